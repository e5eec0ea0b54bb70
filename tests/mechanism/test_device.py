"""Where a run trains, and in which order a GPU adds."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.pretended import pretended_gpu

from equidp.errors import EquidpError
from equidp.gradients.precision import as_precise_as_norms, refuse_short_products
from equidp.mechanism import device as module
from equidp.mechanism.device import choose_device, fixed_order
from equidp.mechanism.noise import SeededRandom
from equidp.models.base import MeanPool
from equidp.training.checkpoint import life_of, repeats

CUDA = torch.device("cuda")


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A machine with NVIDIA's driver."""
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104\nGCC version: 12\n")
    monkeypatch.setattr(module, "DRIVER", file)
    return file


def test_a_gpu_that_torch_cannot_use_is_told(driver, monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert choose_device("auto") == torch.device("cpu")
    assert "has a GPU that torch cannot use" in caplog.text
    assert "535.104" in caplog.text
    caplog.clear()
    choose_device("cpu")
    driver.unlink()
    choose_device("auto")
    assert not caplog.text


def test_a_fixed_order_is_switched_on_for_a_gpu_alone_and_off_again(monkeypatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with fixed_order(True, torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
    with fixed_order(True, CUDA):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


def test_an_operation_without_a_fixed_order_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    said = "x_backward_cuda does not have a deterministic implementation. You can turn off determinism"
    with pytest.raises(EquidpError, match=r"no fixed order \(x_backward_cuda does not have"), fixed_order(True, CUDA):
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="other"), fixed_order(True, CUDA):
        raise RuntimeError("other")


def test_a_gpu_repeats_its_steps_only_where_it_must_add_in_a_fixed_order() -> None:
    with pretended_gpu():
        random = SeededRandom(0, CUDA)
        assert not repeats(random)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            assert not repeats(random)
            torch.use_deterministic_algorithms(True)
            assert repeats(random)
        finally:
            torch.use_deterministic_algorithms(False)


def test_another_driver_or_cudnn_precision_is_another_life(driver) -> None:
    with pretended_gpu():
        random = SeededRandom(0, CUDA)
        before = life_of(random)
        driver.write_text("NVRM version: 550\n")
        assert life_of(random) != before
        before = life_of(random)
        with as_precise_as_norms():
            assert life_of(random) != before
        assert life_of(random) == before


def test_products_may_be_shortened_by_the_old_and_by_the_new_switch_without_an_error_of_torchs() -> None:
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    try:
        for value in ("tf32", "ieee"):
            convolutions.fp32_precision = value
            refuse_short_products(torch.device("cpu"))
            with as_precise_as_norms():
                assert convolutions.fp32_precision == "ieee"
            assert convolutions.fp32_precision == value
    finally:
        convolutions.fp32_precision = before


@pytest.mark.parametrize("size", [4, 8, 7])
def test_a_pool_on_a_gpu_gives_the_cpus_means(size: int) -> None:
    images, pool = torch.rand(2, 3, size, size), MeanPool(4)
    expected = torch.nn.functional.adaptive_avg_pool2d(images, 4)
    assert torch.equal(pool(images), expected)
    with pretended_gpu():
        torch.testing.assert_close(pool(images.to("cuda")).cpu(), expected)
