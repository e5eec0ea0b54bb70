"""What `python -m equidp.training.ranks` refuses, instead of waiting for a training that will not come."""

from __future__ import annotations

import sys

import pytest

from equidp.training.ranks import __main__


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
