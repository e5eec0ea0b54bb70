"""A run's release/ as a user gets it: by itself from a secure run, on request from any other; nothing private in it."""

from __future__ import annotations

import getpass
import json
import socket

import pandas as pd
import pytest
from mlflow import MlflowClient
from tests.end_to_end.kedro_project import QUICK, kedro_run, mlflow_runs, read_json, report_folder

from equidp.errors import EquidpError
from equidp.system.workplace import JOURNAL_FILE
from equidp.training.journal import ABANDONED


def texts(folder) -> dict[str, str]:
    return {path.name: path.read_bytes().decode("utf-8", errors="replace") for path in folder.iterdir()}


def test_a_secure_run_writes_what_may_go_out_and_no_later_run_removes_it(project, capsys):
    kedro_run(project, "dpsgd", **{**QUICK, "privacy.secure": True, "privacy.evaluation.epsilon": 1})

    folder = report_folder(project, "dpsgd") / "release"
    found = texts(folder)
    (run,) = mlflow_runs(project)
    figures = read_json(folder.parent / "metrics_release.json")
    assert json.loads(found["metrics_release.json"])["overall"] == figures["overall"]
    assert run.data.metrics["released/records"] == figures["overall"]["records"]
    assert {"test/accuracy", "nonprivate/test/accuracy"} & run.data.metrics.keys() == {"nonprivate/test/accuracy"}
    assert "exact figures stay inside" in (described := run.data.tags["mlflow.note.content"])
    assert "accuracy" not in described
    assert json.loads(found["privacy.json"])["evaluation"]["mechanism"] == figures["mechanism"]
    assert "Each record of the test part" in found["privacy.md"]
    assert "Released figures" in (folder.parent / "report.html").read_text(encoding="utf-8")
    ledger = (project / "data" / "privacy_ledger" / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["part"] for line in ledger] == ["train", "test"]
    (line,) = [of["elsewhere"] for of in json.loads(found["checklist.json"])["topics"].values() if "elsewhere" in of]
    assert line["value"]["secure_runs"] == 1
    assert line["value"]["research_runs"] == 0
    stated = json.loads(found["privacy.json"])
    worst = max(stated["epsilon"], stated["evaluation"]["epsilon"])  # nobody is in both parts
    assert line["value"]["epsilon"] == pytest.approx(worst, rel=1e-3)
    assert json.loads(ledger[0])["run"] not in "".join(found.values())
    assert {item.path for item in MlflowClient().list_artifacts(run.info.run_id, "release")} == {
        f"release/{name}" for name in found
    }
    assert not [name for name in run.data.params if name.startswith("release")]
    said = " ".join(capsys.readouterr().out.split())
    assert f"dpsgd.release: {folder}" in said
    # release.unprotected=test would be refused beside figures with noise
    assert "They stay inside, like report.html; what may go out is in release/." in said
    assert json.loads(found["privacy.json"])["for_publication"] is True
    metrics = read_json(folder.parent / "metrics.json")
    groups = pd.read_csv(report_folder(project, "ingestion") / "groups.csv")
    exact = [metrics["overall"]["accuracy"], metrics["overall"]["loss"], metrics["baseline"]["overall"]["loss"]]
    exact += [of["loss"] for of in metrics["groups"]["class"].values()]
    private = [repr(value) for value in exact if len(repr(value)) > 10]  # shorter ones may be other figures
    assert len(private) > 5
    private += [str(project), getpass.getuser() + "@", socket.gethostname()]
    private += [f'"{part}": {count}' for part in ("train", "test") for count in groups[part]]
    weights = (folder / "model.safetensors").read_bytes()
    told = found | {"model.safetensors": weights[8 : 8 + int.from_bytes(weights[:8], "little")].decode()}
    # of the weights what they say of themselves: in random bytes a host called `vm` is found, too
    for secret in private:
        assert [name for name, text in told.items() if secret in text] == [], secret

    (workplace := project / "data/06_models/digits/dpsgd/seed=0/workplace").mkdir(exist_ok=True)
    (workplace / f"journal{ABANDONED}1.jsonl").write_text("{}")  # of a run that was killed, and begun anew
    # what a kill leaves in the middle of writing, or of forgetting
    (workplace / ".charged.json.0a1b2c3d.part").touch()
    (workplace / JOURNAL_FILE).touch()
    for again in ({}, {"privacy.secure": True, "resume": True}):  # there is nothing to resume
        with pytest.raises(EquidpError, match=r"dpsgd.seed=0 holds the results of a secure run, whose ε is spent"):
            kedro_run(project, "dpsgd", **QUICK, **again)
    assert texts(folder) == found
    kedro_run(project, "dpsgd", **QUICK, run_label="other")
    assert texts(folder) == found
    assert "dpsgd.release" not in capsys.readouterr().out
    assert "release" not in {item.path for item in MlflowClient().list_artifacts(mlflow_runs(project)[-1].info.run_id)}

    kedro_run(project, "release", algorithm="dpsgd", run_label="other")
    other = folder.parent / "other" / "release"
    assert f"finished.release: {other}" in capsys.readouterr().out
    assert len(mlflow_runs(project)) == 2
    found = texts(other)
    assert all(json.loads(text)["for_publication"] is False for name, text in found.items() if name.endswith(".json"))
    assert "Research mode" in found["README.md"]
    assert "counted 1 secure run on these records" in found["privacy.md"]
    assert "lists 1 run in research mode" in found["privacy.md"]


