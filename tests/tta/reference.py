"""The methods one sample at a time, straight from the papers: autograd, torch's Adam, scipy's quad. Slow, obvious."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from scipy.integrate import quad
from scipy.special import betaln
from torch import Tensor

from fedtta.tta.statistics import Statistics


def entropy(logits: Tensor) -> Tensor:
    """H of one sample's logits [K]."""
    logs = torch.log_softmax(logits, 0)
    return -(logs.exp() * logs).sum()


def fedthe(z, logits_g, logits_l, known: Statistics, alpha=0.1, beta=0.3, steps=20, lr=0.1, objective="slw", batch=0):
    """FedTHE's Algorithm 2, lines 1 to 8: probabilities [n, K] and e [n]; with the published history of batches."""
    past = z[0].clone()
    rows, weights = [], []
    for position, (h, y_g, y_l) in enumerate(zip(z, logits_g, logits_l, strict=True)):
        if batch and position % batch:
            past = alpha * h + (1 - alpha) * past
        smoothed = beta * h + (1 - beta) * past
        far_g, far_l = (smoothed - known.descriptor_global).norm(), (smoothed - known.descriptor_local).norm()
        p_g, p_l = torch.softmax(y_g, 0), torch.softmax(y_l, 0)
        similarity = float(torch.dot(p_g, p_l) / (p_g.norm() * p_l.norm()))
        trust = {"slw": similarity, "em": 1.0, "fa": 0.0, "half": 0.5}[objective]
        pair = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # a_g, a_l
        adam = torch.optim.Adam([pair], lr=lr)
        for _ in range(steps):
            e = torch.softmax(pair, 0)[0]
            alignment = e * far_g + (1 - e) * far_l
            loss = trust * entropy(e * y_g + (1 - e) * y_l) + (1 - trust) * alignment
            adam.zero_grad()
            loss.backward()
            adam.step()
        e = torch.softmax(pair, 0)[0].detach()
        rows.append(torch.softmax(e * y_g + (1 - e) * y_l, 0))
        weights.append(e)
        if not batch:
            past = alpha * h + (1 - alpha) * past
    return torch.stack(rows), torch.stack(weights)


def expected_weight(a: float, b: float, log_tau: float) -> float:
    """E[m / (m + (1-m) τ)], m ~ Beta(a, b), by adaptive quadrature in x = logit m."""

    def density(x: float) -> float:
        return math.exp(-a * np.logaddexp(0, -x) - b * np.logaddexp(0, x) - betaln(a, b))

    def integrand(x: float) -> float:
        return density(x) * math.exp(-np.logaddexp(0, log_tau - x))

    peak = math.log(a / b)
    low, high = -40 / min(a, 1) - 10, 40 / min(b, 1) + 10
    middle = min(max(log_tau, low), high)
    cuts = sorted(
        {c for c in (low, peak - 2, peak, peak + 2, middle - 5, middle, middle + 5, high) if low <= c <= high}
    )
    return sum(quad(integrand, *piece, epsabs=1e-13, epsrel=1e-12, limit=200)[0] for piece in pairwise(cuts))


def btfl(z, logits_g, logits_l, known: Statistics, strength=16, smoothing=0.2, rectify="power", clients=0):
    """BTFL's steps 1 to 7: a dict of columns, and the final (a, b)."""
    p_l, p_g = known.dle_local, known.dle_global
    if clients:
        p_g = ((clients * p_g - p_l) / (clients - 1)).clamp(0, 1)
    if smoothing:
        p_l, p_g = smoothing + (1 - 2 * smoothing) * p_l, smoothing + (1 - 2 * smoothing) * p_g
    else:
        p_l, p_g = p_l.clamp(1e-6, 1 - 1e-6), p_g.clamp(1e-6, 1 - 1e-6)
    a = b = 1.0
    columns = {"probabilities": [], "weight": [], "prior": [], "log_tau": [], "log_tau_hat": [], "event": []}
    for h, y_g, y_l in zip(z, logits_g, logits_l, strict=True):
        y_local, y_global = torch.softmax(y_l, 0), torch.softmax(y_g, 0)
        h_l, h_g = float(entropy(y_l)), float(entropy(y_g))
        code = torch.round(torch.tanh(h))
        log_l = float(torch.where(code == 0, p_l.log(), (1 - p_l).log()).sum())
        log_g = float(torch.where(code == 0, p_g.log(), (1 - p_g).log()).sum())
        mean_l, mean_g = known.entropy_local, known.entropy_global
        u_l = math.exp((h_l - mean_l) / h_l) if h_l else 0.0
        u_g = math.exp((h_g - mean_g) / h_g) if h_g else 0.0
        log_tau, d = log_l - log_g, len(h)
        if rectify == "power":
            hat = (u_l * log_l - u_g * log_g) / d
        elif rectify == "product":
            clipped = [min(max(math.log(u) if u else -math.inf, -30), 30) for u in (u_l, u_g)]
            hat = log_tau / d + clipped[0] - clipped[1]
        else:
            hat = log_tau / d
        e = expected_weight(a, b, hat)
        columns["probabilities"].append(e * y_global + (1 - e) * y_local)
        columns["weight"].append(e)
        columns["prior"].append((a, b))
        columns["log_tau"].append(log_tau)
        columns["log_tau_hat"].append(hat)
        event = 0
        if log_tau > 0 and h_l < mean_l and h_g > mean_g:
            b, event = b + 1, -1
        elif log_tau < 0 and h_l > mean_l and h_g < mean_g:
            a, event = a + 1, 1
        columns["event"].append(event)
        if a + b > strength:
            total = a + b
            a, b = 1 + a / total, 1 + b / total
    result = {name: torch.tensor(np.array([np.asarray(v) for v in values])) for name, values in columns.items()}
    return result, (a, b)
