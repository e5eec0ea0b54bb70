"""The served model: rows and arrays score as in the pipeline however clients write them, or are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from tests.data.sources.tiny import write_tiny

import equidp
from equidp.data.cells import SENT
from equidp.data.records import Records
from equidp.data.sources import SOURCES, source
from equidp.data.sources.base import Source
from equidp.data.sources.table import Table
from equidp.errors import EquidpError
from equidp.hooks.packing import pack
from equidp.hooks.served_model import ServedModel, _encoded, as_read
from equidp.models import MODELS, build_model
from equidp.models.weights import Weights, save_weights
from equidp.training import predict

Served = tuple[partial[pd.DataFrame], Records, np.ndarray]


def serve(tmp_path: Path, name: str, model: str) -> Served:
    """A served model with untrained weights, the records of a tiny dataset, and what the pipeline makes of them."""
    options = write_tiny(name, tmp_path)
    dataset = source(name, options)
    records = dataset.read(dataset.locate(tmp_path))
    network = build_model(model, records.schema, seed=1)
    card = {"model": model, "options": {}, "schema": records.schema.to_dict(), "source": name}
    path = str(tmp_path / "model.safetensors")
    save_weights(Weights(dict(network.state_dict()), card | {"source_options": options}), Path(path))
    served = ServedModel()
    served.load_context(SimpleNamespace(artifacts={"weights": path}))
    return partial(served.predict, None), records, predict(network, records.features).numpy()


@pytest.fixture
def table(tmp_path: Path) -> tuple[Served, pd.DataFrame]:
    served = serve(tmp_path, "csv", "logistic")
    return served, pd.read_csv(next((tmp_path / "mine").glob("*.csv")))


def test_rows_score_as_in_the_pipeline_however_they_are_written(table) -> None:
    (score, _, expected), rows = table
    forms = {
        "columns in another order": rows[rows.columns[::-1]],
        "spaces around values": rows.assign(ward=" " + rows["ward"] + " "),
        "columns of lists": rows.to_dict("list"),
        "rows": rows.to_dict("records"),
    }
    for form, given in forms.items():
        assert np.array_equal(score(given).to_numpy(), expected), form
    assert np.array_equal(score(rows.iloc[1]).to_numpy(), expected[1:2])
    assert np.array_equal(score(rows.iloc[1].to_dict()).to_numpy(), expected[1:2])


def test_a_row_that_cannot_be_scored_has_a_reason_and_the_others_their_scores(table) -> None:
    (score, records, expected), rows = table
    spoilt = rows.astype({"weight": object})
    spoilt.loc[spoilt.index[1], "ward"], spoilt.loc[spoilt.index[4], "weight"] = "Z", 1e6
    found = score(spoilt)
    good = found["reason"] == ""
    assert list(found.index[~good]) == [spoilt.index[1], spoilt.index[4]]
    outputs = list(records.schema.classes)
    assert np.array_equal(found.loc[good, outputs].to_numpy(), expected[good.to_numpy()])
    assert found.loc[~good, outputs].isna().all(axis=None)
    assert json.loads(json.dumps(found.to_dict("records"), allow_nan=False))[1][outputs[0]] is None  # as it is served
    assert "column 'ward': 'Z'" in found["reason"].iloc[1]
    assert "out of bounds" in found["reason"].iloc[4]
    with pytest.raises(EquidpError, match="column 'ward': 'Z'"):
        score(spoilt.iloc[[1]])
    with pytest.raises(EquidpError, match="No column 'ward'"):
        score(rows.drop(columns="ward"))
    with pytest.raises(EquidpError, match="No column 'ward' in the given table, nor 'weight'"):
        score(rows.drop(columns=["ward", "weight"]))


SIGNS = {"decimal": ",", "thousands": ".", "na_values": ["9"], "groups": {"band": {"edges": [30], "maximum": 90}}}


@pytest.mark.parametrize(
    "options",
    [
        None,
        pytest.param({}, marks=pytest.mark.slow),
        SIGNS,
        pytest.param(SIGNS | {"decimal": ".", "thousands": ""}, marks=pytest.mark.slow),
    ],
)
def test_of_many_bad_rows_each_has_the_sentence_it_has_alone_and_few_are_encoded_alone(
    tmp_path: Path, monkeypatch, options
) -> None:
    """One by one, thousands of bad rows kept a server busy for a minute. Without options they are Adult's."""
    declared = {
        "ward": {"kind": "categorical", "categories": ["A", "B", "na"], "unknown": True},
        "weight": {"kind": "numeric", "maximum": 100},
        "height": {"kind": "numeric", "maximum": 10, "missing": 3},
        "stay": {"kind": "categorical", "edges": [1, 5], "maximum": 9},
    }
    given = None if options is None else write_tiny("csv", tmp_path) | options | {"features": declared}
    encoder = source("adult") if given is None else source("csv", given)
    row = encoder.example().astype(object).map(lambda cell: str(int(cell)) if isinstance(cell, float) else cell)
    rows = pd.concat([row] * 300, ignore_index=True).astype(object).rename_axis(index=SENT)
    random, odd = np.random.default_rng(0), ("Z", None, 1e9, "1.234,5", "1.5", np.nan, True, "?", 9, "9", 2**70, "na")
    for at in range(0, 300, 2):
        for column in random.choice(list(rows), 2, replace=False):
            rows.at[at, column] = odd[random.integers(len(odd))]
    rows["band"] = ["17,5", "1.5", "x"] * 100  # of a group: its numbers are read too
    alone, encode = {}, type(encoder).encode
    for at in range(300):
        try:
            encoder.encode(as_read(rows.iloc[[at]]))
        except EquidpError as error:
            alone[at] = error.message
    assert len(alone) > 100
    calls, refused = [], {}
    monkeypatch.setattr(type(encoder), "encode", lambda self, frame: calls.append(len(frame)) or encode(self, frame))
    monkeypatch.setattr(Source if given is None else Table, "encode", type(encoder).encode)  # still its own
    features = _encoded(encoder, as_read(rows), refused)
    assert refused == alone
    assert len(features) == 300 - len(alone)
    assert len(calls) <= 3


