"""Speed: one private step against one ordinary step of the same loop, and against Opacus, in one process.

    python benchmarks/speed.py --model cnn4 --batch-size 512 --device cpu --json
    python benchmarks/speed.py --grid                      # what docs/performance.md shows

Every contender takes the same model, the same random data and the same Poisson sampling; contenders take turns of a
few steps, the first of which is not timed, as in a run a step follows one of its own kind. What is printed are
medians of the ratios of the same round with their quartiles. `sgd` is the trainer's own non-private step, which
shares the trainer's memory layout; `ordinary` is one written by hand in the model's own. `ours` is the trainer's
complete private step: sampling, gathering, norms, weights, weighted sum, noise, optimiser. `floor` is the forward and
backward pass to the layers' outputs, below which no private step can go. On a GPU `graphs` are `sgd` and `ours` with
whole steps replayed as CUDA graphs. `secure` is `ours` in secure mode.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.data.records import Records, Schema
from equidp.errors import EquidpError
from equidp.gradients import compiled
from equidp.gradients.losses import CrossEntropy
from equidp.gradients.recording import CudaGraphs
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.poisson import poisson_sample
from equidp.mechanism.sampling import Population
from equidp.mechanism.secure import SecureRandom
from equidp.mechanism.trainer import Trainer
from equidp.models import build_model

Step = Callable[[], object]
Draw = Callable[[], tuple[Tensor, Tensor]]
"""Features and labels of a batch."""
Losses = Callable[[Tensor, Tensor], Tensor]
"""`[b]` of outputs and labels."""

LOSS = CrossEntropy()
NOISE_MULTIPLIER, CLIP_NORM, LEARNING_RATE, SEED = 1.0, 1.0, 0.05, 0
WARM_UP, PUBLIC_RECORDS = 3, 1_024
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt's parameters
MIB = 1 << 20
NOT_BY_BATCH = ("sgd", "dpsgd", "psasc_momentum_gd")
"""Not in `all`: measured already, or taking every record in every step."""
OPACUS = ("hooks", "functorch", "ew", "ghost", "shipped")
GRID = [
    ("cnn4", 256), ("cnn4", 512), ("cnn4", 1024), ("cnn_small", 256), ("resnet9", 64), ("bilstm", 64), ("mlp", 256),
    ("logistic", 256),
]  # fmt: skip
SLOW = ("resnet9", "bilstm")
"""A fifth of the rounds, in the grid."""
GPU_GRID = [("resnet_finetune", 64)]
"""Measured besides on a GPU."""
DATA = {"logistic": "tabular", "resnet9": "colour", "resnet_finetune": "colour", "bilstm": "text"}
"""Which data a model is measured on; MNIST-like images where nothing is said."""


def schema(kind: str) -> Schema:
    """The shapes of Adult, MNIST, CIFAR-10 and IMDB."""
    ten = tuple(map(str, range(10)))
    return {
        "tabular": Schema("tabular", "tabular", (40,), ten[:2], {"class": ten[:2]}),
        "grey": Schema("grey", "image", (1, 28, 28), ten, {"class": ten}, mean=(0.13,), sd=(0.31,)),
        "colour": Schema("colour", "image", (3, 32, 32), ten, {"class": ten}, mean=(0.5,) * 3, sd=(0.25,) * 3),
        "text": Schema("text", "text", (80,), ten[:2], {"class": ten[:2]}, vocabulary=10_000),
    }[kind]


def random_records(facts: Schema, size: int) -> Records:
    """Records of the right shape, content random."""
    shape = (size, *facts.shape)
    features = {
        "tabular": lambda: torch.rand(shape),
        "image": lambda: torch.randint(0, 256, shape, dtype=torch.uint8),
        "text": lambda: torch.randint(1, max(facts.vocabulary, 2), shape),
    }[facts.kind]()
    labels = torch.randint(0, len(facts.classes), (size,))
    return Records(features, labels, {"class": labels}, facts)


def build(model: str, facts: Schema) -> nn.Module:
    """The model; what wants pretrained weights gets random ones, which take the same time."""
    if model != "resnet_finetune":
        return build_model(model, facts, seed=SEED)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pth"
        torch.save(torchvision.models.resnet18().state_dict(), weights)
        return build_model(model, facts, options={"weights": str(weights)}, seed=SEED)


class Bench:
    """One model, one batch size, one device: builds every contender's step."""

    def __init__(self, model: str, batch_size: int, device: str, records: int) -> None:
        torch.manual_seed(SEED)
        facts = schema(DATA.get(model, "grey"))
        self.records = random_records(facts, max(records, 2 * batch_size)).to(device)
        self.public = random_records(facts, PUBLIC_RECORDS).to(device)
        self.model = build(model, facts).to(device)
        self.plan = Plan(len(self.records), batch_size, 1_000, len(facts.classes), 1e-5, NOISE_MULTIPLIER)
        self.device = torch.device(device)

    def trainer(
        self,
        algorithm: str,
        *,
        average: float | None = None,
        physical_batch_size: int | None = None,
        cuda_graphs: bool = False,
        secure: bool = False,
        **more: Any,
    ) -> Trainer:
        """A trainer on a copy of the model; `more` is given to it."""
        return Trainer(
            model=copy.deepcopy(self.model),
            loss=LOSS,
            algorithm=algorithm_settings(algorithm).build().averaged(average),
            plan=self.plan,
            population=Population(self.records, self.records.labels),
            random=SecureRandom(self.device) if secure else SeededRandom(SEED, self.device),
            ledger=Ledger(),
            learning_rate=LEARNING_RATE,
            physical_batch_size=physical_batch_size,
            new_recorder=partial(CudaGraphs, self.device) if cuda_graphs else None,
            public=self.public,
            **more,
        )

    def step(self, algorithm: str, **settings: Any) -> Step:
        """A complete step of the trainer."""
        trainer = self.trainer(algorithm, **settings)
        segment = trainer.segments[0]
        trainer.begin_epoch(0)
        return lambda: trainer.step(segment)

    def sampled(self) -> Draw:
        """Poisson batches, drawn and gathered as the trainer does."""
        random, rate = SeededRandom(SEED, self.device), self.plan.sampling_rate
        population = Population(self.records, self.records.labels)

        def draw() -> tuple[Tensor, Tensor]:
            batch = population.batch(poisson_sample(random, rate, population.size, population.device))
            return batch.features, batch.labels

        return draw

    def floor(self) -> Step:
        """Forward and backward to the layers' outputs: what a private step cannot do without."""
        engine, draw = self.trainer("dpsgd").engine, self.sampled()
        return lambda: engine.passes.calls(*draw(), [(None, 1.0)])

    def ordinary(self) -> Step:
        """A non-private step as anyone would write it: the model's own memory layout, `backward`, the optimiser."""
        return ordinary(copy.deepcopy(self.model).train(), LOSS, self.sampled(), self.plan.batch_size)

    def opacus(self, mode: str, *, channels_last: bool) -> Step:
        """A complete step of Opacus, batches drawn as for everybody else."""
        model = copy.deepcopy(self.model).train()
        if channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if mode == "shipped":
            return _shipped(model, self)
        given = model, nn.CrossEntropyLoss(reduction="none"), self.sampled(), self.plan.batch_size
        return ghost(*given) if mode == "ghost" else stored(*given, mode)


