"""ATP's five-layer CNN with BatchNorm (Bao et al. 2023, "Adaptive Test-Time Personalization").

    (Conv 3x3, 32 - BN - ReLU - MaxPool 2) - (Conv 3x3, 64 - BN - ReLU - MaxPool 2)
    - (Conv 3x3, 64 - BN - ReLU) - Flatten - (FC 64 - BN - ReLU) - head

The paper says no more than "a randomly initialized 5-layer CNN". What it leaves open follows the facts of its
published code: no padding, convolutions without bias (their BatchNorm has one), a biased fully connected
layer, and a BatchNorm after that one too (over the batch alone, so the training batch needs two samples). The
five layers are three convolutions, one fully connected layer and the head. 32x32 images leave 64 maps of 4x4,
1,024 numbers; d = 64, after a ReLU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from torch import nn

from models.options import Option, require_image_size

OPTIONS: Mapping[str, Option] = {}

FEATURES = 64  # d
KERNEL = 3


def map_size(image_size: int) -> int:
    """Return the side of the last feature map; 0 or less means that the image is too small."""
    after_first = (image_size - (KERNEL - 1)) // 2
    after_second = (after_first - (KERNEL - 1)) // 2
    return after_second - (KERNEL - 1)


def encoder(in_channels: int, image_size: int) -> tuple[nn.Module, int]:
    """Return the encoder [B, C, S, S] → [B, 64], and d = 64.

    Raises
    ------
    ValueError
        `image_size` is below 18.
    """
    require_image_size("model 'shallow-cnn'", image_size, 18)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (fan_in, maps) in enumerate(((in_channels, 32), (32, 64), (64, 64)), start=1):
        layers[f"conv{index}"] = nn.Conv2d(fan_in, maps, KERNEL, bias=False)
        layers[f"norm{index}"] = nn.BatchNorm2d(maps)
        layers[f"relu{index}"] = nn.ReLU()
        if index < 3:
            layers[f"pool{index}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()  # [B, 64 s s]
    layers["fc4"] = nn.Linear(64 * map_size(image_size) ** 2, FEATURES)
    layers["norm4"] = nn.BatchNorm1d(FEATURES)
    layers["relu4"] = nn.ReLU()
    return nn.Sequential(layers), FEATURES
