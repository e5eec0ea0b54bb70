"""The page of tracked runs: which runs are one row, and what the row is called."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
from mlflow import MlflowClient, set_tracking_uri

from equidp.errors import EquidpError
from equidp.parameters import ReportSettings, Settings
from equidp.pipelines.reporting.tracked import _rows, compare_tracked_runs

HERE = "equidp"
"""The experiment, which the configuration fills in from mlflow.yml."""


def compared(**report: Any) -> tuple[str, pd.DataFrame]:
    """The page and the table of the runs that these settings of `report` choose."""
    return compare_tracked_runs(cast(Settings, SimpleNamespace(report=ReportSettings(experiment=HERE, **report))))


def run(number: int, algorithm: str, seed: int, **params: str) -> Any:
    """A run as MLflow lists it."""
    data = SimpleNamespace(tags={"algorithm": algorithm, "seed": str(seed)}, params={"seed": str(seed), **params})
    return SimpleNamespace(info=SimpleNamespace(run_id=str(number)), data=data)


def rows(*runs: Any) -> dict[str, list[str]]:
    return {label: [one.info.run_id for one in found] for label, found in _rows(runs).items()}


def test_seeds_are_one_row_and_the_newest_run_of_a_seed_stands_for_it() -> None:
    assert rows(run(3, "dpsgd", 0), run(2, "dpsgd", 1), run(1, "dpsgd", 0)) == {"dpsgd": ["3", "2"]}


def test_an_interrupted_seed_that_went_on_is_still_a_seed() -> None:
    first = run(2, "dpsgd", 0, resume="False", **{"training.checkpoint_every": "None"})
    resumed = run(1, "dpsgd", 1, resume="True", **{"training.checkpoint_every": "1"})
    assert rows(first, resumed) == {"dpsgd": ["2", "1"]}


def test_secure_runs_are_each_their_own() -> None:
    runs = [run(number, "dpsgd", 0) for number in (2, 1)]
    for one in runs:
        one.data.tags["secure"] = "true"
    assert rows(*runs) == {"dpsgd": ["2", "1"]}


def test_runs_on_other_files_are_no_seeds_of_each_other() -> None:
    runs = [run(2, "dpsgd", 0), run(1, "dpsgd", 1)]
    for number, one in enumerate(runs):
        one.data.tags["raw_fingerprint"] = str(number)
    assert rows(*runs) == {"dpsgd": ["2"], "dpsgd #2": ["1"]}


def test_a_setting_that_only_one_run_has_tells_it_apart() -> None:
    assert rows(run(1, "dpsgd", 0), run(2, "dpsgd", 0, **{"data.keep.yes": "200"})) == {
        "dpsgd": ["1"],
        "dpsgd yes=200": ["2"],
    }


def test_another_algorithms_options_tell_nothing() -> None:
    mine, other = {"dpsgd.options.clip_norm": "1"}, {"psac.options.stability": "0.1"}
    assert list(rows(run(1, "dpsgd", 0, **mine), run(2, "psac", 0, **other))) == ["dpsgd", "psac"]


def test_settings_that_end_alike_have_their_full_names() -> None:
    found = rows(run(1, "dpsgd", 0, **{"a.x": "1"}), run(2, "dpsgd", 0, **{"b.x": "1"}))
    assert found == {"dpsgd a.x=1": ["1"], "dpsgd b.x=1": ["2"]}


def test_rows_are_called_as_on_the_page_of_a_sweep() -> None:
    settings = {"privacy.epsilon": ("1.0", "0.5"), "training.epochs": ("1000000", "2"), "data.keep.8": ("a", "1.50")}
    found = rows(*(run(k, "dpsgd", 0, **{n: v[k] for n, v in settings.items()}) for k in range(2)))
    assert sorted(found) == ["dpsgd 8=1.5 ε=0.5 epochs=2", "dpsgd 8=a ε=1 epochs=1000000"]


def test_a_setting_that_is_not_given_is_not_told() -> None:
    """A run of one algorithm logs the baseline's options, one of several does not."""
    own, rate = {"sgd.options.learning_rate": "None"}, {"training.learning_rate": "0.5"}
    found = rows(run(1, "dpsgd", 0, **own), run(2, "dpsgd", 0, **own, **rate), run(3, "dpsgd", 0))
    assert found == {"dpsgd": ["3"], "dpsgd #2": ["1"], "dpsgd learning_rate=0.5": ["2"]}


