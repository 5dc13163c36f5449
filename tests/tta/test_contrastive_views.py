from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, Tensor

from fedtta.tta.contrastive import DRAWS, TRIES, ContrastiveViews

ONLY_CROP = {"flip": False, "jitter": 0.0, "grayscale": 0.0}


def images(n: int = 6, channels: int = 3, size: tuple[int, int] = (16, 16), seed: int = 0) -> Tensor:
    """Random images with some pure, grey, black and white pixels."""
    x = torch.rand(n, channels, *size, generator=Generator().manual_seed(seed), dtype=torch.float64)
    x[:, :, 0, 0], x[:, :, 0, 1], x[:, :, 0, 2] = 0, 1, 0.5
    x[:, 0, 1, 0] = 1
    return x


def box_of(row: list[float], views: ContrastiveViews, height: int, width: int) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop.get_params, from given uniform numbers: top, left, height, width."""
    (low, high), (narrow, wide) = views.crop_scale, views.crop_ratio
    for i in range(TRIES):
        area = height * width * (low + (high - low) * row[i])
        ratio = math.exp(math.log(narrow) + (math.log(wide) - math.log(narrow)) * row[TRIES + i])
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = row[2 * TRIES : 2 * TRIES + 2]
            return int(top * (height - h + 1)), int(left * (width - w + 1)), h, w
    h, w = height, width
    if width / height < narrow:
        h = round(width / narrow)
    elif width / height > wide:
        w = round(height * wide)
    return (height - h) // 2, (width - w) // 2, h, w


def by_torchvision(x: Tensor, views: ContrastiveViews, seed: int) -> Tensor:
    """The published pipeline, image by image, from torchvision's functions and the same draws."""
    import torchvision.transforms.functional as tv  # not above: every worker would import it, for seconds

    draws = torch.rand(len(x), DRAWS, generator=Generator().manual_seed(seed), dtype=torch.float64)
    adjust = [tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue]
    rows = []
    for image, row in zip(x, draws.tolist(), strict=True):
        box = box_of(row, views, *x.shape[2:])
        image = tv.resized_crop(image, *box, list(x.shape[2:]), antialias=True)
        mirror, jitter, *rest = row[2 * TRIES + 2 :]
        if views.flip and mirror < 0.5:
            image = tv.hflip(image)
        if jitter < views.jitter:
            for code in sorted(range(4), key=lambda code: rest[4 + code]):
                spread = 0.2 * views.strength if code == 3 else 0.8 * views.strength
                image = adjust[code](image, (code < 3) + spread * (2 * rest[code] - 1))
        if rest[8] < views.grayscale and len(image) == 3:
            image = tv.rgb_to_grayscale(image, 3)
        rows.append(image)
    return torch.stack(rows)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "views",
    [
        ContrastiveViews(),
        ContrastiveViews(**ONLY_CROP),  # type: ignore[arg-type]
        ContrastiveViews(flip=False, jitter=1.0, strength=1.25),
        ContrastiveViews(crop_scale=(0.08, 0.5), grayscale=0.5),
        ContrastiveViews(crop_scale=(1.0, 1.0)),
    ],
    ids=str,
)
def test_views_are_torchvisions(views: ContrastiveViews, channels: int) -> None:
    x = images(40, channels)
    got, want = views(x, Generator().manual_seed(5)), by_torchvision(x, views, 5)
    # torchvision's hue is 1e-6 off its own inverse, which two more steps may double.
    torch.testing.assert_close(got, want, atol=5e-6 if views.jitter else 1e-12, rtol=0)
    assert views.crop_scale == (1.0, 1.0) or float((got - x).abs().mean()) > 0.05


@pytest.mark.parametrize("size", [(16, 24), (6, 40), (40, 6), (1, 1), (2, 3)])
def test_images_need_not_be_square(size: tuple[int, int]) -> None:
    views = ContrastiveViews(crop_scale=(0.9, 1.0))  # on long images no box fits
    x = torch.rand(30, 3, *size, generator=Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(views(x, Generator().manual_seed(1)), by_torchvision(x, views, 1), atol=5e-6, rtol=0)


def test_boxes_lie_in_the_image_and_keep_the_share_and_the_ratio() -> None:
    views = ContrastiveViews()
    uniform = torch.rand(4000, 2 * TRIES + 2, generator=Generator().manual_seed(0), dtype=torch.float64)
    top, left, height, width = views.boxes(uniform, 64, 64).unbind(1)
    assert bool(((top >= 0) & (left >= 0) & (top + height <= 64) & (left + width <= 64)).all())
    share, ratio = height * width / 64**2, width / height
    assert 0.18 < float(share.min()) < 0.21
    assert float(share.max()) > 0.97
    assert 0.7 < float(ratio.min()) < 0.78
    assert 1.29 < float(ratio.max()) < 1.4
    assert float(top.min()) == 0
    assert float((top + height).max()) == 64
    assert float(ratio.log().mean().abs()) < 0.02


def test_the_shares_of_mirrored_jittered_and_grey_views() -> None:
    x = torch.zeros(1000, 3, 8, 8, dtype=torch.float64)
    x[:, 0], x[:, 1], x[:, 2, :, 4:] = 0.25, 0.5, 1.0  # blue to the right
    whole = {"crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0)}

    def views(**options: float) -> Tensor:
        return ContrastiveViews(**{**whole, **options})(x, Generator().manual_seed(0))  # type: ignore[arg-type]

    quiet = {"jitter": 0.0, "grayscale": 0.0}
    assert torch.equal(views(**quiet, flip=False), x)
    mirrored = views(**quiet)[:, 2, 0, 0] == 1
    assert 0.45 < float(mirrored.double().mean()) < 0.55
    jittered = (views(flip=False, grayscale=0.0) != x).flatten(1).any(1)
    assert 0.76 < float(jittered.double().mean()) < 0.84
    gray = views(flip=False, jitter=0.0)
    gray = (gray[:, 0] == gray[:, 1]).flatten(1).all(1)
    assert 0.16 < float(gray.double().mean()) < 0.24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_scale": (0.0, 1.0)}, r"crop_scale=\(0.0, 1.0\)"),
        ({"crop_scale": (0.5, 1.5)}, r"crop_scale=\(0.5, 1.5\)"),
        ({"crop_scale": (0.8, 0.2)}, r"crop_scale=\(0.8, 0.2\)"),
        ({"crop_ratio": (1.0, math.inf)}, r"crop_ratio=\(1.0, inf\)"),
        ({"jitter": 1.1}, "jitter=1.1"),
        ({"strength": 1.3}, "strength=1.3"),
        ({"grayscale": math.nan}, "grayscale=nan"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContrastiveViews(**options)  # type: ignore[arg-type]
