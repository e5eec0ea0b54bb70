"""Three ranks in one process, one after the other: what is each one's own, what is rank 0's, what nobody else holds.

Rank 0 goes first and writes down what it tells; the others are told it when their turn comes. So what an exact total
would do on another rank, or whose coins a third rank continues with, can be looked at without starting any process.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.ranks.ranks import DIMENSION, RECORDS, ready, toy
from torch import Tensor, nn

from equidp.data.membership import identified
from equidp.errors import EquidpError
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.secure import SecureRandom
from equidp.mechanism.trainer import Trainer
from equidp.system.installed import CODE_DIGEST
from equidp.training import Prepared, preparation
from equidp.training.checkpoint import life_of, repeats
from equidp.training.digests import initial_state
from equidp.training.ranks import launch as launching
from equidp.training.ranks import peers as peers_module
from equidp.training.ranks.peers import Peers
from equidp.training.ranks.trainer import ParallelTrainer

RANKS = 3
OPTIONS = {"dpis": {"count_noise_fraction": 0.05, "sum_noise_fraction": 0.05}}
OWN = ("random", "global_random", "sampling", "contributing")


class Played(Peers):
    """One of three ranks; `told` is what rank 0 has said, in its order.

    `instead` gives what rank 2 would tell rank 0 in place of its own value, by that value.
    """

    def __init__(self, rank: int, told: list[Any], instead: Mapping[Any, Any] | None = None) -> None:
        self.rank, self.size, self.device = rank, RANKS, torch.device("cpu")
        self.told, self.heard, self.instead = told, 0, instead or {}

    def _tell(self, value: Any) -> Any:
        if self.first:
            self.told.append(value.clone() if isinstance(value, Tensor) else value)
            return value
        self.heard += 1
        return self.told[self.heard - 1]

    from_first = number_from_first = object_from_first = _tell

    def sum_to_first(self, total: Tensor) -> Tensor:
        return total * self.size if self.first else torch.full_like(total, torch.nan)

    def sum_to_all(self, total: Tensor) -> Tensor:
        raise AssertionError("an exact total would be on every rank")

    def gather(self, value: Any) -> list[Any]:
        return [value, value, self.instead.get(value, value)] if self.first else []


def all_ranks(name: str, **changes: Any) -> list[Prepared]:
    told: list[Any] = []
    options = OPTIONS.get(name)
    return [ready(name, 6, Played(rank, told), options=options, **changes) for rank in range(RANKS)]


def own(trainer: Trainer) -> dict[str, Any]:
    """What a rank does not share with the others."""
    state = Trainer.state_dict(trainer)
    return {name: state[name] for name in OWN}


@pytest.mark.parametrize("name", ["dpis", "psasc_momentum_gd"])
def test_every_rank_continues_with_what_is_its_own(name: str) -> None:
    """Its coins, its records' proposals and means: with another's it would toss their coins, and mix their records."""
    before, states, parts = [], [], []
    told: list[Any] = []
    for rank in range(RANKS):
        # made one after the other: they share a process, hence torch's own generator
        trainer = ready(name, 6, Played(rank, told), options=OPTIONS.get(name)).trainer
        trainer.run_steps(3)
        assert isinstance(trainer, ParallelTrainer)
        assert trainer.engine.flatten().isfinite().all()  # the others' totals are no numbers, and nobody looked
        before.append(own(trainer))
        states.append(Trainer.state_dict(trainer))
        parts.append(trainer._own_parts(states[-1]))
    assert len({str(part) for part in before}) == RANKS
    charged = trainer.ledger
    for trainer, expected in zip([found.trainer for found in all_ranks(name)], before, strict=True):
        trainer.ledger = charged
        trainer.load_state_dict({**states[0], "ranks": parts[1:]})
        torch.testing.assert_close(own(trainer), expected, rtol=0, atol=0)


def test_every_rank_has_a_seed_of_its_own() -> None:
    seeds = [Played(rank, []).seed(5) for rank in range(8)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 8


def test_a_life_is_that_of_all_ranks(tmp_path: Path) -> None:
    """One rank on another machine: what it adds rounds otherwise, and noise is drawn anew, on every rank."""
    renewed, drawn = [], []
    here = life_of(SeededRandom(5, "cpu"))
    for last in (here, here, "elsewhere"):
        told: list[Any] = []
        first = ready("dpsgd", 6, Played(0, told, {here: last}), workplace=tmp_path, resume=True)
        third = ready("dpsgd", 6, Played(2, told), workplace=tmp_path, resume=True)
        assert first.keeper is not None
        first.trainer.run_steps(1)
        first.keeper.close()
        renewed.append(first.keeper.renewed)
        drawn.append((third.trainer.random.uniform(5).tolist(), torch.rand(5).tolist(), third.trainer.random.renewed))
    assert renewed == [0, 0, 3]
    assert drawn[0] == drawn[1]
    assert drawn[2][2]
    for once, again in zip(drawn[1][:2], drawn[2][:2], strict=True):
        assert once != again


def test_a_rank_of_other_code_is_refused(tmp_path: Path) -> None:
    """Another machine's version may bound records otherwise than the ledger says, or round a step done again."""
    told: list[Any] = []
    with pytest.raises(EquidpError, match=r"Rank 2 runs another version of equidp, of .* install the same"):
        ready("dpsgd", 6, Played(0, told, {CODE_DIGEST: "of another version"}), workplace=tmp_path)
    with pytest.raises(EquidpError, match="Rank 2 runs another version"):  # on the other machine, too
        ready("dpsgd", 6, Played(2, told))
    ready("dpsgd", 6, Played(0, []), workplace=tmp_path).keeper.close()  # whose folder was let go


