"""Two small convolutional networks with d = 64.

`cnn`, the papers' CNN (FedTHE, appendix C.1; BTFL, appendix B):

    Conv 5x5, 32 - [BN] - ReLU - MaxPool 2 - Conv 5x5, 64 - [BN] - ReLU - MaxPool 2
    - Flatten - FC 64 - ReLU

No padding: 32x32 images leave 64 maps of 5x5, hence 1,600 inputs of the first fully connected layer. The last ReLU is
the one before the heads that BTFL asks for. The text says "2 FC layers (each with 64 neurons in the hidden layers)". By
default the head is the second of the two, 1,600 → 64 → K, as in FedICON's Table 3 and in FedTHE's published code;
`hidden_layers=2` puts the head on top of two. `bias=False` removes the biases of the encoder, as in the published
experiments. `norm="batch"` is FedICON's variant for FedBN ("we add batch normalization layers after the convolutional
layers"), also needed by Tent and EATA.

`shallow-cnn`, ATP's five-layer CNN (W. Bao et al., "Adaptive Test-Time Personalization for Federated Learning",
NeurIPS 2023):

    (Conv 3x3, 32 - BN - ReLU - MaxPool 2) - (Conv 3x3, 64 - BN - ReLU - MaxPool 2)
    - (Conv 3x3, 64 - BN - ReLU) - Flatten - (FC 64 - BN - ReLU) - head

The paper says no more than "a randomly initialized 5-layer CNN". The rest follows its published code: no padding,
convolutions without bias, a biased fully connected layer, and a BatchNorm after that layer too (over the batch alone,
so a training batch needs two samples). 32x32 images leave 64 maps of 4x4.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedtta.models.info import ModelInfo, choice, flag, require_image_size

FEATURES = 64  # d, and the width of every fully connected layer


def cnn(
    in_channels: int, image_size: int, *, bias: bool, norm: str | None, hidden_layers: int
) -> tuple[nn.Module, int]:
    """Return the encoder [B, C, S, S] → [B, 64], and d = 64; `image_size` is at least 16."""
    require_image_size("model 'cnn'", image_size, 16)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    side = image_size
    for index, (fan_in, maps) in enumerate(((in_channels, 32), (32, 64)), start=1):
        layers[f"conv{index}"] = nn.Conv2d(fan_in, maps, 5, bias=bias)
        if norm == "batch":
            layers[f"norm{index}"] = nn.BatchNorm2d(maps)
        layers[f"pool{index}"] = nn.MaxPool2d(2)  # before the ReLU: same values and gradients, a quarter of the work
        layers[f"relu{index}"] = nn.ReLU()
        side = (side - 4) // 2
    layers["flatten"] = nn.Flatten()  # [B, 64 side side]
    width = 64 * side**2
    for index in range(1, hidden_layers + 1):
        layers[f"fc{index}"] = nn.Linear(width, FEATURES, bias=bias)
        layers[f"relu{index + 2}"] = nn.ReLU()
        width = FEATURES
    return nn.Sequential(layers), FEATURES


def shallow_cnn(in_channels: int, image_size: int) -> tuple[nn.Module, int]:
    """Return the encoder [B, C, S, S] → [B, 64], and d = 64; `image_size` is at least 18."""
    require_image_size("model 'shallow-cnn'", image_size, 18)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    side = image_size
    for index, (fan_in, maps) in enumerate(((in_channels, 32), (32, 64), (64, 64)), start=1):
        layers[f"conv{index}"] = nn.Conv2d(fan_in, maps, 3, bias=False)
        layers[f"norm{index}"] = nn.BatchNorm2d(maps)
        side -= 2
        if index < 3:
            layers[f"pool{index}"] = nn.MaxPool2d(2)  # before the ReLU, as in `cnn`
            side //= 2
        layers[f"relu{index}"] = nn.ReLU()
    layers["flatten"] = nn.Flatten()  # [B, 64 side side]
    layers["fc4"] = nn.Linear(64 * side**2, FEATURES)
    layers["norm4"] = nn.BatchNorm1d(FEATURES)
    layers["relu4"] = nn.ReLU()
    return nn.Sequential(layers), FEATURES


CNN = ModelInfo(
    "two 5x5 convolutions and fully connected layers of 64, d = 64 (FedTHE, BTFL, FedICON)",
    cnn,
    {"bias": flag(True), "norm": choice(None, "batch"), "hidden_layers": choice(1, 2)},
    normalisation=None,
    normalisation_option="norm",
)
SHALLOW_CNN = ModelInfo("ATP's five-layer CNN with BatchNorm, d = 64", shallow_cnn, {}, normalisation="batch")
