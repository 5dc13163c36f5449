"""The client's network between requests: loading what was received, and what is kept as private state.

Named arrays of the private state of a training:
- `personal_head.*`: the personal head;
- `kept.<name>`: arrays of the network that the server does not aggregate (FedPer's head, FedBN's layers);
- `own.<name>`: private tensors of the local algorithm (Ditto's personal model);
- `trained-indices`: the images that the client has trained on;
- `statistics.*`: see `fedtta.client.statistics`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtta.client.algorithms.training import generator
from fedtta.messages.arrays import Arrays
from fedtta.models import PERSONAL_PREFIX, TwoHead
from fedtta.models.weights import COUNTER

KEPT = "kept."
OWN = "own."
TRAINED = "trained-indices"


def receive(
    model: TwoHead,
    arrays: Arrays,
    private: Mapping[str, NDArray[Any]],
    seed: int,
    aggregated: Collection[str] | None = None,
) -> None:
    """Load the received arrays, and kept ones where none was received; the personal head is kept or initialized.

    For arrays that are not `aggregated` (None: all are) a kept value takes precedence over a received one.

    Raises
    ------
    ValueError
        Arrays do not fit the network, or one was neither received nor kept.
    """
    kept = _part(private, KEPT)
    own = {} if aggregated is None else {name: value for name, value in kept.items() if name not in aggregated}
    together = {**kept, **arrays, **own}
    missing = [] if aggregated is None else [name for name in model.global_state() if name not in together]
    if missing:
        raise ValueError(f"global state does not fit: missing {missing}, which this client has not kept either")
    load_network(model, together)
    draw = generator(seed, "head")
    for name, value in personal_head(model).items():
        value.copy_(torch.tensor(private[name]) if name in private else _initial(model, value, draw))


def load_network(model: TwoHead, arrays: Arrays) -> None:
    """Load a whole `global_state` and switch to evaluation mode; ValueError if it does not fit.

    BatchNorm counts its batches from then on: those before may be another client's.
    """
    check_model(arrays, model)
    model.eval()  # a network just built is in training mode, where a look at it would move its statistics
    model.load_global_state(_borrowed(arrays))
    for name, value in model.named_buffers():
        if name.endswith(COUNTER):
            value.zero_()


def check_model(arrays: Mapping[str, NDArray[Any]], model: TwoHead) -> None:
    """Refuse what `TwoHead.load_global_state`, which compares names and shapes, does not check.

    Raises
    ------
    ValueError
        An array has another dtype than the network's, or a variance is negative; the message names it.
    """
    for name, own in model.global_state().items():
        if name not in arrays:
            continue
        value, dtype = arrays[name], str(own.dtype).removeprefix("torch.")
        if value.dtype != np.dtype(dtype):
            raise ValueError(f"{name}: dtype {value.dtype} does not fit {dtype}")
        if name.endswith("running_var") and (value < 0).any():
            raise ValueError(f"{name} holds negative variances")


def _borrowed(arrays: Arrays) -> dict[str, Tensor]:
    """Return arrays as tensors in the same memory, which is read only: a copy would take longer than loading it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is never written
        return {name: torch.from_numpy(value) for name, value in arrays.items()}


def own_tensors(private: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Return the private tensors that the local algorithm kept in its last round; empty in the first."""
    return {name: torch.tensor(value, device=device) for name, value in _part(private, OWN).items()}


def network_entries(state: Mapping[str, Tensor], aggregated: Collection[str], own: Mapping[str, Tensor]) -> Arrays:
    """Return the entries of a round: the arrays of a `global_state` that are not aggregated, and the algorithm's."""
    kept = {f"{KEPT}{name}": value for name, value in state.items() if name not in aggregated}
    return _arrays({**kept, **{f"{OWN}{name}": value for name, value in own.items()}})


def carried_entries(private: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return the entries of `network_entries` as an earlier round left them."""
    return {name: value for name, value in private.items() if name.startswith((KEPT, OWN))}


def head_entries(model: TwoHead, private: Mapping[str, NDArray[Any]], trained: NDArray[np.int64]) -> Arrays:
    """Return the personal head and the indices of all images trained on, including `trained`."""
    return {**_arrays(personal_head(model)), TRAINED: np.union1d(trained_indices(private), trained)}


def trained_indices(private: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Return the images that this client has trained on; none before its first round, and for a target."""
    return private.get(TRAINED, np.empty(0, np.int64))


def personal_head(model: TwoHead) -> dict[str, Tensor]:
    """Return the personal head's tensors (not copies) by `state_dict` name."""
    return model.personal_head.state_dict(prefix=PERSONAL_PREFIX)


def _initial(model: TwoHead, value: Tensor, draw: torch.Generator) -> Tensor:
    """Return torch's initial value of a linear layer, the same on every client, from the seed."""
    bound = model.feature_dim**-0.5
    return torch.empty(value.shape, dtype=value.dtype).uniform_(-bound, bound, generator=draw)


def _part(private: Mapping[str, NDArray[Any]], prefix: str) -> Arrays:
    return {name.removeprefix(prefix): value for name, value in private.items() if name.startswith(prefix)}


def _arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    return {name: value.detach().cpu().numpy().copy() for name, value in tensors.items()}
