"""Network: a failed download ends in a reason, and never waits for ever."""

from __future__ import annotations

import socket

import pytest

from equidp.errors import first_line
from equidp.system.network import attempt, timeout


def fail(error: Exception):
    def download():
        raise error

    return download


def test_a_result_comes_without_a_reason() -> None:
    assert attempt(lambda: 3) == (3, "")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotImplementedError(), "this provider allows no automatic download"),
        (OSError("no route\nmore"), "the automatic download failed: OSError: no route"),
        (RuntimeError(), "the automatic download failed: RuntimeError"),
    ],
)
def test_a_failure_comes_with_its_first_line(error: Exception, reason: str) -> None:
    assert attempt(fail(error)) == (None, reason)


def test_an_interrupt_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        attempt(fail(KeyboardInterrupt()))


def test_sockets_have_a_time_limit_inside_and_the_old_one_after() -> None:
    before = socket.getdefaulttimeout()
    with timeout(5):
        assert socket.getdefaulttimeout() == 5
    assert socket.getdefaulttimeout() == before


def test_first_line_of_an_empty_message_is_the_type() -> None:
    assert first_line(ValueError(" \n ")) == "ValueError"
