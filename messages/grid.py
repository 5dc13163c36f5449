"""Flower's grids as a transport: Flower's simulation, or SuperNodes over HTTP.

What it relies on of Flower's internals, and why:
- An error that the SuperLink makes carries the SuperLink's id: the node is found by the message that is answered.
- Codes of errors: 3 and 4 for a message or reply that has expired (its time to live is the deadline).
- A SuperNode that has a reply more than it took messages is one reply behind for good: it pushes a reply when it takes
  the next message (`_push_messages` waits for a reply only if it has none). Such a reply is the error that it makes
  when a client process ends without an answer after the run has ended. `_Reminders` bring it to push what it holds.
- A SuperLink takes a reply from any node that knows the message's id and claims the addressed node's id. Each message
  has a secret, which its reply repeats. The id is a digest of the content, so the secret makes it unguessable, too.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedtta.messages.arrays import array_bytes
from fedtta.messages.flower import CONTENT, SECRET, block_record, from_content, held_record, secret_of
from fedtta.messages.inbox import Incomplete, by_threads, inbox_of, over_http
from fedtta.messages.record import Record
from fedtta.messages.replies import Identity, Telemetry
from fedtta.messages.requests import Observe
from fedtta.messages.transport import Addressed, Answer, late, read_answer, unknown_node

LOG = logging.getLogger(__name__)
EXPIRED = (3, 4)
POLL = 0.05  # seconds between two looks for replies, at least
IDLE = 19  # times as long as a look took: looking at hundreds of messages must not take a core from the clients
REST = 1.0  # seconds at most: a look may be slow because the machine is busy, or because it brings large models
#: Requests that are pushed at once, and bytes of different arrays in them: Flower hashes arrays once for each push.
BATCH, BATCH_BYTES = 64, 256 << 20
SENT = 3  # times that a request is sent at most, when replies come without its secret
#: After so many seconds without a reply, or a part of the timeout if that is less, the nodes that have not answered are
#: sent so many reminders, which live so long: an idle SuperNode looks for messages every three seconds. The wait then
#: doubles.
REMIND, REMIND_PART, REMINDERS, REMINDER_LIFE = 60.0, 1 / 4, 3, 10.0
#: A reply has at most so many bytes, and so many times the bytes of the largest request: it holds a part of the
#: network, or statistics of it, up to three times over (what is shared, its start, and the normalization).
REPLY_BYTES, REPLY_TIMES = 64 << 20, 4
#: What a key is registered as that was enrolled without the name of a device: the file that `fedtta keys` wrote.
UNNAMED = re.compile(r"node-[0-9]+")


@dataclass(frozen=True)
class _Sent:
    """A request under way: its secret, and how often it has been sent."""

    one: Addressed
    secret: str
    times: int


class _Reminders:
    """Messages to nodes that have not answered, so that a SuperNode which is one reply behind pushes it.

    They are sent when no reply has come for a while: many devices may answer for minutes, and messages to all that are
    still waited for would only hold them up. A SuperNode at work does not take them before they expire. When two of
    them are answered at the same time, it pushes both replies at once, and is behind no longer.

    Parameters
    ----------
    every : float
        Seconds until the first ones.
    now : float
    """

    def __init__(self, every: float, now: float) -> None:
        self._every, self._due = every, now + every
        self.tickets: list[str] = []  # of the last ones: their replies are asked for, so that the SuperLink drops them

    def answered(self, now: float) -> None:
        """Wait again: a reply has come."""
        self._due = now + self._every

    def send(self, grid: Grid, waiting: Iterable[_Sent], now: float) -> None:
        """Remind the nodes of these requests if it is time."""
        if now < self._due:
            return
        self._every *= 2
        self._due, self.tickets = now + self._every, []
        nodes = {(sent.one.request.run, sent.one.node) for sent in waiting}
        reminded = [one for one in nodes for _ in range(REMINDERS)]
        for start in range(0, len(reminded), BATCH):
            # made when they are sent: at a busy SuperLink they live no longer than a few pushes take
            messages = [_reminder(*one) for one in reminded[start : start + BATCH]]
            self.tickets += [ticket for ticket in _pushed(grid, messages) if ticket]


class GridTransport:
    """A transport over a Flower grid: Flower's simulation, or SuperNodes over HTTP.

    Parameters
    ----------
    grid : Grid
    window : int or None
        Messages under way at once. Flower's simulation looks at every message under way once per node, ten times a
        second, in the server's process: with 240 messages to 300 nodes that takes a core from the clients.
    clock, sleep : callable

    Attributes
    ----------
    concurrent : bool
        Whether two exchanges may be under way at once, in two threads.
    """

    def __init__(
        self,
        grid: Grid,
        window: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if window is not None and window < 1:
            raise ValueError(f"window = {window}: allowed is 1 or more")
        self.grid, self.window, self._clock, self._sleep = grid, window, clock, sleep
        self.concurrent = over_http(grid)
        self._reminds = self.concurrent
        self._largest = 0  # bytes of the arrays of a request so far

    def nodes(self) -> list[int]:
        """Return the nodes that the grid has."""
        return list(self.grid.get_node_ids())

    def patient(self) -> GridTransport:
        """Return a transport over the same grid that looks for replies once in `REST` seconds, without reminders."""
        made = GridTransport(self.grid, self.window, self._clock, lambda seconds: self._sleep(max(REST, seconds)))
        made._reminds = False
        return made

    def exchange(self, requests: Sequence[Addressed], timeout: float) -> Iterator[Answer]:
        """See `Transport.exchange`.

        A message lives no longer than the timeout, so that a node that returns later does not work on it; clocks must
        agree to well within it. A message to a node that the grid does not have is not sent. One whose reply lacks its
        secret is sent again under another one: the SuperLink keeps only one reply to a message, the forged one. A
        client with another name than its node's key was enrolled under, or with that of another key, is refused.
        """
        end = self._clock() + timeout
        connected = {node.node_id: node.name for node in self.grid.get_nodes()}
        queued = [(one, 1) for one in reversed(requests)]
        waiting: dict[str, _Sent] = {}
        inbox = inbox_of(self.grid, self._most_bytes, lambda: self._clock() >= end)
        reminders = _Reminders(min(REMIND, REMIND_PART * timeout), self._clock()) if self._reminds else None
        try:
            while queued or waiting:
                if queued and (free := self._free(waiting)):
                    batch = _batch(queued, free)
                    yield from (unknown_node(one) for one, _ in batch if one.node not in connected)
                    batch = [(one, times) for one, times in batch if one.node in connected]
                    for one in self._send(batch, timeout, waiting):
                        if self._clock() >= end:  # a SuperLink takes no message whose life has ended on the way
                            yield late(one, timeout)
                        else:
                            yield Answer(one.node, None, "failed", "the message was not accepted for sending")
                began = time.perf_counter()
                asked = [*waiting, *(reminders.tickets if reminders else ())] if waiting else ()
                for ticket, read in inbox.look(asked):
                    if ticket in waiting:
                        if reminders:
                            reminders.answered(self._clock())
                        sent = waiting.pop(ticket)
                        answer = _answer(sent, read)
                        if answer is None:
                            queued.append((sent.one, sent.times + 1))
                        else:
                            yield _as_enrolled(answer, connected)
                        del answer, sent, read  # a large reply must not be here while the next one comes
                    elif reminders and ticket in reminders.tickets:  # not one of former reminders that comes late
                        reminders.tickets.remove(ticket)
                if self._clock() >= end:
                    break
                if waiting and reminders:
                    reminders.send(self.grid, waiting.values(), self._clock())
                if waiting and not (queued and self._free(waiting)):
                    took = time.perf_counter() - began
                    self._sleep(min(max(POLL, min(REST, IDLE * took)), max(0.0, end - self._clock())))
            for ticket, sent in waiting.items():
                yield _late(sent, timeout, inbox.announced(ticket))
            for one, _ in queued:
                yield late(one, timeout)
        finally:
            inbox.close()

    def _free(self, waiting: Sized) -> int:
        """Return how many requests may be sent now."""
        return BATCH if self.window is None else min(BATCH, self.window - len(waiting))

    def _most_bytes(self) -> int:
        return REPLY_BYTES + REPLY_TIMES * self._largest

    def _send(
        self, batch: Sequence[tuple[Addressed, int]], timeout: float, waiting: dict[str, _Sent]
    ) -> list[Addressed]:
        """Send requests, each under a new secret, and note their tickets; return those that the grid did not take."""
        records: dict[int, ArrayRecord] = {}
        sent, messages = [], []
        for one, times in batch:
            plain, secret = one.request.to_record(), secrets.token_hex(16)
            message = _message(one.node, plain, secret, records, self.concurrent)
            message.metadata.ttl = timeout
            self._largest = max(self._largest, sum(array_bytes(arrays) for arrays in plain.arrays.values()))
            sent.append(_Sent(one, secret, times))
            messages.append(message)
        tickets = _pushed(self.grid, messages) if messages else []
        waiting.update({ticket: one for ticket, one in zip(tickets, sent, strict=True) if ticket})
        return [one.one for ticket, one in zip(tickets, sent, strict=True) if not ticket]


def _pushed(grid: Grid, messages: Sequence[Message]) -> list[str | None]:
    """Push messages; return their tickets, None for those that were not taken.

    A SuperLink refuses a whole push that is too large, or with a message whose life has ended on the way; the second is
    a server error. Neither may end the run.
    """
    tickets: list[str | None] = []
    try:
        tickets += [ticket or None for ticket in _push(grid, messages)]
    except httpx.HTTPStatusError as error:
        if not error.response.is_server_error:
            raise
        LOG.warning("%d messages were not taken: %s", len(messages), str(error).partition("\n")[0])
    return tickets + [None] * (len(messages) - len(tickets))


def _push(grid: Grid, messages: Sequence[Message]) -> Iterable[str]:
    """Push messages by a thread of their own, so that a signal ends it (`by_threads`): `HttpGrid` waits for threads."""
    if not over_http(grid):
        return grid.push_messages(messages)
    pool = ThreadPoolExecutor(1, "push")
    try:
        return by_threads(pool, grid.push_messages, [messages])[0]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _reminder(run: str, node: int) -> Message:
    message = _message(node, Observe(settings="{}", run=run).to_record(), secrets.token_hex(16), {})
    message.metadata.ttl = REMINDER_LIFE
    return message


def _batch(queued: list[tuple[Addressed, int]], most: int) -> list[tuple[Addressed, int]]:
    """Take as many requests from the end as may be pushed at once, at least one."""
    batch: list[tuple[Addressed, int]] = []
    sizes: dict[int, int] = {}
    while queued and len(batch) < most and sum(sizes.values()) < BATCH_BYTES:
        batch.append(queued.pop())
        arrays = batch[-1][0].request.to_record().arrays.values()
        sizes |= {id(one): array_bytes(one) for one in arrays}
    return batch


def _message(node: int, plain: Record, secret: str, records: dict[int, ArrayRecord], blocks: bool = False) -> Message:
    """Return a request as a message; arrays that requests have in common become one record, or one block."""
    content = RecordDict()
    for name, arrays in plain.arrays.items():
        if id(arrays) not in records:
            records[id(arrays)] = (block_record if blocks else held_record)(arrays)
        content[name] = records[id(arrays)]
    content["config"] = ConfigRecord({CONTENT: json.dumps(plain.values), SECRET: secret})
    return Message(content, dst_node_id=node, message_type=plain.kind)


def _answer(sent: _Sent, read: Callable[[], Message]) -> Answer | None:
    """Return what a message brought; None if it lacks the secret and the request may be sent again."""
    one, message = sent.one, _opened(read)
    if isinstance(message, Incomplete):  # the line was cut: nothing says that the node is to blame
        return Answer(one.node, None, "failed", str(message))
    if isinstance(message, Message) and message.has_error():
        reason = f"error {message.error.code}: {_last_line(message.error.reason)}"
        return Answer(one.node, None, "late" if message.error.code in EXPIRED else "failed", reason)
    if isinstance(message, Message) and secret_of(message.content) != sent.secret:
        return None if sent.times < SENT else Answer(one.node, None, "refused", f"{SENT} replies without the secret")

    def record() -> Record:
        if isinstance(message, Exception):
            raise message
        return from_content(type(one.request).reply.kind, message.content)

    return read_answer(one, record)


def _as_enrolled(answer: Answer, enrolled: Mapping[int, str]) -> Answer:
    """Refuse what tells another name than the node's key was enrolled under: it would take another client's place.

    Parameters
    ----------
    enrolled : mapping
        Connected node → the name of its key. One without a device's name may tell any that no other of these has.
    """
    name = enrolled[answer.node]
    told = answer.reply.name if isinstance(answer.reply, Identity | Telemetry) else name
    if told == name or not name:
        return answer
    if not UNNAMED.fullmatch(name):
        return Answer(answer.node, None, "refused", f"{told}: the key of node {answer.node} is enrolled as {name!r}")
    holder = next((node for node, other in enrolled.items() if other == told), None)
    if holder is None or UNNAMED.fullmatch(told):
        return answer
    return Answer(answer.node, None, "refused", f"{told}: the key of node {holder} is enrolled under this name")


def _opened(read: Callable[[], Message]) -> Message | Exception:
    """Return a message, or what its bytes raised."""
    try:
        return read()
    except Exception as error:
        return error


def _late(sent: _Sent, timeout: float, announced: bool) -> Answer:
    if announced:
        return Answer(sent.one.node, None, "late", f"a reply was announced, but not sent within {timeout:g} s")
    return late(sent.one, timeout)


def _last_line(reason: str | None) -> str:
    """Return the last line of an error's text, which Flower writes as `<class 'E'>:<'text'>` and Ray as a traceback."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", reason or "").splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    return re.sub(r"^<class '(?:\w+\.)*(\w+)'>:<'", r"\1: ", lines[-1]).removesuffix("'>")
