"""From the merged configuration to one frozen object: every setting is validated here, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from equidp.algorithms import ALGORITHMS, BASELINE, algorithm_settings
from equidp.data.products import within_classes
from equidp.data.sources import SOURCES, record_words, source
from equidp.errors import EquidpError, nearest, refuse_unknown, unknown_name
from equidp.options import refusal_of
from equidp.parameters.declared import declared
from equidp.parameters.privacy import PrivacySettings
from equidp.parameters.sections import (
    AuditSettings,
    DataSettings,
    ModelSettings,
    OperationSettings,
    ReleaseSettings,
    ReportSettings,
    TrainingSettings,
    TuneSettings,
)
from equidp.tasks import CLASSIFICATION, ORDINAL, TASKS

if TYPE_CHECKING:
    from equidp.algorithms.settings import AlgorithmSettings
    from equidp.mechanism.algorithm import Algorithm

PLAIN = ("dataset", "seed", "raw_dir", "run_label", "resume", "algorithm")
"""Settings that are single values."""

SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "data": (DataSettings,),
    "privacy": (PrivacySettings,),
    "training": (TrainingSettings, OperationSettings),
    "model": (ModelSettings,),
}
"""Blocks that all training reads, and the classes that validate each: a user's block may be of several."""

PIPELINE_SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "audit": (AuditSettings,),
    "report": (ReportSettings,),
    "release": (ReleaseSettings,),
    "tune": (TuneSettings,),
}
"""Blocks that one pipeline alone reads."""

SHARED = ("dataset", "seed", "data", "model", "privacy", "training")
"""Settings that all algorithms of a run share, in the order in which they are shown."""

TOP_LEVEL = (*PLAIN, *SECTIONS, *ALGORITHMS, *PIPELINE_SECTIONS)

DECLARED_BY = {
    "classification": "classes",
    "regression": "target (with its bounds)",
    "counts": "counts (with their maximum)",
    "multilabel": "labels (of CelebA attributes)",
    "ordinal": "ordered=true (with classes)",
}
"""The option by which a table tells its task."""

AUDITED = "dpsgd_f"
"""The algorithm that the pipeline `audit` takes unless `algorithm` names another."""

TUNED = "tuned"
"""What `algorithm` names for the model that `tune` chose, and the folder of its results."""

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*")
"""Names that become folders: nothing that could leave the project."""

TAKEN = ("release", "workplace", "nonprivate")
"""Folders within a run's own, which are no `run_label`: a run without one replaces `release`, and gives it away."""

FILES = (".csv", ".html", ".json", ".lock", ".md", ".parquet", ".safetensors")
"""Endings of files there, which no `run_label` has: a run without one removes what is named as its file will be."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run, validated, defaults included; `resolve` makes them.

    Attributes:
        dataset, seed, raw_dir, run_label, resume: as a user gives them.
        data, privacy, training, model, audit, report, release, tune: the blocks of these names.
        operation: the settings below `training` that change no release.
        algorithms: the options of every algorithm, by its name.
        audited: name of the algorithm that an audit, a tuning or a release is of, or `TUNED`.
    """

    dataset: str
    seed: int
    raw_dir: str
    run_label: str
    resume: bool
    data: DataSettings
    privacy: PrivacySettings
    training: TrainingSettings
    operation: OperationSettings
    model: ModelSettings
    algorithms: Mapping[str, AlgorithmSettings]
    audited: str
    audit: AuditSettings
    report: ReportSettings
    release: ReleaseSettings
    tune: TuneSettings
    _built: dict[str, Algorithm] = field(default_factory=dict, init=False, repr=False, compare=False)

    def algorithm(self, name: str) -> Algorithm:
        """The algorithm of that name, built once. Raises EquidpError for parts that cannot hold together."""
        if name not in self._built:
            if name not in self.algorithms:
                algorithm_settings(name)  # of another package, and broken: it says why
            built = self.algorithms[name].build()
            if (found := getattr(built, "name", None)) != name:  # ε would be stated under another name, or fail
                raise EquidpError(f"{name}: its `build` must return an Algorithm of the name {name!r}, not {found!r}.")
            self._built[name] = built
        return self._built[name]

    def __getstate__(self) -> dict[str, Any]:
        """What crosses to another process, which builds its algorithms itself: their parts may be local functions."""
        return self.__dict__ | {"_built": {}}

    def options(self, name: str) -> dict[str, Any]:
        """An algorithm's options as JSON types."""
        return self.algorithms[name].model_dump(mode="json")

    def to_dict(self) -> dict[str, Any]:
        """As JSON types under the names that a user gives them: what is logged and shown."""
        plain = {name: getattr(self, name) for name in PLAIN if name != "algorithm"}
        blocks = {name: _dumped(getattr(self, name)) for name in (*SECTIONS, *PIPELINE_SECTIONS)}
        blocks["training"] |= _dumped(self.operation)
        own = {name: {"options": self.options(name)} for name in self.algorithms}
        return plain | blocks | own | {"audited": {"algorithm": self.audited, **own.get(self.audited, {})}}


