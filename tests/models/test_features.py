"""Features: fixed maps of one record at a time, the same whether computed once or in every step."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
from tests.models.conftest import SCHEMAS, batch
from tests.thorough import first
from torch import Tensor

from equidp.data import storage
from equidp.data.records import Records, Schema
from equidp.errors import EquidpError
from equidp.gradients.shares import threads
from equidp.models import build_model, features, model_features
from equidp.models.features import extract, feature_map, fingerprint


def records(dataset: str, n: int = 5) -> Records:
    schema = SCHEMAS[dataset]
    labels = torch.arange(n) % len(schema.classes)
    return Records(batch(schema, n), labels, {"class": labels}, schema)


@pytest.mark.parametrize(
    ("dataset", "shape"), [("digits", (81, 2, 2)), ("mnist", (81, 7, 7)), ("cifar10", (243, 8, 8))]
)
def test_scattering_has_81_channels_per_channel_at_a_quarter_of_the_size(dataset: str, shape: tuple) -> None:
    extracted = extract(records(dataset), "scatter")
    assert extracted.schema.shape == tuple(extracted.features.shape[1:]) == shape
    assert extracted.features.dtype == torch.float16
    assert torch.equal(extracted.labels, records(dataset).labels)


def test_no_record_at_all_is_refused_in_words_and_not_by_the_library_that_transforms_it() -> None:
    with pytest.raises(EquidpError, match="There are no records to compute features of: check where they are read"):
        extract(records("digits", 0), "scatter")


def test_scattering_is_normalised_per_record_and_group() -> None:
    extracted = extract(records("mnist"), "scatter").features.float()
    grouped = extracted.reshape(5, 27, -1)
    assert float(grouped.mean(dim=2).abs().max()) < 2e-3
    spread = grouped.var(dim=2, unbiased=False)
    # Groups of second order vary so little in noise images that the normalisation's own 1e-5 shows beside them.
    assert float(spread.max()) < 1.01
    assert float(spread[:, 0].min()) > 0.98


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_scattering_is_normalised_by_photographs_and_by_nothing_of_the_records(dataset: str) -> None:
    tiles = features.photographs(*SCHEMAS[dataset].shape)
    assert tiles.shape == (184, *SCHEMAS[dataset].shape)
    assert -1e-6 < float(tiles.min()) < 0.01 < 0.9 < float(tiles.max()) < 1 + 1e-6  # interpolation rounds
    mapped = feature_map("scatter", SCHEMAS[dataset], {"photographs": True})
    of_tiles = mapped(tiles * 255)  # as pictures are stored, but for the rounding
    assert float(of_tiles.mean((0, 2, 3)).abs().max()) < 1e-4
    torch.testing.assert_close(of_tiles.std((0, 2, 3)), torch.ones(len(of_tiles[0])), rtol=1e-3, atol=0)
    assert not mapped.state_dict().keys() & {"mean", "sd"}  # they follow from the option
    plain = feature_map("scatter", SCHEMAS[dataset], {"groups": 0})
    images = records(dataset).features
    torch.testing.assert_close(mapped(images) * mapped.sd + mapped.mean, plain(images), rtol=1e-4, atol=1e-5)


def test_photographs_are_scattered_once_for_each_size_and_number_of_scales(monkeypatch) -> None:
    asked, windows = [], features.photographs
    monkeypatch.setattr(features, "PHOTOGRAPHED", {})
    monkeypatch.setattr(features, "photographs", lambda *shape: asked.append(shape) or windows(*shape))
    first, again = (feature_map("scatter", SCHEMAS["digits"], {"photographs": True}) for _ in range(2))
    assert asked == [SCHEMAS["digits"].shape]
    assert torch.equal(first.mean, again.mean)
    assert torch.equal(first.sd, again.sd)
    first.mean.zero_()  # what one does with its own is nothing to the others
    assert again.mean.all()
    assert len(feature_map("scatter", SCHEMAS["digits"], {"photographs": True, "scales": 1}).mean) == 9
    assert len(asked) == 2


RESNET = "torchvision:resnet18"


@pytest.mark.parametrize("name", first(("scatter", "photographs", "network"), ["network"]))
def test_each_records_features_depend_on_it_alone(name: str, weights_file: Path) -> None:
    given = {"network": RESNET, "weights": str(weights_file), "size": 32} if name == "network" else {}
    if name == "photographs":
        name, given = "scatter", {"photographs": True}
    whole = records("cifar10")
    together = extract(whole, name, given).features
    alone = torch.cat([extract(whole.take(torch.tensor([i])), name, given).features for i in range(5)])
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-3)


class ByRows(features.FeatureMap):
    """What a library does: another kernel for another number of rows, here one that cuts off bits."""

    def __init__(self, schema: Schema, options: features.FeatureOptions) -> None:
        super().__init__()
        self.schema = dataclasses.replace(schema, mean=(), sd=())

    def forward(self, images: Tensor) -> Tensor:
        return images / (255 if len(images) == self.rows else 256)


@pytest.mark.parametrize("n", [1, features.BATCH, features.BATCH + 1])
def test_every_pass_has_the_same_rows_as_kernels_of_other_sizes_round_differently(n: int, monkeypatch) -> None:
    monkeypatch.setitem(features.FEATURES, "by_rows", ByRows)
    fewer, more = records("digits", n), records("digits", n + 1)
    fewer = dataclasses.replace(fewer, features=more.features[:n])
    assert torch.equal(extract(fewer, "by_rows").features, extract(more, "by_rows").features[:n])
    assert torch.equal(extract(fewer, "by_rows").features, fewer.features / 255)


class Gates(features.FeatureMap):
    """Computed value by value, as a network's SiLU is."""

    Options = features.FeatureOptions

    def __init__(self, schema: Schema, options: features.FeatureOptions) -> None:
        super().__init__()
        self.schema = dataclasses.replace(schema, mean=(), sd=())

    def forward(self, images: Tensor) -> Tensor:
        return torch.nn.functional.silu(images.float() / 32 - 4)


