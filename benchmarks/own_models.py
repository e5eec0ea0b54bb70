"""Models of one's own: a step of `make_private` against an ordinary step of torch's, and against Opacus.

    python benchmarks/own_models.py                               # what docs/performance.md shows, 10 minutes
    python benchmarks/own_models.py --only lstm mlp --rounds 5
    python benchmarks/own_models.py --only mlp --secure           # with noise of the cryptographic generator, too

One process, one thread, time of the processor. In every round each contender takes a step, in an order drawn anew; what
is printed are medians of the ratios within one round. All draw Poisson batches of the same expected size from records
with random content. `hooks` is Opacus's default, `ghost` its ghost clipping; either is left out where it takes more
than ten ordinary steps' time, or refuses the model.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
import torchvision
from speed import LEARNING_RATE, NOISE_MULTIPLIER, Step, ghost, ordinary, settle_memory, stored
from torch import Tensor, nn

from equidp.training import make_private

SPARE = 1.05
"""Records per expected batch: nearly all, so that batches are nearly of one size."""
OPACUS, TOO_LONG = ("hooks", "ghost"), 10
"""Which are left out where they take as many ordinary steps' time."""


def per_record(outputs: Tensor, labels: Tensor) -> Tensor:
    """`[b]` cross-entropy, the mean over pixels where there are some."""
    losses = F.cross_entropy(outputs, labels, reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


class Mean(nn.Module):
    """Of embeddings of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(100_000, 64), nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids).mean(1))


class TextCNN(nn.Module):
    """Kim 2014: convolutions of three, four and five words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5_000, 128)
        self.convolutions = nn.ModuleList(nn.Conv1d(128, 100, size) for size in (3, 4, 5))
        self.out = nn.Linear(300, 10)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids).transpose(1, 2)
        return self.out(torch.cat([one(words).relu().amax(2) for one in self.convolutions], 1))


class Recurrent(nn.Module):
    """An LSTM over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.out = (
            nn.Embedding(5_000, 64),
            nn.LSTM(64, 128, batch_first=True),
            nn.Linear(128, 10),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.inner(self.words(ids))[0][:, -1])


class Reader(nn.Module):
    """A transformer of two layers over words."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.words, self.inner, self.out = nn.Embedding(5_000, 256), nn.TransformerEncoder(layer, 2), nn.Linear(256, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.inner(self.words(ids)).mean(1))


class UNet(nn.Module):
    """A class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(_twice(i, o) for i, o in ((3, 16), (16, 32), (32, 64)))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(i, i // 2, 2, 2) for i in (64, 32))
        self.up = nn.ModuleList(_twice(i, i // 2) for i in (64, 32))
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down[0](images)
        second = self.down[1](F.max_pool2d(first, 2))
        found = self.down[2](F.max_pool2d(second, 2))
        for wider, up, beside in zip(self.wider, self.up, (second, first), strict=True):
            found = up(torch.cat([wider(found), beside], 1))
        return self.out(found)


def _twice(inward: int, outward: int) -> nn.Module:
    layers = [(nn.Conv2d(i, outward, 3, padding=1), nn.GroupNorm(4, outward), nn.ReLU()) for i in (inward, outward)]
    return nn.Sequential(*layers[0], *layers[1])


def _volumes() -> nn.Module:
    first, second = nn.Conv3d(1, 16, 3, padding=1), nn.Conv3d(16, 32, 3, padding=1)
    end = (nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 4))
    return nn.Sequential(first, nn.ReLU(), nn.MaxPool3d(2), second, nn.ReLU(), *end)


def _depthwise() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2, 1)]
    for _ in range(4):
        layers += [nn.Conv2d(64, 64, 3, 1, 1, groups=64), nn.GroupNorm(8, 64), nn.ReLU()]
        layers += [nn.Conv2d(64, 64, 1), nn.GroupNorm(8, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _hidden() -> nn.Module:
    return nn.Sequential(
        nn.Linear(200, 1_000), nn.ReLU(), nn.Linear(1_000, 1_000), nn.ReLU(), nn.Linear(1_000, 10)
    )  # fmt: skip


def _grouped(channels: int) -> nn.Module:
    return nn.GroupNorm(8, channels)


def _vit() -> nn.Module:
    import timm

    made: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, num_classes=10)
    return made


@dataclass(frozen=True)
class Case:
    """A model, the shape of a record, and batch sizes; ids below `words`, or random numbers where it is 0."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    sizes: Sequence[int]
    words: int = 0
    classes: int = 10
    labels: tuple[int, ...] = ()


