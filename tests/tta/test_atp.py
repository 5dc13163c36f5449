from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from fedtta import models
from fedtta.tta import ATP, atp
from fedtta.tta.modules import batch_statistics, call_with, gradients_of
from tests.tta.atp_networks import (
    KINDS,
    batch,
    close,
    loss_of,
    moved,
    network,
    reference_directions,
    some_rates,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_directions_are_those_of_the_equations(kind: str, n: int) -> None:
    model, x = network(kind), batch(kind, n)[0]
    got, want = atp.directions(model, x), reference_directions(model, x)
    assert set(got) == set(want)
    for name in got:
        close(got[name], want[name])
    if n == 1 and kind == "flat":
        assert not got["encoder.1.running_var"].any()
        assert got["encoder.1.running_mean"].all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_rates_follow_the_gradient(kind: str) -> None:
    model, (x, y) = network(kind), batch(kind)
    rates, lr = some_rates(model), 0.1
    h = atp.directions(model, x)
    refined = atp.refine(model, x, y, rates, lr)
    here = moved(model, {name: rates[name] * h[name] for name in h})
    for name in h:  # dCE/dα[l] is the derivative along h[l] at w
        up, down = (loss_of(moved(here, {name: t * h[name]}), x, y) for t in (1e-4, -1e-4))
        want = (up - down) / 2e-4 / math.sqrt(h[name].numel())
        got = (rates[name] - refined[name]) / lr
        assert got == pytest.approx(want, abs=1e-7), name
        unused = name.startswith(("encoder.unused", "encoder.spare"))
        assert (got == 0) == unused, name


def test_the_clamp_is_not_differentiated() -> None:
    model, (x, y) = network("flat"), batch("flat")
    layer = model.encoder[1]
    layer.eps = 0.5  # √(σ² + ε) is then smooth at σ² = 0
    h = atp.directions(model, x)
    name = "encoder.1.running_var"
    rates = {**atp.zero_rates(model), name: 5.0}
    w = atp.adapted(model, h, rates)
    raw = layer.running_var + 5 * h[name]
    assert (raw < 0).any()
    assert torch.equal(w[name], raw.clamp(min=0))
    here = moved(model, {name: w[name] - layer.running_var})
    up, down = (loss_of(moved(here, {name: t * h[name]}), x, y) for t in (1e-5, -1e-5))
    want = (up - down) / 2e-5 / math.sqrt(5)
    assert rates[name] - atp.refine(model, x, y, rates, 1.0)[name] == pytest.approx(want, abs=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_that_of_the_state(kind: str) -> None:
    model = network(kind)
    state = [n for n in model.state_dict() if not n.startswith("personal_head.") and "num_batches" not in n]
    assert atp.modules(model) == list(atp.directions(model, batch(kind)[0])) == list(atp.zero_rates(model)) == state


def test_names_of_a_known_network() -> None:
    names = atp.modules(models.build("shallow-cnn", 10))
    assert names[:6] == [
        "encoder.body.conv1.weight",
        "encoder.body.norm1.weight",
        "encoder.body.norm1.bias",
        "encoder.body.norm1.running_mean",
        "encoder.body.norm1.running_var",
        "encoder.body.conv2.weight",
    ]
    assert len(names) == 3 + 4 * 4 + 2 + 2  # convolutions, BatchNorms, fully connected layer, head


def test_a_network_may_be_one_layer() -> None:
    assert atp.modules(nn.BatchNorm1d(2)) == ["weight", "bias", "running_mean", "running_var"]
    layer = nn.BatchNorm1d(2, affine=False).double()
    x = torch.tensor([[1.0, 2.0], [3.0, 8.0]], dtype=torch.float64)
    h = atp.directions(layer, x)
    assert h["running_mean"].tolist() == [2.0, 5.0]
    assert h["running_var"].tolist() == [1.0, 17.0]  # 2 - 1, 18 - 1


class Tied(nn.Module):
    """One tensor under two names of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first + self.second


def test_every_name_of_a_tensor_in_a_layer_is_exchanged() -> None:
    model, x = Tied(), torch.tensor([[3.0, 4.0]])
    assert call_with(model, {"first": torch.tensor([5.0, 6.0])}, x).tolist() == [[20.0, 30.0]]
    assert model(x).tolist() == [[4.0, 10.0]]


def test_gradients_are_zero_where_a_loss_depends_on_nothing() -> None:
    one, other = (torch.tensor([2.0, 3.0], requires_grad=True) for _ in range(2))
    assert [gradient.tolist() for gradient in gradients_of((one**2).sum(), [one, other])] == [[4, 6], [0, 0]]
    assert [gradient.tolist() for gradient in gradients_of(torch.tensor(5.0), [one, other])] == [[0, 0], [0, 0]]


def test_the_personal_head_has_no_modules() -> None:
    model: Any = nn.Module()
    model.head, model.personal_head = nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    assert atp.modules(model) == [f"head.{part}" for part in ("weight", "bias", "running_mean", "running_var")]


def test_statistics_of_half_precision_are_measured_in_the_layers_own() -> None:
    layer = nn.BatchNorm1d(2).eval()
    x = (1000 + torch.randn(50, 2, generator=Generator().manual_seed(0))).bfloat16()
    with batch_statistics(layer) as found:
        layer(x)
    exact = x.double().numpy()
    np.testing.assert_allclose(found["running_mean"].numpy(), exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found["running_var"].numpy(), exact.var(0, ddof=1), rtol=1e-4)


def test_frozen_parameters_are_no_modules() -> None:
    model, (x, y) = network("conv"), batch("conv")
    full = atp.refine(model, x, y, atp.zero_rates(model), 0.1)
    model.encoder.norm.requires_grad_(False)
    left = atp.refine(model, x, y, atp.zero_rates(model), 0.1)
    assert set(full) - set(left) == {"encoder.norm.weight", "encoder.norm.bias"}
    assert left == pytest.approx({name: full[name] for name in left}, abs=1e-12)
    model.requires_grad_(False)
    assert {name.rpartition(".")[2] for name in atp.modules(model)} == {"running_mean", "running_var"}
    frozen = atp.refine(model, x, y, atp.zero_rates(model), 0.1)
    assert frozen == pytest.approx({name: full[name] for name in frozen}, abs=1e-12)
    with pytest.raises(ValueError, match="Linear has nothing to adapt"):
        atp.modules(nn.Linear(2, 2).requires_grad_(False))


def test_shared_tensors_and_layers_count_once() -> None:
    norm, linear = nn.BatchNorm1d(4), nn.Linear(4, 4)
    twin = nn.Linear(4, 4)
    twin.weight = linear.weight
    model = nn.Sequential(linear, norm, nn.Tanh(), twin, norm).double()
    own = dict(model.named_parameters()), dict(model.named_buffers())
    x, y = torch.randn(5, 4, generator=Generator().manual_seed(0)).double(), torch.arange(5) % 4
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "3.bias"]
    assert atp.modules(model) == names
    first = linear(x)
    both = torch.cat((first, twin(torch.tanh(norm.eval()(first))))).detach()  # all that the layer sees
    h = atp.directions(model, x)
    close(h["1.running_mean"], both.mean(0) - norm.running_mean)
    close(h["1.running_var"], both.var(0) - norm.running_var)
    refined = atp.refine(model, x, y, atp.zero_rates(model), 1.0)
    for now, before in zip((dict(model.named_parameters()), dict(model.named_buffers())), own, strict=True):
        assert all(now[name] is value for name, value in before.items())
    assert twin.weight is linear.weight
    for name in names:
        up, down = (loss_of(moved(model, {name: t * h[name]}), x, y) for t in (1e-5, -1e-5))
        assert -refined[name] == pytest.approx((up - down) / 2e-5 / math.sqrt(h[name].numel()), abs=1e-7)


def test_layers_without_running_statistics_have_none() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).double()
    assert atp.modules(model) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    x = torch.randn(4, 3, generator=Generator().manual_seed(0)).double()
    refined = atp.refine(model, x, torch.tensor([0, 1, 2, 3]), atp.zero_rates(model), 0.1)
    assert refined["0.weight"] != 0


@pytest.mark.parametrize("training", [False, True])
def test_the_network_is_left_as_it_is(training: bool) -> None:
    model, (x, y) = network("conv").train(training), batch("conv")
    model.encoder.bare.eval()  # a mixture of modes
    modes = [layer.training for layer in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    marked = lambda x: nn.BatchNorm2d.forward(model.encoder.norm, x)  # noqa: E731
    model.encoder.norm.forward = marked  # a caller's own forward function
    rates = some_rates(model)
    atp.refine(model, x, y, rates, 0.1)
    with pytest.raises(ValueError, match="adapted network's output"):
        atp.refine(model, x, y, {**rates, "head.weight": 1e308, "encoder.fc.weight": 1e308}, 0.1)
    assert [layer.training for layer in model.modules()] == modes
    assert model.encoder.norm.__dict__.pop("forward") is marked
    for layer in model.modules():
        assert "forward" not in layer.__dict__
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
    ATP(model, rates, "online").predict(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None and value.requires_grad for value in model.parameters())


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(KINDS))
def test_a_small_step_lowers_the_loss(seed: int, kind: str) -> None:
    model, (x, y) = network(kind), batch(kind, seed=seed)
    before = atp.refine_with_loss(model, x, y, atp.zero_rates(model), 1e-3)
    after = atp.refine_with_loss(model, x, y, before.rates, 0.0)
    assert after.rates == before.rates
    assert after.loss < before.loss


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_hits_are_those_before_the_step(kind: str) -> None:
    model, (x, y) = network(kind), batch(kind)
    rates, h = some_rates(model), atp.directions(model, x)
    other = moved(model, {name: rates[name] * h[name] for name in h})
    done = atp.refine_with_loss(model, x, y.to(torch.int32), rates, 0.1)
    assert done.loss == pytest.approx(loss_of(other, x, y), abs=1e-12)
    assert (done.correct, done.samples) == (int((other(x).argmax(1) == y).sum()), 7)
    assert done.rates == atp.refine(model, x, y, rates, 0.1)


@pytest.mark.parametrize(("adapt", "kept"), [("params", "running"), ("stats", "weight bias scale")])
def test_variants_learn_and_use_only_their_own(adapt: str, kept: str) -> None:
    model, (x, y) = network("conv"), batch("conv")
    rates = some_rates(model)
    silent = {name: any(word in name for word in kept.split()) for name in rates}
    own = {name: 0.0 if silent[name] else rate for name, rate in rates.items()}
    full, got = (
        atp.refine(model, x, y, own, 0.1),
        atp.refine(model, x, y, rates, 0.1, adapt),  # type: ignore[arg-type]
    )
    for name, rate in rates.items():
        assert got[name] == (rate if silent[name] else pytest.approx(full[name], abs=1e-12)), name
    variant = ATP(model, rates, adapt=adapt)  # type: ignore[arg-type]
    assert variant.rates == own
    close(variant.predict(x), ATP(model, own).predict(x))


def test_rates_may_be_tensors_or_numpy_numbers_in_any_order() -> None:
    model = network("flat")
    rates = some_rates(model)
    mixed = {name: (torch.tensor if i % 2 else np.float64)(rate) for i, (name, rate) in enumerate(rates.items())}
    mixed = {name: mixed[name].double() if i % 2 else mixed[name] for i, name in enumerate(mixed)}
    mixed = dict(reversed(mixed.items()))
    got = atp.check_rates(model, mixed)
    assert list(got) == list(rates)
    assert got == pytest.approx(rates, abs=1e-7)
    assert all(type(rate) is float for rate in got.values())


@pytest.mark.parametrize(
    "use", [lambda m, r: atp.check_rates(m, r), ATP, lambda m, r: atp.refine(m, *batch("flat"), r, 1)]
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head.bias": None}, r"missing \['head.bias'\]"),
        ({"personal_head.weight": 1.0}, r"unknown \['personal_head.weight'\]"),
        ({"head.bias": float("nan")}, "head.bias=nan"),
        ({"encoder.1.running_var": float("inf")}, "encoder.1.running_var=inf"),
    ],
)
def test_bad_rates_are_refused(use, change: dict[str, float | None], message: str) -> None:
    model = network("flat")
    rates = {name: rate for name, rate in {**atp.zero_rates(model), **change}.items() if rate is not None}
    with pytest.raises(ValueError, match=message):
        use(model, rates)


def test_bad_batches_and_options_are_refused() -> None:
    model, (x, y) = network("flat"), batch("flat")
    rates = atp.zero_rates(model)
    for labels, message in (
        (y[:3], r"shape \(7,\)"),
        (y.double(), "float64"),
        (y + 1, r"labels 1\.\.3 are outside 0\.\.2"),
        (y - 1, r"labels -1"),
    ):
        with pytest.raises(ValueError, match=message):
            atp.refine(model, x, labels, rates, 0.1)
    with pytest.raises(ValueError, match="at least one"):
        atp.refine(model, x[:0], y[:0], rates, 0.1)
    with pytest.raises(ValueError, match="lr=-1"):
        atp.refine(model, x, y, rates, -1)
    with pytest.raises(ValueError, match="there are: all, params, stats"):
        atp.refine(model, x, y, rates, 0.1, "none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there are: all, params, stats"):
        ATP(model, rates, adapt="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there are: batch, online"):
        ATP(model, rates, "stream")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"refinement at lr=.* left the finite numbers: encoder"):
        atp.refine(model, x, y, {**rates, "head.weight": -1e10, "head.bias": 1e10}, 1e308)
