"""Appendix C.5 of the paper: why a rate can be negative, in a network of one BatchNorm layer.

x | y = ±1 ~ N(±1, 0.8²). In training both classes are equally likely, so μ = 0 and σ² = 0.8² + 1 = 1.64; the boundary
is z = 0, so β = 0 and γ > 0. In the test 5/6 are positive: the batch mean is 5/6 - 1/6 = 2/3, its variance
0.64 + 1 - 4/9. Adapting the mean at rate α puts the boundary at 2α/3, and

    accuracy(α) = 5/6 Φ((1 - 2α/3)/0.8) + 1/6 Φ((1 + 2α/3)/0.8)

    α = 0:    Φ(1.25) = 0.8944
    α = -1/2: 5/6 Φ(1.6667) + 1/6 Φ(0.8333) = 5/6 · 0.9522 + 1/6 · 0.7977 = 0.9264
    α = +1/2: 5/6 Φ(0.8333) + 1/6 Φ(1.6667) = 5/6 · 0.7977 + 1/6 · 0.9522 = 0.8234
    α = +1:   5/6 Φ(0.4167) + 1/6 Φ(2.0833) = 5/6 · 0.6615 + 1/6 · 0.9814 = 0.7148

The variance moves no boundary, because β = 0. Samples are quantiles: nothing is random.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor, nn

from fedtta.tta import ATP, atp

GAMMA = math.sqrt(1.64) / 0.64  # the logits ±γz are then the log odds of training, 2x/0.64, halved
MINOR, MAJOR = 400, 2000  # 1 : 5


class Toy(nn.Module):
    """z = BatchNorm(x), logits (-z, z)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, eps=1e-12).double()
        nn.init.constant_(self.norm.running_var, 1.64)
        nn.init.constant_(self.norm.weight, GAMMA)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        return torch.cat((-z, z), 1)


def samples() -> tuple[Tensor, Tensor]:
    """Return x [n, 1] and y [n] in {0, 1}: the quantiles of both classes."""
    values = [NormalDist(mean, 0.8).inv_cdf((i + 0.5) / n) for mean, n in ((-1, MINOR), (1, MAJOR)) for i in range(n)]
    return torch.tensor(values, dtype=torch.float64)[:, None], torch.tensor([0] * MINOR + [1] * MAJOR)


def rates_of(model: nn.Module, rate: float) -> dict[str, float]:
    return {name: rate if "running" in name else 0.0 for name in atp.modules(model)}


def accuracy(rate: float) -> float:
    model, (x, y) = Toy(), samples()
    return float((ATP(model, rates_of(model, rate)).predict(x).argmax(1) == y).double().mean())


def expected(rate: float) -> float:
    phi, shift = NormalDist().cdf, 2 * rate / 3
    return 5 / 6 * phi((1 - shift) / 0.8) + 1 / 6 * phi((1 + shift) / 0.8)


def test_directions_by_hand() -> None:
    h = atp.directions(Toy(), samples()[0])
    assert float(h["norm.running_mean"]) == pytest.approx(2 / 3, abs=1e-9)
    assert float(h["norm.running_var"]) == pytest.approx(-4 / 9, abs=2e-3)  # quantiles lack the outermost tails


@pytest.mark.parametrize(("rate", "want"), [(0.0, 0.8944), (-0.5, 0.9264), (0.5, 0.8234), (1.0, 0.7148)])
def test_accuracy_by_hand(rate: float, want: float) -> None:
    assert expected(rate) == pytest.approx(want, abs=1e-4)
    assert accuracy(rate) == pytest.approx(want, abs=1e-3)


def test_negative_rates_help_and_positive_ones_hurt() -> None:
    accuracies = [accuracy(rate) for rate in (-0.6, -0.3, 0.0, 0.3, 0.6)]
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[0] > accuracies[2] + 0.03


def test_refinement_finds_the_sign() -> None:
    model, (x, y) = Toy(), samples()
    rates = atp.zero_rates(model)
    losses = []
    for _ in range(30):
        done = atp.refine_with_loss(model, x, y, rates, 0.3, "stats")
        rates = done.rates
        losses.append(done.loss)
    assert losses == sorted(losses, reverse=True)
    assert rates["norm.running_mean"] < -0.3
    assert rates["norm.weight"] == rates["norm.bias"] == 0
    assert done.correct / done.samples > accuracy(0.0) + 0.02


def test_the_first_step_by_hand() -> None:
    # logits ±γz: dCE/dlogit = p - 1[y]; dz/dμ = -1/σ, so g = h · mean_b[2(p_b - 1[y_b = 1])] · (-γ/σ), numel = 1.
    model, (x, y) = Toy(), samples()
    p = torch.sigmoid(2 * x[:, 0] / 0.64)
    slope = float((2 * (p - y)).mean()) * (-GAMMA / math.sqrt(1.64)) * float(x.mean())
    assert slope > 0
    got = -atp.refine(model, x, y, atp.zero_rates(model), 1.0)["norm.running_mean"]
    assert got == pytest.approx(slope, abs=1e-9)
