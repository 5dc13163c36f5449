"""What clients must have in common, and what a run knows of each."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from fedtta.messages.replies import Identity
from fedtta.server.members import FederationInfo, difference, known_members, member_names
from fedtta.server.run import unfit
from fedtta.settings import Settings
from tests.server.test_nodes import IDENTITY

COWS = ["cow", "sheep"]


def named(name: str, **changes: Any) -> Identity:
    return replace(IDENTITY, name=name, **changes)


def test_what_most_report_is_agreed_and_the_first_decides_a_tie() -> None:
    a, b, c = named("a", classes=COWS), named("b"), named("c")
    assert FederationInfo.agreed([a, b, c]).classes == IDENTITY.classes
    assert FederationInfo.agreed([a, b]).classes == COWS
    assert FederationInfo.agreed([b, a]).classes == IDENTITY.classes


def test_clients_without_labels_have_no_say_but_must_have_the_same_classes() -> None:
    none = [named(name, labelled=False, shifts=[], classes=COWS) for name in "ab"]
    info = FederationInfo.agreed([*none, named("c")])
    assert (info.classes, info.shifts) == (IDENTITY.classes, ["original"])
    assert info.misfit(none[0]) == "classes = ['cow', 'sheep'], the run has ['cat', 'dog']"
    assert info.misfit(named("d", labelled=False, shifts=[])) == ""
    assert FederationInfo.agreed(none).classes == COWS


def test_the_shortest_stream_of_devices_with_their_own_data_is_that_of_the_run() -> None:
    own = [named(name, own_data=True, stream_rounds=rounds) for name, rounds in (("a", 9), ("b", 5), ("c", 7))]
    info = FederationInfo.agreed(own)
    assert info.stream_rounds == 5
    assert not any(map(info.misfit, own))
    sources = [named("d", own_data=True, role="source", stream_rounds=0), *own]  # have no test images
    assert FederationInfo.agreed(sources).stream_rounds == 5
    assert not any(map(info.misfit, sources))
    parts = [named(name, stream_rounds=rounds) for name, rounds in (("a", 9), ("b", 5), ("c", 9))]
    info = FederationInfo.agreed(parts)
    assert info.stream_rounds == 9
    assert [bool(info.misfit(one)) for one in parts] == [False, True, False]


def test_columns_are_in_the_order_given_and_notes_are_told_once() -> None:
    info = FederationInfo.of([
        named("b", sizes=[1, 2, 3], note="no natural shift", samples=8, own_data=True, notes=["2 skipped"]),
        named("a", role="target", labelled=False, note="no natural shift"),
        named("c", note="other; no natural shift"),
    ])  # fmt: skip
    assert (info.names, info.sizes[0], info.roles) == (["b", "a", "c"], [1, 2, 3], ["both", "target", "both"])
    assert info.note == "no natural shift; other"
    assert (info.data[0]["samples"], info.data[0]["notes"], info.data[1]["labelled"]) == (8, ["2 skipped"], False)
    assert info.labelled_roles == ["both", "both"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sizes": [9, 9, 9]}, "sizes = [9, 9, 9], at first it was [5, 4, 3]"),
        ({"labelled": False}, "labelled = False, at first it was True"),
        ({"saved": {"t": [1]}, "notes": ["new"], "note": "x"}, ""),
    ],
)
def test_a_client_that_comes_back(change: dict[str, Any], told: str) -> None:
    assert difference(IDENTITY, replace(IDENTITY, **change)) == told
    own = replace(IDENTITY, own_data=True)
    assert difference(own, replace(own, **change)) == ("" if "sizes" in change else told)


def test_members_of_a_checkpoint_are_known_also_when_they_are_not_there() -> None:
    clients = [named("b", sizes=[1, 1, 1]), named("a", labelled=False, role="target", own_data=True, samples=7)]
    world = asdict(FederationInfo.of(clients))
    back = replace(clients[0], saved={"t": [1]})
    known = known_members(world, {"b": back})
    assert list(known) == member_names(world) == ["b", "a"]
    assert known["b"] is back
    assert known["a"] == clients[1]
    earlier = {"sizes": [[1, 1, 1], [2, 2, 2]], "roles": ["both", "source"], "shifts": ["original"]}
    known = known_members(earlier, {"0": named("0")})
    assert [(one.name, one.role, one.sizes) for one in known.values()][1] == ("1", "source", [2, 2, 2])


def test_members_that_are_not_there_change_nothing_of_the_run() -> None:
    """Its rounds do not get more without the device of the shortest stream, nor its distributions fewer."""
    clients = [
        named("a", labelled=False, role="target", shifts=[], own_data=True, stream_rounds=9),
        named("b", own_data=True, stream_rounds=5),
        named("c", own_data=True, stream_rounds=7),
    ]
    world = asdict(FederationInfo.of(clients))
    there = {one.name: one for one in clients if one.name != "b"}
    assert FederationInfo.of(list(known_members(world, there).values())).stream_rounds == 5
    del world["shifts"]  # as of a fork
    assert FederationInfo.of(list(known_members(world, there).values())).shifts == ["original"]


def test_a_client_that_divides_another_data_set_is_told_how_to_name_its_own() -> None:
    a, b = named("a", images=9, pixel_mean=100.0), named("b", images=9, pixel_mean=100.2)
    info = FederationInfo.agreed([a, b])
    assert info.misfit(b) == ""
    assert info.misfit(named("c", own_data=True)) == ""
    for other in (named("c", images=8, pixel_mean=100.0), named("c", images=9, pixel_mean=101.0)):
        assert "data = 'folder:...'" in info.misfit(other)
        assert "data = 'folder:...'" in FederationInfo.agreed([other, a, b]).misfit(other)
    close = [named("a", images=9, pixel_mean=100.4), named("b", images=9, pixel_mean=100.6)]  # on both sides of a half
    assert FederationInfo.agreed([named("c", images=9, pixel_mean=50.0), *close]).misfit(close[0]) == ""


COLLABORATIVE = Settings(collaborations="fedavg", rounds=0, clients=4, methods="tent", model="resnet20-bn")
OWN = Settings(devices="*.toml", collaborations="fedavg", rounds=1, clients=4, methods="tent", model="resnet20-bn")


@pytest.mark.parametrize(
    ("settings", "changes", "told"),
    [
        (Settings(clients=4), {}, ""),
        (Settings(clients=4), {"name": "4"}, "allowed are the names '0' to '3' without data of its own"),
        (Settings(clients=4), {"name": "-1"}, "allowed are the names '0' to '3'"),
        (Settings(clients=4), {"name": "ward", "own_data": True}, ""),
        (Settings(clients=4, methods="all"), {"role": "target"}, ""),
        (Settings(clients=4, methods="fedavg"), {"role": "target"}, ""),
        (
            Settings(clients=4, methods="fedavg,btfl"),
            {"role": "target"},
            "role = 'target': btfl need clients that train",
        ),
        (Settings(clients=4, methods="fedavg,btfl"), {"role": "target", "labelled": False}, ""),
        (COLLABORATIVE, {}, ""),
        (COLLABORATIVE, {"role": "target"}, ""),
        (COLLABORATIVE, {"stream_rounds": 0}, "stream-rounds = 0: allowed is 1 or more"),
        (OWN, {}, "no data of its own"),
        (OWN, {"own_data": True}, ""),
        (OWN, {"own_data": True, "stream_rounds": 0}, "stream-rounds = 0: allowed is 1 or more"),
        (OWN, {"own_data": True, "stream_rounds": 0, "role": "source"}, ""),
        (COLLABORATIVE, {"stream_rounds": 0, "role": "source"}, "stream-rounds = 0: allowed is 1 or more"),
    ],
)
def test_one_client_that_fits_no_part_of_a_run_does_not_end_it(
    settings: Settings, changes: dict[str, Any], told: str
) -> None:
    found = unfit(settings)(named("3", **changes) if "name" not in changes else replace(IDENTITY, **changes))
    assert found.startswith(told)
    assert bool(found) == bool(told)
