"""Convolutions on a GPU: what each kind of layer costs a private step and SGD, and whether another tile helps.

    python benchmarks/convolutions.py --model resnet50 --batch-size 64            # the medical case's network, 224×224
    python benchmarks/convolutions.py --model resnet9 --batch-size 1024 --tiles   # with other tiles: each is compiled
    TRITON_INTERPRET=1 python benchmarks/convolutions.py --model cnn_small --batch-size 4 --device cpu --most 1

Of each kind of layer (geometry and sides of its images) a line of JSON: how many there are, and milliseconds of one.
`sgd` is torch's weight gradient of the whole batch, which SGD takes. `norms` are our gradients, formed for their norms,
and kept where they are; `sum` is their weighted sum. With `--tiles` both are measured for other tiles, too, whose
squares must be the same. Kinds that cost most come first. The last line adds all layers up. Numbers are random, and the
batch has the public number of rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from speed import DATA, build, schema
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from equidp.gradients import kernels
from equidp.gradients.kernels import Tile, Tiles
from equidp.gradients.shape import public_rows
from equidp.gradients.together import WORTH_KEEPING
from equidp.gradients.windows import Kernel
from equidp.models.pretrained import resnet

CALLS, REPLAYS = 10, 3
"""Calls that one graph has, and how often it is replayed while the clock runs."""

OTHERS = [
    Tile(rows, columns, pixels, warps, stages)
    for rows, columns, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8))
    for pixels, stages in ((32, 3), (32, 4), (64, 2))
]
SAME = 1e-3
"""Relative difference of squares that products of eleven digits, added in another order, may have."""


@dataclass(frozen=True)
class Kind:
    """Convolutions that are alike: geometry, padding of both sides, and the images' height and width."""

    kernel: Kernel
    padding: tuple[int, int]
    sides: tuple[int, int]

    @property
    def outputs(self) -> tuple[int, int]:
        """Height and width of the output."""
        return self.kernel.outputs(*(side + 2 * zeros for side, zeros in zip(self.sides, self.padding, strict=True)))

    def __str__(self) -> str:
        (c, o), (h, w), size = self.kernel.channels, self.sides, "×".join(map(str, self.kernel.size))
        return f"{c}→{o}, {size}, stride {self.kernel.stride[0]}, {h}×{w}"


def kinds_of(model: nn.Module, image: Tensor) -> Counter[Kind]:
    """How often each kind of convolution occurs; those in groups are formed otherwise, and left out."""
    found: Counter[Kind] = Counter()

    def seen(layer: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        channels = (layer.in_channels, layer.out_channels)
        pairs = [tuple(map(int, of)) for of in (layer.kernel_size, layer.stride, layer.dilation, layer.padding)]
        size, stride, dilation, padding = ((of[0], of[1]) for of in pairs)
        height, width = given[0].shape[2:]
        found[Kind(Kernel(size, stride, dilation, channels), padding, (height, width))] += 1

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and layer.groups == 1]
    hooks = [layer.register_forward_hook(seen) for layer in layers]
    with torch.no_grad():
        model.eval()(image)
    for hook in hooks:
        hook.remove()
    return found


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call; on a GPU replayed, so that the host's own time is not in it."""
    step()
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            step()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - start) / (CALLS * REPLAYS), 4)


def measured(kind: Kind, rows: int, device: torch.device, *, others: bool) -> dict[str, Any]:
    """Milliseconds of one layer of this kind, of the tile that is used and of others."""
    kernel = kind.kernel
    images = torch.randn(rows, kernel.channels[0], *kind.sides, device=device)
    backprops = torch.randn(rows, kernel.channels[1], *kind.outputs, device=device)
    weights, shape = torch.rand(rows, device=device), (kernel.channels[1], kernel.channels[0], *kernel.size)
    tiles = Tiles(kernel, images, backprops, kind.padding, any(kind.padding))
    kept = torch.empty(rows, kernel.numel, device=device) if math.prod(kind.outputs) > WORTH_KEEPING else None

    def of(tiles: Tiles) -> tuple[dict[str, float], Tensor]:
        squares = torch.empty(tiles.count, rows, device=device)
        took = {"norms": timed(lambda: tiles.form(squares, kept), device)}
        took["sum"] = timed(lambda: tiles.weighted_sum(weights) if kept is None else weights @ kept, device)
        return took, squares.sum(0)

    took, squares = of(tiles)
    took["sgd"] = timed(
        lambda: conv2d_weight(images, shape, backprops, kernel.stride, kind.padding, kernel.dilation), device
    )
    flops = 2 * rows * math.prod(kind.outputs) * kernel.numel
    found: dict[str, Any] = took | {"kept": kept is not None, "tile": _text(tiles.tile)}
    found["Tflop/s"] = {name: round(flops / took[name] / 1e9, 1) for name in ("norms", "sgd")}
    if others:
        found["others"] = dict(_others(tiles, of, squares, device))
    return found


def _others(
    tiles: Tiles, of: Callable[[Tiles], tuple[dict[str, float], Tensor]], squares: Tensor, device: torch.device
) -> Iterator[tuple[str, Any]]:
    kernel = tiles.kernel
    for tile in OTHERS:
        room = 4 * tile.pixels * (tile.rows + tile.columns) * tile.stages
        half_empty = tile.rows >= 2 * kernel.channels[1] or tile.columns >= 2 * kernel.fan_in
        if half_empty or room > kernels.shared_memory(device) or tile == tiles.tile:
            continue
        try:
            took, found = of(replace(tiles, chosen=tile))
            off = float(((found - squares).abs() / squares).max())
            yield _text(tile), took if off <= SAME else {"off": off}
        except Exception as error:  # whatever a compiler or a card has against this tile
            yield _text(tile), {"said": f"{type(error).__name__}: {error}"[:120]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="resnet50 with frozen BatchNorm, or a model of speed.py")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiles", action="store_true", help="measure other tiles, too")
    parser.add_argument("--most", type=int, help="so many kinds of layers, those that cost most")
    given = parser.parse_args(arguments)
    device, rows = torch.device(given.device), public_rows(given.batch_size, None)
    if given.model == "resnet50":
        model, image = resnet("resnet50", norm="frozen"), torch.zeros(1, 3, 224, 224)
    else:
        facts = schema(DATA.get(given.model, "grey"))
        model, image = build(given.model, facts), torch.zeros(1, *facts.shape)
    kinds = kinds_of(model, image)
    costly = sorted(kinds, key=lambda kind: -kinds[kind] * math.prod(kind.outputs) * kind.kernel.numel)
    totals: Counter[str] = Counter()
    for kind in itertools.islice(costly, given.most):
        found = measured(kind, rows, device, others=given.tiles)
        best = min((one for one in found.get("others", {}).values() if "sum" in one), key=_ours, default=found)
        for name, time_ in (("sgd", found["sgd"]), ("ours", _ours(found)), ("best", min(_ours(best), _ours(found)))):
            totals[name] += kinds[kind] * time_
        print(json.dumps({"layer": str(kind), "count": kinds[kind], **found}, ensure_ascii=False), flush=True)
    every = {name: round(total, 3) for name, total in totals.items()}
    print(json.dumps({"model": given.model, "rows": rows, "ms of all layers": every}))
    return 0


def _text(tile: Tile) -> str:
    return f"{tile.rows}×{tile.columns}, {tile.pixels} pixels, {tile.warps} warps, {tile.stages} stages"


def _ours(took: dict[str, Any]) -> float:
    return float(took["norms"] + took["sum"])


if __name__ == "__main__":
    raise SystemExit(main())
