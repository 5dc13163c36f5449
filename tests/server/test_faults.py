"""Nodes that fail, stay silent, go, come back as others, or send what nobody should: each named, none learned from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from server.errors import NoReplies, QuorumMissed
from server.events import Event
from server.protection import joining_rule, most_examples, needed_replies
from server.rounds import Federation, to_numpy, to_record, train_round
from server.run import make_strategy
from server.trainings import TRAININGS, Phase
from server.validation import NO_LIMITS, Expected, Limits
from settings import Settings, SettingsError
from strategies import ATPRates, Broadcast, FedAvg, FedAvgAtTestTime, RobustFedAvg
from strategies.collaborative import Collaborative
from tests.flower import LocalGrid, record
from tests.server.test_rounds import START, federation, node, of_kind, raises

Answer = Callable[[Message], RecordDict | None]
IDENTITY: dict[str, Any] = {
    "num-partitions": 3, "classes": ["cat", "dog"], "channels": 3, "mean": [0.5], "std": [0.2], "shifts": ["original"],
    "note": "", "corruptions": ["fog"], "stream-rounds": 0, "sizes": [5, 4, 3], "role": "both",
}  # fmt: skip


def said(partition: int, **changes: Any) -> dict[str, Any]:
    return {**IDENTITY, "partition-id": partition, **changes}


class Time:
    """Seconds that pass only while somebody waits; `later` does things at their time."""

    def __init__(self, later: dict[float, Callable[[], object]] | None = None) -> None:
        self.now, self.later = 0.0, dict(later or {})

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.later if when <= self.now]:
            self.later.pop(when)()


def silent(message: Message) -> None:
    return None


def known(partition: int, answer: Answer, **changes: Any) -> Answer:
    """A node that says who it is."""

    def speaks(message: Message) -> RecordDict | None:
        if message.metadata.message_type == "query.identify":
            return RecordDict({"identity": ConfigRecord(said(partition, **changes))})
        return answer(message)

    return speaks


def once(first: Answer, then: Answer) -> Answer:
    """A node that does one thing with the first message, however often it is looked at, and another with later ones."""
    seen: list[str] = []

    def answer(message: Message) -> RecordDict | None:
        seen.append(message.metadata.message_id)
        return (first if seen[0] == message.metadata.message_id else then)(message)

    return answer


class Place:
    """A federation whose time is ours; partition i is node 100 + i."""

    def __init__(self, nodes: dict[int, Answer], **settings: Any) -> None:
        made, self.events = federation(nodes, **{"round_timeout": 60.0, "node_timeout": 300.0, **settings})
        self.time = Time()
        identities = {partition: said(partition) for partition in nodes}
        self.federation: Federation = replace(
            made, identities=identities, clock=lambda: self.time.now, sleep=self.time.sleep
        )
        assert isinstance(made.grid, LocalGrid)
        self.grid = made.grid

    def round(self, strategy: Any = None, phase: Phase | None = None, round: int = 1) -> dict[str, np.ndarray]:
        phase = phase or Phase()
        chosen = strategy or make_strategy(phase, self.federation.settings)
        return to_numpy(train_round(self.federation, chosen, phase, to_record(START), "cross_entropy", round))

    def incidents(self) -> list[tuple[str, int | None, str]]:
        kinds = ("late", "failed", "refused")
        return [(e["event"], e["partition"], e["reason"]) for e in of_kind(self.events, *kinds)]

    def of(self, kind: str) -> list[Event]:
        return of_kind(self.events, kind)

    def asked(self, node: int, kind: str = "train") -> list[Message]:
        return [m for m in self.grid.sent if m.metadata.dst_node_id == node and m.metadata.message_type == kind]


# -- quorum


def test_each_kind_of_fault_has_its_event_and_only_good_replies_are_learned_from() -> None:
    place = Place({0: node(2), 1: silent, 2: raises, 3: node(np.nan), 4: node(4)})
    np.testing.assert_allclose(place.round()["w"], 3.0)
    assert place.incidents() == [
        ("late", 1, "no reply within 60 s"),
        ("failed", 2, "error 2: disk full"),
        ("refused", 3, "w: values that are not finite"),
    ]
    assert all({"training", "round", "phase", "node_id"} <= set(e) for e in of_kind(place.events, "late", "failed"))
    assert place.of("round")[0]["replied"] == [0, 4]
    assert place.time.now == pytest.approx(60.0)


def test_a_round_below_the_quorum_is_done_again_with_the_same_messages() -> None:
    place = Place({0: node(2), 1: once(raises, node(4, 3)), 2: node(6)}, min_replies=3)
    undisturbed = Place({0: node(2), 1: node(4, 3), 2: node(6)}, min_replies=3).round()
    assert place.round()["w"].tobytes() == undisturbed["w"].tobytes()
    assert place.incidents() == [("failed", 1, "error 2: disk full")]
    (note,) = place.of("note")
    assert note["text"] == "train cross_entropy, round 1: 2 usable replies, 3 needed; it is done again"
    assert len(place.of("round")) == 1
    assert place.time.now == 0, "enough nodes are there: nobody waits"
    for one in (100, 101, 102):
        first, second = place.asked(one)
        assert dict(first.content["config"]) == dict(second.content["config"])
        assert first.content["config"]["server-round"] == 1
        sent = [to_numpy(m.content.array_records["arrays"]) for m in (first, second)]
        assert all((sent[0][name] == sent[1][name]).all() for name in START)


def test_a_quorum_that_is_missed_twice_names_everybody_and_why() -> None:
    place = Place({0: node(2), 1: silent, 2: raises, 3: node(np.nan), 4: raises}, min_replies=2)
    with pytest.raises(QuorumMissed) as caught:
        place.round()
    assert not isinstance(caught.value, NoReplies)
    assert str(caught.value) == (
        "train cross_entropy, round 1: 1 usable reply, 2 needed; late client 1: no reply within 60 s; "
        "failed clients 2, 4: error 2: disk full; refused client 3: w: values that are not finite"
    )
    assert len(place.incidents()) == 2 * 4, "both attempts are told"
    assert place.time.now == pytest.approx(120.0)
    assert not place.of("round")


@hypothesis_settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=3, max_size=6),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_whatever_fails_the_model_is_the_mean_of_the_attempt_that_counted(
    works: list[tuple[bool, bool]], needed: int, draw: Any
) -> None:
    bad = [raises, node(np.nan), silent, node(1e9, -3)]
    nodes = {
        i: once(node(i + 1) if first else draw.choice(bad), node(i + 1) if then else draw.choice(bad))
        for i, (first, then) in enumerate(works)
    }
    place = Place(nodes, min_replies=needed, round_timeout=0.2)
    attempts = [[i + 1 for i, pair in enumerate(works) if pair[attempt]] for attempt in (0, 1)]
    good = next((attempt for attempt in attempts if len(attempt) >= needed), None)
    if good is None:
        with pytest.raises(QuorumMissed):
            place.round()
        assert not place.of("round")
    else:
        np.testing.assert_allclose(place.round()["w"], np.mean(good), rtol=1e-6)


# -- nodes that go and come back


def test_who_is_not_there_is_not_waited_for() -> None:
    place = Place({0: node(2), 1: node(4)})
    del place.grid.nodes[101]
    np.testing.assert_allclose(place.round()["w"], 2.0)
    assert place.incidents() == [("failed", 1, "the node is not there")]
    assert (place.time.now, place.asked(101)) == (0, [])


def test_when_all_are_gone_the_wait_is_bounded_and_the_error_typed() -> None:
    place = Place({0: node(2), 1: node(4)}, node_timeout=5.0)
    place.grid.nodes.clear()
    with pytest.raises(NoReplies, match=r"the node is not there; after 5 s 0 of the 2 clients are there"):
        place.round()
    assert place.time.now == pytest.approx(5.0, abs=0.3)
    assert place.grid.sent == []


def test_nodes_that_come_back_in_time_do_the_round() -> None:
    place = Place({0: node(2), 1: node(4), 2: node(6)}, min_replies=2)
    home = dict(place.grid.nodes)
    del place.grid.nodes[101], place.grid.nodes[102]
    place.time.later = {7.0: lambda: place.grid.nodes.update({102: home[102]})}
    np.testing.assert_allclose(place.round()["w"], 4.0)  # 2 and 6
    assert 7 <= place.time.now < 8
    assert place.of("round")[0]["replied"] == [0, 2]


def test_a_client_that_came_back_as_another_node_is_found_and_told_everything() -> None:
    place = Place({0: node(2), 1: node(4), 2: node(6)})
    kept = make_strategy(Phase("own", kept=("w",)), place.federation.settings)
    phase = Phase("own", kept=("w",))

    def shares(message: Message) -> RecordDict:
        content = node(1.0)(message)
        names = list(message.content.config_records["config"]["shared-names"])
        content["arrays"] = ArrayRecord({name: content["arrays"][name] for name in names})
        return content

    place.grid.nodes = dict.fromkeys((100, 101, 102), shares)
    place.round(kept, phase)
    place.grid.nodes = {100: shares, 102: shares, 7: known(1, shares)}
    place.round(kept, phase, 2)
    assert place.federation.nodes == {0: 100, 1: 7, 2: 102}
    (event,) = place.of("rejoined")
    assert (event["partition"], event["old_node_id"], event["node_id"], event["round"]) == (1, 101, 7, 2)
    assert list(place.asked(7)[0].content["arrays"]) == list(START)
    assert list(place.asked(100)[1].content["arrays"]) == ["n.running_var"]
    assert place.of("round")[1]["replied"] == [0, 1, 2]
    assert not place.incidents()
    assert [m.metadata.ttl for m in place.grid.sent] == [
        300.0 if m.metadata.message_type == "query.identify" else 60.0 for m in place.grid.sent
    ]


def test_a_client_that_comes_back_while_a_quorum_is_waited_for() -> None:
    place = Place({0: node(2), 1: node(4)}, min_replies=2)
    del place.grid.nodes[101]
    place.time.later = {3.0: lambda: place.grid.nodes.update({7: known(1, node(8))})}
    np.testing.assert_allclose(place.round()["w"], 5.0)
    assert place.federation.nodes == {0: 100, 1: 7}


@pytest.mark.parametrize(
    ("stranger", "kind", "partition", "reason"),
    [
        (known(1, node(1e6), sizes=[9, 4, 3]), "refused", 1, "sizes = [9, 4, 3], at first it said [5, 4, 3]"),
        (known(1, node(1e6), classes=["cat", "cow"]), "refused", 1, "classes = ['cat', 'cow'], at first it said"),
        (known(1, node(1e6), role="target"), "refused", 1, "role = 'target'"),
        (known(0, node(1e6)), "refused", 0, "node 100 holds this partition and is there"),
        (known(9, node(1e6)), "refused", 9, "partition-id = 9: allowed are 0, 1, 2"),
        (lambda message: RecordDict({}), "refused", None, "partition-id = None"),
        (raises, "failed", None, "disk full"),
        (silent, "late", None, "no reply within 300 s"),
    ],
)
def test_a_stranger_is_asked_once_and_takes_no_place_that_is_not_its_own(
    stranger: Answer, kind: str, partition: int | None, reason: str
) -> None:
    place = Place({0: node(2), 1: node(4), 2: node(6)})
    del place.grid.nodes[101]
    place.grid.nodes[7] = stranger
    for round in (1, 2):
        np.testing.assert_allclose(place.round(round=round)["w"], 4.0)
    told = [one for one in of_kind(place.events, "late", "failed", "refused") if one["node_id"] == 7]
    assert [(one["event"], one["partition"], one["phase"]) for one in told] == [(kind, partition, "identify")]
    assert reason in told[0]["reason"]
    assert len(place.asked(7, "query.identify")) == 1
    assert not place.asked(7)


def test_nobody_is_asked_while_nobody_is_missing_and_a_spare_takes_over_later() -> None:
    place = Place({0: node(2), 1: node(4), 2: node(6)})
    place.grid.nodes[7] = known(0, node(3))
    place.round()
    assert not place.asked(7, "query.identify")
    del place.grid.nodes[101]
    place.round(round=2)  # now it is known, and its partition has a node
    del place.grid.nodes[100]
    place.round(round=3)
    assert place.federation.nodes[0] == 7
    assert len(place.asked(7, "query.identify")) == 1
    assert place.of("round")[2]["replied"] == [0, 2]


def test_a_message_that_expired_is_late() -> None:
    class Expiring(LocalGrid):
        def pull_messages(self, message_ids):
            error = Error(code=3, reason="Message Unavailable")
            return [Message(error, reply_to=self.waiting[name]) for name in message_ids]

    place = Place({0: node(2)})
    federation_ = replace(place.federation, grid=Expiring(place.grid.nodes))
    with pytest.raises(NoReplies, match="late client 0: error 3: Message Unavailable"):
        train_round(federation_, make_strategy(Phase(), Settings()), Phase(), to_record(START), "cross_entropy", 1)


# -- strategies that know who has what


class Anything:
    """Every reply will do."""

    def refusals(self, replies: Sequence[Message], limits: Limits = NO_LIMITS) -> list[str | None]:
        return [None] * len(replies)


def sharing(value: float, asked: list[set[str]]) -> Answer:
    def answer(message: Message) -> RecordDict:
        asked.append(set(message.content.array_records))
        got = message.content.array_records.get("shared")
        mean = got["a"].numpy() if got is not None else np.zeros(2)
        return RecordDict({"shared": record(a=mean + value), "metrics": MetricRecord({"num-examples": 1})})

    return answer


def collaborate(place: Place, strategy: Collaborative, round: int) -> None:
    config = place.federation.config("t")
    partitions = place.federation.testers
    _, replies = place.federation.ask(strategy, round, ArrayRecord(), config, partitions, Anything(), "t", "cell")
    strategy.aggregate_train(round, [reply for _, reply in replies])


def test_a_node_that_came_back_gets_its_mixture_and_the_network_and_the_others_neither_anew() -> None:
    asked: dict[int, list[set[str]]] = {100: [], 101: [], 7: []}
    place = Place({0: sharing(1.0, asked[100]), 1: sharing(3.0, asked[101])})
    strategy = FedAvgAtTestTime(record(w=np.zeros(4)))
    collaborate(place, strategy, 1)
    del place.grid.nodes[101]
    place.grid.nodes[7] = known(1, sharing(5.0, asked[7]))
    collaborate(place, strategy, 2)
    assert asked == {100: [{"arrays"}, {"shared"}], 101: [{"arrays"}], 7: [{"arrays", "shared"}]}
    np.testing.assert_array_equal(strategy.personal[7]["a"].numpy(), [5.0, 5.0])  # 2 from before, mean of 1 and 5


def test_a_repeated_round_brings_the_network_to_a_node_that_lost_it() -> None:
    def loses(message: Message) -> RecordDict:
        raise ValueError("network abc is not here; it must be sent again")

    def found(message: Message) -> RecordDict:
        assert ("arrays" in message.content) is (not received)
        received.append(message)
        return sharing_rates(message)

    def sharing_rates(message: Message) -> RecordDict:
        rates = {name: array.numpy() + 1 for name, array in message.content.array_records["rates"].items()}
        return RecordDict({"rates": to_record(rates), "metrics": MetricRecord({"num-examples": 1})})

    received: list[Message] = []
    place = Place({0: sharing_rates, 1: once(loses, found)}, min_replies=2)
    network = Broadcast(record(w=np.zeros(4)))
    network.held([100, 101])
    strategy, rates = ATPRates(network), record(a=np.asarray(0.5))
    expected = Expected.like("rates", to_numpy(rates))
    config = place.federation.config("t")
    messages, replies = place.federation.ask(strategy, 1, rates, config, [0, 1], expected, "t", "rates t")
    mean, _ = strategy.aggregate_train(1, [reply for _, reply in replies])
    assert float(mean["a"].numpy()) == 1.5
    assert place.incidents() == [("failed", 1, "error 2: network abc is not here; it must be sent again")]
    assert place.federation.partitions_of(messages) == [0, 1]
    again, _ = place.federation.ask(strategy, 2, rates, config, [0, 1], expected, "t", "rates t")
    assert not any("arrays" in message.content for message in again)
    assert len(received) == 2


def test_collect_addresses_the_same_contents_to_the_new_node() -> None:
    place = Place({0: node(2), 1: node(4)}, min_replies=2)
    del place.grid.nodes[101]
    place.time.later = {2.0: lambda: place.grid.nodes.update({7: known(1, node(8))})}
    content = RecordDict({"arrays": to_record(START), "config": place.federation.config("t")})
    messages = [Message(content, dst_node_id=one, message_type="train.statistics") for one in (100, 101)]
    replies = place.federation.collect(messages, Expected.like("arrays", START), "t", 1, "statistics t")
    assert [(partition, float(reply.content["arrays"]["w"].numpy()[0])) for partition, reply in replies] == [
        (0, 2.0),
        (1, 8.0),
    ]


# -- protection


@pytest.mark.parametrize("aggregation", ["fedavg", "fedprox", "fedavgm", "qffl", "gma", "fedmedian"])
def test_a_huge_update_and_a_lying_count_are_refused_under_every_rule(aggregation: str) -> None:
    loss = {"global-loss": 1.0}
    nodes = {i: node(1, 5, **loss) for i in range(3)}
    place = Place({**nodes, 3: node(1e4, 5, **loss), 4: node(1, 6, **loss)}, aggregation=aggregation,
                  update_norm_bound=10.0, fairness=0.0)  # fmt: skip
    strategy = make_strategy(Phase(), place.federation.settings)
    np.testing.assert_allclose(place.round(strategy)["w"], 1.0, rtol=1e-6)
    assert place.incidents() == [
        ("refused", 3, "22359.8 from what was sent (l2 norm), allowed is at most 10"),
        ("refused", 4, "num-examples = 6, allowed is a finite number, more than 0, at most 5"),
    ]


@pytest.mark.parametrize(
    ("kind", "most"), [("train", 5), ("train.statistics", 5), ("train.rates", 4), ("train.adapt", 20), ("evaluate", 50)]
)
def test_claims_are_bounded_by_what_a_client_said_of_its_data(kind: str, most: int) -> None:
    settings = Settings(max_examples=50, stream_batch=20)
    assert most_examples(settings, kind, said(0)) == most
    assert most_examples(settings.replace(max_examples=2), kind, said(0)) == 2
    assert most_examples(settings, "train", None) == 50


ROBUST = {"fedmedian": 3, "fedtrimmedavg": 5, "krum": 5, "multikrum": 6}


@pytest.mark.parametrize("aggregation", ROBUST)
def test_a_wild_client_does_not_move_a_robust_model(aggregation: str) -> None:
    values = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    place = Place({**{i: node(v, 5) for i, v in enumerate(values)}, 6: node(1e30, 5)}, aggregation=aggregation)
    assert isinstance(make_strategy(Phase(), place.federation.settings), RobustFedAvg)
    assert 1.0 <= float(place.round()["w"][0]) <= 1.5


@pytest.mark.parametrize(("aggregation", "least"), ROBUST.items())
def test_fewer_replies_than_a_robust_rule_needs_never_become_a_mean(aggregation: str, least: int) -> None:
    place = Place({i: node(1) if i else raises for i in range(least)}, aggregation=aggregation)
    with pytest.raises(QuorumMissed, match=f"{least - 1} usable replies, {least} needed; failed client 0"):
        place.round()
    few = Settings(aggregation=aggregation, clients=least - 1)
    with pytest.raises(SettingsError, match=f"'{aggregation}' needs {least} clients a round: fraction-train = 1 of"):
        make_strategy(Phase(), few)
    with pytest.raises(SettingsError, match="rates-clients = 2 samples 2"):
        joining_rule(Settings(aggregation=aggregation, clients=least, rates_clients=2))
    joining_rule(few.replace(clients=least))


def test_fewer_clients_asked_than_a_robust_rule_needs() -> None:
    """As with roles, which are known late: three of five clients train."""
    place = Place({i: node(1) for i in range(5)}, aggregation="krum")
    roles = {0: "target", 1: "target"}
    with pytest.raises(QuorumMissed, match="3 clients are asked, 5 replies are needed"):
        train_round(
            replace(place.federation, roles=roles),
            make_strategy(Phase(), place.federation.settings), Phase(), to_record(START), "cross_entropy", 1,
        )  # fmt: skip
    assert place.grid.sent == []


def test_needed_replies() -> None:
    settings = Settings(clients=10, min_replies=4)
    assert [needed_replies(settings, kind, 10) for kind in ("train", "evaluate", "train.adapt")] == [4, 4, 4]
    assert needed_replies(settings, "evaluate", 2) == 2, "of fewer clients asked, all"
    robust = settings.replace(aggregation="krum")
    kinds = ("train", "train.statistics", "train.rates", "train.adapt", "evaluate")
    assert [needed_replies(robust, kind, 10) for kind in kinds] == [5, 5, 5, 4, 4]


def test_what_a_robust_aggregation_cannot_join_is_refused_before_training() -> None:
    robust = Settings(clients=10, aggregation="fedmedian")
    for name, recipe in TRAININGS.items():
        for phase in (phase for phase in recipe.phases if phase.partial):
            with pytest.raises(SettingsError, match="aggregation = 'fedmedian': allowed where all arrays are joined"):
                make_strategy(phase, robust)
        assert name
    for changes in ({"leave_one_out": True}, {"statistics_weighting": "examples"}):
        with pytest.raises(SettingsError, match="aggregation = 'krum': allowed with leave-one-out = False"):
            Settings(aggregation="krum", **changes)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="min-replies = 4: allowed is at most clients = 3"):
        Settings(clients=3, min_replies=4)
    assert joining_rule(Settings()) is None
    assert type(make_strategy(Phase(), Settings())) is FedAvg
