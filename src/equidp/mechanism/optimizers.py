"""Optimisers by name, with their settings. Each sees nothing but the noisy mean, so any of them is post-processing.

So is the schedule of the learning rate: a function of the step's number.

The arithmetic is torch's (`torch.optim.sgd.sgd`, `torch.optim.adam.adam`), and so are the settings and the form of the
state. The methods around it are our own: torch's `add_param_group`, `state_dict`, `load_state_dict` and `step` import
torch's compiler when they are first called, which costs every run more than a second.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from equidp.errors import EquidpError, refuse_unknown

MakeOptimizer = Callable[[Iterable[Tensor], float], torch.optim.Optimizer]
"""Makes an optimiser from parameters and a learning rate."""


class _Kept(torch.optim.Optimizer):
    """Groups and state as torch keeps them, without torch's hooks on saving and loading."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; settings that are not given are the optimiser's own."""
        self.param_groups.append({**self.defaults, **param_group, "params": list(param_group["params"])})

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's form, with parameters numbered in their order."""
        numbers = {parameter: number for number, parameter in enumerate(self._parameters())}
        return {
            "state": {numbers[parameter]: value for parameter, value in self.state.items()},
            "param_groups": [
                {name: v for name, v in group.items() if name != "params"}
                | {"params": [numbers[parameter] for parameter in group["params"]]}
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Counts of steps stay on the CPU, where they are read.

        Raises:
            ValueError: for a state of other parameters.
        """
        if [len(g["params"]) for g in state_dict["param_groups"]] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("The optimiser's state is of other parameters.")
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        self.state.clear()
        for number, parameter in enumerate(self._parameters()):
            if (values := state_dict["state"].get(number)) is not None:
                self.state[parameter] = {
                    name: value.to(parameter.device if value.dim() else "cpu", copy=True)
                    for name, value in values.items()
                }

    def _parameters(self) -> Iterable[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)


def refuse_asking(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimiser that computes gradients again within its step, or takes sparse ones only.

    Raises:
        EquidpError: for such an optimiser. Every step would be charged, and then fail.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    name = type(optimizer).__name__
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise EquidpError(
            f"{name} evaluates the loss again within its step, by a closure, and a noised gradient is there once: take "
            "an optimiser of one gradient, such as SGD or Adam."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise EquidpError(f"{name} is for sparse gradients, and noise is added to all of them: take Adam.")


def refuse_idle(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimiser of Accelerate's where its `accumulate` holds steps back.

    Raises:
        EquidpError: in such a step, which would be charged and move nothing.
    """
    accumulated = getattr(optimizer, "gradient_state", None)
    if not getattr(accumulated, "sync_gradients", True):
        raise EquidpError(
            "The optimiser is Accelerate's, and takes no step while accelerator.accumulate gathers gradients: this one "
            "would be charged, and its noised gradient be lost. Leave accumulate out; `physical_batch_size` passes a "
            "batch in parts."
        )


def moved_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimiser moves."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def refuse_exact(closure: object, groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a step along gradients that may be exact: those of a loss, as training loops of other libraries take it.

    Raises:
        EquidpError: for a function that computes gradients for the step, and for parameters that require gradients of
            autograd, as a trainer's do not.
    """
    if closure is not None:
        raise EquidpError(
            "The optimiser got a closure that computes a loss, whose gradients would have no noise: take steps by "
            "trainer.run_steps(1), which computes noised ones and calls the optimiser itself (in Lightning, say, in "
            "training_step, with automatic_optimization off, and trainer.optimizer left as it was)."
        )
    if any(parameter.requires_grad for group in groups for parameter in group["params"]):
        raise EquidpError(
            "The optimiser's parameters require gradients of autograd, which have neither bound nor noise: leave "
            "requires_grad_(True) and backward() out, and take steps by trainer.run_steps(1)."
        )


def _at_once(group: Mapping[str, Any], parameters: Sequence[Tensor]) -> bool:
    """Whether all parameters are updated by one operation, as torch does it on a GPU unless told otherwise."""
    given: bool | None = group["foreach"]
    return any(p.device.type != "cpu" for p in parameters) if given is None else given


class _SGD(_Kept, torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step along the gradients in `grad`. What may be exact ones is refused."""
        refuse_exact(closure, self.param_groups)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            remembers = group["momentum"] != 0
            buffers = [self.state[p].get("momentum_buffer") for p in parameters] if remembers else []
            settings = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "fused")
            given = {name: group[name] for name in settings} | {"foreach": _at_once(group, parameters)}
            sgd(parameters, [p.grad for p in parameters], buffers, **given)
            for parameter, buffer in zip(parameters, buffers, strict=False):
                self.state[parameter]["momentum_buffer"] = buffer


class _Adam(_Kept, torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step along the gradients in `grad`. What may be exact ones is refused."""
        refuse_exact(closure, self.param_groups)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(p) for p in parameters]
            settings = ("lr", "weight_decay", "eps", "maximize", "fused", "amsgrad", "capturable")
            adam(
                parameters,
                [p.grad for p in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                decoupled_weight_decay=group["decoupled_weight_decay"],
                foreach=_at_once(group, parameters),
                **{name: group[name] for name in settings},
            )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


class _AdamW(_Adam, torch.optim.AdamW):
    """Adam whose weight decay does not pass through its moments."""


OPTIMIZERS: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], Mapping[str, float]]] = {
    "sgd": (_SGD, {"weight_decay": 0.0}),
    "momentum": (_SGD, {"momentum": 0.9, "weight_decay": 0.0}),
    "adam": (_Adam, {"eps": 1e-8, "weight_decay": 0.0}),
    "adamw": (_AdamW, {"eps": 1e-8, "weight_decay": 0.01}),
}
"""Optimisers by name, as typed in `training.optimizer`, with the settings that each takes and their defaults."""

SETTINGS = {"momentum": "momentum", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
"""Torch's names of these settings, and their names below `training`."""


@dataclass(frozen=True)
class Descent:
    """How the noisy mean becomes an update.

    Attributes:
        optimizer: a name of `OPTIMIZERS`; None for the algorithm's own, or `sgd` if it has none.
        momentum, weight_decay, adam_epsilon: settings of the optimiser; None for its defaults.
        schedule: of the learning rate η over the T steps. `cosine`: η·(1 + cos(π·t/T))/2; `step`: η times
            `schedule_factor` for each share of `schedule_at` that t/T has reached.
        schedule_at, schedule_factor: settings of `step`; None for ½ and ¾, and for a tenth.

    Raises:
        EquidpError: for an unknown optimiser, or a setting that it or the schedule does not have.
    """

    optimizer: str | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    adam_epsilon: float | None = None
    schedule: Literal["constant", "cosine", "step"] = "constant"
    schedule_at: tuple[float, ...] | None = None
    schedule_factor: float | None = None

    def __post_init__(self) -> None:
        refuse_unknown("training.optimizer", [self._name], OPTIMIZERS)
        for name in self._given().keys() - OPTIMIZERS[self._name][1].keys():
            takers = " or ".join(kind for kind, (_, settings) in OPTIMIZERS.items() if name in settings)
            raise EquidpError(
                f"training.{SETTINGS[name]} is no setting of training.optimizer={self._name}: leave it out, or "
                f"take {takers}."
            )
        for name in ("schedule_at", "schedule_factor"):
            if self.schedule != "step" and getattr(self, name) is not None:
                raise EquidpError(
                    f"training.{name} is no setting of training.schedule={self.schedule}: leave it out, or take step."
                )

    @property
    def _name(self) -> str:
        return self.optimizer or "sgd"

    def _given(self) -> dict[str, float]:
        """The settings that are given, by torch's names."""
        given = {name: getattr(self, own) for name, own in SETTINGS.items()}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def own_settings(self) -> list[str]:
        """Names of the optimiser's settings that are given."""
        return [f"training.{SETTINGS[name]}" for name in self._given()]

    def make(self, parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
        """The optimiser of these parameters."""
        kind, settings = OPTIMIZERS[self._name]
        return kind(parameters, lr=rate, **{**settings, **self._given()})

    def factor(self, done: float) -> float:
        """The factor on the learning rate when the share `done` of the steps is done."""
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        if self.schedule == "constant":
            return 1.0
        reached = sum(done >= share for share in ((0.5, 0.75) if self.schedule_at is None else self.schedule_at))
        return (0.1 if self.schedule_factor is None else self.schedule_factor) ** reached
