"""What a server can see of training images in an update of weights that it has chosen.

The gradient of a linear layer's weights by a sample is the outer product of what flows back and the layer's input, and
that of its bias is what flows back: their ratio is the input (Geiping et al., NeurIPS 2020; Boenisch et al., EuroS&P
2023). The weights of the convolutions before it are the server's choice, and positive: the input tells the image.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtta.data import load
from fedtta.messages.arrays import Arrays
from fedtta.models import build

SIZE = 32
FC = "encoder.body.fc1."
COMMON = 60  # directions in which the inputs of images differ most: brightness, and what pooling makes of it


def chosen_weights(threshold: float | None = None) -> Arrays:
    """Return weights of the network `cnn` under which every unit of its linear layer sees the image.

    Parameters
    ----------
    threshold : float, optional
        Units are only active for images whose response is larger: a trap for few of them.
    """
    arrays = initial_weights(3)
    rng = np.random.default_rng(3)
    for name, value in arrays.items():
        if "conv" in name:
            sharp = np.abs(value) ** 8  # each map sees a few pixels of what is below, and no ReLU cuts them off
            share = sharp.reshape(len(sharp), -1).sum(1).reshape(-1, *[1] * (sharp.ndim - 1))
            arrays[name] = (sharp / share if name.endswith("weight") else 2 + 0 * value).astype(np.float32)
    arrays[f"{FC}weight"] = np.full_like(arrays[f"{FC}weight"], 1e-3)
    bias = 0.01 if threshold is None else -threshold
    arrays[f"{FC}bias"] = np.full_like(arrays[f"{FC}bias"], bias)
    arrays["head.weight"] = rng.normal(0, 0.02, arrays["head.weight"].shape).astype(np.float32)
    return arrays


def trap(seen: NDArray[np.uint8], count: int = 1) -> Arrays:
    """Return weights under which so many of the images have a feature."""
    found = np.sort(responses(seen))
    return chosen_weights(float(found[-count] + found[-count - 1]) / 2)


def initial_weights(seed: int) -> Arrays:
    """Return the weights with which a run starts."""
    network = build("cnn", 10, image_size=SIZE, seed=seed)
    return {name: value.numpy().copy() for name, value in network.global_state().items()}


def random_weights() -> Arrays:
    """Return normal weights."""
    draw = np.random.default_rng(0)
    return {name: draw.normal(0, 0.1, value.shape).astype(np.float32) for name, value in initial_weights(3).items()}


def decoyed_weights(seen: NDArray[np.uint8], weight: float = 300.0, scale: float = 1e-6) -> Arrays:
    """Return weights under which one of the images makes nearly all of the update, and all have features.

    One unit is a trap; the others have the same small feature for every image, and their gradients cancel in the sum
    over classes. The gradient of the trapped image is `weight` times that of each other one: among 600 images
    (Σ c)² / Σ c² is 9. Random convolutions less the mean of their maps leave what an image has alone: that is two
    thirds of the linear layer's input.
    """
    arrays = random_weights()
    maps = _seen(_network(arrays), seen).numpy().reshape(len(seen), 64, -1)
    arrays["encoder.body.conv2.bias"] -= maps.mean((0, 2))
    total = np.sort(_seen(_network(arrays), seen).double().sum(1).numpy())
    arrays[f"{FC}weight"][0], arrays[f"{FC}bias"][0] = scale, -scale * (total[-1] + total[-2]) / 2
    arrays[f"{FC}weight"][1:], arrays[f"{FC}bias"][1:] = scale * 0.01, 1e-3
    sign = np.where(np.arange(len(arrays["head.weight"])) % 2, 1.0, -1.0)
    arrays["head.weight"][:], arrays["head.weight"][:, 0], arrays["head.weight"][:, 1] = 0, sign * weight, sign
    return arrays


def _network(arrays: Arrays) -> torch.nn.Module:
    network = build("cnn", 10, image_size=SIZE, seed=3)
    network.load_global_state({name: torch.tensor(value) for name, value in arrays.items()})
    return network.eval()


_SEEN: dict[tuple[bytes, bytes], Tensor] = {}


def responses(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return what the thresholds of `chosen_weights` are compared with, for images."""
    return (_seen(_network(chosen_weights()), pixels).sum(1) * 1e-3).numpy()


