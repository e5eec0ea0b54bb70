"""SGD: the non-private baseline that every cost of privacy is measured against.

It samples exactly as the private algorithms do (Poisson, same seed: the same batches) and divides by the expected batch
size, so that privacy is the only difference. Its ε is null: nothing computed from it carries a guarantee.
"""

from __future__ import annotations

from equidp.algorithms.settings import AlgorithmSettings
from equidp.engine.algorithm import Algorithm


class SGD(AlgorithmSettings):
    """No settings."""

    def build(self) -> Algorithm:
        """All weights 1, no noise."""
        return Algorithm(name="sgd", weights=None)
