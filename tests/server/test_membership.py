"""Whole runs with clients that join, leave, return, or have no labels."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedtta.messages.flower import allow_messages
from fedtta.messages.replies import Adapted, Identity, Reply
from fedtta.messages.requests import Adapt, Evaluate, Identify, Request, Summarize, Train
from fedtta.messages.transport import Addressed, Answer
from fedtta.models import load_arrays
from fedtta.server.app import serve
from fedtta.server.checkpoints import checkpoint_files, read_checkpoint
from fedtta.server.events import Event, NodesMissing, RunError
from fedtta.settings import Settings, SettingsError
from tests.transports import Client, FakeTransport, devices

SMALL = Settings(
    clients=3,
    min_clients=2,
    node_timeout=0.3,
    fraction=0.06,
    rounds=2,
    local_epochs=1,
    image_size=16,
    methods="fedavg,btfl",
    shifts="original",
    learning_rate=0.1,
    device="cpu",
    round_timeout=60,
)
BATCHNORM = {"model": "resnet20-bn", "model_options": "depth=8;width=4"}
COLLABORATIVE = SMALL.replace(
    methods="bbn",
    rounds=0,
    collaborations="fedavgm,pfedbbn",
    stream_size=16,
    stream_batch=8,
    stream_rounds=2,
    **BATCHNORM,
)


class Doors(FakeTransport):
    """Clients of whom some are not there; node 900 - i is client i."""

    def __init__(self, clients: dict[int, Client], away: Sequence[int] = ()) -> None:
        super().__init__(clients)
        self.away = set(away)

    def nodes(self) -> list[int]:
        return [node for node in super().nodes() if node not in self.away]

    def exchange(self, requests: Sequence[Addressed], timeout: float) -> Iterator[Answer]:
        for one in requests:
            if one.node in self.away:
                yield Answer(one.node, None, "failed", "the node is not there")
        yield from super().exchange([one for one in requests if one.node not in self.away], timeout)


def run(
    folder: Path,
    settings: Settings,
    away: Sequence[int] = (),
    then: Callable[[Event, Doors], object] = lambda event, doors: None,
    change: Callable[[dict[int, Client]], object] = lambda clients: None,
    targets: Sequence[int] = (),
) -> Doors:
    """Run in `folder`/r; `then` is called with every event and may open or close doors."""
    allow_messages()
    settings = settings.replace(state_dir=str(folder / "state"))
    clients = devices(settings, config=lambda i: {"role": "target"} if i in targets else {}).clients
    change(clients)
    doors = Doors(clients, away)
    serve(doors, settings, folder / "r", [lambda event: then(event, doors)])
    return doors


def events(folder: Path, *kinds: str) -> list[Event]:
    lines = (folder / "r" / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] in kinds]


def opens(node: int, kind: str, **about: Any) -> Callable[[Event, Doors], None]:
    """Let a node be there from an event on."""

    def then(event: Event, doors: Doors) -> None:
        if event["event"] == kind and {**event, **about} == event:
            doors.away.discard(node)

    return then


def named(folder: Path) -> dict[int, str]:
    (start,) = events(folder, "clients")
    joined = {event["partition"]: event["name"] for event in events(folder, "joined")}
    return dict(enumerate(start["names"])) | joined


def arrays_of(folder: Path) -> dict[str, dict[str, bytes]]:
    found = sorted((folder / "r").glob("*.safetensors"))
    return {path.name: {k: v.tobytes() for k, v in load_arrays(path)[0].items()} for path in found}


def results_by_name(folder: Path) -> list[tuple]:
    names = named(folder)
    return sorted(
        (event["method"], names[event["partition"]], event.get("round", 0), event["correct"], event["total"])
        for event in events(folder, "evaluation", "adapted")
    )


# -- joining


@cache
def undisturbed(settings: Settings) -> tuple[dict[str, dict[str, bytes]], list[tuple]]:
    """Return arrays and results of a run in which everyone is there from the start."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), settings)
        return arrays_of(Path(folder)), results_by_name(Path(folder))


