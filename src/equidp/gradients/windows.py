"""Windows: the parts of an image that a convolution's output pixels see, written out in the cheapest order.

A convolution's gradient is a sum over output pixels: the backprop at a pixel times the window that the pixel sees.
Windows overlap, so written out they take several times the image's memory. The cost depends on how long the runs of
memory are that are copied in one go. Two cuts write out the same windows in different orders:

- `WholeWindows`: channels last; a run is one row of a window. Best with many channels.
- `Bands`: channels first; a run is one row of output pixels. Best with few channels.

If code can be compiled for the convolution (`compiled`), nothing is written out. On a GPU runs do not matter: there is
one cut, `InOrder`, whose gradients are in the weight's own order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from equidp.gradients.workspace import Workspace

TURN_COST = 50  # of a float moved between channels first and channels last on a CPU, in multiplications as in `Costs`


@dataclass(frozen=True)
class Costs:
    """Costs of operations on a device, in multiplications of a matrix product.

    Attributes:
        copy: to copy or add a float.
        run: to begin another run of contiguous floats.
        keep: to write a float to main memory and read it again.
        weight: a multiplication in torch's own weight gradient.
        gram: a record's share of the additional launches that Gram matrices need.
    """

    copy: float
    run: float
    keep: float
    weight: float
    gram: float

    @classmethod
    def on(cls, device: torch.device) -> Costs:
        """Return the costs on a device."""
        return CPU if device.type == "cpu" else GPU


CPU = Costs(copy=8, run=330, keep=20, weight=1.3, gram=0)
"""Measured."""
GPU = Costs(copy=100, run=0, keep=70, weight=1.0, gram=1e7)
"""Computed from bytes, not measured. A copied float moves 12 bytes, a kept one 8. An H100 moves 3.35 TB/s and makes
30·10¹² float32 multiplications in a second; on an A100 or T4 the ratio is half to one and a half times that. Gram
matrices need about ten more launches of 2 µs, shared by 64 records."""


@dataclass(frozen=True)
class Kernel:
    """The geometry of a convolution without groups whose images have their padding.

    Attributes:
        size: height and width of the kernel.
        stride: along height and width.
        dilation: along height and width.
        channels: in and out.
    """

    size: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    channels: tuple[int, int]

    @property
    def fan_in(self) -> int:
        """Inputs that one output pixel sees: kh·kw·c."""
        return math.prod(self.size) * self.channels[0]

    @property
    def numel(self) -> int:
        """Entries of the weight."""
        return self.fan_in * self.channels[1]

    @property
    def seen(self) -> int:
        """The most output pixels that see one input pixel."""
        axes = zip(self.size, self.stride, self.dilation, strict=True)
        return math.prod(-(-size // stride) if dilation == 1 else size for size, stride, dilation in axes)

    def outputs(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output."""
        return (height - self.reach(0)) // self.stride[0] + 1, (width - self.reach(1)) // self.stride[1] + 1

    def reach(self, axis: int) -> int:
        """Return the number of pixels from one end of the kernel to the other."""
        return self.dilation[axis] * (self.size[axis] - 1) + 1

    def windows(self, images: Tensor) -> Tensor:
        """Return the windows of images `[b, c, H, W]`, a view `[b, oh, ow, kh, kw, c]` of channels-last memory."""
        images = images.contiguous(memory_format=torch.channels_last)
        b, channels, height, width = images.shape
        image, row, column = width * height * channels, width * channels, channels
        shape = (b, *self.outputs(height, width), *self.size, channels)
        steps = (row * self.stride[0], column * self.stride[1], row * self.dilation[0], column * self.dilation[1])
        return images.as_strided(shape, (image, *steps, 1), images.storage_offset())

    def offsets(self, height: int, width: int) -> Iterator[tuple[slice, slice]]:
        """Give, for every place of the kernel, the rows and columns of the image that it meets over all pixels."""
        oh, ow = self.outputs(height, width)
        for i in range(self.size[0]):
            for j in range(self.size[1]):
                top, left = i * self.dilation[0], j * self.dilation[1]
                yield (
                    slice(top, top + self.stride[0] * (oh - 1) + 1, self.stride[0]),
                    slice(left, left + self.stride[1] * (ow - 1) + 1, self.stride[1]),
                )


@dataclass(frozen=True)
class Layout:
    """In which orders images lie in memory without gaps: both orders if there is one channel."""

    channels_first: bool
    channels_last: bool

    @classmethod
    def of(cls, images: Tensor) -> Layout:
        """Return the layout of images `[b, c, H, W]`."""
        return cls(images.is_contiguous(), images.is_contiguous(memory_format=torch.channels_last))


