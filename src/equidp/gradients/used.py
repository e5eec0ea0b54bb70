"""What a loss or a model uses: how far code of others reaches, which is looked at again and watched during a run."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

HOLDERS = (dict, list, tuple, set, frozenset)


def of_others(model: nn.Module, loss: object) -> bool:
    """Whether a layer, the loss, or what they use (hooks) is neither torch's nor of this package."""
    return any(map(by_others, (*model.modules(), loss))) or any(map(by_others, (*used_by(model), *used_by(loss))))


def by_others(one: object) -> bool:
    """Whether it is neither Python's, nor torch's, nor of this package."""
    if isinstance(one, torch.jit.ScriptFunction):
        return True
    # an object's module is its class's, a function has one of its own
    package = str(getattr(one, "__module__", "")).partition(".")[0]
    return package not in ("torch", "builtins", "functools", __package__.partition(".")[0])


def used_by(loss: object) -> list[object]:
    """A loss, or a model, and what it calls: modules, functions and callable objects, as far as they show.

    A function uses what its code refers to by name, and its defaults; a module what it has; another object those of its
    attributes, and of its class's, that code found so far has the names of. What lists and dicts among these hold
    counts too.
    """
    found, seen, left = list[object](), set[int](), [loss]
    names, attributes = {"__call__", "forward"}, list[tuple[str, object]]()
    while left or (left := [of for name, of in attributes if name in names and id(of) not in seen]):
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, HOLDERS):
            left += filter(_calls, one.values() if isinstance(one, dict) else one)
            continue
        found.append(one)  # so that no other gets its id
        left += filter(_calls, _used_at_once(one, names))
        if not inspect.isfunction(one):
            attributes += _attributes(one.__self__ if inspect.ismethod(one) else one)
    return found


def _used_at_once(one: Any, names: set[str]) -> Iterable[object]:
    """What it uses under any name; names that a function's code has are added."""
    if inspect.isfunction(one):
        given = (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values())
        return (*_named_in(one, names), *given) if by_others(one) else ()
    if inspect.ismethod(one):
        return (one.__func__, one.__self__) if isinstance(one.__self__, nn.Module) else (one.__func__,)
    if isinstance(one, functools.partial):
        return (one.func, *one.args, *one.keywords.values())
    whole = isinstance(one, nn.Module) or not by_others(one)
    return getattr(one, "__dict__", {}).values() if whole else ()


def _calls(one: object) -> bool:
    """Whether it can be called, or hold what can be."""
    return isinstance(one, HOLDERS) or (callable(one) and not isinstance(one, type))


def _attributes(one: object) -> Iterator[tuple[str, object]]:
    """Those of an object, and of its class as far as others wrote it, that can be called."""
    for of in (one, *filter(by_others, type(one).__mro__)):
        for name, value in getattr(of, "__dict__", {}).items():
            # of a slot what it holds, of a static method its function
            here = getattr(one, name, None) if inspect.ismemberdescriptor(value) else getattr(value, "__func__", value)
            if _calls(here):
                yield name, here


def _named_in(function: FunctionType, names: set[str]) -> list[object]:
    """What the names stand for that a function, or one within it, loads by now; all that its code has are added."""
    values = list[object]()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            values.append(cell.cell_contents)
    for code in codes_of(function):
        names.update(code.co_names, (of for of in code.co_consts if isinstance(of, str)))  # for getattr
        # not all of `co_names`: an attribute may be called as something else of the same file
        loaded = {of.argval for of in dis.get_instructions(code) if of.opname == "LOAD_GLOBAL"}
        values += [function.__globals__[name] for name in loaded & function.__globals__.keys()]
    return values


def codes_of(function: FunctionType) -> Iterator[CodeType]:
    """That of a function, and of those within it."""
    codes = [function.__code__]
    while codes:
        yield (code := codes.pop())
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
