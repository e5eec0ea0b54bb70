"""How a private step grows: with records N, parameters d, groups K, and ranks.

    python benchmarks/scaling.py                    # N, d and K on this process
    python benchmarks/scaling.py --ranks 1,2        # the same training on several processes
    python benchmarks/scaling.py --table 2000000    # a whole `kedro run` on a CSV file of so many rows

Random records, DPSGD-F (a step with all there is). Prints JSON lines. Without an option: a hidden layer
on tables, and processor time on one thread, medians over steps, so that other work on the machine does not count. With
--ranks: cnn_small on 8,192 images of 28 × 28, wall-clock time, the busiest rank's processor time, and the load. With
--table: reading, one epoch of DPSGD-F and of its baseline, figures of every group, report; wall-clock time and memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch
from sweep import environment, scratch_project

from equidp.accounting.plan import segment_at
from equidp.algorithms import algorithm_settings
from equidp.data.records import Records, Schema, Split
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.training import TrainingRequest, plan_run, prepare, train_model

PRIVACY = PrivacySettings(noise_multiplier=1.0, delta=1e-9)

TABLE = """
presets:
  table:
    data:
      source: csv
      groups: [sex, age_band, "sex*age_band"]
      options:
        path: table.csv
        label: outcome
        classes: ["no", "yes"]
        features:
          ward: {kind: categorical, categories: [surgery, medicine, eye]}
          weight: {kind: numeric, minimum: 0, maximum: 250}
          age: {kind: numeric, minimum: 0, maximum: 120}
        groups:
          sex: {categories: [f, m], unknown: true}
          age_band: {column: age, edges: [40, 65], maximum: 120}
        missing: drop
    model: {name: logistic}
    privacy: {epsilon: 1.0, delta: 1.0e-7}
    training: {epochs: 1, batch_size: 512, learning_rate: 0.5, evaluate_every: 1}
"""


def random_split(records: int, columns: int, groups: int) -> Split:
    """Records without any meaning."""
    draw = torch.Generator().manual_seed(0)
    names = tuple(str(k) for k in range(groups))
    schema = Schema("random", "tabular", (columns,), ("no", "yes"), {"class": ("no", "yes"), "group": names})
    labels = torch.randint(0, 2, (records,), generator=draw)
    group = torch.randint(0, groups, (records,), generator=draw)
    features = torch.rand(records, columns, generator=draw)
    whole = Records(features, labels, {"class": labels, "group": group}, schema)
    nothing = whole.take(torch.arange(0))
    return Split(whole, nothing, nothing)


def random_images(records: int) -> Split:
    """Grey images of 28 × 28 without any meaning."""
    draw = torch.Generator().manual_seed(0)
    schema = Schema("random", "image", (1, 28, 28), ("no", "yes"), {"class": ("no", "yes")}, mean=(0.5,), sd=(0.5,))
    labels = torch.randint(0, 2, (records,), generator=draw)
    images = torch.randint(0, 256, (records, 1, 28, 28), generator=draw, dtype=torch.uint8)
    whole = Records(images, labels, {"class": labels}, schema)
    nothing = whole.take(torch.arange(0))
    return Split(whole, nothing, nothing)


def settings(batch_size: int, **changes: Any) -> TrainingSettings:
    """Of a training whose steps are timed."""
    return TrainingSettings(batch_size=batch_size, learning_rate=0.1, device="cpu", **{"epochs": 1, **changes})


def seconds_per_step(records: int, columns: int, hidden: int, groups: int, batch_size: int, steps: int) -> float:
    """Processor time, median over steps, the first two left out."""
    epochs = math.ceil((steps + 2) * batch_size / records) + 1
    algorithm, training = algorithm_settings("dpsgd_f").build(), settings(batch_size, epochs=epochs)
    split = random_split(records, columns, groups)
    plan = plan_run(algorithm, units=records, groups=groups, privacy=PRIVACY, training=training)
    request = TrainingRequest(
        algorithm, plan, grouping="group", model=ModelSettings(name="mlp", options={"hidden": [hidden]}),
        privacy=PRIVACY, training=training, seed=0,
    )  # fmt: skip
    prepared = prepare(request, split)
    trainer, times = prepared.trainer, []
    for step in range(steps + 2):
        begun = time.process_time()
        trainer.step(segment_at(trainer.segments, step))
        times.append(time.process_time() - begun)
    return statistics.median(times[2:])


def one_at_a_time(steps: int) -> None:
    """N, d, K and B, each alone."""
    base = {"records": 20_000, "columns": 100, "hidden": 100, "groups": 4, "batch_size": 256}
    axes = {
        "records": (20_000, 200_000, 2_000_000),
        "hidden": (10, 100, 1_000, 10_000, 100_000),
        "groups": (4, 64, 1_024),
        "batch_size": (64, 256, 1_024, 4_096),
    }
    for name, values in axes.items():
        for value in values:
            case = {**base, name: value}
            parameters = case["columns"] * case["hidden"] + case["hidden"] * 3 + 2
            taken = seconds_per_step(**case, steps=steps)
            row = {"axis": name, **case, "parameters": parameters, "cpu_ms_per_step": round(1000 * taken, 2)}
            print(json.dumps(row), flush=True)


def processor_time(count: int) -> float:
    """Of the busiest process that trains, so far: this one where it trains alone, else its ranks."""
    me = psutil.Process()
    training = [me] if count == 1 else [c for c in me.children() if "spawn_main" in " ".join(c.cmdline())]
    return max(process.cpu_times().user + process.cpu_times().system for process in training)


def ranks(counts: list[int], epochs: int) -> None:
    """The same training on so many processes; seconds are from the rows' arrival, so start-up is told apart."""
    algorithm, split = algorithm_settings("dpsgd_f").build(), random_images(8_192)
    for count in counts:
        training = settings(1_024, epochs=epochs, devices=count)
        plan = plan_run(algorithm, units=len(split.train), groups=2, privacy=PRIVACY, training=training)
        arrivals, busy = [time.perf_counter()], []

        def on_epoch(row: dict[str, float], network: torch.nn.Module, seen: Any = (arrivals, busy, count)) -> dict:
            seen[0].append(time.perf_counter())
            seen[1].append(processor_time(seen[2]))
            return {}

        request = TrainingRequest(
            algorithm, plan, grouping="class", model=ModelSettings(name="cnn_small"), privacy=PRIVACY,
            training=training, seed=0,
        )  # fmt: skip
        train_model(request, split, on_epoch=on_epoch, progress=False)
        spent = [b - a for a, b in itertools.pairwise(arrivals)]
        work = [b - a for a, b in itertools.pairwise(busy)]
        row = {"ranks": count, "first_epoch_s": round(spent[0], 1), "epoch_s": round(statistics.median(spent[1:]), 2)}
        row |= {"cpu_s_per_epoch_of_busiest_rank": round(statistics.median(work), 2)}
        print(json.dumps({**row, "load": round(psutil.getloadavg()[0], 1)}), flush=True)


