"""Moments of the noises and the order of the severities."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from fedtta.data.corruptions import corrupt

SEVERITIES = range(1, 6)


def flat(value: float, count: int = 30) -> np.ndarray:
    return np.full((count, 3, 32, 32), value)


def assert_moments(values: np.ndarray, mean: float, deviation: float) -> None:
    """Mean and standard deviation within five standard errors."""
    assert abs(values.mean() - mean) < 5 * deviation / values.size**0.5
    assert values.std() == pytest.approx(deviation, rel=5 / values.size**0.5 * 2)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_noise(severity):
    deviation = [0.04, 0.06, 0.08, 0.09, 0.10][severity - 1]
    noise = corrupt(flat(0.5), "gaussian_noise", severity, 0) - 0.5  # 5 deviations to either end
    assert_moments(noise, 0, deviation)
    # Independent between samples, channels and neighbours.
    for one, other in ((noise[:-1], noise[1:]), (noise[:, 0], noise[:, 1]), (noise[..., 1:], noise[..., :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("value", [0.2, 0.45])
def test_speckle_noise(severity, value):
    deviation = [0.06, 0.1, 0.12, 0.16, 0.2][severity - 1]
    result = corrupt(flat(value), "speckle_noise", severity, 0)
    assert_moments(result, value, value * deviation)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("value", [0.1, 0.4])
def test_shot_noise(severity, value):
    photons = [500, 250, 100, 75, 50][severity - 1]
    result = corrupt(flat(value), "shot_noise", severity, 0)
    assert_moments(result, value, (value / photons) ** 0.5)
    np.testing.assert_allclose(result * photons, (result * photons).round(), atol=1e-9)  # whole photons
    assert (corrupt(flat(0.0, 2), "shot_noise", severity, 0) == 0).all()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise(severity):
    share = [0.01, 0.02, 0.03, 0.05, 0.07][severity - 1]
    result = corrupt(flat(0.5), "impulse_noise", severity, 0)
    for value in (0.0, 1.0):
        error = (share / 2 / result.size) ** 0.5
        assert abs((result == value).mean() - share / 2) < 5 * error
    assert np.isin(result, [0.0, 0.5, 1.0]).all()
    hit = result != 0.5
    both = (hit[:, 0] & hit[:, 1]).mean()  # channels are hit independently
    assert abs(both - share**2) < 5 * (share**2 / hit[:, 0].size) ** 0.5


@pytest.fixture(scope="module")
def photos() -> np.ndarray:
    """48 crops of scikit-learn's two photographs, [48, 3, 32, 32]."""
    place = np.random.default_rng(0)
    crops = []
    for name in ("china.jpg", "flower.jpg"):
        photo = np.asarray(Image.fromarray(load_sample_image(name)).resize((320, 213)))
        for y, x in place.integers(0, (181, 288), (24, 2)):
            crops.append(photo[y : y + 32, x : x + 32])
    return np.stack(crops).transpose(0, 3, 1, 2) / 255.0


def distortion(photos: np.ndarray, name: str) -> list[float]:
    return [float(np.abs(corrupt(photos, name, severity, 0) - photos).mean()) for severity in SEVERITIES]


@pytest.mark.parametrize(
    "name",
    ["gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "gaussian_blur", "defocus_blur",
     "motion_blur", "zoom_blur", "snow", "fog", "brightness", "contrast", "pixelate", "jpeg_compression"],
)  # fmt: skip
def test_heavier_is_further_from_the_clean_image(photos, name):
    grades = distortion(photos, name)
    # Severities 3 and 4 of motion blur have the same sigma and differ in a tail that weighs nothing.
    slack = 1e-4 if name == "motion_blur" else 0.0
    assert all(after > before - slack for before, after in itertools.pairwise(grades)), grades
    assert grades[4] > 1.3 * grades[0]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        # By its constants severity 1 to 3 differ only in blur, 4 and 5 have a second round.
        ("glass_blur", [(1, 4), (2, 4), (3, 5)]),
        ("frost", [(1, 2), (2, 3), (1, 5)]),  # the image darkens from 3 on, which offsets the ice
        ("spatter", [(1, 2), (2, 3), (4, 5)]),  # water, then mud
        ("saturate", [(1, 2), (3, 4), (4, 5)]),  # towards grey, then away from it
        ("elastic_transform", [(5, 4), (4, 3), (3, 2), (2, 1)]),  # the affine part shrinks: less, but finer
    ],
)
def test_order_where_the_published_constants_are_not_one_ladder(photos, name, groups):
    grades = distortion(photos, name)
    assert all(grades[less - 1] < grades[more - 1] for less, more in groups), grades


def test_elastic_transform_gets_finer():
    """Neighbouring pixels of a ramp move apart more and more: what the severity of `elastic_transform` means."""
    ramp = np.broadcast_to(np.linspace(0, 1, 32), (40, 3, 32, 32)).copy()
    rough = [
        np.abs(np.diff(corrupt(ramp, "elastic_transform", severity, 0)[..., 8:-8, 8:-8], n=2, axis=-2)).mean()
        for severity in SEVERITIES
    ]
    assert rough == sorted(rough)
