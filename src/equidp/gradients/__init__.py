"""Per-record gradient norms, then one weighted sum, without a gradient for each record in memory.

- `engine`: what a step asks, `norms` and then `weighted_sum`. It tries a model out before it trusts it.
- `bookkeeping`: one forward and one backward pass, and what is kept of them for both. `tape`: what the layers saw.
- `layers`: one rule for each kind of layer; `volumes`: for Conv3d and transposed convolutions; `libraries`: for timm's
  and transformers' own; `sites`: which layer has which. `rewriting`: attention and recurrence made of
  layers with rules. `products`, `convolutions`, `lookups`: what the rules are made of; `terms`: what these have in
  common; `units`: means over a unit's records; `windows`: what a convolution sees; `standardised`: convolutions by
  weights that are standardised first.
- `rounding`, `precision`: why no norm comes out too small. `refusals`: models that cannot be private; `misfit`: those
  that fail on what they are given.
- `compiled`: kernels for the CPU. Nothing else knows whether there are any. `kernels`: those for a GPU, and `fused`:
  who may use them. `together`: there, norms and sums of all parameters at once.
- `shape`, `memory`: how many rows a pass has on a GPU. `layout`: what a model is for a while.
- `losses`: per-record losses. `workspace`: memory that is used again from step to step.
- `packing`: several tensors per record as one.
- `probe`: the first batch is computed in two ways, and a wrong gradient is refused; `varied`: also on such records.
  `digits`: to the last bit, in secure runs. `counted`, `picks`: models that count their passes, or round what a mask
  picks. `used`, `remembered`: what a model and its loss are made of, and keep. `shares`: threads, by what does not
  depend on the records. `blocks`: layers that see several rows of each record.
- `recording`: a step recorded once and replayed on CUDA. It and the probe know `bookkeeping`, not the engine.

It imports `equidp.errors` and `equidp.system`, and nothing else of this package. It does not know what privacy is.
Begin with `engine.GradientEngine`.
"""
