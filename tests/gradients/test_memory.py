"""How many records a GPU is given at once follows from the memory that is free, without trying."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from contextlib import nullcontext
from functools import lru_cache
from unittest.mock import MagicMock

import pytest
import torch
from tests.models.conftest import SCHEMAS
from tests.pretended import MEMORY, pretended_gpu
from tests.small_run import trainer_of
from torch import Tensor, nn

from equidp.algorithms import algorithm_settings
from equidp.data.records import Membership, Records, Schema, Split
from equidp.errors import EquidpError
from equidp.gradients import recording
from equidp.gradients.memory import PER_PARAMETER, SHARE, kept_per_record, room_for, rows_that_fit
from equidp.gradients.workspace import Workspace
from equidp.models import MODELS, build_model
from equidp.models.base import Standardise
from equidp.models.pretrained import resnet
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.training import TrainingRequest, networks, plan_run, preparation, prepare
from equidp.training.networks import predict
from equidp.training.preparation import bytes_of

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


def test_a_look_at_what_a_record_keeps_leaves_no_graph_behind() -> None:
    model, left = build_model("cnn4", SCHEMAS["mnist"], seed=1), []
    for layer in model.modules():
        layer.register_forward_hook(lambda _layer, _given, output: left.append(weakref.ref(output)))
    kept_per_record(model, torch.zeros(1, *SCHEMAS["mnist"].shape))
    gc.collect()
    assert left
    assert not any(output() is not None for output in left)


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
        roomy, rows = room_for(model, images, 10**7, views=4)
        assert not roomy
        assert rows is not None
        assert rows >= 4096
        assert 4 * Workspace(device).keep_floats <= MEMORY // 4
    assert room_for(nn.Linear(2, 2), torch.zeros(1, 2), 10**9) == (False, None)


def test_one_record_more_never_changes_how_many_are_at_once(monkeypatch) -> None:
    """Else the kernels, and with them everybody's rounding, could change with one record."""
    schema, expected = SCHEMAS["cifar10"], 1000
    model, by_driver, found = build_model("cnn4", schema, options={}, seed=1), set(), set()
    with pretended_gpu():
        model = model.to("cuda")
        kept = kept_per_record(model, torch.zeros(1, *schema.shape, dtype=torch.uint8).to("cuda"))
        trained = sum(parameter.numel() for parameter in model.parameters())
        weights = sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))
        left = math.ceil((2 * 64 * kept + PER_PARAMETER * trained) / SHARE)  # exactly enough for 64
        for there in (expected - 1, expected, expected + 1):
            features, labels = torch.zeros(there, *schema.shape, dtype=torch.uint8), torch.zeros(there).long()
            membership = Membership("hash", "seed=0", records=expected)
            records = Records(features, labels, {"class": labels}, schema, membership=membership)
            each = features[0].numel() + 2 * 8
            free, held = left + (expected - there) * each, there * each + weights
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, MEMORY))
            monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, held=held: held)
            by_driver.add(room_for(model, features.to("cuda"), 10**6)[1])
            found.add(room_for(model, features.to("cuda"), 10**6, resident=bytes_of(records))[1])
    assert by_driver == {48, 64}
    assert found == {64}


