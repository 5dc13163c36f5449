"""A client's statistics against an independent computation, one sample at a time in numpy and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scipy.special import entr, softmax
from torch import nn

from fedtta.client.statistics import summarise
from fedtta.models import TwoHead
from tests.client.tiny import CLASSES, FEATURES, images, network

ALWAYS_ON_THRESHOLD = np.log(3) / 2  # atanh(1/2): above it round(tanh z) is 1


def per_sample(model: TwoHead, pixels: np.ndarray) -> dict[str, np.ndarray]:
    """The definitions of the two papers, sample by sample; the network's matrices are used by hand."""
    heads = [
        (head.weight.detach().double().numpy(), 0 if head.bias is None else head.bias.detach().double().numpy())
        for head in (model.personal_head, model.head)
    ]
    features, off, entropies = [], [], []
    for picture in pixels:
        with torch.no_grad():
            z = model.eval().encoder(torch.tensor(picture[None]).float() / 255)[0].double().numpy()
        features.append(z)
        off.append(z <= ALWAYS_ON_THRESHOLD)
        entropies.append([entr(softmax(w @ z + b)).sum() for w, b in heads])
    local, overall = np.mean(entropies, axis=0)
    return {
        "descriptor": np.mean(features, axis=0),
        "dle": np.mean(off, axis=0),
        "entropy_local": np.array([local]),
        "entropy_global": np.array([overall]),
    }


@pytest.mark.parametrize("norm", [False, True])
def test_statistics_are_the_definitions(norm: bool) -> None:
    model, pixels = network(norm), images(37).pixels
    model.train()  # statistics must not be taken in training mode
    with torch.no_grad():
        model.personal_head.weight *= 5
    found, expected = summarise(model, torch.tensor(pixels), 8), per_sample(model, pixels)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == np.float64
        assert found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert len(set(expected["dle"])) > 2, "the test must see units that are sometimes on"
    assert expected["entropy_local"] != expected["entropy_global"]


def test_the_network_is_left_as_it_was() -> None:
    model = network(norm=True).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    summarise(model, torch.tensor(images(9).pixels), 4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def of_features(z: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics of given features [n, d] in steps of 1/255: the encoder hands its input through."""
    n, d = z.shape
    model = TwoHead(nn.Sequential(nn.Flatten(), _Stretch()), d, CLASSES)
    return summarise(model, torch.tensor(np.round(z * 255).astype(np.uint8)).reshape(n, d, 1, 1), 3)


class _Stretch(nn.Module):
    """Map pixels in [0, 1] to features in [0, 2]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_dead_and_always_on_units_are_exactly_one_and_zero() -> None:
    z = np.column_stack([np.zeros(7), np.ones(7), np.arange(7) >= 3])
    found = of_features(z)
    assert found["dle"].tolist() == [1.0, 0.0, 3 / 7]
    assert found["descriptor"].tolist() == [0.0, 2.0, pytest.approx(8 / 7, rel=1e-15)]


@examples(deadline=None, max_examples=50)
@given(st.integers(1, 12), st.integers(0, 2**31 - 1))
def test_a_dle_is_a_whole_number_of_samples_on_the_right_side_of_the_threshold(count: int, seed: int) -> None:
    z = np.random.default_rng(seed).integers(0, 256, (count, 4)) / 255
    dle = of_features(z)["dle"]
    np.testing.assert_allclose(dle, (2 * z < ALWAYS_ON_THRESHOLD).mean(0), rtol=1e-15)


def test_statistics_do_not_depend_on_the_batch_size() -> None:
    model, pixels = network(), torch.tensor(images(33).pixels)
    whole = summarise(model, pixels, 1000)
    for batch_size in (1, 2, 32, 33):
        found = summarise(model, pixels, batch_size)
        np.testing.assert_array_equal(found["dle"], whole["dle"])
        for name in ("descriptor", "entropy_local", "entropy_global"):
            np.testing.assert_allclose(found[name], whole[name], rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1e4])
def test_entropies_lie_between_zero_and_the_number_of_classes(scale: float) -> None:
    model = network()
    with torch.no_grad():
        for head in (model.head, model.personal_head):
            head.weight *= scale
        model.head.bias.zero_()
    found = summarise(model, torch.tensor(images(20).pixels), 8)
    for name in ("entropy_local", "entropy_global"):
        assert 0 <= found[name][0] <= np.log(CLASSES) * (1 + 1e-12)
        if scale == 0:
            assert found[name][0] == pytest.approx(np.log(CLASSES), rel=1e-12)


def test_one_sample_is_enough_and_none_is_refused() -> None:
    model, pixels = network(norm=True), torch.tensor(images(1).pixels)
    assert np.isfinite(summarise(model, pixels, 8)["descriptor"]).all()
    with pytest.raises(ValueError, match="at least one training sample"):
        summarise(model, pixels[:0], 8)


@pytest.mark.parametrize("bad", [-1e-6, float("nan")])
def test_features_that_are_not_behind_a_relu_are_refused(bad: float) -> None:
    class Spoil(nn.Module):
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return torch.where(torch.arange(FEATURES) == 2, torch.tensor(bad), z)

    model = network()
    model.encoder = nn.Sequential(model.encoder, Spoil())
    with pytest.raises(ValueError, match=r"negative.*ReLU"):
        summarise(model, torch.tensor(images(5).pixels), 2)
    model.features_nonnegative = False
    if math.isnan(bad):
        with pytest.raises(ValueError, match="no number"):
            summarise(model, torch.tensor(images(5).pixels), 2)
    else:
        found = summarise(model, torch.tensor(images(5).pixels), 2)
        assert found["descriptor"][2] == pytest.approx(bad)
        assert found["dle"][2] == 1  # discretised it is 0, as behind a ReLU
