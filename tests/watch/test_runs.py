"""Pages that follow runs: the report's sections, what is happening now, updates, and files that cannot be read."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from fedtta.messages.flower import allow_messages
from fedtta.messages.requests import Request, Train
from fedtta.server import live as listener
from fedtta.server.app import serve
from fedtta.server.report import Results
from fedtta.server.report.live import LISTED, LIVE_FILE, ClientState, Live, now_section
from fedtta.settings import Settings
from fedtta.watch import runs as module
from fedtta.watch.app import make_app
from tests.report.runs import clients_event, training_round, write_events
from tests.transports import devices

SMALL = Settings(
    clients=3, fraction=0.15, rounds=2, local_epochs=1, image_size=16, methods="fedavg", device="cpu",
    shifts="original", node_timeout=5, round_timeout=60,
)  # fmt: skip
HOSTILE = '<img src=x onerror="alert(1)">&\u202e'


def client(folder: Path, **options: Any) -> TestClient:
    return TestClient(make_app(folder, **options), base_url="http://127.0.0.1:8650")


def sections(page: str) -> dict[str, str]:
    """Return id → HTML of the sections of a page."""
    return dict(re.findall(r'(?s)<section id="([\w-]+)">(.*?)</section>', page))


def text(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def changes(browser: TestClient, path: str, page: str = "") -> dict[str, Any]:
    """Return what has changed for a browser that has a page."""
    have = re.findall(r'data-have="([^"]*)"', page)
    return browser.get(path, params={"have": have[0] if have else ""}).json()


@dataclass
class Watched:
    """A results folder, and the pages that were got while its run was under way."""

    folder: Path
    pages: list[str] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A real run that is watched: the page is got in round 2 before client 2 replies, and updated."""
    allow_messages()
    found = Watched(tmp_path_factory.mktemp("watched"))
    with pytest.MonkeyPatch.context() as patch, client(found.folder) as browser:
        patch.setattr(listener, "INTERVAL", 0.01)

        def watch(partition: int, request: Request) -> None:
            if not (isinstance(request, Train) and request.round == 2):
                return
            found.pages.append(browser.get("/runs/r").text)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                update = changes(browser, "/runs/r", found.pages[0])
                if f"{partition} of 3 clients answered" in update["changed"].get("now", {}).get("html", ""):
                    found.updates.append(update)
                    return
                time.sleep(0.01)

        serve(devices(SMALL, watch=watch), SMALL, found.folder / "r")
    return found


# -- a run under way, and its end


def test_the_page_of_a_run_follows_it(watched: Watched) -> None:
    now = [text(update["changed"]["now"]["html"]) for update in watched.updates]
    assert len(now) == 3
    for answered, words in enumerate(now):
        assert "train cross_entropy , round 2" in words
        assert f"{answered} of 3 clients answered" in words
        assert "1 of 3 steps done" in words  # two rounds and an evaluation
        training = 3 - answered
        assert words.count(" training") == training + 1  # one line for each, and the sum
        assert f"{training} training" in words
    assert not any(update["ended"] for update in watched.updates)
    assert list(sections(watched.pages[0]))[:2] == ["now", "summary"]


def test_the_page_of_a_run_that_has_ended_is_its_report(watched: Watched) -> None:
    report = (watched.folder / "r" / "report.html").read_text()
    with client(watched.folder) as browser:
        page = browser.get("/runs/r").text
        assert sections(page) == sections(report) != {}
        assert not (watched.folder / "r" / LIVE_FILE).exists()
        update = changes(browser, "/runs/r", watched.pages[-1])
        assert update["ended"]
        assert "now" not in update["order"]
        assert "accuracy" in update["changed"]
        assert changes(browser, "/runs/r", page)["changed"] == {}
    assert "<script" not in report
    assert "<script" in page


