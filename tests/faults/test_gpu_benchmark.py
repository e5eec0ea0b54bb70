"""The command that tries a GPU out, tried in small on the CPU."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tests.mechanism.test_pretended_gpu import TRANSFORMS
from tests.pretended import WATCHED, Replaying, pretended_gpu
from tests.thorough import first
from torch import Tensor, nn

from equidp.algorithms import ALGORITHMS
from equidp.gradients.engine import GradientEngine
from equidp.models import build_model

STAGES = ("versions", "gradients", "algorithms", "graphs", "resumed", "memory", "images")
NOT_PRETENDED = ("custom", *TRANSFORMS)
NEW_NOISE = ("dpsgd_decay", "sad_dpsgd", "auto_dpsgd_l", "auto_dpsgd_s")
"""Each has a recording of its own, which is on trial and may wait."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("gpu")


@pytest.mark.parametrize("stage", first(STAGES, ("gradients", "versions", "graphs")))
def test_a_stage_finds_nothing_wrong_on_the_cpu(gpu: ModuleType, stage: str, tmp_path: Path) -> None:
    gpu.do_stage(stage, gpu.Place(torch.device("cpu"), small=True), tmp_path / "found.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert rows
    assert [row for row in rows if not row.get("ok", True)] == []


def found(gpu: ModuleType, stage: str, device: str, folder: Path) -> dict[str, dict]:
    """A stage's rows in small, by what they are of."""
    gpu.do_stage(stage, gpu.Place(torch.device(device), small=True), folder / "found.jsonl")
    rows = map(json.loads, (folder / "found.jsonl").read_text().splitlines())
    return {row["what"]: row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", first([n for n in ALGORITHMS if n not in NOT_PRETENDED], ("dpsgd", "dpis", "asc"))
)
def test_with_the_cpus_coins_every_algorithm_is_the_cpus_on_a_pretended_gpu(gpu: ModuleType, algorithm: str) -> None:
    with pretended_gpu():
        row = gpu._against_cpu(gpu.Place(torch.device("cuda", 0), small=True), algorithm)
    assert row["ok"], row


@pytest.fixture
def watched_replays(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays without a GPU, in which torch's watch for what waits is the pretended GPU's."""

    def watch(mode: str) -> None:
        WATCHED[:] = [True] if mode == "error" else []

    monkeypatch.setattr(gpu, "CudaGraphs", lambda device: Replaying())
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", watch)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", first([n for n in ALGORITHMS if n not in NOT_PRETENDED], ("sgd", "dpsgd_decay")))
def test_replayed_steps_are_watched_once_their_trials_are_over(gpu, watched_replays, algorithm: str) -> None:
    with pretended_gpu():
        row = gpu._replayed(gpu.Place(torch.device("cuda", 0), small=True), algorithm)
    assert row["ok"], row
    assert ("noise changes" in row["waits"]) == (algorithm in NEW_NOISE)
    assert (row["waits"] == "never") == (row["not whole as"] is None and algorithm not in NEW_NOISE)


@pytest.mark.slow
def test_other_tiles_of_a_convolution_are_held_to_the_same_squares(gpu: ModuleType, monkeypatch) -> None:
    pytest.importorskip("triton")
    layers = importlib.import_module("convolutions")
    (kind,) = layers.kinds_of(nn.Conv2d(3, 20, 3, padding=1), torch.zeros(1, 3, 12, 12))
    assert (str(kind), kind.outputs) == ("3→20, 3×3, stride 1, 12×12", (12, 12))
    monkeypatch.setattr(layers, "OTHERS", [layers.Tile(16, 32, 16, 4, 2), layers.Tile(64, 32, 16, 4, 2)])
    found = layers.measured(kind, 2, torch.device("cpu"), others=True)
    assert found["kept"]
    assert list(found["others"]) == ["16×32, 16 pixels, 4 warps, 2 stages"]  # the other would be half empty
    assert found["others"]["16×32, 16 pixels, 4 warps, 2 stages"].keys() == {"norms", "sum"}


@pytest.mark.parametrize(("stage", "part"), [("algorithms", "_against_cpu"), ("gradients", "_gradients")])
def test_one_that_fails_is_a_wrong_row_and_the_others_go_on(gpu, stage, part, tmp_path, monkeypatch) -> None:
    def failing(place: object, name: object) -> dict:
        if "dpsgd" in name or "logistic" in name:
            raise RuntimeError("no kernel image\nis available")
        return {"ok": True}

    monkeypatch.setattr(gpu, part, failing)
    wrong, *others = found(gpu, stage, "cpu", tmp_path).values()
    assert not wrong["ok"]
    assert "RuntimeError: no kernel image is available (test_gpu_benchmark.py:" in wrong["said"]
    assert others[-1]["ok"]


@pytest.mark.slow
def test_planted_faults_of_gradients_are_found_each_by_its_own_figure(gpu, monkeypatch) -> None:
    norms, sums = GradientEngine.norms, GradientEngine.weighted_sum

    def row(of_norms: Callable[[int], float], of_sums: float, records: slice = slice(None)) -> dict:
        """With norms of some records too long by a share that follows from the batch, and sums by another."""

        def wrong_norms(self: GradientEngine, features: Tensor, labels: Tensor) -> Tensor:
            exact = norms(self, features, labels)
            if self.rows is not None:
                exact[records] *= 1 + of_norms(len(features))
            return exact

        def wrong_sums(self: GradientEngine, weights: Tensor) -> Tensor:
            return sums(self, weights) * (1.0 if self.rows is None else 1 + of_sums)

        monkeypatch.setattr(GradientEngine, "norms", wrong_norms)
        monkeypatch.setattr(GradientEngine, "weighted_sum", wrong_sums)
        return gpu._gradients(gpu.Place(torch.device("cpu"), small=True), ("cnn_small", "float32", ""))

    right = row(lambda _: 0.0, 0.0)
    assert right["ok"]
    kernels = row(lambda size: 1e-6 if size < 8 else 0.0, 0.0)  # other ones for another number of rows
    assert not kernels["ok"]
    assert not kernels["same for others"]
    assert kernels["same when repeated"]
    long = row(lambda _: 0.0, 2e-4)
    assert not long["ok"]
    assert long["moved by"] > 1.0001
    assert long["same for others"]
    other = row(lambda _: 1e-4, 0.0)
    assert not other["ok"]
    assert other["norms off, the middle one"] > 5e-5
    assert other["moved by"] < 1
    one = slice(1)
    assert row(lambda _: 1e-4, 0.0, one)["ok"]  # as a gate of a ReLU that rounding flips
    assert not row(lambda _: 1e-2, 0.0, one)["ok"]
    assert not row(lambda _: 0.0, 0.5)["ok"]


@pytest.mark.parametrize("other", [1.5, 1.5000001])
def test_runs_on_a_gpu_and_on_a_cpu_must_have_the_same_epsilon(gpu, other: float, tmp_path, monkeypatch) -> None:
    epsilons = iter([1.5, other])
    monkeypatch.setattr(gpu, "_run", lambda command, limit: gpu.subprocess.CompletedProcess(command, 0, "", ""))
    monkeypatch.setattr(gpu, "_last_run", lambda: {"epsilon": next(epsilons)})
    rows = found(gpu, "runs", "cuda", tmp_path)
    assert rows["digits, cuda"]["ok"]
    assert rows["digits, cpu"]["ok"] == (other == 1.5)


def test_a_stage_that_fails_is_a_line_and_the_status(gpu: ModuleType, tmp_path: Path, monkeypatch, capsys) -> None:
    def failing(command: list[str], limit: float) -> object:
        return gpu.subprocess.CompletedProcess(command, 1, "", "no kernel image is available")

    monkeypatch.setattr(gpu, "_run", failing)
    assert gpu.main(["--device", "cpu", "--small", "--stages", "versions", "--folder", str(tmp_path)]) == 1
    assert "WRONG whole stage" in capsys.readouterr().out


def test_without_a_gpu_the_command_says_so(gpu: ModuleType, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "--device cpu --small" in capsys.readouterr().out


@pytest.mark.slow
def test_a_gate_that_rounding_flips_moves_its_records_norm_by_more_than_the_middle_one_may_be_off(gpu) -> None:
    """Record 63 of the 64 that the stage takes for this model has such a gate: by it a GPU was off from the CPU."""
    records, (norms, _) = gpu._on_cpu("tramer_boneh_cifar10", 64)
    model = build_model("tramer_boneh_cifar10", records.schema, seed=1)
    features, layers = model.features(records.features[63:]), model.layers
    before_gates = layers[:3](features).detach()
    channel, row, column = np.unravel_index(int(before_gates.abs().argmin()), before_gates.shape[1:])
    weight = layers[2].weight[channel].detach()
    step = -2 * before_gates[0, channel, row, column] * weight / weight.square().sum()
    moved = nn.functional.pad(features, (1, 1, 1, 1))  # as the convolution sees them
    moved[0, :, row : row + 3, column : column + 3] += step
    moved = moved[:, :, 1:-1, 1:-1]
    assert (moved - features).norm() < 1e-6 * features.norm()

    def norm(of: Tensor) -> float:
        loss = nn.functional.cross_entropy(layers(of), records.labels[63:])
        return float(torch.cat([part.flatten() for part in torch.autograd.grad(loss, layers.parameters())]).norm())

    either = [norm(features), norm(moved)]  # a processor may round to this side or to that
    assert min(abs(found / float(norms[63]) - 1) for found in either) < 1e-6
    assert abs(either[1] / either[0] - 1) == pytest.approx(9.2e-5, rel=0.02)
    assert abs(either[1] / either[0] - 1) > 4 * 3 * gpu.ROUNDING["float32", ""]
