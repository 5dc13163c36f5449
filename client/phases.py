"""What each kind of message makes a client do: from `Work` to `Done`, without Flower.

A process that has the data does this itself: the ClientApp in a simulation, the agent on a device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from client.device import Device
from client.evaluation import Row
from client.identity import kept
from client.networks import NetworkStore, private_folder
from client.runtime import make_device
from client.state import DirectoryState, Keeping, PrivateState
from client.task import Task
from client.work import Arrays, Done, Work
from settings import Settings, SettingsError, from_config

#: Keys of a message's config that are no settings.
ENVELOPE = (
    "server-round", "training", "rule", "objective", "shared-names", "wanted", "run", "labels", "adapters", "options",
    "bases", "shifts-resolved", "variant", "network", "send-normalisation", "send-start", "cell", "mixed",
    "checkpoint-rounds",
)  # fmt: skip
#: Settings that a node may set for itself in its node config.
NODE_KEYS = ("data-dir", "device", "state-dir")


@dataclass(frozen=True)
class Node:
    """What a node says of itself, whatever the run.

    Parameters
    ----------
    partition, num_partitions : int
        Which client it is, of how many.
    state : PrivateState
        Where private state lives when neither node nor run sets `state-dir`.
    memory : PrivateState, optional
        Where what adapters learn lives; where it is given, `state` is used whatever `state-dir` says.
    role : "both", "source", "target" or None
        None: what the data make of it.
    settings : mapping
        Those of `NODE_KEYS` that it sets for itself.
    lends : bool
        Answer with a network's own memory: the answer is read before the node, or another that shares the network, is
        asked for anything else.
    """

    partition: int
    num_partitions: int
    state: PrivateState
    role: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    memory: PrivateState | None = None
    lends: bool = False


def perform(work: Work, node: Node) -> Done:
    """Do what a message asks for.

    Raises
    ------
    SettingsError
        A setting is unknown or impossible, or the run has another number of clients.
    ValueError, FloatingPointError
        As `Device`.
    """
    return PHASES[work.phase](work, node)


def identify(work: Work, node: Node) -> Done:
    """Say which partition this node holds, what its data look like (no label counts), and what it kept of the run."""
    device = device_of(work, node)
    return Done(identity={**device.describe(), **kept(device.state, device.memory)})


def train(work: Work, node: Node) -> Done:
    """Do one training round."""
    device, arrays = device_of(work, node), work.records["arrays"]
    arrays, metrics = device.train(round_of(work), task_of(work), arrays, lend=node.lends)
    return Done({"arrays": arrays}, metrics)


def statistics(work: Work, node: Node) -> Done:
    """Personalise on the final model and report statistics under it."""
    wanted = list(work.config["wanted"])
    arrays, metrics = device_of(work, node).statistics(round_of(work), task_of(work), work.records["arrays"], wanted)
    return Done({"statistics": arrays}, metrics)


def refine_rates(work: Work, node: Node) -> Done:
    """Refine adaptation rates on this client's held-out data (ATP); the network travels once."""
    rates, variant = rates_of(work, "rates"), work.config["variant"]
    refined, metrics = device_of(work, node).refine_rates(round_of(work), network_of(work, node), rates, variant)
    return Done({"rates": {name: np.asarray(value, np.float64) for name, value in refined.items()}}, metrics)


def adapt(work: Work, node: Node) -> Done:
    """Adapt to the next batch of this client's stream, starting from its mixture (test-time rounds)."""
    config = work.config
    row = Row(config["labels"][0], config["adapters"][0], json.loads(config["options"][0]))
    adapted, metrics = device_of(work, node).adapt(
        round_of(work),
        config["cell"],
        network_of(work, node),
        row,
        config["mixed"],
        work.records.get("shared"),
        float(config["proximal-mu"]),
    )
    records = {"shared": adapted.shared}
    if config["send-normalisation"]:
        records["normalisation"] = adapted.domain
    if config["send-start"]:
        records["start"] = adapted.start
    return Done(records, metrics)


def evaluate(work: Work, node: Node) -> Done:
    """Run the adapters named in the message on the test streams named in it."""
    leak_check, results = device_of(work, node).evaluate(
        round_of(work),
        task_of(work),
        work.records["arrays"],
        work.records.get("statistics"),
        rows_of(work),
        work.config["shifts-resolved"],
        variants_of(work),
    )
    metrics: dict[str, Any] = dict(leak_check)
    for result in results:
        prefix = f"{result.pop('method')}|{result.pop('shift')}|"
        metrics |= {prefix + name: value for name, value in result.items()}
    metrics["num-examples"] = max(leak_check["checked"], 1)
    return Done(metrics=metrics)


PHASES: dict[str, Callable[[Work, Node], Done]] = {
    "identify": identify,
    "train": train,
    "statistics": statistics,
    "rates": refine_rates,
    "adapt": adapt,
    "evaluate": evaluate,
}


def round_of(work: Work) -> int:
    """Return the round that a message belongs to."""
    return int(work.config["server-round"])


def task_of(work: Work) -> Task:
    """Return what a message's training asks of this client."""
    config = work.config
    joined = frozenset(config["shared-names"]) if "shared-names" in config else None
    return Task(config["training"], config["rule"], config["objective"], joined)


def rows_of(work: Work) -> list[Row]:
    """Return the rows of the table that an evaluation asks for."""
    config = work.config
    columns = zip(config["labels"], config["adapters"], config["options"], config["bases"], strict=True)
    return [Row(label, adapter, json.loads(options), base) for label, adapter, options, base in columns]


def rates_of(work: Work, record: str) -> dict[str, float]:
    """Return adaptation rates by module; finite numbers only."""
    numbers = {name: float(value) for name, value in work.records[record].items()}
    if bad := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise ValueError(f"rates of {', '.join(bad)} are not finite")
    return numbers


def variants_of(work: Work) -> dict[str, dict[str, float]]:
    """Return variant → learned rates of an evaluation."""
    return {variant: rates_of(work, f"rates.{variant}") for variant in work.config.get("variant", [])}


def settings_of(work: Work, node: Node) -> Settings:
    """Return a message's settings, with what the node sets for itself."""
    return from_config({**work.config, **node.settings}, ignore=ENVELOPE)


def device_of(work: Work, node: Node) -> Device:
    """Build the device that a message is for, from its settings and the node's own."""
    settings, run = settings_of(work, node), work.config["run"]
    if node.num_partitions != settings.clients:
        raise SettingsError(f"clients = {settings.clients}: this node is one of {node.num_partitions}")
    folder = Path(settings.state_dir).expanduser() if settings.state_dir and node.memory is None else None
    state = DirectoryState(folder, run, node.partition) if folder else node.state
    # on disk unless the node lives as long as the run: Flower would ship its context with every message
    memory = node.memory or DirectoryState(private_folder(settings), run, node.partition)
    keep = [int(round) for round in work.config.get("checkpoint-rounds", [])]
    return make_device(settings, node.partition, Keeping(state, keep), Keeping(memory, keep), node.role)


def network_of(work: Work, node: Node) -> Arrays:
    """Return the network that a message is about: what it brings, which is kept, or what was kept before."""
    store, digest = NetworkStore(private_folder(settings_of(work, node)) / "networks"), str(work.config["network"])
    if "arrays" not in work.records:
        return store.load(digest)
    arrays = work.records["arrays"]
    store.keep(digest, arrays)
    return arrays