@pytest.mark.parametrize(
    "settings",
    [SMALL, COLLABORATIVE, SMALL.replace(methods="fedavgm,fedper")],
    ids=["statistics", "cells", "two trainings"],
)
@pytest.mark.parametrize("late", [900, 899], ids=["first name", "middle name"])
def test_who_joins_before_the_first_round_changes_no_bit(settings: Settings, late: int, tmp_path: Path) -> None:
    """Its partition is the last, its place in sums, cohorts and mixtures is that of its name."""
    settings = settings.replace(fraction_train=0.67)
    run(tmp_path / "late", settings, [late], opens(late, "clients"))
    (joined,) = events(tmp_path / "late", "joined")
    assert (joined["partition"], joined["name"], joined["round"]) == (2, str(900 - late), 1)
    assert (arrays_of(tmp_path / "late"), results_by_name(tmp_path / "late")) == undisturbed(settings)
    assert events(tmp_path / "late", "rejoined", "left", "failed", "refused") == []


@pytest.mark.parametrize("methods", ["fedavg,btfl", "fedbn", "fedper", "fedrep", "ditto", "fedicon", "fedrod", "apfl"])
def test_who_joins_after_a_round_takes_part_from_the_next_on(methods: str, tmp_path: Path) -> None:
    settings = SMALL.replace(methods=methods, rounds=3, **(BATCHNORM if methods == "fedbn" else {}))
    doors = run(tmp_path, settings, [900], opens(900, "round", round=1))
    (joined,) = events(tmp_path, "joined")
    assert (joined["partition"], joined["name"], joined["round"]) == (2, "0", 2)
    assert [event["replied"] for event in events(tmp_path, "round")][:3] == [[0, 1], [2, 0, 1], [2, 0, 1]]
    assert {event["partition"] for event in events(tmp_path, "evaluation")} == {0, 1, 2}
    assert not events(tmp_path, "failed", "refused", "late")
    (first, *_) = doors.requests(Train, 900)
    assert first.round == 2
    assert {event["name"] for event in events(tmp_path, "joined")} == {"0"}


@pytest.mark.parametrize("methods", ["btfl", "fedper"])
def test_who_joins_after_the_last_round_trains_its_head_and_is_evaluated(methods: str, tmp_path: Path) -> None:
    settings = SMALL.replace(methods=f"{methods},fixed_mix")
    last = {"training": "fedper"} if methods == "fedper" else {}
    run(tmp_path, settings, [898], opens(898, "round", round=2, **last))
    assert not events(tmp_path, "failed", "refused", "late")
    for event in events(tmp_path, "statistics"):
        assert event["replied"] == [0, 1, 2]
    assert {event["partition"] for event in events(tmp_path, "evaluation")} >= {0, 1}


def test_who_joins_in_test_time_rounds_starts_from_the_network(tmp_path: Path) -> None:
    settings = COLLABORATIVE.replace(stream_rounds=3, collaborations="fedavgm,pfedgraph")
    doors = run(tmp_path, settings, [900], opens(900, "adapt_round", round=1, collaboration="fedavgm"))
    rounds = events(tmp_path, "adapt_round")
    assert [event["replied"] for event in rounds] == [[0, 1], *[[2, 0, 1]] * 5]
    assert all(len(event["weights"]) == len(event["replied"]) for event in rounds)
    assert not events(tmp_path, "failed", "refused", "late")
    sent = [(one.round, one.arrays is not None, one.shared is not None) for one in doors.requests(Adapt, 900)]
    assert sent[:3] == [(2, True, False), (3, False, True), (1, False, False)]


# -- leaving


@pytest.mark.drawn
def test_who_leaves_is_named_once_and_comes_back_under_its_name(tmp_path: Path) -> None:
    def then(event: Event, doors: Doors) -> None:
        if event["event"] == "round" and event["round"] == 1:
            doors.away.add(899)
        if event["event"] == "round" and event["round"] == 3:
            doors.clients[7] = doors.clients.pop(899)

    doors = run(tmp_path, SMALL.replace(rounds=4), then=then)
    (left,), (back,) = events(tmp_path, "left"), events(tmp_path, "rejoined")
    assert (left["partition"], left["name"], left["round"]) == (1, "1", 2)
    assert (back["partition"], back["name"], back["round"], back["node_id"]) == (1, "1", 4, 7)
    assert [event["replied"] for event in events(tmp_path, "round")] == [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]
    assert {event["partition"] for event in events(tmp_path, "evaluation")} == {0, 1, 2}
    assert len(doors.requests(Train, 7)) == 1
    page = (tmp_path / "r" / "report.html").read_text()
    assert "left" in page


