"""`/metrics`: names, labels and numbers of devices and runs, as prometheus-client's parser reads them."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from docs import generated
from fedtta.server.report.events import parse_event
from fedtta.server.report.results import Results
from fedtta.simulation.superlink import FlowerError
from fedtta.watch import metrics
from fedtta.watch.access import Access
from fedtta.watch.alerts import Alert
from fedtta.watch.app import make_app
from fedtta.watch.fleet import FleetDevice
from fedtta.watch.listing import Fleet
from fedtta.watch.runs import Runs
from tests.report.runs import training_round, write_events
from tests.watch.made import FULL, damage, listed, made, run_events, say, telemetry

Found = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(text: str) -> Found:
    """Return (name, labels) → value; the same twice is an error, as in Prometheus."""
    found: Found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, key
            found[key] = sample.value
    return found


def app(folder: Path, access: Access | None = None, fleet: Fleet | None = None) -> TestClient:
    fleet = fleet or Fleet(folder)
    alert = Alert("most-drift", "site-a", 0.4, 0.3, 0.0, "")
    made_app = make_app(folder, access, [metrics.router(folder, fleet.devices, lambda: [alert])])
    return TestClient(made_app, base_url="http://127.0.0.1:8650", follow_redirects=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Found]:
    """The text of a made fleet and run, and what it holds."""
    folder = made(tmp_path_factory.mktemp("results"))
    fleet = Fleet(folder, lambda: [listed("site-a", 1, seen=1e9), listed("site-c", 3, "registered")])
    with app(folder, fleet=fleet) as client:
        text = client.get("/metrics").text
    return text, scraped(text)


def value(found: Found, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_every_documented_metric_exists_and_no_other(found: tuple[str, Found]) -> None:
    text, _ = found
    documented = {name: (kind, labels) for name, kind, labels, _ in metrics.documented()}
    assert len(documented) == len(metrics.documented())
    exposed = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M)
    assert dict(exposed) == {name: {"info": "gauge"}.get(kind, kind) for name, (kind, _) in documented.items()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = re.sub(r"_(bucket|sum|count)$", "", sample.name) if family.type == "histogram" else sample.name
            own = {"le"} if sample.name.endswith("_bucket") else set()
            own |= {"model", "adapter", "choice", "software"} if name == "fedtta_device_info" else set()
            assert set(sample.labels) - own == set(filter(None, documented[name][1].split(", "))), sample
    assert {family.name for family in text_string_to_metric_families(text) if not family.samples} == set()


def test_the_documentation_lists_what_there_is() -> None:
    lines = [line for line in generated.section("metrics").splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == [name for name, *_ in metrics.documented()]


def test_names_follow_prometheus_rules() -> None:
    """As `promtool check metrics` asks: base units as suffix, _total for counters and no others, a help text."""
    for name, kind, labels, about in metrics.documented():
        assert re.fullmatch(r"fedtta(_[a-z]+)+", name)
        assert name.endswith("_total") == (kind == "counter"), name
        assert name.endswith("_info") == (kind == "info"), name
        assert not re.search(r"_(bucket|sum|count|created|gauge|counter|histogram)(_|$)", name), name
        assert not re.search(r"milli|micro|kilo|mega|minutes|hours|percent|_ms|_mb", name), name
        assert "timestamp" not in name or name.endswith("_timestamp_seconds")
        assert re.fullmatch(r"[A-Z0-9].*\.", about), name
        assert all(
            re.fullmatch(r"[a-z]+", label) and label not in ("le", "job") for label in labels.split(", ") if label
        )


def test_numbers_of_a_run(found: tuple[str, Found]) -> None:
    _, one = found
    where = {"run": "r1", "training": "cross_entropy"}
    assert value(one, "fedtta_rounds_total", **where) == 3
    assert value(one, "fedtta_train_loss", **where) == pytest.approx(1 / 3)
    assert value(one, "fedtta_validation_accuracy", **where) == pytest.approx(0.3)
    assert value(one, "fedtta_bytes_total", **where, direction="up") == 300
    assert value(one, "fedtta_bytes_total", **where, direction="down") == 3000
    # rounds of 2, 4 and 6 s
    assert value(one, "fedtta_round_seconds_sum", **where) == 12
    buckets = {
        bound: value(one, "fedtta_round_seconds_bucket", **where, le=bound) for bound in ("1", "3", "10", "+Inf")
    }
    assert buckets == {"1": 0, "3": 1, "10": 3, "+Inf": 3}
    results = ("accepted", "refused", "failed", "late", "limited")
    replies = [value(one, "fedtta_replies_total", **where, result=name) for name in results]
    assert replies == [6, 1, 1, 2, 1]
    assert value(one, "fedtta_run_started_timestamp_seconds", run="r1") == 1795255200  # 2026-11-21T10:00:00Z
    states = {
        name: value(one, "fedtta_clients", run="r1", state=name) for name in ("asked", "answered", "late", "gone")
    }
    assert states == {"asked": 1, "answered": 1, "late": 1, "gone": 0}
    ends = {name: [value(one, f"fedtta_run_{name}", run=run) for run in ("r1", "r0")] for name in ("running", "ended")}
    assert ends == {"running": [1, 0], "ended": [0, 1]}
    assert value(one, "fedtta_run_completed", run="r0") == 1
    assert ("fedtta_clients", frozenset({"run": "r0", "state": "asked"}.items())) not in one


def test_only_replies_of_training_rounds_count_as_such() -> None:
    """What was lost of the evaluation, the statistics and the rates of a training has its name, too."""
    round = training_round("cross_entropy", 1)
    phases = ("train cross_entropy", "evaluate cross_entropy", "statistics cross_entropy", "rates cross_entropy")
    lost = [
        {"event": event, "training": "cross_entropy", "round": 1, "reason": "x", "phase": phase}
        for event in ("refused", "limited") for phase in phases
    ]  # fmt: skip
    run = metrics.Run.of(Results.of([one for one in map(parse_event, (round, *lost)) if one is not None]))
    assert run.trainings["cross_entropy"].replies() == {
        "accepted": 2, "refused": 1, "failed": 0, "late": 0, "limited": 1,
    }  # fmt: skip


def test_numbers_of_devices(found: tuple[str, Found]) -> None:
    _, one = found
    assert value(one, "fedtta_head_weight", device="site-a") == FULL["weight"]
    assert value(one, "fedtta_guard_events_total", device="site-a", kind="collapse") == 2
    assert value(one, "fedtta_device_online", device="site-a") == 1
    assert value(one, "fedtta_device_online", device="site-c") == 0
    assert ("fedtta_device_online", frozenset({"device": "site-b"}.items())) not in one
    assert ("fedtta_head_weight", frozenset({"device": "site-b"}.items())) not in one
    assert value(one, "fedtta_last_seen_timestamp_seconds", device="site-a") > 1e9


def test_old_telemetry_is_exposed_with_its_age(tmp_path: Path) -> None:
    say(tmp_path / "r", (1, telemetry("a", samples=7)), at=1000.0)
    with app(tmp_path) as client:
        one = scraped(client.get("/metrics").text)
    assert value(one, "fedtta_adapter_samples", device="a") == 7
    assert value(one, "fedtta_telemetry_timestamp_seconds", device="a") == 1000


def test_two_devices_of_one_name_are_one(tmp_path: Path) -> None:
    devices = [
        FleetDevice("a", 1, "online", 5.0, telemetry("a", samples=1), 5.0),
        FleetDevice("a", 2, "online", 9.0, telemetry("a", samples=2), 9.0),
        FleetDevice("a", 3, "registered", None, None, None),
    ]
    samples = [s for family in metrics.device_metrics(devices) for s in family.samples if s.name.endswith("r_samples")]
    assert [sample.value for sample in samples] == [2]


def test_runs_with_long_names_have_their_own_labels(tmp_path: Path) -> None:
    names = [f"{'r' * 250}{end}" for end in "ab"]
    for name in names:
        write_events(tmp_path / name, [json.dumps(event) for event in run_events(1)])
    with app(tmp_path) as client:
        one = scraped(client.get("/metrics").text)  # which refuses a series that is there twice
    assert sorted(dict(labels)["run"] for name, labels in one if name == "fedtta_run_ended") == names


def test_hostile_texts_stay_in_their_labels(tmp_path: Path) -> None:
    """Names of trainings are of a file that may be damaged, models and kinds of events are a device's."""
    evil = 'x"} 1\nfedtta_rounds_total{run="evil\\", training="\udcff\x1b[2J'
    events = run_events(1)
    for event in events:
        event.update({"training": evil} if "training" in event else {})
    write_events(tmp_path / "r", [json.dumps(event) for event in events])
    say(tmp_path / "r", (1, telemetry("a", model='"} 1\\', guard_events={'k"}\\': 1})))
    with app(tmp_path) as client:
        answer = client.get("/metrics")
    one = scraped(answer.text)
    assert "\x1b" not in answer.text
    assert {dict(labels)["run"] for name, labels in one if name == "fedtta_rounds_total"} == {"r"}
    (training,) = (dict(labels)["training"] for name, labels in one if name == "fedtta_rounds_total")
    assert training.startswith('x"} 1')
    assert len(training) <= len(evil)
    assert value(one, "fedtta_guard_events_total", device="a", kind='k"}\\') == 1


