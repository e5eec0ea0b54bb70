"""`equidp new` makes a project that runs without the repository, and that an upgrade of the package leaves alone."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from equidp.config_loader import EquidpConfigLoader
from equidp.drafting import marked
from equidp.errors import EquidpError
from equidp.new_project import create, main
from equidp.settings import CONFIG_LOADER_ARGS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project, and the working directory in it."""
    folder = tmp_path / "my-study"
    create(folder)
    monkeypatch.chdir(folder)
    for name in ("EQUIDP_RAW_DIR", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_without_scripts_on_the_path_the_module_is_the_command(tmp_path: Path) -> None:
    """It said 'Got unexpected extra arguments', as the module is the packaged project's run otherwise."""
    called = [sys.executable, "-m", "equidp", "new", "my-study"]
    done = subprocess.run(called, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("my-study is made.")
    assert (tmp_path / "my-study" / "conf" / "base").is_dir()


def loader(folder: Path, **params: object) -> EquidpConfigLoader:
    return EquidpConfigLoader(str(folder / "conf"), runtime_params=params, **CONFIG_LOADER_ARGS)


def test_a_new_project_has_the_packages_settings_below_its_own(study: Path) -> None:
    (study / "conf/base/parameters/mine.yml").write_text(
        "training: {epochs: 7}\n"
        "presets: {my_digits: {data: {source: digits}, privacy: {epsilon: 2.0, delta: 1.0e-4}}}\n"
    )
    (study / "conf/base/catalog.yml").write_text("visits: {type: MemoryDataset}\n")
    (study / "conf/base/globals.yml").write_text("seed: 5\n")
    found = loader(study, dataset="my_digits")
    assert (found["parameters"]["seed"], found["parameters"]["training"]["epochs"]) == (5, 7)
    assert found["parameters"]["raw_dir"] == "data/01_raw"  # the package's
    assert {"visits", "{algorithm}.model"} <= set(found["catalog"])
    assert found["mlflow"]["server"]["mlflow_tracking_uri"] == f"sqlite:///{study / 'mlflow.db'}"
    assert found["mlflow"]["tracking"]["experiment"]["name"] == "my-study"  # on a shared server, too, its own
    assert found["mlflow"]["tracking"]["disable_tracking"] == loader(ROOT)["mlflow"]["tracking"]["disable_tracking"]
    assert set(found["sweeps"]) == set(loader(ROOT)["sweeps"])
    assert loader(study, dataset="adult", training={"epochs": 9})["parameters"]["training"]["epochs"] == 9


def test_a_preset_over_the_packages_takes_nothing_of_what_its_own_choice_replaces(study: Path) -> None:
    (study / "conf/base/parameters/mine.yml").write_text(
        "presets: {adult: {privacy: {epsilon: 2.0}}, cifar10: {model: {name: mlp}, privacy: {noise_multiplier: 3.0}}}\n"
    )
    adult, cifar = (loader(study, dataset=name)["parameters"] for name in ("adult", "cifar10"))
    assert [adult["privacy"][name] for name in ("epsilon", "noise_multiplier", "delta")] == [2.0, None, 1e-6]
    assert (cifar["privacy"]["epsilon"], cifar["privacy"]["noise_multiplier"]) == (None, 3.0)
    assert cifar["model"] == {"name": "mlp", "options": {}}  # the package's are another network's


def test_the_preset_to_fill_is_refused_until_it_is_filled_and_stops_no_other_data_set(study: Path) -> None:
    preset = study / "conf/base/parameters/my_study.yml"
    assert len(marked(preset.read_text())) == 5
    assert loader(study)["parameters"]["dataset"] == "digits"
    with pytest.raises(EquidpError, match="FROM_CODEBOOK"):
        loader(study, dataset="my_study")["parameters"]


def test_a_project_that_has_the_packages_own_files_reads_them_once() -> None:
    assert loader(ROOT)._packaged is None  # a checkout: the package's settings are its conf/


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("there", "there exists: choose another name, or remove it."),
        ("2024", "'2024' cannot be a project's name"),
        ("my study", "'my study' cannot be a project's name"),
        ("..", "cannot be a project's name"),
        ("Adult", "'adult' is a data set that equidp knows"),
        ("no/such/study", "is no folder: make it first."),
        ("file/study", "is no folder: make it first."),
    ],
)
def test_a_bad_folder_is_refused_in_a_sentence(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    done = CliRunner().invoke(main, ["new", str(tmp_path / name)])
    assert done.exit_code == 1
    assert words in done.output
    assert len(done.output.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


def test_the_command_to_go_on_with_can_be_pasted(tmp_path: Path) -> None:
    (tmp_path / "Ünï cödé").mkdir()
    done = CliRunner().invoke(main, ["new", str(tmp_path / "Ünï cödé" / "study")])
    assert f"cd '{tmp_path}/Ünï cödé/study' && kedro run" in done.output


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(EquidpError, match="Cannot write"):
        create(tmp_path / "study")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_leaves_no_half_of_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copy", full)
    with pytest.raises(EquidpError, match="Cannot write"):
        create(tmp_path / "study")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_no_message_names_a_page_that_a_wheel_does_not_have() -> None:
    for file in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        texts = {id(node): node for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        for node in ast.walk(tree):  # docstrings, also those of a field
            if isinstance(node, ast.Expr):
                texts.pop(id(node.value), None)
        named = [text.lineno for text in texts.values() if isinstance(text.value, str) and "docs/" in text.value]
        assert not named, f"{file}, lines {named}: say it in the message"


def test_an_algorithm_is_checked_without_those_whose_names_contain_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}
    monkeypatch.setattr(pytest, "main", lambda args, plugins: given.update(plugins=plugins) or 0)
    assert CliRunner().invoke(main, ["check", "dpsgd"]).exit_code == 0
    of_it = ["test_sum[dpsgd]", "test_sum[dpsgd-1]", "test_sum[1-dpsgd]", "test_sum[1-dpsgd-2]"]
    items = [SimpleNamespace(name=name) for name in [*of_it, "test_sum[dpsgd_f]", "test_sum[my_dpsgd-1]", "test_dpsgd"]]
    given["plugins"][0].pytest_collection_modifyitems(items)
    assert [item.name for item in items] == of_it


def test_an_algorithm_that_there_is_not_is_not_checked() -> None:
    refused = CliRunner().invoke(main, ["check", "dpsgd_decoy"])
    assert refused.exit_code == 1
    assert "Unknown algorithm 'dpsgd_decoy'. Did you mean 'dpsgd_decay'?" in refused.output


def built(source: Path, into: Path) -> Path:
    """The wheel of a checkout's code and settings, built offline from its sdist."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    return next(into.glob("*.whl"))


@pytest.mark.slow
def test_a_wheel_makes_a_project_that_runs_and_that_an_upgrade_leaves_alone(tmp_path: Path) -> None:
    """The environment has this one's libraries, and no equidp but the wheel's."""
    source = tmp_path / "source"
    source.mkdir()
    for name in (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "constraints.txt",
    ):
        shutil.copy(ROOT / name, source)
    for name in ("src", "conf", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "local"))
    first = built(source, tmp_path / "first")
    carried = zipfile.ZipFile(first).namelist()
    for name in ("conf/base/catalog.yml", "conf/logging.yml", "template/gitignore", "reporting/assets", "py.typed"):
        assert any(file.startswith(f"equidp/{name}") for file in carried), name
    assert not any("local" in file for file in carried)

    python = environment(tmp_path / "venv")
    home = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def call(*words: str, where: Path = tmp_path) -> str:
        done = subprocess.run([str(word) for word in words], cwd=where, env=home, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def install(wheel: Path) -> None:
        target = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall"]
        call(sys.executable, "-m", "pip", *target, str(wheel))

    install(first)
    call(python.parent / "equidp", "new", "my-study")
    study = tmp_path / "my-study"
    call(python, "-m", "kedro", "run", "--pipeline=dpsgd_f", "--params=training.epochs=1", where=study)
    assert (study / "data/08_reporting/digits/dpsgd_f/seed=0/report.html").is_file()
    assert " passed" in call(python.parent / "equidp", "check", "dpsgd_tanh", where=study)
    (study / "conf/base/parameters/mine.yml").write_text("training: {epochs: 1}\n")
    mine = digests(study)

    code = source / "src/equidp/__init__.py"
    code.write_text(code.read_text().replace("0.1.0", "0.1.1"))
    presets = source / "conf/base/parameters/presets.yml"
    tomorrow = "data: {source: digits}, model: {name: logistic}, privacy: {epsilon: 2.0, delta: 1.0e-4}"
    presets.write_text(f"{presets.read_text()}\n  digits_of_tomorrow: {{{tomorrow}}}\n")
    install(built(source, tmp_path / "second"))
    assert "0.1.1" in call(python.parent / "equidp", "--version")
    call(python, "-m", "kedro", "run", "--pipeline=dpsgd_f", "--params=dataset=digits_of_tomorrow", where=study)
    assert (study / "data/08_reporting/digits_of_tomorrow/dpsgd_f/seed=0/report.html").is_file()
    assert digests(study) == mine


def environment(folder: Path) -> Path:
    """The interpreter of a fresh environment that finds this one's libraries."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    here = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], **PIPED)
    # a .pth file of a .pth file's folder is not read: the editable install of this checkout stays outside
    Path(here.stdout.strip(), "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


PIPED = {"check": True, "capture_output": True, "text": True}


def digests(study: Path) -> dict[str, str]:
    """The files of a project that are its user's."""
    made = {"data", "mlartifacts", ".viz", "mlflow.db"}
    files = [path for path in study.rglob("*") if path.is_file() and path.relative_to(study).parts[0] not in made]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
