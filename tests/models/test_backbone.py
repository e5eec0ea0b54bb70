"""`backbone`: weights that fit or are refused, one sentence each; what is trained; texts by the network's tokenizer."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.conftest import SCHEMAS, batch
from torchvision.models import VisionTransformer

from equidp.data.records import Records, Schema
from equidp.data.sources import source
from equidp.data.sources.table import Csv
from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine
from equidp.gradients.losses import CrossEntropy
from equidp.gradients.rewriting import rewritten
from equidp.models import build_model, card_options, model_features
from equidp.models.features import extract, feature_map
from equidp.models.hubs.network import ImageNetwork, Preparation
from equidp.models.hubs.trainable import choose
from equidp.options import dotted
from equidp.parameters import TrainingSettings, resolve
from equidp.pipelines.ingestion.nodes import encode_records
from equidp.training.networks import augmentation

timm = pytest.importorskip("timm", reason="needs equidp[pretrained]")
transformers = pytest.importorskip("transformers", reason="needs equidp[pretrained]")

NETWORK = "timm:test_efficientnet"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
SIZES |= {"vocab_size": len(WORDS), "max_position_embeddings": 16}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = timm.create_model("test_efficientnet").state_dict()
    path = tmp_path_factory.mktemp("timm") / "model.safetensors"
    save_file(state, path)
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a hub has it: a small BERT of random weights, and its tokenizer."""
    folder = tmp_path_factory.mktemp("hub") / "bert"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture
def reviews(tmp_path: Path, bert: Path) -> Records:
    (tmp_path / "r.csv").write_text("text,sex,good\ngood film,f,yes\nbad film,m,no\nfilm,f,no\ngood good,m,yes\n")
    options = {"path": "r.csv", "label": "good", "classes": ["no", "yes"], "text": "text", "length": 8}
    csv = source("csv", {**options, "tokenizer": str(bert)})
    return csv.records(csv.locate(tmp_path))


def options(weights: Path, **more: object) -> dict:
    return {"network": NETWORK, "weights": str(weights), "size": 32, **more}


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_only_the_head_is_trained_unless_more_is_asked_for(weights: Path) -> None:
    whole = build_model("backbone", SCHEMAS["cifar10"], options=options(weights))
    assert trained(whole) == {"head.1.weight", "head.1.bias"}
    assert torch.equal(whole.network.body.conv_stem.weight, load_file(weights)["conv_stem.weight"])
    bias = trained(build_model("backbone", SCHEMAS["cifar10"], options=options(weights, trainable="bias")))
    assert bias > {"head.1.weight"}
    assert {name.rpartition(".")[2] for name in bias - trained(whole)} == {"bias"}
    norm = trained(build_model("backbone", SCHEMAS["cifar10"], options=options(weights, trainable="norm")))
    assert all("bn" in name for name in norm - trained(whole))


@pytest.mark.parametrize("trainable", ["head", "bias", "all"])
def test_the_model_as_a_whole_has_the_gradients_of_autograd(bert: Path, reviews: Records, trainable: str) -> None:
    given = {"network": f"hf:{bert}", "trainable": trainable}
    engine = GradientEngine(build_model("backbone", reviews.schema, options=given, seed=1), CrossEntropy())
    norms = engine.norms(reviews.features, reviews.labels)
    each = [engine.plain_sum(reviews.features[i : i + 1], reviews.labels[i : i + 1]) for i in range(len(reviews))]
    torch.testing.assert_close(norms, torch.stack(each).norm(dim=1), rtol=1e-5, atol=1e-6)


