"""Work done by a device's resident agent instead of in this process: the way there and back, without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import grpc

from client.agent import agent_pb2 as pb
from client.agent import agent_pb2_grpc, wire
from client.work import Done, Work
from settings import SettingsError

READY = 60.0  # seconds an agent may take to be there: one that has just been restarted loads its model first
MAX_BYTES = 1 << 30  # of a message, in either direction
#: Keys of the node config that are the agent's own where there is one.
AGENTS_OWN = ("role", "state-dir", "data-dir", "device")
OPTIONS = [
    ("grpc.max_send_message_length", MAX_BYTES),
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]
#: What an agent's refusal is raised as here; everything else is a RuntimeError.
RAISED: dict[grpc.StatusCode, type[Exception]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ValueError,
    grpc.StatusCode.OUT_OF_RANGE: FloatingPointError,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimeoutError,
    grpc.StatusCode.UNAVAILABLE: ConnectionError,
}


def relay(work: Work, config: Mapping[str, Any], timeout: float) -> Done:
    """Let the agent that a node config names do the work.

    Parameters
    ----------
    config : mapping
        The node config: `agent`, and perhaps `partition-id` and `num-partitions`, which must be the agent's.
    timeout : float
        Seconds.

    Raises
    ------
    SettingsError
        The node config says what is the agent's to say.
    ValueError, FloatingPointError, RuntimeError, TimeoutError, ConnectionError
        As `perform`.
    """
    if foreign := [key for key in AGENTS_OWN if key in config]:
        raise SettingsError(f"node config: {', '.join(foreign)} beside agent; it belongs in the agent's own file")
    partition, number = (int(config[key]) if key in config else None for key in ("partition-id", "num-partitions"))
    return perform(str(config["agent"]), work, timeout, partition, number)


def perform(
    address: str,
    work: Work,
    timeout: float,
    partition: int | None = None,
    num_partitions: int | None = None,
    ready: float = READY,
) -> Done:
    """Let an agent do the work and return its answer.

    Parameters
    ----------
    address : str
        The agent's relay socket, `unix:/path`: work is not relayed to other machines.
    timeout : float
        Seconds for everything.
    partition, num_partitions : int, optional
        What the node config says; the agent refuses work for another client.
    ready : float
        Seconds of these for the agent to be there.

    Raises
    ------
    ValueError
        The address is none of a Unix socket, or the agent refuses the work; its reason is the text.
    FloatingPointError, RuntimeError
        The agent failed; its reason is the text.
    TimeoutError
        It took too long.
    ConnectionError
        The agent is not there, or went away.
    """
    end = time.monotonic() + timeout
    path, message = wire.socket_path(address), wire.work_to(work, partition, num_partitions)
    with grpc.insecure_channel(f"unix:{path}", OPTIONS) as channel:
        try:
            grpc.channel_ready_future(channel).result(min(ready, timeout))
        except grpc.FutureTimeoutError as error:
            raise ConnectionError(f"no agent answers at {address} within {min(ready, timeout):g} s") from error
        try:
            done: pb.Done = agent_pb2_grpc.RelayStub(channel).Perform(
                message, timeout=end - time.monotonic(), wait_for_ready=True
            )
        except grpc.RpcError as error:
            raised = RAISED.get(error.code(), RuntimeError)
            raise raised(_reason(address, work, timeout, error)) from error
    return wire.done_from(done)


def _reason(address: str, work: Work, timeout: float, error: grpc.RpcError) -> str:
    """Return what the agent says, or what happened on the way to it."""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the agent at {address} has not finished phase {work.phase} within {timeout:g} s"
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return f"the agent at {address} went away in phase {work.phase}: {error.details()}"
    return error.details() or f"the agent at {address}: {error.code().name}"
