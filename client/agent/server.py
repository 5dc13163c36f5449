"""The agent's sockets: addresses, access, TLS, limits on messages, health, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fedtta.client.agent.core import Agent
from fedtta.client.agent.federated import Relay
from fedtta.client.agent.metrics import MetricsServer
from fedtta.client.agent.predictions import PredictQueue
from fedtta.client.agent.service import Calls, Predictor
from fedtta.client.agent.tls import credentials
from fedtta.client.config import UNIX, AgentConfig
from fedtta.client.relay import MAX_BYTES, socket_path
from fedtta.messages import agent_pb2_grpc
from fedtta.messages.protobuf import PROTOCOL

LOG = logging.getLogger("fedtta.agent")
PREDICTOR, RELAY = f"{PROTOCOL}.Predictor", f"{PROTOCOL}.Relay"
STATE = f"{PROTOCOL}.State"  # in the health service
SPARE = 16  # calls beside streams and waiting requests: status, health, and those refused as busy
SENT = 1.0  # seconds for sending the last replies
_Result = TypeVar("_Result")


@dataclass
class _Socket:
    """A gRPC server, its address and its health service."""

    server: grpc.aio.Server
    address: str
    health: Any


class Running:
    """A running agent's sockets.

    Parameters
    ----------
    listen, relay, metrics : str
        Their addresses, with the port that was chosen for port 0; `metrics` is empty without metrics.
    """

    def __init__(
        self,
        sockets: Sequence[_Socket],
        calls: Calls,
        ends: Sequence[Callable[[], None]],
        metrics: MetricsServer | None = None,
    ) -> None:
        self.listen, self.relay = (one.address for one in sockets)
        self.metrics = metrics.address if metrics else ""
        self._sockets, self._calls, self._ends = sockets, calls, ends

    def stop(self, grace: float = 30.0) -> int:
        """Take no more requests, answer the accepted ones and close the sockets; return how many calls were cut off.

        Parameters
        ----------
        grace : float
            Seconds for the calls in progress.
        """
        left = _on_loop(self._stop(grace))
        for end in self._ends:
            end()
        return left

    async def _stop(self, grace: float) -> int:
        for one in self._sockets:
            await one.health.enter_graceful_shutdown()
        left = await self._calls.finish(grace)
        await asyncio.gather(*(one.server.stop(SENT) for one in self._sockets))  # which removes the socket files
        return left


def serve(agent: Agent, config: AgentConfig) -> Running:
    """Start the sockets of an agent, which must hold the lock of its state directory.

    Raises
    ------
    ValueError
        A socket's path is too long or not absolute, or a TLS file is missing or invalid.
    OSError
        An address is in use, or cannot be bound.
    """
    with contextlib.ExitStack() as undo:
        metrics = MetricsServer(agent.telemetry, config) if config.metrics else None
        if metrics:
            undo.callback(metrics.close)
        queue = PredictQueue(agent, config.queue_limit, config.batch_limit)
        undo.callback(queue.close)
        running = _on_loop(_start(agent, queue, metrics, config))
        undo.pop_all()
    return running


async def _start(agent: Agent, queue: PredictQueue, metrics: MetricsServer | None, config: AgentConfig) -> Running:
    calls = Calls(agent.log)
    predictor = _server(config.message_limit_mb << 20, config.max_streams + config.queue_limit + SPARE, calls)
    agent_pb2_grpc.add_PredictorServicer_to_server(Predictor(agent, queue, calls), predictor)
    relay = _server(min(MAX_BYTES, config.policy.most_message_mb << 20), SPARE, calls)
    requests = Relay(agent, calls)
    agent_pb2_grpc.add_RelayServicer_to_server(requests, relay)
    bound: list[_Socket] = []
    try:
        for server, address, service in (
            (predictor, config.listen_address, PREDICTOR),
            (relay, config.relay_address, RELAY),
        ):
            state = Health(agent)
            await state.set(service, health_pb2.HealthCheckResponse.SERVING)
            health_pb2_grpc.add_HealthServicer_to_server(state, server)
            server.add_generic_rpc_handlers([Unknown(service)])
            bound.append(_Socket(server, _bind(server, address, config), state))
        if config.relay_group:
            share(socket_path(bound[-1].address), config.relay_group)
        for one in bound:
            await one.server.start()
    except BaseException:
        for one in bound:
            await one.server.stop(None)
            if one.address.startswith(UNIX):  # left by a server that has not been started
                socket_path(one.address).unlink(missing_ok=True)
        raise
    LOG.info("predictions at %s, federated requests at %s", *(one.address for one in bound))
    ends = [queue.close, requests.close, *([metrics.close] if metrics else [])]
    return Running(bound, calls, ends, metrics)


def _server(limit: int, most: int, calls: Calls) -> grpc.aio.Server:
    """Return a server that takes messages of `limit` bytes, and at most so many concurrent calls."""
    options = [
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        ("grpc.so_reuseport", 0),  # or a second agent would share the port
    ]
    return grpc.aio.server(options=options, maximum_concurrent_rpcs=most, interceptors=[Malformed(calls)])


class Health(health.aio.HealthServicer):
    """The health of a socket's service, and under the name `STATE` whether what the adapter learns is saved.

    An agent that cannot save still predicts: its services go on serving.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """Return the health of the service that is asked for."""
        if request.service != STATE:
            return await super().Check(request, context)
        status = health_pb2.HealthCheckResponse
        return status(status=status.NOT_SERVING if self._agent.trouble else status.SERVING)


