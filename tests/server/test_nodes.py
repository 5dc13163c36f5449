"""Nodes by partition: identities, sampling, answers in one order, and nodes that come back as others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta.messages.replies import Identity, Reply
from fedtta.messages.requests import Identify, Request
from fedtta.messages.transport import Addressed
from fedtta.server.events import Event, Events, NodesMissing, RunError
from fedtta.server.nodes import FederationInfo, Nodes, gather, grouped, identify, sample, wait_for_nodes
from tests.transports import Client, Clock, FakeTransport

SILENT = Events()
WHO = Identify(settings="{}", run="run")
IDENTITY = Identity(
    partition_id=0, num_partitions=3, classes=["cat", "dog"], channels=3, mean=[0.5], std=[0.2], shifts=["original"],
    note="", corruptions=["fog"], stream_rounds=15, sizes=[5, 4, 3], role="both",
)  # fmt: skip


def says(partition: int, **changes: Any) -> Client:
    """A node that reports an identity."""
    return lambda request: replace(IDENTITY, partition_id=partition, **changes)


def raises(request: Request) -> Reply:
    raise RuntimeError("disk full")


def silent(request: Request) -> None:
    return None


# -- the start of a run


def test_nodes_are_identified_by_their_partition() -> None:
    transport = FakeTransport({70: says(1), 50: says(0)}, order=lambda found: found[::-1])
    by_partition, identities = identify(transport, [70, 50], WHO, 5, SILENT)
    assert by_partition == {0: 50, 1: 70}
    assert [identity.partition_id for identity in identities.values()] == [0, 1]


def test_nodes_that_cannot_be_identified_are_named() -> None:
    transport = FakeTransport({7: raises, 8: says(0), 9: says(0)})
    with pytest.raises(NodesMissing, match=r"node 7: RuntimeError: disk full; nodes 8 and 9 both hold partition 0"):
        identify(transport, [7, 8, 9], WHO, 5, SILENT)


def test_waiting_for_nodes_is_bounded() -> None:
    with pytest.raises(NodesMissing, match="2 of 3 nodes are connected"):
        wait_for_nodes(FakeTransport({1: silent, 2: silent}), 3, timeout=0.01)


def test_clients_must_agree_about_their_data() -> None:
    info = FederationInfo.agree({1: replace(IDENTITY, role="target", sizes=[0, 0, 3]), 0: IDENTITY})
    assert (info.roles, info.sizes, info.classes) == (["both", "target"], [[5, 4, 3], [0, 0, 3]], ["cat", "dog"])
    assert (info.corruptions, info.stream_rounds) == (["fog"], 15)
    with pytest.raises(RunError, match=r"client 1: classes = \['b'\], others have \['cat', 'dog'\]"):
        FederationInfo.agree({0: IDENTITY, 1: replace(IDENTITY, classes=["b"])})
    with pytest.raises(RunError, match="client 1: stream-rounds = 7, others have 15"):
        FederationInfo.agree({0: IDENTITY, 1: replace(IDENTITY, stream_rounds=7)})


# -- a round


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_answers_are_sorted_by_partition_whatever_the_order_of_arrival(order: tuple[int, ...]) -> None:
    clients = {10: says(2), 11: raises, 12: silent}
    transport = FakeTransport(clients, order=lambda found: [found[i] for i in (*order, 3)])
    seen: list[Event] = []
    requests = [Addressed(node, WHO) for node in (11, 12, 13, 10)]
    answers = gather(transport, requests, {10: 2, 11: 0, 12: 1, 13: 3}, 7.5, Events(seen.append), "train")
    assert [(one.node, one.kind) for one in answers] == [(11, "failed"), (12, "late"), (10, ""), (13, "failed")]
    assert [one.reason for one in answers] == [
        "RuntimeError: disk full", "no reply within 7.5 s", "", "the node is not there"
    ]  # fmt: skip
    assert seen[0] == {**seen[0], "event": "phase", "name": "train", "total": 4}
    assert {one["partition"] for one in seen[1:]} == {0, 2, 3}, "a late reply is no answer"


def test_equal_reasons_are_told_once() -> None:
    lines = grouped("client", {0: "disk full", 1: "no reply", 4: "disk full"})
    assert lines == ["clients 0, 4: disk full", "client 1: no reply"]


@given(st.integers(1, 200), st.floats(0.01, 1), st.integers(0, 99), st.integers(1, 99))
def test_sampling_depends_on_seed_and_round_alone(n: int, fraction: float, seed: int, round: int) -> None:
    chosen = sample(list(range(n)), fraction, seed, round)
    assert chosen == sample(list(range(n))[::-1], fraction, seed, round) == sorted(set(chosen))
    assert len(chosen) == max(1, int(n * fraction))
    assert set(chosen) <= set(range(n))


def test_rounds_sample_differently() -> None:
    assert len({tuple(sample(range(50), 0.2, 1, round)) for round in range(1, 6)}) == 5


# -- nodes that come back


class Place:
    """Three clients, of which partition 1 has lost its node 101; partition i was node 100 + i."""

    def __init__(self, **others: Client) -> None:
        self.clock, self.events = Clock(), list[Event]()
        self.transport = FakeTransport({100: silent, 102: silent}, clock=self.clock)
        self.transport.clients.update({int(name.removeprefix("n")): client for name, client in others.items()})
        identities = {i: replace(IDENTITY, partition_id=i) for i in range(3)}
        by_partition = {i: 100 + i for i in range(3)}
        self.nodes = Nodes(self.transport, by_partition, identities, self.clock, self.clock.sleep)

    def rejoin(self) -> dict[int, int]:
        return self.nodes.rejoin(WHO, 300, Events(self.events.append), {"training": "t", "round": 2})


def test_a_client_that_came_back_as_another_node_replaces_its_old_node() -> None:
    place = Place(n7=says(1))
    assert place.nodes.missing() == [1]
    assert place.rejoin() == {1: 101}
    assert place.nodes.by_partition == {0: 100, 1: 7, 2: 102}
    assert place.nodes.missing() == []
    (event,) = [one for one in place.events if one["event"] == "rejoined"]
    assert event == {**event, "partition": 1, "old_node_id": 101, "node_id": 7, "training": "t", "round": 2}
    assert [timeout for _, timeout in place.transport.sent] == [300]


@pytest.mark.parametrize(
    ("unknown", "kind", "partition", "reason"),
    [
        (says(1, sizes=[9, 4, 3]), "refused", 1, "sizes = [9, 4, 3], at first it was [5, 4, 3]"),
        (says(1, classes=["cat", "cow"]), "refused", 1, "classes = ['cat', 'cow'], at first it was"),
        (says(1, role="target"), "refused", 1, "role = 'target'"),
        (says(0), "refused", 0, "node 100 holds this partition and is connected"),
        (says(9), "refused", 9, "partition-id = 9: allowed are 0, 1, 2"),
        (says(1, mean=[float("nan")]), "refused", None, "mean"),
        (raises, "failed", None, "disk full"),
        (silent, "late", None, "no reply within 300 s"),
    ],
)
def test_an_unknown_node_is_asked_once_and_replaces_only_a_node_with_its_data(
    unknown: Callable, kind: str, partition: int | None, reason: str
) -> None:
    place = Place(n7=unknown)
    assert place.rejoin() == place.rejoin() == {}
    assert place.nodes.by_partition[1] == 101
    (told,) = [one for one in place.events if one["event"] not in ("phase", "answered")]
    assert (told["event"], told["partition"], told["phase"], told["node_id"]) == (kind, partition, "identify", 7)
    assert reason in told["reason"]
    assert len(place.transport.requests(Identify, 7)) == 1


def test_unknown_nodes_are_asked_only_while_a_node_is_missing_and_a_spare_takes_over_later() -> None:
    place = Place(n101=silent, n7=says(0))
    assert place.rejoin() == {}
    assert not place.transport.sent
    del place.transport.clients[101]
    assert place.rejoin() == {}  # now it is identified, and its partition has a node
    del place.transport.clients[100]
    assert place.rejoin() == {0: 100}
    assert len(place.transport.requests(Identify)) == 1


def test_waiting_for_enough_nodes_looks_before_each_count_and_ends_in_time() -> None:
    place = Place()
    place.clock.later = {7.0: lambda: place.transport.clients.update({7: says(1)})}
    looks: list[float] = []

    def look() -> None:
        looks.append(place.clock.now)
        place.rejoin()

    assert place.nodes.wait_for([0, 1], 2, 300, look) == 2
    assert 7 <= place.clock.now < 8
    assert looks[0] == 0
    assert place.nodes.wait_for([0, 1], 3, 5, look) == 2
    assert place.clock.now == pytest.approx(looks[0] + 7 + 5, abs=0.5)