def ordinary(model: nn.Module, losses: Losses, draw: Draw, batch_size: int) -> Step:
    """A non-private step: batches as they are drawn, the loss of each record, `backward`, the optimiser."""
    optimizer = _sgd(model)

    def step() -> None:
        features, labels = draw()
        optimizer.zero_grad()
        (losses(model(features), labels).sum() / batch_size).backward()
        optimizer.step()

    return step


def stored(model: nn.Module, losses: Losses, draw: Draw, batch_size: int, mode: str = "hooks") -> Step:
    """Opacus with per-sample gradients held in memory: `hooks` (its default), `functorch`, `ew`."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleExpandedWeights
    from opacus.optimizers import DPOptimizer

    wrapped: nn.Module
    if mode == "ew":
        wrapped = GradSampleModuleExpandedWeights(model, loss_reduction="mean")
    else:
        wrapped = GradSampleModule(model, loss_reduction="mean", force_functorch=mode == "functorch")
    optimizer = DPOptimizer(_sgd(wrapped), **_privacy(batch_size), loss_reduction="mean")

    def step() -> None:
        features, labels = draw()
        losses(wrapped(features), labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()  # frees the stored gradients: several contenders are alive at once

    return step


def ghost(model: nn.Module, losses: Losses, draw: Draw, batch_size: int) -> Step:
    """Opacus's ghost clipping: two backward passes, no stored gradients."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, loss_reduction="mean", max_grad_norm=CLIP_NORM, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(_sgd(wrapped), **_privacy(batch_size), loss_reduction="mean")

    def step() -> None:
        features, labels = draw()
        # what Opacus's own wrapper of a loss gives
        DPTensorFastGradientClipping(wrapped, optimizer, losses(wrapped(features), labels), "mean").backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _shipped(model: nn.Module, bench: Bench) -> Step:
    """Opacus as `PrivacyEngine.make_private` hands it out: `hooks`, its own Poisson loader, its accountant."""
    from opacus import PrivacyEngine

    records = TensorDataset(bench.records.features, bench.records.labels)
    wrapped, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=_sgd(model),
        data_loader=DataLoader(records, batch_size=bench.plan.batch_size),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> None:
        features, labels = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(features), labels).backward()
        optimizer.step()

    return step


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


