"""Per-record gradient norms, then one weighted sum, without a gradient for each record in memory.

Begin with `engine.GradientEngine`. A step asks it for `norms`, then for a `weighted_sum`.

- **How they are computed.** `bookkeeping`: one forward and one backward pass, and what is kept of them. `tape`: records
  the calls of layers. `sites`: which layer has which rule. `layers`: a rule for each kind of layer; `volumes`: for
  Conv3d and transposed convolutions; `libraries`: for layers of timm and transformers. `rewriting`,
  `recurrence`: attention and recurrence, rewritten as layers with rules. `losses`: per-record losses.
- **What rules are made of.** `products`, `convolutions`, `lookups`, `windows` (what a convolution sees),
  `standardised` (convolutions with standardised weights), `terms` (what all have in common), `units` (means over the
  records of a unit).
- **How a model is tried.** Before its first batch `refusals` refuses models that cannot be private. On the first batch
  `probe` compares gradients with those of autograd, also on `varied` records and with random numbers of its own
  (`drawn`). For code of others (`used` finds it): `counted` refuses models that count their passes, and `remembered`
  sets back what they keep. In secure runs `digits` compares records to the last bit, and `picks` finds functions that
  round by place. Later batches are looked at again (`engine.Looks`). `misfit` explains errors from inside the model.
- **Models of a special kind.** `blocks`: layers that see several rows of each record. `packing`: several tensors for
  each record, packed as one.
- **Rounding.** `rounding`, `precision`: why no norm comes out too small. `shares`: a number of threads that does not
  depend on the records. `shape`: a public number of rows for each pass.
- **Speed and memory.** `compiled`: kernels for the CPU; no other module knows whether there are any. `kernels`: kernels
  for a GPU; `fused` says when these are used; `together`: norms and sums of all parameters at once there.
  `recording`: a step recorded once and replayed on CUDA. `memory`: rows for each pass on a GPU. `workspace`: memory
  that is used again from step to step. `layout`: modes and memory layouts that a model has for a while.

The package imports `equidp.errors` and `equidp.system`, and nothing else of equidp. It does not know what privacy is.
The recording and the probe use `bookkeeping`, not the engine.
"""
