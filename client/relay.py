"""The relay: requests that a device's resident agent answers, over a Unix socket; without torch and without Flower."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import grpc

from fedtta.messages import agent_pb2 as pb
from fedtta.messages import agent_pb2_grpc, protobuf
from fedtta.messages.replies import Reply
from fedtta.messages.requests import Request
from fedtta.messages.transport import Addressed, Answer, late, read_answer, reason_of, unknown_node
from fedtta.settings import SettingsError, keys_in

READY = 60.0  # seconds for an agent to be reachable: one that has just been restarted loads its model first
LOOK = 0.1  # seconds between two looks
MAX_BYTES = 1 << 30  # of a message, in either direction
SOCKET_PATH = 107  # bytes in the path of a Unix socket, at most
#: Keys of the node config that belong in the agent's own file, and those beside it; Flower sets the last two.
AGENT_KEYS = ("data", "class-map", "role", *keys_in("node"))
NODE_KEYS = ("agent", "name", "partition-id", "num-partitions")
OPTIONS = [
    ("grpc.max_send_message_length", MAX_BYTES),
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]
#: The exception for a status of the agent; any other status is a RuntimeError.
RAISED: dict[grpc.StatusCode, type[Exception]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ValueError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionError,
    grpc.StatusCode.OUT_OF_RANGE: FloatingPointError,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimeoutError,
    grpc.StatusCode.UNAVAILABLE: ConnectionError,
}


class RelayTransport:
    """A transport to resident agents.

    Parameters
    ----------
    addresses : mapping
        Node → the agent's relay socket, `unix:/path`.
    ready : float
        Seconds of a request's time for its agent to be reachable.
    """

    def __init__(self, addresses: Mapping[int, str], ready: float = READY) -> None:
        self.addresses, self.ready = dict(addresses), ready

    def nodes(self) -> list[int]:
        """Return the nodes that have an address."""
        return list(self.addresses)

    def exchange(self, requests: Sequence[Addressed], timeout: float) -> Iterator[Answer]:
        """See `fedtta.messages.transport.Transport.exchange`."""
        end = time.monotonic() + timeout
        pool = ThreadPoolExecutor(max(1, len(requests)), "relay")
        try:
            for future in as_completed([pool.submit(self._answer, one, timeout, end) for one in requests]):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, one: Addressed, timeout: float, end: float) -> Answer:
        if one.node not in self.addresses:
            return unknown_node(one)
        try:
            left = max(0.0, end - time.monotonic())
            message = protobuf.to_work(one.request.to_record())
            done = _call(self.addresses[one.node], message, left, self.ready)
        except TimeoutError:
            return late(one, timeout)
        except Exception as error:
            return Answer(one.node, None, "failed", reason_of(error))
        return read_answer(one, lambda: protobuf.from_done(type(one.request).reply.kind, done))


def relay(request: Request, node_config: Mapping[str, Any], timeout: float, ready: float = READY) -> Reply:
    """Let the agent that a node config names answer a request.

    Parameters
    ----------
    request : Request
    node_config : mapping
        `agent`, the address of its relay socket, and optionally `name`, which must be that of the agent.
    timeout : float
        Seconds for everything.
    ready : float
        Seconds of these for the agent to be reachable.

    Raises
    ------
    SettingsError
        The node config has keys that belong in the agent's own file, or unknown ones.
    ValueError
        The address is not that of a Unix socket, the agent refuses the request, or its reply cannot be read.
    FloatingPointError, RuntimeError
        The agent failed; the text is its reason.
    PermissionError
        The owner's policy refuses the request; the text names the rule.
    TimeoutError
        The agent took too long.
    ConnectionError
        The agent cannot be reached, or ended meanwhile.
    """
    if foreign := [key for key in AGENT_KEYS if key in node_config]:
        raise SettingsError(f"node config: {', '.join(foreign)} beside agent; it belongs in the agent's own file")
    if unknown := [key for key in node_config if key not in NODE_KEYS]:
        raise SettingsError(f"the node config has {', '.join(unknown)}; allowed are {', '.join(NODE_KEYS)}")
    name = str(node_config["name"]) if "name" in node_config else None
    message = protobuf.to_work(request.to_record(), name)
    done = _call(str(node_config["agent"]), message, timeout, ready)
    return request.reply.from_record(protobuf.from_done(request.reply.kind, done))


def socket_path(address: str) -> Path:
    """Return the path in `unix:/path`.

    Raises
    ------
    ValueError
        It is another kind of address, or its path is relative or too long for a socket.
    """
    path = Path(address.removeprefix("unix:"))
    if not (address.startswith("unix:") and path.is_absolute()):
        raise ValueError(f"address {address!r}: allowed is unix:/path")
    if (size := len(str(path).encode())) > SOCKET_PATH:
        raise ValueError(f"{path}: {size} bytes; the path of a socket has at most {SOCKET_PATH}: choose a shorter one")
    return path


def _call(address: str, message: pb.Work, timeout: float, ready: float) -> pb.Done:
    """Send a request to an agent; raises what `relay` does."""
    end, path = time.monotonic() + timeout, socket_path(address)
    if not _listens(path, min(ready, timeout)):
        raised: type[Exception] = ConnectionError if ready < timeout else TimeoutError
        raise raised(f"no agent answers at {address} within {min(ready, timeout):g} s")
    with grpc.insecure_channel(f"unix:{path}", OPTIONS) as channel:
        try:
            return agent_pb2_grpc.RelayStub(channel).Perform(
                message, timeout=end - time.monotonic(), wait_for_ready=True
            )
        except grpc.RpcError as error:
            raised = RAISED.get(error.code(), RuntimeError)
            raise raised(_reason(address, message.phase, timeout, error)) from error


def _listens(path: Path, seconds: float) -> bool:
    """Wait until a process listens at a socket, at most so many seconds; return whether one does."""
    end = time.monotonic() + seconds
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)  # it would wait for ever for one that accepts no connection
                probe.connect(str(path))
            return True
        except OSError:
            if time.monotonic() >= end:
                return False
        time.sleep(min(LOOK, max(0.0, end - time.monotonic())))


def _reason(address: str, kind: str, timeout: float, error: grpc.RpcError) -> str:
    """Return the agent's reason, or why the call failed."""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the agent at {address} has not answered {kind} within {timeout:g} s"
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return f"the agent at {address} ended during {kind}: {error.details()}"
    return error.details() or f"the agent at {address}: {error.code().name}"
