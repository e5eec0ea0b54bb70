"""Exact figures of the training and the public records at the current parameters, which parts may ask the loop for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from equidp.gradients.engine import GradientEngine
from equidp.mechanism.parts import Contributing, SideRelease
from equidp.mechanism.sampling import Batch, Labelled, Population
from equidp.mechanism.states import global_random, set_global_random

LOOK_BATCH = 1024
"""Units looked at at once where only norms or losses are wanted and `physical_batch_size` does not say otherwise."""


class Looking:
    """A loop that looks at its records."""

    model: nn.Module
    engine: GradientEngine
    population: Population
    contributing: Contributing
    public_part: Labelled | None
    physical_batch_size: int | None
    drawn: Iterator[Mapping[str, Tensor]] = iter(())
    """States of torch's generators before the chunks that are still to be looked at again."""

    def first_norms(self, batches: Sequence[Batch], release: SideRelease | None) -> list[Tensor]:
        """Contribution norms `[u]` of each chunk of a batch, which that release counts.

        Where what a record adds to it is bounded by the norm, `norms_again` draws what a model with dropout drew here:
        a record that is counted as short must not be weighed as a long one.
        """
        tied = len(batches) > 1 and release is not None and release.tied
        states, found = [], []
        for batch in batches:
            if tied:
                states.append(global_random(self.population.device))
            found.append(self.contributing.norms(batch))
        self.drawn = iter(states)
        return found

    def norms_again(self, batch: Batch) -> Tensor:
        """Contribution norms of the next chunk, with its gradients at hand."""
        if (state := next(self.drawn, None)) is not None:
            set_global_random(state, self.population.device)
        return self.contributing.norms(batch)

    def norms_of_all(self) -> Tensor:
        """`[n]` contribution norms of every unit of this process at the current parameters; exact, hence private."""
        return torch.cat([self.contributing.norms(self.population.batch(units)) for units in self._everyone()])

    @torch.no_grad()
    def losses(self, units: Tensor) -> Tensor:
        """`[u]` exact loss of each of these training units (the mean over its records); private."""
        parts = [self._unit_losses(self.population.batch(chunk)) for chunk in units.split(self._look_size())]
        return torch.cat(parts) if parts else torch.zeros(0, device=self.population.device)

    @torch.no_grad()
    def public_loss(self, records: int) -> float:
        """Mean loss of the first so many public records."""
        assert self.public_part is not None
        size, total = min(records, len(self.public_part.labels)), 0.0
        for chunk in torch.arange(size, device=self.public_part.labels.device).split(self._look_size()):
            outputs = self.model(self.public_part.features[chunk])
            total += float(self.engine.loss(outputs, self.public_part.labels[chunk]).double().sum())
        return total / size

    def _unit_losses(self, batch: Batch) -> Tensor:
        # a contribution that takes every record alone sees nothing of a model in which they meet; losses would
        self.engine.try_out(batch.features, batch.labels)
        losses = self.engine.loss(self.model(batch.features), batch.labels).float()
        if batch.owners is None:
            return losses
        total = torch.zeros(len(batch), device=losses.device).index_add_(0, batch.owners, losses)
        return total / torch.bincount(batch.owners, minlength=len(batch))

    def _everyone(self) -> tuple[Tensor, ...]:
        return torch.arange(self.population.size, device=self.population.device).split(self._look_size())

    def _look_size(self) -> int:
        return self.physical_batch_size or LOOK_BATCH
