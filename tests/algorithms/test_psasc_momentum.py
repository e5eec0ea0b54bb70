"""PSASC with momentum, against an implementation that keeps every gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equidp.algorithms.psasc import AdaptiveScaling
from equidp.algorithms.psasc_momentum_gd import record_gradients
from equidp.errors import EquidpError
from equidp.mechanism.parts import tensors
from equidp.mechanism.sampling import Population


def network() -> nn.Module:
    """Convolution, normalisation and linear layers on 6 features seen as a 1×6 image."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (1, 1, 6)),
        nn.Conv2d(1, 4, (1, 3), padding="same"),
        nn.Tanh(),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )


def weigh(norms: Tensor, clip_norm: float = 0.1, scale: float = 0.8, stability: float = 1e-4) -> Tensor:
    return clip_norm / (scale * norms + stability / (norms + stability))


class TestSGD:
    """Algorithm 3."""

    @pytest.mark.parametrize("length", [0, 1, 3])
    def test_equals_one_that_materialises(self, lab: Any, length: int) -> None:
        options = {"inner_momentum": 0.5, "outer_momentum": 0.2, "momentum_length": length}
        plan = lab.plan(epochs=2)

        def trainer() -> Any:
            return lab.trainer(
                "psasc_momentum", options, model=network(), plan=plan, random=lab.random(noise=0.0), learning_rate=0.5
            )

        ours, naive = trainer(), trainer()
        iterates, memory = [naive.engine.flatten()], torch.zeros(naive.engine.dimension)
        for step in range(plan.steps):
            ours.run_steps(1)
            units = naive.draw().units
            batch = naive.population.batch(units)
            momenta = torch.zeros(len(units), naive.engine.dimension)
            for age in range(min(length, step) + 1):
                naive.engine.load_(iterates[step - age])
                momenta += 0.5**age * record_gradients(naive.engine, batch)
            memory = 0.8 * memory + weigh(momenta.norm(dim=1)) @ momenta
            iterates.append(iterates[step] - 0.5 * memory / plan.batch_size)
            theta = ours.engine.flatten()
            assert float((theta - iterates[-1]).norm() / iterates[-1].norm()) < 1e-5

    def test_keeps_only_the_snapshots_it_needs(self, lab: Any) -> None:
        trainer = lab.trainer("psasc_momentum", {"momentum_length": 2}, plan=lab.plan(epochs=2))
        thetas = []
        for _ in range(5):
            thetas.append(trainer.engine.flatten())
            trainer.run_steps(1)
        assert len(trainer.contributing.past) == 2
        assert torch.equal(trainer.contributing.past[0], thetas[-1])
        assert torch.equal(trainer.contributing.past[1], thetas[-2])

    def test_outer_momentum_remembers(self, lab: Any) -> None:
        # M_1 = 1, M_2 = 1 + 0.8·1, M_3 = 1 + 0.8·1.8
        updating = lab.trainer("psasc_momentum").updating
        ones = torch.ones(2)
        assert [updating.direction(ones, lab.facts())[0].item() for _ in range(3)] == pytest.approx([1.0, 1.8, 2.44])


