"""Who is there: nodes known by their partition, and collecting their replies."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from messages.held import hold
from server.errors import NodesMissing
from server.events import Events

POLL = 0.05  # seconds between two looks for replies, at least
IDLE = 19  # times as long as a look took: looking at hundreds of messages must not take a core from the work
REST = 1.0  # seconds at most: a look may be slow because the machine is busy, or because it brings large models
IDENTIFY = "query.identify"
#: Flower's codes for a message or a reply that has expired: its time to live is the deadline.
EXPIRED = (3, 4)


@dataclass(frozen=True)
class Answer:
    """What came back from one node: a reply, or None and the reason why not; `kind` is then "failed" or "late"."""

    partition: int
    node_id: int
    reply: Message | None
    reason: str = ""
    kind: str = ""


class CohortGrid(Grid):
    """A view of a grid that shows only the nodes of a cohort.

    Flower's strategies sample from the grid with the global random generator; given this view and a fraction of one,
    they take exactly the cohort that we sampled by partition.
    """

    def __init__(self, grid: Grid, node_ids: Sequence[int]) -> None:
        self._grid = grid
        self._node_ids = list(node_ids)

    def get_node_ids(self) -> Iterable[int]:
        """Return the cohort."""
        return list(self._node_ids)

    def set_run(self, run: Any) -> None:
        """Pass on to the grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """Return the grid's run."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Pass on to the grid."""
        return self._grid.create_message(*args, **kwargs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Pass on to the grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pass on to the grid."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Pass on to the grid."""
        return self._grid.send_and_receive(messages, timeout=timeout)


def wait_for_nodes(grid: Grid, expected: int, timeout: float, poll: float = 0.2) -> list[int]:
    """Wait until `expected` nodes are there: a ServerApp starts before all nodes are registered.

    Raises
    ------
    NodesMissing
        Fewer are there after `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while len(nodes := list(grid.get_node_ids())) < expected:
        if time.monotonic() > end:
            raise NodesMissing(f"{len(nodes)} of {expected} nodes are there after {timeout:g} s")
        time.sleep(poll)
    return nodes


def identify(
    grid: Grid, node_ids: Sequence[int], config: ConfigRecord, timeout: float, events: Events
) -> tuple[dict[int, int], dict[int, dict[str, Any]]]:
    """Ask the nodes which partition they hold.

    Returns
    -------
    nodes, identities
        partition → node id, and partition → what the node said of itself.

    Raises
    ------
    NodesMissing
        A node did not answer or failed, or two hold the same partition; all are named.
    """
    content = RecordDict({"config": config})
    messages = [Message(content, dst_node_id=node, message_type=IDENTIFY) for node in node_ids]
    answers = gather(grid, messages, dict.fromkeys(node_ids, -1), timeout, events, "identify")
    nodes: dict[int, int] = {}
    identities: dict[int, dict[str, Any]] = {}
    identity: dict[str, Any]
    problems = []
    failures: dict[int, str] = {}
    for answer in answers:
        if answer.reply is None:
            failures[answer.node_id] = answer.reason
            continue
        identity = dict(answer.reply.content.config_records["identity"])
        partition = int(identity["partition-id"])
        if partition in nodes:
            problems.append(f"nodes {nodes[partition]} and {answer.node_id} both hold partition {partition}")
            continue
        nodes[partition], identities[partition] = answer.node_id, identity
    problems = grouped("node", failures) + problems
    if problems:
        raise NodesMissing("; ".join(problems))
    return nodes, identities


def gather(
    grid: Grid,
    messages: Iterable[Message],
    partitions: Mapping[int, int],
    deadline: float,
    events: Events,
    phase: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Answer]:
    """Send messages and collect the replies until all are there or `deadline` seconds have passed.

    A message lives no longer than the deadline, so that nobody who comes back later works on it. Clocks must agree to
    well within it. One to a node that the grid does not have is not sent.

    Parameters
    ----------
    partitions : mapping
        node id → partition.
    phase : str
        What the progress calls it.
    clock, sleep : callable

    Returns
    -------
    list of Answer
        One for each message, sorted by partition: floating-point sums must not depend on the order of arrival. An error
        that the SuperLink makes carries the SuperLink's id; the node is found by the message it answers.
    """
    waiting: dict[str, int] = {}
    answers: list[Answer] = []
    there = set(grid.get_node_ids())
    for message in messages:
        node = message.metadata.dst_node_id
        message.metadata.ttl = deadline
        ids = [sent for sent in grid.push_messages([message]) if sent] if node in there else []
        waiting.update(dict.fromkeys(ids, node))
        if not ids:
            reason = "the message was not accepted for sending" if node in there else "the node is not there"
            answers.append(Answer(partitions[node], node, None, reason, "failed"))
    events("phase", name=phase, total=len(waiting) + len(answers))
    end = clock() + deadline
    while waiting:
        began = time.perf_counter()
        for reply in grid.pull_messages(list(waiting)):
            node = waiting.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                reason = f"error {reply.error.code}: {_last_line(reply.error.reason)}"
                kind = "late" if reply.error.code in EXPIRED else "failed"
                answers.append(Answer(partitions[node], node, None, reason, kind))
            else:
                hold(reply.content)
                answers.append(Answer(partitions[node], node, reply))
            events("answered", phase=phase, partition=partitions[node])
        if not waiting or clock() >= end:
            break
        if not getattr(grid, "blocking", False):  # one that takes its time in `pull_messages`
            sleep(min(max(POLL, min(REST, IDLE * (time.perf_counter() - began))), max(0.0, end - clock())))
    late = f"no reply within {deadline:g} s"
    answers += [Answer(partitions[node], node, None, late, "late") for node in waiting.values()]
    return sorted(answers, key=lambda answer: (answer.partition, answer.node_id))


def grouped(kind: str, reasons: Mapping[int, str]) -> list[str]:
    """Return one line for each different reason, naming all who gave it."""
    by_reason: dict[str, list[int]] = {}
    for who, reason in reasons.items():
        by_reason.setdefault(reason, []).append(who)
    return [
        f"{kind}{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {reason}" for reason, who in by_reason.items()
    ]


def _last_line(reason: str | None) -> str:
    """Return the last line of an error's text, which Ray fills with a coloured traceback."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", reason or "").splitlines() if line.strip()]
    return lines[-1].removesuffix("'>") if lines else "no reason given"


def cohort_size(clients: int, fraction: float) -> int:
    """Return how many clients a fraction of them is, at least one."""
    return max(1, int(clients * fraction))


def sample(partitions: Sequence[int], fraction: float, seed: int, round: int) -> list[int]:
    """Sample a fraction of the partitions, at least one, from (seed, round) alone; sorted."""
    ordered = sorted(partitions)
    size = cohort_size(len(ordered), fraction)
    if size == len(ordered):
        return ordered
    draw = np.random.default_rng([seed, round])
    return sorted(int(i) for i in draw.choice(ordered, size, replace=False))
