from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from scipy import stats
from torch import Tensor

from fedtta.tta.augmix import (
    DEPTH,
    DRAWS,
    GEOMETRIC,
    OPERATIONS,
    WIDTH,
    AugMix,
    affine,
    autocontrast,
    equalize,
    posterize,
    solarize,
)

SIZE = (32, 24)  # height, width: not square, so that a swap of the two shows


def image_8bit(seed: int, channels: int = 3) -> np.ndarray:
    """Smooth-ish 8-bit image [H, W, C] that does not use the whole range."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(30, 200, (8, 6, channels)).repeat(4, 0).repeat(4, 1)
    return np.clip(coarse + rng.integers(-20, 21, coarse.shape), 0, 255).astype(np.uint8)


def as_tensor(image: np.ndarray) -> Tensor:
    return torch.from_numpy(image.astype(np.float64) / 255).permute(2, 0, 1)[None]  # [1, C, H, W]


def as_levels(x: Tensor) -> np.ndarray:
    return (x[0].permute(1, 2, 0) * 255).numpy()


def one_operation(name: str, level: float, sign: float) -> Tensor:
    """A row of draws: no crop shift, no flip, m = 0, w = (1, 0, 0), first chain = one operation."""
    row = torch.zeros(1, DRAWS, dtype=torch.float64)
    row[0, 2] = 0.9  # no flip
    row[0, 4] = 0.5  # weights (1, 0, 0): the others' exponentials are 0
    operation = 4 + 2 * WIDTH
    row[0, operation] = (OPERATIONS.index(name) + 0.5) / len(OPERATIONS)
    row[0, operation + WIDTH * DEPTH] = level
    row[0, operation + 2 * WIDTH * DEPTH] = 0.25 if sign < 0 else 0.75
    return row


def pillow(name: str, image: Image.Image, level: float, sign: float, fill: tuple[int, ...]) -> Image.Image:
    """AugMix's operation with Pillow at a level, as published."""
    width, height = image.size
    bilinear = Image.Resampling.BILINEAR
    coefficients = {
        "shear_x": (1, sign * level * 0.3 / 10, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, sign * level * 0.3 / 10, 1, 0),
        "translate_x": (1, 0, sign * int(level * (width / 3) / 10), 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, sign * int(level * (height / 3) / 10)),
    }
    if name in coefficients:
        affine_mode = Image.Transform.AFFINE
        return image.transform((width, height), affine_mode, coefficients[name], bilinear, fillcolor=fill)
    if name == "rotate":
        return image.rotate(sign * int(level * 30 / 10), bilinear, fillcolor=fill)
    if name == "solarize":
        return ImageOps.solarize(image, 256 - int(level * 256 / 10))
    if name == "posterize":
        return ImageOps.posterize(image, 4 - int(level * 4 / 10))
    return ImageOps.autocontrast(image) if name == "autocontrast" else ImageOps.equalize(image)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("severity", "uniform"), [(1.0, 0.95), (1.0, 0.4), (10.0, 0.3), (10.0, 0.97)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_every_operation_matches_pillow(name: str, severity: float, uniform: float, sign: int) -> None:
    level = 0.1 + (severity - 0.1) * uniform
    exact = name in ("equalize", "solarize", "posterize")
    for seed, channels in ((0, 3), (1, 1)):
        image = image_8bit(seed, channels)
        opened = Image.fromarray(image.squeeze())
        want = np.asarray(pillow(name, opened, level, sign, (128,) * channels)).reshape(image.shape)
        augment = AugMix(padding=0, severity=severity)
        got = as_levels(augment.apply(as_tensor(image), one_operation(name, uniform, sign)))
        np.testing.assert_allclose(got, want, atol=1e-9 if exact else 1.0 + 1e-9, rtol=0)


def test_operations_on_constant_channels_do_nothing() -> None:
    x = torch.full((1, 3, 8, 8), 0.4, dtype=torch.float64)
    assert torch.equal(autocontrast(x), x)
    assert torch.equal(equalize(x), x)


def test_autocontrast_and_equalize_by_hand() -> None:
    x = torch.tensor([0.2, 0.4, 0.6, 0.3], dtype=torch.float64).view(1, 1, 2, 2)
    assert torch.allclose(autocontrast(x).flatten(), torch.tensor([0, 0.5, 1, 0.25], dtype=torch.float64))
    # 510 pixels of level 10, 510 of level 20, 4 of level 30: step = 1020 // 255 = 4, tables (2 + 0) // 4 = 0,
    # (2 + 510) // 4 = 128, (2 + 1020) // 4 = 255.
    levels = torch.tensor([10.0] * 510 + [20.0] * 510 + [30.0] * 4, dtype=torch.float64)
    got = equalize((levels / 255).view(1, 1, 32, 32)).flatten() * 255
    assert torch.equal(got.round(), torch.tensor([0.0] * 510 + [128.0] * 510 + [255.0] * 4, dtype=torch.float64))


def test_operations_take_one_parameter_an_image() -> None:
    x = torch.tensor([100 / 255, 200 / 255], dtype=torch.float64).view(1, 1, 1, 2).repeat(2, 1, 1, 1)
    solarized = solarize(x, torch.tensor([150.0, 250.0])) * 255
    assert solarized.flatten().round().tolist() == [100, 55, 100, 200]
    posterized = posterize(x, torch.tensor([1.0, 4.0])) * 255
    assert posterized.flatten().round().tolist() == [0, 128, 96, 192]


def test_affine_identity_and_whole_pixel_shift() -> None:
    x = torch.rand(1, 2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    still = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]], dtype=torch.float64)
    assert torch.allclose(affine(x, still, 0.5), x, atol=1e-12)
    shift = torch.tensor([[[1.0, 0, 2], [0, 1, -1]]], dtype=torch.float64)  # reads 2 to the right, 1 above
    want = torch.full_like(x, 0.5)
    want[..., 1:, :-2] = x[..., :-1, 2:]
    assert torch.allclose(affine(x, shift, 0.5), want, atol=1e-12)


