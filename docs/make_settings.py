"""Writes the pages of settings from the classes that validate them: `python docs/make_settings.py`."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from equidp.algorithms import ALGORITHMS
from equidp.models import MODELS, ModelOptions
from equidp.parameters import PIPELINE_SECTIONS, SECTIONS

DOCS = Path(__file__).parent

HEAD = """# Settings

Made by `python docs/make_settings.py`; do not edit. These are the defaults in code. Each of the following overrides
what is before it: the dataset's preset (`conf/base/parameters/presets.yml`), blocks of the same names in the
`conf/base` of your own project, those in `conf/local`, and `--params`:
`kedro run --pipeline=dpsgd_f --params=dataset=adult,privacy.epsilon=3,training.epochs=5`. Give exactly one of
`privacy.epsilon` and `privacy.noise_multiplier`; it also replaces the other one of a preset. An unknown name is refused
with the nearest valid one. In `--params` a list is written with +: `model.options.hidden=16+8`.

Settings of a single algorithm: [settings of the algorithms](settings-algorithms.md). Options of a single model, and the
sources of the papers' presets: [models and presets](settings-models.md).

| setting | default | what it is |
|---|---|---|
| `dataset` | `digits` | name of a preset |
| `seed` | `0` | seed of split, initial weights, batches and noise |
| `raw_dir` | `data/01_raw` | folder of the raw files; `EQUIDP_RAW_DIR` sets it too |
| `run_label` | | one more level in the output path; no name in a run's folder (`release`, `privacy.json`) |
| `resume` | `false` | continue what an interrupted run left |
| `algorithm` | `dpsgd_f` | algorithm of the pipelines `audit`, `tune` and `release` |
"""

ALGORITHMS_HEAD = """# Settings of the algorithms

Made by `python docs/make_settings.py`; do not edit. What each does: [the algorithms](algorithms.md).

"""

MODELS_HEAD = """# Models and presets

Made by `python docs/make_settings.py`; do not edit.

"""

PAPERS = """
## Settings of the papers

One preset for each paper and dataset, which takes no value from another paper:
`kedro run --pipeline=psasc --params=dataset=mnist_psasc`. A misspelt name is refused with the nearest. Presets named
after a dataset alone serve the tables of [results.md](results.md), and some mix papers. Where a paper prints no value,
the column "source" names what it refers to, and "ours" what nobody prints.

| preset | paper | network (its weights) | source | ours |
|---|---|---|---|---|
"""

TB = "Tramèr and Boneh"
WIDTHS = "widths (those of Opacus' example), ReLU, rate, γ_0, γ_1, γ, K_0"
PRESETS = (
    ("`adult`, `dutch`", "DPSGD-F", "`logistic`", "section 6.1", "–"),
    ("`mnist_unbalanced`", "DPSGD-F", "`cnn_small` (77,484)", "section 6.1", "the layers' widths"),
    ("`mnist_psasc`", "DP-PSASC", "`psasc_cnn` (130,890)", "Tables II, III", WIDTHS),
    ("`fashion_mnist_psasc`", "DP-PSASC", "`psasc_cnn` (130,890)", "Tables II, III", f"{WIDTHS}, which 40,000 records"),
    ("`celeba`, `imagenette`", "DP-PSASC", "`resnet9`", "Tables II, III", "widths, image size, rate, γ_0, γ_1, K_0"),
    ("`cifar10_wide`", "De et al. 2022", "`wrn16_4`", "its public code, at ε 1", "ε 8, epochs, `sgd`'s rate; not run"),
    ("`mnist_sa`, `fashion_mnist_sa`", "SA-DPSGD", "`cnn4` (26,010), tanh", f"Table 2; epochs: {TB}; r: AUTO-S", "–"),
    ("`cifar10_sa`", "SA-DPSGD", "`sa_cnn9` (550,570), tanh", f"Table 2; network, epochs: {TB}; r: AUTO-S", "–"),
    (
        "`mnist_sa_relu`, `fashion_mnist_sa_relu`, `cifar10_sa_relu`",
        "SA-DPSGD, its row DPSGD",
        "the same, ReLU",
        "the same",
        "–",
    ),
    (
        "`mnist_dpis`, `fashion_mnist_dpis`",
        "DPIS; its DP-SGD-HF is `dpsgd`",
        "`tramer_boneh_mnist` (33,066)",
        f"Table 2; network, batch, rate, C_1, epochs: {TB}",
        "on MNIST: 25 epochs, features normalised within groups",
    ),
    (
        "`cifar10_dpis`",
        "DPIS; its DP-SGD-HF is `dpsgd`",
        "`tramer_boneh_cifar10` (187,210)",
        f"Table 2; network, batch, rate, C_1, epochs: {TB}",
        "features normalised within groups",
    ),
    (
        "`mnist_dpis_pixels`, `fashion_mnist_dpis_pixels`, `cifar10_dpis_pixels`",
        "DPIS, its other rows",
        "`cnn4` (26,010), `cnn9` (605,226)",
        f"Papernot et al.; batch, rate, C_1, epochs: {TB}",
        "ReLU of `dpsgd` and `dpsgd_decay`",
    ),
    ("`imdb_dpis`", "DPIS", "`bilstm`, GloVe's vectors", "Tables 1, 2", "batch, rate, epochs, C_1, vocabulary"),
    (
        "`ham10000_sad`",
        "SAD-DPSGD",
        "`resnet_finetune` (ResNet-50)",
        "section V; batch, epochs, rate, C: its code",
        "a, bounds of `auto_dpsgd_*`",
    ),
)

NO_PAPERS = (
    "digits", "diabetes", "diabetes_bands", "mnist", "fashion_mnist", "cifar10", "ham10000", "ham10000_pretrained",
    "imdb", "imdb_pretrained",
)  # fmt: skip
"""Presets whose values are of no one paper."""

NINE_LAYERS = """
SA-DPSGD prints "9 layers" for CIFAR-10 and names earlier work for them. No network of that work has nine layers with
weights: both have eight. SA-DPSGD's batch, rate and noise are those of Tramèr and Boneh's network, whose six
convolutions and three pools are nine; that is the one taken.
"""


def pages() -> dict[Path, str]:
    """The pages' texts."""
    shared = [block(name, *kinds) for name, kinds in {**SECTIONS, **PIPELINE_SECTIONS}.items()]
    own = [
        block(f"{name}.options" if kind.below_options else name, kind)
        for name, kind in ALGORITHMS.items()
        if kind.model_fields
    ]
    return {
        DOCS / "settings.md": HEAD + "\n".join(["", *shared]),
        DOCS / "settings-algorithms.md": ALGORITHMS_HEAD + "\n".join(own),
        DOCS / "settings-models.md": MODELS_HEAD + "\n".join(models()) + papers(),
    }


