"""A run's release/ as a user gets it: by itself from a secure run, on request from any other; nothing private in it."""

from __future__ import annotations

import getpass
import json
import socket

import pandas as pd
import pytest
from tests.end_to_end.kedro_project import QUICK, kedro_run, read_json, report_folder

from equidp.errors import EquidpError


def texts(folder) -> dict[str, str]:
    return {path.name: path.read_bytes().decode("utf-8", errors="replace") for path in folder.iterdir()}


def test_a_secure_run_writes_what_may_go_out_and_a_later_one_in_research_mode_removes_it(project):
    kedro_run(project, "dpsgd", **{**QUICK, "privacy.secure": True})

    folder = report_folder(project, "dpsgd") / "release"
    found = texts(folder)
    assert json.loads(found["privacy.json"])["for_publication"] is True
    metrics = read_json(folder.parent / "metrics.json")
    groups = pd.read_csv(report_folder(project, "ingestion") / "groups.csv")
    exact = [metrics["overall"]["accuracy"], metrics["overall"]["loss"], metrics["baseline"]["overall"]["loss"]]
    exact += [of["loss"] for of in metrics["groups"]["class"].values()]
    private = [repr(value) for value in exact if len(repr(value)) > 10]  # shorter ones may be other figures
    assert len(private) > 5
    private += [str(project), getpass.getuser() + "@", socket.gethostname()]
    private += [f'"{part}": {count}' for part in ("train", "test") for count in groups[part]]
    for secret in private:
        assert [name for name, text in found.items() if secret in text] == [], secret

    kedro_run(project, "dpsgd", **QUICK)
    assert not folder.exists()

    kedro_run(project, "release", algorithm="dpsgd")
    found = texts(folder)
    assert all(json.loads(text)["for_publication"] is False for name, text in found.items() if name.endswith(".json"))
    assert "Research mode" in found["README.md"]


def test_a_release_of_a_run_that_was_not_made_is_refused_in_one_sentence(project):
    with pytest.raises(EquidpError, match=r"There is no model .*naive.*: train one first"):
        kedro_run(project, "release", algorithm="naive")