def test_a_node_that_does_not_fit_fails_nothing(tmp_path: Path) -> None:
    def other(request: Request) -> Reply:
        raise ValueError("classes = ('cow', 'sheep'): this device has others")

    doors = run(tmp_path, SMALL.replace(min_clients=0), change=lambda clients: clients.update({5: other}))
    (alone,) = events(tmp_path, "left_alone")
    assert (alone["node_id"], alone["name"]) == (5, None)
    assert "cow" in alone["reason"]
    assert [type(one.request) for one, _ in doors.sent if one.node == 5] == [Identify]
    (end,) = events(tmp_path, "end")
    assert end["status"] == "completed"


# -- resuming


class Killed(BaseException):
    """The server is gone."""


def killed_at(kind: str, round: int, also: Callable[[Event, Doors], None]) -> Callable[[Event, Doors], None]:
    def then(event: Event, doors: Doors) -> None:
        also(event, doors)
        if event["event"] == kind and event["round"] == round:
            raise Killed

    return then


@pytest.mark.parametrize(
    "settings",
    [SMALL.replace(methods="fedrep", rounds=4), COLLABORATIVE.replace(collaborations="fedavgm", stream_rounds=3)],
    ids=["training", "cells"],
)
def test_a_resumed_run_has_the_clients_that_joined_before_the_checkpoint(settings: Settings, tmp_path: Path) -> None:
    kind = "adapt_round" if settings.collaborations else "round"
    joins = opens(900, kind, round=1)
    run(tmp_path / "whole", settings, [900], joins)
    with pytest.raises(Killed):
        run(tmp_path / "cut", settings, [900], killed_at(kind, 3, joins))
    newest = read_checkpoint(list(checkpoint_files(tmp_path / "cut" / "r").values())[-1])
    assert newest.world["names"] == ["1", "2", "0"]
    run(tmp_path / "cut", settings.replace(resume=str(tmp_path / "cut" / "r")))
    assert len(events(tmp_path / "cut", "joined")) == 1
    assert arrays_of(tmp_path / "cut") == arrays_of(tmp_path / "whole")
    assert results_by_name(tmp_path / "cut") == results_by_name(tmp_path / "whole")


def test_a_member_that_is_not_there_when_a_run_is_resumed_may_come_back(tmp_path: Path) -> None:
    settings = SMALL.replace(methods="fedrep", rounds=4)
    with pytest.raises(Killed):
        run(tmp_path, settings, then=killed_at("round", 3, lambda event, doors: None))
    resumed = settings.replace(resume=str(tmp_path / "r"))
    run(tmp_path, resumed, [900], opens(900, "round", round=3))
    assert [event["replied"] for event in events(tmp_path, "round")] == [[0, 1, 2], [0, 1, 2], [1, 2], [0, 1, 2]]
    assert [event["name"] for event in events(tmp_path, "left")] == ["0"]
    assert [(event["name"], event["round"]) for event in events(tmp_path, "rejoined")] == [("0", 4)]


def test_a_member_whose_private_state_is_lost_is_left_out_until_it_is_restored(tmp_path: Path) -> None:
    settings = SMALL.replace(methods="fedrep", rounds=5)
    with pytest.raises(Killed):
        run(tmp_path, settings, then=killed_at("round", 3, lambda event, doors: None))
    (lost,) = (tmp_path / "state").glob("*/0")
    lost.rename(tmp_path / "lost")

    def restore(event: Event, doors: Doors) -> None:
        if event["event"] == "round" and event["round"] == 3:
            doors.away.add(900)
            (tmp_path / "lost").rename(lost)
        opens(900, "round", round=4)(event, doors)

    run(tmp_path, settings.replace(resume=str(tmp_path / "r")), then=restore)
    replied = [event["replied"] for event in events(tmp_path, "round")]
    assert replied == [[0, 1, 2], [0, 1, 2], [1, 2], [1, 2], [0, 1, 2]]
    assert any("client 0: the private state of fedrep" in event["text"] for event in events(tmp_path, "note"))
    assert "private state of fedrep" in events(tmp_path, "left_alone")[0]["reason"]
    assert [(event["name"], event["round"]) for event in events(tmp_path, "rejoined")] == [("0", 5)]


