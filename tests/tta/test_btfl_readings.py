"""What BTFL's published code does otherwise than its paper, against a loop over samples in plain numbers.

The loop multiplies likelihoods instead of adding logarithms, integrates scipy's density, and shares nothing with the
product. `python -m tests.tta.test_btfl_readings` prints what `published.json` has to hold.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import beta
from torch import nn

from fedtta.models.two_head import TwoHead
from fedtta.tta.btfl import BTFL, LARGEST_STRENGTH, READINGS, Reading, prior_path, squashed
from fedtta.tta.fedthe import FedTHE
from fedtta.tta.posterior import GridRule, mixing_weight
from fedtta.tta.statistics import Statistics
from tests.tta import reference

GOLDEN = Path(__file__).parent / "published.json"
WITH_K, WITH_100 = "btfl[reading=published]", "btfl[reading=published;classes=100]"
HISTORY = "fedthe[history=batch;beta=0.1]"
PAPER: dict[str, Any] = {
    "strength": 16, "leave_one_out": 0, "mixing": "probability", "denominators": "paper", "classes": 5, "squash": 0,
    "prune": "paper", "integral": "exact", "prior": "sample",
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "strength": 5, "leave_one_out": 20, "mixing": "log", "denominators": "code", "classes": 5, "squash": 4,
    "prune": "code", "integral": "grid", "prior": "batch",
}  # fmt: skip
D, K, N = 12, 5, 60
Stream = tuple[np.ndarray, np.ndarray, np.ndarray, Statistics]


def parts(count: int, size: int) -> list[list[int]]:
    """The positions of `count` samples in batches."""
    return [list(range(first, min(first + size, count))) for first in range(0, count, size)]


def random_stream(seed: int) -> Stream:
    """z [N, D], logits of the global and the personal head [N, K], statistics; all of them made up."""
    draw = np.random.default_rng(seed)
    z = np.where(np.arange(N) % 2 == 0, 0.6, 1.6)[:, None] * draw.random((N, D))
    local, everyone = draw.random(D), 0.2 + 0.6 * draw.random(D)
    known = Statistics(None, None, local, everyone, 0.7, 0.9)  # type: ignore[arg-type]
    return z, draw.uniform(0.1, 4, (N, 1)) * draw.normal(size=(N, K)), 3 * draw.normal(size=(N, K)), known


def loop(stream: Stream, size: int, reading: dict[str, Any]) -> tuple[dict[str, np.ndarray], tuple[float, float]]:
    """Return columns by name and the last (a, b); batches of `size` samples matter to the prior alone."""
    z, logits_g, logits_l, known = stream
    p_l, p_g = np.asarray(known.dle_local), np.asarray(known.dle_global)
    if n := reading["leave_one_out"]:
        p_g = np.clip((n * p_g - p_l) / (n - 1), 0, 1)
    p_l, p_g = 0.2 + 0.6 * p_l, 0.2 + 0.6 * p_g
    mean_l, mean_g = float(known.entropy_local or 0), float(known.entropy_global or 0)
    a = b = 1.0
    columns: dict[str, list[Any]] = {name: [] for name in ("probabilities", "weight", "prior", "tau_hat", "event")}
    for batch in parts(len(z), size):
        before, external, internal = (a, b), 0, 0
        for i in batch:
            y_g, y_l = (np.exp(one[i]) / np.exp(one[i]).sum() for one in (logits_g, logits_l))
            h_g, h_l = (-sum(p * math.log(p) for p in y if p > 0) for y in (y_g, y_l))
            silent = np.tanh(z[i]) <= 0.5
            q_l, q_g = (float(np.prod(np.where(silent, p, 1 - p))) for p in (p_l, p_g))
            if reading["denominators"] == "paper":
                u_l, u_g = math.exp((h_l - mean_l) / h_l), math.exp((h_g - mean_g) / h_g)
            else:
                most = math.log(reading["classes"])
                u_l, u_g = math.exp((h_l - mean_l) / mean_l), math.exp((h_g - most) / most)
            tau_hat = (q_l**u_l / q_g**u_g) ** (1 / z.shape[1])
            if k := reading["squash"]:
                above = tau_hat > 1
                tau_hat = 1 + k * math.tanh(tau_hat - 1) if above else 1 / (1 + k * math.tanh(1 / tau_hat - 1))
            used = before if reading["prior"] == "batch" else (a, b)
            e = integral(*used, tau_hat, reading["integral"])
            mixed = e * y_g + (1 - e) * y_l if reading["mixing"] == "probability" else y_g**e * y_l ** (1 - e)
            event = int(q_l < q_g and h_l > mean_l and h_g < mean_g) - int(q_l > q_g and h_l < mean_l and h_g > mean_g)
            for name, value in zip(columns, (mixed / mixed.sum(), e, used, tau_hat, event), strict=True):
                columns[name].append(value)
            external, internal = external + (event == 1), internal + (event == -1)
            if reading["prior"] == "sample":
                a, b = pruned(a + (event == 1), b + (event == -1), reading)
        if reading["prior"] == "batch":
            a, b = pruned(a + external, b + internal, reading)
    return {name: np.array(values) for name, values in columns.items()}, (a, b)


def pruned(a: float, b: float, reading: dict[str, Any]) -> tuple[float, float]:
    total = a + b
    if total <= reading["strength"]:
        return a, b
    scale = 1 if reading["prune"] == "paper" else reading["strength"] / 10
    return a / total * scale + 1, b / total * scale + 1


@cache
def integral(a: float, b: float, tau: float, rule: str) -> float:
    def integrand(m: Any) -> Any:
        return beta.pdf(m, a, b) * m / (m + (1 - m) * tau)

    if rule == "exact":
        return float(quad(integrand, 0, 1, epsabs=1e-12, epsrel=1e-11, limit=200)[0])
    points = np.linspace(0.01, 0.99, 100)
    return float(np.trapezoid(integrand(points), points))


def adapter(known: Statistics, **options: Any) -> BTFL:
    return BTFL(TwoHead(nn.Identity(), D, K).double(), known, **options)


def assert_equals_the_loop(
    stream: Stream, size: int, expected: dict[str, Any], options: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Compare on numpy arrays (as the light agent has them) and on tensors, with a saved state at every border."""
    *outputs, known = stream
    want, prior = loop(stream, size, expected)
    for to in (np.asarray, torch.from_numpy):
        made, reports, rows = adapter(known, **options), [], []
        for batch in parts(len(outputs[0]), size):
            state = made.state_dict()
            made = adapter(known, **options)
            made.load_state_dict(state)
            rows.append(np.asarray(made.interpolate(*(to(one[batch]) for one in outputs))))  # type: ignore[arg-type]
            reports.append(made.report())
        found = {name: np.concatenate([one[name].numpy() for one in reports]) for name in reports[0]}
        assert np.allclose(np.concatenate(rows), want["probabilities"], rtol=0, atol=1e-9)
        assert np.allclose(np.exp(found["log_tau_hat"]), want["tau_hat"], rtol=1e-11, atol=0)
        assert np.array_equal(found["event"], want["event"])
        for name in ("weight", "prior"):
            assert np.allclose(found[name], want[name], rtol=0, atol=1e-9), name
        assert np.allclose(made.state_dict()["prior"].numpy(), prior, rtol=0, atol=1e-11)
    return want


