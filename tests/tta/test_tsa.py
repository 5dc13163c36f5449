from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from fedtta.models.two_head import TwoHead
from fedtta.tta.tsa import TSA, agreement
from tests.tta.networks import noise
from tests.tta.streams import Stream


def generator_of(seed: int, position: int, step: int) -> Generator:
    key = np.random.SeedSequence(seed, spawn_key=(position, step))
    return Generator().manual_seed(int(key.generate_state(1, np.uint64)[0]))


def similarity_of(a: Tensor, model: TwoHead, one: Tensor, two: Tensor, kind: str) -> Tensor:
    """The similarity of one sample's two views [...], from the definition."""
    e = a.exp()[0] / a.exp().sum()
    predictions = []
    for view in (one, two):
        z = model.features(view[None])[0].detach()
        logits = e * model.head(z).detach() + (1 - e) * model.personal_head(z).detach()
        predictions.append(logits.exp() / logits.exp().sum())
    p, q = predictions
    dot = (p * q).sum()
    return dot if kind == "dot" else dot / ((p * p).sum().sqrt() * (q * q).sum().sqrt())


def reference(
    model: TwoHead, x: Tensor, size: int, scope: str, lr: float, steps: int, kind: str, momentum: float = 0.9
) -> tuple[Tensor, Tensor]:
    """TSA with torch's optimisers, one sample's similarity after the other: probabilities [n, K] and e [n]."""
    size = 1 if scope == "sample" else size
    a = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimiser: torch.optim.Optimizer = torch.optim.SGD([a], lr=lr, momentum=momentum)
    rows, shares = [], []
    for start in range(0, len(x), size):
        batch = x[start : start + size]
        if scope == "sample":
            a = torch.zeros(2, dtype=torch.float64, requires_grad=True)
            optimiser = torch.optim.Adam([a], lr=lr)
        for step in range(steps):
            at = 0 if scope == "sample" else step
            views = noise(torch.cat((batch, batch)), generator_of(3, start, at))
            pairs = zip(views[: len(batch)], views[len(batch) :], strict=True)
            loss = -sum(similarity_of(a, model, one, two, kind) for one, two in pairs) / len(batch)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[union-attr]
            optimiser.step()
        e = torch.softmax(a.detach(), 0)[0]
        z = model.features(batch)
        rows.append(torch.softmax(e * model.head(z) + (1 - e) * model.personal_head(z), 1).detach())
        shares += [float(e)] * len(batch)
    return torch.cat(rows), torch.tensor(shares, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["cosine", "dot"])
@pytest.mark.parametrize(("scope", "size"), [("stream", 7), ("stream", 20), ("stream", 1), *[("sample", 7)]])
def test_it_equals_the_definition(stream: Stream, scope: str, size: int, kind: str) -> None:
    x = stream.x[:20]
    want, shares = reference(stream.model, x, size, scope, 0.4, 3, kind)
    options = {"scope": scope, "lr": 0.4, "steps": 3, "similarity": kind, "least": 0.0}
    adapter = TSA(stream.model, augment=noise, seed=3, **options)  # type: ignore[arg-type]
    got = torch.cat([adapter.predict(part) for part in x.split(size)])
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
    torch.testing.assert_close(adapter.report()["weight"], shares, atol=1e-9, rtol=0)
    assert float((shares - 0.5).abs().max()) > 0.01  # it did something


@pytest.mark.parametrize(("scope", "steps"), [("stream", 5), ("sample", 10)])
def test_rates_and_steps_are_the_published_ones(stream: Stream, scope: str, steps: int) -> None:
    want, shares = reference(stream.model, stream.x[:6], 3, scope, 0.1, steps, "cosine")
    adapter = TSA(stream.model, scope=scope, augment=noise, seed=3)  # type: ignore[arg-type]
    got = torch.cat([adapter.predict(part) for part in stream.x[:6].split(3)])
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
    torch.testing.assert_close(adapter.report()["weight"], shares, atol=1e-9, rtol=0)
    assert adapter.least == 0.05