def test_batch_statistics_stay_and_are_named(weights: Path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        model = build_model("backbone", SCHEMAS["cifar10"], options=options(weights, trainable="all")).train()
    assert "BatchNorm layers stay as they are (bn1, …)" in caplog.text
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(batch(SCHEMAS["cifar10"])).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_adapters_are_added_where_they_are_asked_for_and_their_rank_is_checked(bert: Path, reviews: Records) -> None:
    pytest.importorskip("peft", reason="needs equidp[pretrained]")
    given = {"network": f"hf:{bert}", "trainable": "lora", "lora_rank": 2}
    found = trained(build_model("backbone", reviews.schema, options=given))
    assert sum("lora_A" in name for name in found) == 4  # query, key, value and output of the one layer
    named = trained(build_model("backbone", reviews.schema, options={**given, "lora_targets": "query"}))
    assert {name.split(".")[-3] for name in named if "lora" in name} == {"lora_A", "lora_B"} or len(named) == 4
    for wrong, message in (
        ({"lora_rank": 17}, r"lora_rank=17: layer '.*' maps 16 numbers to 16, so a rank above 16 is no adapter"),
        ({"lora_targets": "qery"}, r"no layer of the network is called 'qery'; its layers' names end in .*query"),
    ):
        with pytest.raises(EquidpError, match=message):
            build_model("backbone", reviews.schema, options={**given, **wrong})
    with pytest.raises(EquidpError, match=r"lora_rank has no effect unless training\.trainable is lora"):
        build_model("backbone", reviews.schema, options={**given, "trainable": "bias"})


def test_adapters_beside_torchs_own_attention_are_trained() -> None:
    pytest.importorskip("peft", reason="needs equidp[pretrained]")
    body = VisionTransformer(32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16)
    body.requires_grad_(False).eval()
    images = torch.randn(3, 3, 32, 32)
    expected = body(images)
    choose(body, "lora", rank=2, alpha=4.0, targets=())
    torch.testing.assert_close(rewritten(body)(images), expected)
    assert sum("lora_B" in name for name in trained(body)) == 8  # query, key, value and output of two layers
    engine = GradientEngine(body, CrossEntropy())
    assert (engine.norms(images, torch.tensor([0, 1, 2])) > 0).all()


def test_without_targets_a_network_of_convolutions_gets_adapters_where_they_are_narrower_than_the_layer(
    weights: Path,
) -> None:
    pytest.importorskip("peft", reason="needs equidp[pretrained]")
    for rank, stem in ((8, True), (28, False)):  # the first convolution maps 3·9 numbers
        given = options(weights, trainable="lora", lora_rank=rank, precision="float32", views=1)
        found = trained(build_model("backbone", SCHEMAS["cifar10"], options=given))
        assert any("lora_A" in name for name in found)
        assert any("conv_stem" in name for name in found) == stem


def test_texts_are_read_by_the_networks_own_tokenizer_and_padding_changes_nothing(bert: Path, reviews: Records) -> None:
    assert reviews.features[0].tolist() == [3, 6, 8, 4, 0, 0, 0, 0]  # [CLS] good film [SEP], each 1 more
    assert reviews.schema.vocabulary == len(WORDS) + 1
    features = extract(reviews, *model_features("backbone", {"network": f"hf:{bert}"}))
    assert features.features.shape == (4, 16)
    body = transformers.AutoModel.from_pretrained(bert).eval()
    with torch.no_grad():
        hidden = body(input_ids=torch.tensor([[2, 5, 7, 3]])).last_hidden_state.mean(1)
    torch.testing.assert_close(features.features[:1], hidden, rtol=1e-4, atol=1e-5)
    head = build_model("backbone", features.schema, options={"network": f"hf:{bert}"}, seed=1)
    whole = build_model("backbone", reviews.schema, options={"network": f"hf:{bert}"}, seed=1)
    whole.head.load_state_dict(head.head.state_dict())
    torch.testing.assert_close(whole(reviews.features), head(features.features), rtol=1e-4, atol=1e-5)


def test_settings_hand_the_tokenizer_to_the_data_and_what_is_trained_to_the_model(bert: Path) -> None:
    given = {"dataset": "imdb", "privacy": {"epsilon": 3.0}, "training": {"trainable": "bias"}}
    settings = resolve(given | {"model": {"name": "backbone", "options": {"network": f"hf:{bert}"}}})
    assert settings.data.options["tokenizer"] == str(bert)
    assert dotted(settings.model.model_dump())["options.trainable"] == "bias"
    with pytest.raises(EquidpError, match=r"trainable=bias: model 'bilstm' is no pretrained network by name"):
        resolve(given | {"model": {"name": "bilstm"}})


def test_a_card_has_what_builds_a_tuned_network_again_where_its_folder_is_not(bert: Path, reviews: Records) -> None:
    given = {"network": f"hf:{bert}", "trainable": "bias"}
    model = build_model("backbone", reviews.schema, options=given, seed=1)
    card = json.loads(json.dumps(card_options("backbone", given)))
    assert card["network"] == "hf:bert"
    assert str(bert.parent) not in json.dumps(card)
    again = build_model("backbone", reviews.schema, options=card, files=False)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(reviews.features), model(reviews.features))


def _without(weights: Path, folder: Path, name: str) -> Path:
    state = {key: value for key, value in load_file(weights).items() if key != name}
    save_file(state, folder / "w.safetensors")
    return folder / "w.safetensors"


