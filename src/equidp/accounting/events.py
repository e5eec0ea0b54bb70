"""Events: what was released, at which sampling rate and noise.

Every released value of a run is an `Event`: a Gaussian of some effective noise multiplier on a Poisson sample of some
rate (rate 1: a plain Gaussian on all records). Two releases computed from the *same* sample are one event with the
fused multiplier of `fuse`. Charging them as two independently sampled events would understate ε, because the second
release would be credited with a sampling coin that was never tossed.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import dp_accounting as dp

from equidp.errors import EquidpError

MOST_DIFFERENT, LEVELS = 100, 64
"""If there are more than `MOST_DIFFERENT` different events, the accountants get at most `LEVELS` + 1 noise multipliers
at each sampling rate (`lowered`), because every different event takes a second of solving for the noise."""

SMALLEST_NOISE = 1e-6
"""Smaller noise counts as none: every ε is beyond 10¹¹, and accountants divide by zero."""


@dataclass(frozen=True)
class Event:
    """`count` releases of a Gaussian mechanism on fresh Poisson samples.

    Attributes:
        sampling_rate: inclusion probability q of each record, in (0, 1]; 1 means no sampling.
        noise_multiplier: standard deviation of the noise divided by the L2 sensitivity of the released value, > 0.
        count: how many times it happened.
    """

    sampling_rate: float
    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1:
            raise EquidpError(
                f"A sampling rate must lie in (0, 1], not {self.sampling_rate}: lower training.batch_size."
            )
        _refuse_no_noise(self.noise_multiplier)
        if self.count < 1:
            raise ValueError(f"An event happens at least once, not {self.count} times.")

    @property
    def kind(self) -> str:
        """`poisson_gaussian`, or `gaussian` if nothing is sampled."""
        return "gaussian" if self.sampling_rate == 1 else "poisson_gaussian"

    def to_dict(self) -> dict:
        """Return the event as written to privacy.json."""
        return {
            "event": self.kind,
            "sampling_rate": self.sampling_rate,
            "noise_multiplier": self.noise_multiplier,
            "count": self.count,
        }

    @classmethod
    def from_dict(cls, entry: dict) -> Event:
        """Read an entry of privacy.json."""
        return cls(entry["sampling_rate"], entry["noise_multiplier"], entry["count"])

    def as_dp_event(self) -> dp.DpEvent:
        """Return the same event in dp_accounting's terms."""
        gaussian: dp.DpEvent = dp.GaussianDpEvent(self.noise_multiplier)
        if self.sampling_rate < 1:
            gaussian = dp.PoissonSampledDpEvent(self.sampling_rate, gaussian)
        return dp.SelfComposedDpEvent(gaussian, self.count)


def _refuse_no_noise(noise_multiplier: float) -> None:
    if not noise_multiplier >= SMALLEST_NOISE:
        raise EquidpError(
            f"Every release needs noise: a noise multiplier is {noise_multiplier:g}, and must be at least "
            f"{SMALLEST_NOISE:g}; raise it, or let it fall less."
        )


def fuse(*noise_multipliers: float) -> float:
    """Effective noise multiplier of Gaussian releases computed from one sample: (Σ σ_j⁻²)^(−1/2).

    Given the sample, releases with L2 shifts 1/σ_j, adaptively chosen, are dominated by one Gaussian whose shift is the
    root of the sum of squares (equal to it when one record can move all of them fully); Poisson sampling preserves
    domination. An infinite multiplier contributes nothing.

    Examples:
        >>> round(fuse(1.0, 10.0), 4)  # group counts with ten times the gradient's noise
        0.995
    """
    for noise_multiplier in noise_multipliers:
        _refuse_no_noise(noise_multiplier)
    return sum(s**-2 for s in noise_multipliers) ** -0.5


def merged(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return the run-length form: consecutive equal events become one with the summed count. The order is kept."""
    runs: list[Event] = []
    for event in events:
        last = runs[-1] if runs else None
        if last and (last.sampling_rate, last.noise_multiplier) == (event.sampling_rate, event.noise_multiplier):
            runs[-1] = Event(last.sampling_rate, last.noise_multiplier, last.count + event.count)
        else:
            runs.append(event)
    return tuple(runs)


def counted(events: Iterable[Event]) -> Counter[tuple[float, float]]:
    """Return how often each (sampling rate, noise multiplier) occurs, in any order."""
    counts: Counter[tuple[float, float]] = Counter()
    for event in events:
        counts[event.sampling_rate, event.noise_multiplier] += event.count
    return counts


def beyond(charged: Iterable[Event], planned: Iterable[Event]) -> tuple[Event, ...]:
    """Return the events that were charged more often than they were planned, with the excess as count."""
    more = counted(charged) - counted(planned)
    return tuple(Event(rate, noise, count) for (rate, noise), count in more.items())


def canonical(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events in a fixed order, with equal ones counted together, so that caches find them.

    Composition does not depend on the order. More than `MOST_DIFFERENT` different events are `lowered`.
    """
    return merged(sorted(lowered(merged(events)), key=lambda e: (e.sampling_rate, e.noise_multiplier)))


def lowered(events: Sequence[Event]) -> Sequence[Event]:
    """Return the events; if more than `MOST_DIFFERENT` of them differ, return fewer different ones with no more noise.

    A Gaussian of σ ≥ σ' is a Gaussian of σ' to which independent noise of variance σ² − σ'² was added. This is
    post-processing. So at the same sampling rate an event of σ' costs no less, at any δ and in any Rényi divergence,
    and this also holds for composed events. For a sampling rate with smallest noise s and largest noise S, each σ
    becomes the smallest σ of its cell. Cells are r = (S/s)^(1/`LEVELS`) wide, so ε is at most the one with all noise
    divided by r. r is 1.008 if noise falls to 0.6 of its first value.
    """
    of_rate = defaultdict(set)
    for event in events:
        of_rate[event.sampling_rate].add(event.noise_multiplier)
    if sum(map(len, of_rate.values())) <= MOST_DIFFERENT:
        return events
    level: dict[tuple[float, float], float] = {}
    for rate, noises in of_rate.items():
        least, width = min(noises), math.log(max(noises) / min(noises)) / LEVELS
        smallest: dict[int, float] = {}
        for noise in sorted(noises):  # to the nearest grid point, so that rounding does not decide for noises on one
            cell = round(math.log(noise / least) / width) if width else 0
            level[rate, noise] = smallest.setdefault(cell, noise)
    return [replace(event, noise_multiplier=level[event.sampling_rate, event.noise_multiplier]) for event in events]
