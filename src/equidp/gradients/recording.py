"""Recording: on a GPU the passes of a step are recorded once, and then replayed as CUDA graphs.

A small model's step has a few hundred operations, and to launch each of them takes longer than to do it. Only norms and
weighted sums are recorded; they follow from batch, weights and parameters. Sampling, side releases, noise and update
are not recorded, so no recorded operation draws a random number.

A recording has a fixed number of rows, as all private passes on a GPU have (`shape.py`). A batch with another number of
rows is computed without it. Every recording is checked first: until the parameters have changed a few times, its
batches are computed both ways and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol, Unpack

import torch
from torch import Tensor

from equidp.errors import EquidpError, first_line
from equidp.gradients.agreement import TOLERANCE
from equidp.gradients.bookkeeping import Asked, BookKeeping
from equidp.system.threads import GLOBAL_RANDOM

TRIALS = 3
"""Number of states of the parameters at which a recording's batches are computed both ways.

States are counted, not batches: batches at the same parameters do not show whether the recording reads new ones.
"""

WARM_UP = 3
"""Number of passes before the recorded one, in which libraries choose their kernels and reserve their memory."""

REMEDY = "leave training.cuda_graphs out."


class Recorder(Protocol):
    """Records the passes of one recording, in the order in which they will be replayed.

    Each pass is computed before the next one is recorded, because the next one may read its results.
    """

    def record(self, work: Callable[[], Tensor], generators: Sequence[torch.Generator] = ()) -> Callable[[], Tensor]:
        """Return a function that does `work` again with every call, and overwrites its earlier result.

        Args:
            work: reads tensors, whose content at the time of the call counts.
            generators: random generators that `work` draws from, besides torch's own; every call draws new numbers.
        """


@lru_cache(maxsize=64)
def _aside(device: int) -> torch.cuda.Stream:
    """Return a device's stream for passes before the recorded one.

    There is one for each device, because cuBLAS keeps a workspace of 32 MiB for each stream as long as the process
    lives.
    """
    return torch.cuda.Stream(device)


class CudaGraphs:
    """Recorder on a CUDA device. Its graphs share their memory.

    Args:
        device: the model's device; None: torch's current one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor], generators: Sequence[torch.Generator] = ()) -> Callable[[], Tensor]:
        """Record a graph of `work`."""
        # only one thread of the process records at a time, and no thread may seed the generators meanwhile, because
        # a capture registers them
        with GLOBAL_RANDOM, torch.cuda.device(self._device):
            aside = _aside(torch.cuda.current_device())
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP):
                    work()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            # thread_local: training in another thread may go on allocating memory
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
            # a capture computes nothing: without a replay the next pass's warm-up would read results that are not
            # written yet, such as ids that point beyond a table
            graph.replay()

        def again() -> Tensor:
            graph.replay()
            return result

        return again


class Recording:
    """Norms and weighted sums of batches with as many rows as the given one, from recorded passes."""

    def __init__(self, passes: BookKeeping, recorder: Recorder, features: Tensor, labels: Tensor) -> None:
        self.rows, self._states = len(features), 0
        self._seen: list[Tensor] = []  # copies of the parameters at the last state, while on trial
        self._features, self._labels = torch.zeros_like(features), torch.zeros_like(labels)
        self._weights = torch.zeros(self.rows, device=features.device)
        self._passes = passes.twin()  # the recorded sum reads the tensors that these passes keep
        self._norms = recorder.record(lambda: self._passes.norms(self._features, self._labels))
        self._sum = recorder.record(lambda: self._passes.weighted_sum(self._weights))

    @property
    def on_trial(self) -> bool:
        """Whether its results are still compared with passes that are not recorded."""
        return self._states <= TRIALS

    @property
    def outputs(self) -> Tensor | None:
        """The model's outputs of the last batch, if they are kept."""
        return self._passes.outputs_kept

    def norms(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the norms `[b]`, as the passes do."""
        if self.on_trial:
            self._count_states()
        self._features.copy_(features)
        self._labels.copy_(labels)
        return self._norms().clone()

    def _count_states(self) -> None:
        now = self._passes.parameters
        if not self._seen or not all(torch.equal(p, seen) for p, seen in zip(now, self._seen, strict=True)):
            self._states += 1
            self._seen = [p.detach().clone() for p in now] if self.on_trial else []

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the weighted sum `[d]` of the last batch, as the passes do."""
        self._weights.copy_(weights)
        return self._sum().clone()


class Recordings:
    """Passes that replay a recording if a batch fits it, and compute other batches without it."""

    def __init__(self, passes: BookKeeping, new_recorder: Callable[[], Recorder]) -> None:
        self._passes, self._new_recorder = passes, new_recorder
        self._made: Recording | None = None
        self._last = torch.zeros(0)
        self._replayed = False  # whether the last norms were

    def norms(self, features: Tensor, labels: Tensor, **asked: Unpack[Asked]) -> Tensor:
        """Return the norms, as the passes do.

        Batches with units, other iterates, several views or another number of rows are computed without the recording.

        Raises:
            EquidpError: the passes cannot be recorded, or give other results when replayed.
        """
        self._passes.clear()
        plain = asked.get("owners") is None and asked.get("iterates") is None and asked.get("views", 1) == 1
        self._replayed = plain and len(features) > 0
        recording = self._recording(features, labels) if self._replayed else None
        if recording is None or recording.rows != len(features):
            self._replayed = False
            return self._passes.norms(features, labels, **asked)
        found = recording.norms(features, labels)
        if recording.on_trial:
            expected = self._passes.norms(features, labels)  # also keeps what the compared sum needs
            allowed = self._tolerance()
            _compare(torch.isclose(found, expected, rtol=allowed, atol=1e-6 * allowed, equal_nan=True).all())
        self._passes.outputs_kept = recording.outputs
        self._last = found
        return found

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the weighted sum, as the passes do."""
        if not self._replayed or self._made is None:
            return self._passes.weighted_sum(weights)
        found = self._made.weighted_sum(weights)
        if self._made.on_trial:
            expected = self._passes.weighted_sum(weights)
            # the summands may cancel, so their sizes count, too
            size = expected.norm() + 0.1 * torch.where(weights > 0, weights * self._last, 0.0).sum()
            _compare((found - expected).norm() <= self._tolerance() * size)
        return found

    def _tolerance(self) -> float:
        return TOLERANCE[self._passes.precision]

    def _recording(self, features: Tensor, labels: Tensor) -> Recording:
        if self._made is None:
            try:
                self._made = Recording(self._passes, self._new_recorder(), features, labels)
            except RuntimeError as error:
                raise EquidpError(
                    f"The model's passes cannot be recorded as CUDA graphs ({first_line(error)}): {REMEDY}"
                ) from error
        return self._made


def _compare(equal: Tensor) -> None:
    if not equal:
        raise EquidpError(
            "The model's passes, replayed as CUDA graphs, give other gradients than computed afresh (so it is with a "
            f"model that draws random numbers, such as dropout): {REMEDY}"
        )
