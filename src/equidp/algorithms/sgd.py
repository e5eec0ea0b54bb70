"""SGD: the non-private baseline, against which the cost of privacy is measured.

It samples exactly as the private algorithms do (Poisson, and with the same seed the same batches), and divides by the
expected batch size. So privacy is the only difference. Its ε is null: its results have no guarantee.

With clipped gradients a learning rate may work at which plain gradients diverge. A baseline that learns badly would
make privacy look cheap. So the baseline may have a learning rate of its own.
"""

from __future__ import annotations

from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Positive


class SGD(AlgorithmSettings):
    """Settings of the baseline."""

    learning_rate: Positive | None = None
    """The baseline's own learning rate; null: `training.learning_rate`, as for every other algorithm."""

    def build(self) -> Algorithm:
        """All weights 1, no noise."""
        return Algorithm(name="sgd", weights=None, learning_rate=self.learning_rate)
