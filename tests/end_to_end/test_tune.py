"""`kedro run --pipeline=tune`: what a secure tuning leaves, what it says, and what a later one removes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient
from tests.end_to_end.kedro_project import kedro_run, mlflow_runs, read_json, report_folder

from equidp.accounting.trials import Trials
from equidp.errors import EquidpError

QUICK: dict[str, Any] = {
    "algorithm": "dpsgd",
    "training.epochs": 1,
    "training.batch_size": 256,
    "training.device": "cpu",
    "privacy.noise_multiplier": 2.0,
    "privacy.delta": 1e-5,
    "tune.grid.training.learning_rate": "0.5+2.0",
}
LAW = {"privacy.trials_law": "geometric", "privacy.trials_mean": 2}


def test_a_secure_tuning_leaves_a_release_and_an_exact_one_leaves_none(
    project: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    secure = {"privacy.secure": True, "privacy.evaluation.epsilon": 1.0}
    kedro_run(project, "tune", **QUICK, **LAW, **secure)
    folder, workplace = report_folder(project, "tuned"), project / "data/06_models/digits/tuned/seed=0/workplace"
    said = capsys.readouterr().out
    assert "training part: ε = " in said
    assert "test part: ε = " in said
    assert f"tuned.report: {folder / 'report.html'}" in said
    assert not list(workplace.iterdir())
    released = read_json(folder / "release" / "privacy.json")
    choice = read_json(folder / "tune.json")
    assert released["epsilon"] == choice["epsilon"]
    (tracked,) = (run.data for run in mlflow_runs(project))
    assert tracked.metrics["epsilon"] == choice["epsilon"]
    assert tracked.metrics["validation/epsilon"] == choice["validation"]["epsilon"]
    assert tracked.metrics["validation/balanced_accuracy"] == choice["value"]
    assert tracked.params["chosen.training.learning_rate"] == choice["chosen"]["training.learning_rate"]
    assert "training.learning_rate" not in tracked.params, "the file's, which no trial need have had"
    assert tracked.tags["mlflow.runName"].startswith("tune dpsgd")
    assert "digits" in tracked.tags["mlflow.runName"]
    assert released["epsilon_published"]["value"] < released["epsilon"]
    assert released["epsilon_published"]["guarantee"] is False
    assert released["tuning"]["chosen"] == choice["chosen"]
    assert released["evaluation"]["trials"] == {"max": 1}
    assert not (folder / "nonprivate").exists()
    page = (folder / "report.html").read_text(encoding="utf-8")
    for told in (
        "Declared before the first trial", "0.5, 2.0", "the geometric law, mean 2", f"{choice['value']:.4f}",
        "Each record of the validation part", "of the validation part, with noise",
        "Nothing of the other trials is shown", "Released figures",
    ):  # fmt: skip
        assert told in page
    rate = float(choice["chosen"]["training.learning_rate"])
    assert f'<th scope="row">training.learning_rate</th><td>{rate} (chosen)</td>' in page
    assert page.count('<th scope="row">training.learning_rate</th><td>') == 1
    told = (folder / "privacy.md").read_text(encoding="utf-8").replace("\\", "")
    assert f"was chosen: training.learning_rate = {choice['chosen']['training.learning_rate']}. That figure" in told
    assert "All other figures of this page are exact" not in page
    assert "nonprivate" not in page[page.index("<main>") : page.index('id="privacy"')]
    run = mlflow_runs(project)[-1]
    scores = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model").predict(np.zeros((3, 1, 8, 8), dtype=np.uint8))
    assert scores.shape == (3, 10)
    client = MlflowClient()
    assert {Path(file.path).name for file in client.list_artifacts(run.info.run_id, "release")} == {
        path.name for path in (folder / "release").iterdir()
    }
    logged = run.data
    assert logged.params["tune.grid.training.learning_rate"] == "0.5+2.0"
    assert {"released/accuracy", "released/epsilon"} <= logged.metrics.keys()

    first = {path.name: path.read_bytes() for path in (folder / "release").iterdir()}
    shutil.rmtree(folder / "release")
    kedro_run(project, "release", algorithm="tuned", **{"release.curator": "A clinic"})
    again = {path.name: path.read_bytes() for path in (folder / "release").iterdir()}
    assert "A clinic" in again["README.md"].decode()
    kedro_run(project, "release", algorithm="tuned")
    assert first == {path.name: path.read_bytes() for path in (folder / "release").iterdir()}
    for pipeline in ("audit", "tune"):
        with pytest.raises(EquidpError, match=rf"name an algorithm for the pipeline {pipeline}"):
            kedro_run(project, pipeline, **QUICK | LAW | {"algorithm": "tuned"})

    (workplace / "nonprivate_trial-0").mkdir()  # as a kill leaves it while the tuning forgets its trials
    (workplace / "nonprivate_begun-0").touch()
    with pytest.raises(EquidpError, match=r"tuned.seed=0 holds the results of a secure run, whose ε is spent"):
        kedro_run(project, "tune", **QUICK, **{"tune.exact": True})
    assert not list(workplace.iterdir())  # of a secure tuning no later call draws, and so none would remove them
    folder.rename(folder.with_name("kept"))
    kedro_run(project, "tune", **QUICK, **{"tune.exact": True})
    assert "validation part: ε" not in capsys.readouterr().out
    assert "a choice without privacy, for research" in caplog.text
    assert not (folder / "release").exists()
    assert not (folder / "metrics_release.json").exists()
    assert len(read_json(folder / "nonprivate" / "trials.json")["trials"]) == 2
    page = (folder / "report.html").read_text(encoding="utf-8")
    for told in ("Settings were chosen without privacy (tune.exact)", "nonprivate/trials", "every combination once"):
        assert told in page
    assert "with noise" not in page[page.index('id="choice"') : page.index('id="trials"')]


@pytest.mark.slow
def test_what_a_box_and_an_option_of_the_algorithm_were_is_logged_of_the_choice_alone(project: Any) -> None:
    given = QUICK | {"tune.box.training.learning_rate": "0.5+2.0", "tune.points": 2}
    given["tune.grid.dpsgd.options.clip_norm"] = "0.75+1.5"
    del given["tune.grid.training.learning_rate"]
    kedro_run(project, "tune", **given, **LAW)
    (params,) = (run.data.params for run in mlflow_runs(project))
    assert {"chosen.training.learning_rate", "chosen.dpsgd.options.clip_norm"} <= params.keys()
    assert not {"training.learning_rate", "audited.options.clip_norm"} & params.keys(), "the file's, of no trial"


def test_nothing_that_a_secure_tuning_prints_tells_how_many_trials_there_were(
    project: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of a trial of noise 1 and the geometric law of mean 4 the choice costs ε = 7.8 at δ = 1e-6, and 15 or more for
    # whoever knows K, too: so neither bars nor lines may be counted
    said = []
    for trials in (1, 3):
        caplog.clear()
        monkeypatch.setattr(Trials, "draw", lambda self, uniform, trials=trials: trials)
        kedro_run(project, "tune", **QUICK | LAW | {"privacy.secure": True, "run_label": "one", "data.key": "one"})
        said.append((capsys.readouterr().err, [record.getMessage() for record in caplog.records]))
        assert "trials print nothing" in caplog.text
        assert "trains 650" not in caplog.text
        shutil.rmtree(project / "data" / "08_reporting")
    assert said[0] == said[1]
    assert "epoch" not in said[0][0]


@pytest.mark.slow
def test_nothing_of_an_earlier_tuning_stays_beside_the_model_of_a_new_one_that_is_cut_short(project: Any) -> None:
    folder = report_folder(project, "tuned")
    kedro_run(project, "tune", **QUICK, **{"tune.exact": True})
    assert (folder / "nonprivate" / "trials.json").is_file()
    kedro_run(project, "tune", options={"to_outputs": ["tuned.model"]}, **QUICK, **LAW)
    assert not (folder / "nonprivate" / "trials.json").exists(), "scores of all trials, of which a law shows one alone"
    assert not (folder / "report.html").exists()
