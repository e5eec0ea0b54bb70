"""Per-record gradients of timm's and transformers' networks: norms and sums are autograd's, whatever is trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from equidp.gradients import compiled
from equidp.gradients.engine import GradientEngine
from equidp.gradients.losses import CrossEntropy
from equidp.models.backbone import BackboneOptions, head_on
from equidp.models.hubs.folder import ImageFolderNetwork
from equidp.models.hubs.network import ImageNetwork, Network, Preparation, TextNetwork
from equidp.models.hubs.trainable import Trainable, choose

timm = pytest.importorskip("timm", reason="needs equidp[pretrained]")
transformers = pytest.importorskip("transformers", reason="needs equidp[pretrained]")
pytest.importorskip("peft", reason="needs equidp[pretrained]")

SIDE, LENGTH, TOKENS, CLASSES = 32, 6, 40, 3
OPTIONS = BackboneOptions(network="timm:any")
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
VIT = {**BERT, "image_size": SIDE, "patch_size": 16}


def of_text(kind: str, **sizes: Any) -> TextNetwork:
    config = transformers.AutoConfig.for_model(kind, vocab_size=TOKENS, max_position_embeddings=LENGTH + 2, **sizes)
    body = transformers.AutoModel.from_config(config)
    body.pooler = None
    return TextNetwork(body, config.pad_token_id if (config.pad_token_id or TOKENS) < TOKENS else 0, "mean")


def of_folder(kind: str, **sizes: Any) -> ImageFolderNetwork:
    body = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    network = ImageFolderNetwork(body, Preparation(SIDE))
    if network.by_token:
        body.pooler = None
    return network


def of_timm(name: str, **sizes: Any) -> ImageNetwork:
    return ImageNetwork(timm.create_model(name, num_classes=0, **sizes), Preparation(SIDE))


SMALL = {"img_size": SIDE, "embed_dim": 16, "depth": 1, "num_heads": 2}
SWIN = {"img_size": SIDE, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4}
ARCHITECTURES: dict[str, Callable[[], Network]] = {
    "bert": lambda: of_text("bert", **BERT),
    "roberta": lambda: of_text("roberta", pad_token_id=1, **BERT),
    "distilbert": lambda: of_text("distilbert", dim=16, n_layers=1, n_heads=2, hidden_dim=24),
    "gpt2": lambda: of_text("gpt2", n_embd=16, n_layer=1, n_head=2),
    "vit": lambda: of_folder("vit", **VIT),
    "deit": lambda: of_folder("deit", **VIT),
    "convnext": lambda: of_folder("convnext", hidden_sizes=[8, 8], depths=[1, 1], num_stages=2),
    "resnet": lambda: of_folder("resnet", embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic"),
    "timm vit": lambda: of_timm("vit_tiny_patch16_224", init_values=0.1, **SMALL),
    "timm deit": lambda: of_timm("deit_tiny_distilled_patch16_224", **SMALL),
    "timm swin": lambda: of_timm("swin_tiny_patch4_window7_224", **SWIN),
    "timm convnext": lambda: of_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)),
    "timm efficientnet": lambda: of_timm("test_efficientnet", pad_type="same"),
    "timm mobilenet": lambda: of_timm("mobilenetv2_035"),
}


class Classifier(nn.Module):
    def __init__(self, network: Network, width: int) -> None:
        super().__init__()
        self.network, self.head = network, head_on(width, CLASSES, OPTIONS)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.network(features))


def records_for(network: Network) -> Tensor:
    if network.kind == "image":
        return torch.randint(0, 256, (3, 3, SIDE, SIDE)).to(torch.uint8)
    tokens = torch.randint(3, TOKENS + 1, (3, LENGTH))
    tokens[1, 4:] = 0  # a shorter text
    return tokens


def quick(name: str, trainable: str) -> bool:
    """Whether `make test` runs it.

    One MobileNet takes as long as ten others. A DeiT has the layers of a ViT, and tests of layers hold those of the
    other networks that are left out to autograd.
    """
    left_out = ("deit", *(f"timm {network}" for network in ("mobilenet", "deit", "efficientnet", "convnext", "swin")))
    return name in ("bert", "timm vit") if trainable != "all" else name not in left_out


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without compiled code, which tests of its own hold to the same: making it takes longer than all else here."""
    monkeypatch.setattr(compiled, "gradients_of", lambda *_: None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize(
    ("name", "trainable"),
    [
        pytest.param(name, chosen, marks=() if quick(name, chosen) else pytest.mark.slow)
        for name in ARCHITECTURES
        for chosen in get_args(Trainable)
    ],
)
def test_norms_and_sums_are_those_of_autograd(name: str, trainable: Trainable) -> None:
    network = ARCHITECTURES[name]()
    features, labels = records_for(network), torch.tensor([0, 1, 2])
    for parameter in network.parameters():  # nothing may be hidden behind a zero
        nn.init.normal_(parameter, std=0.2) if parameter.dim() < 2 else nn.init.normal_(parameter, std=0.1)
    network.requires_grad_(False).eval()
    with torch.no_grad():
        width = network(features).shape[1]
    choose(network.body, trainable, rank=2, alpha=4.0, targets=())
    for key, parameter in network.named_parameters():
        if "lora_B" in key:  # which is zero at first, and then hides what is wrong with the other factor
            nn.init.normal_(parameter, std=0.1)
    model = Classifier(network, width)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*goes through torch.func")
        engine = GradientEngine(model, CrossEntropy())
    engine.train()
    norms = engine.norms(features, labels)
    total = engine.weighted_sum(torch.tensor([1.0, 0.5, 2.0]))
    each = [engine.plain_sum(features[i : i + 1], labels[i : i + 1]) for i in range(3)]
    expected = torch.stack([gradient.norm() for gradient in each])
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=1e-6)
    whole = each[0] + 0.5 * each[1] + 2 * each[2]
    assert (total - whole).norm() <= 1e-5 * whole.norm()