@pytest.mark.parametrize("size", [1, 7, N])
@pytest.mark.parametrize("name", ["none", *PUBLISHED])
def test_each_reading_alone_equals_the_loop(name: str, size: int) -> None:
    changed = {name: PUBLISHED[name]} if name != "none" else {}
    want = assert_equals_the_loop(random_stream(7), size, PAPER | changed, changed)
    assert {-1, 1} <= set(want["event"].tolist())  # so that the comparison means something
    assert want["weight"].std() > 0.05
    assert want["tau_hat"].min() < 1 < want["tau_hat"].max()


@pytest.mark.parametrize("size", [1, 7, N])
@pytest.mark.parametrize(
    "changed", [{}, {"classes": 100}, {"strength": 300, "squash": 10}, {"strength": 3000}, {"strength": 1.5}], ids=str
)
def test_all_readings_together_equal_the_loop(changed: dict[str, Any], size: int) -> None:
    options = {"reading": "published", "leave_one_out": 20, **changed}
    want = assert_equals_the_loop(random_stream(40 + size), size, PUBLISHED | changed, options)
    assert {-1, 1} <= set(want["event"].tolist())


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_reading_shows(name: str) -> None:
    """On the stream of the comparisons, each moves a probability; C = K = 5 alone is no change."""
    *outputs, known = random_stream(7)
    value = 100 if name == "classes" else PUBLISHED[name]
    base: dict[str, Any] = {"classes": {"denominators": "code"}, "prune": {"strength": 5}}.get(name, {})
    plain, changed = (
        np.concatenate([made.interpolate(*(one[part] for one in outputs)) for part in parts(N, 7)])  # type: ignore[arg-type]
        for made in (adapter(known, **base), adapter(known, **base, **{name: value}))
    )
    assert np.abs(plain - changed).max() > 1e-4


