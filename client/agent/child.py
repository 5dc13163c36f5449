"""`python -m fedtta.client.agent.child FD`: the process with PyTorch of an agent that predicts without it.

On the file descriptor it gets the agent's config and then one piece of work after another: two frames each, JSON and a
message. It answers with notes (JSON), then the result or the error (JSON) and a message. It ends with the agent.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from fedtta.client.agent.backend import UNSERVED, Offer
from fedtta.client.agent.candidate import Samples
from fedtta.client.agent.light import RAISED, leave
from fedtta.client.agent.live import as_floats
from fedtta.client.agent.local import Local
from fedtta.client.agent.own_data import samples_of, scan
from fedtta.client.config import AgentConfig
from fedtta.client.policy import Policy
from fedtta.client.served import NETWORK
from fedtta.client.serving import Served
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import protobuf
from fedtta.messages.requests import REQUESTS, AdapterRow, Base
from fedtta.models.export import export_encoder
from fedtta.models.preprocessing import Preprocessing
from fedtta.settings import logs

#: What is said of a finished piece of work, and the message after it.
Result = tuple[dict[str, Any], bytes]


class Child:
    """What the child does; each method is one kind of work.

    Parameters
    ----------
    config : AgentConfig
    note : callable
        Called with a line of text for the owner.
    """

    def __init__(self, config: AgentConfig, note: Callable[[str], None]) -> None:
        self.config, name = config, config.adapter_name
        self.row = AdapterRow(name, name, config.adapter_options, cast(Base, config.base))
        self.local = Local(config, self.row, note)

    def answer(self, about: Mapping[str, Any], message: bytes) -> Result:
        """Check and answer a request; leave the model that is to be served."""
        record = protobuf.from_work(pb.Work.FromString(message))
        request = REQUESTS[record.kind].from_record(record)
        self.local.check(request)
        reply, offer = self.local.answer(request, self.row if about["serves"] else None)
        told: dict[str, Any] = {"offered": False, "reason": offer if isinstance(offer, str) else ""}
        if isinstance(offer, Offer):
            try:
                told |= self._left(offer, Path(about["to"]))
            except UNSERVED as error:  # the evaluation itself has succeeded
                told["reason"] = str(error) or type(error).__name__
        return told, protobuf.to_done(reply.to_record()).SerializeToString()

    def file(self, about: Mapping[str, Any], _: bytes) -> Result:
        """Leave the model of a file."""
        return self._left(self.local.from_file(Path(about["path"])), Path(about["to"])), b""

    def export(self, about: Mapping[str, Any], _: bytes) -> Result:
        """Export the encoder of a model in the store."""
        folder = Path(about["folder"])
        served = Served.load(folder, torch.device("cpu"))
        self._export(served, folder, samples_of(self.config, served) if self._calibrates else None)
        return {}, b""

    def scan(self, about: Mapping[str, Any], _: bytes) -> Result:
        """Scan the device's own data."""
        found = scan(self.config, tuple(about["classes"]), Preprocessing.from_dict(about["preprocessing"]))
        return asdict(found), b""

    @property
    def _calibrates(self) -> bool:
        """Return whether an export needs the device's samples."""
        return self.config.precision == "int8"

    def _left(self, offer: Offer, folder: Path) -> dict[str, Any]:
        """Leave a model with its exported encoder in a folder."""
        leave(folder, offer)
        self._export(cast(Served, offer.served), folder, offer.samples)
        return {"offered": True, "file": offer.file}

    def _export(self, served: Served, folder: Path, samples: Samples | None) -> None:
        """Export the encoder of the model in a folder; in int8 it is calibrated on the device's samples."""
        images = as_floats(samples.pixels) if samples and self._calibrates else None
        export_encoder(served.network, served.shape, folder / NETWORK, images)


def main() -> None:
    """Work until the agent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: it ends when the agent does
    line = Connection(int(sys.argv[1]))
    values = json.loads(line.recv_bytes())
    config = AgentConfig(**{**values, "policy": Policy(**values["policy"])})
    logs.configure(config.log_format, config.log_level, lambda: {"device": config.name})
    jobs: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(line, jobs), daemon=True).start()

    def say(told: Mapping[str, Any]) -> None:
        line.send_bytes(json.dumps(told).encode())

    child = Child(config, lambda text: say({"note": text}))
    while True:
        about, message = jobs.get()
        try:
            told, done = getattr(child, about["job"])(about, message)
        except Exception as error:  # the agent raises it
            told, done = _error(error), b""
        say(told)
        line.send_bytes(done)


def _read(line: Connection, jobs: queue.SimpleQueue[tuple[dict[str, Any], bytes]]) -> None:
    """Take over work; end this process when the agent has ended, also in the middle of a piece."""
    try:
        while True:
            jobs.put((json.loads(line.recv_bytes()), line.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)


def _error(error: Exception) -> dict[str, Any]:
    """Return an error as the agent is told it."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in RAISED), "")
    text = str(error) if name else f"{type(error).__name__}: {error}"
    return {"error": name or "RuntimeError", "text": text, "rule": getattr(error, "rule", "")}


if __name__ == "__main__":
    main()
