"""EM and BBSE: the estimators, and the adapters that predict with them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from fedtta.tta.base import Adapter
from fedtta.tta.label_shift import BBSE, EM, bbse_weights, em_prior, em_prior_of_logs, reweighted
from fedtta.tta.statistics import Statistics
from tests.tta.networks import images, two_head_network

K = 4
SOURCE = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
TARGET = torch.tensor([0.1, 0.05, 0.25, 0.6], dtype=torch.float64)


class Known(Statistics):
    """Statistics with the fields that these methods read."""

    def __init__(self, label_prior: Tensor | None = None, confusion: Tensor | None = None) -> None:
        super().__init__()
        object.__setattr__(self, "label_prior", label_prior)
        object.__setattr__(self, "confusion", confusion)


def table(seed: int, rows: int, columns: int = K, sharpness: float = 2.0) -> Tensor:
    """Random distributions [rows, columns]."""
    noise = torch.randn(rows, columns, generator=Generator().manual_seed(seed), dtype=torch.float64)
    return torch.softmax(sharpness * noise, 1)


def sample(n: int, prior: Tensor, seed: int = 0) -> Tensor:
    """Posteriors [n, K] under SOURCE of x ~ N(2 e_y, 1), with y ~ prior: exactly Bayes's."""
    generator = Generator().manual_seed(seed)
    y = torch.multinomial(prior, n, replacement=True, generator=generator)
    x = torch.randn(n, K, generator=generator, dtype=torch.float64)
    x[torch.arange(n), y] += 2
    return torch.softmax(2 * x + SOURCE.log(), 1)  # the densities differ by exp(2 x_y)


def joint(posteriors: Tensor, labels: Tensor) -> Tensor:
    c = torch.zeros(K, K, dtype=torch.float64)
    for i, j in zip(posteriors.argmax(1).tolist(), labels.tolist(), strict=True):
        c[i, j] += 1 / len(labels)
    return c


def em_by_loop(posteriors: list[list[float]], source: list[float], iterations: int) -> list[float]:
    prior = list(source)
    for _ in range(iterations):
        total = [0.0] * len(prior)
        for row in posteriors:
            part = [prior[k] / source[k] * row[k] for k in range(len(prior))]
            total = [t + one / sum(part) for t, one in zip(total, part, strict=True)]
        prior = [t / len(posteriors) for t in total]
    return prior


@pytest.mark.parametrize("iterations", [1, 2, 9])
@pytest.mark.parametrize("n", [1, 30])
def test_em_equals_a_loop(n: int, iterations: int) -> None:
    posteriors = table(1, n)
    got = em_prior(posteriors, SOURCE, iterations, tolerance=0.0)
    want = em_by_loop(posteriors.tolist(), SOURCE.tolist(), iterations)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-13, rtol=0)


