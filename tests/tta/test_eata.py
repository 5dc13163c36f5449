from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedtta.tta.eata import EATA, fisher_diagonal, sample_weights
from fedtta.tta.tent import Tent
from tests.tta.networks import CLASSES, conv_network, images, mlp_network, two_head_network, vectors, weights
from tests.tta.test_tent import both_kinds

# Rates so large that the steps show, and limits that some samples of the small networks meet and others do not.
OPTIONS: dict[str, Any] = {"lr": 0.05, "margin": 0.97, "redundancy": 0.93, "num_classes": CLASSES}


def sharp(kind: str = "conv") -> nn.Sequential:
    """A network that is sure of some samples, of every class."""
    network, x = (conv_network(), images(64)) if kind == "conv" else (mlp_network(), vectors(64))
    with torch.no_grad():
        network[-1].weight *= 20 if kind == "conv" else 6
        network[-1].bias -= copy.deepcopy(network).train()(x).mean(0)
    return network


def affine_of(network: nn.Module) -> dict[str, nn.Parameter]:
    norms = nn.BatchNorm1d | nn.BatchNorm2d
    return {
        f"{path}.{name}": value
        for path, layer in network.named_modules()
        if isinstance(layer, norms)
        for name, value in layer.named_parameters()
    }


def squared(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The squared gradient of one batch's mean loss with predicted labels, in training mode."""
    network = copy.deepcopy(network).train()
    rows = torch.log_softmax(network(x), 1)
    loss = -sum(row.max() for row in rows) / len(x)
    loss.backward()
    return {name: value.grad**2 for name, value in affine_of(network).items() if value.grad is not None}


def reference(
    network: nn.Module,
    batches: list[Tensor],
    beta: float,
    steps: int = 1,
    left_out: tuple[str, ...] = (),
    proximal: float = 0.0,
) -> tuple[list[Tensor], ...]:
    """EATA sample by sample: torch in training mode and torch.optim.SGD; ω from the first batch; μ of FedProx."""
    adapted = copy.deepcopy(network).train()
    trained = {name: value for name, value in affine_of(adapted).items() if not name.startswith(left_out)}
    start = {name: value.detach().clone() for name, value in trained.items()}
    fisher = squared(network, batches[0])
    descent = torch.optim.SGD(trained.values(), lr=OPTIONS["lr"], momentum=0.9)
    limit = OPTIONS["margin"] * math.log(CLASSES)
    average: Tensor | None = None
    rows, kept_of = [], []
    for x in batches:
        for _ in range(steps):
            logits = adapted(x)
            losses, kept, keep = [], [], []
            for row in logits:
                p = torch.softmax(row, 0)
                entropy = -(p * p.log()).sum()
                apart = (
                    average is None or abs((p @ average / (p.norm() * average.norm())).item()) < OPTIONS["redundancy"]
                )
                keep.append(entropy.item() < limit and apart)
                if keep[-1]:
                    losses.append(math.exp(limit - entropy.item()) * entropy)
                    kept.append(p.detach())
            if losses:
                pull = sum(
                    ((beta * fisher[name] + proximal / 2) * (value - start[name]) ** 2).sum()
                    for name, value in trained.items()
                )
                adapted.zero_grad()
                (sum(losses) / len(losses) + pull).backward()
                descent.step()
                mean = torch.stack(kept).mean(0)
                average = mean if average is None else 0.9 * average + 0.1 * mean
        rows.append(torch.softmax(logits, 1).detach())
        kept_of.append(torch.tensor(keep))
    return rows, kept_of, [value.detach() for value in trained.values()]


@pytest.mark.parametrize(("beta", "steps", "proximal"), [(0.0, 1, 0.0), (30.0, 1, 0.0), (30.0, 2, 0.0), (30.0, 1, 2.0)])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_it_equals_the_reference(kind: str, beta: float, steps: int, proximal: float) -> None:
    network, x = sharp(kind), images(24) if kind == "conv" else vectors(24)
    batches = list(x.split([7, 2, 9, 6]))
    want, kept, trained = reference(network, batches, beta, steps, proximal=proximal)
    before = weights(network)
    eata = EATA(network, fisher_strength=beta, steps=steps, proximal=proximal, **OPTIONS)
    for batch, rows in zip(batches, want, strict=True):
        torch.testing.assert_close(eata.predict(batch), rows, atol=1e-10, rtol=0)
    for got, value in zip(eata.trained().values(), trained, strict=True):
        torch.testing.assert_close(got.detach(), value, atol=1e-10, rtol=0)
    weight = eata.report()["loss_weight"]
    assert torch.equal(weight > 0, torch.cat(kept))
    assert 0 < int((weight > 0).sum()) < 24  # some of each, or the test says little
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(value.requires_grad for value in network.parameters())


def test_batchnorm2d_alone_is_trained_as_in_the_published_code() -> None:
    network, batches = both_kinds(), list(images(24).split([7, 8, 9]))
    with torch.no_grad():
        network[-1].weight *= 6
        network[-1].bias -= copy.deepcopy(network).train()(images(24)).mean(0)
    want, kept, trained = reference(network, batches, 30.0, left_out=("5.",))
    eata = EATA(network, fisher_strength=30.0, layers="batchnorm2d", **OPTIONS)
    for batch, rows in zip(batches, want, strict=True):
        torch.testing.assert_close(eata.predict(batch), rows, atol=1e-10, rtol=0)
    assert list(eata.trained()) == ["1.weight", "1.bias"]
    assert {name for name in eata.state_dict() if name.startswith("fisher.")} == {"fisher.1.weight", "fisher.1.bias"}
    for got, value in zip(eata.trained().values(), trained, strict=True):
        torch.testing.assert_close(got.detach(), value, atol=1e-10, rtol=0)
    assert 0 < int(torch.cat(kept).sum()) < 24


def test_weights_by_hand() -> None:
    """K = 2, E_0 = 0.4 ln 2 = 0.277: p = (0.99, 0.01) has E = 0.056 and is kept, (0.9, 0.1) with 0.325 is not."""
    logits = torch.tensor([[0.99, 0.01], [0.9, 0.1], [0.01, 0.99]], dtype=torch.float64).log()
    limit = 0.4 * math.log(2)
    entropy = -(0.99 * math.log(0.99) + 0.01 * math.log(0.01))
    sure = math.exp(limit - entropy)
    none_yet = torch.zeros(2, dtype=torch.float64)
    assert sample_weights(logits, none_yet, limit, 0.4).tolist() == pytest.approx([sure, 0, sure])
    # cos with (1, 0) is 0.99995 for the first and 0.0101 for the last.
    assert sample_weights(logits, none_yet + torch.tensor([1, 0]), limit, 0.4).tolist() == pytest.approx([0, 0, sure])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(0, 30), margin=st.floats(0.01, 1.4), redundancy=st.floats(0.01, 1))
