"""Whole runs told twice, as in `test_replayed`, with a model that draws: dropout is within the guarantee.

A mask is drawn for each record alone, and its law is the same whoever else is in the batch. So the two runs may be
coupled in any way that keeps it; here every record has its own masks, whatever its position. Given all masks, a record
moves what is released by no more than was charged, and the mixture over masks by no more than that. Coupled by position
in the batch, as one generator draws them, one record more would shift everybody's: that is another coupling of the same
two laws, and says nothing about how far apart these are.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from typing import Any, ClassVar

import pytest
import torch
from tests.algorithms.test_replayed import FEATURES, OTHERS, ROUNDING, SETTINGS, UNITS, Release, Telling, excess, looks
from tests.algorithms.test_replayed import unit as with_unit
from torch import Tensor, nn

from equidp.accounting.events import Event
from equidp.accounting.ledger import Ledger
from equidp.data.records import Records
from equidp.gradients.engine import GradientEngine
from equidp.mechanism import looking
from equidp.mechanism.sampling import Population
from equidp.mechanism.trainer import Trainer

HIDDEN = 8


class Dropping(nn.Module):
    """Two layers and dropout between them, whose masks follow from a record's number (its last feature), the step, and
    how often the record was seen in it: these two stand for the state of a generator, which all models share."""

    step: ClassVar[int] = 0
    seen: ClassVar[Counter[tuple[int, float]]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, features: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(features[:, :FEATURES]))
        masks = [self._mask(float(number)) for number in features[:, FEATURES].detach()]
        return self.last(hidden * torch.stack(masks) * 2) if masks else self.last(hidden)

    def _mask(self, number: float) -> Tensor:
        key = (Dropping.step, number)
        Dropping.seen[key] += 1
        drawn = hashlib.sha256(repr((key, Dropping.seen[key])).encode()).digest()[:HIDDEN]
        return torch.tensor([byte % 2 for byte in drawn], dtype=torch.float32)


def numbered(records: Records, first: int) -> Records:
    """With a number of each record as its last feature."""
    numbers = first + torch.arange(float(len(records)))
    names = (*records.schema.feature_names, "number")
    schema = replace(records.schema, shape=(FEATURES + 1,), feature_names=names)
    return replace(records, features=torch.cat([records.features, numbers[:, None]], dim=1), schema=schema)


def tell(lab: Any, name: str, options: dict[str, Any], records: Records, first: Telling | None = None) -> Trainer:
    """A whole run in chunks of four; the second of two where the first is given."""
    torch.manual_seed(3)
    Dropping.step, Dropping.seen = 0, Counter()
    random = Telling()
    random.forced = [entry.noised for entry in first.told if isinstance(entry, Release)] if first else None
    trainer: Trainer = lab.trainer(
        name,
        options,
        records=records,
        population=Population(records, records.groups["class"], by_unit=True),
        plan=lab.plan(records=OTHERS, epochs=2, noise_multiplier=0.8),
        random=random,
        ledger=Ledger(journal=random.told.append),
        learning_rate=0.5,
        model=Dropping(),
        physical_batch_size=4,
        public=numbered(lab.records(16, seed=9, features=FEATURES), 500),
    )
    step = trainer.step

    def counted(segment: Any) -> None:
        Dropping.step = trainer.steps_done
        step(segment)

    trainer.step = counted  # type: ignore[method-assign]
    trainer.history = trainer.train(progress=False)  # type: ignore[attr-defined]
    return trainer


@pytest.fixture
def coupled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loop keeps of a generator, where masks must be drawn again, and that no run draws masks to try them."""

    def restore(state: dict[str, Any], device: torch.device) -> None:
        Dropping.seen = state["seen"].copy()

    monkeypatch.setattr(looking, "global_random", lambda device: {"seen": Dropping.seen.copy()})
    monkeypatch.setattr(looking, "set_global_random", restore)
    monkeypatch.setattr(GradientEngine, "try_out", lambda *given: None)


def between(one: list[Event | Release], other: list[Event | Release]) -> list[float]:
    """As `excess`, where neither run is without a unit: a replacement may move twice as far."""
    return [moved / 4 for moved in excess(one, other)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpsgd", {}),
        ("dpsgd_minimax", {}),
        *((name, SETTINGS[name][0]) for name in ("asc", "dpis", "dpsgd_f_slack", "sa_dpsgd")),
        ("dpsgd_quantile", SETTINGS["dpsgd_quantile"][2]),
    ],
)
@pytest.mark.usefixtures("coupled")
def test_no_unit_moves_a_release_of_a_model_with_dropout_by_more_than_was_charged(
    lab: Any, name: str, options: dict[str, Any]
) -> None:
    """Added, or in the place of another one."""
    base = numbered(replace(lab.records(OTHERS, features=FEATURES), unit=torch.arange(OTHERS)), 0)
    without = tell(lab, name, options, base)
    looked, within = looks(without), list[Trainer]()
    for number, (features, label) in enumerate(product((UNITS["ordinary"], UNITS["long"]), (0, 2))):
        numbers = torch.full((len(features), 1), 1000.0 + number)
        records = with_unit(torch.cat([features, numbers], dim=1), label, base)
        within.append(tell(lab, name, options, records, without.random))
        assert max(excess(without.random.told, within[-1].random.told)) <= 1 + ROUNDING
        assert looks(within[-1]) == looked
    pairs = [between(one.random.told, other.random.told) for one, other in combinations(within, 2)]
    assert 0.25 < max(map(max, pairs)) <= 1 + ROUNDING
