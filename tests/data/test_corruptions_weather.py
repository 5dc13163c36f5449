"""Snow, frost, fog and spatter against pixel-by-pixel implementations, and the parts they are made of."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from sklearn.datasets import load_sample_image

from fedtta.benchmarks.provenance import RESULTS
from fedtta.data import load
from fedtta.data.corruptions import corrupt, sample_generators, spatter, weather
from fedtta.models.checkpoint import load_model

SEVERITIES = range(1, 6)
REAL = Path(os.environ.get("FEDTTA_DATA", "nowhere"))


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Real photographs: 3 crops [3, 3, 32, 32] in float64."""
    photo = np.asarray(Image.fromarray(load_sample_image("flower.jpg")).resize((160, 106)))
    crops = [photo[y : y + 32, x : x + 32] for y, x in ((20, 40), (50, 60), (60, 90))]
    return np.stack(crops).transpose(0, 3, 1, 2) / 255.0


def fog_map(noise: np.ndarray, decay: float) -> np.ndarray:
    """Diamond-square on a 32 x 32 torus, point by point."""
    heights, step, roughness, values = np.zeros((32, 32)), 32, 100.0, iter(noise)
    while step > 1:
        half = step // 2
        for offsets, neighbours in (
            ((half, half), [(-half, -half), (-half, half), (half, -half), (half, half)]),
            ((0, half), [(-half, 0), (half, 0), (0, -half), (0, half)]),
            ((half, 0), [(-half, 0), (half, 0), (0, -half), (0, half)]),
        ):
            for y in range(offsets[0], 32, step):
                for x in range(offsets[1], 32, step):
                    mean = sum(heights[(y + dy) % 32, (x + dx) % 32] for dy, dx in neighbours) / 4
                    heights[y, x] = mean + roughness**2 * next(values)
        step, roughness = half, roughness / decay
    heights -= heights.min()
    return heights / heights.max()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_fog(images, severity):
    thickness, decay = [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)][severity - 1]
    result = corrupt(images, "fog", severity, 2)
    for image, stream, got in zip(images, sample_generators(2, 3), result, strict=True):
        haze = fog_map(stream.uniform(-1, 1, 1023), decay)
        want = (image + thickness * haze) * image.max() / (image.max() + thickness)
        np.testing.assert_allclose(got, np.clip(want, 0, 1), atol=1e-12)


def test_fog_of_a_large_image_uses_a_larger_map():
    result = corrupt(torch.full((1, 3, 40, 70), 0.5), "fog", 1, 0)
    # The map spans 0 to 1 over 128 x 128 and is not repeated inside the image.
    assert not torch.allclose(result[..., :32], result[..., 32:64])


@pytest.mark.parametrize("severity", SEVERITIES)
def test_snow(images, severity):
    mean, deviation, zoom, threshold, radius, sigma, weight = [
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ][severity - 1]  # fmt: skip
    result = corrupt(images, "snow", severity, 5)
    for image, stream, got in zip(images, sample_generators(5, 3), result, strict=True):
        flakes = stream.normal(mean, deviation, (32, 32))
        crop = math.ceil(32 / zoom)
        top = (32 - crop) // 2
        flakes = ndimage.zoom(flakes[top : top + crop, top : top + crop], zoom, order=1)
        trim = (len(flakes) - 32) // 2
        flakes = flakes[trim : trim + 32, trim : trim + 32]
        flakes = np.clip(np.where(flakes < threshold, 0, flakes), 0, 1)
        angle = math.radians(stream.uniform(-135, -45))
        weights = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
        fallen = np.zeros((32, 32))
        for i, share in enumerate(weights / weights.sum()):
            down, right = math.ceil(i * math.sin(angle) - 0.5), math.ceil(i * math.cos(angle) - 0.5)
            rows, columns = (np.clip(np.arange(32) + move, 0, 31) for move in (down, right))
            fallen += share * flakes[np.ix_(rows, columns)]
        grey = np.tensordot([0.299, 0.587, 0.114], image, 1)
        white = weight * image + (1 - weight) * np.maximum(image, 1.5 * grey + 0.5)
        np.testing.assert_allclose(got, np.clip(white + fallen + np.rot90(fallen, 2), 0, 1), atol=1e-12)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_frost_adds_a_crop_of_a_texture(images, severity):
    image_weight, ice_weight = [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)][severity - 1]
    result = corrupt(images, "frost", severity, 4)
    for image, stream, got in zip(images, sample_generators(4, 3), result, strict=True):
        number, y, x = stream.integers((5, 192, 192))
        ice = np.tile(weather.textures()[number], (2, 2, 1))[y : y + 32, x : x + 32].transpose(2, 0, 1)
        np.testing.assert_allclose(got, np.clip(image_weight * image + ice_weight * ice, 0, 1), atol=1e-12)


