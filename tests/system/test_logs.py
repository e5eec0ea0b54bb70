"""Another library's messages, held back while we tell the same."""

from __future__ import annotations

import logging

from equidp.system.logs import held_back


def test_loggers_beneath_are_held_back_too_though_each_has_a_level_of_its_own(caplog) -> None:
    """Torch gives its own levels: a Ctrl-C on several ranks told "Received 2 death signal" in the progress bar."""
    beneath, beside = logging.getLogger("held.one.two"), logging.getLogger("heldback")
    beneath.setLevel(logging.WARNING)
    with held_back("held", below=logging.CRITICAL):
        beneath.error("torch tells it")
        beside.warning("not this one's")
    beneath.warning("afterwards")
    assert [record.message for record in caplog.records] == ["not this one's", "afterwards"]
    assert logging.getLogger("held").level == logging.NOTSET
