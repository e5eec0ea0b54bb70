"""An interrupt is not lost, wherever it arrives."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from equidp.system.interrupts import SIGTERM_STATUS, raise_hidden, waiting

IN_A_FINALISER = """
import signal, sys, time, weakref
from equidp.system import interrupts


class Thing:
    pass


def leave(*_):
    raise SystemExit(interrupts.SIGTERM_STATUS)


number = signal.Signals[sys.argv[1]]
signal.signal(signal.SIGTERM, leave)
interrupts.keep()
interrupts.keep()
thing = Thing()
watched = weakref.ref(thing, lambda _: signal.raise_signal(number))
try:
    del thing  # the exception is raised, and lost, in here
    print("lost", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("Ctrl-C", flush=True)
"""

FAILING_FINALISER = """
import weakref
from equidp.system import interrupts


class Thing:
    pass


interrupts.keep()
thing = Thing()
watched = weakref.ref(thing, lambda _: 1 / 0)
del thing
"""


HOOKS_OF_OTHERS = """
import sys
from equidp.system import interrupts

interrupts.keep()
ours = sys.unraisablehook
sys.unraisablehook = lambda lost: ours(lost)
interrupts.keep()
"""


DURING_IMPORTS = """
import sys


class Pressed:
    def find_spec(self, name, *_):
        if name == "equidp.hooks":
            raise {error}


sys.meta_path.insert(0, Pressed())
import equidp.settings
"""


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=50)


@pytest.mark.skipif(sys.platform == "win32", reason="signals end a process at once on Windows")
def test_an_interrupt_in_a_finaliser_is_raised_afterwards() -> None:
    stopped = _python(IN_A_FINALISER, "SIGINT")
    assert (stopped.stdout.split(), stopped.returncode) == (["lost", "Ctrl-C"], 0)
    assert _python(IN_A_FINALISER, "SIGTERM").returncode == SIGTERM_STATUS


def test_other_faults_of_finalisers_are_remarked_upon_as_ever() -> None:
    assert "ZeroDivisionError" in _python(FAILING_FINALISER).stderr


def test_a_hook_that_hands_on_to_ours_is_no_circle() -> None:
    told = _python(HOOKS_OF_OTHERS + FAILING_FINALISER).stderr
    assert told.count("ZeroDivisionError") == 1
    assert "RecursionError" not in told


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals end a process at once on Windows")
def test_an_interrupt_while_kedro_imports_the_project_prints_no_traceback() -> None:
    stopped = _python(DURING_IMPORTS.format(error="KeyboardInterrupt"))
    assert (stopped.stderr.split(), stopped.returncode) == (["Aborted!"], -signal.SIGINT)
    assert "Traceback" in _python(DURING_IMPORTS.format(error="ZeroDivisionError")).stderr


def test_a_first_interrupt_waits_for_a_protected_block_and_a_second_does_not() -> None:
    def pressed(times: int, error: Exception | None = None) -> list[int]:
        reached: list[int] = []

        def work() -> None:
            with waiting():
                for time in range(times):
                    signal.raise_signal(signal.SIGINT)
                    reached.append(time)
                if error is not None:
                    raise error

        with pytest.raises(KeyboardInterrupt):
            work()
        return reached

    assert pressed(1) == [0]
    assert pressed(2) == [0]
    assert pressed(1, OSError()) == [0]  # an error does not take its place
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_behind_an_error_is_raised() -> None:
    def closed(interrupt: BaseException) -> None:
        try:
            try:
                raise interrupt
            finally:
                raise OSError("this session is being closed already")
        except OSError as error:
            raise ValueError("the store failed") from error

    for interrupt in (KeyboardInterrupt(), SystemExit(SIGTERM_STATUS)):
        with pytest.raises(ValueError, match="the store failed") as caught:
            closed(interrupt)
        with pytest.raises(type(interrupt)) as raised:
            raise_hidden(caught.value)
        assert raised.value is interrupt
    with pytest.raises(ValueError, match="the store failed") as caught:
        closed(ZeroDivisionError())
    raise_hidden(caught.value)
