"""BiLstm: the usual LSTM's mathematics, padding that changes nothing, and word vectors from a file."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.models.conftest import SCHEMAS
from torch import Tensor, nn

from equidp.data.words import token_ids, word_id
from equidp.errors import EquidpError
from equidp.models import build_model
from equidp.models.bilstm import Lstm, read_vectors

LISTED = replace(SCHEMAS["reviews"], vocabulary=5, words=("film", "the", "odd"))


def test_one_direction_equals_torchs_lstm() -> None:
    ours, theirs = Lstm(5, 7), nn.LSTM(5, 7, batch_first=True)
    # Ours orders the gates forget, input, output, candidate; torch's are input, forget, candidate, output.
    order = torch.cat([torch.arange(7) + 7 * k for k in (1, 0, 3, 2)])
    with torch.no_grad():
        ours.from_input.weight.copy_(theirs.weight_ih_l0[order])
        ours.from_input.bias.copy_((theirs.bias_ih_l0 + theirs.bias_hh_l0)[order])
        ours.from_state.weight.copy_(theirs.weight_hh_l0[order])
    words = torch.randn(3, 11, 5)
    _, (state, _) = theirs(words)
    torch.testing.assert_close(ours(words, torch.ones(3, 11, 1)), state[0])


def test_padding_changes_nothing() -> None:
    model = build_model("bilstm", SCHEMAS["reviews"], seed=1)
    words = ["some", "words", "of", "a", "review"]
    short, long = (torch.tensor([token_ids(words, 100, length)]) for length in (5, 20))
    torch.testing.assert_close(model(short), model(long))


def test_a_review_of_no_words_has_logits() -> None:
    assert torch.isfinite(build_model("bilstm", SCHEMAS["reviews"])(torch.zeros(2, 20, dtype=torch.int64))).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trained_model_goes_into_torchscript() -> None:
    model, texts = build_model("bilstm", SCHEMAS["reviews"]), torch.randint(0, 100, (7, 20))
    scripted = torch.jit.trace(model, texts[:3])
    assert "_KeepFirst" not in str(scripted.inlined_graph)
    torch.testing.assert_close(scripted(texts), model(texts))


def test_words_are_counted_in_half_precision_too() -> None:
    """bfloat16 has no 511: the state after so many words was looked for behind the last one."""
    model, words = Lstm(5, 7), torch.randn(2, 512, 5)
    present = torch.ones(2, 512, 1)
    present[0, 511:] = 0
    expected = model(words, present)
    found = model.bfloat16()(words.bfloat16(), present.bfloat16())
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.02)


def vectors(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "vectors.txt"
    path.write_text(text)
    return path


def test_word_vectors_go_where_the_words_ids_point_and_stay_fixed(tmp_path: Path) -> None:
    path = vectors(tmp_path, "the 1 2 3\nThe 9 9 9\nfilm -0.5 0 1e-2\n")
    given = {"embedding": "vectors", "vectors": str(path), "dimension": 3}
    embedding = build_model("bilstm", SCHEMAS["reviews"], options=given).embedding
    assert not embedding.weight.requires_grad
    torch.testing.assert_close(embedding.weight[word_id("the", 100)], torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(embedding.weight[word_id("film", 100)], torch.tensor([-0.5, 0.0, 0.01]))
    assert float(embedding.weight[0].abs().sum()) == 0
    assert int((embedding.weight.abs().sum(dim=1) > 0).sum()) == 2


@pytest.mark.parametrize("embedding", ["vectors", "trainable"])
def test_words_of_a_list_get_the_vectors_of_the_same_words(tmp_path: Path, embedding: str) -> None:
    path = vectors(tmp_path, "the 1 2 3\nThe 9 9 9\nfilm -0.5 0 1e-2\n")
    given = {"embedding": embedding, "vectors": str(path), "dimension": 3}
    weight = build_model("bilstm", LISTED, options=given).embedding.weight
    assert weight.requires_grad is (embedding == "trainable")
    # padding, unknown words, film, the, and a word without a vector
    expected = torch.tensor([[0.0, 0, 0], [0, 0, 0], [-0.5, 0, 0.01], [1, 2, 3], [0, 0, 0]])
    torch.testing.assert_close(weight.detach(), expected)


def test_vectors_are_read_plain_or_gzipped_under_either_name(tmp_path: Path) -> None:
    plain = vectors(tmp_path, "the 1 2 3\n")
    expected = read_vectors(str(plain), LISTED, 3)
    plain.with_name("vectors.txt.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert torch.equal(read_vectors(str(plain), LISTED, 3), expected)
    assert torch.equal(read_vectors(f"{plain}.gz", LISTED, 3), expected)


def test_vectors_of_none_of_the_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EquidpError, match=r"vectors\.txt has none of the words of dataset 'reviews'"):
        read_vectors(str(vectors(tmp_path, "der 1 2 3\n")), LISTED, 3)


@pytest.mark.parametrize(("embedding", "trained"), [("trainable", True), ("fixed", False)])
def test_vectors_without_a_file_are_trained_or_fixed_as_asked(embedding: str, trained: bool) -> None:
    model = build_model("bilstm", SCHEMAS["reviews"], options={"embedding": embedding})
    assert model.embedding.weight.requires_grad is trained


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the 1 2\n", r"vectors\.txt, line 1: 2 numbers; expected 3 finite ones, or set model\.options\.dimension"),
        ("a 1 2 3\nthe 1 two 3\n", r"line 2: could not convert string to float: 'two'; expected a word and 3 numbers"),
        ("the 1 nan 3\n", "line 1: 3 numbers; expected 3 finite ones"),
    ],
)
def test_bad_vector_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        read_vectors(str(vectors(tmp_path, text)), SCHEMAS["reviews"], 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"embedding": "vectors"}, "embedding: vectors needs the path vectors"),
        ({"embedding": "fixed", "vectors": "x.txt"}, "embedding: fixed is for random vectors"),
        (
            {"embedding": "vectors", "vectors": "/no/such.txt"},
            r"vectors: /no/such\.txt does not exist, plain or as \.gz",
        ),
    ],
)
def test_vectors_that_cannot_be_had_are_an_error_and_never_random(given: dict, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        build_model("bilstm", SCHEMAS["reviews"], options=given)


class Doubled(nn.Linear):
    """Stands for an adapter of peft."""

    def forward(self, state: Tensor) -> Tensor:
        return 2 * super().forward(state)


def test_what_takes_the_place_of_the_map_of_states_counts_in_every_step() -> None:
    """The steps read its weight, and did not see what it gave; only its gradient was taken."""
    plain, words, present = Lstm(5, 7), torch.randn(3, 4, 5), torch.ones(3, 4, 1)
    expected = plain(words, present)
    weight = plain.from_state.weight.detach() / 2
    plain.from_state = Doubled(7, 28, bias=False)
    plain.from_state.load_state_dict({"weight": weight})
    torch.testing.assert_close(plain(words, present), expected)
