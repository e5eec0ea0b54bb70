"""`kedro new-dataset`: a preset for a table, drafted from its columns' names and types alone, and then checked.

No category and no bound is taken from the table: each would be a release. What only the codebook can say is marked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from equidp.data.raw_files import content
from equidp.data.tables import FEATHER, PARQUET, SEPARATORS, read_binary
from equidp.errors import EquidpError, missing_column
from equidp.options import MARK
from equidp.system.files import replacing

if TYPE_CHECKING:
    from equidp.parameters import Settings

SENSITIVE = re.compile(
    r"sex|gender|geschlecht|race|ethnic|religion|national|disab|marital|(^|_)age(_|$|group)|^alter$", re.IGNORECASE
)
IDENTIFYING = re.compile(
    r"(^|[_.\s-])(id|nr|no|key|uuid)$|^(id|name|patient|person|subject|index)$"
    r"|^(row|record|case|patient|person|subject)[_.\s-]?index$",
    re.IGNORECASE,
)
"""A body mass index, say, is a feature."""
IMAGE = re.compile(
    r"(^|[_.\s-])(image|img|photo|picture|bild|foto)s?([_.\s-]?(name|file|path))?$|^file[_.\s-]?(name|path)$",
    re.IGNORECASE,
)
"""File names of images; an index of images, say, is an id."""
DATE = r"\d{1,2}\.\d{1,2}\.\d+"
"""Which is a number to pandas where a point groups thousands."""

ROWS = 5000
"""How many rows the types are read from."""

DRAFT = """\
# Drafted by `kedro new-dataset` from the names and types of columns; no value of the table is in it.
# Replace every {mark} by what the codebook says, not by what the table holds: a bound or a list of categories
# that is read from the data is a release. Then call the same command again, which checks it.
presets:
  {name}:
    data:
      source: table
      groups: {reported}          # what is reported by; a product too: "sex*age_band"
      options:
        path: {path}
{dialect}        label: {label}
        classes: [{mark}]          # values of the label, in label order, each in quotes
        # target: {{minimum: 0, maximum: 100}}          in place of classes, if the label is a number to be predicted
        # class_map: {{bad: ["1"], good: ["2"]}}        names for coded values; class_edges: [50] cuts a number
        missing: error          # `drop` leaves out rows with a missing feature or label; or keep them: `unknown: true`
                                # of categories, `missing: 75` of a number
        # unit: {id}          the column whose rows are one person's; name it as `split_by` beside
                                # `groups`, too, and as `unit` in `privacy`: without, ε is of one row
        features:
{features}{ids}{images}        groups:
{groups}    model: {{name: logistic}}
    privacy: {{epsilon: 3.0, delta: 1.0e-5}}          # δ below 1 / the number of rows
    training: {{epochs: 20, batch_size: 256, learning_rate: 0.1}}          # the check proposes a rate