class Malformed(grpc.aio.ServerInterceptor):
    """Refuses bytes that are no message as an invalid argument; gRPC itself would log a traceback for each.

    Parameters
    ----------
    calls : Calls
        Logs the refusal.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def intercept_service(self, continuation: Callable[..., Any], details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call, whose messages are read here; those of a stream are read by its handler."""
        handler = await continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler

        def read(content: bytes) -> Any:
            try:
                return handler.request_deserializer(content)
            except DecodeError as error:
                return error

        async def answer(request: Any, context: Any) -> Any:
            if isinstance(request, DecodeError):
                await context.abort(*self._calls.refused(request))
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(answer, read, handler.response_serializer)


class Unknown(grpc.GenericRpcHandler):
    """Refuses calls to other versions of the protocol, and to methods of the other socket, with a reason."""

    def __init__(self, service: str) -> None:
        self.service_name = service

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Return a handler whose error names the service of this socket."""
        method = handler_call_details.method
        name = method.strip("/").split("/")[0]
        if name.startswith("fedtta.agent.") and not name.startswith(f"{PROTOCOL}."):
            text = f"{method}: this agent speaks {PROTOCOL}"
        else:
            text = f"{method}: this socket offers {self.service_name}"

        async def refuse(_: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

        return grpc.stream_stream_rpc_method_handler(refuse)


def _bind(server: grpc.aio.Server, address: str, config: AgentConfig) -> str:
    """Bind a server to an address; return the address with its port."""
    if address.startswith(UNIX):
        address = f"{UNIX}{Path(address.removeprefix(UNIX)).absolute()}"
        free(socket_path(address))
        with _umask(0o177), _named(address):
            server.add_insecure_port(address)
        return address
    with _named(address):
        port = server.add_secure_port(address, credentials(config))
    return f"{address.rpartition(':')[0]}:{port}"


def free(path: Path) -> None:
    """Prepare the path of a socket: make its folder, and remove a socket file left by a dead agent.

    gRPC itself would take the path away from a living agent.

    Raises
    ------
    FileExistsError
        A process listens there, or the file is not a socket.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # no process listens
            return
        except OSError as error:
            raise FileExistsError(f"{path} exists, and connecting to it failed: {error}") from error
    raise FileExistsError(f"{path}: another process listens there")


def share(path: Path, group: str) -> None:
    """Let a group connect to a socket.

    Raises
    ------
    ValueError
        There is no such group, or this process does not belong to it.
    """
    try:
        shutil.chown(path, group=group)
        path.chmod(0o660)
    except (LookupError, PermissionError) as error:
        raise ValueError(f"relay-group = {group!r}: allowed is a group that this user belongs to: {error}") from error


@contextlib.contextmanager
def _named(address: str) -> Iterator[None]:
    """Turn gRPC's error about an address into one that explains it."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"cannot listen at {address}: it is in use, or its name or folder cannot be used") from error


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all agents of this process: gRPC wakes every loop for each of its events."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agent sockets", daemon=True).start()
    return loop


def _on_loop(task: Coroutine[Any, Any, _Result]) -> _Result:
    return asyncio.run_coroutine_threadsafe(task, _loop()).result()