def test_a_given_option_wins_over_the_reading() -> None:
    known = random_stream(0)[3]
    paper = {name: value for name, value in PAPER.items() if name != "classes"}
    assert adapter(known, reading="published", **paper).reading == adapter(known).reading == READINGS["paper"]
    whole = adapter(known, reading="published", leave_one_out=20)
    assert adapter(known, **{**PUBLISHED, "classes": None}).reading == whole.reading
    assert whole.per == "batch"
    assert adapter(known, reading="published", leave_one_out=20, prior="sample").per == "sample"
    with pytest.raises(ValueError, match="leave_one_out=None: give the number of clients"):
        adapter(known, reading="published")


@pytest.mark.parametrize("integral", LARGEST_STRENGTH)
def test_the_largest_strength_is_one_that_the_integral_can_compute(integral: str) -> None:
    known, most = random_stream(0)[3], LARGEST_STRENGTH[integral]
    rule, shares = adapter(known, strength=most, integral=integral)._rule, np.linspace(0.1, 0.9, 300)
    weights = rule.mean(most * np.stack((shares, 1 - shares), 1), np.zeros(300))  # a/(a+b) for τ = 1
    np.testing.assert_allclose(weights, shares, atol=0.06 if integral == "grid" else 1e-9)
    with pytest.raises(ValueError, match=rf"strength={most + 1} is outside \(0, {most}\]"):
        adapter(known, strength=most + 1, integral=integral)


def test_squash_by_hand() -> None:
    """k_b = 4: τ̂ = 2 → 1 + 4 tanh 1 = 4.046, τ̂ = 1/2 → its inverse, 1 stays 1 (the published code makes it 0)."""
    found = np.exp(squashed(np.log([2.0, 0.5, 1.0, 1e200, 1e-200]), 4))
    high = 1 + 4 * math.tanh(1)
    assert found.tolist() == pytest.approx([high, 1 / high, 1, 5, 0.2], rel=1e-14)
    assert squashed(np.zeros(1), 4)[0] == 0
    assert np.array_equal(squashed(np.array([0.3, -7.0]), 0), [0.3, -7.0])


def test_prune_and_prior_by_hand() -> None:
    """λ = 5: three external and two internal events make (4, 3), sum 7 > 5, so (1 + 0.5 · 4/7, 1 + 0.5 · 3/7)."""
    path, last = prior_path([1, 1, -1, 0, 1, -1], (1.0, 1.0), Reading(5, prune="code", prior="batch"))
    assert path == [(1, 1)] * 6
    assert last == pytest.approx((1 + 2 / 7, 1 + 1.5 / 7), abs=1e-15)
    path, last = prior_path([1, 1, -1, 1, 0], (1.0, 1.0), Reading(5, prune="code"))  # (4, 2), sum 6
    assert path == [(1, 1), (2, 1), (3, 1), (3, 2), pytest.approx((1 + 0.5 * 4 / 6, 1 + 0.5 * 2 / 6), abs=1e-15)]
    assert last == path[-1]


@given(st.floats(1, 300), st.floats(1, 300), st.floats(-12, 12))
def test_the_grid_is_the_trapezoid_over_scipys_density(a: float, b: float, log_tau: float) -> None:
    shapes, logs = np.array([[a, b]]), np.array([log_tau])
    want = integral(a, b, math.exp(log_tau), "grid")
    assert float(GridRule().mean(shapes, logs)[0]) == pytest.approx(want, abs=1e-11)
    elsewhere = GridRule().mean(torch.from_numpy(shapes), torch.from_numpy(logs))
    assert float(elsewhere[0]) == pytest.approx(want, abs=1e-11)


def test_the_grid_loses_the_ends() -> None:
    """∫ m over [0.01, 0.99] = 0.49; at a = 15, b = 1, τ = 1: 15/16 (1 - 0.99^16) = 0.139 is missing."""
    found = GridRule().mean(np.array([[1.0, 1.0], [15.0, 1.0]]), np.zeros(2))
    assert found.tolist() == pytest.approx([0.49, 15 / 16 * 0.99**16], abs=2e-3)
    assert mixing_weight(15, 1, 1.0) - found[1] == pytest.approx(0.139, abs=2e-3)
    assert float(GridRule().mean(np.array([[1e6, 1e6]]), np.array([-50.0]))[0]) <= 1  # narrower than the points


