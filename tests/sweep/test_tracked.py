"""Above the runs of a sweep's seeds MLflow has one of each row's means, and one of each data set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from equidp.hooks.views import MEANS, NOISED, RUNS, TAG, add_views
from equidp.reporting.headlines import headline_metrics
from equidp.sweep.tracked import Means, summarise


@pytest.mark.slow
def test_a_row_is_above_its_seeds_and_below_its_data_set_once_however_often_it_is_written(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = MlflowClient(store)
    experiment = client.create_experiment("equidp", artifact_location=(tmp_path / "artifacts").as_uri())
    cells = [client.create_run(experiment).info.run_id for _ in range(2)]
    client.log_param(cells[0], "privacy.epsilon", "3")
    client.log_param(cells[0], "seed", "0")
    page = tmp_path / "digits.html"
    page.write_text("<p>all rows</p>")
    for mean in (0.5, 0.55, 0.6):
        if mean == 0.6:  # a user may delete a run in MLflow's pages, and the means stay up to date
            client.delete_run(cells[1])
        shown = {"overall": f"{mean}±0.1"}
        row = Means("abc", "digits", "dpsgd", "dpsgd ε=3", {"test/accuracy": mean}, shown, f"{mean}", cells)
        summarise("demo", [row], {"digits": page}, tmp_path, store, experiment)

    client.restore_run(cells[1])
    runs = {run.info.run_id: run for run in client.search_runs([experiment])}
    (above,) = [run for run in runs.values() if run.data.tags.get("summary") == "dataset"]
    (means,) = [run for run in runs.values() if run.data.tags.get("summary") == "seeds"]
    assert means.data.tags["mlflow.parentRunId"] == above.info.run_id
    assert {runs[cell].data.tags["mlflow.parentRunId"] for cell in cells} == {means.info.run_id}
    assert (means.data.metrics, means.data.params) == ({"test/accuracy": 0.6}, {"privacy.epsilon": "3"})
    assert means.data.tags["overall"] == "0.6±0.1"
    assert [run.info.status for run in (above, means)] == ["FINISHED", "FINISHED"]
    assert [item.path for item in client.list_artifacts(above.info.run_id)] == ["digits.html"]

    other = client.get_experiment(client.create_experiment("other"))
    add_views(client, other)
    shown = json.loads(json.loads(client.get_experiment(other.experiment_id).tags[f"{TAG}{RUNS}"])["state"])
    assert shown["selectedColumns"][1] == "metrics.`test/accuracy`"
    assert {"metrics.`test/mae`", "metrics.`test/worst_group_label_accuracy`"} < set(shown["selectedColumns"])
    client.set_experiment_tag(experiment, f"{TAG}{RUNS}", "the user's own")
    add_views(client, client.get_experiment(experiment))
    tags = client.get_experiment(experiment).tags
    views = {name.removeprefix(TAG): text for name, text in tags.items() if name.startswith(TAG)}
    assert views.pop(RUNS) == "the user's own"
    columns = {key: set(json.loads(json.loads(view)["state"])["selectedColumns"]) for key, view in views.items()}
    assert columns.keys() == {MEANS, NOISED}
    assert columns[MEANS] >= {"metrics.`epsilon`", "tags.`overall`"}
    assert columns[NOISED] >= {"metrics.`released/epsilon`", "metrics.`released/accuracy`"}
    client._tracking_client.store.engine.dispose()


@pytest.fixture
def mlflow_(tmp_path: Path) -> Iterator[tuple[MlflowClient, str, str]]:
    """A client, its store and an experiment there."""
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = MlflowClient(store)
    yield client, store, client.create_experiment("equidp", artifact_location=(tmp_path / "artifacts").as_uri())
    client._tracking_client.store.engine.dispose()


def row_of(cells: Sequence[str], **metrics: float) -> Means:
    shown = {"overall": "0.5±0.1", "seeds": str(len(cells))}
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return Means("abc", "digits", "dpsgd", "dpsgd", named, shown, "accuracy 0.5±0.1", cells)


def summaries(client: MlflowClient, experiment: str) -> list[Run]:
    return [run for run in client.search_runs([experiment]) if run.data.tags.get("summary") == "seeds"]


@pytest.mark.slow
def test_two_projects_of_one_experiment_have_means_of_their_own(tmp_path: Path, mlflow_) -> None:
    """They had one run, with the means of whoever was last, and the seeds of both below it."""
    client, store, experiment = mlflow_
    page = tmp_path / "digits.html"
    page.write_text("")
    for folder, mean in (("mine", 0.5), ("yours", 0.9)):
        cell = client.create_run(experiment).info.run_id
        summarise("demo", [row_of([cell], test__accuracy=mean)], {"digits": page}, Path(folder), store, experiment)
    found = {run.data.tags["project"]: run.data.metrics["test/accuracy"] for run in summaries(client, experiment)}
    assert found == {"mine": 0.5, "yours": 0.9}


@pytest.mark.slow
def test_means_keep_nothing_of_an_earlier_call(tmp_path: Path, mlflow_, caplog: pytest.LogCaptureFixture) -> None:
    """Of one seed an interval stood there that was one over two; and a setting that had changed ended it all."""
    client, store, experiment = mlflow_
    page = tmp_path / "digits.html"
    page.write_text("")
    cells = [client.create_run(experiment).info.run_id for _ in range(2)]
    for cell, limit in zip(cells, ("8", "9"), strict=True):  # a setting that no result depends on
        client.log_param(cell, "privacy.total_epsilon", limit)
    both = row_of(cells, test__accuracy=0.5, plus_minus__accuracy=0.1)
    summarise("demo", [both], {"digits": page}, tmp_path, store, experiment)
    summarise("demo", [row_of(cells[1:], test__accuracy=0.6)], {"digits": page}, tmp_path, store, experiment)
    (means,) = summaries(client, experiment)
    assert means.data.metrics == {"test/accuracy": 0.6}
    assert means.data.params == {"privacy.total_epsilon": "9"}
    assert not caplog.text


@pytest.mark.slow
def test_means_outlive_a_run_that_is_gone_for_good(tmp_path: Path, mlflow_, caplog: pytest.LogCaptureFixture) -> None:
    client, store, experiment = mlflow_
    page = tmp_path / "digits.html"
    page.write_text("")
    cells = ["0" * 32, client.create_run(experiment).info.run_id]
    summarise("demo", [row_of(cells, test__accuracy=0.5)], {"digits": page}, tmp_path, store, experiment)
    (means,) = summaries(client, experiment)
    assert client.get_run(cells[1]).data.tags["mlflow.parentRunId"] == means.info.run_id
    assert not caplog.text


def test_a_full_disk_and_a_lost_page_cost_no_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = MlflowClient(store)
    experiment = client.create_experiment("equidp", artifact_location=(tmp_path / "artifacts").as_uri())
    (tmp_path / "artifacts").write_text("a file where a folder should be: the system refuses")
    page = tmp_path / "digits.html"
    page.write_text("<p>all rows</p>")
    summarise("demo", [], {"digits": page}, tmp_path, store, experiment)
    assert "MLflow has no means of this sweep (" in caplog.text
    client._tracking_client.store.engine.dispose()


def test_a_run_s_headlines_are_of_all_records_and_of_the_first_grouping() -> None:
    figures = {"count": 9, "accuracy": 0.8, "mcc": 0.5, "auroc": None}
    groups = {"sex": {"Female": figures}, "race": {"Other": figures}}
    worst = {"sex": {"group": "Female", "accuracy": 0.7}, "race": {"group": "Other", "accuracy": 0.1}}
    gap = {"sex": {"accuracy": 0.2}, "race": {"accuracy": 0.9}}
    document = {"overall": figures, "groups": groups, "worst": worst, "baseline": {"overall": {"accuracy": 0.9}}}
    document |= {"cost_of_privacy": {"overall": {"accuracy": 0.1}, "gap": gap}}
    assert headline_metrics(document) == {
        "test/accuracy": 0.8,
        "test/worst_group_accuracy": 0.7,
        "baseline/accuracy": 0.9,
        "cost_of_privacy/accuracy": 0.1,
        "cost_of_privacy/gap": 0.2,
    }