def test_frost_of_a_grey_image_is_the_luminance_of_the_texture(images):
    result = corrupt(images[:, :1], "frost", 5, 4)
    for image, stream, got in zip(images, sample_generators(4, 3), result, strict=True):
        number, y, x = stream.integers((5, 192, 192))
        ice = np.tile(weather.textures()[number], (2, 2, 1))[y : y + 32, x : x + 32] @ [0.299, 0.587, 0.114]
        np.testing.assert_allclose(got[0], np.clip(0.75 * image[0] + 0.45 * ice, 0, 1), atol=1e-12)


def test_pixels_of_frost_belong_to_the_nearest_crystal_on_a_torus():
    """Against the nearest one among nine copies of each crystal."""
    rng, warp = np.random.default_rng(3), list(np.random.default_rng(4).normal(0, 6, (2, 192, 192)))
    got = weather._nearest_crystal(np.random.default_rng(3), warp)
    centres = rng.uniform(0, 192, (40, 2))
    directions = rng.integers(0, 18, 40)
    tiles = 192 * np.stack(np.meshgrid([-1, 0, 1], [-1, 0, 1]), -1).reshape(9, 1, 2)
    for y, x in [(0, 0), (191, 191), (0, 100), (100, 0), *np.random.default_rng(5).integers(0, 192, (400, 2))]:
        point = np.array([y + warp[0][y, x], x + warp[1][y, x]])
        distance = ((centres + tiles - point) ** 2).sum(axis=2).min(axis=0)
        assert got[y, x] == directions[distance.argmin()]


def test_needles_of_frost_are_blurred_along_their_direction():
    """The transfer function is that of a Gaussian drawn on the torus: 6 pixels along 30 degrees, 2 across."""
    down, right = (np.indices((192, 192)) + 96) % 192 - 96
    turn = math.radians(30)
    along, across = right * math.cos(turn) + down * math.sin(turn), down * math.cos(turn) - right * math.sin(turn)
    kernel = np.exp(-(along**2) / (2 * 6**2) - across**2 / (2 * 2**2))
    want = np.fft.fft2(kernel / kernel.sum())
    np.testing.assert_allclose(weather._spectrum(2.0, 6.0, 30.0), want.real, atol=1e-6)


def test_frost_textures_have_the_colours_of_the_photographs():
    """Facts about CIFAR-10-C's five photographs: mean 164 of 255, bluish, of different brightness and spread."""
    textures = 255 * weather.textures()
    assert textures.shape == (5, 192, 192, 3)
    assert textures.min() >= 0
    assert textures.max() <= 255
    assert textures.mean() == pytest.approx(164, abs=1)
    np.testing.assert_allclose(textures.mean(axis=(1, 2, 3)), [131, 207, 207, 152, 123], atol=1)
    np.testing.assert_allclose(textures[..., 1].std(axis=(1, 2)), [16.5, 20.5, 20.5, 28, 38.5], atol=1)
    red, green, blue = textures.mean(axis=(0, 1, 2))
    assert red < green < blue
    assert not np.allclose(textures[1], textures[2])


def test_frost_textures_are_fine_grained_and_tile():
    """The photographs' crops of 32 x 32 have correlations of 0.22 to 0.52 between neighbours; seams are not rougher."""
    textures = weather.textures()
    grey = textures.mean(axis=-1)
    grey -= grey.mean(axis=(1, 2), keepdims=True)
    for axis in (1, 2):
        neighbours = (grey * np.roll(grey, 1, axis)).mean(axis=(1, 2)) / grey.var(axis=(1, 2))
        assert ((neighbours > 0.3) & (neighbours < 0.6)).all(), neighbours
    seam = np.abs(textures[:, 0] - textures[:, -1]).mean()
    assert seam == pytest.approx(np.abs(np.diff(textures, axis=1)).mean(), rel=0.2)