def test_a_record_less_moves_no_other_to_the_end_of_a_threads_share_which_rounds_otherwise(monkeypatch) -> None:
    """On five threads a share of 64 images of 3 × 32 × 32 ends within a vector of the processor."""
    monkeypatch.setitem(features.FEATURES, "gates", Gates)
    all_of_them = records("cifar10", 200)
    fewer = all_of_them.take(torch.arange(1, 200))
    with threads(5):
        assert torch.equal(extract(all_of_them, "gates").features[1:], extract(fewer, "gates").features)
        assert torch.get_num_threads() == 5


@pytest.mark.parametrize("name", ["scatter_linear", "scatter_cnn", "backbone"])
def test_a_head_gives_the_same_logits_on_extracted_features_as_on_raw_images(name: str, options: dict) -> None:
    raw = records("mnist")
    extracted = extract(raw, *model_features(name, options[name]))
    head = build_model(name, extracted.schema, options=options[name], seed=3)
    whole = build_model(name, raw.schema, options=options[name], seed=3)
    part = "head" if name == "backbone" else "layers"
    getattr(whole, part).load_state_dict(getattr(head, part).state_dict())
    torch.testing.assert_close(whole(raw.features), head(extracted.features), rtol=0.02, atol=0.02)
    trained = {id(p) for p in whole.parameters() if p.requires_grad}
    assert trained == {id(p) for p in getattr(whole, part).parameters()}


def test_models_say_what_they_are_trained_on(options: dict) -> None:
    assert model_features("logistic", {}) is None
    assert model_features("scatter_cnn", {"groups": 9}) == ("scatter", {"scales": 2, "groups": 9, "photographs": False})
    name, given = model_features("backbone", options["backbone"])
    assert (name, given["network"], given["size"]) == ("network", RESNET, 32)
    assert model_features("backbone", {**options["backbone"], "trainable": "bias"}) is None


@pytest.mark.slow
def test_grey_images_pass_a_network_in_its_own_size_or_another(weights_file: Path) -> None:
    for size in (0, 64):
        given = {"network": RESNET, "weights": str(weights_file), "size": size}
        extracted = extract(records("digits", 2), "network", given)
        assert extracted.features.shape == (2, 512)
        assert extracted.schema.kind == "tabular"
        assert extracted.schema.feature_names[511] == "backbone.511"


def test_extracted_records_are_stored_as_they_are(tmp_path: Path) -> None:
    extracted = extract(records("digits"), "scatter")
    storage.save(extracted, tmp_path / "r.safetensors")
    loaded = storage.load(tmp_path / "r.safetensors")
    assert torch.equal(loaded.features, extracted.features)
    assert loaded.schema == extracted.schema


@pytest.mark.parametrize("dataset", ["table", "reviews", "scattered"])
def test_what_is_no_image_comes_back_as_it_is(dataset: str, caplog) -> None:
    given = records(dataset)
    with caplog.at_level(logging.WARNING):
        assert extract(given, "scatter") is given
    assert "has no raw images" in caplog.text
    with pytest.raises(EquidpError, match="are computed from raw images"):
        feature_map("scatter", given.schema)


def test_fingerprints_follow_options_and_weights(weights_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"x")
    prints = [
        fingerprint("scatter"),
        fingerprint("scatter", {"groups": 9}),
        fingerprint("scatter", {"photographs": True}),
        *(fingerprint("network", {"network": RESNET, "weights": str(path)}) for path in (weights_file, other)),
        fingerprint("network", {"network": "torchvision:resnet34", "weights": str(weights_file)}),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint("scatter", {"groups": 27}) == prints[0]


def test_features_that_would_not_fit_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(features, "MOST_BYTES", 1000)
    with pytest.raises(EquidpError, match=r"features of 5 images would take .* choose a smaller data\.options\.size"):
        extract(records("mnist"), "scatter")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("scater", {}, r"Unknown features 'scater'\. Did you mean 'scatter'"),
        ("scatter", {"scale": 2}, r"Unknown option of features 'scatter': 'scale'\. Did you mean 'scales'"),
        ("network", {"network": RESNET, "weights": "/no/file.safetensors"}, r"/no/file\.safetensors does not exist"),
    ],
)
def test_unknown_maps_options_and_files_are_named(name: str, given: dict, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        extract(records("digits"), name, given)
    with pytest.raises(EquidpError, match=message):
        fingerprint(name, given)
