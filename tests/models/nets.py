"""Functions that make networks, as a user would write them; models name them "tests.models.nets:<function>"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """An encoder that uses one convolution twice, and whose output may be negative."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = self.first
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, width)
        self.feature_dim = width

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(self.norm(self.stem(x)))))
        return self.head(x.mean((2, 3)))


def tied(in_channels: int, width: int = 6) -> nn.Module:
    return Tied(in_channels, width)


def pair(in_channels: int) -> tuple[nn.Module, int]:
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * in_channels, 5), nn.ReLU()), 5


def whole(num_classes: int, **options: Any) -> nn.Module:
    layers = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Dropout(options.get("p", 0.0))]
    return nn.Sequential(*layers, nn.Linear(7, num_classes, bias=False))


def not_last(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.Linear(4, num_classes), nn.Softmax(1))


def no_linear() -> nn.Module:
    return nn.Flatten()


def wrong_width() -> tuple[nn.Module, int]:
    return nn.Flatten(), 7


def nothing() -> None:
    return None


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def own_norm() -> tuple[nn.Module, int]:
    return nn.Sequential(OwnNorm(3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 3


def residual() -> tuple[nn.Module, int]:
    """Return an encoder whose last layer is a ReLU, and whose output may be negative nevertheless."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            z = x.flatten(1)[:, :9]
            return z + 0.1 * self.relu(z)

    return Residual(), 9


def branching(training: bool = True) -> tuple[nn.Module, int]:
    """Return an encoder whose computation depends on the images; without `training`, in evaluation mode alone."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            z = x.flatten(1)[:, :9] * self.scale
            return z if (self.training and not training) or float(z.mean()) > 0 else -z

    return Branching(), 9


class Average(nn.Module):
    """Subtracts the average of all values so far, which it keeps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean()
            return x
        return x - self.average


def counting() -> tuple[nn.Module, int]:
    """Return an encoder that counts its batches in training, and depends on their number."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.steps += 1
            return x.flatten(1)[:, :9] * self.scale / (1 + self.steps)

    return Counting(), 9


def moving(own: bool = False) -> tuple[nn.Module, int]:
    """Return an encoder with running statistics that are no exponential averages of a BatchNorm layer."""
    norms = [nn.BatchNorm2d(3), Average()] if own else [nn.BatchNorm2d(3, momentum=None)]
    return nn.Sequential(*norms, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)), 3


def unmarked(num_classes: int) -> nn.Module:
    raise AssertionError("a function that is not marked must not be called")


class Auxiliary(nn.Module):
    """An encoder that returns more than its features in training mode."""

    feature_dim = 12

    def forward(self, x: Tensor) -> Any:
        z = nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)
        return (z, z) if self.training else z


def no_averages(in_channels: int, num_classes: int) -> nn.Module:
    norm = nn.BatchNorm2d(in_channels, track_running_stats=False)
    layers = [norm, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4 * in_channels, num_classes))


def auxiliary() -> nn.Module:
    return Auxiliary()


for _function in (
    tied, pair, whole, not_last, no_linear, wrong_width, nothing, own_norm, residual, branching, counting, moving,
    no_averages, auxiliary,
):  # fmt: skip
    _function.is_network = True  # type: ignore[attr-defined]
