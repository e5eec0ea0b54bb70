"""Two ranks and one process: the same mechanism, for every algorithm."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scipy import stats
from tests.thorough import FEW, first
from tests.training.ranks import ranks
from tests.training.ranks.ranks import DIMENSION, RECORDS, algorithms_here, ready, toy
from tests.tried import tried_once
from torch import nn

from equidp.accounting.events import Event
from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError
from equidp.gradients.losses import CrossEntropy
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.sampling import Population
from equidp.training.ranks.trainer import ParallelTrainer


@pytest.fixture(scope="module", autouse=True)
def tried() -> Iterator[None]:
    """All train one model, here as on the ranks."""
    with tried_once():
        yield


def alone(name: str, batch_size: int, **changes: Any) -> tuple[list[float], tuple, list[dict[str, float]]]:
    """The same training on one process."""
    prepared = ready(name, batch_size, None, **changes)
    rows = prepared.run(None, progress=False)
    return ranks.fingerprint(prepared), prepared.trainer.outcome().events, rows


def test_units_are_divided_among_the_ranks(found):
    assert [part["sampled"]["dpsgd"]["units"] for part in found] == [RECORDS // 2, RECORDS // 2]
    assert [part["units"]["units"] for part in found] == [RECORDS // 4, RECORDS // 4]


@pytest.mark.parametrize("name", first(algorithms_here(), FEW))
def test_weights_are_equal_across_ranks(found, name):
    first, second = (part["sampled"][name] for part in found)

    assert first["weights"] == second["weights"]
    assert first["ledger"] == second["ledger"]
    assert any(first["weights"])


@pytest.mark.parametrize("name", first(algorithms_here(), FEW))
def test_the_ledger_is_that_of_one_process_so_epsilon_is_too(found, name):
    prepared = ready(name, 8, None)
    trainer = prepared.trainer
    events = [Event.from_dict(entry) for entry in found[0]["sampled"][name]["ledger"]]

    assert trainer.algorithm.covers(trainer.plan, events)
    if name != "dpis":  # whose noise follows from noised values, hence from the draws
        prepared.run(None, progress=False)
        assert events == list(trainer.outcome().events)


@pytest.mark.parametrize("name", first([n for n in algorithms_here() if n not in ("dpis", "asc")], FEW))
def test_with_everybody_in_the_batch_two_ranks_train_what_one_does(found, name):
    """No coin decides at q = 1 (fixed rates), and noise and decisions are rank 0's, whose seed is the run's."""
    weights, _, _ = alone(name, RECORDS, epochs=4)

    assert found[0]["everybody"][name]["weights"] == pytest.approx(weights, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "name", "batch_size", "changes"),
    [
        ("units", "dpsgd", RECORDS // 2, {"privacy": {"unit": "unit"}}),
        ("chunks", "dpsgd_f", RECORDS, {}),
        ("private_energy", "sa_dpsgd", RECORDS, {"options": {"energy": "private", "energy_records": RECORDS}}),
    ],
)
def test_units_chunks_and_a_private_energy_too(found, kind, name, batch_size, changes):
    weights, events, _ = alone(name, batch_size, epochs=4, **changes)

    assert found[0][kind]["weights"] == found[1][kind]["weights"]
    assert found[0][kind]["weights"] == pytest.approx(weights, rel=1e-4, abs=1e-5)
    assert found[0][kind]["ledger"] == [event.to_dict() for event in events]


def test_secure_noise_and_decisions_are_shared(found):
    assert found[0]["secure"]["weights"] == found[1]["secure"]["weights"]


def test_diagnostics_count_all_ranks(found):
    _, _, rows = alone("dpsgd", RECORDS, training={"diagnostics": True}, epochs=4)

    for rank in found:
        told = rank["diagnostics"]["rows"]
        for row, other in zip(told, rows, strict=True):
            assert row["nonprivate/batch_size"] == RECORDS
            assert {k: v for k, v in row.items() if k.startswith("nonprivate/")} == pytest.approx(
                {k: v for k, v in other.items() if k.startswith("nonprivate/")}, rel=1e-3, abs=1e-4
            )


def test_an_empty_batch_holds_nobody_up(found):
    sizes = [part["empty"]["sizes"] for part in found]

    steps = len(sizes[0])
    assert steps == len(sizes[1]) == 3 * RECORDS
    # one rank's batch empty while the other's is not, both ways, and both empty
    assert {(a > 0, b > 0) for a, b in zip(*sizes, strict=True)} >= {(False, True), (True, False), (False, False)}
    # each rank's size is Binomial(24, 1/48): the sum over 144 steps and both ranks is Binomial(6912, 1/48), mean 144
    assert abs(sum(map(sum, sizes)) - 144) < 5 * (144 * 47 / 48) ** 0.5
    assert sizes[0] != sizes[1]
    assert found[0]["empty"]["weights"] == found[1]["empty"]["weights"]


def least_p_value(first: list[list[float]], second: list[list[float]]) -> float:
    """Of tests of location, spread and shape, along each coordinate and four random directions."""
    samples = [torch.tensor(sample, dtype=torch.float64) for sample in (first, second)]
    directions = torch.randn(samples[0].shape[1], 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = (torch.cat([sample, sample @ directions], dim=1).T.numpy() for sample in samples)
    tests = (lambda a, b: stats.ttest_ind(a, b, equal_var=False), stats.levene, stats.ks_2samp)
    return min(test(a, b).pvalue for a, b in zip(ours, theirs, strict=True) for test in tests)


def test_updates_of_two_ranks_have_the_distribution_of_one_process(found):
    own = ranks.updates(ranks.UPDATES, None)
    # some 50 tests: an honest pair stays above 1e-4 but once in two hundred draws, and this draw is fixed
    assert found[0]["updates"] == found[1]["updates"]
    assert least_p_value(own, found[0]["updates"]) > 1e-4
    # ranks that toss the same coins would be noticed
    assert least_p_value(own, found[0]["same_coins"]) < 1e-6


def test_noise_is_added_once(found):
    """N(0, (2·0.5)²) on the total of both ranks; twice would have a standard deviation of √2."""
    first, second = found[0]["noise"], found[1]["noise"]

    assert first == second
    assert stats.kstest(first, "norm").pvalue > 1e-3
    assert torch.tensor(first).std().item() == pytest.approx(1.0, abs=0.06)


def test_a_model_that_draws_draws_otherwise_on_every_rank(found):
    """Were masks alike, one more record on a rank would change which of the others share theirs."""
    first, second = (rank["dropout"] for rank in found)
    ready("dpsgd", 8, None)

    assert first == torch.rand(4).tolist()
    assert second != first


def test_no_rank_is_left_behind(found):
    assert multiprocessing.active_children() == []
    assert [part["size"] for part in found] == [2, 2]


class Apart:
    """Rank 0 of two, of which the other has gone its own way."""

    first, size, rank = True, 2, 0

    def gather(self, own):
        return [own, "other weights" if isinstance(own, str) else own]

    def number_from_first(self, number):
        return number

    def sum_to_first(self, total):
        return total


def test_ranks_whose_weights_have_parted_are_stopped_after_the_epoch():
    train, plan = toy().train, Plan(RECORDS, 8, 2, 2, 1e-2, 1.0)
    trainer = ParallelTrainer(
        peers=Apart(), model=nn.Linear(DIMENSION, 2), loss=CrossEntropy(), plan=plan,
        algorithm=algorithm_settings("dpsgd").build(), population=Population(train, train.groups["class"]),
        random=SeededRandom(0, "cpu"), ledger=Ledger(), learning_rate=0.1,
    )  # fmt: skip
    with pytest.raises(EquidpError, match="The weights of 2 ranks differ after step 6"):
        trainer.train(progress=False)
