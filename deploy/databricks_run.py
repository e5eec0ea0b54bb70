"""A task of a Databricks job: `databricks_run.py VOLUME EXPERIMENT run --pipeline=dpsgd_f` runs kedro in a new project.

The project is on the machine's own disk, because a volume has no file locks. Settings in VOLUME/conf lie over those of
the new project, raw files are read from VOLUME/raw, and data/08_reporting is copied to VOLUME/results at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from equidp.new_project import create


def main(volume: Path, experiment: str, arguments: list[str]) -> int:
    """Make the project, run kedro in it, and keep the results; kedro's exit status."""
    with tempfile.TemporaryDirectory(prefix="equidp-", ignore_cleanup_errors=True) as folder:
        study = Path(folder) / "study"
        create(study)
        if (volume / "conf").is_dir():
            shutil.copytree(volume / "conf", study / "conf", dirs_exist_ok=True)
        tracked = study / "conf" / "local" / "mlflow.yml"
        if not tracked.exists():  # the workspace keeps the artifacts
            named = {"name": experiment, "create_experiment_kwargs": {"artifact_location": None}}
            tracked.write_text(yaml.safe_dump({"tracking": {"experiment": named}}))
        environment = dict(os.environ)
        if (volume / "raw").is_dir():
            environment["EQUIDP_RAW_DIR"] = str(volume / "raw")
        status = subprocess.call([sys.executable, "-m", "kedro", *arguments], cwd=study, env=environment)
        results = volume / "results" / time.strftime("%Y-%m-%d-%H%M%S")
        shutil.copytree(study / "data" / "08_reporting", results, copy_function=shutil.copyfile)
        return status


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("Give the volume's folder, the experiment's name and kedro's arguments.")
    if status := main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]):
        sys.exit(status)  # not for 0: Databricks would count SystemExit as a failure
