"""Every setting a user can give, validated before anything runs. Unknown keys are refused, defaults are filled in.

`resolve` turns the merged configuration into plain dicts in which every setting has its value: that is what nodes
receive and what MLflow logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.data.sources import SOURCES, source
from equidp.errors import EquidpError, refuse_unknown, unknown_name
from equidp.mechanism.parts import HUGE, Positive
from equidp.mechanism.trainer import OPTIMIZERS
from equidp.models import MODELS, model_options
from equidp.options import Declared, Number, listed, refusal_of

INVERSE_SQRT_STEPS = "1/sqrt(steps)"
"""A learning rate that falls with the length of the run, as in DPSGD-F's census experiments."""

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*")
"""Names that become folders: nothing that could leave the project."""

Count = Annotated[int, Field(ge=0, le=10_000_000)]
Probability = Annotated[float, Field(gt=0, lt=1)]


class Section(Declared, BaseModel):  # the second for ruff, which knows by it that a default of {} is copied
    """A block of settings; frozen, and refusing keys it does not know."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)


RECORDS = {"record", *(kind.unit_names[0] for kind in SOURCES.values())}
"""The sources' words for one record; any other word of `data.split_by` and `privacy.unit` is for several together."""


class DataSettings(Section):
    """Which records, how they are split, and by which groups results are told."""

    source: str = ""
    """Registry name of the source; the dataset's own name unless given."""
    groups: Annotated[tuple[str, ...], BeforeValidator(listed)] = ("class",)
    """Groupings to report, `sex+race+sex*race`; the first is the partition that group-aware algorithms use."""
    keep: dict[str, Annotated[Number, Field(gt=0)]] = {}
    """Unbalancing of the training part: class name → count, or fraction below 1. By `hash` a count is the expected one,
    of the class's declared size."""
    membership: Literal["hash", "strata"] = "hash"
    """Who trains: by `hash`, each record's own identity and a public key decide, and parts have random sizes; `strata`
    draws exact sizes, and one record more in the table exchanges many training records: for the papers' tables."""
    id: str = ""
    """Column with an id for each record of a `csv` or an `image_folder`: its identity; else its content is."""
    key: str = ""
    """What the public key is made of; empty: of the seed, so that every seed has parts of its own."""
    accept_strata: bool = False
    """Let a secure run take `strata`, although its ε then does not hold for the table."""
    split_by: str = "record"
    """`unit` (or the dataset's word: `lesion`, `person`, a table's column) keeps all records of one unit on one side of
    the split."""
    public_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of the training part set aside as public; null: 5 % where an algorithm asks for it, else none."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share held out where the provider has no split."""
    evaluate_on: Literal["test", "validation"] = "test"
    """`validation` holds `test_fraction` of the training part back and evaluates on that; the test part is not looked
    at. Choose settings with it; no ε covers its figures, and the final run trains on its records."""
    options: dict[str, Any] = {}
    """Options of the source."""

    @model_validator(mode="before")
    @classmethod
    def _id_is_an_option_of_the_source(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("id") and isinstance(given.get("options", {}), Mapping):
            return {**given, "options": {**given.get("options", {}), "id": given["id"]}}
        return given

    @field_validator("groups")
    @classmethod
    def _some(cls, groups: tuple[str, ...]) -> tuple[str, ...]:
        if not groups:
            raise ValueError("name at least one grouping, such as class")
        groups = tuple("*".join(part.strip() for part in name.split("*")) for name in groups)
        if twice := [name for name in dict.fromkeys(groups) if groups.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} stands there twice")
        return groups

    @property
    def split_unit(self) -> Literal["record", "unit"]:
        """`record` or `unit`, whatever the dataset calls them."""
        return "record" if self.split_by in RECORDS else "unit"


class PrivacySettings(Section):
    """The guarantee asked for: a target ε, or a noise multiplier whose ε is then reported."""

    epsilon: Annotated[float, Field(gt=0)] | None = None
    """Target ε; the noise is solved for."""
    epsilon_as: Literal["sound", "published"] = "sound"
    """Which ε meets the target: `sound`, the one we stand by, or `published`, as the algorithm's paper counts; then the
    sound ε is whatever it comes to."""
    noise_multiplier: Annotated[float, Field(gt=0)] | None = None
    """The noise, given directly; ε is then reported."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """δ; keep it below one over the number of training records."""
    unit: str = "record"
    """What one person's influence is bounded as: one record, or all records of one unit (or `lesion`, `person`, …)."""
    secure: bool = False
    """Noise and sampling from a cryptographic generator; no seed."""
    trials: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """How many runs on these data this one was chosen from; more than one costs privacy too."""

    @model_validator(mode="after")
    def _one_of_two(self) -> PrivacySettings:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            state = "neither is" if self.epsilon is None else "both are"
            raise ValueError(
                f"give exactly one of privacy.epsilon and privacy.noise_multiplier ({state} set; set the other to null)"
            )
        if self.epsilon is None and self.epsilon_as == "published":
            raise ValueError("privacy.epsilon_as=published tells how to read privacy.epsilon, which is not set")
        return self

    @property
    def by_unit(self) -> bool:
        """Whether a unit spans several records."""
        return self.unit not in RECORDS


class TrainingSettings(Section):
    """The update loop."""

    epochs: Annotated[int, Field(ge=1)] = 10
    """Expected passes over the training part."""
    batch_size: Annotated[int, Field(ge=1)] = 256
    """Expected batch size B; the actual one varies with the Poisson sample."""
    learning_rate: Positive | Literal["1/sqrt(steps)"] = 0.1
    """Step size, or `1/sqrt(steps)`."""
    optimizer: str = "sgd"
    """`sgd`, `momentum` (0.9), `adam` or `adamw`; it sees the noisy mean alone."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`, `cuda:1` and so on; `auto` takes CUDA if there is one."""
    devices: Annotated[int, Field(ge=1)] = 1
    """Processes of data-parallel training."""
    physical_batch_size: Annotated[int, Field(ge=1)] | None = None
    """At most so many units in memory at once; the result does not depend on it."""
    precision: Literal["float32", "bf16"] = "float32"
    """`bf16` runs the model in mixed precision; norms and sums stay in float32."""
    cuda_graphs: bool = False
    """Replay the model's passes as CUDA graphs: for small models on a GPU; not yet tried on one."""
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    """Epochs between checkpoints; null: none."""
    diagnostics: bool = False
    """Log exact training figures (`nonprivate/…`), outside the guarantee."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Epochs between evaluations on the test part."""
    class_weights: Annotated[tuple[Annotated[Number, Field(ge=0, le=HUGE)], ...] | None, BeforeValidator(listed)] = None
    """Weight of each class in the loss, in label order, `1+2.5`; null: all 1."""

    @field_validator("optimizer")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in OPTIMIZERS:
            raise unknown_name("training.optimizer", name, OPTIMIZERS)
        return name

    def rate(self, steps: int) -> float:
        """The learning rate of a run of T steps."""
        return float(steps**-0.5) if self.learning_rate == INVERSE_SQRT_STEPS else float(self.learning_rate)


class ModelSettings(Section):
    """Which model."""

    name: str = "mlp"
    """Registry name of the model."""
    options: dict[str, Any] = {}
    """Options of the model family: see *Models* at the end of this page."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in MODELS:
            raise unknown_name("model", name, MODELS)
        return name


SECTIONS: dict[str, type[Section]] = {
    "data": DataSettings,
    "privacy": PrivacySettings,
    "training": TrainingSettings,
    "model": ModelSettings,
}


class AuditSettings(Declared):
    """What is audited and how hard. A count of 0 leaves that attack out."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    gradient_canaries: Count = 10_000
    """Canaries with a prescribed gradient each; fewer than some thousands find no ordinary fault."""
    input_canaries: Count = 1_000
    """Training records given a wrong label; at most half of the training part is taken."""
    guesses: Count | None = None
    """Canaries guessed about, half of them "in"; fixed in advance; null: one in twenty."""
    delta: Probability | None = None
    """δ at which the claim is audited; null: 0.3 per number of canaries, where the one-run bound is strongest."""
    confidence: Probability = 0.95
    """Level of every bound and interval."""
    membership: bool = True
    """Whether to attack the membership of the training records, per group."""
    reference_models: Count = 4
    """Non-private models of the reference-model attack, in pairs that halve the pool; 0: loss threshold only."""
    membership_records: Annotated[int, Field(ge=100)] = 2_000
    """At most so many members, and non-members, of each group are attacked."""
    resamples: Annotated[int, Field(ge=20)] = 200
    """Bootstrap resamples behind each interval."""

    @model_validator(mode="after")
    def _paired(self) -> AuditSettings:
        if self.reference_models % 2:
            raise ValueError("reference_models come in pairs: give an even number")
        if 1 in (self.gradient_canaries, self.input_canaries):
            raise ValueError("one canary tells nothing: give 0 to leave it out, or some thousands")
        return self

    def guesses_of(self, canaries: int) -> int:
        """r, even."""
        wanted = canaries // 20 if self.guesses is None else self.guesses
        return 2 * max(1, min(wanted, canaries) // 2)

    def delta_of(self, canaries: int) -> float:
        """δ of the audit."""
        return 0.3 / canaries if self.delta is None else self.delta


class ReportSettings(Section):
    """Which tracked runs the comparison report takes."""

    dataset: str | None = None
    """Only runs on this dataset; null: all."""
    experiment: str | None = None
    """Name of the MLflow experiment; null: the one that runs log to, by `mlflow.yml`."""
    tags: dict[str, Annotated[str, BeforeValidator(str)]] = {}
    """Only runs with these tags, such as {sweep: demo}."""
    runs: Annotated[int, Field(ge=1, le=50_000)] = 200
    """At most so many, the newest; MLflow gives 50,000 and no more."""


PLAIN = ("dataset", "seed", "raw_dir", "run_label", "resume", "algorithm")
"""Settings that are single values."""


PIPELINE_SECTIONS: dict[str, type[BaseModel]] = {"audit": AuditSettings, "report": ReportSettings}
"""Blocks that one pipeline alone reads."""

TOP_LEVEL = (*PLAIN, *SECTIONS, *ALGORITHMS, *PIPELINE_SECTIONS)

AUDITED = "dpsgd_f"
"""The algorithm that the pipeline `audit` takes unless `algorithm` names another."""


def section(kind: type[BaseModel], name: str, values: Mapping[str, Any] | None) -> BaseModel:
    """Validate one block of settings.

    Raises:
        EquidpError: an unknown key (naming the nearest) or a value out of range, with the setting's dotted name.
    """
    values = block(name, values)
    refuse_unknown("setting", (f"{name}.{key}" for key in values), (f"{name}.{field}" for field in kind.model_fields))
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _readable(name, values, error) from error


def _readable(name: str, values: object, error: ValidationError) -> EquidpError:
    first, reason = refusal_of(error)
    place, at = [name], values
    for part in first["loc"]:
        if not isinstance(at, Mapping):  # from here on pydantic's own words, such as which kind of value it tried
            break
        place, at = [*place, str(part)], at.get(part)
    where = ".".join(place)
    return EquidpError(f"{where}={first['input']!r}: {reason}." if first["loc"] else f"{name}: {reason}.")


def resolve(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """All settings with their values, defaults included, as plain dicts. `presets` are dropped.

    Raises:
        EquidpError: for anything a user could have mistyped, naming the nearest valid name.
    """
    given = {key: value for key, value in parameters.items() if key != "presets" and not key.startswith("_")}
    check_names(given, TOP_LEVEL)
    dataset, seed = _folder_name("dataset", given.get("dataset", "")), given.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise EquidpError(f"seed={seed!r}: give a whole number.")
    resolved: dict[str, Any] = {
        "dataset": dataset,
        "seed": seed,
        "raw_dir": _raw_dir(given.get("raw_dir")),
        "run_label": _folder_name("run_label", given.get("run_label") or "", empty=True),
        "resume": _yes_or_no("resume", given.get("resume", False)),
    }
    for name, kind in SECTIONS.items():
        resolved[name] = section(kind, name, given.get(name)).model_dump(mode="json")
    resolved["data"]["source"] = resolved["data"]["source"] or dataset
    if resolved["data"]["source"] not in SOURCES:
        if resolved["data"]["source"] == dataset:  # it has a preset, or the loader would have refused it
            raise EquidpError(
                f"Dataset {dataset!r} is no source of its own, and its preset names none: give it data.source, such as "
                f"`source: csv`, in conf/local/parameters.yml. Sources: {', '.join(sorted(SOURCES))}."
            )
        raise unknown_name("data.source", resolved["data"]["source"], SOURCES)
    _refuse_id(resolved["data"]["source"], resolved["data"]["id"])
    chosen = source(resolved["data"]["source"], resolved["data"]["options"])
    for setting, word in (
        ("data.split_by", resolved["data"]["split_by"]),
        ("privacy.unit", resolved["privacy"]["unit"]),
    ):
        if chosen.split_level(setting, word) == "unit" and word in RECORDS:  # a table's column called `image`, say
            raise EquidpError(f"{setting}={word} means one record elsewhere: write {setting}=unit.")
    _refuse_divided_units(resolved["data"]["split_by"], resolved["privacy"]["unit"])
    _refuse_strata(DataSettings(**resolved["data"]), PrivacySettings(**resolved["privacy"]))
    model_options(resolved["model"]["name"], resolved["model"]["options"])
    for name in ALGORITHMS:
        resolved[name] = {"options": _options(name, given.get(name))}
    for name, settings in PIPELINE_SECTIONS.items():
        resolved[name] = section(settings, name, given.get(name)).model_dump(mode="json")
    audited = str(given.get("algorithm") or AUDITED)
    if audited not in ALGORITHMS:
        raise unknown_name("algorithm", audited, ALGORITHMS)
    resolved["audited"] = {"algorithm": audited, **resolved[audited]}
    return resolved


def _refuse_divided_units(split_by: str, unit: str) -> None:
    """A unit that is protected with all its records has none of them in the test or the public part."""
    if unit not in RECORDS and split_by in RECORDS:
        raise EquidpError(
            f"privacy.unit={unit} protects all records of a {unit}, and data.split_by={split_by} may put some of them "
            f"into the test or the public part, which nothing protects: set data.split_by={unit}."
        )


def _refuse_id(name: str, column: str) -> None:
    """A column is named where there is a table to name it in."""
    with_table = [known for known, kind in SOURCES.items() if "id" in kind.Options.model_fields]
    if column and name not in with_table:
        raise EquidpError(
            f"data.id={column}: every record of source {name!r} has an identity already; leave it out (it names "
            f"a column of {' or '.join(with_table)})."
        )


def _refuse_strata(data: DataSettings, privacy: PrivacySettings) -> None:
    if privacy.secure and data.membership == "strata" and not data.accept_strata:
        raise EquidpError(
            "data.membership=strata: one record more in the table would exchange many training records, and the ε of a "
            "secure run would not hold for the table: take data.membership=hash, or accept that by "
            "data.accept_strata=true."
        )


def check_names(given: Iterable[str], valid: Iterable[str]) -> None:
    """Refuse the first top-level key that is no setting."""
    valid = tuple(valid)
    for key in given:
        if key not in valid:
            blocks = {**SECTIONS, **PIPELINE_SECTIONS}
            nested = [f"{name}.{key}" for name, kind in blocks.items() if key in kind.model_fields]
            takers = [name for name, kind in ALGORITHMS.items() if kind.below_options and key in kind.model_fields]
            if takers and not nested:
                nested = [f"{takers[0] if len(takers) == 1 else '<algorithm>'}.options.{key}"]
            if nested:
                raise EquidpError(f"Unknown setting {key!r}. Did you mean {' or '.join(map(repr, nested))}?")
            raise unknown_name("setting", key, valid)


def _options(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    given = block(name, given)
    kind = ALGORITHMS[name]
    if not kind.below_options:
        if "options" in given:
            raise EquidpError(
                f"{name}.options: the settings of {name} stand below {name} itself, as {name}.weights does."
            )
        return algorithm_settings(name, given).model_dump(mode="json")
    for key in given:
        if key != "options":
            raise unknown_name("setting", f"{name}.{key}", (f"{name}.options.{field}" for field in kind.model_fields))
    return algorithm_settings(name, block(f"{name}.options", given.get("options"))).model_dump(mode="json")


def block(name: str, values: object) -> dict[str, Any]:
    """A block of settings as a dict; an empty one where nothing is given."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise EquidpError(f"{name}={values!r}: give settings below it, such as {name}.<setting>=<value>.")
    return {str(key): value for key, value in values.items()}


def _raw_dir(value: object) -> str:
    if value is None or value == "":  # an empty EQUIDP_RAW_DIR is none
        return str(Path("data") / "01_raw")
    if isinstance(value, str):
        return value
    raise EquidpError(f"raw_dir={value!r}: give a folder, such as data/01_raw; ./2024 where its name is a number.")


def _yes_or_no(setting: str, value: object) -> bool:
    try:
        return TypeAdapter(bool).validate_python(value)  # as in the blocks: "no" is false
    except ValidationError as error:
        raise EquidpError(f"{setting}={value!r}: give true or false.") from error


def _folder_name(setting: str, value: object, *, empty: bool = False) -> str:
    text = str(value)
    if (empty and not text) or SAFE_NAME.fullmatch(text):
        return text
    raise EquidpError(f"{setting}={text!r}: use letters a-z, digits and . _ = - only, as it becomes a folder's name.")
