"""Who is there, sampling, and collecting replies in whatever order they come."""

import itertools

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from server.errors import NodesMissing
from server.events import Events
from server.nodes import REST, CohortGrid, gather, grouped, identify, sample, wait_for_nodes
from tests.flower import LocalGrid

SILENT = Events()


def identity(partition: int, **more: object) -> RecordDict:
    return RecordDict({"identity": ConfigRecord({"partition-id": partition, **more})})


def messages(nodes: list[int]) -> list[Message]:
    return [Message(RecordDict({"c": ConfigRecord({})}), dst_node_id=n, message_type="train") for n in nodes]


def test_nodes_are_known_by_their_partition() -> None:
    grid = LocalGrid({70: lambda m: identity(1), 50: lambda m: identity(0)}, order=lambda ids: ids[::-1])
    nodes, identities = identify(grid, [70, 50], ConfigRecord({}), 5, SILENT)
    assert nodes == {0: 50, 1: 70}
    assert list(identities) == [0, 1]


def test_who_cannot_be_identified_is_named() -> None:
    def broken(message: Message) -> RecordDict:
        raise ValueError("data file x.webp is damaged")

    grid = LocalGrid({7: broken, 8: lambda m: identity(0), 9: lambda m: identity(0)})
    with pytest.raises(NodesMissing, match=r"node 7: error 2: data file x.webp is damaged.*both hold partition 0"):
        identify(grid, [7, 8, 9], ConfigRecord({}), 5, SILENT)


def test_equal_reasons_are_told_once() -> None:
    lines = grouped("client", {0: "disk full", 1: "no reply", 4: "disk full"})
    assert lines == ["clients 0, 4: disk full", "client 1: no reply"]


def test_waiting_for_nodes_is_bounded() -> None:
    with pytest.raises(NodesMissing, match="2 of 3"):
        wait_for_nodes(LocalGrid({1: identity, 2: identity}), 3, timeout=0.01, poll=0.001)  # type: ignore[dict-item]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_answers_are_sorted_by_partition_whatever_the_order_of_arrival(order: tuple[int, ...]) -> None:
    grid = LocalGrid(dict.fromkeys((10, 11, 12), lambda m: RecordDict({})), order=lambda ids: [ids[i] for i in order])
    answers = gather(grid, messages([11, 12, 10]), {10: 2, 11: 0, 12: 1}, 5, SILENT, "train")
    assert [(a.partition, a.node_id) for a in answers] == [(0, 11), (1, 12), (2, 10)]


def test_silent_and_failing_nodes_are_told_apart() -> None:
    def fails(message: Message) -> RecordDict:
        raise RuntimeError("out of memory")

    ticks = itertools.count()
    grid = LocalGrid({1: lambda m: RecordDict({}), 2: fails, 3: lambda m: None})
    answers = gather(grid, messages([1, 2, 3]), {1: 0, 2: 1, 3: 2}, 3, SILENT, "train", clock=lambda: next(ticks))
    assert [a.reply is not None for a in answers] == [True, False, False]
    assert "out of memory" in answers[1].reason
    assert "no reply within 3 s" in answers[2].reason


def test_the_reason_of_an_error_is_its_last_line_without_colours() -> None:
    def fails(message: Message) -> RecordDict:
        raise RuntimeError("Traceback:\n  \x1b[36mray::Actor.run()\x1b[39m\nMessage: dle holds values\n")

    (answer,) = gather(LocalGrid({1: fails}), messages([1]), {1: 0}, 5, SILENT, "train")
    assert answer.reason == "error 2: Message: dle holds values"


def test_a_message_that_cannot_be_sent_is_reported() -> None:
    class Refusing(LocalGrid):
        def push_messages(self, messages):
            return [None]

    answers = gather(Refusing({1: lambda m: None}), messages([1]), {1: 0}, 1, SILENT, "train")
    assert "not accepted" in answers[0].reason


@given(st.integers(1, 200), st.floats(0.01, 1), st.integers(0, 99), st.integers(1, 99))
def test_sampling_depends_on_seed_and_round_alone(n: int, fraction: float, seed: int, round: int) -> None:
    chosen = sample(list(range(n)), fraction, seed, round)
    assert chosen == sample(list(range(n))[::-1], fraction, seed, round) == sorted(set(chosen))
    assert len(chosen) == max(1, int(n * fraction))
    assert set(chosen) <= set(range(n))


def test_rounds_sample_differently() -> None:
    assert len({tuple(sample(range(50), 0.2, 1, round)) for round in range(1, 6)}) == 5


def test_a_cohort_hides_the_others() -> None:
    grid = LocalGrid(dict.fromkeys(range(5), lambda m: RecordDict({})))
    view = CohortGrid(grid, [3, 1])
    assert list(view.get_node_ids()) == [3, 1]
    assert len(list(view.send_and_receive(messages([3])))) == 1


def test_a_message_lives_as_long_as_the_round_and_goes_to_nobody_who_is_not_there() -> None:
    grid = LocalGrid({1: lambda m: RecordDict({})})
    here, gone = gather(grid, messages([1, 2]), {1: 0, 2: 1}, 7.5, SILENT, "train")
    assert here.reply is not None
    assert (gone.reason, gone.kind, gone.partition) == ("the node is not there", "failed", 1)
    assert [message.metadata.ttl for message in grid.sent] == [7.5]


def test_a_slow_look_is_followed_by_a_short_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a look may take seconds; resting many times as long would be most of the round."""
    looked = itertools.count(step=5.0)
    monkeypatch.setattr("server.nodes.time.perf_counter", lambda: next(looked))
    now, rests = [0.0], []

    def sleep(seconds: float) -> None:
        rests.append(seconds)
        now[0] += seconds

    grid = LocalGrid({1: lambda message: None})
    gather(grid, messages([1]), {1: 0}, 3, SILENT, "train", clock=lambda: now[0], sleep=sleep)
    assert rests == [REST] * 3


def test_waiting_for_replies_ends_at_the_deadline_and_not_a_look_later() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    grid = LocalGrid({1: lambda m: None})
    (answer,) = gather(grid, messages([1]), {1: 0}, 2, SILENT, "train", clock=lambda: now[0], sleep=sleep)
    assert (answer.kind, answer.reason) == ("late", "no reply within 2 s")
    assert now[0] == pytest.approx(2.0)
