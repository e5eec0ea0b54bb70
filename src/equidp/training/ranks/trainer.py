"""The training loop on one of several ranks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from equidp.accounting.events import Event
from equidp.accounting.ledger import Ledger
from equidp.errors import EquidpError
from equidp.mechanism.parts import StepFacts
from equidp.mechanism.trainer import EpochCallback, Trainer
from equidp.training.ranks.peers import Peers

GO, SAVE, STOP = 0, 1, 2
"""Words that rank 0 sends to the others between steps: go on, send your state, stop."""

OF_ONE_RANK = ("random", "global_random", "sampling", "contributing", "diagnostics")
"""Parts of a trainer's state that differ from rank to rank."""


class FollowedError(Exception):
    """Rank 0 has stopped, and so does this rank."""


class ParallelTrainer(Trainer):
    """The training loop on one of several ranks.

    Between steps rank 0 may do what only one process should do (save, evaluate, notice Ctrl-C). The others wait for its
    word, so that all of them leave the loop after the same step.
    """

    alone = False

    def __init__(self, *, peers: Peers, **arguments: Any) -> None:
        self.peers, self._followed = peers, False
        self._parts: list[Any] | None = None  # of all ranks, once training has ended and they are gone
        super().__init__(**arguments)

    @classmethod
    def joined(cls, peers: Peers, saved: Mapping[str, Any] | None, *, ledger: Ledger, **arguments: Any) -> Trainer:
        """Make the loop of this rank, in the state of rank 0's checkpoint if there is one, and with rank 0's weights.

        All ranks call this at once. The others' ledgers start with the steps done in rank 0's, because parts may look
        at the ledger.
        """
        done = peers.object_from_first([event.to_dict() for event in ledger.done])
        own = ledger if peers.first else Ledger(Event.from_dict(entry) for entry in done)
        trainer = cls(peers=peers, ledger=own, **arguments)
        saved = peers.object_from_first(saved)
        if saved is not None:
            trainer.load_state_dict(saved)
        trainer.engine.load_(peers.from_first(trainer.engine.flatten()))
        return trainer

    def train(
        self, on_epoch: EpochCallback | None = None, *, on_step: Callable[[], None] | None = None, progress: bool = True
    ) -> list[dict[str, float]]:
        """As on one process; only rank 0 calls the callbacks and shows progress."""

        def after_epoch(row: dict[str, float], model: nn.Module) -> Mapping[str, float]:
            self._refuse_different_weights()
            return self._between_steps(lambda: on_epoch(row, model) if on_epoch else {}) or {}

        def after_step() -> None:
            self._between_steps(lambda: on_step() if on_step else None)

        rows = super().train(after_epoch, on_step=after_step, progress=progress and self.peers.first)
        self._parts = self.peers.gather(self._own_parts(super().state_dict()))
        return rows

    def _between_steps(self, callback: Callable[[], Any]) -> Any:
        if not self.peers.first:
            return self._follow()
        self._followed = True
        try:
            result = callback()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the others may be gone already
                self._say(STOP)
            raise
        finally:
            self._followed = False
        self._say(GO)
        return result

    def _follow(self) -> None:
        while (word := int(self.peers.number_from_first(GO))) == SAVE:
            self.state_dict()
        if word == STOP:
            raise FollowedError

    def _say(self, word: int) -> None:
        self.peers.number_from_first(word)

    def expected_batch(self) -> float:
        """This rank's share."""
        return super().expected_batch() / self.peers.size

    @property
    def finished(self) -> bool:
        """As on one process; where the end depends on outputs, rank 0's answer."""
        mine = super().finished
        return mine if self.algorithm.fixed else bool(self.peers.number_from_first(float(mine)))

    def reduce(self, total: Tensor) -> Tensor:
        """The sum over all ranks. A private one exists on rank 0 alone, until `perturb` has noised it."""
        return self.peers.sum_to_first(total) if self.algorithm.private else self.peers.sum_to_all(total)

    def public_loss(self, records: int) -> float:
        """Rank 0's figure."""
        return self.peers.number_from_first(super().public_loss(records) if self.peers.first else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """On rank 0 the state of the whole run, with the other ranks' own parts under `ranks`."""
        if self._followed:
            self._say(SAVE)
        state = super().state_dict()
        parts = self.peers.gather(self._own_parts(state)) if self._parts is None else self._parts
        return state | {"ranks": parts[1:]}

    def _own_parts(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        return None if self.peers.first else {name: state[name] for name in OF_ONE_RANK}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state, with this rank's own parts of it."""
        own = {} if self.peers.first else state["ranks"][self.peers.rank - 1]
        super().load_state_dict({name: value for name, value in {**state, **own}.items() if name != "ranks"})

    def _observe_step(self, used: Tensor, facts: StepFacts) -> None:
        if self.diagnostics is not None and self.diagnostics.clean_sum is not None:
            self.diagnostics.clean_sum = self.peers.sum_to_all(self.diagnostics.clean_sum)
        super()._observe_step(used, facts)

    def _diagnostic_row(self) -> dict[str, float]:
        assert self.diagnostics is not None
        for name, value in sorted(self.diagnostics.totals.items()):
            total = self.peers.sum_to_all(value.clone())
            # every rank has seen the cosine of the whole batch, and only its own part of everything else
            self.diagnostics.totals[name] = total / self.peers.size if name.startswith(("cosine", "noise")) else total
        return super()._diagnostic_row()

    def _refuse_different_weights(self) -> None:
        """Refuse ranks whose weights differ, by a mistake in a part: they would train on, without a meaning."""
        weights = self.engine.flatten().cpu().numpy().tobytes()
        seen = self.peers.gather(hashlib.sha256(weights).hexdigest())
        if len(set(seen)) > 1:
            raise EquidpError(
                f"The weights of {self.peers.size} ranks differ after step {self.steps_done}. An update or "
                "acceptance of your own must not draw at random, as each rank draws other numbers. Else this is a bug: "
                "please report it with the settings, and train with training.devices=1 meanwhile."
            )
