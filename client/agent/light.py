"""An agent's work without torch: predictions by onnxruntime, everything else in a child process with PyTorch.

    agent   predictions, adapters, guard, policy of messages, audit log, store      no torch
    child   trainings, statistics, evaluations, scans of data, exports              `fedtta.client.agent.child`

The child starts with the first piece of work and ends when none has come for a while. A child that ends in the middle
of one, whatever ended it, has failed that one; the next starts another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import fedtta
from fedtta.client.agent.backend import UNSERVED, Offer
from fedtta.client.agent.candidate import Samples
from fedtta.client.agent.scans import Scan
from fedtta.client.config import AgentConfig
from fedtta.client.policy import PolicyError
from fedtta.client.served import NETWORK, Rest, ServedModel
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import protobuf
from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import Reply
from fedtta.messages.requests import AdapterRow, Request
from fedtta.models import load_arrays, save_arrays
from fedtta.models.deadline import Stopped, check_deadline
from fedtta.models.exported import ENCODER, MISSING, ExportedNetwork, Precision, load_network
from fedtta.settings import SettingsError
from fedtta.settings.files import make_folder, write_atomically
from fedtta.tta import Statistics

CHILD = "fedtta.client.agent.child"
OFFERED = "offered"  # folder in `state-dir` in which the child leaves a model
SAMPLES = "samples.safetensors"  # in that folder: what the model is checked on
IDLE = 30.0  # seconds without work after which the child ends
LOOK = 0.05  # seconds between two looks at the deadline
#: Errors of the child that are raised here as what they were; any other is a RuntimeError.
RAISED: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (PolicyError, SettingsError, FloatingPointError, Stopped, ValueError, FileNotFoundError, OSError)
}


class Exported(ServedModel):
    """A served model whose network is an `ExportedNetwork`; see `ServedModel`.

    It keeps the encoder's graph in memory, not its values: these are read from its files when they are needed.
    """

    network: ExportedNetwork

    def images(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return images as they are."""
        return pixels

    def given(self, value: NDArray[Any]) -> NDArray[Any]:
        """Return an array as it is."""
        return value

    def network_arrays(self) -> Arrays:
        """Return the network's floating-point values by name."""
        return load_arrays(self.network.path)[0]

    def save_network(self, folder: Path) -> None:
        """Copy the network's file and the exported encoder."""
        make_folder(folder)
        for name in (NETWORK, ENCODER):
            write_atomically(folder / name, self.network.path.with_name(name).read_bytes())

    def moved(self, folder: Path) -> None:
        """Read the network's values from `folder`: where they came from may be removed."""
        self.network.path = folder / NETWORK

    @classmethod
    def load(cls, folder: Path, precision: Precision = "float32") -> Exported:
        """Read what `save` wrote, here or in torch, and the exported encoder beside it.

        Raises
        ------
        FileNotFoundError, ValueError
            A file is missing, altered or of another version; the message names it.
        """
        rest = Rest.load(folder)
        arrays, metadata = load_arrays(folder / NETWORK)
        try:
            spec = json.loads(metadata["spec"])
        except (KeyError, ValueError) as error:
            raise ValueError(f"{folder / NETWORK}: its spec cannot be read: {error}") from error
        statistics = None if rest.statistics is None else Statistics.of_arrays(rest.statistics)
        network = load_network(folder / NETWORK, arrays, precision)
        served = cls(network=network, spec=spec, statistics=statistics, **rest.values)
        rest.check(served, folder)
        return served


class Light:
    """See `fedtta.client.agent.backend.Backend`.

    Parameters
    ----------
    config : AgentConfig
    row : AdapterRow
        The device's adapter.
    note : callable
        Called with a line of text for the owner.

    Raises
    ------
    ValueError
        onnxruntime is missing.
    """

    def __init__(self, config: AgentConfig, row: AdapterRow, note: Callable[[str], None]) -> None:
        if find_spec("onnxruntime") is None:  # or the first model would tell, after its training
            raise ValueError(MISSING)
        self.config, self.row = config, row
        self._precision = cast(Precision, config.precision)
        self._children, self._offered = Children(config, note), config.state_folder / OFFERED

    def load(self, folder: Path) -> Exported:
        """Return the model in a folder of the store; one without an intact exported encoder is exported first."""
        try:
            return Exported.load(folder, self._precision)
        except (FileNotFoundError, ValueError) as damage:  # which may be of a file that no export makes again
            try:
                self._children.work("export", {"folder": str(folder)})
            except (RuntimeError, ArithmeticError) as error:
                raise ValueError(f"{damage}; {error}") from error
            return Exported.load(folder, self._precision)

    def from_file(self, path: Path) -> Offer:
        """Return a model file with the device's adapter and samples."""
        with self._children.reserved():
            told, _ = self._children.work("file", {"path": str(path), "to": str(self._offered)})
            return self._offer(told)

    def scan(self, served: ServedModel | None) -> Scan:
        """Scan the device's own data as the served model would read them."""
        classes, made = (served.classes, served.preprocessing.to_dict()) if served else ((), {})
        told, _ = self._children.work("scan", {"classes": classes, "preprocessing": made})
        return Scan(**{**told, "notes": tuple(told["notes"])})

    def check(self, request: Request) -> None:
        """Check the names; the child checks the rest before it works, for that needs the request's network."""
        self.config.policy.check_names(request)

    def answer(self, request: Request, row: AdapterRow | None) -> tuple[Reply, Offer | str]:
        """Let the child check and answer a request."""
        about = {"serves": row is not None, "to": str(self._offered)}
        with self._children.reserved():
            told, done = self._children.work("answer", about, protobuf.to_work(request.to_record()))
            reply = request.reply.from_record(protobuf.from_done(request.reply.kind, pb.Done.FromString(done)))
            if not told["offered"]:
                return reply, str(told["reason"])
            try:
                return reply, self._offer(told)
            except Stopped:
                raise
            except UNSERVED as error:
                return reply, str(error) or type(error).__name__

    def close(self) -> None:
        """End the child."""
        self._children.close()

    def _offer(self, told: Mapping[str, Any]) -> Offer:
        """Return the model that the child has left."""
        arrays, _ = load_arrays(self._offered / SAMPLES)
        samples = Samples(arrays["pixels"], arrays.get("labels"))
        served = Exported.load(self._offered, self._precision)
        return Offer(served, samples, told["file"], lambda: shutil.rmtree(self._offered, ignore_errors=True))