def test_em_by_hand() -> None:
    # One iteration from the source is the mean posterior; two certain samples of class 2 are a fixed point.
    posteriors = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert em_prior(posteriors, half, iterations=1).tolist() == pytest.approx([0.375, 0.625])
    certain = torch.tensor([[0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    assert em_prior(certain, half).tolist() == [0.0, 1.0]


def test_em_and_bbse_recover_the_prior() -> None:
    n = 20000
    target = sample(n, TARGET, seed=1)
    torch.testing.assert_close(em_prior(target, SOURCE, iterations=500), TARGET, atol=0.01, rtol=0)
    # Validation data of the source, with their labels drawn from its own posteriors.
    validation = sample(n, SOURCE, seed=2)
    labels = torch.multinomial(validation, 1, generator=Generator().manual_seed(3)).flatten()
    predicted = torch.bincount(target.argmax(1), minlength=K).double() / n
    confusion = joint(validation, labels)
    estimate = bbse_weights(confusion, predicted) * confusion.sum(0)
    torch.testing.assert_close(estimate, TARGET, atol=0.03, rtol=0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 20))
def test_em_is_a_distribution_that_raises_the_likelihood_and_ignores_order(seed: int, n: int) -> None:
    posteriors, source = table(seed, n), table(seed + 1, 1)[0]

    def likelihood(prior: Tensor) -> float:
        return float((posteriors * (prior / source)).sum(1).log().sum())

    path = [em_prior(posteriors, source, i, tolerance=0.0) for i in range(1, 12)]
    values = [likelihood(prior) for prior in (source, *path)]
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(values))
    assert all(float(prior.sum()) == pytest.approx(1, abs=1e-12) for prior in path)
    shuffled = posteriors[torch.randperm(n, generator=Generator().manual_seed(seed))]
    torch.testing.assert_close(em_prior(shuffled, source, 5), em_prior(posteriors, source, 5))
    # In the end the prior is a fixed point: Σ_b r_b(y) / B = p(y); where it tends to 0, steps shrink like 1/t² only.
    final = em_prior(posteriors, source, 2000, tolerance=1e-9)
    ratio = posteriors * final / source
    torch.testing.assert_close((ratio / ratio.sum(1, keepdim=True)).mean(0), final, atol=1e-5, rtol=0)


def test_em_where_the_source_lacks_a_class_or_a_posterior_is_tiny() -> None:
    source = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    logs = torch.tensor([[-2000.0, -2001.0, 0.0], [-1.0, -3.0, -0.5]], dtype=torch.float64)
    prior = em_prior_of_logs(logs, source)
    assert float(prior[2]) == 0
    torch.testing.assert_close(prior[:2], em_prior_of_logs(logs[:, :2], source[:2]))
    with pytest.raises(ValueError, match=r"\[1\] have probability 0"):
        em_prior(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64), source)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_bbse_inverts_the_confusion_and_the_source_is_a_fixed_point(seed: int) -> None:
    given_label, source = table(seed, K, sharpness=0.5) + 2 * torch.eye(K).double(), table(seed + 1, 1)[0]
    confusion = (given_label / given_label.sum(1, keepdim=True)).T * source  # P(ŷ = i | y = j) p_s(j)
    assume(float(torch.linalg.cond(confusion)) < 1e6)  # no singular value counts as 0
    target = table(seed + 2, 1)[0]
    predicted = confusion @ (target / source)
    torch.testing.assert_close(bbse_weights(confusion, predicted), target / source, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(bbse_weights(confusion, confusion.sum(1)), torch.ones(K).double())


def test_bbse_by_hand() -> None:
    # C = [[.4, .1], [.1, .4]], μ = (.2, .8): C^-1 = [[.4, -.1], [-.1, .4]]/.15, so w = (0, 2).
    confusion = torch.tensor([[0.4, 0.1], [0.1, 0.4]], dtype=torch.float64)
    got = bbse_weights(confusion, torch.tensor([0.2, 0.8], dtype=torch.float64))
    torch.testing.assert_close(got, torch.tensor([0.0, 2.0], dtype=torch.float64), atol=1e-12, rtol=0)
    # μ = (.1, .9) would give (-1/3, 7/3): cut off at 0.
    got = bbse_weights(confusion, torch.tensor([0.1, 0.9], dtype=torch.float64))
    torch.testing.assert_close(got, torch.tensor([0.0, 7 / 3], dtype=torch.float64), atol=1e-12, rtol=0)


def test_bbse_of_a_singular_confusion() -> None:
    # Classes 1 and 2 are told apart by nothing: least squares gives both the same weight.
    confusion = torch.tensor([[0.25, 0.25, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.5]], dtype=torch.float64)
    got = bbse_weights(confusion, torch.tensor([0.8, 0.0, 0.2], dtype=torch.float64))
    torch.testing.assert_close(got, torch.tensor([1.6, 1.6, 0.4], dtype=torch.float64))
    # Only predictions that the source never had: nothing is known.
    assert bbse_weights(confusion, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)).tolist() == [1, 1, 1]
    # No data of class 2: its weight is 1, the others' are exact.
    missing = torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.5]], dtype=torch.float64)
    got = bbse_weights(missing, torch.tensor([0.9, 0.0, 0.1], dtype=torch.float64))
    torch.testing.assert_close(got, torch.tensor([1.8, 1.0, 0.2], dtype=torch.float64))
    # A confusion that float32 cannot tell from singular does not blow up.
    nearly = torch.tensor([[0.25 + 1e-9, 0.25], [0.25, 0.25]], dtype=torch.float64)
    assert float(bbse_weights(nearly, torch.tensor([0.3, 0.7], dtype=torch.float64)).max()) < 2


