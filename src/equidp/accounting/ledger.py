"""The ledger: which privacy events happened, and the ε that follows from them.

Every released value of a run is an `Event`: a Gaussian of some effective noise multiplier on a Poisson sample of some
rate (rate 1: a plain Gaussian on all records). Two releases computed from the *same* sample are one event with the
fused multiplier of `fuse`; charging them as two independently sampled events would understate ε, because the second
release would be credited with a sampling coin that was never tossed.

Arithmetic on privacy loss is dp_accounting's, at integer orders Opacus's (live figures, papers' figures, budgets). This
module only builds events, picks the smaller of dp_accounting's two sound bounds (RDP, PLD), and searches for the noise
that meets a target.

Adjacency throughout: add or remove one record (unit), everything in the `Plan` public.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Literal

import dp_accounting as dp
from dp_accounting import pld, rdp

from equidp.errors import EquidpError
from equidp.system.logs import held_back

SEARCH_INTERVAL = 1e-3
"""PLD discretisation while searching and for per-epoch curves: fast, ε at most about 0.5 % larger."""

REPORT_INTERVAL = 1e-4
"""PLD discretisation of every reported ε. Both are pessimistic: the bound holds at any interval."""

TIGHTENING, TIGHTENINGS = 0.998, 6
"""Steps in which a noise multiplier found by the coarse discretisation is lowered by the fine one."""

LARGE_NOISE = 1e3
"""Stands for "infinite gradient noise" when asking what the side releases cost on their own: far larger values push
Rényi divergences below the rounding error, where no accountant can be trusted."""

SMALLEST_NOISE = 1e-6
"""Less noise is none: every ε is beyond 10¹¹, and accountants divide by zero."""

PLD_LIMIT = 2e3
"""ε by RDP above which PLD is not asked: its grid would take gigabytes to refine a figure that promises nothing."""

PUBLISHED_ORDERS = range(2, 65)
"""The integer Rényi orders the papers minimise over."""

LIVE_ORDERS = (*PUBLISHED_ORDERS, 80, 128, 256, 512)
"""Integer Rényi orders of the live figure."""

Conversion = Literal["classic", "improved"]


@dataclass(frozen=True)
class Event:
    """`count` releases of a Gaussian mechanism on fresh Poisson samples.

    Attributes:
        sampling_rate: inclusion probability q of each record, in (0, 1]; 1 means no sampling.
        noise_multiplier: standard deviation of the noise over the L2 sensitivity of what it covers, > 0.
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
        """`poisson_gaussian`, or `gaussian` where nothing is sampled."""
        return "gaussian" if self.sampling_rate == 1 else "poisson_gaussian"

    def to_dict(self) -> dict:
        """As written to privacy.json."""
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
        """The same event in dp_accounting's terms."""
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
    """
    for noise_multiplier in noise_multipliers:
        _refuse_no_noise(noise_multiplier)
    return sum(s**-2 for s in noise_multipliers) ** -0.5


def merged(events: Iterable[Event]) -> tuple[Event, ...]:
    """Run-length form: consecutive equal events become one with the summed count. Order is kept."""
    runs: list[Event] = []
    for event in events:
        last = runs[-1] if runs else None
        if last and (last.sampling_rate, last.noise_multiplier) == (event.sampling_rate, event.noise_multiplier):
            runs[-1] = Event(last.sampling_rate, last.noise_multiplier, last.count + event.count)
        else:
            runs.append(event)
    return tuple(runs)


def counted(events: Iterable[Event]) -> Counter[tuple[float, float]]:
    """How often each (sampling rate, noise multiplier) occurs, in whatever order."""
    counts: Counter[tuple[float, float]] = Counter()
    for event in events:
        counts[event.sampling_rate, event.noise_multiplier] += event.count
    return counts


class Ledger:
    """Append-only record of the events of one run.

    The trainer appends a step's event *before* the step's result becomes visible to anything else, so that whatever
    was seen has been charged, whenever the run stops.

    Args:
        events: events already spent, when a run resumes.
        journal: called with every event before it enters the ledger; a durable journal survives a crash.
    """

    def __init__(self, events: Iterable[Event] = (), *, journal: Callable[[Event], None] | None = None) -> None:
        self._events = list(merged(events))
        self._journal = journal

    def append(self, event: Event) -> None:
        """Charge an event."""
        if self._journal is not None:
            self._journal(event)
        self._events[-1:] = merged((*self._events[-1:], event))

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything charged so far, in order, run-length encoded."""
        return tuple(self._events)

    @property
    def done(self) -> tuple[Event, ...]:
        """What was charged for steps that will not be repeated; a durable ledger may hold charges ahead of these."""
        return tuple(self._events)


