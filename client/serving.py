"""A served model whose network runs in torch: made by a training's end or from a model file, saved and loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtta.client.adapters import AdapterContext, make_adapter
from fedtta.client.algorithms import LocalAlgorithm
from fedtta.client.evaluation import Neighbours
from fedtta.client.served import NETWORK, Baseline, Rest, ServedModel, entropy
from fedtta.data import Federation
from fedtta.messages.arrays import Arrays
from fedtta.messages.requests import AdapterRow
from fedtta.models import PERSONAL_PREFIX, TwoHead, load_arrays, load_model, save_model
from fedtta.models.accelerator import ahead
from fedtta.models.arrays import to_device
from fedtta.settings import Settings
from fedtta.tta import Statistics
from fedtta.tta.auto import Gains
from fedtta.tta.knn_per import Datastore, KNNPer
from fedtta.tta.registry import info, needs_of

UNLABELLED = 1000  # images without labels that a baseline is computed from, at most


class Served(ServedModel):
    """A served model whose network is a `TwoHead`; see `ServedModel`."""

    network: TwoHead

    def images(self, pixels: NDArray[np.float32]) -> Tensor:
        """Return images [B, C, H, W] as a tensor where the network lives."""
        return self.given(pixels).contiguous(memory_format=torch.channels_last)

    def given(self, value: NDArray[Any]) -> Tensor:
        """Return an array as a tensor where the network lives."""
        return to_device(torch.from_numpy(value), self.device)

    def ahead(self, received: bool = False) -> AbstractContextManager[None]:
        """Return a context whose work on a GPU goes before a training's; see `fedtta.models.accelerator.ahead`."""
        return ahead(self.device, received)

    @property
    def device(self) -> torch.device:
        """Return where the network lives."""
        return next(self.network.parameters()).device

    def network_arrays(self) -> Arrays:
        """Return the network's floating-point values by name."""
        state = self.network.state_dict()
        return {name: value.detach().cpu().numpy() for name, value in state.items() if value.is_floating_point()}

    def save_network(self, folder: Path) -> None:
        """Write the network's file; ValueError if it is not what its spec says."""
        save_model(folder / NETWORK, self.network, self.spec, personal=True)

    def _neighbours(self) -> Neighbours | None:
        nothing = torch.empty(0)
        return None if self.datastore is None else Neighbours(self.datastore, nothing, nothing)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Served:
        """Read what `save` wrote.

        Raises
        ------
        FileNotFoundError, ValueError
            A file is missing, altered or of another version; the message names it.
        """
        rest = Rest.load(folder)
        network, spec = load_model(folder / NETWORK)
        network = network.to(device).to(memory_format=torch.channels_last)
        statistics = None if rest.statistics is None else Statistics.from_arrays(rest.statistics, device)
        store = {name: torch.tensor(value, device=device) for name, value in rest.datastore.items()}
        datastore = Datastore(**store) if store else None
        served = cls(network=network, spec=spec, statistics=statistics, datastore=datastore, **rest.values)
        rest.check(served, folder)
        return served


def serve(
    row: AdapterRow,
    context: AdapterContext[TwoHead],
    gains: Gains | None,
    spec: Mapping[str, Any],
    classes: tuple[str, ...],
    baseline: Baseline,
) -> Served:
    """Return what makes a row's adapter, after making it once; what follows from validation data is fixed by that.

    Raises
    ------
    ValueError
        As `Served.build`.
    """
    followed = {key.replace("-", "_"): value for key, value in context.settings.select("adapter").items()}
    made = make_adapter(row, context, gains)
    chosen = {"weight": made.weight} if isinstance(made, KNNPer) else {}
    variant = str(row.options.get("adapt", "all"))
    own = {variant: dict((context.rates or {})[variant])} if "rates" in needs_of(row.adapter, row.options) else None
    store = context.neighbours.store if context.neighbours else None
    known = context.statistics, own, store, chosen, gains
    served = Served(row, context.model, dict(spec), followed, classes, baseline, *known)
    served.build()
    return served


def from_file(path: Path, row: AdapterRow, device: torch.device) -> tuple[Served, str]:
    """Return a model file (`fedtta.models.save_model`) with an adapter that needs no training, and the file's SHA-256.

    Raises
    ------
    FileNotFoundError, ValueError
        There is no such file, it cannot be read, or the adapter needs what only a federated training makes.
    """
    network, spec = load_model(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    given = {"gradients", "batchnorm", "clients"}
    if any(name.startswith(PERSONAL_PREFIX) for name in load_arrays(path)[0]):
        given.add("personal_head")
    if network.rotation_head is not None:
        given.add("rotation_head")
    if missing := sorted(info(row.adapter).needs - given):
        raise ValueError(
            f"adapter = {row.adapter} needs {', '.join(missing)}, which a federated training makes; "
            "there are adapters without: none and t3a, and with runtime = torch bn_adapt and tent"
        )
    if row.base == "personalised":
        raise ValueError("base = personalised: only a federated training personalizes a network")
    classes = tuple(map(str, spec.get("classes") or range(network.num_classes)))
    network = network.to(device).to(memory_format=torch.channels_last)
    settings = {key.replace("-", "_"): value for key, value in Settings().select("adapter").items()}
    served = Served(row, network, spec, settings, classes, Baseline.unknown(len(classes)), origin=f"file/{path.stem}/0")
    served.build()
    return served, digest


def missing_heads(row: AdapterRow, algorithm: LocalAlgorithm) -> list[str]:
    """Return the heads that a row's adapter needs, or a candidate that it names, and an algorithm does not train."""
    heads = {"personal_head", "residual_head", "rotation_head"}
    return sorted((needs_of(row.adapter, row.options) & heads) - algorithm.heads)


@torch.no_grad()
def baseline_predictions(
    network: TwoHead, federation: Federation, partition: int, device: torch.device, batch_size: int, labelled: bool
) -> Baseline:
    """Return a client's usual predictions under a network in evaluation mode.

    Predictions are those of its validation split, of its training split where that is empty, or of some test images
    where it has no labels at all.

    Parameters
    ----------
    labelled : bool
        Whether the client has labels; their shares count then, too.
    """
    split, images = federation.splits[partition], federation.images
    index = split.validation if len(split.validation) else split.train
    if not images.labelled:
        index = split.test[:: -(-len(split.test) // UNLABELLED) or 1]
    classes = len(images.classes)
    if not len(index):
        return Baseline.unknown(classes)
    parts = [index[begin : begin + batch_size] for begin in range(0, len(index), batch_size)]
    rows = [torch.softmax(network(images.batch(part, device)), 1).cpu().numpy() for part in parts]
    p = np.concatenate(rows)
    shares = np.bincount(p.argmax(1), minlength=classes) / len(p)
    if labelled and len(split.train):
        shares = np.maximum(shares, np.bincount(images.labels[split.train], minlength=classes) / len(split.train))
    return Baseline(shares, float(entropy(p).mean()))
