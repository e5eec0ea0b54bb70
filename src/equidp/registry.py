"""Registries: classes by name, each imported when it is first asked for. Names alone cost no import."""

from __future__ import annotations

import pkgutil
from collections import UserDict
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from equidp.errors import EquidpError

T = TypeVar("T")


class Registry(UserDict[str, T]):
    """Classes by the names that users type.

    Args:
        package: where they are.
        places: per name, module and class below the package, such as `dpsgd:DPSGD`.

    An installed package adds a class by an entry point, whose group is `package`. A name that is here already stays. In
    one process a class is added as to a dictionary: `MODELS["mine"] = Mine`.
    """

    def __init__(self, package: str, places: Mapping[str, Any]) -> None:
        super().__init__({point.name: point for point in entry_points(group=package)} | dict(places))
        self._package = package

    def __getitem__(self, name: str) -> T:
        found = self.data[name]
        if isinstance(found, EntryPoint):
            found = self.data[name] = _loaded(found)
        if isinstance(found, str):
            found = self.data[name] = pkgutil.resolve_name(f"{self._package}.{found}")
        return found

    def place(self, name: str) -> str | None:
        """Module and class, such as `equidp.algorithms.dpsgd:DPSGD`; None of one that has been imported."""
        found = self.data[name]
        return f"{self._package}.{found}" if isinstance(found, str) else None


def _loaded(point: EntryPoint) -> Any:
    """The class of another package. Raises EquidpError where it cannot be imported, or is none."""
    where = f"{point.value}, which the package {point.dist.name if point.dist else '?'} adds as {point.name!r},"
    try:
        found = point.load()
    except Exception as error:  # whatever that package's code does
        reason = str(error).partition("\n")[0]
        raise EquidpError(
            f"{where} cannot be imported ({type(error).__name__}: {reason}): mend it, or uninstall that package."
        ) from error
    if not isinstance(found, type):
        raise EquidpError(f"{where} is no class: correct the group {point.group} of its entry points.")
    return found
