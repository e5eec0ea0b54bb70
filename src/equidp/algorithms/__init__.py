"""The registry: every algorithm, one file each, and every part they brought with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from equidp.algorithms.auto_dpsgd import AutoDPSGDL, AutoDPSGDS
from equidp.algorithms.auto_s import AutoS
from equidp.algorithms.custom import PARTS, Custom
from equidp.algorithms.dpis import DPIS
from equidp.algorithms.dpsgd import DPSGD
from equidp.algorithms.dpsgd_decay import DPSGDDecay
from equidp.algorithms.dpsgd_f import DPSGDF
from equidp.algorithms.dpsgd_f_adjusted import DPSGDFAdjusted
from equidp.algorithms.dpsgd_f_balanced import DPSGDFBalanced
from equidp.algorithms.dpsgd_f_smooth import DPSGDFSmooth
from equidp.algorithms.dpsgd_global import DPSGDGlobal, DPSGDGlobalAdapt
from equidp.algorithms.dpsgd_quantile import DPSGDQuantile
from equidp.algorithms.dpsgd_scatter import DPSGDScatter
from equidp.algorithms.dpsgd_tanh import DPSGDTanh
from equidp.algorithms.naive import Naive
from equidp.algorithms.psasc import PSAC, PSASC
from equidp.algorithms.psasc_momentum import PSASCMomentum
from equidp.algorithms.psasc_momentum_gd import PSASCMomentumGD
from equidp.algorithms.sa_dpsgd import SADPSGD
from equidp.algorithms.sad_dpsgd import SADDPSGD
from equidp.algorithms.settings import AlgorithmSettings
from equidp.algorithms.sgd import SGD
from equidp.errors import refuse_unknown, unknown_name
from equidp.options import not_valid

__all__ = ["ALGORITHMS", "PARTS", "AlgorithmSettings", "algorithm_settings"]

ALGORITHMS: dict[str, type[AlgorithmSettings]] = {
    "sgd": SGD,
    "dpsgd": DPSGD,
    "dpsgd_tanh": DPSGDTanh,
    "dpsgd_scatter": DPSGDScatter,
    "dpsgd_decay": DPSGDDecay,
    "naive": Naive,
    "dpsgd_f": DPSGDF,
    "dpsgd_f_smooth": DPSGDFSmooth,
    "dpsgd_f_balanced": DPSGDFBalanced,
    "dpsgd_f_adjusted": DPSGDFAdjusted,
    "dpsgd_global": DPSGDGlobal,
    "dpsgd_global_adapt": DPSGDGlobalAdapt,
    "dpsgd_quantile": DPSGDQuantile,
    "auto_s": AutoS,
    "psac": PSAC,
    "psasc": PSASC,
    "psasc_momentum": PSASCMomentum,
    "psasc_momentum_gd": PSASCMomentumGD,
    "sad_dpsgd": SADDPSGD,
    "auto_dpsgd_l": AutoDPSGDL,
    "auto_dpsgd_s": AutoDPSGDS,
    "sa_dpsgd": SADPSGD,
    "dpis": DPIS,
    "custom": Custom,
}
"""Algorithm names as typed after `--pipeline=`."""


def algorithm_settings(name: str, options: Mapping[str, Any] | None = None) -> AlgorithmSettings:
    """The validated settings of an algorithm; `.build()` gives the algorithm.

    Raises:
        EquidpError: for an unknown algorithm, an unknown option, or a value out of range.
    """
    if name not in ALGORITHMS:
        raise unknown_name("algorithm", name, ALGORITHMS)
    kind = ALGORITHMS[name]
    place = f"{name}.options" if kind.below_options else name
    refuse_unknown(f"setting of {place}", options or {}, kind.model_fields)
    try:
        return kind.model_validate(dict(options or {}))
    except ValidationError as error:
        at = error.errors()[0]["loc"]
        # `custom.initial` has names below it
        nested = bool(at) and isinstance((options or {}).get(str(at[0])), Mapping)
        raise not_valid(place, error, below=1 + nested) from error
