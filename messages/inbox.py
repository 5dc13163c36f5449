"""Replies at a SuperLink, fetched object by object: no node holds up the others, and none fills the memory.

`HttpGrid.pull_messages` (flwr 1.39) waits for the objects of one reply after the other, minutes for a reply that a node
announced and never sends; it unpacks whatever came, also an array that lists one chunk a million times; and when one
reply makes it raise, the other replies of the call are lost. `HttpInbox` sends the SuperLink the same requests
(`PullMessages`, `PullObject`, `ConfirmMessageReceived`), waits for no reply, and bounds what a reply unpacks to.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

import httpx
from flwr.app import Array, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

if TYPE_CHECKING:
    from flwr.superlink.grid.http_grid import HttpGrid

OBJECTS = 200_000  # of a reply, at most: Flower makes one or more of every array and each 5 MB of it
STRUCTURE_BYTES = 8 << 20  # of an object that is no part of an array, at most
PARALLEL = 4  # objects of a large reply that are fetched at once
COMPANY = 8  # replies that are fetched at once, as long as none is large
SMALL = 4 << 20  # bytes of a reply, at most, that is not large
TURN = 1.0  # seconds of a look for one reply: a large one must not keep those behind it waiting
HELD = 256 << 20  # bytes of replies that have come in part; beyond that no other is begun
T = TypeVar("T")
R = TypeVar("R")
#: The ticket of a request, and a function that returns its reply or raises whatever the reply's bytes make it raise.
Arrival = tuple[str, Callable[[], Message]]


class Incomplete(ValueError):
    """A reply was announced, and a part of it never came: the SuperLink has dropped it after three minutes."""


class Inbox(Protocol):
    """The replies to the messages of one exchange."""

    def look(self, tickets: Sequence[str]) -> Iterator[Arrival]:
        """Yield the replies to these messages that have come since the last look, each once; wait for none."""

    def announced(self, ticket: str) -> bool:
        """Return whether a node has announced a reply that is not there yet."""

    def close(self) -> None:
        """Drop what has not come."""


class GridInbox:
    """The replies on a grid whose nodes run in this process's care, as those of Flower's simulation."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def look(self, tickets: Sequence[str]) -> Iterator[Arrival]:
        """See `Inbox.look`."""
        for message in self._grid.pull_messages(list(tickets)):
            yield message.metadata.reply_to_message_id, partial(_same, message)

    def announced(self, ticket: str) -> bool:
        """See `Inbox.announced`; a reply of this grid is there as a whole."""
        return False

    def close(self) -> None:
        """See `Inbox.close`."""


@dataclass
class _Coming:
    """A reply that its node has announced: its id, the objects still to be fetched, and those that are here."""

    message: str
    missing: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)
    size: int = 0

    def forget(self) -> None:
        """Fetch later what has come."""
        self.missing += self.contents
        self.contents, self.size = {}, 0


