"""Whether a GPU trains rightly, and how fast: one command, about ten minutes.

    python benchmarks/gpu.py                          # the first GPU; `make gpu`
    python benchmarks/gpu.py --device cpu --small     # the same stages in small, to try the command itself
    python benchmarks/gpu.py --stages versions gradients --folder gpu

Every stage is a process with a time limit. What it finds are lines of JSON in the folder; a stage that fails or takes
too long is a line too, and the others go on. A table comes last; the exit status is 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from speed import DATA, LOSS, NOISE_MULTIPLIER, Bench, Stopwatch, random_records, schema
from torch import Tensor, nn

from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.data.records import Records
from equidp.gradients import fused
from equidp.gradients.bookkeeping import Precision
from equidp.gradients.engine import GradientEngine
from equidp.gradients.memory import room_for
from equidp.gradients.precision import as_precise_as_norms
from equidp.gradients.recording import CudaGraphs
from equidp.mechanism.device import driver_version, fixed_order
from equidp.mechanism.noise import SeededRandom, Stream
from equidp.mechanism.parts import Draw
from equidp.mechanism.poisson import sample_on_host
from equidp.mechanism.recorded import TRIALS
from equidp.mechanism.sampling import Population
from equidp.mechanism.trainer import Trainer
from equidp.models import MODELS, build_model
from equidp.models.base import Standardise
from equidp.models.pretrained import resnet
from equidp.training.networks import predict

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]

WITH_WEIGHTS = ("backbone", "frozen_backbone", "resnet_finetune")
"""Models that want a file of pretrained weights; their layers are those of others."""

SPEED = [("cnn4", 512), ("resnet9", 64), ("resnet9", 1024), ("cnn_small", 256), ("logistic", 256), ("bilstm", 64)]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a stage runs, and how much of it."""

    device: torch.device
    small: bool

    @property
    def models(self) -> list[str]:
        """Those that are tried."""
        return ["logistic", "cnn_small"] if self.small else [name for name in MODELS if name not in WITH_WEIGHTS]

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Brought(SeededRandom):
    """The CPU's coins and noise, brought to a device: two runs differ by their arithmetic alone."""

    def __init__(self, seed: int, there: torch.device) -> None:
        super().__init__(seed, "cpu")
        self.there = there

    def bernoulli(self, probability: float | Tensor, size: int) -> Tensor:
        return self.uniform(size) < probability

    def uniform(self, size: int, stream: Stream = "sampling") -> Tensor:
        return super().uniform(size, stream).to(self.there)

    def normal(self, size: int) -> Tensor:
        return super().normal(size).to(self.there)


def versions(place: Place) -> Iterator[Row]:
    """The card, its driver, and what launching one operation costs."""
    one, rounds = torch.zeros(1, device=place.device), 2_000
    for _ in range(100):
        one.add_(1)
    place.wait()
    start = time.perf_counter()
    for _ in range(rounds):
        one.add_(1)
    place.wait()
    launch = (time.perf_counter() - start) / rounds
    card = torch.cuda.get_device_properties(place.device) if place.device.type == "cuda" else None
    yield {
        "what": card.name if card else "CPU",
        "memory GiB": round(card.total_memory / 2**30, 1) if card else None,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "driver": driver_version(),
        "kernels": fused.version(place.device) or "torch's operations",
        "µs an operation": round(launch * 1e6, 2),
    }


def tests(place: Place) -> Iterator[Row]:
    """The tests that need a GPU."""
    files = sorted(str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text())
    how = ["--collect-only"] if place.small else []
    done = _run([sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *files, *how], limit=240)
    yield {"what": "pytest -m gpu", "said": done.stdout.strip().rpartition("\n")[2], "ok": done.returncode == 0}


def _each_of(names: list[Any], found: Callable[[Any], Row]) -> Iterator[Row]:
    """A row for each; one that fails is a wrong row, and the next ones go on."""
    for name in names:
        what = name if isinstance(name, str) else ", ".join(filter(None, name))
        try:
            yield {"what": what, **found(name)}
        except Exception as error:
            *_, place = traceback.extract_tb(error.__traceback__)
            said = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            yield {"what": what, "said": " ".join(said.split())[:300], "ok": False}


ROUNDING = {("float32", ""): 2**-21, ("float32", "TF32"): 2**-11, ("bf16", "TF32"): 2**-9}
"""u, by which a layer's products are off: what shortens their factors, and for float32 some 64 partial sums of 2⁻²⁴."""


