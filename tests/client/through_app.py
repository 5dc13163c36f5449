"""Requests through the ClientApp's own dispatch, as Flower delivers them."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Context, RecordDict

from fedtta.client.app import app
from fedtta.messages.arrays import Arrays
from fedtta.messages.flower import from_content, to_content
from fedtta.messages.requests import Request
from fedtta.models import build
from fedtta.settings import Settings, to_json
from tests.flower import request as message_of

CLIENTS = 4
SETTINGS = Settings(
    dataset="digits", fraction=0.15, image_size=16, clients=CLIENTS, partition="iid", model="cnn", local_epochs=1,
    learning_rate=0.05, device="cpu", shifts="original,mixture",
)  # fmt: skip


def node(partition: Any = 1, clients: Any = CLIENTS, **config: Any) -> Context:
    """What Flower hands to a node's ClientApp in its simulation, with an empty run config."""
    numbers = {"partition-id": partition, "num-partitions": clients}
    given = {key: value for key, value in numbers.items() if value is not None}
    return Context(run_id=1, node_id=1, node_config={**given, **config}, state=RecordDict(), run_config={})


def about(settings: Settings = SETTINGS, run: str = "run1") -> dict[str, Any]:
    """What every request carries."""
    return {"settings": to_json(settings), "run": run}


def ask(context: Context, request: Request) -> Any:
    """Send a request to the ClientApp and return the typed reply."""
    kind = type(request).reply.kind
    content = app(message_of(kind=request.kind, content=to_content(request.to_record())), context).content
    return type(request).reply.from_record(from_content(kind, content))


def initial() -> Arrays:
    """A network's global state, as a server sends it first."""
    model = build("cnn", 10, image_size=16, seed=5)
    return {name: value.numpy() for name, value in model.global_state().items()}


def bits(reply: Any) -> Any:
    """Everything in a reply but its times."""
    plain = reply.to_record()
    arrays = {key: {n: np.asarray(a).tobytes() for n, a in one.items()} for key, one in plain.arrays.items()}
    values = {key: value for key, value in plain.values.items() if key != "seconds"}
    for one in values.get("results", []):
        del one["seconds"]
    return arrays, values