def test_no_earlier_release_stays_beside_a_new_model(project):
    folder = report_folder(project, "dpsgd")
    (folder / "release").mkdir(parents=True)
    for name in ("release/README.md", "metrics_release.json", "privacy.json", "metrics.json"):
        (folder / name).write_text("{}")
    kedro_run(project, "dpsgd", options={"to_nodes": ["dpsgd.train_model"]}, **QUICK)
    assert {path.name for path in folder.iterdir()} == {"privacy.json", "history.parquet"}


@pytest.mark.slow
def test_documents_of_the_baseline_alone_are_not_written_and_its_release_is_refused(project, caplog):
    kedro_run(project, "sgd", **QUICK, **{"release.documents": True})
    assert "sgd trains without differential privacy, so nothing of it may go out" in caplog.text
    assert not (report_folder(project, "sgd") / "release").exists()
    with pytest.raises(EquidpError, match="sgd was trained without differential privacy"):
        kedro_run(project, "release", algorithm="sgd")


@pytest.mark.slow
def test_findings_of_an_audit_made_since_go_out_with_a_finished_run(project):
    weak = {"audit.gradient_canaries": 500, "audit.input_canaries": 0, "audit.reference_models": 0}
    kedro_run(project, "dpsgd", **{**QUICK, "privacy.secure": True})
    folder = report_folder(project, "dpsgd") / "release"
    assert "No audit of this training is at hand" in texts(folder)["reidentification.md"]
    kedro_run(project, "audit", **QUICK, **weak, algorithm="dpsgd")
    kedro_run(project, "release", algorithm="dpsgd")
    assert '"correct"' not in texts(folder)["reidentification.json"]  # by the seed it tells how many records there are
    kedro_run(project, "release", algorithm="dpsgd", **{"release.unprotected": "audit"})
    found = json.loads(texts(folder)["reidentification.json"])["topics"]
    (line,) = [lines["audit"] for lines in found.values() if "audit" in lines]
    assert line["value"]["canaries"] == 500
    (bound,) = [lines["membership_bound"] for lines in found.values() if "membership_bound" in lines]
    assert bound["value"]["source"] == "trade-off curve"


def test_a_release_of_a_run_that_was_not_made_is_refused_in_one_sentence(project):
    with pytest.raises(EquidpError, match=r"There is no model .*naive.*: train one first"):
        kedro_run(project, "release", algorithm="naive")
