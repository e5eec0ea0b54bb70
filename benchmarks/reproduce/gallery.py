"""Draws the figures of docs/gallery.md: the papers' figures, from runs that exist.

    kedro sweep gallery                        # small runs whose histories are drawn
    python benchmarks/reproduce/gallery.py     # into docs/images; needs Chromium and Pillow

The others come from the tables of docs/results.md, or need no run. A figure without its runs is left as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from PIL import Image

from equidp.algorithms.sad_dpsgd import SADDPSGD, DecayingPhases, schedule_report
from equidp.parameters import PrivacySettings, TrainingSettings
from equidp.reporting import figures
from equidp.reporting.figures.drawing import draw_lines
from equidp.reporting.style import bars, categories, figure, line, looks
from equidp.reporting.titles import cost_title
from equidp.training import plan_run

ROOT = Path(__file__).resolve().parents[2]
IMAGES, WIDTH, COLOURS = ROOT / "docs" / "images", 680, 32
CHROMIUM = "chromium"
FIGURE = re.compile(r"^([+−-]?[0-9.]+)(?: ± ([0-9.]+))?")

Points = dict[str, tuple[float, float]]
"""Mean and half of the interval over seeds, by a table's columns."""


class NoRunsError(Exception):
    """What a figure is drawn from is not there."""


def main() -> None:
    """Draw all that can be drawn, or those that are named."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("names", nargs="*", help=f"of {', '.join(FIGURES)}")
    arguments.add_argument("--project", type=Path, default=ROOT, help="whose `kedro sweep gallery` is finished")
    options = arguments.parse_args()
    if unknown := sorted(set(options.names) - set(FIGURES)):
        sys.exit(f"No figure is called {unknown[0]}: take one of {', '.join(FIGURES)}.")
    missing = []
    for name in options.names or FIGURES:
        try:
            store(FIGURES[name](options.project), name)
        except NoRunsError as error:
            missing.append(name)
            print(f"{name}: not drawn, {error}", file=sys.stderr)
    sys.exit(bool(missing))


def store(chart: go.Figure, name: str) -> None:
    """`docs/images/gallery_<name>.png`, in few colours, as it is committed."""
    height = int(chart.layout.height or 380)
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder, "page.html"), Path(folder, "shot.png")
        chart.update_layout(width=WIDTH, height=height, margin_t=100).write_html(page, config={"staticPlot": True})
        page.write_text(page.read_text().replace("<body>", '<body style="margin:0">'))
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [
            "--virtual-time-budget=8000",
            f"--screenshot={shot}",
            f"--window-size={WIDTH},{height}",
            page.as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        path = IMAGES / f"gallery_{name}.png"
        Image.open(shot).convert("RGB").quantize(COLOURS).save(path, optimize=True)
    print(f"{path}, {path.stat().st_size // 1024} KiB", flush=True)


# --------------------------------------------------------------------------------------------------- what there is


def table(title: str) -> dict[str, Points]:
    """The rows of a table of docs/results.md, by their labels."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    [part] = [part for part in text.split("\n## ") if part.startswith(f"{title}\n")]
    [head] = [line for line in part.splitlines() if line.startswith("| | seeds")]
    names = head.strip("| ").split(" | ")
    rows: dict[str, Points] = {}
    for entry in (entry for entry in part.splitlines() if entry.startswith("| `")):
        label, *values = entry.removeprefix("| ").removesuffix(" |").split(" | ")
        found = {name: FIGURE.match(value) for name, value in zip(names, values, strict=False)}
        rows[label.replace("`", "")] = {
            name: (float(one[1].replace("−", "-")), float(one[2] or 0)) for name, one in found.items() if one
        }
    return rows


def lines(chart: go.Figure, series: dict[str, dict[float, tuple[float, float]]]) -> go.Figure:
    """Lines with intervals over seeds: name → x → point."""
    for name, look in looks(series).items():
        if points := dict(sorted(series.get(name, {}).items())):
            spread = [half for _, half in points.values()]
            chart.add_trace(line(look, points, [mean for mean, _ in points.values()], spread))
    return chart


