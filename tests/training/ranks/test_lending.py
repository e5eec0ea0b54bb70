"""What `python -m equidp.training.ranks` refuses, instead of waiting for a training that will not come."""

from __future__ import annotations

import json
import sys

import pytest

from equidp.errors import EquidpError
from equidp.training.ranks import __main__
from equidp.training.ranks.job import JOB, reported


@pytest.mark.parametrize(
    ("node", "rendezvous", "words"),
    [
        ("5", "10.0.0.1:29500", "--node 5 of --nodes 2"),
        ("0", "10.0.0.1:29500", "--node 0 of --nodes 2"),
        ("1", "10.0.0.1", "give host:port"),
        ("1", ":29500", "give host:port"),
    ],
)
@pytest.mark.timeout(20)
def test_a_machine_that_nobody_will_meet_is_refused(tmp_path, monkeypatch, capsys, node, rendezvous, words):
    given = ["--nodes", "2", "--node", node, "--rendezvous", rendezvous, "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["equidp.training.ranks", *given])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def lent(tmp_path, monkeypatch):
    """A folder with a job for two machines, of which this is the second."""
    given = ["--nodes", "2", "--node", "1", "--rendezvous", "127.0.0.1:1", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["equidp.training.ranks", *given])
    (tmp_path / JOB).write_text(json.dumps({"training": {"devices": 2}}))
    return tmp_path


@pytest.mark.parametrize(
    ("ended", "status", "words"),
    [
        (EquidpError("Rank 1 of 2 was killed by signal 9."), 1, r"Rank 1 of 2 was killed by signal 9\."),
        (KeyboardInterrupt(), 130, r"Machine 1 of 2 .* was told to stop.*resume=true"),
    ],
)
def test_the_asking_machine_is_told_why_this_one_ended(lent, monkeypatch, ended, status, words):
    """It would tell of a closed connection, and that its own rank 0 has failed."""

    def launched(*given: object) -> None:
        raise ended

    monkeypatch.setattr(__main__, "launch", launched)
    with pytest.raises(SystemExit) as left:
        __main__.main()
    assert left.value.code == status
    with pytest.raises(EquidpError, match=words):
        raise reported(lent)


def test_ctrl_c_while_nobody_asks_ends_it_without_a_traceback(lent, monkeypatch, capsys):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    (lent / JOB).unlink()
    monkeypatch.setattr(__main__.time, "sleep", interrupted)
    with pytest.raises(SystemExit) as left:
        __main__.main()
    assert left.value.code == 130
    assert capsys.readouterr().err == f"Waiting for a training in {lent}, until Ctrl-C.\n"
