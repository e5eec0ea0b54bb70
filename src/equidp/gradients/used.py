"""What a loss or a model uses: how far code of others reaches, which is looked at again and watched during a run."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from equidp.system.installed import LIBRARIES

HOLDERS = (dict, list, tuple, set, frozenset)
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})

KNOWN = {*sys.stdlib_module_names, *LIBRARIES, "torch", "equidp"} - {"__main__"}
"""Packages whose objects keep no records unless they are called: of a thread or a queue nothing may be set back."""


def of_others(model: nn.Module, loss: object) -> bool:
    """Whether a layer, the loss, or what they use (hooks) is neither torch's nor of this package."""
    return any(map(by_others, (*model.modules(), loss))) or any(map(by_others, (*used_by(model), *used_by(loss))))


def by_others(one: object) -> bool:
    """Whether it is neither Python's, nor torch's, nor of this package."""
    if isinstance(one, torch.jit.ScriptFunction):
        return True
    return package_of(one) not in ("torch", "builtins", "functools", __package__.partition(".")[0])


def package_of(one: object) -> str:
    """That of an object's class, or a function's own."""
    return str(getattr(one, "__module__", "")).partition(".")[0]


def innermost(loss: object) -> list[Any]:
    """A loss, and the functions and objects that partial objects and methods hand on to."""
    found = [loss]
    while isinstance(last := found[-1], functools.partial) or inspect.ismethod(last):
        found.append(last.func if isinstance(last, functools.partial) else last.__self__)
    return found


def own_packages(*used: object) -> set[str]:
    """Those that a model, its layers or a loss are of, beside known ones."""
    layers = (layer for one in used if isinstance(one, nn.Module) for layer in one.modules())
    return {package_of(of) for of in (*layers, *(inner for one in used for inner in innermost(one)))} - KNOWN


def used_by(loss: object) -> list[object]:
    """A loss, or a model, and what it calls: modules, functions and callable objects, as far as they show.

    A function uses what its code refers to by name, and its defaults; a module what it has; another object those of its
    attributes, and of its class's, that code found so far has the names of. What lists and dicts among these hold
    counts too, and what objects of the loss's or the layers' packages have.
    """
    found, seen, left = list[object](), dict[int, object](), [loss]
    names, attributes, own = {"__call__", "forward"}, list[tuple[str, object]](), own_packages(loss)
    kinds = set[type]()

    def leads_on(one: object) -> bool:
        if type(one) in PLAIN:  # lists may have millions
            return False
        return _calls(one) or (package_of(one) in own and not isinstance(one, type))

    while left or (left := [of for name, of in attributes if name in names and id(of) not in seen]):
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one  # so that no other gets its id
        if isinstance(one, HOLDERS):
            left += filter(leads_on, one.values() if isinstance(one, dict) else one)
            continue
        if callable(one):
            found.append(one)
            left += filter(leads_on, _used_at_once(one, names))
        if not inspect.isfunction(one):
            of = one.__self__ if inspect.ismethod(one) else one
            attributes += ((name, here) for name, here in _attributes(of, kinds) if leads_on(here))
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


def _attributes(one: object, kinds: set[type]) -> Iterator[tuple[str, object]]:
    """Those of an object, and of its class as far as others wrote it, if it is of none of these kinds."""
    yield from getattr(one, "__dict__", {}).items()
    yield from ((slot.__name__, getattr(one, slot.__name__, None)) for slot in slots_of(one))
    if type(one) not in kinds:
        kinds.add(type(one))
        for of in filter(by_others, type(one).__mro__):  # of a static method its function
            yield from ((name, getattr(value, "__func__", value)) for name, value in vars(of).items())


def slots_of(one: object) -> Sequence[Any]:
    """Descriptors of an object's attributes that are in no dict."""
    kind: Any = type(one)
    return _slots(kind)


@functools.lru_cache
def _slots(kind: Any) -> tuple[Any, ...]:
    own = filter(by_others, kind.__mro__)
    return tuple(value for of in own for value in vars(of).values() if inspect.ismemberdescriptor(value))


def _named_in(function: FunctionType, names: set[str]) -> list[object]:
    """What the names stand for that a function, or one within it, loads by now; all that its code has are added."""
    values = list[object]()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            values.append(cell.cell_contents)
    for code in codes_of(function):
        names.update(code.co_names, (of for of in code.co_consts if isinstance(of, str)))  # for getattr
    # not all of `co_names`: an attribute may be called as something else of the same file
    values += [
        function.__globals__[name] for name in global_names(function, "LOAD_GLOBAL") & function.__globals__.keys()
    ]
    return values


def global_names(function: FunctionType, operation: str) -> set[str]:
    """Those that a function, or one within it, loads (`LOAD_GLOBAL`) or sets (`STORE_GLOBAL`)."""
    every = (of for code in codes_of(function) for of in dis.get_instructions(code))
    return {of.argval for of in every if of.opname == operation}


def codes_of(function: FunctionType) -> Iterator[CodeType]:
    """That of a function, and of those within it."""
    codes = [function.__code__]
    while codes:
        yield (code := codes.pop())
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
