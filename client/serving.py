"""A served model: network, the client's statistics and private values, and adapter, saved across restarts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtta.client.algorithms import LocalAlgorithm
from fedtta.client.evaluation import Neighbours, make_adapter
from fedtta.data import Federation
from fedtta.messages.arrays import Arrays
from fedtta.messages.requests import AdapterRow
from fedtta.models import PERSONAL_PREFIX, TwoHead, load_arrays, load_model, save_arrays, save_model
from fedtta.models.checkpoint import SIZES
from fedtta.models.preprocessing import Preprocessing
from fedtta.settings import Scalar, Settings
from fedtta.tta import Adapter, Statistics
from fedtta.tta.knn_per import Datastore, KNNPer
from fedtta.tta.registry import info

FORMAT, VERSION = "fedtta-served", "1"
NETWORK, REST = "network.safetensors", "rest.safetensors"
UNLABELLED = 1000  # images without labels that a baseline is computed from, at most


@dataclass(frozen=True)
class Baseline:
    """A client's usual predictions, against which the guard judges; they never leave the device.

    Parameters
    ----------
    shares : float64 [K]
        The larger of each class's share of the client's training samples and of the unadapted model's predictions.
    entropy : float
        Mean entropy of the unadapted model, nats.
    """

    shares: NDArray[np.float64]
    entropy: float = 0.0

    @classmethod
    def unknown(cls, classes: int) -> Baseline:
        """Return the value for a client without samples: all classes alike."""
        return cls(np.full(classes, 1 / classes))

    @property
    def known(self) -> bool:
        """Return whether it is that of samples, not the value for none."""
        return self.entropy != 0 or bool((self.shares != self.shares[0]).any())


@dataclass(frozen=True)
class Served:
    """A network, the client's statistics and private values, and the adapter that predicts with it.

    Parameters
    ----------
    row : AdapterRow
    network : TwoHead
        This object's own, on its device, as the adapter gets it: personal head included, base applied.
    spec : dict
        The arguments of `fedtta.models.build`.
    settings : dict
        Those that adapters' options follow from (group "adapter"), by field name.
    classes : tuple of str
    baseline : Baseline
    statistics : Statistics or None
    rates : mapping
        variant → module → α.
    datastore : Datastore or None
    chosen : mapping
        Options that validation data chose, where the row does not say otherwise.
    origin : str
        "<run>/<training>/<round>".
    """

    row: AdapterRow
    network: TwoHead
    spec: Mapping[str, Any]
    settings: Mapping[str, Scalar]
    classes: tuple[str, ...]
    baseline: Baseline
    statistics: Statistics | None = None
    rates: Mapping[str, Mapping[str, float]] | None = None
    datastore: Datastore | None = None
    chosen: Mapping[str, float] = field(default_factory=dict)
    origin: str = ""

    def build(self) -> Adapter:
        """Return a new adapter.

        Raises
        ------
        ValueError
            The adapter needs something that is not here, or takes a whole test set.
        """
        settings: dict[str, Any] = dict(self.settings)
        nothing = torch.empty(0)
        neighbours = None if self.datastore is None else Neighbours(self.datastore, nothing, nothing)
        row = replace(self.row, options={**self.chosen, **self.row.options})
        made = make_adapter(row, self.network, Settings(**settings), self.statistics, self.rates, neighbours)
        if made.takes_whole_set:
            raise ValueError(f"{self.row.label} takes a whole test set, which a stream never is")
        made.reset()
        return made

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return C, H, W of the images that the network takes."""
        size = int(self.spec.get("image_size", SIZES["image_size"]))
        return int(self.spec.get("in_channels", SIZES["in_channels"])), size, size

    @property
    def preprocessing(self) -> Preprocessing:
        """Return what prepares an image for the network; the default for models that do not say."""
        stated = self.spec.get("preprocessing")
        if stated is not None:
            return Preprocessing.from_dict(stated)
        channels, size, _ = self.shape
        return Preprocessing(size, channels)

    def digest(self) -> str:
        """Return the SHA-256 of all that predictions depend on, so that a state can tell its model."""
        total = hashlib.sha256(self._about().encode())
        state = {name: value.detach().cpu().numpy() for name, value in self.network.state_dict().items()}
        for name, value in sorted({**state, **self.arrays()}.items()):
            if value.dtype.kind == "f":  # counters, such as BatchNorm's, are not saved
                total.update(f"{name} {value.dtype} {value.shape}".encode())
                total.update(np.ascontiguousarray(value).tobytes())
        return total.hexdigest()

    def save(self, folder: Path) -> None:
        """Write two files to `folder`; ValueError if the network is not what its spec says."""
        save_model(folder / NETWORK, self.network, self.spec, personal=True)
        metadata = {"format": FORMAT, "version": VERSION, "about": self._about(), "digest": self.digest()}
        save_arrays(folder / REST, self.arrays(), metadata)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Served:
        """Read what `save` wrote.

        Raises
        ------
        FileNotFoundError, ValueError
            A file is missing, altered or of another version; the message names it.
        """
        arrays, metadata = load_arrays(folder / REST)
        if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{folder / REST}: not of format {FORMAT}, version {VERSION}")
        network, spec = load_model(folder / NETWORK)
        network = network.to(device).to(memory_format=torch.channels_last)
        about = json.loads(metadata["about"])
        served = cls(
            AdapterRow(**about["row"]),
            network,
            spec,
            about["settings"],
            tuple(about["classes"]),
            Baseline(arrays["usual.shares"], float(arrays["usual.entropy"])),
            Statistics.from_arrays(_part(arrays, "statistics."), device) if about["statistics"] else None,
            _rates(arrays, about["variants"]),
            _datastore(arrays, device),
            about["chosen"],
            about["origin"],
        )
        if served.digest() != metadata["digest"]:
            raise ValueError(f"{folder}: {NETWORK} and {REST} do not belong together")
        return served

    def _about(self) -> str:
        """Return what is not an array, as JSON."""
        row = {"label": self.row.label, "adapter": self.row.adapter, "options": dict(self.row.options)}
        about = {
            "row": {**row, "base": self.row.base},
            "spec": dict(self.spec),
            "settings": dict(self.settings),
            "classes": list(self.classes),
            "statistics": self.statistics is not None,
            "variants": list(self.rates or {}),
            "chosen": dict(self.chosen),
            "origin": self.origin,
        }
        return json.dumps(about, sort_keys=True, allow_nan=False)

    def arrays(self) -> Arrays:
        """Return the arrays other than the network's."""
        arrays: Arrays = {"usual.shares": self.baseline.shares, "usual.entropy": np.array(self.baseline.entropy)}
        if self.statistics is not None:
            arrays |= {f"statistics.{name}": value for name, value in self.statistics.to_arrays().items()}
        for variant, rates in (self.rates or {}).items():
            arrays |= {f"rates.{variant}.{module}": np.array(rate) for module, rate in rates.items()}
        if self.datastore is not None:
            arrays["datastore.features"] = _array(self.datastore.features)
            arrays["datastore.labels"] = _array(self.datastore.labels)
        return arrays


