"""MLflow's pages for a project's store: nothing of it reaches out by itself, and nothing stays when it ends."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from equidp.errors import EquidpError
from equidp.hooks.views import MEANS, RUNS
from equidp.system.interrupts import handling

SECONDS_TO_STOP = 10

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that end it as Ctrl-C does; the second one where its terminal is closed."""


def serve(uri: str, experiment: str, host: str, port: int) -> int:
    """Serve MLflow's pages until Ctrl-C, and print the addresses of the views. Returns MLflow's exit status.

    Of a store that is a server (`uri`), only the addresses of its own pages are printed; `experiment` is an id.

    Raises:
        EquidpError: another process serves at this port.
    """
    remote = uri.startswith(("http://", "https://"))
    if not remote:
        _refuse_taken(host, port)
    uri = re.sub(r"://[^/]*@", "://", uri) if remote else uri  # a browser asks for the login, and a terminal keeps it
    pages = f"{uri if remote else f'http://{host}:{port}'}/#/experiments/{experiment}/runs?viewStateShareKey="
    charts = f"{pages}{MEANS}&compareRunsMode=CHART"
    print(f"All runs: {pages}{RUNS}\nOf sweeps, means over seeds: {pages}{MEANS}\n as charts: {charts}", flush=True)
    if remote:
        return 0
    variables = {
        "MLFLOW_BACKEND_STORE_URI": uri,  # not as an argument, which every user of the machine could read
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes for what no training needs
    }
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    process = subprocess.Popen(command, env=os.environ | variables, start_new_session=True)
    try:
        with handling(signal.default_int_handler, *ENDING), suppress(KeyboardInterrupt):
            return process.wait()
        return 0
    finally:
        _end(process)


def _refuse_taken(host: str, port: int) -> None:
    """Before an address is printed: it would show what the other process serves, such as another project's runs."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise EquidpError(
                f"Port {port} of {host} is taken, such as by the pages of another project: end that process, or give "
                f"another port, such as kedro ui --port {port + 1 if port < 65535 else port - 1}."
            ) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server with all that it has started: its workers outlive it if it is ended alone."""
    if not hasattr(os, "killpg"):
        process.terminate()
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
