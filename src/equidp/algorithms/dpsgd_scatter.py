"""DP-SGD on handcrafted features (Tramèr and Boneh 2021, "Differentially Private Learning Needs Better Features").

The mechanism is DP-SGD's. Only the data change: images are replaced by their scattering transform (J = 2), a fixed,
untrained function of each image alone, normalised per record within channel groups. Where we depart from the paper: the
paper can also normalise by statistics of the private data, at a cost in ε. Here nothing is learnt from the data.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import FlatClip, Positive


class DPSGDScatter(AlgorithmSettings):
    """Settings of DP-SGD on scattering features (DP-SGD-HF)."""

    features: ClassVar[str | None] = "scatter"

    clip_norm: Positive = 1.0
    """C, the bound on each record's gradient."""
    model: Literal["scatter_linear", "scatter_cnn"] = "scatter_linear"
    """The model that is trained on the features. For data without images the run's own model is kept."""

    def build(self) -> Algorithm:
        """Flat clipping, constant noise, features computed once."""
        return Algorithm(
            name="dpsgd_scatter", weights=FlatClip(), initial={"clip_norm": self.clip_norm}, model=self.model
        )
