from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from fedtta.models.two_head import TwoHead
from fedtta.tta.shot import SHOT, centroid_labels, information_maximisation
from tests.tta.networks import CLASSES, images, two_head_network, weights

LR = 0.5  # large: the steps must show


def plain_network() -> TwoHead:
    """No BatchNorm."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TwoHead(
            nn.Sequential(nn.Flatten(), nn.Linear(108, 6), nn.GroupNorm(2, 6), nn.ReLU()), 6, CLASSES
        ).double()


def nearest_centroids(z: Tensor, logits: Tensor) -> list[int]:
    """The pseudo-labels with loops over samples and classes."""
    rows = [np.append(row, 1.0) / np.linalg.norm(np.append(row, 1.0)) for row in z.numpy()]
    shares = torch.softmax(logits, 1).numpy()
    labels = [int(share.argmax()) for share in shares]
    for _ in range(2):
        candidates = sorted(set(labels))
        centroids = {
            k: sum(share[k] * row for share, row in zip(shares, rows, strict=True)) / (1e-12 + shares[:, k].sum())
            for k in candidates
        }
        cosines = [{k: row @ c / np.linalg.norm(c) for k, c in centroids.items()} for row in rows]
        labels = [max(cosine, key=lambda k: cosine[k]) for cosine in cosines]
        shares = np.array([[float(k == label) for k in range(shares.shape[1])] for label in labels])
    return labels


def loss_of(logits: Tensor, labels: list[int], beta: float) -> Tensor:
    """L of the module, sample by sample."""
    n = len(logits)
    rows = [torch.softmax(row, 0) for row in logits]
    mean = torch.stack(rows).sum(0) / n
    loss = (mean * mean.log()).sum()
    for p, label in zip(rows, labels, strict=True):
        loss = loss - (p * p.log()).sum() / n - beta * p[label].log() / n
    return loss


def reference(
    network: TwoHead, batches: list[Tensor], beta: float, steps: int, head: str
) -> tuple[list[Tensor], list[list[int]], TwoHead]:
    network = copy.deepcopy(network).train()
    classify: Any = getattr(network, head)
    descent = torch.optim.SGD(network.encoder.parameters(), lr=LR, momentum=0.9)
    rows, labels_of = [], []
    for x in batches:
        for _ in range(steps):
            z = network.features(x)
            logits = classify(z)
            labels = nearest_centroids(z.detach(), logits.detach())
            network.zero_grad()
            loss_of(logits, labels, beta).backward()
            descent.step()
        rows.append(torch.softmax(logits, 1).detach())
        labels_of.append(labels)
    return rows, labels_of, network


@pytest.mark.parametrize(
    ("beta", "steps", "head"), [(0.3, 1, "head"), (0.0, 1, "head"), (2.0, 3, "head"), (0.3, 2, "personal_head")]
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_it_equals_the_reference(norm: str, beta: float, steps: int, head: str) -> None:
    network, x = two_head_network() if norm == "batch" else plain_network(), images(17)
    batches = list(x.split([7, 2, 8]))
    before = weights(network)
    want, labels, tuned = reference(network, batches, beta, steps, head)
    chosen: Any = "global" if head == "head" else "personal"
    shot = SHOT(network, strength=beta, steps=steps, lr=LR, head=chosen)
    for batch, rows in zip(batches, want, strict=True):
        torch.testing.assert_close(shot.predict(batch), rows, atol=1e-10, rtol=0)
    assert shot.report()["pseudo_label"].tolist() == [label for row in labels for label in row]
    state = shot.state_dict()
    for name, value in tuned.encoder.named_parameters():
        torch.testing.assert_close(state[f"weight.encoder.{name}"], value.detach(), atol=1e-10, rtol=0)
    assert not torch.equal(state["weight.encoder.1.weight"], before["encoder.1.weight"])
    assert all(name.startswith(("weight.encoder", "optimizer")) for name in state)  # no head
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(value.requires_grad and value.grad is None for value in network.parameters())


def test_information_by_hand() -> None:
    """Sure of two different classes: H(p) = 0, H(p̄) = ln 2. Unsure of everything, or sure of one class only: 0."""
    sure = torch.tensor([[200.0, 0, 0], [0, 200.0, 0]], dtype=torch.float64, requires_grad=True)
    loss = information_maximisation(sure)
    assert float(loss) == pytest.approx(-math.log(2))
    loss.backward()
    assert sure.grad is not None
    assert bool(torch.isfinite(sure.grad).all())
    assert float(information_maximisation(torch.zeros(4, 3))) == pytest.approx(0, abs=1e-6)
    assert float(information_maximisation(torch.tensor([[9.0, 0, 0]] * 5))) == pytest.approx(0, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 6), scale=st.floats(0, 60))
def test_information_is_bounded_and_does_not_depend_on_the_order(seed: int, n: int, scale: float) -> None:
    generator = Generator().manual_seed(seed)
    logits = scale * torch.randn(n, CLASSES, generator=generator, dtype=torch.float64)
    value = float(information_maximisation(logits))
    assert -math.log(CLASSES) - 1e-9 <= value <= 1e-9
    order = torch.randperm(n, generator=generator)
    assert float(information_maximisation(logits[order])) == pytest.approx(value, abs=1e-12)
    if scale < 20:  # the loop's ln p is finite
        assert value == pytest.approx(float(loss_of(logits, [0] * n, 0.0)), abs=1e-9)


def test_centroids_move_a_sample_to_its_neighbours_class() -> None:
    """The last sample lies with the first two but the head calls it class 1: it becomes 0. Class 2 has no sample."""
    z = torch.tensor([[9.0, 0], [8, 1], [0, 9], [1, 9], [9, 1]], dtype=torch.float64)
    logits = torch.tensor([[3.0, 0, 1], [3, 0, 1], [0, 3, 1], [0, 3, 1], [1.0, 1.2, 1]], dtype=torch.float64)
    assert centroid_labels(z, logits).tolist() == [0, 0, 1, 1, 0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 12), classes=st.integers(1, 5), dead=st.booleans())
def test_pseudo_labels_equal_the_loops(seed: int, n: int, classes: int, dead: bool) -> None:
    generator = Generator().manual_seed(seed)
    z = torch.rand(n, 3, generator=generator, dtype=torch.float64)
    if dead:
        z[0] = 0  # no unit is on: a cosine of the bare features would not exist
    logits = 2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    got = centroid_labels(z, logits)
    assert got.tolist() == nearest_centroids(z, logits)
    assert set(got.tolist()) <= set(logits.argmax(1).tolist())


def test_with_one_sample_only_the_pseudo_label_teaches() -> None:
    network, x = plain_network(), images(1)
    idle, taught = SHOT(network, strength=0.0, lr=LR), SHOT(network, strength=1.0, lr=LR)
    torch.testing.assert_close(idle.predict(x), taught.predict(x), atol=0, rtol=0)
    again = [adapter.predict(x) for adapter in (idle, taught)]
    torch.testing.assert_close(again[0], torch.softmax(network(x), 1), atol=1e-9, rtol=0)
    assert float(again[1].max()) > float(again[0].max()) + 1e-3


def test_errors_leave_the_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(12)
    shot = SHOT(two_head_network(), lr=LR, steps=2)
    shot.predict(x[:6])
    before, calls, labels = shot.state_dict(), [], centroid_labels

    def fails(z: Tensor, logits: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return labels(z, logits)

    monkeypatch.setattr("fedtta.tta.shot.centroid_labels", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        shot.predict(x[6:])
    x[7, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match=r"\[1\]"):
        shot.predict(x[6:])
    assert all(torch.equal(value, before[name]) for name, value in shot.state_dict().items())
    assert shot.report()["entropy"].shape == (6,)


def test_a_network_without_what_is_needed_is_refused() -> None:
    with pytest.raises(ValueError, match="features, head"):
        SHOT(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="may be trained"):
        SHOT(TwoHead(nn.Identity(), 3, 2))
