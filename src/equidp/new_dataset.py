"""`kedro new-dataset`: a preset for a table, drafted from its columns' names and types alone, and then checked.

No category and no bound is taken from the table: each would be a release. What only the codebook can say is marked.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pandas as pd
import yaml
from kedro.config import MissingConfigException
from kedro.io import DataCatalog

from equidp.data.raw_files import content
from equidp.data.tables import FEATHER, PARQUET, SEPARATORS, read_binary, read_entry, read_query
from equidp.errors import EquidpError, missing_column
from equidp.options import MARK
from equidp.system.files import replacing

if TYPE_CHECKING:
    from equidp.config_loader import EquidpConfigLoader

SENSITIVE = re.compile(
    r"sex|gender|geschlecht|race|ethnic|religion|national|disab|marital|(^|_)age(_|$|group)|^alter\b|familienstand",
    re.IGNORECASE,
)
IDENTIFYING = re.compile(
    r"(^|[_.\s-])(id|nr|no|key|uuid)$|^(id|name|patient|person|subject|index)$"
    r"|^(row|record|case|patient|person|subject)[_.\s-]?(index|number)$",
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
DATES = re.compile(rf"({DATE}|\d{{1,2}}[/-]\d{{1,2}}[/-]\d{{2,4}}|\d{{4}}([-/.])\d{{1,2}}\2\d{{1,2}})([T ].*)?")

DISTINCT, FEW = 0.99, 100
"""From which share of rows with a value of their own on a column is like an identifier; of fewer rows nobody knows."""

EXCEL, SQLITE = (".xlsx", ".xlsm", ".xls", ".ods"), b"SQLite format 3\0"

ROWS = 5000
"""How many rows the types are read from."""

DRAFT = """\
# Drafted by `kedro new-dataset` from names and types of columns; no value of the table is in it. But types, and which
# columns are left out, follow from cells: one row may change them, and they go out with a model. Go by the codebook.
# Replace every {mark} by what it says: bounds or categories read from data are a release. The same command checks.
presets:
  {name}:
    data:
      source: table
      groups: {reported}          # what is reported by; a product too: "sex*age_band"
{split}      options:
{table}{label}\
        missing: error          # `drop` leaves out rows with a missing feature or label; or keep them: `unknown: true`
                                # of categories, `missing: 75` of a number
{unit}        features:
{features}{remarks}        groups:
{groups}    model: {{name: logistic}}
    privacy: {{epsilon: 3.0, delta: 1.0e-5{protected}}}          # δ below 1 / the number of rows
    training: {{epochs: 20, batch_size: 256, learning_rate: 0.1}}          # the check proposes a rate
"""


ONE_LABEL = """\
        label: {label}
        classes: [{mark}]          # values of the label, in label order, each in quotes
        # ordered: true          where this order counts, as of grades; of three classes or more
        # target: {{minimum: 0, maximum: 100}}          in place of classes, if the label is a number to be predicted
        # class_map: {{bad: ["1"], good: ["2"]}}        names for coded values; class_edges: [50] cuts a number
"""

UNTOLD = """\
        # unit: {id}          the column whose rows are one person's; name it as `split_by` beside
                                # `groups`, too, and as `unit` in `privacy`: without, ε is of one row