def test_the_first_page_lists_the_runs(watched: Watched, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    write_events(folder / "failed", [{"event": "end", "seconds": 1.0, "status": f"failed: {HOSTILE}"}])
    write_events(folder / "killed", [{"event": "note", "text": "x"}])
    shutil.copytree(watched.folder / "r", folder / "all of it")
    (folder / "notes").mkdir()
    with client(folder) as browser:
        page = browser.get("/").text
    words = text(page)
    assert "all of it completed" in words
    assert "killed not ended" in words
    assert "failed failed: &lt;img" in words
    assert re.findall(r'href="(/runs/[^"]*)"', page)[-1].startswith("/runs/")
    assert 'href="/runs/all%20of%20it"' in page
    assert "notes" not in words
    with client(tmp_path / "nowhere") as browser:
        assert "No run has begun" in browser.get("/").text


def test_a_live_page_is_the_report_with_one_more_section(watched: Watched, tmp_path: Path) -> None:
    shutil.copytree(watched.folder / "r", tmp_path / "r")
    now = time.time()
    live = Live(written=now, started=now - 10, clients={0: ClientState("idle", now - 5)})
    (tmp_path / "r" / "live.json").write_bytes(live.to_json())
    with client(tmp_path) as browser:
        page = browser.get("/runs/r").text
    found = sections(page)
    assert found.pop("now")
    assert found == sections((watched.folder / "r" / "report.html").read_text())
    assert {"summary", "training", "settings"} <= set(found)


# -- the section "Now"


def test_a_federation_of_any_size_is_counted_and_the_urgent_ones_are_listed() -> None:
    clients = {partition: ClientState("answered", 1.0) for partition in range(3000)}
    clients |= {partition: ClientState("late", 1.0) for partition in range(2000, 2040)}
    clients |= {2999: ClientState("failed", 1.0)}
    live = Live(100.0, 0.0, "evaluate ce", 1.0, 3000, 2959, clients=clients)
    html = now_section(live, Results(), 100.0)
    words = text(html)
    assert "1 failed 40 late 2,959 answered" in words
    assert html.count("<tr>") == 1 + LISTED
    rows = [text(row) for row in html.split("<tr>")[2:]]
    assert rows[0].startswith("2999 failed")
    assert rows[1].startswith("2000 late")
    assert rows[41].startswith("0 answered")
    assert f"The first {LISTED} of 3,000" in words
    assert len(html) < 20_000


def test_texts_of_nodes_are_text(tmp_path: Path) -> None:
    events = [
        {**clients_event(), "names": [HOSTILE, "b", "c"]},
        training_round(HOSTILE, 1),
        {"event": "note", "text": HOSTILE},
    ]
    events[0] |= {"sizes": [[1, 1, 1]] * 3, "class_counts": None, "roles": None, "data": None}
    folder = write_events(tmp_path / "r", events)
    live = Live(time.time(), 0.0, HOSTILE, 1.0, 3, 1, clients={0: ClientState("asked", 1.0)})
    (folder / LIVE_FILE).write_bytes(live.to_json())
    with client(tmp_path) as browser:
        page = browser.get("/runs/r").text
        index = browser.get("/").text
    assert "<img" not in page + index
    assert page.count("&lt;img") >= 4
    assert page.count("<script") == 1


@pytest.mark.parametrize(
    ("live", "words"),
    [
        (Live(100.0, 40.0), "Waiting for clients. Running for 1 min 0 s."),
        (Live(69.0, 0.0), "not been heard of for 31.0 s"),
        (Live(100.0, 0.0, "train ce", 88.0, 5, 2, 7), "train ce , round 7, for 12 s: 2 of 5 clients answered"),
        (Live(100.0, 90.0, planned=8, steps=2), "2 of 8 steps done, running for 10 s, time left not known yet"),
        (Live(100.0, 90.0, planned=8, steps=2, end=160.5), "about 1 min 0 s left"),
        (Live(100.0, 90.0, planned=8, steps=2, end=99.0), "nearly done"),
        (Live(100.0, 200.0, "x", 300.0, 1), "for 0 s"),  # clocks differ
    ],
)
def test_words_about_now(live: Live, words: str) -> None:
    html = now_section(live, Results(), 100.0)
    assert words in text(html)
    assert ("process may have been stopped" in html) == (live.written < 70)
    for bar in re.findall("<progress[^>]*>", html):
        value, most = (int(re.findall(rf'aria-value{name}="(\d+)"', bar)[0]) for name in ("now", "max"))
        assert 0 <= value <= most
        assert f' value="{value}" max="{most}"' in bar
        assert "aria-label=" in bar


# -- files that are damaged, half written, or change all the time


def test_damage_is_told_and_the_last_sections_stay(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(watched.folder / "r", tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "checkpoints")
    metrics = tmp_path / "r" / "metrics.jsonl"
    whole = metrics.read_bytes()
    with client(tmp_path) as browser:
        good = sections(browser.get("/runs/r").text)
        metrics.write_bytes(whole + b'{"event": "rou')  # half a line
        assert sections(browser.get("/runs/r").text) == good
        metrics.write_bytes(whole.replace(b'"event": "round"', b'"event": "rounb"', 1))
        drop_limit(browser)
        found = sections(browser.get("/runs/r").text)
        assert "metrics.jsonl, line" in found["problem"]
        assert str(tmp_path) not in found["problem"]
        assert {name: html for name, html in found.items() if name != "problem"} == good
        assert not changes(browser, "/runs/r")["ended"]
        metrics.write_bytes(whole)
        (tmp_path / "r" / LIVE_FILE).write_bytes(b'{"phase": "<b>')
        drop_limit(browser)
        found = sections(browser.get("/runs/r").text)
        assert LIVE_FILE in found["problem"]
        assert "<b>" not in found["problem"]
        metrics.unlink()
        assert "not ended" not in text(browser.get("/").text)
        assert browser.get("/runs/r").status_code == 200
    metrics.write_bytes(whole)
    with client(tmp_path) as browser, monkeypatch.context() as patch:
        patch.setattr(module, "build_sections", lambda *_: [][0])
        assert "cannot be drawn: IndexError" in sections(browser.get("/runs/r").text)["problem"]
    with client(tmp_path) as browser:  # from the start
        metrics.write_bytes(b"nothing\n")
        found = sections(browser.get("/runs/r").text)
        assert list(found) == ["problem", "summary"]


def drop_limit(browser: TestClient) -> None:
    """Let changes be drawn at once."""
    runs = browser.app.state.runs  # type: ignore[attr-defined]
    runs._drawn = type(runs._drawn)((name, replace(drawn, again=0.0)) for name, drawn in runs._drawn.items())


def test_many_readers_cause_one_drawing_and_changes_a_limited_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARE", 1e-9)
    monkeypatch.setattr(module, "build_sections", lambda results, *_: {"notes": f"<p>{len(results.notes)}</p>"})
    notes = [json.dumps({"event": "note", "text": str(number)}) for number in range(9)]
    folder = write_events(tmp_path / "r", notes[:1])
    (folder / LIVE_FILE).write_bytes(Live(time.time(), 0.0).to_json())
    app = make_app(tmp_path)

    async def read() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as browser:

            async def page() -> str:
                return (await browser.get("/runs/r")).text

            pages = await asyncio.gather(*(page() for _ in range(20)))
            assert all("<p>1</p>" in one for one in pages)
            assert app.state.runs.drawings == 1
            for number in range(2, 9):
                write_events(folder, notes[:number])
                assert "<p>1</p>" in await page()
            assert app.state.runs.drawings == 1
            (folder / LIVE_FILE).unlink()  # the end is drawn in any case
            assert "<p>8</p>" in await page()
            assert app.state.runs.drawings == 2
            assert "<p>8</p>" in await page()
            assert app.state.runs.drawings == 2

    asyncio.run(read())


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    with client(tmp_path / "results", only="r") as browser:
        first = browser.get("/runs/r")
        assert first.status_code == 200
        assert "has not begun" in first.text
        assert browser.get("/runs/other").status_code == 404
        write_events(tmp_path / "results" / "other", [{"event": "note", "text": "x"}])
        write_events(tmp_path / "results" / "r", [{"event": "end", "seconds": 1.0, "status": "completed"}])
        assert browser.get("/runs/other").status_code == 404
        assert "other" not in text(browser.get("/").text)
        update = changes(browser, "/runs/r", first.text)
        assert update["ended"]
        assert "not begun" not in update["changed"]["summary"]["html"]