def concerning(parameters: Mapping[str, Any], algorithms: Iterable[str], *more: str) -> dict[str, Any]:
    """Of `Settings.to_dict` what concerns these algorithms: the shared settings, more blocks, and options.

    The baseline's options are among them, as costs of privacy depend on them.
    """
    own = {f"{name}.options": parameters[name]["options"] for name in dict.fromkeys((BASELINE, *algorithms))}
    return {name: parameters[name] for name in (*SHARED, *more)} | own


def varied(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings of the algorithm `audited` with others in some places, by dotted names; validated as a user's are.

    Raises:
        EquidpError: for a name or value that does not exist.
    """
    name, every = settings.audited, settings.to_dict()
    given = {key: value for key, value in every.items() if key != "audited" and key not in ALGORITHMS}
    given |= {"algorithm": name, name: every[name] if ALGORITHMS[name].below_options else every[name]["options"]}
    if settings.training.trainable is not None:  # written there by `_with_network`, and not the user's
        given["model"]["options"].pop("trainable", None)
    for setting, value in changes.items():
        *path, last = setting.split(".")
        place = given
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return resolve(given)


def _dumped(settings: BaseModel) -> dict[str, Any]:
    return settings.model_dump(mode="json")


def resolve(parameters: Mapping[str, Any]) -> Settings:
    """All settings of the merged configuration, validated. `presets` are dropped.

    Raises:
        EquidpError: for anything a user could have mistyped, naming the nearest valid name.
    """
    given = {key: value for key, value in parameters.items() if key != "presets" and not key.startswith("_")}
    check_names(given, TOP_LEVEL)
    # names before values: some values are checked by what imports torch, which takes longer than all before
    options = {name: _options(name, given.get(name)) for name in ALGORITHMS}
    blocks = SECTIONS | PIPELINE_SECTIONS
    for name, kinds in blocks.items():
        valid = [f"{name}.{setting}" for kind in kinds for setting in kind.model_fields]
        refuse_unknown("setting", (f"{name}.{key}" for key in block(name, given.get(name))), valid)
    audited = str(given.get("algorithm") or AUDITED)
    if audited not in ALGORITHMS and audited != TUNED:
        raise unknown_name("algorithm", audited, ALGORITHMS)
    dataset, seed = _folder_name("dataset", given.get("dataset", "")), given.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise EquidpError(f"seed={seed!r}: give a whole number.")
    raw_dir = _raw_dir(given.get("raw_dir"))
    run_label = _folder_name("run_label", given.get("run_label") or "", empty=True)
    plain = run_label.lower().rstrip(".")  # Windows leaves dots at the end out
    if plain in TAKEN:
        raise EquidpError(f"run_label={run_label}: a run without a label has a folder of that name; take another word.")
    if plain.endswith(FILES):
        raise EquidpError(
            f"run_label={run_label}: a run without a label may have a file of that name; leave its end out."
        )
    resume = _yes_or_no("resume", given.get("resume", False))
    data, privacy, training, operation, model, audit, report, release, tune = (
        made for name, kinds in blocks.items() for made in _section(name, kinds, given.get(name))
    )
    data = _sourced(data, dataset)
    _refuse_exact_figures(release, data, privacy, audit)
    model, data = _with_network(model, data, training)
    _refuse_other_units(data, privacy)
    _refuse_strata(data, privacy)
    _refuse_beyond_task(data, privacy, training)
    # one of another package that is broken stops the runs that name it, and no others
    kept = [name for name, _ in ALGORITHMS.sound()]
    algorithms = {name: algorithm_settings(name, options[name]) for name in kept}
    return Settings(
        dataset, seed, raw_dir, run_label, resume, data, privacy, training, operation, model, algorithms, audited,
        audit, report, release, tune,
    )  # fmt: skip


def _section(name: str, kinds: Iterable[type[BaseModel]], given: object) -> list[Any]:
    """One block of settings as an object of each of its classes."""
    values, found = block(name, given), []
    for kind in kinds:
        own = {key: value for key, value in values.items() if key in kind.model_fields}
        try:
            found.append(kind.model_validate(own))
        except ValidationError as error:
            raise _readable(name, own, error) from error
    return found


def _sourced(data: DataSettings, dataset: str) -> DataSettings:
    """With the name of the source, which is the dataset's own unless it is given."""
    named = data.source or dataset
    if named not in SOURCES:
        if named == dataset:  # it has a preset, or the loader would have refused it
            raise EquidpError(
                f"Dataset {dataset!r} is no source of its own, and its preset names none: give it data.source, such as "
                f"`source: table`, in conf/local/parameters.yml. Sources: {', '.join(sorted(SOURCES))}."
            )
        raise unknown_name("data.source", named, SOURCES)
    _refuse_id(data.id, named)  # before the source's options, among which it is by now
    task = source(named, data.options).task
    if data.task not in ("", task):
        if data.task not in TASKS:
            raise unknown_name("data.task", data.task, TASKS)
        tells = DECLARED_BY.get(data.task) if data.task in SOURCES[named].tasks else None
        raise EquidpError(
            f"data.task={data.task}: "
            + (f"declare data.options.{tells}." if tells else f"source {named!r} is for {task}; leave it out.")
        )
    return data.model_copy(update={"source": named, "task": task})


def _refuse_beyond_task(data: DataSettings, privacy: PrivacySettings, training: TrainingSettings) -> None:
    """Refuse settings that the task has no use for; where there are classes all but other losses have one."""
    if training.loss is not None:  # else no task is imported, and torch with it
        TASKS[data.task].loss_named(training.loss)
    if data.task == CLASSIFICATION:
        return
    beyond: dict[str, Any] = {"data.positive_class": data.positive_class}
    if data.task != ORDINAL:
        beyond |= {"data.keep": data.keep, "training.class_weights": training.class_weights}
    for setting, given in beyond.items():
        if given:
            raise EquidpError(f"{setting} is not for the task {data.task}: leave it out.")
    if data.task != ORDINAL and any(within_classes(name) for name in data.groups):
        raise EquidpError(
            f"data.groups names class, and {data.task} has no classes: name one or more of data.options.groups, by "
            "sex, say, or by bands (edges) of a number."
        )
    if privacy.evaluation.epsilon is not None:
        raise EquidpError(
            f"privacy.evaluation.epsilon is for classification, not for the task {data.task}: leave it out. Figures of "
            "the test part are then exact, and stay inside."
        )


def _with_network(
    model: ModelSettings, data: DataSettings, training: TrainingSettings
) -> tuple[ModelSettings, DataSettings]:
    """The model's options with what is trained of it, and for texts the data's with the network's own tokenizer."""
    from equidp.models import MODELS, model_options

    if training.trainable is not None:
        if "trainable" not in MODELS[model.name].Options.model_fields:
            raise EquidpError(
                f"training.trainable={training.trainable}: model {model.name!r} is no pretrained network by name; "
                "set model.name=backbone, or leave it out."
            )
        if model.options.get("trainable", training.trainable) != training.trainable:
            raise EquidpError("training.trainable and model.options.trainable differ: leave the second out.")
        model = model.model_copy(update={"options": {**model.options, "trainable": training.trainable}})
    chosen = model_options(model.name, model.options)
    tokenizer = chosen.tokenizer()
    takes = "tokenizer" in SOURCES[data.source].Options.model_fields
    if tokenizer and takes and not data.options.get("tokenizer"):
        data = data.model_copy(update={"options": {**data.options, "tokenizer": tokenizer}})
    return model, data


def _refuse_exact_figures(
    release: ReleaseSettings, data: DataSettings, privacy: PrivacySettings, audit: AuditSettings
) -> None:
    """Refuse to publish exact figures of records that something protects."""
    protected = data.evaluate_on == "validation" or privacy.evaluation.epsilon is not None
    if "audit" in release.unprotected and audit.membership and protected:
        raise EquidpError(
            f"release.unprotected=audit would publish membership inference: exact figures of {data.evaluate_on} "
            "records, too, which are protected here. Leave it out, or audit by canaries alone (audit.membership=false)."
        )
    if "test" not in release.unprotected:
        return
    if data.evaluate_on == "validation":
        raise EquidpError(
            "release.unprotected=test would publish figures of validation records, which were taken from the training "
            "records: leave it out, or set data.evaluate_on=test."
        )
    if privacy.evaluation.epsilon is not None:
        raise EquidpError(
            "release.unprotected=test would publish the exact figures beside those that privacy.evaluation.epsilon "
            "protects: leave one of them out."
        )


def _refuse_other_units(data: DataSettings, privacy: PrivacySettings) -> None:
    """Refuse words for units that the source does not know, and units that the split would divide."""
    chosen = source(data.source, data.options)
    for setting, word in (("data.split_by", data.split_by), ("privacy.unit", privacy.unit)):
        # a table's column called `image`, say
        if chosen.split_level(setting, word) == "unit" and word in record_words():
            raise EquidpError(f"{setting}={word} means one record elsewhere: write {setting}=unit.")
    if privacy.unit not in record_words() and data.split_by in record_words():
        raise EquidpError(
            f"privacy.unit={privacy.unit} protects all records of a {privacy.unit}, and data.split_by={data.split_by} "
            f"may put some of them into the test or the public part, which nothing protects: set "
            f"data.split_by={privacy.unit}."
        )


def _refuse_id(column: str, source: str) -> None:
    """A column is named where there is a table to name it in."""
    with_table = [name for name, kind in SOURCES.sound() if "id" in kind.Options.model_fields]
    if column and source not in with_table:
        raise EquidpError(
            f"data.id={column}: every record of source {source!r} has an identity already; leave it out (it "
            f"names a column of {' or '.join(with_table)})."
        )


def _refuse_strata(data: DataSettings, privacy: PrivacySettings) -> None:
    if privacy.secure and data.membership == "strata" and privacy.evaluation.epsilon is not None:
        raise EquidpError(
            "privacy.evaluation.epsilon with data.membership=strata: one record more in the table would exchange "
            "records between the training and the test part, so that neither ε holds for a person: take "
            "data.membership=hash."
        )
    if privacy.secure and data.membership == "strata" and not data.accept_strata:
        raise EquidpError(
            "data.membership=strata: one record more in the table would exchange many training records, and the ε of a "
            "secure run would not hold for the table: take data.membership=hash, or accept that by "
            "data.accept_strata=true."
        )


def _readable(name: str, values: object, error: ValidationError) -> EquidpError:
    first, reason = refusal_of(error)
    place, at = [name], values
    for part in first["loc"]:
        if not isinstance(at, Mapping):  # from here on pydantic's own words, such as which kind of value it tried
            break
        place, at = [*place, str(part)], at.get(part)
    if not first["loc"]:  # of several settings, which most name with their section
        return EquidpError(f"{reason}." if reason.startswith(f"{name}.") else f"{name}: {reason}.")
    return EquidpError(f"{'.'.join(place)}={first['input']!r}: {reason}.")


def check_names(given: Iterable[str], valid: Iterable[str]) -> None:
    """Refuse the first top-level key that is no setting."""
    valid = tuple(valid)
    for key in given:
        if key not in valid:
            section, _, inner = key.partition(".")
            if inner and section in valid:
                raise EquidpError(
                    f"{key!r}: only --params takes names with dots. In a file of settings, and in Python's "
                    f"runtime_params, write the block: {section}: {{{inner}: …}}."
                )
            blocks = {**SECTIONS, **PIPELINE_SECTIONS}
            nested = [f"{name}.{key}" for name in blocks for kind in blocks[name] if key in kind.model_fields]
            options = {} if nested or nearest(key, valid) else {name: declared(name) for name in ALGORITHMS}
            if takers := [name for name, (names, below) in options.items() if below and key in names]:
                nested = [f"{takers[0] if len(takers) == 1 else '<algorithm>'}.options.{key}"]
            if nested:
                raise EquidpError(f"Unknown setting {key!r}. Did you mean {' or '.join(map(repr, nested))}?")
            raise unknown_name("setting", key, valid)


def _options(name: str, given: object) -> dict[str, Any]:
    """What is given of an algorithm's settings; names are checked before what it imports is imported."""
    values = block(name, given)
    if not values:
        return {}
    names, below = declared(name)
    if below:
        for key in values:
            if key != "options":
                raise unknown_name("setting", f"{name}.{key}", (f"{name}.options.{field}" for field in names))
        values = block(f"{name}.options", values.get("options"))
    elif "options" in values:
        raise EquidpError(f"{name}.options: the settings of {name} stand below {name} itself, as {name}.weights does.")
    refuse_unknown(f"setting of {name}.options" if below else f"setting of {name}", values, names)
    return values


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
    if isinstance(value, bool | float):  # `4e999` and `7e999` would be one name
        raise EquidpError(f"{setting}={value!r} is a number or a truth value here: put it in quotes.")
    text = str(value)
    if (empty and not text) or SAFE_NAME.fullmatch(text):
        return text
    raise EquidpError(f"{setting}={text!r}: use letters a-z, digits and . _ = - only, as it becomes a folder's name.")
