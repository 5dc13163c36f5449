"""Which federated training a message is about, and what a client is to do in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """What the messages of a training say.

    Parameters
    ----------
    training : str
        Names the federated training, so that several keep their private states apart.
    rule : str
        What to do in a round, and how to make the final model the client's own; see `client.rules`.
    objective : str
        The loss that the rule minimises; see `client.objectives`.
    joined : frozenset of str or None
        Names of the arrays that the server joins; the others stay here. None: all are joined.
    """

    training: str
    rule: str = "joint"
    objective: str = "cross_entropy"
    joined: frozenset[str] | None = None
