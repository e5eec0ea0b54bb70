"""How often the 95 % intervals of figures released with noise hold the true value: `python benchmarks/coverage.py`.

Test parts are drawn from a known law of label and score; a part's histogram gets Gaussian noise on every count. Prints
one row per size of a group and noise of a count, with coverage and mean width for every figure; the same for a model
that is nearly always right; then the worst group and the gap of three groups, whose intervals hold at 95 % at least.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from equidp.evaluation.histogram import Noised
from equidp.evaluation.noised import Cells, released_figures

SIZES = (20, 100, 500, 2_000, 20_000)
NOISES = (1.0, 4.0, 8.0)
FIGURES = ("accuracy", "balanced_accuracy", "auroc", "overconfidence")
BINS = 5
"""Of confidence; 10 score bins in all."""


def law(shift: float, rare: float, edge: float = 1.0) -> NDArray:
    """Shares `[label, predicted, confidence bin]`: the second class is `rare`, its scores lie `shift` higher, and a
    score above `edge` is a prediction of it.
    """
    draw = np.random.default_rng(0)
    labels = (draw.random(1_000_000) < rare).astype(int)
    score = 1 / (1 + np.exp(-1.3 * (draw.normal(size=len(labels)) + shift * labels - edge)))
    confidence = np.maximum(score, 1 - score)
    bin_of = np.clip(np.ceil((confidence - 0.5) * 2 * BINS).astype(int) - 1, 0, BINS - 1)
    cells = np.ravel_multi_index((labels, (score > 0.5).astype(int), bin_of), (2, 2, BINS))
    return np.bincount(cells, minlength=4 * BINS).reshape(2, 2, BINS) / len(labels)


def part(shares: NDArray, size: int, noise: float, draw: np.random.Generator) -> NDArray:
    """A noised histogram of `size` records of the law."""
    return draw.multinomial(size, shares.ravel()).reshape(shares.shape) + noise * draw.normal(size=shares.shape)


def one_group(shares: NDArray, repeats: int, sizes: tuple[int, ...] = SIZES) -> None:
    """A row per size and noise."""
    draw = np.random.default_rng(1)
    true = {name: getattr(Cells(shares * 1e9, 0.0), name)().value for name in FIGURES}
    print(", ".join(f"{name} {value:.3f}" for name, value in true.items()))
    print(f"| records | noise | {' | '.join(name.replace('_', ' ') for name in FIGURES)} |")
    print("|---|---|" + "---|" * len(FIGURES))
    for size in sizes:
        for noise in NOISES:
            ends = {name: np.empty((repeats, 2)) for name in FIGURES}
            for k in range(repeats):
                cells = Cells(part(shares, size, noise, draw), noise)
                for name in FIGURES:
                    ends[name][k] = getattr(cells, name)().interval
            texts = []
            for name, (low, high) in ((name, of.T) for name, of in ends.items()):
                texts.append(f"{np.mean((low <= true[name]) & (true[name] <= high)):.3f} ({np.mean(high - low):.3f})")
            print(f"| {size:,} | {noise:g} | {' | '.join(texts)} |", flush=True)


def three_groups(repeats: int) -> None:
    """Worst group and gap of groups of 20,000, 2,000 and 500 records."""
    laws = [law(1.2, 0.3), law(1.0, 0.3), law(0.6, 0.4)]
    true = [Cells(one * 1e9, 0.0).accuracy().value for one in laws]
    known = [value for value in true if value is not None]
    worst, gap, draw = min(known), max(known) - min(known), np.random.default_rng(2)
    print("\n| noise | worst group | gap |\n|---|---|---|")
    for noise in NOISES:
        held = np.zeros(2)
        for _ in range(repeats):
            counts = [part(one, size, noise, draw) for one, size in zip(laws, (20_000, 2_000, 500), strict=True)]
            found = released_figures(Noised({"g": np.stack(counts)}, {"g": ("a", "b", "c")}, ("0", "1"), noise))
            for k, (of, value) in enumerate(((found["worst"]["g"], worst), (found["gap"]["g"], gap))):
                held[k] += of["interval"] is not None and of["interval"][0] <= value <= of["interval"][1]
        print(f"| {noise:g} | {held[0] / repeats:.3f} | {held[1] / repeats:.3f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2_000)
    asked = parser.parse_args()
    one_group(law(1.2, 0.3), asked.repeats)
    one_group(law(4.0, 0.3, 2.0), asked.repeats, SIZES[:3])
    three_groups(asked.repeats // 4)
