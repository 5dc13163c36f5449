"""The agent's metrics over HTTP: what Prometheus reads, who may read it, and scrapes that never end."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fedtta.client.agent import metrics, server
from fedtta.messages.exposition import METRICS, SECONDS
from fedtta.simulation.keys import make_keys
from tests.client.agent.fake import TIMEOUT, FakeAgent, channel, config, folder, predictor, request, running, until

LOCAL = {"metrics": "127.0.0.1:0"}


def scrape(address: str, tls: ssl.SSLContext | None = None) -> str:
    url = f"{'https' if tls else 'http'}://{address}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT, context=tls) as reply:
        return str(reply.read().decode())


def read(text: str) -> dict[tuple[str, ...], float]:
    """Return (name, label values but the device's ...) → value."""
    return {
        (one.name, *(value for key, value in sorted(one.labels.items()) if key != "device")): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_prometheus_reads_what_happened() -> None:
    with running(**LOCAL) as (fake, sockets), channel(sockets.listen) as line:
        for _ in range(3):
            predictor(line).Predict(request(shape=(2, 1, 2, 2)), timeout=TIMEOUT)
            fake.observation.predicted(2)  # which the agent itself does
        found = read(scrape(sockets.metrics))
        assert found["fedtta_predictions_total",] == 6
        assert found[f"{SECONDS}_count",] == found[f"{SECONDS}_bucket", "+Inf"] == 3
        assert found["fedtta_guard_events_total", "one-class"] == 4
        (about,) = (key for key in found if key[0] == "fedtta_device_info")
        assert about[1:4] == ("fedthe", "btfl", "run/ce/3/abcd")
        predictor(line).Predict(request(), timeout=TIMEOUT)
        assert read(scrape(sockets.metrics))[f"{SECONDS}_count",] == 4
        names = {name for name, *_ in found}
        families = {re.sub("_(total|info|bucket|count|sum)$", "", name) for name in names}
        unknown = {one.name for one in METRICS} - families
        assert unknown == {"fedtta_head_weight", "fedtta_estimated_accuracy", "fedtta_drift"}
        assert all(name.startswith("fedtta_") for name in names)  # and nothing of the process's own


def test_other_questions_are_refused_and_errors_stay_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    with running(**LOCAL) as (fake, sockets):
        for path, method, code in (("/", "GET", 404), ("/metrics/..", "GET", 404), ("/metrics", "POST", 405)):
            asked = urllib.request.Request(f"http://{sockets.metrics}{path}", method=method)
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(asked, timeout=TIMEOUT)
            assert caught.value.code == code
        fake.status = lambda: {}["secret"]  # type: ignore[method-assign]
        with pytest.raises(urllib.error.HTTPError) as caught:
            scrape(sockets.metrics)
        assert (caught.value.code, b"secret" in caught.value.read()) == (500, False)
    assert "KeyError: 'secret'" in caplog.text


def test_scrapes_that_never_end_harm_no_other_and_are_cut_off(capfd: pytest.CaptureFixture[str]) -> None:
    half = [b"", b"GET", b"GET /metrics HTTP/1.1\r\nHost: x\r\n", b"\x16\x03\x01"]
    with running() as (fake, sockets), channel(sockets.listen) as line, contextlib.ExitStack() as hung:
        made = metrics.MetricsServer(fake.telemetry, config(fake.config.state_folder, **LOCAL))
        hung.callback(made.close)
        host, _, port = made.address.rpartition(":")

        def connect() -> socket.socket:
            return hung.enter_context(socket.create_connection((host, int(port)), TIMEOUT))

        silent = [connect() for _ in range(metrics.SCRAPES)]
        until(lambda: len(made._server._due) == metrics.SCRAPES)
        made._server._due.update(dict.fromkeys(made._server._due, float("inf")))
        for number, one in enumerate(silent):
            one.sendall(half[number % len(half)])
        predictor(line).Predict(request(), timeout=TIMEOUT)
        assert connect().recv(1) == b""  # closed at once: as many wait as may
        made._server._due.update(dict.fromkeys(made._server._due, 0.0))
        for one in silent:
            with contextlib.suppress(ConnectionError):
                while one.recv(4096):
                    pass
        until(lambda: not made._server._due)
        assert read(scrape(made.address))[f"{SECONDS}_count",] == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_scrape_whose_thread_cannot_be_started_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = metrics._Server("127.0.0.1", 0, None)
    monkeypatch.setattr(threading.Thread, "start", full)
    with server, socket.socket() as connection, pytest.raises(RuntimeError, match="new thread"):
        server.process_request(connection, None)
    assert not server._due


def test_it_ends_with_the_agent_and_a_taken_port_is_named() -> None:
    with running(**LOCAL) as (_, sockets):
        with folder() as path:
            other = config(path, metrics=sockets.metrics)
            with pytest.raises(OSError, match=rf"^metrics = '{sockets.metrics}': cannot listen there: .*in use"):
                server.serve(FakeAgent(other), other)  # type: ignore[arg-type]
            assert not list(path.glob("*.sock"))
        sockets.stop(TIMEOUT)
        with pytest.raises(urllib.error.URLError):
            scrape(sockets.metrics)
    with running() as (_, sockets):
        assert sockets.metrics == ""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of an agent and of a program; beside them in `other` those of another authority."""
    path = tmp_path_factory.mktemp("keys")
    for one in (path, path / "other"):
        make_keys(one, nodes=1, agents=["localhost"])
    return path


def over_tls(keys: Path) -> dict[str, Any]:
    names = {"certificate": "agent-localhost.crt", "key": "agent-localhost.key", "client_ca": "agents-ca.crt"}
    return {"metrics": "localhost:0", **{key: str(keys / name) for key, name in names.items()}}


def client(trusted: Path, own: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted / "agents-ca.crt"))
    if own:
        context.load_cert_chain(own / "program.crt", own / "program.key")
    return context


def test_over_tls_both_sides_show_a_certificate(keys: Path) -> None:
    with running(**over_tls(keys)) as (_, sockets), contextlib.ExitStack() as hung:
        host, _, port = sockets.metrics.rpartition(":")
        hung.enter_context(socket.create_connection((host, int(port))))  # no handshake: it blocks no other
        for context in (None, client(keys, None), client(keys, keys / "other")):
            with pytest.raises(OSError, match=r".+"):  # reset, closed, or an alert
                scrape(sockets.metrics, context)
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):  # it is taken for an impostor
            scrape(sockets.metrics, client(keys / "other", keys))
        assert read(scrape(sockets.metrics, client(keys, keys)))["fedtta_guard_holding",] == 1


def test_tls_files_that_do_not_fit_are_named(keys: Path) -> None:
    with folder() as path:
        wrong = config(path, **{**over_tls(keys), "key": str(keys / "program.key")})
        with pytest.raises(ValueError, match=r"key = .*program\.key: .*mismatch"):
            server.serve(FakeAgent(wrong), wrong)  # type: ignore[arg-type]