def slow_view(augment: AugMix, x: Tensor, draws: Tensor) -> Tensor:
    """One view [1, C, H, W] of one image, operation by operation."""
    plan = augment.plan(draws)
    height, width = x.shape[2:]
    row, column = plan.corner[0].tolist()
    padded = torch.zeros(1, x.shape[1], height + 8, width + 8, dtype=x.dtype)
    padded[..., 4:-4, 4:-4] = x
    x = padded[..., row : row + height, column : column + width]
    x = x.flip(3) if plan.flip[0] else x
    mixed = torch.zeros_like(x)
    for chain in range(WIDTH):
        y = x
        for depth in range(DEPTH):
            index, level = int(plan.operation[chain, depth]), plan.level[chain, depth]
            if index >= 0:
                crafted = one_operation(OPERATIONS[index], 0.5, float(plan.sign[chain, depth]))
                crafted[0, 4 + 2 * WIDTH + WIDTH * DEPTH] = (level - 0.1) / (augment.severity - 0.1)
                y = AugMix(padding=0, severity=augment.severity).apply(y, crafted)
        mixed += plan.weights[0, chain] * y
    return plan.mix[0] * x + (1 - plan.mix[0]) * mixed


@pytest.mark.parametrize("severity", [1.0, 6.0])
def test_views_together_equal_views_one_by_one(severity: float) -> None:
    augment = AugMix(severity=severity)
    x = torch.cat([as_tensor(image_8bit(seed)) for seed in range(12)])
    draws = augment.draw(torch.Generator().manual_seed(3), 12)
    together = augment.apply(x, draws)
    for i in range(12):
        assert torch.allclose(together[i : i + 1], slow_view(augment, x[i : i + 1], draws[i : i + 1]), atol=1e-9)


def test_no_flip_is_possible() -> None:
    draws = AugMix().draw(torch.Generator().manual_seed(0), 200)
    assert 60 < int(AugMix().plan(draws).flip.sum()) < 140
    assert not bool(AugMix(flip=False).plan(draws).flip.any())


def test_draws_have_the_published_distributions() -> None:
    n = 3000
    augment = AugMix(severity=3.0)
    plan = augment.plan(augment.draw(torch.Generator().manual_seed(7), n))
    assert stats.kstest(plan.mix.numpy(), "uniform").pvalue > 1e-3  # Beta(1, 1)
    assert torch.allclose(plan.weights.sum(1), torch.ones(n, dtype=torch.float64))
    for chain in range(WIDTH):  # a coordinate of Dir(1, 1, 1) is Beta(1, 2)
        assert stats.kstest(plan.weights[:, chain].numpy(), "beta", (1, 2)).pvalue > 1e-3
    assert stats.kstest(plan.level.flatten().numpy(), "uniform", (0.1, 2.9)).pvalue > 1e-3
    counts = {
        "length": torch.bincount((plan.operation >= 0).sum(1), minlength=4)[1:],
        "operation": torch.bincount(plan.operation[plan.operation >= 0], minlength=len(OPERATIONS)),
        "row": torch.bincount(plan.corner[:, 0], minlength=9),
        "column": torch.bincount(plan.corner[:, 1], minlength=9),
        "flip": torch.bincount(plan.flip.long(), minlength=2),
        "sign": torch.bincount((plan.sign.flatten() > 0).long(), minlength=2),
    }
    for name, count in counts.items():
        assert stats.chisquare(count.numpy()).pvalue > 1e-3, name
    assert len(GEOMETRIC) == 5
    assert len(OPERATIONS) == 9


@pytest.mark.parametrize(
    "options", [{"severity": 0.1}, {"severity": 11}, {"padding": -1}, {"fill": 1.5}, {"severity": float("nan")}]
)
def test_bad_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AugMix(**options)  # type: ignore[arg-type]


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="images"):
        AugMix()(torch.rand(2, 5), torch.Generator())
    with pytest.raises(ValueError, match="draws"):
        AugMix().apply(torch.rand(2, 3, 8, 8), torch.rand(3, DRAWS))
