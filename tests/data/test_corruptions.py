"""The contract of `corrupt`: kind, range, seeds, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.data.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt

EVERY = CORRUPTIONS + EXTRA_CORRUPTIONS


def random_images(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def test_names_are_those_of_cifar_10_c():
    assert CORRUPTIONS == (
        "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur",
        "snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
    )  # fmt: skip
    assert EXTRA_CORRUPTIONS == ("speckle_noise", "gaussian_blur", "spatter", "saturate")


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(EVERY),
    severity=st.integers(1, 5),
    batch=st.integers(0, 3),
    channels=st.sampled_from([1, 3]),
    height=st.integers(8, 40),
    width=st.integers(8, 40),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    fill=st.sampled_from([None, 0.0, 1.0]),
    seed=st.integers(0, 2**64),
)
def test_keeps_shape_dtype_range_and_input(name, severity, batch, channels, height, width, dtype, fill, seed):
    images = random_images(batch, channels, height, width, dtype=dtype)
    if fill is not None:
        images.fill_(fill)
    before = images.clone()
    result = corrupt(images, name, severity, seed)
    assert result.shape == images.shape
    assert result.dtype == dtype
    assert torch.isfinite(result).all()
    assert ((result >= 0) & (result <= 1)).all()
    assert torch.equal(images, before)
    assert batch == 0 or result.data_ptr() != images.data_ptr()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_in_numpy_out_equals_torch(name, dtype):
    images = random_images(3, 3, 16, 16).numpy().astype(dtype)
    result = corrupt(images, name, 3, 5)
    assert isinstance(result, np.ndarray)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, corrupt(torch.tensor(images), name, 3, 5).numpy())
    reversed_view = images[::-1].transpose(0, 1, 3, 2)  # negative strides, not contiguous, and read only
    reversed_view.flags.writeable = False
    np.testing.assert_array_equal(corrupt(reversed_view, name, 3, 5), corrupt(reversed_view.copy(), name, 3, 5))


@pytest.mark.parametrize("name", EVERY)
def test_same_seed_same_bits_and_a_prefix_is_a_prefix(name, monkeypatch):
    images = random_images(7, 3, 32, 32)
    whole = corrupt(images, name, 4, 11)
    assert torch.equal(whole, corrupt(images, name, 4, 11))
    for count in (1, 3):
        assert torch.equal(whole[:count], corrupt(images[:count], name, 4, 11))
    monkeypatch.setattr("fedtta.data.corruptions._CHUNK_VALUES", 2 * 3 * 32 * 32)
    assert torch.equal(whole, corrupt(images, name, 4, 11))  # however the work is cut up


@pytest.mark.parametrize("name", EVERY)
def test_own_seed_makes_a_sample_independent_of_position_and_neighbours(name):
    images = random_images(6, 3, 32, 32)
    seeds = [3, 1, 4, 1, 5, 9]
    whole = corrupt(images, name, 4, seeds)
    order = torch.tensor([4, 2, 5, 0, 1, 3])
    shuffled = corrupt(images[order], name, 4, [seeds[i] for i in order])
    assert torch.equal(shuffled, whole[order])
    for i in (0, 5):
        assert torch.equal(corrupt(images[i : i + 1], name, 4, [seeds[i]])[0], whole[i])
    assert torch.equal(corrupt(images, name, 4, np.array(seeds)), whole)
    assert torch.equal(corrupt(images, name, 4, torch.tensor(seeds)), whole)


RANDOM = tuple(
    name
    for name in EVERY
    if name not in {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}
    and name not in {"gaussian_blur", "saturate"}
)


@pytest.mark.parametrize("name", RANDOM)
def test_different_seeds_and_different_samples_draw_differently(name):
    images = random_images(1, 3, 32, 32).expand(4, -1, -1, -1)
    one = corrupt(images, name, 5, 0)
    other = corrupt(images, name, 5, 1)
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one, other)
    same = corrupt(images, name, 5, [8, 8, 2**80, 2**80 + 1])
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[2], same[3])


@pytest.mark.parametrize("name", EVERY)
def test_leaves_the_global_random_state_alone(name):
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    corrupt(random_images(2, 3, 16, 16), name, 5, 0)
    assert torch.equal(torch_before, torch.get_rng_state())
    assert (numpy_before == np.random.get_state()[1]).all()  # noqa: NPY002


def test_result_carries_no_gradient():
    assert not corrupt(random_images(2, 3, 16, 16).requires_grad_(), "fog", 3, 0).requires_grad


def test_unknown_name_lists_all():
    with pytest.raises(ValueError, match="unknown corruption 'rain'; there are: ") as error:
        corrupt(random_images(1, 3, 16, 16), "rain", 1, 0)
    assert all(name in str(error.value) for name in EVERY)


@pytest.mark.parametrize("severity", [0, 6, -1, 2.0, True, "3", None, np.float64(2), np.bool_(True)])
def test_severity_must_be_an_int_from_1_to_5(severity):
    with pytest.raises(ValueError, match=r"severity must be an int in 1\.\.5"):
        corrupt(random_images(1, 3, 16, 16), "fog", severity, 0)


def test_integers_of_numpy_are_integers():
    images = random_images(2, 3, 16, 16)
    assert torch.equal(corrupt(images, "fog", np.int64(2), np.int32(7)), corrupt(images, "fog", 2, 7))


@pytest.mark.parametrize("seed", [-1, 1.0, True, None, "7", [1, -2], [1, 2.0], [True, 1]])
def test_bad_seed(seed):
    with pytest.raises(ValueError, match="seed"):
        corrupt(random_images(2, 3, 16, 16), "fog", 1, seed)


@pytest.mark.parametrize("seed", [[], [1], [1, 2, 3]])
def test_wrong_number_of_seeds(seed):
    with pytest.raises(ValueError, match=rf"{len(seed)} seeds for 2 images"):
        corrupt(random_images(2, 3, 16, 16), "fog", 1, seed)


def test_empty_batch_takes_no_seeds():
    assert corrupt(random_images(0, 3, 16, 16), "fog", 1, []).shape == (0, 3, 16, 16)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "floating point"),
        (np.zeros((2, 3, 16, 16), dtype=np.int64), "floating point"),
        (torch.zeros(3, 16, 16), r"\[B, C, H, W\]"),
        (torch.zeros(2, 4, 16, 16), "channels"),
        (torch.zeros(2, 16, 16, 3), "channels"),
        (torch.zeros(2, 3, 7, 16), "at least 8"),
        ([[0.0]], "Tensor or a numpy array"),
    ],
)
def test_bad_images(images, message):
    with pytest.raises(ValueError, match=message):
        corrupt(images, "contrast", 1, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1.01, -0.01])
def test_bad_value_names_its_sample(value):
    images = random_images(5, 3, 16, 16)
    images[3, 1, 2, 5] = value
    with pytest.raises(ValueError, match="sample 3 has a value"):
        corrupt(images, "contrast", 1, 0)
