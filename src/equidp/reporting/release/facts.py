"""What may go out with a model: the one place that decides it.

`released_facts` copies, by name, what the guarantee covers or what is taken as public. Everything else stays behind:
exact figures of private records (counts of groups, baseline, cost of privacy, diagnostics), per-record data, options of
the source (they name files), digests and dates of files. The documents are written from `Facts` alone, so that none of
them can hold more. A key that is not named here does not go out: whoever adds a key to a run's documents decides here.

Two kinds of exact figures go out where the user asks for them by `release.unprotected`: the model's figures of the test
records, and an audit's figures. The documents then say that nothing protects them. How many guesses about canaries are
right also depends on the private records: on what they add to the sums, and, by the order of the random numbers, at
least on how many there are. An audit's noise comes from the seed. So whoever has the seed can read this off the number
of right guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from equidp.accounting.dataset_ledger import Spent
from equidp.algorithms import ALGORITHMS, BASELINE
from equidp.algorithms.custom import PARTS
from equidp.data.records import MIN_TEST_RECORDS, Schema
from equidp.data.tables import looks_at_other_rows
from equidp.errors import EquidpError
from equidp.evaluation.metrics import METRICS
from equidp.evaluation.noised import FIGURES
from equidp.models import MODELS, model_features
from equidp.parameters import ReleaseSettings
from equidp.reporting.statement_sections import evaluated
from equidp.tasks import kind_of, task_of
from equidp.tasks.base import Words

STATEMENT = (
    "algorithm", "private", "epsilon", "delta", "epsilon_rdp", "epsilon_pld", "epsilon_published",
    "epsilon_fixed_before_training", "target_epsilon", "target_epsilon_as", "noise_multiplier", "adjacency", "sampling",
    "sampling_rate", "unit", "records", "records_declared", "public_records", "expected_batch_size", "steps", "epochs",
    "groups", "ledger", "filter_order", "filter_total", "charged", "accepted_steps", "releases", "secure", "seed",
    "trials", "epsilon_replace_one", "trade_off", "membership", "assumptions", "notes",
    "steps_repeated", "test_records_decide", "diagnostics_published", "evaluated_on", "evaluation", "tuning",
)  # fmt: skip
"""Keys of `privacy.json` that go out: all that `training.statement` writes, and all that its readers look for."""

EVALUATION = (
    "part", "epsilon", "delta", "unit", "adjacency", "mechanism", "sensitivity", "tables", "bins", "trials",
)  # fmt: skip
"""Keys of the statement's `evaluation` that go out: what figures of test records cost these records."""

RELEASED = (*dict.fromkeys((*METRICS, *FIGURES)),)
"""Figures with noise that go out, overall and per group; their intervals have the same names."""

COMPARED = ("group", "accuracy", "difference", "interval")
"""Keys of a worst group, a gap and a disparity that go out."""

MEMBERSHIP = ("how", "key", "given")
"""Keys of the statement's `membership` that go out: how the training part was drawn, by which public key, and that the
data name the test part, where they do."""

SCHEMA = ("name", "kind", "shape", "classes", "groupings", "feature_names", "mean", "sd", "vocabulary", "words",
    "tokenizer", "task", "targets", "bounds")  # fmt: skip
"""Keys of a schema that go out. They are declared: none is learnt from the records."""

ENCODING = (
    "label", "classes", "class_map", "class_edges", "ordered", "target", "counts", "labels", "features", "decimal",
    "thousands", "na_values", "text", "length", "vocabulary", "size", "channels", "fit", "mean", "sd",
)  # fmt: skip
"""Options of the source that go out: declared columns with their categories and bounds; how numbers are written; how
texts and images are read. Of the groupings, those that are also features go out. Other options name files.
"""

TRAINING = (
    "epochs", "batch_size", "learning_rate", "optimizer", "momentum", "weight_decay", "adam_epsilon", "schedule",
    "schedule_at", "schedule_factor", "average", "augmentations", "augmentation_kinds", "augmentation_padding",
    "augmentation_noise", "precision", "loss", "huber_delta", "class_weights", "options",
)  # fmt: skip
"""Keys of a model's training settings that go out; settings are public."""

CANARIES = (
    "canaries", "guesses", "correct", "delta", "confidence", "epsilon_lower_bound", "epsilon_claimed",
    "epsilon_within_reach", "consistent", "refutable",
)  # fmt: skip
EXPOSURE = ("auc", "auc_interval", "tpr_at_1_percent_fpr", "tpr_at_1_percent_fpr_interval")
"""Figures of membership inference that may be asked for. The numbers of members are exact counts, and stay inside."""

DECIMALS = 3
"""Decimal places of exact figures that go out on request; for errors in a target's unit, significant digits."""

