"""SGD: the non-private baseline that every cost of privacy is measured against.

It samples exactly as the private algorithms do (Poisson, same seed: the same batches) and divides by the expected batch
size, so that privacy is the only difference. Its ε is null: nothing computed from it carries a guarantee.

Clipped gradients bear a learning rate at which plain ones diverge, and a baseline that learns badly makes privacy look
cheap: where a run's rate is such a one, the baseline has its own.
"""

from __future__ import annotations

from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Positive


class SGD(AlgorithmSettings):
    """Settings of the baseline."""

    learning_rate: Positive | None = None
    """Step size of the baseline alone; null: `training.learning_rate`, like every other algorithm."""

    def build(self) -> Algorithm:
        """All weights 1, no noise."""
        return Algorithm(name="sgd", weights=None, learning_rate=self.learning_rate)
