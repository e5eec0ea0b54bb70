"""Which GPU a rank opens, or how many threads it takes, and what it sends; tried without a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models.conftest import SCHEMAS, batch
from tests.models.test_models import cross_entropy
from tests.pretended import OnGpu, pretended_gpu

from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine
from equidp.gradients.shares import threads
from equidp.models import build_model
from equidp.parameters import TrainingSettings
from equidp.training.preparation import device_of
from equidp.training.ranks import worker
from equidp.training.ranks.peers import Peers


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_a_rank_takes_its_own_gpu_before_anything_opens_another(name: str, monkeypatch) -> None:
    done: list[Any] = []
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: done.append(number))
    monkeypatch.setattr(worker, "choose_device", lambda given: done.append(given) or torch.device("cuda"))
    worker._device(name)
    assert done == [3, name]


@pytest.mark.parametrize(("chosen", "expected"), [(None, 2), ("6", 6)])
def test_ranks_of_a_machine_share_its_threads_on_cpus(chosen: str | None, expected: int, monkeypatch) -> None:
    monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", "3")
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "6")
    if chosen is None:
        monkeypatch.delitem(os.environ, "OMP_NUM_THREADS")
    with threads(6):
        worker._device("cpu")
        assert torch.get_num_threads() == expected


def test_one_gpu_by_its_number_is_no_place_for_several_ranks() -> None:
    with pytest.raises(EquidpError, match=r"device=cuda:1 names one: set training\.device=cuda"):
        device_of(TrainingSettings(device="cuda:1", devices=2))


def test_what_ranks_gather_comes_by_way_of_the_cpu(monkeypatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(dist, "gather_object", lambda value, *_, **__: sent.append(value))
    peers = Peers.__new__(Peers)
    peers.rank, peers.size, peers._control = 1, 2, None
    with pretended_gpu():
        peers.gather({"average": torch.ones(3, device="cuda"), "taken": 2})
    assert not isinstance(sent[0]["average"], OnGpu)
    assert sent[0]["taken"] == 2


def test_a_model_is_tried_out_with_the_generator_of_its_own_gpu(monkeypatch) -> None:
    def current(seed: int) -> None:
        raise AssertionError("the current GPU's generator")

    with pretended_gpu():
        monkeypatch.setattr(torch.cuda, "manual_seed", current)
        model = build_model("mlp", SCHEMAS["table"], options={}, seed=1).to("cuda")
        engine = GradientEngine(model.train(), cross_entropy, rows=4)
        features, labels = batch(SCHEMAS["table"], 4).to("cuda"), torch.arange(4).to("cuda")
        assert engine.norms(features, labels).cpu().isfinite().all()
