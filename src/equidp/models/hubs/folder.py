"""A network in a folder of Hugging Face's format: config.json, model.safetensors, and a tokenizer or image settings.

Only the network's own files are read. Code among them is not run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.data.tokens import tokenizer_digest
from equidp.errors import EquidpError, first_line
from equidp.models.hubs.files import digest, refuse_unfitting, weight_files
from equidp.models.hubs.network import ImageNetwork, Network, Preparation, TextNetwork
from equidp.system.extras import extra

if TYPE_CHECKING:
    from equidp.models.hubs import Asked

SETTING = "model.options.network"
IMAGE_FILE, POOLING_FILE = "preprocessor_config.json", Path("1_Pooling") / "config.json"
RESAMPLING = {0: "nearest", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers."""
POOLER = "pooler"
"""Name of a layer for another task. Checkpoints often lack it, so it is removed where features do not need it."""


class ImageFolderNetwork(ImageNetwork):
    """A network for images. Features: the class token; else the pooled output; else the mean over all positions."""

    def __init__(self, body: nn.Module, preparation: Preparation) -> None:
        super().__init__(body, preparation)
        self.by_token = any(name.endswith("cls_token") for name, _ in body.named_parameters())

    def pooled(self, pixels: Tensor) -> Tensor:
        """One row of features per image."""
        found = self.body(pixel_values=pixels)
        if self.by_token:
            return found.last_hidden_state[:, 0]
        rows = getattr(found, "pooler_output", None)
        return found.last_hidden_state.flatten(2).mean(2) if rows is None else rows.flatten(1)


def config_of(name: str) -> dict[str, Any]:
    """Read what a network is built from besides its weights, as JSON types: network, image settings, pooling.

    Raises:
        EquidpError: the folder or its config.json is missing, or a file is not JSON.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise EquidpError(f"{SETTING}: folder {folder} does not exist; give a folder in Hugging Face's format.")
    model = _json(folder / "config.json")
    if model is None:
        raise EquidpError(f"{SETTING}: {folder} has no config.json; save the network there with save_pretrained.")
    pooling = _json(folder / POOLING_FILE) or {}
    token = pooling.get("pooling_mode_cls_token", False) or pooling.get("pooling_mode") == "cls"
    return {"model": model, "images": _json(folder / IMAGE_FILE), "pooling": "cls" if token else "mean"}


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise EquidpError(f"{SETTING}: {path} is damaged ({error}); get it again.") from error


def from_folder(name: str, asked: Asked, schema: Schema, files: bool) -> Network:
    """Return the network in a folder, or one built from a configuration that was once read from a folder."""
    if asked.weights:
        raise EquidpError(
            f"model.options.weights: the folder of {asked.network} has its weights; leave the option out."
        )
    given = dict(asked.config) if asked.config and not files else config_of(name)
    transformers = extra("transformers", f"{SETTING}=hf:{name}")
    if schema.kind == "text" and files:
        _refuse_other_tokens(schema, name)
    body = _loaded(transformers, name) if files else _built(transformers, given["model"])
    if schema.kind == "text":
        longest = getattr(body.config, "max_position_embeddings", None)
        if longest and schema.shape[0] > longest:
            raise EquidpError(
                f"data.options.length={schema.shape[0]}: hf:{name} reads at most {longest} tokens; lower it."
            )
        _drop_pooler(body)
        return TextNetwork(body, getattr(body.config, "pad_token_id", None) or 0, given["pooling"])
    network = ImageFolderNetwork(body, _preparation(given["images"], asked.size, name))
    if network.by_token:
        _drop_pooler(body)
    return network


def identity(name: str, asked: Asked) -> str:
    """Version, configuration and weights."""
    config = json.dumps(config_of(name), sort_keys=True)
    return f"transformers {version('transformers')} {config} {digest(weight_files(Path(name), SETTING))}"


def _refuse_other_tokens(schema: Schema, name: str) -> None:
    remedy = f"set data.options.tokenizer={name}"
    if not schema.tokenizer:
        raise EquidpError(
            f"The texts of dataset {schema.name!r} are words of no tokenizer, and hf:{name} reads the tokens of its "
            f"own: {remedy}."
        )
    if schema.tokenizer != tokenizer_digest(Path(name)):
        raise EquidpError(f"The texts of dataset {schema.name!r} are another tokenizer's than hf:{name}'s: {remedy}.")


def _loaded(transformers: Any, name: str) -> nn.Module:
    weight_files(Path(name), SETTING)
    try:
        with _silent(transformers):
            body, found = transformers.AutoModel.from_pretrained(
                name,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # refused below, all in one message
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise EquidpError(
            f"{SETTING}: {name} holds no network that transformers can read ({first_line(error)})."
        ) from error
    children = {child for child, _ in body.named_children()}
    prefix = f"{body.base_model_prefix}."
    unknown = [key for key in found["unexpected_keys"] if key.removeprefix(prefix).partition(".")[0] in children]
    refuse_unfitting(
        f"hf:{name}, by its config.json,",
        lacking=sorted(key for key in found["missing_keys"] if POOLER not in key),
        other=sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in found["mismatched_keys"]),
        extra=sorted(unknown),
    )
    return body


def _built(transformers: Any, config: Mapping[str, Any]) -> nn.Module:
    return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config))


def _drop_pooler(body: nn.Module) -> None:
    if getattr(body, POOLER, None) is not None:
        body.pooler = None  # type: ignore[assignment]


def _preparation(facts: Mapping[str, Any] | None, size: int, name: str) -> Preparation:
    if facts is None:
        raise EquidpError(
            f"{SETTING}: {name} has no {IMAGE_FILE}, so that nobody knows how its images were scaled; save the "
            "network's image processor there with save_pretrained."
        )
    side = facts.get("crop_size") or facts.get("size") or 224
    if isinstance(side, Mapping):
        side = side.get("height") or side.get("shortest_edge") or 224
    plain = not facts.get("do_normalize", True)
    mean, sd = ((0.0,) * 3, (1.0,) * 3) if plain else (facts.get("image_mean"), facts.get("image_std"))
    constants = {} if mean is None or sd is None else {"mean": tuple(mean), "sd": tuple(sd)}
    return Preparation(
        size or int(side), interpolation=RESAMPLING.get(facts.get("resample", 2), "bicubic"), **constants
    )


@contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    """Silence the library's remarks on keys. Those that matter are refused in one sentence."""
    log = transformers.utils.logging
    level = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        log.enable_progress_bar()