class Cut(ABC):
    """One way of forming per-record gradients from padded images and backprops.

    Their entries are in the order that is cheapest to form; `as_weight` brings them into the weight's order.
    """

    def __init__(self, kernel: Kernel, height: int, width: int) -> None:
        self.kernel, self.height, self.width = kernel, height, width
        self.outputs = kernel.outputs(height, width)

    @abstractmethod
    def cost(self, layout: Layout) -> float:
        """Return the cost per record of preparing and copying, in multiplications."""

    def _turned(self) -> int:
        """Return the cost per record of bringing images into the other memory layout."""
        return self.kernel.channels[0] * self.height * self.width * TURN_COST

    def scratch(self) -> int:
        """Return the number of floats per record that copying needs."""
        return math.prod(self.outputs) * self.kernel.fan_in

    @abstractmethod
    def view(self, images: Tensor) -> Tensor:
        """Return the windows of images `[b, c, H, W]` as a view with overlaps, `[b, …]`, to be written out later."""

    @abstractmethod
    def multiply(self, view: Tensor, backprops: Tensor, out: Tensor, add: bool, workspace: Workspace) -> None:
        """Write (or add) the gradients of m records to `out [m, numel]`; `backprops [m, o, P]`."""

    @abstractmethod
    def as_weight(self, gradients: Tensor) -> Tensor:
        """Return gradients `[m, numel]` as `[m, o, c, kh, kw]`."""


class WholeWindows(Cut):
    """Windows `[m, oh·ow, kh·kw·c]` of channels-last images."""

    def cost(self, layout: Layout) -> float:
        turned = 0 if layout.channels_last else self._turned()
        return turned + math.prod(self.outputs) * (self.kernel.size[0] * CPU.run + self.kernel.fan_in * CPU.copy)

    def view(self, images: Tensor) -> Tensor:
        return self.kernel.windows(images)

    def multiply(self, view: Tensor, backprops: Tensor, out: Tensor, add: bool, workspace: Workspace) -> None:
        windows = workspace.take("windows", *view.shape, like=view).copy_(view).view(len(view), -1, self.kernel.fan_in)
        product(backprops, windows, out.view(*backprops.shape[:2], -1), add)

    def as_weight(self, gradients: Tensor) -> Tensor:
        (c, o), size = self.kernel.channels, self.kernel.size
        return gradients.view(-1, o, *size, c).permute(0, 1, 4, 2, 3)


class Bands(Cut):
    """Rows of output pixels `[m, c·kh·kw, oh·ow]` of channels-first images."""

    def cost(self, layout: Layout) -> float:
        turned = 0 if layout.channels_first else self._turned()
        return turned + self.kernel.fan_in * self.outputs[0] * (CPU.run + self.outputs[1] * CPU.copy)

    def view(self, images: Tensor) -> Tensor:
        images, kernel = images.contiguous(), self.kernel
        channels, plane, row = kernel.channels[0], self.height * self.width, self.width
        shape = (channels, *kernel.size, *self.outputs)
        steps = (plane, row * kernel.dilation[0], kernel.dilation[1], row * kernel.stride[0], kernel.stride[1])
        return images.as_strided((len(images), *shape), (channels * plane, *steps), images.storage_offset())

    def multiply(self, view: Tensor, backprops: Tensor, out: Tensor, add: bool, workspace: Workspace) -> None:
        band, places = self.kernel.fan_in, backprops.transpose(1, 2)
        floats = self.scratch()
        room = workspace.take("windows", len(view), floats + -floats % 4, like=view)[:, :floats]  # see `rounding.alike`
        bands = room.view(view.shape).copy_(view).view(len(view), band, -1)
        product(bands, places, out.view(len(view), band, -1), add)

    def as_weight(self, gradients: Tensor) -> Tensor:
        (c, o), size = self.kernel.channels, self.kernel.size
        return gradients.view(-1, c, *size, o).permute(0, 4, 1, 2, 3)


class InOrder(Bands):
    """Bands on a GPU, whose product may transpose them: gradients `[m, o·c·kh·kw]` in the weight's own order."""

    def cost(self, layout: Layout) -> float:
        return self.scratch() * GPU.copy

    def multiply(self, view: Tensor, backprops: Tensor, out: Tensor, add: bool, workspace: Workspace) -> None:
        if not view.is_contiguous():  # the view of a 1×1 kernel is the images themselves, and needs no copy
            view = workspace.take("windows", *view.shape, like=view).copy_(view)
        bands = view.flatten(1, 3).flatten(2)
        product(backprops, bands.transpose(1, 2), out.unflatten(1, (self.kernel.channels[1], -1)), add)

    def as_weight(self, gradients: Tensor) -> Tensor:
        c, o = self.kernel.channels
        return gradients.view(-1, o, c, *self.kernel.size)


def cuts(kernel: Kernel, height: int, width: int) -> list[Cut]:
    """Return every cut that may be the cheapest for padded images of this size."""
    found: list[Cut] = [WholeWindows(kernel, height, width)]
    if kernel.stride[1] == 1:
        found.append(Bands(kernel, height, width))
    return found


@lru_cache(maxsize=256)
def cheapest(
    kernel: Kernel, height: int, width: int, layouts: tuple[Layout, ...], *, on_cpu: bool = True
) -> tuple[Cut, float]:
    """Return the cut that copies a record's images, one for each layout, at the least cost; and that cost."""
    if not on_cpu:
        cut = InOrder(kernel, height, width)
        return cut, sum(map(cut.cost, layouts))
    costs = ((cut, sum(map(cut.cost, layouts))) for cut in cuts(kernel, height, width))
    return min(costs, key=lambda pair: pair[1])


def product(left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
    """Write or add batched `left @ right` to `out`."""
    if add:
        torch.baddbmm(out, left, right, out=out)
    else:
        torch.bmm(left, right, out=out)
