from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from fedtta.models.two_head import TwoHead
from fedtta.tta import knn_per
from fedtta.tta.knn_per import Datastore, KNNPer, choose_weight, knn_probabilities
from tests.tta.streams import D, K, Stream


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


def store_of(n: int, features: int = D, classes: int = K, seed: int = 5) -> Datastore:
    labels = torch.randint(0, classes, (n,), generator=Generator().manual_seed(seed))
    return Datastore(random(n, features, seed=seed).abs(), labels)


def reference(z: Tensor, store: Datastore, classes: int, k: int, scale: float) -> Tensor:
    """Sort all distances of each sample, with plain numbers."""
    rows = []
    for query in z.tolist():
        pairs = sorted(
            (math.dist(query, key), label)
            for key, label in zip(store.features.tolist(), store.labels.tolist(), strict=True)
        )
        votes = [0.0] * classes
        for distance, label in pairs[:k]:
            votes[label] += math.exp(-(distance - pairs[0][0]) / scale)
        rows.append([vote / sum(votes) for vote in votes])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("head", ["global", "personal"])
@pytest.mark.parametrize(("k", "scale"), [(1, 1.0), (10, 1.0), (7, 0.05), (1000, 3.0)])
@pytest.mark.parametrize("size", [1, 7, 60])
def test_it_equals_brute_force_whatever_the_batch_size(
    stream: Stream, size: int, k: int, scale: float, head: str
) -> None:
    store = store_of(40)
    adapter = KNNPer(stream.model, store, neighbours=k, scale=scale, weight=0.3, head=head)  # type: ignore[arg-type]
    logits = stream.logits_global if head == "global" else stream.logits_personal
    want = 0.3 * reference(stream.x, store, K, k, scale) + 0.7 * torch.softmax(logits, 1)
    got = torch.cat([adapter.predict(part) for part in stream.x.split(size)])
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    assert adapter.report()["knn_weight"].tolist() == [0.3] * 60


def test_by_hand() -> None:
    # Distances 0, 1 and 3 from z = 0, labels 0, 1, 1, k = 2, σ = 1: weights 1 and e^-1.
    store = Datastore(torch.tensor([[3.0], [0.0], [-1.0]]), torch.tensor([1, 0, 1]))
    p = knn_probabilities(torch.zeros(1, 1), store, 3, 2, 1.0)
    assert p[0].tolist() == pytest.approx([1 / (1 + math.exp(-1)), math.exp(-1) / (1 + math.exp(-1)), 0.0])


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    store, z = store_of(9), random(11, D)
    whole = knn_probabilities(z, store, K, 4, 1.0)
    monkeypatch.setattr(knn_per, "CHUNK_NUMBERS", 20)  # two rows at once
    assert torch.equal(knn_probabilities(z, store, K, 4, 1.0), whole)


def test_far_queries_and_close_keys_are_exact() -> None:
    far = knn_probabilities(torch.full((1, D), 1e6, dtype=torch.float64), store_of(20), K, 5, 1e-3)
    assert bool(torch.isfinite(far).all())
    assert float(far.sum()) == pytest.approx(1)
    # The squares of 1e4 lose differences of 1e-3 in float32; differences themselves do not.
    keys = torch.tensor([[1e4], [1e4 + 1 / 64]])
    near = knn_probabilities(torch.tensor([[1e4 + 1 / 64]]), Datastore(keys, torch.tensor([0, 1])), 2, 1, 1.0)
    assert near.tolist() == [[0.0, 1.0]]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 15), k=st.integers(1, 20), scale=st.floats(0.01, 100))
