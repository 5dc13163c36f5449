"""Networks that cells start from: kept ones are found and checked, missing ones are trained and labelled."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedtta.benchmarks.provenance import BEFORE, RESULTS, differing, provenance, provenance_of_run
from fedtta.benchmarks.tables.pretrained import check_pretrained, read_label, write_label
from fedtta.benchmarks.tables.protocol import Cell, Network, Protocol
from fedtta.benchmarks.tables.results import UNRECORDED, cell_path, read_cell
from fedtta.benchmarks.tables.runs import RUN, digest, trained
from fedtta.benchmarks.tables.training import CENTRAL, source_parts, train_centrally, train_source
from fedtta.client.resources import federation_of
from fedtta.data import Federation
from fedtta.models import save_model
from fedtta.server.fork import LATER
from fedtta.server.methods import plan
from fedtta.server.rates import save_rates
from fedtta.server.report import METRICS_FILE, read_results
from fedtta.settings import Settings, SettingsError
from fedtta.settings.files import write_atomically

NETWORK_FILE = "model.safetensors"


def of_seed(settings: Settings, seed: int) -> Settings:
    """Return the settings of one seed; {seed} in `init` stands for it."""
    return settings.replace(seed=seed, init=settings.init.replace("{seed}", str(seed)))


def network_path(network: Network, seed: int, out: Path) -> Path:
    """Return the file of a network in `out`, or a fitting one among the committed results, or a new one in `out`.

    Raises
    ------
    SettingsError
        The file in `out` was trained with other settings.
    """
    name = network.file.format(seed=seed)
    for folder in dict.fromkeys((out, RESULTS)):
        if (folder / name).exists():
            other = _other_training(folder / name, network, seed, out)
            if not other:
                return folder / name
            if folder == out:
                raise SettingsError(f"{folder / name} was trained with other settings ({', '.join(other)})")
    return out / name


def initial_settings(
    protocol: Protocol, cell: Cell, seed: int, out: Path, folder: Path, console: Console
) -> tuple[Settings, dict[str, Any]]:
    """Return a cell's settings with the network and the rates that it starts from, and what its results say of them.

    A missing network is trained. The network must not have been trained on test samples of the cell.

    Raises
    ------
    SettingsError, RunError
        As `check_pretrained` and `trained`, or the cell whose rates are used has not been run.
    """
    settings, start = of_seed(cell.settings, seed), cell.start
    path = _initial_network(protocol, cell, settings, out)
    if path is None:
        return settings, {}
    if start.network:
        path = kept_or_trained(protocol.networks[start.network], seed, out, folder, console)
    settings = settings.replace(init=str(path))
    federation = None if settings.collaborations else load_federation(settings)
    label = check_pretrained(path, settings, federation)
    content = {"kind": label["kind"], "sha256": _sha256(path)}
    content |= {key: label[key] for key in ("validation_accuracy", "accuracy", "recipe") if key in label}
    if start.network:
        content["network"] = start.network
    if start.rates:
        content["rates"] = start.rates
        settings = settings.replace(rates_init=str(_rates_file(protocol, start.rates, seed, out, folder)))
    return settings, content


def kept_or_trained(network: Network, seed: int, out: Path, folder: Path, console: Console) -> Path:
    """Return a network's file; a missing one is trained, after the network that it goes on from."""
    path = network_path(network, seed, out)
    if not path.exists():
        start = kept_or_trained(network.start, seed, out, folder, console) if network.start else None
        console.print(f"network {network.name}, seed {seed}", highlight=False)
        train_network(network, seed, path, folder, console, start)
    return path


def check_start(protocol: Protocol, cell: Cell, seed: int, out: Path) -> None:
    """Check before any run that an existing network fits; SettingsError as `initial_settings`."""
    settings = of_seed(cell.settings, seed)
    path = _initial_network(protocol, cell, settings, out)
    if path is not None and (path.exists() or not cell.start.network):
        check_pretrained(path, settings)