def run_folder(project: Path, dataset: str, algorithm: str, epsilon: float | None = None) -> Path:
    """Where a run of `kedro sweep gallery` has written."""
    place = project / "data" / "08_reporting" / dataset / algorithm / "seed=0"
    for path in (*sorted(place.glob("cell-*")), place):  # of a sweep, or of the command alone
        if (path / "history.parquet").is_file() and (path / "privacy.json").is_file():
            target = json.loads((path / "privacy.json").read_text(encoding="utf-8")).get("target_epsilon")
            if epsilon is None or target == epsilon:
                return path
    raise NoRunsError("run `kedro sweep gallery` first")


def histories(project: Path, dataset: str, algorithms: Sequence[str], epsilon: float | None = None) -> dict[str, Any]:
    """History of each algorithm's run there."""
    return {a: pd.read_parquet(run_folder(project, dataset, a, epsilon) / "history.parquet") for a in algorithms}


# ------------------------------------------------------------------------------------------------------ the figures

LARGER = "The same on the network of the experiments it builds on"
ON_THE_WAY = "The number of epochs, on the network of 431,080 parameters"
CLASSES = ("class 2", "class 8")


def rare_class(_: Path) -> go.Figure:
    """DPSGD-F, figure 1: accuracy of classes 2 and 8, ours from the costs that the table shows."""
    rows = table(LARGER)
    chart = figure("Accuracy of a common class and of the rare one", "class", "test accuracy")
    names = ["sgd", "dpsgd", "naive", "dpsgd_f", "dpsgd_f_smooth"]
    for name, look in looks(names).items():
        means = [rows["sgd"][c][0] - (0.0 if name == "sgd" else rows[name][c][0]) for c in CLASSES]
        chart.add_trace(bars(look, CLASSES, means))
    categories(chart, CLASSES)
    return chart.update_layout(barmode="group")


def over_epochs(_: Path) -> go.Figure:
    """DPSGD-F, figure 3a: accuracy of classes 2 and 8 against the number of epochs."""
    rows, series = table(ON_THE_WAY), {}
    for label, points in rows.items():
        name, _, epochs = label.removesuffix(" epochs").partition(", ")
        if epochs and name in ("dpsgd", "dpsgd_f"):
            for c in CLASSES:
                series.setdefault(f"{name}, {c}", {})[float(epochs)] = points[c]
    return lines(figure("Accuracy against the number of epochs", "epochs", "test accuracy"), series)


def over_noise(_: Path) -> go.Figure:
    """DPSGD-F, figure 3b: cost of privacy of classes 2 and 8 against the noise."""
    series: dict[str, dict[float, tuple[float, float]]] = {}
    for label, points in table("The noise, in 12 epochs").items():
        name, _, noise = label.partition(", noise_multiplier ")
        if name != "sgd":
            for c in CLASSES:
                series.setdefault(f"{name}, {c}", {})[float(noise or 0.8)] = points[c]
    return lines(figure("Cost of privacy against the noise", "noise multiplier", cost_title("accuracy")), series)


def bounds_of_classes(project: Path) -> go.Figure:
    """DPSGD-F, figure 2: C of every class over the epochs."""
    return figures.clip_norms(histories(project, "digits", ["dpsgd_f"])["dpsgd_f"], "dpsgd_f")


def terms_of_sexes(project: Path, quantity: str) -> go.Figure:
    """DPSGD-F's Eq. 1: a term of both sexes under two algorithms."""
    name, series = figures.GROUP_DIAGNOSTICS[quantity], {}
    for algorithm, history in histories(project, "adult", ["dpsgd", "dpsgd_f"]).items():
        for group in ("Male", "Female"):
            series[f"{algorithm}, {group}"] = (history["epoch"], history[f"nonprivate/{quantity}/{group}"])
    return draw_lines(figure(f"{name[0].upper()}{name[1:]} (not private)", "epoch", name), series)


