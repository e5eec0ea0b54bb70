"""A pretrained network from stored records to features. It resizes and scales images, and masks padding of texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.errors import EquidpError, first_line
from equidp.gradients.misfit import FAILURES

ROWS = 32
"""Records in a pass that only computes features: few, so that memory stays small at 224 pixels."""
STEP = 32
"""A text's length is rounded up to a multiple of this, so that its features depend on its own length alone."""
MIXED = 0.05
"""If a record's features differ by more than this share of their norm, rounding in half precision is not the cause."""
Precision = Literal["float32", "bf16"]
Views = Literal[1, 2, 4, 8]


@dataclass(frozen=True)
class Preparation:
    """How a network wants its images: side in pixels, published constants per channel on the 0..1 scale, resampling."""

    size: int
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    sd: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: str = "bilinear"


class Network(nn.Module):
    """A network from stored features `[b, …]` to `[b, width]`; `body` is the library's module."""

    width: int = 0
    kind: ClassVar[str] = "image"
    rows: ClassVar[int] = ROWS

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.computed_in, self.views = body, torch.float32, 1
        for module in body.modules():
            if getattr(module, "inplace", False) is True:  # it would overwrite outputs that are needed again
                module.inplace = False  # type: ignore[assignment]

    def compute(self, precision: Precision, views: Views) -> None:
        """Set the number format of the body, and over how many views of an image features are averaged.

        Images are prepared, and features returned, in float32.

        Raises:
            EquidpError: several views of a text.
        """
        if precision == "bf16":
            self.body, self.computed_in = self.body.to(torch.bfloat16), torch.bfloat16
        if views > 1 and self.kind != "image":
            raise EquidpError(f"model.options.views={views}: a {self.kind} has one view; leave the option out.")
        self.views = views

    def measure(self, schema: Schema, name: str) -> None:
        """Set the width, and check that a random record has the same features alone and beside another one.

        Raises:
            EquidpError: the network takes no such records, gives no row of numbers, or mixes records.
        """
        if schema.kind != self.kind:
            raise EquidpError(f"Network {name} reads {self.kind}s, dataset {schema.name!r} has {schema.kind} features.")
        text, drawn = self.kind == "text", torch.Generator().manual_seed(0)
        values = (1, max(2, min(256, schema.vocabulary))) if text else (0, 256)
        two = torch.randint(*values, (2, *schema.shape), generator=drawn, dtype=torch.int64 if text else torch.uint8)
        two[1] = two[1] // 4 + text  # another distribution, which batch statistics would show
        try:
            with torch.no_grad():
                found, beside = self.eval()(two[:1]), self(two)[:1]
        except FAILURES as error:
            raise EquidpError(
                f"Network {name} fails on {schema.kind} features of shape {schema.shape}: {first_line(error)}. "
                "Choose another network, or leave model.options.size out for the network's own."
            ) from error
        if found.dim() != 2:
            raise EquidpError(f"Network {name} gives {tuple(found.shape)} for one record, not one row of features.")
        if (beside - found).norm() > MIXED * found.norm():
            raise EquidpError(
                f"Network {name} gives a record other features where another one is beside it: a layer of it mixes "
                "records, and then nothing bounds what one of them changes. Choose another network."
            )
        self.width = found.shape[1]

    def chunks(self, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions and features of `rows` records, or fewer, at a time."""
        for index in torch.arange(len(features)).split(self.rows):
            yield index, features[index]

    def train(self, mode: bool = True) -> Network:
        """Stay in evaluation mode: batch statistics are fixed, and there is no dropout beside the noise."""
        return super().train(False)


class ImageNetwork(Network):
    """Byte images `[b, 1 or 3, height, width]` to `[b, width]`."""

    mean: Tensor
    sd: Tensor

    def __init__(self, body: nn.Module, preparation: Preparation) -> None:
        super().__init__(body)
        self.size, self.interpolation = preparation.size, preparation.interpolation
        self.register_buffer("mean", torch.tensor(preparation.mean).reshape(-1, 1, 1), persistent=False)
        self.register_buffer("sd", torch.tensor(preparation.sd).reshape(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """`[b, width]`."""
        pixels = images.to(self.mean.dtype) / 255
        if pixels.shape[1] == 1:
            pixels = pixels.expand(-1, 3, -1, -1)
        if pixels.shape[-2:] != (self.size, self.size):
            nearest = self.interpolation == "nearest"
            how: dict[str, Any] = {} if nearest else {"align_corners": False, "antialias": True}
            pixels = nn.functional.interpolate(pixels, (self.size, self.size), mode=self.interpolation, **how)
            pixels = pixels.clamp(0, 1)  # bicubic resampling goes beyond this range
        # channels last is up to twice as fast on a CPU; numbers differ by rounding only
        scaled = ((pixels - self.mean) / self.sd).to(self.computed_in)
        found = [
            self.pooled(view.contiguous(memory_format=torch.channels_last)).float()
            for view in views_of(scaled, self.views)
        ]
        return found[0] if len(found) == 1 else torch.stack(found).mean(0)

    def pooled(self, pixels: Tensor) -> Tensor:
        """One row of features per image."""
        return self.body(pixels)


def views_of(images: Tensor, count: int) -> Iterator[Tensor]:
    """Yield images `[b, c, side, side]`; for 2 also turned by half, 4 also mirrored, 8 these also transposed."""
    for turned in (images, images.transpose(2, 3))[: 2 if count == 8 else 1]:
        for sides in ((), (2, 3), (2,), (3,))[: min(count, 4)]:
            yield turned.flip(sides) if sides else turned


class TextNetwork(Network):
    """A network from tokens int64 `[b, length]` to `[b, width]`. A token is 1 + the tokenizer's id, or 0 for padding.

    Args:
        body: Hugging Face's module; its attention is set to the implementation `eager`.
        padding: the id that the body wants in places of padding.
        pooling: `mean` of the tokens' last hidden states, or `cls`, the first token's state.
    """

    kind = "text"

    def __init__(self, body: Any, padding: int, pooling: str) -> None:
        super().__init__(body)
        # If no text in the batch is padded, other implementations leave the mask out, and on a GPU their kernels then
        # round differently: a record's last digits would depend on the others. `eager` adds a mask of zeros, which
        # changes no digit.
        body.set_attn_implementation("eager")
        self.padding, self.pooling = padding, pooling

    def forward(self, tokens: Tensor) -> Tensor:
        """`[b, width]`."""
        present = tokens > 0
        first = torch.arange(tokens.shape[1], device=tokens.device) == 0
        ids = torch.where(present, tokens - 1, self.padding)
        mask = present | first  # an empty text keeps its first place, because the mean of no token is not a number
        hidden = self.body(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
        if self.pooling == "cls":
            return hidden[:, 0]
        weights = mask.unsqueeze(2).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)

    def chunks(self, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions and tokens of texts of similar length together, without most of their padding."""
        lengths = ((features > 0).sum(1).clamp(min=1) + STEP - 1) // STEP * STEP
        for length in lengths.unique().tolist():
            for index in (lengths == length).nonzero().squeeze(1).split(self.rows):
                yield index, features[index, :length]
