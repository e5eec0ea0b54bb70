"""Hostile input: whatever a file or a setting holds, the answer is a result or one readable sentence."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kedro.io import DatasetError
from tests.data.sources.tiny import WRITERS, write_tiny

import equidp
from equidp import parameters
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.data.records import Records
from equidp.data.sources import source
from equidp.errors import EquidpError
from equidp.hooks.guard import LOCK, refusal_in
from equidp.models import MODELS, model_options
from equidp.models.weights import Weights
from equidp.pipelines.training.baseline import trained_once

SOURCE_ROOT = Path(equidp.__file__).parent

# ------------------------------------------------------------------------------------------------------------ settings

VALID: dict[str, Any] = {"dataset": "digits", "seed": 0, "privacy": {"epsilon": 3.0, "delta": 1e-5}}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)

NAMES = st.sampled_from(
    [*parameters.PLAIN, *parameters.SECTIONS, *ALGORITHMS, "audit", "report", "algorithm", "custom"]
)


def _fields() -> Iterator[tuple[str, str]]:
    for name, kinds in parameters.SECTIONS.items():
        yield from ((name, field) for kind in kinds for field in kind.model_fields)


def _refuses_in_a_sentence(call: Callable[[], object]) -> None:
    """Run; anything but a result or an `EquidpError` of one readable line escapes and fails the test."""
    refusal: EquidpError | None = None
    try:
        call()
    except EquidpError as error:
        refusal = error
    assert refusal is None or (len(refusal.message) > 10 and refusal.exit_code != 0)


@settings(max_examples=150)
@given(NAMES, VALUES)
def test_any_value_of_a_block_of_settings(name: str, value: Any) -> None:
    _refuses_in_a_sentence(lambda: parameters.resolve(VALID | {name: value}))


@settings(max_examples=300)
@given(st.sampled_from(list(_fields())), VALUES)
def test_any_value_of_any_setting(setting: tuple[str, str], value: Any) -> None:
    name, field = setting
    block = {**VALID.get(name, {}), field: value}
    _refuses_in_a_sentence(lambda: parameters.resolve(VALID | {name: block}))


@settings(max_examples=100)
@given(st.dictionaries(st.text(max_size=10) | NAMES, VALUES, max_size=4))
def test_any_dictionary_of_settings(given_settings: dict[str, Any]) -> None:
    _refuses_in_a_sentence(lambda: parameters.resolve(given_settings))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@settings(max_examples=30)
@given(data=st.data())
def test_any_option_of_any_algorithm(name: str, data: st.DataObject) -> None:
    known = sorted(ALGORITHMS[name].model_fields) or ["clip_norm"]
    options = data.draw(st.dictionaries(st.sampled_from(known) | st.text(max_size=8), VALUES, max_size=2))
    _refuses_in_a_sentence(lambda: algorithm_settings(name, options).build())


@pytest.mark.parametrize("name", sorted(MODELS))
@settings(max_examples=30)
@given(data=st.data())
def test_any_option_of_any_model(name: str, data: st.DataObject) -> None:
    known = sorted(MODELS[name].Options.model_fields)
    options = data.draw(st.dictionaries(st.sampled_from(known) | st.text(max_size=8), VALUES, max_size=2))
    _refuses_in_a_sentence(lambda: model_options(name, options))


ESCAPES = ["../x", "..", "/etc", "a/b", "a\\b", "~", "a\0b", "-rf", " ", "a\n", "${HOME}", "C:\\x", "."]


@pytest.mark.parametrize("setting", ["dataset", "run_label"])
@pytest.mark.parametrize("escape", ESCAPES)
def test_no_name_can_leave_the_project(setting: str, escape: str) -> None:
    with pytest.raises(EquidpError):
        parameters.resolve(VALID | {setting: escape})


def test_no_label_is_a_folder_that_a_run_without_one_has() -> None:
    """Of two secure runs the second replaced all results of the first, which was labelled `release`."""
    catalog = (SOURCE_ROOT.parents[1] / "conf" / "base" / "catalog.yml").read_text(encoding="utf-8")
    placed = re.findall(r"type: (\S+)\n  filepath: \S+/\$\{_run\}/([^/\s]+)(/?)", catalog)
    folders = {name for kind, name, below in placed if below or kind.endswith("FolderDataset")}
    assert folders == {"release", "workplace", "nonprivate"}
    for name in (*folders, "Release", "release."):
        with pytest.raises(EquidpError, match=f"run_label={name}: a run without a label has a folder of that name"):
            parameters.resolve(VALID | {"run_label": name})
    assert parameters.resolve(VALID | {"run_label": "release-2"}).run_label == "release-2"
    files = {name for _, name, _ in placed} - folders
    assert {"privacy.json", "model.safetensors"} < files
    for name in (*files, "Privacy.JSON", LOCK):  # such a folder was removed, with all results of a secure run
        with pytest.raises(EquidpError, match=f"run_label={name}: a run without a label may have a file of that name"):
            parameters.resolve(VALID | {"run_label": name})
    assert parameters.resolve(VALID | {"run_label": "eps=0.5"}).run_label == "eps=0.5"


# --------------------------------------------------------------------------------------------------------------- files

FILES = sorted(set(WRITERS) - {"diabetes", "diabetes_bands", "digits"})  # these come with scikit-learn and read no file


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, dict[str, Any]]]:
    """Every dataset's tiny raw files, written once, with the options to read them by."""
    folders = {name: tmp_path_factory.mktemp(name) for name in FILES}
    return {name: (folder, write_tiny(name, folder)) for name, folder in folders.items()}