def _privacy(batch_size: int) -> dict[str, float]:
    return {"noise_multiplier": NOISE_MULTIPLIER, "max_grad_norm": CLIP_NORM, "expected_batch_size": batch_size}


@dataclass(frozen=True)
class Stopwatch:
    """Times steps on one device.

    Attributes:
        device: its queue is waited for.
        clock: seconds on the wall, or of this process's processor time where a busy machine would blur the wall's
            (with one thread only: threads that wait for each other burn processor time).
    """

    device: torch.device
    clock: Callable[[], float] = time.perf_counter

    def turn(self, step: Step, length: int) -> float:
        """Seconds per step of `length` steps in a row, after one more that fetches into the caches what they find."""
        step()
        self._wait()
        started = self.clock()
        for _ in range(length):
            step()
        self._wait()
        return (self.clock() - started) / length

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def interleaved(self, steps: Mapping[str, Step], rounds: int, length: int) -> dict[str, list[float]]:
        """Seconds per step of every contender's turn, round by round; what disturbs the machine disturbs all alike.

        Every round has an order of its own, so that nobody has always the same neighbour.
        """
        times: dict[str, list[float]] = {name: [] for name in steps}
        for step in list(steps.values()) * WARM_UP:
            step()
        source, order = random.Random(0), list(steps)
        for _ in range(rounds):
            source.shuffle(order)
            for name in order:
                times[name].append(self.turn(steps[name], length))
        return times


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles of the ratios of measurements of the same round."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    low, middle, high = (float(quartile) for quartile in statistics.quantiles(ratios, n=4))
    return middle, low, high


