from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtta import models
from fedtta.tta.atp import ATP
from fedtta.tta.modules import modules
from fedtta.tta.surgical import Surgical, block_scores, blocks
from tests.tta.networks import CLASSES, conv_network, images, mlp_network, two_head_network, vectors, weights

LR = 0.4  # large: the step must show
ENCODER = {
    "encoder.0": ["encoder.0.weight", "encoder.0.bias", *(f"encoder.1.{part}" for part in ("weight", "bias"))],
    "encoder.3": ["encoder.3.weight", "encoder.3.bias", *(f"encoder.4.{part}" for part in ("weight", "bias"))],
}


def reference(network: nn.Module, x: Tensor, names: list[str], adapt: str, steps: int) -> Tensor:
    """The step written out: autograd on a copy in evaluation mode, running statistics from what reaches each layer."""
    own: Any = copy.deepcopy(network).eval()
    for _ in range(steps):
        reached: dict[str, Tensor] = {}
        hooks = [
            layer.register_forward_pre_hook(lambda layer, x, path=path, to=reached: to.update({path: x[0].detach()}))
            for path, layer in own.named_modules()
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
        ]
        p = torch.softmax(own(x), 1)
        own.zero_grad()
        (-(p * p.log()).sum() / len(x)).backward()
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for name in names:
                layer, _, part = name.rpartition(".")
                if not part.startswith("running"):
                    value = own.get_parameter(name)
                    value -= LR * value.grad
                elif adapt == "all":
                    values = reached[layer].transpose(0, 1).flatten(1)  # (C, B H W)
                    target = values.mean(1) if part == "running_mean" else values.var(1)
                    own.get_buffer(name).lerp_(target, LR)
    return torch.softmax(own(x), 1).detach()


@pytest.mark.parametrize(("adapt", "steps"), [("all", 1), ("params", 1), ("all", 3)])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_it_equals_the_reference_for_every_block(kind: str, adapt: Any, steps: int) -> None:
    network, x = (conv_network(), images(13)) if kind == "conv" else (mlp_network(), vectors(13))
    before, plain = weights(network), torch.softmax(network(x), 1)
    for block, (name, names) in enumerate(blocks(network).items()):
        adapter = Surgical(network, block=block, lr=LR, adapt=adapt, steps=steps)
        assert adapter.block == name
        for part in x.split([6, 7]):
            want = reference(network, part, names, adapt, steps)
            torch.testing.assert_close(adapter.predict(part), want, atol=1e-10, rtol=0)
        p = adapter.predict(x)
        assert float((p - plain).abs().max()) > 1e-4
        torch.testing.assert_close(adapter.report()["entropy"][-13:], -(p * p.log()).sum(1), atol=1e-10, rtol=0)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(value.requires_grad and value.grad is None for value in network.parameters())


def test_adapt_params_is_one_step_of_sgd_in_evaluation_mode_and_running_statistics_stay() -> None:
    """ATP's code: torch.optim.SGD on the block's parameters, the network in evaluation mode, fresh for every batch."""
    network, x = conv_network(), images(14)
    for block, names in enumerate(blocks(network).values()):
        adapter = Surgical(network, block=block, lr=LR, adapt="params")
        for part in x.split(7):
            own = copy.deepcopy(network).eval()
            descent = torch.optim.SGD([value for name, value in own.named_parameters() if name in names], lr=LR)
            p = torch.softmax(own(part), 1)
            loss = -sum(value * value.log() for row in p for value in row) / len(part)
            loss.backward()
            descent.step()
            want = torch.softmax(own(part), 1).detach()
            torch.testing.assert_close(adapter.predict(part), want, atol=1e-10, rtol=0)
        for name, value in adapter._network.named_buffers():
            assert torch.equal(value, network.get_buffer(name)), name
        moving = Surgical(network, block=block, lr=LR)
        moving.predict(x)
        moved = [not torch.equal(v, network.get_buffer(n)) for n, v in moving._network.named_buffers() if n in names]
        assert all(moved)


def test_it_is_atp_with_the_rate_in_one_block() -> None:
    network, x = two_head_network(), images(9)
    for block, names in enumerate(blocks(network).values()):
        rates = {name: LR if name in names else 0.0 for name in modules(network)}
        want = ATP(network, rates).predict(x)
        torch.testing.assert_close(Surgical(network, block=block, lr=LR).predict(x), want, atol=1e-12, rtol=0)


