"""Models: every family builds from a schema and a seed, and no record touches another one's logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equidp.errors import EquidpError
from equidp.models import MODELS, build_model
from equidp.models.base import Standardise, TemperedSigmoid
from equidp.records import Schema

CLASSES = tuple("abcdefghij")
GROUPINGS = {"class": CLASSES}
SCHEMAS = {
    "tabular": Schema("table", "tabular", (40,), CLASSES, GROUPINGS),
    "digits": Schema("digits", "image", (1, 8, 8), CLASSES, GROUPINGS, mean=(0.0,), sd=(1.0,)),
    "mnist": Schema("mnist", "image", (1, 28, 28), CLASSES, GROUPINGS, mean=(0.1307,), sd=(0.3081,)),
    "cifar10": Schema("cifar10", "image", (3, 32, 32), CLASSES, GROUPINGS, mean=(0.49, 0.48, 0.45), sd=(0.25,) * 3),
    "photos": Schema("photos", "image", (3, 64, 48), CLASSES, GROUPINGS, mean=(0.49, 0.48, 0.45), sd=(0.25,) * 3),
    "reviews": Schema("reviews", "text", (20,), ("no", "yes"), {"class": ("no", "yes")}, vocabulary=100),
}
COMBINATIONS = [(m, d) for m in MODELS for d, schema in SCHEMAS.items() if schema.kind in MODELS[m].kinds]


def batch(schema: Schema, n: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    if schema.kind == "tabular":
        return torch.rand(n, *schema.shape, generator=generator)
    high = 256 if schema.kind == "image" else schema.vocabulary
    dtype = torch.uint8 if schema.kind == "image" else torch.int64
    return torch.randint(0, high, (n, *schema.shape), generator=generator).to(dtype)


@pytest.mark.parametrize(("name", "dataset"), COMBINATIONS)
def test_logits_come_out_for_stored_features(name: str, dataset: str) -> None:
    schema = SCHEMAS[dataset]
    logits = build_model(name, schema, seed=1)(batch(schema))
    assert logits.shape == (3, len(schema.classes))
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(("name", "dataset"), COMBINATIONS)
def test_one_record_never_changes_another_ones_logits(name: str, dataset: str) -> None:
    schema = SCHEMAS[dataset]
    model = build_model(name, schema, seed=1).train()
    features = batch(schema)
    alone = torch.cat([model(features[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(model(features), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_weights_follow_from_the_seed_and_torchs_generator_is_left_alone(name: str) -> None:
    schema = next(SCHEMAS[d] for m, d in COMBINATIONS if m == name)
    before = torch.random.get_rng_state()
    first, again, other = (build_model(name, schema, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(("name", "dataset"), COMBINATIONS)
@pytest.mark.parametrize("activation", ["relu", "tanh", "tempered_sigmoid"])
def test_every_model_takes_every_activation_and_none_in_place(name: str, dataset: str, activation: str) -> None:
    schema = SCHEMAS[dataset]
    model = build_model(name, schema, options={"activation": activation})
    assert not any(getattr(module, "inplace", False) for module in model.modules())
    kinds = {"relu": nn.ReLU, "tanh": nn.Tanh, "tempered_sigmoid": TemperedSigmoid}
    others = tuple(kind for key, kind in kinds.items() if key != activation)
    assert not any(isinstance(module, others) for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_mixes_records(name: str) -> None:
    schema = next(SCHEMAS[d] for m, d in COMBINATIONS if m == name)
    norms = [m for m in build_model(name, schema).train().modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert not any(norm.training or norm.weight.requires_grad for norm in norms)


def test_a_tempered_sigmoid_of_scale_2_is_tanh() -> None:
    x = torch.linspace(-4, 4, 50)
    torch.testing.assert_close(TemperedSigmoid(2.0, 2.0, 1.0)(x), torch.tanh(x))
    torch.testing.assert_close(TemperedSigmoid(1.58, 3.0, 0.71)(torch.zeros(1)), torch.tensor([1.58 / 2 - 0.71]))


def test_standardise_applies_the_published_constants_and_holds_no_weights() -> None:
    module = Standardise(SCHEMAS["cifar10"])
    out = module(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8))
    torch.testing.assert_close(out[0, :, 0, 0], (1 - torch.tensor([0.49, 0.48, 0.45])) / 0.25)
    assert not module.state_dict()
    floats = torch.rand(2, 40)
    assert torch.equal(Standardise(SCHEMAS["tabular"])(floats), floats)


@pytest.mark.parametrize(
    ("name", "dataset", "options", "message"),
    [
        ("logistik", "digits", {}, r"Unknown model 'logistik'\. Did you mean 'logistic'"),
        ("mlp", "digits", {"hiden": [3]}, r"Unknown option of model 'mlp' 'hiden'\. Did you mean 'hidden'"),
        ("mlp", "digits", {"hidden": [0]}, r"Model 'mlp', hidden\.0: Input should be greater than or equal to 1"),
        ("mlp", "digits", {"activation": "sine"}, r"Model 'mlp', activation: .*'relu', 'tanh' or 'tempered_sigmoid'"),
        ("mlp", "digits", {"scale": 3.0}, r"scale has no effect unless activation is tempered_sigmoid"),
        ("cnn_small", "tabular", {}, r"Model CnnSmall takes image features, dataset 'table' has tabular features"),
        ("logistic", "reviews", {}, r"takes tabular or image features, dataset 'reviews' has text features"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, dataset: str, options: dict, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        build_model(name, SCHEMAS[dataset], options=options)


def test_hidden_widths_are_an_option() -> None:
    model = build_model("mlp", SCHEMAS["tabular"], options={"hidden": [7, 5]})
    assert [m.out_features for m in model.modules() if isinstance(m, nn.Linear)] == [7, 5, 10]
