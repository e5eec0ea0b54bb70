"""Networks that timm and torchvision know by name."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.errors import EquidpError, refuse_unknown, unknown_name
from equidp.models.hubs.files import digest, load_fitting, read_weights, weight_files
from equidp.models.hubs.network import ImageNetwork, Preparation
from equidp.system.extras import extra
from equidp.system.network import attempt

if TYPE_CHECKING:
    from equidp.models.hubs import Asked

DOWNLOAD = "download"
SETTING = "model.options.weights"


def from_timm(name: str, asked: Asked, schema: Schema, files: bool) -> ImageNetwork:
    """timm's network of that name."""
    timm = _timm(name)
    body = timm.create_model(name, pretrained=False, num_classes=0)
    facts = extra("timm.data", "model.options.network").resolve_data_config({}, model=body)
    own = facts["input_size"][-1]
    if asked.size and asked.size != own and body.pretrained_cfg.get("fixed_input_size"):
        raise EquidpError(
            f"model.options.size={asked.size}: timm:{name} takes images of {own} alone; leave the option out."
        )
    if files:
        state = _timm_state(timm, name) if asked.weights == DOWNLOAD else _given(asked)
        heads = body.pretrained_cfg.get("classifier") or ()
        load_fitting(body, state, (heads,) if isinstance(heads, str) else tuple(heads), _what(asked))
    preparation = Preparation(
        asked.size or own, tuple(facts["mean"]), tuple(facts["std"]), str(facts["interpolation"]).replace("random", "")
    )
    return ImageNetwork(body, preparation)


def identity_in_timm(name: str, asked: Asked) -> str:
    """Version and weights."""
    timm = _timm(name)
    found = str(timm.get_pretrained_cfg(name)) if asked.weights == DOWNLOAD else _digest(asked)
    return f"timm {version('timm')} {found}"


def _timm(name: str) -> Any:
    timm = extra("timm", f"model.options.network=timm:{name}")
    if not timm.is_model(name.partition(".")[0]):
        raise unknown_name("network of timm", name, timm.list_models())
    return timm


def _timm_state(timm: Any, name: str) -> dict[str, Tensor]:
    made, reason = attempt(lambda: timm.create_model(name, pretrained=True, num_classes=0))
    if made is None:
        raise EquidpError(
            f"Weights of timm:{name} are not available ({reason}): fetch its model.safetensors on another machine, and "
            f"give the path in {SETTING}."
        )
    return made.state_dict()


def from_torchvision(name: str, asked: Asked, schema: Schema, files: bool) -> ImageNetwork:
    """torchvision's network of that name, for classes of images."""
    models = _torchvision(name)
    body = models.get_model(name, weights=None)
    last = [layer for layer, module in body.named_modules() if isinstance(module, nn.Linear)]
    if not last:
        raise EquidpError(f"torchvision:{name} does not end in a Linear layer; choose another network.")
    body.set_submodule(last[-1], nn.Identity())
    facts = models.get_model_weights(name).DEFAULT.transforms()
    if files:
        load_fitting(body, _torchvision_state(name, asked), (last[-1],), _what(asked))
    preparation = Preparation(
        asked.size or facts.crop_size[0], tuple(facts.mean), tuple(facts.std), facts.interpolation.value
    )
    return ImageNetwork(body, preparation)


def identity_in_torchvision(name: str, asked: Asked) -> str:
    """Version and weights."""
    models = _torchvision(name)
    found = models.get_model_weights(name).DEFAULT.url if asked.weights == DOWNLOAD else _digest(asked)
    return f"torchvision {version('torchvision')} {found}"


def _torchvision(name: str) -> Any:
    from torchvision import models  # late: other models need not wait for it

    refuse_unknown("network of torchvision", [name], models.list_models(module=models))
    return models


def _torchvision_state(name: str, asked: Asked) -> dict[str, Tensor]:
    if asked.weights != DOWNLOAD:
        return _given(asked)
    from equidp.models.pretrained import torchvision_state

    return torchvision_state(name)


def _given(asked: Asked) -> dict[str, Tensor]:
    return read_weights(_path(asked), SETTING)


def _digest(asked: Asked) -> str:
    return digest(weight_files(_path(asked), SETTING))


def _path(asked: Asked) -> Path:
    if not asked.weights:
        raise EquidpError(
            f"{SETTING}: {asked.network} needs its pretrained weights: give the path of its .safetensors file, or "
            "`download` to fetch them."
        )
    return Path(asked.weights)


def _what(asked: Asked) -> str:
    return f"{asked.weights} for {asked.network}"