def test_weights_of_another_network_are_refused_by_the_names_that_differ(weights: Path, tmp_path: Path) -> None:
    state = load_file(weights)
    state["conv_stem.weight"] = torch.zeros(1, 3, 3, 3)
    state["blocks.9.more"] = torch.zeros(1)
    del state["bn2.bias"]
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(
        EquidpError,
        match=r"another network's: they lack bn2\.bias; they have another shape of conv_stem\.weight \(\(1, 3, 3, 3\) "
        r"there, .*\); they have in addition blocks\.9\.more",
    ):
        build_model("backbone", SCHEMAS["cifar10"], options=options(tmp_path / "w.safetensors"))


def test_a_folder_whose_configuration_is_another_networks_is_refused_by_name(bert: Path, tmp_path: Path) -> None:
    for path in bert.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((bert / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "intermediate_size": 20}))
    schema = Schema("r", "text", (8,), ("a", "b"), {"class": ("a", "b")}, vocabulary=9)
    with pytest.raises(
        EquidpError, match=r"The texts of dataset 'r' are words of no tokenizer, .* set data\.options\.tok"
    ):
        build_model("backbone", schema, options={"network": f"hf:{tmp_path}"})
    from equidp.data.tokens import tokenizer_digest

    schema = Schema(**{**vars(schema), "tokenizer": tokenizer_digest(tmp_path)})
    with pytest.raises(
        EquidpError, match=r"they lack encoder\.layer\.1\..* and \d+ more; they have another shape of enc"
    ):
        build_model("backbone", schema, options={"network": f"hf:{tmp_path}"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"network": NETWORK, "weights": None}, r"needs its pretrained weights"),
        ({"network": "tim:x"}, r"Unknown library in model\.options\.network 'tim'\. Did you mean 'timm'"),
        ({"network": "resnet18"}, r"write timm:<name>, torchvision:<name> or hf:<folder>"),
        ({"network": "timm:resnet81"}, r"Unknown network of timm 'resnet81'\. Did you mean"),
        ({"network": "torchvision:resnet81"}, r"Unknown network of torchvision 'resnet81'\. Did you mean"),
        ({"network": NETWORK}, r"needs its pretrained weights: give the path of its \.safetensors file, or `download`"),
        ({"network": NETWORK, "weights": "no.safetensors"}, r"no\.safetensors does not exist in .+; give"),
        ({"network": "hf:nowhere"}, r"folder nowhere does not exist"),
        ({"network": NETWORK, "weights": "{folder}/m.bin"}, r"m\.bin is a pickle, .*save_file\(.*m\.safetensors'\)"),
        ({"network": NETWORK, "weights": "{folder}"}, r"m\.bin is a pickle"),
        ({"network": NETWORK, "weights": "{folder}/broken.safetensors"}, r"broken\.safetensors is damaged"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_sentence(given: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"\x80")
    if "broken" in (given.get("weights") or ""):
        (tmp_path / "broken.safetensors").write_bytes(b"rubbish")
    given = {key: value and value.format(folder=tmp_path) for key, value in given.items()}
    with pytest.raises(EquidpError, match=message):
        build_model("backbone", SCHEMAS["cifar10"], options=given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 2}, r"they lack encoder\.layer\.1\."),
        ({"model_type": "bart"}, r"bert holds no network|another network's"),
        ("pickle", r"pytorch_model\.bin is a pickle"),
        ("truncated", r"bert holds no network that transformers can read \(.*file not fully covered"),
    ],
)
def test_a_network_that_does_not_fit_is_refused_before_a_text_is_read(
    changed: object, message: str, bert: Path, tmp_path: Path, monkeypatch
) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    for path in bert.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    if isinstance(changed, dict):
        (folder / "config.json").write_text(json.dumps(json.loads((bert / "config.json").read_text()) | changed))
    elif changed == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    else:
        (folder / "model.safetensors").write_bytes((bert / "model.safetensors").read_bytes()[:-1])
    (tmp_path / "r.csv").write_text("body,urgent\ngood film,yes\n")
    given = {"path": "r.csv", "label": "urgent", "classes": ["no", "yes"], "text": "body", "length": 8}
    network = {"name": "backbone", "options": {"network": f"hf:{folder}"}}
    data = {"source": "csv", "options": given}
    settings = resolve({"dataset": "letters", "data": data, "model": network, "privacy": {"epsilon": 3.0}})
    monkeypatch.setattr(Csv, "read", lambda self, files: pytest.fail("the texts were read"))
    with pytest.raises(EquidpError, match=message):
        encode_records(tmp_path, tmp_path / "cache", lambda name: None, settings)
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_tokenizer_and_a_text_network_for_images_are_refused(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(EquidpError, match=r"holds no tokenizer \(tokenizer\.json or vocab\.txt\)"):
        source("imdb", {"tokenizer": str(tmp_path)}).schema  # noqa: B018
    with pytest.raises(EquidpError, match=r"Folder .*none does not exist: give a folder"):
        source("imdb", {"tokenizer": str(tmp_path / "none")}).schema  # noqa: B018
    with pytest.raises(EquidpError, match=r"has no preprocessor_config\.json, so that nobody knows how its images"):
        build_model("backbone", SCHEMAS["cifar10"], options={"network": f"hf:{bert}"})


def test_a_network_that_mixes_records_is_refused_also_where_its_features_are_only_computed() -> None:
    class Centred(torch.nn.Flatten):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            rows = super().forward(pixels)
            return rows - rows.mean(0) / 2

    ImageNetwork(torch.nn.Flatten(), Preparation(8)).measure(SCHEMAS["cifar10"], "x:y")
    with pytest.raises(EquidpError, match=r"x:y gives a record other features where another one is beside it: a layer"):
        ImageNetwork(Centred(), Preparation(8)).measure(SCHEMAS["cifar10"], "x:y")


def test_features_over_views_are_those_of_any_view_and_half_precision_is_near(weights: Path) -> None:
    images = torch.randint(0, 255, (3, 3, 64, 64), dtype=torch.uint8)
    schema = Schema(**{**vars(SCHEMAS["cifar10"]), "shape": (3, 64, 64)})

    def found(pixels: torch.Tensor, **more: object) -> torch.Tensor:
        with torch.no_grad():
            return feature_map("network", schema, options(weights, size=64, **more))(pixels)

    for count, same in ((2, (images.flip(2, 3),)), (8, (images.flip(3), images.transpose(2, 3)))):
        mean = found(images, views=count)
        assert all(torch.allclose(mean, found(view, views=count), atol=1e-5) for view in same)
        assert not torch.allclose(mean, found(images), atol=1e-4)
    half = found(images, precision="bf16")
    assert half.dtype == torch.float32
    assert 0 < float((half - found(images)).norm() / half.norm()) < 0.02
    assert torch.equal(half[:1], found(images[:1], precision="bf16")), "a record's features depend on it alone"


def test_views_and_precision_of_features_are_refused_where_there_are_none(bert: Path, reviews: Records) -> None:
    with pytest.raises(EquidpError, match=r"precision of features have no effect unless training\.trainable is head"):
        build_model(
            "backbone", reviews.schema, options={"network": f"hf:{bert}", "precision": "bf16", "trainable": "norm"}
        )
    with pytest.raises(EquidpError, match=r"model\.options\.views=4: a text has one view"):
        build_model("backbone", reviews.schema, options={"network": f"hf:{bert}", "views": 4})


def test_features_of_a_network_have_no_random_views(bert: Path, reviews: Records) -> None:
    """They were taken for columns of a table in [0, 1], and got its noise."""
    rows = extract(reviews, "network", {"network": f"hf:{bert}"})
    assert rows.schema.kind == "tabular"
    with pytest.raises(EquidpError, match=r"are those of a fixed map, of which there are no random views"):
        augmentation(TrainingSettings(augmentations=2), rows.schema, 0)


def test_a_missing_library_is_one_sentence(weights: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(EquidpError, match=r"timm, which is not installed: pip install 'equidp\[pretrained\]'\."):
        build_model("backbone", SCHEMAS["cifar10"], options=options(weights))


def test_what_has_none_of_the_parameters_asked_for_is_refused(bert: Path, weights: Path) -> None:
    from torch import nn

    with pytest.raises(EquidpError, match=r"trainable=norm: the network has no such parameters"):
        choose(nn.Linear(2, 2).requires_grad_(False), "norm", rank=1, alpha=1.0, targets=())
    with pytest.raises(EquidpError, match=r"lora: the network has no layer for an adapter"):
        choose(nn.ReLU(), "lora", rank=1, alpha=1.0, targets=())


def test_a_parameter_that_has_not_moved_is_named_and_none_where_nothing_moved(caplog) -> None:
    from types import SimpleNamespace

    from equidp.training.preparation import warn_of_unmoved

    model = torch.nn.Linear(2, 2)
    engine = GradientEngine(model, CrossEntropy())
    trainer = SimpleNamespace(engine=engine, model=model, algorithm=SimpleNamespace(name="dpsgd"))
    start = engine.flatten()
    warn_of_unmoved(trainer, start)
    assert not caplog.text
    model.weight.data += 1
    warn_of_unmoved(trainer, start)
    assert "1 of 2 trained parameters have not moved: bias." in caplog.text