def test_votes_are_distributions_and_ignore_order_and_place(seed: int, n: int, k: int, scale: float) -> None:
    store, z = store_of(n, 3, 4, seed), random(5, 3, seed=seed + 1)
    p = knn_probabilities(z, store, 4, k, scale)
    torch.testing.assert_close(p.sum(1), torch.ones(5).double())
    assert bool((p >= 0).all())
    order = torch.randperm(n, generator=Generator().manual_seed(seed))
    shuffled = Datastore(store.features[order], store.labels[order])
    torch.testing.assert_close(knn_probabilities(z, shuffled, 4, k, scale), p)
    moved = Datastore(store.features + 7, store.labels)  # distances stay
    torch.testing.assert_close(knn_probabilities(z + 7, moved, 4, k, scale), p, atol=1e-9, rtol=0)
    scaled = Datastore(3 * store.features, store.labels)  # with σ
    torch.testing.assert_close(knn_probabilities(3 * z, scaled, 4, k, 3 * scale), p, atol=1e-9, rtol=0)


def test_choose_weight() -> None:
    # The vote is right on sample 0, the head on 1. The vote's (0.9, 0.1) beats (0.2, 0.8) from λ·0.8 > (1-λ)·0.6 on,
    # λ > 3/7 = 0.4286; the head's (0.1, 0.9) beats (0.8, 0.2) as long as λ·0.6 < (1-λ)·0.8, λ < 4/7.
    p_knn = torch.tensor([[0.9, 0.1], [0.8, 0.2]], dtype=torch.float64)
    p_head = torch.tensor([[0.2, 0.8], [0.1, 0.9]], dtype=torch.float64)
    labels = torch.tensor([0, 1])
    assert choose_weight(p_knn, p_head, labels) == 0.43
    assert choose_weight(p_knn, p_head, labels, step=0.1) == 0.5
    assert choose_weight(p_knn, p_head, torch.tensor([1, 1])) == 0.0  # the head alone: of several the smallest
    assert choose_weight(p_knn, p_head, torch.tensor([0, 0]), step=0.25) == 0.75  # 4/7 < 0.75
    knn, head = torch.softmax(random(30, 4), 1), torch.softmax(random(30, 4, seed=1), 1)
    labels = torch.randint(0, 4, (30,), generator=Generator().manual_seed(2))
    chosen = choose_weight(knn, head, labels)

    def accuracy(share: float) -> int:
        return int(((share * knn + (1 - share) * head).argmax(1) == labels).sum())

    scores = [accuracy(point / 100) for point in range(101)]
    assert chosen == min(point / 100 for point in range(101) if scores[point] == max(scores))


def test_weights_0_and_1_are_head_and_vote_and_parts_gives_both(stream: Stream) -> None:
    store = store_of(30)
    p_knn, p_head = KNNPer(stream.model, store).parts(stream.x)
    torch.testing.assert_close(KNNPer(stream.model, store, weight=0.0).predict(stream.x), p_head)
    torch.testing.assert_close(KNNPer(stream.model, store, weight=1.0).predict(stream.x), p_knn)
    torch.testing.assert_close(p_head, torch.softmax(stream.logits_global, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: KNNPer(m, store_of(9, features=3)), "has 3 features, the model 12"),
        (lambda m: KNNPer(m, Datastore(random(1, D), torch.tensor([K]))), "label 5, the model 5"),
        (lambda m: KNNPer(nn.Linear(D, K), store_of(9)), "features"),
        (lambda m: Datastore(random(0, D), torch.tensor([], dtype=torch.int64)), "n > 0"),
        (lambda m: Datastore(random(2, D), torch.tensor([0])), "labels"),
        (lambda m: Datastore(random(1, D) / 0, torch.tensor([0])), "finite"),
        (lambda m: Datastore(random(1, D), torch.tensor([0.0])), "integers"),
        (lambda m: Datastore(random(1, D), torch.tensor([-1])), "integers"),
        (lambda m: choose_weight(random(2, 3), random(2, 3), torch.tensor([0, 1]), step=0.3), "step=0.3"),
        (lambda m: choose_weight(random(2, 3), random(2, 3), torch.tensor([0, 1]), step=0.0), "step=0"),
        (lambda m: choose_weight(random(2, 3), random(2, 4), torch.tensor([0, 1])), "choose_weight needs"),
    ],
)
def test_bad_input_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(TwoHead(nn.Identity(), D, K).double())