@pytest.mark.parametrize("rectify", ["power", "product", "none"])
@pytest.mark.parametrize("mean", [0.0, 1e-6])
def test_a_mean_entropy_of_zero_stays_finite(mean: float, rectify: str) -> None:
    """u_l = exp(H_l/H̄_l - 1) has no bound: τ̂ → 0 and the global head decides."""
    shares = np.full(D, 0.4), np.full(D, 0.6)
    known = Statistics(None, None, *shares, mean, 0.9)  # type: ignore[arg-type]
    made = adapter(known, rectify=rectify, denominators="code", mixing="log")
    rows = made.interpolate(np.ones((3, D)), np.eye(3, K), np.zeros((3, K)))  # type: ignore[arg-type]
    assert np.isfinite(rows).all()
    if rectify == "power":
        assert made.report()["weight"].tolist() == pytest.approx([1, 1, 1], abs=1e-12)
        assert np.allclose(rows, np.exp(np.eye(3, K)) / np.exp(np.eye(3, K)).sum(1, keepdims=True))


# Golden numbers: a change of a published reading shows, whatever becomes of product and loop together


def golden_stream() -> Stream:
    """28 samples from sines, which no library's generator can change; both events occur, and the counts are pruned."""
    n, wave = np.arange(28)[:, None], np.arange(1, 7)[None]
    z = np.abs(np.where(n % 2, 1.2, 0.9) * np.sin(1.7 * n * wave + wave))
    logits_g, logits_l = (s * np.sin(n * (wave[:, :4] + 0.3) + s) * (1 + n % 3) for s in (1.1, 1.9))
    share = 0.5 + 0.4 * np.sin(np.arange(6) + 0.5), 0.5 + 0.2 * np.cos(2.0 * np.arange(6))
    known = Statistics(0.6 * share[0], 0.3 + 0.4 * share[1], *share, 0.7, 0.7)  # type: ignore[arg-type]
    return z, logits_g, logits_l, known


def golden() -> dict[str, dict[str, list[Any]]]:
    """What the loops say of `golden_stream` in batches of 5: e, the first class's probability, the last (a, b)."""
    stream = golden_stream()
    found: dict[str, dict[str, list[Any]]] = {}
    for name, classes in ((WITH_K, 4), (WITH_100, 100)):
        rows, prior = loop(stream, 5, PUBLISHED | {"classes": classes})
        found[name] = {"e": rows["weight"].tolist(), "p": rows["probabilities"][:, 0].tolist(), "prior": list(prior)}
    *outputs, known = stream
    descriptors = (torch.from_numpy(np.asarray(one)) for one in (known.descriptor_local, known.descriptor_global))
    p, e = reference.fedthe(*map(torch.from_numpy, outputs), Statistics(*descriptors), beta=0.1, batch=5)
    return {**found, HISTORY: {"e": e.tolist(), "p": p[:, 0].tolist()}}


def test_the_golden_numbers_are_the_loops() -> None:
    for name, columns in golden().items():
        for column, values in columns.items():
            assert json.loads(GOLDEN.read_text())[name][column] == pytest.approx(values, abs=1e-9)


@pytest.mark.parametrize("name", [WITH_K, WITH_100, HISTORY])
def test_the_product_gives_the_golden_numbers(name: str) -> None:
    *outputs, known = golden_stream()
    model = TwoHead(nn.Identity(), 6, 4).double()
    made: BTFL | FedTHE
    if name == HISTORY:
        made = FedTHE(model, known, history="batch", beta=0.1)
    else:
        classes = 100 if name == WITH_100 else None
        made = BTFL(model, known, reading="published", leave_one_out=20, classes=classes)
    rows = [made.interpolate(*(one[part] for one in outputs)) for part in parts(28, 5)]  # type: ignore[arg-type]
    found = {"e": made.report()["weight"].tolist(), "p": np.concatenate(rows)[:, 0].tolist()}
    if isinstance(made, BTFL):
        found["prior"] = made.state_dict()["prior"].tolist()
    want = json.loads(GOLDEN.read_text())[name]
    assert set(found) == set(want)
    for column, values in want.items():
        assert found[column] == pytest.approx(values, abs=1e-9), column


if __name__ == "__main__":
    rows = (
        f'"{name}": {{\n' + ",\n".join(f'  "{key}": {json.dumps(column)}' for key, column in columns.items()) + "\n}"
        for name, columns in golden().items()
    )
    print("{\n" + ",\n".join(rows) + "\n}")
