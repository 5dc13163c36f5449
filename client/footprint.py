"""The memory that a request would take, estimated before any of it is taken.

A network is built without memory (torch's device "meta") and sees one image of no content, so that its size and that of
its activations are known from the settings alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fedtta.messages.requests import AdapterRow
from fedtta.models import MODELS, without_weights
from fedtta.models.info import COMMON_OPTIONS
from fedtta.models.libraries import OPTIONS, is_external, make_network
from fedtta.models.registry import check_build
from fedtta.settings import Settings, assignments
from fedtta.tta.registry import info

#: Copies of a network's values: weights, gradients, two moments of Adam, what was received, a copy for serving.
COPIES = 6
#: Activations of a training step: kept for the gradient, and half as much again for the gradient itself.
TRAINING = 1.5
#: Activations of a pass without gradient: input and output of the largest layer, and one more.
PASS = 3
#: Images of a divided data set, of which only "digits" is known to have fewer.
DIVIDED, DIGITS = 60_000, 1_797
NUMBER = 4  # bytes of a float32


@dataclass(frozen=True)
class Footprint:
    """A network's memory, in bytes.

    Parameters
    ----------
    values : int
        Of its parameters and buffers.
    activations, largest : int
        Of all layers' outputs for one image, and of the largest of them.
    """

    values: int
    activations: int
    largest: int


def memory(settings: Settings, rows: Sequence[AdapterRow], own_data: bool) -> int:
    """Return an estimate, in bytes, of the memory that a request takes beside what the process has.

    Parameters
    ----------
    settings : Settings
        Of the request.
    rows : sequence of AdapterRow
        The adapters that it runs.
    own_data : bool
        Whether the images are the device's own, which are read when they are needed.

    Raises
    ------
    ValueError
        There is no such network, or its options do not fit.
    """
    network = footprint(settings)
    image = settings.channels * settings.image_size**2
    divided = (DIGITS if settings.dataset == "digits" else DIVIDED) * image
    kept = settings.image_cache_mb << 20 if own_data else divided
    trained = max(settings.batch_size, settings.rates_batch_size)
    adapted = settings.adapt_batch_size * max((_growth(row) for row in rows), default=1.0)
    streamed = settings.stream_batch if settings.collaborations else 0
    steps = TRAINING * max(trained, adapted, streamed) * (network.activations + NUMBER * image)
    passes = PASS * settings.eval_batch_size * (network.largest + NUMBER * image)
    return int(COPIES * network.values + kept + max(steps, passes))


def footprint(settings: Settings) -> Footprint:
    """Return the footprint of a run's network; raises as `memory`."""
    options = without_weights(assignments(settings.model_options, "model-options"))
    classes = len(settings.classes.split(",")) if settings.classes else 10
    return _footprint(settings.model, classes, settings.channels, settings.image_size, json.dumps(options))


@lru_cache(maxsize=16)
def _footprint(name: str, classes: int, channels: int, size: int, options: str) -> Footprint:
    chosen: dict[str, Any] = json.loads(options)
    complete = check_build(name, classes, channels, size, chosen)
    with torch.device("meta"):
        if is_external(name):
            library = {key: value for key, value in complete.items() if key not in (*COMMON_OPTIONS, *OPTIONS)}
            network = make_network(name, (channels, size, size), classes, library, False).network
            heads = 0
        else:
            network, features = MODELS[name].encoder(
                channels, size, **{key: complete[key] for key in MODELS[name].own_options}
            )
            heads = 2 * classes * (features + 1) * NUMBER
    outputs = _outputs(network, torch.zeros(1, channels, size, size, device="meta"))
    values = sum(value.numel() * value.element_size() for value in network.state_dict().values())
    return Footprint(values + heads, sum(outputs), max(outputs, default=0))


@torch.no_grad()
def _outputs(network: nn.Module, x: Tensor) -> list[int]:
    """Return the bytes of each layer's output for x."""
    sizes: list[int] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel() * NUMBER)

    layers = [layer for layer in network.modules() if not any(layer.children())]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        network.eval()(x)
    except (NotImplementedError, RuntimeError) as error:  # what has no meaning without values
        raise ValueError(f"the memory of its network cannot be estimated: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return sizes


def _growth(row: AdapterRow) -> float:
    """Return how many times the usual memory and time an adapter takes by its options, such as `views`."""
    usual = info(row.adapter).options
    grown = 1.0
    for name, value in row.options.items():
        default = usual[name][1] if name in usual and name != "seed" else None
        if isinstance(value, int) and isinstance(default, int) and not isinstance(value, bool):
            grown *= max(1.0, value / max(default, 1))
    return grown
