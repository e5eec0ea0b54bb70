"""Two runs of one dataset, seed and run_label: nodes read what nodes wrote, so the second one waits its turn."""

from __future__ import annotations

import pytest
from tests.end_to_end.kedro_project import QUICK, kedro_run, mlflow_runs, report_folder

from equidp.errors import EquidpError
from equidp.hooks.guard import LOCK
from equidp.pipelines.training import nodes
from equidp.system.files import locked


def test_another_run_at_work_is_told_and_its_files_are_left_alone(project):
    """It may train another algorithm: the baseline's plan is one file, and its model. A release waits for its model."""
    path = report_folder(project, "ingestion") / LOCK
    path.parent.mkdir(parents=True)
    with path.open("wb") as other:
        assert locked(other)
        for pipeline, more in (("ingestion", {}), ("release", {"algorithm": "dpsgd"})):
            with pytest.raises(EquidpError, match="Another run of this dataset, seed and run_label is at work"):
                kedro_run(project, pipeline, **more)
        assert [file.name for file in path.parent.iterdir()] == [LOCK]
        kedro_run(project, "ingestion", run_label="mine")
    kedro_run(project, "ingestion")


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_is_at_work_until_its_results_are_logged(project, monkeypatch, fails):
    def free() -> bool:
        with (report_folder(project, "ingestion") / LOCK).open("rb") as file:
            return locked(file)

    def scored(*arguments):
        seen.append(free())
        if fails:
            raise RuntimeError("in the middle")
        return score(*arguments)

    seen, score = [], nodes.score_test
    monkeypatch.setattr(nodes, "score_test", scored)
    monkeypatch.setattr("equidp.training.forget", lambda workplace: seen.append(free()))
    if fails:
        with pytest.raises(RuntimeError, match="in the middle"):
            kedro_run(project, "sgd", **QUICK)
    else:
        kedro_run(project, "sgd", **QUICK)
        assert [run.info.status for run in mlflow_runs(project)] == ["FINISHED"]
    assert seen
    assert not any(seen)
    assert free()
