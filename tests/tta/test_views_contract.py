"""What all random views promise: images of the same shape, drawn from the given generator alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from fedtta.tta.augmix import AugMix
from fedtta.tta.contrastive import ContrastiveViews
from fedtta.tta.ttt import CropAndFlip
from fedtta.tta.views import Augment, RandomViews, Views, augmented

VIEWS: dict[str, Callable[[], Augment]] = {
    "border": Views,
    "reflection": lambda: Views(padding="reflection", soft=True),
    "augmix": AugMix,
    "augmix, severe": lambda: AugMix(severity=10.0),
    "contrastive": lambda: ContrastiveViews(strength=1.25),
    "crop and flip": CropAndFlip,
}
COLOURED = {"border": Views, "contrastive": ContrastiveViews}  # those that check what they are given


def random_images(n: int, channels: int, size: tuple[int, int], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(n, channels, *size, generator=Generator().manual_seed(seed), dtype=dtype)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(VIEWS)),
    seed=st.integers(0, 10**6),
    n=st.integers(0, 5),
    channels=st.sampled_from([1, 3]),
    size=st.tuples(st.integers(2, 12), st.integers(2, 12)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_views_are_images_and_a_function_of_the_generator(
    name: str, seed: int, n: int, channels: int, size: tuple[int, int], dtype: torch.dtype
) -> None:
    x, views = random_images(n, channels, size, seed, dtype), VIEWS[name]()
    before, state = x.clone(), torch.get_rng_state()
    first, second = (views(x, Generator().manual_seed(seed)) for _ in range(2))
    assert first.shape == x.shape
    assert first.dtype == dtype
    assert bool(((first >= 0) & (first <= 1)).all())
    assert torch.equal(first, second)
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", list(VIEWS))
def test_every_image_has_a_view_of_its_own_and_every_call_another(name: str) -> None:
    x = random_images(1, 3, (12, 12), 0, torch.float64).repeat(4, 1, 1, 1)
    generator, views = Generator().manual_seed(0), VIEWS[name]()
    both = torch.cat([views(x, generator), views(x, generator)])
    distance = (both[:, None] - both[None]).abs().mean((2, 3, 4)) + torch.eye(8)
    assert float(distance.min()) > 1e-4


@pytest.mark.parametrize("name", list(VIEWS))
def test_a_view_does_not_depend_on_other_images(name: str) -> None:
    x, other = (random_images(20, 3, (12, 12), seed, torch.float64) for seed in (0, 1))
    other[7] = x[7]
    first, second = (VIEWS[name]()(batch, Generator().manual_seed(2)) for batch in (x, other))
    torch.testing.assert_close(first[7], second[7], atol=1e-12, rtol=0)
    assert float((first - second).flatten(1).abs().mean(1)[8]) > 0.01


@pytest.mark.parametrize("name", ["border", "reflection", "contrastive", "crop and flip"])
def test_draws_do_not_depend_on_the_dtype(name: str) -> None:
    x = random_images(20, 3, (12, 12), 0, torch.float64)
    exact, close = (VIEWS[name]()(images, Generator().manual_seed(2)) for images in (x, x.float()))
    torch.testing.assert_close(close.double(), exact, atol=5e-5, rtol=0)


@pytest.mark.parametrize("kind", [Views, AugMix, ContrastiveViews, CropAndFlip])
def test_views_for_a_data_set_mirror_only_where_they_may(kind: type[RandomViews]) -> None:
    for flip in (True, False):
        views = kind.for_data(flip=flip, crop=1.0)
        assert views.flip is flip  # type: ignore[attr-defined]
    assert ContrastiveViews.for_data(flip=True, crop=0.6).crop_scale == (0.6, 1.0)


@pytest.mark.parametrize("name", list(COLOURED))
@pytest.mark.parametrize(
    "x", [torch.zeros(2, 5), torch.zeros(2, 2, 4, 4), torch.zeros(3, 4, 4), torch.zeros(1, 3, 4, 4, dtype=torch.int64)]
)
def test_other_shapes_are_refused(name: str, x: Tensor) -> None:
    with pytest.raises(ValueError, match="1 or 3, H, W"):
        COLOURED[name]()(x, Generator())


@pytest.mark.parametrize("name", list(VIEWS))
@pytest.mark.parametrize("channels", [1, 3])
def test_views_made_together_are_those_of_separate_calls(name: str, channels: int) -> None:
    x, views = random_images(15, channels, (9, 7), 0, torch.float32), VIEWS[name]()
    apart = [views(part, Generator().manual_seed(i)) for i, part in enumerate(x.chunk(3))]
    together = augmented(views, x, *(Generator().manual_seed(i) for i in range(3)))
    assert torch.equal(together, torch.cat(apart))