def test_a_rank_with_other_frozen_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine may have another file of them: rank 0 tells the trained ones alone, and compares these alone."""

    def model(weight: float) -> nn.Module:
        frozen = nn.Linear(DIMENSION, DIMENSION, bias=False).requires_grad_(False)
        nn.init.constant_(frozen.weight, weight)
        return nn.Sequential(frozen, nn.Linear(DIMENSION, 2))  # whose weights are random

    monkeypatch.setattr(preparation, "make_model", lambda *asked: model(1.0))
    one, again, other = (initial_state(model(weight), trained=False) for weight in (1.0, 1.0, 2.0))
    with pytest.raises(EquidpError, match=r"Rank 2 has another model than rank 0.*the same files of weights"):
        ready("dpsgd", 6, Played(0, [], {one: other}))
    ready("dpsgd", 6, Played(0, [], {one: again}))


def test_sums_of_several_gpus_are_not_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    alone, together = SeededRandom(5, "cpu"), Played(0, []).random(SeededRandom(5, "cpu"))
    assert repeats(together)
    alone.device = together.device = torch.device("cuda")
    assert repeats(alone)
    assert not repeats(together)


def test_secure_streams_stay_secure_among_ranks() -> None:
    """Taken for repeatable, steps done again after a crash would be charged once and drawn twice."""
    for rank in range(RANKS):
        random = Played(rank, []).random(SecureRandom("cpu"))
        assert not random.repeatable
        assert not repeats(random)
        assert life_of(random) == "secure"


def test_renewed_streams_are_known_to_be() -> None:
    random, other = (Played(0, []).random(SeededRandom(5, "cpu")) for _ in range(2))
    saved = other.state_dict()
    random.renew(2)
    assert random.renewed
    random.load_state_dict(saved)
    assert random.normal(5).tolist() != other.normal(5).tolist()


def test_all_records_are_somebodys_and_nobodys_twice() -> None:
    shards = [found.trainer.population.records.features for found in all_ranks("dpsgd")]
    assert len(torch.cat(shards).unique(dim=0)) == sum(map(len, shards)) == RECORDS


@pytest.mark.parametrize("by_unit", [False, True])
def test_one_record_less_leaves_all_others_on_their_ranks(by_unit: bool) -> None:
    """Another rank may round otherwise, on another machine, and has other random views of them in a secure run."""
    whole = identified(dataclasses.replace(toy().train, unit=torch.arange(RECORDS) // 3))
    assert whole.unit_identity is not None
    spoilt = whole.unit_identity.clone()
    spoilt[::3] += 1  # a source of one's own may say so of some of a unit's records
    for some in (whole, dataclasses.replace(whole, unit_identity=spoilt)):
        shards = []
        less = some.take(torch.arange(3, RECORDS))
        assert less.unit is not None
        for records in (some, dataclasses.replace(less, unit=less.unit - 1)):  # a source numbers the units it finds
            shards.append([Played(rank, []).shard(records, by_unit=by_unit) for rank in range(RANKS)])
        places = [{tuple(x): r for r, part in enumerate(one) for x in part.features.tolist()} for one in shards]
        assert len(places[0]) == RECORDS
        assert len(places[1]) == RECORDS - 3
        assert places[1].items() <= places[0].items()
        assert set(places[0].values()) == set(range(RANKS))
        units = [set(part.unit.tolist()) for part in shards[0]]
        assert not by_unit or sum(map(len, units)) == RECORDS // 3


def test_one_record_less_leaves_all_others_on_their_ranks_where_none_has_a_unit() -> None:
    whole = dataclasses.replace(identified(toy().train), unit=None, unit_identity=None)
    first = [Played(0, []).shard(records, by_unit=False) for records in (whole, whole.take(torch.arange(1, RECORDS)))]
    places = [set(map(tuple, part.features.tolist())) for part in first]
    assert places[1] <= places[0]
    assert len(places[0]) - len(places[1]) <= 1


def test_ranks_stay_at_home_before_they_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(peers_module.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"})
    for name, found in {"get_rank": 0, "get_world_size": 2, "new_group": None}.items():
        monkeypatch.setattr(peers_module.dist, name, lambda found=found, **named: found)
    monkeypatch.setattr(
        peers_module.dist, "init_process_group", lambda *how, **named: seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
    )
    Peers(torch.device("cpu"), tmp_path)
    assert seen == ["lo"]


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_shared_job_folder_is_private_and_goes_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launching.FOLDER, str(tmp_path / "job"))

    def fails() -> None:
        with launching._job_folder() as folder:
            (folder / launching.TRAIN).write_bytes(b"records")
            modes.append(stat.S_IMODE(folder.stat().st_mode))
            raise KeyError

    modes: list[int] = []
    before = os.umask(0o022)
    try:
        with pytest.raises(KeyError):
            fails()
    finally:
        os.umask(before)
    assert modes == [0o700]
    assert list(tmp_path.iterdir()) == []