EXACT_TELL = "they may tell of single records, also of groups that are left out because they are small"
"""What exact figures do, even rounded and without small groups. A group's balanced accuracy tells which classes the
group has. The figures of all groups together tell of the group that is left out."""

MATCHED = ("records", "expected_batch_size", "steps", "noise_multiplier", "unit", "membership")
DESCRIBED = ("schema", "model", "options", "training", "source", "source_options")
"""Facts of `privacy.json` (`MATCHED`) and of the model's file (`DESCRIBED`). An audit's findings are taken as the run's
if its training agrees with the run in all of them."""

SOFTWARE = ("equidp", "torch", "dp-accounting")
"""Packages that train a model and compute ε. The model's file has their versions, because later versions may write the
folder."""
UNTOLD = "of a version that the model's file does not tell"

RESEARCH_MODE = (
    "Research mode: batches and noise came from an ordinary random generator with a seed. Whoever knows or guesses the "
    "seed can recompute the noise, and ε does not hold against them. Not for publication: keep this document and the "
    "model inside. A model that goes out is trained with privacy.secure=true."
)
LARGE_DELTA = (
    "δ is not below one over the number of units: publishing one of them outright would satisfy the guarantee. Not for "
    "publication: train again with a smaller privacy.delta (of figures of test records: privacy.evaluation.delta)."
)
REFUTED = (
    "An audit of this training refuted its ε. Not for publication: keep this document and the model inside until the "
    "cause is found."
)


@dataclass(frozen=True)
class Facts:
    """All that the documents know of a run; JSON types.

    Attributes:
        schema: the declared schema. `network`: name and options of the model. Together they rebuild it.
        encoding: the source's name and, where options described them, a table's columns or how images are read.
        parameters: number of the model's parameters.
        training: settings of the training; empty where the model's file does not have them.
        adjusted: whether the loss did not count all classes alike.
        privacy: the privacy statement.
        audit: findings of an audit of the same training, or None.
        metrics: figures of test records released under differential privacy, or None.
        exact_metrics: exact figures of test records, or None where the user did not ask for them.
        across: what the rows come from, if it may make one row depend on others; empty if nothing says so.
        compared: groupings by which the costs of privacy were measured; empty where there is no baseline.
        counted: what the data set's ledger counts for the unit when the documents are written. It has numbers only,
            because names of runs and of other data sets are the curator's. None if the ledger has no entry, or its
            numbers may not be told.
        listed: whether that ledger may have this run. False if the ledger is another project's, or has lost the run.
        curator: what the user states in the settings.
        software: versions of the packages that trained the model and computed ε.
        warning: why nothing of this is for publication, or None.
    """

    schema: Mapping[str, Any]
    encoding: Mapping[str, Any]
    network: Mapping[str, Any]
    parameters: int
    training: Mapping[str, Any]
    adjusted: bool
    privacy: Mapping[str, Any]
    audit: Mapping[str, Any] | None
    metrics: Mapping[str, Any] | None
    exact_metrics: Mapping[str, Any] | None
    across: str
    compared: tuple[str, ...]
    counted: Spent | None
    listed: bool
    curator: Mapping[str, str]
    software: Mapping[str, str]
    warning: str | None

    @property
    def dataset(self) -> str:
        """The user's name of the dataset."""
        return str(self.schema["name"])

    @property
    def words(self) -> Words:
        """Words for what the model is, and what it gives."""
        return task_of(Schema.from_dict(self.schema)).words()

    @property
    def mapped(self) -> bool:
        """Whether the model takes the features that a fixed public map makes of a record, instead of the record."""
        return model_features(self.network["name"], self.network["options"]) is not None

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return str(self.privacy["algorithm"])


