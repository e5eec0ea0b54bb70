"""Lend this machine to a training that another one was asked for: `python -m equidp.training.ranks --help`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from equidp.errors import EquidpError
from equidp.system.files import replacing
from equidp.training.ranks.job import ARRIVED, JOB
from equidp.training.ranks.launch import FOLDER, POLL_SECONDS, Machines, is_address, launch


def main() -> None:
    """Wait for the job, and run this machine's ranks."""
    parser = argparse.ArgumentParser(prog="python -m equidp.training.ranks", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True, help="number of machines")
    parser.add_argument("--node", type=int, required=True, help="which one this is, from 1")
    parser.add_argument("--rendezvous", required=True, help="host:port, the same on all machines")
    parser.add_argument("--folder", type=Path, required=True, help=f"the {FOLDER} of the asking machine")
    given = parser.parse_args()
    # a machine that nobody will meet would wait for ever
    if not 0 < given.node < given.nodes:
        parser.error(f"--node {given.node} of --nodes {given.nodes}: they are counted from 0, the one that is asked.")
    if not is_address(given.rendezvous):
        parser.error(f"--rendezvous {given.rendezvous}: give host:port, such as 10.0.0.1:29500.")
    while not (given.folder / JOB).exists():
        time.sleep(POLL_SECONDS)
    job = json.loads((given.folder / JOB).read_text())
    try:
        with replacing(given.folder / ARRIVED.format(given.node)) as part:
            part.write_text(str(given.nodes), encoding="utf-8")
        machines = Machines(given.nodes, given.node, given.rendezvous)
        launch(machines.launch(job["training"]["devices"], given.folder), given.folder, job)
    except EquidpError as error:
        error.show()
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
