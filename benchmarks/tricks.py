"""What the training tricks cost, and what they gain: the tables of docs/performance.md and docs/algorithms.md.

    python benchmarks/tricks.py cost --model cnn_small --batch-size 256 [--rounds 20]
    python benchmarks/tricks.py gain --dataset digits --model cnn_small [--seeds 3] [--epochs 30]

`cost` times `dpsgd`'s whole step with and without, in one thread by processor time (the machine may be busy), as
medians of the ratios of a round. `gain` trains `dpsgd` at ε 3 with each setting alone on what the others share.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import speed
import torch

from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.data.records import Split
from equidp.data.sources import source
from equidp.data.splitting import split
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.augmentation import Augmentation
from equidp.mechanism.optimizers import Descent
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.training import TrainingRequest, make_model, plan_run, predict, train_model

CROPS: dict[str, Any] = {"augmentation_kinds": "crop", "augmentation_padding": 1}
GAINS: dict[str, dict[str, Any]] = {
    "none": {},
    "average 0.99": {"average": 0.99},
    "schedule cosine": {"schedule": "cosine"},
    "schedule step": {"schedule": "step"},
    "optimizer momentum, momentum 0.5": {"optimizer": "momentum", "momentum": 0.5},
    "weight_decay 0.001": {"weight_decay": 0.001},
    "augmentations 1, crop": {"augmentations": 1, **CROPS},
    "augmentations 4, crop": {"augmentations": 4, **CROPS},
    "average, augmentations 4": {"average": 0.99, "augmentations": 4, **CROPS},
    **{
        f"adam at 0.01, adam_epsilon {e:g}": {"optimizer": "adam", "learning_rate": 0.01, "adam_epsilon": e}
        for e in (1e-8, 1e-4, 1e-2)
    },
}
"""Row: settings below `training`."""


def cost(args: argparse.Namespace) -> None:
    """Ratios of a step with a trick to one without."""
    bench = speed.Bench(args.model, args.batch_size, "cpu", 20_000)
    facts = bench.records.schema
    kinds = ("flip", "crop") if facts.kind == "image" else ("noise",)
    views = {f"augmentations {m}": {"augmentation": Augmentation(m, kinds, 0, facts.shape)} for m in args.views}
    tricks = {
        "average": {"average": 0.999},
        "schedule": {"optimizer": Descent(schedule="cosine")},
        "weight decay": {"optimizer": Descent(weight_decay=1e-4)},
        **views,
    }
    steps = {"none": bench.step("dpsgd")} | {name: bench.step("dpsgd", **more) for name, more in tricks.items()}
    times = speed.Stopwatch(torch.device("cpu"), time.process_time).interleaved(steps, args.rounds, 4)
    trainer = bench.trainer("dpsgd", average=0.999)  # which its parts do not keep alive
    alone = speed.Stopwatch(torch.device("cpu"), time.process_time).turn(trainer.releasing.follow, 100)
    print(f"the average alone: {alone * 1e3:.3f} ms")
    print(f"{args.model}, B {args.batch_size}: {statistics.median(times['none']) * 1e3:.2f} ms of the processor")
    for name in tricks:
        middle, low, high = speed.ratio(times[name], times["none"])
        print(f"{name}: {middle:.3f} [{low:.3f}, {high:.3f}]")


def gain(args: argparse.Namespace) -> None:
    """Test accuracy, overall and of the worst class."""
    algorithm = algorithm_settings("dpsgd", {"clip_norm": args.clip_norm}).build()
    privacy, plain = PrivacySettings(epsilon=3.0, delta=args.delta), TrainingSettings(**shared(args))
    reader = source(args.dataset, {})
    records = reader.read(reader.locate(Path(os.environ.get("EQUIDP_RAW_DIR", "data/01_raw"))))
    parts = [split(records, seed=seed, membership="strata") for seed in range(args.seeds)]
    plan = plan_run(algorithm, units=len(parts[0].train), groups=10, privacy=privacy, training=plain)  # none changes it
    print(f"| setting | {args.dataset}: accuracy | worst class |\n|---|---|---|")
    for name, tricks in GAINS.items():
        training = TrainingSettings(**shared(args) | tricks)
        found = [scores(algorithm, plan, part, privacy, training, args.model, seed) for seed, part in enumerate(parts)]
        cells = [f"{statistics.mean(v):.3f} ± {statistics.stdev(v):.3f}" for v in zip(*found, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def shared(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of every row."""
    return {"epochs": args.epochs, "batch_size": args.batch_size, "learning_rate": args.rate, "device": "cpu"}


def scores(
    algorithm: Algorithm,
    plan: Plan,
    parts: Split,
    privacy: PrivacySettings,
    training: TrainingSettings,
    name: str,
    seed: int,
) -> tuple[float, float]:
    """Of one run."""
    model = ModelSettings(name=name)
    request = TrainingRequest(
        algorithm, plan, grouping="class", model=model, privacy=privacy, training=training, seed=seed
    )
    trained = train_model(request, parts, progress=False)
    network = make_model(parts.train.schema, model, algorithm, seed)
    network.load_state_dict(trained.weights)
    right = predict(network, parts.test.features).argmax(1) == parts.test.labels
    classes = [float(right[parts.test.labels == k].float().mean()) for k in range(10)]
    return float(right.float().mean()), min(classes)


def main() -> None:
    """One of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "gain"])
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--model", default="cnn_small")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--clip-norm", type=float, default=0.5)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--views", type=int, nargs="*", default=[4])
    args = parser.parse_args()
    torch.set_num_threads(1)
    cost(args) if args.what == "cost" else gain(args)


if __name__ == "__main__":
    main()
