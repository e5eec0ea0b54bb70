"""Algorithms: the registry of all algorithms. Each has a file of its own, which also has the parts it introduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from equidp.errors import refuse_unknown
from equidp.options import not_valid
from equidp.registry import Registry

if TYPE_CHECKING:
    from equidp.algorithms.settings import AlgorithmSettings


ALGORITHMS: Registry[type[AlgorithmSettings]] = Registry(
    "equidp.algorithms",
    {
        "sgd": "sgd:SGD",
        "dpsgd": "dpsgd:DPSGD",
        "dpsgd_tanh": "dpsgd_tanh:DPSGDTanh",
        "dpsgd_scatter": "dpsgd_scatter:DPSGDScatter",
        "dpsgd_decay": "dpsgd_decay:DPSGDDecay",
        "dp_adambc": "dp_adambc:DPAdamBC",
        "naive": "naive:Naive",
        "dpsgd_f": "dpsgd_f:DPSGDF",
        "dpsgd_f_smooth": "dpsgd_f_smooth:DPSGDFSmooth",
        "dpsgd_f_balanced": "dpsgd_f_balanced:DPSGDFBalanced",
        "dpsgd_f_adjusted": "dpsgd_f_adjusted:DPSGDFAdjusted",
        "dpsgd_f_slack": "dpsgd_f_slack:DPSGDFSlack",
        "dpsgd_level": "dpsgd_level:DPSGDLevel",
        "dpsgd_minimax": "dpsgd_minimax:DPSGDMinimax",
        "dpsgd_global": "dpsgd_global:DPSGDGlobal",
        "dpsgd_global_adapt": "dpsgd_global:DPSGDGlobalAdapt",
        "dpsgd_quantile": "dpsgd_quantile:DPSGDQuantile",
        "dpsgd_bounded": "dpsgd_bounded:DPSGDBounded",
        "soft_adaclip": "soft_adaclip:SoftAdaClip",
        "slaclip": "slaclip:SlaClip",
        "dc_sgd_p": "dc_sgd:DCSGDP",
        "dc_sgd_e": "dc_sgd:DCSGDE",
        "auto_s": "auto_s:AutoS",
        "psac": "psasc:PSAC",
        "psasc": "psasc:PSASC",
        "psasc_momentum": "psasc_momentum:PSASCMomentum",
        "psasc_momentum_gd": "psasc_momentum_gd:PSASCMomentumGD",
        "sad_dpsgd": "sad_dpsgd:SADDPSGD",
        "auto_dpsgd_l": "auto_dpsgd:AutoDPSGDL",
        "auto_dpsgd_s": "auto_dpsgd:AutoDPSGDS",
        "sa_dpsgd": "sa_dpsgd:SADPSGD",
        "dpis": "dpis:DPIS",
        "asc": "asc:ASC",
        "custom": "custom:Custom",
    },
    "settings:AlgorithmSettings",
)
"""Algorithm names as typed after `--pipeline=`."""

BASELINE = "sgd"
"""The non-private algorithm, with which all others are compared."""

OWN = frozenset(
    (
        "dpsgd_f_smooth", "dpsgd_f_balanced", "dpsgd_f_adjusted", "dpsgd_f_slack", "dpsgd_level", "dpsgd_minimax",
        "custom",
    )
)  # fmt: skip
"""Algorithms of this project, which no paper describes."""


def of_a_paper(name: str) -> bool:
    """Whether an algorithm is a paper's. False for those of other packages or of users: nothing is known of them."""
    return name in ALGORITHMS and ALGORITHMS.package(name) is None and name not in OWN


def algorithm_settings(name: str, options: Mapping[str, Any] | None = None) -> AlgorithmSettings:
    """Return the validated settings of an algorithm; `.build()` gives the algorithm.

    Raises:
        EquidpError: the algorithm or an option is unknown, or a value is out of range.

    Examples:
        >>> algorithm_settings("dpsgd", {"clip_norm": 0.5}).build().name
        'dpsgd'
    """
    refuse_unknown("algorithm", [name], ALGORITHMS)
    kind = ALGORITHMS[name]
    place = f"{name}.options" if kind.below_options else name
    refuse_unknown(f"setting of {place}", options or {}, kind.model_fields)
    try:
        return kind.model_validate(dict(options or {}))
    except ValidationError as error:
        at = error.errors()[0]["loc"]
        # the error lies one level deeper in a setting that has names of its own, such as `custom.initial`
        nested = bool(at) and isinstance((options or {}).get(str(at[0])), Mapping)
        raise not_valid(place, error, below=1 + nested) from error
