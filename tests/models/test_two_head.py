"""The two-head network itself: what travels, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedtta import models


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_identity_encoder_works_on_features() -> None:
    model = models.TwoHead(nn.Identity(), feature_dim=6, num_classes=4)
    x = torch.rand(5, 6)
    assert torch.equal(model.features(x), x)
    assert torch.allclose(model(x), x @ model.head.weight.T + model.head.bias)
    assert torch.allclose(model.personal_head(x), x @ model.personal_head.weight.T)
    assert model.personal_head.bias is None
    assert set(model.global_state()) == {"head.weight", "head.bias"}


def test_personal_bias_is_an_option() -> None:
    assert models.TwoHead(nn.Identity(), 3, 2, personal_bias=True).personal_head.bias is not None


@pytest.mark.parametrize(("d", "k"), [(0, 3), (3, 0)])
def test_sizes_are_checked(d: int, k: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        models.TwoHead(nn.Identity(), d, k)


def test_global_state_moves_everything_but_the_personal_head() -> None:
    source = models.build("shallow-cnn", 4, image_size=18, seed=1)
    target = models.build("shallow-cnn", 4, image_size=18, seed=2)
    source.train()(torch.rand(4, 3, 18, 18))  # moves the running statistics
    before = target.personal_head.weight.clone()
    target.load_global_state(source.global_state())
    assert same(target.global_state(), source.global_state())
    assert torch.equal(target.personal_head.weight, before)
    x = torch.rand(2, 3, 18, 18)
    assert torch.equal(target.eval()(x), source.eval()(x))


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "nan", "inf"])
def test_refusals_leave_the_model_unchanged(fault: str) -> None:
    model = models.build("cnn", 4, image_size=16, seed=1)
    state = {name: torch.ones_like(value) for name, value in model.global_state().items()}
    last = list(state)[-1]
    if fault == "missing":
        del state[last]
    elif fault == "unknown":
        state["personal_head.weight"] = torch.ones(4, 64)
    elif fault == "shape":
        state[last] = torch.ones(9)
    else:
        state[last][0] = float(fault)
    before = snapshot(model)
    with pytest.raises(ValueError, match="personal_head.weight" if fault == "unknown" else last):
        model.load_global_state(state)
    assert same(snapshot(model), before)


def test_normalise_is_the_formula_and_leaves_no_trace() -> None:
    x = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    layer = models.Normalise([0.1, 0.2, 0.3], [0.5, 0.25, 2.0]).double()
    y = layer(x)
    for channel, (mean, std) in enumerate([(0.1, 0.5), (0.2, 0.25), (0.3, 2.0)]):
        assert torch.allclose(y[:, channel], (x[:, channel] - mean) / std, atol=1e-6)
    assert layer.state_dict() == {}
    default = models.Normalise()(torch.tensor([[[[0.0, 0.5, 1.0]]]]))
    assert default.flatten().tolist() == [-1.0, 0.0, 1.0]


def test_normalise_refuses_other_channel_counts() -> None:
    with pytest.raises(ValueError, match=r"\[B, 3, H, W\].*\(2, 1, 8, 8\)"):
        models.Normalise(0.5, 0.5, channels=3)(torch.rand(2, 1, 8, 8))
    with pytest.raises(ValueError, match="one number for each of 3 channels"):
        models.Normalise([0.5, 0.5, 0.5], [0.5])
    with pytest.raises(ValueError, match="positive"):
        models.Normalise(0.5, [0.5, -1.0])
    with pytest.raises(ValueError, match="finite"):
        models.Normalise([0.5, float("inf")])
