"""Registries: classes by name, each imported when it is first asked for. Names alone cost no import."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """Classes by the names that users type.

    Args:
        package: where they are.
        places: per name, module and class below the package, such as `dpsgd:DPSGD`.

    A class of one's own is added as to a dictionary: `MODELS["mine"] = Mine`.
    """

    def __init__(self, package: str, places: Mapping[str, str]) -> None:
        self._package = package
        self._known: dict[str, T | str] = dict(places)

    def __getitem__(self, name: str) -> T:
        found = self._known[name]
        if isinstance(found, str):
            found = self._known[name] = cast(T, pkgutil.resolve_name(f"{self._package}.{found}"))
        return found

    def place(self, name: str) -> str | None:
        """Module and class, such as `equidp.algorithms.dpsgd:DPSGD`; None of one that has been imported."""
        found = self._known[name]
        return f"{self._package}.{found}" if isinstance(found, str) else None

    def __setitem__(self, name: str, value: T) -> None:
        self._known[name] = value

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