@torch.no_grad()
def _seen(network: torch.nn.Module, pixels: NDArray[np.uint8]) -> Tensor:
    """Return the input of the linear layer for images; kept for the same images and convolutions."""
    made = [value.numpy().tobytes() for name, value in network.named_parameters() if "conv" in name]
    key = hashlib.sha256(pixels.tobytes()).digest(), hashlib.sha256(b"".join(made)).digest()
    if key not in _SEEN:
        _SEEN[key] = _inputs(network, torch.tensor(pixels).float() / 255)
    return _SEEN[key]


def _inputs(network: torch.nn.Module, x: Tensor) -> Tensor:
    for name, layer in network.encoder.body.named_children():  # type: ignore[union-attr]
        if name == "fc1":
            return x
        x = layer(network.encoder.normalise(x) if name == "conv1" else x)  # type: ignore[union-attr, operator]
    raise AssertionError("there is no linear layer")


def reconstructed(before: Arrays, after: Arrays) -> NDArray[np.float32]:
    """Return the gray image [S, S] that explains an update best."""
    weight, bias = (np.float64(after[FC + name]) - before[FC + name] for name in ("weight", "bias"))
    unit = int(np.abs(bias).argmax())
    seen = torch.tensor(weight[unit] / bias[unit], dtype=torch.float32)
    network, basis = _network(before), torch.tensor(_basis())
    for value in network.parameters():
        value.requires_grad_(False)
    code = torch.full((len(basis),), 0.3, requires_grad=True)
    descent = torch.optim.LBFGS(
        [code], max_iter=400, tolerance_change=1e-14, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        descent.zero_grad()
        image = (code @ basis).view(1, 1, SIZE, SIZE).expand(1, 3, SIZE, SIZE)
        value = ((_inputs(network, image)[0] - seen) ** 2).mean()
        value.backward()
        return value

    descent.step(loss)
    return (code @ basis).detach().view(SIZE, SIZE).numpy()


@lru_cache(maxsize=1)
def _basis() -> NDArray[np.float32]:
    """Return images [64, S S] of which the digits are sums: they were made from 8 by 8 pixels."""
    small, large = (load("digits", image_size=size).pixels[:, 0].reshape(1797, -1) / 255 for size in (8, SIZE))
    return np.linalg.lstsq(small, large, rcond=None)[0].astype(np.float32)


def correlations(image: NDArray[np.float32], pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the correlation of an image with each of others, after the mean of all digits is taken off."""
    mean = load("digits", image_size=SIZE).pixels[:, 0].mean(0) / 255
    one = (image - mean).ravel()
    rows = (pixels[:, 0] / 255 - mean).reshape(len(pixels), -1)
    one, rows = one - one.mean(), rows - rows.mean(1, keepdims=True)
    return rows @ one / (np.linalg.norm(rows, axis=1) * np.linalg.norm(one) + 1e-12)


def gap(before: Arrays, after: Arrays, members: NDArray[np.uint8], others: NDArray[np.uint8]) -> float:
    """Return how much more an update correlates with an image that was trained on than with those that were not.

    Correlations are those of the linear layer's inputs, without what all inputs have in common: for every unit whose
    weights have moved, what the update tells of its input, with each image's own.
    """
    network = _network(before)
    weight = np.float64(after[f"{FC}weight"]) - before[f"{FC}weight"]
    moved = np.abs(weight).max(1) > 1e-9
    if not (moved.any() and np.isfinite(weight).all()):
        return 0.0
    common, inside, outside = _special(network, members, others)
    told = _without(common, torch.tensor(weight[moved]))
    return float((told @ inside.T).abs().max() - (told @ outside.T).abs().max())  # of either sign


_SPECIAL: dict[bytes, tuple[Tensor, Tensor, Tensor]] = {}


def _special(
    network: torch.nn.Module, members: NDArray[np.uint8], others: NDArray[np.uint8]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the common directions of the inputs of images, and members' and others' inputs without them."""
    inside, outside = (_seen(network, one).double() for one in (members, others))
    key = hashlib.sha256(inside.numpy().tobytes()).digest()
    if key not in _SPECIAL:
        common = torch.linalg.svd(torch.cat([inside, outside]), full_matrices=False).Vh[:COMMON]  # orthonormal rows
        _SPECIAL[key] = common, _without(common, inside), _without(common, outside)
    return _SPECIAL[key]


def _without(common: Tensor, rows: Tensor) -> Tensor:
    rest = rows - rows @ common.T @ common
    return rest / rest.norm(dim=1, keepdim=True).clamp(min=1e-12)
