"""The profile `observe`: Prometheus reads the server's metrics, and the dashboard asks for metrics that exist."""

from __future__ import annotations

import json
import re
import runpy
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from typer.main import get_command

from fedtta import cli
from fedtta.simulation.keys import LOCAL
from fedtta.simulation.superlink import PROJECT
from fedtta.watch import __main__ as program
from fedtta.watch import metrics
from fedtta.watch.access import Access, read_token
from fedtta.watch.app import make_app
from fedtta.watch.listing import Fleet
from tests.watch.made import listed, made

DOCKER = PROJECT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = {name: one for name, one in COMPOSE["services"].items() if "observe" in one.get("profiles", [])}
BOARD: dict[str, Any] = json.loads((DOCKER / "observe/dashboard.json").read_text(encoding="utf-8"))
SCRAPED = {"up": {"job", "instance"}}  # of Prometheus itself, for each target
OF_TARGET = {"job", "instance"}

# PromQL: what the dashboard uses of it

TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<text>"(?:[^"\\]|\\.)*")|(?P<duration>\d+[smhd]\b)|(?P<number>\d+(?:\.\d+)?)
    |(?P<name>[A-Za-z_:][\w:]*)|(?P<sign>[=!]~|[!<>=]=|[-+*/%<>={}()\[\],])""",
    re.VERBOSE,
)
COUNTED = {"rate", "increase", "irate"}  # of counters only
FUNCTIONS = {*COUNTED, "histogram_quantile", "sum", "count", "max", "min", "avg", "time", "vector"}
GROUPING = {"by", "without", "on", "ignoring"}
WORDS = {"and", "or", "unless"}


@dataclass
class Query:
    """Selectors as (metric, label → (operator, value), function around it), and the labels that it groups by."""

    selectors: list[tuple[str, dict[str, tuple[str, str]], str]] = field(default_factory=list)
    grouped: set[str] = field(default_factory=set)


def tokens(expression: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(expression):
        found = TOKEN.match(expression, position)
        assert found, f"{expression!r} at {position}: no PromQL that this test knows"
        position = found.end()
        if found.lastgroup != "space":
            yield str(found.lastgroup), found[0]


def parsed(expression: str) -> Query:
    """Read the names, matchers and groupings of an expression, in which every bracket must close."""
    left, query, around = list(tokens(expression)), Query(), [""]

    def take(text: str = "", kind: str = "") -> str:
        assert left, f"{expression!r} ends early"
        found, word = left.pop(0)
        assert text in ("", word), f"{expression!r}: expected {text}, not {word}"
        assert kind in ("", found), f"{expression!r}: expected a {kind}, not {word}"
        return word

    def following() -> str:
        return left[0][1] if left else ""

    def labels() -> Iterator[str]:
        take("(")
        while following() != ")":
            yield take(kind="name")
            if following() != ")":
                take(",")
        take(")")

    def matchers() -> Iterator[tuple[str, tuple[str, str]]]:
        take("{")
        while following() != "}":
            label, sign = take(kind="name"), take(kind="sign")
            assert sign in ("=", "!=", "=~", "!~")
            yield label, (sign, json.loads(take(kind="text")))
            if following() != "}":
                take(",")
        take("}")

    while left:
        kind, word = left.pop(0)
        if word == ")":
            assert len(around) > 1, f"{expression!r}: closes too often"
            around.pop()
        elif word == "(":
            around.append(around[-1])
        elif kind == "name" and word in GROUPING:
            query.grouped |= set(labels())
        elif kind == "name" and word not in WORDS:
            calls = following() == "(" or following() in GROUPING
            if calls:
                assert word in FUNCTIONS, f"{expression!r}: no function is called {word}"
                if following() in GROUPING:
                    take()
                    query.grouped |= set(labels())
                take("(")
                around.append(word)
                continue
            chosen = dict(matchers()) if following() == "{" else {}
            over = following() == "["
            if over:
                take("["), take(kind="duration"), take("]")
            assert over == (around[-1] in COUNTED), f"{expression!r}: {word} needs a range inside of rate, only there"
            query.selectors.append((word, chosen, around[-1]))
    assert len(around) == 1, f"{expression!r}: a bracket is open"
    return query


# What there is


@pytest.fixture(scope="module")
def existing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[str]]]:
    """Sample name → label → values, of a made fleet and run."""
    folder = made(tmp_path_factory.mktemp("results"))
    fleet = Fleet(folder, lambda: [listed("site-a", 1, seen=5.0)])
    app = make_app(folder, None, [metrics.router(folder, fleet.devices)])
    with TestClient(app, base_url="http://127.0.0.1:8650") as client:
        text = client.get("/metrics").text
    found: dict[str, dict[str, set[str]]] = {
        name: {label: {"fedtta"} for label in labels} for name, labels in SCRAPED.items()
    }
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, value in {"": "", **sample.labels}.items():
                found.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    return found


def check(expression: str, existing: dict[str, dict[str, set[str]]], legend: str = "") -> None:
    """Fail for a metric, a label or a label's value that does not exist, and for a rate of what is no counter."""
    query = parsed(expression)
    assert query.selectors, expression
    known = set(OF_TARGET)
    for name, chosen, around in query.selectors:
        assert name in existing, f"{expression!r}: there is no metric {name}"
        if around in COUNTED:
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), f"{expression!r}: {name} is no counter"
        for label, (sign, value) in chosen.items():
            assert label in existing[name].keys() | OF_TARGET, f"{expression!r}: {name} has no label {label}"
            if sign in ("=", "!="):
                assert value in existing[name][label], f"{expression!r}: {label} is never {value}"
            else:
                assert value in variables(), f"{expression!r}: {value} is no variable"
        known |= existing[name].keys()
    assert query.grouped <= known, f"{expression!r}: groups by {sorted(query.grouped - known)}"
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= (query.grouped or known), (
        f"{expression!r}: {legend!r} names other labels"
    )


