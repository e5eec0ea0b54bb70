"""Kedro's configuration, with each dataset's preset applied and every setting validated before anything runs.

The layers, from lowest to highest: defaults in code, the dataset's preset, blocks in conf/base or conf/local,
`--params`. The package's conf/base lies below a project's. Presets are merged here and not by interpolation in YAML,
because Kedro resolves conf/base before it reads conf/local: the preset of a user's own dataset, in conf/local, would
not be found.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import os
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from kedro.config import MissingConfigException, OmegaConfigLoader
from kedro.framework.project import LOGGING
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from equidp.data.sources import SOURCES
from equidp.errors import EquidpError, first_line, unknown_name
from equidp.hooks.mlflow_yml import checked
from equidp.packaged import conf
from equidp.parameters import SECTIONS, TOP_LEVEL, Settings, block, check_names, resolve


def _sqlite_uri(path: Path) -> str:
    """Return SQLAlchemy's URL of a file.

    If a sign in the path is encoded, the URL names the driver, because MLflow would otherwise make a folder of the
    encoded name.
    """
    from sqlalchemy import URL, make_url

    plain = f"sqlite:///{path}"
    if make_url(plain).database == str(path):
        return plain
    return URL.create("sqlite+pysqlite", database=str(path)).render_as_string()


PROJECT_URIS: Mapping[str, Callable[[Path], str]] = {"sqlite": _sqlite_uri, "file": Path.as_uri, "path": str}
"""How a path inside the project is written, by its reader; a relative path would depend on the working directory."""

EITHER_OR = ("epsilon", "noise_multiplier")
"""Settings of `privacy` of which exactly one is given: a layer that gives one drops the other one of lower layers."""

TWICE = "Duplicate keys found in "
"""Beginning of Kedro's message on files that set the same name."""

PLACES = ("dataset", "seed", "run_label")
"""Settings in a result's path: a run with the same three replaces the files there."""

RESOLVING = threading.RLock()
"""Held while files are read, because `${setting:…}` is shared by the process, and two threads may have two sessions."""

CHOICES = {"model": "name", "data": "source"}
"""Sections whose `options` belong to the thing that this setting names; another name drops a lower layer's options."""