def serve(
    row: AdapterRow,
    network: TwoHead,
    spec: Mapping[str, Any],
    settings: Settings,
    classes: tuple[str, ...],
    baseline: Baseline,
    statistics: Statistics | None,
    rates: Mapping[str, Mapping[str, float]] | None,
    neighbours: Neighbours | None,
) -> Served:
    """Return what makes a row's adapter, after making it once; what follows from validation data is fixed by that.

    Raises
    ------
    ValueError
        As `Served.build`.
    """
    followed = {key.replace("-", "_"): value for key, value in settings.select("adapter").items()}
    made = make_adapter(row, network, settings, statistics, rates, neighbours)
    chosen = {"weight": made.weight} if isinstance(made, KNNPer) else {}
    variant = str(row.options.get("adapt", "all"))
    own = {variant: dict((rates or {})[variant])} if "rates" in info(row.adapter).needs else None
    store = neighbours.store if neighbours else None
    served = Served(row, network, dict(spec), followed, classes, baseline, statistics, own, store, chosen)
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
    given = {"gradients", "batchnorm"}
    if any(name.startswith(PERSONAL_PREFIX) for name in load_arrays(path)[0]):
        given.add("personal_head")
    if network.rotation_head is not None:
        given.add("rotation_head")
    if missing := sorted(info(row.adapter).needs - given):
        raise ValueError(
            f"adapter = {row.adapter} needs {', '.join(missing)}, which a federated training makes; "
            "there are adapters without: none, bn_adapt, tent, t3a"
        )
    if row.base == "personalised":
        raise ValueError("base = personalised: only a federated training personalizes a network")
    classes = tuple(map(str, spec.get("classes") or range(network.num_classes)))
    network = network.to(device).to(memory_format=torch.channels_last)
    settings = {key.replace("-", "_"): value for key, value in Settings().select("adapter").items()}
    served = Served(row, network, spec, settings, classes, Baseline.unknown(len(classes)), origin=f"file/{path.stem}/0")
    served.build()
    return served, digest


def missing_heads(adapter: str, algorithm: LocalAlgorithm) -> list[str]:
    """Return the heads that an adapter needs and a local algorithm does not train."""
    heads = {"personal_head", "residual_head", "rotation_head"}
    return sorted((info(adapter).needs & heads) - algorithm.heads)


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


def entropy(probabilities: NDArray[Any]) -> NDArray[np.float64]:
    """Return the entropy in nats of rows [B, K]; 0 ln 0 is 0."""
    p = np.asarray(probabilities, np.float64)
    return -(p * np.log(np.where(p > 0, p, 1))).sum(1)


def _array(value: Tensor | float) -> NDArray[Any]:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.array(value, np.float64)


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _rates(arrays: Arrays, variants: list[str]) -> dict[str, dict[str, float]] | None:
    found = {variant: _part(arrays, f"rates.{variant}.") for variant in variants}
    return {variant: {name: float(rate) for name, rate in rates.items()} for variant, rates in found.items()} or None


def _datastore(arrays: Arrays, device: torch.device) -> Datastore | None:
    tensors = {name: torch.tensor(value, device=device) for name, value in _part(arrays, "datastore.").items()}
    return Datastore(**tensors) if tensors else None
