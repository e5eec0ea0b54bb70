"""Words: text as ids of a fixed, hashed vocabulary, so that no word is learnt from private text.

A word's id follows from the word alone. Two words may share an id; with 20,000 ids for the few thousand words that
matter that costs little, and it costs no privacy.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

PADDING = 0
TAG = re.compile(r"<[^>]*>")
WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")


def words(text: str) -> list[str]:
    """Lower-case words of a text, markup left out; `don't` is one word."""
    return WORD.findall(TAG.sub(" ", text.lower()))


@lru_cache(maxsize=1 << 18)
def word_id(word: str, vocabulary: int) -> int:
    """Id of a word in `1..vocabulary-1`; 0 is padding."""
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (vocabulary - 1) + 1


def token_ids(text_words: list[str], vocabulary: int, length: int) -> list[int]:
    """Ids of the last `length` words, padded on the left: a review's verdict stands at its end."""
    ids = [word_id(word, vocabulary) for word in text_words[-length:]]
    return [PADDING] * (length - len(ids)) + ids
