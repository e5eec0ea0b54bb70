"""On another device than the CPU a training gives the CPU's result: tried without a GPU, on a pretended one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.conftest import SCHEMAS, batch
from tests.models.test_models import FIRST, cross_entropy
from tests.pretended import GPU, OnGpu, as_on_gpu, pretended_gpu
from tests.thorough import first
from tests.training.test_checkpoint import EMPTY
from tests.tried import tried_once
from torch import Tensor, nn

from equidp.accounting.events import Event
from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.data.records import Records
from equidp.mechanism.device import choose_device
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.sampling import Population
from equidp.mechanism.trainer import Trainer
from equidp.models import MODELS, build_model
from equidp.models.features import Scatter
from equidp.system.workplace import CHECKPOINT_FILE
from equidp.training.checkpoint import read_checkpoint, write_checkpoint

RECORDS = 40
TRANSFORMS = ("psasc_momentum_gd",)
"""`torch.func` sees through a pretended tensor."""

FEW = ("dpsgd_f", "sa_dpsgd", "dpis")
"""Each takes a second or two, and `make slow` has the others."""

PRETRAINED = ("backbone", "resnet_finetune")
"""They want a file of weights; their layers are those of others."""


SCATTERED: dict[tuple[str, int, bytes], Tensor] = {}


@pytest.fixture(scope="module", autouse=True)
def tried():
    """On the pretended GPU, too, but not for every algorithm anew."""
    with tried_once():
        yield


@pytest.fixture
def gpu():
    with pretended_gpu():
        yield


def new_trainer(algorithm: str, model: str, device: str, *, by_unit: bool, chunk: int | None) -> Trainer:
    """A run of four steps."""
    schema = SCHEMAS[FIRST[model]]
    labels = (torch.arange(RECORDS) % len(schema.classes)).to(device)
    unit = (torch.arange(RECORDS) // 2).to(device)
    records = Records(batch(schema, RECORDS).to(device), labels, {"class": labels}, schema, unit=unit)
    population = Population(records, labels, by_unit=by_unit)
    return Trainer(
        model=build_model(model, schema, options={}, seed=1).to(device),
        loss=cross_entropy,
        algorithm=algorithm_settings(algorithm).build(),
        plan=Plan(population.size, 10, 1, len(schema.classes), 1e-3, 1.0),
        population=population,
        random=SeededRandom(3, device),  # the pretended GPU draws the CPU's numbers
        ledger=Ledger(),
        learning_rate=0.1,
        physical_batch_size=chunk,
        diagnostics=True,
        public=records,
    )


def trained(algorithm: str, model: str, device: str, steps: int | None, **how) -> tuple[list[Event], torch.Tensor]:
    """What a run charges, and its parameters on the CPU; all four steps unless told otherwise."""
    trainer = new_trainer(algorithm, model, device, **how)
    if steps is None:
        trainer.train(progress=False)
    else:
        trainer.run_steps(steps)
    flat = trainer.engine.flatten()
    assert isinstance(flat, OnGpu) == (device != "cpu")
    return trainer.ledger.done, flat.cpu()


def compare(algorithm: str, model: str, steps: int | None = None, **how) -> None:
    with as_on_gpu():
        charged, parameters = trained(algorithm, model, "cpu", steps, **how)
    assert choose_device("auto") == torch.device("cuda")
    charged_there, parameters_there = trained(algorithm, model, "cuda", steps, **how)
    assert charged_there == charged
    assert (parameters_there - parameters).norm() < 1e-4 * parameters.norm()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"by_unit": False, "chunk": None}, id="records", marks=pytest.mark.slow),
        pytest.param({"by_unit": True, "chunk": 9}, id="units"),
    ],
)
@pytest.mark.parametrize("algorithm", first([n for n in ALGORITHMS if n not in ("custom", *TRANSFORMS)], FEW))
def test_every_algorithm_gives_the_cpus_result(gpu, algorithm: str, how: dict) -> None:
    compare(algorithm, "mlp", **how)


@pytest.mark.parametrize("model", [name for name in MODELS if name not in PRETRAINED])
@pytest.mark.slow
def test_every_model_gives_the_cpus_result(gpu, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scatter, "forward", scattered_once(Scatter.forward))
    compare("dpsgd_f", model, steps=2, by_unit=False, chunk=None)


def scattered_once(forward: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Features by content, for all models: they have no parameters, and on the pretended GPU an image is slow."""

    def found(module: nn.Module, images: Tensor) -> Tensor:
        keys = [(str(images.device), module.groups, image.numpy().tobytes()) for image in images.cpu()]
        for place, key in enumerate(keys):
            if key not in SCATTERED:
                SCATTERED[key] = forward(module, images[place : place + 1])
        return torch.cat([SCATTERED[key] for key in keys])

    return found


@pytest.mark.slow
def test_scattering_on_a_gpu_is_the_cpus(gpu) -> None:
    images = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    there, here = (Scatter(SCHEMAS["digits"], Scatter.Options()).to(device) for device in ("cuda", "cpu"))
    assert torch.allclose(there(images.to("cuda")).cpu(), here(images), atol=1e-6)


def test_the_pretended_gpu_refuses_what_a_gpu_does(gpu) -> None:
    there = torch.ones(2, device="cuda")
    assert there.device == GPU
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(2)
    with pytest.raises(TypeError, match="to numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="generator of the tensor's own device"):
        torch.rand(2, generator=torch.Generator(), device="cuda")
    assert float((there + torch.tensor(1.0)).sum()) == 4.0


def structure(state: Any) -> Any:
    """What a state holds and where, without its numbers."""
    if isinstance(state, dict):
        return tuple((name, structure(value)) for name, value in sorted(state.items()))
    return type(state).__name__, getattr(state, "dtype", None)


def test_a_run_goes_on_from_a_checkpoint_which_lies_on_the_cpu(tmp_path: Path) -> None:
    with pretended_gpu():
        goes_on("dpsgd_f", tmp_path)


@pytest.mark.slow
def test_so_does_a_run_of_every_kind(tmp_path: Path) -> None:
    """One algorithm for each structure that the state of any has: copying a state looks at nothing else."""
    found: dict[Any, str] = {}
    for name in ALGORITHMS:
        if name not in ("custom", *TRANSFORMS):
            trainer = new_trainer(name, "mlp", "cpu", by_unit=False, chunk=None)
            found.setdefault(structure(trainer.state_dict()), name)
    assert len(found) >= 5
    with pretended_gpu():
        for name in found.values():
            goes_on(name, tmp_path)


def goes_on(algorithm: str, tmp_path: Path) -> None:
    whole = new_trainer(algorithm, "mlp", "cuda", by_unit=False, chunk=None)
    whole.run_steps(2)
    write_checkpoint(tmp_path / CHECKPOINT_FILE, EMPTY | {"state": whole.state_dict()}, {})
    second = new_trainer(algorithm, "mlp", "cuda", by_unit=False, chunk=None)
    for event in whole.ledger.done:
        second.ledger.append(event)
    whole.train(progress=False)
    second.load_state_dict(read_checkpoint(tmp_path / CHECKPOINT_FILE, {}).state)
    second.train(progress=False)
    assert second.ledger.done == whole.ledger.done
    assert torch.equal(second.engine.flatten().cpu(), whole.engine.flatten().cpu())
