"""Words: ids follow from the words alone and stay the same from run to run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from equidp.data.words import PADDING, token_ids, word_id, words


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