def test_weights_exceed_one_for_the_kept_and_do_not_depend_on_the_order(
    seed: int, scale: float, margin: float, redundancy: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(6, CLASSES, generator=generator, dtype=torch.float64)
    average = torch.rand(CLASSES, generator=generator, dtype=torch.float64)
    got = sample_weights(logits, average, margin, redundancy)
    assert bool(((got == 0) | (got > 1)).all())
    order = torch.randperm(6, generator=generator)
    assert torch.equal(sample_weights(logits[order], average, margin, redundancy), got[order])
    assert bool((sample_weights(logits, average, margin, redundancy / 2) <= got).all())


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_fisher_equals_finite_differences(batch_size: int) -> None:
    """The derivative of each batch's loss by every weight in turn; labels are those of the unmoved network."""
    network, x = sharp(), images(6)
    want = {name: torch.zeros_like(value) for name, value in affine_of(network).items()}
    parts = x.split(batch_size)
    for part in parts:
        moved = copy.deepcopy(network).train()
        with torch.no_grad():
            labels = moved(part).argmax(1)
            for name, value in affine_of(moved).items():
                for i in range(len(value)):
                    kept, losses = float(value[i]), []
                    for step in (1e-5, -1e-5):
                        value[i] = kept + step
                        losses.append(float(nn.functional.cross_entropy(moved(part), labels)))
                    value[i] = kept
                    want[name][i] += ((losses[0] - losses[1]) / 2e-5) ** 2 / len(parts)
    got = fisher_diagonal(network, x, batch_size)
    assert list(got) == list(want)
    assert float(torch.cat(list(got.values())).max()) > 1e-3
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], atol=1e-8, rtol=0)