class HttpInbox:
    """The replies at a SuperLink.

    Parameters
    ----------
    grid : HttpGrid
    most : callable
        Bytes of a reply, as it travels and unpacked, at most; asked at each look.
    over : callable
        Whether the time of the exchange is over; large replies are no longer fetched then.
    """

    def __init__(self, grid: HttpGrid, most: Callable[[], int], over: Callable[[], bool]) -> None:
        self._client, self._node, self._run = grid._runtime_client, grid.node, grid.run.run_id
        self._most, self._over = most, over
        self._coming: dict[str, _Coming] = {}
        self._objects = ThreadPoolExecutor(PARALLEL, "objects")
        self._replies = ThreadPoolExecutor(COMPANY, "replies")
        self._large = False  # whether one of this exchange's replies so far is large

    def look(self, tickets: Sequence[str]) -> Iterator[Arrival]:
        """See `Inbox.look`; what of a reply has not come is asked for again at the next look."""
        yield from self._ask([ticket for ticket in tickets if ticket not in self._coming])
        left = list(self._coming.items())
        while left:
            # a SuperLink at its limit serves those who ask more often: a thousand devices do, so small replies, which
            # are many calls and few bytes, are fetched together
            together = 1 if self._large else COMPANY
            turn, left = left[:together], left[together:]
            held = self._held()
            turn = [(ticket, coming) for ticket, coming in turn if coming.contents or held <= HELD]
            if len(turn) == 1:
                reads = [self._turn(turn[0][1])]
            else:
                reads = by_threads(self._replies, partial(self._turn, together=True), [coming for _, coming in turn])
            for (ticket, _), read in zip(turn, reads, strict=True):
                if read is not None:
                    del self._coming[ticket]
                    yield ticket, read

    def announced(self, ticket: str) -> bool:
        """See `Inbox.announced`."""
        return ticket in self._coming

    def close(self) -> None:
        """See `Inbox.close`."""
        for pool in (self._replies, self._objects):
            pool.shutdown(wait=False, cancel_futures=True)
        for coming in self._coming.values():
            self._confirm(coming)
        self._coming.clear()

    def _ask(self, tickets: Sequence[str]) -> Iterator[Arrival]:
        """Ask for announced replies. If one makes the SuperLink fail, ask for each alone, and yield that one."""
        if not tickets:
            return
        try:
            response = self._client.PullMessages(PullAppMessagesRequest(message_ids=list(tickets)))
        except (ValueError, httpx.HTTPStatusError) as error:
            if len(tickets) == 1:
                yield tickets[0], partial(_raise, error)
            else:
                for ticket in tickets:
                    yield from self._ask([ticket])
            return
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            # the SuperLink's metadata: those inside the reply are the node's own word
            metadata = message.metadata
            if metadata.reply_to_message_id in tickets:
                # fetched from the last one on: a node pushes them in this order, so that of a reply which it is still
                # pushing nothing is held here
                objects = list(dict.fromkeys(one.object_id for one in iterate_object_tree(tree)))
                self._large = self._large or _in_chunks(tree)
                self._coming[metadata.reply_to_message_id] = _Coming(metadata.message_id, objects)

    def _turn(self, coming: _Coming, together: bool = False) -> Callable[[], Message] | None:
        """Fetch a reply for one turn; return what reads it, and let the SuperLink forget it; None if it is not here."""
        read: Callable[[], Message]
        try:
            if not self._fetch(coming, together):
                return None
            read = partial(unpacked, coming.message, coming.contents, self._most())
        except (ValueError, httpx.HTTPStatusError) as error:
            read = partial(_raise, error)
        self._confirm(coming)
        return read

    def _fetch(self, coming: _Coming, together: bool) -> bool:
        """Fetch the missing objects of a reply that are there, for one turn; return whether all are here.

        Together with other replies this ends when the reply turns out to be large.

        Raises
        ------
        Incomplete
            The SuperLink does not have one of them.
        ValueError
            There are too many objects or bytes.
        """
        if len(coming.missing) > OBJECTS:
            raise ValueError(f"a reply of {len(coming.missing)} objects; allowed are at most {OBJECTS}")
        end = time.monotonic() + TURN
        while coming.missing and time.monotonic() < end and not self._over():
            if together and coming.size > SMALL:
                self._large = True
                return False
            wanted = coming.missing[-1:] if together else coming.missing[-PARALLEL:]
            complete = True
            pulled = (
                [self._pull(name) for name in wanted] if together else by_threads(self._objects, self._pull, wanted)
            )
            for name, response in zip(wanted, pulled, strict=True):
                if not response.object_found:
                    raise Incomplete(f"the reply lacks its object {name[:12]}")
                if not response.object_available:
                    complete = False
                    continue
                coming.missing.remove(name)
                coming.contents[name] = response.object_content
                coming.size += len(response.object_content)
                if coming.size > (most := self._most()):
                    raise ValueError(f"a reply of more than {most} bytes")
            if not complete:
                if self._held() > HELD:
                    coming.forget()
                return False
        return not coming.missing

    def _held(self) -> int:
        return sum(coming.size for coming in self._coming.values())

    def _pull(self, name: str) -> Any:
        return self._client.PullObject(PullObjectRequest(node=self._node, run_id=self._run, object_id=name))

    def _confirm(self, coming: _Coming) -> None:
        """Let the SuperLink forget a reply; if it cannot, it does so when the reply expires."""
        request = ConfirmMessageReceivedRequest(node=self._node, run_id=self._run, message_object_id=coming.message)
        with suppress(ValueError, httpx.HTTPStatusError):
            self._client.ConfirmMessageReceived(request)


