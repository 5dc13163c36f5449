"""The webhook against real servers: what is sent, what is tried again, and that nothing waits for it."""

from __future__ import annotations

import itertools
import json
import logging
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedtta.simulation.keys import make_keys
from fedtta.watch.alerting import Alerting
from fedtta.watch.fleet import FleetDevice
from fedtta.watch.rules import Rules
from fedtta.watch.webhook import WAITING, Webhook
from tests.watch.test_alerts import NOW, OFF, device

SECRET = "/hooks/T0KEN"


class Server(ThreadingHTTPServer):
    """Answers requests with one status after another, and the last one for ever; 0: not at all, 1: byte by byte."""

    daemon_threads = True

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses, self.got = list(statuses), list[tuple[str, Any]]()
        self.leave = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{SECRET}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status = self.server.statuses[min(len(self.server.got), len(self.server.statuses) - 1)]
        self.server.got.append((self.path, body))
        if status == 0:
            self.server.leave.wait(60)
        elif status == 1:
            for byte in b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000:
                if self.server.leave.wait(0.05):
                    break
                self.wfile.write(bytes([byte]))
        else:
            self.send_response(status)
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

    def do_GET(self) -> None:
        self.server.got.append(("GET " + self.path, None))
        self.send_error(404)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def server(*statuses: int) -> Iterator[Server]:
    with Server(*statuses) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield made
        finally:
            made.leave.set()
            made.shutdown()
            thread.join()


def until(condition: Any, what: Any) -> None:
    """Wait for something that happens in another thread."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.01)


def sent(to: Server, caplog: pytest.LogCaptureFixture, timeout: float = 10.0) -> list[Any]:
    """Send a message, then one that the server takes, and return what it got until then."""
    with caplog.at_level(logging.WARNING), Webhook(to.url, timeout, (0.01, 0.02)) as hook:
        hook.send({"text": "first"})
        hook.send({"text": "second"})
        until(lambda: to.got and to.got[-1][1] == {"text": "second"}, lambda: to.got)
    assert all(path == SECRET for path, _ in to.got)
    assert "T0KEN" not in caplog.text
    return [body["text"] for _, body in to.got]


@pytest.mark.parametrize(
    ("statuses", "got", "told"),
    [
        ((200,), ["first", "second"], ""),
        ((204,), ["first", "second"], ""),
        ((503, 429, 200), ["first", "first", "first", "second"], ""),
        ((500, 500, 502, 200), ["first", "first", "first", "second"], "not sent: status 502: first"),
        ((404, 200), ["first", "second"], "not sent: status 404: first"),
        ((302, 200), ["first", "second"], "not sent: status 302: first"),
        ((307, 200), ["first", "second"], "not sent: status 307: first"),
    ],
)
def test_what_is_tried_again(
    statuses: tuple[int, ...], got: list[str], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server(*statuses) as to:
        assert sent(to, caplog) == got
    assert told in caplog.text
    assert bool(told) == bool(caplog.records)


@pytest.mark.parametrize("hanging", [0, 1])
def test_a_server_that_hangs_is_given_up(hanging: int, caplog: pytest.LogCaptureFixture) -> None:
    """One that never answers, and one that always has another byte of its answer."""
    with server(hanging, hanging, hanging, 200) as to:
        got = sent(to, caplog, timeout=0.3)
    assert [text for text, _ in itertools.groupby(got)] == ["first", "second"]  # it may take the second late, too
    assert "not sent: no answer in 0.3 s: first" in caplog.text


def test_nothing_waits_for_a_webhook(caplog: pytest.LogCaptureFixture) -> None:
    with server(0) as to, caplog.at_level(logging.WARNING):
        with Webhook(to.url) as hook:
            for number in range(WAITING + 2):
                hook.send({"text": f"message {number}"})
            assert "dropped: message" in caplog.text  # at most one is being sent
        assert "stopped with " in caplog.text
    assert len(to.got) <= 1


def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with server(200) as to:
        url = to.url
    with caplog.at_level(logging.WARNING), Webhook(url, pauses=(0.01,)) as hook:
        hook.send({"text": "x"})
        until(lambda: "not sent: ConnectError: All connection attempts failed: x" in caplog.text, lambda: caplog.text)


def test_a_certificate_that_is_not_trusted_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys, _ = make_keys(tmp_path, 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*keys.server)
    with server(200) as to:
        to.socket = context.wrap_socket(to.socket, server_side=True)
        url = to.url.replace("http:", "https:")
        with caplog.at_level(logging.WARNING), Webhook(url, pauses=(0.01,)) as hook:
            hook.send({"text": "x"})
            until(lambda: "not sent: " in caplog.text, lambda: caplog.text)
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    assert "T0KEN" not in caplog.text


def test_a_receiver_may_be_away_for_minutes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    slept: list[float] = []
    monkeypatch.setattr("fedtta.watch.webhook.time", SimpleNamespace(sleep=slept.append))
    with server(503, 503, 503, 503, 200) as to, caplog.at_level(logging.WARNING), Webhook(to.url) as hook:
        hook.send({"text": "x"})
        until(lambda: len(to.got) == 5, lambda: (to.got, slept))
    assert sum(slept) > 5 * 60
    assert "not sent" not in caplog.text


def test_a_line_says_whether_the_alert_began_or_ended(caplog: pytest.LogCaptureFixture) -> None:
    with server(404, 404) as to, caplog.at_level(logging.WARNING), Webhook(to.url) as hook:
        for state in ("begins", "ends"):
            hook.send({"state": state, "text": "site-a: silent"})
            until(lambda state=state: f"404: {state}: site-a: silent" in caplog.text, lambda: caplog.text)


def test_alerts_are_logged_and_sent_while_the_devices_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    """An alert begins; the devices cannot be read for a while; it ends."""
    fleet: list[FleetDevice | Exception] = [device("a<b", drift=0.5)]

    def read() -> list[FleetDevice]:
        if isinstance(fleet[0], Exception):
            raise fleet[0]
        return [one for one in fleet if isinstance(one, FleetDevice)]

    with server(200) as to, caplog.at_level(logging.WARNING):
        rules: Rules = replace(OFF, most_drift=0.4, webhook=to.url)
        with Alerting(rules, read, lambda _: [], interval=0.01, clock=lambda: NOW) as alerting:
            until(lambda: to.got, lambda: caplog.text)
            assert [one.device for one in alerting.current] == ["a<b"]
            fleet[0] = OSError("disk")
            until(lambda: "cannot be read: OSError: disk" in caplog.text, lambda: caplog.text)
            fleet[0] = device("a<b", drift=0.3)
            until(lambda: len(to.got) == 2, lambda: caplog.text)
    assert [body["state"] for _, body in to.got] == ["begins", "ends"]
    assert set(to.got[0][1]) == {"state", "at", "rule", "device", "model", "value", "limit", "since", "text"}
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["alert begins", "alerts", "alert ends"]
