"""Registries: classes by name, each imported when it is first asked for. Names alone cost no import."""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from equidp.errors import EquidpError, first_line

T = TypeVar("T")

logger = logging.getLogger(__name__)


@cache
def installed() -> Any:
    """The entry points of all packages, read once for all registries, because it takes a hundredth of a second."""
    return entry_points()


@dataclass(frozen=True)
class Added:
    """A class that an installed package adds: module and class, and the package's name."""

    place: str
    package: str


class Registry(UserDict[str, T]):
    """Classes by the names that users type.

    Args:
        package: the package that the classes are in.
        places: by name, module and class below the package, such as `dpsgd:DPSGD`.
        kind: module and class, below the package, of the base of all classes.

    An installed package adds a class by an entry point, whose group is `package`. If the name is taken here already,
    equidp's class stays, and a warning says so. In one process a class is added as to a dictionary:
    `MODELS["mine"] = Mine`.
    """

    def __init__(self, package: str, places: Mapping[str, Any], kind: str) -> None:
        super().__init__()
        self._package, self._kind = package, f"{package}.{kind}"
        self._added: dict[str, list[Added]] = {}
        for point in installed().select(group=package):
            added = Added(point.value, point.dist.name if point.dist else "?")
            if point.name in places:
                logger.warning("The package %s adds %r to %s, which has one: its own is taken. Rename yours.",
                               added.package, point.name, package)  # fmt: skip
            elif added not in self._added.setdefault(point.name, []):
                self._added[point.name].append(added)
        everything: dict[str, Any] = {**places, **self._added}
        self.data.update(everything)

    def __getitem__(self, name: str) -> T:
        found = self.data[name]
        if isinstance(found, str):
            found = self.data[name] = pkgutil.resolve_name(f"{self._package}.{found}")
        if isinstance(found, list):
            found = self.data[name] = self._imported(name, found)
        return found

    def place(self, name: str) -> str | None:
        """Module and class, such as `equidp.algorithms.dpsgd:DPSGD`; None if the class has been imported."""
        found = self.data[name]
        return f"{self._package}.{found}" if isinstance(found, str) else None

    def package(self, name: str) -> str | None:
        """The installed package that adds a name; None for equidp's own names."""
        return self._added[name][0].package if name in self._added else None

    def sound(self) -> Iterator[tuple[str, T]]:
        """Names and classes, without those of other packages that cannot be imported."""
        for name in list(self.data):
            try:
                yield name, self[name]
            except EquidpError:
                if name not in self._added:
                    raise

    def _imported(self, name: str, added: list[Added]) -> T:
        """The class of another package. Raises EquidpError if it cannot be imported, or is no class of this kind."""
        if len(added) > 1:
            packages = ", ".join(one.package for one in added)
            raise EquidpError(f"{name!r} is added to {self._package} by several packages ({packages}): rename one.")
        where = f"{added[0].place}, which the package {added[0].package} adds as {name!r},"
        try:
            found = pkgutil.resolve_name(added[0].place)
        except Exception as error:  # the package's code may raise anything
            raise EquidpError(
                f"{where} cannot be imported ({first_line(error)}): correct it, or uninstall that package."
            ) from error
        kind = pkgutil.resolve_name(self._kind)
        if not (isinstance(found, type) and issubclass(found, kind)):
            raise EquidpError(f"{where} is no {kind.__name__}: derive it from {kind.__module__}.{kind.__name__}.")
        if inspect.isabstract(found):
            missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
            raise EquidpError(f"{where} does not define {missing}, which every {kind.__name__} has: write it.")
        return found  # type: ignore[return-value]