def _read(name: str, folder: Path, options: dict[str, Any]) -> Records:
    reader = source(name, options)
    return reader.read(reader.locate(folder))


def _damage(content: bytes, chance: np.random.Generator) -> bytes:
    """Cut off, overwritten in places, doubled, emptied, or something else altogether."""
    how = chance.integers(6)
    position = int(chance.integers(len(content) + 1))
    if how == 0:
        return content[:position]
    if how == 1:
        return content[:position] + bytes(chance.integers(0, 256, 40, dtype=np.uint8)) + content[position + 40 :]
    if how == 2:
        damaged = bytearray(content)
        for place in chance.integers(0, max(len(content), 1), 5):
            if content:
                damaged[place] ^= 1 << int(chance.integers(8))
        return bytes(damaged)
    if how == 3:
        return content[:position] + content
    if how == 4:
        return b""
    return [b"\x80\x04cos\nsystem\n(S'exit 1'\ntR.", b"<html>404</html>", b"\xff" * 100, b",,,\n,,,\n"][position % 4]


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_read_or_refused(
    name: str, written: Mapping[str, tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, options = written[name]
    chance = np.random.default_rng(len(name))
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    for number in range(12):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        victim = copy / files[int(chance.integers(len(files)))]
        victim.write_bytes(_damage(victim.read_bytes(), chance))
        here = {key: str(copy) if value == str(folder) else value for key, value in options.items()}
        _refuses_in_a_sentence(lambda copy=copy, here=here: _read(name, copy, here))


@pytest.mark.parametrize("victim", ["sgd.parquet", "sgd.safetensors"])
@pytest.mark.parametrize("keep", [0, 40])
def test_a_damaged_baseline_says_what_to_do(tmp_path: Path, victim: str, keep: int) -> None:
    def train(place: Path | None) -> tuple[Weights, pd.DataFrame]:
        return Weights({"w": torch.ones(2)}, {}), pd.DataFrame({"epoch": [1.0]})

    trained_once(tmp_path, "sgd", train, workplace="sgd")
    (tmp_path / victim).write_bytes((tmp_path / victim).read_bytes()[:keep])
    with pytest.raises((EquidpError, DatasetError)) as refused:
        trained_once(tmp_path, "sgd", train, workplace="sgd")
    told = refusal_in(refused.value)
    assert told is not None
    assert re.search(rf"{re.escape(victim)} is damaged \(.*\): delete it, and train again\.$", told.message)


# -------------------------------------------------------------------------------------------------------------- source


def test_nothing_is_ever_unpickled_or_evaluated() -> None:
    # `weights_only` loads tensors alone; `pickletools` only lists what a pickle would do; a trial's process takes what
    # the process that started it has given it, as multiprocessing does
    forbidden = re.compile(
        r"\b(import pickle|from pickle|cPickle|joblib|shelve|marshal|dill)\b|allow_pickle=True"
        r"|(?<![\w.])(eval|exec)\((?!\))|torch\.load\((?!.*weights_only=True)|yaml\.(load|unsafe_load)\(|shell=True|os\.system"
    )
    found = [
        f"{path.relative_to(SOURCE_ROOT)}:{number}"
        for path in SOURCE_ROOT.rglob("*.py")
        if path != SOURCE_ROOT / "sweep" / "apart.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if forbidden.search(line.split("#")[0])
    ]
    assert found == []


def test_no_server_listens_to_the_network_by_default() -> None:
    project = SOURCE_ROOT.parents[1]
    read = [*SOURCE_ROOT.rglob("*.py"), *(project / "conf").rglob("*.yml")]
    assert len(read) > 20
    assert [path.name for path in read if "0.0.0.0" in path.read_text(encoding="utf-8")] == []
