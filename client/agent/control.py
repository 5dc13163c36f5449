"""The device owner's commands to a running agent, over its local socket.

    python -m fedtta.client.agent.control --socket unix:/var/lib/fedtta/agent.sock status
    python -m fedtta.client.agent.control --socket ... models | approve | reject | rollback | rescan

Each command is a function that returns the text to print; `fedtta` calls the same functions. An agent on TCP is reached
with the certificates of a client (`Connection`).
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from fedtta.client.agent.status import CALIBRATED
from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc
from fedtta.settings import SettingsError

LIMIT = 64 << 20  # bytes of a reply


@dataclass(frozen=True)
class Connection:
    """How an agent is reached.

    Parameters
    ----------
    address : str
        "unix:<path>" or "<host>:<port>".
    ca, certificate, key : str
        PEM files for TCP: the authority of the agent's certificate, and this client's pair.
    timeout : float
        Seconds for a call.
    """

    address: str
    ca: str = ""
    certificate: str = ""
    key: str = ""
    timeout: float = 60.0

    @contextlib.contextmanager
    def stub(self) -> Iterator[agent_pb2_grpc.PredictorStub]:
        """Connect.

        Raises
        ------
        SettingsError
            An address of another form; TCP without certificates, or with files that cannot be read.
        ValueError
            The agent refuses a call; the text is its reason.
        ConnectionError
            The agent cannot be reached.
        """
        try:
            with self._channel() as channel:
                yield agent_pb2_grpc.PredictorStub(channel)
        except grpc.RpcError as error:
            code, text = error.code(), error.details() or error.code().name
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise ConnectionError(f"no agent answers at {self.address}: {text}") from error
            raise ValueError(text) from error

    def _channel(self) -> grpc.Channel:
        options = [("grpc.max_receive_message_length", LIMIT)]
        if self.address.startswith("unix:"):
            return grpc.insecure_channel(self.address, options)
        if not re.fullmatch(r".+:\d+", self.address):
            raise SettingsError(f"{self.address}: allowed are unix:PATH, such as unix:/run/agent.sock, and HOST:PORT")
        if not (self.ca and self.certificate and self.key):
            raise SettingsError(f"{self.address}: an agent on TCP needs --ca, --certificate and --key")
        try:
            ca, key, certificate = (Path(path).read_bytes() for path in (self.ca, self.key, self.certificate))
        except OSError as error:
            raise SettingsError(str(error)) from error
        return grpc.secure_channel(self.address, grpc.ssl_channel_credentials(ca, key, certificate), options)


def status(agent: Connection) -> str:
    """Return the agent's state."""
    with agent.stub() as stub:
        reply = stub.Status(pb.StatusRequest(), timeout=agent.timeout)
    lines = {
        "model": reply.model_version or "none yet",
        "adapter": reply.adapter + (" (held by the guard)" if reply.holding else ""),
        "choice": f"{reply.choice} {reply.choice_reason}" if reply.choice else "",
        "classes": ", ".join(reply.classes),
        "samples": f"{reply.samples} predicted, {reply.unsaved_samples} not saved, {reply.waiting} requests wait",
        "accuracy": "{:.0%} ({:.0%} to {:.0%}), estimated without labels".format(*reply.estimated_accuracy)
        if reply.estimated_accuracy
        else "",
        "candidate": reply.candidate,
        "refused": reply.refused,
        "training": reply.training,
        "data": f"{reply.data_samples} files, {reply.data_skipped} skipped" if reply.data_samples else "",
        "guard": ", ".join(f"{kind} {count}" for kind, count in sorted(reply.guard_events.items()) if count),
        "snapshots": ", ".join(reply.snapshots),
        "up": f"{reply.uptime_seconds:.0f} s",
    }
    text = [f"{name:10} {value}" for name, value in lines.items() if value]
    return "\n".join([*text, *(f"note: {note}" for note in (*reply.notes, *reply.data_notes))])


def models(agent: Connection) -> str:
    """Return a line for each model of the device, the last one offered last."""
    with agent.stub() as stub:
        reply = stub.Models(pb.ModelsRequest(), timeout=agent.timeout)
    lines = []
    for model in reply.models:
        when = datetime.fromtimestamp(model.time, UTC).strftime("%Y-%m-%d %H:%MZ")
        shown = sorted(name for name in model.check if not name.startswith(CALIBRATED))
        figures = ", ".join(f"{name} {model.check[name]:.4g}" for name in shown)
        about = "; ".join(filter(None, (model.reason, figures)))
        lines.append(f"{model.state:9} {when}  {model.version}" + (f"  ({about})" if about else ""))
    return "\n".join(lines) or "no models"


def approve(agent: Connection, version: str = "") -> str:
    """Serve the model that waits."""
    return _changed(agent, "Approve", version)


def reject(agent: Connection, version: str = "") -> str:
    """Drop the model that waits."""
    return _changed(agent, "Reject", version)


def rollback(agent: Connection, version: str = "") -> str:
    """Serve an older model again, by default the one served before."""
    return _changed(agent, "RestoreModel", version)


def rescan(agent: Connection) -> str:
    """Look at the device's own data again."""
    with agent.stub() as stub:
        reply = stub.Rescan(pb.RescanRequest(), timeout=max(agent.timeout, 3600.0))
    return "\n".join([f"{reply.samples} samples, {reply.used} used, {reply.skipped} skipped", *reply.notes])


def _changed(agent: Connection, call: str, version: str) -> str:
    with agent.stub() as stub:
        reply = getattr(stub, call)(pb.ModelRequest(version=version), timeout=agent.timeout)
    return f"{reply.state} {reply.version}" + (f" after {reply.samples} samples" if reply.samples else "")


#: Commands that may be given a version, and those without.
OF_MODEL: dict[str, Callable[[Connection, str], str]] = {"rollback": rollback, "approve": approve, "reject": reject}
PLAIN: dict[str, Callable[[Connection], str]] = {"status": status, "models": models, "rescan": rescan}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = argparse.ArgumentParser(prog="fedtta", description="Commands to a running agent.")
    parser.add_argument("--socket", required=True, metavar="ADDRESS", help="unix:<path>, or <host>:<port> with TLS")
    for name, text in (("ca", "the agent's authority"), ("certificate", "this client's"), ("key", "its private key")):
        parser.add_argument(f"--{name}", default="", metavar="FILE", help=f"PEM file of {text} (TCP)")
    commands = parser.add_subparsers(dest="command", required=True)
    functions: dict[str, Any] = {**PLAIN, **OF_MODEL}
    for name, function in functions.items():
        command = commands.add_parser(name, help=(function.__doc__ or "").rstrip("."))
        if name in OF_MODEL:
            command.add_argument("version", nargs="?", default="", help="a version, or its last part")
    chosen = parser.parse_args(arguments)
    agent = Connection(chosen.socket, chosen.ca, chosen.certificate, chosen.key)
    try:
        given = (chosen.version,) if chosen.command in OF_MODEL else ()
        text = functions[chosen.command](agent, *given)
    except (ValueError, OSError) as error:  # ConnectionError too
        print(_printable(str(error)), file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    print(_printable(text))
    return 0


def _printable(text: str) -> str:
    """Return lines without control characters: an agent quotes what a server chose, and a terminal obeys them."""
    return "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in text)


if __name__ == "__main__":
    sys.exit(main())
