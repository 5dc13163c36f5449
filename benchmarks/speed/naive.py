"""FedTHE, BTFL and tuning on views, written naively: a loop over samples, autograd, adaptive quadrature.

The part `loops` compares time and results with these. Each function follows its paper line by line (FedTHE, Algorithm
2; BTFL, Algorithm 1; MEMO) with the default options, and shares no code with `tta` but the container of statistics.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from scipy.integrate import quad
from torch import Tensor
from torch.nn import functional

from fedtta.models import TwoHead
from fedtta.tta.statistics import Statistics


def fedthe(z: Tensor, logits_global: Tensor, logits_personal: Tensor, statistics: Statistics) -> Tensor:
    """Return FedTHE's probabilities, float64 [n, K].

    Parameters
    ----------
    z : Tensor [n, d]
        Features in stream order, n at least 1.
    logits_global, logits_personal : Tensor [n, K]
    statistics : Statistics
        With both descriptors.
    """
    doubles = _doubles(statistics)
    history = z[0].double()  # h^hist
    predictions = []
    for h, y_g, y_l in zip(z.double(), logits_global.double(), logits_personal.double(), strict=True):
        smoothed = 0.3 * h + 0.7 * history  # h', β = 0.3
        to_global = torch.linalg.vector_norm(smoothed - doubles["descriptor_global"])
        to_local = torch.linalg.vector_norm(smoothed - doubles["descriptor_local"])
        agreement = functional.cosine_similarity(y_g.softmax(0), y_l.softmax(0), dim=0)  # λ_s
        scalars = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # a_g, a_l
        adam = torch.optim.Adam([scalars], lr=0.1)
        for _ in range(20):
            e_g, e_l = scalars.softmax(0)
            confidence = _entropy(e_g * y_g + e_l * y_l)  # L_EM
            alignment = e_g * to_global + e_l * to_local  # L_FA
            adam.zero_grad()
            (agreement * confidence + (1 - agreement) * alignment).backward()
            adam.step()
        e_g, e_l = scalars.detach().softmax(0)
        predictions.append((e_g * y_g + e_l * y_l).softmax(0))
        history = 0.1 * h + 0.9 * history  # α = 0.1
    return torch.stack(predictions)


def btfl(z: Tensor, logits_global: Tensor, logits_personal: Tensor, statistics: Statistics) -> Tensor:
    """Return BTFL's probabilities, float64 [n, K].

    Parameters
    ----------
    z : Tensor [n, d]
        Features in stream order, not negative.
    logits_global, logits_personal : Tensor [n, K]
    statistics : Statistics
        With both DLEs and both mean entropies.
    """
    doubles = _doubles(statistics)
    silent_local = 0.2 + 0.6 * doubles["dle_local"]  # P(ẑ_i = 0), smoothing 0.2
    silent_global = 0.2 + 0.6 * doubles["dle_global"]
    mean_local, mean_global = float(doubles["entropy_local"]), float(doubles["entropy_global"])
    external, internal = 1.0, 1.0  # a, b
    predictions = []
    for h, y_g, y_l in zip(z.double(), logits_global.double(), logits_personal.double(), strict=True):
        fires = h.tanh().round() == 1  # ẑ
        log_local = float(torch.where(fires, 1 - silent_local, silent_local).log().sum())  # ln q_l
        log_global = float(torch.where(fires, 1 - silent_global, silent_global).log().sum())
        h_local, h_global = float(_entropy(y_l)), float(_entropy(y_g))
        trust_local, trust_global = math.exp(1 - mean_local / h_local), math.exp(1 - mean_global / h_global)
        ratio = math.exp((trust_local * log_local - trust_global * log_global) / len(h))  # τ̂
        e = _posterior_mean(external, internal, ratio)
        predictions.append(e * y_g.softmax(0) + (1 - e) * y_l.softmax(0))
        if log_local > log_global and h_local < mean_local and h_global > mean_global:
            internal += 1
        elif log_local < log_global and h_local > mean_local and h_global < mean_global:
            external += 1
        total = external + internal
        if total > 16:  # λ
            external, internal = 1 + external / total, 1 + internal / total
    return torch.stack(predictions)


def tune(
    model: TwoHead, images: Tensor, weights: Tensor, views: int, steps: int, lr: float, view: Callable[..., Tensor]
) -> Tensor:
    """Return the probabilities [n, K] of MEMO (all weights 1) or of FedTHE+ (weights e of the global head).

    Parameters
    ----------
    model : TwoHead
        Left as it is: each sample tunes a copy.
    images : Tensor [n, C, H, W]
    weights : Tensor [n]
    views, steps, lr
        Views a step, steps a sample, rate of SGD.
    view : callable
        (number of the sample, step, number of the view) → one view [C, H, W].
    """
    predictions = []
    for i, (image, e) in enumerate(zip(images, weights, strict=True)):
        own = copy.deepcopy(model)
        descent = torch.optim.SGD(own.parameters(), lr=lr)
        for step in range(steps):
            z = own.encoder(torch.stack([view(i, step, v) for v in range(views)]))
            mean = (e * own.head(z) + (1 - e) * own.personal_head(z)).softmax(1).mean(0)
            descent.zero_grad()
            torch.special.entr(mean).sum().backward()
            descent.step()
        with torch.no_grad():
            z = own.encoder(image.unsqueeze(0))
            predictions.append((e * own.head(z) + (1 - e) * own.personal_head(z)).softmax(1))
    return torch.cat(predictions)


def _posterior_mean(a: float, b: float, ratio: float) -> float:
    """Return E[m / (m + (1-m) τ̂)] for m ~ Beta(a, b), a and b at least 1 (eq. 21)."""
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b))
    return scale * quad(lambda m: m**a * (1 - m) ** (b - 1) / (m + (1 - m) * ratio), 0, 1)[0]


def _entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats of the softmax of logits [K]."""
    logs = logits.log_softmax(0)
    return -(logs.exp() * logs).sum()


def _doubles(statistics: Statistics) -> dict[str, Tensor]:
    """Return the statistics that are there as float64 tensors by name."""
    return {name: torch.as_tensor(v, dtype=torch.float64) for name, v in vars(statistics).items() if v is not None}
