"""Exact figures of training, outside the guarantee: off unless asked for, and named `nonprivate/…`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "gradient_norm": (0.0, *(2.0**k for k in range(-8, 8))),
    "cosine": tuple(k / 50 for k in range(-50, 50)),
}
"""Lower edges of the bins in which diagnostics count records' norms and steps' cosines; the last bin is open."""


MOST_NUMBERS = 2**25
"""The most groups × parameters for which the gradients of each group are added up separately."""


def binned(values: Tensor, edges: tuple[float, ...]) -> Tensor:
    """Counts of `values` per bin, `[len(edges)]`; values below the first edge count in the first bin."""
    inner = torch.tensor(edges[1:], device=values.device)
    return torch.bincount(torch.bucketize(values, inner, right=True), minlength=len(edges)).float()


@dataclass
class Diagnostics:
    """Exact figures of one epoch's batches. *Outside the guarantee*: off unless asked for, named `nonprivate/…`."""

    steps: int = 0
    totals: dict[str, Tensor] = field(default_factory=dict)
    clean_sum: Tensor | None = None

    def observe(self, values: Mapping[str, Tensor]) -> None:
        """Add these values to the totals of their names."""
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, torch.zeros_like(value)) + value

    def chunk(self, norms: Tensor, weights: Tensor, groups: Tensor, size: int, clean: Tensor) -> None:
        """Add up a part of a batch.

        Args:
            norms, weights, groups: `[u]` each.
            size: number of groups.
            clean: `[d]` sum of the unweighted gradients, without those that are not finite.
        """
        finite = norms.isfinite()
        ones, zeros = finite.float(), torch.zeros(size, device=norms.device)
        self.clean_sum = clean if self.clean_sum is None else self.clean_sum + clean
        self.observe(
            {
                "units": ones.sum(),
                "nonfinite": (~finite).float().sum(),
                "weight": weights.sum(),
                "group_units": zeros.index_add(0, groups, ones),
                "group_norm": zeros.index_add(0, groups, torch.where(finite, norms, 0.0)),
                "gradient_norm_histogram": binned(norms[finite], HISTOGRAMS["gradient_norm"]),
            }
        )

    def group_chunk(
        self, norms: Tensor, groups: Tensor, size: int, bounds: Tensor | None, sums: Sequence[Tensor]
    ) -> None:
        """Add up the terms of DPSGD-F's Eq. 1 for each group: what its bound cuts off, and its gradient.

        Args:
            norms, groups, size: as in `chunk`.
            bounds: `[u]` or `()`, C of each record; None where the algorithm has none.
            sums: `[d]` for each group, the sum of its finite gradients; empty for more than `MOST_NUMBERS`.
        """
        zeros = torch.zeros(size, device=norms.device)
        if bounds is not None:
            excess = torch.where(norms.isfinite(), norms - bounds, 0.0).clamp(min=0)
            above = (excess > 0).float()
            self.observe({"group_above": zeros.index_add(0, groups, above)})
            self.observe({"group_excess": zeros.index_add(0, groups, excess)})
        if sums:
            self.observe({"group_gradient": torch.stack(list(sums))})

    def step(self, used: Tensor, noise: Tensor) -> None:
        """Compare what the optimiser is given, `[d]`, with the plain sum of the batch's gradients.

        `noise`, `()`: σ·Δ·√d, the expected length of the step's noise to within 1/(4d) of it.
        """
        self.observe({"noise": noise})
        if self.clean_sum is None:
            return
        clean, self.clean_sum = self.clean_sum, None
        self.steps += 1
        cosine = torch.nn.functional.cosine_similarity(used, clean, dim=0)
        self.observe({"cosine": cosine, "cosine_histogram": binned(cosine.reshape(1), HISTOGRAMS["cosine"])})

    def row(self) -> dict[str, float]:
        """The epoch's columns."""
        totals, steps = self.totals, max(self.steps, 1)
        if not totals:
            return {}
        units = totals["units"].clamp(min=1)
        mean_norm = totals["group_norm"] / totals["group_units"].clamp(min=1)
        of_group = {"gradient_norm": mean_norm, **self._group_terms()}
        shares = {name: float(value / units) for name, value in totals.items() if name.startswith("nonprivate/")}
        return {
            "nonprivate/batch_size": float(totals["units"]) / steps,
            "nonprivate/nonfinite": float(totals["nonfinite"]),
            "nonprivate/mean_weight": float(totals["weight"] / units),
            "nonprivate/cosine": float(totals["cosine"]) / steps,
            **{f"nonprivate/{name}/{k}": float(v) for name, values in of_group.items() for k, v in enumerate(values)},
            **shares,
            **{
                f"nonprivate/{name}_histogram/{edge:.3f}": float(count)
                for name, edges in HISTOGRAMS.items()
                for edge, count in zip(edges, totals[f"{name}_histogram"], strict=True)
            },
        }

    def _group_terms(self) -> dict[str, Tensor]:
        """`[G]` each, over the epoch: Eq. 1's two terms with n, C and the noise, and the length of the mean gradient.

        All groups share the noise. A group's estimate, the mean over its b_k records in a batch, has 1/b_k of it.
        """
        totals, units = self.totals, self.totals["group_units"].clamp(min=1)
        terms = {}
        if "group_above" in totals:
            terms = {"above": totals["group_above"] / units, "excess": totals["group_excess"] / units}
            terms["noise"] = totals["noise"] / units
        if "group_gradient" in totals:
            terms["mean_gradient"] = totals["group_gradient"].norm(dim=1) / units
        return terms
