"""Streams that the adapter tests share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedtta.models.two_head import TwoHead
from fedtta.tta.statistics import Statistics

D, K, N = 12, 5, 60


class Stream(NamedTuple):
    """A two-head network on bare features, what it knows, and a stream for it."""

    model: TwoHead
    known: Statistics
    x: Tensor
    logits_global: Tensor
    logits_personal: Tensor


def make_stream(dtype: torch.dtype = torch.float64, sharpness: float = 6.0) -> Stream:
    """Half of the samples look like the client's own data, half do not; both heads range from unsure to certain."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    model = TwoHead(nn.Identity(), D, K)
    with torch.no_grad():
        for head in (model.head, model.personal_head):
            head.weight.copy_(sharpness * (random(K, D) - 0.5))
        model.head.bias.copy_(random(K) - 0.5)
    model = model.to(dtype)
    local, global_ = random(D), random(D)
    scale = torch.where(torch.arange(N) % 2 == 0, 0.4, 1.6)[:, None]
    x = (scale * random(N, D)).to(dtype)
    known = Statistics(local, global_, 0.2 + 0.7 * random(D), random(D), 0.7, 0.9)
    with torch.no_grad():
        return Stream(model, known, x, model.head(x), model.personal_head(x))