def test_the_baseline_is_one_row_whatever_privacy_the_runs_beside_it_had() -> None:
    """As `sgd ε=3` it would promise a privacy that it has not, and stand below itself."""
    target = [{"privacy.epsilon": epsilon, "privacy.delta": "0.1"} for epsilon in ("1", "3")]
    baselines = [run(i, "sgd", 0, **params) for i, params in enumerate(target)]
    for one in baselines:
        one.data.tags["private"] = "false"
    private = [run(i + 2, "dpsgd", 0, **params) for i, params in enumerate(target)]
    assert rows(*baselines, *private) == {"sgd": ["0"], "dpsgd ε=1": ["2"], "dpsgd ε=3": ["3"]}


@pytest.fixture
def store(project: Path, sample: Any) -> MlflowClient:
    """A store with two seeds of dpsgd and one of dpsgd_f."""
    uri = f"sqlite:///{project / 'mlflow.db'}"
    set_tracking_uri(uri)
    client = MlflowClient(uri)
    experiment = client.create_experiment(HERE, artifact_location=(project / "artifacts").as_uri())
    for algorithm, seed in (("dpsgd", "0"), ("dpsgd", "1"), ("dpsgd_f", "0")):
        tags = {"algorithm": algorithm, "seed": seed, "private": "true", "dataset": "digits"}
        run_id = client.create_run(experiment, tags=tags).info.run_id
        client.log_dict(run_id, sample.documents[algorithm], "metrics.json")
        client.log_dict(run_id, sample.privacy[algorithm], "privacy.json")
        client.set_terminated(run_id)
    return client


@pytest.mark.slow
def test_the_page_says_how_many_seeds_a_row_has_and_when_runs_were_left_out(store: MlflowClient, caplog: Any) -> None:
    page, table = compared(dataset="digits")
    assert table.set_index("algorithm")["seeds"].to_dict() == {"sgd": 2, "dpsgd": 2, "dpsgd_f": 1}
    assert "Older runs may be missing" not in page + caplog.text

    page, _ = compared(dataset="digits", runs=2)
    assert "Older runs may be missing: the 2 newest were taken" in page
    assert "Older runs may be missing" in caplog.text


def test_runs_whose_files_are_gone_are_left_out_and_named(store: MlflowClient, project: Path) -> None:
    folders = {run.info.run_id: project / "artifacts" / run.info.run_id for run in store.search_runs(["1"])}
    lost, damaged, _ = folders
    shutil.rmtree(folders[lost])
    (folders[damaged] / "artifacts" / "metrics.json").write_text("{")
    page, table = compared(dataset="digits")
    assert f"Runs whose files are gone or damaged are left out: {lost}, {damaged}." in page
    assert table["seeds"].max() == 1
    shutil.rmtree(project / "artifacts")
    with pytest.raises(EquidpError, match="Of no run are the files still there: train again"):
        compared(dataset="digits")


@pytest.mark.parametrize("report", [{"dataset": "o'brien"}, {"tags": {"sweep": "col'lide"}}, {"tags": {"a`b": "c"}}])
def test_quotes_are_refused_in_a_sentence(store: MlflowClient, report: dict[str, Any]) -> None:
    with pytest.raises(EquidpError, match="takes no quotes"):
        compared(**report)


def test_a_mistyped_dataset_is_told_the_nearest(store: MlflowClient) -> None:
    with pytest.raises(EquidpError, match=r"Unknown dataset of tracked runs 'adlt'\. Did you mean 'adult'\?"):
        compared(dataset="adlt")
    with pytest.raises(EquidpError, match=r"No finished run fits .*'dutch'.*: train one first"):
        compared(dataset="dutch")


def test_two_names_of_a_dataset_are_refused(store: MlflowClient) -> None:
    with pytest.raises(EquidpError, match=r"report\.dataset is 'digits' and report\.tags\.dataset 'adult'; give one"):
        compared(dataset="digits", tags={"dataset": "adult"})
    _, table = compared(dataset="digits", tags={"dataset": "digits"})
    assert len(table) == 3


@pytest.mark.slow
def test_of_several_datasets_none_shows_its_baseline_for_all(store: MlflowClient, sample: Any) -> None:
    _, table = compared()
    assert "sgd" in set(table["algorithm"])

    other = copy.deepcopy(sample.documents["dpsgd"])
    other["baseline"]["overall"]["accuracy"] = 0.25
    experiment = store.get_experiment_by_name(HERE).experiment_id
    tags = {"algorithm": "dpsgd", "seed": "0", "private": "true", "dataset": "adult", "raw_fingerprint": "another"}
    run_id = store.create_run(experiment, tags=tags).info.run_id
    store.log_dict(run_id, other, "metrics.json")
    store.log_dict(run_id, sample.privacy["dpsgd"], "privacy.json")
    store.set_terminated(run_id)
    _, table = compared()
    assert "sgd" not in set(table["algorithm"])
    assert table["cost"].notna().all()
