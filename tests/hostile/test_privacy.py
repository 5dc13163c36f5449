"""Secure aggregation and noise under attack: a server that asks too much, clients that lie or are lost on the way.

Messages go through their plain form; clients are the real ones but for their training.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from docs import leaving
from fedtta.client.privacy import Session, protect, share_keys, unmask
from fedtta.client.state import DirectoryState, MemoryState
from fedtta.messages.arrays import Arrays
from fedtta.messages.replies import REPLIES, Identity, Reply, SharedKeys, Summarized, Trained, Unmasked
from fedtta.messages.requests import Identify, Masking, Request, ShareKeys, Summarize, Train, TrainingTask, Unmask
from fedtta.privacy import masking
from fedtta.privacy.gaussian import epsilon
from fedtta.privacy.sharing import fingerprint
from fedtta.server.aggregation import make_strategy
from fedtta.server.events import Event, Events, JsonLines, QuorumMissed
from fedtta.server.methods import plan
from fedtta.server.nodes import Nodes
from fedtta.server.privacy import Ledger, check_privacy, feasible_statistics, threshold
from fedtta.server.rounds import Federation
from fedtta.server.secure import SecureAggregation, Sum, neighbourhoods
from fedtta.server.training import train_round
from fedtta.server.trainings import TrainingStage
from fedtta.settings import Settings, SettingsError, to_json
from tests.transports import Clock, FakeTransport

START: Arrays = {"w": np.zeros(3, np.float32), "n.running_var": np.ones(2, np.float32)}
IDENTITY = Identity(
    name="0", classes=["a", "b"], channels=3, mean=[0.5], std=[0.5], sizes=[9, 2, 3], shifts=[], note="", role="both",
    classes_present=1, notes=["no samples of b"],
)  # fmt: skip
#: Changes a reply before it leaves, or raises: the client is lost then.
Fault = Callable[[Request, Reply], Reply]


class Member:
    """A client whose training gives every value; the rest of it is real."""

    def __init__(
        self, number: int, settings: Settings, value: float, examples: int, fault: Fault | None = None
    ) -> None:
        self.value, self.examples, self.fault = value, examples, fault
        self.counts = {"validation_total": 4, "validation_correct": 1, "personal_validation_correct": 2}
        self.identity = replace(IDENTITY, name=str(number))
        self.device: Any = SimpleNamespace(
            settings=settings, memory=MemoryState(), model=SimpleNamespace(num_classes=2)
        )

    def __call__(self, request: Request) -> Reply:
        reply = protect(self.device, request, self._reply(request))
        return self.fault(request, reply) if self.fault else reply

    def _reply(self, request: Request) -> Reply:
        if isinstance(request, Identify):
            return self.identity
        if isinstance(request, ShareKeys):
            return share_keys(self.device, request)
        if isinstance(request, Unmask):
            return unmask(self.device, request)
        counts: dict[str, Any] = {"num_examples": self.examples, **self.counts, "seconds": 0.1}
        if isinstance(request, Summarize):
            values = {"dle": np.full(3, self.value), "entropy_local": np.full(1, self.value)}
            return Summarized(statistics=values, **counts)
        assert isinstance(request, Train)
        arrays = {name: np.full_like(value, self.value) for name, value in request.arrays.items()}
        return Trained(arrays=arrays, train_loss=self.value, global_loss=self.value, **counts)


class Place:
    """A federation under secure aggregation; partition i is node 100 + i, trains i + 1 and has i + 1 samples."""

    def __init__(self, clients: int = 4, faults: dict[int, Fault] | None = None, **settings: Any) -> None:
        chosen = {"clients": clients, "round_timeout": 60.0, "node_timeout": 1.0, "secure_aggregation": True}
        self.settings, self.events, clock = Settings(**{**chosen, **settings}), list[Event](), Clock()
        found = faults or {}
        self.members = {i: Member(i, self.settings, i + 1.0, i + 1, found.get(i)) for i in range(clients)}
        self.transport = FakeTransport({100 + i: one for i, one in self.members.items()}, clock=clock)
        by_partition = {i: 100 + i for i in range(clients)}
        about = Identify(settings=to_json(self.settings), run="r")
        identities = {i: protect(one.device, about, one.identity) for i, one in self.members.items()}
        self.nodes = Nodes(self.transport, by_partition, identities, clock, clock.sleep)  # type: ignore[arg-type]
        events = Events(self.events.append)
        secure = SecureAggregation(self.settings, self.nodes, events) if self.settings.secure_aggregation else None
        self.federation = Federation(self.nodes, self.settings, "r", events, secure=secure)

    def round(self, number: int = 1) -> Arrays:
        stage = TrainingStage()
        return train_round(self.federation, make_strategy(stage, self.settings), stage, START, "cross_entropy", number)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["event"] in kinds]


def mean(*partitions: int) -> float:
    """The mean of what these clients train, weighted by their samples."""
    values = np.array(partitions) + 1.0
    return float((values * values).sum() / values.sum())


def lost(*kinds: type[Request]) -> Fault:
    """A client that is gone when it has such a request."""

    def fault(request: Request, reply: Reply) -> Reply:
        if isinstance(request, kinds):
            raise ConnectionError("gone")
        return reply

    return fault


def changed(kind: type[Reply], change: Callable[[Any], Reply]) -> Fault:
    """A client that lies in replies of a kind."""
    return lambda request, reply: change(reply) if isinstance(reply, kind) else reply


# -- the sum


def test_the_mean_is_that_without_secure_aggregation_and_of_a_client_only_masked_numbers_arrive() -> None:
    place, seen = Place(), []
    for one in place.members.values():
        one.fault = lambda request, reply: (seen.append(reply), reply)[1]
    new = place.round()
    np.testing.assert_allclose(new["w"], mean(0, 1, 2, 3), rtol=1e-6)
    assert {name: value.dtype for name, value in new.items()} == {name: value.dtype for name, value in START.items()}
    (done,) = place.of("round")
    assert done["train_loss"] == pytest.approx(mean(0, 1, 2, 3))
    assert (done["validation_accuracy"], done["personal_validation_accuracy"]) == (0.25, 0.5)
    trained = [one for one in seen if isinstance(one, Trained)]
    assert len(trained) == 4
    for one in trained:
        assert (one.arrays, one.num_examples, one.train_loss, one.validation_total) == ({}, 1, 0.0, 0)
        assert one.global_loss is None
        assert one.masked is not None
        assert (one.masked["sum"] > 2**40).mean() > 0.9  # as of random numbers, not of small ones
    assert done["bytes_up"] == sum(one.masked["sum"].nbytes for one in trained)


def test_accuracies_of_a_sum_are_those_of_all_samples() -> None:
    """As means over clients, rounded, they were 2 of 2 here."""
    place = Place(4)
    for i, right in enumerate((0, 2, 2, 3)):
        own = {"validation_total": 2 + i % 2, "validation_correct": right, "personal_validation_correct": 1}
        place.members[i].counts = own
    place.round()
    (done,) = place.of("round")
    assert (done["validation_accuracy"], done["personal_validation_accuracy"]) == (7 / 10, 4 / 10)


@examples(max_examples=12, deadline=None)
@given(
    before=st.sets(st.integers(0, 4), max_size=1),
    replying=st.sets(st.integers(0, 4), max_size=1),
    revealing=st.sets(st.integers(0, 4), max_size=1),
    neighbours=st.sampled_from([0, 4]),
)
def test_clients_lost_at_any_step_leave_the_mean_of_the_others(
    before: set[int], replying: set[int], revealing: set[int], neighbours: int
) -> None:
    faults = {}
    for kind, found in ((ShareKeys, before), (Train, replying), (Unmask, revealing)):
        faults |= {i: lost(kind) for i in found if i not in faults}
    place = Place(5, faults, secure_threshold=0.51, secure_neighbours=neighbours)
    survivors = [i for i in range(5) if i not in before | replying]
    gone = len(set(faults))
    if gone > 2:
        with pytest.raises(QuorumMissed):
            place.round()
        return
    np.testing.assert_allclose(place.round()["w"], mean(*survivors), rtol=1e-6)
    (done,) = place.of("round")
    assert done["replied"] == survivors


def test_equal_survivors_have_equal_bits_however_the_others_were_lost() -> None:
    kinds = [(ShareKeys,), (Train,), (ShareKeys,)]
    results = [Place(6, {5: lost(*kind)}, learning_rate=0.1).round()["w"].tobytes() for kind in kinds]
    neighbours = Place(6, {5: lost(Train)}, secure_threshold=0.51, secure_neighbours=4).round()["w"].tobytes()
    assert len({*results, neighbours}) == 1


def test_below_the_threshold_the_round_is_repeated_once_and_then_refused_with_the_reason() -> None:
    place = Place(4, {1: lost(Train), 2: lost(Train)})
    with pytest.raises(QuorumMissed, match=r"2 clients have replied, 3 are needed"):
        place.round()
    assert len([e for e in place.of("note") if "the round is repeated" in e["text"]]) == 1
    assert not place.transport.requests(Unmask)  # nothing was revealed of the two


def test_a_round_that_will_be_repeated_tells_no_sum() -> None:
    """Clients reply the same again: the sum of all five less that of four is what one client sent."""
    gone: list[Request] = []

    def once(request: Request, reply: Reply) -> Reply:
        if isinstance(request, Train) and not gone:
            gone.append(request)
            raise ConnectionError("gone")
        return reply

    place = Place(5, {4: once}, secure_threshold=0.6, min_replies=5)
    np.testing.assert_allclose(place.round()["w"], mean(0, 1, 2, 3, 4), rtol=1e-6)
    (told,) = place.of("note")
    assert "failed client 4: ConnectionError: gone; 4 clients have replied, 5 are needed" in told["text"]
    assert [(e["survivors"], e["unmasked"]) for e in place.of("secure_aggregation")] == [(5, True)]
    assert len({one.session for one in place.transport.requests(Unmask)}) == 1


def test_a_threshold_is_the_part_of_the_members_that_was_written() -> None:
    """In floats 0.55 of 100 is more than 55."""
    assert [threshold(Settings(secure_threshold=0.55), members) for members in (100, 101)] == [55, 56]


# -- clients that lie


def test_a_client_that_reveals_wrong_shares_spoils_nothing() -> None:
    lie = changed(Unmasked, lambda reply: replace(reply, shares=[bytes(66).hex() for _ in reply.shares]))
    np.testing.assert_allclose(Place(4, {0: lie}).round()["w"], mean(0, 1, 2, 3), rtol=1e-6)


def test_a_client_that_deals_shares_of_nothing_is_left_out_when_the_round_is_repeated() -> None:
    def lie(reply: SharedKeys) -> SharedKeys:
        return replace(reply, shares=["00" * 160 for _ in reply.shares])

    place = Place(5, {2: changed(SharedKeys, lie)}, secure_threshold=0.6)
    np.testing.assert_allclose(place.round()["w"], mean(0, 1, 3, 4), rtol=1e-6)
    repeated, left_out = (e["text"] for e in place.of("note"))
    assert "client 2: 0 of its shares were revealed, 3 are needed; the round is repeated" in repeated
    assert left_out == "secure aggregation leaves out client 2: shares of it, or that it revealed, spoilt a sum"
    assert [e["unmasked"] for e in place.of("secure_aggregation")] == [False, True]
    np.testing.assert_allclose(place.round(2)["w"], mean(0, 1, 3, 4), rtol=1e-6)
    assert [e["unmasked"] for e in place.of("secure_aggregation")] == [False, True, True]


@pytest.mark.parametrize("neighbours", [0, 4])
def test_clients_lost_while_they_reveal_make_no_other_a_suspect(neighbours: int) -> None:
    threshold = 0.81 if neighbours else 0.9  # eight of nine clients, all five members; or all nine
    place = Place(9, {0: lost(Unmask)}, secure_threshold=threshold, secure_neighbours=neighbours)
    with pytest.raises(QuorumMissed):
        place.round()
    place.members[0].fault = None
    np.testing.assert_allclose(place.round(2)["w"], mean(*range(9)), rtol=1e-6)


def test_one_client_that_reveals_wrong_shares_is_left_out_and_no_other() -> None:
    """Three of four shares are needed, and another client is lost once while it reveals."""
    lie = changed(Unmasked, lambda reply: replace(reply, shares=[bytes(66).hex() for _ in reply.shares]))
    gone: list[Request] = []

    def once(request: Request, reply: Reply) -> Reply:
        if isinstance(request, Unmask) and not gone:
            gone.append(request)
            raise ConnectionError("gone")
        return reply

    place = Place(4, {0: lie, 3: once}, secure_threshold=0.75)
    np.testing.assert_allclose(place.round()["w"], mean(1, 2, 3), rtol=1e-6)
    assert [e["text"] for e in place.of("note") if "leaves out" in e["text"]] == [
        "secure aggregation leaves out client 0: shares of it, or that it revealed, spoilt a sum"
    ]


@pytest.mark.parametrize(
    ("wrong", "failed", "expected"),
    [
        ([(1, 3), (2, 3), (3, 3)], [1, 2, 3], {3}),  # (dealer, holder): 3 revealed wrong shares
        ([(3, 1), (3, 2)], [3], {3}),  # 3 dealt wrong ones
        ([(1, 2)], [1], {1, 2}),  # cannot be told
        ([(1, 2), (3, 2)], [1], {2}),  # 2 is in both
        ([(1, 2), (4, 3)], [1], {1, 2}),  # that of 4 and 3 did not spoil it
        ([], [1], set()),  # clients were lost
    ],
)
def test_suspects_are_those_in_most_pairs_of_a_dealer_and_a_wrong_share(
    wrong: list[tuple[int, int]], failed: list[int], expected: set[int]
) -> None:
    numbers = [1, 2, 3, 4]
    summing = Sum(dict.fromkeys(numbers, numbers), 4)
    digests = [fingerprint(bytes([holder])) for holder in numbers]
    for one in numbers:
        summing.shared[one] = SharedKeys(
            key="", shares=[""] * 4, key_digests=digests, seed_digests=digests, seed_digest=""
        )
        shares = [b"wrong" if (dealer, one) in wrong else bytes([one]) for dealer in numbers]
        summing.revealed[one] = Unmasked(shares=[share.hex() for share in shares])
    if not wrong:
        del summing.revealed[2]
    assert summing.suspects(failed) == expected


@pytest.mark.parametrize(
    "lie",
    [
        lambda reply: replace(reply, masked=None),
        lambda reply: replace(reply, masked={"sum": np.zeros(3, np.uint64)}),
        lambda reply: replace(reply, masked={"sum": reply.masked["sum"].astype(np.int64)}),
        lambda reply: replace(reply, masked={"other": reply.masked["sum"]}),
    ],
)
def test_a_client_whose_masked_numbers_do_not_fit_is_refused_by_name(lie: Callable[[Any], Reply]) -> None:
    place = Place(4, {3: changed(Trained, lie)})
    np.testing.assert_allclose(place.round()["w"], mean(0, 1, 2), rtol=1e-6)
    assert [(e["partition"], e["event"]) for e in place.of("refused")] == [(3, "refused")]


@pytest.mark.parametrize(
    "lie",
    [
        lambda reply: replace(reply, shares=reply.shares[:-1]),
        lambda reply: replace(reply, key_digests=[]),
        lambda reply: replace(reply, key="00"),
        lambda reply: replace(reply, key="00" * 32),  # a point of low order: no client could agree on a key
    ],
)
def test_a_client_with_keys_that_are_none_does_not_end_the_run(lie: Callable[[Any], Reply]) -> None:
    place = Place(5, {4: changed(SharedKeys, lie)}, secure_threshold=0.6)
    np.testing.assert_allclose(place.round()["w"], mean(0, 1, 2, 3), rtol=1e-6)


@pytest.mark.parametrize("key", ["", "00", "00" * 32, "another's"])
def test_a_client_that_is_identified_with_a_key_that_is_none_of_its_own_is_left_out(key: str) -> None:
    place = Place(5, secure_threshold=0.6)
    known = place.nodes.identities
    known[4] = replace(known[4], mask_key=known[0].mask_key if key == "another's" else key)
    np.testing.assert_allclose(place.round()["w"], mean(0, 1, 2, 3), rtol=1e-6)


def test_a_client_that_is_identified_with_more_samples_than_can_be_summed_is_left_out_by_name() -> None:
    place = Place(5, secure_threshold=0.6)
    for partition, sizes in ((4, [2**53, 2, 3]), (3, [9, 2**53, 3])):
        place.nodes.identities[partition] = replace(place.nodes.identities[partition], sizes=sizes)
        if partition == 4:
            np.testing.assert_allclose(place.round()["w"], mean(0, 1, 2, 3), rtol=1e-6)
    place.members[0].fault = lost(ShareKeys)
    with pytest.raises(QuorumMissed, match=r"client 3: 9007199254740992 samples, .* 100000000 \(max-examples\)"):
        place.round(2)


def test_a_client_that_repeats_anothers_masking_key_is_left_out() -> None:
    seen: list[str] = []

    def copy(request: Request, reply: Reply) -> Reply:
        if isinstance(reply, SharedKeys):
            seen.append(reply.key)
            return replace(reply, key=seen[0])
        return reply

    place = Place(5, {0: copy, 4: copy}, secure_threshold=0.6)
    place.round()
    (done,) = place.of("round")
    assert len(done["replied"]) == 4


def test_numbers_that_no_clients_can_have_sent_are_found_in_the_mean() -> None:
    """A client cannot be named: the round is repeated once and then missed."""

    def lie(reply: Trained) -> Trained:
        assert reply.masked is not None
        words = reply.masked["sum"].copy()
        words[:2] += np.uint64(1) << np.uint64(62)  # a variance, which is not negative
        words[-5:] -= np.uint64(1) << np.uint64(50)
        return replace(reply, masked={"sum": words})

    with pytest.raises(QuorumMissed, match="secure aggregation"):
        Place(4, {0: changed(Trained, lie)}).round()


# -- a server that asks too much


def session(members: int = 3) -> tuple[list[Member], list[ShareKeys], list[SharedKeys]]:
    settings = Settings(secure_aggregation=True, clients=members)
    clients = [Member(i, settings, 1.0, 1) for i in range(members)]
    about: dict[str, Any] = {"settings": to_json(settings), "run": "r"}
    identities: list[Any] = [one(Identify(**about)) for one in clients]
    keys, numbers = [one.mask_key for one in identities], list(range(1, members + 1))
    requests = [ShareKeys(session="s", own=n, members=numbers, keys=keys, threshold=2, **about) for n in numbers]
    replies: list[Any] = [one(request) for one, request in zip(clients, requests, strict=True)]
    return clients, requests, replies


def training(replies: list[SharedKeys], request: ShareKeys, **changes: Any) -> Train:
    told = Masking("s", request.own, request.members, [one.key for one in replies], 3, 9, "examples")
    about: dict[str, Any] = {"settings": request.settings, "run": "r"}
    return Train(round=1, task=TrainingTask("t"), arrays=START, **{"masking": replace(told, **changes), **about})


def revealing(requests: list[ShareKeys], replies: list[SharedKeys], to: int, survivors: list[int]) -> Unmask:
    dealt = [one.shares[to - 1] for one in replies]
    return Unmask(session="s", survivors=survivors, shares=dealt, settings=requests[0].settings, run="r")


def test_a_request_without_masks_is_not_answered() -> None:
    (client, *_), (request, *_), _ = session()
    plain = Train(round=1, task=TrainingTask("t"), arrays=START, settings=request.settings, run="r")
    with pytest.raises(ValueError, match="secure-aggregation is on"):
        client(plain)


def test_a_second_reply_under_the_same_masks_is_not_given() -> None:
    (client, *_), (request, *_), replies = session()
    client(training(replies, request))
    with pytest.raises(ValueError, match="has used them"):
        client(training(replies, request))
    client(request)  # new secrets for the old name
    other: Any = client(training([client(request), *replies[1:]], request))  # type: ignore[list-item]
    assert other.masked["sum"].dtype == np.uint64


@pytest.mark.parametrize(
    ("changes", "cancel"),
    [
        ({}, True),
        ({"checkpoint_rounds": [1]}, True),
        ({"arrays": {**START, "w": np.ones(3, np.float32)}}, False),
        ({"task": TrainingTask("other")}, False),
        ({"round": 2}, False),
        ({"proximal_mu": 9.0}, False),
    ],
)
def test_masks_of_clients_that_were_sent_different_requests_do_not_cancel(changes: Any, cancel: bool) -> None:
    clients, requests, replies = session()
    sent = [training(replies, request) for request in requests]
    words: list[Any] = [one(each) for one, each in zip(clients, [replace(sent[0], **changes), *sent[1:]], strict=True)]
    seeds = [Session.load(one.device.memory, "s", "masked").seed for one in clients]
    own = (masking.mask(bytes.fromhex(seed), len(words[0].masked["sum"])) for seed in seeds)
    total = sum(one.masked["sum"] - mask for one, mask in zip(words, own, strict=True))
    assert (np.abs(total.view(np.int64)) < 2**62).all() == cancel


def test_of_a_member_both_kinds_of_shares_are_never_revealed() -> None:
    (client, *_), requests, replies = session()
    client(training(replies, requests[0]))
    first: Any = client(revealing(requests, replies, 1, [1, 2, 3]))
    assert all(first.shares)
    with pytest.raises(ValueError, match="has used them"):
        client(revealing(requests, replies, 1, [1, 2]))


@pytest.mark.parametrize("survivors", [[1], [2, 3], [1, 4], []])
def test_a_sum_of_too_few_or_of_others_is_not_unmasked(survivors: list[int]) -> None:
    (client, *_), requests, replies = session()
    client(training(replies, requests[0]))
    with pytest.raises(ValueError, match="too few members survive"):
        client(revealing(requests, replies, 1, survivors))


def test_nothing_is_revealed_before_a_masked_reply() -> None:
    (client, *_), requests, replies = session()
    with pytest.raises(ValueError, match="no secrets for it"):
        client(revealing(requests, replies, 1, [1, 2, 3]))


def test_a_share_for_another_client_is_not_opened() -> None:
    (client, *_), requests, replies = session()
    client(training(replies, requests[0]))
    swapped = replace(revealing(requests, replies, 1, [1, 2, 3]), shares=[one.shares[1] for one in replies])
    assert client(swapped).shares == ["", "", ""]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"members": [1, 2], "keys": lambda keys: keys[:2]}, "at least 3"),
        ({"keys": lambda keys: [keys[0], keys[1], keys[1]]}, "different keys"),
        ({"keys": lambda keys: [keys[1], keys[0], keys[2]]}, "not among those"),
        ({"own": 4}, "not among those"),
        ({"members": [1, 2, 2]}, "different keys"),
        ({"threshold": 1}, "more than half"),
        ({"threshold": 4}, "more than half"),
    ],
)
def test_a_sum_that_would_tell_single_replies_is_not_joined(changes: dict[str, Any], told: str) -> None:
    (client, *_), (request, *_), _ = session()
    values = {k: v(request.keys) if callable(v) else v for k, v in changes.items()}
    with pytest.raises(ValueError, match=told):
        client(replace(request, **values))


@pytest.mark.parametrize(
    "changes", [{"members": [1]}, {"members": [1, 2, 9]}, {"members": [2, 3]}, {"session": "other"}]
)
def test_masks_with_others_than_the_members_are_not_made(changes: dict[str, Any]) -> None:
    (client, *_), (request, *_), replies = session()
    told = {**changes, "keys": [one.key for one in replies][: len(changes.get("members", "abc"))]}
    with pytest.raises(ValueError, match=r"no members|are left|no secrets"):
        client(training(replies, request, **told))


def test_a_run_with_hidden_contributions_is_not_told_which_classes_a_client_lacks() -> None:
    (client, *_), (request, *_), _ = session()
    identity: Any = client(Identify(settings=request.settings, run="r"))
    assert (identity.classes_present, identity.notes) == (None, [])
    assert len(identity.mask_key) == 64
    assert client(Identify(settings=request.settings, run="r")).mask_key == identity.mask_key  # type: ignore[attr-defined]


def test_secrets_on_disk_are_for_their_user_alone(tmp_path: Path) -> None:
    client, request = Member(0, Settings(secure_aggregation=True), 1.0, 1), Identify(settings="{}", run="r")
    state = client.device.memory = DirectoryState(tmp_path, "r", "0")
    old = os.umask(0o022)  # also where other files are for everyone
    try:
        identity: Any = client(request)
        keys = [identity.mask_key, *(masking.public_key(masking.new_secret()).hex() for _ in range(2))]
        client(ShareKeys(session="s", own=1, members=[1, 2, 3], keys=keys, threshold=2, settings="{}", run="r"))
    finally:
        os.umask(old)
    assert set(state.tags()) == {"secure-sum", "secure-key"}
    assert {path.name: path.stat().st_mode & 0o777 for path in state.folder.iterdir()} == {
        "secure-key@0.safetensors": 0o600,
        "secure-sum@0.safetensors": 0o600,
    }


def test_secrets_are_not_in_what_leaves() -> None:
    (client, *_), (request, *_), replies = session()
    left = [client(Identify(settings=request.settings, run="r")), *replies]
    text = json.dumps([one.to_record().values for one in left])
    entries = client.device.memory.entries
    kept = json.loads(entries["secure-sum", 0]["json"].tobytes())
    for secret in (kept["private"], kept["seed"], entries["secure-key", 0]["private"].tobytes().hex()):
        assert secret not in text


# -- the norm bound moves to the client


def test_the_norm_bound_is_kept_by_clients_before_masking() -> None:
    place = Place(4, update_norm_bound=1.0)
    new = place.round()
    assert list(new) == list(START)
    change = np.concatenate([new[name] - START[name] for name in START])
    assert 0.9 < np.linalg.norm(change) <= 1 + 1e-6


# -- noise


def test_noise_on_statistics_and_clipping_on_the_client() -> None:
    settings = Settings(clients=3, differential_privacy="statistics=1/0.25")
    request = Summarize(round=1, task=TrainingTask("t"), arrays=START, settings=to_json(settings), run="r")
    replies: list[Any] = [Member(0, settings, 100.0, 9)(request) for _ in range(400)]
    dle = np.stack([one.statistics["dle"] for one in replies])
    entropy = np.stack([one.statistics["entropy_local"] for one in replies])
    # clipped to 0.25 (root mean square) from the middle; two arrays share the noise: 0.25 √2 √size
    np.testing.assert_allclose(dle.mean(0), 0.75, atol=0.2)
    np.testing.assert_allclose(entropy.mean(0), np.log(2) / 2 + 0.25, atol=0.1)
    np.testing.assert_allclose(dle.std(0), 0.25 * np.sqrt(2) * np.sqrt(3), rtol=0.2)
    np.testing.assert_allclose(entropy.std(0), 0.25 * np.sqrt(2), rtol=0.2)
    assert {(one.validation_total, one.validation_correct, one.num_examples) for one in replies} == {(0, 0, 9)}


def test_noise_of_the_survivors_adds_up_to_that_of_the_mechanism() -> None:
    """z C W over the sum of weights: here each client has 9 of 9 samples, W = 9, and 3 of 4 must survive."""
    deviations = []
    for _ in range(60):
        place = Place(4, differential_privacy="model=0.5/2", secure_threshold=0.75)
        for one in place.members.values():
            one.value, one.examples = 0.0, 9
        deviations.append(place.round()["w"])
    expected = 0.5 * 2 * 9 * np.sqrt(4 / 3) / (4 * 9)
    assert np.std(deviations) == pytest.approx(expected, rel=0.25)


def test_a_loss_that_is_hidden_is_not_reported_as_zero() -> None:
    place = Place(4, differential_privacy="model=1/1")
    place.round()
    (done,) = place.of("round")
    assert (done["train_loss"], done["validation_accuracy"]) == (None, None)


def test_clipping_bounds_a_model_update_whatever_was_learned() -> None:
    settings = Settings(clients=3, differential_privacy="model=0.000001/0.5")
    request = Train(round=1, task=TrainingTask("t"), arrays=START, settings=to_json(settings), run="r")
    reply: Any = Member(0, settings, 1e6, 1)(request)
    change = np.concatenate([reply.arrays[name] - START[name] for name in START])
    assert np.linalg.norm(change) == pytest.approx(0.5, rel=1e-3)
    assert {value.dtype for value in reply.arrays.values()} == {np.dtype("float32")}
    assert (reply.train_loss, reply.global_loss, reply.validation_total) == (0.0, None, 0)


def test_means_are_brought_back_into_their_ranges() -> None:
    found = feasible_statistics(
        {
            "dle": np.array([-3.0, 0.5, 7.0]),
            "entropy_local": np.array([-1.0]),
            "label_prior": np.array([-1.0, 3.0, 1.0]),
        }
    )
    assert found["dle"].tolist() == [0, 0.5, 1]
    assert found["entropy_local"].tolist() == [0]
    assert found["label_prior"].tolist() == [0, 0.5, 0.5]


def test_epsilon_counts_rounds_that_are_repeated_and_those_before_a_resume(tmp_path: Any) -> None:
    settings = Settings(differential_privacy="model=4/1;statistics=2/0.5")
    before = [{"event": "round", "sampled": [0, 1], "replied": [0]}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in before) + '{"event": "rou')
    ledger = Ledger(settings, tmp_path)
    for event in (
        {"event": "attempt", "releases": "model", "asked": [1]},
        {"event": "attempt", "releases": "model", "asked": [1]},
        {"event": "round", "sampled": [1], "replied": [1]},
        {"event": "attempt", "releases": "statistics", "asked": [0, 1]},
        {"event": "statistics", "replied": [0]},
    ):
        ledger(event)
    spent = ledger.spent()
    assert spent is not None
    assert spent["releases"] == {"model": 3, "statistics": 1}  # of client 1
    assert spent["epsilon"] == pytest.approx(epsilon([4, 4, 4, 2], 1e-5))
    assert Ledger(Settings()).spent() is None


def test_what_any_client_released_without_noise_is_named() -> None:
    ledger = Ledger(Settings(differential_privacy="rates=4/1"))
    for what, asked in (("rates", [0]), ("model", [1, 2])):
        ledger({"event": "attempt", "releases": what, "asked": asked})
    spent = ledger.spent()
    assert spent is not None
    assert spent["releases"] == {"rates": 1}  # of client 0
    assert spent["without_noise"] == ["model"]  # of clients 1 and 2


def test_epsilon_counts_attempts_of_a_killed_server_once_whatever_became_of_its_files(tmp_path: Path) -> None:
    write, place = JsonLines(tmp_path / "metrics.jsonl"), Place(4, differential_privacy="model=4/1")
    place.federation.events.listeners.append(write)
    place.round()
    offset = (tmp_path / "metrics.jsonl").stat().st_size
    place.members[0].fault = place.members[1].fault = lost(Train)  # two attempts, and no end of the round
    with pytest.raises(QuorumMissed):
        place.round(2)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole[:offset])
    (tmp_path / "metrics-1.cut.jsonl").write_bytes(whole[offset:])
    (tmp_path / "metrics-1.damaged.jsonl").write_bytes(b"\xff\n[1]\n" + whole)
    spent = Ledger(place.settings, tmp_path).spent()
    assert spent is not None
    assert spent["releases"] == {"model": 3}


# -- what cannot be combined


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"secure_aggregation": True, "aggregation": "krum"}, "needs each client's reply"),
        ({"secure_aggregation": True, "aggregation": "fedmedian"}, "needs each client's reply"),
        ({"secure_aggregation": True, "methods": "gma"}, "needs each client's reply"),
        ({"differential_privacy": "model=1/1", "methods": "qffl"}, "each client's loss"),
        ({"secure_aggregation": True, "collaborations": "fedavg", "methods": "tent"}, "a mixture of its own"),
        ({"secure_aggregation": True, "clients": 2}, "clients = 2, of which train 2; allowed is 3 or more"),
        ({"secure_aggregation": True, "clients": 9, "fraction_train": 0.3}, "fraction-train = 0.3 .* samples 2; all"),
        ({"secure_aggregation": True, "methods": "atp", "rates_clients": 2}, "rates-clients = 2 samples 2; allowed"),
        ({"differential_privacy": "model=1/1", "update_norm_bound": 1.0}, "noise on the model"),
        ({"differential_privacy": "rates=1/1", "update_norm_bound": 1.0, "methods": "atp"}, "noise on the rates"),
        ({"differential_privacy": "model=1"}, "allowed are"),
        ({"secure_aggregation": True, "update_format": "int8"}, "each number takes 64 bits"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(changes: dict[str, Any], told: str) -> None:
    model = {"model": "resnet20-bn"} if "collaborations" in changes else {}
    with pytest.raises(SettingsError, match=told):
        plan(Settings(**{"methods": "fedavg", **model, **changes}))


def test_clients_that_only_test_are_none_of_a_secure_sum() -> None:
    settings = Settings(secure_aggregation=True, clients=4, methods="fedavg,tent", model="resnet20-bn")
    with pytest.raises(SettingsError, match="clients = 4, of which train 2; allowed is 3 or more"):
        plan(settings, ["source", "both", "target", "target"])
    plan(settings, ["source", "both", "source", "target"])


def test_means_with_and_without_momentum_and_parts_of_networks_can_be_combined() -> None:
    settings = Settings(secure_aggregation=True, methods="fedavg,fedprox,fedavgm,fedper,fedthe,btfl,em")
    plan(settings)
    check_privacy(Settings(), [Settings(aggregation="krum")], 1)  # off: nothing is refused


@given(st.integers(3, 30), st.integers(0, 30))
def test_in_a_ring_each_client_is_its_neighbours_neighbour(clients: int, neighbours: int) -> None:
    found = neighbourhoods(list(range(1, clients + 1)), neighbours)
    sizes = {len(members) for members in found.values()}
    assert len(sizes) == 1
    assert all(one in found[other] for one, members in found.items() for other in members)
    assert all(one in members for one, members in found.items())
    assert sizes == {clients} or sizes == {2 * (neighbours // 2) + 1}


def test_every_field_that_leaves_has_its_line_in_the_documentation() -> None:
    for reply in REPLIES.values():
        assert [row[0] for row in leaving.rows(reply)]
        assert set(leaving.TELLS[reply]) == {one.name for one in dataclasses.fields(reply)}


def test_keys_and_masks_differ_between_sessions_and_clients() -> None:
    _, _, first = session()
    _, _, second = session()
    assert len({one.key for one in (*first, *second)}) == 6
    assert len({one.seed_digest for one in (*first, *second)}) == 6  # a known seed takes the mask off
    assert masking.KEY == 32