def test_fisher_may_be_given_or_come_from_several_batches() -> None:
    network, x = sharp(), images(18)
    fisher = fisher_diagonal(network, x[:12], 6)
    own = EATA(network, fisher_batches=2, fisher_strength=50.0, **OPTIONS)
    own.predict(x[:6])
    own.predict(x[6:12])
    state = own.state_dict()
    for name, value in fisher.items():
        torch.testing.assert_close(state[f"fisher.{name}"], value, atol=1e-14, rtol=0)
    held = EATA(network, fisher={name: value + 5 for name, value in fisher.items()}, **OPTIONS)
    free = EATA(network, fisher_batches=0, **OPTIONS)
    for part in x.split(6):
        held.predict(part)
        free.predict(part)
    moved = [float((adapter.trained()["5.bias"] - network[5].bias).detach().norm()) for adapter in (held, free)]
    assert 0 < moved[0] < moved[1]
    assert not any("fisher" in name for name in held.state_dict())


def test_nothing_to_learn_from_changes_nothing_and_everything_kept_is_nearly_tent() -> None:
    x = images(8)
    idle = EATA(two_head_network(), margin=1e-6)
    start = idle.shared("all")
    idle.predict(x)
    assert all(torch.equal(value, start[name]) for name, value in idle.shared("all").items())
    assert float(idle.state_dict()["average"].abs().sum()) == 0
    all_kept = EATA(two_head_network(), margin=1.0, fisher_batches=0)
    tent = Tent(two_head_network(), optimizer="sgd", lr=0.005)
    assert torch.equal(all_kept.predict(x), tent.predict(x))
    assert bool((all_kept.report()["loss_weight"] > 0).all())


def test_negative_averages_are_refused() -> None:
    eata = EATA(sharp(), **OPTIONS)
    eata.predict(images(6))
    state = eata.state_dict()
    for name in ("average", "fisher.1.weight"):
        with pytest.raises(ValueError, match=f"{name}.*negative"):
            eata.load_state_dict({**state, name: state[name] - 9})


def test_a_failing_batch_leaves_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(12)
    eata = EATA(sharp(), steps=2, fisher_batches=9, **OPTIONS)
    eata.predict(x[:6])
    before, calls, descend = eata.state_dict(), [], eata._step

    def fails(x: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return descend(x, *more)

    monkeypatch.setattr(eata, "_step", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        eata.predict(x[6:])
    assert all(torch.equal(value, before[name]) for name, value in eata.state_dict().items())
    assert eata.report()["entropy"].shape == (6,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fisher": {}}, "missing"),
        ({"fisher": {f"{i}.{part}": torch.zeros(3) for i in (1, 5) for part in ("weight", "bias")}}, "shape"),
        ({"fisher": {name: -value.detach().abs() for name, value in affine_of(conv_network()).items()}}, "0 or more"),
    ],
)
def test_fisher_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EATA(conv_network(), **{"num_classes": CLASSES, **options})
    with pytest.raises(ValueError, match="batch_size=0"):
        fisher_diagonal(conv_network(), images(2), 0)
