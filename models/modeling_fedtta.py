"""A network exported by FedTTA, for Hugging Face's transformers; needs torch, transformers, numpy and Pillow.

    model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
    processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
    logits = model(**processor(image)).logits

`fedtta.models.export` copies this file and `preprocessing.py` into the folder. The network itself is `program.pt2`, a
program of torch.export from images [B, C, S, S], floats in [0, 1], to logits [B, K].
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils import cached_file

from .preprocessing import Preprocessing

PROGRAM = "program.pt2"


class FedTTAConfig(PretrainedConfig):
    """Class names, and the preprocessing of images."""

    model_type = "fedtta"


class FedTTAForImageClassification(PreTrainedModel):
    """The exported network, in evaluation mode."""

    config_class = FedTTAConfig
    main_input_name = "pixel_values"

    def __init__(self, config: FedTTAConfig, program: torch.nn.Module | None = None) -> None:
        super().__init__(config)
        if program is None:
            raise ValueError("the network is in the exported folder: use from_pretrained")
        self.program = program

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *_: Any, config: Any = None, **options: Any
    ) -> FedTTAForImageClassification:
        """Load `config.json` and `program.pt2` from a folder or a repository of the hub."""
        hub = {key: options[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in options}
        config = config or FedTTAConfig.from_pretrained(folder, **hub)
        program = cached_file(folder, PROGRAM, **hub)
        if program is None:
            raise OSError(f"{folder} has no {PROGRAM}")
        return cls(config, torch.export.load(program).module())

    def train(self, mode: bool = True) -> FedTTAForImageClassification:
        """Keep evaluation mode, the only one that the program knows."""
        if mode:
            raise ValueError("an exported network cannot be trained")
        return self

    def eval(self) -> FedTTAForImageClassification:
        """Return the model, which is in evaluation mode."""
        return self

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **_: Any) -> ImageClassifierOutput:
        """Return logits [B, K] of images [B, C, S, S], floats in [0, 1], and with `labels` [B] the cross-entropy."""
        logits = self.program(pixel_values)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


class FedTTAImageProcessor(BaseImageProcessor):
    """The model's preprocessing: images (files' bytes, Pillow images, arrays) to floats [B, C, S, S] in [0, 1]."""

    model_input_names = ["pixel_values"]  # noqa: RUF012 (as transformers declares it)

    def __init__(self, preprocessing: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.preprocessing = preprocessing or {}

    def __call__(self, images: Any, **_: Any) -> BatchFeature:
        """Prepare one image or a sequence of images."""
        prepare = Preprocessing.from_dict(self.preprocessing)
        several = images if isinstance(images, Sequence) and not isinstance(images, bytes) else [images]
        decoded = [prepare.decode(one) if isinstance(one, bytes) else one for one in several]
        pixels = torch.stack([torch.tensor(prepare.apply(one)) for one in decoded])
        return BatchFeature({"pixel_values": pixels.float() / 255})