def sad_training(project: Path) -> go.Figure:
    """SAD-DPSGD, figures 1 and 9: accuracy of the majority and the minority over the training."""
    names = ["dpsgd", "sad_dpsgd"]
    places = {name: run_folder(project, "ham10000", name) for name in names}
    documents = {name: json.loads((place / "metrics.json").read_text()) for name, place in places.items()}
    drawn = histories(project, "ham10000", names)
    return figures.group_curves(drawn, documents, "majority", list(documents["dpsgd"]["groups"]["majority"]))


def sad_counts(project: Path) -> go.Figure:
    """SAD-DPSGD, figure 2: records of each diagnosis in both parts."""
    place = project / "data" / "08_reporting" / "ham10000" / "ingestion" / "seed=0"
    path = next(iter(sorted(place.rglob("groups.csv"))), None)
    if path is None:
        raise NoRunsError("run `kedro run --pipeline=ingestion --params=dataset=ham10000` first")
    return figures.group_counts(pd.read_csv(path), "class")


def sad_schedule(_: Path, parameter: str, values: Sequence[float]) -> go.Figure:
    """SAD-DPSGD, figures 3 to 5: no run is needed."""
    privacy, training = PrivacySettings(epsilon=3.0, delta=1e-3), TrainingSettings(epochs=50, batch_size=128)
    rows = []
    for value in values:
        shape: dict[str, Any] = {"noise_decay": 0.8, "phase_decay": 0.9, "phases": 3, parameter: value}
        plan = plan_run(SADDPSGD(**shape).build(), units=8012, groups=7, privacy=privacy, training=training)
        report = schedule_report(DecayingPhases(**shape), plan)
        row = {"mean": report.mean_noise, "variance": report.noise_variance, "first_noise_multiplier": report.noise[0]}
        rows.append({parameter: value, **row, "first_steps": report.lengths[0]})
    return figures.schedule_figure(pd.DataFrame(rows), parameter)


def sad_decay(_: Path, parameter: str) -> go.Figure:
    """SAD-DPSGD, figures 6 and 7."""
    series: dict[str, dict[float, tuple[float, float]]] = {"overall": {}, "balanced": {}}
    for label, points in table("SAD-DPSGD's decays, β and γ").items():
        if found := re.search(rf"{parameter} ([0-9.]+)$", label):
            for name, of in series.items():
                of[float(found[1])] = points[name]
    words = parameter.replace("_", " ")
    return lines(figure(f"Accuracy against {words}", words, "test accuracy"), series)


def sad_utility(_: Path) -> go.Figure:
    """SAD-DPSGD, figure 8."""
    series: dict[str, dict[float, tuple[float, float]]] = {}
    for epsilon in (3, 8, 16):
        rows = table(f"SAD-DPSGD's comparison on scatter features, at an ε of {epsilon}")
        for name in ("dpsgd", "auto_dpsgd_s", "auto_dpsgd_l", "sad_dpsgd"):
            label = name if name.startswith("auto") else f"{name}, learning_rate 4"
            for measure in ("overall", "balanced"):
                series.setdefault(f"{name}, {measure}", {})[epsilon] = rows[label][measure]
    chart = lines(figure("Accuracy against ε", "ε", "test accuracy"), series)
    return chart.update_layout(height=440, legend_y=1.0, yaxis_range=[0, 0.8])


def psasc(project: Path, quantity: str, *, distribution: bool) -> go.Figure:
    """DP-PSASC, figures 2 to 8."""
    if distribution:
        runs = histories(project, "mnist_psasc", ["dpsgd", "auto_s", "psac", "psasc"])
        return figures.diagnostic_distribution(runs, quantity)
    return figures.diagnostic_curve(histories(project, "mnist_psasc", ["psac", "psasc"]), quantity, last=10)