def papers() -> str:
    """Where each paper's preset has its values from."""
    return PAPERS + "".join(f"| {' | '.join(row)} |\n" for row in PRESETS) + NINE_LAYERS


def models() -> list[str]:
    """What `model.name` may be, and each one's options."""
    rows = [f"| `{name}` | {', '.join(kind.kinds)} | {summary(kind)} |" for name, kind in MODELS.items()]
    tables = [block("model.options", ModelOptions).split("\n", 2)[2]]
    for name, kind in MODELS.items():
        own = kind.Options.model_fields.keys() - ModelOptions.model_fields.keys()
        if own:
            tables.append(block("model.options", kind.Options, names=own).replace("## ", f"### `{name}`: ", 1))
    head = ["| `model.name` | features | what it is |", "|---|---|---|", *rows, ""]
    return ["## Models", "", *head, "Options of all models:", "", *tables]


def summary(kind: type) -> str:
    """The first sentence of a class's docstring."""
    return told_text((kind.__doc__ or "").split("\n\n")[0])


def block(prefix: str, *kinds: type[BaseModel], names: Iterable[str] | None = None) -> str:
    """One table of the fields of these classes; of some only, where names are given."""
    rows = [row for kind in kinds for row in rows_of(prefix, kind, names)]
    return "\n".join([f"## `{prefix}`", "", "| setting | default | what it is |", "|---|---|---|", *rows, ""])


def rows_of(prefix: str, kind: type[BaseModel], names: Iterable[str] | None = None) -> list[str]:
    """A row for each field of a class, or the rows of the settings below it."""
    rows, told = [], sentences(kind)
    for name, field in kind.model_fields.items():
        if isinstance(field.default, BaseModel):
            rows += rows_of(f"{prefix}.{name}", type(field.default))
        elif names is None or name in names:
            rows.append(f"| `{prefix}.{name}` | {default(field)} | {told_text(told.get(name, ''))} |")
    return rows


def sentences(kind: type) -> dict[str, str]:
    """What stands below each field in the source. Pydantic would read it too, whenever the package is imported."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if one.__module__.startswith("equidp"):
            (written,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
            assert isinstance(written, ast.ClassDef)
            for field, below in itertools.pairwise(written.body):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    text = below.value if isinstance(below, ast.Expr) else None
                    found[field.target.id] = str(text.value) if isinstance(text, ast.Constant) else ""
    return found


def default(field: FieldInfo) -> str:
    """A default as it is typed in YAML."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, tuple):
        value = list(value)
    if value == "":
        return ""
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def told_text(text: str) -> str:
    """A text on one line of a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
