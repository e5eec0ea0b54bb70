"""Tokens: what the ids of a text depend on besides the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from equidp.data.tokens import BESIDE, tokenizer_digest
from equidp.errors import EquidpError


@pytest.mark.parametrize("name", BESIDE)
def test_a_tokenizer_with_other_settings_is_another_one(tmp_path: Path, name: str) -> None:
    """Whether capital letters count, say: kept ids would be another tokenizer's, and people in other parts."""
    (tmp_path / name).write_text("{}")
    with pytest.raises(EquidpError, match="holds no tokenizer"):
        tokenizer_digest(tmp_path)
    (tmp_path / "vocab.txt").write_text("[UNK]\npain\n")
    digests = []
    for settings in ('{"do_lower_case": true}', '{"do_lower_case": true}', '{"do_lower_case": false}'):
        (tmp_path / name).write_text(settings)
        digests.append(tokenizer_digest(tmp_path))
    assert digests[0] == digests[1] != digests[2]