def variables() -> set[str]:
    return {f"${one['name']}" for one in BOARD["templating"]["list"]}


def targets() -> list[tuple[str, str]]:
    """Every expression of the dashboard with its legend."""
    return [(one["expr"], one["legendFormat"]) for panel in BOARD["panels"] for one in panel.get("targets", [])]


@pytest.mark.parametrize(("expression", "legend"), targets())
def test_the_dashboard_asks_for_what_there_is(
    expression: str, legend: str, existing: dict[str, dict[str, set[str]]]
) -> None:
    check(expression, existing, legend)


@pytest.mark.parametrize(
    ("expression", "legend", "words"),
    [
        ("fedtta_head_wait", "", "no metric"),
        ("fedtta_predictions", "", "no metric"),  # which is the name without _total
        ('fedtta_clients{status="late"}', "", "no label status"),
        ('fedtta_clients{state="lost"}', "", "never lost"),
        ('fedtta_head_weight{device=~"$devices"}', "", "no variable"),
        ("sum by (node) (fedtta_head_weight)", "", "groups by"),
        ("fedtta_head_weight", "{{node}}", "other labels"),
        ("sum by (run) (fedtta_clients)", "{{state}}", "other labels"),
        ("rate(fedtta_head_weight[5m])", "", "no counter"),
        ("rate(fedtta_rounds_total)", "", "range"),
        ("fedtta_rounds_total[5m]", "", "range"),
        ("sun(fedtta_rounds_total)", "", "no function"),
        ("sum(fedtta_rounds_total", "", "open"),
        ("fedtta_rounds_total)", "", "too often"),
        ("fedtta_rounds_total ? 1", "", "no PromQL"),
        ("1 + 1", "", "1 + 1"),
    ],
)
def test_a_query_that_is_wrong_is_seen(
    expression: str, legend: str, words: str, existing: dict[str, dict[str, set[str]]]
) -> None:
    with pytest.raises(AssertionError, match=re.escape(words)):
        check(expression, existing, legend)


def test_variables_are_labels_of_metrics(existing: dict[str, dict[str, set[str]]]) -> None:
    for one in BOARD["templating"]["list"]:
        (found,) = re.findall(r"^label_values\((\w+), (\w+)\)$", one["query"]["query"])
        assert found[1] in existing[found[0]]
        assert any(f"${one['name']}" in expression for expression, _ in targets())


def test_the_dashboard_shows_devices_and_runs() -> None:
    """Its panels do not overlap, have a title and a description, and ask the provisioned source."""
    source = yaml.safe_load((DOCKER / "observe/datasource.yaml").read_text())["datasources"][0]
    names = {name for expression, _ in targets() for name, *_ in parsed(expression).selectors}
    assert {one.exposed for one in (*metrics.TRAINING, *metrics.RUN)} - names <= {
        "fedtta_round_seconds", "fedtta_run_started_timestamp_seconds", "fedtta_run_ended", "fedtta_run_completed",
    }  # fmt: skip
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert {one["datasource"]["uid"] for one in panel["targets"]} == {source["uid"]}
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


# Prometheus and Grafana


def option(service: str, name: str) -> str:
    (found,) = [word.partition("=")[2] for word in SERVICES[service]["command"] if word.startswith(f"{name}=")]
    return found


