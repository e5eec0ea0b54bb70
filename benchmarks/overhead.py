"""What `kedro run` costs besides training: seconds of one run on digits, those within `Trainer.train`, and the rest.

    python benchmarks/overhead.py                      # dpsgd_f and its baseline in an empty project
    python benchmarks/overhead.py --second             # the same where an earlier run has made MLflow's database
    python benchmarks/overhead.py --pipeline psasc

Wall time is to be read on a machine that does nothing else; processor time, of one thread, elsewhere too. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

STARTED = time.monotonic()
os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait for each other burn processor time


def main() -> None:
    """Run once, timed."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--pipeline", default="dpsgd_f")
    arguments.add_argument("--second", action="store_true", help="after another run in the same project")
    options = arguments.parse_args()
    pipeline = options.pipeline

    from sweep import environment, scratch_project

    with scratch_project() as project:
        os.environ |= environment(project)
        os.chdir(project)
        before = time.monotonic()
        if options.second:
            command = [sys.executable, "-m", "kedro", "run", "--pipeline=sgd", "--params=dataset=digits,seed=1"]
            subprocess.run(command, check=True, capture_output=True)
        waited = time.monotonic() - before
        from kedro.framework.cli import main as kedro

        import equidp.settings  # noqa: F401  as Kedro's command line does
        from equidp.mechanism.trainer import Trainer

        imported = time.process_time()
        spent = {"wall": 0.0, "processor": 0.0}
        Trainer.train = timed(Trainer.train, spent)  # type: ignore[method-assign]
        sys.argv = ["kedro", "run", f"--pipeline={pipeline}", "--params=dataset=digits"]
        try:
            kedro()
        except SystemExit as end:
            if end.code:
                raise
    wall, processor = time.monotonic() - STARTED - waited, time.process_time()
    result = {
        "pipeline": pipeline,
        "wall": wall,
        "wall_outside_training": wall - spent["wall"],
        "processor": processor,
        "processor_outside_training": processor - spent["processor"],
        "processor_of_imports": imported,
    }
    print(json.dumps({name: v if isinstance(v, str) else round(v, 2) for name, v in result.items()}, indent=2))


def timed(method: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    """The method, its seconds added up."""

    def measured(*args: Any, **options: Any) -> Any:
        wall, processor = time.monotonic(), time.process_time()
        try:
            return method(*args, **options)
        finally:
            spent["wall"] += time.monotonic() - wall
            spent["processor"] += time.process_time() - processor

    return measured


if __name__ == "__main__":
    main()