def test_blocks_are_layers_with_their_norm() -> None:
    network: Any = two_head_network()
    network.rotation_head = nn.Linear(6, 4)
    found = blocks(network)
    assert list(found) == ["encoder.0", "encoder.3", "head"]
    assert found["head"] == ["head.weight", "head.bias"]
    for (name, parameters), norm in zip(ENCODER.items(), ("encoder.1", "encoder.4"), strict=True):
        assert found[name] == [*parameters, f"{norm}.running_mean", f"{norm}.running_var"]
    network.encoder[3].requires_grad_(False)
    assert blocks(network)["encoder.0"][-2:] == ["encoder.4.running_mean", "encoder.4.running_var"]


@pytest.mark.parametrize("name", ["cnn", "resnet20-gn"])
def test_blocks_of_the_models_hold_every_shared_tensor_once(name: str) -> None:
    network = models.build(name, num_classes=CLASSES)
    found = blocks(network)
    assert [tensor for names in found.values() for tensor in names] == modules(network)
    if name == "cnn":
        assert list(found) == ["encoder.body.conv1", "encoder.body.conv2", "encoder.body.fc1", "head"]
    else:
        assert len(found) == 1 + 9 * 2 + 2 + 1  # the first layer, two a residual block, two shortcuts, the head


def test_scores_are_accuracies_and_choose_the_block() -> None:
    network, x = conv_network(), images(21)
    y = torch.tensor([0, 1, 2, 3, 1, 0, 2] * 3)
    scores = block_scores(network, x, y, lr=LR, batch_size=8)
    found = blocks(network)
    for score, names in zip(scores.tolist(), found.values(), strict=True):
        rows = torch.cat([reference(network, part, names, "all", 1) for part in x.split(8)])
        assert score == pytest.approx(sum(int(row.argmax()) == int(k) for row, k in zip(rows, y, strict=True)) / 21)
    for scored, name in (([0.1, 0.5, 0.5], 1), ([0.3, 0.2, 0.1], 0), ([0.0, 0.0, 1.0], 2)):
        known: Any = SimpleNamespace(block_scores=torch.tensor(scored))
        assert Surgical(network, known).block == list(found)[name]
        assert Surgical(network, known, block=2).block == list(found)[2]


@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_every_batch_starts_from_the_source(kind: str) -> None:
    network, x = (conv_network(), images(8)) if kind == "conv" else (mlp_network(), vectors(8))
    one = Surgical(network, block=0, lr=LR)
    first = one.predict(x)
    alone = one.predict(x[:1])  # one value a channel in a vector: its variance stays
    assert torch.equal(alone, Surgical(network, block=0, lr=LR).predict(x[:1]))
    assert torch.equal(one.predict(x), first)
    wild = Surgical(network.float(), block=0, lr=3e38)
    with pytest.raises(ValueError, match="adapted network's output for samples"):
        wild.predict(x.float())


@pytest.mark.parametrize(
    ("options", "scores", "message"),
    [
        ({"block": 3}, None, r"block=3 must be 0..2 \(0, 4, 9\)"),
        ({"block": -2}, None, "block=-2"),
        ({}, None, "needs the statistic block_scores"),
        ({}, torch.zeros(2), "3 finite numbers"),
        ({}, torch.tensor([0.0, math.nan, 1.0]), "3 finite numbers"),
    ],
)
def test_blocks_and_scores_must_fit(options: dict[str, Any], scores: Tensor | None, message: str) -> None:
    known: Any = SimpleNamespace(block_scores=scores)
    with pytest.raises(ValueError, match=message):
        Surgical(conv_network(), known, **options)


def test_bad_labels_and_networks_are_refused() -> None:
    network, x = conv_network(), images(3)
    for y, message in ((torch.zeros(2).long(), "shape"), (torch.zeros(3), "integers")):
        with pytest.raises(ValueError, match=message):
            block_scores(network, x, y)
    with pytest.raises(ValueError, match="empty"):
        block_scores(network, x[:0], torch.zeros(0).long())
    with pytest.raises(ValueError, match="batch_size=0"):
        block_scores(network, x, torch.zeros(3).long(), batch_size=0)
    with pytest.raises(ValueError, match="nothing to adapt"):
        Surgical(nn.Sequential(nn.ReLU()), block=0)
