from __future__ import annotations

import math

import pytest
import torch
from torch import Generator, Tensor

from fedtta.tta.views import COLOURS, DRAWS, Views, augmented, blur


def images(n: int = 6, channels: int = 3, size: tuple[int, int] = (16, 16), seed: int = 0) -> Tensor:
    """Random images with some pure, grey, black and white pixels."""
    x = torch.rand(n, channels, *size, generator=Generator().manual_seed(seed), dtype=torch.float64)
    x[:, :, 0, 0], x[:, :, 0, 1], x[:, :, 0, 2] = 0, 1, 0.5
    x[:, 0, 1, 0] = 1
    return x


def by_torchvision(x: Tensor, views: Views, seed: int) -> Tensor:
    """The published pipeline, image by image, from torchvision's functions and the same draws."""
    import torchvision.transforms.functional as tv  # not above: every worker would import it, for seconds
    from torchvision.transforms import InterpolationMode

    generator = Generator().manual_seed(seed)
    draws = torch.rand(len(x), DRAWS, generator=generator, dtype=torch.float64)
    noise = torch.randn(x.shape, generator=generator).to(x) if views.noise else torch.zeros_like(x)
    height, width = x.shape[2:]
    jitter = {
        "brightness": tv.adjust_brightness,
        "contrast": tv.adjust_contrast,
        "saturation": tv.adjust_saturation,
        "hue": tv.adjust_hue,
        "gamma": tv.adjust_gamma,
    }
    ranges = {
        "brightness": (0.6, 1.4),
        "contrast": (0.7, 1.3),
        "saturation": (0.5, 1.5),
        "hue": (-0.06, 0.06),
        "gamma": (0.7, 1.3),
    }
    degrees, zoom, largest = (8, 0.05, 0.25) if views.soft else (15, 0.1, 0.5)
    rows = []
    for i, row in enumerate(draws.tolist()):
        image = x[i]
        for code in sorted(range(5), key=lambda code: row[5 + code]):
            name = list(COLOURS)[code]
            low, high = ranges[name]
            value = low + (high - low) * row[code]
            if views.soft:
                value = (value + (0 if name == "hue" else 1)) / 2
            image = jitter[name](image, value)
        padding = [width // 2, height // 2]
        image = tv.pad(image, padding, padding_mode={"border": "edge", "reflection": "reflect"}[views.padding])
        shift = [round((2 * u - 1) * 2 * size / 16) for u, size in zip(row[12:14], (width, height), strict=True)]
        angle, scale = (2 * row[10] - 1) * degrees, 1 + (2 * row[11] - 1) * zoom
        image = tv.affine(image, angle, shift, scale, [0.0, 0.0], InterpolationMode.BILINEAR, fill=[0.0])
        if views.blur:
            image = tv.gaussian_blur(image, [5, 5], [0.001 + (largest - 0.001) * row[14]] * 2)
        image = tv.center_crop(image, [height, width])
        if views.flip and row[15] < 0.5:
            image = tv.hflip(image)
        rows.append((image + views.noise * noise[i]).clamp(0, 1))
    return torch.stack(rows)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "views",
    [
        Views(),
        Views(soft=True),
        Views(flip=False, noise=0.0),
        Views(blur=False, noise=0.0, padding="reflection"),
        Views(blur=True, padding="reflection"),
    ],
    ids=str,
)
def test_views_are_torchvisions(views: Views, channels: int) -> None:
    x = images(40, channels)
    got, want = views(x, Generator().manual_seed(5)), by_torchvision(x, views, 5)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert float((got - x).abs().mean()) > 0.05


def test_images_need_not_be_square() -> None:
    x = images(10, 3, (16, 24))
    torch.testing.assert_close(Views()(x, Generator().manual_seed(1)), by_torchvision(x, Views(), 1), atol=1e-6, rtol=0)
    point = x[:, :, 1:2, :1]  # one pixel looks as a square of its colour does
    one, square = (Views(noise=0.0)(image, Generator()) for image in (point, point.expand(-1, -1, 4, 4)))
    torch.testing.assert_close(one.expand_as(square), square)


