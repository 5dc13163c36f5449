"""An agent's work in torch: in the agent's own process, or in the child of one that predicts without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedtta.client.agent.backend import UNSERVED, Offer
from fedtta.client.agent.candidate import Samples
from fedtta.client.agent.own_data import samples_of, scan
from fedtta.client.agent.scans import Scan
from fedtta.client.config import AgentConfig
from fedtta.client.device import Device
from fedtta.client.node import Node, make_device, perform, settings_of
from fedtta.client.resources import resolve_device, set_up_torch
from fedtta.client.served import ServedModel
from fedtta.client.serving import Served, from_file
from fedtta.client.state import MemoryState
from fedtta.messages.replies import Evaluated, Reply
from fedtta.messages.requests import AdapterRow, Evaluate, Request, Summarize, Train
from fedtta.models.deadline import Stopped
from fedtta.models.preprocessing import Preprocessing
from fedtta.settings import Scalar, keys_in, parse_class_map


class Local:
    """See `fedtta.client.agent.backend.Backend`.

    Parameters
    ----------
    config : AgentConfig
    row : AdapterRow
        The device's adapter.
    note : callable
        Called with a line of text for the owner.
    """

    def __init__(self, config: AgentConfig, row: AdapterRow, note: Callable[[str], None]) -> None:
        self.config, self.row = config, row
        self.device = resolve_device(config.device)
        set_up_torch(self.device)  # one thread: training leaves a core to predictions
        self.node = own_node(config, note)

    def load(self, folder: Path) -> Served:
        """Return the model in a folder of the store."""
        return Served.load(folder, self.device)

    def from_file(self, path: Path) -> Offer:
        """Return a model file with the device's adapter and samples."""
        served, digest = from_file(path, self.row, self.device)
        return Offer(served, samples_of(self.config, served), digest)

    def scan(self, served: ServedModel | None) -> Scan:
        """Scan the device's own data as the served model would read them."""
        if served is None:
            return scan(self.config, (), Preprocessing())
        return scan(self.config, served.classes, served.preprocessing)

    def check(self, request: Request) -> None:
        """Refuse a request by what it says."""
        self.config.policy.check_request(request, settings_of(request, self.node), bool(self.node.source))

    def answer(self, request: Request, row: AdapterRow | None) -> tuple[Reply, Offer | str]:
        """Answer a request that has been checked."""
        reply = perform(request, self.node, self._admit)
        if row is None or not (isinstance(request, Evaluate) and isinstance(reply, Evaluated)):
            return reply, ""
        try:
            device = make_device(request, self.node)
            version = f"{request.run}/{request.task.training}/{request.round}"
            served = replace(device.serve(request, row), origin=version)
            return reply, Offer(served, Samples.of_device(device, request.round))
        except Stopped:
            raise
        except UNSERVED as error:  # the evaluation itself has succeeded, and its result counts
            return reply, str(error) or type(error).__name__

    def close(self) -> None:
        """There is nothing to end."""

    def _admit(self, request: Request, device: Device) -> None:
        """Refuse what too few samples of a device would stand behind."""
        federation, policy = device.federation.in_round(int(getattr(request, "round", 1))), self.config.policy
        split = federation.splits[device.partition]
        training = 0 if device.role == "target" else len(split.train)
        policy.check_samples(request, training, len(split.validation))
        if isinstance(request, Train | Summarize) and training and policy.weighs_samples:
            policy.check_effective(request, *device.effective_samples(request))


def own_node(config: AgentConfig, note: Callable[[str], None]) -> Node:
    """Return the node of an agent, whose own paths and data stand in place of those that a message names.

    Parameters
    ----------
    note : callable
        Called with a line of text for the owner.
    """
    settings: dict[str, Scalar] = dict.fromkeys(keys_in("paths"), "")
    settings |= {"data-dir": config.data_dir, "state-dir": str(config.private_folder), "device": config.device}
    settings |= {"download": config.policy.download, **config.limits_of_data}
    return Node(
        config.name,
        MemoryState(),
        config.data,
        config.role or None,
        settings,
        class_map=parse_class_map(config.class_map),
        index=config.index,
        note=note,
        least_batch=config.policy.least_batch_size,
    )
