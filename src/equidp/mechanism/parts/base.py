"""What all parts have in common, what a running part may ask of the loop, and the combination that a part judges."""

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
"""The least value of thresholds that are adapted, so that the weight of every record stays a finite number."""


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
        """What the part releases besides the model, as a sentence for readers; empty for nothing."""
        return ""

    @property
    def charges(self) -> bool:
        """Whether it has privacy events of its own, besides the step's."""
        return False

    def objection(self, combination: Combination) -> str | None:
        """Return why this part cannot hold what it says in that combination; None where it can."""
        return None

    promised: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = ()
    """Names of methods that state a bound, each with the methods that it bounds.

    A class that overrides one of the latter without the bound loses the inherited bound: it gets back that of the kind
    of part, which always holds.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **given: Any) -> None:
        super().__pydantic_init_subclass__(**given)
        kinds = cls.mro()
        for bound, bounded in cls.promised:
            known, *changed = (min(_saying(kinds, name)) for name in (bound, *bounded))
            if known > min(changed):  # also where a class that is mixed in overrides the method
                first = kinds[max(_saying(kinds, bound))]
                setattr(cls, bound, vars(first)[bound])


def of_others(*of: object) -> bool:
    """Whether the class of one of these parts or running parts comes from another package than this."""
    return any(type(one).__module__.partition(".")[0] != __package__.partition(".")[0] for one in of)


def _saying(kinds: Sequence[type], name: str) -> list[int]:
    """Positions of the classes that define `name` themselves."""
    return [at for at, kind in enumerate(kinds) if name in vars(kind)]


@dataclass(frozen=True)
class Combination:
    """The parts of one algorithm, and where their public values start: all that a part's `objection` may look at."""

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
    """Names of the attributes that make up the state: tensors and plain JSON values, enough to continue."""

    def state_dict(self) -> dict[str, Any]:
        """The `remembered` attributes, by name."""
        return {name: getattr(self, name) for name in self.remembered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        for name in self.remembered:
            setattr(self, name, state[name])

    def shown(self) -> dict[str, float]:
        """Figures for the history that may be published: settings, counts of steps, noised values."""
        return {}


class Run(Protocol):
    """What a running part may ask of its training loop. The part has a weak reference, and does not keep it alive."""

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
        """Mean loss of the first `records` public records."""


def listed(names: Iterable[str]) -> str:
    """Names as a message lists them."""
    return ", ".join(sorted(names)) or "nothing"
