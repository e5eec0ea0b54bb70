"""In plain PyTorch, too, a budget is not spent on nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError
from equidp.mechanism import sampling
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.sampling import Batch, Examples, Population
from equidp.mechanism.trainer import Trainer

FEATURES, LABELS = torch.ones(6, 3), torch.zeros(6, dtype=torch.int64)


def trainer(model: nn.Module, batch_size: int = 3) -> Trainer:
    return Trainer(
        model=model,
        loss=nn.CrossEntropyLoss(reduction="none"),
        algorithm=algorithm_settings("dpsgd", {}).build(),
        plan=Plan(6, batch_size, 2, 1, 1e-5, 1.0),
        population=Population(Examples(FEATURES, LABELS), torch.zeros(6, dtype=torch.int64)),
        random=SeededRandom(0, "cpu"),
        ledger=Ledger(),
        learning_rate=0.1,
    )


@pytest.mark.parametrize("whose", ["another model's", "one of two", "with one more"])
def test_an_optimiser_of_other_tensors_is_refused_before_anything_is_charged(whose: str) -> None:
    run = trainer(nn.Linear(3, 2))
    own = list(run.engine.parameters)
    others = {"another model's": nn.Linear(3, 2).parameters(), "one of two": own[:1]}
    given = others.get(whose, [*own, torch.zeros(1, requires_grad=True)])
    with pytest.raises(EquidpError, match=r"not those that are trained.* Make it of trainer\.engine\.parameters"):
        run.optimizer = torch.optim.SGD(given, lr=0.1)
    assert not run.ledger.events
    run.optimizer = torch.optim.SGD(own, lr=0.1)
    run.run_steps(1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["features", "labels"])
def test_records_that_add_nothing_are_named_and_end_no_run(name: str, value: float, caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("equidp"), "propagate", True)
    spoilt = torch.ones(6, 3) if name == "features" else torch.ones(6)
    spoilt[4] = value
    given: dict[str, Tensor] = {"features": FEATURES, "labels": LABELS, name: spoilt}
    Population(Examples(**given), LABELS)
    assert caplog.messages[0].startswith(f"The {name} of 1 of 6 records, such as record 4 (from 0), are not finite")


def test_records_are_looked_at_in_parts_of_so_many_numbers(caplog, monkeypatch) -> None:
    """However wide they are: a file of records may be larger than memory."""
    monkeypatch.setattr(logging.getLogger("equidp"), "propagate", True)
    monkeypatch.setattr(sampling, "NUMBERS", 7)
    looked_at, isfinite = list[int](), Tensor.isfinite
    monkeypatch.setattr(Tensor, "isfinite", lambda part: looked_at.append(part.numel()) or isfinite(part))
    Population(Examples(FEATURES.index_fill(0, torch.tensor(4), torch.nan), LABELS), LABELS)
    assert looked_at == [6, 6, 6]
    assert caplog.messages[0].startswith("The features of 1 of 6 records, such as record 4 (from 0), are not finite")


def test_nobody_has_no_number_that_is_not_finite(caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("equidp"), "propagate", True)
    Population(Examples(FEATURES[:0], LABELS[:0]), LABELS[:0])
    assert caplog.messages == []


def test_who_is_silent_in_a_step_does_not_follow_from_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of all steps in one tensor, in which another record's is not finite each time."""
    run = trainer(nn.Linear(3, 2), batch_size=6)
    again, weights, buffer, seen = run.norms_again, run.weights, torch.empty(6), list[Tensor]()

    def norms(batch: Batch) -> Tensor:
        buffer.copy_(again(batch))[len(seen)] = torch.nan
        return buffer

    def kept(*given: Any, **how: Any) -> Tensor:
        seen.append(weights(*given, **how))
        return seen[-1]

    monkeypatch.setattr(run, "norms_again", norms)
    monkeypatch.setattr(run, "weights", kept)
    run.run_steps(2)
    assert [(step == 0).nonzero().flatten().tolist() for step in seen] == [[0], [1]]