class EquidpConfigLoader(OmegaConfigLoader):
    """`parameters` come out validated, with every default filled in and the chosen dataset's preset applied."""

    def __init__(self, conf_source: str | Path, *args: Any, **kwargs: Any) -> None:
        _refuse_no_settings(Path(conf_source))
        kwargs["custom_resolvers"] = {"oc.env": oc.env, **(kwargs.get("custom_resolvers") or {})}  # for all settings
        if not _has_settings(Path(conf_source), kwargs.get("default_run_env", "local")):
            # for example, an image or an archive without conf/local. Kedro would merge an empty one too, which takes as
            # long again
            kwargs["default_run_env"] = kwargs.get("base_env", "base")
        with RESOLVING:  # Kedro's own resolvers, too, belong to the latest loader of the process
            self._packaged = _packaged(Path(conf_source), kwargs)
            super().__init__(conf_source, *args, **kwargs)
        if self.runtime_params and self.runtime_params.get("run_label", "") is None:  # a script's `run_label=$label`
            self.runtime_params = {**self.runtime_params, "run_label": ""}
        folder = Path(conf_source)  # may also be an archive, or a remote place
        _set_up_logging(folder / "logging.yml")
        if self.env and folder.is_dir() and not (folder / self.env).is_dir():
            there = [part.name for part in folder.iterdir() if part.is_dir()]
            raise unknown_name(f"environment (a folder of {folder})", self.env, there)
        project_is_at(Path(conf_source).resolve().parent)  # until a context says where: --conf-source may be anywhere

    def __getitem__(self, key: str) -> dict[str, Any]:
        """As Kedro's; parameters are resolved once and kept."""
        with RESOLVING, self._in_a_sentence():
            if key == "parameters" and key not in self:
                self._settings = self._resolved()
                self["parameters"] = self._settings.to_dict()
            if key == "catalog" and key not in self:
                # paths contain the run's settings, wherever these were set: else a run could replace another's files
                _settings_are(self["parameters"])
            found = self._read(key)
            return checked(found) if key == "mlflow" else found

    def marked_catalog(self) -> dict[str, Any]:
        """The catalog's entries with `<dataset>`, `<seed>` and `<run_label>` where a path has these settings."""
        with RESOLVING, self._in_a_sentence():
            if "catalog" in self:  # set by a hook, which has put the settings' values there
                return {}
            _settings_are({**self["parameters"], **{name: f"<{name}>" for name in PLACES}})
            try:
                return self._read("catalog")
            finally:
                _settings_are(self["parameters"])

    def presets(self) -> dict[str, Any]:
        """Every dataset's preset, merged from all layers; for a loader that has not given parameters yet."""
        with self._in_a_sentence():
            return block("presets", self._read("parameters").get("presets"))

    def refuse_wrong_names(self) -> None:
        """Raise EquidpError for a data set or a block of settings that does not exist; this needs no long import."""
        with self._in_a_sentence():
            self._layered()

    @contextmanager
    def _in_a_sentence(self) -> Iterator[None]:
        """Turn an error about a file of settings into an EquidpError that says where it is."""
        try:
            yield
        except OmegaConfBaseException as error:
            place = f" ({error.full_key})" if error.full_key else ""
            raise EquidpError(f"The configuration does not resolve: {str(error).splitlines()[0]}{place}.") from error
        except (yaml.YAMLError, UnicodeDecodeError, AttributeError, OSError, RecursionError) as error:
            # a file with a list, or with a number as a name, gives an AttributeError
            fault = _fault_in(Path(self.conf_source), (self.base_env, self.env or self.default_run_env))
            if fault is None and isinstance(error, yaml.YAMLError):  # in an archive
                fault = f"A file of settings in {self.conf_source} cannot be read: {' '.join(str(error).split())}"
            if fault is None:
                raise
            raise EquidpError(fault) from error
        except ValueError as error:
            if not str(error).startswith(TWICE):
                raise
            files, _, keys = str(error).partition("\n")[0].removeprefix(TWICE).rpartition(": ")
            name = keys.split(", ")[0]
            name = ".".join(name.split(".")[:2]) if name.startswith("presets.") else name
            raise EquidpError(
                f"Two files of one environment set {name}: {files}. Keep it in one of them, and delete it in the other."
            ) from error

    @property
    def settings(self) -> Settings:
        """All settings as the object that nodes are given; `self["parameters"]` is the same in plain values."""
        self["parameters"]  # resolved once, and errors worded as for every other part of the configuration
        return self._settings

    def _read(self, key: str) -> dict[str, Any]:
        """Return the project's settings over the package's, block by block if the merge is soft, else by name."""
        if self._packaged is None or key == "credentials" or key in self:
            return super().__getitem__(key)
        self._packaged.runtime_params = self.runtime_params
        below = self._packaged[key]
        try:
            own = super().__getitem__(key)
        except MissingConfigException:  # the project has no file of this kind
            return below
        if self.merge_strategy.get(key) != "soft":
            return {**below, **own}
        presets = own.get("presets")
        if key == "parameters" and isinstance(presets, dict):  # a preset, too, is merged over the package's of its name
            known = {name: below["presets"].get(name) for name in presets}
            over = {n: _laid_over(known[n], of) for n, of in presets.items() if known[n] and isinstance(of, dict)}
            below, own = {**below, "presets": below["presets"] | over}, {**own, "presets": presets | over}
        return OmegaConf.to_container(OmegaConf.merge(below, own))  # type: ignore[return-value]

    def _resolved(self) -> Settings:
        settings = resolve(self._layered())
        if settings.report.experiment is not None:
            return settings
        experiment = self["mlflow"]["tracking"]["experiment"]["name"]
        return dataclasses.replace(settings, report=settings.report.model_copy(update={"experiment": experiment}))

    def _layered(self) -> dict[str, Any]:
        """Preset, files and command line merged, the last one winning."""
        files = self._read("parameters")
        if files.get("presets", {}) is None:  # an empty `presets:` in one file replaces the presets of all other files
            raise EquidpError(
                f"presets: is empty in a file of settings in {self.conf_source}, which hides the presets of all "
                "datasets: write a dataset's block below it, or delete the line."
            )
        # before the dataset is looked up, because the word `presets` itself may be mistyped
        check_names((str(name) for name in files if not str(name).startswith("_")), ("presets", *TOP_LEVEL))
        presets = block("presets", files.pop("presets", None))
        dataset = str(files.get("dataset"))
        if dataset not in presets:
            if dataset not in SOURCES:
                raise unknown_name("dataset", dataset, presets)
            raise EquidpError(
                f"Dataset {dataset!r} has a source but no preset: give it a block in conf/base/parameters/presets.yml."
            )
        layers = [block(f"presets.{dataset}", presets[dataset]), files, dict(self.runtime_params or {})]
        for layer, section in itertools.product(layers, SECTIONS):
            block(section, layer.get(section))  # refuses a section that is no block, because it is read below
        merged: dict[str, Any] = {}
        for layer in layers:
            merged = _laid_over(merged, layer)
        if "seed" in layers[-1] and (merged.get("privacy") or {}).get("secure"):
            raise EquidpError(
                "privacy.secure=true draws batches and noise that no seed can repeat: leave seed out (kedro sweep "
                "gives one to every run: use kedro run). The split and the initial weights, which are public, are "
                "drawn with the project's seed (conf/base/globals.yml)."
            )
        return merged


def _settings_are(parameters: Mapping[str, Any]) -> None:
    """Let `${setting:…}` stand for these parameters."""
    OmegaConf.register_new_resolver(
        "setting", lambda name: functools.reduce(getitem, name.split("."), parameters), replace=True
    )


