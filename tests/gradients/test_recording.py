"""Recorded passes give what passes computed afresh give, whatever was in the recording's rows before.

A CUDA graph does again, in the same memory, what it was told once. `Again` stands in for it where there is no GPU: it
does the work again and overwrites the first result, so that whatever keeps a result, or lays a batch into the wrong
rows, is found here. What it cannot show is whether torch can capture the passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.models.conftest import PRETRAINED, SCHEMAS, batch
from tests.models.test_models import FIRST, cross_entropy
from tests.pretended import as_on_gpu, pretended_gpu
from tests.small_run import trainer_of
from tests.thorough import FEW, first, small
from tests.tried import tried_once
from torch import Tensor, nn

from equidp.algorithms import ALGORITHMS
from equidp.errors import EquidpError
from equidp.gradients import recording
from equidp.gradients.engine import GradientEngine
from equidp.gradients.precision import as_precise_as_norms
from equidp.gradients.recording import TRIALS, CudaGraphs, Recorder
from equidp.gradients.shape import FixedRows
from equidp.gradients.shares import WholeShares, threads
from equidp.mechanism.trainer import Trainer
from equidp.models import MODELS, build_model


@pytest.fixture(scope="module", autouse=True)
def tried() -> Iterator[None]:
    """All train the same few models."""
    with tried_once():
        yield


class Again:
    """Stands in for CUDA graphs."""

    def record(self, work: Callable[[], Tensor], generators: Any = ()) -> Callable[[], Tensor]:
        result = work()
        return lambda: result.copy_(work())


def counting(rows: list[int]) -> Callable[[], Recorder]:
    """Recorders like `Again` that note how many rows each recording has."""

    class Counting(Again):
        def __init__(self) -> None:
            rows.append(0)

        def record(self, work: Callable[[], Tensor], generators: Any = ()) -> Callable[[], Tensor]:
            if not rows[-1]:  # norms are recorded first
                rows[-1] = len(work())
            return super().record(work)

    return Counting


class Stale:
    """A graph that does not see new batches."""

    def record(self, work: Callable[[], Tensor], generators: Any = ()) -> Callable[[], Tensor]:
        result = work()
        return lambda: result


class Refusing:
    """What torch says where it cannot capture."""

    def record(self, work: Callable[[], Tensor], generators: Any = ()) -> Callable[[], Tensor]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand advice")


def engine_of(network: nn.Module, new_recorder: Callable[[], Recorder] = Again, rows: int = 24) -> GradientEngine:
    return GradientEngine(network.train(), cross_entropy, new_recorder=new_recorder, rows=rows)


def mlp(new_recorder: Callable[[], Recorder] = Again) -> GradientEngine:
    return engine_of(build_model("mlp", SCHEMAS["table"], options={}, seed=1), new_recorder)


def rows(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, 40, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def compare(engine: GradientEngine, features: Tensor, labels: Tensor, allowed: float = 1e-5) -> None:
    """One batch both ways on as many rows, with weights as clipping gives them."""
    norms = engine.norms(features, labels)
    weights = torch.where(norms.isfinite(), (0.1 / norms).clamp(max=1.0), 0.0)
    total = engine.weighted_sum(weights)
    afresh = FixedRows(engine.passes.twin(), engine.rows, WholeShares(engine.model))
    torch.testing.assert_close(norms, afresh.norms(features, labels), rtol=allowed, atol=1e-6, equal_nan=True)
    expected = afresh.weighted_sum(weights)
    # without a GPU both are the same operations; else the error is of what was added, which may nearly cancel
    size = (weights * norms).nansum() if norms.is_cuda else expected.norm()
    assert (total - expected).norm() <= allowed * size


def move(engine: GradientEngine) -> None:
    """A step: a recording reads the parameters as they are by then."""
    with torch.no_grad():
        for parameter in engine.parameters:
            parameter.add_(0.01 * torch.randn_like(parameter))


@pytest.mark.parametrize("model", small([name for name in MODELS if name not in PRETRAINED]))
def test_every_model_gives_the_same_when_trusted(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equidp.gradients.engine.look_again", lambda *_, **__: None)  # which is not replayed
    schema = SCHEMAS[FIRST[model]]
    made: list[int] = []
    engine = engine_of(build_model(model, schema, options={}, seed=1), counting(made), 8)
    for size in (6, 6, 5, 8, 4, 6, 7):
        compare(engine, batch(schema, size), torch.arange(size) % len(schema.classes))
        move(engine)
    assert len(made) == 1
    engine.passes.norms = no_more  # type: ignore[method-assign]  # trusted, nothing is computed afresh
    assert engine.norms(batch(schema, 6), torch.arange(6) % len(schema.classes)).isfinite().all()


def no_more(*_: object, **__: object) -> Tensor:
    raise AssertionError("computed afresh")


def test_batches_of_all_sizes_are_served_by_one_recording() -> None:
    made: list[int] = []
    engine = mlp(counting(made))
    for size in (10, 1, 0, 22, 23, 100, 2, 3, 10):
        compare(engine, *rows(size, seed=size))
    assert made == [24]


def test_a_recording_has_no_more_rows_than_may_be_in_memory() -> None:
    made: list[int] = []
    trained("dpsgd", counting(made), "cpu", 7)
    assert made == [7]


def test_what_rows_held_before_adds_nothing() -> None:
    engine = mlp()
    features, labels = rows(20)
    for _ in range(TRIALS + 1):
        compare(engine, features, labels)
        move(engine)
    poisoned = features.clone()
    poisoned[5:] = torch.inf
    compare(engine, poisoned, labels)
    norms = engine.norms(features[:12], labels[:12])
    assert norms.isfinite().all()
    assert engine.weighted_sum(torch.ones(12)).isfinite().all()
    compare(engine, features[:12], labels[:12])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_nobody_ends_a_trial(value: float) -> None:
    """Whose gradient is no number weighs nothing, from the first batch on: a run that ended would tell of it."""
    engine = mlp()
    features, labels = rows(20)
    compare(engine, features, labels)
    features[3] = value
    for _ in range(TRIALS):
        compare(engine, features, labels)
        move(engine)


def test_norms_and_sums_are_their_own() -> None:
    engine = mlp()
    first, second = engine.norms(*rows(20, 1)), engine.norms(*rows(20, 2))
    assert torch.equal(first, engine.passes.twin().norms(*rows(20, 1)))
    one, two = engine.weighted_sum(torch.ones(20)), engine.weighted_sum(torch.zeros(20))
    assert one.norm() > 0
    assert two.norm() == 0
    assert not torch.equal(first, second)


def test_outputs_are_those_of_the_last_batch() -> None:
    """`dpsgd_minimax` counts errors by them."""
    engine = mlp()
    engine.passes.keeps_outputs = True
    for seed in range(TRIALS + 2):
        features, labels = rows(20, seed)
        engine.norms(features, labels)
        torch.testing.assert_close(engine.passes.outputs_kept[:20], engine.model(features))


def test_units_and_iterates_are_computed_afresh() -> None:
    engine = mlp()
    features, labels = rows(8)
    engine.norms(features, labels)
    owners = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])
    for how in ({"owners": owners}, {"iterates": [(None, 1.0), (engine.flatten() + 0.1, 0.5)]}):
        with threads(1):  # on several the engine chooses how many
            norms = engine.norms(features, labels, **how)
            afresh = engine.passes.twin()
            assert torch.equal(norms, afresh.norms(features, labels, **how))
            weights = torch.ones_like(norms)
            assert torch.equal(engine.weighted_sum(weights), afresh.weighted_sum(weights))


def test_a_recording_that_does_not_see_its_batch_is_not_trusted() -> None:
    engine = mlp(Stale)
    with pytest.raises(EquidpError, match=r"other gradients.*leave training\.cuda_graphs out"):
        engine.norms(*rows(20))


def test_a_wrong_sum_is_not_trusted() -> None:
    class WrongSum(Again):
        def record(self, work: Callable[[], Tensor], generators: Any = ()) -> Callable[[], Tensor]:
            again = super().record(work)
            return lambda: again() if again().dim() == 1 and len(again()) < 100 else again() * 0.9

    engine = mlp(WrongSum)
    engine.norms(*rows(20))
    with pytest.raises(EquidpError, match="other gradients"):
        engine.weighted_sum(torch.ones(20))


def test_a_look_at_many_batches_ends_no_trial() -> None:
    """Norms alone, at the same parameters: of sums, and of a step's new parameters, nothing was seen."""

    class OldParameters(Again):
        def record(self, work: Callable[[], Tensor], generators: Any = ()) -> Callable[[], Tensor]:
            result, old = work(), engine.flatten()

            def again() -> Tensor:
                now = engine.flatten()
                engine.load_(old)
                result.copy_(work())
                engine.load_(now)
                return result

            return again

    engine = mlp(OldParameters)
    for seed in range(2 * TRIALS):
        compare(engine, *rows(20, seed))
    move(engine)
    with pytest.raises(EquidpError, match="other gradients"):
        engine.norms(*rows(20))