"""


def run_command(
    project: Path,
    loader_at: Callable[..., EquidpConfigLoader],
    *,
    file: Path | None,
    catalog: str,
    sql: str,
    name: str,
    label: tuple[str, ...],
    unit: str,
    env: str | None,
) -> None:
    """`kedro new-dataset`: draft a preset, or check the one that the project has.

    Raises:
        EquidpError: no table is named, or it cannot be drafted from; or the preset that there is does not hold.
    """
    if not (file or catalog or name) or (file and catalog):
        raise EquidpError(
            "Name one table: a file, such as data/01_raw/visits.csv, or an entry of the catalog by --catalog; --name "
            "alone checks the preset of that name."
        )
    stem = catalog or (file.name.split(".")[0] if file else "")
    called, name = name, name or re.sub(r"\W+", "_", stem).strip("_").lower()
    read = None if env == "base" else env  # as `kedro run` reads: conf/local lies over conf/base there
    loader = loader_at(project, read)
    folder = Path(loader.conf_source)
    raw_dir = project / (loader["globals"]["raw_dir"] or Path("data") / "01_raw")
    presets = loader.presets()
    if name in presets:
        _refuse_other(presets[name], name, file, catalog, raw_dir, (*label, unit))
        places = list(_places(folder, {loader.base_env, read or loader.default_run_env}, name))
        found, start = check(project, places, partial(loader_at, project, read, {"dataset": name}))
        run = shlex.join(["--env", read]) + " " if read else ""
        click.echo(found)
        click.echo(f"The preset is valid. Now: kedro run {run}--pipeline=dpsgd --params=dataset={name}{start}")
        return
    preset = folder / (env or "local") / "parameters" / f"{name}.yml"
    if preset.exists():
        raise EquidpError(f"{preset} is there, and has no preset {name!r}: rename it, or give another --name.")
    if catalog:
        # whichever dataset is the project's own may be the one that is to be drafted
        digits = loader_at(project, read, {"dataset": "digits"})
        text = draft_entry(catalog, partial(_loaded, project, digits), name, label, unit)
    elif file:
        text = draft(file, raw_dir, name, label, unit=unit, sql=sql)
    else:
        raise EquidpError(f"There is no preset {name!r} yet: name its table, too, and it is drafted.")
    write(preset, text)
    labels = [("label", one) for one in label]
    options = [("catalog", catalog), ("sql", sql), ("name", called), *labels, ("unit", unit), ("env", env)]
    again = [*([str(file)] if file else []), *(x for key, one in options if one for x in (f"--{key}", one))]
    click.echo(
        f"{preset.relative_to(project)} is drafted. {len(marked(text))} lines have {MARK}: "
        f"replace each by what the codebook says.\nThen, to check it: kedro new-dataset {shlex.join(again)}"
    )


def draft(path: Path, raw_dir: Path, name: str, label: tuple[str, ...], *, unit: str = "", sql: str = "") -> str:
    """The preset's text for a table below `raw_dir`; its label is the last column unless one or several are named.

    Raises:
        EquidpError: the file is not there, or lies elsewhere, or is none to draft from, or has no such column.
    """
    if path.is_dir():
        raise EquidpError(f"{path} is a folder: name a table. For images write a preset of data.source: image_folder.")
    if not path.is_file():
        raise EquidpError(f"{path} is missing: name a csv, parquet or feather file.")
    if path.suffix.lower() in EXCEL:
        raise EquidpError(
            f"{path} is a workbook: give its sheet an entry in conf/base/catalog.yml, such as `sheet: {{type: "
            f"pandas.ExcelDataset, filepath: {path}}}`, and then name that: kedro new-dataset --catalog sheet."
        )
    if not path.resolve().is_relative_to(raw_dir.resolve()):
        raise EquidpError(
            f"{path} is not below raw_dir ({raw_dir}): move it there, or set EQUIDP_RAW_DIR to the folder it is in."
        )
    if not sql and _begins(path, SQLITE):
        raise EquidpError(f'{path} is an SQLite database: add a query, such as --sql "SELECT * FROM visits".')
    lines = [f"path: {_text(path.resolve().relative_to(raw_dir.resolve()).as_posix())}"]
    if sql:
        more, columns = [f"sql: {json.dumps(sql, ensure_ascii=False)}"], _kinds(read_query(sql, path))
    else:
        more, columns = _columns(path)
    return _drafted(str(path), [*lines, *more], columns, name, label, unit)


def draft_entry(entry: str, load: Callable[[str], object], name: str, label: tuple[str, ...], unit: str) -> str:
    """The preset's text for what an entry of the Kedro catalog gives, which `load` loads.

    Raises:
        EquidpError: there is no such entry, or it gives no table, or one without such a column.
    """
    columns = _kinds(read_entry(load, entry))
    return _drafted(entry, [f"catalog: {_text(entry)}"], columns, name, label, unit)


def _drafted(
    where: str, table: list[str], columns: dict[str, str], name: str, label: tuple[str, ...], unit: str
) -> str:
    for column in filter(None, (*label, unit)):
        if column not in columns:
            raise missing_column(where, column, columns)
    possible = [column for column in columns if column != unit]
    if not possible:
        lack = f"no column but the unit {unit!r}" if unit else "no column"
        raise EquidpError(f"{where} has {lack}, so there is nothing to predict: name a table with more columns.")
    guess = "" if label else f"          # {MARK}: the last column; or name another"
    label = tuple(dict.fromkeys(label)) or (possible[-1],)
    others = [column for column in columns if column not in (*label, unit)]
    groups, ids, images = (list(filter(of.search, others)) for of in (SENSITIVE, IDENTIFYING, IMAGE))
    left = [column for column in others if column not in (*groups, *ids, *images)]
    distinct, dates = ([column for column in left if columns[column] == kind] for kind in ("distinct", "date"))
    remarks = (
        (ids, "it is called like an identifier", ""),
        (distinct, "nearly every row has a value of its own, as of an identifier or a text", ""),
        (dates, "it is a date", ". Write a column of your own from it, such as the age then, or the quarter"),
        (images, "it is called like a file", ". Where a table is of images, data.source is image_folder"),
    )  # fmt: skip
    not_taken = [f"as {why}: {', '.join(map(_text, names))}{more}" for names, why, more in remarks if names]
    features = [f"{_text(of)}: {_feature(columns[of])}" for of in left if of not in (*distinct, *dates)]
    no_group = "{}          # sex: {categories: [f, m], unknown: true}, over any column"
    return DRAFT.format(
        mark=MARK,
        name=name,
        reported=f"[{', '.join(map(_text, groups)) or ('class' if len(label) == 1 else MARK)}]",
        split=_lines([f"split_by: {_text(unit)}"] if unit else [], 6),
        table=_lines(table, 8),
        label=_lines([f"labels: [{', '.join(map(_text, label))}]          # columns of 0 and 1"], 8)
        if len(label) > 1
        else ONE_LABEL.format(label=f"{_text(label[0])}{guess}", mark=MARK),
        unit=f"        unit: {_text(unit)}\n" if unit else UNTOLD.format(id=_text(next(iter(ids), "…"))),
        features=_lines(features or [f"{{}}          # {MARK}: name columns; a group's may be a feature too"], 10),
        remarks=_lines((f"# not taken, {remark}" for remark in not_taken), 10),
        groups=_lines([f"{_text(column)}: {_group(columns[column])}" for column in groups] or [no_group], 10),
        protected=f", unit: {_text(unit)}" if unit else "",
    )


def _lines(lines: Iterable[str], indent: int) -> str:
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


def marked(text: str) -> list[int]:
    """Numbers of the lines that still wait for the codebook."""
    return [number for number, line in enumerate(text.splitlines(), 1) if MARK in line and not line.startswith("#")]


def check(
    project: Path, places: list[tuple[Path, int, str]], load: Callable[[], EquidpConfigLoader]
) -> tuple[str, str]:
    """Validate a preset and read its table; returns what was found, and settings to start from, for `--params`.

    Args:
        places: where it stands: a file, the number of its first line there, and its text.
        load: gives the configuration of a run of this dataset; it is called once no mark is left.

    Raises:
        EquidpError: a mark is left, a setting is not valid, or the table is not as declared.
    """
    for file, begins, text in places:
        if left := marked(text):
            raise EquidpError(
                f"{file}: {len(left)} lines still have {MARK}, the first is line {begins + left[0] - 1} "
                f"({text.splitlines()[left[0] - 1].strip()}); replace them by what the codebook says, and call the "
                "command again. For another draft, such as of another --label, delete this one first."
            )
    loader = load()
    settings = loader.settings
    click.echo("Reads the table and tries it against the preset.", err=True)
    import torch  # late, too: a draft needs none of it

    from equidp.data.labelling import group_table
    from equidp.data.records import Split
    from equidp.data.sources import source

    table = source(settings.data.source, settings.data.options)
    table.catalog = partial(_loaded, project, loader)
    records = table.records(table.locate(project / settings.raw_dir))
    none = records.take(torch.arange(0))
    rows = group_table(Split(records, none, none))
    found = []
    for grouping, some in rows.groupby("grouping", sort=False):
        counts = zip(some["group"], some["train"], strict=True)
        found.append(f"{grouping}: {', '.join(f'{name} {count:,}' for name, count in counts)}")
    found.insert(0, f"{len(records):,} rows, {'×'.join(map(str, records.features.shape[1:]))} features")
    if not (table.columns and records.schema.classes):
        return "\n".join(found), ""
    from equidp.starting_rate import starting_rate  # late: it imports all that trains

    click.echo("It is as declared. Now six short trainings on made-up rows, for a rate to start from.", err=True)
    whole = records.unit if settings.privacy.by_unit else None
    # by declared sizes how many there are is protected, and what is proposed here becomes a setting
    declared = sum(records.schema.sizes if whole is None else records.schema.unit_sizes)
    units = declared or (len(records) if whole is None else len(whole.unique()))
    rate, bound = starting_rate(settings, records.schema, table.columns, units)
    start = f"training.learning_rate={rate:g},dpsgd.options.clip_norm={bound:g}"
    heading = "To start from (found on made-up rows of this shape, not on the table; write it into the preset)"
    return "\n".join([*found, f"{heading}: {start}"]), f",{start}"


def write(file: Path, text: str) -> None:
    """Write the draft, whole or not at all."""
    with replacing(file) as part:
        part.write_text(text, encoding="utf-8")


def _refuse_other(preset: Any, name: str, file: Path | None, catalog: str, raw: Path, named: Iterable[str]) -> None:
    """Refuse a name whose preset is of another table than the one that was named, or of another label or unit."""
    data = preset.get("data") if isinstance(preset, dict) else None
    options = (data.get("options") if isinstance(data, dict) else None) or {}
    values = options.values() if isinstance(options, dict) else []
    own = [str(one) for value in values for one in (value if isinstance(value, list) else [value])]
    files = [str((raw / one).resolve()).removesuffix(".gz") for one in own if one]
    elsewhere = file and str(file.resolve()).removesuffix(".gz") not in files
    other = [str(catalog or file)] if elsewhere or (catalog and catalog not in own) else []
    other += [f"{one!r} as label or unit" for one in named if one and one not in own and MARK not in own]
    if other:
        raise EquidpError(
            f"The name {name!r} has a preset already, and it does not read {', nor '.join(other)}: give another "
            "by --name, or correct that preset, or remove it to have it drafted anew."
        )


def _places(folder: Path, environments: set[str], name: str) -> Iterator[tuple[Path, int, str]]:
    """Where a preset stands: each file, the number of its first line there, and its lines."""
    for file in (file for env in sorted(environments) for file in sorted((folder / env).rglob("*"))):
        read = any(part.startswith("parameters") for part in file.relative_to(folder).parts[1:])  # by Kedro
        if not (read and file.suffix in (".yml", ".yaml", ".json") and file.is_file()):
            continue
        text = file.read_text(encoding="utf-8")
        blocks = [block for key, block in _entries(yaml.compose(text)) if key.value == "presets"]
        for own, block in (preset for presets in blocks for preset in _entries(presets)):
            if own.value == name:
                begins, end = own.start_mark.line, block.end_mark.line + (block.end_mark.column > 0)
                yield file, begins + 1, "\n".join(text.splitlines()[begins:end])


def _entries(node: yaml.Node | None) -> list[tuple[yaml.Node, yaml.Node]]:
    return node.value if isinstance(node, yaml.MappingNode) else []


def _loaded(project: Path, loader: EquidpConfigLoader, entry: str) -> Any:
    """What an entry of the project's catalog gives."""
    from equidp.hooks.guard import load_entry

    credentials = {}
    with suppress(MissingConfigException):
        credentials = loader["credentials"]
    with chdir(project):  # an entry's path is relative to it
        return load_entry(DataCatalog.from_config(loader["catalog"], credentials), entry)


