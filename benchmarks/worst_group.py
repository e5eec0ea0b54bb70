"""All algorithms on the worst group at one sound ε: the plan of worst_group.yml, carried out and written up.

    python benchmarks/worst_group.py run [--datasets digits adult] [--algorithms dpsgd naive] [--epsilons 1 3 8]
    python benchmarks/worst_group.py page                   # docs/worst_group.md and its figures, from the records
    python benchmarks/worst_group.py again digits/dpsgd/1   # retrains one row's seed: equal to the last digit?

Raw files lie in `EQUIDP_RAW_DIR` (data/01_raw). Every finished training is a line of
`worst_group/<data set>_<ε>.jsonl`, found again by a digest of all its settings: a stopped run goes on where it was, and
a changed plan trains anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from scipy import stats
from tqdm import tqdm

from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.data import encoding
from equidp.data.records import Records, Split
from equidp.data.splitting import split
from equidp.errors import EquidpError
from equidp.evaluation.seeds import Interval, mean_interval, paired_difference
from equidp.mechanism.algorithm import Algorithm
from equidp.models import features, model_features
from equidp.parameters import DataSettings, ModelSettings, PrivacySettings, TrainingSettings
from equidp.sweep.project import given
from equidp.training import (
    TrainingRequest,
    classes_of,
    make_model,
    partition,
    plan_run,
    predict,
    train_model,
    units_in,
)

HERE = Path(__file__).parent
PLAN, RECORDS = HERE / "worst_group.yml", HERE / "worst_group"
CACHE = HERE.parent / "data" / "02_intermediate"
PAGE = HERE.parent / "docs" / "worst_group.md"
OURS = "dpsgd_minimax"


@dataclass(frozen=True)
class Cell:
    """One training, by what a person varies; `settings` is everything, and `key` its digest."""

    dataset: str
    algorithm: str
    epsilon: float
    step: float
    bound: float
    part: str
    seed: int

    @property
    def trial(self) -> tuple[float, float]:
        """(step, bound)."""
        return self.step, self.bound

    def settings(self) -> dict[str, Any]:
        """Of every kind, as JSON types; paths aside."""
        plan = read_plan()
        here, entry = plan["datasets"][self.dataset], plan["algorithms"][self.algorithm]
        scale = {name: factor * self.bound for name, factor in entry.get("bound", {}).items()}
        rate = self.step * entry.get("rate", 1.0) / (self.bound if entry.get("by_bound", True) else 1.0)
        name, options = entry.get("of", self.algorithm), {**entry.get("options", {}), **scale}
        evaluated = here["data"]["groups"][0]
        chosen = algorithm_settings(name, options).model_dump(mode="json")  # with defaults: they may change
        beside = {"told": other} if (other := entry.get("told", evaluated)) != evaluated else {}
        if entry.get("weighted"):
            beside["weighted"] = True
        return beside | {
            "algorithm": name,
            "options": given(chosen),
            "data": {**plan["data"], **here["data"], "evaluate_on": self.part},
            "model": here["model"],
            "privacy": {"epsilon": float(self.epsilon), "delta": here["delta"]},
            "training": {**plan["training"], **here["training"], **entry.get("training", {}), "learning_rate": rate},
            "seed": self.seed,
        }

    @property
    def key(self) -> str:
        """Tells any two settings apart."""
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()[:12]


Results = dict[str, dict[str, Any]]
"""Lines of the records by their key."""


def read_plan() -> dict[str, Any]:
    """The plan."""
    return _plan_at(PLAN, PLAN.stat().st_mtime_ns)


@cache
def _plan_at(path: Path, changed: int) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def read_results() -> Results:
    """Every line whose settings the plan still has, by key; the last counts. A line cut short is left out."""
    found = {}
    files = sorted(RECORDS.glob("*.jsonl"))
    for line in (line for file in files for line in file.read_text(encoding="utf-8").splitlines()):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # killed while it wrote
            continue
        found[row["key"]] = row
    return found


# ---------------------------------------------------------------------------------------------------------- training


def raw_folder() -> Path:
    """Where the raw files are."""
    return Path(os.environ.get("EQUIDP_RAW_DIR", HERE.parent / "data" / "01_raw"))


def model_of(settings: Mapping[str, Any]) -> ModelSettings:
    """The model, its weights where the raw files are."""
    return ModelSettings(**json.loads(json.dumps(settings["model"]).replace("${raw}", str(raw_folder()))))


@cache
def records_of(dataset: str) -> Records:
    """A dataset's records, or the features that its model is trained on, kept between runs."""
    here = read_plan()["datasets"][dataset]
    data, model = here["data"], model_of(here)
    records, facts = encoding.encode(
        dataset, data["source"], data.get("options", {}), raw_folder=raw_folder(), cache=CACHE
    )
    wanted = model_features(model.name, model.options)
    if wanted is None:
        return records
    key = hashlib.sha256(f"{facts['fingerprint']}/{features.fingerprint(*wanted)}".encode()).hexdigest()
    return encoding.kept(CACHE, key, lambda: features.extract(records, *wanted))