def test_a_model_that_draws_is_refused() -> None:
    engine = engine_of(nn.Sequential(nn.Linear(40, 30), nn.Dropout(0.5), nn.Linear(30, 10)))
    with pytest.raises(EquidpError, match="dropout"):
        engine.norms(*rows(20))


def test_what_torch_cannot_record_is_one_sentence() -> None:
    with pytest.raises(EquidpError, match=r"cannot be recorded .*stream is capturing\): leave") as refused:
        mlp(Refusing).norms(*rows(20))
    assert "advice" not in refused.value.message


def trained(algorithm: str, new_recorder: Callable[[], Recorder] | None, device: str, chunk: int | None) -> Trainer:
    """A whole run."""
    trainer = trainer_of(algorithm, new_recorder, device, epochs=8, physical_batch_size=chunk, diagnostics=True)
    trainer.train(progress=False)
    return trainer


def same_run(algorithm: str, new_recorder: Callable[[], Recorder], device: str, chunk: int | None) -> None:
    afresh, recorded = (trained(algorithm, how, device, chunk) for how in (None, new_recorder))
    assert recorded.ledger.done == afresh.ledger.done
    parameters = afresh.engine.flatten()
    assert (recorded.engine.flatten() - parameters).norm() < 1e-4 * parameters.norm()
    assert recorded.shown.keys() == afresh.shown.keys()
    for name, value in afresh.shown.items():
        torch.testing.assert_close(recorded.shown[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize("algorithm", first([n for n in ALGORITHMS if n not in ("custom", "sgd")], FEW))
def test_every_algorithm_runs_the_same(algorithm: str, chunk: int | None) -> None:
    same_run(algorithm, Again, "cpu", chunk)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 7])