def random_table(rows: int) -> pd.DataFrame:
    """Made-up visits to a clinic; a few do not say their sex."""
    draw = np.random.default_rng(0)
    age = draw.integers(0, 100, rows)
    return pd.DataFrame(
        {
            "ward": draw.choice(["surgery", "medicine", "eye"], rows, p=[0.5, 0.45, 0.05]),
            "weight": draw.normal(75, 15, rows).clip(0, 250).round(1),
            "sex": draw.choice(["f", "m", ""], rows, p=[0.5, 0.495, 0.005]),
            "age": age,
            "outcome": np.where(draw.random(rows) < age / 150, "yes", "no"),
        }
    )


def whole_run(rows: int) -> None:
    """`kedro run` on one's own table, in an empty project."""
    with scratch_project() as project:
        raw = project / "data" / "01_raw"
        raw.mkdir(parents=True)
        random_table(rows).to_csv(raw / "table.csv", index=False)
        (project / "conf" / "local" / "parameters.yml").write_text(TABLE, encoding="utf-8")
        command = [sys.executable, "-m", "kedro", "run", "--pipeline=dpsgd_f", "--params=dataset=table"]
        variables = environment(project) | {"EQUIDP_RAW_DIR": str(raw)}
        begun = time.perf_counter()
        subprocess.run(command, cwd=project, env=variables, check=True, capture_output=True)
        spent = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(json.dumps({"rows": rows, "wall_s": round(spent, 1), "peak_gib": round(peak, 2)}))


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", help="measure these numbers of processes: 1,2")
    parser.add_argument("--table", type=int, metavar="ROWS", help="measure a whole run on a table of so many rows")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    if options.table:
        whole_run(options.table)
    elif options.ranks:
        ranks([int(n) for n in options.ranks.split(",")], options.epochs)
    else:
        torch.set_num_threads(1)
        one_at_a_time(options.steps)


if __name__ == "__main__":
    main()
