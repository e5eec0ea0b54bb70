"""Windows: what a convolution's output pixels see, cut from the images in the way that copies least.

A convolution's gradient is a product over output pixels of what came back with the windows that were seen. Windows
overlap, so writing them out multiplies the image; how long the copied runs of memory are decides what that costs. Three
cuts do the same thing:

- `WholeWindows`: channels last; a run is one row of a window. Best with many channels.
- `RowsOfOutputs`: channels first, stride 1; a run is one row of output pixels. Best with few channels.
- `Bands`: for strides. Every s-th row and column goes to one of s² planes; in a plane a window's next row is the next
  row of memory, so only the steps along a row are written out and the steps across rows are offsets into the same copy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.engine.workspace import Workspace

# What copying costs on a CPU, in multiplications of a matrix product (measured, docs/performance.md):
COPY_COST = 8  # a float copied, or summed, in cache
RUN_COST = 330  # starting another run of contiguous floats
TURN_COST = 50  # a float moved between channels-first and channels-last


@dataclass(frozen=True)
class Kernel:
    """Geometry of a convolution without groups, padding already applied.

    Attributes:
        size, stride, dilation: per axis (height, width).
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

    def outputs(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output."""
        return (height - self.reach(0)) // self.stride[0] + 1, (width - self.reach(1)) // self.stride[1] + 1

    def reach(self, axis: int) -> int:
        """Pixels from one end of the kernel to the other."""
        return self.dilation[axis] * (self.size[axis] - 1) + 1

    def windows(self, images: Tensor) -> Tensor:
        """`[b, c, H, W]` to a view `[b, oh, ow, kh, kw, c]` of channels-last memory: what each output pixel sees."""
        images = images.contiguous(memory_format=torch.channels_last)
        b, channels, height, width = images.shape
        image, row, column = width * height * channels, width * channels, channels
        shape = (b, *self.outputs(height, width), *self.size, channels)
        steps = (row * self.stride[0], column * self.stride[1], row * self.dilation[0], column * self.dilation[1])
        return images.as_strided(shape, (image, *steps, 1), images.storage_offset())

    def offsets(self, height: int, width: int) -> Iterator[tuple[slice, slice]]:
        """For every place of the kernel: which rows and columns of the image it meets over all output pixels."""
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
    """In which order images lie in memory without gaps; both where there is one channel."""

    channels_first: bool
    channels_last: bool

    @classmethod
    def of(cls, images: Tensor) -> Layout:
        """The layout of `[b, c, H, W]`."""
        return cls(images.is_contiguous(), images.is_contiguous(memory_format=torch.channels_last))


class Cut(ABC):
    """One way of forming per-record gradients from images and backprops.

    Gradients come in `parts` pieces of equal size, `[parts, m, numel/parts]`, ordered as was cheap; `as_weight` sorts
    them.

    Args:
        kernel: the geometry.
        height, width: of the padded images.
    """

    def __init__(self, kernel: Kernel, height: int, width: int) -> None:
        self.kernel, self.height, self.width = kernel, height, width
        self.outputs = kernel.outputs(height, width)

    @property
    def parts(self) -> int:
        """How many pieces a gradient comes in."""
        return 1

    @abstractmethod
    def cost(self, layout: Layout) -> float:
        """Cost per record of preparing and copying, in multiplications; infinite where the cut does not apply."""

    def _turned(self) -> int:
        """Cost per record of bringing images into the other memory layout."""
        return self.kernel.channels[0] * self.height * self.width * TURN_COST

    @abstractmethod
    def scratch(self) -> int:
        """Floats per record that copying needs."""

    @abstractmethod
    def prepare(self, images: Tensor) -> Tensor:
        """What pieces are cut from, once for a batch `[b, c, H, W]`."""

    @abstractmethod
    def multiply(self, source: Tensor, backprops: Tensor, out: Tensor, add: bool, workspace: Workspace) -> None:
        """Write (or add) the gradients of m records to `out [parts, m, numel/parts]`; `backprops [m, o, oh, ow]`."""

    @abstractmethod
    def as_weight(self, gradients: Tensor) -> Tensor:
        """`[parts, m, numel/parts]` to `[m, o, c, kh, kw]`."""


class WholeWindows(Cut):
    """Windows `[m, P, kh·kw·c]` of channels-last images."""

    def cost(self, layout: Layout) -> float:
        positions = math.prod(self.outputs)
        turned = 0 if layout.channels_last else self._turned()
        return turned + positions * (self.kernel.size[0] * RUN_COST + self.kernel.fan_in * COPY_COST)

    def scratch(self) -> int:
        return math.prod(self.outputs) * self.kernel.fan_in

    def prepare(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=torch.channels_last)

    def multiply(self, source: Tensor, backprops: Tensor, out: Tensor, add: bool, workspace: Workspace) -> None:
        view = self.kernel.windows(source)
        windows = workspace.take("windows", *view.shape, like=source).copy_(view)
        windows = windows.view(len(source), -1, self.kernel.fan_in)
        product(backprops.flatten(2), windows, out[0].view(-1, self.kernel.channels[1], self.kernel.fan_in), add)

    def as_weight(self, gradients: Tensor) -> Tensor:
        c, o = self.kernel.channels
        return gradients[0].view(-1, o, *self.kernel.size, c).permute(0, 1, 4, 2, 3)


class RowsOfOutputs(Cut):
    """Windows `[m, c·kh·kw, P]` of channels-first images, stride 1 along rows."""

    def cost(self, layout: Layout) -> float:
        if self.kernel.stride[1] > 1:
            return math.inf
        turned = 0 if layout.channels_first else self._turned()
        return turned + self.kernel.fan_in * self.outputs[0] * (RUN_COST + self.outputs[1] * COPY_COST)

    def scratch(self) -> int:
        return math.prod(self.outputs) * self.kernel.fan_in

    def prepare(self, images: Tensor) -> Tensor:
        return images.contiguous()

    def multiply(self, source: Tensor, backprops: Tensor, out: Tensor, add: bool, workspace: Workspace) -> None:
        kernel, (m, channels) = self.kernel, source.shape[:2]
        plane, row = self.height * self.width, self.width
        steps = (channels * plane, plane, row * kernel.dilation[0], kernel.dilation[1], row * kernel.stride[0], 1)
        shape = (m, channels, *kernel.size, *self.outputs)
        view = source.as_strided(shape, steps, source.storage_offset())
        windows = workspace.take("windows", *shape, like=source).copy_(view).view(m, kernel.fan_in, -1)
        product(windows, backprops.flatten(2).transpose(1, 2), out[0].view(m, kernel.fan_in, -1), add)

    def as_weight(self, gradients: Tensor) -> Tensor:
        c, o = self.kernel.channels
        return gradients[0].view(-1, c, *self.kernel.size, o).permute(0, 4, 1, 2, 3)


class Bands(Cut):
    """For each kernel row of a plane one product of `[m, c·s·kw, L]` bands with backprops widened to a plane's rows."""

    def __init__(self, kernel: Kernel, height: int, width: int) -> None:
        super().__init__(kernel, height, width)
        self._rows, self._columns = -(-height // kernel.stride[0]), -(-width // kernel.stride[1])
        self._taps = kernel.size[0] // kernel.stride[0], kernel.size[1] // kernel.stride[1]
        self._band = kernel.channels[0] * kernel.stride[0] * kernel.size[1]
        self._span = (self.outputs[0] - 1) * self._columns + self.outputs[1]  # from first to last output in a plane
        self._length = (self._taps[0] - 1) * self._columns + self._span

    @property
    def parts(self) -> int:
        return self._taps[0]

    def cost(self, layout: Layout) -> float:
        kernel = self.kernel
        divisible = not any(k % s for k, s in zip(kernel.size, kernel.stride, strict=True))
        if (
            kernel.dilation != (1, 1) or kernel.stride == (1, 1) or not divisible or self._band < 16
        ):  # thin products are slow
            return math.inf
        widened = self._rows * self._columns * kernel.channels[1]
        wasted = (self._span - math.prod(self.outputs)) * kernel.fan_in * kernel.channels[1]
        return self._turned() + self._band * (RUN_COST + self._length * COPY_COST) + 2 * widened * COPY_COST + wasted

    def scratch(self) -> int:
        return self._band * self._length + self._rows * self._columns * self.kernel.channels[1]

    def prepare(self, images: Tensor) -> Tensor:
        down, across = self.kernel.stride
        if self.width % across or self.height % down:
            images = F.pad(images, (0, -self.width % across, 0, -self.height % down))
        split = images.unflatten(3, (self._columns, across)).unflatten(2, (self._rows, down))
        return split.permute(0, 1, 3, 5, 2, 4).contiguous()  # [b, c, s, s, H/s, W/s]

    def multiply(self, source: Tensor, backprops: Tensor, out: Tensor, add: bool, workspace: Workspace) -> None:
        m, channels, down, across = source.shape[:4]
        image, channel, upper, left = source.stride()[:4]
        shape = (m, channels, down, self._taps[1], across, self._length)
        view = source.as_strided(shape, (image, channel, upper, 1, left, 1), source.storage_offset())
        bands = workspace.take("windows", *shape, like=source).copy_(view).view(m, self._band, self._length)
        places = self._widened(backprops, workspace)
        for tap in range(self.parts):
            band = bands[:, :, tap * self._columns :][:, :, : self._span]
            product(band, places, out[tap].view(m, self._band, -1), add)

    def _widened(self, backprops: Tensor, workspace: Workspace) -> Tensor:
        """`[m, o, oh, ow]` to `[m, span, o]` with zeros where a plane's rows are longer than the output's."""
        m, o, oh, ow = backprops.shape
        wide = workspace.take("backprops", m, oh, self._columns, o, like=backprops)
        wide[:, :, :ow].copy_(backprops.permute(0, 2, 3, 1))
        wide[:, :, ow:].zero_()
        return wide.flatten(1, 2)[:, : self._span]

    def as_weight(self, gradients: Tensor) -> Tensor:
        (c, o), (down, across) = self.kernel.channels, self.kernel.stride
        sorted_ = gradients.view(self.parts, -1, c, down, self._taps[1], across, o).permute(1, 6, 2, 0, 3, 4, 5)
        return sorted_.reshape(-1, o, c, *self.kernel.size)


@lru_cache(maxsize=256)
def cheapest(kernel: Kernel, height: int, width: int, layouts: tuple[Layout, ...]) -> tuple[Cut, float]:
    """The cut that copies a record's images, one per layout, at the least cost, and that cost."""
    cuts = [kind(kernel, height, width) for kind in (WholeWindows, RowsOfOutputs, Bands)]
    return min(((cut, sum(map(cut.cost, layouts))) for cut in cuts), key=lambda pair: pair[1])


def product(left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
    """Batched `left @ right`, written or added to `out`."""
    if add:
        torch.baddbmm(out, left, right, out=out)
    else:
        torch.bmm(left, right, out=out)