def _begins(path: Path, sign: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(sign)) == sign


def _columns(path: Path) -> tuple[list[str], dict[str, str]]:
    """Lines of the dialect, and the kind of each column."""
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
    headless = any(not name or _is_number(name) for name in names) or len(set(names)) < len(names)
    try:
        first = pd.read_csv(path, skipinitialspace=True, dtype=str, **given)
        # a row that has a value of other rows is no header: a person's cells would be drafted as names
        if headless := headless or any((first[name] == name).any() for name in first):
            given |= {"header": None, "names": [f"column_{i}" for i in range(1, len(names) + 1)]}
        frame, texts = (pd.read_csv(path, skipinitialspace=True, dtype=kind, **given) for kind in (None, str))
        if sign != ",":
            grouped = any(_grouped(texts[name]) for name in texts)
            signs = {"decimal": ",", "thousands": "."} if grouped else {"decimal": ","}
            commas = pd.read_csv(path, skipinitialspace=True, **{**given, **signs})
            numbers = [sum(map(pd.api.types.is_numeric_dtype, of.dtypes)) for of in (frame, commas)]
            if numbers[0] < numbers[1]:
                lines, frame = [*lines, *(f'{name}: "{sign}"' for name, sign in signs.items())], commas
    except (ValueError, OSError) as error:  # pandas' errors of parsing are ValueErrors
        raise EquidpError(f"{path} cannot be read ({' '.join(str(error).split())}); is it a table?") from error
    if headless:
        listed = f"columns: [{', '.join(map(str, frame.columns))}]"
        lines.append(f"{listed}          # {MARK}: the file has no header row; name them, here and below")
    codes = [str(name) for name in texts if texts[name].str.fullmatch(rf"0\d+|{DATE}").any()]  # 01 is no number
    return lines, _kinds(frame) | _kinds(texts[codes])


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


