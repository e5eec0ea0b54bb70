"""Per-sample gradient norms, then one weighted sum, without a gradient for each record in memory.

- `engine`: the two passes, `norms` and `weighted_sum`, and how they are combined.
- `layers`: one rule for each kind of layer. `terms`, `windows`: the products that the rules are made of.
- `losses`: per-record losses. `workspace`: memory that is used again from step to step.
- `recording`: a step recorded once and replayed on CUDA. `compiled`: kernels for the CPU, behind one door.
- `probe`: the first batch is computed in two ways, and a wrong gradient is refused.

It imports `equidp.errors`, `equidp.options` and `equidp.system`, and nothing else of this package. It does not know
what privacy is. Begin with `engine.GradientEngine`.
"""
