"""Used: finds the functions and objects that a model or a loss calls, to know whether others wrote some of them.

Code of others is tried more often: it may do something else later than at first.
"""

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
"""Packages whose objects are not set back: they keep no records by themselves, and a thread or a queue must not be."""


def of_others(model: nn.Module, loss: object) -> bool:
    """Whether a layer, the loss, or something that they use (such as a hook) is neither torch's nor of this package."""
    return any(map(by_others, (*model.modules(), loss))) or any(map(by_others, (*used_by(model), *used_by(loss))))


def by_others(one: object) -> bool:
    """Whether an object comes neither from Python, nor from torch, nor from this package."""
    if isinstance(one, torch.jit.ScriptFunction):
        return True
    return package_of(one) not in ("torch", "builtins", "functools", __package__.partition(".")[0])


def package_of(one: object) -> str:
    """Return the package of a function, or of an object's class."""
    return str(getattr(one, "__module__", "")).partition(".")[0]


def innermost(loss: object) -> list[Any]:
    """Return a loss, followed by the functions and objects that its partial objects and methods wrap."""
    found = [loss]
    while isinstance(last := found[-1], functools.partial) or inspect.ismethod(last):
        found.append(last.func if isinstance(last, functools.partial) else last.__self__)
    return found


def own_packages(*used: object) -> set[str]:
    """Return the packages that a model, its layers or a loss come from, without known libraries."""
    layers = (layer for one in used if isinstance(one, nn.Module) for layer in one.modules())
    return {package_of(of) for of in (*layers, *(inner for one in used for inner in innermost(one)))} - KNOWN


def used_by(loss: object) -> list[object]:
    """Return a loss or a model and everything that it may call: modules, functions and callable objects.

    They are found as follows, as far as code shows it:

    - a function uses the names in its code, and its defaults;
    - a module uses all its attributes;
    - another object uses those attributes, of its own or of its class, whose names occur in code found so far;
    - lists and dicts among these are searched, too, and so are objects of the loss's or the layers' packages.
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
        seen[id(one)] = one  # kept alive, so that no other object gets its id
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
    """Return what an object uses whatever the names are; the names in a function's code are added to `names`."""
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
    """Whether an object can be called, or is a container that may hold callable objects."""
    return isinstance(one, HOLDERS) or (callable(one) and not isinstance(one, type))


def _attributes(one: object, kinds: set[type]) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object, and those of its classes that others wrote.

    `kinds` are the classes that were searched before; this one is added.
    """
    yield from getattr(one, "__dict__", {}).items()
    yield from ((slot.__name__, getattr(one, slot.__name__, None)) for slot in slots_of(one))
    if type(one) not in kinds:
        kinds.add(type(one))
        for of in filter(by_others, type(one).__mro__):  # a static method counts as its function
            yield from ((name, getattr(value, "__func__", value)) for name, value in vars(of).items())


def slots_of(one: object) -> Sequence[Any]:
    """Return the descriptors of an object's slots: attributes that are not in its `__dict__`."""
    kind: Any = type(one)
    return _slots(kind)


@functools.lru_cache
def _slots(kind: Any) -> tuple[Any, ...]:
    own = filter(by_others, kind.__mro__)
    return tuple(value for of in own for value in vars(of).values() if inspect.ismemberdescriptor(value))


def _named_in(function: FunctionType, names: set[str]) -> list[object]:
    """Return the objects that a function, or a function within it, refers to by name.

    All names in its code are added to `names`, and strings, which `getattr` may use.
    """
    values = list[object]()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the variable has no value yet
            values.append(cell.cell_contents)
    for code in codes_of(function):
        names.update(code.co_names, (of for of in code.co_consts if isinstance(of, str)))  # for getattr
    # not all of `co_names`: an attribute may be called as something else of the same file
    values += [
        function.__globals__[name] for name in global_names(function, "LOAD_GLOBAL") & function.__globals__.keys()
    ]
    return values


def global_names(function: FunctionType, operation: str) -> set[str]:
    """Return the global names that a function, or one within it, loads (`LOAD_GLOBAL`) or sets (`STORE_GLOBAL`)."""
    every = (of for code in codes_of(function) for of in dis.get_instructions(code))
    return {of.argval for of in every if of.opname == operation}


def codes_of(function: FunctionType) -> Iterator[CodeType]:
    """Yield the code of a function, and the code of the functions within it."""
    codes = [function.__code__]
    while codes:
        yield (code := codes.pop())
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
