"""IMDb: 25,000 + 25,000 film reviews, positive or negative (Maas et al. 2011), as ids of a public vocabulary.

The vocabulary is hashed, or the first words of a public list such as GloVe's. The papers keep the words that are most
common in the private reviews, which would be one more release.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from numbers import Number
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import pandas as pd
import torch
from pydantic import Field, model_validator
from torch import Tensor
from tqdm import tqdm

from equidp.data.cells import as_written, place, require
from equidp.data.columns import band_ids, bands
from equidp.data.membership import identities
from equidp.data.raw_files import (
    PublishedFile,
    RawFiles,
    files_below,
    find,
    fingerprint,
    folder_fingerprint,
    inside,
    missing,
    verified,
)
from equidp.data.records import Records, Schema
from equidp.data.sources.base import Source, SourceOptions
from equidp.data.tokens import Tokenizer, tokenizer_digest
from equidp.data.words import FIRST_LISTED, TAG, ids_of, listed_ids, read_list, token_ids, words
from equidp.errors import EquidpError
from equidp.system.progress import frames

PAGE = "https://ai.stanford.edu/~amaas/data/sentiment/"
FOLDER = PublishedFile("imdb/aclImdb", PAGE, contains="train/pos, train/neg, test/pos and test/neg")
PACKED = PublishedFile(
    "imdb/imdb_reviews.jsonl.xz", PAGE, "a877ce2de045410581d714f01ef62d81142b303bc45de739e9211b474495fef9"
)
GLOVE_PAGE = "https://nlp.stanford.edu/projects/glove/"
GLOVE_PACKED = PublishedFile(
    "glove/glove.6B.100d.first30000.txt", GLOVE_PAGE, "a161a4161305404b0d3923410f74f12cd1c2a9614bf9ce4a998021ea451e6e08"
)
GLOVE = (GLOVE_PACKED, PublishedFile("glove/glove.6B.100d.txt", GLOVE_PAGE))
CLASSES = ("negative", "positive")
PARTS = ("train", "test")
SENTIMENTS = ("neg", "pos")
LENGTH_EDGES = (100, 200, 400)

REVIEW = re.compile(r"\d+_\d+\.txt")
"""Names of the provider's files. A Mac leaves `._0_9.txt` beside them."""

Review = tuple[int, int, str]
"""Part (0 train, 1 test), label (0 negative, 1 positive), text."""


class ImdbOptions(SourceOptions):
    """Options of `imdb`.

    Attributes:
        vocabulary: number of ids that words are hashed into, the padding included; with `words`, the number of words
            taken from that list.
        length: how many words of each review are kept, the last ones.
        words: public list of words below `raw_dir`, the most common first (GloVe's file, plain or as .gz); empty to
            hash words.
        tokenizer: folder of a pretrained network's tokenizer, in place of words; `length` then counts its tokens.
    """

    vocabulary: Annotated[int, Field(ge=2, le=2**24)] = 20_000
    length: Annotated[int, Field(ge=1, le=10_000)] = 80
    words: str = ""
    tokenizer: str = ""
    paths: ClassVar[tuple[str, ...]] = ("tokenizer",)

    @model_validator(mode="after")
    def _one_of_two(self) -> ImdbOptions:
        if self.tokenizer and self.words:
            raise ValueError("words and tokenizer are two ways to read a text; give one of them")
        return self