def gradients(place: Place) -> Iterator[Row]:
    """Norms and sums of every model against the CPU's, and what one record less does to the others.

    *Privacy.* With one record less the others' norms must be the very same numbers, as all passes have one shape, and
    a sum of gradients of length 1 must move by 1, up to the rounding of a float32 sum of B of them. The first is asked
    while cuDNN adds in a fixed order: where it does not, two runs of the *same* batch may differ as well.

    *Accuracy.* A model of L layers is off by r = 4·L·u of a gradient's length: in each layer two factors are rounded,
    forward and backward. Rounding also moves a share r of the activations across the kink of a ReLU, and as many
    gates of a gradient flip: a share √r of its length, in another direction for each record. So the middle one of the
    records' norms is compared with r, and each with √r: a single gate that flips moves its record's norm by far more
    than rounding moves the others (`docs/gpu.md` has an example). A sum of B moves by √(r/B) of the B lengths that
    were added. It is compared with these and not with the sum's own length: gradients that nearly cancel leave a short
    sum, and the error that any arithmetic has.
    """
    ways = [how for how in ROUNDING if how[0] == "float32" or place.device.type != "cpu"]  # where bf16 is refused
    yield from _each_of([(name, *how) for name in place.models for how in ways], partial(_gradients, place))


def _gradients(place: Place, which: tuple[str, Precision, str]) -> Row:
    (name, precision, tf32), size = which, 8 if place.small else 64
    records, expected = _on_cpu(name, size)
    features, labels = records.features.to(place.device), records.labels.to(place.device)
    model = build_model(name, records.schema, seed=1).to(place.device)
    layers = sum(1 for layer in model.modules() if list(layer.parameters(recurse=False)))
    engine = GradientEngine(model, LOSS, precision=precision, rows=size)
    with contextlib.nullcontext() if tf32 else as_precise_as_norms():
        found, again = (_norms_and_sum(engine, features, labels) for _ in range(2))
        fewer = _norms_and_sum(engine, features[:-1], labels[:-1])
        with _adding_in_order():
            whole, less = (_norms_and_sum(engine, features[:n], labels[:n])[0] for n in (size, size - 1))
    off = float((found[1] - expected[1]).norm() / size)
    moved = float((found[1] - fewer[1]).norm())
    same, repeated = torch.equal(less, whole[:-1]), torch.equal(again[0], found[0])
    r = 4 * layers * ROUNDING[precision, tf32]
    norms = (found[0] / expected[0] - 1).abs()
    middle, most = float(norms.median()), float(norms.max())
    right = middle <= r and most <= math.sqrt(r) and off <= math.sqrt(r / size)
    return {
        "norms off, the middle one": middle,
        "at most": most,
        "sum off, of B": off,
        "allowed": f"{r:.1e}, {math.sqrt(r):.1e} and {math.sqrt(r / size):.1e}",
        "same for others": same,
        "same when repeated": repeated,
        "moved by": moved,
        "ok": right and same and moved <= 1 + 1e-5 * size,
    }


@contextlib.contextmanager
def _adding_in_order() -> Iterator[None]:
    """cuDNN's own choice adds in no fixed order in some models: the same batch then differs from itself.

    `fixed_order` asks all of torch for it, and refuses models with an operation that has no such kernel.
    """
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


@lru_cache(maxsize=1)
def _on_cpu(name: str, size: int) -> tuple[Records, tuple[Tensor, Tensor]]:
    """Records for a model, and what the CPU finds of them."""
    torch.manual_seed(0)
    facts = schema(DATA.get(name, "grey"))
    records, model = random_records(facts, size), build_model(name, facts, seed=1)
    return records, _norms_and_sum(GradientEngine(model, LOSS), records.features, records.labels)


def graphs(place: Place) -> Iterator[Row]:
    """Whole steps replayed against steps afresh; no replayed step may wait for the device."""
    if place.device.type != "cuda":
        yield {"what": "CUDA graphs are for a GPU"}
        return
    names = (
        ["sgd", "dpsgd_f", "dpsgd_decay", "dpis"] if place.small else [name for name in ALGORITHMS if name != "custom"]
    )
    yield from _each_of(names, partial(_replayed, place))


