"""What a run costs: events, ε by Rényi DP and by privacy loss distributions, calibration, plan, budget.

- `events`: what was released, at which sampling rate and noise.
- `ledger`: the append-only record of a run's events.
- `epsilon`: the ε that follows from events, by Rényi DP and by privacy loss distributions.
- `calibration`: the noise multiplier with which events meet a target ε.
- `plan`: the public numbers that are fixed before the first step (records, expected batch size, steps, noise, δ).
- `accounted`: what a stated ε is of, and its other figures.
- `trials`: what several trainings cost, of which one is chosen.
- `replacement`: ε where a record is replaced.
- `trade_off`: the whole curve of false alarms and misses, and μ.
- `budget`: a bound on Rényi divergence, where the noise is chosen while the run goes on.

It imports `equidp.errors`, `equidp.options` and `equidp.system`, and nothing else of this package. It knows no
algorithm, no model and no record. Begin with `epsilon.epsilon`: events in, ε out.
"""