def test_a_damaged_run_is_counted_and_the_others_are_there(tmp_path: Path) -> None:
    folder = made(tmp_path)
    damage(folder / "r0" / "metrics.jsonl")
    damage(folder / "r1" / "devices.jsonl")
    with app(folder) as client:
        one = scraped(client.get("/metrics").text)
    assert value(one, "fedtta_unreadable_runs") == 1
    assert value(one, "fedtta_damaged_telemetry_lines") == 1
    assert value(one, "fedtta_run_ended", run="r1") == 0


def test_a_stopped_run_does_not_run(tmp_path: Path) -> None:
    runs = Runs(made(tmp_path), clock=lambda: time.time() + 3600)
    found, _ = metrics.RunReader(runs).read()
    assert found["r1"].live is None


def test_a_run_is_read_when_its_files_change(tmp_path: Path) -> None:
    """And the newest runs are those that changed last."""
    reader = metrics.RunReader(Runs(made(tmp_path)), newest=2)
    assert set(reader.read()[0]) == {"r0", "r1"}
    reader.read()
    assert reader.readings == 2
    for kept in list(reader._kept):
        reader._kept[kept] = metrics._Kept(reader._kept[kept].signature, reader._kept[kept].run, 0.0)
    write_events(tmp_path / "r1", run_events(4))
    assert len(reader.read()[0]["r1"].trainings["cross_entropy"].rounds) == 4
    assert reader.readings == 3
    write_events(tmp_path / "r2", run_events(1))
    os.utime(tmp_path / "r0" / "metrics.jsonl", (1, 1))
    assert set(reader.read()[0]) == {"r1", "r2"}


def test_prometheus_comes_with_the_token(tmp_path: Path) -> None:
    token = "0123456789abcdef0123456789abcdef"
    with app(made(tmp_path), Access(token)) as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers={"authorization": "Bearer wrong"}).status_code == 401
        answer = client.get("/metrics", headers={"authorization": f"Bearer {token}"})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        asked = {"authorization": f"Bearer {token}", "accept": "application/openmetrics-text; version=1.0.0"}
        assert client.get("/metrics", headers=asked).text.endswith("# EOF\n")
        odd = client.get("/metrics", headers=asked | {"accept": "application/openmetrics-text; version=x"})
        assert (odd.status_code, odd.text) == (200, answer.text)  # another one is not a reason to say nothing


def test_a_superlink_that_is_gone_leaves_the_metrics(tmp_path: Path) -> None:
    def gone() -> list:
        raise FlowerError("no SuperLink answers")

    fleet = Fleet(made(tmp_path), gone)
    with app(tmp_path, fleet=fleet) as client:
        one = scraped(client.get("/metrics").text)
    assert fleet.problem == "no SuperLink answers"
    assert value(one, "fedtta_adapter_samples", device="site-a") == FULL["samples"]
