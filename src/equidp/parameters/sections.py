"""The blocks of settings: every name that a user can give, its default, and what it may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from equidp.data.sources import record_words
from equidp.errors import refuse_unknown
from equidp.options import HUGE, Declared, Number, Positive, dotted, listed, values_of

if TYPE_CHECKING:
    from equidp.mechanism.optimizers import Descent

INVERSE_SQRT_STEPS = "1/sqrt(steps)"
"""A learning rate that falls with the length of the run, as in DPSGD-F's census experiments."""

DESCENT = frozenset(
    {"optimizer", "momentum", "weight_decay", "adam_epsilon", "schedule", "schedule_at", "schedule_factor"}
)
"""Settings that `Descent` has too."""

HUBER_DELTA = 0.1
"""Where Huber's loss becomes linear unless told otherwise, as a share of the target's range."""

AUGMENTATIONS = {"image": ("flip", "crop"), "tabular": ("noise",)}
"""What can make a view of a record random, by the kind of features."""

Count = Annotated[int, Field(ge=0, le=10_000_000)]
Probability = Annotated[float, Field(gt=0, lt=1)]


def _as_text(value: Any) -> Any:
    """A number as it is typed: `data.key=2024` is a text to whoever types it."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_as_text)]
"""A text, which may look like a number."""


class Block(Declared, BaseModel):  # the second for ruff, which knows by it that a default of {} is copied
    """A block of settings; frozen, and refusing keys it does not know."""

    model_config = ConfigDict(allow_inf_nan=False)


ClassWeights = Annotated[tuple[Annotated[Number, Field(ge=0, le=HUGE)], ...], BeforeValidator(listed)]
"""Weights in label order."""


class DataSettings(Block):
    """Which records, how they are split, and by which groups results are told."""

    source: str = ""
    """Registry name of the source; the dataset's own name unless given."""
    task: str = ""
    """What is predicted: `classification`, `ordinal`, `regression`, `counts` or `multilabel`; unless given, the
    source's own. Of a `table` it follows from what is declared of the label."""
    groups: Annotated[tuple[str, ...], BeforeValidator(listed)] = ("class",)
    """Groupings to report, `sex+race+sex*race`; the first is the partition that group-aware algorithms use."""
    positive_class: Text = ""
    """Class whose selection rate, true and false positive rate and predictive value are reported per group. Unless
    given: the second of two classes; of more classes none."""
    keep: dict[str, Annotated[Number, Field(gt=0)]] = {}
    """Unbalancing of the training part: class name → count, or fraction below 1. By `hash` the count is an expected
    one, and needs the class's declared size."""
    membership: Literal["hash", "strata"] = "hash"
    """Which records train. `hash`: each record's own identity and a public key decide, and sizes are random. `strata`,
    for the papers' tables: sizes are exact, but one more record in the table exchanges many training records."""
    id: str = ""
    """Column of a `table` or an `image_folder` with each record's id, its identity; without one its content is."""
    key: Text = ""
    """Text that the public key is made of; empty: the seed, so that every seed has parts of its own."""
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
        return "record" if self.split_by in record_words() else "unit"