@dataclass(frozen=True)
class Epsilon:
    """ε of a list of events at one δ: both sound bounds, and the smaller of them.

    `pld` is None where only Rényi divergence bounds the run (the noise was chosen within a Rényi budget).
    """

    rdp: float
    pld: float | None

    @property
    def value(self) -> float:
        """The ε we stand by. Both bounds hold for events fixed before training, hence so does the smaller."""
        if self.pld is None:
            return self.rdp
        # dp_accounting answers 0 where rounding has made a Rényi divergence negative; PLD decides there
        return min(self.rdp, self.pld) if self.rdp > 0 else self.pld


def epsilon(events: Sequence[Event], delta: float, *, interval: float = REPORT_INTERVAL) -> Epsilon:
    """ε of events that were fixed before training, by RDP (improved conversion) and by PLD."""
    runs = _canonical(events)
    return Epsilon(rdp_epsilon(runs, delta), _pld_epsilon(runs, delta, interval))


def rdp_epsilon(events: Sequence[Event], delta: float) -> float:
    """ε by dp_accounting's RDP accountant. Milliseconds; used for live figures and for brackets."""
    return _rdp_epsilon(_canonical(events), delta)


def published_epsilon(
    events: Sequence[Event], delta: float, conversion: Conversion, orders: Sequence[int] = PUBLISHED_ORDERS
) -> float:
    """ε by a paper's own conversion of RDP at integer orders.

    `classic`: ε = τ + ln(1/δ)/(α−1) (Mironov 2017, Prop. 3). `improved`: ε = τ + ln((α−1)/α) − (ln δ + ln α)/(α−1)
    (Balle et al. 2020, Thm. 21). Only for the figure shown beside ours; never what we stand by.
    """
    if not events:
        return 0.0
    totals = zip(renyi_curve(events, orders), orders, strict=True)
    if conversion == "classic":
        figures = [total + math.log(1 / delta) / (order - 1) for total, order in totals]
    else:
        figures = [epsilon_of(total, order, delta) for total, order in totals]
    return max(0.0, min(figures))


def renyi_curve(events: Sequence[Event], orders: Sequence[int]) -> list[float]:
    """Rényi divergence of all events together at each of some integer orders, by Opacus's analysis."""
    totals = [0.0] * len(orders)
    for event in merged(events):
        curve = _rdp_curve(event.sampling_rate, event.noise_multiplier, tuple(orders))
        totals = [total + event.count * one for total, one in zip(totals, curve, strict=True)]
    return totals


def epsilon_of(total: float, order: int, delta: float) -> float:
    """ε = R + ln((α−1)/α) − (ln δ + ln α)/(α−1) (Balle et al. 2020, Theorem 21; Canonne et al. 2020)."""
    return total + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1)


def live_epsilon(events: Sequence[Event], delta: float) -> float:
    """A sound ε in microseconds, for progress bars: RDP at integer orders, improved conversion."""
    return published_epsilon(events, delta, "improved", LIVE_ORDERS)


def epsilon_path(epochs: Sequence[Sequence[Event]], delta: float) -> list[Epsilon]:
    """ε after each epoch, composed incrementally.

    PLD uses the coarse interval here, RDP integer orders. The ε of a prefix never exceeds the ε of the whole, so the
    curve is capped by the figure reported for the whole run, and ends in it.
    """
    return list(_epsilon_path(tuple(map(tuple, epochs)), delta)) if any(epochs) else []


