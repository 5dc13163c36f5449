"""Networks, batches and a reference by the letter for the tests of ATP."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fedtta.models import TwoHead
from fedtta.tta import atp

KINDS = ("conv", "flat")
CLASSES = 3


class ConvEncoder(nn.Module):
    """BatchNorm with and without weights, a scalar parameter, and layers that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.bare = nn.BatchNorm2d(4, affine=False)
        self.unused = nn.Linear(2, 2)
        self.spare = nn.BatchNorm1d(3)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.elu(self.norm(self.conv(x * self.scale)))
        x = x + F.elu(self.bare(x))
        return F.softplus(self.fc(x.mean((2, 3))))


def network(kind: str, dtype: torch.dtype = torch.float64) -> TwoHead:
    torch.manual_seed(0)
    flat = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5, bias=False), nn.BatchNorm1d(5))
    model = TwoHead(ConvEncoder() if kind == "conv" else flat, 5, CLASSES)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(layer.running_mean, std=0.3)
            nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return model.to(dtype)


def batch(kind: str, n: int = 7, seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = Generator().manual_seed(seed)
    shape = (n, 2, 5, 4) if kind == "conv" else (n, 6)
    x = torch.randn(shape, generator=generator, dtype=dtype)
    return x, torch.randint(CLASSES, (n,), generator=generator)


def some_rates(model: nn.Module, scale: float = 0.2, seed: int = 2) -> dict[str, float]:
    numbers = np.random.default_rng(seed).uniform(-scale, scale, len(atp.modules(model)))
    return dict(zip(atp.modules(model), numbers.tolist(), strict=True))


def reference_directions(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Eq. 4 and 5 to the letter: a copy, one sample after the other, numpy for the statistics."""
    model = copy.deepcopy(model).eval()
    entropy = torch.zeros((), dtype=x.dtype)
    for sample in x:
        p = torch.softmax(model(sample[None]), 1)[0]
        entropy = entropy - (p * p.log()).sum() / len(x)
    entropy.backward()
    h = {
        name: torch.zeros_like(value) if value.grad is None else -value.grad
        for name, value in model.named_parameters()
        if value.requires_grad and not name.startswith("personal_head.")
    }
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            seen: list[np.ndarray] = []
            handle = layer.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].detach().numpy()))
            model(x)
            handle.remove()
            mean, variance = layer.running_mean.clone(), layer.running_var.clone()
            if seen:
                rows = np.moveaxis(seen[0], 1, -1).reshape(-1, layer.num_features)
                mean = torch.from_numpy(rows.mean(0))
                variance = torch.from_numpy(rows.var(0, ddof=1)) if len(rows) > 1 else variance
            h[f"{name}.running_mean"] = mean - layer.running_mean
            h[f"{name}.running_var"] = variance - layer.running_var
    return h


def moved(model: nn.Module, steps: dict[str, Tensor]) -> nn.Module:
    """Return a copy of the network with `steps` added, by name of its state; no clamp."""
    other = copy.deepcopy(model).eval().requires_grad_(False)
    state = other.state_dict(keep_vars=True)
    for name, step in steps.items():
        state[name].add_(step)
    return other


def close(got: Tensor, want: Tensor) -> None:
    np.testing.assert_allclose(got.detach().numpy(), want.detach().numpy(), rtol=1e-9, atol=1e-11)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()
