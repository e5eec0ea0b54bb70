"""The registry: every algorithm, one file each, and every part they brought with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from equidp.algorithms.dpsgd import DPSGD
from equidp.algorithms.dpsgd_f import DPSGDF, GroupClipCounts
from equidp.algorithms.naive import GroupSizeCounts, Naive
from equidp.algorithms.settings import AlgorithmSettings
from equidp.algorithms.sgd import SGD
from equidp.engine.parts import AlwaysAccept, Constant, FlatClip, Part, PoissonSampler
from equidp.errors import EquidpError, unknown_name

ALGORITHMS: dict[str, type[AlgorithmSettings]] = {
    "sgd": SGD,
    "dpsgd": DPSGD,
    "naive": Naive,
    "dpsgd_f": DPSGDF,
}
"""Algorithm names as typed after `--pipeline=`."""

PARTS: dict[str, dict[str, type[Part]]] = {
    "sampler": {"poisson": PoissonSampler},
    "weights": {"flat": FlatClip},
    "schedule": {"constant": Constant},
    "side_release": {"group_clip_counts": GroupClipCounts, "group_size_counts": GroupSizeCounts},
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
