"""The ranks that train together: what they send each other, what each of them draws."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equidp.data.records import Records
from equidp.errors import EquidpError
from equidp.mechanism.noise import RandomSource, Stream, derived_seed
from equidp.mechanism.states import moved
from equidp.training.ranks.job import STORE

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others before it gives up."""


LOOPBACK = ("lo", "lo0")
"""Names of the loopback interface, which stays on the machine, on Linux and on macOS."""


def at_home() -> bool:
    """Whether all ranks are on this machine."""
    return os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]


def stay_at_home() -> None:
    """If all ranks are on this machine, let gloo listen to this machine alone; what the user has set is kept.

    Gloo would take the address that the machine's name stands for, which others can often reach. Exact sums go over it,
    and gloo asks nobody for a password.
    """
    if at_home():
        here = {name for _, name in socket.if_nameindex()}
        for name in LOOPBACK:
            if name in here:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


class Peers:
    """The ranks that train together, as one of them sees them.

    Args:
        device: where this rank's tensors are; NCCL connects GPUs, gloo everything else.
        folder: the job's, which is private: ranks of one machine find each other there, without an open port.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        stay_at_home()
        meeting: dict[str, Any] = {}
        if at_home():
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            meeting = {"store": dist.FileStore(str(folder / STORE), size), "rank": rank, "world_size": size}
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT, **meeting)
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        # numbers and objects are sent by the CPU, whatever sends the sums
        self._control = dist.new_group(backend="gloo", timeout=TIMEOUT)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which adds noise, keeps the ledger and writes the results."""
        return self.rank == 0

    def sum_to_first(self, total: Tensor) -> Tensor:
        """The sum over all ranks, on rank 0; the others get values without a meaning."""
        dist.reduce(total, dst=0)
        return total

    def sum_to_all(self, total: Tensor) -> Tensor:
        """The sum over all ranks, on every rank."""
        dist.all_reduce(total)
        return total

    def from_first(self, value: Tensor) -> Tensor:
        """Rank 0's value, on every rank; the others give a tensor of the same shape and type."""
        value = value.contiguous()
        dist.broadcast(value, src=0)
        return value

    def number_from_first(self, value: float) -> float:
        """Rank 0's number, on every rank."""
        carrier = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(carrier, src=0, group=self._control)
        return float(carrier)

    def object_from_first(self, value: Any) -> Any:
        """Rank 0's object, on every rank; for small ones that are sent once."""
        carrier = [value]
        dist.broadcast_object_list(carrier, src=0, group=self._control)
        return carrier[0]

    def gather(self, value: Any) -> list[Any]:
        """On rank 0, the objects of all ranks in order; elsewhere empty. Tensors in them are sent by the CPU."""
        value = moved(value, torch.device("cpu"))  # otherwise rank 0 would open a context on every sender's GPU
        gathered: list[Any] = [None] * self.size if self.first else []
        dist.gather_object(value, gathered if self.first else None, dst=0, group=self._control)
        return gathered

    def refuse_unlike(self, value: Any, otherwise: str) -> None:
        """Raise EquidpError on every rank, "Rank r …", if one has another value than rank 0."""
        other = next((rank for rank, its in enumerate(self.gather(value)) if its != value), None)
        if (other := self.object_from_first(other)) is not None:
            raise EquidpError(f"Rank {other} {otherwise}")

    def shard(self, records: Records, *, by_unit: bool) -> Records:
        """This rank's records: all of a unit or none, as the unit's own identity says.

        So one record less leaves the others on their ranks. If records were dealt out in turn, all after it would go to
        another rank, which may round otherwise, and in a secure run gives them other views. Records without identities
        are dealt out in turn nevertheless.
        """
        identity = records.unit_identity if by_unit else records.identity
        number = torch.arange(len(records)) if identity is None else identity[:, 0]
        if by_unit:
            assert records.unit is not None
            units, unit = torch.unique(records.unit, return_inverse=True)
            if identity is None:
                number = unit
            else:  # one identity for all records of a unit, even if a source gives several
                number = units.scatter_reduce(0, unit, number, "amin", include_self=False)[unit]
        return records.take(number % self.size == self.rank)

    def seed(self, seed: int) -> int:
        """This rank's seed. Rank 0 has the run's seed, so noise and decisions are those of a run on one process."""
        return seed if self.first else derived_seed(seed, f"rank {self.rank}")

    def random(self, own: RandomSource) -> SharedRandom:
        """Random numbers with this rank's coins and rank 0's noise."""
        return SharedRandom(own, self)

    def leave(self) -> None:
        """End the connection to the other ranks."""
        dist.destroy_process_group()


class SharedRandom:
    """A rank's random numbers: its own coins, and noise and decisions of rank 0."""

    def __init__(self, own: RandomSource, peers: Peers) -> None:
        self.own, self.peers = own, peers
        self.repeatable, self.margin, self.device = own.repeatable, own.margin, peers.device

    def bernoulli(self, probability: float | Tensor, size: int) -> Tensor:
        """`[size]` bool: coins about this rank's units."""
        return self.own.bernoulli(probability, size)

    def uniform(self, size: int, stream: Stream = "sampling") -> Tensor:
        """`[size]` float64: for sampling this rank's own; for other streams rank 0's, so that all decide alike."""
        if stream == "sampling":
            return self.own.uniform(size, stream)
        nothing = torch.empty(size, dtype=torch.float64, device=self.device)
        return self.peers.from_first(self.own.uniform(size, stream) if self.peers.first else nothing)

    def words(self, size: int) -> np.ndarray:
        """`[size]` uint64: for coins about this rank's units."""
        return self.own.words(size)

    def normal(self, size: int) -> Tensor:
        """`[size]` float32 standard normal, rank 0's on every rank."""
        nothing = torch.empty(size, device=self.device)
        return self.peers.from_first(self.own.normal(size) if self.peers.first else nothing)

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        """Rank 0's total with its noise, on every rank: a total leaves rank 0 here alone, and with noise."""
        if self.peers.first:
            noised = self.own.perturb(values, sensitivity=sensitivity, noise_multiplier=noise_multiplier)
            return self.peers.from_first(noised.to(values.dtype))
        return self.peers.from_first(torch.empty_like(values))

    def renew(self, life: int) -> None:
        """Draw other values from this rank's streams."""
        self.own.renew(life)

    @property
    def renewed(self) -> bool:
        """Whether `renew` was called."""
        return self.own.renewed

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's streams."""
        return self.own.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue this rank's streams."""
        self.own.load_state_dict(state)

    def set_back(self, state: dict[str, Tensor]) -> None:
        """Set this rank's streams back."""
        self.own.set_back(state)
