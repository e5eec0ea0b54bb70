"""`backbone`: a public pretrained network and a new head. The head alone is trained, or more (`training.trainable`)."""

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
    """Number format of the computation of fixed features: `bf16` takes half of the time or less on processors that have
    it."""
    views: Views = 1
    """Number of views of an image; the mean of their fixed features is taken. 1: the image alone; 2: also turned by
    half; 4: also mirrored; 8: also turned by a quarter. For pictures without top and bottom; each view takes one more
    pass."""
    hidden: Widths = ()
    """Widths of the head's hidden layers; none for a linear head."""
    trainable: Trainable = "head"
    """Set it by `training.trainable`. With `head`, features are computed only once."""
    lora_rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rank of an adapter."""
    lora_alpha: Positive = 16.0
    """An adapter's result is multiplied by this number divided by the rank."""
    lora_targets: Annotated[tuple[str, ...], BeforeValidator(listed)] = ()
    """Ends of the names of the layers that get adapters, such as `query+value`. If empty, the attention layers get
    them; in a network without attention, all layers wider than the rank, or else all."""
    config: dict[str, Any] = Field(default_factory=dict)
    """A run writes it into its model's card: the configuration in the network's folder, to build the model where the
    folder is missing."""
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
        if fixed and self.trainable != "head":  # judged by value, so that the defaults undo a preset's choice
            raise ValueError(
                f"{' and '.join(fixed)} of features have no effect unless training.trainable is head; set precision to "
                "float32 and views to 1 (where more is trained, training.precision is the setting)"
            )
        return self

    def feature_options(self) -> dict[str, Any] | None:
        """The options of the fixed feature map; None where more than the head is trained."""
        if self.trainable != "head":
            return None
        return {name: getattr(self, name) for name in ("network", "weights", "size", "precision", "views")}

    def tokenizer(self) -> str:
        """The folder of the network, which holds its tokenizer; empty for timm and torchvision."""
        library, name = check_name(self.network)
        return name if library == "hf" else ""

    @property
    def extra(self) -> str:
        """`pretrained`, but empty for a head alone, which takes features, and for torchvision without adapters."""
        alone = self.trainable == "head" or (self.trainable != "lora" and self.network.startswith("torchvision:"))
        return "" if alone else "pretrained"

    @property
    def files(self) -> bool:
        """Whether weights are read from files."""
        return self._files

    def without_files(self) -> Self:
        """The options without the path of weights: the weights that the model gets include the network's."""
        found = self.model_copy(update={"weights": ""})
        found._files = False
        return found

    @classmethod
    def published(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options as they may be published: of a folder, too, only its name.

        If more than the head is trained, the network goes out with the model, and its configuration is added.
        """
        found, (library, name) = super().published(options), check_name(options["network"])
        if library == "hf":
            found["network"] = f"hf:{Path(name).name}"
            if options.get("trainable", "head") != "head" and not options.get("config"):
                found["config"] = config_of(name)
        return found


class Backbone(Model):
    """A pretrained network for images or texts, and a linear or MLP head on its normalised features."""

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
            # the parameters' `requires_grad` does not tell: the gradient engine switches it off during its passes
            with torch.no_grad() if self.fixed else contextlib.nullcontext():
                features = self.network(features)
        return self.head(features)


def head_on(width: int, classes: int, options: BackboneOptions) -> nn.Sequential:
    """Return the head: LayerNorm without parameters, hidden layers, and a linear layer that gives the logits.

    LayerNorm works on each record alone, so it learns nothing from the data.
    """
    layers: list[nn.Module] = [nn.LayerNorm(width, elementwise_affine=False)]
    for hidden in options.hidden:
        layers += [nn.Linear(width, hidden), options.make_activation()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, classes))
