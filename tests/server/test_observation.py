"""Telemetry between rounds, and the run that only asks for it."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from threading import Event as Flag
from typing import Any

import pytest

from fedtta.messages.flower import allow_messages
from fedtta.messages.replies import Reply, Telemetry
from fedtta.messages.requests import Observe, Request
from fedtta.models import load_arrays
from fedtta.server.app import run_folder, serve
from fedtta.server.events import RunError
from fedtta.server.observation import DEVICES_FILE, FORMER, RAREST, Kept, Observation, observe
from fedtta.server.resume import locked
from fedtta.settings import Settings, SettingsError
from fedtta.settings.files import Lines
from tests.transports import Client, Clock, FakeTransport, devices

RUN = Settings(
    clients=2, fraction=0.06, rounds=2, local_epochs=1, image_size=16, methods="fedavg", shifts="original",
    device="cpu", round_timeout=60,
)  # fmt: skip
TIMES = ("at", "seconds", "wall_seconds", "train_seconds", "digest", "settings", "environment")


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / DEVICES_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def says(name: str, **about: Any) -> Client:
    return lambda request: Telemetry(name=name, **about)


def refuses(request: Request) -> Reply:
    raise PermissionError("the owner's policy tells nothing")


# -- within a run


def run(folder: Path, settings: Settings, change: Callable[[dict[int, Client]], object] = lambda clients: None) -> Path:
    allow_messages()
    transport = devices(settings)
    change(transport.clients)
    serve(transport, settings, folder)
    return folder


def content(folder: Path) -> tuple[dict[str, bytes], list[dict[str, Any]], str]:
    """Return the models, the events but for times, and the table of a run."""
    arrays = load_arrays(folder / "model.safetensors")[0]
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = [{key: value for key, value in event.items() if key not in TIMES} for event in events]
    for event in kept:
        event.pop("run", None)
    return {name: value.tobytes() for name, value in arrays.items()}, kept, (folder / "table.csv").read_text()


@pytest.fixture(scope="module")
def unobserved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("unobserved") / "r", RUN)


def answered(client: Client, answer: Client) -> Client:
    """Return a client that answers `Observe` in another way."""
    return lambda request: answer(request) if isinstance(request, Observe) else client(request)


def test_clients_are_asked_between_rounds_and_results_have_the_same_bits(unobserved: Path, tmp_path: Path) -> None:
    found = run(tmp_path / "r", RUN.replace(observe_every=1e-9))
    assert lines(unobserved) == []
    assert [(one["telemetry"]["name"], one["node"], one["run"]) for one in lines(found)] == [
        ("0", 900, "r"),
        ("1", 899, "r"),
    ] * 2  # two training rounds
    (arrays, events, table), (others, told, same) = content(unobserved), content(found)
    assert arrays == others
    assert table == same
    assert [event for event in told if event["event"] != "run"] == [one for one in events if one["event"] != "run"]


def test_hostile_telemetry_and_a_full_disk_are_a_note_each(
    unobserved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Lines, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def change(clients: dict[int, Client]) -> None:
        clients[900] = answered(clients[900], says("1"))

    append = Lines.append
    monkeypatch.setattr(
        Lines, "append", lambda self, text: (full if self.path.name == DEVICES_FILE else append)(self, text)
    )
    found = run(tmp_path / "r", RUN.replace(observe_every=1e-9), change)
    arrays, events, _ = content(found)
    assert arrays == content(unobserved)[0]
    notes = sorted(event["text"] for event in events if event["event"] == "note" and "telemetry" in event["text"])
    assert [note.split(";")[0] for note in notes] == [
        "telemetry is lost: devices.jsonl: [Errno 28] No space left on device",
        "telemetry of node 900 is refused: name = '1': allowed is '0'",
    ]
    assert not any(event["event"] in ("failed", "late", "refused") for event in events)
    assert events[-1]["status"] == "completed"


# -- asking


def observation(
    folder: Path, clients: dict[int, Client], **about: Any
) -> tuple[Observation, FakeTransport, Clock, list[str]]:
    clock, notes = Clock(), list[str]()
    transport = FakeTransport(clients, clock=clock)
    request = Observe(settings="{}", run="x")
    made = Observation(
        transport, folder, request, every=60.0, note=notes.append, clock=clock, now=lambda: 1000.0,
        **about,
    )  # fmt: skip
    return made, transport, clock, notes


def test_the_interval_and_who_does_not_answer_is_asked_more_rarely(tmp_path: Path) -> None:
    made, transport, clock, notes = observation(tmp_path, {1: says("a"), 2: refuses, 3: lambda request: None})
    for _ in range(4 * 3 * RAREST):  # an interval is four looks
        made.ask({1: "a", 2: "b", 3: "c"})
        clock.now += 15.0
    assert [one["node"] for one in lines(tmp_path)] == [1] * len(transport.requests(Observe, 1))
    intervals = len(transport.requests(Observe, 1))
    assert intervals > 2 * RAREST
    # after 2, 4, 8 and from then on 16 intervals
    assert len(transport.requests(Observe, 2)) == len([at for at in (0, 2, 6, 14, 30, 46) if at < intervals])
    assert len(transport.requests(Observe, 3)) == intervals  # it may be busy: a question that expires costs it nothing
    made.tell()
    assert not notes


def test_a_node_that_answers_again_is_asked_as_often_as_before(tmp_path: Path) -> None:
    made, transport, clock, _ = observation(tmp_path, {1: refuses})
    made.ask({1: "a"})
    transport.clients[1] = says("a")
    for _ in range(5):
        clock.now += 60.0
        made.ask({1: "a"})
    assert len(lines(tmp_path)) == 4


def test_nothing_waits_for_a_slow_node_and_it_is_not_asked_twice(tmp_path: Path) -> None:
    go, asked = Flag(), list[int]()

    def slow(request: Request) -> Reply:
        asked.append(1)
        assert go.wait(60)
        return Telemetry(name="a")

    made, transport, clock, _ = observation(tmp_path, {1: slow, 2: says("b")})
    transport.concurrent = True  # type: ignore[attr-defined]
    transport.order = lambda requests: sorted(requests, key=lambda one: -one.node)
    for _ in range(3):
        made.ask({1: "a", 2: "b"})
        clock.now += 60.0
        wait(lambda: len(lines(tmp_path)) >= 1 and not (made._asked - {1}))
    assert {one["node"] for one in lines(tmp_path)} == {2}
    assert asked == [1]
    go.set()
    wait(lambda: not made._asked)
    assert {one["node"] for one in lines(tmp_path)} == {1, 2}
    made.ask({1: "a", 2: "b"})
    wait(lambda: not made._asked)
    assert asked == [1, 1]


def test_an_answer_after_the_end_is_dropped(tmp_path: Path) -> None:
    go = Flag()

    def slow(request: Request) -> Reply:
        assert go.wait(60)
        return Telemetry(name="a")

    made, transport, _, _ = observation(tmp_path, {1: slow})
    transport.concurrent = True  # type: ignore[attr-defined]
    made.ask({1: "a"})
    made.close()
    go.set()
    wait(lambda: not made._asked)
    assert lines(tmp_path) == []


def wait(reached: Callable[[], bool]) -> None:
    """Wait for other threads."""
    pause = Flag()
    for _ in range(6000):
        if reached():
            return
        pause.wait(0.01)
    raise AssertionError("waited in vain")


def test_an_exchange_that_fails_is_said_once_and_tried_again(tmp_path: Path) -> None:
    made, transport, clock, notes = observation(tmp_path, {1: says("a")})
    exchange = transport.exchange
    transport.exchange = lambda requests, timeout: (_ for _ in ()).throw(ConnectionError("gone"))  # type: ignore[method-assign]
    for _ in range(2):
        made.ask({1: "a"})
        made.tell()
        clock.now += 60.0
    assert notes == ["telemetry: ConnectionError: gone"]
    transport.exchange = exchange  # type: ignore[method-assign]
    made.ask({1: "a"})
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (says("\x1b[2J"), "name = "),
        (says("a", weight=2.0), "weight = 2.0"),
        (says("a", latency=[1]), "latency"),
        (says("a", software={"x": "evil"}), "software"),
        (says("a", memory=2**60), "memory"),
        (says("a", weights=[0.5] * 101), "weights"),
        (says("b"), "allowed is 'a'"),
    ],
)
def test_telemetry_is_validated(answer: Client, told: str, tmp_path: Path) -> None:
    made, _, clock, notes = observation(tmp_path, {1: answer, 2: answer})
    for _ in range(9):
        made.ask({1: "a", 2: "a"})
        made.tell()
        clock.now += 60.0
    (note,) = notes
    assert told in note
    assert note.isprintable()
    assert lines(tmp_path) == []


def test_files_are_bounded(tmp_path: Path) -> None:
    kept = Kept(tmp_path, most=2000)
    for at in range(100):
        kept.append(float(at), 1, "r", Telemetry(name="a"))
    times = [one["at"] for one in lines(tmp_path)]
    former = [json.loads(line)["at"] for line in (tmp_path / FORMER).read_text().splitlines()]
    assert former + times == list(range(100))[-len(former + times) :]
    assert len(former) >= 2
    assert {path.name for path in tmp_path.iterdir()} == {DEVICES_FILE, FORMER}
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())


# -- the standing run


class Stopped(BaseException):
    """What a signal raises, as SystemExit is."""


STANDING = Settings(observe_only=True, observe_every=10.0)


def test_a_standing_run_survives_nodes_that_come_and_go(tmp_path: Path) -> None:
    transport, clock = FakeTransport({}), Clock()

    def stop() -> None:
        raise Stopped

    clock.later = {
        15.0: lambda: transport.clients.update({1: says("a"), 2: says("b"), 3: refuses}),
        35.0: lambda: transport.clients.clear(),
        55.0: lambda: transport.clients.update({7: says("a"), 8: says("a")}),
        75.0: stop,
    }
    notes: list[str] = []
    with pytest.raises(Stopped):
        observe(transport, STANDING, tmp_path, notes.append, clock.sleep, clock)
    assert [(one["node"], one["telemetry"]["name"]) for one in lines(tmp_path)] == [
        (1, "a"), (2, "b"), (1, "a"), (2, "b"), (7, "a"), (7, "a"),
    ]  # fmt: skip
    (note,) = notes
    assert note.startswith("telemetry of node 8 is refused: name = 'a': node 7 has this name, too")
    assert {type(one.request) for one, _ in transport.sent} == {Observe}


def test_a_node_keeps_the_name_that_it_has_told(tmp_path: Path) -> None:
    made, transport, clock, notes = observation(tmp_path, {1: says("a")})
    made.ask({1: None})
    transport.clients[1] = says("b")
    clock.now += 60.0
    made.ask({1: None})
    made.tell()
    assert [one["telemetry"]["name"] for one in lines(tmp_path)] == ["a"]
    assert "name = 'b': allowed is 'a'" in notes[0]


def test_a_standing_run_leaves_a_folder_that_the_next_one_adds_to(tmp_path: Path) -> None:
    settings = STANDING.replace(results=str(tmp_path))
    folder = run_folder(settings)
    assert folder == tmp_path / "watch"

    def leaves(request: Request) -> Reply:
        transport.nodes = stopped  # type: ignore[method-assign]
        return Telemetry(name="a")

    def stopped() -> list[int]:
        raise SystemExit(0)

    for times in (1, 2):
        transport = FakeTransport({1: leaves})
        with pytest.raises(SystemExit):
            serve(transport, settings.replace(observe_every=1e-9), folder)
        assert len(lines(folder)) == times
        assert {path.name for path in folder.iterdir()} == {DEVICES_FILE, "settings.toml"}
    with locked(folder), pytest.raises(RunError, match="another process"):
        serve(FakeTransport({}), settings, folder)
    assert run_folder(settings) == folder


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({"observe_only": True}, "observe-every = 0.0: allowed with observe-only = True is more than 0"),
        ({"observe_only": True, "observe_every": 1.0, "resume": "r"}, "resume = 'r'"),
        ({"observe_every": -1.0}, "observe-every = -1.0: allowed is 0 or more"),
    ],
)
def test_settings_that_do_not_fit_are_refused(about: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        Settings(**about)
