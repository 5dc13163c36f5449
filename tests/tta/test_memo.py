from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from fedtta.models.two_head import TwoHead
from fedtta.tta.augmix import AugMix
from fedtta.tta.memo import (
    MEMO,
    Readout,
    Tuning,
    by_loop,
    marginal_entropy,
    marginal_entropy_of_logits,
    sample_bytes,
    tune_and_predict,
)

LR = 0.3  # large: the tuning must show
OPTIONS = {"views": 5, "steps": 3, "lr": LR, "seed": 11}


def noise(x: Tensor, generator: Generator) -> Tensor:
    """An augmentation for samples of any shape."""
    return x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def make_network(kind: str, dtype: torch.dtype = torch.float64) -> TwoHead:
    torch.manual_seed(0)
    norm: nn.Module = nn.GroupNorm(2, 4)
    if kind == "batchnorm":
        norm = nn.BatchNorm2d(4)
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    encoder: nn.Module = nn.Sequential(
        nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Dropout(0.5), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 6)
    )
    if kind == "identity":
        encoder = nn.Identity()
    return TwoHead(encoder, 6, 4).to(dtype)


def samples(kind: str, n: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = (n, 6) if kind == "identity" else (n, 3, 8, 8)
    return torch.rand(shape, generator=Generator().manual_seed(1), dtype=dtype)


def reference(network: TwoHead, x: Tensor, tuning: Tuning, head: str, first: int = 0) -> tuple[Tensor, Tensor]:
    """MEMO to the letter: a copy, torch.optim.SGD and the entropy of the mean, for one sample after the other."""
    rows, losses = [], []
    for position, sample in enumerate(x, start=first):
        tuned = copy.deepcopy(network).eval().requires_grad_(True)
        optimiser = torch.optim.SGD(tuned.parameters(), lr=tuning.lr)

        def probabilities(batch: Tensor, tuned: TwoHead = tuned) -> Tensor:
            z = tuned.features(batch)
            return torch.softmax(tuned.head(z) if head == "global" else tuned.personal_head(z), 1)

        for step in range(tuning.steps):
            copies = torch.stack([sample] * tuning.views)
            mean = probabilities(tuning.augment(copies, tuning.generator(position, step))).mean(0)
            loss = -(mean * mean.log()).sum()
            losses.append(loss.detach())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        rows.append(probabilities(sample[None]).detach())
    return torch.cat(rows), torch.stack(losses).view(len(x), tuning.steps)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), views=st.integers(1, 6), classes=st.integers(1, 6), scale=st.floats(0, 20))
def test_marginal_entropy_is_the_entropy_of_the_mean(seed: int, views: int, classes: int, scale: float) -> None:
    logits = scale * torch.randn(views, classes, generator=Generator().manual_seed(seed), dtype=torch.float64)
    probabilities = torch.softmax(logits, 1).tolist()
    mean = [sum(row[k] for row in probabilities) / views for k in range(classes)]
    want = -sum(p * math.log(p) for p in mean if p > 0)
    assert float(marginal_entropy(torch.tensor(probabilities, dtype=torch.float64))) == pytest.approx(want, abs=1e-9)
    assert float(marginal_entropy_of_logits(logits)) == pytest.approx(want, abs=1e-9)


def test_marginal_entropy_by_hand() -> None:
    # Two certain views that disagree: the mean is (1/2, 1/2), the entropy ln 2.
    views = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert float(marginal_entropy(views)) == pytest.approx(math.log(2))