def released_facts(
    card: Mapping[str, Any],
    parameters: int,
    privacy: Mapping[str, Any],
    settings: ReleaseSettings,
    *,
    metrics: Mapping[str, Any] | None = None,
    released_metrics: Mapping[str, Any] | None = None,
    audit: Mapping[str, Any] | None = None,
    counted: Spent | None = None,
    listed: bool = True,
) -> Facts:
    """Return the facts that may go out.

    Args:
        card: what the model's file says of the model.
        parameters: number of the model's parameters.
        privacy: `privacy.json`.
        settings: what the user asked for, and what the user states.
        metrics: `metrics.json`. Without `release.unprotected=test` only names of groupings go out of it.
        released_metrics: `metrics_release.json`, where the run has one.
        audit: `audit.json`, where there is one; used if it is of this training.
        counted: what the data set's ledger counts, where it was read.
        listed: whether the ledger may have this run.

    Raises:
        EquidpError: the model has no differential privacy, the files are of two runs, or figures were asked for that
            the run does not have or that may not go out at all.
    """
    if not privacy.get("private"):
        raise EquidpError(
            f"{privacy.get('algorithm', 'This model')} was trained without differential privacy: nothing of it may go "
            "out. Name a private algorithm, such as algorithm=dpsgd."
        )
    if card.get("algorithm") != privacy["algorithm"]:
        raise EquidpError(
            f"The model is {card.get('algorithm')}'s and the privacy statement {privacy['algorithm']}'s: train again."
        )
    # the statement promises an ε for noised figures even if their file is missing: it may be published already
    if (released_metrics or privacy.get("evaluation")) and "test" in settings.unprotected:
        raise EquidpError(
            "release.unprotected=test: this run released figures of its test records with noise, and the exact ones "
            "beside them would undo it. Leave it out."
        )
    found = _audit(audit, privacy, card, exact="audit" in settings.unprotected)
    # for a run of an older version, only metrics.json says which records were evaluated
    held_back = not metrics or "validation" in (metrics.get("evaluated_on"), evaluated(privacy))
    if found and found["membership"] and (released_metrics or privacy.get("evaluation") or held_back):
        raise EquidpError(
            "release.unprotected=audit: the audit's membership inference tells exactly of the records that this run "
            "was evaluated on, too, and these are protected, or metrics.json is not there to tell which they are. "
            "Leave it out, or audit again with audit.membership=false."
        )
    others = packages(privacy["algorithm"], card["model"], (card.get("training") or {}).get("options", {}))
    statement = _only(privacy, STATEMENT)
    if statement.get("secure"):
        statement["seed"] = None
    if statement.get("membership"):
        statement["membership"] = _only(statement["membership"], MEMBERSHIP)
    if statement.get("evaluation"):
        statement["evaluation"] = _only(statement["evaluation"], EVALUATION)
    return Facts(
        schema=_only(card["schema"], SCHEMA),
        encoding=_only(card, ("source",)) | _encoding(card.get("source_options") or {}),
        network={"name": card["model"], "options": dict(card["options"])},
        parameters=parameters,
        training=_only(card.get("training") or {}, TRAINING),
        adjusted=bool(card.get("adjusted")),
        privacy=statement,
        audit=found,
        metrics=None if not released_metrics else _released(released_metrics),
        exact_metrics=_exact(metrics, privacy) if "test" in settings.unprotected else None,
        across=_across(card.get("source_options") or {}),
        # a tuning trains no baseline
        compared=tuple(metrics["groups"])
        if metrics and metrics.get("cost_of_privacy") and not privacy.get("tuning")
        else (),
        counted=counted,
        listed=listed,
        curator=settings.statements(),
        software=_only(card.get("software") or {"equidp": UNTOLD}, (*SOFTWARE, *others)),
        warning=_warning(statement, found),
    )


def _across(options: Mapping[str, Any]) -> str:
    """Return what the rows come from, if it may make one row depend on others; else empty."""
    if options.get("catalog"):  # the entry may be a query, or code
        return "an entry of the curator's catalog, which may compute anything"
    word = looks_at_other_rows(options.get("sql") or "")
    return f"a query with {word}" if word else ""


def _encoding(options: Mapping[str, Any]) -> dict[str, Any]:
    features = (options.get("features") or {}).items()
    used = {feature.get("group") or name for name, feature in features if feature["kind"] == "group"}
    groups = _only(options.get("groups") or {}, sorted(used))
    encoding = _only(options, ENCODING) | ({"groups": groups} if groups else {})
    if isinstance(by_column := encoding.get("na_values"), Mapping):
        read = {of.get("column") or name for name, of in (*features, *groups.items())}
        encoding["na_values"] = _only(
            by_column, sorted({*read, options.get("label") or "", *(options.get("labels") or ())})
        )
    return encoding


def packages(algorithm: str, model: str, options: Mapping[str, Any]) -> list[str]:
    """Names of other packages that add the algorithm, a part of it, or the network."""
    found = {ALGORITHMS.package(algorithm), MODELS.package(model)}
    if algorithm == "custom":
        found |= {PARTS[kind].package(part["name"]) for kind, part in options.items() if part and kind in PARTS}
    return sorted(name for name in found if name)


def _warning(privacy: Mapping[str, Any], audit: Mapping[str, Any] | None) -> str | None:
    if not privacy.get("secure"):
        return RESEARCH_MODE
    figures = privacy.get("evaluation") or privacy
    if max(privacy["delta"], figures["delta"]) >= 1 / privacy["records"]:
        return LARGE_DELTA
    found = [audit[kind] for kind in ("gradient_canaries", "input_canaries") if audit and audit.get(kind)]
    return None if all(one["consistent"] for one in found) else REFUTED


