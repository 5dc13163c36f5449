"""Small networks with BatchNorm that the adapter tests share: each call builds a new one, always the same.

Running statistics, weights and biases of every BatchNorm are far from their initial values, so that a method that reads
the wrong one shows. `images` and `vectors` are streams for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Generator, Tensor, nn

from fedtta.models.two_head import TwoHead

Network = TypeVar("Network", bound=nn.Module)

CLASSES = 4
SIDE = 6  # of an image
FEATURES = 5  # of a vector


def conv_network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Two convolutions with BatchNorm2d, for `images`."""
    return _build(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 5, 3, padding=1, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(5, CLASSES),
        ),
        dtype,
    )


def mlp_network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A hidden layer with BatchNorm1d, for `vectors`: one sample is one value a channel."""
    return _build(
        lambda: nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, CLASSES)), dtype
    )


def two_head_network(dtype: torch.dtype = torch.float64) -> TwoHead:
    """`TwoHead` with two BatchNorm2d layers in its encoder, for `images`."""
    return _build(
        lambda: TwoHead(
            nn.Sequential(
                nn.Conv2d(3, 4, 3),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Conv2d(4, 6, 3),
                nn.BatchNorm2d(6),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            ),
            6,
            CLASSES,
        ),
        dtype,
    )


def images(n: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Images [n, 3, SIDE, SIDE] in [0, 1]."""
    return torch.rand(n, 3, SIDE, SIDE, generator=Generator().manual_seed(seed), dtype=dtype)


def vectors(n: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Vectors [n, FEATURES]."""
    return torch.randn(n, FEATURES, generator=Generator().manual_seed(seed), dtype=dtype)


def noise(x: Tensor, generator: Generator) -> Tensor:
    """An `augment` for samples of any shape: every value moves on its own."""
    return x + 0.2 * torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of everything in a network, to compare with later."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def _build(make: Callable[[], Network], dtype: torch.dtype) -> Network:
    """Make a network with the same random values every time, the global random state left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)  # `torch.manual_seed` prints a stack for every kind of device
        network = make().to(dtype)
        for layer in network.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                assert layer.running_mean is not None
                assert layer.running_var is not None
                nn.init.normal_(layer.running_mean, std=0.3)
                nn.init.uniform_(layer.running_var, 0.5, 2.0)
                nn.init.uniform_(layer.weight, 0.5, 1.5)
                nn.init.normal_(layer.bias, std=0.3)
    return network.eval()
