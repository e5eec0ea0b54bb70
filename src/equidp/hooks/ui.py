"""UI: serves MLflow's pages for a project's store, only at the given host and port. No process outlives it."""

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
"""Signals that end the server as Ctrl-C does; SIGHUP comes if its terminal is closed."""


def serve(uri: str, experiment: str, host: str, port: int) -> int:
    """Serve MLflow's pages until Ctrl-C, print the addresses of the views, and return MLflow's exit status.

    If the store is a server, only the addresses of its own pages are printed.

    Args:
        uri: the store's.
        experiment: id of the experiment.
        host: on which the pages are served.
        port: on which the pages are served.

    Raises:
        EquidpError: another process serves at this port.
    """
    remote = uri.startswith(("http://", "https://"))
    if not remote:
        _refuse_taken(host, port)
    uri = re.sub(r"://[^/]*@", "://", uri) if remote else uri  # without the login: a terminal keeps what is printed
    pages = f"{uri if remote else f'http://{host}:{port}'}/#/experiments/{experiment}/runs?viewStateShareKey="
    charts = f"{pages}{MEANS}&compareRunsMode=CHART"
    print(f"All runs: {pages}{RUNS}\nOf sweeps, means over seeds: {pages}{MEANS}\n as charts: {charts}", flush=True)
    if remote:
        return 0
    variables = {
        "MLFLOW_BACKEND_STORE_URI": uri,  # not as an argument, because every user of the machine could read it
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # it would start eight processes that no training needs
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
    """End the server and all processes that it has started: its workers would outlive it."""
    if not hasattr(os, "killpg"):
        process.terminate()
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
