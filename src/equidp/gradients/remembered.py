"""What a model and its loss remember from pass to pass beside parameters and buffers, so that it can be set back."""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from equidp.gradients.refusals import same
from equidp.gradients.used import by_others, codes_of, used_by

TORCHS = frozenset(vars(nn.Module()))
"""Attributes that torch gives a module: what it trains, its buffers, its layers and its hooks."""

NOTHING = object()


def remembered(model: nn.Module, loss: object) -> Callable[[], None]:
    """What sets it back to what it is now, in the same objects.

    It is in attributes of layers, and of functions and objects that others wrote; in variables that such functions
    share with those around them, and in global ones that they set; and in lists, dicts, sets and tensors among these.
    """
    undo = list[Callable[[], None]]()
    for one in {id(one): one for one in (*model.modules(), *used_by(model), *used_by(loss))}.values():
        space = getattr(one, "__dict__", None)  # a scripted function has none
        if isinstance(space, dict) and (isinstance(one, nn.Module) or by_others(one)):
            own = {name: value for name, value in space.items() if name not in TORCHS}
            undo += [partial(_attributes_back, space, own), *_contents_back(own.values())]
        if inspect.isfunction(one) and by_others(one):
            undo += _variables_back(one)

    def set_back() -> None:
        for one in undo:
            one()

    return set_back


def _attributes_back(space: dict[str, Any], before: dict[str, Any]) -> None:
    for name in space.keys() - TORCHS - before.keys():
        del space[name]
    space.update(before)


def _variables_back(function: FunctionType) -> Iterator[Callable[[], None]]:
    """Those of the functions around it, and global ones."""
    space, named = function.__globals__, [of for code in codes_of(function) for of in dis.get_instructions(code)]
    for name in {of.argval for of in named if of.opname == "STORE_GLOBAL"}:
        yield partial(_global_back, space, name, space.get(name, NOTHING))
    cells = [(cell, _content(cell)) for cell in function.__closure__ or ()]
    yield from (partial(_cell_back, cell, content) for cell, content in cells)
    loaded = {of.argval for of in named if of.opname == "LOAD_GLOBAL"}
    yield from _contents_back([*(content for _, content in cells), *(space[name] for name in loaded & space.keys())])


def _global_back(space: dict[str, Any], name: str, before: object) -> None:
    if before is NOTHING:
        space.pop(name, None)
    else:
        space[name] = before


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value yet
        return NOTHING


def _cell_back(cell: CellType, before: object) -> None:
    if before is not NOTHING:
        cell.cell_contents = before
    elif _content(cell) is not NOTHING:
        del cell.cell_contents


def _contents_back(values: Any) -> Iterator[Callable[[], None]]:
    """Of each list, dict, set and tensor, and of those directly within it."""
    for value in values:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
        for one in (value, *inner):
            if type(one) in (dict, list, set):
                yield partial(_refill, one, copy.copy(one))
            elif type(one) is Tensor:
                yield partial(_rewrite, one, one.detach().clone())


def _refill(holder: Any, before: Any) -> None:
    holder.clear()
    (holder.extend if isinstance(holder, list) else holder.update)(before)


def _rewrite(tensor: Tensor, before: Tensor) -> None:
    if not same(tensor, before):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(before)