def _in_chunks(tree: ObjectTree) -> bool:
    """Return whether a message has an array of more than one chunk, 5 MB."""
    arrays = (array for content in tree.children for record in content.children for array in record.children)
    return any(len(array.children) > 1 for array in arrays)


def inbox_of(grid: Grid, most: Callable[[], int], over: Callable[[], bool]) -> Inbox:
    """Return the inbox of a grid; see `HttpInbox` for the arguments."""
    return HttpInbox(grid, most, over) if over_http(grid) else GridInbox(grid)


def over_http(grid: Grid) -> TypeGuard[HttpGrid]:
    """Return whether a grid reaches a SuperLink over HTTP."""
    from flwr.superlink.grid.http_grid import HttpGrid  # a second of imports that no simulation needs

    return isinstance(grid, HttpGrid)


def by_threads(pool: ThreadPoolExecutor, function: Callable[[T], R], values: Sequence[T]) -> list[R]:
    """Return what a function that calls a SuperLink gives for each value; a signal ends the wait.

    Flower ends an app whose SuperLink is gone by a signal. The main thread runs its handler, so it must wake up now and
    then: the pool's threads try to reach that SuperLink for as long as it takes.
    """
    futures = [pool.submit(function, value) for value in values]
    while wait(futures, timeout=TURN).not_done:
        pass
    return [future.result() for future in futures]


def unpacked(message: str, contents: dict[str, bytes], most: int) -> Message:
    """Return the message that objects make up.

    Parameters
    ----------
    message : str
        The id of the message's own object.
    contents : dict
        id → bytes of an object; empty afterwards.
    most : int
        Bytes of all arrays, at most.

    Raises
    ------
    ValueError
        An object is too large, or the arrays are.
    Exception
        Whatever Flower raises for objects that do not fit each other.
    """
    size, chunks = 0, dict[str, list[str]]()
    for name, content in contents.items():
        kind, parts, _ = get_object_head_values_from_object_content(content)
        if kind != "ArrayChunk" and len(content) > STRUCTURE_BYTES:
            raise ValueError(f"an object {kind[:20]} of {len(content)} bytes; allowed are at most {STRUCTURE_BYTES}")
        if kind == "Array":  # it lists its chunks by position, and may list one as often as it likes
            chunks[name] = [parts[number] for number in _about(content)["arraychunk_ids"]]
            size += sum(len(contents[chunk]) for chunk in chunks[name])
            if size > most:
                raise ValueError(f"arrays of more than {most} bytes")
    found = inflate_object_from_contents(message, contents, objects=_joined(contents, chunks))
    contents.clear()  # so that the caller, who still has the mapping, does not hold the reply twice
    if not isinstance(found, Message):
        raise ValueError(f"the reply is a {type(found).__name__}")
    return found


def _about(array: bytes) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(array.partition(HEAD_BODY_DIVIDER)[2])
    return about


def _joined(contents: dict[str, bytes], chunks: Mapping[str, Sequence[str]]) -> dict[str, InflatableObject]:
    """Return arrays by id, with the numbers of their chunks, which are dropped; Flower would have them four times."""
    left = Counter(chain.from_iterable(chunks.values()))
    arrays: dict[str, InflatableObject] = {}
    for name, parts in chunks.items():
        about, data = _about(contents[name]), BytesIO()
        for part in parts:
            data.write(memoryview(contents[part])[contents[part].index(HEAD_BODY_DIVIDER) + 1 :])
            left[part] -= 1
            if not left[part]:
                del contents[part]
        arrays[name] = Array(about["dtype"], tuple(about["shape"]), about["stype"], data.getvalue())
    return arrays


def _same(message: Message) -> Message:
    return message


def _raise(error: Exception) -> Message:
    raise error
