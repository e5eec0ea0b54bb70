"""How many operations a GPU is given for a step: launches bound the time of a small model's step before one is seen.

Counted on torch's meta device, which takes a GPU's way through the code. Views and new memory cost no launch.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from tests.models.conftest import SCHEMAS
from tests.models.test_devices import META, Shapes
from tests.models.test_models import cross_entropy
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.data.records import Records, Schema
from equidp.gradients import fused
from equidp.gradients.products import Products
from equidp.gradients.recurrence import recur
from equidp.gradients.rounding import norms_of
from equidp.gradients.standardised import Standardisation, Standardised
from equidp.gradients.terms import Vectors
from equidp.mechanism.parts import Draw
from equidp.mechanism.sampling import Population
from equidp.mechanism.trainer import Trainer
from equidp.models import build_model
from equidp.models.base import Standardise
from equidp.models.pretrained import resnet

FREE = {
    "view", "expand", "_unsafe_view", "transpose", "t", "permute", "slice", "select", "as_strided", "detach", "alias",
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "unsqueeze", "squeeze", "squeeze_",
    "split", "split_with_sizes", "unbind", "diagonal", "unfold", "lift_fresh", "_record_function_enter_new",
    "_record_function_exit",
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def launches(self) -> int:
        return sum(count for name, count in self.found.items() if name not in FREE)


@pytest.fixture(autouse=True)
def no_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode composite operations would be counted in place of their parts."""
    monkeypatch.setattr(torch._C, "_InferenceMode", lambda mode: torch.no_grad())


def launches(algorithm: str, network: nn.Module, schema: Schema, size: int) -> int:
    """Of the second of two steps; only who is in the batch is given."""
    features = torch.empty(size, *schema.shape, dtype=torch.uint8, device=META)
    labels = torch.zeros(size, dtype=torch.long, device=META)
    records = Records(features, labels, {"class": labels}, schema)
    trainer = Trainer(
        model=network.to(META).train(),
        loss=cross_entropy,
        algorithm=algorithm_settings(algorithm).build(),
        plan=Plan(size, size - 1, 2, len(schema.classes), 1e-3, 1.0),
        population=Population(records, labels),
        random=Shapes(),
        ledger=Ledger(),
        learning_rate=0.1,
    )
    trainer.engine.try_out = lambda *_: None  # type: ignore[method-assign]
    draw = Draw(torch.arange(size, device=META))
    trainer.sampling.draw = lambda: draw  # type: ignore[method-assign]
    trainer.begin_epoch(0)
    trainer.step(trainer.segments[0])
    with Operations() as counted:
        trainer.step(trainer.segments[0])
    assert trainer.steps_done == trainer.plan.steps == 2
    return counted.launches


def of_model(algorithm: str, model: str, data: str, size: int) -> int:
    return launches(algorithm, build_model(model, SCHEMAS[data], options={}, seed=1), SCHEMAS[data], size)


@pytest.fixture(params=["torch", "kernels"])
def by_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether Triton's kernels are used, of which each launch counts as one operation."""
    if request.param == "torch":
        return False
    kernels = pytest.importorskip("equidp.gradients.kernels")
    monkeypatch.setattr(fused, "kernels_for", lambda like: kernels)
    monkeypatch.setattr(kernels, "launch", lambda *given, **more: torch.zeros(1, device=META))
    return True


@pytest.mark.parametrize(
    ("algorithm", "most", "with_kernels"),
    [("dpsgd", 73, 63), ("dpsgd_f", 95, 85), ("naive", 95, 85), ("dpsgd_minimax", 152, 142)],
)
def test_a_small_networks_private_step_takes_few_operations(
    algorithm: str, most: int, with_kernels: int, by_kernels: bool
) -> None:
    assert of_model(algorithm, "cnn4", "mnist", 512) <= (with_kernels if by_kernels else most)


@pytest.mark.parametrize("size", [64, 1024])
def test_a_residual_networks_private_step_takes_at_most_twice_those_of_sgd(size: int, by_kernels: bool) -> None:
    """By torch's operations alone a few more."""
    sgd = of_model("sgd", "resnet9", "cifar10", size)
    assert of_model("dpsgd", "resnet9", "cifar10", size) <= (1.5 if by_kernels else 2.4) * sgd


@pytest.mark.slow
def test_a_resnet50_takes_half_as_many_again_as_sgd(by_kernels: bool) -> None:
    schema = dataclasses.replace(SCHEMAS["cifar10"], shape=(3, 224, 224))

    def network() -> nn.Module:
        with torch.device(META):
            return nn.Sequential(Standardise(schema), resnet("resnet50", norm="frozen"))

    sgd = launches("sgd", network(), schema, 64)
    assert launches("dpsgd", network(), schema, 64) <= (1.15 if by_kernels else 1.5) * sgd


@pytest.mark.parametrize(("kind", "most"), [("LSTM", 14), ("LSTM, keep first", 14), ("GRU", 9), ("RNN_TANH", 5)])
def test_a_recurrence_takes_few_operations_for_each_word(kind: str, most: int) -> None:
    """Forth and back; what is computed for all words at once does not count."""

    def of_words(count: int) -> int:
        from_state = nn.Linear(8, 8 * {"GRU": 3, "RNN_TANH": 1}.get(kind, 4), device=META)
        inputs = torch.empty(4, count, from_state.out_features, device=META, requires_grad=True)
        begin = torch.zeros(4, 8, device=META)
        with Operations() as operations:
            states, _ = recur(kind, inputs, from_state, (begin, begin))
            states.sum().backward()
        return operations.launches

    assert of_words(30) - of_words(20) == 10 * most


@pytest.mark.parametrize("positions", [96, 128])
def test_wide_layers_on_many_positions_are_formed_many_records_at_a_time(positions: int) -> None:
    """768 to 3,072, as in a transformer: on a CPU each record's gradient of 9 MiB is one piece."""
    features, backprops = (torch.empty(64, positions, width, device=META) for width in (768, 3072))
    term = Products([features], [backprops])
    with Operations() as counted:
        term.squared_norms()
        term.weighted_sum(torch.empty(64, device=META), None)
    assert counted.launches <= 60


def test_a_long_row_is_two_operations_however_long() -> None:
    for numel in (1 << 22, 2359296, 1 << 26):
        with Operations() as counted:
            norms_of(torch.empty(4, numel, device=META))
        assert counted.found["linalg_vector_norm"] == 2


def test_standardised_gradients_are_formed_many_records_at_a_time() -> None:
    weight = torch.empty(64, 64, 3, 3, device=META)
    term = Standardised([Vectors(torch.empty(256, weight.numel(), device=META))], [Standardisation.of(weight)], 256)
    with Operations() as counted:
        term.squared_norms()
    assert counted.launches <= 25


def test_views_and_new_memory_are_not_counted() -> None:
    with Operations() as counted:
        values: Tensor = torch.empty(4, 6, device=META)
        values.view(24)[:3].unsqueeze(0)
    assert counted.launches == 0
