"""What all parts have in common, what a running part may ask of the loop, and the combination that parts object to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import ConfigDict, Field
from torch import Tensor

from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine
from equidp.mechanism.noise import RandomSource
from equidp.mechanism.sampling import Population
from equidp.options import RATIO, Declared

NoiseLevel = Annotated[float, Field(gt=0)] | Annotated[str, Field(pattern=RATIO)]
"""A side noise: a number, or a ratio to the gradient's noise multiplier such as `"10x"`."""

TINY = 1e-12
"""Range that adapted thresholds are kept in: a weight must stay a finite number for every record, always."""


class Part(Declared):
    """A frozen, validated piece of an algorithm. Its fields are its settings."""

    model_config = ConfigDict(allow_inf_nan=False)

    reads: ClassVar[frozenset[str]] = frozenset()
    """Names of the public values that it needs."""

    gives: ClassVar[frozenset[str]] = frozenset()
    """Names of the public values that it provides to the weight rule."""

    steers: ClassVar[frozenset[str]] = frozenset()
    """Names of the carried public values that it moves from step to step; they need a start value."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise EquidpError(
            f"{type(self).__name__} keeps {name!r} from one call to the next, and what a part is told is private: "
            "kept, it would be released without noise. A side release hands noised values on by `later`; sampler, "
            "update and the like keep state in the object that their `start` returns."
        )

    @property
    def released(self) -> str:
        """What it releases besides the model, in a reader's words; empty for nothing."""
        return ""

    @property
    def charges(self) -> bool:
        """Whether it has privacy events of its own, besides the step's."""
        return False

    def objection(self, combination: Combination) -> str | None:
        """Why this part cannot hold beside those; None where it can."""
        return None

    promised: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = ()
    """Methods that bound what others do, with these: a class that changes one of them has to say the bound anew."""

    @classmethod
    def __pydantic_init_subclass__(cls, **given: Any) -> None:
        super().__pydantic_init_subclass__(**given)
        kinds = cls.mro()
        for bound, bounded in cls.promised:
            known, *changed = (min(_saying(kinds, name)) for name in (bound, *bounded))
            if known > min(changed):  # it may be a class that is mixed in
                first = kinds[max(_saying(kinds, bound))]
                setattr(cls, bound, vars(first)[bound])  # that of the kind of part, which always holds


def of_others(*of: object) -> bool:
    """Whether a part, or what it has started, comes from another package than this."""
    return any(type(one).__module__.partition(".")[0] != __package__.partition(".")[0] for one in of)


def _saying(kinds: Sequence[type], name: str) -> list[int]:
    """Which of these classes define it themselves."""
    return [at for at, kind in enumerate(kinds) if name in vars(kind)]


@dataclass(frozen=True)
class Combination:
    """The parts of one algorithm and the start values of their public values: all that a part may object to."""

    initial: Mapping[str, float]
    sampler: Part
    objective: Part
    contribution: Part
    weights: Part | None
    schedule: Part
    side_release: Part | None
    update: Part
    acceptance: Part
    released_weights: Part


class Running:
    """A part at work during one run. Whatever it remembers is in its state."""

    remembered: ClassVar[tuple[str, ...]] = ()
    """Attributes that the state is made of: tensors and plain JSON values, enough to continue."""

    def state_dict(self) -> dict[str, Any]:
        """What is `remembered`, by name."""
        return {name: getattr(self, name) for name in self.remembered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name in self.remembered:
            setattr(self, name, state[name])

    def shown(self) -> dict[str, float]:
        """Figures for the history that may be published: settings, counts of steps, noised values."""
        return {}


class Run(Protocol):
    """What a running part may ask of the training loop it runs in, which does not live longer for it."""

    combination: Combination
    plan: Plan
    sampling_rate: float
    random: RandomSource
    ledger: Ledger
    engine: GradientEngine
    population: Population

    def reduce(self, total: Tensor) -> Tensor:
        """The sum over all processes that train together; the tensor itself where there is one."""

    def norms_of_all(self) -> Tensor:
        """`[n]` contribution norms of every unit at the current parameters; exact, hence private."""

    def losses(self, units: Tensor) -> Tensor:
        """`[u]` exact loss of each of these training units at the current parameters; private."""

    def public_loss(self, records: int) -> float:
        """Mean loss of the first so many public records."""


def listed(names: Iterable[str]) -> str:
    """Names in a message."""
    return ", ".join(sorted(names)) or "nothing"
