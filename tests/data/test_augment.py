"""Crop and mirror against a loop over samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from torch.nn import functional

from fedtta.data import CropFlip


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("flip", [True, False])
def test_each_sample_is_a_crop_of_its_padded_self(flip):
    x = torch.rand(64, 3, 9, 7, generator=seeded(5))
    before = x.clone()
    out = CropFlip(padding=2, flip=flip)(x, seeded())
    padded = functional.pad(x, (2, 2, 2, 2))
    found = set()
    for sample in range(64):
        for dy in range(5):
            for dx in range(5):
                crop = padded[sample, :, dy : dy + 9, dx : dx + 7]
                for mirrored in (False, True):
                    if torch.equal(out[sample], crop.flip(2) if mirrored else crop):
                        found.add((sample, dy, dx, mirrored))
    assert {sample for sample, *_ in found} == set(range(64))
    assert {dy for _, dy, _, _ in found} == {dx for _, _, dx, _ in found} == set(range(5))
    assert {mirrored for *_, mirrored in found} == ({True, False} if flip else {False})
    assert torch.equal(x, before)


def test_every_shift_mirrored_or_not_is_as_likely_as_another():
    rows, columns, flips = CropFlip(padding=1).draw(seeded(7), 9000).unbind(1)
    counts = torch.bincount((3 * rows + columns) * 2 + flips, minlength=18)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_nothing_to_do_is_the_identity():
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(CropFlip(padding=0, flip=False)(x, seeded()), x)


def test_flip_leaves_the_other_draws_alone():
    x = torch.rand(16, 3, 8, 8)
    plain, mirrored = (CropFlip(flip=flip)(x, seeded(1)) for flip in (False, True))
    same = (plain == mirrored).flatten(1).all(1)
    assert torch.equal(mirrored[~same], plain[~same].flip(3))
    assert 0 < int(same.sum()) < 16
    one, other = seeded(2), seeded(2)
    CropFlip(flip=False)(x, one)
    CropFlip(flip=True)(x, other)
    assert torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=other))


def test_an_empty_batch_and_other_dtypes():
    assert CropFlip()(torch.empty(0, 3, 8, 8), seeded()).shape == (0, 3, 8, 8)
    assert CropFlip()(torch.rand(2, 3, 8, 8, dtype=torch.float64), seeded()).dtype == torch.float64


def test_bad_input():
    with pytest.raises(ValueError, match="B, C, H, W"):
        CropFlip()(torch.rand(3, 8, 8), seeded())
    with pytest.raises(ValueError, match="padding=-1"):
        CropFlip(padding=-1)
    with pytest.raises(ValueError, match="generator must be on the CPU, not on cuda"):
        CropFlip().draw(SimpleNamespace(device=torch.device("cuda")), 1)
