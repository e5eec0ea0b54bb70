"""What a run must not import: each of these costs every run a third of a second or more."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from equidp.system.notebooks import without_ipython

SCRIPT = """
import sys
import torch
from torch import nn
import equidp.settings
from equidp.algorithms import algorithm_settings
from equidp.accounting.epsilon import live_epsilon
from equidp.accounting.ledger import Ledger
from equidp.mechanism.noise import SeededRandom
from equidp.accounting.plan import Plan
from equidp.mechanism.sampling import Population
from equidp.mechanism.optimizers import OPTIMIZERS
from equidp.mechanism.trainer import Trainer
from equidp.data.records import Records, Schema

labels = torch.arange(40) % 2
schema = Schema("toy", "tabular", (3,), ("a", "b"), {"class": ("a", "b")})
records = Records(torch.rand(40, 3), labels, {"class": labels}, schema)
plan = Plan(records=40, batch_size=10, epochs=1, groups=2, delta=1e-3, noise_multiplier=1.0)
for optimizer in OPTIMIZERS:
    trainer = Trainer(
        model=nn.Linear(3, 2), loss=nn.CrossEntropyLoss(reduction="none"),
        algorithm=algorithm_settings("dpsgd_f").build(), plan=plan, population=Population(records, labels),
        random=SeededRandom(0, "cpu"), ledger=Ledger(), learning_rate=0.1, optimizer=optimizer,
    )
    trainer.train(progress=False)
    trainer.load_state_dict(trainer.state_dict())
live_epsilon(trainer.ledger.events, 1e-3)
unwanted = ("IPython", "llvmlite", "opacus", "sympy", "torch._dynamo", "torch.distributed.tensor")
print(*(name for name in unwanted if name in sys.modules))
"""


@pytest.mark.slow
def test_training_imports_neither_opacus_nor_ipython_nor_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


A_WORKER = """
import sys
import equidp.sweep.cell
print(*(name for name in ("sklearn", "torch") if name in sys.modules))
"""


@pytest.mark.slow
def test_a_sweeps_worker_which_hands_cells_on_imports_nothing_that_trains() -> None:
    done = subprocess.run([sys.executable, "-c", A_WORKER], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


CALLS_HOME = """
from pathlib import Path
import equidp.settings
from kedro_telemetry.plugin import _check_for_telemetry_consent
from mlflow.telemetry import get_telemetry_client

print(get_telemetry_client() is None, _check_for_telemetry_consent(Path(".")) is False)
"""


def test_neither_mlflow_nor_kedro_reports_what_is_run(tmp_path: Path) -> None:
    """Nor where the project is installed, and no `.telemetry` lies in the folder."""
    # with pytest's own variables, or a CI's, MLflow would be silent of itself
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "SYSTEMROOT") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", CALLS_HOME], capture_output=True, text=True, env=kept, cwd=tmp_path, check=True
    )
    assert done.stdout.split()[-2:] == ["True", "True"]  # Kedro logs a line before


def test_ipython_seems_absent_where_it_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    with pytest.raises(ModuleNotFoundError), without_ipython():
        import_module("IPython")
    assert "IPython" not in sys.modules


def test_a_notebook_keeps_its_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", shell)
    with without_ipython():
        assert import_module("IPython") is shell
    assert sys.modules["IPython"] is shell
