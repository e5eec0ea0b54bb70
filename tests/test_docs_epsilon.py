"""The page on where ε comes from names code and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "epsilon.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w/]+(?:\.py|/))`", PAGE)


@pytest.mark.parametrize("path", sorted(set(NAMED)))
def test_a_named_file_or_folder_is_there(path: str) -> None:
    assert (ROOT / path).exists() or (ROOT / "src" / "equidp" / path).exists()


@pytest.mark.parametrize(("path", "test"), re.findall(r"`(tests/[\w/]+\.py)` \(`(test_\w+)`\)", PAGE))
def test_a_named_test_is_in_the_file_beside_it(path: str, test: str) -> None:
    assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")
