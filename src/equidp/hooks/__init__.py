"""What happens around a Kedro run, one hook a file.

- `guard`: refuses what cannot run, keeps a run's files to it alone, and removes what a new model makes untrue;
  `handed` looks at what other hooks put in the place of nodes' inputs.
- `track`: what MLflow gets; `runs` and `store` write it, `packing` and `served_model` make the model that is logged.
- `print`: the tables at the end.

The hooks import what they need once they are called: MLflow and scikit-learn take seconds, and a mistyped setting is
refused before. This layer may import all others; none of them imports it. Begin with `guard.GuardHook`.
"""
