"""Who may read the pages: hosts, methods, tokens, logins, names of runs, and addresses to listen on."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fastapi import APIRouter
from starlette.testclient import TestClient

from fedtta.settings import SettingsError
from fedtta.settings.names import is_loopback
from fedtta.watch import __main__ as program
from fedtta.watch import access as module
from fedtta.watch.access import COOKIE, LOGIN, POLICY, Access, read_token
from fedtta.watch.app import make_app
from tests.report.runs import write_events

TOKEN = "0123456789abcdef-token"
LOCAL, REMOTE = "http://127.0.0.1:8650", "https://fed.example.org"


def browser(folder: Path, access: Access | None = None, url: str = LOCAL, **options: Any) -> TestClient:
    return TestClient(make_app(folder, access, **options), base_url=url, follow_redirects=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A results folder with a run `r`, and secrets beside and above it."""
    write_events(tmp_path / "results" / "r", [{"event": "note", "text": "a note of r"}])
    write_events(tmp_path / "secret", [{"event": "note", "text": "the secret"}])
    write_events(tmp_path / "results" / ".hidden", [{"event": "note", "text": "the secret"}])
    write_events(tmp_path / "results" / "r" / "inner", [{"event": "note", "text": "the secret"}])
    (tmp_path / "results" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "results" / "through").mkdir()
    (tmp_path / "results" / "through" / "metrics.jsonl").symlink_to(tmp_path / "secret" / "metrics.jsonl")
    (tmp_path / "results" / "circle").mkdir()
    (tmp_path / "results" / "circle" / "metrics.jsonl").symlink_to("metrics.jsonl")
    write_events(tmp_path / "results" / "pipe", [])
    os.mkfifo(tmp_path / "results" / "pipe" / "live.json")
    write_events(tmp_path / "results" / "copied", [])
    (tmp_path / "results" / "copied" / "checkpoints").symlink_to(tmp_path / "secret")
    return tmp_path / "results"


# -- names


@pytest.mark.parametrize(
    "name",
    ["link", "through", "copied", "circle", "pipe", ".hidden", ".", "%2e%2e", "..%2fsecret", "%2e%2e%2fsecret",
     "r%2finner", "r/inner", "../secret", "..%5csecret", "r%00", "%00", "nothing", "r ", "%20", "%ff", "~", "a" * 5000],
)  # fmt: skip
def test_only_runs_of_the_folder_are_shown(name: str, folder: Path) -> None:
    with browser(folder) as local:
        answer = local.get(f"/runs/{name}")
        assert answer.status_code == 404
        assert "secret" not in answer.text
        assert "a note of r" in local.get("/runs/r").text
        assert 'href="/runs/' + name not in local.get("/").text


def test_reading_only(folder: Path) -> None:
    with browser(folder) as local:
        for path in ("/", "/runs/r", "/live.js", LOGIN):
            for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
                assert local.request(method, path).status_code == 405
        assert [local.head(path).status_code for path in ("/", "/runs/r", "/live.js")] == [200] * 3
        assert [local.get(path).status_code for path in ("/docs", "/openapi.json", "/redoc", LOGIN)] == [404] * 4


@pytest.mark.parametrize(
    ("host", "known"),
    [("127.0.0.1", True), ("127.0.0.1:80", True), ("localhost:9000", True), ("LOCALHOST", True), ("[::1]:8650", True),
     ("127.9.9.9", True), ("", False), ("evil.example", False), ("evil.example:8650", False), ("192.168.1.2", False),
     ("127.0.0.1.evil.example", False), ("localhost.evil.example", False), ("[::2]", False), ("[::1", False),
     ("evil@localhost", False)],
)  # fmt: skip
def test_a_loopback_page_has_no_other_name(host: str, known: bool, folder: Path) -> None:
    with browser(folder) as local:
        assert local.get("/", headers={"host": host}).status_code == (200 if known else 421)


