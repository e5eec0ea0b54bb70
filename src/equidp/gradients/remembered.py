"""Remembered: what a model and its loss keep between passes beside parameters and buffers, and how to set it back."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from itertools import chain
from numbers import Number
from operator import is_
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equidp.gradients.refusals import same
from equidp.gradients.used import (
    PLAIN,
    by_others,
    codes_of,
    global_names,
    innermost,
    own_packages,
    package_of,
    slots_of,
    used_by,
)

TORCHS = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module: its parameters, buffers, layers and hooks."""

FILLED = (dict, list, set, deque, OrderedDict, defaultdict, Counter)
FIXED = (tuple, frozenset)
CACHED = type(functools.lru_cache(lambda: None))

CELL = vars(CellType)["cell_contents"]
"""The content of a variable that functions share (a closure's cell). It is read, set and deleted like a slot."""

FEW = 64
"""A list, tuple, dict, array or tensor of at most so many numbers is compared number by number."""

NOTHING = object()

Undo = Callable[[], None]


def remembered(model: nn.Module, loss: object) -> Undo:
    """Return a function that sets everything the model and its loss remember back to its present state.

    It writes into the same objects, and leaves those that have not changed alone. It looks in these places:

    - attributes of layers, and of functions and objects written by others than torch and this package;
    - variables that such functions share with those around them, their defaults, and global variables;
    - objects, classes, modules and caches of the packages that the layers and the loss come from;
    - lists, dicts, sets, arrays and tensors found in any of these.
    """
    undo = _Walk(model, loss).undo

    def set_back() -> None:
        for one in undo:
            one()

    return set_back


def numbers_in(model: nn.Module, loss: object) -> list[tuple[str, Callable[[], object], object]]:
    """Return all numbers found there: for each its name, a function that reads it, and its present value.

    A short list of numbers, or a small tensor, counts as one number: a tuple of values.
    """
    return _Walk(model, loss).numbers


class _Walk:
    """A walk along everything that a model and its loss hold."""

    def __init__(self, model: nn.Module, loss: object) -> None:
        found = [*used_by(model), *used_by(loss), *innermost(loss)]
        functions = [*filter(inspect.isfunction, found)]
        self._named = {name for of in functions for code in codes_of(of) for name in code.co_names}
        self._layers, self._used = set(map(id, model.modules())), set(map(id, found))
        self._own = own_packages(model, loss)
        self.numbers: list[tuple[str, Callable[[], object], object]] = []
        self.undo, left = list[Undo](), [*model.modules(), *found]
        # parameters and buffers are compared elsewhere (`probe.py`)
        seen = {id(one): one for one in (*model.parameters(), *model.buffers())}
        while left:
            one = left.pop()
            if type(one) not in PLAIN and id(one) not in seen:
                seen[id(one)] = one  # kept alive, so that no other object gets its id
                left += self._passed(one)

    def _passed(self, one: Any) -> list[Any]:
        """Note how to set an object back, and return the objects that it holds."""
        kind = type(one)
        if kind in FILLED or kind in FIXED:
            if kind in FILLED:
                self.undo.append(partial(_refill, one, copy.copy(one)))
                places = () if isinstance(one, set) else one if isinstance(one, dict) else range(len(one))
                for place in places:
                    self._number(f"Entry {place!r} of a {kind.__name__}", partial(_entry, one, place), one[place])
            return [of for of in (one.values() if isinstance(one, dict) else one) if type(of) not in PLAIN]
        if kind in (Tensor, nn.Parameter) and one.layout == torch.strided and not (one.is_meta or one.is_nested):
            self.undo.append(partial(_rewrite, one, one.detach().clone()))
            if one.numel() == 1:
                self._number("A tensor that is no buffer", one.item, one.item())
        elif kind is np.ndarray and one.flags.writeable:
            self.undo.append(partial(_rewrite_array, one, one.copy()))
        elif kind is CACHED and package_of(one) in self._own:
            self.undo.append(one.cache_clear)
        elif kind is partial:
            return [one.func, *one.args, *one.keywords.values()]
        elif kind is FunctionType and by_others(one):
            return self._function(one)
        elif isinstance(one, type) and package_of(one) in self._own:
            return self._class(one)
        elif isinstance(one, nn.Module) or (id(one) in self._used and by_others(one)) or self._is_own(one):
            return self._object(one)
        return []

    def _is_own(self, one: object) -> bool:
        return type(one) is SimpleNamespace or (package_of(one) in self._own and not inspect.isroutine(one))

    def _function(self, function: FunctionType) -> list[Any]:
        """Note a function's shared variables, defaults and global variables, and return what they hold."""
        space = function.__globals__
        self._names(space, global_names(function, "STORE_GLOBAL"))
        held = [self._slot(cell, CELL) for cell in function.__closure__ or ()]
        held += [space[name] for name in global_names(function, "LOAD_GLOBAL") & space.keys()]
        for module in held:
            if isinstance(module, ModuleType) and module.__name__.partition(".")[0] in self._own:
                self._names(vars(module), self._named)
                held += [of for name, of in vars(module).items() if name in self._named and _is_data(of)]
        self._attributes(function.__name__, vars(function), frozenset())
        return [
            *held,
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
            *vars(function).values(),
        ]

    def _class(self, kind: type) -> list[Any]:
        data = _data_of(kind)
        self.undo.append(partial(_class_back, kind, data))
        for name, of in data.items():
            self._number(f"{kind.__name__}.{name}", partial(getattr, kind, name, NOTHING), of)
        return [of for name, of in data.items() if name in self._named]

    def _object(self, one: Any) -> list[Any]:
        held, space = (
            list[Any](type(one).__mro__),
            getattr(one, "__dict__", None),
        )  # scripted functions have no __dict__
        if isinstance(space, dict):
            hidden = TORCHS if id(one) in self._layers else frozenset()
            self._attributes(type(one).__name__, space, hidden)
            whole = isinstance(one, nn.Module)
            held += [of for name, of in space.items() if name not in hidden and (whole or name in self._named)]
        return [*held, *(self._slot(one, slot) for slot in slots_of(one))]

    def _slot(self, one: object, slot: Any) -> object:
        """Note how to set a slot back, and return what it holds."""
        self.undo.append(partial(_slot_back, one, slot, before := _in_slot(one, slot)))
        name = "A variable that functions share" if slot is CELL else f"{type(one).__name__}.{slot.__name__}"
        self._number(name, partial(_in_slot, one, slot), before)
        return before

    def _attributes(self, owner: str, space: dict[str, Any], hidden: frozenset[str]) -> None:
        given = {n: of for n, of in space.items() if n not in hidden}
        self.undo.append(partial(_attributes_back, space, given, hidden))
        for name, of in given.items():
            self._number(f"{owner}.{name}", partial(space.get, name), of)

    def _names(self, space: dict[str, Any], names: set[str]) -> None:
        self.undo += [partial(_name_back, space, name, space.get(name, NOTHING)) for name in names]
        for name in names:
            self._number(f"The global variable {name}", partial(space.get, name), space.get(name))

    def _number(self, name: str, now: Callable[[], object], before: object) -> None:
        if (number := _number_of(before)) is not None:
            self.numbers.append((name, lambda: _number_of(now()), number))


