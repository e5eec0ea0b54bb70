"""Events, ε and calibration against numbers worked out beforehand and against Opacus's accountants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp

from equidp.accounting import calibration
from equidp.accounting.calibration import calibrate
from equidp.accounting.epsilon import (
    Epsilon,
    epsilon,
    epsilon_path,
    live_epsilon,
    published_epsilon,
    rdp_epsilon,
    renyi_curve,
)
from equidp.accounting.events import Event, fuse, merged
from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError


def run(records: int, batch_size: int, noise: float, epochs: int, delta: float) -> tuple[list[Event], float]:
    """The events of plain DP-SGD."""
    return [Event(batch_size / records, noise, round(epochs * records / batch_size))], delta


TABLE = [
    ((60000, 256, 1.1, 60, 1e-5), 2.5966, 2.3817, 2.3917),
    ((60000, 256, 0.8, 60, 1e-6), 5.5997, 5.1405, 5.1506),
    ((8012, 128, 1.2448, 50, 1e-3), 3.0005, 2.6313, 2.6416),
    ((36177, 256, 1.0, 20, 1e-6), 2.6625, 2.4134, 2.4235),
]


class TestTables:
    """The numbers a correct implementation must reproduce."""

    @pytest.mark.parametrize(("setting", "by_rdp", "by_pld", "by_prv"), TABLE)
    def test_plain_runs(self, setting: Any, by_rdp: float, by_pld: float, by_prv: float) -> None:
        events, delta = run(*setting)
        found = epsilon(events, delta)
        assert found.rdp == pytest.approx(by_rdp, abs=6e-5)
        assert found.pld == pytest.approx(by_pld, abs=6e-5)
        assert found.value == found.pld

    @pytest.mark.slow
    @pytest.mark.parametrize(("setting", "by_prv"), [(row[0], row[3]) for row in TABLE])
    def test_opacus_gives_the_same_within_its_error(self, setting: Any, by_prv: float) -> None:
        events, delta = run(*setting)
        second = PRVAccountant()
        second.history = [(e.noise_multiplier, e.sampling_rate, e.count) for e in events]
        assert second.get_epsilon(delta) == pytest.approx(by_prv, abs=6e-5)
        assert epsilon(events, delta).pld <= second.get_epsilon(delta)  # its default error of 0.01 is on top

    def test_opacus_has_the_same_divergences_at_integer_orders(self) -> None:
        orders = (*range(2, 65), 128, 512)
        for rate, noise in ((0.01, 1.0), (0.2, 0.6), (1.0, 5.0), (1e-4, 3.0)):
            theirs = compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=list(orders))
            assert renyi_curve([Event(rate, noise)], orders) == pytest.approx(list(theirs), rel=1e-7, abs=1e-12)

    def test_opacus_rdp_agrees_too(self) -> None:
        events, delta = run(*TABLE[0][0])
        second = RDPAccountant()
        second.history = [(e.noise_multiplier, e.sampling_rate, e.count) for e in events]
        assert rdp_epsilon(events, delta) == pytest.approx(second.get_epsilon(delta), rel=2e-3)

    @pytest.mark.parametrize(
        ("counts", "by_rdp", "by_pld"),
        [
            (5.0, 6.098, 5.596),
            *(
                pytest.param(*case, marks=pytest.mark.slow)
                for case in ((None, 5.903, 5.422), (8.0, 5.979, 5.489), (20.0, 5.915, 5.432))
            ),
        ],
    )
    def test_counts_and_gradients_of_one_sample_are_one_event(
        self, counts: float | None, by_rdp: float, by_pld: float
    ) -> None:
        noise = 0.8 if counts is None else fuse(0.8, counts)
        found = epsilon([Event(1 / 214, noise, 12840)], 1e-6)
        assert (found.rdp, found.pld) == (pytest.approx(by_rdp, abs=6e-4), pytest.approx(by_pld, abs=6e-4))

    @pytest.mark.parametrize(
        ("records", "noise", "epochs", "printed"),
        [(54649, 0.8, 60, 6.55), (36177, 1.0, 20, 3.1), (48336, 1.0, 20, 2.66)],
    )
    def test_the_papers_own_figures(self, records: int, noise: float, epochs: int, printed: float) -> None:
        plan = Plan(records, 256, epochs, 2, 1e-6, noise)
        published = algorithm_settings("dpsgd_f").build().published_epsilon(plan)
        assert published is not None
        assert published.value == pytest.approx(printed, abs=6e-3)
        assert "classic" in published.formula

    def test_published_costs_nothing_for_nothing(self) -> None:
        assert published_epsilon([], 1e-5, "classic") == 0.0
        assert published_epsilon([Event(0.01, 1e6, 1)], 1e-5, "improved") == pytest.approx(0.0, abs=0.2)


class TestEvents:
    """Events, runs of them, and their order."""

    def test_fuse(self) -> None:
        assert fuse(3.0, 4.0) == pytest.approx(2.4)  # 1/√(1/9 + 1/16)
        assert fuse(0.8, float("inf")) == pytest.approx(0.8)
        assert fuse(2.0) == 2.0

    @pytest.mark.parametrize("noise", [0.0, -1.0, 1e-300, 1e-7])
    def test_a_release_without_noise_is_refused(self, noise: float) -> None:
        with pytest.raises(EquidpError, match="Every release needs noise"):
            fuse(1.0, noise)
        with pytest.raises(EquidpError, match="Every release needs noise"):
            Event(0.1, noise)

    def test_hardly_any_noise_has_an_epsilon_and_takes_no_gigabytes(self) -> None:
        events = [Event(0.1, 1e-3, 20)]  # the grid of its privacy loss would have 5·10⁹ points
        found = epsilon(events, 1e-5)
        assert math.isinf(found.pld or 0.0)
        assert found.value == found.rdp == pytest.approx(1.1e7, rel=1e-3)
        path = epsilon_path([events, events], 1e-5)
        assert path[0].value < path[1].value == pytest.approx(2.2e7, rel=1e-3)

    def test_charging_two_releases_as_two_samples_would_understate(self) -> None:
        joint = rdp_epsilon([Event(0.01, fuse(1.0, 1.0), 1000)], 1e-5)
        apart = rdp_epsilon([Event(0.01, 1.0, 1000), Event(0.01, 1.0, 1000)], 1e-5)
        assert apart < joint

    @pytest.mark.parametrize(
        ("rate", "noise"),
        [(0.0, 1.0), (1.1, 1.0), (float("nan"), 1.0), (0.1, 0.0), (0.1, -1.0), (0.1, float("nan"))],
    )
    def test_refuses_what_is_no_event(self, rate: float, noise: float) -> None:
        with pytest.raises(EquidpError):
            Event(rate, noise)
        if not noise > 0:  # squared, a negative noise would pass for one of the same size
            with pytest.raises(EquidpError, match="needs noise"):
                fuse(1.0, noise)

    def test_refuses_an_event_that_never_happens(self) -> None:
        with pytest.raises(ValueError, match="at least once"):
            Event(0.1, 1.0, 0)

    def test_merged_keeps_order_and_counts(self) -> None:
        a, b = Event(0.1, 1.0), Event(0.1, 2.0)
        assert merged([a, a, b, a]) == (Event(0.1, 1.0, 2), b, a)

    @pytest.mark.parametrize("other", [Event(0.1, 1.0 - 1e-9), Event(0.1 + 1e-9, 1.0)])
    def test_merged_takes_no_event_for_a_like_one(self, other: Event) -> None:
        # where noise falls by next to nothing from step to step, all of them would be charged as the first
        assert merged([Event(0.1, 1.0), other]) == (Event(0.1, 1.0), other)

    def test_json_round_trip(self) -> None:
        for event in (Event(0.1, 1.5, 3), Event(1.0, 2.0)):
            assert Event.from_dict(event.to_dict()) == event
        assert Event(1.0, 2.0).to_dict()["event"] == "gaussian"
        assert Event(0.1, 2.0).to_dict()["event"] == "poisson_gaussian"

    def test_composition_does_not_depend_on_order(self) -> None:
        a, b = Event(0.1, 1.0, 5), Event(0.2, 2.0, 7)
        assert epsilon([a, b], 1e-5) == epsilon([b, a], 1e-5)

    def test_a_plain_gaussian_is_no_sampled_one(self) -> None:
        assert epsilon([Event(1.0, 5.0)], 1e-5).value > epsilon([Event(0.5, 5.0)], 1e-5).value


class TestLedger:
    """The append-only record."""

    def test_appends_and_journals_in_order(self) -> None:
        written: list[Event] = []
        ledger = Ledger([Event(0.1, 1.0, 2)], journal=written.append)
        ledger.append(Event(0.1, 1.0))
        ledger.append(Event(0.1, 3.0))
        assert ledger.events == (Event(0.1, 1.0, 3), Event(0.1, 3.0))
        assert written == [Event(0.1, 1.0), Event(0.1, 3.0)]

    def test_an_event_whose_journal_failed_is_not_in_the_ledger(self) -> None:
        def fail(event: Event) -> None:
            raise OSError

        ledger = Ledger(journal=fail)
        with pytest.raises(OSError):  # noqa: PT011
            ledger.append(Event(0.1, 1.0))
        assert ledger.events == ()


class TestPath:
    """ε over the epochs."""

    def test_grows_and_ends_in_the_reported_figure(self) -> None:
        epochs = [[Event(0.05, 1.0, 20)] for _ in range(4)]
        path = epsilon_path(epochs, 1e-5)
        values = [e.value for e in path]
        assert values == sorted(values)
        assert path[-1].value == pytest.approx(epsilon([Event(0.05, 1.0, 80)], 1e-5).value, rel=5e-3)
        assert all(e.value <= epsilon([Event(0.05, 1.0, 80)], 1e-5).value for e in path)

    def test_nothing_costs_nothing(self) -> None:
        assert epsilon_path([], 1e-5) == []
        assert epsilon_path([[], []], 1e-5) == []


def constant(noise: float) -> Sequence[Event]:
    return [Event(256 / 36177, noise, 2826)]


def rising(noise: float) -> Sequence[Event]:
    return [Event(0.02, noise * f, 100) for f in (0.64, 0.8, 1.0)]


def with_counts(noise: float) -> Sequence[Event]:
    return [Event(0.02, fuse(noise, 30.0), 500)]


class TestCalibration:
    """The smallest noise that meets a target, for any schedule."""

    @pytest.mark.parametrize(
        ("schedule", "target"),
        [
            (constant, 3.0),
            *(pytest.param(*case, marks=pytest.mark.slow) for case in ((rising, 1.0), (with_counts, 3.0))),
        ],
    )
    def test_meets_the_target_from_below_within_one_per_cent(self, schedule: Any, target: float) -> None:
        noise = calibrate(schedule, target, 1e-5)
        assert 0.99 * target < epsilon(schedule(noise), 1e-5).value <= target

    @pytest.mark.slow
    @pytest.mark.parametrize("target", [0.01, 0.05, 0.2])
    def test_meets_a_small_target_as_nearly(self, target: float) -> None:
        """There the coarse grid of the search is off by much, and Rényi divergences drown in rounding."""
        events = [Event(0.02, calibrate(lambda noise: [Event(0.02, noise, 500)], target, 1e-5), 500)]
        assert 0.99 * target < epsilon(events, 1e-5).value <= target

    @pytest.mark.parametrize(("rate", "count"), [pytest.param(0.01, 1000, marks=pytest.mark.slow), (1.0, 10)])
    def test_meets_a_target_below_what_order_512_says_of_no_divergence(self, rate: float, count: int) -> None:
        """The quick figure is at least ln(511/512) − ln(512·δ)/511 = 0.04, whatever the noise."""
        noise = calibrate(lambda noise: [Event(rate, noise, count)], 0.03, 1e-12)
        assert 0.0297 < epsilon([Event(rate, noise, count)], 1e-12).value <= 0.03

    @pytest.mark.slow
    @pytest.mark.parametrize("event", [(0.01, 1000), (0.05, 200)])
    def test_meets_a_target_beyond_the_limit_of_pld(self, event: tuple[float, int]) -> None:
        """PLD is asked up to a Rényi figure only, and there it may still be below so large a target."""
        rate, count = event
        noise = calibrate(lambda noise: [Event(rate, noise, count)], 200, 1e-5)
        assert 100 < epsilon([Event(rate, noise, count)], 1e-5).value <= 200

    @pytest.mark.parametrize("share", [0.5, 1.5])
    def test_a_search_that_found_too_little_or_too_much_noise_is_not_believed(
        self, share: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = share * calibrate(lambda noise: [Event(1.0, noise)], 1.0, 1e-5)
        monkeypatch.setattr(calibration, "_searched", lambda *_, **__: found)
        again = calibrate(lambda noise: [Event(1.0, noise)], 1.0, 1e-5)
        assert again * share / found == pytest.approx(1, rel=0.01)
        assert epsilon([Event(1.0, again)], 1e-5).value <= 1.0

    def test_what_the_fine_discretisation_gives_back_stops_short_of_the_target(self) -> None:
        # the next smaller noise would cost 1.0005 times the target
        target = epsilon([Event(1.0, calibration.TIGHTENING)], 1e-5).pld / 1.0005
        assert calibration.tightened(lambda noise: [Event(1.0, noise)], 1.0, target, 1e-5) == 1.0

    def test_refuses_a_target_that_the_side_release_alone_exceeds(self) -> None:
        # 1,437 records, counts with a fixed noise of 5: ε ≥ 1.2 whatever the gradient noise
        algorithm = algorithm_settings("dpsgd_f", {"count_noise_multiplier": 5.0}).build()

        def events(noise: float) -> Sequence[Event]:
            return algorithm.events(Plan(1437, 128, 60, 10, 1e-5, noise))

        floor = epsilon(events(1e7), 1e-5).value
        with pytest.raises(EquidpError, match="count_noise_multiplier"):
            calibrate(events, 0.9 * floor, 1e-5)

    def test_blames_no_side_release_where_there_is_none(self) -> None:
        with pytest.raises(EquidpError, match=r"even a noise multiplier of 1000 is charged ε = 0\.00"):
            calibrate(lambda noise: [Event(0.01, noise, 1000)], 1e-4, 1e-5)

    def test_blames_no_side_release_that_costs_next_to_nothing(self) -> None:
        def events(noise: float) -> Sequence[Event]:
            return [Event(1.0, 7000.0, 10), Event(0.5, noise, 20_000)]

        with pytest.raises(EquidpError, match="even a noise multiplier of 1000 is charged"):
            calibrate(events, 0.1, 1e-8)

    def test_refuses_a_target_that_needs_no_noise(self) -> None:
        with pytest.raises(EquidpError, match="lower it"):
            calibrate(lambda s: [Event(0.01, s)], 1e9, 1e-5)


def test_a_ledger_shows_its_first_events() -> None:
    assert repr(Ledger()) == "<Ledger of 0 events: none>"
    several = Ledger([Event(0.1, 1.0, 2), *(Event(0.1, noise) for noise in (2.0, 3.0, 4.0))])
    assert repr(several) == "<Ledger of 5 events: 2 at q=0.1, σ=1; 1 at q=0.1, σ=2; 1 at q=0.1, σ=3; …>"


def test_epsilon_is_the_smaller_of_the_two_bounds() -> None:
    assert Epsilon(rdp=2.0, pld=3.0).value == 2.0
    assert Epsilon(rdp=3.0, pld=2.0).value == 2.0


def test_a_renyi_divergence_of_which_rounding_left_nothing_bounds_nothing() -> None:
    assert Epsilon(rdp=0.0, pld=0.01).value == 0.01


def test_no_figure_is_below_zero() -> None:
    event = Event(1e-3, 1000.0)  # at order 512 the conversion subtracts more than there is
    assert live_epsilon([event], 1e-3) == published_epsilon([event], 0.1, "improved") == 0.0


@pytest.mark.slow
def test_orders_that_the_accountant_leaves_out_are_nobodys_news(caplog) -> None:
    event = Event(0.161388, 0.93, 23)  # of no other test, as figures are remembered
    assert rdp_epsilon([event], 1e-4) < 10
    calibrate(lambda noise: [Event(0.161388, noise, 23)], 2.0, 1e-4)
    assert not [record for record in caplog.records if not record.name.startswith("equidp.")]  # ours: a slow machine