@pytest.mark.skipif(not (REAL / "cifar10" / "labels.npz").is_file(), reason="needs CIFAR-10 (FEDTTA_DATA)")
@pytest.mark.parametrize(("severity", "photographs"), [(1, 74.8), (3, 54.5), (5, 43.05)])
def test_frost_costs_a_network_what_photographs_do(severity, photographs):
    """Accuracy of the kept ResNet-8, beside that with CIFAR-10-C's photographs (mean of two draws, same images)."""
    images = load("cifar10", root=REAL, part="test")
    first = np.arange(4000)
    x = corrupt(images.batch(first), "frost", severity, 0)
    network = load_model(RESULTS / "source-resnet8.safetensors")[0].eval()
    network, x = (one.to(memory_format=torch.channels_last) for one in (network, x))
    with torch.inference_mode():  # 50 at a time, channels last: half the time, the same predictions
        predicted = torch.cat([network(part).argmax(dim=1) for part in x.split(50)])
    accuracy = 100 * float((predicted.numpy() == images.labels[first]).mean())
    assert accuracy == pytest.approx(photographs, abs=1)


@pytest.mark.parametrize("severity", [4, 5])
def test_mud(images, severity):
    smooth, threshold = [(0.7, 0.69), (0.5, 0.68)][severity - 4]
    result = corrupt(images, "spatter", severity, 9)
    for image, stream, got in zip(images, sample_generators(9, 3), result, strict=True):
        liquid = ndimage.gaussian_filter(stream.normal(0.65, 0.1, (32, 32)), smooth, mode="nearest")
        dense = ndimage.gaussian_filter((liquid > threshold).astype(float), 0.6, mode="nearest")
        dense[dense < 0.8] = 0
        brown = np.array([63, 42, 20])[:, None, None] / 255
        np.testing.assert_allclose(got, image * (1 - dense) + brown * dense, atol=1e-12)


@pytest.mark.parametrize("severity", [1, 2, 3])
def test_water_brightens_towards_turquoise_where_there_is_liquid(images, severity):
    (mean, deviation), smooth, threshold = [
        ((0.62, 0.1), 0.7, 0.7), ((0.65, 0.1), 0.8, 0.7), ((0.65, 0.3), 1.0, 0.69),
    ][severity - 1]  # fmt: skip
    dark = np.zeros_like(images)
    result = corrupt(dark, "spatter", severity, 9)
    for stream, got in zip(sample_generators(9, 3), result, strict=True):
        liquid = ndimage.gaussian_filter(stream.normal(mean, deviation, (32, 32)), smooth, mode="nearest")
        assert (got[:, liquid < threshold] == 0).all()
        # The brightest drop reaches half of (175, 238, 238) / 255, all others the same colour, darker.
        np.testing.assert_allclose(got.max(axis=(1, 2)), np.array([175, 238, 238]) / 510, atol=1e-12)
        np.testing.assert_allclose(got[0] * 238, got[1] * 175, atol=1e-9)


def edges_by_pixel(levels: np.ndarray) -> np.ndarray:
    """Canny with OpenCV's ties, pixel by pixel: the angle of the gradient picks the two neighbours across the edge."""
    dx = ndimage.correlate(levels, np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]), mode="nearest")
    dy = ndimage.correlate(levels, np.array([[-1, -2, -1], [0, 0, 0], [1, 2, 1]]), mode="nearest")
    size = np.pad(abs(dx) + abs(dy), 1)
    candidate = np.zeros(levels.shape, bool)
    for y, x in np.ndindex(levels.shape):
        steep = math.degrees(math.atan2(abs(dy[y, x]), abs(dx[y, x])))
        here, last = size[y + 1, x + 1], [(0, -1), (0, 1)] if steep < 22.5 else [(-1, 0), (1, 0)]
        if 22.5 <= steep <= 67.5:
            side = 1 if (dx[y, x] > 0) == (dy[y, x] > 0) else -1
            last = [(-1, -side), (1, side)]
        before, after = (size[y + 1 + down, x + 1 + right] for down, right in last)
        highest = here > before and (here > after if 22.5 <= steep <= 67.5 else here >= after)
        candidate[y, x] = highest and here > 50
    groups, _ = ndimage.label(candidate, np.ones((3, 3)))
    return candidate & np.isin(groups, np.unique(groups[candidate & (size[1:-1, 1:-1] > 150)]))


def glare_by_pixel(liquid: np.ndarray) -> np.ndarray:
    """The published steps in whole numbers (make_cifar_c.py, `spatter`), scipy's filters and a loop over edges."""
    levels = np.floor(np.clip(liquid, 0, 1) * 255)
    distance = np.full(levels.shape, 20.0)
    for y, x in np.argwhere(edges_by_pixel(levels)):
        down, right = np.indices(levels.shape) - np.array([y, x])[:, None, None]
        short, long = np.minimum(abs(down), abs(right)), np.maximum(abs(down), abs(right))
        far = np.where(long >= 2 * short, long + 0.1969 * short, 2.1969 * (long - short) + 1.4 * (2 * short - long))
        distance = np.minimum(distance, far)
    smooth = np.floor(ndimage.uniform_filter(distance, 3, mode="mirror") + 1e-4)
    above = smooth > smooth.min()
    rank = {level: round(255 * (above & (smooth <= level)).sum() / above.sum()) for level in np.unique(smooth)}
    equal = np.reshape([rank[level] for level in smooth.flat], smooth.shape)
    emboss = ndimage.correlate(equal, np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]), mode="mirror")
    return levels * np.round(ndimage.uniform_filter(np.clip(emboss, 0, 255).astype(float), 3, mode="mirror"))