def test_a_member_that_comes_back_later_without_its_private_state_is_left_alone(tmp_path: Path) -> None:
    """As if it had been there when the run was resumed; its head began from the start, without a word."""
    settings = SMALL.replace(methods="fedrep", rounds=4)
    with pytest.raises(Killed):
        run(tmp_path, settings, then=killed_at("round", 3, lambda event, doors: None))
    shutil.rmtree(next((tmp_path / "state").glob("*/0")))
    run(tmp_path, settings.replace(resume=str(tmp_path / "r")), [900], opens(900, "round", round=3))
    assert [event["replied"] for event in events(tmp_path, "round")] == [[0, 1, 2], [0, 1, 2], [1, 2], [1, 2]]
    (told,) = events(tmp_path, "left_alone")
    assert told["reason"].startswith("0: the private state of fedrep at round 2 of fedrep is lost; ")
    assert not events(tmp_path, "rejoined")


def test_other_devices_than_those_of_a_run_do_not_resume_it(tmp_path: Path) -> None:
    settings = SMALL.replace(methods="fedrep", clients=2, min_clients=0)
    with pytest.raises(Killed):
        run(tmp_path, settings, then=killed_at("round", 2, lambda event, doors: None))

    def renamed(clients: dict[int, Client]) -> None:
        clients[899] = says_also(clients[899], True, None, name="ward")

    told = "1 of 2 clients are there after 0.3 s: 0; missing: 1; node 899: ward: no client of the run that is resumed"
    with pytest.raises(NodesMissing, match=told.replace(".", r"\.")):
        run(tmp_path, settings.replace(resume=str(tmp_path / "r")), change=renamed)


@pytest.mark.parametrize(
    ("own_data", "told"), [(False, r"client 1: sizes = \[9, 9, 9\], in the run it is"), (True, "")]
)
def test_a_divided_data_set_must_not_change_and_a_device_may_have_new_files(
    own_data: bool, told: str, tmp_path: Path
) -> None:
    def owning(sizes: list[int] | None) -> Callable[[dict[int, Client]], None]:
        return lambda clients: clients.update({899: says_also(clients[899], own_data, sizes)})

    settings = SMALL.replace(methods="fedavg")
    with pytest.raises(Killed):
        run(tmp_path, settings, then=killed_at("round", 2, lambda event, doors: None), change=owning(None))
    resumed = settings.replace(resume=str(tmp_path / "r"))
    if told:
        with pytest.raises(RunError, match=told):
            run(tmp_path, resumed.replace(min_clients=3), change=owning([9, 9, 9]))
        run(tmp_path, resumed.replace(min_clients=2), change=owning([9, 9, 9]))
        assert [event["replied"] for event in events(tmp_path, "round")] == [[0, 1, 2], [0, 2]]
        assert any("client 1: sizes" in event["text"] for event in events(tmp_path, "note"))
    else:
        run(tmp_path, resumed, change=owning([9, 9, 9]))


def says_also(client: Client, own_data: bool, sizes: list[int] | None, **changes: Any) -> Client:
    def answer(request: Request) -> Reply | None:
        reply = client(request)
        if isinstance(reply, Identity):
            return replace(reply, own_data=own_data, sizes=sizes or reply.sizes, **changes)
        return reply

    return answer


