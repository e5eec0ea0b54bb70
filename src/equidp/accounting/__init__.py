"""What a run costs: events, ε by Rényi DP and by privacy loss distributions, calibration, plan, budget.

- `ledger`: the events of a run (what was released, at which sampling rate and noise) and the ε that follows from them.
- `plan`: the public numbers that are fixed before the first step (records, expected batch size, steps, noise, δ).
- `budget`: the noise multiplier that a target ε asks for.

It imports `equidp.errors`, `equidp.options` and `equidp.system`, and nothing else of this package. It knows no
algorithm, no model and no record. Begin with `ledger.epsilon`: events in, ε out.
"""