@pytest.mark.parametrize(("by_unit", "taken"), [(False, 130), (True, 120)])
def test_a_declared_number_of_records_takes_the_place_of_a_protected_one(
    by_unit: bool, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DPIS protects how many there are; a number of units says nothing of records."""
    features, labels = torch.rand(120, 8), torch.arange(120) % 2
    schema = Schema("toy", "tabular", (8,), ("a", "b"), {"class": ("a", "b")})
    records = Records(features, labels, {"class": labels}, schema, unit=torch.arange(120))
    algorithm, seen = algorithm_settings("dpis", {"declared_records": 130}).build(), list[int]()
    privacy = PrivacySettings(noise_multiplier=5.0, unit="unit" if by_unit else "record")
    training = TrainingSettings(epochs=1, batch_size=12, device="cpu")
    plan = plan_run(algorithm, units=120, groups=2, privacy=privacy, training=training)
    request = TrainingRequest(algorithm, plan, "class", ModelSettings(name="logistic"), privacy, training, seed=1)
    fits = preparation.room_for
    monkeypatch.setattr(
        preparation, "room_for", lambda *given, resident: seen.append(resident) or fits(*given, resident=resident)
    )
    prepare(request, Split(records, records, records))
    assert seen == [taken * bytes_of(records) // 120]


def test_a_gpu_that_holds_not_even_one_record_is_refused_in_a_sentence(monkeypatch) -> None:
    """Its first step failed with torch's own error, which says nothing of what to do."""
    with pretended_gpu():
        model, images = nn.Flatten(), torch.zeros(1, *LARGE.shape).to("cuda")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 18, MEMORY))
        with pytest.raises(EquidpError, match="The GPU has 0 MiB of free memory, too little"):
            room_for(model, images, 64)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 30)  # torch's own, and free
        assert room_for(model, images, 64, resident=0)[1] is None
        monkeypatch.setattr(model, "forward", MagicMock(side_effect=torch.OutOfMemoryError("no room")))
        with pytest.raises(EquidpError, match="The GPU has 1024 MiB of free memory"):
            room_for(model, images, 64)


class Counting(nn.Module):
    """Notes how many records it is given at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 2), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.layer(x.flatten(1)[:, :1].float())


def test_scoring_large_images_fits_beside_a_step() -> None:
    """Of 16 GiB a step has at most 60 %. What torch would keep for a backward pass is more than scoring needs."""
    network = Counting()
    whole = predict(network, torch.zeros(1, *LARGE.shape, dtype=torch.uint8).expand(300, *LARGE.shape))
    assert len(whole) == sum(network.seen) == 300
    kept = kept_per_record(resnet50(), torch.zeros(1, *LARGE.shape, dtype=torch.uint8, device="meta"))
    assert max(*network.seen, MODELS["resnet_finetune"].scored_at_once) * kept <= 0.4 * MEMORY
    network.seen.clear()
    predict(network, torch.zeros(2_000, 3, 32, 32, dtype=torch.uint8))
    assert network.seen == [1_024, 976]
    assert len(predict(network, torch.zeros(0, 3, 32, 32))) == 0


def test_scoring_leaves_frozen_layers_of_a_model_in_training_frozen() -> None:
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).train()
    network[0].eval()
    predict(network, torch.zeros(4, 3))
    assert [layer.training for layer in network] == [False, True]


def test_the_test_part_is_brought_to_a_gpu_once_where_an_eighth_of_its_memory_holds_it() -> None:
    with pretended_gpu():
        network, features = Counting().to("cuda"), torch.rand(40, 3)
        first = predict(network, features)
        ((of, there),) = networks._HELD
        assert of() is features
        assert torch.equal(predict(network, features), first)
        assert networks._HELD[0][1] is there
        large = torch.zeros(1, 1).expand(2, MEMORY // 32 + 1)
        assert networks._resident(large, torch.device("cuda", 0)) is large
    del features, of
    networks._HELD.clear()


def test_public_records_are_looked_at_in_as_many_as_a_step_has_rows() -> None:
    with pretended_gpu():
        trainer = trainer_of("sa_dpsgd", None, "cuda", physical_batch_size=None)
        seen: list[int] = []
        trainer.model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        trainer.public_loss(60)
        assert trainer.engine.rows == 32
    assert seen == [32, 28]


def test_all_recordings_are_tried_on_one_stream_as_a_library_keeps_memory_for_each(monkeypatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(recording, "_aside", lru_cache(recording._aside.__wrapped__))
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or MagicMock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock)
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 63)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for _ in range(2):
        recorder = recording.CudaGraphs()
        for _ in range(3):
            recorder.record(lambda: torch.zeros(1))
    assert made == [63]
