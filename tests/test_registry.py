"""Classes of other packages: found by their entry points, asked for late, and part of a run's code."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from equidp import registry
from equidp.algorithms.dpsgd import DPSGD
from equidp.data.records import Schema
from equidp.errors import EquidpError
from equidp.mechanism.parts import FlatClip
from equidp.models import MODELS, build_model
from equidp.models.linear import Logistic
from equidp.training.digests import code_of_others, initial_state

ALGORITHM = """
from equidp.algorithms.settings import AlgorithmSettings
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import FlatClip, Positive

class Half(AlgorithmSettings):
    clip_norm: Positive = 1.0

    def build(self) -> Algorithm:
        return Algorithm(name="dpsgd_half", weights=FlatClip(), initial={"clip_norm": self.clip_norm / 2})

class Gentle(FlatClip):
    "Half of flat clipping's weights."
    def weights(self, norms, public):
        return super().weights(norms, public) / 2
    def bound(self, public):
        return super().bound(public) / 2

class Careless(Gentle):
    'The same, with a bound that is too small.'
    def bound(self, public):
        return super().bound(public) / 2
"""

ASKED = """
import importlib_metadata  # as Dask and MLflow do
from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError
from equidp.models import MODELS
from equidp.parameters import resolve
from equidp.pipeline_registry import register_pipelines
from equidp.reporting.release.facts import packages
given = {"dataset": "digits", "raw_dir": "data", "privacy": {"epsilon": 3}, "dpsgd_half": {"options": {"clip_norm": 3}}}
settings, pipelines = resolve(given), register_pipelines()
print(settings.algorithm("dpsgd_half").initial, "dpsgd_half" in pipelines, MODELS["flat"].__name__)
recombined = algorithm_settings("custom", {"weights": "gentle"})
print(recombined.build().weights.__class__.__name__, packages("custom", "flat", recombined.model_dump(mode="json")))
for refused in (lambda: settings.algorithm("broken"), lambda: pipelines["broken"], lambda: settings.algorithm("other")):
    try:
        refused()
    except EquidpError as error:
        print(error)
"""

PARTS = "[equidp.mechanism.parts.weights]\ngentle = half:Gentle\ncareless = half:Careless\n"


class OfTheBackport:
    """What `entry_points` gives once `importlib_metadata` was imported, as by Dask and MLflow: not Python's class."""

    def __init__(self, name: str, value: str, package: str = "my-dp") -> None:
        self.name, self.value, self.dist = name, value, SimpleNamespace(name=package)


def made(monkeypatch: pytest.MonkeyPatch, *given: OfTheBackport) -> registry.Registry[type]:
    monkeypatch.setattr(registry, "installed", lambda: SimpleNamespace(select=lambda *, group: given))
    return registry.Registry[type]("equidp.algorithms", {"naive": "naive:Naive"}, "settings:AlgorithmSettings")


def test_a_packages_classes_stand_beside_ours_and_are_imported_when_they_are_asked_for(monkeypatch, caplog) -> None:
    names = made(
        monkeypatch, OfTheBackport("mine", "equidp.algorithms.dpsgd:DPSGD"), OfTheBackport("naive", "elsewhere:Naive"),
        OfTheBackport("lost", "no.such.module:Lost"),
    )  # fmt: skip
    assert set(names) == {"mine", "naive", "lost"}
    assert names["mine"] is DPSGD
    assert (names.package("mine"), names.package("naive")) == ("my-dp", None)
    assert names["naive"].__module__ == "equidp.algorithms.naive"  # a name that is ours stays ours
    assert "The package my-dp adds 'naive' to equidp.algorithms, which has one" in caplog.text
    assert [name for name, _ in names.sound()] == ["naive", "mine"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no.such.module:Lost", r"Lost, which the package my-dp adds as 'one', cannot be imported \(ModuleNotFound"),
        ("equidp.errors:listed_names", r"is no AlgorithmSettings: derive it from equidp\.algorithms\.settings"),
        ("equidp.models.base:Model", "is no AlgorithmSettings: derive it"),
        ("equidp.algorithms.settings:AlgorithmSettings", "does not define build, which every AlgorithmSettings has"),
    ],
)
def test_what_is_no_such_class_is_refused_in_a_sentence(value: str, reason: str, monkeypatch) -> None:
    with pytest.raises(EquidpError, match=reason):
        made(monkeypatch, OfTheBackport("one", value))["one"]


