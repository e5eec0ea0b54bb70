"""One training on several processes: every rank samples its own shard, sums are reduced, and noise is added once.

    the process that was asked to train                rank 0, 1, … (started by torch's elastic launch)
    ───────────────────────────────────                ────────────────────────────────────────────────
    writes records and settings to a private folder →  each loads its shard of the units
    evaluates after every epoch, logs               ←  rank 0 hands over weights and row, and waits
    reads weights, history, statement               ←  rank 0 writes them, checkpoints and the ledger too

It is the same mechanism as on one process. A unit's own identity says which rank it is on, and each unit is drawn on
its own coin, from its rank's stream. Sums (of weighted gradients, of a side statistic, of whatever a part reduces) are
formed on rank 0, which adds the noise and sends the *noised* value to all ranks. The others never hold an exact total,
except those of `training.diagnostics`. Whatever decides about a step (an acceptance's coin, a public loss, whether a
budget is used up) comes from rank 0 as well, so that a rounding error cannot make ranks go different ways.

Several machines: run the same command with EQUIDP_NODES, EQUIDP_RENDEZVOUS and EQUIDP_JOB_FOLDER set, and on every
other machine `python -m equidp.training.ranks` (docs/scaling.md).
"""
