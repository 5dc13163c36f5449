"""Configuration of a device and its agent, set by the owner: `device.toml`, keys and the table `[policy]`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedtta.client.names import LEFT, TABLES, absolute_source, check_name
from fedtta.client.policy import Policy
from fedtta.models.exported import PRECISIONS
from fedtta.settings import Scalar, SettingsError, from_toml, parse_class_map, words
from fedtta.settings.fields import REQUIRED, by_field, check_fields, key_of, setting
from fedtta.settings.logs import FORMATS, LEVELS
from fedtta.settings.names import check_source, is_loopback
from fedtta.settings.schema import check_device

#: Keys that hold a path; a relative one is relative to the TOML file.
PATHS = ("state_dir", "data_dir", "model", "certificate", "key", "client_ca")
#: Keys that only a TCP address has.
TLS = ("certificate", "key", "client_ca")
UNIX = "unix:"
RUNTIMES = ("torch", "onnx")
OF_NETWORK = ("block",)  # options of adapters whose range the network decides
PRIVATE = "private"  # folder in `state-dir` for the private state of trainings
LAST_PORT = 65535


@dataclass(frozen=True)
class Limits:
    """Limits of the guard; see `fedtta.client.agent.guard`.

    Parameters
    ----------
    window : int
        Samples in the window.
    margin : float
        Share of a window of degenerate samples whose prediction may differ from the unadapted one.
    retry : int
        Samples for which the guard holds the adapter before it is tried again.
    collapse_share : float
        One class's share of the adapted predictions that counts as a collapse.
    one_class : float
        One class's share of the unadapted predictions, or the share of constant images, that is degenerate.
    low_entropy, high_entropy : float
        Mean entropy, as a share of ln K, that is close to zero, and that is noise.
    least_batch : int
        Smaller batches are degenerate for methods defined per batch.
    """

    window: int = 128
    margin: float = 0.05
    retry: int = 512
    collapse_share: float = 0.9
    one_class: float = 0.6
    low_entropy: float = 0.02
    high_entropy: float = 0.8
    least_batch: int = 8


@dataclass(frozen=True)
class Acceptance:
    """Limits of a new model's check; see `fedtta.client.agent.candidate`.

    Parameters
    ----------
    margin : float
        By how much its accuracy may be below that of the served model.
    agreement : float
        Least share of samples without labels on which both predict the same class.
    one_class : float
        One class's share of its predictions beyond which it is refused.
    """

    margin: float = 0.05
    agreement: float = 0.3
    one_class: float = 0.9


@dataclass(frozen=True)
class AgentConfig:
    """All keys of an agent, validated on construction; a key is the field's name with hyphens.

    Raises
    ------
    SettingsError
        A value has the wrong type or lies outside what is allowed; the message names the key.
    """

    # Identity of the client
    name: str = setting(
        REQUIRED, "the client's name: letters, digits, '.', '_', '-'; '0' to 'N-1' of a divided data set"
    )
    state_dir: str = setting(REQUIRED, "folder of the agent's state; one agent per folder")
    data: str = setting("", "its own data, e.g. 'folder:/data/site-a'; empty: its part of the run's data set")
    class_map: str = setting("", "class names of its data that the run calls otherwise: 'pneumo=pneumonia;...'")
    role: str = setting("", "what the client does; empty: what its data allow", ("", "both", "source", "target"))
    data_dir: str = setting("", "folder of data sets; empty: the environment variable FEDTTA_DATA")
    device: str = setting("auto", "auto, cpu, cuda or cuda:<index>")

    # What it predicts with
    runtime: str = setting(
        "torch", "what runs the network: torch, or onnx, lighter for adapters that allow it", RUNTIMES
    )
    precision: str = setting("float32", "of the network under runtime = onnx; int8 needs data", PRECISIONS)
    adapter: str = setting("fedthe", "test-time adaptation, with options: 'fedthe[beta=0.3]'")
    base: str = setting("global", "network that the adapter gets", ("global", "personalised"))
    training: str = setting("", "training whose model is served; empty: the first one of a run that fits the adapter")

    model: str = setting("", "model file to serve without a federation; empty: trainings bring the model")
    max_megapixels: float = setting(100.0, "larger images are skipped in its data and refused in requests", above=0)
    max_skipped: float = setting(
        -1.0, "share of its data that may be unusable in a run; -1: what the run says", low=-1, high=1
    )
    image_cache_mb: int = setting(0, "memory for images of its data, MiB; 0: what the run says", low=0)

    # A new model; see `fedtta.client.agent.candidate`
    accept_margin: float = setting(0.05, "by how much its accuracy may be below the served model's", low=0, high=1)
    accept_agreement: float = setting(0.3, "least agreement with the served model, without labels", low=0, high=1)
    accept_one_class: float = setting(0.9, "one class's share of its predictions that is refused; 1: none", above=0.5)
    shadow_samples: int = setting(0, "samples that it predicts beside the served model before it is promoted", low=0)
    approval: bool = setting(False, "whether it waits for the operator's approval")
    models_kept: int = setting(3, "models on disk, the served one included", low=1)
    log_mb: int = setting(10, "size at which <state-dir>/agent.log is rotated, MiB", low=1)
    log_format: str = setting("text", "lines on stderr: text for people, json for programs", FORMATS)
    log_level: str = setting("info", "least level of lines on stderr", LEVELS)

    # Addresses and limits of the sockets
    listen: str = setting("", "address of the predictor; empty: unix:<state-dir>/agent.sock")
    relay: str = setting("", "address for the Flower ClientApp; empty: unix:<state-dir>/relay.sock")
    relay_group: str = setting("", "group of the SuperNode's user, which may connect to relay; empty: this user only")
    metrics: str = setting("", "address of the metrics for Prometheus, e.g. '127.0.0.1:9464'; empty: none")
    certificate: str = setting("", "PEM file of this server's certificate (TCP only)")
    key: str = setting("", "PEM file of its private key (TCP only)")
    client_ca: str = setting("", "PEM file of the authority that signs clients' certificates (TCP only)")
    message_limit_mb: int = setting(64, "largest message of the predictor, MiB", low=1, high=1024)
    deadline: float = setting(30.0, "seconds for a request to wait and be predicted", above=0)
    max_streams: int = setting(64, "concurrent streams of predictions", low=1)
    queue_limit: int = setting(64, "waiting requests, at most; others are refused as 'busy'", low=1)
    batch_limit: int = setting(256, "samples of waiting requests that are joined into one batch", low=1)

    # State
    save_every_samples: int = setting(256, "samples after which the adapter's state is saved", low=1)
    save_every_seconds: float = setting(30.0, "seconds after which unsaved state is saved", above=0, high=1e9)
    snapshots_kept: int = setting(3, "snapshots of the adapter's state", low=1)
    runs_kept: int = setting(4, "runs whose private state is kept; older ones cannot be resumed", low=1)

    # The guard against collapse; see `fedtta.client.agent.guard`
    guard: bool = setting(True, "watch the adapter, hold it or roll it back")
    guard_window: int = setting(128, "samples in the guard's window", low=8)
    guard_margin: float = setting(0.05, "share of degenerate samples that may be predicted adapted", low=0, high=1)
    guard_retry: int = setting(512, "samples predicted unadapted before the adapter is tried again", low=1)
    guard_collapse_share: float = setting(0.9, "one class's share of adapted predictions that is a collapse", above=0.5)
    guard_one_class: float = setting(0.6, "one class's share of unadapted predictions that is degenerate", above=0)
    guard_low_entropy: float = setting(0.02, "mean entropy, as a share of ln K, that is close to zero", low=0, high=1)
    guard_high_entropy: float = setting(0.8, "mean unadapted entropy, as a share of ln K, that is noise", above=0)
    guard_least_batch: int = setting(8, "smaller batches are degenerate for methods defined per batch", low=1)

    # What a run may ask for: the table [policy]
    policy: Policy = dataclasses.field(default_factory=Policy, metadata={"help": "what a run may ask of the device"})

    def __post_init__(self) -> None:
        """Check every key, then combinations of keys."""
        check_fields(self)
        if -1 < self.max_skipped < 0:
            raise SettingsError(f"max-skipped = {self.max_skipped}: allowed are -1 and 0 to 1")
        check_name(self.name)
        if self.data:
            check_source(self.data)
        parse_class_map(self.class_map)
        if self.class_map and not self.data:
            raise SettingsError("class-map: allowed with data only")
        if not self.state_dir:
            raise SettingsError("state-dir = '': allowed is a folder")
        check_device(self.device)
        if self.precision != "float32" and not (self.runtime == "onnx" and self.data):
            raise SettingsError(
                f"precision = {self.precision!r}: allowed with runtime = onnx and data of its own, which calibrate it"
            )
        self._check_addresses()
        self._check_adapter()

    def _check_addresses(self) -> None:
        if not self.relay_address.startswith(UNIX):
            raise SettingsError(f"relay = {self.relay!r}: allowed is unix:<path>, for federated requests stay local")
        given = [key_of(name) for name in TLS if getattr(self, name)]
        if self.metrics:
            self._check_metrics(given)
        if self.listen_address.startswith(UNIX):
            if given and not self.metrics:
                raise SettingsError(f"{', '.join(given)}: allowed with listen or metrics = <host>:<port> only")
            if self.listen_address == self.relay_address:
                raise SettingsError(f"relay = {self.relay!r}: the same as listen; each needs its own socket")
        elif not re.fullmatch(r".+:\d+", self.listen_address):
            raise SettingsError(f"listen = {self.listen!r}: allowed are unix:<path> and <host>:<port>")
        elif missing := [key_of(name) for name in TLS if key_of(name) not in given]:
            raise SettingsError(f"listen = {self.listen!r}: TCP needs mutual TLS; set {', '.join(missing)}")

    def _check_metrics(self, given: list[str]) -> None:
        """Refuse an address of the metrics that is none, or that others reach without certificates."""
        match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:]+):(\d{1,5})", self.metrics)
        if match is None or int(match[2]) > LAST_PORT:
            raise SettingsError(f"metrics = {self.metrics!r}: allowed is <host>:<port>")
        if given and (missing := [key_of(name) for name in TLS if key_of(name) not in given]):
            raise SettingsError(f"metrics = {self.metrics!r}: mutual TLS needs {', '.join(missing)}, too")
        if not given and not is_loopback(match[1]):
            keys = ", ".join(key_of(name) for name in TLS)
            raise SettingsError(
                f"metrics = {self.metrics!r}: allowed without TLS is 127.0.0.1, [::1] or localhost; "
                f"other addresses need mutual TLS: set {keys}"
            )

    def _check_adapter(self) -> None:
        """Refuse an adapter that cannot run here, or one that chooses among others that cannot."""
        if self.runtime == "torch" and find_spec("torch") is None:
            raise SettingsError("runtime = 'torch': PyTorch is not installed here; runtime = 'onnx' does without it")
        from fedtta.tta.registry import info
        from fedtta.tta.statistics import PERSONALISED

        name = self.adapter_name
        self._check_light(name)
        options = self.adapter_options  # raises for what does not exist
        for candidate in str(options.get("among", "")).split("+"):
            self._check_light(candidate)
        self._check_runs(name, options)
        learned = sorted(info(name).needs & PERSONALISED)
        if learned and self.role == "target" and not self.model:  # a model file may have them
            raise SettingsError(
                f"adapter = {self.adapter!r}: with role = 'target' there are no labels to learn {', '.join(learned)} "
                "from"
            )
        if "candidates" in info(name).needs:
            self._check_candidates(name, options)
        if options:
            self._check_ranges(name, options)

    def _check_candidates(self, name: str, options: Mapping[str, Any]) -> None:
        """Refuse an adapter that chooses among others where it, or one of these, cannot be calibrated."""
        from fedtta.tta.registry import candidates_of, info

        try:
            candidates = candidates_of(name, options)
        except ValueError as error:
            raise SettingsError(f"adapter = {self.adapter!r}: {error}") from error
        for candidate in candidates:
            self._check_runs(candidate, {})
            if "datastore" in info(candidate).needs:
                raise SettingsError(
                    f"adapter = {self.adapter!r}: {candidate} cannot be a candidate of an agent, which keeps no "
                    "samples to choose its weight on"
                )

    def _check_light(self, name: str) -> None:
        """Refuse an adapter that the runtime cannot run, before its class is imported, which needs torch."""
        from fedtta.tta.registry import LIGHT, PATHS

        if self.runtime == "onnx" and name in PATHS and name not in LIGHT:
            raise SettingsError(
                f"adapter = {self.adapter!r}: {name} adapts the network itself, which runtime = onnx has as a fixed "
                f"graph; allowed there are {', '.join(LIGHT)}"
            )

    def _check_runs(self, name: str, options: Mapping[str, Any]) -> None:
        """Refuse an adapter that does not exist or that needs a whole test set."""
        from fedtta.tta.registry import info

        try:
            adapter = info(name)
        except ValueError as error:
            raise SettingsError(f"adapter = {self.adapter!r}: {error}") from error
        if whole_set := adapter.whole_set:
            option, value = whole_set
            if options.get(option, adapter.options[option][1]) == value:
                raise SettingsError(
                    f"adapter = {self.adapter!r}: {option}={value} needs a whole test set, but requests are a stream"
                )

    def _check_ranges(self, name: str, options: Mapping[str, Any]) -> None:
        """Refuse options out of range, by a trial on a small network; without torch under runtime = onnx."""
        from fedtta.tta.trial import check_options

        network: Any
        if self.runtime == "onnx":
            from fedtta.models.exported import ExportedNetwork, Linear

            head = Linear(np.zeros((2, 4), np.float32))
            network = ExportedNetwork(Path(), cast(Any, None), head, head, features_nonnegative=True)
        else:
            from fedtta.models import build

            network = build("cnn", 2, image_size=16, norm="batch", seed=0)
        known = {option: value for option, value in options.items() if option not in OF_NETWORK}
        try:
            check_options(name, network, 2, **known)
        except ValueError as error:
            raise SettingsError(f"adapter = {self.adapter!r}: {error}") from error

    @property
    def adapter_name(self) -> str:
        """Return the adapter's name."""
        return self._words()[0]

    @property
    def adapter_options(self) -> dict[str, Any]:
        """Return the adapter's options, typed."""
        from fedtta.tta.registry import parse_options

        try:
            return parse_options(*self._words())
        except ValueError as error:  # which lists the known ones
            raise SettingsError(f"adapter = {self.adapter!r}: {error}") from error

    def _words(self) -> tuple[str, dict[str, str]]:
        """Return name and options of `adapter` as they are written."""
        match = re.fullmatch(r"([\w.-]+)(?:\[(.*)\])?", self.adapter)
        name = match[1] if match else self.adapter
        return name, words((match[2] if match else "") or "", f"adapter: {name}")

    @property
    def state_folder(self) -> Path:
        """Return `state-dir`."""
        return Path(self.state_dir).expanduser()

    @property
    def private_folder(self) -> Path:
        """Return the folder of the private state of all runs."""
        return self.state_folder / PRIVATE

    @property
    def index(self) -> Path:
        """Return the file that remembers the scans of its data, the same as without an agent."""
        from fedtta.client.own import index_path

        return index_path(self.state_folder, self.name)

    @property
    def limits_of_data(self) -> dict[str, Scalar]:
        """Return what it sets of a run's settings of its own data, by key."""
        given: dict[str, Scalar] = {
            "max-megapixels": self.max_megapixels,
            "max-skipped": self.max_skipped,
            "image-cache-mb": self.image_cache_mb,
        }
        return {key: value for key, value in given.items() if value != LEFT.get(key)}

    @property
    def listen_address(self) -> str:
        """Return the predictor's address: "unix:<path>" or "<host>:<port>"."""
        return self.listen or f"{UNIX}{self.state_folder / 'agent.sock'}"

    @property
    def relay_address(self) -> str:
        """Return the address for the ClientApp, "unix:<path>"."""
        return self.relay or f"{UNIX}{self.state_folder / 'relay.sock'}"

    @property
    def limits(self) -> Limits:
        """Return the limits of the guard."""
        return Limits(**{field.name: getattr(self, f"guard_{field.name}") for field in dataclasses.fields(Limits)})

    @property
    def acceptance(self) -> Acceptance:
        """Return the limits of a new model's check."""
        return Acceptance(self.accept_margin, self.accept_agreement, self.accept_one_class)

    @classmethod
    def from_toml(cls, path: str | Path) -> AgentConfig:
        """Read a TOML file.

        Raises
        ------
        SettingsError
            The file is missing or not TOML, a key is unknown or missing, or a value is not allowed; the message names
            the file and the key.
        """
        path = Path(path)
        try:
            return cls.from_mapping(from_toml(path, TABLES), path.parent)
        except SettingsError as error:
            text = str(error)
            raise SettingsError(text if str(path) in text else f"{path}: {text}") from error

    @classmethod
    def from_mapping(cls, content: Mapping[str, Any], folder: Path = Path()) -> AgentConfig:
        """Build a config from flat hyphenated keys and the table `policy`; relative paths are relative to `folder`."""
        values = by_field(cls, content)
        if "policy" in values:
            if not isinstance(values["policy"], Mapping):
                raise SettingsError(f"policy = {values['policy']!r}: allowed is a table [policy]")
            values["policy"] = Policy.from_mapping(values["policy"])
        for name in (*PATHS, "data", "listen", "relay"):
            if isinstance(text := values.get(name), str) and text:
                try:
                    values[name] = _absolute(name, text, folder)
                except RuntimeError as error:  # "~" of no user
                    raise SettingsError(f"{key_of(name)} = {text!r}: {error}") from error
        return cls(**values)


def _absolute(name: str, text: str, folder: Path) -> str:
    """Return the value of a key with its path, if it holds one, relative to `folder`."""
    if name == "data":
        return absolute_source(text, folder)
    if name in PATHS:
        return str(folder / Path(text).expanduser())
    return f"{UNIX}{folder / Path(text.removeprefix(UNIX)).expanduser()}" if text.startswith(UNIX) else text