def train_network(
    network: Network, seed: int, path: Path, folder: Path, console: Console, start: Path | None = None
) -> None:
    """Train a network and write it with its label; an interrupted training goes on from its last epoch.

    The network comes last: a label alone is no kept network, and is written again.

    `start` is the file of the network that it goes on from.

    Raises
    ------
    SettingsError, RunError, FloatingPointError
        A setting does not fit, data cannot be read, the run failed, or training diverged.
    """
    settings = _network_settings(network, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # never an old network beside a new label
    if network.train == "federated":
        (training,) = plan(settings)
        run = trained(settings, training, folder / "trainings") / RUN
        federation = load_federation(settings)
        content = provenance_of_run(read_results(run / METRICS_FILE))
        trained_on = federation.images, federation.trained_on(settings.rounds)
        write_label(path, network.train, settings, content, trained_on)
        write_atomically(path, (run / NETWORK_FILE).read_bytes())
        return
    begun = settings.replace(init=str(start)) if start else settings
    key = digest(begun, network.train, network.epochs, network.threads, CENTRAL.as_json())
    threads, midway = torch.get_num_threads(), folder / "midway" / f"{path.stem}-{key}.safetensors"
    torch.set_num_threads(network.threads)
    try:
        if network.train == "central":
            done = train_centrally(settings, load_federation(settings), network.epochs, console, midway=midway)
        else:
            done = train_source(begun, source_parts(begun), network.epochs, console, network.half, midway)
    finally:
        torch.set_num_threads(threads)
    content = {**done.content, **provenance()}
    if start:
        content["start"] = {"file": start.name, "sha256": _sha256(start)}
    write_label(path, network.train, settings, content, done.trained_on)
    save_model(path, done.model.half() if network.half else done.model, done.spec)
    midway.unlink(missing_ok=True)


def load_federation(settings: Settings) -> Federation:
    """Return the data split of a run; SettingsError if the data cannot be read or do not fit."""
    try:
        return federation_of(settings)
    except (ValueError, OSError) as error:
        raise SettingsError(f"dataset = {settings.dataset!r}: {error}") from error


def _initial_network(protocol: Protocol, cell: Cell, settings: Settings, out: Path) -> Path | None:
    """Return the file that a cell starts from, by `from` or `init`; None for a random network that is trained."""
    if cell.start.network:
        return network_path(protocol.networks[cell.start.network], settings.seed, out)
    if settings.init:
        return Path(settings.init)
    if settings.rounds == 0:
        raise SettingsError("rounds = 0: no network would be trained; allowed is a cell with `from`, or init=PATH")
    return None


def _network_settings(network: Network, seed: int) -> Settings:
    return of_seed(network.settings, seed) if "{seed}" in network.file else network.settings


def _other_training(path: Path, network: Network, seed: int, out: Path) -> list[str]:
    """Return in what the training of a kept network differs from what the protocol says."""
    label = read_label(path)
    before = BEFORE if network.train == "federated" else {}  # training in one place takes no mean
    other = differing({**before, **label["settings"]}, _network_settings(network, seed), {*LATER, *UNRECORDED})
    if network.train != "federated" and label.get("recipe", {}).get("epochs") != network.epochs:
        other.append("epochs")
    if network.start and not _went_on_from(label.get("start", {}), network_path(network.start, seed, out)):
        other.append("from")
    return other


def _went_on_from(recorded: dict[str, str], start: Path) -> bool:
    """Return whether a label names this network's file; one that is not there may have had the recorded bytes."""
    return recorded.get("file") == start.name and (not start.exists() or recorded.get("sha256") == _sha256(start))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _rates_file(protocol: Protocol, cell: str, seed: int, out: Path, folder: Path) -> Path:
    """Write the rates that another cell learned for all modules to a file, and return its path."""
    path = cell_path(out, protocol.name, cell, seed)
    trainings = read_cell(path)["trainings"] if path.exists() else {}
    found = [(name, one["rates"]["all"]) for name, one in trainings.items() if "all" in one.get("rates", {})]
    if not found:
        raise SettingsError(f"{path} has no learned rates: run cell {cell} first")
    training, rates = found[0]
    file = folder / "rates" / f"{protocol.name}-{cell}-{seed}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_rates(file, rates, training, "all")
    return file
