"""The papers' CNN: two convolutions, fully connected layers of 64 (FedTHE, appendix C.1; BTFL, appendix B).

    Conv 5x5, 32 - [BN] - ReLU - MaxPool 2 - Conv 5x5, 64 - [BN] - ReLU - MaxPool 2
    - Flatten - FC 64 - ReLU

No padding: 32x32 images leave 64 maps of 5x5, 1,600 numbers, for the first fully connected layer. d = 64, and
the ReLU before the heads that BTFL asks for is the last layer's.

Readings. The text says "2 FC layers (each with 64 neurons in the hidden layers)". By default the head is the second of
the two, 1,600 → 64 → K, as FedICON's Table 3 prints it and as FedTHE's published code has it. `hidden_layers=2` puts
the head on top of two.
`bias=False` removes the biases of all layers here, as in the published experiments (the global head keeps its
own). `norm="batch"` is FedICON's variant for FedBN ("we add batch normalization layers after the
convolutional layers"), also needed by Tent and EATA.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from torch import nn

from models.options import Option, choice, flag, require_image_size

OPTIONS: Mapping[str, Option] = {
    "bias": flag(True),
    "norm": choice(None, "batch"),
    "hidden_layers": choice(1, 2),
}

FEATURES = 64  # d, and the width of every fully connected layer
KERNEL = 5


def map_size(image_size: int) -> int:
    """Return the side of the last feature map; 0 or less means that the image is too small."""
    after_first = (image_size - (KERNEL - 1)) // 2
    return (after_first - (KERNEL - 1)) // 2


def encoder(
    in_channels: int, image_size: int, *, bias: bool, norm: str | None, hidden_layers: int
) -> tuple[nn.Module, int]:
    """Return the encoder [B, C, S, S] → [B, 64], and d = 64.

    Raises
    ------
    ValueError
        `image_size` is below 16.
    """
    require_image_size("model 'cnn'", image_size, 16)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (fan_in, maps) in enumerate(((in_channels, 32), (32, 64)), start=1):
        layers[f"conv{index}"] = nn.Conv2d(fan_in, maps, KERNEL, bias=bias)
        if norm == "batch":
            layers[f"norm{index}"] = nn.BatchNorm2d(maps)
        layers[f"relu{index}"] = nn.ReLU()
        layers[f"pool{index}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()  # [B, 64 s s]
    width = 64 * map_size(image_size) ** 2
    for index in range(1, hidden_layers + 1):
        layers[f"fc{index}"] = nn.Linear(width, FEATURES, bias=bias)
        layers[f"relu{index + 2}"] = nn.ReLU()
        width = FEATURES
    return nn.Sequential(layers), FEATURES