def test_marginal_entropy_has_the_right_gradient_and_a_finite_one_at_certainty() -> None:
    logits = torch.randn(4, 5, generator=Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(marginal_entropy_of_logits, (logits,))
    certain = torch.tensor([[2000.0, 0.0], [2000.0, -2000.0]], requires_grad=True)
    marginal_entropy_of_logits(certain).backward()
    assert certain.grad is not None
    assert bool(torch.isfinite(certain.grad).all())


def test_one_step_follows_the_finite_difference_gradient() -> None:
    network, x = make_network("identity").eval(), samples("identity", 1)
    tuning = Tuning(views=3, steps=1, lr=LR, augment=noise)
    views = tuning.views_of(x, 0)

    def loss(weight: Tensor, bias: Tensor) -> float:
        return float(marginal_entropy(torch.softmax(views[0, 0] @ weight.T + bias, 1)))

    def slope(parameter: Tensor, at: int) -> float:
        parts = [network.head.weight.detach().clone(), network.head.bias.detach().clone()]
        which = 0 if parameter is network.head.weight else 1
        values = []
        for sign in (1, -1):
            moved = [part.clone() for part in parts]
            moved[which].view(-1)[at] += sign * 1e-5
            values.append(loss(moved[0], moved[1]))
        return (values[0] - values[1]) / 2e-5

    weight, bias = (
        torch.tensor([slope(p, i) for i in range(p.numel())], dtype=torch.float64).view_as(p)
        for p in (network.head.weight, network.head.bias)
    )
    with torch.no_grad():
        want = x @ (network.head.weight - LR * weight).T + network.head.bias - LR * bias
        got, _ = by_loop(Readout(network, "global"), views, x, x.new_ones(1), LR)
    torch.testing.assert_close(got, want, atol=1e-8, rtol=0)


@pytest.mark.parametrize("mode", ["loop", "vmap"])
@pytest.mark.parametrize("head", ["global", "personal"])
@pytest.mark.parametrize("kind", ["groupnorm", "batchnorm", "identity"])
def test_both_paths_equal_the_definition(kind: str, head: str, mode: str) -> None:
    network, x = make_network(kind), samples(kind)
    network.head.bias.requires_grad_(False)  # tuned all the same
    augment = noise if kind == "identity" else AugMix()
    memo = MEMO(network, head=head, augment=augment, mode=mode, chunk=3, **OPTIONS)  # type: ignore[arg-type]
    want, losses = reference(network, x, memo.tuning, head)
    got = memo.predict(x)
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
    torch.testing.assert_close(memo.report()["loss"], losses, atol=1e-9, rtol=0)
    untuned = network.head if head == "global" else network.personal_head
    with torch.no_grad():
        assert float((got - torch.softmax(untuned(network.features(x)), 1)).abs().max()) > 1e-3


def test_equal_samples_at_different_positions_have_different_views() -> None:
    x = samples("groupnorm", 1).repeat(2, 1, 1, 1)
    memo = MEMO(make_network("groupnorm"), **OPTIONS)  # type: ignore[arg-type]
    first, second = memo.predict(x)
    assert not torch.allclose(first, second, atol=1e-9)


def test_seed_position_and_step_each_give_other_views() -> None:
    keys = list(itertools.product(range(3), repeat=3))
    tunings = [Tuning(views=1, steps=3, lr=LR, seed=seed) for seed in range(3)]
    drawn = [torch.rand(1, generator=tunings[seed].generator(position, step)).item() for seed, position, step in keys]
    again = [torch.rand(1, generator=tunings[seed].generator(position, step)).item() for seed, position, step in keys]
    assert drawn == again
    assert len(set(drawn)) == len(keys)


def test_views_of_all_steps_at_once_equal_views_step_by_step() -> None:
    x = samples("groupnorm", 2)
    tuning = Tuning(views=4, steps=3, lr=LR, seed=5)
    views = tuning.views_of(x, position=10)
    assert views.shape == (2, 3, 4, 3, 8, 8)
    for i in range(2):
        for step in range(3):
            want = tuning.augment(x[i].expand(4, -1, -1, -1), tuning.generator(10 + i, step))
            assert torch.equal(views[i, step], want)


def test_no_steps_means_no_tuning() -> None:
    network, x = make_network("groupnorm"), samples("groupnorm")
    with torch.no_grad():
        want = torch.softmax(network.eval()(x), 1)
    for mode in ("loop", "vmap"):
        got = MEMO(network, steps=0, mode=mode).predict(x)  # type: ignore[arg-type]
        torch.testing.assert_close(got, want)


def test_divergence_is_an_error() -> None:
    memo = MEMO(make_network("groupnorm", torch.float32), lr=1e38, views=2)
    with pytest.raises(ValueError, match=r"lr=1e\+38.*\[0, 1\]"):
        memo.predict(samples("groupnorm", 2, torch.float32))
    assert int(memo.state_dict()["position"]) == 0


def test_one_class_that_is_not_finite_is_an_error() -> None:
    plain = nn.Linear(6, 4).double()
    nn.init.constant_(plain.bias[:1], math.inf)
    with pytest.raises(ValueError, match=r"for samples \[0, 1\] of the batch"):
        MEMO(plain, augment=noise, steps=0).predict(samples("identity", 2))


def test_a_plain_network_has_a_global_head_only() -> None:
    plain = nn.Linear(6, 4).double()
    x = samples("identity")
    assert MEMO(plain, augment=noise).predict(x).shape == (7, 4)
    with pytest.raises(ValueError, match="personal_head"):
        MEMO(plain, head="personal")


def test_memory_estimate_grows_with_views_and_counts_weights() -> None:
    readout, x = Readout(make_network("identity"), "global"), samples("identity")
    one, two = (sample_bytes(readout, x, x.new_ones(7), Tuning(views=v, steps=1, lr=LR)) for v in (1, 2))
    weights = 8 * (6 * 4 + 4 + 6 * 4)
    assert one > 3 * weights
    # A linear layer saves its input, 6 numbers, and a view is 6 numbers: 2 * (48 + 48) bytes more a view.
    assert two - one == 2 * (48 + 48)


def test_auto_is_the_loop_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("fedtta.tta.memo.by_loop", lambda *args: calls.append(len(args[2])) or by_loop(*args))
    x = samples("identity", 3)
    readout = Readout(make_network("identity").eval(), "global")
    tune_and_predict(readout, x, x.new_ones(3), 0, Tuning(views=2, steps=1, lr=LR, augment=noise))
    assert calls == [1, 1, 1]
