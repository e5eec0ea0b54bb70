"""Agreement: whether norms of the same records agree when a model is tried in two ways, where, and of which records."""

from __future__ import annotations

import torch
from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.bookkeeping import BookKeeping

RECORDS = 2
"""So many records are held to autograd."""

TOLERANCE = {"float32": 1e-3, "bf16": 5e-2}
"""Allowed difference as a share of a gradient's norm: far above rounding, and far below a missing contribution."""


def nearby(passes: BookKeeping) -> Tensor:
    """Return `[d]` parameters near those of the model, none of them zero."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in passes.parameters])
    moved = torch.randn(flat.shape, generator=torch.Generator().manual_seed(0)).to(flat.device)
    return flat + 0.01 * moved


def first_two(features: Tensor, labels: Tensor, among: Tensor | None = None) -> list[int]:
    """Return the places of the first record and of the next one with other features; of one if all are equal.

    Two equal records would not show that records mix. Records with numbers that are not finite come into question only
    if there are no others: they show nothing, and one that comes first in every batch would always hide the others.
    Records of a single repeated number come last. A normalisation turns a blank image into mere rounding, which differs
    from that of autograd, and a refusal would reveal that there is such a record.

    Args:
        features: `[b, …]`.
        labels: `[b, …]`.
        among: `[b]`, which records may be taken; None for all.
    """
    rows = features.unsqueeze(1).flatten(1)
    finite = rows.isfinite().all(1) & labels.isfinite().unsqueeze(1).flatten(1).all(1)
    finite = finite if among is None else finite & among
    places = (finite if finite.any() else ~finite).nonzero().squeeze(1)
    places = places[(rows == rows[:, :1]).all(1)[places].byte().argsort(stable=True)]
    others = (rows[places] != rows[places[:1]]).any(1)
    return [*places[:1].tolist(), *places[others][:1].tolist()]


def compare_norms(passes: BookKeeping, together: Tensor, alone: Tensor, share: float = 1.0) -> None:
    """Refuse a model whose norms `[b]` of the same records do not agree; `share` as of `close`.

    Raises:
        EquidpError: records mix.
    """
    if not close(passes, together, alone, share):
        raise mixed()


def mixed() -> EquidpError:
    """Return the refusal of a model in which a record's gradient depends on others."""
    return EquidpError(
        "A record's gradient changes with the other records of its batch, or with those before it: some layer or "
        "the loss mixes records, or draws from another generator than torch's (numpy's, say); let each record's loss "
        "depend on that record alone."
    )


def close(passes: BookKeeping, norms: Tensor, others: Tensor, share: float = 1.0) -> bool:
    """Whether norms `[b]` of the same records agree, up to rounding.

    Args:
        passes: their precision decides how nearly.
        norms: `[b]`; of more than two records, their mean is the measure.
        others: `[b]`, of the same records.
        share: of `TOLERANCE`, by which norms of one or two records may differ; those of more may by a tenth of it.
    """
    finite = norms.isfinite()
    # among many records some may have almost no gradient, only rounding, so the mean norm is the measure
    floor, share = (1e-6, share) if len(norms) <= RECORDS else (norms[finite].mean(), 0.1)
    near = (norms - others).abs() <= share * TOLERANCE[passes.precision] * (norms + floor)
    # asks for "near", not "different": NaN is neither, and counts as equal only where both are not finite
    return bool((near | ~(finite | others.isfinite())).all())