def test_reweighting_is_bayes_rule_and_stable() -> None:
    logits, w = torch.randn(5, K, generator=Generator().manual_seed(0)), torch.tensor([0.5, 2.0, 0.0, 1.0])
    p = torch.softmax(logits.double(), 1) * w.double()
    torch.testing.assert_close(reweighted(logits, w), (p / p.sum(1, keepdim=True)).float())
    assert reweighted(torch.tensor([[0.0, 5000.0]]), torch.tensor([1.0, 0.0])).tolist() == [[1.0, 0.0]]


def adapters(model: nn.Module) -> list[Adapter]:
    confusion = 0.7 * torch.diag(SOURCE) + 0.3 / K * SOURCE.expand(K, K)
    known = Known(SOURCE.float(), confusion)
    return [EM(model, known), BBSE(model, known), BBSE(model, known, predictions="soft")]


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 7, 20])
def test_the_adapters_equal_their_definition(index: int, size: int) -> None:
    network, x = two_head_network(), images(20)
    adapter, rows, shifts = adapters(network)[index], [], []
    for batch in x.split(size):
        p = torch.softmax(network(batch), 1).detach()
        if index == 0:
            w = em_prior(p, SOURCE.float().double(), 100, 1e-6) / SOURCE.float().double()
        else:
            mu = p.mean(0) if index == 2 else torch.stack([(p.argmax(1) == k).double().mean() for k in range(K)])
            confusion = 0.7 * torch.diag(SOURCE) + 0.3 / K * SOURCE.expand(K, K)
            w = torch.linalg.solve(confusion, mu).clamp_min(0)
        part = p * w
        rows.append(part / part.sum(1, keepdim=True))
        shifts += [float(((w - 1).abs() * SOURCE).sum() / 2)] * len(batch)
    got = torch.cat([adapter.predict(batch) for batch in x.split(size)])
    torch.testing.assert_close(got, torch.cat(rows), atol=1e-6, rtol=0)
    torch.testing.assert_close(adapter.report()["shift"], torch.tensor(shifts).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("index", [0, 1])
def test_another_number_of_classes_is_refused(index: int) -> None:
    network = two_head_network()
    adapter = adapters(network)[index]
    network.head = nn.Linear(6, K + 1).double()
    with pytest.raises(ValueError, match=f"{K} classes, the network's output {K + 1}"):
        adapter.predict(images(6))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: EM(m), "label_prior"),
        (lambda m: BBSE(m, Known(SOURCE)), "confusion"),
        (lambda m: EM(m, Known(2 * SOURCE)), "sums to 2"),
        (lambda m: EM(m, Known(SOURCE - 0.2)), "negative"),
        (lambda m: EM(m, Known(SOURCE[:, None])), "shape"),
        (lambda m: BBSE(m, Known(confusion=SOURCE.expand(3, K) / 3)), "shape"),
        (lambda m: em_prior(torch.ones(0, K), SOURCE), "B > 0"),
        (lambda m: em_prior(torch.full((2, K), -1.0), SOURCE), "0 or more"),
        (lambda m: bbse_weights(torch.ones(K, K), SOURCE), "sums to 16"),
        (lambda m: bbse_weights(torch.diag(SOURCE), SOURCE[:2]), "BBSE needs"),
    ],
)
def test_bad_input_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(two_head_network())
