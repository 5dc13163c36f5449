"""Corruptions against independent implementations that take one sample, often one pixel, at a time."""

from __future__ import annotations

import colorsys
import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from sklearn.datasets import load_sample_image

from fedtta.data.corruptions import corrupt, sample_generators

SEVERITIES = range(1, 6)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Real photographs: 4 crops [4, 3, 32, 32], float64 multiples of 1/255; the last has grey and black pixels."""
    photo = np.asarray(Image.fromarray(load_sample_image("china.jpg")).resize((160, 106)))
    crops = np.stack([photo[y : y + 32, x : x + 32] for y, x in ((20, 40), (50, 0), (70, 100), (40, 70))])
    crops[3, :4] = 0
    crops[3, 4:8] = 90
    return crops.transpose(0, 3, 1, 2) / 255.0


def levels(image: np.ndarray) -> Image.Image:
    """Return [3, H, W] in [0, 1] as an 8-bit image."""
    return Image.fromarray((image * 255).round().astype(np.uint8).transpose(1, 2, 0))


def per_pixel(image: np.ndarray, change) -> np.ndarray:
    result = np.empty_like(image)
    for y, x in np.ndindex(*image.shape[1:]):
        result[:, y, x] = change(*image[:, y, x])
    return result


def check(images, name, severity, expected, tolerance=1e-12):
    result = corrupt(images, name, severity, 3)
    want = np.stack([np.clip(expected(image, stream), 0, 1) for image, stream in
                     zip(images, sample_generators(3, len(images)), strict=True)])  # fmt: skip
    np.testing.assert_allclose(result, want, atol=tolerance, rtol=0)
    single = corrupt(images.astype(np.float32), name, severity, 3)
    np.testing.assert_allclose(single, want, atol=max(2e-5, tolerance), rtol=0)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_brightness(images, severity):
    added = [0.05, 0.1, 0.15, 0.2, 0.3][severity - 1]

    def change(r, g, b):
        h, s, v = colorsys.rgb_to_hsv(r, g, b)
        return colorsys.hsv_to_rgb(h, s, min(v + added, 1))

    check(images, "brightness", severity, lambda image, _: per_pixel(image, change))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_saturate(images, severity):
    factor, offset = [(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)][severity - 1]

    def change(r, g, b):
        h, s, v = colorsys.rgb_to_hsv(r, g, b)
        return colorsys.hsv_to_rgb(h, min(max(s * factor + offset, 0), 1), v)

    check(images, "saturate", severity, lambda image, _: per_pixel(image, change))
    grey = images[:, :1]
    np.testing.assert_array_equal(corrupt(grey, "saturate", severity, 0), grey)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast(images, severity):
    factor = [0.75, 0.5, 0.4, 0.3, 0.15][severity - 1]

    def expected(image, _):
        mean = image.reshape(3, -1).mean(axis=1)[:, None, None]
        return mean + factor * (image - mean)

    check(images, "contrast", severity, expected)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_blur(images, severity):
    sigma = [0.4, 0.6, 0.7, 0.8, 1][severity - 1]
    check(images, "gaussian_blur", severity,
          lambda image, _: ndimage.gaussian_filter(image, (0, sigma, sigma), mode="nearest", truncate=4.0))  # fmt: skip


@pytest.mark.parametrize("severity", SEVERITIES)
def test_defocus_blur(images, severity):
    radius, alias = [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)][severity - 1]
    y, x = np.mgrid[-8:9, -8:9]
    disk = (x**2 + y**2 <= radius**2).astype(float)
    disk /= disk.sum()
    side = math.exp(-1 / (2 * alias**2))
    taps = np.array([side, 1, side]) / (1 + 2 * side)
    kernel = ndimage.convolve(disk, np.outer(taps, taps))
    check(images, "defocus_blur", severity,
          lambda image, _: ndimage.correlate(image, kernel[None], mode="mirror"))  # fmt: skip


@pytest.mark.parametrize("severity", SEVERITIES)
def test_pixelate_equals_pillow_bit_for_bit(images, severity):
    side = int(32 * [0.95, 0.9, 0.85, 0.75, 0.65][severity - 1])

    def expected(image, _):
        small = levels(image).resize((side, side), Image.Resampling.BOX)
        return np.asarray(small.resize((32, 32), Image.Resampling.BOX)).transpose(2, 0, 1) / 255

    check(images, "pixelate", severity, expected)


@pytest.mark.parametrize("size", [(8, 8), (28, 28), (33, 50), (96, 64)])
def test_pixelate_of_other_sizes(size):
    image = np.random.default_rng(0).integers(0, 256, (1, 1, *size)) / 255
    large = Image.fromarray((image[0, 0] * 255).round().astype(np.uint8))
    small = large.resize((int(size[1] * 0.65), int(size[0] * 0.65)), Image.Resampling.BOX)
    want = np.asarray(small.resize(large.size, Image.Resampling.BOX))
    np.testing.assert_array_equal((corrupt(image, "pixelate", 5, 0)[0, 0] * 255).round(), want)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_compression(images, severity):
    quality = [80, 65, 58, 50, 40][severity - 1]

    def expected(image, _):
        buffer = io.BytesIO()
        levels(image).save(buffer, "JPEG", quality=quality)
        return np.asarray(Image.open(buffer)).transpose(2, 0, 1) / 255

    check(images, "jpeg_compression", severity, expected)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_zoom_blur(images, severity):
    end = [1.06, 1.11, 1.16, 1.21, 1.26][severity - 1]

    def zoomed(image, factor):
        crop = math.ceil(32 / factor)
        top = (32 - crop) // 2
        large = ndimage.zoom(image[:, top : top + crop, top : top + crop], (1, factor, factor), order=1)
        trim = (large.shape[1] - 32) // 2
        return large[:, trim : trim + 32, trim : trim + 32]

    def expected(image, _):
        factors = np.arange(1, end, 0.01)
        return np.mean([image] + [zoomed(image, factor) for factor in factors], axis=0)

    check(images, "zoom_blur", severity, expected)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_motion_blur(images, severity):
    radius, sigma = [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)][severity - 1]

    def expected(image, stream):
        angle = math.radians(stream.uniform(-45, 45))
        weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
        result = np.zeros_like(image)
        for y, x in np.ndindex(32, 32):
            for i, weight in enumerate(weights):
                down, right = math.ceil(i * math.sin(angle) - 0.5), math.ceil(i * math.cos(angle) - 0.5)
                source = image[:, min(max(y + down, 0), 31), min(max(x + right, 0), 31)]
                result[:, y, x] += weight / sum(weights) * source
        return result

    check(images[:2], "motion_blur", severity, expected)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_glass_blur_is_the_published_loop(images, severity):
    sigma, rounds = [(0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2)][severity - 1]

    def blurred(image):
        return ndimage.gaussian_filter(image, (sigma, sigma, 0), mode="nearest", truncate=4.0)

    def expected(image, stream):
        x = np.uint8(blurred(image.transpose(1, 2, 0)) * 255 + 1e-4)
        jumps = stream.integers(-1, 1, (rounds, 2, 30, 30))
        for i in range(rounds):
            for h in range(31, 1, -1):
                for w in range(31, 1, -1):
                    dy, dx = jumps[i, :, h - 2, w - 2]
                    # The published statement on numpy views: it copies, it does not swap.
                    x[h, w], x[h + dy, w + dx] = x[h + dy, w + dx], x[h, w]
        return blurred(x / 255.0).transpose(2, 0, 1)

    # Single precision may fall on the other side of a rounding step: one level of 255.
    result = corrupt(images, "glass_blur", severity, 3)
    want = np.stack([expected(image, stream) for image, stream in zip(images, sample_generators(3, 4), strict=True)])
    np.testing.assert_allclose(result, want, atol=1e-12, rtol=0)
    single = corrupt(torch.tensor(images, dtype=torch.float32), "glass_blur", severity, 3).numpy()
    np.testing.assert_allclose(single, want, atol=1.01 / 255, rtol=0)
    assert np.abs(single - want).mean() < 1e-5


@pytest.mark.parametrize("severity", SEVERITIES)
def test_elastic_transform(images, severity):
    strength, smoothness, shift = [
        (0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96),
    ][severity - 1]  # fmt: skip

    def expected(image, stream):
        corners = np.array([[26, 26], [26, 6], [6, 6]], dtype=float)  # x, y
        moved = corners + stream.uniform(-shift, shift, (3, 2))
        # Forward map A p + t from the corners, then its inverse at each pixel.
        forward = np.linalg.solve(np.c_[corners, np.ones(3)], moved)  # [x, y, 1] @ forward
        inverse = np.linalg.inv(forward[:2].T)
        rows, columns = np.mgrid[0:32, 0:32].astype(float)
        back = np.einsum("ij,jyx->iyx", inverse, np.stack((columns, rows)) - forward[2][:, None, None])
        warped = [ndimage.map_coordinates(c, (back[1], back[0]), order=1, mode="mirror") for c in image]
        if strength == 0:
            return np.stack(warped)
        field = stream.uniform(-1, 1, (2, 32, 32))
        dx, dy = (strength * ndimage.gaussian_filter(f, smoothness, mode="reflect", truncate=3) for f in field)
        places = (rows + dy, columns + dx)
        return np.stack([ndimage.map_coordinates(c, places, order=1, mode="reflect") for c in warped])

    check(images, "elastic_transform", severity, expected)
