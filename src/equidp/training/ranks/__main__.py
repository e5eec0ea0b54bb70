"""Lend this machine to a training that another one was asked for: `python -m equidp.training.ranks --help`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from equidp.errors import EquidpError
from equidp.system.files import replacing
from equidp.training.ranks.job import ARRIVED, FOLDER, JOB, report
from equidp.training.ranks.launch import POLL_SECONDS, Machines, is_address, launch

STOPPED = (
    "Machine {} of {} (counted from 0) was told to stop, and took its ranks along. Go on by the same command with "
    "resume=true added to --params: what was charged stays charged."
)


def main() -> None:
    """Wait for the job, and run this machine's ranks."""
    parser = argparse.ArgumentParser(prog="python -m equidp.training.ranks", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="number of machines")
    parser.add_argument("--node", type=int, required=True, help="which one this is, from 1")
    parser.add_argument("--rendezvous", required=True, help="host:port, the same on all machines")
    parser.add_argument("--folder", type=Path, required=True, help=f"the {FOLDER} of the asking machine")
    given = parser.parse_args()
    # checked first, because a machine that no other will meet would wait for ever
    if not 0 < given.node < given.nodes:
        parser.error(f"--node {given.node} of --nodes {given.nodes}: they are counted from 0, the one that is asked.")
    if not is_address(given.rendezvous):
        parser.error(f"--rendezvous {given.rendezvous}: give host:port, such as 10.0.0.1:29500.")
    try:
        _lend(given.folder, Machines(given.nodes, given.node, given.rendezvous))
    except EquidpError as error:
        report(given.folder, error)  # the asking machine's ranks only know that they have lost others, but not why
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        report(given.folder, EquidpError(STOPPED.format(given.node, given.nodes)))
        sys.exit(128 + signal.SIGINT)


def _lend(folder: Path, machines: Machines) -> None:
    print(f"Waiting for a training in {folder}, until Ctrl-C.", file=sys.stderr, flush=True)
    while not (folder / JOB).exists():
        time.sleep(POLL_SECONDS)
    job = json.loads((folder / JOB).read_text())
    with replacing(folder / ARRIVED.format(machines.node)) as part:
        part.write_text(str(machines.nodes), encoding="utf-8")
    launch(machines.launch(job["training"]["devices"], folder), folder, job)


if __name__ == "__main__":
    main()
