"""What ends a run between two steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from equidp.mechanism.trainer import Trainer


@pytest.fixture
def power_cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """`with power_cut(after=5):` the run inside dies after that many steps, and must."""

    @contextlib.contextmanager
    def cut(after: int) -> Iterator[None]:
        step = Trainer.step

        def crashing(self: Trainer, segment) -> None:
            step(self, segment)
            if self.steps_done == after:
                raise RuntimeError("power cut")

        with monkeypatch.context() as patched:
            patched.setattr(Trainer, "step", crashing)
            with pytest.raises(RuntimeError, match="power cut"):
                yield

    return cut
