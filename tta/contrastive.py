"""Contrastive losses on features: supervised, over everything of one class, and self-supervised, over two views.

Taming Heterogeneity to Deal with Test-Time Shift in Federated Learning (Tan, Chen, Zhuang, Dong, Lyu, Long, 2023;
FedICON), eq. 2 and 5:

    L_sup = mean_x  -1/|P(x)| Σ_{p ∈ P(x)} ln( exp(z_x·z_p/τ) / Σ_{a ∈ A(x)} exp(z_x·z_a/τ) )

    L_us = mean_x  -ln( exp(z_x·z'_x/τ) / Σ_{a ∈ A(x)} exp(z_x·z_a/τ) )

x runs over the rows of a batch of views (the anchors), A(x) are all its other rows, P(x) those with x's label, z'_x is
the other view of x's image. They are L_out of Supervised Contrastive Learning (Khosla et al., NeurIPS 2020, eq. 2) and
NT-Xent of SimCLR (Chen et al., ICML 2020). Eq. 5 is eq. 2 where every image is a class of its own; that is how it is
computed.

Decisions and deviations:

- The paper prints sums over a data set, with A(x) all of it; computed is a mean over a batch, A(x) the rest of it.
- z is divided by its length here, as in both sources. A row shorter than 1e-19 (float32) has no direction: its products
  with every row are 0, and it gets no gradient.
- An anchor without a positive is left out, and the mean runs over those that have one; where no anchor has one the loss
  is 0. With two views of each image there is always one.
- The paper does not tell τ. Without labels 0.5 is SimCLR's for CIFAR-10. With labels 0.1 is Khosla et al.'s; with 0.5
  the encoder learns several times more slowly (Digit-5, two rounds, a linear probe on validation images: 70.6 % right
  against 84.5 %; 0.05: 85.8, 0.2: 83.3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tta.heads import check_number


def supervised_contrastive(z: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """Return L_sup (see the module), a scalar of the dtype of `z`, 0 or more.

    Parameters
    ----------
    z : Tensor [n, d]
        Features of n views, floating point, of any length; n = 2B where each of B images has two.
    labels : Tensor [n]
        Integer labels of the rows.
    temperature : float
        τ, finite, above 0.

    Raises
    ------
    ValueError
        `temperature` is out of range, or a shape or type is another.
    """
    check_number("temperature", temperature, 0, math.inf, open_low=True)
    if z.ndim != 2 or not z.is_floating_point():
        raise ValueError(f"z must be floating-point features [n, d], got {z.dtype} of shape {tuple(z.shape)}")
    if labels.shape != z.shape[:1] or labels.is_floating_point():
        raise ValueError(f"labels must be {len(z)} integers, got {labels.dtype} of shape {tuple(labels.shape)}")
    direction = unit(z)
    same = (labels[:, None] == labels[None]).fill_diagonal_(False)  # [n, n], P(x)
    anchors = torch.nonzero(same.any(1)).flatten()  # [m]
    if len(anchors) == 0:
        return (direction * 0).sum()  # 0, with a gradient, which is 0 too
    products = direction[anchors] @ direction.T / temperature  # [m, n]
    itself = torch.arange(len(z), device=z.device) == anchors[:, None]
    log_p = products - products.masked_fill(itself, -math.inf).logsumexp(1, keepdim=True)
    positive = same[anchors]
    return -(log_p.masked_fill(~positive, 0).sum(1) / positive.sum(1)).mean()


def self_contrastive(first: Tensor, second: Tensor, temperature: float = 0.5) -> Tensor:
    """Return L_us (see the module): of two views of each image, either is the positive of the other.

    One image alone has no negatives: its loss is 0, and so is the gradient.

    Parameters
    ----------
    first, second : Tensor [B, d]
        Features of one view of each image, and of another, in the same order.
    temperature : float
        τ, finite, above 0.

    Returns
    -------
    Tensor []
        The mean over the 2B views, 0 or more.

    Raises
    ------
    ValueError
        `temperature` is out of range, or the views differ in shape or are no features.
    """
    if first.shape != second.shape:
        raise ValueError(f"views differ in shape: {tuple(first.shape)} and {tuple(second.shape)}")
    images = torch.arange(len(first), device=first.device).repeat(2)
    return supervised_contrastive(torch.cat((first, second)), images, temperature)


def unit(z: Tensor) -> Tensor:
    """Return the rows of z [n, d] at length 1; a row of (nearly) zero length as zeros, without a gradient."""
    largest = z.detach().abs().amax(1, keepdim=True) if z.numel() else z.new_zeros(len(z), 1)
    nothing = largest < math.sqrt(torch.finfo(z.dtype).tiny)  # [n, 1]
    # Divided by the largest entry first, so that no square overflows or vanishes.
    scaled = (z / largest.masked_fill(nothing, 1)).masked_fill(nothing, 0)
    length = scaled.square().sum(1, keepdim=True).masked_fill(nothing, 1).sqrt()
    return scaled / length
