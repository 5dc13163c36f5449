from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedtta.models.two_head import TwoHead
from fedtta.tta.t3a import T3A
from tests.tta.streams import Stream

OPTIONS = [
    {"support": 3},
    {"support": 0},
    {"support": 1, "head": "personal"},
    {"support": 3, "prototype": "direction"},
    {"support": 0, "prototype": "direction", "head": "personal"},
]


def entropy(logits: Tensor) -> float:
    return -sum(float(p) * math.log(float(p)) for p in torch.softmax(logits, 0) if p > 0)


@torch.no_grad()
def reference(
    model: TwoHead,
    x: Tensor,
    support: int = 50,
    prototype: str = "mean",
    head: str = "global",
    state: list | None = None,
) -> Tensor:
    """The paper, sample by sample, with lists: a class is a list of (entropy, age, direction)."""
    linear = model.head if head == "global" else model.personal_head
    z = model.features(x)
    classes = [[(entropy(linear(row)), -1, row / row.norm())] for row in linear.weight]
    rows = []
    for n, feature in enumerate(z):
        logits = linear(feature)
        mine = classes[int(logits.argmax())]
        mine.append((entropy(logits), n, feature / feature.norm()))
        if support:
            mine.sort(key=lambda one: one[:2])
            del mine[support:]
        means = [torch.stack([one[2] for one in kept]).mean(0) for kept in classes]
        if prototype == "direction":
            means = [mean / mean.norm() for mean in means]
        rows.append(torch.softmax(torch.stack([feature @ mean for mean in means]), 0))
    if state is not None:
        state.extend(classes)
    return torch.stack(rows)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [1, 7, 60])
def test_it_equals_the_paper_whatever_the_batch_size(stream: Stream, size: int, options: dict) -> None:
    adapter = T3A(stream.model, **options)
    rows = torch.cat([adapter.predict(part) for part in stream.x.split(size)])
    torch.testing.assert_close(rows, reference(stream.model, stream.x, **options), atol=1e-12, rtol=0)
    linear = stream.model.personal_head if options.get("head") == "personal" else stream.model.head
    want = [entropy(logits) for logits in linear(stream.x).detach()]
    torch.testing.assert_close(adapter.report()["entropy"], torch.tensor(want, dtype=torch.float64))


def test_by_hand() -> None:
    # Head rows e_1 and 2 e_2, no bias. z = (3, 4): the head says class 2 (8 > 3), so S_2 = {(0, 1), (0.6, 0.8)},
    # c_1 = (1, 0), c_2 = (0.3, 0.9), scores 3 and 0.9 + 3.6 = 4.5.
    model = TwoHead(nn.Identity(), 2, 2).double()
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        model.head.bias.zero_()
    adapter = T3A(model)
    p = adapter.predict(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    assert float(p[0, 1]) == pytest.approx(1 / (1 + math.exp(3 - 4.5)), abs=1e-12)
    # c_2 normalised is (1, 3)/√10.
    direction = T3A(model, prototype="direction").predict(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    assert float(direction[0, 1]) == pytest.approx(1 / (1 + math.exp(3 - 15 / math.sqrt(10))), abs=1e-12)
    # M = 1: the row of class 2 has the entropy of logits (0, 4), 0.09; z that of (3, 8), 0.04, which replaces it.
    one = T3A(model, support=1).predict(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    assert float(one[0, 1]) == pytest.approx(1 / (1 + math.exp(3 - 5)), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), support=st.integers(1, 5), cuts=st.lists(st.integers(0, 20), max_size=3))
def test_supports_are_the_most_certain_and_cuts_do_not_matter(seed: int, support: int, cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = two_head(generator)
    # Few distinct values: features of the same entropy happen, and the older one stays.
    x = torch.randint(0, 3, (20, 3), generator=generator).double()
    x[x.sum(1) == 0] = 1.0
    kept: list = []
    want = reference(model, x, support, state=kept)
    adapter = T3A(model, support=support)
    edges = [0, *sorted(cuts), 20]
    rows = [adapter.predict(x[start:stop]) for start, stop in itertools.pairwise(edges)]
    torch.testing.assert_close(torch.cat(rows), want, atol=1e-12, rtol=0)
    state = adapter.state_dict()
    assert state["counts"].tolist() == [len(one) for one in kept]
    for k, one in enumerate(kept):
        torch.testing.assert_close(state["supports"][k, : len(one)], torch.stack([s for _, _, s in one]))


def two_head(generator: torch.Generator) -> TwoHead:
    model = TwoHead(nn.Identity(), 3, 4).double()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.parametrize("scale", [0.01, 1000.0])
def test_the_length_of_a_support_does_not_matter(stream: Stream, scale: float) -> None:
    # Without a bias the pseudo-label is the same; with M = 0 entropies do not count. Scores scale with the last z.
    model = TwoHead(nn.Identity(), 12, 5).double()
    model.head.weight = stream.model.head.weight
    nn.init.zeros_(model.head.bias)
    plain, scaled = T3A(model, support=0), T3A(model, support=0)
    plain.predict(stream.x)
    scaled.predict(scale * stream.x)
    torch.testing.assert_close(plain.state_dict()["sums"], scaled.state_dict()["sums"])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("counts", torch.zeros(5, dtype=torch.int64), "counts"),
        ("counts", torch.full((5,), 4), "counts"),
        ("entropies", torch.tensor([[2.0, 1.0, 0.0]] * 5, dtype=torch.float64), "rise"),
    ],
)
def test_a_bad_state_is_refused(stream: Stream, name: str, value: Tensor, message: str) -> None:
    adapter = T3A(stream.model, support=3)
    adapter.predict(stream.x)
    before = adapter.state_dict()
    assert before["counts"].max() == 3
    with pytest.raises(ValueError, match=message):
        adapter.load_state_dict({**before, name: value})
    assert all(torch.equal(value, adapter.state_dict()[key]) for key, value in before.items())


def test_a_feature_of_length_zero(stream: Stream) -> None:
    adapter = T3A(stream.model)
    zero = adapter.predict(torch.zeros(1, 12, dtype=torch.float64))
    torch.testing.assert_close(zero, torch.full((1, 5), 0.2, dtype=torch.float64))
