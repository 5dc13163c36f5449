from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from fedtta.tta.contrastive import self_contrastive, supervised_contrastive

Loss = Callable[[Tensor], Tensor]


def features(n: int, d: int = 5, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=Generator().manual_seed(seed), dtype=torch.float64)


def by_anchor(z: Tensor, positives: list[list[int]], temperature: float) -> float:
    """Eq. 2 to the letter, with plain floats: P(x) is given, A(x) is everything but x."""
    rows = [[float(v) / math.sqrt(sum(float(w) ** 2 for w in row)) for v in row] for row in z]
    terms = []
    for x, found in enumerate(positives):
        if not found:
            continue
        products = [sum(a * b for a, b in zip(rows[x], other, strict=True)) / temperature for other in rows]
        below = sum(math.exp(value) for a, value in enumerate(products) if a != x)
        terms.append(sum(-math.log(math.exp(products[p]) / below) for p in found) / len(found))
    return sum(terms) / len(terms) if terms else 0.0


def of_labels(labels: list[int]) -> list[list[int]]:
    return [[p for p, other in enumerate(labels) if other == label and p != x] for x, label in enumerate(labels)]


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
@pytest.mark.parametrize(
    "labels", [[0, 1, 2, 0, 1, 2], [3, 3, 3, 3], [0, 1, 1, 2, 0, 1, 1, 2], [0, 0, 1], [0, 1, 2], [0]], ids=str
)
def test_supervised_is_the_sum_over_anchors(labels: list[int], temperature: float) -> None:
    z = features(len(labels))
    got = supervised_contrastive(z, torch.tensor(labels), temperature)
    assert got.shape == ()
    assert float(got) == pytest.approx(by_anchor(z, of_labels(labels), temperature), abs=1e-12)


@pytest.mark.parametrize(("temperature", "base"), [(0.1, 0.07), (0.5, 0.07), (0.2, 0.2)])
def test_the_base_temperature_scales_the_loss_as_published(temperature: float, base: float) -> None:
    """COALA's loss: -(τ/τ_base) times the mean log-probability of the positives."""
    z, labels = features(6), [0, 1, 0, 2, 1, 0]
    want = temperature / base * by_anchor(z, of_labels(labels), temperature)
    got = supervised_contrastive(z, torch.tensor(labels), temperature, base)
    assert float(got) == pytest.approx(want, abs=1e-12)
    pairs = [[3], [4], [5], [0], [1], [2]]
    got = self_contrastive(z[:3], z[3:], temperature, base)
    assert float(got) == pytest.approx(temperature / base * by_anchor(z, pairs, temperature), abs=1e-12)
    assert torch.equal(
        supervised_contrastive(z, torch.tensor(labels), 0.2, 0.2), supervised_contrastive(z, torch.tensor(labels), 0.2)
    )
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"base_temperature={wrong}"):
            supervised_contrastive(z, torch.tensor(labels), temperature, wrong)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
@pytest.mark.parametrize("images", [1, 2, 7])
def test_the_positive_of_a_view_is_the_other_one(images: int, temperature: float) -> None:
    z = features(2 * images)
    pairs = [[(x + images) % (2 * images)] for x in range(2 * images)]
    got = self_contrastive(z[:images], z[images:], temperature)
    assert float(got) == pytest.approx(by_anchor(z, pairs, temperature), abs=1e-12)
    assert float(self_contrastive(z[images:], z[:images], temperature)) == pytest.approx(float(got), abs=1e-12)


def test_two_images_by_hand() -> None:
    """Views of one image are equal, those of two at a right angle: ln((e^2 + 1 + 1) / e^2) with τ = 1/2."""
    first = torch.eye(2, dtype=torch.float64)
    want = math.log((math.exp(2) + 2) / math.exp(2))
    assert float(self_contrastive(first, 3 * first)) == pytest.approx(want, abs=1e-12)
    # One class: every anchor has three positives, products 2, 0 and 0.
    one_class = math.log(math.exp(2) + 2) - 2 / 3
    got = supervised_contrastive(torch.cat((first, first)), torch.zeros(4, dtype=torch.int64), 0.5)
    assert float(got) == pytest.approx(one_class, abs=1e-12)


@pytest.mark.parametrize(
    "loss",
    [lambda z: supervised_contrastive(z, torch.tensor([0, 1, 0, 2, 1, 0])), lambda z: self_contrastive(z[:3], z[3:])],
    ids=["supervised", "self"],
)
def test_gradient_is_that_of_finite_differences(loss: Loss) -> None:
    z = features(6).requires_grad_()
    loss(z).backward()
    slopes = torch.zeros_like(z)
    with torch.no_grad():
        for i in range(z.numel()):
            step = torch.zeros(z.numel(), dtype=z.dtype)
            step[i] = 1e-6
            slopes.view(-1)[i] = (loss(z + step.view_as(z)) - loss(z - step.view_as(z))) / 2e-6
    assert z.grad is not None
    torch.testing.assert_close(z.grad, slopes, atol=1e-8, rtol=0)


