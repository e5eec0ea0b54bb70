"""Registries: classes by name, each imported when it is first asked for. Names alone cost no import."""

from __future__ import annotations

import pkgutil
from collections import UserDict
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Registry(UserDict[str, T]):
    """Classes by the names that users type.

    Args:
        package: where they are.
        places: per name, module and class below the package, such as `dpsgd:DPSGD`.

    A class of one's own is added as to a dictionary: `MODELS["mine"] = Mine`.
    """

    def __init__(self, package: str, places: Mapping[str, Any]) -> None:
        super().__init__(places)
        self._package = package

    def __getitem__(self, name: str) -> T:
        found = self.data[name]
        if isinstance(found, str):
            found = self.data[name] = pkgutil.resolve_name(f"{self._package}.{found}")
        return found

    def place(self, name: str) -> str | None:
        """Module and class, such as `equidp.algorithms.dpsgd:DPSGD`; None of one that has been imported."""
        found = self.data[name]
        return f"{self._package}.{found}" if isinstance(found, str) else None
