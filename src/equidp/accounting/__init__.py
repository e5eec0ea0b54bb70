"""Accounting: what a run costs, as events, and the ε that follows from them.

- `events`: what was released, at which sampling rate and noise.
- `ledger`: the append-only record of a run's events.
- `epsilon`: the ε that follows from events, by Rényi DP and by privacy loss distributions.
- `calibration`: the noise multiplier with which events meet a target ε.
- `plan`: the public numbers that are fixed before the first step (records, expected batch size, steps, noise, δ).
- `accounted`: the events or the budget that a stated ε follows from, and other figures of the same.
- `trials`: what it costs to train several times and choose one model.
- `replacement`: ε if a record is replaced by another one.
- `trade_off`: the whole curve of false alarms and misses, and μ.
- `budget`: a limit on Rényi divergence, for runs whose noise is chosen while they go on.
- `dataset_ledger`: what all runs on one data set cost together.

It imports `equidp.errors`, `equidp.options` and `equidp.system`, and nothing else of equidp. It knows no algorithm, no
model and no record. Begin with `epsilon.epsilon`, which takes events and returns ε.
"""
