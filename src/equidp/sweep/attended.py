"""`python -m equidp.sweep.attended run …` is `kedro run …` that stops when whoever started it is gone.

The starter holds the other end of standard input. When it closes, because he died or wants it so, the run gets SIGTERM,
on which training leaves a checkpoint.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def stop_when_input_ends() -> None:
    """Wait for the end of standard input, then ask this process to stop."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=stop_when_input_ends, daemon=True).start()
    sys.argv[0] = "kedro"
    runpy.run_module("kedro", run_name="__main__", alter_sys=True)