class Allocations(TorchDispatchMode):
    """Remembers the size, in floats, of the largest storage that an operation has written to."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // 4)
        return found


class TestMemory:
    """Per-record gradients of a linear or a convolution layer are never written out for a whole batch.

    What is allowed is what the engine does to be quick: gradients formed a cache-full of records at a time, and kept
    where all of them are smaller than a fixed buffer, which those of this model are not.
    """

    CONVOLUTION, LINEAR = 128 * 128 * 3 * 3, 2048 * 512

    def largest_in_a_step(self, lab: Any, name: str, records: int) -> int:
        """Floats in the largest storage during the second step, which has a past iterate to look at."""
        model = nn.Sequential(
            nn.Unflatten(1, (128, 4, 4)),
            nn.Conv2d(128, 128, 3, padding=1, bias=False),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(2048, 512, bias=False),
            nn.Tanh(),
            nn.Linear(512, 3),
        )
        plan = lab.plan(records=records, batch_size=records, epochs=3)
        everybody = lab.random(coins=True)
        trainer = lab.trainer(
            name, records=lab.records(records, features=2048), model=model, plan=plan, random=everybody
        )
        trainer.run_steps(1)
        with Allocations() as seen:
            trainer.run_steps(1)
        return seen.largest

    def test_no_batch_of_gradients_is_written_out(self, lab: Any) -> None:
        records = 256
        assert self.largest_in_a_step(lab, "psasc_momentum", records) < records * min(self.CONVOLUTION, self.LINEAR) / 8

    def test_an_implementation_that_did_would_be_caught(self, lab: Any) -> None:
        records = 8  # it needs gigabytes for more
        assert self.largest_in_a_step(lab, "psasc_momentum_gd", records) >= records * (self.CONVOLUTION + self.LINEAR)


class TestGD:
    """Algorithm 2."""

    def test_equals_the_recursion(self, lab: Any) -> None:
        plan = lab.plan(epochs=4)

        def trainer() -> Any:
            return lab.trainer(
                "psasc_momentum_gd", {"momentum": 0.3}, model=network(), plan=plan, random=lab.random(noise=0.0),
                learning_rate=0.5,
            )  # fmt: skip

        ours, naive = trainer(), trainer()
        batch, means = naive.population.batch(torch.arange(40)), None
        for _ in range(4):
            ours.run_steps(1)
            fresh = record_gradients(naive.engine, batch)
            means = fresh if means is None else 0.3 * fresh + 0.7 * means
            naive.engine.load_(naive.engine.flatten() - 0.5 * (weigh(means.norm(dim=1)) @ means) / 40)
        torch.testing.assert_close(ours.engine.flatten(), naive.engine.flatten(), rtol=1e-5, atol=1e-6)

    def test_a_loop_inside_autocast_is_refused(self, lab: Any) -> None:
        """Its sum is its own, and would be taken in half precision as the engine's would."""
        trainer = lab.trainer("psasc_momentum_gd", model=network())
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(EquidpError, match="half precision"):
            trainer.run_steps(1)

    def test_materialised_gradients_are_the_engines(self, lab: Any) -> None:
        trainer = lab.trainer("psasc_momentum_gd", model=network())
        batch = trainer.population.batch(torch.arange(7))
        found = record_gradients(trainer.engine, batch)
        norms = trainer.engine.norms(batch.features, batch.labels)
        torch.testing.assert_close(found.norm(dim=1), norms, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.sum(0), trainer.engine.weighted_sum(torch.ones(7)), rtol=1e-4, atol=1e-5)

    def test_a_units_gradient_is_the_mean_of_its_records(self, lab: Any) -> None:
        records = replace(lab.records(40), unit=torch.tensor([0, 1, 0, 2, 2, 0, 1] + [3] * 33))
        population = Population(records, records.groups["class"], by_unit=True)
        trainer = lab.trainer(
            "psasc_momentum_gd",
            model=network(),
            records=records,
            population=population,
            plan=lab.plan(records=4, batch_size=4),
        )
        batch = population.batch(torch.arange(4))
        found = record_gradients(trainer.engine, batch)
        norms = trainer.engine.norms(batch.features, batch.labels, owners=batch.owners)
        torch.testing.assert_close(found.norm(dim=1), norms, rtol=1e-4, atol=1e-6)
        weights = torch.tensor([1.0, 0.5, 2.0, 0.0])
        torch.testing.assert_close(weights @ found, trainer.engine.weighted_sum(weights), rtol=1e-4, atol=1e-5)

    def test_records_have_dropout_masks_of_their_own(self, lab: Any) -> None:
        model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 3))
        trainer = lab.trainer("psasc_momentum_gd", model=model)
        trainer.run_steps(1)
        batch = trainer.population.batch(torch.tensor([0, 0]))
        one, other = record_gradients(trainer.engine, batch)
        assert not torch.equal(one, other)

    def test_is_refused_where_it_would_not_fit(self, lab: Any) -> None:
        options = {
            "sampler": "full_batch",
            "contribution": {"name": "record_momentum", "memory_limit": 1e-9},
            "weights": "psasc",
        }
        with pytest.raises(EquidpError, match="GiB are allowed"):
            lab.trainer("custom", options)

    def test_one_record_more_decides_on_no_refusal(self, lab: Any) -> None:
        """40 are declared, and 40 × d numbers fit."""
        numbers = lab.trainer("psasc_momentum_gd").engine.dimension
        options = {
            "sampler": "full_batch",
            "contribution": {"name": "record_momentum", "memory_limit": 40.5 * numbers * 4 / 2**30},
            "weights": "psasc",
        }
        for present in (40, 41):
            found = lab.trainer("custom", options, records=lab.records(present), plan=lab.plan())
            assert found.population.size == present

    def test_batch_size_is_the_number_of_records(self, lab: Any) -> None:
        trainer = lab.trainer("psasc_momentum_gd", plan=lab.plan(epochs=5))
        assert (trainer.plan.batch_size, trainer.plan.steps) == (40, 5)
        assert trainer.algorithm.adapt(trainer.plan) == trainer.plan


class TestWeight:
    """Eq. 6."""

    @given(scale=st.floats(0.1, 2.0), stability=st.floats(1e-6, 0.5))
    def test_the_largest_weight_is_where_the_paper_says(self, scale: float, stability: float) -> None:
        # max w = C/(1 − (1 − √(s·r))²) where r ≤ 1/s, at n = √(r/s) − r
        rule = AdaptiveScaling(scale=scale, stability=stability)
        public = tensors({"clip_norm": 1.0}, "cpu")
        top = 1 / (1 - (1 - (scale * stability) ** 0.5) ** 2)
        norms = torch.cat([torch.linspace(0, 5, 2000), torch.tensor([(stability / scale) ** 0.5 - stability])])
        found = rule.weights(norms.clamp(min=0).double(), {k: v.double() for k, v in public.items()})
        assert float(found.max()) <= top * (1 + 1e-6)
        if stability <= 1 / scale:
            assert float(found[-1]) == pytest.approx(top, rel=1e-6)


def test_a_model_is_tried_out_before_each_records_gradient_is_kept(lab: Any) -> None:
    """On a CPU, where half precision around frozen layers lets a record reach the one before it."""

    class Halved(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                found = self[0](x)
            return self[1](found.float())

    model = Halved(nn.Linear(6, 4).requires_grad_(False), nn.Linear(4, 3))
    with pytest.raises(EquidpError, match=r"turns torch\.autocast on in its own forward"):
        lab.trainer("psasc_momentum_gd", model=model).run_steps(1)


def test_a_loss_that_reads_its_labels_as_numbers_is_named_where_each_gradient_is_formed_alone(lab: Any) -> None:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.square().sum(1) * float(labels.min() >= 0)

    with pytest.raises(EquidpError, match=r"cannot take this model and loss record by record .*F\.one_hot"):
        lab.trainer("psasc_momentum_gd", loss=loss).run_steps(1)