def sa_trajectories(_: Path) -> go.Figure:
    """SA-DPSGD, figure 1: the block of docs/figures.md, as it stands there."""
    blocks = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8").split("```python\n")[1:]
    [code] = [block.split("```")[0] for block in blocks if "trajectories(pd" in block]
    body, _, last = code.rstrip().rpartition("\n")
    names: dict[str, Any] = {}
    exec(body, names)
    chart: go.Figure = eval(last.partition(".write_html")[0], names)
    return chart


def dpis_noise(project: Path) -> go.Figure:
    """DPIS, figure 1: the noise multiplier over the epochs."""
    series = {}
    for target in (0.5, 1.0, 4.0):
        try:
            runs = histories(project, "fashion_mnist_dpis_pixels", ["dpis", "dpsgd", "dpsgd_decay"], target)
        except NoRunsError:
            continue
        for name, history in runs.items():
            column = "gradient_noise" if name == "dpis" else "noise_multiplier"
            series[f"{name}, ε {target:g}"] = (history["epoch"], history[column])
    if not series:
        raise NoRunsError("run `kedro sweep gallery` first")
    return draw_lines(figure("Noise multiplier over the epochs", "epoch", "σ"), series).update_layout(height=440)


def dpis_utility(_: Path) -> go.Figure:
    """DPIS, Table 3 as a figure."""
    series: dict[str, dict[float, tuple[float, float]]] = {}
    for epsilon, title in ((3, ""), (2, ", at an ε of 2"), (1, ", at an ε of 1"), (0.5, ", at an ε of 0.5")):
        for name in ("dpsgd", "dpis"):
            series.setdefault(name, {})[epsilon] = table(f"DPIS on scatter features{title}")[name]["overall"]
    return lines(figure("Accuracy against ε", "ε", "test accuracy"), series)


def sa_rows(_: Path) -> go.Figure:
    """SA-DPSGD, Table 1: its rows at the published ε, with the printed ones in the labels of docs/results.md."""
    names = ("dpsgd", "dpsgd_tanh", "auto_s", "sa_dpsgd")
    titles = {
        "published ε": "SA-DPSGD on MNIST, at a published ε of 3",
        "sound ε": "SA-DPSGD on MNIST, at a sound ε of 3",
        "sound ε, momentum": "SA-DPSGD on MNIST, at a sound ε of 3, with momentum",
    }
    rows = {short: table(title) for short, title in titles.items()}
    chart = figure("SA-DPSGD's comparison on MNIST", "", "test accuracy")
    for name, look in looks(names).items():
        if name in names:
            points = [rows[short][name]["overall"] for short in titles]
            chart.add_trace(bars(look, titles, [mean for mean, _ in points], [(half, half) for _, half in points]))
    categories(chart, titles)
    return chart.update_layout(barmode="group", yaxis_range=[0.9, 1.0])


FIGURES: dict[str, Callable[[Path], go.Figure]] = {
    "dpsgd_f_1": rare_class,
    "dpsgd_f_2": bounds_of_classes,
    "dpsgd_f_3a": over_epochs,
    "dpsgd_f_3b": over_noise,
    "dpsgd_f_excess": partial(terms_of_sexes, quantity="excess"),
    "dpsgd_f_mean_gradient": partial(terms_of_sexes, quantity="mean_gradient"),
    "sad_1": sad_training,
    "sad_2": sad_counts,
    "sad_3": partial(sad_schedule, parameter="noise_decay", values=(0.6, 0.7, 0.8, 0.9)),
    "sad_4": partial(sad_schedule, parameter="phase_decay", values=(0.3, 0.5, 0.7, 0.9)),
    "sad_5": partial(sad_schedule, parameter="phases", values=(3, 4, 5)),
    "sad_6": partial(sad_decay, parameter="noise_decay"),
    "sad_7": partial(sad_decay, parameter="phase_decay"),
    "sad_8": sad_utility,
    "psasc_2": partial(psasc, quantity="gradient_norm", distribution=True),
    "psasc_3": partial(psasc, quantity="cosine", distribution=True),
    "psasc_8": partial(psasc, quantity="mean_weight", distribution=False),
    "sa_1": sa_trajectories,
    "sa_table": sa_rows,
    "dpis_1": dpis_noise,
    "dpis_utility": dpis_utility,
}

if __name__ == "__main__":
    main()
