"""`backbone`: a public pretrained network, whose last layer alone is trained, or more of it (`training.trainable`)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.errors import EquidpError
from equidp.models.base import Model
from equidp.models.features import is_row_of_network
from equidp.models.heads import HeadOptions
from equidp.models.hubs import Network, Precision, Views, check_name, config_of, open_network
from equidp.models.hubs.trainable import BATCH_NORMS, Trainable, choose
from equidp.options import Positive, Widths, listed

logger = logging.getLogger(__name__)


class BackboneOptions(HeadOptions):
    """Options of `backbone`."""

    paths: ClassVar[tuple[str, ...]] = ("network", "weights")

    network: str
    """`timm:<name>`, `torchvision:<name>`, or `hf:<folder>` in Hugging Face's format."""
    weights: Annotated[str, BeforeValidator(lambda path: path or "")] = ""  # `weights=` on the command line is None
    """Path of a `.safetensors` file or its folder, or `download`; none for `hf`, whose folder has them."""
    size: Annotated[int, Field(ge=0, le=1024)] = 0
    """Side that images are resized to before the network sees them; 0 for the network's own."""
    precision: Precision = "float32"
    """Of fixed features: `bf16` takes half of the time or less on processors that have it."""
    views: Views = 1
    """Of an image, over whose fixed features the mean is taken: 2, also turned by half; 4, also mirrored; 8, also
    turned by a quarter. For pictures without top and bottom; each view takes one more pass."""
    hidden: Widths = ()
    """Widths of the head's hidden layers; none for a linear head."""
    trainable: Trainable = "head"
    """Set it by `training.trainable`. `head`: features are computed once."""
    lora_rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rank of an adapter."""
    lora_alpha: Positive = 16.0
    """An adapter's result is multiplied by this over its rank."""
    lora_targets: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    """Ends of the names of the layers that get adapters, `query+value`; none: those of attention, else all."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Written by a run into its model's card: what the folder says of the network, for where the folder is not."""
    _files: bool = PrivateAttr(default=True)

    @model_validator(mode="after")
    def _names_a_network(self) -> Self:
        try:
            check_name(self.network)
        except EquidpError as error:
            raise ValueError(error.message.rstrip(".")) from error
        if self.trainable != "lora" and (lora := sorted(n for n in self.model_fields_set if n.startswith("lora_"))):
            raise ValueError(f"{', '.join(lora)} has no effect unless training.trainable is lora")
        fixed = [
            name for name in ("precision", "views") if getattr(self, name) != type(self).model_fields[name].default
        ]
        if fixed and self.trainable != "head":  # a preset's are set back by the defaults
            raise ValueError(
                f"{' and '.join(fixed)} of features have no effect unless training.trainable is head; set precision to "
                "float32 and views to 1 (where more is trained, training.precision is the setting)"
            )
        return self

    def feature_options(self) -> dict[str, Any] | None:
        """Network, weights and how it computes; None where more than the head is trained."""
        if self.trainable != "head":
            return None
        return {name: getattr(self, name) for name in ("network", "weights", "size", "precision", "views")}

    def tokenizer(self) -> str:
        """The folder of the network."""
        library, name = check_name(self.network)
        return name if library == "hf" else ""

    @property
    def extra(self) -> str:
        """None for a head alone, which takes features, and for a network of torchvision without adapters."""
        alone = self.trainable == "head" or (self.trainable != "lora" and self.network.startswith("torchvision:"))
        return "" if alone else "pretrained"

    @property
    def files(self) -> bool:
        """Whether weights are read from files."""
        return self._files

    def without_files(self) -> Self:
        """The network's weights are among those given."""
        found = self.model_copy(update={"weights": ""})
        found._files = False
        return found

    @classmethod
    def published(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Also of a folder only its name, and what it says of the network where that goes out with the model."""
        found, (library, name) = super().published(options), check_name(options["network"])
        if library == "hf":
            found["network"] = f"hf:{Path(name).name}"
            if options.get("trainable", "head") != "head" and not options.get("config"):
                found["config"] = config_of(name)
        return found


class Backbone(Model):
    """A pretrained network for images or texts, its features normalised, and a linear or MLP head."""

    kinds = ("tabular", "image", "text")
    Options = BackboneOptions
    extracts = "network"
    scored_at_once = 32

    def __init__(self, schema: Schema, options: BackboneOptions) -> None:
        super().__init__(schema, options)
        self.network: Network | None = None
        self.fixed = options.trainable == "head"
        if is_row_of_network(schema):
            if options.trainable != "head":
                raise EquidpError(f"training.trainable={options.trainable}: the records are features already.")
            width = schema.shape[0]
        elif schema.kind == "tabular":
            raise EquidpError(
                f"Model backbone takes images or texts, dataset {schema.name!r} has tabular features; choose another "
                "model.name."
            )
        else:
            self.network = open_network(options, schema, files=options.files)
            width = self.network.width
            self._choose(self.network.body, options)
        self.head = head_on(width, schema.outputs, options)

    def _choose(self, body: nn.Module, options: BackboneOptions) -> None:
        choose(body, options.trainable, rank=options.lora_rank, alpha=options.lora_alpha, targets=options.lora_targets)
        frozen = [name for name, module in body.named_modules() if isinstance(module, BATCH_NORMS)]
        if options.trainable != "head" and frozen:
            logger.info(
                "%s: the statistics of %d BatchNorm layers stay as they are (%s, …).",
                options.network,
                len(frozen),
                frozen[0],
            )

    def forward(self, features: Tensor) -> Tensor:
        """Logits `[batch, classes]`."""
        if self.network is not None:
            # not asked of the parameters: the gradient engine switches their gradients off for autograd
            with torch.no_grad() if self.fixed else contextlib.nullcontext():
                features = self.network(features)
        return self.head(features)


def head_on(width: int, classes: int, options: BackboneOptions) -> nn.Sequential:
    """LayerNorm without parameters (per record, so nothing is learnt from the data), hidden layers, logits."""
    layers: list[nn.Module] = [nn.LayerNorm(width, elementwise_affine=False)]
    for hidden in options.hidden:
        layers += [nn.Linear(width, hidden), options.make_activation()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, classes))