def test_what_is_out_of_range_is_clipped_first() -> None:
    x = 3 * images() - 1
    before = x.clone()
    want = by_torchvision(x.clamp(0, 1), Views(), 4)
    torch.testing.assert_close(Views()(x, Generator().manual_seed(4)), want, atol=1e-6, rtol=0)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", list(COLOURS))
def test_colours_by_hand(name: str) -> None:
    function, _ = COLOURS[name]
    red, grey = [0.8, 0.4, 0.4], [0.5, 0.5, 0.5]
    x = torch.tensor([[red, grey]], dtype=torch.float64).transpose(1, 2).unsqueeze(3)  # [1, 3, 2, 1]
    luma = 0.4 + 0.2989 * 0.4
    mean = (luma + 0.5 * 0.9999) / 2  # the luma weights sum to 0.9999
    # A third of a circle turns red into green; factors of 2 and 1/2 by arithmetic.
    factor, want_red, want_grey = {
        "brightness": (2.0, [1.0, 0.8, 0.8], [1.0, 1.0, 1.0]),
        "contrast": (0.5, [(c + mean) / 2 for c in red], [(0.5 + mean) / 2] * 3),
        "saturation": (0.5, [(c + luma) / 2 for c in red], [(0.5 + 0.5 * 0.9999) / 2] * 3),
        "hue": (1 / 3, [0.4, 0.8, 0.4], grey),
        "gamma": (2.0, [0.64, 0.16, 0.16], [0.25] * 3),
    }[name]
    got = function(x, torch.full((1, 1, 1, 1), factor, dtype=torch.float64))[0, :, :, 0].T
    want = torch.tensor([want_red, want_grey], dtype=torch.float64)
    # The luma of a saturated red is 0.4 * 0.9999 + 0.2989 * 0.4: the same 1e-4 again.
    torch.testing.assert_close(got, want, atol=5e-5, rtol=0)


def test_blur_by_hand() -> None:
    # One white pixel, sigma 1/2: taps e^0, e^-2, e^-8, over their sum 1 + 2 e^-2 + 2 e^-8, in both directions.
    x = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    x[0, 0, 4, 4] = 1
    taps = [math.exp(-8), math.exp(-2), 1, math.exp(-2), math.exp(-8)]
    want = torch.tensor([[a * b / sum(taps) ** 2 for b in taps] for a in taps], dtype=torch.float64)
    got = blur(x, torch.tensor([0.5]))
    torch.testing.assert_close(got[0, 0], want, atol=1e-12, rtol=0)
    assert torch.equal(blur(x, torch.tensor([0.001])), x[:, :, 2:-2, 2:-2])


def test_a_constant_image_shows_the_colour_operations_only() -> None:
    x = torch.full((50, 3, 8, 8), 0.5, dtype=torch.float64)
    y = Views(noise=0.0)(x, Generator().manual_seed(0))
    spread = y.flatten(1).amax(1) - y.flatten(1).amin(1)
    assert float(spread.max()) < 1e-3  # nothing black comes in; luma weights sum to 0.9999
    assert float(y.mean((1, 2, 3)).std()) > 0.05


def test_half_of_the_views_are_mirrored() -> None:
    x = torch.zeros(400, 1, 8, 8, dtype=torch.float64)
    x[:, :, :, 4:] = 1
    right_is_bright = [
        (y[..., 6:].mean((1, 2, 3)) > y[..., :2].mean((1, 2, 3))).double().mean()
        for y in (Views(flip=flip)(x, Generator().manual_seed(0)) for flip in (True, False))
    ]
    assert 0.4 < float(right_is_bright[0]) < 0.6
    assert float(right_is_bright[1]) == 1


@pytest.mark.parametrize("parts", [1, 2])
def test_views_of_another_size_are_refused(parts: int) -> None:
    with pytest.raises(ValueError, match=r"augment made \(\d, 3, 16, 8\) of a batch of shape \(\d, 3, 16, 16\)"):
        augmented(lambda x, _: x[..., :8], images(4), *(Generator() for _ in range(parts)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": -1.0}, "noise=-1"),
        ({"noise": math.nan}, "noise=nan"),
        ({"noise": math.inf}, "noise=inf"),
        ({"padding": "zeros"}, "border, reflection"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Views(**options)  # type: ignore[arg-type]