def test_a_run_folder_without_names_and_without_later_settings_is_resumed(tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    from fedtta.server.checkpoints import write_checkpoint

    settings = SMALL.replace(methods="fedrep", rounds=3)
    run(tmp_path / "whole", settings)
    with pytest.raises(Killed):
        run(tmp_path / "cut", settings, then=killed_at("round", 2, lambda event, doors: None))
    later = ("classes", "devices", "channels", "resize", "interpolation", "crop-fraction", "window", "normalization",
             "max-skipped", "max-megapixels", "image-cache-mb", "min-clients", "max-clients")  # fmt: skip
    for path in checkpoint_files(tmp_path / "cut" / "r").values():
        one = read_checkpoint(path)
        world = {key: value for key, value in one.world.items() if key not in ("names", "data")}
        known = {key: value for key, value in one.settings.items() if key not in later}
        replied = {key: value for key, value in one.replied.items() if "/" not in key}
        write_checkpoint(path, replace(one, world=world, settings=known, replied=replied))
    run(tmp_path / "cut", settings.replace(resume=str(tmp_path / "cut" / "r")))
    assert arrays_of(tmp_path / "cut") == arrays_of(tmp_path / "whole")


# -- without labels


def unlabelled(client: Client) -> Client:
    """A client without labels: it refuses what needs them, and has no right predictions to count."""

    def answer(request: Request) -> Reply | None:
        if isinstance(request, Evaluate):
            assert request.shifts == []
        elif request.kind.startswith("train") and not isinstance(request, Adapt):
            raise AssertionError(f"{request.kind} needs labels")
        reply = client(request)
        if isinstance(reply, Identity):
            sizes = [0, 0, sum(reply.sizes)]
            return replace(reply, labelled=False, role="target", shifts=[], sizes=sizes, own_data=True)
        if isinstance(reply, Adapted):
            return replace(reply, correct=[0] * len(reply.correct), total=[0] * len(reply.total))
        return reply

    return answer


def without_labels(clients: dict[int, Client]) -> None:
    clients[899] = unlabelled(clients[899])


@pytest.mark.parametrize("methods", ["fedavg,btfl", "fedbn", "fedavg,atp"])
@pytest.mark.drawn
def test_a_client_without_labels_gets_the_model_and_is_never_asked_for_what_needs_them(
    methods: str, tmp_path: Path
) -> None:
    settings = SMALL.replace(methods=methods, rates_rounds=1, **({} if "btfl" in methods else BATCHNORM))
    doors = run(tmp_path, settings, change=without_labels, targets=[1])
    assert not events(tmp_path, "failed", "refused", "late")
    assert [event["replied"] for event in events(tmp_path, "round", "statistics")] == [[0, 2]] * (
        2 + ("btfl" in methods)
    )
    assert {event["partition"] for event in events(tmp_path, "evaluation")} == {0, 2}
    sent, whole = doors.requests(Evaluate, 899), set(load_arrays(tmp_path / "r" / "model.safetensors")[0])
    assert [set(request.arrays) for request in sent] == ([] if methods == "fedbn" else [whole])
    notes = " ".join(event["text"] for event in events(tmp_path, "note"))
    assert ("cannot have its model: some layers stay on clients that train" in notes) == (methods == "fedbn")
    assert "no labels" in (tmp_path / "r" / "report.html").read_text()


def test_clients_are_told_how_many_the_means_are_over(tmp_path: Path) -> None:
    """The client without labels has no part in the statistics, of which BTFL takes a client's own share out."""
    settings = SMALL.replace(leave_one_out=True, methods="btfl")
    doors = run(tmp_path / "targets", settings, change=without_labels, targets=[1])
    assert [one.means_over for one in doors.requests(Evaluate, 900)] == [2]
    assert not events(tmp_path / "targets", "failed")
    doors = run(tmp_path / "all", settings)
    assert [one.means_over for one in doors.requests(Evaluate, 900)] == [None]  # 3, as the settings say


def test_a_client_whose_statistics_were_lost_takes_no_share_out(tmp_path: Path) -> None:
    """It has them, and the mean is one over the other two."""

    def losing(clients: dict[int, Client]) -> None:
        whole = clients[899]

        def answer(request: Request) -> Reply | None:
            reply = whole(request)
            if isinstance(request, Summarize):
                raise ConnectionError("lost")
            return reply

        clients[899] = answer

    doors = run(tmp_path, SMALL.replace(leave_one_out=True, methods="btfl"), change=losing)
    assert [event["replied"] for event in events(tmp_path, "statistics")] == [[0, 2]]
    assert [[one.means_over for one in doors.requests(Evaluate, node)] for node in (900, 899, 898)] == [[2], [0], [2]]
    assert len(events(tmp_path, "evaluation")) == 3


@pytest.mark.parametrize(
    ("changes", "needed"), [({"methods": "btfl"}, 1), ({"methods": "btfl", "leave_one_out": True}, 2),
                            ({"methods": "btfl[reading=published]"}, 2)]
)  # fmt: skip
def test_a_share_is_taken_out_of_a_mean_over_two_clients_at_least(
    tmp_path: Path, changes: dict[str, Any], needed: int
) -> None:
    def failing(clients: dict[int, Client]) -> None:
        for node in sorted(clients)[:2]:
            clients[node] = fails_in_statistics(clients[node])

    settings = SMALL.replace(**changes)
    if needed == 1:
        run(tmp_path, settings, change=failing)
        assert events(tmp_path, "statistics")[0]["replied"] == [0]
        return
    with pytest.raises(RunError, match=r"^statistics cross_entropy for leave-one-out, round 3: 1 usable reply, 2 need"):
        run(tmp_path, settings, change=failing)
    assert not events(tmp_path, "statistics", "evaluation")
    run(tmp_path, settings.replace(resume=str(tmp_path / "r")))  # the round is not lost
    assert len(events(tmp_path, "evaluation")) == 3


def fails_in_statistics(client: Client) -> Client:
    def answer(request: Request) -> Reply | None:
        if isinstance(request, Summarize):
            raise RuntimeError("out of memory")
        return client(request)

    return answer


@pytest.mark.parametrize(("method", "rule"), [("bn_adapt", "pfedgraph"), ("bn_adapt", "fedavgm"), ("bbn", "fedavgm")])
def test_a_client_that_comes_back_as_another_node_for_a_repeated_round_ends_none(
    method: str, rule: str, tmp_path: Path
) -> None:
    """Where nothing is shared, the rule asked again for what was shared at first, and the round refused it."""

    def restarting(clients: dict[int, Client]) -> None:
        whole = clients[898]

        def answer(request: Request) -> Reply | None:
            if isinstance(request, Adapt) and request.round == 2:
                clients[798] = whole
                del clients[898]
                raise ConnectionError("restarted")
            return whole(request)

        clients[898] = answer

    run(tmp_path, COLLABORATIVE.replace(methods=method, collaborations=rule, min_replies=3), change=restarting)
    assert [event["node_id"] for event in events(tmp_path, "rejoined")] == [798]
    assert [event["replied"] for event in events(tmp_path, "adapt_round")] == [[0, 1, 2]] * 2


@pytest.mark.drawn
def test_a_client_without_labels_takes_part_in_test_time_rounds(tmp_path: Path) -> None:
    run(tmp_path, COLLABORATIVE, change=without_labels, targets=[1])
    assert not events(tmp_path, "failed", "refused", "late")
    assert all(event["replied"] == [0, 1, 2] for event in events(tmp_path, "adapt_round"))
    assert "no labels" in (tmp_path / "r" / "report.html").read_text()


def test_a_client_that_only_trains_has_no_part_in_test_time_rounds(tmp_path: Path) -> None:
    """A source device has no test images, and so no stream."""

    def owning(clients: dict[int, Client]) -> None:
        for node, client in clients.items():
            only_trains = {"role": "source", "stream_rounds": 0} if node == 899 else {}
            clients[node] = says_also(client, True, None, **only_trains)

    run(tmp_path, COLLABORATIVE.replace(rounds=1, classes=",".join("0123456789")), change=owning)
    assert not events(tmp_path, "left_alone", "failed", "refused", "late")
    assert [event["replied"] for event in events(tmp_path, "round")] == [[0, 1, 2]]
    assert [event["replied"] for event in events(tmp_path, "adapt_round")] == [[0, 2]] * 4  # two rules, two rounds


def test_a_federation_without_any_labels_is_refused_before_training(tmp_path: Path) -> None:
    def all_of_them(clients: dict[int, Client]) -> None:
        clients.update({node: unlabelled(client) for node, client in clients.items()})

    with pytest.raises(SettingsError, match="all clients are targets: some must train"):
        run(tmp_path, SMALL.replace(methods="fedavg"), change=all_of_them)


def test_a_member_that_has_not_come_back_is_not_said_to_lack_a_key(tmp_path: Path) -> None:
    """The key of a client is known when it is there."""
    settings = SMALL.replace(clients=4, min_clients=3, methods="fedavg", secure_aggregation=True, secure_threshold=0.6)

    def stop(event: Event, doors: Doors) -> None:
        if event["event"] == "round" and event["round"] == 2:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path, settings, then=stop)
    run(tmp_path, settings.replace(resume=str(tmp_path / "r")), away=[898])
    assert [event["replied"] for event in events(tmp_path, "round")] == [[0, 1, 2, 3], [0, 1, 3]]
    assert [event["name"] for event in events(tmp_path, "left")] == ["2"]
    assert not [event["text"] for event in events(tmp_path, "note") if "leaves out" in event["text"]]