def test_prometheus_scrapes_the_port_of_the_pages() -> None:
    """The server takes the command of the compose file; Prometheus comes with its token, and trusts its authority."""
    config = yaml.safe_load((DOCKER / "observe/prometheus.yml").read_text(encoding="utf-8"))
    assert set(config) == {"global", "scrape_configs"}
    assert re.fullmatch(r"\d+s", config["global"]["scrape_interval"])
    (job,) = config["scrape_configs"]
    assert set(job) == {"job_name", "scheme", "authorization", "tls_config", "static_configs"}
    words = SERVICES["watch"]["command"]
    assert words[:3] == ["python", "-m", "fedtta.watch"]
    options = program.parser().parse_args(words[3:])
    host, port = program.address(options.listen)
    assert job["static_configs"] == [{"targets": [f"watch:{port}"]}]
    assert host == "0.0.0.0"
    assert SERVICES["watch"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert SERVICES["watch"]["healthcheck"]["test"][-1] == f"https://localhost:{port}/"
    assert job["scheme"] == ("https" if options.key else "http")
    assert job["authorization"] == {"credentials_file": str(options.token_file)}
    assert job["tls_config"] == {"ca_file": str(options.root_certificates), "server_name": "localhost"}
    assert job["tls_config"]["server_name"] in LOCAL  # of every certificate
    mounts = dict(volume.split(":", 1) for volume in SERVICES["watch"]["volumes"])
    assert mounts["results"] == f"{options.results}:ro"


def test_the_token_of_the_readme_opens_the_metrics(tmp_path: Path) -> None:
    assert "openssl rand -hex 32 > keys/watch.token" in (DOCKER / "README.md").read_text(encoding="utf-8")
    (tmp_path / "watch.token").write_text("5e" * 32 + "\n")
    token = read_token(tmp_path / "watch.token")
    routers = [metrics.router(tmp_path, Fleet(tmp_path).devices)]
    with TestClient(make_app(tmp_path, Access(token, loopback=False, secure=True), routers)) as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers={"authorization": f"Bearer {token}"}).status_code == 200


def test_grafana_has_no_login_and_only_what_is_provisioned() -> None:
    service = SERVICES["grafana"]
    environment = service["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    for name in ("GF_AUTH_ANONYMOUS_ENABLED", "GF_AUTH_DISABLE_LOGIN_FORM",
                 "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION", "GF_SERVER_ENFORCE_DOMAIN"):  # fmt: skip
        assert environment[name] == "true"
    places = {one["source"]: one["target"] for one in service["configs"]}
    provider = yaml.safe_load((DOCKER / "observe/dashboards.yaml").read_text())["providers"][0]
    assert str(Path(places["dashboard"]).parent) == provider["options"]["path"]
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == places["dashboard"]
    for kind in ("datasource", "dashboards"):
        folder = {"datasource": "datasources"}.get(kind, kind)
        assert places[kind].startswith(f"/etc/grafana/provisioning/{folder}/")
        assert places[kind].endswith(".yaml")
    source = yaml.safe_load((DOCKER / "observe/datasource.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert set(SERVICES["prometheus"]["networks"]) & set(service["networks"])
    for name, one in COMPOSE["configs"].items():
        assert "content" in one or (DOCKER / one["file"]).is_file(), name


@pytest.mark.parametrize(("status", "code"), [(200, 0), (401, 0), (404, 1), (500, 1)])
def test_the_health_of_a_page(status: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """One that asks for a token serves; one that nothing listens for does not."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    ask = runpy.run_path(str(DOCKER / "health.py"))["ask_page"]
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert ask(address, 10.0, None) == code
        thread.join()
    assert str(status) in capsys.readouterr().out
    assert ask(address, 0.3, None) == 1
    assert ask("https://localhost:port/", 0.3, None) == 1
    assert "nonnumeric port" in capsys.readouterr().err


def test_the_health_of_a_page_that_starts_late() -> None:
    ask = runpy.run_path(str(DOCKER / "health.py"))["ask_page"]
    with socket.socket() as late, ThreadPoolExecutor(1) as pool:
        late.settimeout(60)
        late.bind(("127.0.0.1", 0))  # which does not listen yet
        asked = pool.submit(ask, f"http://127.0.0.1:{late.getsockname()[1]}/", 60.0, None)
        time.sleep(0.3)
        late.listen()
        connection, _ = late.accept()
        with connection:
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        assert asked.result() == 0


def test_a_standing_run_asks_the_devices() -> None:
    """Its telemetry comes into the folder that the pages' server reads."""
    words = SERVICES["devices"]["command"]
    assert words[:4] == ["python", "-m", "fedtta", "devices"]
    group: Any = get_command(cli.app)
    options = group.commands["devices"].make_context("devices", words[4:]).params
    assert options["watch"]
    assert Path(options["results"]) == program.parser().parse_args(SERVICES["watch"]["command"][3:]).results
    assert Path(options["root"]) == Path("/run/secrets/ca.crt")


def test_nothing_of_the_profile_starts_without_it() -> None:
    assert set(SERVICES) == {"watch", "devices", "prometheus", "grafana"}
    others = COMPOSE["services"].keys() - SERVICES.keys()
    assert not any(set(COMPOSE["services"][name].get("depends_on", {})) & set(SERVICES) for name in others)