@cache
def parts_of(dataset: str, data: str, seed: int) -> Split:
    """The parts of one seed; `data` is JSON, which a cache can tell apart."""
    chosen = DataSettings(**json.loads(data))
    return split(
        records_of(dataset),
        seed=seed,
        keep=chosen.keep,
        split_by=chosen.split_unit,
        public_fraction=chosen.public_fraction or 0.0,
        test_fraction=chosen.test_fraction,
        evaluate_on=chosen.evaluate_on,
        membership=chosen.membership,
    )


@cache
def noise_of(
    algorithm: str, options: str, epsilon: float, delta: float, training: str, units: int, groups: int, classes: int
) -> float:
    """The noise multiplier that meets ε: it does not depend on rate and bound, and each run's ledger is checked."""
    return _plan(
        algorithm_settings(algorithm, json.loads(options)).build(),
        PrivacySettings(epsilon=epsilon, delta=delta),
        TrainingSettings(**json.loads(training)),
        units,
        groups,
        classes,
    ).noise_multiplier


def _plan(
    algorithm: Algorithm, privacy: PrivacySettings, training: TrainingSettings, units: int, groups: int, classes: int
) -> Plan:
    return plan_run(algorithm, units=units, groups=groups, classes=classes, privacy=privacy, training=training)


def trained(cell: Cell) -> dict[str, Any]:
    """Train one cell: its line of the records."""
    settings, plan = cell.settings(), read_plan()
    algorithm = algorithm_settings(settings["algorithm"], settings["options"]).build()
    evaluated = settings["data"]["groups"][0]
    grouping = partition(algorithm, settings.get("told", evaluated))
    parts = parts_of(cell.dataset, json.dumps(settings["data"]), cell.seed)
    if settings.get("weighted"):
        settings["training"]["class_weights"] = class_weights(parts.train)
    training, model = TrainingSettings(**settings["training"]), model_of(settings)
    privacy = PrivacySettings(**settings["privacy"])
    units, groups = units_in(parts.train, privacy), len(parts.train.grouping(grouping)[1])
    classes = classes_of(algorithm, parts.train)
    # dpis meets a target at fractional Rényi orders, for which a given noise multiplier does not ask
    if algorithm.private and algorithm.name != "dpis":
        plainly = Cell(
            cell.dataset, cell.algorithm, cell.epsilon, 1.0, plan["bounds"][0], cell.part, cell.seed
        ).settings()
        same = {**settings["training"], "learning_rate": 1.0}
        noise = noise_of(
            settings["algorithm"],
            json.dumps(plainly["options"]),
            cell.epsilon,
            privacy.delta,
            json.dumps(same),
            units,
            groups,
            classes,
        )
        privacy = PrivacySettings(noise_multiplier=noise, delta=privacy.delta)
    declared = _plan(algorithm, privacy, training, units, groups, classes)
    request = TrainingRequest(
        algorithm, declared, grouping=grouping, model=model, privacy=privacy, training=training, seed=cell.seed,
        options=settings["options"],
    )  # fmt: skip
    found = train_model(request, parts, progress=False)
    spent = found.privacy["epsilon"]
    if algorithm.private and spent > cell.epsilon * 1.0001:
        raise SystemExit(f"{cell}: its ledger comes to ε {spent}, above {cell.epsilon}.")
    network = make_model(parts.train.schema, model, algorithm, cell.seed)
    network.load_state_dict(found.weights)
    right = (predict(network, parts.test.features).argmax(1) == parts.test.labels).double()
    figures = figures_of(right, *parts.test.grouping(evaluated))
    return {
        "key": cell.key,
        **asdict(cell),
        **figures,
        "spent": spent,
    }