def test_two_packages_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = made(monkeypatch, OfTheBackport("one", "a:A"), OfTheBackport("one", "b:B", "other"))
    with pytest.raises(EquidpError, match=r"by several packages \(my-dp, other\): rename one"):
        names["one"]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds a package's classes."""
    (tmp_path / "half.py").write_text(ALGORITHM)
    (tmp_path / "flat.py").write_text("from equidp.models.linear import Logistic\nclass Flat(Logistic): pass\n")
    facts = tmp_path / "half-0.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 0.1\n")
    (facts / "entry_points.txt").write_text(
        "[equidp.algorithms]\ndpsgd_half = half:Half\nbroken = no_module:X\nother = half:Half\n"
        "[equidp.models]\nflat = flat:Flat\n" + PARTS
    )
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))}


@pytest.mark.slow
def test_an_installed_package_adds_a_pipeline_with_its_settings_a_part_and_a_model(installed: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], env=installed, capture_output=True, text=True, check=False)
    first, second, *refused = done.stdout.splitlines()
    assert first == "{'clip_norm': 1.5} True Flat", done.stderr
    assert second == "Gentle ['half']"
    assert [line.partition(":")[0] for line in refused] == ["no_module", "no_module", "other"]
    assert "must return an Algorithm of the name 'other', not 'dpsgd_half'" in refused[2]


@pytest.mark.parametrize(
    ("name", "passes"), [pytest.param("gentle", True, marks=pytest.mark.slow), ("careless", False)]
)
def test_a_part_of_an_installed_package_is_held_to_the_contract(installed, name: str, passes: bool, tmp_path) -> None:
    (tmp_path / "half-0.1.dist-info/entry_points.txt").write_text(PARTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")  # of the folder it is called in
    call = [sys.executable, "-c", "from equidp.new_project import main; main()", "check", name]
    done = subprocess.run(call, env=installed, capture_output=True, text=True, check=False, cwd=tmp_path)
    held = map(int, re.findall(r"(\d+) (?:passed|failed)", done.stdout))  # a run of a careless one is refused, too
    assert sum(held) > 20, done.stdout + done.stderr
    assert "warning" not in done.stdout
    assert (done.returncode == 0, " failed" not in done.stdout) == (passes, passes), done.stdout


def test_the_model_of_the_docs_is_built_from_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
    module = ModuleType("my_net")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where pydantic looks for the names in annotations
    exec(compile(page.split("```python\n")[2].split("```")[0], "docs/extending.md", "exec"), module.__dict__)
    monkeypatch.setitem(MODELS.data, "my_net", module.MyNet)
    ten = tuple("0123456789")
    digits = Schema("digits", "image", (1, 8, 8), ten, {"class": ten}, mean=(0.3,), sd=(0.4,))
    model = build_model("my_net", digits, options={"width": 16})
    assert model(torch.zeros(3, 1, 8, 8, dtype=torch.uint8)).shape == (3, 10)


def test_a_resumed_run_has_to_agree_with_the_code_of_parts_and_models_from_elsewhere() -> None:
    class Own(FlatClip):
        pass

    class Net(nn.Module):
        pass

    assert code_of_others([FlatClip, Logistic, nn.Linear]) == ""
    assert len(code_of_others([FlatClip, Own])) == 64
    assert code_of_others([Own]) == code_of_others([Net])  # of one package, whose every file counts


def test_code_is_read_anew_and_what_was_typed_into_a_notebook_is_never_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "edited_parts.py"
    file.write_text("from equidp.mechanism.parts import FlatClip\n\n\nclass Mine(FlatClip):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("edited_parts").Mine
    before = code_of_others([kind])
    assert before == code_of_others([kind])
    file.write_text(file.read_text().replace("pass", "of = 2"))
    assert before != code_of_others([kind])  # in the same process

    typed = type("Typed", (FlatClip,), {"__module__": "typed_into_a_notebook"})
    assert code_of_others([typed]) != code_of_others([typed])


def test_a_tensor_that_a_layer_keeps_as_no_buffer_is_a_setting_too() -> None:
    """Read from a file, say: the same noise on other sums would give their difference."""

    def made(table: float) -> nn.Module:
        network = nn.Sequential(nn.Linear(2, 2))
        torch.nn.init.zeros_(network[0].weight)
        torch.nn.init.zeros_(network[0].bias)
        network[0].table = torch.tensor([table])
        return network

    assert initial_state(made(1.0)) == initial_state(made(1.0)) != initial_state(made(2.0))
