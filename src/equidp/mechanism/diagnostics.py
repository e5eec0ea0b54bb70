"""Exact figures of training, outside the guarantee: off unless asked for, and named `nonprivate/…`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "gradient_norm": (0.0, *(2.0**k for k in range(-8, 8))),
    "cosine": tuple(k / 10 for k in range(-10, 10)),
}
"""Lower edges of the bins in which diagnostics count records' norms and steps' cosines; the last bin is open."""


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
        """Add sums."""
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, torch.zeros_like(value)) + value

    def chunk(self, norms: Tensor, weights: Tensor, groups: Tensor, size: int, clean: Tensor) -> None:
        """Add up a part of a batch.

        Args:
            norms, weights, groups: `[u]` each.
            size: number of groups.
            clean: `[d]` sum of the gradients as they are, those that are not finite left out.
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

    def step(self, used: Tensor) -> None:
        """Compare what the optimiser is given, `[d]`, with the plain sum of the batch's gradients."""
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
        shares = {name: float(value / units) for name, value in totals.items() if name.startswith("nonprivate/")}
        return {
            "nonprivate/batch_size": float(totals["units"]) / steps,
            "nonprivate/nonfinite": float(totals["nonfinite"]),
            "nonprivate/mean_weight": float(totals["weight"] / units),
            "nonprivate/cosine": float(totals["cosine"]) / steps,
            **{f"nonprivate/gradient_norm/{k}": float(v) for k, v in enumerate(mean_norm)},
            **shares,
            **{
                f"nonprivate/{name}_histogram/{edge:.3f}": float(count)
                for name, edges in HISTOGRAMS.items()
                for edge, count in zip(edges, totals[f"{name}_histogram"], strict=True)
            },
        }
