"""Words: ids follow from the words alone and stay the same from run to run."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equidp.data.words import PADDING, UNKNOWN, ids_of, listed_ids, read_list, token_ids, word_id, words
from equidp.errors import EquidpError


def test_markup_and_case_are_left_out() -> None:
    assert words("A GOOD film.<br /><br />Don't miss it!") == ["a", "good", "film", "don't", "miss", "it"]


@given(st.text(min_size=1, max_size=8), st.integers(2, 50_000))
def test_ids_never_are_padding_and_never_leave_the_vocabulary(word: str, vocabulary: int) -> None:
    assert PADDING < word_id(word, vocabulary) < vocabulary


def test_ids_are_the_same_in_every_process() -> None:
    assert [word_id(word, 20_000) for word in ("the", "film")] == [3612, 9953]


def test_the_end_of_a_text_is_kept_and_padded_on_the_left() -> None:
    ids = [word_id(word, 100) for word in ("a", "b", "c")]
    assert token_ids(["a", "b", "c"], 100, 2) == ids[1:]
    assert token_ids(["a", "b", "c"], 100, 5) == [PADDING, PADDING, *ids]
    assert token_ids([], 100, 2) == [PADDING, PADDING]


def listed(tmp_path: Path, content: bytes, name: str = "list.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_list_gives_its_first_words_in_order_plain_or_gzipped(tmp_path: Path, pack) -> None:
    path = listed(
        tmp_path, pack(b"the 1 2\nfilm 3 4\nodd 5 6\n"), "list.txt.gz" if pack is gzip.compress else "list.txt"
    )
    assert read_list(path, 2) == ("the", "film")


def test_no_two_words_of_a_list_share_an_id_and_none_is_padding_or_unknown() -> None:
    ids = ids_of(tuple(f"w{i}" for i in range(1000)))
    assert len(set(ids.values())) == 1000
    assert sorted(ids.values()) == list(range(2, 1002))


def test_a_word_that_is_not_on_the_list_is_cut_at_its_apostrophe_or_unknown() -> None:
    ids = ids_of(("did", "n't", "film", "'s", "o'clock"))
    assert listed_ids(words("Didn't film's o'clock zzz"), ids, 8) == [PADDING, PADDING, 2, 3, 4, 5, 6, UNKNOWN]
    assert listed_ids(words("Didn't film's"), ids, 3) == [3, 4, 5]
    assert listed_ids([], ids, 2) == [PADDING, PADDING]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"the 1 2\nthe 3 4\n", r"list\.txt, line 2: 'the' stands there twice; expected one word per line"),
        (b"the 1 2\nfilm 3\n", "line 2: 2 columns, the first has 3"),
        (b"the 1\n\nodd 1\n", "line 2: no word"),
        (b"the 1\n", "list.txt has 1 words, and data.options.vocabulary asks for 3: lower it"),
        (b"the 1\n\xff\xfe 2\n", "list.txt is not UTF-8 text"),
    ],
)
def test_a_broken_list_is_named_with_its_row(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        read_list(listed(tmp_path, content), 3)


def test_a_truncated_list_is_named(tmp_path: Path) -> None:
    packed = gzip.compress("".join(f"word{i} {i}\n" for i in range(5000)).encode())
    with pytest.raises(EquidpError, match=r"list\.txt\.gz is truncated or corrupt"):
        read_list(listed(tmp_path, packed[:-2000], "list.txt.gz"), 5000)
