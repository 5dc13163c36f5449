"""Who takes part in a run: the start, the sample and the order of a round, clients that leave, return and join."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta.messages.replies import Identity, Reply
from fedtta.messages.requests import Identify, Request
from fedtta.messages.transport import Addressed, Answer
from fedtta.server.events import Event, Events, NodesMissing
from fedtta.server.identification import PATIENCE, Identification
from fedtta.server.members import FederationInfo
from fedtta.server.nodes import AGAIN, ASKED, Nodes, Wanted, gather, grouped, sample
from tests.transports import Client, Clock, FakeTransport

SILENT = Events()
WHO = Identify(settings="{}", run="run")
IDENTITY = Identity(
    name="0", classes=["cat", "dog"], channels=3, mean=[0.5], std=[0.2], shifts=["original"],
    note="", corruptions=["fog"], stream_rounds=15, sizes=[5, 4, 3], role="both",
)  # fmt: skip


def says(name: int | str, **changes: Any) -> Client:
    """A node that reports an identity."""
    return lambda request: replace(IDENTITY, name=str(name), **changes)


def raises(request: Request) -> Reply:
    raise RuntimeError("disk full")


def silent(request: Request) -> None:
    return None


# -- the start of a run


class Start:
    """Nodes that are connected when a run begins; `later`: second → nodes that are connected from then on."""

    def __init__(self, clients: dict[int, Client], later: dict[float, dict[int, Client]] | None = None) -> None:
        self.clock, self.events = Clock(), list[Event]()
        self.transport = FakeTransport(clients, clock=self.clock)
        for second, others in (later or {}).items():
            self.clock.later[second] = lambda others=others: self.transport.clients.update(others)
        self.nodes = Nodes(self.transport, clock=self.clock, sleep=self.clock.sleep)

    def begin(self, clients: int, least: int | None = None, most: int = 0, timeout: float = 300) -> list[str]:
        """Return the names of those that take part, by partition."""
        wanted, events = Wanted(clients, least or clients, most), Events(self.events.append)
        found = self.nodes.assemble(WHO, wanted, timeout, events)
        identities = {name: identity for name, node in found.items() if (identity := self.nodes.unknown[node])}
        self.nodes.begin(found, identities, wanted)
        self.nodes.leave_others_alone(events)
        return self.nodes.info.names

    def left_alone(self) -> list[tuple[int, str | None, str]]:
        return [(e["node_id"], e["name"], e["reason"]) for e in self.events if e["event"] == "left_alone"]


def test_partitions_are_positions_in_name_order_whatever_the_order_of_arrival() -> None:
    names = ("site-b", "10", "2", "Site-a")
    for order in itertools.permutations(range(4)):
        start = Start({50 + i: says(names[order[i]]) for i in range(4)})
        assert start.begin(4) == ["2", "10", "Site-a", "site-b"]
        assert start.nodes.by_partition == {p: 50 + order.index(i) for p, i in enumerate((2, 1, 3, 0))}
        assert [start.nodes.identities[p].name for p in range(4)] == start.nodes.info.names
        assert not start.left_alone()


def test_more_than_a_run_waits_for_take_part_up_to_the_limit_by_name() -> None:
    clients = {7: says("c"), 8: says("a"), 9: says("b"), 10: says("d")}
    assert Start(clients).begin(2) == ["a", "b", "c", "d"]
    start = Start(clients)
    assert start.begin(2, most=3) == ["a", "b", "c"]
    assert start.left_alone() == [(10, "d", "d: max-clients = 3, and the run has that many clients")]


def test_it_waits_for_clients_that_fit_and_no_longer() -> None:
    later = {3.0: {8: says("odd", classes=["cow"])}, 5.0: {9: says("b")}, 9.0: {10: says("late")}}
    start = Start({7: says("a"), 6: raises}, later)
    assert start.begin(2) == ["a", "b"]
    assert 5 <= start.clock.now < 6
    assert start.left_alone() == [
        (6, None, "RuntimeError: disk full"), (8, "odd", "odd: classes = ['cow'], the run has ['cat', 'dog']"),
    ]  # fmt: skip


def test_a_node_that_does_not_fit_is_told_before_others_are_waited_for() -> None:
    start = Start({7: says("a"), 8: says("odd", classes=["cow"]), 9: says("b")})
    misfit, told = (8, "odd", "odd: classes = ['cow'], the run has ['cat', 'dog']"), []
    start.clock.later[1.0] = lambda: told.extend(start.left_alone())
    with pytest.raises(NodesMissing, match=r"2 of 3 clients are there after 300 s: a, b; node 8: odd: classes"):
        start.begin(3)
    assert told == start.left_alone() == [misfit]


def test_a_reason_is_forgotten_when_the_node_fits() -> None:
    cow = {"classes": ["cow"]}
    clients = {7: says("b"), 8: says("c"), 9: says("d"), 5: says("y", **cow), 6: says("z", **cow)}
    start = Start(clients, {1.0: {10: says("10", **cow), 11: says("11", **cow)}})  # now most have cows
    with pytest.raises(NodesMissing, match=r"^4 of 5 clients are there after 300 s: 10, 11, y, z; node 7") as caught:
        start.begin(5)
    assert "the run has ['cat', 'dog']" not in str(caught.value)


def test_a_node_that_was_killed_while_it_was_asked_is_asked_again_when_it_is_back() -> None:
    start = Start({7: says("a"), 8: raises}, {5.0: {8: says("b")}})
    start.clock.later[3.0] = lambda: start.transport.clients.pop(8)
    assert start.begin(2) == ["a", "b"]
    assert 5 <= start.clock.now < 6
    assert start.left_alone() == [(8, None, "RuntimeError: disk full")]


def test_a_node_that_could_not_be_reached_is_asked_again_while_a_run_waits_for_it() -> None:
    start = Start({7: says("a"), 8: raises})
    start.clock.later[30.0] = lambda: start.transport.clients.update({8: says("b")})
    assert start.begin(2) == ["a", "b"]
    assert AGAIN <= start.clock.now < AGAIN + 1
    assert len(start.transport.requests(Identify, 7)) == 1
    assert len(start.transport.requests(Identify, 8)) == 2
    assert start.left_alone() == [(8, None, "RuntimeError: disk full")]


@pytest.mark.parametrize(("lost", "asked"), [(raises, 4), (silent, 1)])
def test_a_node_that_failed_is_asked_once_more_before_the_start_is_given_up(lost: Client, asked: int) -> None:
    start = Start({7: says("a"), 8: lost})
    start.clock.later[250.0] = lambda: start.transport.clients.update({8: says("b")})
    if lost is raises:
        assert start.begin(2) == ["a", "b"]
    else:  # it has had all the time, and a second question could take as long again
        with pytest.raises(NodesMissing, match=r"1 of 2 clients are there after 300 s: a"):
            start.begin(2)
    assert 300 <= start.clock.now < 301
    assert len(start.transport.requests(Identify, 8)) == asked


def test_when_the_time_is_over_the_least_are_enough_or_all_are_named() -> None:
    clients = {7: says("b"), 8: says("a"), 6: raises, 9: says("b"), 5: says("odd", channels=1)}
    start = Start(dict(clients))
    assert start.begin(5, least=2, timeout=4) == ["a", "b"]
    assert 4 <= start.clock.now < 5
    assert {node for node, _, _ in start.left_alone()} == {5, 6, 9}
    start = Start(dict(clients))
    with pytest.raises(NodesMissing) as caught:
        start.begin(5, least=3, timeout=4)
    told = str(caught.value)
    assert told.startswith("2 of 5 clients are there after 4 s: a, b; ")
    for part in (
        "node 6: RuntimeError: disk full", "node 9: b: node 7 has this name, too, and came first",
        "node 5: odd: channels = 1, the run has 3",
    ):  # fmt: skip
        assert part in told


def test_nodes_that_are_not_there_in_time() -> None:
    with pytest.raises(NodesMissing, match=r"1 of 3 clients are there after 2 s: a$"):
        Start({1: says("a")}).begin(3, timeout=2)
    with pytest.raises(NodesMissing, match=r"0 of 3 clients are there after 2 s$"):
        Start({}).begin(3, timeout=2)


def test_nodes_that_all_fail_are_not_waited_for() -> None:
    start = Start({1: raises, 2: raises})
    with pytest.raises(NodesMissing, match="0 of 2 clients are there; nodes 1, 2: RuntimeError: disk full"):
        start.begin(2)
    assert start.clock.now == 0


def test_a_node_that_never_answers_does_not_hold_up_the_others_for_longer_than_the_timeout() -> None:
    start = Start({1: says("a"), 2: says("b"), 3: silent})
    assert start.begin(2, timeout=30) == ["a", "b"]
    assert start.clock.now == pytest.approx(30)
    assert start.left_alone() == [(3, None, "no reply within 30 s")]


def test_one_client_that_fits_no_part_of_the_run_is_left_alone_and_all_of_them_are_not() -> None:
    def unfit(identity: Identity) -> str:
        return "it is a target" if identity.role == "target" else ""

    start = Start({7: says("a"), 8: says("b", role="target"), 9: says("c")})
    start.nodes.unfit = unfit
    assert start.begin(2) == ["a", "c"]
    assert start.left_alone() == [(8, "b", "b: it is a target")]
    start = Start({7: says("a", role="target"), 8: says("b", role="target")})
    start.nodes.unfit = unfit
    assert start.begin(2) == ["a", "b"], "the run says what is wrong with its settings"


# -- a round


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_answers_come_in_the_order_of_the_clients_whatever_the_order_of_arrival(order: tuple[int, ...]) -> None:
    clients = {10: says(2), 11: raises, 12: silent}
    transport = FakeTransport(clients, order=lambda found: [found[i] for i in (*order, 3)])
    seen: list[Event] = []
    requests = [Addressed(node, WHO) for node in (11, 12, 13, 10)]
    answers = gather(transport, requests, {11: 0, 12: 1, 10: 2, 13: 3}, 7.5, Events(seen.append), "train")
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
    assert chosen == sorted(set(chosen))
    assert len(chosen) == max(1, int(n * Fraction(str(fraction))))
    assert set(chosen) <= set(range(n))
    others = [7 * i % 1009 for i in range(n)]  # drawn by position
    assert sample(others, fraction, seed, round) == [others[i] for i in chosen]


def test_a_cohort_is_the_part_of_the_clients_that_was_written() -> None:
    """In floats 0.29 of 100 is less than 29."""
    assert len(sample(range(100), 0.29, 0, 1)) == 29


def test_rounds_sample_differently() -> None:
    assert len({tuple(sample(range(50), 0.2, 1, round)) for round in range(1, 6)}) == 5


# -- clients that leave, come back and join


class Place:
    """Three clients, of which "1" has lost its node 101; client i was node 100 + i."""

    def __init__(self, most: int = 0, **others: Client) -> None:
        self.clock, self.events = Clock(), list[Event]()
        self.transport = FakeTransport({100: silent, 102: silent}, clock=self.clock)
        self.transport.clients.update({int(name.removeprefix("n")): client for name, client in others.items()})
        identities = {i: replace(IDENTITY, name=str(i)) for i in range(3)}
        by_partition = {i: 100 + i for i in range(3)}
        self.nodes = Nodes(self.transport, by_partition, identities, self.clock, self.clock.sleep, most)

    def update(self, join: bool = True) -> dict[int, int]:
        return self.nodes.update(WHO, 300, Events(self.events.append), {"training": "t", "round": 2}, join)

    def of(self, kind: str) -> list[Event]:
        return [one for one in self.events if one["event"] == kind]


def test_a_client_that_left_is_reported_once_and_so_is_its_return() -> None:
    place = Place()
    for _ in range(3):
        assert place.update() == {}
    (left,) = place.of("left")
    assert left == {**left, "partition": 1, "name": "1", "node_id": 101, "training": "t", "round": 2}
    place.transport.clients[101] = silent
    for _ in range(3):
        assert place.update() == {}
    (back,) = place.of("rejoined")
    assert (back["partition"], back["node_id"], back["old_node_id"]) == (1, 101, 101)
    assert not place.transport.sent, "a node that is known is not asked who it is"


def test_a_client_that_came_back_as_another_node_replaces_its_old_node() -> None:
    place = Place(n7=says(1, samples=30))
    assert place.nodes.missing() == [1]
    assert place.update(join=False) == {1: 101}
    assert place.nodes.by_partition == {0: 100, 1: 7, 2: 102}
    assert place.nodes.missing() == []
    (event,) = place.of("rejoined")
    assert event == {**event, "partition": 1, "name": "1", "old_node_id": 101, "node_id": 7, "training": "t"}
    assert event["data"]["samples"] == 30
    assert [timeout for _, timeout in place.transport.sent] == [300]


def test_a_new_client_joins_between_rounds_with_the_next_partition() -> None:
    place = Place(n101=silent, n7=says("ward", sizes=[9, 8, 7], role="source", samples=30, own_data=True))
    assert place.update(join=False) == {}
    assert 3 not in place.nodes.by_partition
    assert place.update() == {}
    (event,) = place.of("joined")
    assert event == {**event, "partition": 3, "name": "ward", "node_id": 7, "sizes": [9, 8, 7], "role": "source"}
    assert (event["data"]["samples"], event["data"]["own_data"], event["round"]) == (30, True, 2)
    assert place.nodes.by_partition[3] == 7
    assert place.nodes.info.names == ["0", "1", "2", "ward"]
    place.transport.clients[8] = says("Aha")
    place.update()
    assert (place.nodes.by_partition[4], place.nodes.ordered()) == (8, [0, 1, 2, 4, 3])  # partition 4 comes before 3
    assert len(place.transport.requests(Identify)) == 2


def test_no_more_join_than_the_limit() -> None:
    place = Place(most=4, n101=silent, n7=says("a"), n8=says("b"))
    for _ in range(2):
        place.update()
    assert place.nodes.info.names == ["0", "1", "2", "a"]
    (event,) = place.of("left_alone")
    assert (event["node_id"], event["reason"]) == (8, "b: max-clients = 4, and the run has that many clients")
    del place.transport.clients[7]
    place.transport.clients[9] = says("a")
    assert place.update() == {3: 7}, "a client that comes back is no new one"


@pytest.mark.parametrize(
    ("unknown", "name", "reason"),
    [
        (says(1, sizes=[9, 4, 3]), "1", "sizes = [9, 4, 3], at first it was [5, 4, 3]"),
        (says(1, classes=["cat", "cow"]), "1", "classes = ['cat', 'cow'], at first it was"),
        (says(1, role="target"), "1", "role = 'target'"),
        (says(0), "0", "0: node 100 has this name, too, and came first"),
        (says("x", channels=1), "x", "x: channels = 1, the run has 3"),
        (says("x", shifts=["fog"]), "x", "x: shifts = ['fog'], the run has ['original']"),
        (says("x", stream_rounds=14, own_data=True), "x", "x: stream-rounds = 14, the run has 15"),
        (says("x", stream_rounds=16), "x", "x: stream-rounds = 16, the run has 15"),
        (says(1, mean=[float("nan")]), None, "mean"),
        (raises, None, "disk full"),
        (silent, None, "no reply within 300 s"),
    ],
)
def test_a_node_that_does_not_fit_is_asked_once_and_left_alone(
    unknown: Callable, name: str | None, reason: str
) -> None:
    place = Place(n7=unknown)
    assert place.update() == place.update() == {}
    assert place.nodes.by_partition == {0: 100, 1: 101, 2: 102}
    (told,) = place.of("left_alone")
    assert (told["name"], told["node_id"], told["round"]) == (name, 7, 2)
    assert reason in told["reason"]
    assert len(place.transport.requests(Identify, 7)) == 1


@pytest.mark.parametrize("lost", [raises, silent])
def test_a_node_that_was_late_or_not_reached_is_asked_again_after_longer_and_longer_waits(lost: Client) -> None:
    place = Place(n7=lost)
    asked: list[float] = []
    for _ in range(10_000):
        before = len(place.transport.requests(Identify, 7))
        start = place.clock.now
        place.update()
        asked += [start] * (len(place.transport.requests(Identify, 7)) - before)
        place.clock.sleep(1.0)
    took = 300 if lost is silent else 0
    waits = [after - before - took for before, after in itertools.pairwise(asked)]
    assert len(asked) == ASKED
    assert waits == pytest.approx([AGAIN * 2**i for i in range(ASKED - 1)], abs=1.5)
    assert len(place.of("left_alone")) == 1, "told once"
    del place.transport.clients[7]
    place.update()
    place.transport.clients[7] = says("ward")
    place.update()
    assert [event["name"] for event in place.of("joined")] == ["ward"], "one that connects again is a new one"


def test_a_node_that_was_not_reached_joins_when_it_answers() -> None:
    place = Place(n101=silent, n7=raises)
    place.update()
    place.transport.clients[7] = says("ward")
    place.update()
    assert not place.of("joined")
    place.clock.sleep(AGAIN)
    place.update()
    assert [(event["name"], event["partition"]) for event in place.of("joined")] == [("ward", 3)]


@pytest.mark.parametrize("nonsense", [says(1, mean=[float("nan")]), says("x", channels=1)])
def test_a_refused_identity_is_not_asked_for_again_until_its_node_connects_again(nonsense: Client) -> None:
    place = Place(n7=nonsense)
    for _ in range(20):
        place.update()
        place.clock.sleep(AGAIN * 2**ASKED)
    assert len(place.transport.requests(Identify, 7)) == 1
    del place.transport.clients[7]
    place.update()
    place.transport.clients[7] = nonsense
    place.update()
    assert len(place.transport.requests(Identify, 7)) == 2


def test_what_a_run_knows_of_its_clients_is_gathered_once_for_all_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(most=3, n101=silent, **{f"n{i}": says(f"spare-{i}") for i in range(10, 60)})
    place.update()
    looks, gathered, of = 0, 0, FederationInfo.of

    def counted(identities: Sequence[Identity]) -> FederationInfo:
        nonlocal gathered
        gathered += 1
        return of(identities)

    def nodes() -> list[int]:
        nonlocal looks
        looks += 1
        return list(place.transport.clients)

    monkeypatch.setattr(FederationInfo, "of", counted)
    monkeypatch.setattr(place.transport, "nodes", nodes)
    place.update()
    assert (looks, gathered) == (1, 1)


def test_a_device_without_labels_or_with_longer_streams_or_more_files_fits() -> None:
    place = Place(
        n101=silent,
        n7=says("x", labelled=False, role="target", shifts=[], own_data=True),
        n8=says("y", stream_rounds=99, own_data=True),
    )
    place.update()
    assert place.nodes.info.names == ["0", "1", "2", "x", "y"]
    assert place.nodes.info.stream_rounds == 15
    del place.transport.clients[8]
    place.transport.clients[9] = says("y", stream_rounds=99, own_data=True, sizes=[50, 1, 1], samples=60)
    assert place.update() == {4: 8}
    assert place.nodes.info.sizes[4] == [50, 1, 1]


def test_a_node_that_was_repaired_is_asked_again_and_a_spare_takes_over() -> None:
    place = Place(n101=silent, n7=raises)
    place.update()
    del place.transport.clients[7]
    place.update()
    place.transport.clients[7] = says(0)  # fits, but its name is taken by a node that is there
    place.update()
    assert [event["reason"] for event in place.of("left_alone")] == [
        "RuntimeError: disk full", "0: node 100 has this name, too, and came first",
    ]  # fmt: skip
    del place.transport.clients[100]
    assert place.update() == {0: 100}
    assert len(place.transport.requests(Identify)) == 2


def test_waiting_for_enough_nodes_looks_before_each_count_and_ends_in_time() -> None:
    place = Place()
    place.clock.later = {7.0: lambda: place.transport.clients.update({7: says(1)})}
    looks: list[float] = []

    def look() -> None:
        looks.append(place.clock.now)
        place.update(join=False)

    assert place.nodes.wait_for([0, 1], 2, 300, look) == 2
    assert 7 <= place.clock.now < 8
    assert looks[0] == 0
    assert place.nodes.wait_for([0, 1], 3, 5, look) == 2
    assert place.clock.now == pytest.approx(looks[0] + 7 + 5, abs=0.5)


class Gate(FakeTransport):
    """A transport that may have several exchanges at once; all wait for the gate to open."""

    concurrent = True

    def __init__(self, clients: dict[int, Client]) -> None:
        super().__init__(clients)
        self.open = threading.Event()

    def exchange(self, requests: Sequence[Addressed], timeout: float) -> Iterator[Answer]:
        assert self.open.wait(60)
        if timeout < 0:
            raise RuntimeError("the SuperLink is gone")
        yield from super().exchange(requests, timeout)


def test_a_new_node_that_stays_silent_holds_up_a_round_for_seconds_and_joins_later() -> None:
    place = Place()
    gate = Gate({100: silent, 102: silent, 7: says(8), 5: says(9)})
    nodes = Nodes(gate, place.nodes.by_partition, place.nodes.identities, place.clock, place.clock.sleep)
    events, about = Events(place.events.append), {"training": "t", "round": 2}
    for _ in range(2):
        nodes.update(WHO, 300, events, about)
        assert place.clock.now == pytest.approx(PATIENCE), "waited for once"
    assert not place.of("joined")
    gate.open.set()
    while not place.of("joined"):
        nodes.update(WHO, 300, events, about)
    assert [(one["name"], one["node_id"]) for one in place.of("joined")] == [("9", 5), ("8", 7)]
    assert len(gate.sent) == 2, "each is asked once"


def test_what_ends_an_exchange_beside_the_rounds_is_raised_by_them() -> None:
    gate = Gate({7: says(8)})
    gate.open.set()
    identification = Identification(gate)
    identification.ask([7], WHO, -1)
    with pytest.raises(RuntimeError, match="the SuperLink is gone"):
        identification.answers()