def test_on_a_pretended_gpu_too(chunk: int | None) -> None:
    with as_on_gpu():
        on_cpu = trained("dpsgd_f", None, "cpu", chunk)
    with pretended_gpu():
        there = trained("dpsgd_f", Again, "cuda", chunk)
        parameters = there.engine.flatten().cpu()
    assert there.ledger.done == on_cpu.ledger.done
    assert (parameters - on_cpu.engine.flatten()).norm() < 1e-4 * parameters.norm()


@pytest.mark.parametrize("model", small([name for name in MODELS if name not in PRETRAINED]))
def test_recorded_passes_ask_the_device_for_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a GPU records it answers no question. The meta device, which has no values, never answers any."""
    monkeypatch.setattr(recording, "TRIALS", 0)  # they compare numbers
    for what in ("probe", "look_again"):  # so do these
        monkeypatch.setattr(f"equidp.gradients.engine.{what}", lambda *_, **named: True)
    schema = SCHEMAS[FIRST[model]]
    engine = engine_of(build_model(model, schema, options={}, seed=1).to("meta"))
    for size in (8, 6):
        norms = engine.norms(batch(schema, size).to("meta"), torch.zeros(size, dtype=torch.long, device="meta"))
        assert engine.weighted_sum(norms).shape == (engine.dimension,)


def test_without_trials_the_stand_in_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """That runs are the same is not the trials' doing: recordings are what runs use."""
    monkeypatch.setattr(recording, "TRIALS", 0)
    with pytest.raises(AssertionError):
        same_run("dpsgd", Stale, "cpu", None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in ("custom", "sgd")])
def test_on_a_gpu_every_algorithm_runs_the_same(algorithm: str, chunk: int | None) -> None:
    same_run(algorithm, CudaGraphs, "cuda", chunk)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("model", [name for name in MODELS if name not in PRETRAINED])
def test_on_a_gpu_every_model_gives_the_same(model: str) -> None:
    """Both in float32 without TF32, and with the same kernels, as rows are as many.

    What is left are additions in another order, where a kernel adds by atomics. Each product of n terms is then off by
    some √n·2⁻²⁴ of its size, n about 9·256 here, and a record's gradient by as much for each layer, forward and
    backward.
    """
    schema = SCHEMAS[FIRST[model]]
    network = build_model(model, schema, options={}, seed=1).cuda()
    layers = sum(1 for layer in network.modules() if list(layer.parameters(recurse=False)))
    allowed = 1e-5 + 2 * layers * math.sqrt(9 * 256) * 2**-24
    with as_precise_as_norms():
        engine = engine_of(network, CudaGraphs)
        for size in (30, 28, 33, 25, 30, 40):
            compare(engine, batch(schema, size).cuda(), (torch.arange(size) % len(schema.classes)).cuda(), allowed)
            move(engine)
