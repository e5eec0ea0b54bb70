"""Augmentation: a record's gradient is the mean over m random views of it (De et al. 2022, section 3).

    g_i = (1/m)·Σ_v ∇f(θ; view_v(x_i)),   then norm, weight and bound as ever

Event and sensitivity stay as they are. What a record adds is weighed by the norm of its mean gradient, so Δ bounds it,
and a record that leaves takes all its views along. This needs that no other record's views change with it. If views
were drawn in the batch's order, one record fewer would give other views to all records after it. So a record's views
follow from its own identity, the step and a key alone:

    u = (a·identity + b) mod (2³¹ − 1),   a and b from key, step and view

The numbers u are pairwise independent over identities (Carter and Wegman 1979). They choose the shift, the flip or the
piece of a public table of noise. The key may be known to everybody. Records without an identity have the numbers of
their rows. These stay as they are when a record leaves, because the guarantee lets it leave an empty slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from equidp.errors import EquidpError
from equidp.mechanism.noise import derived_seed
from equidp.mechanism.sampling import Batch

PRIME = 2**31 - 1
TABLE = 1 << 20
"""Numbers of the public table of noise."""


@dataclass(frozen=True)
class Augmentation:
    """Random views of records.

    Attributes:
        views: m, the number of views of each record at each step.
        kinds: `flip` left and right, `crop` after padding by reflection, `noise` N(0, sd²) on every feature.
        key: public; all random numbers follow from it.
        shape: of one record's features: `[c, h, w]` for `flip` and `crop`.
        padding: pixels on each side, for `crop`.
        sd: standard deviation, for `noise`.
        head: leading columns that no view changes; the features then are flat.

    Raises:
        EquidpError: for no views, for kinds that do not go together or are not of such records, and for more padding
            than an image has pixels to reflect.
    """

    views: int
    kinds: tuple[str, ...]
    key: int
    shape: tuple[int, ...]
    padding: int = 4
    sd: float = 0.05
    head: int = 0

    def __post_init__(self) -> None:
        if self.views < 1:
            raise EquidpError(f"An augmentation has 1 view or more of each record, not {self.views}.")
        if not self.kinds or not (set(self.kinds) <= {"flip", "crop"} or set(self.kinds) == {"noise"}):
            raise EquidpError(
                f"The kinds of an augmentation are ('flip', 'crop'), one of these, or ('noise',), not {self.kinds!r}."
            )
        if "noise" not in self.kinds and len(self.shape) != 3:
            raise EquidpError(f"Flips and crops are of images [c, h, w], not of {list(self.shape)}.")
        for name in ("padding", "head"):  # a piece would reach into the next record
            if getattr(self, name) < 0:
                raise EquidpError(f"The {name} of an augmentation is 0 or more, not {getattr(self, name)}.")
        if "crop" in self.kinds and self.padding >= min(self.shape[1:]):
            raise EquidpError(
                f"training.augmentation_padding={self.padding}: images of {self.shape[1]}×{self.shape[2]} have no more "
                f"than {min(self.shape[1:]) - 1} pixels to reflect; take fewer."
            )

    def of(self, batch: Batch, identities: Tensor, step: int) -> Batch:
        """The batch with the views of that step, `[m·b, …]`: all records' first ones, then their second ones.

        Args:
            identities: `[b]` int64 of the batch's records.
        """
        if not len(identities):
            return replace(batch, views=self.views)
        numbers = self._numbers(identities % PRIME, step)
        body = batch.features[:, self.head :].reshape(-1, *self.shape) if self.head else batch.features
        seen = self._noisy(body, numbers) if "noise" in self.kinds else self._moved(body, numbers)
        if self.head:
            seen = torch.cat([batch.features[:, : self.head].repeat(self.views, 1), seen.flatten(1)], dim=1)
        return replace(batch, features=seen, views=self.views)

    def _numbers(self, identities: Tensor, step: int) -> Tensor:
        """`[m, b]` int64 in 0…2³¹ − 2."""
        drawn = [
            [derived_seed(self.key, f"views/{step}/{view}/{name}") % PRIME for view in range(self.views)]
            for name in ("factor", "summand")
        ]
        factors, summands = torch.tensor(drawn, device=identities.device).unsqueeze(2)
        return (identities * factors + summands) % PRIME

    def _moved(self, images: Tensor, numbers: Tensor) -> Tensor:
        """`[m·b, c, h, w]`: pieces of the padded images or of their mirror images, which lie in memory in a row."""
        (records, channels), (height, width) = images.shape[:2], images.shape[2:]
        padding = self.padding if "crop" in self.kinds else 0
        for axis in (2, 3) if padding else ():
            images = images.index_select(axis, _reflected(images.shape[axis], padding, images.device))
        moves, (tall, wide) = 2 * padding + 1, images.shape[2:]
        which = torch.arange(records, device=images.device)
        if "flip" in self.kinds:
            which = which + records * (numbers // moves**2 % 2)
            images = torch.cat([images, images.flip(3)])
        starts = (which * channels * tall + numbers % moves) * wide + numbers // moves % moves
        starts = starts.flatten()[:, None] + tall * wide * torch.arange(channels, device=images.device)
        memory = torch.cat([images.flatten(), images.new_zeros(wide)])
        rows = memory.unfold(0, height * wide, 1).index_select(0, starts.flatten())  # whole rows are copied at once
        return rows.view(-1, channels, height, wide)[..., :width]

    def _noisy(self, features: Tensor, numbers: Tensor) -> Tensor:
        """`[m·b, …]`."""
        pieces = self._table.to(features.device).unfold(0, features[0].numel(), 1)
        noise = pieces.index_select(0, (numbers % TABLE).flatten())
        return noise.view(self.views, *features.shape).add_(features).flatten(0, 1)

    @cached_property
    def _table(self) -> Tensor:
        generator = torch.Generator().manual_seed(derived_seed(self.key, "views"))
        return torch.randn(TABLE + math.prod(self.shape), generator=generator) * self.sd


def _reflected(side: int, padding: int, device: torch.device) -> Tensor:
    """`[side + 2·padding]` positions in a row of pixels that its mirror image continues on both sides."""
    places = torch.arange(-padding, side + padding, device=device).abs()
    return torch.where(places < side, places, 2 * (side - 1) - places)
