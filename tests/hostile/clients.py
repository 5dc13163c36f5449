"""Clients that train nothing and reply at once, for tests of what the server does with replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Message

from fedtta.messages.flower import reply_message, request_of
from fedtta.messages.replies import (
    Adapted,
    Evaluated,
    EvaluationResult,
    Identity,
    RefinedRates,
    Reply,
    Summarized,
    Trained,
)
from fedtta.messages.requests import Adapt, Evaluate, Identify, RefineRates, Request, Summarize, Train
from tests.hostile.superlink import Behaviour, Pushed, pushed

CLASSES = [str(number) for number in range(10)]
SIZES = [20, 10, 10]
COUNTS: dict[str, Any] = {"num_examples": 20, "validation_total": 10, "validation_correct": 5, "seconds": 0.5}
#: What a hostile node makes of a request's message and the honest reply to it.
Attack = Callable[[Message, Reply], "Reply | Pushed | None"]


def honest(request: Request, name: str) -> Reply:
    """Return what a client could reply."""
    if isinstance(request, Identify):
        return Identity(
            name=name, classes=CLASSES, channels=1, mean=[0.5], std=[0.5], sizes=SIZES, shifts=["original"], note="",
            role="both", corruptions=["fog", "snow"], stream_rounds=2, images=100, pixel_mean=50.0,
        )  # fmt: skip
    if isinstance(request, Train):
        moved = {key: value + value.dtype.type(1) / 64 for key, value in request.arrays.items()}
        return Trained(arrays=moved, train_loss=1.0, personal_validation_correct=5, global_loss=1.0, **COUNTS)
    if isinstance(request, Summarize):
        return Summarized(statistics=statistics(request), personal_validation_correct=5, **COUNTS)
    if isinstance(request, RefineRates):
        rates = {key: value + 0.01 for key, value in request.rates.items()}
        return RefinedRates(rates=rates, loss=1.0, correct=5, num_examples=10, seconds=0.5)
    if isinstance(request, Adapt):
        domain = {"bn.mean": np.zeros(3), "bn.variance": np.ones(3)} if request.send_normalization else None
        start = {"gamma": np.ones(3, np.float32)} if request.send_start else None
        counts: dict[str, Any] = {"correct": [1] * 10, "total": [1] * 10, "num_examples": 10, "corruption": 0}
        shared = {"gamma": np.full(3, 0.5 + request.round, np.float32)}
        return Adapted(shared=shared, normalization=domain, start=start, seconds=0.5, **counts)
    assert isinstance(request, Evaluate)
    results = [
        EvaluationResult(label=row.label, shift=shift, correct=5, total=10, seconds=0.5)
        for row in request.rows
        for shift in request.shifts
    ]
    return Evaluated(checked=10, leaked=0, results=results, num_examples=10)


def statistics(request: Summarize) -> dict[str, np.ndarray]:
    """Return statistics in range, of the shapes that the network has."""
    (features,) = {value.shape[1] for key, value in request.arrays.items() if key == "head.weight"}
    found = {
        "descriptor": np.full(features, 0.5), "dle": np.full(features, 0.5), "entropy_local": np.ones(1),
        "entropy_global": np.ones(1), "label_prior": np.full(10, 0.1), "confusion": np.full((10, 10), 0.01),
    }  # fmt: skip
    return {key: value for key, value in found.items() if key in request.wanted or key in list(found)[:4]}


def client(name: str, kind: type[Request] | None = None, attack: Attack | None = None) -> Behaviour:
    """Return a node that is honest, except that it answers requests of a kind by an attack."""

    def answer(message: Message) -> Pushed | None:
        request = request_of(message)
        reply: Reply | Pushed | None = honest(request, name)
        if attack is not None and (kind is None or type(request) is kind):
            assert isinstance(reply, Reply)
            reply = attack(message, reply)
        return pushed(reply_message(reply, message)) if isinstance(reply, Reply) else reply

    return answer