class Imdb(Source):
    """Film reviews; groupings class and length band (in words)."""

    name = "imdb"
    Options = ImdbOptions
    unit_names = ("review",)
    sizes = (12_500, 12_500)
    test_size = 25_000

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self._listed: tuple[str, ...] = ()
        self._known: dict[str, int] = {}

    def search(self, raw_dir: Path) -> RawFiles | None:
        """The provider's folder, else the packed file; also the list of words, if one is asked for."""
        folder, packed = raw_dir / FOLDER.path, raw_dir / PACKED.path
        if folder.is_dir():
            texts = (path for path in files_below(folder) if path.suffix == ".txt")
            found, digests = {"folder": folder}, [folder_fingerprint(folder, texts)]
        elif packed.is_file():
            found, digests = {"packed": packed}, [verified(packed, PACKED, verify=self.options.verify)]
        else:
            return None
        if self.options.words:
            wanted = self._wanted_words(raw_dir)
            if (path := find(raw_dir, wanted)) is None:
                why = missing(raw_dir, wanted, download="there is no automatic download").message
                raise EquidpError(
                    f"{why} Or leave data.options.words out: ids are then hashed, and words may share one."
                )
            found["words"] = path
            digests.append(verified(path, wanted, verify=self.options.verify))
        if self.options.tokenizer:
            digests.append(tokenizer_digest(Path(self.options.tokenizer)))
        return RawFiles(found, fingerprint(digests))

    def _wanted_words(self, raw_dir: Path) -> PublishedFile:
        asked = self.options.words.removesuffix(".gz")
        if (known := next((file for file in GLOVE if file.path == asked), None)) is not None:
            return known  # like other files of a provider, it may be in a linked folder
        return PublishedFile(inside(raw_dir, asked).relative_to(raw_dir.resolve()).as_posix(), GLOVE_PAGE)

    def wanted(self, raw_dir: Path) -> PublishedFile:
        """The provider's folder."""
        return FOLDER

    def read(self, files: RawFiles) -> Records:
        """Token ids int64 `[50000, length]`."""
        if self.options.words:
            self._know(read_list(files.paths["words"], self.options.vocabulary))
        reviews = (
            _read_folder(files.paths["folder"]) if "folder" in files.paths else _read_packed(files.paths["packed"])
        )
        parts, labels, ids, lengths, texts = [], [], [], [], []
        for part, label, text in tqdm(reviews, desc="reviews", unit="review", **frames()):
            found = words(text)
            parts.append(part)
            labels.append(label)
            lengths.append(len(found))
            texts.append(text)
            if not self.options.tokenizer:
                ids.append(torch.tensor(self._ids(found), dtype=torch.int64))
        if not texts:
            raise EquidpError(f"{next(iter(files.paths.values()))} holds no reviews; download it again from {PAGE}.")
        label_ids = torch.tensor(labels, dtype=torch.int64)
        groups = {"class": label_ids, "length_band": band_ids(torch.tensor(lengths), LENGTH_EDGES)}
        return Records(
            self._tokens.ids([TAG.sub(" ", text) for text in texts]) if self.options.tokenizer else torch.stack(ids),
            label_ids,
            groups,
            self.schema,
            part=torch.tensor(parts, dtype=torch.uint8),
            identity=identities(texts),
        )

    @property
    def schema(self) -> Schema:
        """Token ids of a tokenizer, of a hashed vocabulary, or of a list's words once they are read."""
        tokens = self._tokens if self.options.tokenizer else None
        return Schema(
            name=self.name,
            kind="text",
            shape=(self.options.length,),
            classes=CLASSES,
            groupings={"class": CLASSES, "length_band": bands(LENGTH_EDGES)},
            vocabulary=tokens.vocabulary
            if tokens
            else self.options.vocabulary + FIRST_LISTED * bool(self.options.words),
            words=self._listed,
            tokenizer=tokens.digest if tokens else "",
        )

    def as_in(self, schema: Schema) -> Self:
        """This source with the words of a schema's records: a served model has no file of words."""
        self._know(schema.words)
        return self

    def example(self) -> pd.DataFrame:
        """A text."""
        return pd.DataFrame({"text": ["a text"]})

    def encode(self, frame: pd.DataFrame) -> Tensor:
        """Token ids int64 `[N, length]` of the column `text`.

        Raises:
            EquidpError: there is no such column, or a row has no text. It must not be read as the review `nan` or
                `b'…'`.
        """
        require(frame, ["text"], "the given table")
        if (absent := frame["text"].isna()).any():
            row = frame.index[int(absent.to_numpy().argmax())]
            raise EquidpError(
                f"{place('the given table', frame['text'], row)}: the text is missing; leave the row out."
            )
        texts = frame["text"].tolist()
        for row, text in zip(frame.index, texts, strict=True):
            if not isinstance(text, str | Number):
                where = place("the given table", frame["text"], row)
                raise EquidpError(f"{where}: {as_written(text)} is no text; give the review as text.")
        if self.options.tokenizer:
            return self._tokens.ids([TAG.sub(" ", str(text)) for text in texts])
        ids = [self._ids(words(str(text))) for text in texts]
        return torch.tensor(ids, dtype=torch.int64).reshape(-1, self.options.length)

    @cached_property
    def _tokens(self) -> Tokenizer:
        return Tokenizer(Path(self.options.tokenizer), self.options.length, "last")  # a review's verdict is at its end

    def _know(self, listed: tuple[str, ...]) -> None:
        self._listed, self._known = listed, ids_of(listed)

    def _ids(self, found: list[str]) -> list[int]:
        if not self.options.words:
            return token_ids(found, self.options.vocabulary, self.options.length)
        if not self._known:
            raise EquidpError(f"The words of {self.options.words} are not read yet: read the reviews first.")
        return listed_ids(found, self._known, self.options.length)


def _read_folder(folder: Path) -> Iterator[Review]:
    for part, part_name in enumerate(PARTS):
        for label, sentiment in enumerate(SENTIMENTS):
            texts = sorted((folder / part_name / sentiment).glob("*.txt"))
            if not texts:
                raise EquidpError(f"{folder / part_name / sentiment} holds no .txt file; unpack the archive again.")
            if stray := next((path for path in texts if not REVIEW.fullmatch(path.name)), None):
                raise EquidpError(f"{stray} is no review by its name (such as 0_9.txt); remove it.")
            yield from ((part, label, _text(path)) for path in texts)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EquidpError(f"{path} is not readable UTF-8 text ({error}); unpack the archive again.") from error


def _read_packed(path: Path) -> Iterator[Review]:
    for number, line in _lines(path):
        try:
            row = json.loads(line)
            yield PARTS.index(row["split"]), (0, 1).index(row["label"]), str(row["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise EquidpError(
                f"{path}, line {number}: {error!r}; expected split (train or test), label (0 or 1) and text."
            ) from error


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            yield from enumerate(lines, start=1)
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise EquidpError(f"{path} is truncated or corrupt ({error}); download it again.") from error
