"""The registry: every algorithm, one file each, and every part they brought with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from equidp.algorithms.auto_dpsgd import AutoDPSGDL, AutoDPSGDS, LinearFall, OwnThreshold, StepFall
from equidp.algorithms.auto_s import AutoS, Normalise
from equidp.algorithms.dpsgd import DPSGD
from equidp.algorithms.dpsgd_decay import DPSGDDecay, ExponentialDecay
from equidp.algorithms.dpsgd_f import DPSGDF, GroupClipCounts
from equidp.algorithms.dpsgd_global import (
    DPSGDGlobal,
    DPSGDGlobalAdapt,
    ScaleOrClip,
    ScaleOrDrop,
    StrictBoundCount,
)
from equidp.algorithms.dpsgd_quantile import DPSGDQuantile, QuantileCount
from equidp.algorithms.dpsgd_scatter import DPSGDScatter
from equidp.algorithms.dpsgd_tanh import DPSGDTanh
from equidp.algorithms.naive import GroupSizeCounts, Naive
from equidp.algorithms.psasc import PSAC, PSASC, AdaptiveScaling
from equidp.algorithms.sad_dpsgd import SADDPSGD, DecayingPhases
from equidp.algorithms.settings import AlgorithmSettings
from equidp.algorithms.sgd import SGD
from equidp.engine.parts import AlwaysAccept, Constant, FlatClip, Part, PoissonSampler, UnitWeight
from equidp.errors import EquidpError, unknown_name

ALGORITHMS: dict[str, type[AlgorithmSettings]] = {
    "sgd": SGD,
    "dpsgd": DPSGD,
    "naive": Naive,
    "dpsgd_f": DPSGDF,
    "dpsgd_tanh": DPSGDTanh,
    "dpsgd_scatter": DPSGDScatter,
    "dpsgd_decay": DPSGDDecay,
    "dpsgd_global": DPSGDGlobal,
    "dpsgd_global_adapt": DPSGDGlobalAdapt,
    "dpsgd_quantile": DPSGDQuantile,
    "auto_s": AutoS,
    "psac": PSAC,
    "psasc": PSASC,
    "sad_dpsgd": SADDPSGD,
    "auto_dpsgd_l": AutoDPSGDL,
    "auto_dpsgd_s": AutoDPSGDS,
}
"""Algorithm names as typed after `--pipeline=`."""

PARTS: dict[str, dict[str, type[Part]]] = {
    "sampler": {"poisson": PoissonSampler},
    "weights": {
        "flat": FlatClip,
        "normalise": Normalise,
        "psasc": AdaptiveScaling,
        "own_threshold": OwnThreshold,
        "scale_or_drop": ScaleOrDrop,
        "scale_or_clip": ScaleOrClip,
        "unit": UnitWeight,
    },
    "schedule": {
        "constant": Constant,
        "exponential": ExponentialDecay,
        "linear": LinearFall,
        "steps": StepFall,
        "phases": DecayingPhases,
    },
    "side_release": {
        "group_clip_counts": GroupClipCounts,
        "group_size_counts": GroupSizeCounts,
        "quantile": QuantileCount,
        "strict_bound": StrictBoundCount,
    },
    "acceptance": {"always": AlwaysAccept},
}
"""Parts by kind and name, as typed under `custom`."""


def algorithm_settings(name: str, options: Mapping[str, Any] | None = None) -> AlgorithmSettings:
    """The validated settings of an algorithm; `.build()` gives the algorithm.

    Raises:
        EquidpError: for an unknown algorithm, an unknown option, or a value out of range.
    """
    if name not in ALGORITHMS:
        raise unknown_name("algorithm", name, ALGORITHMS)
    kind = ALGORITHMS[name]
    for option in options or {}:
        if option not in kind.model_fields:
            raise unknown_name(f"setting of {name}.options", option, kind.model_fields)
    try:
        return kind(**(options or {}))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([f"{name}.options", *map(str, first["loc"][:1])])
        raise EquidpError(f"{where}={first['input']!r} is not valid: {first['msg']}.") from error
