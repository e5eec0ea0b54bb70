"""What a run must not import: each of these costs every run a third of a second or more."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

from equidp.notebooks import without_ipython

SCRIPT = """
import sys
import torch
from torch import nn
import equidp.settings
from equidp.algorithms import algorithm_settings
from equidp.engine.ledger import Ledger, live_epsilon
from equidp.engine.noise import SeededRandom
from equidp.engine.plan import Plan
from equidp.engine.sampling import Population
from equidp.engine.trainer import OPTIMIZERS, Trainer
from equidp.records import Records, Schema

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
unwanted = ("IPython", "opacus", "sympy", "torch._dynamo", "torch.distributed.tensor")
print(*(name for name in unwanted if name in sys.modules))
"""


def test_training_imports_neither_opacus_nor_ipython_nor_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


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