@pytest.mark.parametrize("severity", [1, 2, 3])
def test_water_shines_as_published(images, severity):
    """Drops of all directions, weak and strong edges: what OpenCV's 8-bit pipeline makes of them."""
    (mean, deviation), smooth, threshold = [
        ((0.62, 0.1), 0.7, 0.7), ((0.65, 0.1), 0.8, 0.7), ((0.65, 0.3), 1.0, 0.69),
    ][severity - 1]  # fmt: skip
    images = images[:, :, :20, :24]
    result = corrupt(images, "spatter", severity, 9)
    turquoise = np.array([175, 238, 238])[:, None, None] / 255
    for image, stream, got in zip(images, sample_generators(9, 3), result, strict=True):
        liquid = ndimage.gaussian_filter(stream.normal(mean, deviation, (20, 24)), smooth, mode="nearest")
        liquid[liquid < threshold] = 0
        shine = glare_by_pixel(liquid)
        np.testing.assert_allclose(got, np.clip(image + 0.5 * shine / shine.max() * turquoise, 0, 1), atol=1e-12)


def test_faint_and_slanted_edges_are_followed_pixel_by_pixel():
    draw = np.random.default_rng(0)
    for deviation in (0.6, 1, 2):  # of smoothed noise: from few edges above 150 to many
        levels = np.floor(255 * np.clip(ndimage.gaussian_filter(draw.normal(0.5, deviation, (20, 24)), 1.5), 0, 1))
        got = spatter.canny(torch.tensor(levels)[None, None])[0, 0].numpy()
        np.testing.assert_array_equal(got, edges_by_pixel(levels))
        assert got.any()


def test_no_drop_no_change():
    assert (spatter.glare(torch.zeros(2, 1, 16, 16)) == 0).all()


def test_chamfer_distance_from_one_point():
    marked = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    marked[..., 5, 7] = True
    got = spatter.chamfer_distance(marked)[0, 0].numpy()
    for y, x in np.ndindex(32, 32):
        short, long = sorted((abs(y - 5), abs(x - 7)))
        # The cheapest path: knight's moves, filled up with straight or with diagonal steps.
        knight = (long - 2 * short) + 2.1969 * short if long >= 2 * short else None
        want = knight if knight is not None else 2.1969 * (long - short) + 1.4 * (2 * short - long)
        if want <= 20:
            assert got[y, x] == pytest.approx(want, rel=1e-5)
        else:
            assert got[y, x] > 20


def test_canny_outlines_a_square_and_follows_faint_ends():
    square = np.zeros((1, 1, 20, 20))
    square[..., 5:15, 5:15] = 200
    edges = spatter.canny(torch.tensor(square))[0, 0].numpy()
    # A step has equal gradients on both sides; the tie goes to the earlier pixel across the edge (> before, >= after).
    assert edges[7:13, 4].all()
    assert edges[7:13, 14].all()
    assert edges[4, 7:13].all()
    assert edges[14, 7:13].all()
    assert not edges[7:13, 7:13].any()
    assert not edges[:3].any()
    faint = np.zeros((1, 1, 20, 20))
    faint[..., :, 10:] = 20  # |dx| = 80: between the thresholds
    assert not spatter.canny(torch.tensor(faint)).any()
    faint[..., :4, 10:] = 120  # a strong piece (480) that the faint rest is attached to
    assert spatter.canny(torch.tensor(faint))[0, 0, 8:, 9].all()


def test_equalise_spreads_the_levels():
    images = torch.randint(3, 21, (4, 1, 6, 6), generator=torch.Generator().manual_seed(1)).double()
    images[3] = 7  # a flat image stays
    got = spatter.equalise(images)
    assert (got[3] == 7).all()
    for image, result in zip(images[:3, 0].numpy(), got[:3, 0].numpy(), strict=True):
        above = (image > image.min()).sum()
        for y, x in np.ndindex(6, 6):
            below = ((image > image.min()) & (image <= image[y, x])).sum()
            assert result[y, x] == round(255 * below / above)