def test_samples_do_not_depend_on_the_batch_size(stream: Stream) -> None:
    results = []
    for size in (1, 7, 60):
        adapter = TSA(stream.model, scope="sample", augment=noise)
        results.append(torch.cat([adapter.predict(part) for part in stream.x.split(size)]))
        assert adapter.per == "sample"
    for one, other in itertools.pairwise(results):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(0, 5), each=st.booleans())
def test_agreement_by_loop_and_its_gradient(seed: int, scale: float, each: bool) -> None:
    generator = Generator().manual_seed(seed)
    logits = [scale * torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    a = torch.randn((6, 2) if each else (2,), generator=generator, dtype=torch.float64, requires_grad=True)
    first, second = (logits[0], logits[1]), (logits[2], logits[3])
    for kind in ("cosine", "dot"):
        got = agreement(a, first, second, kind)
        assert bool(((got >= 0) & (got <= 1 + 1e-12)).all())
        torch.testing.assert_close(got, agreement(a, second, first, kind))  # views can be exchanged
        shifted = agreement(a + 3, first, second, kind)
        torch.testing.assert_close(got, shifted)  # the softmax of a counts
        for i in range(6):
            e = torch.softmax(a[i] if each else a, 0)[0]
            p = torch.softmax(e * logits[0][i] + (1 - e) * logits[1][i], 0)
            q = torch.softmax(e * logits[2][i] + (1 - e) * logits[3][i], 0)
            want = torch.dot(p, q) if kind == "dot" else torch.cosine_similarity(p, q, 0)
            assert got[i].item() == pytest.approx(want.item(), abs=1e-9)
        assert torch.autograd.gradcheck(lambda v, kind=kind: agreement(v, first, second, kind).sum(), (a,))


def test_by_hand() -> None:
    # The global head gives both views (1/2, 1/2), the personal head (1, 0) and (0, 1): only the first one is stable.
    half = torch.zeros(1, 2, dtype=torch.float64)
    left, right = torch.tensor([[50.0, -50.0]]).double(), torch.tensor([[-50.0, 50.0]]).double()
    for a, want in (((40.0, -40.0), 1.0), ((-40.0, 40.0), 0.0)):
        got = agreement(torch.tensor(a, dtype=torch.float64), (half, left), (half, right))
        assert float(got) == pytest.approx(want, abs=1e-9)


def unstable() -> TwoHead:
    """The personal head changes its mind with the first feature's sign, the global head hardly looks."""
    model = TwoHead(nn.Identity(), 2, 2).double()
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[0.0, 3.0], [0.0, -3.0]]))
        model.head.bias.zero_()
        model.personal_head.weight.copy_(torch.tensor([[9.0, 0.0], [-9.0, 0.0]]))
    return model


def test_it_finds_the_stable_head_and_stops_at_the_least_weight() -> None:
    x = torch.tensor([[0.05, 1.0], [-0.05, -1.0]] * 10, dtype=torch.float64)
    free = TSA(unstable(), augment=noise, lr=0.5, least=0.0)
    bounded = TSA(unstable(), augment=noise, lr=0.5, least=0.2)
    for _ in range(30):
        free.predict(x)
        bounded.predict(x)
    weight = bounded.report()["weight"]
    assert float(free.report()["weight"][-1]) > 0.95
    assert float(weight[-1]) > 0.8
    stopped = int((weight > 0.8).nonzero()[0])
    assert bool((weight[stopped:] == weight[stopped]).all())  # for good


def test_it_also_stops_when_the_global_head_has_the_least_weight() -> None:
    x = torch.tensor([[0.05, 1.0], [-0.05, -1.0]] * 3, dtype=torch.float64)
    model = unstable()
    model.head, model.personal_head = model.personal_head, model.head
    adapter = TSA(model, augment=noise, lr=0.5, least=0.4)
    for _ in range(8):
        adapter.predict(x)
    weight = adapter.report()["weight"]
    stopped = int((weight < 0.4).nonzero()[0])
    assert stopped < len(x) * 4
    assert bool((weight[stopped:] == weight[stopped]).all())