"""


def draft(path: Path, raw_dir: Path, name: str, label: str) -> str:
    """The preset's text for a table below `raw_dir`; its label is the last column unless named.

    Raises:
        EquidpError: the file is not there, or lies elsewhere, or has no such column.
    """
    if path.is_dir():
        raise EquidpError(f"{path} is a folder: name a table. Images are declared by hand (docs/images.md).")
    if not path.is_file():
        raise EquidpError(f"{path} is missing: name a csv, parquet or feather file.")
    if not path.resolve().is_relative_to(raw_dir.resolve()):
        raise EquidpError(
            f"{path} is not below raw_dir ({raw_dir}): move it there, or set EQUIDP_RAW_DIR to the folder it is in."
        )
    dialect, columns = _columns(path)
    if label and label not in columns:
        raise missing_column(str(path), label, columns)
    label, marked = label or list(columns)[-1], not label
    others = {column: kind for column, kind in columns.items() if column != label}
    groups = {column: kind for column, kind in others.items() if SENSITIVE.search(column)}
    ids = [column for column in others if IDENTIFYING.search(column)]
    images = [column for column in others if IMAGE.search(column)]
    features = {column: kind for column, kind in others.items() if column not in (*groups, *ids, *images)}
    return DRAFT.format(
        mark=MARK,
        id=_text(next(iter(ids), "…")),
        ids=_not_taken(ids, "an identifier"),
        images=_not_taken(
            images, "a file", ". Where a table is of images, their folder is the source (image_folder: docs/images.md)"
        ),
        name=name,
        reported=f"[{', '.join(map(_text, groups)) or 'class'}]",
        path=_text(path.resolve().relative_to(raw_dir.resolve()).as_posix()),
        dialect="".join(f"        {line}\n" for line in dialect),
        label=_text(label) + (f"          # {MARK}: the last column; or name another" if marked else ""),
        features="".join(f"          {_text(column)}: {_feature(kind)}\n" for column, kind in features.items()),
        groups="".join(f"          {_text(column)}: {_group(kind)}\n" for column, kind in groups.items())
        or "          {}          # sex: {categories: [f, m], unknown: true}, over any column\n",
    )


def marked(text: str) -> list[int]:
    """Numbers of the lines that still wait for the codebook."""
    return [number for number, line in enumerate(text.splitlines(), 1) if MARK in line and not line.startswith("#")]


def check(file: Path, project: Path, resolved: Callable[[], Settings]) -> tuple[str, str]:
    """Validate a preset and read its table; returns what was found, and settings to start from, for `--params`.

    `resolved` gives the settings of a run of this dataset; it is called once no mark is left.

    Raises:
        EquidpError: a mark is left, a setting is not valid, or the table is not as declared.
    """
    text = file.read_text(encoding="utf-8")
    if left := marked(text):
        raise EquidpError(
            f"{file}: {len(left)} lines still have {MARK}, the first is line {left[0]} "
            f"({text.splitlines()[left[0] - 1].strip()}); replace them by what the codebook says, and call the command "
            "again."
        )
    settings = resolved()
    from equidp.data.labelling import group_table
    from equidp.data.records import Split
    from equidp.data.sources import source
    from equidp.starting_rate import starting_rate

    table = source(settings.data.source, settings.data.options)
    records = table.records(table.locate(project / settings.raw_dir))
    none = records.take(records.labels < 0)
    rows = group_table(Split(records, none, none))
    found = []
    for grouping, some in rows.groupby("grouping", sort=False):
        counts = zip(some["group"], some["train"], strict=True)
        found.append(f"{grouping}: {', '.join(f'{name} {count:,}' for name, count in counts)}")
    found.insert(0, f"{len(records):,} rows, {records.features.shape[1]} features")
    if not (table.columns and records.schema.classes):
        return "\n".join(found), ""
    rate, bound = starting_rate(settings, records.schema, table.columns, len(records))
    start = f"training.learning_rate={rate:g},dpsgd.options.clip_norm={bound:g}"
    told = "To start from (found on made-up rows of this shape, not on the table; write it into the preset)"
    return "\n".join([*found, f"{told}: {start}"]), f",{start}"


def write(file: Path, text: str) -> None:
    """Write the draft, whole or not at all."""
    with replacing(file) as part:
        part.write_text(text, encoding="utf-8")


def _columns(path: Path) -> tuple[list[str], dict[str, str]]:
    """Lines of the dialect, and for each column `number`, `truth` or `text`."""
    if path.suffix.lower() in PARQUET + FEATHER:
        return [], _kinds(read_binary(path))
    text, encoding = _decoded(path)
    first_line = text.partition("\n")[0].strip()
    lines = [] if encoding == "utf-8-sig" else [f"encoding: {encoding}          # {MARK}: a guess; it is not UTF-8"]
    sign = max(",;\t|", key=first_line.count)
    if not any(one in first_line for one in SEPARATORS) and len(first_line.split()) > 1:
        sign = " "
    if sign != ",":
        lines.append(f"separator: {json.dumps(sign)}")
    given: dict[str, Any] = {"sep": r"\s+" if sign == " " else sign, "encoding": encoding, "nrows": ROWS}
    names = [name.strip().strip('"') for name in (first_line.split() if sign == " " else first_line.split(sign))]
    if headless := any(not name or _is_number(name) for name in names) or len(set(names)) < len(names):
        given |= {"header": None, "names": [f"column_{i}" for i in range(1, len(names) + 1)]}
    try:
        frame, texts = (pd.read_csv(path, skipinitialspace=True, dtype=kind, **given) for kind in (None, str))
        if sign != ",":
            grouped = any(_grouped(texts[name]) for name in texts)
            signs = {"decimal": ",", "thousands": "."} if grouped else {"decimal": ","}
            commas = pd.read_csv(path, skipinitialspace=True, **{**given, **signs})
            if _numeric(commas) > _numeric(frame):
                lines, frame = [*lines, *(f'{name}: "{sign}"' for name, sign in signs.items())], commas
    except (ValueError, OSError) as error:  # pandas' errors of parsing are ValueErrors
        raise EquidpError(f"{path} cannot be read ({' '.join(str(error).split())}); is it a table?") from error
    if headless:
        listed = ", ".join(map(str, frame.columns))
        lines.append(f"columns: [{listed}]          # {MARK}: the file has no header row; name them, here and below")
    codes = [str(name) for name in texts if texts[name].str.fullmatch(rf"0\d+|{DATE}").any()]  # 01 is no number
    return lines, _kinds(frame) | dict.fromkeys(codes, "text")


def _grouped(column: pd.Series) -> bool:
    """Whether the column holds numbers with a point before each three digits, and so is no date."""
    given = column.dropna().str
    whole = given.fullmatch(r"[+-]?\d{1,3}(\.\d{3})*(,\d+)?").all()
    return bool(whole and given.contains(".", regex=False).any())


def _decoded(path: Path) -> tuple[str, str]:
    raw = content(path)
    marked_16 = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
    for encoding in ("utf-16" if marked_16 else "utf-8-sig", "cp1252"):
        with suppress(UnicodeError):
            return raw.decode(encoding), encoding
    raise EquidpError(f"{path} is neither text nor parquet or feather by its name; name a table.")


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _numeric(frame: pd.DataFrame) -> int:
    return sum(kind == "number" for kind in _kinds(frame).values())


def _kinds(frame: pd.DataFrame) -> dict[str, str]:
    def kind(column: pd.Series) -> str:
        if pd.api.types.is_bool_dtype(column):
            return "truth"
        return "number" if pd.api.types.is_numeric_dtype(column) else "text"

    return {str(name): kind(frame[name]) for name in frame.columns}


def _not_taken(columns: list[str], like: str, more: str = "") -> str:
    """A comment on columns that are no features."""
    names = ", ".join(map(_text, columns))
    return f"          # not taken, as it is called like {like}: {names}{more}\n" if columns else ""


def _feature(kind: str) -> str:
    if kind == "number":
        return f"{{kind: numeric, minimum: {MARK}, maximum: {MARK}}}"
    return f"{{kind: categorical, categories: [{'true, false' if kind == 'truth' else MARK}]}}".replace(
        "true, false", '"false", "true"'
    )


def _group(kind: str) -> str:
    if kind == "number":
        return f"{{edges: [{MARK}], minimum: {MARK}, maximum: {MARK}}}          # or categories, if numbers are codes"
    return f"{{categories: [{MARK}], unknown: true}}"


def _text(name: str) -> str:
    """A name as YAML reads it back as text."""
    plain = re.fullmatch(r"[A-Za-z][\w./ -]*", name) and name.strip() == name
    word = name.lower() in ("yes", "no", "on", "off", "true", "false", "null", "y", "n")
    return name if plain and not word else json.dumps(name, ensure_ascii=False)