def test_a_source_that_encodes_in_its_own_way_is_asked_row_by_row() -> None:
    class Own(Source):
        name = "own"
        read = Table.read

        def encode(self, frame: pd.DataFrame) -> torch.Tensor:
            if (frame["x"] > 1).any():
                raise EquidpError(f"{len(frame)} rows do not fit.")
            return torch.tensor(frame[["x"]].to_numpy())

    refused = {}
    assert _encoded(Own(), pd.DataFrame({"x": [0, 2, 1, 3]}), refused).tolist() == [[0], [1]]
    assert refused == {1: "1 rows do not fit.", 3: "1 rows do not fit."}


@pytest.mark.parametrize("name", ["csv", "adult", "dutch", "diabetes", "imdb"])
def test_the_example_in_a_models_folder_is_scored_and_comes_from_the_declaration(tmp_path: Path, name: str) -> None:
    options = {} if name == "diabetes" else write_tiny(name, tmp_path)
    example = source(name, options).example()
    assert example is not None
    assert len(source(name, options).encode(example)) == 1


def test_scores_of_a_part_of_a_table_keep_its_index(table) -> None:
    (score, records, expected), rows = table
    part = rows[rows.index % 2 == 1]
    scores = score(part)
    assert scores.index.equals(part.index)
    assert np.array_equal(scores.to_numpy(), expected[1::2])
    assert list(scores.columns) == list(records.schema.classes)


def test_stored_features_of_a_table_are_scaled_ones(table) -> None:
    (score, records, expected), _ = table
    assert np.array_equal(score(records.features.numpy().astype(float)).to_numpy(), expected)
    with pytest.raises(EquidpError, match=r"holds 80\.0; the model takes scaled features, finite numbers from 0 to 1"):
        score(np.array([[1, 0, 80.0]]))
    with pytest.raises(EquidpError, match="holds nan"):
        score(np.array([[1, 0, np.nan]]))


ODD = (np.zeros((2, 7)), np.zeros(3), 5, None, [[1, 0, 0], [1]], np.array([["a", "b", "c"]]))


@pytest.mark.parametrize("given", ODD)
def test_arrays_of_another_shape_or_kind_are_refused(table, given) -> None:
    (score, _, _), _ = table
    with pytest.raises(EquidpError, match=r"takes an array of numbers of shape \(n, 3\).* or a data frame"):
        score(given)


@pytest.mark.parametrize("given", [{"ward": ["A", "B"], "weight": [1]}, {"ward": [["A"], ["B"]], "weight": [[1], [2]]}])
def test_columns_that_make_no_table_are_refused(table, given) -> None:
    (score, _, _), _ = table
    with pytest.raises(EquidpError, match=r"The given columns make no table|category in the given table, row 0"):
        score(given)


@pytest.mark.parametrize("value", [None, np.nan, pd.NA, pd.NaT])
def test_a_missing_cell_is_no_category_whose_name_is_how_it_prints(tmp_path: Path, value) -> None:
    printed = ("None", "nan", "<NA>", "NaT")
    options = {"features": {"ward": {"kind": "categorical", "categories": list(printed)}}}
    dataset = source("csv", write_tiny("csv", tmp_path) | options)
    assert dataset.encode(as_read(pd.DataFrame({"ward": list(printed)}))).argmax(1).tolist() == [0, 1, 2, 3]
    for others in (["nan"], []):
        with pytest.raises(EquidpError, match="column 'ward': a category is missing"):
            dataset.encode(as_read(pd.DataFrame({"ward": [value, *others]})))


def test_a_missing_text_is_no_review_and_no_rows_are_no_scores(tmp_path: Path) -> None:
    score, _, _ = serve(tmp_path, "imdb", "bilstm")
    assert len(score(pd.DataFrame({"text": ["a good film"]}))) == 1
    for value in (None, np.nan):
        found = score(pd.DataFrame({"text": ["a good film", value]}))
        assert found.iloc[:, 0].notna().tolist() == [True, False]
        assert "row 1 of those sent (the first is 0), column 'text': the text is missing" in found["reason"][1]
    assert score(pd.DataFrame({"text": []})).shape == (0, 2)
    for value in (b"a good film", ["a", "good", "film"], {"review": "good"}):  # words of its spelling would be scored
        found = score(pd.DataFrame({"text": ["a good film", value]}))
        assert found.iloc[:, 0].notna().tolist() == [True, False]
        assert found["reason"][1].endswith("is no text; give the review as text.")