def test_security_headers_are_on_every_answer(folder: Path) -> None:
    with browser(folder, Access(TOKEN)) as local:
        answers = [local.get("/"), local.get("/", headers={"host": "evil.example"}), local.post("/")]
        local.headers["authorization"] = f"Bearer {TOKEN}"
        answers += [local.get(path) for path in ("/", "/runs/r", "/runs/nothing", "/live.js")]
    assert [one.status_code for one in answers] == [401, 421, 405, 200, 200, 404, 200]
    for answer in answers:
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "http://" not in answer.text.replace("http://www.w3.org", "")
        assert "https://" not in answer.text
    assert "'unsafe-eval'" not in POLICY
    assert "script-src 'self';" in POLICY


# -- tokens


def test_routes_of_other_parts_are_behind_the_same_guard(folder: Path) -> None:
    router = APIRouter()
    router.add_api_route("/devices", lambda: {"devices": 3})
    with browser(folder, Access(TOKEN), routers=[router], links={"Devices": "/devices"}) as local:
        assert local.get("/devices").status_code == 401
        assert local.get("/devices", headers={"host": "evil.example"}).status_code == 421
        local.headers["authorization"] = f"Bearer {TOKEN}"
        assert local.get("/devices").json() == {"devices": 3}
        assert '<a href="/devices">Devices</a>' in local.get("/").text