def _audit(
    audit: Mapping[str, Any] | None, privacy: Mapping[str, Any], card: Mapping[str, Any], *, exact: bool
) -> dict[str, Any] | None:
    """Return findings that may go out, if the audited training has the run's algorithm, settings, N, B, T and noise.

    An audit trains on the private records with noise from a seed, and no ε covers it. So results on canaries and of
    membership inference go out only if the user asks for them. The baseline's figures never go out.
    """
    if not audit or audit["algorithm"] != privacy["algorithm"]:
        return None
    audited = audit.get("training") or {}
    described = audited.get("card") or {}
    if any(audited.get(name) != privacy.get(name) for name in MATCHED):
        return None
    if any(described.get(name) != card.get(name) for name in DESCRIBED):
        return None
    found = {name: audit[name] and _only(audit[name], CANARIES) for name in ("gradient_canaries", "input_canaries")}
    if not exact:
        # that canaries refute ε always goes out, because a refuted claim must be withdrawn
        found = {
            name: None if not known or known["consistent"] else {"consistent": False} for name, known in found.items()
        }
    attacks = (audit.get("membership") or {}).get(privacy["algorithm"], {}) if exact else {}
    return found | {
        "confidence": audit["confidence"],
        "membership": _rounded({attack: _figures(figures, EXPOSURE) for attack, figures in attacks.items()}),
    }


def _exact(metrics: Mapping[str, Any] | None, privacy: Mapping[str, Any]) -> dict[str, Any]:
    """Overall and group figures of the private model, without numbers of records, intervals, baseline and costs.

    They are rounded, because all digits of a fraction would give the number of records. Groups so small that a figure
    is about single persons are left out. That is no protection: see `EXACT_TELL`.
    """
    if not metrics:
        raise EquidpError(
            "release.unprotected=test: the run has no metrics.json: evaluate it first (one of tune never has it)."
        )
    if "validation" in (metrics.get("evaluated_on"), evaluated(privacy)):
        raise EquidpError(
            "release.unprotected=test: this run was evaluated on validation records, which were taken from the "
            "training records: their exact figures may not go out. Train with data.evaluate_on=test."
        )
    groups = {
        grouping: {group: of for group, of in groups.items() if of["count"] >= MIN_TEST_RECORDS}
        for grouping, groups in metrics["groups"].items()
    }
    task = kind_of(metrics)
    found = _figures({**metrics, "groups": groups}, task.metrics)
    return _rounded(found, "f" if task.most == 1 else "g")  # `f`: more digits of a small fraction give its denominator


def _rounded(figures: Any, form: str = "f") -> Any:
    """Nested figures with `DECIMALS` decimal places each; with `g`, as many significant digits."""
    if isinstance(figures, dict):
        return {name: _rounded(value, form) for name, value in figures.items()}
    if isinstance(figures, list):
        return [_rounded(value, form) for value in figures]
    return float(f"{figures:.{DECIMALS}{form}}") if isinstance(figures, float) else figures


def _released(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with noise, and the ε of these figures."""
    if metrics.get("epsilon") is None:
        raise EquidpError("metrics_release.json has no epsilon: its figures may not go out. Evaluate the run again.")
    compared = {
        kind: {
            grouping: {name: _only(one, COMPARED) for name, one in of.items()}
            if kind == "disparity"
            else _only(of, COMPARED)
            for grouping, of in metrics[kind].items()
        }
        for kind in ("worst", "gap", "disparity")
        if kind in metrics
    }
    named = _only(metrics, (*EVALUATION, "left_out", "notes")) | compared
    if "intervals" in metrics:
        named["intervals"] = _figures(metrics["intervals"], RELEASED)
    if "reliability" in metrics:
        named["reliability"] = [_only(row, ("confidence", "accuracy", "interval")) for row in metrics["reliability"]]
    if "histogram" in metrics:
        named["histogram"] = _only(metrics["histogram"], ("counts", "groups", "classes", "sd"))
    return named | _figures(metrics, RELEASED)


def _figures(figures: Mapping[str, Any], names: Iterable[str] = METRICS) -> dict[str, Any]:
    groups, names = (figures.get("groups") or {}).items(), tuple(names)
    of_groups = {grouping: {group: _only(own, names) for group, own in of.items()} for grouping, of in groups}
    return {"overall": _only(figures["overall"], names), "groups": of_groups}


def _only(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def wanted(settings: ReleaseSettings, privacy: Mapping[str, Any]) -> bool:
    """Whether a run writes its documents: a secure run does by default, any other private run on request."""
    if settings.documents is None:
        return bool(privacy.get("secure"))
    return settings.documents and privacy.get("algorithm") != BASELINE
