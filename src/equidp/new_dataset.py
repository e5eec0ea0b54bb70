"""`kedro new-dataset`: the draft of a preset for a table, and then its check.

`drafting` writes the draft.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml
from kedro.config import MissingConfigException
from kedro.io import DataCatalog

from equidp.drafting import draft, draft_entry, marked
from equidp.errors import EquidpError, credentials_told
from equidp.options import MARK
from equidp.parameters.resolved import SAFE_NAME
from equidp.system.files import replacing

if TYPE_CHECKING:
    from equidp.config_loader import EquidpConfigLoader


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
    """`kedro new-dataset`: draft a preset, or check the preset that the project has.

    Raises:
        EquidpError: no table is named, no preset can be drafted from it, or the existing preset is not valid.
    """
    if not (file or catalog or name) or (file and catalog):
        raise EquidpError(
            "Name one table: a file, such as data/01_raw/visits.csv, or an entry of the catalog by --catalog; --name "
            "alone checks the preset of that name."
        )
    stem = catalog or (file.name.split(".")[0] if file else "")
    called, name = name, _folder_name(name or stem, given=bool(name))
    read = None if env == "base" else env  # as `kedro run` reads settings: conf/local over conf/base
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
        # a dataset that surely has a preset, because the project's own dataset may be the one to draft
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


def check(
    project: Path, places: list[tuple[Path, int, str]], load: Callable[[], EquidpConfigLoader]
) -> tuple[str, str]:
    """Validate a preset and read its table; return a summary of the table, and settings to start from, for `--params`.

    Args:
        project: the project's folder.
        places: where the preset is: each file, the number of the preset's first line there, and its text.
        load: returns the configuration of a run of this dataset; it is called once no mark is left.

    Raises:
        EquidpError: a mark is left, a setting is not valid, or the table is not as declared.
    """
    for file, begins, text in places:
        if left := marked(text):
            raise EquidpError(
                f"{file}: {len(left)} line{'s' * (len(left) > 1)} still with {MARK}, the first is line "
                f"{begins + left[0] - 1} ({text.splitlines()[left[0] - 1].strip()}); replace each by what the codebook "
                "says, and call the command again. For another draft, such as of another --label, delete this one "
                "first."
            )
    loader = load()
    settings = loader.settings
    click.echo("Reads the table and tries it against the preset.", err=True)
    import torch  # late, because a draft does not need it

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
    # With declared sizes the true number is protected, so it is not used: the proposal becomes a setting
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


def _folder_name(name: str, *, given: bool) -> str:
    """Return the name of a dataset: the one that the user gave, or a file's name in plain letters."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    plain = name if given else re.sub(r"\W+", "_", plain).strip("_").lower()
    if not SAFE_NAME.fullmatch(plain):
        raise EquidpError(
            f"The dataset's name {name!r} becomes a folder's: by --name give one of letters a-z, digits and . _ = -."
        )
    return plain


def _refuse_other(preset: Any, name: str, file: Path | None, catalog: str, raw: Path, named: Iterable[str]) -> None:
    """Refuse a name whose preset is for another table than the named one, or has another label or unit."""
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
    """Yield where a preset is: each file, the number of the preset's first line there, and its lines."""
    for file in (file for env in sorted(environments) for file in sorted((folder / env).rglob("*"))):
        read = any(part.startswith("parameters") for part in file.relative_to(folder).parts[1:])  # Kedro reads these
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
    """Load an entry of the project's catalog."""
    from equidp.hooks.guard import load_entry

    credentials = {}
    with suppress(MissingConfigException):
        credentials = loader["credentials"]
    with chdir(project):  # an entry's path is relative to the project
        with credentials_told():
            catalog = DataCatalog.from_config(loader["catalog"], credentials)
        return load_entry(catalog, entry)
