"""Replies as they leave the client: clipped, noisy and masked as the run says, and trained models as updates.

Noise comes before rounding, so that what leaves follows from noisy values alone, the residual as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedtta.client.privacy import protect
from fedtta.messages.replies import Reply, Trained
from fedtta.messages.requests import Request, Train
from fedtta.messages.updates import decode, encode
from fedtta.privacy.gaussian import Privacy

if TYPE_CHECKING:
    from fedtta.client.device import Device

#: Begins the key of a training's residual in the state that is as large as the network.
RESIDUAL = "residual-"


def outgoing(device: Device, request: Request, reply: Reply) -> Reply:
    """Return a reply as it leaves; a trained model in the format that the request asks for.

    Raises
    ------
    ValueError
        As `fedtta.client.privacy.protect`.
    FloatingPointError
        The model has changed by more than the format can hold.
    """
    reply = protect(device, request, reply)
    if not isinstance(request, Train) or request.update_format == "float32":
        return reply
    assert isinstance(reply, Trained), "the reply to a training request"
    key, how, sent = f"{RESIDUAL}{request.task.training}", request.update_format, request.expected
    update = encode(how, sent, reply.arrays, device.memory.load(key, request.round - 1) or {})
    counts: dict[str, Any] = {}
    if update.residual and "model" not in Privacy.parse(device.settings.differential_privacy).mechanisms:
        decoded = decode(how, sent, update.arrays, update.scales)
        counts["trained_correct"] = device.correct_after(request, reply.arrays)
        counts["decoded_correct"] = device.correct_after(request, decoded)
    if update.residual:
        device.memory.save(key, request.round, update.residual)  # last: a failed round leaves no trace
    return replace(reply, arrays=update.arrays, scales=update.scales or None, **counts)
