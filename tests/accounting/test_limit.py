"""A limit that holds whatever decides on a data set's runs."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from tests.accounting.test_dataset_ledger import DELTA, entry

from equidp.accounting.budget import total_for
from equidp.accounting.dataset_ledger import DatasetLedger, Spent, spent, total_epsilon
from equidp.accounting.epsilon import epsilon_of
from equidp.accounting.events import Event
from equidp.accounting.limit import Limit
from equidp.errors import EquidpError
from equidp.parameters import resolve
from equidp.pipelines.reporting.nodes import draw_ledger

LIMIT = {"limit": 3.0, "adaptive": True}


def charged(ledger: DatasetLedger, number: int, **given: Any) -> None:
    ledger.charge([entry(run=str(number))], **({"delta": DELTA} | LIMIT | given))


def test_releases_chosen_by_earlier_ones_stay_within_the_divergence_of_one_order() -> None:
    """All transcripts of randomised responses, each at one of two ε: the last answer decides, until no room is left."""
    alpha, room, choices = 3.0, 0.5, (0.25, 0.6)

    def probability(epsilon: float, truth: int, told: int) -> float:
        return (math.exp(epsilon) if truth == told else 1.0) / (1 + math.exp(epsilon))

    def divergence(epsilon: float) -> float:
        ratios = [(probability(epsilon, 0, told), probability(epsilon, 1, told)) for told in (0, 1)]
        return math.log(sum(p**alpha * q ** (1 - alpha) for p, q in ratios)) / (alpha - 1)

    def moment(p: float, q: float, last: int, spent: float) -> float:
        epsilon = choices[last]
        if spent + divergence(epsilon) > room:
            return p**alpha * q ** (1 - alpha)
        return sum(
            moment(
                p * probability(epsilon, 0, told), q * probability(epsilon, 1, told), told, spent + divergence(epsilon)
            )
            for told in (0, 1)
        )

    reached = math.log(moment(1.0, 1.0, 0, 0.0)) / (alpha - 1)
    assert 0.5 * room < reached <= room + 1e-12


def test_the_first_run_fixes_the_order_with_room_for_most_runs_like_it(tmp_path: Path) -> None:
    # Gaussian noise of 4 costs α/32 at order α: of all orders none leaves room for more such runs
    room = {order: total_for(3.0, order, DELTA) / (order / 32) for order in (1.5, 2.0, 4.0, 7.0, 8.0, 9.0, 12.0, 32.0)}
    ledger, taken = DatasetLedger(tmp_path, "adult"), int(max(room.values()))
    for number in range(taken):
        charged(ledger, number)
    with pytest.raises(EquidpError, match=r"privacy\.total_epsilon=3: .* dpsgd was not trained"):
        charged(ledger, taken)
    entries = ledger.entries()
    (limit,) = {one.limit for one in entries}
    assert (limit.epsilon, limit.delta) == (3.0, DELTA)
    assert total_epsilon(entries, DELTA) == pytest.approx(epsilon_of(taken * limit.order / 32, limit.order, DELTA))
    found = spent(entries, DELTA, "record")
    assert found == Spent(taken, 0, 0, total_epsilon(entries, DELTA), DELTA, limit)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "plain", "guaranteed"), [(3.0, 7, 6), (8.0, 40, 35)])
def test_what_the_guarantee_costs_in_runs(tmp_path: Path, limit: float, plain: int, guaranteed: int) -> None:
    one = (Event(0.01, 1.84, 2000),)  # ε = 1
    for folder, runs, adaptive in (("plain", plain, False), ("guaranteed", guaranteed, True)):
        ledger = DatasetLedger(tmp_path / folder, "adult")
        asked: dict[str, Any] = {"delta": DELTA, "limit": limit, "adaptive": adaptive}
        ledger.charge([entry(run="0", events=one)], **asked)
        ledger.add([entry(run=str(number), events=one) for number in range(1, runs - 1)])
        ledger.charge([entry(run="last", events=one)], **asked)
        with pytest.raises(EquidpError, match="was not trained"):
            ledger.charge([entry(run="beyond", events=one)], **asked)


def test_the_order_is_the_first_runs_although_another_suits_a_later_one_better(tmp_path: Path) -> None:
    ledger = DatasetLedger(tmp_path, "adult")
    ledger.charge([entry(run="small", events=(Event(0.001, 0.7, 50),))], delta=DELTA, **LIMIT)
    first = ledger.entries()[0].limit
    charged(ledger, 1)
    assert {one.limit for one in ledger.entries()} == {first}
    assert first.order < Limit.fixed(3.0, DELTA, {order: order / 32 for order in (2.0, 7.0, 8.0, 9.0)}).order


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"adaptive": False},
            r"keep a limit of ε = 3 at δ = 1e-05, .*: set privacy\.total_adaptive=true and privacy\.",
        ),
        ({"limit": None, "adaptive": False}, r"set privacy\.total_adaptive=true and privacy\.total_epsilon=3\."),
        ({"limit": 8.0}, r"set privacy\.total_adaptive=true and privacy\.total_epsilon=3\."),
    ],
)
def test_a_later_run_keeps_the_limit_of_the_first(tmp_path: Path, given: dict[str, Any], told: str) -> None:
    ledger = DatasetLedger(tmp_path, "adult")
    charged(ledger, 0)
    with pytest.raises(EquidpError, match=told):
        charged(ledger, 1, **given)
    assert len(ledger.entries()) == 1
    ledger.charge([entry(run="research", secure=False)], delta=DELTA)  # which does not count
    charged(ledger, 1, delta=1e-3)
    assert [one.limit and one.limit.delta for one in ledger.entries()] == [DELTA, None, DELTA]


def test_a_run_whose_own_delta_is_larger_is_judged_at_that_of_the_limit(tmp_path: Path) -> None:
    ledger = DatasetLedger(tmp_path, "adult")
    charged(ledger, 0)
    large = entry(run="1", events=(Event(1.0, 1.5),))
    assert min(epsilon_of(order * (1 / 32 + 1 / 4.5), order, 1e-2) for order in (2.0, 4.0, 6.0)) < 3.0
    with pytest.raises(EquidpError, match=r"at δ = 1e-05, and with this run it would be"):
        ledger.charge([large], delta=1e-2, **LIMIT)


def test_a_limit_is_fixed_before_the_first_secure_run_or_never(tmp_path: Path) -> None:
    ledger = DatasetLedger(tmp_path, "adult")
    ledger.charge([entry(run="0")], delta=DELTA)
    with pytest.raises(EquidpError, match=r"fixes a limit before a data set's first secure run, and .* without it"):
        charged(ledger, 1)
    assert "limit" not in json.loads(ledger.path.read_text())  # so that older versions can read it


def test_two_data_sets_with_and_without_a_limit_that_turn_out_to_be_one_get_no_more_runs(tmp_path: Path) -> None:
    charged(DatasetLedger(tmp_path, "adult"), 0)
    DatasetLedger(tmp_path, "copy").charge([entry(run="1")], delta=DELTA)
    for given in (LIMIT, {"limit": 3.0}):
        with pytest.raises(EquidpError, match=r"privacy\.total_adaptive"):
            DatasetLedger(tmp_path, "adult", "copy").charge([entry(run="2")], delta=DELTA, **given)


@pytest.mark.parametrize("given", [{}, {"delta": 1e-6}, {"limit": 8.0}])
def test_two_limits_hold_for_no_data_sets_that_turn_out_to_be_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any]
) -> None:
    """Each kept its own. If they were equal, they were told as one guarantee, whatever both had spent together."""
    for number in range(5):
        charged(DatasetLedger(tmp_path, "digits"), number)
        charged(DatasetLedger(tmp_path, "copy"), 10 + number, **given)
    told(tmp_path, caplog, within=True)
    ledger = DatasetLedger(tmp_path, "digits", "copy")
    ledger.charge([entry(run="shows", secure=False)], delta=DELTA)  # a research run shows that they are one
    told(tmp_path, caplog, within=False)
    with pytest.raises(EquidpError, match=r"begun apart, .* no more secure runs"):
        ledger.charge([entry(run="little", events=(Event(1.0, 500.0),))], delta=DELTA, **LIMIT)


def test_a_limit_is_no_guarantee_once_lost_entries_are_beyond_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = DatasetLedger(tmp_path, "digits")
    for number in range(6):
        charged(ledger, number)
    told(tmp_path, caplog, within=True)
    ledger.add([entry(run=f"lost{number}") for number in range(6)])
    told(tmp_path, caplog, within=False)


def told(folder: Path, caplog: pytest.LogCaptureFixture, *, within: bool) -> None:
    """Compare whether a release and the log tell the limit as a guarantee."""
    found = spent(DatasetLedger(folder, "digits").entries(), DELTA, "record")
    assert found is not None
    assert (found.limit is not None) is within
    caplog.clear()
    with caplog.at_level(logging.INFO):
        draw_ledger(folder, resolve({"dataset": "digits", "privacy": {"epsilon": 1.0}}))
    assert ("No run is begun" in caplog.text) is within
    assert ("none covers decisions by exact figures, baselines or audits" in caplog.text) is within


def test_a_limit_is_no_guarantee_where_runs_of_another_unit_may_decide_on_its_runs(tmp_path: Path) -> None:
    charged(DatasetLedger(tmp_path, "digits"), 0)
    copy = DatasetLedger(tmp_path, "copy")
    copy.charge([entry(run="1", unit="person")], delta=DELTA)
    DatasetLedger(tmp_path, "digits", "copy").charge([entry(run="shows", secure=False)], delta=DELTA)
    found = spent(copy.entries(), DELTA, "record")
    assert found is not None
    assert (found.secure, found.others, found.limit) == (1, 1, None)


def test_an_order_that_the_accountant_has_no_longer_is_bounded_by_the_next() -> None:
    limit = Limit(7.0, 3.0, DELTA)
    assert limit.spent({2.0: 0.1, 8.0: 0.3, 16.0: 0.9}, DELTA) == epsilon_of(0.3, 7.0, DELTA)
    assert limit.spent({2.0: 0.1}, DELTA) == math.inf


def test_a_guarantee_needs_a_limit() -> None:
    with pytest.raises(EquidpError, match=r"privacy\.total_adaptive=true is of a limit.*set privacy\.total_epsilon"):
        resolve({"dataset": "digits", "privacy": {"epsilon": 1.0, "total_adaptive": True}})


@pytest.mark.parametrize("limit", [math.inf, math.nan, 0.0, -1.0])
def test_a_limit_that_bounds_nothing_is_refused(limit: float) -> None:
    with pytest.raises(EquidpError, match=r"privacy\.total_epsilon=.*: Input should be"):
        resolve({"dataset": "digits", "privacy": {"epsilon": 1.0, "total_epsilon": limit}})
