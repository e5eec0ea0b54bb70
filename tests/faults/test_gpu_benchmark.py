"""The command that tries a GPU out, tried in small on the CPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

IMAGES = pytest.param("images", marks=pytest.mark.slow)
STAGES = ("versions", "gradients", "algorithms", "graphs", "resumed", "memory", IMAGES)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("gpu")


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_finds_nothing_wrong_on_the_cpu(gpu: ModuleType, stage: str, tmp_path: Path) -> None:
    gpu.do_stage(stage, gpu.Place(torch.device("cpu"), small=True), tmp_path / "found.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert rows
    assert [row for row in rows if not row.get("ok", True)] == []


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
