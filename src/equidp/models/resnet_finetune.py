"""`resnet_finetune`: torchvision's pretrained ResNet with a fresh last layer, trained as a whole or from a stage on."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from equidp.data.records import Schema
from equidp.errors import EquidpError
from equidp.models.base import Model, ModelOptions, Standardise

SCRATCH = "none"


class ResNetFinetuneOptions(ModelOptions):
    """Options of `resnet_finetune`."""

    paths = ("weights",)

    architecture: Literal["resnet18", "resnet34", "resnet50"] = "resnet18"
    """Which ResNet."""
    norm: Literal["frozen", "group"] = "frozen"
    """`frozen` keeps BatchNorm with its pretrained statistics, fixed; `group` replaces it by GroupNorm."""
    weights: str = "torchvision"
    """`torchvision`, the path of a file, or `none` for a start from scratch (with `norm: group` only)."""
    train_from: Literal["conv1", "layer1", "layer2", "layer3", "layer4", "fc"] = "conv1"
    """First stage that is trained; the stages before it stay as they are."""
    size: Annotated[int, Field(ge=0, le=1024)] = 0
    """Side that images are resized to; 0 to keep their size."""

    @model_validator(mode="after")
    def _frozen_statistics_are_somebodys(self) -> Self:
        if self.weights == SCRATCH and self.norm == "frozen":
            raise ValueError("weights: none needs norm: group, as frozen statistics need weights")
        return self

    def without_files(self) -> Self:
        """The options without pretrained weights: the weights that the model gets include frozen statistics."""
        return self.model_copy(update={"weights": SCRATCH})


class ResNetFinetune(Model):
    """A ResNet for any image dataset; grey images are repeated to three channels."""

    kinds = ("image",)
    Options = ResNetFinetuneOptions
    scored_at_once = 128  # small images may be resized to large ones

    def __init__(self, schema: Schema, options: ResNetFinetuneOptions) -> None:
        super().__init__(schema, options)
        from equidp.models import pretrained  # imports torchvision, which the small models need not wait for

        if schema.shape[0] not in (1, 3):
            raise EquidpError(f"Model resnet_finetune takes images of 1 or 3 channels, not {schema.shape[0]}.")
        self.standardise = Standardise(schema)
        self.size = options.size
        self.network = pretrained.resnet(options.architecture, norm=options.norm, activation=options.make_activation)
        if options.weights != SCRATCH:
            pretrained.load_pretrained(self.network, options.architecture, options.weights)
        for name, stage in self.network.named_children():
            if name == options.train_from:
                break
            stage.requires_grad_(False)
        self.network.fc = nn.Linear(self.network.fc.in_features, schema.outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Logits `[batch, classes]`."""
        images = self.standardise(features).expand(-1, 3, -1, -1)
        if self.size:
            images = nn.functional.interpolate(images, self.size, mode="bilinear", align_corners=False)
        return self.network(images)
