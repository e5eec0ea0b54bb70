"""The command line: nothing that was said is lost, and names stay as typed."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

import click
import pytest
from sqlalchemy import make_url

from equidp.cli import cli, run
from equidp.config_loader import PROJECT_URIS, EquidpConfigLoader
from equidp.errors import EquidpError
from equidp.settings import CONFIG_LOADER_ARGS


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command is called with."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(run, "callback", lambda **options: found.update(options))
    return found


def test_repeated_options_are_joined(given: dict) -> None:
    """click would take the last: a run without the dataset that was named first."""
    run.main(
        ["--params=privacy.epsilon=1,seed=2", "--params", "dataset=clinic", "-t", "a", "--tags=b"], "run", None, False
    )
    assert given["params"] == {"privacy": {"epsilon": 1}, "seed": 2, "dataset": "clinic"}
    assert given["tags"] == ["a", "b"]


def test_another_option_with_two_values_is_refused(given: dict) -> None:
    with pytest.raises(click.UsageError, match="--env is given twice, as a and as b: give one"):
        run.main(["--env=a", "-e", "b"], "run", None, False)
    run.main(["--env=a", "-e", "a", "--async"], "run", None, False)
    assert (given["env"], given["is_async"]) == ("a", True)


@pytest.mark.parametrize("name", ["01", "4e12345", "7e99999", "1_0", "true", "0x1f", "null", ""])
def test_names_stay_as_typed(given: dict, name: str) -> None:
    """As numbers, two labels would be one, and the second run would replace the first."""
    run.main([f"--params=run_label={name},dataset={name},data.key={name},seed=01"], "run", None, False)
    assert given["params"] == {"run_label": name, "dataset": name, "data": {"key": name}, "seed": 1}


def test_two_values_of_one_setting_are_refused(given: dict) -> None:
    """OmegaConf would take the last: the first ε would be lost."""
    with pytest.raises(click.UsageError, match=r"gives privacy\.epsilon twice, as 1 and as 2: give one"):
        run.main(["--params=privacy.epsilon=1,seed=3", "--params=privacy.epsilon=2"], "run", None, False)
    run.main(["--params=seed=3", "--params=seed=3"], "run", None, False)
    assert given["params"] == {"seed": 3}


@pytest.mark.parametrize("typed", ["data.key='a", "model.options.hidden=[16", "seed=@", "dataset=%x", "data.key=${"])
def test_what_does_not_read_as_settings_is_refused_in_a_sentence(given: dict, typed: str) -> None:
    with pytest.raises(
        click.UsageError, match=r"--params=.* does not read as settings \(.*\)\. .*list is written with"
    ):
        run.main([f"--params={typed}"], "run", None, False)
    assert not given


def test_columns_and_tags_that_a_number_would_change_stay_as_typed(given: dict) -> None:
    options = "data.options.label=010,data.options.size=32,data.options.verify=false,data.options.sizes=[5]"
    run.main([f"--params={options},report.tags.a=1.50,report.tags.b=7e999"], "run", None, False)
    assert given["params"]["data"]["options"] == {"label": "010", "size": 32, "verify": False, "sizes": [5]}
    assert given["params"]["report"]["tags"] == {"a": "1.50", "b": "7e999"}


def test_a_sweeps_repeated_lists_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr("equidp.cli.project_at", lambda *place: None)
    monkeypatch.setattr("equidp.sweep.command.run_command", lambda project, name, **options: found.update(options))
    words = ["--algorithms", "dpsgd", "--algorithms=psasc", "--params=a=1", "--params=b=2", "--seeds=3"]
    cli.main(["sweep", *words], "kedro", None, False, obj=type("Metadata", (), {"project_path": Path()}))
    assert (found["algorithms"], found["params"], found["seeds"]) == ("dpsgd,psasc", "a=1,b=2", "3")


@pytest.mark.parametrize("command", ["sweep", "ui", "new-dataset"])
@pytest.mark.parametrize("words", [[], ["--env=lab"]])
def test_every_command_reads_the_environment_that_kedro_run_reads(
    command: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells of a sweep did, and had other settings than those that they are named by."""
    monkeypatch.setenv("KEDRO_ENV", "prod")
    with cli.commands[command].make_context(command, [*words]) as context:
        assert context.params["env"] == ("lab" if words else "prod")


def _folder(conf: Path) -> Path:
    return conf


def _zip(conf: Path) -> Path:
    return Path(shutil.make_archive(str(conf.parent / "packed"), "zip", conf.parent, conf.name))


def _tar(conf: Path) -> Path:
    with tarfile.open(conf.parent / "packed.tar.gz", "w:gz") as archive:
        archive.add(conf, "conf")
    return conf.parent / "packed.tar.gz"


@pytest.mark.parametrize("source", [_folder, _zip, _tar])
def test_settings_without_a_folder_of_ones_own_are_read(project: Path, source) -> None:
    """Images and packages leave conf/local out."""
    shutil.rmtree(project / "conf" / "local")
    loader = EquidpConfigLoader(str(source(project / "conf")), runtime_params={"seed": 4}, **CONFIG_LOADER_ARGS)
    assert loader["parameters"]["dataset"] == "digits"
    assert loader["parameters"]["seed"] == 4


@pytest.mark.parametrize(
    ("name", "packed", "words"),
    [
        ("packed.tgz", _tar, "no settings by its name: give a folder, a .zip or a .tar.gz"),
        ("settings.yml", _tar, "no settings by its name"),
        ("half.tar.gz", _tar, "a damaged archive .*: pack it again"),
        ("half.zip", _zip, "a damaged archive .*: pack it again"),
        ("half.tar", _zip, "a damaged archive .*: pack it again"),
    ],
)
def test_a_file_that_is_no_archive_of_settings_is_refused(project: Path, name: str, packed, words: str) -> None:
    """A run would go on with the package's settings, the user's own ones unread."""
    content = packed(project / "conf").read_bytes()
    (project / name).write_bytes(content[: len(content) // 2] if "half" in name else content)
    with pytest.raises(EquidpError, match=words):
        EquidpConfigLoader(str(project / name), **CONFIG_LOADER_ARGS)


@pytest.mark.parametrize("label", [float("inf"), True, 1.5])
def test_a_number_as_a_name_is_refused_where_its_text_is_gone(project: Path, label: object) -> None:
    loader = EquidpConfigLoader(str(project / "conf"), runtime_params={"run_label": label}, **CONFIG_LOADER_ARGS)
    with pytest.raises(EquidpError, match=r"run_label=.* is a number or a truth value here: put it in quotes"):
        loader["parameters"]


@pytest.mark.parametrize("name", ["plain", "é", "a#b", "a%20b", "100%", "what?", "a b"])
def test_a_database_below_an_odd_folder_is_where_it_should_be(name: str) -> None:
    """MLflow makes the folder that it reads between `sqlite:///` and the file's name, encoded or not."""
    path = Path("/somewhere") / name / "mlflow.db"
    uri = PROJECT_URIS["sqlite"](path)
    assert make_url(uri).database == str(path)
    assert uri.removeprefix("sqlite:///") in (str(path), uri)