def _laid_over(below: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a layer over lower ones, without the settings there that its choices replace (`EITHER_OR`, `CHOICES`)."""
    merged = {name: dict(of) if isinstance(of, Mapping) else of for name, of in below.items()}

    def given(section: str) -> Mapping[str, Any]:
        return of if isinstance(of := layer.get(section), Mapping) else {}

    chosen = {name for name in EITHER_OR if given("privacy").get(name) is not None}
    if len(chosen) == 1 and merged.get("privacy"):
        merged["privacy"].update({name: None for name in EITHER_OR if name not in chosen})
    for section, choice in CHOICES.items():
        before, named = merged.get(section) or {}, given(section).get(choice)
        if named is not None and named != before.get(choice):
            before.pop("options", None)
    _refuse_unlike("", merged, layer)
    return OmegaConf.to_container(OmegaConf.merge(merged, layer))  # type: ignore[return-value]


def _packaged(source: Path, given: Mapping[str, Any]) -> OmegaConfigLoader | None:
    """The package's settings, which lie below a project's; None if the project itself has the same files."""
    base = conf() / "base"
    names = [path.relative_to(base) for path in base.rglob("*.yml")]
    own = source / "base"
    if all((own / name).is_file() and (own / name).read_bytes() == (base / name).read_bytes() for name in names):
        return None
    kept = {name: value for name, value in given.items() if name not in ("env", "base_env", "default_run_env")}
    return OmegaConfigLoader(str(base.parent), **{**kept, "base_env": "base", "default_run_env": "base"})


def _refuse_no_settings(source: Path) -> None:
    """Refuse a file that is neither a folder nor an archive: Kedro would run with the package's settings alone."""
    if not source.is_file():
        return
    try:
        if source.name.endswith(".zip"):
            zipfile.ZipFile(source).close()
        elif source.name.endswith((".tar", ".tar.gz")):
            with tarfile.open(source) as archive:
                archive.getnames()
        else:
            raise EquidpError(f"--conf-source={source} is no settings by its name: give a folder, a .zip or a .tar.gz.")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, zlib.error) as error:
        raise EquidpError(
            f"--conf-source={source} is a damaged archive ({first_line(error)}): pack it again."
        ) from error


def _has_settings(source: Path, name: str) -> bool:
    """Whether a folder of settings, or its archive, has an environment with a file; True for anything else."""
    if source.is_dir():
        try:
            return any(not path.name.startswith(".") for path in (source / name).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a folder that may not be listed can hold files
            return True
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as packed:
            names = packed.namelist()
    elif source.is_file() and tarfile.is_tarfile(source):
        with tarfile.open(source) as archive:
            names = archive.getnames()
    else:
        return True
    return any(name in Path(member).parts[:-1] for member in names)


def project_is_at(folder: Path) -> None:
    """Let `${project:…}` name files in this project's folder."""
    # Kedro registers a resolver once per process, which would keep the first project's path for all later ones
    OmegaConf.register_new_resolver("project", lambda path, scheme: PROJECT_URIS[scheme](folder / path), replace=True)


def _fault_in(folder: Path, environments: Iterable[str]) -> str | None:
    """Say what is wrong with the first file that holds no settings. Kedro counts lines from 0, or names no file."""
    files = (path for name in environments for path in sorted((folder / name).rglob("*")))
    for path in files:
        if path.suffix not in (".yml", ".yaml", ".json") or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")  # read whole: else the byte's number would be that in a chunk
            read = OmegaConf.load(io.StringIO(text))
        except UnicodeDecodeError as error:
            return f"{path} is not UTF-8 text (byte {error.start}); save it in UTF-8."
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
            return f"{path}{place}: {error.problem}; repair it."
        except RecursionError:
            return f"{path} has an anchor that stands below itself (&name … *name); repair it."
        except (yaml.YAMLError, OSError) as error:  # a character that YAML does not allow; or a lone number
            return f"{path} cannot be read: {' '.join(str(error).split()).rstrip('.')}; repair it."
        if not OmegaConf.is_dict(read):
            return f"{path} holds a list: give names with values, such as `dataset: adult`."
        if unlike := [name for name in read if not isinstance(name, str)]:
            return f"{path} has the name {unlike[0]!r}, which YAML takes for no text: put it in quotes."
    return None


def _set_up_logging(file: Path) -> None:
    """Set up the project's logging: Kedro looks for it in the working directory only, and is loud without it."""
    if file.is_file() and "KEDRO_LOGGING_CONFIG" not in os.environ and not (Path.cwd() / "conf" / file.name).exists():
        LOGGING.configure(yaml.safe_load(file.read_text(encoding="utf-8")))


def _refuse_unlike(place: str, below: Any, above: Any) -> None:
    """Refuse a list where a lower layer has a block, or the reverse: OmegaConf does not say which setting it is."""
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        for key in below.keys() & above.keys():
            _refuse_unlike(f"{place}.{key}" if place else str(key), below[key], above[key])
    elif isinstance(below, Mapping | list) and isinstance(above, Mapping | list) and type(below) is not type(above):
        kind = "a list" if isinstance(below, list) else "settings below it"
        raise EquidpError(f"{place}={above!r}: give {kind}, such as {below!r}.")