CASES: Mapping[str, Case] = {
    "textcnn": Case(TextCNN, (128,), (16, 64), words=5_000),
    "transformer": Case(Reader, (128,), (16,), words=5_000),
    "vit": Case(_vit, (3, 64, 64), (16,)),
    "unet": Case(UNet, (3, 64, 64), (16,), classes=3, labels=(64, 64)),
    "volumes": Case(_volumes, (1, 16, 16, 16), (64,), classes=4),
    "depthwise": Case(_depthwise, (3, 32, 32), (64,)),
    "mobilenet": Case(
        lambda: torchvision.models.mobilenet_v2(num_classes=10, norm_layer=_grouped), (3, 64, 64), (16,)
    ),
    "resnet18": Case(
        lambda: torchvision.models.resnet18(num_classes=10, norm_layer=_grouped), (3, 32, 32), (16, 64)
    ),
    "mlp": Case(_hidden, (200,), (64, 256, 1_024)),
    "embedding": Case(Mean, (64,), (64,), words=100_000),
    "lstm": Case(Recurrent, (128,), (16, 64), words=5_000),
}  # fmt: skip


class Bench:
    """The contenders of one case at one batch size."""

    def __init__(self, case: Case, batch_size: int) -> None:
        torch.manual_seed(0)
        self.batch_size, records = batch_size, int(SPARE * batch_size)
        self.model = case.build().train()
        for layer in self.model.modules():
            if hasattr(layer, "inplace"):
                layer.inplace = False  # Opacus's hooks do not take it
        shape = (records, *case.shape)
        self.features = torch.randint(0, case.words, shape) if case.words else torch.rand(shape)
        self.labels = torch.randint(0, case.classes, (records, *case.labels))
        self._coins = torch.Generator().manual_seed(1)

    def draw(self) -> tuple[Tensor, Tensor]:
        """A Poisson batch."""
        rate = self.batch_size / len(self.labels)
        rows = (torch.rand(len(self.labels), generator=self._coins) < rate).nonzero().squeeze(1)
        return self.features[rows], self.labels[rows]

    def ordinary(self) -> Step:
        """As anyone would write it."""
        return ordinary(copy.deepcopy(self.model), per_record, self.draw, self.batch_size)

    def ours(self, seed: int | None = 0) -> Step:
        """`make_private`."""
        trainer = make_private(
            copy.deepcopy(self.model), (self.features, self.labels), per_record, noise_multiplier=NOISE_MULTIPLIER,
            delta=1e-6, epochs=10_000, batch_size=self.batch_size, learning_rate=LEARNING_RATE, seed=seed, device="cpu",
        )  # fmt: skip
        trainer.engine.train()
        return lambda: trainer.run_steps(1)

    def secure(self) -> Step:
        """`make_private` without a seed, which is its default."""
        return self.ours(None)

    def _replaced(self) -> nn.Module:
        from opacus.validators import ModuleValidator

        made: nn.Module = ModuleValidator.fix(copy.deepcopy(self.model)).train()  # its own LSTM
        return made

    def hooks(self) -> Step:
        """Opacus's default."""
        return stored(self._replaced(), per_record, self.draw, self.batch_size)

    def ghost(self) -> Step:
        """Opacus's ghost clipping."""
        return ghost(self._replaced(), per_record, self.draw, self.batch_size)


def timed(step: Step) -> float:
    """Seconds of the processor."""
    begun = time.process_time()
    step()
    return time.process_time() - begun


def measure(case: Case, batch_size: int, rounds: int, names: Sequence[str]) -> dict[str, float | str]:
    """Milliseconds of an ordinary step, and every other contender's share of it, or why it has none."""
    bench = Bench(case, batch_size)
    steps: dict[str, Step] = {}
    found: dict[str, float | str] = {}
    slowest = float("inf")
    for name in ("ordinary", *names):
        try:
            step = getattr(bench, name)()
            step()
            took = timed(step)
        except Exception as error:  # whatever Opacus says of a model that it does not take
            found[name] = f"refused ({type(error).__name__})"
            continue
        if took > slowest and name in OPACUS:
            found[name] = f"about {took / slowest * TOO_LONG:.0f}"
            continue
        slowest = TOO_LONG * took if name == "ordinary" else slowest
        steps[name] = step
        gc.collect()
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, drawn = list(steps), random.Random(0)
    for _ in range(rounds):
        drawn.shuffle(order)
        for name in order:
            times[name].append(timed(steps[name]))
    for name, taken in times.items():
        ratios = [one / base for one, base in zip(taken, times["ordinary"], strict=True)]
        found[name] = 1e3 * statistics.median(taken) if name == "ordinary" else round(statistics.median(ratios), 2)
    return found


def main() -> None:
    """Print a row of Markdown for each case and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--secure", action="store_true", help="noise of the cryptographic generator, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    settle_memory()
    names = ["ours", *(["secure"] if given.secure else []), *OPACUS]
    print("| model, B | ordinary, ms | " + " | ".join(names) + " |\n|---|---|" + "---|" * len(names))
    for name in given.only:
        for size in CASES[name].sizes:
            found = measure(CASES[name], size, given.rounds, names)
            cells = [f"{found['ordinary']:.1f}", *(str(found[one]) for one in names)]
            print(f"| {name}, {size} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