def _replayed(place: Place, name: str) -> Row:
    recorded, plain = (_trained(name, place.device, steps=8, brought=False, graphs=how) for how in (True, False))
    steps = recorded.recorded
    assert steps is not None
    # a recording on trial compares numbers, which waits; a new noise or clip factor has a new recording
    changes = len({(segment.noise, segment.clip) for segment in recorded.segments}) > 1
    watched = not steps.reason and not changes and all(made.tried == TRIALS for made in steps._made.values())
    if watched:
        torch.cuda.set_sync_debug_mode("error")
    try:
        recorded.run_steps(8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    plain.run_steps(8)
    off = _off(recorded.engine.flatten().cpu(), plain.engine.flatten().cpu())
    same = recorded.ledger.done == plain.ledger.done
    why = "its noise changes" if changes else "it is not replayed whole"
    watchable = watched or changes or bool(steps.reason)
    return {
        "weights off": off,
        "same ledger": same,
        "not whole as": steps.reason or None,
        "waits": "never" if watched else f"not asked, as {why}",
        "ok": same and off < 1e-3 and watchable and "something else" not in steps.reason,
    }


def algorithms(place: Place) -> Iterator[Row]:
    """Twenty steps of every algorithm against the CPU, with the same coins and noise."""
    some = ["dpsgd", "dpsgd_f", "sa_dpsgd", "dpis", "asc"]
    names = some if place.small else [name for name in ALGORITHMS if name not in ("sgd", "custom")]
    yield from _each_of(names, partial(_against_cpu, place))


def _against_cpu(place: Place, name: str) -> Row:
    here, there = (
        _trained(name, device, steps=4 if place.small else 20) for device in (torch.device("cpu"), place.device)
    )
    off = _off(there.engine.flatten().cpu(), here.engine.flatten().cpu())
    pairs = list(zip(there.ledger.done, here.ledger.done, strict=True))
    if here.algorithm.sampler.budget(here.plan) is None:
        same = all(one == other for one, other in pairs)
    else:  # rates and noise follow from released values, which the devices round each in their own way
        same = all(
            one.count == other.count
            and math.isclose(one.sampling_rate, other.sampling_rate, rel_tol=1e-5)
            and math.isclose(one.noise_multiplier, other.noise_multiplier, rel_tol=1e-5)
            for one, other in pairs
        )
    return {"weights off": off, "same ledger": same, "ok": same and off < 1e-3}


def resumed(place: Place) -> Iterator[Row]:
    """Twenty steps against ten and ten more of a trainer that goes on, bit by bit."""
    with fixed_order(True, place.device):
        for name in ("dpsgd", "dpsgd_f"):
            whole, first = (_trained(name, place.device, steps=steps, brought=False) for steps in (20, 10))
            second = _trained(name, place.device, steps=0, brought=False)
            for event in first.ledger.done:
                second.ledger.append(event)
            second.load_state_dict(first.state_dict())
            second.run_steps(10)
            same = torch.equal(second.engine.flatten(), whole.engine.flatten())
            yield {"what": name, "same bits": same, "ok": same}


def speed(place: Place) -> Iterator[Row]:
    """Steps against SGD and Opacus (`speed.py`)."""
    for model, batch in [("logistic", 256)] if place.small else SPEED:
        command = [sys.executable, str(ROOT / "benchmarks" / "speed.py"), "--model", model, "--batch-size", str(batch)]
        # turns long enough that the host is ahead of the device, as in a run
        turn = 4 if place.small or batch >= 1024 or model == "bilstm" else 20
        how = ["--device", place.device.type, "--json", "--rounds", "3" if place.small else "8", "--turn", str(turn)]
        how += ["--opacus"] if place.small else ["--opacus", "hooks", "ghost"]
        done = _run([*command, *how], limit=90)
        found = json.loads(done.stdout) if done.returncode == 0 else {"said": done.stderr.strip()[-300:]}
        yield {"what": f"{model}, B {batch}", "ok": done.returncode == 0, "found": found}


def network_of_images(place: Place) -> Iterator[Row]:
    """ResNet-50 on synthetic images of the medical case's size and number: steps against SGD's in the same mode and
    against Opacus's, and an epoch with its evaluation.
    """
    size, tested, batch, network = (8, 4, 4, "resnet9") if place.small else (8_012, 2_003, 64, "resnet50")
    facts = dataclasses.replace(schema("colour"), shape=(3, 32, 32) if place.small else (3, 224, 224))
    records, test = (random_records(facts, count) for count in (size, tested))
    records = records.to(place.device)
    torch.manual_seed(0)
    if place.small:
        model: nn.Module = build_model(network, facts, seed=1)
    else:
        model = nn.Sequential(Standardise(facts), resnet(network, norm="frozen"))
    plan, times = Plan(size, batch, 20, 10, 1e-5, NOISE_MULTIPLIER), dict[str, float]()
    turns = 2 if place.small else 20
    for graphs in (False, True) if place.device.type == "cuda" else (False,):
        for name in ("sgd", "dpsgd"):
            there = copy.deepcopy(model).to(place.device)
            trainer = Trainer(
                model=there,
                loss=LOSS,
                algorithm=algorithm_settings(name).build(),
                plan=plan,
                population=Population(records, records.labels),
                random=SeededRandom(0, place.device),
                ledger=Ledger(),
                learning_rate=0.01,
                physical_batch_size=room_for(there, records.features, batch)[1],
                new_recorder=partial(CudaGraphs, place.device) if graphs else None,
            )
            _peak(place)
            times[name] = _each(partial(trainer.run_steps, 1), place, turns)
            row = {"what": f"{network}, {name}{', in a graph' if graphs else ''}, B {batch}"}
            row |= {"ms a step": round(1e3 * times[name], 2), **_peak(place)}
            yield row if name == "sgd" else row | {"of SGD": round(times[name] / times["sgd"], 3)}
    start = time.perf_counter()
    trainer.run_steps(plan.epoch_lengths()[0])
    place.wait()
    trained = time.perf_counter()
    for part in (records.features, test.features):
        predict(there, part)
    evaluated = time.perf_counter() - trained
    yield {"what": "an epoch and its evaluation, s", "training": round(trained - start, 2),
           "evaluation of both parts": round(evaluated, 2)}  # fmt: skip
    del trainer, there
    bench = OfImages(model.to(place.device), records, plan, place.device)
    for mode in ("hooks", "ghost"):
        try:
            each = _each(bench.opacus(mode, channels_last=False), place, turns)
            found: Row = {"ms a step": round(1e3 * each, 2), "of ours": round(each / times["dpsgd"], 2)}
        except Exception as error:
            found = {"said": f"{type(error).__name__}: {error}"[:200]}
        yield {"what": f"{network}, Opacus {mode}, B {batch}", **found, **_peak(place)}


class OfImages(Bench):
    """Opacus's steps on a given model and given records."""

    def __init__(self, model: nn.Module, records: Records, plan: Plan, device: torch.device) -> None:
        self.model, self.records, self.plan, self.device = model, records, plan, device


def _each(step: Callable[[], object], place: Place, turns: int) -> float:
    for _ in range(5):  # until a recording is trusted
        step()
    return Stopwatch(place.device).turn(step, turns)


def memory(place: Place) -> Iterator[Row]:
    """Three trainings in a row: none may leave anything behind."""
    peaks = []
    for turn in range(3):
        trainer = Bench("cnn_small", 64, place.device.type, 2_000).trainer("dpsgd_f")
        trainer.run_steps(4 if place.small else 600)
        del trainer
        peaks.append(_peak(place).get("peak MiB", 0.0))
        yield {"what": f"training {turn + 1}", "peak MiB": peaks[-1], "ok": peaks[-1] <= 1.02 * peaks[0] + 1}


def runs(place: Place) -> Iterator[Row]:
    """`kedro run` from the command line; digits on the CPU too, whose ε must be the same."""
    device = place.device.type
    wanted = [("digits", one, "training.epochs=2" if place.small else "") for one in dict.fromkeys((device, "cpu"))]
    if not place.small:
        wanted.append(("mnist_unbalanced", device, ""))
    epsilons: dict[str, set[float | None]] = {}
    for dataset, where, more in wanted:
        how = ",".join(filter(None, [f"dataset={dataset}", f"training.device={where}", more]))
        start = time.perf_counter()
        done = _run([sys.executable, "-m", "kedro", "run", "--pipeline=dpsgd_f", f"--params={how}"], limit=240)
        row: Row = {"what": f"{dataset}, {where}", "seconds": round(time.perf_counter() - start, 1)}
        if done.returncode:
            yield row | {"ok": False, "said": (done.stderr or done.stdout).strip()[-300:]}
            continue
        row |= _last_run()
        same = epsilons.setdefault(dataset, set())
        same.add(row["epsilon"])
        yield row | {"ok": len(same) == 1}


def _last_run() -> Row:
    """What MLflow has of the run that began last: ε, figures of test records, and how long the private model trained.

    An epoch's ε is written with the time of its end, so the first epoch, in which everything is made, is left out.
    """
    from mlflow import MlflowClient

    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{ROOT / 'mlflow.db'}"))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, order_by=["attributes.start_time DESC"], max_results=1)
    ended: dict[int, int] = {}
    for metric in client.get_metric_history(run.info.run_id, "epsilon_rdp"):
        ended[metric.step] = min(metric.timestamp, ended.get(metric.step, metric.timestamp))
    first, last = min(ended), max(ended)
    return {
        "training and evaluation after the first epoch, s": (ended[last] - ended[first]) / 1000,
        "epochs": last,
        **{name: run.data.metrics[name] for name in ("epsilon", "test/accuracy", "test/worst_group_accuracy")},
    }


STAGES: dict[str, tuple[Callable[[Place], Iterator[Row]], int]] = {
    "versions": (versions, 60), "tests": (tests, 260), "gradients": (gradients, 150), "algorithms": (algorithms, 120),
    "graphs": (graphs, 120),
    "resumed": (resumed, 60), "speed": (speed, 560), "images": (network_of_images, 120), "memory": (memory, 90),
    "runs": (runs, 500),
}  # fmt: skip
"""And the seconds that each may take."""


def _trained(name: str, device: torch.device, *, steps: int, brought: bool = True, graphs: bool = False) -> Trainer:
    torch.manual_seed(0)
    facts, size = schema("tabular"), 400
    records = random_records(facts, size).to(device)
    trainer = Trainer(
        model=build_model("mlp", facts, seed=1).to(device),
        loss=LOSS,
        algorithm=algorithm_settings(name).build(),
        plan=Plan(size, 50, 20, len(facts.classes), 1e-3, NOISE_MULTIPLIER),
        population=Population(records, records.labels),
        random=Brought(3, device) if brought else SeededRandom(3, device),
        ledger=Ledger(),
        learning_rate=0.1,
        public=random_records(facts, 40).to(device),
        new_recorder=partial(CudaGraphs, device) if graphs else None,
    )
    if brought and trainer.sampling.on_host:  # else a GPU's batches are drawn another way than the CPU's
        drawn, rate = SeededRandom(4, "cpu"), trainer.sampling_rate
        trainer.sampling.draw = lambda: Draw(  # type: ignore[method-assign]
            sample_on_host(drawn, rate, size).to(device)
        )
    trainer.run_steps(steps)
    return trainer


def _norms_and_sum(engine: GradientEngine, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    norms = engine.norms(features, labels)
    return norms.cpu(), engine.weighted_sum(1 / norms.clamp(min=1e-9)).cpu()


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def _peak(place: Place) -> Row:
    if place.device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(place.device) / 2**20
    torch.cuda.reset_peak_memory_stats(place.device)
    return {"peak MiB": round(peak, 1)}


def _run(command: list[str], limit: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"took more than {limit:g} s")


def do_stage(name: str, place: Place, file: Path) -> None:
    """Run a stage in this process; each row is written as soon as it is known."""
    torch.manual_seed(0)
    with file.open("a") as lines:
        for row in STAGES[name][0](place):
            lines.write(json.dumps({"stage": name, **row}, ensure_ascii=False) + "\n")
            lines.flush()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a few seconds of each stage")
    parser.add_argument("--stages", nargs="*", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--folder", type=Path, help="for the lines; by default a new one")
    parser.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    place = Place(torch.device(given.device), given.small)
    if place.device.type == "cuda" and not torch.cuda.is_available():
        print(f"There is no GPU that torch can use (driver: {driver_version() or 'none'}): try --device cpu --small.")
        return 2
    folder = given.folder or Path(tempfile.mkdtemp(prefix="equidp-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "found.jsonl"
    if given.stage:
        do_stage(given.stage, place, file)
        return 0
    file.unlink(missing_ok=True)
    for name in given.stages:
        start = time.perf_counter()
        how = ["--device", given.device, *(["--small"] if given.small else []), "--folder", str(folder)]
        limit = STAGES[name][1] * (1 if place.device.type == "cuda" else 5)
        done = _run([sys.executable, str(Path(__file__).resolve()), "--stage", name, *how], limit)
        row = {"stage": name, "what": "whole stage", "seconds": round(time.perf_counter() - start, 1)}
        row |= {"ok": True} if done.returncode == 0 else {"ok": False, "said": done.stderr.strip()[-600:]}
        with file.open("a") as lines:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        _show(file, name)
    print(f"\nAll lines: {file}")
    return 0 if all(json.loads(line).get("ok", True) for line in file.read_text().splitlines()) else 1


def _show(file: Path, stage: str) -> None:
    for row in map(json.loads, file.read_text().splitlines()):
        if row.pop("stage") == stage:
            mark = "" if row.pop("ok", True) else "WRONG "
            rest = ", ".join(f"{name} {value}" for name, value in row.items() if name != "what" and value is not None)
            print(f"{stage:<11}{mark}{row['what']}: {' '.join(rest.split())}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
