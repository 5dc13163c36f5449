"""Aggregation of many replies, corruptions and partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedtta.benchmarks.speed.measurement import Measured, Ratio, least_seconds
from fedtta.data import CORRUPTIONS, corrupt
from fedtta.data.partition import SCHEMES, partition
from fedtta.messages.flower import allow_messages, bytes_record, held_record
from fedtta.models import build
from fedtta.strategies import FedAvg

REPLIES = 1000
IMAGES = 60_000
CLIENTS = 1000


def aggregation(quick: bool) -> Measured:
    """Time FedAvg over many replies of the papers' CNN, beside adding up the same numbers in numpy."""
    allow_messages()
    count = 20 if quick else REPLIES
    network = {name: value.numpy() for name, value in build("cnn", 10, seed=0).global_state().items()}
    sizes = np.arange(1, count + 1)

    def replies(pack: Callable[[dict[str, Any]], ArrayRecord]) -> list[Message]:
        metrics = [MetricRecord({"num-examples": int(size)}) for size in sizes]
        return [_reply(pack(network), one) for one in metrics]

    def plain() -> None:
        total = {name: np.zeros_like(value) for name, value in network.items()}
        for size in sizes:
            for name, value in network.items():
                total[name] += value * np.float32(size / sizes.sum())

    base, found = least_seconds(plain), []
    for name, pack in (("by reference", held_record), ("as they are sent", bytes_record)):
        messages = replies(pack)
        took = least_seconds(lambda messages=messages: FedAvg().aggregate_train(1, messages))  # type: ignore[misc]
        found.append(Ratio(f"FedAvg of {count} replies, {name}", took / base, "s", took, base, "adding up in numpy"))
    return Measured(found)


def _reply(arrays: ArrayRecord, metrics: MetricRecord) -> Message:
    request = Message(RecordDict(), dst_node_id=1, message_type="train")
    request.metadata.__dict__["_message_id"] = "1"
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=request)


def data_path(quick: bool) -> Measured:
    """Time corruptions of a batch beside copying it, and partitions beside shuffling the labels."""
    count = 16 if quick else 512
    images = torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    copied, found = least_seconds(lambda: images.clone()), []
    for name in CORRUPTIONS:
        took = least_seconds(lambda name=name: corrupt(images, name, 3, 0))  # type: ignore[misc]
        what = f"{name}, {count / took:,.0f} images/s"
        found.append(Ratio(what, took / copied, "s", took, copied, f"a copy of {count} images"))
    total, clients = (600, 10) if quick else (IMAGES, CLIENTS)
    labels = np.random.default_rng(0).integers(10, size=total)
    shuffled = least_seconds(lambda: np.random.default_rng(0).permutation(labels))
    for scheme in [name for name, one in SCHEMES.items() if not one.by_domain]:
        took = least_seconds(lambda scheme=scheme: partition(labels, clients, scheme, alpha=1.0), 1)  # type: ignore[misc]
        what = f"{scheme}: {total:,} images to {clients:,} clients"
        found.append(Ratio(what, took / shuffled, "s", took, shuffled, "a shuffle"))
    return Measured(found)