class TrainingSettings(Block):
    """The update loop: what a release may depend on, in its last digit too.

    A resumed run must have the same settings. Its steps that are done again take the noise that they took before, so
    that of two releases whose sums round differently the difference would be exact. Hence these are here and not among
    `OperationSettings`:

    - `device`: another device has other kernels, which round differently, and other seeded generators.
    - `devices`: every process draws from streams of its own, and their sums are added in another order.
    - `physical_batch_size`: a sum over other chunks rounds differently.
    - `precision`: the gradients of bf16 are other gradients.
    - `cuda_graphs`: a recorded step may have other kernels than one computed afresh.
    - `deterministic`: other kernels, which add in another order.
    - `diagnostics`: exact figures are published, and the privacy statement says so for the whole run.
    """

    epochs: Annotated[int, Field(ge=1)] = 10
    """Expected passes over the training part."""
    batch_size: Annotated[int, Field(ge=1)] = 256
    """Expected batch size B; the actual one varies with the Poisson sample."""
    learning_rate: Positive | Literal["1/sqrt(steps)"] = 0.1
    """Step size, or `1/sqrt(steps)`."""
    optimizer: str | None = None
    """`sgd`, `momentum` (0.9), `adam` or `adamw`; it sees the noisy mean alone. null: the algorithm's own, or `sgd`."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum of the optimiser `momentum`; null: 0.9."""
    weight_decay: Annotated[float, Field(ge=0, le=HUGE)] | None = None
    """λ, added to the update as λ·θ, with `adamw` apart from the moments; null: 0, with `adamw` 0.01."""
    adam_epsilon: Positive | None = None
    """Added to the root in the denominator of `adam` and `adamw`; null: 1e-8."""
    schedule: Literal["constant", "cosine", "step"] = "constant"
    """How the learning rate changes: `constant`, `cosine` (towards 0), or `step` (down in steps)."""
    schedule_at: Annotated[tuple[Probability, ...] | None, BeforeValidator(listed)] = None
    """Shares of the run, `0.5+0.75`, at which `step` lowers the rate; null: these two."""
    schedule_factor: Probability | None = None
    """What `step` multiplies the rate by each time; null: 0.1."""
    average: Annotated[float, Field(ge=0, lt=1)] | None = None
    """β: the released weights are an exponential moving average of the trained ones, β_t = min(β, (1 + t)/(10 + t));
    null: the trained ones."""
    augmentations: Annotated[int, Field(ge=0, le=1024)] = 0
    """m: a record's gradient is the mean over m random views of it, then bounded; 0: of the record itself."""
    augmentation_kinds: Annotated[tuple[str, ...] | None, BeforeValidator(listed)] = None
    """What makes a view random: `flip+crop` for images, `noise` for tables; null: all kinds for the data."""
    augmentation_padding: Annotated[int, Field(ge=1)] | None = None
    """Pixels that images are padded by, by reflection, before a `crop`; null: 4."""
    augmentation_noise: Positive | None = None
    """Standard deviation of `noise`, on features in [0, 1]; null: 0.05."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`, `cuda:1` and so on; `auto` takes CUDA if there is one."""
    devices: Annotated[int, Field(ge=1)] = 1
    """Processes of data-parallel training."""
    physical_batch_size: Annotated[int, Field(ge=1)] | None = None
    """The most units (on a GPU and in a secure run records), with all their views, in memory at once; it changes the
    result by rounding only. A secure run on a CPU takes a multiple of 32, and 32 at least."""
    precision: Literal["float32", "bf16"] = "float32"
    """`bf16` runs the model in mixed precision, on a GPU; norms and sums stay in float32."""
    cuda_graphs: bool | None = None
    """Replay whole steps as CUDA graphs, after a check that they give what ordinary steps give. null: on a GPU whose
    memory holds a step twice, unless `deterministic`."""
    deterministic: bool = False
    """On a GPU, kernels that add in a fixed order (slower), so that a resumed run repeats its steps, as on a CPU."""
    diagnostics: bool = False
    """Log exact training figures (`nonprivate/…`), outside the guarantee."""
    trainable: Literal["head", "bias", "norm", "lora", "all"] | None = None
    """What of a pretrained network (`model.name=backbone`) is trained besides its head: nothing (`head`, the default),
    biases, normalisations, adapters of low rank, or everything; statistics of BatchNorm always stay."""
    loss: str | None = None
    """Loss of each record; null: the first of its task. Classification: `cross_entropy`; ordered classes:
    `cumulative_cross_entropy`; regression: `squared`, `huber`; counts: `poisson`; several labels:
    `binary_cross_entropy` (mean over them), `binary_cross_entropy_sum`."""
    huber_delta: Annotated[float, Field(gt=0, le=1)] | None = None
    """The error above which `huber` is linear, as a share of the target's range; null: 0.1."""
    class_weights: ClassWeights | Literal["balanced"] | None = None
    """Weight of each class in the loss, in label order, `1+2.5`; `balanced`: 1 for the rarest class, less for others,
    by declared sizes; null: all 1. Clipping undoes weights: raise C, to 16, say."""

    @model_validator(mode="after")
    def _holds_together(self) -> TrainingSettings:
        if self.model_fields_set & DESCENT:
            _ = self.descent  # refuses what does not belong together
        if self.huber_delta is not None and self.loss != "huber":
            raise ValueError("huber_delta has no effect unless loss is huber")
        self._refuse_idle_augmentation()
        return self

    def _refuse_idle_augmentation(self) -> None:
        words = [word for words in AUGMENTATIONS.values() for word in words]
        refuse_unknown("training.augmentation_kinds", self.augmentation_kinds or (), words)
        given = [name for name in ("kinds", "padding", "noise") if getattr(self, f"augmentation_{name}") is not None]
        if given and not self.augmentations:
            raise ValueError(f"augmentation_{given[0]} has no effect while augmentations is 0: give m")
        for name, word in (("padding", "crop"), ("noise", "noise")):
            if name in given and word not in (self.augmentation_kinds or words):
                raise ValueError(f"augmentation_{name} has no effect without {word} in augmentation_kinds")

    @property
    def descent(self) -> Descent:
        """Optimiser and schedule, with their settings."""
        from equidp.mechanism.optimizers import Descent  # late: it imports torch

        return Descent(**{name: getattr(self, name) for name in DESCENT})

    def rate(self, steps: int) -> float:
        """The learning rate of a run of T steps."""
        return float(steps**-0.5) if self.learning_rate == INVERSE_SQRT_STEPS else float(self.learning_rate)


class OperationSettings(Block):
    """How a training is operated: a user finds these below `training`, too.

    They change no digit of a release, so a run that is resumed may have others:

    - `checkpoint_every`: a checkpoint is a copy of the state between two steps, and draws nothing.
    - `evaluate_every`: an evaluation reads the test part, in evaluation mode, and draws nothing.
    """

    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    """Epochs between checkpoints; null: none. A resumed run may have another."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Epochs between evaluations on the test part. A resumed run may have another."""


