"""Devices enrolled at a SuperLink: names, status and last seen over TLS; what runs and agents know of them."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedtta import cli
from fedtta.settings import SettingsError
from fedtta.simulation import deployment, devices, superlink
from fedtta.simulation.control import public_key
from fedtta.simulation.devices import Device, Known
from fedtta.simulation.keys import make_keys
from fedtta.simulation.superlink import POLL, FlowerError, free_ports
from tests.client.agent import fake

NOW = datetime(2026, 11, 23, 10, 20, 30, tzinfo=UTC)


def drawn(*arguments: Any) -> list[str]:
    console = Console(width=160)
    with console.capture() as text:
        console.print(devices.table(*arguments))
    return [" ".join(line.split()) for line in text.get().splitlines()]


def write(folder: Path, *events: dict[str, Any]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_a_table_says_what_is_known_and_a_dash_otherwise() -> None:
    enrolled = [Device("a", 7, "online", NOW), Device("b", 8, "registered", None), Device("c", 9, "unregistered", NOW)]
    known = {"a": Known("30 samples", "v2"), "other": Known()}
    head, *rows = drawn(enrolled, known)
    assert head == "name node status last seen data model"
    assert rows == ["a 7 online 2026-11-23 10:20:30Z 30 samples v2", "b 8 registered never - -"]
    assert len(drawn(enrolled, known, True)) == 4


def test_a_narrow_table_cuts_no_id_and_no_version() -> None:
    node, version = 12358915127539907807, "promoted dbcdee207d22/cross_entropy/3/e421e4cb"
    console = Console(width=80)  # of a pipe
    with console.capture() as text:
        known = {"site-a": Known("270 samples, 3 classes", version)}
        console.print(devices.table([Device("site-a", node, "online", NOW)], known))
    assert str(node) in text.get()
    assert "…" not in text.get()


def test_a_run_says_what_data_each_device_had(tmp_path: Path) -> None:
    abouts = [
        {"labelled": True, "samples": 40, "skipped": 2, "classes_present": 3},
        {"labelled": False, "samples": 9, "skipped": 0, "classes_present": None},
    ]
    clients = {"event": "clients", "names": ["site-a", "site-b"], "sizes": [[24, 8, 8], [0, 0, 9]], "data": abouts}
    joined = {"event": "joined", "partition": 2, "name": "late", "node_id": 1, "sizes": [3, 1, 1]}
    served = {"event": "served", "partition": 2, "served": "promoted v1"}
    assert devices.from_run(write(tmp_path, {"event": "run"}, clients, joined, served)) == {
        "site-a": Known("40 samples, 2 skipped, 3 classes"),
        "site-b": Known("9 samples, no labels"),
        "late": Known("5 samples", "promoted v1"),
    }


def test_a_run_of_a_divided_data_set_names_its_clients_by_number(tmp_path: Path) -> None:
    assert devices.from_run(write(tmp_path, {"event": "clients", "sizes": [[1, 2, 3], [4, 5, 6]]})) == {
        "0": Known("6 samples"),
        "1": Known("15 samples"),
    }
    with pytest.raises(SettingsError, match=r"no metrics\.jsonl"):
        devices.from_run(tmp_path / "nowhere")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n{"event": "ser')  # damaged, and half a line of a killed run
    assert list(devices.from_run(tmp_path)) == ["0", "1"]


def test_an_address_or_a_certificate_that_is_none_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("garbage")
    with pytest.raises(FlowerError, match="no SuperLink answers at localhost:abc: "):
        devices.listed("localhost:abc", None)
    with pytest.raises(FlowerError, match=r"ca\.crt is no certificate: "):
        devices.listed("localhost:1", tmp_path / "ca.crt")


def test_another_server_at_the_address_is_an_error_in_words() -> None:
    """Such as the login page of a proxy: status 200, and nothing of Flower."""

    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.handle_request, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        with pytest.raises(FlowerError, match=f"what answers at {address} is no SuperLink: "):
            devices.listed(address, None)


def test_an_agent_says_what_it_serves(tmp_path: Path) -> None:
    with fake.running() as (agent, _):
        assert devices.from_agent(agent.config.listen_address).model == "run/ce/3/abcd"
    with pytest.raises(FlowerError, match="no agent answers"):
        devices.from_agent(f"unix:{tmp_path}/nowhere")


def test_a_device_is_removed_by_its_name_only_if_one_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    found = [Device("a", 1, "online", NOW), Device("b", 2, "online", NOW), Device("b", 3, "offline", NOW)]
    found.append(Device("a", 4, "unregistered", NOW))
    monkeypatch.setattr(devices, "listed", lambda *_: found)
    control = SimpleNamespace(UnregisterNode=lambda request: calls.append(request.node_id))
    monkeypatch.setattr(devices, "client", lambda *_: nullcontext(control))
    assert devices.remove("h:1", None, "a") == "a (node 1) is removed"
    assert devices.remove("h:1", None, "3") == "b (node 3) is removed"
    assert calls == [1, 3]
    with pytest.raises(SettingsError, match=r"several .*b \(2\), b \(3\)"):
        devices.remove("h:1", None, "b")
    with pytest.raises(SettingsError, match=r"no such device; enrolled: a \(1\), b \(2\), b \(3\)$"):
        devices.remove("h:1", None, "4")


@pytest.mark.parametrize(
    ("number", "name", "says"),
    [
        (0, "site a", "1 to 64 letters"),
        (0, "site-b", "is enrolled already, as site-a"),
        (1, "site-a", r"another key is enrolled as site-a \(node 1\)"),
        (2, "site-c", "was removed, as site-a"),
    ],
)
def test_a_name_or_a_key_that_is_taken_is_not_enrolled(
    number: int, name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, _ = make_keys(tmp_path, 3)
    content = [public_key(keys.node(i)[1]) for i in range(3)]
    found = [Device("site-a", 1, "online", NOW, content[0]), Device("site-a", 2, "unregistered", None, content[2])]
    monkeypatch.setattr(devices, "listed", lambda *_: found)
    monkeypatch.setattr(devices, "register", lambda *_: 9)
    with pytest.raises(SettingsError, match=says):
        devices.enrol("h:1", None, keys.node(number)[1], name)
    assert devices.enrol("h:1", None, keys.node(1)[1], "site-b") == "site-b is enrolled as node 9"


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_devices_of_a_superlink_over_tls(tmp_path: Path) -> None:
    """Enrolled under a name, seen when it connects, removed; all through the command."""
    keys, _ = make_keys(tmp_path / "keys", 2)
    home = tmp_path / "home"
    home.mkdir()
    with superlink.superlink(home, simulation=False, keys=keys) as fleet:
        address, _ = superlink.connection(home)
        how = ["--superlink", address, "--root-certificates", str(keys.ca)]

        def fedtta(*words: str) -> str:
            done = CliRunner().invoke(cli.app, ["devices", *words, *how], env={"COLUMNS": "200"})
            assert done.exit_code == 0, done.output
            return done.output

        def row(name: str) -> list[str]:
            return next(line.split() for line in fedtta("list").splitlines() if line.startswith(name))

        assert fedtta("enrol", str(keys.node(0)[1]), "--name", "site-a").startswith("site-a is enrolled as node ")
        assert "already" in fedtta("enrol", str(keys.node(0)[1]), "--name", "site-a")
        fedtta("enrol", str(keys.node(1)[1]))
        assert row("site-a")[2:4] == ["registered", "never"]
        started = datetime.now(UTC).replace(microsecond=0)
        with deployment.supernode(home / "node-0", fleet, {"partition-id": 0}, (keys.ca, keys.node(0)[0])) as node:
            try:
                end = time.monotonic() + 60
                while row("site-a")[2] != "online" and time.monotonic() < end:
                    assert node.poll() is None
                    time.sleep(POLL)
                found = row("site-a")
                assert found[2] == "online"
                seen = datetime.fromisoformat(f"{found[3]} {found[4]}")
                assert timedelta(0) <= seen - started < timedelta(seconds=120)
            finally:
                node.terminate()  # else a failed assertion would wait for it until the test's time is over
        assert row("node-1")[2] == "registered"
        assert fedtta("remove", "site-a").endswith("is removed\n")
        assert "site-a" not in fedtta("list")
        assert "unregistered" in fedtta("list", "--all")
        (rules := tmp_path / "alerts.toml").write_text("certificate-days = 366\n")  # the server's has 365
        ends = CliRunner().invoke(cli.app, ["devices", "--check", "--alerts", str(rules), *how])
        assert (ends.exit_code, ends.output.count("\n")) == (1, 1), ends.output
        assert ends.output.startswith("SuperLink: certificate-days: its certificate is valid until 20")
        wrong = CliRunner().invoke(cli.app, ["devices", "list", "--superlink", address, "--insecure"])
        assert wrong.exit_code == 1
    assert free_ports(1)
