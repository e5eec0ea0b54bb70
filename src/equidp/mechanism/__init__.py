"""What a private step is, the same for every algorithm.

- `parts`: what an algorithm is combined from. Each part states its own bound and its own event.
- `algorithm`: one combination of parts, with the checks that a combination has to pass.
- `sampling`, `poisson`: which records are in a step's batch, by Poisson sampling of units.
- `noise`, `secure`: the noise of a step, seeded for research and cryptographic for a release.
- `trainer`: the loop. Draw a batch, weigh, sum, add noise, charge the ledger, update.

It imports `equidp.gradients`, `equidp.accounting` and what stands below them. It knows no algorithm, model, dataset
or file by name. Begin with `trainer.Trainer`, then `parts`.
"""