class ModelSettings(Block):
    """Which model."""

    name: str = "mlp"
    """Registry name of the model."""
    options: dict[str, Any] = {}
    """Options of the model: see [models](settings-models.md#models)."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        from equidp.models import MODELS  # late: it imports torch

        refuse_unknown("model", [name], MODELS)
        return name


class AuditSettings(Declared):
    """What is audited and how hard. A count of 0 leaves that attack out."""

    gradient_canaries: Count = 10_000
    """Canaries with a prescribed gradient each; with less than some thousands an audit finds no ordinary fault."""
    input_canaries: Count = 1_000
    """Training records given a wrong label; at most half of the training part is taken."""
    guesses: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Canaries about which a guess is made, half of them "in"; fixed in advance; null: one in twenty."""
    delta: Probability | None = None
    """δ at which the claim is audited; null: 0.3 per number of canaries, where the one-run bound is strongest."""
    confidence: Probability = 0.95
    """Level of every bound and interval."""
    membership: bool = True
    """Whether to attack the membership of the training records, per group."""
    reference_models: Count = 4
    """Non-private models of the reference-model attack, in pairs that halve the pool; 0: loss threshold only."""
    membership_records: Annotated[int, Field(ge=100)] = 2_000
    """The most members, and the most non-members, of each group that are attacked."""
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


class TuneSettings(Block):
    """What the pipeline `tune` chooses from, and by what. The number of trials is `privacy.trials_law`'s."""

    grid: dict[str, Any] = {}
    """Values of each setting, `tune.grid.training.learning_rate=0.1+0.5`; every trial draws one of all combinations."""
    box: dict[str, Any] = {}
    """Ranges, `tune.box.training.learning_rate=0.05+2`, or `0.05+2+log`; if both ends are whole, only whole numbers."""
    points: Annotated[int, Field(ge=1)] = 32
    """Points of the box, each with every combination of the grid."""
    sampler: str = "halton"
    """How the points are spread over the box; no sampler that sees scores is allowed."""
    score: Literal["accuracy", "balanced_accuracy", "worst_group"] = "balanced_accuracy"
    """Figure of the validation part that chooses; `worst_group`: the lowest accuracy over the first grouping."""
    epsilon: Annotated[float, Field(gt=0)] = 1.0
    """ε of choice and scores together, for the validation records; `privacy.epsilon` is that of choice and model for
    the training records."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Trials at the same time, each in a process of its own; the result is the same for any number."""
    exact: bool = False
    """For research, a choice without privacy: every combination is trained once, each at `privacy.epsilon` alone, and
    the exact figure chooses."""

    @property
    def values(self) -> dict[str, list[Any]]:
        """Each setting's values, by its dotted name."""
        return {name: values_of(value) for name, value in dotted(self.grid).items()}

    @property
    def ranges(self) -> dict[str, list[Any]]:
        """Each range's ends, and `log` where it is logarithmic, by the setting's dotted name."""
        return {name: values_of(value) for name, value in dotted(self.box).items()}


class ReportSettings(Block):
    """Which tracked runs the comparison report takes."""

    dataset: str | None = None
    """Only runs on this dataset; null: all."""
    experiment: str | None = None
    """Name of the MLflow experiment; null: the one that runs log to, by `mlflow.yml`."""
    tags: dict[str, Annotated[str, BeforeValidator(str)]] = {}
    """Only runs with these tags, such as {sweep: demo}."""
    runs: Annotated[int, Field(ge=1, le=50_000)] = 200
    """The most runs, the newest first; MLflow gives no more than 50,000."""


class ReleaseSettings(Block):
    """The documents that go out with a model (docs/release.md). Texts are yours: they go out as they are."""

    documents: bool | None = None
    """Whether a run writes `release/`; null: a secure run does, any other does not."""
    unprotected: Annotated[tuple[Literal["test", "audit"], ...], BeforeValidator(listed)] = ()
    """Exact figures to publish unprotected, `test+audit`: of the test records; an audit's figures."""
    curator: str = ""
    """Who releases the model, and how to reach them."""
    purpose: str = ""
    """What the model is for."""
    data_origin: str = ""
    """Whose data these are, how they were collected and chosen, on what legal ground."""
    published_on: str = ""
    """Date of publication."""
    license: str = "unknown"
    """Licence of the weights, by the model hubs' names."""
    rationale: str = ""
    """Why this unit, ε and δ."""
    access: str = ""
    """Who may receive the model, and under which terms."""
    security: str = ""
    """How raw data, checkpoints and logs are kept."""
    bias: str = ""
    """What is known of bias in the data, and in how the model will be used."""
    consultation: str = ""
    """Impact assessment, and the advice of the data-protection officer."""
    withdrawal: str = ""
    """What happens if a new attack appears."""

    def statements(self) -> dict[str, str]:
        """The texts that are given, by setting; `unknown` is no answer."""
        texts = {name: text.strip() for name, text in self.model_dump().items() if isinstance(text, str)}
        return {name: text for name, text in texts.items() if text not in ("", "unknown")}
