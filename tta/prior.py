"""BTFL's history: a Beta(a, b) over m = P(external) that counts events (section 4, eq. 7 to 11, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence


def detect_event(log_tau: float, entropy: Sequence[float], mean_entropy: tuple[float, float]) -> int:
    """Return 1 for an external event, -1 for an internal one, 0 for none (eq. 10, 11; all inequalities strict).

    Parameters
    ----------
    log_tau : float
        ln τ, raw, not rectified.
    entropy, mean_entropy : (float, float)
        Of the personal and the global head.
    """
    (personal, global_), (mean_personal, mean_global) = entropy, mean_entropy
    if log_tau > 0 and personal < mean_personal and global_ > mean_global:
        return -1
    if log_tau < 0 and personal > mean_personal and global_ < mean_global:
        return 1
    return 0


def prior_path(
    events: list[int], prior: tuple[float, float], strength: float
) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Return the prior (a, b) before each event, and after the last one (eq. 11, Algorithm 1).

    An external event (1) raises a, an internal one (-1) raises b; a sum above `strength` is then pruned to 3, in the
    proportion of the counts, both with the old sum.
    """
    a, b = prior
    path = []
    for event in events:
        path.append((a, b))
        if event > 0:
            a += 1
        elif event < 0:
            b += 1
        total = a + b
        if total > strength:
            a, b = 1 + a / total, 1 + b / total
    return path, (a, b)