def peak_memory(step: Step, device: torch.device) -> float | None:
    """MiB that a step needs beyond what is there before it; None where the system does not tell."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - allocated) / MIB
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _status("VmRSS")
        for _ in range(3):
            step()
        return _status("VmHWM") - before
    except OSError:
        return None


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def settle_memory() -> None:
    """Bring the C library's heap to the state of a long run, where it knows better; call it before measuring.

    At first it asks the system for every large tensor and gives it back at once, a page fault for every 4 KiB touched;
    only after a hundred steps or so has it learned to keep them. An ordinary step, which allocates most, looks a tenth
    slower until then.
    """
    try:
        allocator = ctypes.CDLL("libc.so.6")
        settled = allocator.mallopt(M_MMAP_THRESHOLD, 32 * MIB) and allocator.mallopt(M_TRIM_THRESHOLD, 1024 * MIB)
    except (OSError, AttributeError):
        settled = 0
    if not settled:
        print("no GNU C library here: the first hundred steps may be slower", file=sys.stderr)
        return
    touched = [torch.zeros(8 * MIB // 4) for _ in range(64)]
    touched.clear()  # free, and never given back


def contenders(bench: Bench, watch: Stopwatch, args: argparse.Namespace) -> dict[str, Step]:
    """Every step that runs here; an Opacus mode that cannot run the model is left out and said so.

    Opacus gets the memory layout in which it is faster.
    """
    steps: dict[str, Step] = {"sgd": bench.step("sgd"), "ordinary": bench.ordinary(), "floor": bench.floor()}
    for name in args.algorithms:
        try:
            steps[f"ours:{name}"] = bench.step(name)
            if args.secure:
                steps[f"secure:{name}"] = bench.step(name, secure=True)
            if bench.device.type == "cuda":
                steps[f"graphs:{name}"] = bench.step(name, cuda_graphs=True)
        except EquidpError as error:
            print(f"{name} left out: {error.message}", file=sys.stderr)
    if bench.device.type == "cuda":
        steps["graphs:sgd"] = bench.step("sgd", cuda_graphs=True)
    for mode in args.opacus:
        try:
            layouts = [bench.opacus(mode, channels_last=last) for last in (False, True)]
            tried = watch.interleaved({str(i): step for i, step in enumerate(layouts)}, rounds=WARM_UP, length=1)
        except Exception as error:
            print(f"opacus {mode} left out: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
            continue
        steps[f"opacus:{mode}"] = layouts[int(min(tried, key=lambda k: statistics.median(tried[k])))]
    return steps


def measure(args: argparse.Namespace, model: str, batch_size: int) -> dict[str, object]:
    """All ratios for one model and batch size."""
    bench = Bench(model, batch_size, args.device, args.records)
    watch = Stopwatch(bench.device, time.process_time if args.clock == "processor" else time.perf_counter)
    steps = contenders(bench, watch, args)
    times = watch.interleaved(steps, args.rounds, args.turn)
    names = {"ours" if k == "ours:dpsgd" else k.replace(":", "_"): k for k in steps}
    result: dict[str, object] = {"model": model, "batch_size": batch_size, "device": args.device}
    result |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "rounds": args.rounds, "turn": args.turn}
    result |= {"clock": args.clock}
    result["sgd_ms"] = 1e3 * statistics.median(times["sgd"])
    for name, key in names.items():
        if key != "sgd":
            middle, low, high = ratio(times[key], times["sgd"])
            result |= {f"{name}_over_sgd": middle, f"{name}_over_sgd_quartiles": [low, high]}
    if "ours:dpsgd" in times:
        result["ours_over_ordinary"] = ratio(times["ours:dpsgd"], times["ordinary"])[0]
        others = (name for name in args.algorithms if name != "dpsgd" and f"ours:{name}" in times)
        result |= {f"ours_{n}_over_ours": ratio(times[f"ours:{n}"], times["ours:dpsgd"])[0] for n in others}
    for name in args.algorithms if args.secure else ():
        if f"secure:{name}" in times:
            result[f"secure_{name}_over_ours"] = ratio(times[f"secure:{name}"], times[f"ours:{name}"])[0]
    if "graphs:dpsgd" in times:
        result["graphs_over_graphs_sgd"] = ratio(times["graphs:dpsgd"], times["graphs:sgd"])[0]
    result |= _best_opacus(times)
    return result | _memory(bench, steps)


def _best_opacus(times: Mapping[str, list[float]]) -> dict[str, object]:
    modes = [k for k in times if k.startswith("opacus:") and k != "opacus:shipped"]
    if not modes:
        return {}
    best = min(modes, key=lambda k: statistics.median(times[k]))
    found: dict[str, object] = {"opacus_best": best, "opacus_best_over_sgd": ratio(times[best], times["sgd"])[0]}
    if "graphs:dpsgd" in times:
        found["opacus_best_over_graphs"] = ratio(times[best], times["graphs:dpsgd"])[0]
    if "ours:dpsgd" in times:
        found["opacus_best_over_ours"] = ratio(times[best], times["ours:dpsgd"])[0]
        for mode in ("hooks", "shipped"):
            if f"opacus:{mode}" in times:
                found[f"opacus_{mode}_over_ours"] = ratio(times[f"opacus:{mode}"], times["ours:dpsgd"])[0]
    return found


def _memory(bench: Bench, steps: Mapping[str, Step]) -> dict[str, object]:
    peaks = {k: peak_memory(step, bench.device) for k, step in steps.items() if k != "floor"}
    base, ours = peaks["sgd"], peaks.get("ours:dpsgd")
    chunked = peak_memory(bench.step("dpsgd", physical_batch_size=bench.plan.batch_size // 4), bench.device)
    return {
        "memory_mib": peaks,
        "ours_memory_over_sgd": ours / base if ours and base else None,
        "ours_in_chunks_memory_over_sgd": chunked / base if chunked and base else None,
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cnn4")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall", help="processor needs --threads 1")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turn", type=int, default=4, help="timed steps in a row, in every round")
    parser.add_argument("--records", type=int, default=20_000, help="size N of the training data sampled from")
    parser.add_argument("--algorithms", nargs="*", default=["dpsgd"], help="names, or `all`")
    parser.add_argument("--opacus", nargs="*", default=list(OPACUS), choices=OPACUS)
    parser.add_argument("--secure", action="store_true", help="each algorithm in secure mode too")
    parser.add_argument("--by-torch", action="store_true", help="compile nothing, as on other systems")
    parser.add_argument("--grid", action="store_true", help="every model of docs/performance.md")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.clock == "processor" and args.threads != 1:
        parser.error("--clock processor needs --threads 1")
    if args.algorithms == ["all"]:
        args.algorithms = ["dpsgd", *(name for name in ALGORITHMS if name not in NOT_BY_BATCH)]
    return args


def show(result: Mapping[str, object]) -> None:
    """One line per figure."""
    for name, value in result.items():
        print(f"{name:36s} {value:.3f}" if isinstance(value, float) else f"{name:36s} {value}")


def main() -> None:
    """Measure and print."""
    args = arguments()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    settle_memory()
    if args.by_torch:
        compiled.gradients_of = lambda *_: None  # type: ignore[assignment]
    rounds = args.rounds
    grid = GRID + (GPU_GRID if args.device.startswith("cuda") else [])
    for model, batch_size in grid if args.grid else [(args.model, args.batch_size)]:
        args.rounds = max(5, rounds // 5) if args.grid and model in SLOW else rounds
        result = measure(args, model, batch_size)
        print(json.dumps(result), flush=True) if args.json else show(result)


if __name__ == "__main__":
    main()