@lru_cache(maxsize=16)
def _epsilon_path(epochs: tuple[tuple[Event, ...], ...], delta: float) -> tuple[Epsilon, ...]:
    """Algorithms that are compared often have the same events: a second or so for each curve."""
    whole = epsilon([event for events in epochs for event in events], delta)
    if math.isinf(whole.pld or 0.0):  # beyond PLD_LIMIT, or δ below its grid
        spent_by = [[event for events in epochs[: n + 1] for event in events] for n in range(len(epochs))]
        return tuple(Epsilon(min(live_epsilon(spent, delta), whole.rdp), whole.value) for spent in spent_by)
    spent: list[Event] = []
    loss = pld.privacy_loss_distribution.identity(SEARCH_INTERVAL)
    path = []
    for events in epochs:
        spent += events
        for event in merged(events):
            loss = loss.compose(_pld(event))
        by_pld = min(float(loss.get_epsilon_for_delta(delta)), whole.value)
        path.append(Epsilon(min(live_epsilon(spent, delta), whole.rdp), by_pld))
    return tuple(path)


def calibrate(events_for: Callable[[float], Sequence[Event]], target: float, delta: float) -> float:
    """The smallest noise multiplier whose whole schedule of events costs at most ε = `target` at `delta`.

    Args:
        events_for: the run's events as a function of the one scalar that is solved for; ε must fall as it grows.
        target: ε > 0.
        delta: δ in (0, 1).

    Raises:
        EquidpError: where the target cannot be met even with infinite gradient noise, naming what it costs.
    """
    if (floor := _floor(events_for(LARGE_NOISE), target, delta)) > target:
        pairs = zip(events_for(LARGE_NOISE), events_for(3 * LARGE_NOISE), strict=True)
        if all(more.noise_multiplier > 2 * less.noise_multiplier for less, more in pairs):  # all fall with it
            raise EquidpError(
                f"privacy.epsilon={target:g} cannot be reached: even a noise multiplier of {LARGE_NOISE:g} is charged "
                f"ε = {floor:.3g} at δ = {delta:g}. Raise privacy.epsilon, or train fewer steps."
            )
        raise EquidpError(
            f"privacy.epsilon={target:g} cannot be reached: the side releases of this algorithm cost ε = {floor:.3g} "
            f"at δ = {delta:g} on their own. Raise their noise (count_noise_multiplier, best as a ratio, '10x'), "
            f"raise privacy.epsilon, or train fewer steps."
        )

    def solve(make: Callable[[], dp.PrivacyAccountant], bracket: tuple[float, float], tol: float) -> float:
        with _orders_left_out_in_silence():
            return dp.calibrate_dp_mechanism(
                make,
                lambda noise: dp.ComposedDpEvent([e.as_dp_event() for e in _canonical(events_for(noise))]),
                target,
                delta,
                dp.ExplicitBracketInterval(*bracket),
                tol=tol,
            )

    def finely(noise: float) -> float:
        return epsilon(events_for(noise), delta).value

    low, high = _bracket(lambda noise: live_epsilon(events_for(noise), delta), target)
    if _pld_bound(events_for(high), delta) > target:  # RDP is the tighter of the two here, or PLD's grid too coarse
        try:
            found = solve(rdp.RdpAccountant, (low, 2 * high), tol=high * 1e-5)
        except ValueError:  # so small an ε that rounding leaves nothing of a Rényi divergence
            return smallest_noise(finely, target)
    else:
        met = high
        while _pld_bound(events_for(0.9 * met), delta) <= target:
            met *= 0.9
        coarse = None
        with suppress(ValueError):  # PLD is still below the target where it comes to its limit: nothing brackets it
            coarse = solve(
                lambda: pld.PLDAccountant(value_discretization_interval=SEARCH_INTERVAL),
                (0.9 * met, high),
                tol=high * 5e-4,
            )
        if coarse is None or math.isinf(_pld_bound(events_for(coarse), delta)):
            return min(met, smallest_noise(lambda noise: _rdp_epsilon(_canonical(events_for(noise)), delta), target))
        found = _tightened(events_for, coarse, target, delta)
        if found > coarse * TIGHTENING ** (TIGHTENINGS - 0.5):  # it came to the target
            return found
    return found if finely(found) >= 0.99 * target else smallest_noise(finely, target)


