"""A served model, whose network runs in torch (`fedtta.client.serving`) or onnxruntime (`fedtta.client.agent.light`).

Two files hold it, `NETWORK` and `REST`; its digest is that of all that predictions depend on. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtta.client.adapters import AdapterContext, make_adapter
from fedtta.messages.arrays import Arrays
from fedtta.messages.requests import AdapterRow
from fedtta.models import Preprocessing, load_arrays, save_arrays
from fedtta.settings import Scalar, Settings
from fedtta.tta import Adapter, Statistics
from fedtta.tta.arrays import softmax_of, to_host
from fedtta.tta.auto import Gains
from fedtta.tta.estimates import Calibration

if TYPE_CHECKING:
    from fedtta.tta.knn_per import Datastore

FORMAT, VERSION = "fedtta-served", "1"
NETWORK, REST = "network.safetensors", "rest.safetensors"
CHANNELS, IMAGE_SIZE = 3, 32  # the defaults of `fedtta.models.build`


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
class ServedModel(ABC):
    """A network, the client's statistics and private values, and the adapter that predicts with it.

    Parameters
    ----------
    row : AdapterRow
    network : TwoHead or ExportedNetwork
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
    gains : Gains or None
        What validation data say about the candidates of an adapter that chooses among others.
    origin : str
        "<run>/<training>/<round>".
    """

    row: AdapterRow
    network: Any
    spec: Mapping[str, Any]
    settings: Mapping[str, Scalar]
    classes: tuple[str, ...]
    baseline: Baseline
    statistics: Statistics | None = None
    rates: Mapping[str, Mapping[str, float]] | None = None
    datastore: Datastore | None = None
    chosen: Mapping[str, float] = field(default_factory=dict)
    gains: Gains | None = None
    origin: str = ""

    @abstractmethod
    def images(self, pixels: NDArray[np.float32]) -> Any:
        """Return images [B, C, H, W] as the network takes them."""

    @abstractmethod
    def given(self, value: NDArray[Any]) -> Any:
        """Return an array of an adapter's state as the adapter takes it."""

    @abstractmethod
    def network_arrays(self) -> Arrays:
        """Return the network's floating-point values by name; counters, such as BatchNorm's, are not saved."""

    @abstractmethod
    def save_network(self, folder: Path) -> None:
        """Write the network's file, and what is kept beside it; ValueError if it is not what its spec says."""

    def moved(self, folder: Path) -> None:  # noqa: B027 (a network in memory needs no files)
        """Note that the model's files, which `save` has written to `folder`, are those to be read from now on."""

    def ahead(self, received: bool = False) -> AbstractContextManager[None]:
        """Return a context whose work on a GPU goes before a training's; see `fedtta.models.accelerator.ahead`.

        A network that does not run in torch has no such work.
        """
        return nullcontext()

    def build(self) -> Adapter:
        """Return a new adapter.

        Raises
        ------
        ValueError
            The adapter needs something that is not here, or takes a whole test set.
        """
        settings: dict[str, Any] = dict(self.settings)
        row = replace(self.row, options={**self.chosen, **self.row.options})
        known = Settings(**settings), self.statistics, self.rates, self._neighbours()
        made = make_adapter(row, AdapterContext(self.network, *known), self.gains)
        if made.takes_whole_set:
            raise ValueError(f"{self.row.label} takes a whole test set, which a stream never is")
        made.reset()
        return made

    def _neighbours(self) -> Any:
        """Return the client's memorized samples, if there are any that the adapter can take."""
        return None

    def unadapted(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the network's own probabilities [B, K] of images [B, C, H, W]."""
        return np.asarray(to_host(softmax_of(self.network(self.images(pixels)))), np.float32)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return C, H, W of the images that the network takes."""
        size = int(self.spec.get("image_size", IMAGE_SIZE))
        return int(self.spec.get("in_channels", CHANNELS)), size, size

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
        for name, value in sorted({**self.network_arrays(), **self.arrays()}.items()):
            if value.dtype.kind == "f":
                total.update(f"{name} {value.dtype} {value.shape}".encode())
                total.update(np.ascontiguousarray(value).tobytes())
        return total.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the model's files to `folder`; ValueError if the network is not what its spec says."""
        self.save_network(folder)
        metadata = {"format": FORMAT, "version": VERSION, "about": self._about(), "digest": self.digest()}
        save_arrays(folder / REST, self.arrays(), metadata)

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
        if self.gains:  # left out where there are none: models of former versions have the digests they had
            about["gains"] = [[name, one.offset, one.variance] for name, one in self.gains.of.items()]
            if self.gains.shares:
                about |= {"shares": list(self.gains.shares), "weights": list(self.gains.weights)}
        return json.dumps(about, sort_keys=True, allow_nan=False)

    def arrays(self) -> Arrays:
        """Return the arrays other than the network's."""
        arrays: Arrays = {"usual.shares": self.baseline.shares, "usual.entropy": np.array(self.baseline.entropy)}
        if self.statistics is not None:
            arrays |= {f"statistics.{name}": value for name, value in self.statistics.to_arrays().items()}
        for variant, rates in (self.rates or {}).items():
            arrays |= {f"rates.{variant}.{module}": np.array(rate) for module, rate in rates.items()}
        if self.datastore is not None:
            arrays["datastore.features"] = to_host(self.datastore.features)
            arrays["datastore.labels"] = to_host(self.datastore.labels)
        return arrays


@dataclass(frozen=True)
class Rest:
    """What a model's file `REST` holds, beside the statistics and the datastore, which are made where they are needed.

    Parameters
    ----------
    values : dict
        Arguments of `ServedModel` by name.
    statistics : dict or None
        Arrays; None: the model has none.
    datastore : dict
        Arrays; empty: the model has none.
    digest : str
        That of the model.
    """

    values: Mapping[str, Any]
    statistics: Arrays | None
    datastore: Arrays
    digest: str

    @classmethod
    def load(cls, folder: Path) -> Rest:
        """Read the file; FileNotFoundError or ValueError name one that is missing, altered or of another version."""
        arrays, metadata = load_arrays(folder / REST)
        if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{folder / REST}: not of format {FORMAT}, version {VERSION}")
        about = json.loads(metadata["about"])
        values = {
            "row": AdapterRow(**about["row"]),
            "settings": about["settings"],
            "classes": tuple(about["classes"]),
            "baseline": Baseline(arrays["usual.shares"], float(arrays["usual.entropy"])),
            "rates": _rates(arrays, about["variants"]),
            "chosen": about["chosen"],
            "gains": _gains(about),
            "origin": about["origin"],
        }
        statistics = _part(arrays, "statistics.") if about["statistics"] else None
        return cls(values, statistics, _part(arrays, "datastore."), metadata["digest"])

    def check(self, served: ServedModel, folder: Path) -> None:
        """Raise ValueError if a model read from `folder` is not that of the file."""
        if served.digest() != self.digest:
            raise ValueError(f"{folder}: {NETWORK} and {REST} do not belong together")


def version_of(origin: str, digest: str) -> str:
    """Return a model's version: "<origin>/<the first 8 digits of its digest>"."""
    return f"{origin}/{digest[:8]}"


def _gains(about: Mapping[str, Any]) -> Gains | None:
    """Return what a model's file says of candidates; models of former versions do not tell class shares."""
    of = {name: Calibration(*values) for name, *values in about.get("gains", [])}
    return Gains(of, tuple(about.get("shares", ())), tuple(about.get("weights", ()))) if of else None


def entropy(probabilities: NDArray[Any]) -> NDArray[np.float64]:
    """Return the entropy in nats of rows [B, K]; 0 ln 0 is 0."""
    p = np.asarray(probabilities, np.float64)
    return -(p * np.log(np.where(p > 0, p, 1))).sum(1)


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _rates(arrays: Arrays, variants: list[str]) -> dict[str, dict[str, float]] | None:
    found = {variant: _part(arrays, f"rates.{variant}.") for variant in variants}
    return {variant: {name: float(rate) for name, rate in rates.items()} for variant, rates in found.items()} or None
