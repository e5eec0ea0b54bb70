"""A limit on the total ε of a data set that holds however earlier releases decide on its runs.

The total of a ledger is a guarantee for runs that were fixed before the first. Mostly earlier releases decide on later
runs. Then it is random which runs there are, and the least ε over all orders, or that of privacy loss
distributions, bounds nothing. A bound on the divergence of one order α still holds if α and the bound were fixed before
the first run (Feldman and Zrnic 2021, who call it a filter). Shown directly:

Let p_i and q_i be the densities of the i-th release given all earlier ones, on two neighbouring tables, and R_i what it
is charged at order α, which may depend on earlier releases: E_q[(p_i/q_i)^α | earlier ones] ≤ exp((α−1)·R_i). With
X_n = Π_{i≤n} (p_i/q_i)^α·exp(−(α−1)·R_i) this is E_q[X_n | earlier ones] ≤ X_{n−1}, so E_q[X_n] ≤ 1. If no release is
begun with which Σ R_i > B, then Π (p_i/q_i)^α ≤ X_n·exp((α−1)·B). So the divergence of all releases together, of order
α, is at most B, in both directions because R_i bounds both. The ledger adds, for every split, the largest sum over its
parts, which is no less than what it has charged the part with the person.

So the guarantee is the limit, at any time: what was spent when one looks is none, because when one looks may follow
from results, too. The order must not follow from results either. The first run's plan decides on it, and it is written
down before that run begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from equidp.accounting.budget import total_for
from equidp.accounting.epsilon import epsilon_of


@dataclass(frozen=True)
class Limit:
    """A limit that was fixed before a data set's first secure run, and that all its runs keep.

    Attributes:
        order: α, at which alone divergences are added.
        epsilon: the largest total ε, converted from that order.
        delta: δ.
        run: name of the run that fixed it. Two data sets that turn out to be one were held below two limits; even equal
            ones bound nothing together.
    """

    order: float
    epsilon: float
    delta: float
    run: str = ""

    def __str__(self) -> str:
        return f"ε = {self.epsilon:g} at δ = {self.delta:g}"

    @classmethod
    def fixed(cls, epsilon: float, delta: float, first: Mapping[float, float], run: str = "") -> Limit:
        """Return a limit at the order at which most runs like the first have room.

        Args:
            epsilon: the largest total ε.
            delta: δ.
            first: what the first run is charged, by order.
            run: its name.
        """
        orders = [order for order in first if order > 1]
        order = max(orders, key=lambda order: total_for(epsilon, order, delta) / max(first[order], 1e-9))
        return cls(order, epsilon, delta, run)

    def spent(self, divergences: Mapping[float, float], delta: float) -> float:
        """Return ε at δ of the divergence of this order.

        Args:
            divergences: by order. A divergence grows with its order, so a larger one's stands for an order that a later
                version of the accountant has not.
            delta: δ.
        """
        known = [divergence for order, divergence in divergences.items() if order >= self.order]
        return max(0.0, epsilon_of(min(known, default=float("inf")), self.order, delta))
