"""Light devices: hundreds of clients of a SuperLink's Fleet API in two threads, which answer at once.

Each makes the calls of a SuperNode (flwr 1.39: `flwr.client.grpc_rere_client.connection`,
`flwr.supernode.start_client_internal`) with a key of its own: `RegisterNode`, `ActivateNode`, `SendNodeHeartbeat`;
`PullMessages` every three seconds; for a message `PullObject` for each of its objects and `ConfirmMessageReceived`; for
the reply `PushMessages`, and `PushObject` for each object that the SuperLink does not have. Three things are lighter:
arrays are fetched and dropped unread, devices share a few connections, and a signature is used for a minute (it covers
the time alone, and the SuperLink verifies it at every call all the same). Heartbeats have a thread and a connection of
their own, so that no work of the devices delays them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import (
    HEARTBEAT_BASE_MULTIPLIER,
    HEARTBEAT_DEFAULT_INTERVAL,
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
)
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.date import now
from flwr.supercore.grpc import GRPC_MAX_MESSAGE_LENGTH
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_head_values_from_object_content,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata

from fedtta.server.events import RunError

POLL = 3.0  # seconds between two looks of an idle SuperNode
UNAVAILABLE = 0.1  # seconds between two looks for an object that the server is still sending
SIGNED = 60.0  # seconds for which a signature is used
CONNECTIONS = 8
AT_ONCE = 32  # messages that are worked on at once
STARTING = 300.0  # seconds for all devices to become active
#: What a device answers: its number, the message without its content, and the message's config. None: nothing, ever.
Answering = Callable[[int, Message, Mapping[str, Any]], RecordDict | None]


@dataclass
class Device:
    """One device: its node, its key and its last signature."""

    number: int
    node: Node = field(default_factory=Node)
    signed: float = -SIGNED
    metadata: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        self._private, public = generate_key_pairs()
        self.public = public_key_to_bytes(public)
        self._version = RuntimeVersionMetadata.from_local_component("SuperNode").append_to_grpc_metadata(None)

    def sign(self) -> tuple[tuple[str, Any], ...]:
        """Return the metadata of a call."""
        if time.monotonic() - self.signed > SIGNED:
            stamp = now().isoformat()
            signature = sign_message(self._private, stamp.encode("ascii"))
            own = ((PUBLIC_KEY_HEADER, self.public), (TIMESTAMP_HEADER, stamp), (SIGNATURE_HEADER, signature))
            self.metadata, self.signed = (*self._version, *own), time.monotonic()
        return self.metadata


class LightDevices:
    """Devices that live in two threads while this is entered.

    Parameters
    ----------
    address : str
        Of the SuperLink's Fleet API, without TLS.
    count : int
    answer : callable
        See `Answering`.
    poll : float
        Seconds between two looks of an idle device.
    at_once : int
        Messages that are worked on at once; the replies to them must fit into memory.

    Attributes
    ----------
    calls : Counter
        Method → calls that were answered.
    failures : Counter
        What went wrong → how often: a call that failed is not repeated, and the device goes on.
    """

    def __init__(self, address: str, count: int, answer: Answering, poll: float = POLL, at_once: int = AT_ONCE) -> None:
        self._address, self._count, self._answer, self.poll, self._at_once = address, count, answer, poll, at_once
        self.calls: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._active, self._ended = threading.Event(), threading.Event()
        self._errors: list[str] = []  # of either thread
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="light devices", daemon=True)
        self._devices: list[Device] = []
        self._hearts = threading.Thread(target=lambda: asyncio.run(self._hearts_live()), name="heartbeats", daemon=True)

    def __enter__(self) -> Self:
        """Start, and wait until all devices are active.

        Raises
        ------
        RunError
            One could not be registered or activated.
        """
        self._thread.start()
        if not self._active.wait(STARTING) or self._errors:
            self._ended.set()
            raise RunError(
                f"{self._count} light devices are not active: {'; '.join(self._errors) or f'after {STARTING:g} s'}"
            )
        self._hearts.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop; a call under way is given up.

        Raises
        ------
        RunError
            A device has ended before.
        """
        self._ended.set()
        self._thread.join()
        self._hearts.join()
        if self._errors:
            raise RunError(f"a light device has ended: {'; '.join(self._errors)}")

    async def _live(self) -> None:
        self._slots = asyncio.Semaphore(self._at_once)
        async with contextlib.AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(self._channel(i)) for i in range(min(CONNECTIONS, self._count))]
            stubs = [FleetStub(channel) for channel in channels]
            self._devices = [Device(number) for number in range(self._count)]
            pairs = [(device, stubs[device.number % len(stubs)]) for device in self._devices]
            try:
                await asyncio.gather(*(self._begin(*pair) for pair in pairs))
            except grpc.aio.AioRpcError as error:
                self._errors.append(f"{error.code().name}: {error.details()}")
                return
            finally:
                self._active.set()
            await self._until_the_end([asyncio.create_task(self._follow(*pair)) for pair in pairs])

    async def _hearts_live(self) -> None:
        async with self._channel(CONNECTIONS) as channel:
            stub = FleetStub(channel)
            await self._until_the_end([asyncio.create_task(self._beat(device, stub)) for device in self._devices])

    async def _until_the_end(self, lives: Sequence[asyncio.Task[None]]) -> None:
        """Let tasks run until this is left, or one of them has ended, which is an error."""
        while not self._ended.is_set() and not any(life.done() for life in lives):
            await asyncio.sleep(0.1)
        for life in lives:
            life.cancel()
        ended = await asyncio.gather(*lives, return_exceptions=True)
        self._errors += [repr(one) for one in ended if not isinstance(one, asyncio.CancelledError)]

    def _channel(self, number: int) -> grpc.aio.Channel:
        """Return a connection; an option of its own keeps gRPC from sharing one with another channel."""
        options = [(f"grpc.max_{way}_message_length", GRPC_MAX_MESSAGE_LENGTH) for way in ("send", "receive")]
        return grpc.aio.insecure_channel(self._address, [*options, ("own", number)])

    async def _call(self, device: Device, method: Any, request: Any) -> Any:
        response = await method(request, metadata=device.sign())
        self.calls[type(request).__name__.removesuffix("Request")] += 1
        return response

    async def _begin(self, device: Device, stub: FleetStub) -> None:
        """Register and activate a device."""
        async with self._slots:
            await self._call(device, stub.RegisterNode, RegisterNodeFleetRequest(public_key=device.public))
            activate = ActivateNodeRequest(public_key=device.public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            device.node = Node(node_id=(await self._call(device, stub.ActivateNode, activate)).node_id)

    async def _follow(self, device: Device, stub: FleetStub) -> None:
        """Look for messages and answer them, until this is cancelled."""
        await asyncio.sleep(device.number / self._count * self.poll)  # devices do not all look at the same moment
        while True:
            try:
                if not await self._look(device, stub):
                    await asyncio.sleep(self.poll)
            except grpc.aio.AioRpcError as error:  # such as a run that has ended meanwhile
                self._failed(error)
                await asyncio.sleep(self.poll)

    async def _beat(self, device: Device, stub: FleetStub) -> None:
        """Send heartbeats, whatever the device is doing, until this is cancelled."""
        pause = HEARTBEAT_BASE_MULTIPLIER * HEARTBEAT_DEFAULT_INTERVAL
        beat = SendNodeHeartbeatRequest(node=device.node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        await asyncio.sleep(device.number / self._count * pause)
        while True:
            try:
                await self._call(device, stub.SendNodeHeartbeat, beat)
            except grpc.aio.AioRpcError as error:
                self._failed(error)
            await asyncio.sleep(pause)

    def _failed(self, error: grpc.aio.AioRpcError) -> None:
        self.failures[f"{error.code().name}: {error.details()}"[:200]] += 1

    async def _look(self, device: Device, stub: FleetStub) -> bool:
        """Look for one message and answer it; return whether there was one."""
        found = await self._call(device, stub.PullMessages, PullMessagesRequest(node=device.node))
        if not found.messages_list:
            return False
        message = message_from_proto(found.messages_list[0])
        async with self._slots:
            config = await self._fetched(device, stub, message, found.message_object_trees[0])
            content = None if config is None else self._answer(device.number, message, config)
            if content is not None:
                await self._push(device, stub, Message(content, reply_to=message))
        return True

    async def _fetched(
        self, device: Device, stub: FleetStub, message: Message, tree: ObjectTree
    ) -> ConfigRecord | None:
        """Fetch all objects of a message, and return its config; None if the SuperLink has dropped one of them."""
        config, run = ConfigRecord(), message.metadata.run_id
        for name in dict.fromkeys(one.object_id for one in iterate_object_tree(tree)):
            wanted = PullObjectRequest(node=device.node, run_id=run, object_id=name)
            while not (got := await self._call(device, stub.PullObject, wanted)).object_available:
                if not got.object_found:
                    self.failures["an object of a message is gone"] += 1
                    return None
                await asyncio.sleep(UNAVAILABLE)
            if get_object_head_values_from_object_content(got.object_content)[0] == ConfigRecord.__qualname__:
                config = ConfigRecord.inflate(got.object_content)
        confirm = ConfirmMessageReceivedRequest(
            node=device.node, run_id=run, message_object_id=message.metadata.message_id
        )
        await self._call(device, stub.ConfirmMessageReceived, confirm)
        return config

    async def _push(self, device: Device, stub: FleetStub, reply: Message) -> None:
        """Announce a reply and send the objects that the SuperLink lacks."""
        objects = {name: one.deflate() for name, one in get_all_nested_objects(reply).items()}
        reply.metadata.__dict__["_message_id"] = reply.object_id
        announced = PushMessagesRequest(
            node=device.node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
            clientapp_runtime_list=[0.0],
        )
        response = await self._call(device, stub.PushMessages, announced)
        for name in response.objects_to_push:
            one = PushObjectRequest(
                node=device.node, run_id=reply.metadata.run_id, object_id=name, object_content=objects[name],
                session_id=response.session_id,
            )  # fmt: skip
            if not (await self._call(device, stub.PushObject, one)).stored:
                self.failures["an object was not stored: its session has ended"] += 1
                return
