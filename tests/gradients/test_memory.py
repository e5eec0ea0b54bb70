"""How many records a GPU is given at once follows from the memory that is free, without trying."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.models.conftest import SCHEMAS
from tests.pretended import MEMORY, pretended_gpu
from torch import nn

from equidp.gradients.memory import kept_per_record, room_for, rows_that_fit
from equidp.gradients.workspace import Workspace
from equidp.models import build_model
from equidp.models.base import Standardise
from equidp.models.pretrained import resnet

LARGE = dataclasses.replace(SCHEMAS["cifar10"], shape=(3, 224, 224))


def resnet50() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(Standardise(LARGE), resnet("resnet50", norm="frozen"))


def test_what_one_record_keeps_is_counted_without_parameters_and_without_memory() -> None:
    layers = nn.Sequential(nn.Linear(10, 1000), nn.Tanh(), nn.Linear(1000, 3))
    # features, what the first and second layer and tanh need, outputs
    assert kept_per_record(layers, torch.zeros(5, 10)) in range(4 * (10 + 1000 + 3), 4 * (10 + 10 + 2 * 1000 + 3) + 1)
    kept = kept_per_record(resnet50(), torch.zeros(1, *LARGE.shape, dtype=torch.uint8, device="meta"))
    assert 30e6 < kept < 200e6


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    features, before = torch.rand(5, 4), {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    kept_per_record(model, features)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(layer.training for layer in model.modules())


@pytest.mark.parametrize("free", [16 << 30, 80 << 30])
def test_a_resnet50_at_224_has_room_for_its_pass_and_for_what_is_kept(free: int) -> None:
    kept, trained = 45 << 20, 25_600_000
    rows = rows_that_fit(free, trained, kept)
    assert rows >= 16
    assert rows * 2 * kept + 24 * trained <= 0.6 * free
    assert rows & (rows - 1) == 0 or rows % 3 == 0


def test_more_memory_never_means_fewer_records_and_none_is_not_an_answer() -> None:
    found = [rows_that_fit(free << 30, 10**6, 50 << 20) for free in range(1, 100)]
    assert found == sorted(found)
    assert rows_that_fit(0, 10**9, 10**9) == 1


def test_a_little_more_or_less_of_free_memory_is_the_same_number() -> None:
    assert rows_that_fit(15_900 << 20, 10**6, 50 << 20) == rows_that_fit(15_000 << 20, 10**6, 50 << 20)


def test_a_gpu_of_16_gib_holds_the_presets_batches_of_small_models_whole_and_keeps_a_quarter() -> None:
    with pretended_gpu():
        device = torch.device("cuda")
        model = build_model("cnn4", SCHEMAS["mnist"], options={}, seed=1).to("cuda")
        images = torch.zeros(2, *SCHEMAS["mnist"].shape, dtype=torch.uint8).to("cuda")
        assert room_for(model, images, 2048) == (True, None)
        roomy, rows = room_for(model, images, 10**7)
        assert not roomy
        assert rows is not None
        assert rows >= 4096
        assert 4 * Workspace(device).keep_floats <= MEMORY // 4
    assert room_for(nn.Linear(2, 2), torch.zeros(1, 2), 10**9) == (False, None)
