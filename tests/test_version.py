"""The version stands in one place, and what repeats it agrees."""

from __future__ import annotations

import re
from pathlib import Path

from equidp import __version__

ROOT = Path(__file__).parents[1]


def test_every_file_that_repeats_the_version_has_the_package_s() -> None:
    def text(name: str) -> str:
        return (ROOT / name).read_text(encoding="utf-8")

    assert re.findall(r"^version: (.+)$", text("CITATION.cff"), flags=re.M) == [__version__]
    assert set(re.findall(r"equidp:(\d+\.\d+\.\d+)", text("deploy/kubernetes.yml"))) == {__version__}
    assert re.findall(r"^## (\S+)", text("CHANGELOG.md"), flags=re.M)[0] == __version__