@pytest.mark.slow
def test_activations_that_work_in_place_are_no_obstacle_in_a_loop_of_ones_own() -> None:
    """timm's BatchNorms have their activation inside, in place unless they are read by `backbone`."""
    model = timm.create_model("test_efficientnet", num_classes=CLASSES).eval()
    features, labels = torch.rand(3, 3, SIDE, SIDE), torch.tensor([0, 1, 2])
    assert any(getattr(layer, "inplace", False) for layer in model.modules())
    engine = GradientEngine(model, CrossEntropy())
    norms = engine.norms(features, labels)
    expected = [engine.plain_sum(features[i : i + 1], labels[i : i + 1]).norm() for i in range(3)]
    torch.testing.assert_close(norms, torch.stack(expected), rtol=1e-5, atol=1e-6)


class Operations(TorchDispatchMode):
    """Names of the operations that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2"])
def test_no_kernel_of_attention_depends_on_whether_another_text_is_padded(name: str) -> None:
    network = ARCHITECTURES[name]().eval()
    tokens = torch.randint(3, TOKENS + 1, (2, LENGTH))
    padded = tokens.clone()
    padded[1, 2:] = 0
    with torch.no_grad(), Operations() as computed:
        alike, beside = network(tokens), network(padded)
    assert torch.equal(alike[0], beside[0])
    assert not torch.equal(alike[1], beside[1])
    assert not [name for name in computed.names if "scaled_dot_product" in name]


@pytest.mark.parametrize("kind", ["GroupNorm", "GroupNorm1"])
def test_group_norms_of_timm_have_the_rule_of_torchs(kind: str) -> None:
    """Through torch.func they took a record at a time, and SHViT was refused, as its numbers lie channels last."""
    normed = timm.layers.GroupNorm(6, 3) if kind == "GroupNorm" else timm.layers.GroupNorm1(6)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), normed, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, CLASSES))
    features, labels = torch.rand(3, 3, 8, 8), torch.arange(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a layer without a rule
        engine = GradientEngine(model, CrossEntropy())
    norms, total = engine.norms(features, labels), engine.weighted_sum(torch.ones(3))
    alone = torch.stack([engine.plain_sum(features[i : i + 1], labels[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(norms, alone.norm(dim=1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, alone.sum(0), rtol=1e-4, atol=1e-5)
