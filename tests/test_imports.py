"""What a run must not import: each of these costs every run half a second or more."""

from __future__ import annotations

import subprocess
import sys

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
print(*(name for name in ("opacus", "sympy", "torch._dynamo", "torch.distributed.tensor") if name in sys.modules))
"""


def test_training_imports_neither_opacus_nor_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
