"""`bilstm`: word vectors and a bidirectional LSTM for reviews (the model of DPIS on IMDb).

The LSTM is written as two linear layers, of the words and of the states, because the engine knows the per-record
gradients of such layers (`gradients/recurrence.py`). The mathematics is the usual LSTM's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from equidp.data.raw_files import find_own
from equidp.data.records import Schema
from equidp.data.words import PADDING, ids_of, table_lines, word_id
from equidp.errors import EquidpError
from equidp.gradients.recurrence import recur
from equidp.models.base import Model, ModelOptions


class BiLstmOptions(ModelOptions):
    """Options of `bilstm`."""

    paths = ("vectors",)

    embedding: Literal["trainable", "vectors", "fixed"] = "trainable"
    """Word vectors: `trainable`, which start from the file `vectors` if it is given; `vectors`, read from that file and
    kept fixed, as in DPIS; or `fixed`, random and kept fixed."""
    vectors: str = ""
    """Text file, plain or as .gz, of a word and its numbers on each line (GloVe's format)."""
    dimension: Annotated[int, Field(ge=1)] = 100
    """Numbers of a word vector."""
    projection: Annotated[int, Field(ge=1)] = 32
    """Width of the linear layer before the LSTM."""
    hidden: Annotated[int, Field(ge=1)] = 32
    """Width of the LSTM, in each direction."""
    head: Annotated[int, Field(ge=1)] = 16
    """Width of the linear layer after the LSTM."""

    @model_validator(mode="after")
    def _vectors_belong_to_their_choice(self) -> BiLstmOptions:
        if self.embedding == "vectors" and not self.vectors:
            raise ValueError("embedding: vectors needs the path vectors")
        if self.embedding == "fixed" and self.vectors:
            raise ValueError("embedding: fixed is for random vectors; for those of a file write embedding: vectors")
        return self

    def without_files(self) -> Self:
        """The options without the file of word vectors: the weights that the model gets include them."""
        return self.model_copy(update={"vectors": ""})


class BiLstm(Model):
    """Embedding, linear, bidirectional LSTM, linear, linear. The recurrence skips padding."""

    kinds = ("text",)
    Options = BiLstmOptions

    def __init__(self, schema: Schema, options: BiLstmOptions) -> None:
        super().__init__(schema, options)
        self.embedding = nn.Embedding(schema.vocabulary, options.dimension, padding_idx=PADDING)
        if options.vectors:
            self.embedding.weight.data = read_vectors(options.vectors, schema, options.dimension)
        self.embedding.weight.requires_grad_(options.embedding == "trainable")
        self.projection = nn.Sequential(nn.Linear(options.dimension, options.projection), options.make_activation())
        self.forwards = Lstm(options.projection, options.hidden)
        self.backwards = Lstm(options.projection, options.hidden)
        self.head = nn.Sequential(
            nn.Linear(2 * options.hidden, options.head),
            options.make_activation(),
            nn.Linear(options.head, schema.outputs),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Logits `[batch, classes]` of token ids int64 `[batch, length]`."""
        words = self.projection(self.embedding(features))
        present = (features != PADDING).unsqueeze(2).to(words.dtype)
        last = self.forwards(words, present), self.backwards(words.flip(1), present.flip(1))
        return self.head(torch.cat(last, dim=1))


class Lstm(nn.Module):
    """One direction of an LSTM; gives the state after the last word that is not padding."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.from_input = nn.Linear(width, 4 * hidden)
        self.from_state = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, words: Tensor, present: Tensor) -> Tensor:
        """State `[batch, hidden]`.

        Args:
            words: `[batch, length, width]`.
            present: `[batch, length, 1]`, 0 where a word is padding: the state passes such a step unchanged.
        """
        # padding goes behind the words, where no state that is used depends on it
        places = present.argsort(dim=1, descending=True, stable=True)
        inputs = self.from_input(words.gather(1, places.expand_as(words)))
        begin = inputs.new_zeros(words.shape[0], self.hidden)
        states, _ = recur("LSTM, keep first", inputs, self.from_state, (begin, begin))
        count = present.sum(1, keepdim=True, dtype=torch.int64)  # half precision cannot count beyond 256
        last = states.gather(1, (count - 1).clamp(min=0).expand(-1, 1, self.hidden)).squeeze(1)
        return last * (count.squeeze(1) > 0)


def read_vectors(vectors: str, schema: Schema, dimension: int) -> Tensor:
    """Read word vectors `[schema.vocabulary, dimension]` in the order of the dataset's ids; ids not in the file get 0.

    Hashed words may share an id. Files of word vectors list frequent words first, so the more frequent word keeps its
    vector.

    Raises:
        EquidpError: the file is missing or broken, a line has another number of values, or the file has none of the
            dataset's words.
    """
    path = find_own(Path(), vectors)
    if path is None:
        raise EquidpError(
            f"model.options.vectors: {vectors} does not exist, plain or as .gz; give the path of a GloVe file."
        )
    listed = ids_of(schema.words)
    wanted = len(listed) if listed else schema.vocabulary - 1
    found: dict[int, Tensor] = {}
    for number, (word, *values) in table_lines(path):
        index = listed.get(word) if listed else word_id(word.lower(), schema.vocabulary)
        if index is not None and index not in found:
            found[index] = _numbers(values, dimension, path, number)
        if len(found) == wanted:
            break
    if not found:
        raise EquidpError(f"model.options.vectors: {path} has none of the words of dataset {schema.name!r}.")
    table = torch.zeros(schema.vocabulary, dimension)
    table[torch.tensor(list(found))] = torch.stack(list(found.values()))
    return table


def _numbers(values: list[str], dimension: int, path: Path, line: int) -> Tensor:
    try:
        numbers = torch.tensor([float(value) for value in values])
    except ValueError as error:
        raise EquidpError(f"{path}, line {line}: {error}; expected a word and {dimension} numbers.") from error
    if len(numbers) != dimension or not torch.isfinite(numbers).all():
        raise EquidpError(
            f"{path}, line {line}: {len(numbers)} numbers; expected {dimension} finite ones, or set "
            "model.options.dimension."
        )
    return numbers