@pytest.mark.parametrize(
    "given",
    ["", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer", "Bearer ", "Bearer é", "é"],
)
def test_nothing_is_read_without_the_token(given: str, folder: Path) -> None:
    with browser(folder, Access(TOKEN)) as local:
        headers = {"authorization": given.encode("latin-1")} if given else {}
        for path in ("/", "/runs/r", "/runs/nothing", "/live.js", f"/?token={TOKEN}", f"/runs/r?have={TOKEN}"):
            answer = local.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "note of r" not in answer.text
            assert TOKEN not in answer.text
        assert local.get("/", headers={"authorization": f"bearer {TOKEN}"}).status_code == 200


def test_a_login_is_a_cookie_that_only_this_process_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access(TOKEN, loopback=False, secure=True)
    with browser(folder, access, REMOTE) as remote:
        asked = remote.get("/runs/r")
        assert 'type="password"' in asked.text
        assert asked.headers["referrer-policy"] == "same-origin"  # with no-referrer browsers post with Origin: null
        assert remote.get(LOGIN).status_code == 401
        wrong = remote.post(LOGIN, data={"token": TOKEN[:-1], "next": "/runs/r"})
        assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
        assert "not the token" in wrong.text
        right = remote.post(LOGIN, data={"token": f" {TOKEN}\n", "next": "/runs/r"})
        assert (right.status_code, right.headers["location"]) == (303, "/runs/r")
        cookie = right.headers["set-cookie"]
        assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Secure", "Path=/", "Max-Age=43200"))
        assert TOKEN not in cookie
        assert "a note of r" in remote.get("/runs/r").text
        value = remote.cookies[COOKIE]
        assert not Access(TOKEN)._valid(value)
        until, code = value.split(".")
        for forged in ("", ".", until, f"{int(until) + 1}.{code}", f"{until}.{code[:-1]}", f"٣.{code}"):
            assert not access._valid(forged)
        monkeypatch.setattr(module.time, "time", lambda: int(until) + 1)
        assert remote.get("/runs/r").status_code == 401


@pytest.mark.parametrize("name", ["münchen-1", "a?b#c", "100 %"])
def test_a_login_leads_to_the_page_that_was_asked_for(name: str, folder: Path) -> None:
    shutil.copytree(folder / "r", folder / name)
    with browser(folder, Access(TOKEN)) as local:
        asked = local.get(f"/runs/{quote(name)}").text
        there = re.findall('name="next" value="([^"]*)"', asked)[0]
        right = local.post(LOGIN, data={"token": TOKEN, "next": unescape(there)})
        assert right.headers["location"] == f"/runs/{quote(name)}"
        assert "a note of r" in local.get(right.headers["location"]).text


@pytest.mark.parametrize(
    "there", ["//evil.example", "https://evil.example", "/\\evil", "javascript:x", "", "/a\r\nb: c"]
)
def test_a_login_leads_nowhere_else(there: str, folder: Path) -> None:
    with browser(folder, Access(TOKEN)) as local:
        assert local.post(LOGIN, data={"token": TOKEN, "next": there}).headers["location"] == "/"


def test_logins_of_other_sites_and_long_ones_are_refused(folder: Path) -> None:
    with browser(folder, Access(TOKEN)) as local:
        for origin in ("http://evil.example", "http://[", "http://[x]", "null", "", "//", "\xff"):
            there = {"origin": origin.encode("latin-1")}
            assert local.post(LOGIN, data={"token": TOKEN}, headers=there).status_code == 403
        assert local.post(LOGIN, data={"token": "x" * 10_000}).status_code == 413
        assert local.post(LOGIN, data={"token": TOKEN}, headers={"origin": LOCAL}).status_code == 303
        assert local.post(LOGIN, content=b"\xff\xfe%ff").status_code == 401


def test_tokens_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert read_token(path) == TOKEN
    for bad in ("", "short", "with a space in the token", "nicht-ascii-zeichen-ä", "control\x07control-control"):
        path.write_text(bad)
        with pytest.raises(SettingsError, match="at least 16"):
            read_token(path)


# -- addresses


@pytest.mark.parametrize("options", [{}, {"token": TOKEN}, {"secure": True}])
def test_access_from_outside_needs_token_and_tls(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="token and TLS"):
        Access(loopback=False, **options)


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "fed.example.org", "localhost.evil", "", "127.1")))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--listen 0.0.0.0:0", "needs --token-file, --certificate and --key"),
        ("--listen 0.0.0.0:0 --token-file {token}", "needs --token-file, --certificate and --key"),
        ("--listen [::]:0 --certificate {token} --key {token}", "needs --token-file"),
        ("--listen fed.example.org:1", "needs --token-file"),
        ("--listen 127.0.0.1:{used}", "in use"),
        ("--listen 127.0.0.1", "HOST:PORT"),
        ("--listen 127.0.0.1:99999", "HOST:PORT"),
        ("--listen :80", "HOST:PORT"),
        ("--key {token}", "both, or neither"),
        ("--token-file nowhere", "nowhere"),
        ("--token-file /dev/null", "at least 16"),
        ("--certificate nowhere --key other", "--certificate nowhere --key other: allowed are a certificate and its"),
        ("--certificate {token} --key {token}", "private key, PEM: "),
    ],
)
def test_refusals_are_one_line(words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as used:
        filled = words.format(token=tmp_path / "token", used=used.getsockname()[1])
        assert program.main([str(tmp_path), *filled.split()]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    (line,) = error.splitlines()
    assert told in line
    assert TOKEN not in line


def test_the_logs_of_others_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn's own configuration would close every handler of the process, and with some the stream behind it."""
    handler = logging.StreamHandler()
    closed: list[bool] = []
    monkeypatch.setattr(handler, "close", lambda: closed.append(True))
    with socket.create_server(("127.0.0.1", 0)) as used:
        assert program.main([str(tmp_path), "--listen", f"127.0.0.1:{used.getsockname()[1]}"]) == 2
    assert not closed


def test_the_default_address_is_any_free_one_where_the_usual_one_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with program.listen("127.0.0.1", port, exact=False) as other:
            assert other.getsockname()[0] == "127.0.0.1"
            assert other.getsockname()[1] != port
    assert program.address("") == ("127.0.0.1", 8650)
    assert program.address("[::1]:1") == ("::1", 1)
    assert program.address("localhost:1") == ("127.0.0.1", 1)
