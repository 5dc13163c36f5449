"""Poisoners: a transport some of whose nodes reply with what harms the others, for tests and `fedtta bench poisoning`.

An attack changes an honest reply and keeps to the rules that the server checks in single replies: finite numbers,
shapes, variances that are not negative, DLEs from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import Adapted, Identity, RefinedRates, Reply, Summarized, Trained
from fedtta.messages.requests import RefineRates, Request, Train
from fedtta.messages.transport import Addressed, Answer, Transport

#: (the request, the attacker's honest reply, the honest replies of the others) → what the attacker sends.
Attack = Callable[[Any, Any, Sequence[Any]], Reply]

#: Samples that a node claims that lies about its size; the server's `max-examples` is as large by default.
CLAIMED = 10**8
#: Endings of the names of variances, which are not negative.
VARIANCES = ("running_var", "variance")


class Poisoned:
    """A transport some of whose nodes attack; they know what all others reply.

    Parameters
    ----------
    transport : Transport
        Runs the clients, which are all honest.
    attackers : collection of int
        Node ids.
    attack : Attack
    """

    def __init__(self, transport: Transport, attackers: Collection[int], attack: Attack) -> None:
        self.transport, self.attackers, self.attack = transport, attackers, attack

    def nodes(self) -> list[int]:
        """Return the nodes of the transport."""
        return self.transport.nodes()

    def exchange(self, requests: Sequence[Addressed], timeout: float) -> Iterator[Answer]:
        """See `Transport.exchange`; answers come when the last one is there."""
        asked = {one.node: one.request for one in requests}
        answers = list(self.transport.exchange(requests, timeout))
        others = [one.reply for one in answers if one.node not in self.attackers and one.reply is not None]
        for answer in answers:
            if answer.node in self.attackers and answer.reply is not None:
                yield replace(answer, reply=self.attack(asked[answer.node], answer.reply, others))
            else:
                yield answer


def honest(request: Request, reply: Reply, others: Sequence[Reply]) -> Reply:
    """Change nothing."""
    return reply


def sign_flip(factor: float) -> Attack:
    """Return an attack that sends a model `factor` times as far from what was received, in the opposite direction."""

    def attack(request: Request, reply: Reply, others: Sequence[Reply]) -> Reply:
        if not (isinstance(request, Train) and isinstance(reply, Trained)):
            return reply
        return replace(reply, arrays=moved(request.arrays, reply.arrays, -factor))

    return attack


def size_lie(request: Request, reply: Reply, others: Sequence[Reply]) -> Reply:
    """Flip the sign of the step and claim `CLAIMED` samples, already when the node is identified."""
    if isinstance(reply, Identity):
        return replace(reply, sizes=[CLAIMED, *reply.sizes[1:]])
    if isinstance(request, Train) and isinstance(reply, Trained):
        return replace(reply, num_examples=CLAIMED, arrays=moved(request.arrays, reply.arrays, -1.0))
    return reply


def alie(deviations: float = 1.5) -> Attack:
    """Return "a little is enough" (Baruch et al., NeurIPS 2019): every number at mean - z standard deviations."""

    def attack(request: Request, reply: Reply, others: Sequence[Reply]) -> Reply:
        if not isinstance(reply, Trained) or not others:
            return reply
        arrays = {}
        for name, own in reply.arrays.items():
            stack = np.stack([one.arrays[name] for one in others if isinstance(one, Trained)]).astype(np.float64)
            arrays[name] = _legal(name, stack.mean(axis=0) - deviations * stack.std(axis=0), own)
        return replace(reply, arrays=arrays)

    return attack


def descriptors(request: Request, reply: Reply, others: Sequence[Reply]) -> Reply:
    """Send a descriptor ten times as large."""
    return _with_statistics(reply, lambda name, value: 10 * value if name == "descriptor" else value)


def dles(request: Request, reply: Reply, others: Sequence[Reply]) -> Reply:
    """Send 1 - the client's DLE."""
    return _with_statistics(reply, lambda name, value: 1 - value if name == "dle" else value)


def statistics(request: Request, reply: Reply, others: Sequence[Reply]) -> Reply:
    """Do both: descriptors are FedTHE's, DLEs BTFL's."""
    return dles(request, descriptors(request, reply, others), others)


def shared_arrays(request: Request, reply: Reply, others: Sequence[Reply]) -> Reply:
    """Send -10 times what the client shares in test-time rounds; variances, which have no sign, 10 times."""
    if not isinstance(reply, Adapted):
        return reply
    return replace(reply, shared={name: _legal(name, -10.0 * v, v) for name, v in reply.shared.items()})


def rates(request: Request, reply: Reply, others: Sequence[Reply]) -> Reply:
    """Move the rates ten times as far in the opposite direction."""
    if not (isinstance(request, RefineRates) and isinstance(reply, RefinedRates)):
        return reply
    return replace(reply, rates={n: request.rates[n] - 10 * (v - request.rates[n]) for n, v in reply.rates.items()})


def moved(sent: Arrays, trained: Arrays, factor: float) -> Arrays:
    """Return what was sent plus `factor` times the step, in the arrays' dtypes; variances stay at least 0."""
    return {
        name: _legal(name, sent[name] + factor * (value.astype(np.float64) - sent[name]), value)
        for name, value in trained.items()
    }


def _legal(name: str, value: Any, like: Any) -> Any:
    """Return an array in the dtype and layout of another; a variance is not negative."""
    value = np.abs(value) if name.endswith(VARIANCES) else value
    return np.asarray(value).astype(like.dtype)


def _with_statistics(reply: Reply, change: Callable[[str, Any], Any]) -> Reply:
    if not isinstance(reply, Summarized):
        return reply
    return replace(reply, statistics={name: change(name, value) for name, value in reply.statistics.items()})