def _kinds(frame: pd.DataFrame) -> dict[str, str]:
    """Of each column `number`, `truth`, `text`, `date`, or `distinct`: one that differs in nearly every row."""

    def kind(column: pd.Series) -> str:
        given = column.dropna()
        if pd.api.types.is_bool_dtype(column):
            return "truth"
        dated = (isinstance(cell, datetime.date) or (isinstance(cell, str) and DATES.fullmatch(cell)) for cell in given)
        if len(given) and all(dated):
            return "date"
        if len(given) >= FEW and not pd.api.types.is_float_dtype(column) and given.nunique() >= DISTINCT * len(given):
            return "distinct"
        return "number" if pd.api.types.is_numeric_dtype(column) else "text"

    return {str(name): kind(column) for name, column in frame.convert_dtypes().items()}


def _feature(kind: str) -> str:
    if kind == "number":
        return f"{{kind: numeric, minimum: {MARK}, maximum: {MARK}}}"
    if kind == "truth":  # in any of the ways that pandas reads as one
        spelt = {word: [word, word.capitalize(), word.upper()] for word in ("false", "true")}
        return f"{{kind: categorical, map: {json.dumps(spelt)}}}"
    return f"{{kind: categorical, categories: [{MARK}]}}"


def _group(kind: str) -> str:
    if kind == "number":
        return f"{{edges: [{MARK}], minimum: {MARK}, maximum: {MARK}}}          # or categories, if numbers are codes"
    return f"{{categories: [{MARK}], unknown: true}}"


def _text(name: str) -> str:
    """A name as YAML reads it back as text."""
    plain = re.fullmatch(r"[A-Za-z][\w./ -]*", name) and name.strip() == name
    word = name.lower() in ("yes", "no", "on", "off", "true", "false", "null", "y", "n")
    return name if plain and not word else json.dumps(name, ensure_ascii=False)
