"""The page "Devices": what it shows, that a device's words are text, that it changes only with what it shows."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from fedtta.simulation.superlink import FlowerError
from fedtta.watch import devices_page
from fedtta.watch import listing as module
from fedtta.watch.app import make_app
from fedtta.watch.charts import Point, line_chart, sparkline
from fedtta.watch.devices_page import device_page, overview_page
from fedtta.watch.fleet import FleetDevice
from fedtta.watch.listing import Fleet
from tests.watch.made import FULL, listed, say, telemetry

NOW = 2_000_000.0
EVIL = "\"><script>alert(1)</script><img src=x onerror=alert(1)>&amp;'"


class Page(HTMLParser):
    """Elements, headers of the table, cells, titles of drawings and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("wbr", "meta", "path", "circle"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    handle_startendtag = handle_starttag  # type: ignore[assignment]

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("wbr", "path", "circle"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data if "title" not in self.open else ""


def device(name: str = "a", **fields: Any) -> FleetDevice:
    return FleetDevice(name, 1, "online", NOW - 30, telemetry(name[:64] if name.isalnum() else "a", **fields), NOW - 30)


def shown(*devices: FleetDevice, problem: str = "") -> Page:
    return Page("".join(overview_page(devices, problem, NOW).sections.values()))


def test_a_row_says_everything() -> None:
    page = shown(device("site-a", **FULL))
    cells = {name: cell.replace("\N{NO-BREAK SPACE}", " ") for name, cell in zip(*page.rows, strict=True)}
    assert {name: cell.strip() for name, cell in cells.items()} == {
        "device": "site-a", "status": "online", "last seen": "just now", "guard": "holds, 3 events",
        "weight e": "0.62", "accuracy, estimated": "81.0 %", "drift": "0.20", "samples": "1,100", "model": "3f2c1ab",
        "new model": "shadow 77aa", "adapter": "fedthe_plus[lr=0.001]: btfl",
        # 50 of 100 requests: 10 of the 40 in (5, 10] ms lie below; the 95th ends (10, 25] ms
        "latency": "6.25 ms / 25 ms", "disk": "123 MB, 9.88 GB free", "memory": "512 MB", "software": "0.9.1",
    }  # fmt: skip
    assert "1 held by the guard · 1 with a model that waits · 1 cannot save" in "".join(page.words)


def test_the_table_is_accessible() -> None:
    page = shown(device(**FULL), FleetDevice("b", 2, "offline", None, None, None))
    scopes = [about.get("scope") for tag, about in page.tags if tag == "th"]
    assert scopes == ["col"] * len(devices_page.HEAD) + ["row"] * 2
    drawings = [tag for tag, _ in page.tags if tag in ("svg", "title")]
    assert drawings == ["svg", "title"]
    assert all(about["role"] == "img" for tag, about in page.tags if tag == "svg")
    assert "online" in page.rows[1]  # a word beside its color
    assert page.rows[2][1:3] == ["offline", "–"]


def test_what_is_unknown_is_a_dash() -> None:
    cells = dict(zip(devices_page.HEAD, shown(device()).rows[1], strict=True))
    named = ("weight e", "accuracy, estimated", "drift", "latency", "model", "new model", "adapter", "software")
    unknown = (*named, "disk", "memory")
    assert {name: cells[name] for name in unknown} == dict.fromkeys(unknown, "–")
    assert cells["guard"] == "free"
    sections = devices_page.device_page(device(), [(NOW, telemetry("a"))], NOW).sections
    for name in ("Running for", "Disk", "Memory"):
        assert f"<dt>{name}</dt><dd>–</dd>" in sections["device-now"]
        assert f"{name}: " not in sections["device-series"]
    full = zip(devices_page.HEAD, shown(device(disk_used=10)).rows[1], strict=True)
    assert dict(full)["disk"] == "10 B, 0 B free"


def test_without_telemetry_the_page_says_how_to_get_it() -> None:
    for page in (shown(), shown(FleetDevice("a", 1, "registered", None, None, None))):
        assert "fedtta devices --watch" in "".join(page.words)
    assert "fedtta devices --watch" not in "".join(shown(device()).words)


def test_old_telemetry_is_said_to_be_old() -> None:
    one = FleetDevice("a", 1, "online", NOW - 30, telemetry("a"), NOW - 7200)
    assert shown(one).rows[1][2] == "just now telemetry 2 h ago"


@pytest.mark.parametrize("field", ["model", "candidate", "refused", "adapter", "choice", "phase"])
def test_a_devices_words_are_text(field: str) -> None:
    """Long ones are cut in the table."""
    one = device(**{**FULL, field: EVIL, "guard_events": {EVIL: 1}, "software": {EVIL: "1.0"}})
    views = [overview_page([one], EVIL, NOW), device_page(one, [(NOW, one.telemetry)], NOW)]
    for view in views:
        page = Page("".join(view.sections.values()))
        assert not {"script", "img"} & {tag for tag, _ in page.tags}
        assert not any(name.startswith("on") for _, about in page.tags for name in about)
        assert EVIL in "".join(page.words)
    long = device(**{field: "x" * 200})
    assert "x" * 51 not in "".join(overview_page([long], "", NOW).sections.values())


def test_a_listed_name_is_text_and_leads_to_its_device(tmp_path: Path) -> None:
    """The operator chooses it; it may hold anything."""
    for name in (EVIL, "a/b", "..", "ü x", "a?b#c"):
        fleet = Fleet(tmp_path, lambda name=name: [listed(name, 1, seen=5.0)])
        with client(fleet) as browser:
            page = Page(browser.get("/devices").text.partition("<body>")[2].partition("</body>")[0])
            links = [about["href"] for tag, about in page.tags if tag == "a" and "/devices/" in str(about.get("href"))]
            assert links == [f"/devices/{quote(name, safe='')}"]
            assert not {"img"} & {tag for tag, _ in page.tags}
            if name != "..":  # browsers take it for the folder above
                found = browser.get(str(links[0]))
                assert found.status_code == 200
                assert "<script>alert" not in found.text


def client(fleet: Fleet) -> TestClient:
    app = make_app(fleet.folder, None, [devices_page.router(fleet, lambda: NOW)], {"Devices": devices_page.PATH})
    return TestClient(app, base_url="http://127.0.0.1:8650", follow_redirects=False)


def test_a_latency_just_below_a_second_is_a_second() -> None:
    slow = [0] * 9 + [10001, 10000, 0, 0, 0]  # the median ends (0.5, 1] s
    page = shown(device(latency=slow))
    assert dict(zip(*page.rows, strict=True))["latency"].replace("\N{NO-BREAK SPACE}", " ") == "1 s / 2.35 s"


def test_the_page_of_a_device_shows_what_it_said_over_time(tmp_path: Path) -> None:
    for minute in range(5):
        fields = FULL | {"estimated_accuracy": None, "drift": 0.1 * minute}
        say(tmp_path / "r", (1, telemetry("site-a", **fields)), at=NOW - 600 + 60 * minute)
    with client(Fleet(tmp_path)) as browser:
        answer = browser.get("/devices/site-a")
        page = Page(answer.text.partition("<main")[2].partition("</main>")[0].partition(">")[2])
        nothing = browser.get("/devices/nothing")
        assert nothing.status_code == 404
        assert "live.js" not in nothing.text  # which would say of it that the run has ended
    words = "".join(page.words)
    assert "Drift: 0.00 to 0.40, last 0.40" in words
    assert "Estimated accuracy:" not in words
    for told in ("12ab: accuracy 0.41 is below 0.55", "812 files, 3 skipped", "constant images", "torch", "2.7.0"):
        assert told in words


def test_a_device_that_is_not_listed_keeps_its_history_as_another_node(tmp_path: Path) -> None:
    """A SuperNode without a registered key has another id after each start; a listed device has one."""
    for node in (1, 2):
        say(tmp_path / "r", (node, telemetry("a", predictions=100 * node)), at=NOW + node)
    told = {}
    for fleet in (Fleet(tmp_path), Fleet(tmp_path, lambda: [listed("a", 2)])):
        (device,) = (one for one in fleet.devices() if one.node_id == 2)
        told[device.status] = [one.predictions for _, one in fleet.history(device)]
    assert told == {"unknown": [100, 200], "online": [200]}


def test_only_what_has_changed_is_sent(tmp_path: Path) -> None:
    say(tmp_path / "r", (1, telemetry("a", samples=5)), at=NOW - 10)
    with client(Fleet(tmp_path)) as browser:
        (have,) = re.findall(r'data-have="([^"]+)"', browser.get("/devices").text)
        assert browser.get("/devices", params={"have": have}).json()["changed"] == {}
        say(tmp_path / "r", (1, telemetry("a", samples=6)), at=NOW - 5)
        changed = browser.get("/devices", params={"have": have}).json()
    assert set(changed["changed"]) == {"devices"}
    assert not changed["ended"]


def test_many_devices_are_bounded() -> None:
    devices = [device(f"d{number}") for number in range(devices_page.LISTED + 1)]
    page = shown(*devices)
    assert len(page.rows) == devices_page.LISTED + 1
    assert f"The first {devices_page.LISTED} of 501." in "".join(page.words)


# The SuperLink's list


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_list_is_kept_for_a_while_and_a_failure_is_shown(tmp_path: Path) -> None:
    asked, clock = 0, Clock()

    def ask() -> list:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise FlowerError("no SuperLink\nanswers\x1b[2J")
        return [listed("a", 1, seen=NOW)]

    fleet = Fleet(tmp_path, ask, clock)
    for _ in range(3):
        assert [one.name for one in fleet.devices()] == ["a"]
    assert asked == 1
    clock.now = module.PAUSE
    assert [one.name for one in fleet.devices()] == ["a"]  # the last that is known
    assert fleet.problem == "no SuperLink answers\ufffd[2J"
    assert fleet.problem in "".join(shown(problem=fleet.problem).words)
    clock.now *= 2
    fleet.devices()
    assert (asked, fleet.problem) == (3, "")


def test_a_superlink_that_is_slow_is_asked_once(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    def ask() -> list:
        begun.set()
        assert go.wait(60)
        return [listed("a", 1)]

    fleet = Fleet(tmp_path, ask)
    slow = threading.Thread(target=fleet.devices)
    slow.start()
    assert begun.wait(60)
    assert fleet.devices() == []  # without waiting
    go.set()
    slow.join()
    assert [one.name for one in fleet.devices()] == ["a"]


# Charts

values = st.floats(0, 1e30)


@given(st.lists(st.tuples(values, st.none() | values), min_size=1, max_size=30))
def test_a_line_stays_in_its_area(points: list[Point]) -> None:
    """Whatever the values: each known one is in the chart once, as a corner or a dot, inside the axes."""
    points = sorted(points, key=lambda point: point[0])
    known = [value for _, value in points if value is not None]
    if not known:
        return
    words: Callable[[float], str] = "{:g}".format
    for chart in (line_chart("c", points, words, None, words), line_chart("c", points, words, (0, 1), words)):
        lines = chart.partition("</title>")[2].split("stroke:var(--line)", 1)[1]
        corners = [tuple(map(float, pair)) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", lines)]
        corners += [tuple(map(float, pair)) for pair in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', lines)]
        assert len(corners) == len(known)
        assert all(62 <= x <= 410 and 10 <= y <= 96 for x, y in corners)
        assert "nan" not in lines


def test_a_line_goes_where_its_values_are() -> None:
    """0, 0.5 and 1 in an area of 78 by 18 that begins at (1, 1)."""
    assert 'd="M1.0 19.0L40.0 10.0L79.0 1.0"' in sparkline([0.0, 0.5, 1.0], "t")
    assert "<title>&lt;t&gt;</title>" in sparkline([0.0], "<t>")
