"""Models: every family builds from a schema and a seed, and no record touches another one's logits or gradients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.conftest import SCHEMAS, batch, combinations
from tests.thorough import LARGE, first
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine
from equidp.models import MODELS, Model, ModelOptions, build_model, model_options, weights_of
from equidp.models.base import AtLeast, Standardise, TemperedSigmoid
from equidp.models.weights import Weights

COMBINATIONS = combinations()
FIRST = {model: next(d for m, d in COMBINATIONS if m == model) for model in MODELS}
TRAINED = FIRST | dict.fromkeys(
    ("scatter_linear", "scatter_cnn", "tramer_boneh_mnist", "tramer_boneh_cifar10"), "scattered"
)
"""A dataset of each model; of extracted features where a fixed map, which takes a second to make, has no part in it."""
cross_entropy = nn.CrossEntropyLoss(reduction="none")

HELD_TO_FLOAT64 = {"logistic", "mlp", "cnn_small", "cnn4", "cnn9", "resnet9", "bilstm"}
"""Models whose gradients tests/gradients/test_engine.py holds to exact ones."""


def test_every_model_takes_some_dataset() -> None:
    assert set(FIRST) == set(MODELS)


@pytest.mark.parametrize(
    ("name", "dataset"),
    [
        pytest.param(name, dataset, marks=pytest.mark.slow if name in LARGE and dataset != FIRST[name] else ())
        for name, dataset in COMBINATIONS
    ],
)
def test_logits_come_out_for_stored_features_and_no_record_changes_anothers(
    name: str, dataset: str, options: dict
) -> None:
    schema = SCHEMAS[dataset]
    model = build_model(name, schema, options=options[name], seed=1).train()
    features = batch(schema)
    logits = model(features)
    assert logits.shape == (3, len(schema.classes))
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()
    alone = torch.cat([model(features[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", first(MODELS, MODELS.keys() - {"resnet_finetune", "wrn16_4"} - HELD_TO_FLOAT64))
def test_the_engine_finds_each_records_gradient(name: str, options: dict) -> None:
    schema = SCHEMAS[TRAINED[name]]
    model = build_model(name, schema, options=options[name], seed=1).train()
    features, labels = batch(schema), torch.tensor([0, 1, 1])
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = [cross_entropy(model(features[i : i + 1]), labels[i : i + 1]).sum() for i in range(3)]
    gradients = torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)]) for loss in losses])
    engine = GradientEngine(model, cross_entropy)
    torch.testing.assert_close(engine.norms(features, labels), gradients.norm(dim=1), rtol=1e-4, atol=1e-6)
    weights = torch.tensor([0.5, 0.0, 2.0])
    expected = weights @ gradients
    assert float((engine.weighted_sum(weights) - expected).norm()) <= 1e-4 * float(expected.norm())


@pytest.mark.parametrize("name", MODELS)
def test_weights_follow_from_the_seed_and_torchs_generator_is_left_alone(name: str, options: dict) -> None:
    schema = SCHEMAS[TRAINED[name]]
    before = torch.random.get_rng_state()
    first, again, other = (build_model(name, schema, options=options[name], seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("activation", ["relu", "tanh", "tempered_sigmoid"])
def test_every_model_takes_every_activation_and_none_in_place(name: str, activation: str, options: dict) -> None:
    model = build_model(name, SCHEMAS[TRAINED[name]], options={**options[name], "activation": activation})
    kinds = {"relu": nn.ReLU, "tanh": nn.Tanh, "tempered_sigmoid": TemperedSigmoid}
    others = tuple(kind for key, kind in kinds.items() if key != activation)
    maps = (getattr(model, part, None) for part in (("network",) if name == "backbone" else ("features",)))
    fixed = {module for part in maps if isinstance(part, nn.Module) for module in part.modules()}
    trained = [module for module in model.modules() if module not in fixed]
    assert not any(isinstance(module, others) for module in trained)
    assert not any(getattr(module, "inplace", False) for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_mixes_records(name: str, options: dict) -> None:
    model = build_model(name, SCHEMAS[FIRST[name]], options=options[name]).train()
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert not any(norm.training for norm in norms)


@pytest.mark.parametrize(
    ("name", "dataset", "weights", "layers"),
    [
        ("tramer_boneh_mnist", "mnist", 33_066, 4),
        ("tramer_boneh_cifar10", "cifar10", 187_210, 3),
        ("psasc_cnn", "mnist", 130_890, 5),
        ("sa_cnn9", "cifar10", 550_570, 8),
        ("cnn4", "mnist", 26_010, 4),
        ("cnn9", "cifar10", 605_226, 8),
        ("wrn16_4", "cifar10", 2_748_890, 17),
    ],
)
def test_a_papers_network_has_its_number_of_weights(name: str, dataset: str, weights: int, layers: int) -> None:
    """Tramèr and Boneh print 33 and 187 thousand and, for the network that SA-DPSGD's settings are of, 551 thousand.

    A WRN-16-4 by hand: convolutions 432 + (9,216 + 3·36,864 + 1,024) + (73,728 + 3·147,456 + 8,192) + (294,912 +
    3·589,824 + 32,768), GroupNorms 2·(16 + 4·64 + 4·128 + 3·256), linear 2,570.
    """
    model = build_model(name, SCHEMAS[dataset])
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == weights
    assert sum(p.dim() > 1 for p in trained) == layers


def test_sa_cnn9_has_nine_convolutions_and_pools_and_psasc_cnn_four_convolutions_and_one_linear_layer() -> None:
    nine = build_model("sa_cnn9", SCHEMAS["cifar10"])
    kinds = [type(layer) for layer in nine.modules() if isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.Linear)]
    assert kinds == [nn.Conv2d, nn.Conv2d, nn.MaxPool2d] * 3 + [nn.Linear] * 2
    five = build_model("psasc_cnn", SCHEMAS["mnist"])
    kinds = [type(layer) for layer in five.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert kinds == [nn.Conv2d] * 4 + [nn.Linear]


def test_tramer_and_bonehs_first_convolution_on_mnist_halves_the_features() -> None:
    first, second = (
        layer for layer in build_model("tramer_boneh_mnist", SCHEMAS["mnist"]).layers if isinstance(layer, nn.Conv2d)
    )
    assert (first.out_channels, first.stride, second.out_channels, second.stride) == (16, (2, 2), 32, (1, 1))


def test_the_papers_shapes() -> None:
    cnn4 = [m for m in build_model("cnn4", SCHEMAS["mnist"]).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [tuple(m.weight.shape) for m in cnn4] == [(16, 1, 8, 8), (32, 16, 4, 4), (32, 512), (10, 32)]
    cnn9 = [m for m in build_model("cnn9", SCHEMAS["cifar10"]).modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in cnn9] == [32, 32, 64, 64, 128, 128, 256, 10]
    lenet = build_model("cnn_small", SCHEMAS["mnist"], options={"hidden": 500})
    assert sum(p.numel() for p in lenet.parameters()) == 431_080


def test_a_tempered_sigmoid_of_scale_2_is_tanh() -> None:
    x = torch.linspace(-4, 4, 50)
    torch.testing.assert_close(TemperedSigmoid(2.0, 2.0, 1.0)(x), torch.tanh(x))
    torch.testing.assert_close(TemperedSigmoid(1.58, 3.0, 0.71)(torch.zeros(1)), torch.tensor([1.58 / 2 - 0.71]))


def test_standardise_applies_the_published_constants_and_holds_no_weights() -> None:
    module = Standardise(SCHEMAS["cifar10"])
    out = module(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8))
    torch.testing.assert_close(
        out[0, :, 0, 0], (1 - torch.tensor([0.49, 0.48, 0.45])) / torch.tensor([0.25, 0.24, 0.26])
    )
    assert not module.state_dict()
    floats = torch.rand(2, 40)
    assert torch.equal(Standardise(SCHEMAS["table"])(floats), floats)


def test_small_images_are_padded_around_their_centre_and_large_ones_left_alone() -> None:
    padded = AtLeast(4)(torch.ones(1, 1, 2, 5))
    assert padded.shape == (1, 1, 4, 5)
    assert padded[0, 0, :, 0].tolist() == [0, 1, 1, 0]
    large = torch.rand(1, 1, 9, 9)
    assert AtLeast(4)(large) is large


@pytest.mark.parametrize(
    ("name", "dataset", "given", "message"),
    [
        ("logistik", "digits", {}, r"Unknown model 'logistik'\. Did you mean 'logistic'"),
        ("mlp", "digits", {"hiden": [3]}, r"Unknown option of model 'mlp': 'hiden'\. Did you mean 'hidden'"),
        (
            "mlp",
            "digits",
            {"hidden": [0]},
            r"option of model 'mlp' 'hidden\.0' is not valid: .*greater than or equal to 1",
        ),
        ("mlp", "digits", {"activation": "sine"}, r"'activation' is not valid: .*'relu', 'tanh' or 'tempered_sigmoid'"),
        ("mlp", "digits", {"scale": 3.0}, r"scale has no effect unless activation is tempered_sigmoid"),
        ("cnn_small", "table", {}, r"Model CnnSmall takes image features, dataset 'table' has tabular features"),
        ("logistic", "reviews", {}, r"takes tabular or image features, dataset 'reviews' has text features"),
        ("bilstm", "digits", {}, r"Model BiLstm takes text features, dataset 'digits' has image features"),
        ("backbone", "table", {"network": "timm:x"}, r"takes images or texts, dataset 'table' has tabular features"),
        ("resnet_finetune", "scattered", {}, r"takes images of 1 or 3 channels, not 81"),
        ("resnet_finetune", "mnist", {"weights": "none"}, r"weights: none needs norm: group"),
        ("scatter_linear", "digits", {"scales": 4}, r"of 4 scales needs images of 16"),
        ("scatter_linear", "digits", {"groups": 7}, r"groups=7 does not divide the 81 channels"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, dataset: str, given: dict, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        build_model(name, SCHEMAS[dataset], options=given)


class Wrong(Model):
    """A model with a slip of the pen."""

    def __init__(self, schema: Schema, options: ModelOptions) -> None:
        super().__init__(schema, options)
        self.layer = nn.Linear(40, 3)

    def forward(self, features: Tensor) -> Tensor:
        """Three logits, whatever the classes."""
        return self.layer(features.flatten(1))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("table", r"Model 'wrong' gives \(2, 3\) for two records; it must give one for each class, .*: \(2, 10\)"),
        ("digits", r"Model 'wrong' fails on image features of shape \(1, 8, 8\): .*Choose another model\.name"),
    ],
)
def test_a_model_that_does_not_fit_is_told_before_it_trains(
    dataset: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "wrong", Wrong)
    with pytest.raises(EquidpError, match=message):
        build_model("wrong", SCHEMAS[dataset])


@pytest.mark.parametrize("error", [ValueError(), AssertionError(), AttributeError("no attribute 'head'"), KeyError(3)])
def test_a_model_that_fails_without_a_reason_is_told_before_it_trains(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Wrong):
        def forward(self, features: Tensor) -> Tensor:
            raise error

    monkeypatch.setitem(MODELS, "failing", Failing)
    with pytest.raises(EquidpError, match=rf"Model 'failing' fails on .*: {type(error).__name__}.*correct the model"):
        build_model("failing", SCHEMAS["table"])


def test_a_model_that_starts_with_no_numbers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Wrong):
        def forward(self, features: Tensor) -> Tensor:
            return self.layer(features).sum(1, keepdim=True).expand(-1, 10) * torch.nan

    monkeypatch.setitem(MODELS, "lost", Lost)
    with pytest.raises(EquidpError, match="Model 'lost' gives logits that are not finite before it is trained"):
        build_model("lost", SCHEMAS["table"])


@pytest.mark.parametrize("name", MODELS)
def test_the_trial_leaves_a_new_model_as_it_is(name: str, options: dict) -> None:
    schema = SCHEMAS[TRAINED[name]]
    tried = build_model(name, schema, options=options[name], seed=1)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(1)
        fresh = MODELS[name](schema, model_options(name, options[name]))
    assert [m.training for m in tried.modules()] == [m.training for m in fresh.modules()]
    assert all(torch.equal(a, b) for a, b in zip(tried.state_dict().values(), fresh.state_dict().values(), strict=True))


def test_weights_that_two_layers_share_can_be_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    save_file(weights_of(model), tmp_path / "w.safetensors")
    model.load_state_dict(load_file(tmp_path / "w.safetensors"))


def test_hidden_widths_are_an_option() -> None:
    model = build_model("mlp", SCHEMAS["table"], options={"hidden": [7, 5]})
    assert [m.out_features for m in model.modules() if isinstance(m, nn.Linear)] == [7, 5, 10]


def test_models_built_at_once_start_from_their_seeds_weights() -> None:
    schema = SCHEMAS["cifar10"]
    alone = weights_of(build_model("resnet9", schema, seed=1))
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: weights_of(build_model("resnet9", schema, seed=1)), range(12)))
    assert all(torch.equal(weights[name], alone[name]) for weights in built for name in alone)


class Remembering(Wrong):
    """Keeps the mean of what it sees where no buffer is, and gives it away with its weights."""

    def forward(self, features: Tensor) -> Tensor:
        self.mean = features.float().mean(0).flatten()
        return super().forward(features)

    def get_extra_state(self) -> Tensor:
        return getattr(self, "mean", torch.zeros(1))

    def set_extra_state(self, state: Tensor) -> None:
        self.mean = state


def test_what_leaves_with_the_weights_is_what_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "remembering", Remembering)
    with pytest.raises(EquidpError, match="'_extra_state', which is neither a parameter nor a buffer"):
        build_model("remembering", SCHEMAS["table"])


def test_weights_show_how_many_they_are() -> None:
    held = Weights({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, {"model": "logistic", "schema": {}})
    assert repr(held) == "<Weights: 8 numbers in 2 tensors; card with model, schema>"