def leave(folder: Path, offer: Offer) -> None:
    """Write a model to be offered, without its exported encoder, to an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder, 0o700)
    offer.served.save(folder)
    labels = {} if offer.samples.labels is None else {"labels": offer.samples.labels}
    save_arrays(folder / SAMPLES, {"pixels": offer.samples.pixels, **labels}, private=True)


class Children:
    """The child process of an agent: at most one, which works on one thing at a time; thread-safe.

    Parameters
    ----------
    config : AgentConfig
    note : callable
        Called with a line of text for the owner, of the child's too.
    """

    def __init__(self, config: AgentConfig, note: Callable[[str], None]) -> None:
        self._config, self._note = config, note
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._idle: threading.Timer | None = None

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Let no other thread's work begin in the block; raises Stopped if the thread's deadline is over before."""
        while not self._lock.acquire(timeout=LOOK):
            check_deadline()
        try:
            yield
        finally:
            self._lock.release()

    def work(self, job: str, about: Mapping[str, Any], message: pb.Work | None = None) -> tuple[dict[str, Any], bytes]:
        """Let the child do something; return what it says, and its message.

        Raises
        ------
        Stopped
            The thread's deadline is over; the child is killed.
        RuntimeError
            The child has ended, or failed with another error than those of `RAISED`, which are raised as they are; or
            there is no PyTorch for it.
        """
        if find_spec("torch") is None:
            raise RuntimeError(f"{job}: needs PyTorch, which is not installed here")
        with self.reserved():
            line = self._started()
            try:
                line.send_bytes(json.dumps({"job": job, **about}).encode())
                line.send_bytes(message.SerializeToString() if message else b"")
                while (told := self._heard(line)).get("note"):
                    self._note(told["note"])
                done = line.recv_bytes()
            except (EOFError, ConnectionError) as error:
                raise RuntimeError(f"{job}: the training process ended with {self._ended()}") from error
            except BaseException:
                self._kill()
                raise
            self._wait_for_work()
        if "error" not in told:
            return told, done
        kind = RAISED.get(told["error"], RuntimeError)
        raised = kind.__new__(kind, told["text"])
        if isinstance(raised, PolicyError):
            raised.rule = told["rule"]
        raise raised

    def close(self) -> None:
        """Kill the child: what it has written is complete, what it was doing has failed."""
        self._kill()

    def _heard(self, line: Connection) -> dict[str, Any]:
        """Return the next thing that the child says."""
        while not line.poll(LOOK):
            check_deadline()
        told: dict[str, Any] = json.loads(line.recv_bytes())
        return told

    def _started(self) -> Connection:
        """Return the line to a running child."""
        if self._idle is not None:
            self._idle.cancel()
        if self._process is not None and self._process.poll() is not None:
            self._ended()  # it was killed while it waited
        if self._line is None:
            ours, theirs = Pipe()
            root = str(Path(str(fedtta.__file__)).parents[1])
            paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
            command = [sys.executable, "-m", CHILD, str(theirs.fileno())]
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": paths},
                )
            ours.send_bytes(json.dumps(dataclasses.asdict(self._config)).encode())
            self._line = ours
        return self._line

    def _wait_for_work(self) -> None:
        """End the child if nothing is to be done for a while."""

        def end() -> None:
            with self._lock:
                if self._idle is timer:
                    self._kill()

        self._idle = timer = threading.Timer(IDLE, end)
        timer.daemon = True
        timer.start()

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            self._ended()

    def _ended(self) -> str:
        """Return how the child has ended, and forget it."""
        process, line = self._process, self._line
        self._process = self._line = None
        if line is not None:
            line.close()
        if process is None:
            return "the agent"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()
        status = process.wait()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