def test_a_column_that_is_there_twice_is_refused(table) -> None:
    (score, _, _), rows = table
    with pytest.raises(EquidpError, match="two columns called 'ward'"):
        score(pd.concat([rows, rows[["ward"]]], axis=1))


def test_images_score_alike_as_bytes_and_as_whole_floats_and_are_refused_otherwise(tmp_path: Path) -> None:
    score, records, expected = serve(tmp_path, "image_folder", "logistic")
    pixels = records.features.numpy()
    for given in (pixels, pixels.astype(np.float32), pixels.astype(np.int64), pixels.tolist()):
        assert np.array_equal(score(given).to_numpy(), expected)
    for given in (pixels / 255 + 0.001, pixels.astype(int) - 256, pixels * np.nan):
        with pytest.raises(EquidpError, match="pixels, whole numbers from 0 to 255"):
            score(given)
    for given in (pixels.transpose(0, 2, 3, 1), pixels[0], pixels[:, :, 1:]):
        with pytest.raises(EquidpError, match="resize or reshape it"):
            score(given)


def test_a_model_is_loaded_where_its_word_vectors_are_not(tmp_path: Path) -> None:
    """They are among its weights, and the file that they were read from is on another machine."""
    vectors, path = tmp_path / "glove.txt", str(tmp_path / "model.safetensors")
    vectors.write_text("good 0.1 0.2\n")
    schema, options = source("imdb").schema, {"embedding": "vectors", "vectors": str(vectors), "dimension": 2}
    network = build_model("bilstm", schema, options=options, seed=1)
    card = {"model": "bilstm", "options": options, "schema": schema.to_dict(), "source": "imdb", "source_options": {}}
    save_weights(Weights(dict(network.state_dict()), card), Path(path))
    vectors.unlink()
    served, rows = ServedModel(), pd.DataFrame({"text": ["a good film"]})
    served.load_context(SimpleNamespace(artifacts={"weights": path}))
    assert np.array_equal(served.predict(None, rows), predict(network, source("imdb").encode(rows)).numpy())


def test_a_model_that_knows_a_list_of_words_is_served_where_the_list_is_not(tmp_path: Path) -> None:
    path, options = str(tmp_path / "model.safetensors"), {"words": "words.txt", "vocabulary": 2, "length": 4}
    schema = replace(source("imdb", options).schema, words=("good", "film"))
    network = build_model("bilstm", schema, seed=1)
    card = {"model": "bilstm", "options": {}, "schema": schema.to_dict(), "source": "imdb", "source_options": options}
    save_weights(Weights(dict(network.state_dict()), card), Path(path))
    served = ServedModel()
    served.load_context(SimpleNamespace(artifacts={"weights": path}))
    scores = served.predict(None, pd.DataFrame({"text": ["a good film"]}))
    assert np.array_equal(scores, predict(network, torch.tensor([[0, 1, 2, 3]])).numpy())


def test_token_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    score, records, expected = serve(tmp_path, "imdb", "bilstm")
    assert np.allclose(score(records.features.numpy()).to_numpy(), expected)
    with pytest.raises(EquidpError, match="token ids, whole numbers from 0 to 199"):
        score(records.features.numpy() + 200)


def test_features_of_a_map_may_be_any_finite_numbers(tmp_path: Path) -> None:
    score, records, _ = serve(tmp_path, "image_folder", "logistic")
    score.func.__self__.card["schema"] |= {"mean": [], "sd": []}  # as the scattering transform's are
    assert score(torch.randn(2, *records.schema.shape)).notna().all(axis=None)


@pytest.mark.parametrize(
    ("options", "extra"),
    [({"trainable": "head"}, ""), ({"trainable": "bias"}, "[pretrained]"), ({"trainable": "lora"}, "[pretrained]")],
)
def test_a_server_is_told_of_every_package_that_the_model_needs(tmp_path: Path, monkeypatch, options, extra) -> None:
    monkeypatch.setattr(MODELS, "package", {"backbone": "numpy"}.get)  # an installed one, which has a version
    monkeypatch.setattr(SOURCES, "package", {"mnist": "pandas"}.get)
    options |= {"network": "timm:test_efficientnet"}
    card = {"model": "backbone", "options": options, "schema": source("mnist").schema.to_dict()}
    weights = tmp_path / "model.safetensors"
    save_weights(Weights({}, card | {"source": "mnist", "source_options": {}}), weights)
    pack(tmp_path / "model", weights)
    asked = (tmp_path / "model" / "requirements.txt").read_text().split()
    assert asked[0].startswith("mlflow==")
    assert asked[1:] == [
        f"equidp{extra}=={equidp.__version__}",
        f"numpy=={np.__version__}",
        f"pandas=={pd.__version__}",
    ]
