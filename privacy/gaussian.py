"""Clipping, Gaussian noise, and what several releases tell together.

The unit of privacy is a client: (ε, δ) bounds what the server learns about all data of one client, compared with a
client that sends zeros ("Learning differentially private recurrent language models", McMahan et al., ICLR 2018; the
zero-out adjacency of "Practical and private (deep) learning without sampling or shuffling", Kairouz et al., ICML 2021).
The sampling of clients follows from the run's seed, which the server knows: it adds no privacy. Without sampling k
Gaussian releases are exactly one with √Σ 1/z² in place of 1/z, and its (ε, δ) is known in closed form ("Improving the
Gaussian mechanism for differential privacy", Balle and Wang, ICML 2018, Theorem 8), so that no accountant is needed; a
test compares with that of `dp-accounting`.

Noise comes from the operating system's entropy, never from the run's seed, which the server knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtta.settings import SettingsError, assignments

KEY = "differential-privacy"
LEAST_NOISE = 1e-6  # z; with less, ε may be too large for a number
Values = dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Mechanism:
    """A Gaussian mechanism.

    Parameters
    ----------
    noise : float
        z, standard deviation of the noise over the bound; at least `LEAST_NOISE`.
    clip : float
        Bound of a contribution: of a model's or of rates' distance from what was sent (l2 norm), or of statistics'
        distance from the middle of their range (root mean square); above 0.
    """

    noise: float
    clip: float


@dataclass(frozen=True)
class Privacy:
    """The mechanisms of a run, by what they release: "model", "statistics", "rates"; none: it is sent as it is.

    Parameters
    ----------
    mechanisms : dict
    delta : float
        δ for which ε is given.
    """

    mechanisms: Mapping[str, Mechanism]
    delta: float = 1e-5

    @classmethod
    def parse(cls, text: str) -> Privacy:
        """Return what a setting such as "statistics=2/0.25;model=4/1;delta=1e-5" says (noise/clip).

        Raises
        ------
        SettingsError
            A name is unknown, or a number is missing or out of range.
        """
        found: dict[str, Mechanism] = {}
        delta = cls.delta
        for name, value in assignments(text, KEY).items():
            try:
                numbers = [float(part) for part in str(value).split("/")]
            except ValueError:
                numbers = []
            fine = bool(numbers) and all(0 < number < math.inf for number in numbers)
            if name == "delta" and fine and len(numbers) == 1 and numbers[0] < 1:
                delta = numbers[0]
            elif name in ("model", "statistics", "rates") and fine and len(numbers) == 2 and numbers[0] >= LEAST_NOISE:
                found[name] = Mechanism(*numbers)
            else:
                allowed = f"model=z/clip, statistics=z/clip, rates=z/clip, delta=δ, z at least {LEAST_NOISE:g}"
                raise SettingsError(f"{KEY}: {name}={value}; allowed are {allowed}, all numbers above 0")
        return cls(found, delta)


def clipped(values: Mapping[str, NDArray[Any]], bound: float) -> Values:
    """Scale arrays down together so that their l2 norm is at most `bound`; in float64."""
    exact = {name: np.asarray(value, np.float64) for name, value in values.items()}
    norm = math.sqrt(sum(float(np.vdot(one, one)) for one in exact.values()))
    factor = 1.0 if norm <= bound else bound / norm
    return {name: value * factor for name, value in exact.items()}


def noised(values: Mapping[str, NDArray[Any]], std: float, draw: np.random.Generator | None = None) -> Values:
    """Add independent Gaussian noise to every number; `draw` is for tests only."""
    draw = draw or np.random.default_rng()
    return {name: value + std * draw.standard_normal(np.shape(value)) for name, value in values.items()}


def epsilon(noises: Iterable[float], delta: float) -> float:
    """Return the ε of several Gaussian releases together.

    Parameters
    ----------
    noises : iterable of float
        z of each release, above 0; without any release ε is 0.
    delta : float
        In (0, 1).
    """
    mu = math.sqrt(sum(z**-2 for z in noises))
    if mu == 0:
        return 0.0
    low, high = 0.0, 1.0
    while _delta(mu, high) > delta:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(mu, middle) > delta else (low, middle)
    return high


def _delta(mu: float, epsilon: float) -> float:
    """Return δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ)."""
    from scipy.special import log_ndtr  # 20 MiB and most of a second, which a policy without noise does without

    above = math.exp(log_ndtr(mu / 2 - epsilon / mu))
    return above - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