def class_weights(train: Records) -> list[float]:
    """Of every class: the number of records of the rarest one by its own. The counts are exact, and cost no ε here."""
    sizes = torch.bincount(train.labels, minlength=len(train.schema.classes))
    return [float(weight) for weight in sizes.min() / sizes]


def figures_of(right: torch.Tensor, ids: torch.Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Accuracy of every group with records, their lowest, largest difference and mean, and overall."""
    groups = {name: float(right[ids == k].mean()) for k, name in enumerate(names) if bool((ids == k).any())}
    values = list(groups.values())
    return {
        "worst": min(values),
        "gap": max(values) - min(values),
        "balanced": sum(values) / len(values),
        "overall": float(right.mean()),
        "groups": {name: round(value, 6) for name, value in groups.items()},
    }


# ------------------------------------------------------------------------------------------------------------ choice


def score(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Worst group, then balanced accuracy, means over the tuning seeds."""
    return tuple(sum(row[name] for row in rows) / len(rows) for name in ("worst", "balanced"))  # type: ignore[return-value]


def best_trial(scores: Mapping[tuple[float, float], tuple[float, float]]) -> tuple[float, float]:
    """(step, bound) of the highest score; of equal ones the smaller step."""
    return max(sorted(scores), key=lambda trial: scores[trial])


def beyond(
    scores: Mapping[tuple[float, float], tuple[float, float]], steps: Sequence[float]
) -> tuple[float, float] | None:
    """The next trial by the rule of the edge, or None where the best is not at one."""
    step, bound = best_trial(scores)
    tried = sorted(s for s, b in scores if b == bound)
    factor = steps[1] / steps[0]
    if step == tried[-1]:
        return step * factor, bound
    return (step / factor, bound) if step == tried[0] else None


def chosen(dataset: str, algorithm: str, epsilon: float, results: Results, train: Any = None) -> Any:
    """The best trial, and how many there were; `train` makes what the results lack, else None where they lack any."""
    plan = read_plan()
    here, entry = plan["datasets"][dataset], plan["algorithms"][algorithm]
    if "as" in entry:  # a row that takes another's choice, such as an ablation
        return chosen(dataset, entry["as"], epsilon, results, train)
    scores: dict[tuple[float, float], tuple[float, float]] = {}
    bounds = plan["bounds"] if entry.get("bound") else plan["bounds"][:1]
    waiting, more = [(step, bound) for step in here["steps"] for bound in bounds], plan["more"]
    while waiting:
        trial = waiting.pop(0)
        cells = [Cell(dataset, algorithm, epsilon, *trial, "validation", seed) for seed in here["tuning_seeds"]]
        rows = [results.get(cell.key) or (train(cell) if train else None) for cell in cells]
        if None in rows:
            return None
        scores[trial] = score(rows)
        if not waiting and more and (further := beyond(scores, here["steps"])):
            waiting, more = [further], more - 1
    return best_trial(scores), len(scores)


def finals(dataset: str, algorithm: str, epsilon: float, trial: tuple[float, float]) -> Iterator[Cell]:
    """The trainings that a row of the table is made of."""
    for seed in read_plan()["seeds"]:
        yield Cell(dataset, algorithm, epsilon, *trial, "test", seed)


def run(args: argparse.Namespace) -> None:
    """Train what the plan has and the records do not."""
    torch.set_num_threads(1)
    RECORDS.mkdir(exist_ok=True)
    plan, results = read_plan(), read_results()

    def train(cell: Cell) -> dict[str, Any]:
        row = trained(cell)
        results[cell.key] = row
        with (RECORDS / f"{cell.dataset}_{cell.epsilon:g}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return row

    for dataset in args.datasets or plan["datasets"]:
        for epsilon in args.epsilons or plan["epsilons"]:
            for algorithm in tqdm(
                args.algorithms or plan["algorithms"], desc=f"{dataset} ε {epsilon:g}", file=sys.stderr
            ):
                if args.until and time.strftime("%H:%M") > args.until:
                    return
                results |= read_results()  # another process may be at it
                try:
                    trial, trials = chosen(dataset, algorithm, epsilon, results, train)
                except EquidpError as refused:  # its counts alone cost more than ε
                    print(f"{dataset} {algorithm} ε {epsilon:g}: {refused}", flush=True)
                    continue
                rows = [results.get(cell.key) or train(cell) for cell in finals(dataset, algorithm, epsilon, trial)]
                worst = sum(row["worst"] for row in rows) / len(rows)
                told = f"{trials} trials, step {trial[0]:g}, bound {trial[1]:g}: {worst:.3f}"
                print(f"{dataset} {algorithm} ε {epsilon:g}: {told}", flush=True)
        parts_of.cache_clear()
        records_of.cache_clear()


# -------------------------------------------------------------------------------------------------------------- page


@dataclass(frozen=True)
class Row:
    """One algorithm in one table: its chosen trial and the records of its seeds."""

    name: str
    trial: tuple[float, float]
    trials: int
    rows: Mapping[int, Mapping[str, Any]]
    kind: str
    """`published`, `ours`, `ablation` or `reference`."""

    def by_seed(self, figure: str) -> dict[int, float]:
        """A figure's values."""
        return {seed: row[figure] for seed, row in self.rows.items()}

    def mean(self, figure: str) -> float:
        """Over the seeds."""
        return mean_interval(list(self.by_seed(figure).values())).mean

    def interval(self, figure: str) -> Interval:
        """Over the seeds."""
        return mean_interval(list(self.by_seed(figure).values()))


def table_of(dataset: str, epsilon: float, results: Results) -> list[Row]:
    """The finished rows of one table, the best worst group first."""
    found, plan = [], read_plan()
    for name, entry in plan["algorithms"].items():
        choice = chosen(dataset, name, epsilon, results)
        if choice is None:
            continue
        rows = {c.seed: results[c.key] for c in finals(dataset, name, epsilon, choice[0]) if c.key in results}
        if len(rows) == len(plan["seeds"]):
            found.append(Row(name, *choice, rows, kind_of(name, entry)))
    return sorted(found, key=lambda row: -row.mean("worst"))


def kind_of(name: str, entry: Mapping[str, Any]) -> str:
    """What a row is compared as."""
    if name == "sgd":
        return "reference"
    if entry.get("ours"):
        return "ours"
    return "published" if "of" not in entry or entry.get("published") else "ablation"


def p_value(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """Of a two-sided paired t-test over the common seeds; 1 where all differences are 0, 0 where they are one other."""
    seeds = sorted(first.keys() & second.keys())
    differences = [first[seed] - second[seed] for seed in seeds]
    if max(differences) - min(differences) < 1e-12:
        return 1.0 if abs(differences[0]) < 1e-12 else 0.0
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(values: Mapping[Any, float]) -> dict[Any, float]:
    """Holm's corrected p-values: the i-th smallest of m times m − i + 1, never below the one before, at most 1."""
    corrected, least = {}, 0.0
    for i, (name, value) in enumerate(sorted(values.items(), key=lambda item: item[1])):
        least = max(least, min(1.0, value * (len(values) - i)))
        corrected[name] = least
    return corrected


def comparisons(table: Sequence[Row]) -> dict[tuple[str, str], float]:
    """p of every private row against `dpsgd`, and of ours against the best published: (row, other) → p."""
    rows = {row.name: row for row in table}
    best = best_published(table)
    pairs = [(row.name, "dpsgd") for row in table if row.kind != "reference" and row.name != "dpsgd"]
    pairs += [(row.name, best) for row in table if row.kind in ("ours", "ablation") and best not in ("", "dpsgd")]
    pairs = [pair for pair in pairs if pair[1] in rows]
    return {pair: p_value(*(rows[name].by_seed("worst") for name in pair)) for pair in pairs}


def best_published(table: Sequence[Row]) -> str:
    """The published algorithm with the highest mean of the worst group on the test part, which favours it."""
    published = [row for row in table if row.kind == "published"]
    return max(published, key=lambda row: row.mean("worst")).name if published else ""


def section(dataset: str, epsilon: float, table: Sequence[Row]) -> str:
    """Heading, what it is, and the table."""
    plan = read_plan()
    here, best, corrected = plan["datasets"][dataset], best_published(table), holm(comparisons(table))
    training = here["training"]
    missing = [name for name in plan["algorithms"] if name not in {row.name for row in table}]
    about = (
        f"Groups {here['data']['groups'][0]}; model `{here['model']['name']}`; {training['epochs']} epochs of batch "
        f"{training['batch_size']:,}; δ {here['delta']:g}; steps {', '.join(f'{s:g}' for s in here['steps'])}; "
        f"{len(here['tuning_seeds'])} tuning seed(s), {len(plan['seeds'])} seeds on the test part."
    )
    lines = [f"## {here.get('title', dataset)}, ε {epsilon:g}", "", about]
    if missing:
        lines += [
            "",
            "Not here, as not run or as its counts alone cost more than ε: "
            + ", ".join(f"`{name}`" for name in missing)
            + ".",
        ]
    lines += [
        "",
        "| | step, bound (trials) | worst group | gap | balanced | overall | worst, against `dpsgd` | p "
        f"| worst, against `{best}` | p |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = {row.name: row for row in table}
    for row in table:
        mark = {"ours": f"**`{row.name}`**", "ablation": f"*{row.name}*", "reference": f"`{row.name}`, not private"}
        cells = [mark.get(row.kind, f"`{row.name}`"), f"{row.trial[0]:g}, {row.trial[1]:g} ({row.trials})"]
        cells += [shown(row.interval("worst"))] + [
            f"{row.mean(figure):.3f}" for figure in ("gap", "balanced", "overall")
        ]
        for other in ("dpsgd", best):
            p = corrected.get((row.name, other))
            cells += ["–", "–"] if p is None else [
                shown(paired_difference(row.by_seed("worst"), rows[other].by_seed("worst")), "+"),
                p_text(p),
            ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(tables: Mapping[str, Sequence[Row]]) -> str:
    """The worst group of every algorithm that is in all tables of `OURS`, its mean, and how far `OURS` is ahead."""
    found = {name: {row.name: row for row in table} for name, table in tables.items()}
    found = {name: rows for name, rows in found.items() if OURS in rows}
    names = [name for name in read_plan()["algorithms"] if found and all(name in rows for rows in found.values())]
    if OURS not in names:
        return ""
    seeds = read_plan()["seeds"]  # a row without one of them is in no table
    means = {
        name: {seed: sum(rows[name].by_seed("worst")[seed] for rows in found.values()) / len(found) for seed in seeds}
        for name in names
    }
    ours = means[OURS]
    others = [name for name in names if kind_of(name, read_plan()["algorithms"][name]) == "published"]
    corrected = holm({name: p_value(ours, means[name]) for name in others})
    lines = [
        f"| | {' | '.join(found)} | mean | `{OURS}` against it | p |",
        "|---|" + "---|" * (len(found) + 3),
    ]
    for name in sorted(names, key=lambda name: -sum(means[name].values())):
        cells = [f"{rows[name].mean('worst'):.3f}" for rows in found.values()]
        cells += [f"{sum(means[name].values()) / len(seeds):.3f}"]
        cells += ["–" if name == OURS else shown(paired_difference(ours, means[name]), "+")]
        cells += [p_text(corrected[name]) if name in corrected else "–"]
        label = f"**`{name}`**" if name == OURS else f"`{name}`" + ", not private" * (name == "sgd")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    told = (
        f"Accuracy of the worst group. Mean and difference are over {len(seeds)} seeds, each the "
        f"mean of the data sets;\np is corrected by Holm for the {len(others)} published algorithms shown."
    )
    return "\n".join([*lines, "", told])


def p_text(p: float) -> str:
    """`0.012`."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def shown(interval: Interval, sign: str = "") -> str:
    """`0.812 ± 0.003`."""
    half = "" if interval.half_width is None else f" ± {interval.half_width:.3f}"
    return f"{interval.mean:{sign}.3f}{half}".replace("-", "−")


def figure(tables: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Overall accuracy against the worst group's, one panel a dataset; matplotlib comes with MLflow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 2 if len(tables) < 5 else 3
    drawing, panels = pyplot.subplots(2, columns, figsize=(6.5 * columns, 10), layout="constrained")
    colours = {"ours": "#d1495b", "published": "#30638e", "reference": "#888888"}
    for panel in panels.flat[len(tables) :]:
        panel.set_visible(False)
    for panel, (dataset, table) in zip(panels.flat, tables.items(), strict=False):
        # right or left of the point, above or below it: those that lie close together go apart
        by_worst = [row.name for row in table if row.name in (OURS, "dpsgd_level")]
        labelled = {name: (1, place) for place, name in enumerate(by_worst)}
        labelled |= {"dpsgd": (1, 1), "sgd": (-1, 1), best_published(table): (-1, 0)}
        for row in (row for row in table if row.kind in colours):
            x, y = row.mean("overall"), row.mean("worst")
            panel.plot(x, y, "o", color=colours[row.kind], markersize=6)
            if row.name in labelled:
                side, down = labelled[row.name]
                where = {"xytext": (6 * side, 5 - 15 * down), "textcoords": "offset points"}
                panel.annotate(row.name, (x, y), ha="left" if side > 0 else "right", fontsize=8, **where)
        for kind, colour in colours.items():
            panel.plot([], [], "o", color=colour, label="not private" if kind == "reference" else kind)
        panel.legend(loc="best", fontsize=8)
        panel.set(title=dataset, xlabel="overall accuracy", ylabel="accuracy of the worst group")
        panel.margins(x=0.25, y=0.1)
    path.parent.mkdir(exist_ok=True)
    drawing.savefig(path, dpi=80, metadata={"Software": None})
    pyplot.close(drawing)


def page(args: argparse.Namespace) -> None:
    """Write the page and its figure, and a page of the data sets' tables."""
    plan, results = read_plan(), read_results()
    sections = ["# The worst group, data set by data set", f"How to read them: [the comparison]({PAGE.name})."]
    parts = [plan["head"].strip().format(rule=plan["rule"])]
    for epsilon in sorted({row["epsilon"] for row in results.values()}):
        tables = {name: table_of(name, epsilon, results) for name in plan["datasets"]}
        tables = {
            name: table
            for name, table in tables.items()
            if best_published(table) and "dpsgd" in {r.name for r in table}
        }
        if not tables:
            continue
        sections += [section(name, epsilon, table) for name, table in tables.items()]
        name = f"worst_group_{epsilon:g}.png"
        figure(tables, PAGE.parent / "images" / name)
        if short := summary(tables):
            parts.insert(1, f"## In short, ε {epsilon:g}\n\n{short}")
        parts.insert(2, plan.get("said", {}).get(epsilon, "").strip())
        parts.insert(2, f"![Overall accuracy against that of the worst group, ε {epsilon:g}](images/{name})")
    tables_page = PAGE.with_name(f"{PAGE.stem}_tables.md")
    for place, texts in ((PAGE, [*parts, plan["foot"].strip()]), (tables_page, sections)):
        place.write_text("\n\n".join(filter(None, texts)) + "\n", encoding="utf-8")
        print(place)


def again(args: argparse.Namespace) -> None:
    """Train `dataset/algorithm/seed` once more and compare every figure."""
    plan, parts = read_plan(), args.row.split("/")
    if len(parts) != 3 or not parts[2].isdecimal():
        sys.exit(f"{args.row!r} names no row and seed: write dataset/algorithm/seed, such as digits/dpsgd/1.")
    dataset, algorithm, seed = parts
    for kind, name in (("datasets", dataset), ("algorithms", algorithm)):
        if name not in plan[kind]:
            sys.exit(f"{args.row}: {name!r} is none of the plan's {kind}: {', '.join(plan[kind])}.")
    results = read_results()
    found = chosen(dataset, algorithm, args.epsilon, results)
    rows = (
        [] if found is None else [c for c in finals(dataset, algorithm, args.epsilon, found[0]) if c.seed == int(seed)]
    )
    if not rows or rows[0].key not in results:
        sys.exit(f"{args.row} has no record at ε {args.epsilon:g}: `run` makes it.")
    torch.set_num_threads(1)
    old, new = results[rows[0].key], trained(rows[0])
    if math.isclose(old["spent"], new["spent"], rel_tol=1e-8):  # accounting was made stricter after the records
        new["spent"] = old["spent"]
    told = [f"{name}: {old[name]!r} and {new[name]!r}" for name in old if old[name] != new[name]]
    print("\n".join(told) or f"{args.row}: the same to the last digit")
    sys.exit(bool(told))


def main() -> None:
    """`run`, `page` or `again`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    one = kinds.add_parser("run")
    one.add_argument("--datasets", nargs="*")
    one.add_argument("--algorithms", nargs="*")
    one.add_argument("--epsilons", nargs="*", type=float)
    one.add_argument("--until", help="HH:MM after which nothing more is begun")
    one.set_defaults(call=run)
    kinds.add_parser("page").set_defaults(call=page)
    two = kinds.add_parser("again")
    two.add_argument("row", help="dataset/algorithm/seed")
    two.add_argument("--epsilon", type=float, default=3)
    two.set_defaults(call=again)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