def test_a_step_downhill_brings_positives_together() -> None:
    z, labels = features(8).requires_grad_(), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    start = supervised_contrastive(z, labels)
    (slope,) = torch.autograd.grad(start, z)
    assert bool(supervised_contrastive(z - 0.1 * slope, labels) < start)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 9), classes=st.integers(1, 4), scale=st.floats(1e-6, 1e6))
def test_neither_the_order_nor_the_length_of_rows_matters(seed: int, n: int, classes: int, scale: float) -> None:
    generator = Generator().manual_seed(seed)
    z, labels = features(n, seed=seed), torch.randint(classes, (n,), generator=generator)
    order = torch.randperm(n, generator=generator)
    lengths = scale * (0.1 + torch.rand(n, 1, generator=generator, dtype=torch.float64))
    loss = supervised_contrastive(z, labels)
    assert float(loss) >= 0
    torch.testing.assert_close(supervised_contrastive(z[order], labels[order]), loss, atol=1e-10, rtol=0)
    torch.testing.assert_close(supervised_contrastive(z * lengths, labels), loss, atol=1e-10, rtol=0)
    torch.testing.assert_close(supervised_contrastive(z, 7 - labels), loss, atol=1e-10, rtol=0)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64)).Q
    torch.testing.assert_close(supervised_contrastive(z @ turn, labels), loss, atol=1e-10, rtol=0)


HARD: dict[str, Tensor] = {
    "zero": torch.zeros(6, 4),
    "one zero": torch.cat((torch.zeros(1, 4), torch.randn(5, 4, generator=Generator().manual_seed(0)))),
    "identical": torch.full((6, 4), 0.3),
    "opposite": torch.tensor([[1.0, 0], [-1, 0]]).repeat(3, 1),
    "huge": torch.tensor([[3e38, 3e38], [1e38, -3e38]]).repeat(3, 1),
    "tiny": torch.tensor([[1e-15, 2e-15], [1e-15, 0], [1e-25, 1e-25]]).repeat(2, 1),
    "one row": torch.ones(1, 4),
    "none": torch.zeros(0, 4),
    "no features": torch.zeros(4, 0),
}


@pytest.mark.parametrize("temperature", [0.01, 0.5])
@pytest.mark.parametrize("name", list(HARD))
def test_hard_cases_have_finite_losses_and_gradients_in_float32(name: str, temperature: float) -> None:
    start = HARD[name]
    for labels in (torch.zeros(len(start), dtype=torch.int64), torch.arange(len(start)) % 3, torch.arange(len(start))):
        z = start.clone().requires_grad_()
        loss = supervised_contrastive(z, labels, temperature)
        loss.backward()
        assert loss.dtype == torch.float32
        assert z.grad is not None
        assert bool(torch.isfinite(loss))
        assert bool(torch.isfinite(z.grad).all())
        assert bool((z.grad[(start == 0).all(1)] == 0).all())  # no direction, no gradient


def test_float32_at_a_small_temperature_is_close_to_float64() -> None:
    z, labels = features(40), torch.arange(40) % 7
    got = supervised_contrastive(z.float(), labels, 0.01)
    assert float(got) == pytest.approx(by_anchor(z, of_labels(labels.tolist()), 0.01), rel=1e-5)


def test_one_image_alone_has_no_loss_and_no_gradient() -> None:
    z = features(2).requires_grad_()
    loss = self_contrastive(z[:1], z[1:], 0.1)
    loss.backward()
    assert float(loss.detach()) == 0
    assert z.grad is not None
    assert not bool(z.grad.any())


def test_bad_input_is_refused() -> None:
    z, labels = features(4), torch.tensor([0, 0, 1, 1])
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"temperature={temperature}"):
            supervised_contrastive(z, labels, temperature)
    with pytest.raises(ValueError, match=r"z must be .* got torch.int64 of shape \(4,\)"):
        supervised_contrastive(labels, labels)
    with pytest.raises(ValueError, match=r"labels must be 4 integers, got torch.int64 of shape \(3,\)"):
        supervised_contrastive(z, labels[:3])
    with pytest.raises(ValueError, match=r"labels must be 4 integers, got torch\.float32"):
        supervised_contrastive(z, labels.float())
    with pytest.raises(ValueError, match=r"views differ in shape: \(4, 5\) and \(3, 5\)"):
        self_contrastive(z, z[:3])