def _is_data(one: object) -> bool:
    """Whether an object is data: no function, class or module, which may hold much that the model does not use."""
    return not (isinstance(one, (type, ModuleType)) or inspect.isroutine(one) or inspect.isdatadescriptor(one))


def _number_of(one: object) -> object:
    """Return a number, or the tuple of numbers in a short list, tuple or dict, or in a small array or tensor.

    The tuple has None where an entry is no number. The result is None if there is no number at all.
    """
    if isinstance(one, Number):
        return one
    if isinstance(one, np.ndarray) or type(one) in (Tensor, nn.Parameter):
        return _few_of(one)
    if isinstance(one, (tuple, list, dict)) and len(one) <= FEW:
        entries = one.values() if isinstance(one, dict) else one
        found = tuple(of if isinstance(of, Number) else _few_of(of) for of in entries)
        return found if any(of is not None for of in found) else None
    return None


def _few_of(one: Any) -> object:
    """Return the numbers of a small array or tensor, else None.

    On a GPU only a tensor of one number counts, because others may be rounded differently in every pass.
    """
    if isinstance(one, np.ndarray):
        return tuple(one.ravel().tolist()) if one.size <= FEW and one.dtype.kind in "biufc" else None
    if type(one) not in (Tensor, nn.Parameter) or one.layout != torch.strided or one.is_meta or one.is_nested:
        return None
    if one.numel() > (FEW if one.is_cpu else 1):
        return None
    return one.item() if one.numel() == 1 else tuple(one.flatten().tolist())


def _entry(holder: Any, place: Any) -> object:
    try:
        return holder[place]
    except LookupError:  # the list is shorter now
        return NOTHING


def _attributes_back(space: dict[str, Any], before: dict[str, Any], hidden: frozenset[str]) -> None:
    for name in space.keys() - hidden | before.keys():
        _name_back(space, name, before.get(name, NOTHING))


def _name_back(space: dict[str, Any], name: str, before: object) -> None:
    if before is NOTHING:
        space.pop(name, None)
    elif space.get(name, NOTHING) is not before:
        space[name] = before


def _data_of(kind: type) -> dict[str, Any]:
    return {name: of for name, of in vars(kind).items() if _is_data(of) and not name.startswith("__")}


def _class_back(kind: type, before: dict[str, Any]) -> None:
    now = _data_of(kind)
    for name in now.keys() - before.keys():
        delattr(kind, name)
    for name, of in before.items():
        if now.get(name, NOTHING) is not of:
            setattr(kind, name, of)


def _in_slot(one: object, slot: Any) -> object:
    try:
        return slot.__get__(one)
    except (AttributeError, ValueError):  # the slot or the cell has no value yet
        return NOTHING


def _slot_back(one: object, slot: Any, before: object) -> None:
    if (now := _in_slot(one, slot)) is before:
        return
    if before is not NOTHING:
        slot.__set__(one, before)
    elif now is not NOTHING:
        slot.__delete__(one)


def _refill(holder: Any, before: Any) -> None:
    """Put the old content back, if it changed: another thread may read the holder, which is empty for a moment."""
    if isinstance(holder, set):
        alike = holder == before
    else:
        now, then = ((chain.from_iterable(of.items()) if isinstance(of, dict) else of) for of in (holder, before))
        alike = len(holder) == len(before) and all(map(is_, now, then))
    if not alike:
        holder.clear()
        (holder.extend if isinstance(holder, (list, deque)) else holder.update)(before)


def _rewrite(tensor: Tensor, before: Tensor) -> None:
    if not same(tensor.detach(), before):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(before)


def _rewrite_array(array: np.ndarray, before: np.ndarray) -> None:
    array[...] = before