def _floor(events: Sequence[Event], target: float, delta: float) -> float:
    """ε of these events, or a bound on it that is below the target already."""
    cheap = live_epsilon(events, delta)
    return cheap if cheap <= target else epsilon(events, delta, interval=SEARCH_INTERVAL).value


def _pld_bound(events: Sequence[Event], delta: float) -> float:
    return _pld_epsilon(_canonical(events), delta, SEARCH_INTERVAL)


def _tightened(events_for: Callable[[float], Sequence[Event]], coarse: float, target: float, delta: float) -> float:
    """Use up what the coarse discretisation left over: a few evaluations at the reporting interval."""
    best = coarse
    for _ in range(TIGHTENINGS):
        candidate = best * TIGHTENING
        if _pld_epsilon(_canonical(events_for(candidate)), delta, REPORT_INTERVAL) > target:
            break
        best = candidate
    return best


def smallest_noise(cost: Callable[[float], float], target: float) -> float:
    """The smallest noise multiplier with `cost` at most `target`, to a relative 1e-5. `cost` falls as noise grows.

    Raises:
        EquidpError: where no noise meets the target, or none is needed.
    """
    return _bracket(cost, target, 1e-5)[1]


def _bracket(cost: Callable[[float], float], target: float, precision: float = 1e-3) -> tuple[float, float]:
    """Noise multipliers on either side of the target, so close to each other. `cost` falls as noise grows."""
    high = 1.0
    while cost(high) > target:
        high *= 2
        if high > 1e6:
            raise EquidpError(f"privacy.epsilon={target:g} cannot be reached with any noise for this schedule.")
    low = high / 2
    while cost(low) <= target:
        high, low = low, low / 2
        if low < 1e-3:
            raise EquidpError(f"privacy.epsilon={target:g} is so large that no noise would be needed; lower it.")
    while high > low * (1 + precision):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= target else (middle, high)
    return low, high


def _canonical(events: Sequence[Event]) -> tuple[Event, ...]:
    """Composition is order-free: equal events anywhere are counted together, which also makes caching effective."""
    return merged(sorted(merged(events), key=lambda e: (e.sampling_rate, e.noise_multiplier)))


def _orders_left_out_in_silence() -> AbstractContextManager[None]:
    """dp_accounting warns of every Rényi order that it leaves out, which only loosens ε."""
    return held_back("absl", below=logging.ERROR)


@lru_cache(maxsize=4096)
def _rdp_epsilon(events: tuple[Event, ...], delta: float) -> float:
    accountant = rdp.RdpAccountant()
    with _orders_left_out_in_silence():
        for event in events:
            accountant.compose(event.as_dp_event())
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=4096)
def _pld_epsilon(events: tuple[Event, ...], delta: float, interval: float) -> float:
    if live_epsilon(events, delta) > PLD_LIMIT:
        return math.inf
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    for event in events:
        accountant.compose(event.as_dp_event())
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=256)
def _pld(event: Event) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
    """Privacy loss distribution of an event under add-or-remove, at the coarse interval."""
    once = pld.privacy_loss_distribution.from_gaussian_mechanism(
        event.noise_multiplier, sampling_prob=event.sampling_rate, value_discretization_interval=SEARCH_INTERVAL
    )
    return once.self_compose(event.count)


@lru_cache(maxsize=1024)
def _rdp_curve(sampling_rate: float, noise_multiplier: float, orders: tuple[int, ...]) -> tuple[float, ...]:
    """RDP of one event at integer orders."""
    curve = _opacus_analysis().compute_rdp(
        q=sampling_rate, noise_multiplier=noise_multiplier, steps=1, orders=list(orders)
    )
    return tuple(map(float, curve))


@cache
def _opacus_analysis() -> ModuleType:
    """Opacus's Rényi analysis, without the rest of Opacus: that imports half of torch and costs a second.

    Raises:
        EquidpError: if Opacus is not installed, or has moved the file.
    """
    package = importlib.util.find_spec("opacus")
    name = "equidp.engine._opacus_rdp"
    file = Path(package.origin).parent / "accountants" / "analysis" / "rdp.py" if package and package.origin else None
    if file is None or not file.is_file():
        raise EquidpError("Opacus's accountants/analysis/rdp.py is missing; install the versions in constraints.txt.")
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
