"""Which vector stands for a record."""

from __future__ import annotations

from torch import Tensor

from equidp.mechanism.parts.base import Part, Run, Running
from equidp.mechanism.sampling import Batch


class Contribution(Part):
    """Which vector stands for a record: its gradient at the current parameters."""

    def start(self, run: Run) -> Contributing:
        """The contribution at work."""
        return Contributing(run)


class Contributing(Running):
    """A contribution during one run. Between `norms` and `weighted_sum` nothing else may use the engine."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def norms(self, batch: Batch) -> Tensor:
        """`[u]` l2 norms of the units' vectors; each follows from its unit and from released values alone."""
        return self.run.engine.norms(batch.features, batch.labels, owners=batch.owners, views=batch.views)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ w_i m_i of the last `norms`, flat `[d]`; a unit of weight 0 adds nothing, even if it is not finite."""
        return self.run.engine.weighted_sum(weights)

    def advance(self, previous: Tensor) -> None:
        """Called after a step was taken, with the parameters (`[d]`) it started from; only where `remembers` is True.

        What is kept here must follow from released parameters. What is kept of a unit may also follow from that unit.
        """

    remembers: bool = False
    """Whether `advance` is called; otherwise no copy of the parameters is made."""
