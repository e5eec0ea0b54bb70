"""Words: text as ids of a fixed vocabulary, so that no word is learnt from private text.

The vocabulary is hashed, or a public list. With hashing, a word's id follows from the word alone, and two words may
share one. A public list of words from other texts (such as GloVe's) costs no privacy either, and each of its words has
its own id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from equidp.data.raw_files import opened
from equidp.errors import EquidpError

PADDING = 0
UNKNOWN = 1
"""The id of words that are not on a list; hashed ids have no such word."""
FIRST_LISTED = 2
TAG = re.compile(r"<[^>]*>")
CUT = re.compile(r"(?=n't$)|(?='(?!t$))|(?<!n)(?='t$)")
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
    """Ids of the last `length` words, padded on the left: a review's verdict is at its end."""
    return _padded([word_id(word, vocabulary) for word in text_words[-length:]], length)


def listed_ids(text_words: list[str], ids: Mapping[str, int], length: int) -> list[int]:
    """As `token_ids`, with a list's ids. A word not on it is split as in GloVe's texts: did + n't, film + 's."""
    last = text_words[-length:]  # enough, because words are split into parts and never joined
    known = [ids.get(part, UNKNOWN) for word in last for part in ((word,) if word in ids else CUT.split(word))]
    return _padded(known[-length:], length)


def ids_of(listed: tuple[str, ...]) -> dict[str, int]:
    """Each word's id, in the order of the list, after the ids of padding and unknown words."""
    return {word: number for number, word in enumerate(listed, start=FIRST_LISTED)}


def read_list(path: Path, count: int) -> tuple[str, ...]:
    """Return the first `count` words of a file with a word on each line; numbers may follow it (GloVe's format).

    Raises:
        EquidpError: the file is truncated or not text, has fewer words, has a line of another form than the first, or
            repeats a word.
    """
    found: dict[str, None] = {}
    width = 0
    for number, (word, *values) in table_lines(path):
        width = width or len(values) + 1
        if not word or word in found or len(values) + 1 != width:
            why = (
                f"{word!r} stands there twice" if word in found else f"{len(values) + 1} columns, the first has {width}"
            )
            raise EquidpError(f"{path}, line {number}: {why if word else 'no word'}; expected one word per line.")
        found[word] = None
        if len(found) == count:
            return tuple(found)
    raise EquidpError(f"{path} has {len(found)} words, and data.options.vocabulary asks for {count}: lower it.")


def table_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and columns of each line of a text file, plain or gzipped, columns separated by single spaces.

    Raises:
        EquidpError: the file is truncated, corrupt or not UTF-8 text.
    """
    try:
        with opened(path) as lines:
            for number, line in enumerate(lines, start=1):
                yield number, line.decode().rstrip().split(" ")
    except UnicodeDecodeError as error:
        raise EquidpError(f"{path} is not UTF-8 text ({error}); download it again.") from error


def _padded(ids: list[int], length: int) -> list[int]:
    return [PADDING] * (length - len(ids)) + ids
