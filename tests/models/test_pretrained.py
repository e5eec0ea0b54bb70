"""Pretrained networks: torchvision's mathematics without in-place steps, and weights that are never silently random."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision.models
from safetensors.torch import load_file, save_file
from tests.models.conftest import SCHEMAS, batch
from torch import nn

from equidp.errors import EquidpError
from equidp.models import MODELS, build_model, card_options, pretrained


@pytest.mark.parametrize("architecture", ["resnet18", "resnet34", "resnet50"])
def test_our_networks_compute_what_torchvisions_do(architecture: str) -> None:
    theirs = getattr(torchvision.models, architecture)().eval()
    ours = pretrained.resnet(architecture, norm="frozen")
    ours.load_state_dict(
        {key: value for key, value in theirs.state_dict().items() if not key.endswith("num_batches_tracked")}
    )
    images = torch.rand(2, 3, 40, 40)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)


def test_frozen_statistics_never_move(weights_file: Path) -> None:
    model = build_model("resnet_finetune", SCHEMAS["cifar10"], options={"weights": str(weights_file)}).train()
    before = {key: value.clone() for key, value in model.state_dict().items() if "running" in key}
    model(batch(SCHEMAS["cifar10"])).sum().backward()
    assert before
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())


def test_weights_come_from_the_file_and_only_the_last_layer_is_fresh(weights_file: Path) -> None:
    model = build_model("resnet_finetune", SCHEMAS["cifar10"], options={"weights": str(weights_file)})
    stored = load_file(weights_file)
    assert torch.equal(model.network.layer3[0].conv1.weight, stored["layer3.0.conv1.weight"])
    assert model.network.fc.weight.shape == (10, 512)


def test_group_norm_keeps_the_convolutions_and_starts_its_own_scales(weights_file: Path) -> None:
    given = {"weights": str(weights_file), "norm": "group"}
    model = build_model("resnet_finetune", SCHEMAS["cifar10"], options=given)
    assert torch.equal(model.network.conv1.weight, load_file(weights_file)["conv1.weight"])
    assert isinstance(model.network.bn1, nn.GroupNorm)
    assert torch.equal(model.network.bn1.weight, torch.ones(64))


@pytest.mark.parametrize(
    ("stage", "first"), [("conv1", "conv1.weight"), ("layer4", "layer4.0.conv1.weight"), ("fc", "fc.weight")]
)
def test_training_starts_at_the_stage_given(weights_file: Path, stage: str, first: str) -> None:
    given = {"weights": str(weights_file), "train_from": stage, "norm": "group"}
    model = build_model("resnet_finetune", SCHEMAS["cifar10"], options=given)
    trained = [name.removeprefix("network.") for name, p in model.named_parameters() if p.requires_grad]
    assert trained[0] == first
    assert trained[-1] == "fc.bias"


def test_a_pth_file_of_plain_weights_is_read(weights_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(load_file(weights_file), path)
    state = pretrained.file_state(path)
    assert torch.equal(state["conv1.weight"], load_file(weights_file)["conv1.weight"])


class Trap:
    """An object whose unpickling would leave a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pth_file_is_never_executed(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"conv1.weight": Trap(tmp_path / "sprung")}, path)
    with pytest.raises(EquidpError, match=r"weights\.pth holds no plain weights"):
        pretrained.file_state(path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("w.safetensors", b"rubbish", "holds no plain weights"),
        ("w.pth", b"rubbish", "holds no plain weights"),
        ("w.pth", b"", "holds no plain weights"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, raw: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(EquidpError, match=message):
        pretrained.file_state(tmp_path / name)


def test_weights_of_another_network_are_refused(weights_file: Path, tmp_path: Path) -> None:
    state = load_file(weights_file)
    state["conv1.weight"] = torch.zeros(64, 3, 3, 3)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(EquidpError, match=r"are not those of torchvision's resnet18: conv1\.weight has shape"):
        build_model("resnet_finetune", SCHEMAS["mnist"], options={"weights": str(tmp_path / "w.safetensors")})
    del state["conv1.weight"]
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(EquidpError, match=r"conv1\.weight has shape .* the file has nothing"):
        build_model("resnet_finetune", SCHEMAS["mnist"], options={"weights": str(tmp_path / "w.safetensors")})


@pytest.mark.parametrize(
    ("name", "given"),
    [("resnet_finetune", {}), ("backbone", {"network": "torchvision:resnet18", "weights": "download"})],
)
def test_without_the_internet_the_run_stops_and_says_what_to_fetch(name: str, given: dict, monkeypatch) -> None:
    def refuse(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    with pytest.raises(
        EquidpError,
        match=r"weights of resnet18 are not available \(.*no route to host\): download https://.*model\.options\.weights",
    ):
        build_model(name, SCHEMAS["mnist"], options=given)


@pytest.mark.parametrize("norm", ["frozen", "group"])
def test_trained_weights_need_no_file_that_training_started_from(weights_file: Path, tmp_path: Path, norm: str) -> None:
    """A served model is loaded on other machines."""
    schema, given = SCHEMAS["cifar10"], {"weights": str(weights_file), "norm": norm}
    trained = build_model("resnet_finetune", schema, options=given, seed=1)
    elsewhere = given | {"weights": str(tmp_path / "nowhere.safetensors")}
    served = build_model("resnet_finetune", schema, options=elsewhere, files=False)
    served.load_state_dict(trained.state_dict())
    images = torch.randint(0, 256, (2, *schema.shape), dtype=torch.uint8)
    assert torch.equal(served.eval()(images), trained.eval()(images))


@pytest.mark.parametrize(
    ("name", "option"), [("resnet_finetune", "weights"), ("backbone", "weights"), ("bilstm", "vectors")]
)
def test_a_card_does_not_tell_on_whose_machine_a_file_lay(name: str, option: str) -> None:
    """It is in the file of weights, which may go out."""
    own = {"network": "timm:resnet18"} if name == "backbone" else {"activation": "tanh"}
    told = card_options(name, {option: "/home/a.name/clinic/start.pth", **own})
    assert told == {option: "start.pth", **own}
    assert card_options("resnet_finetune", {"weights": "torchvision"}) == {"weights": "torchvision"}


def test_every_option_that_is_a_path_is_known() -> None:
    texts = {
        name: [o for o, f in kind.Options.model_fields.items() if f.annotation is str] for name, kind in MODELS.items()
    }
    assert {name: options for name, options in texts.items() if options} == {
        name: list(kind.Options.paths) for name, kind in MODELS.items() if kind.Options.paths
    }
