"""Hooks: what happens around a Kedro run. Each hook has a file of its own.

- `guard`: refuses runs that cannot work or would mislead, keeps other runs from this run's files, and removes results
  that a new model makes untrue. `entries` knows the catalog's entries. `handed` refuses inputs of nodes that other
  hooks have replaced. `turn` lets one run at a time use a process.
- `track`: logs to MLflow. `record` says what is logged, and `runs` and `store` write it. `packing` and `served_model`
  make the model that is logged. `mlflow_yml` validates the settings, and `views` and `ui` are MLflow's pages.
- `print`: prints the tables at the end.

The hooks import other modules only when they are called: MLflow and scikit-learn take seconds to import, and a mistyped
setting is refused before that. This layer may import all others, and none of them imports it. Begin with
`guard.GuardHook`.
"""
