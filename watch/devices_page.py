"""The page "Devices": a table of the fleet, and a page for each device with what it has said over time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from fedtta.messages.record import NAME_LENGTH, printable
from fedtta.messages.replies import WEIGHT_WINDOW, Telemetry
from fedtta.server.report.markup import (
    breakable,
    counted,
    data_table,
    definitions,
    duration,
    missing,
    section,
    size,
    text,
)
from fedtta.watch.alerts import Alert
from fedtta.watch.alerts import section as alerts_section
from fedtta.watch.charts import Point, line_chart, sparkline
from fedtta.watch.fleet import FleetDevice, history, latency
from fedtta.watch.layout import View, page
from fedtta.watch.listing import Fleet

PATH = "/devices"
LISTED = 500  # devices of the table
WORDS = 50  # characters of a device's text in the table
POINTS = 200  # of a series over time
STALE = 600.0  # seconds after which the age of telemetry is shown
SECONDS = 5.0  # between two updates
HOW = "No telemetry yet. A run with observe-every = 60 collects it; without a run, `fedtta devices --watch` does."
#: Status → class of the style sheet; the word itself says what it is.
CLASSES = {"online": "state-answered", "offline": "state-gone"}
HEAD = (
    "device", "status", "last seen", "guard", "weight e", "accuracy, estimated", "drift", "samples", "model",
    "new model", "adapter", "latency", "disk", "memory", "software",
)  # fmt: skip
#: Caption, value, range (None: that of the values) and format of the series of a device's page.
SERIES: tuple[
    tuple[str, Callable[[Telemetry], float | None], tuple[float, float] | None, Callable[[float], str]], ...
] = (
    ("Weight e of the global head", lambda one: one.weight, (0, 1), "{:.2f}".format),
    ("Estimated accuracy", lambda one: one.estimated_accuracy, (0, 1), "{:.0%}".format),
    ("Drift", lambda one: one.drift, (0, 1), "{:.2f}".format),
    ("Guard holds", lambda one: float(one.holding), (0, 1), "{:.0f}".format),
    ("Samples seen by the adapter", lambda one: float(one.samples), None, "{:,.0f}".format),
    (
        "Latency, 95th percentile since the agent began",
        lambda one: latency(one, 0.95),
        None,
        lambda seconds: _milliseconds(seconds),
    ),
    ("Memory", lambda one: one.memory or None, None, size),
    ("Disk used", lambda one: one.disk_used if one.knows_disk else None, None, size),
)


def router(
    fleet: Fleet, clock: Callable[[], float] = time.time, alerts: Callable[[], Sequence[Alert]] | None = None
) -> APIRouter:
    """Return the routes `/devices` and `/devices/<name>`.

    Parameters
    ----------
    fleet : Fleet
    clock : callable
        Seconds since the epoch.
    alerts : callable, optional
        Returns the alerts that last; None: there are no rules.
    """
    made = APIRouter()

    async def overview(request: Request) -> Response:
        found = None if alerts is None else alerts()
        view = await run_in_threadpool(lambda: overview_page(fleet.devices(), fleet.problem, clock(), found))
        return view.respond(request)

    async def details(request: Request, name: str) -> Response:
        view = await run_in_threadpool(_details, fleet, name, clock)
        return _missing(request) if view is None else view.respond(request)

    for path, answer in ((PATH, overview), (f"{PATH}/{{name:path}}", details)):
        made.add_api_route(path, answer, methods=["GET", "HEAD"], response_model=None)
    return made


def _missing(request: Request) -> Response:
    words = f'<h1>Not found</h1><p>There is no such device. <a href="{PATH}">All devices</a></p>'
    return page(request, "Not found", f'<main id="page">{words}</main>', status=404)


def _details(fleet: Fleet, name: str, clock: Callable[[], float]) -> View | None:
    """Return the page of the device that was seen last of those with this name; None if there is none."""
    found = [one for one in fleet.devices() if one.name == name]
    if not found:
        return None
    device = max(found, key=lambda one: one.last_seen or 0.0)
    listed = device.node_id if device.status != "unknown" else None
    return device_page(device, history(fleet.folder, name, POINTS, listed), clock())


def overview_page(
    devices: Sequence[FleetDevice], problem: str, now: float, alerts: Sequence[Alert] | None = None
) -> View:
    """Return the page of all devices.

    Parameters
    ----------
    devices : sequence of FleetDevice
    problem : str
        Why the SuperLink's list is missing or old; may be empty.
    now : float
        Seconds since the epoch.
    alerts : sequence of Alert, optional
        None: there are no rules.
    """
    warning = f'<p class="warning">The list of the SuperLink cannot be had: {escape(problem)}</p>' if problem else ""
    hint = missing(HOW) if not any(one.telemetry for one in devices) else ""
    summary = f'<h1>Devices</h1><p class="lead">{_summary(devices)}</p>{warning}{hint}'
    sections = {"devices-summary": section("devices-summary", summary)}
    if alerts is not None:
        sections["alerts"] = alerts_section(alerts)
    if devices:
        more = f" The first {LISTED} of {len(devices):,}." if len(devices) > LISTED else ""
        caption = (
            "<strong>Devices</strong> by name; each name leads to what the device said over time. Weight e: of the "
            f"global head, means over {WEIGHT_WINDOW} images. Drift: how far the classes predicted lately are from "
            f"those at the model's evaluation, 0 to 1. Latency: median and 95th percentile since the agent began.{more}"
        )
        rows = [_row(one, now) for one in devices[:LISTED]]
        sections["devices"] = section("devices", data_table(HEAD, rows, caption, kind="cards text"))
    return View("Devices", sections, seconds=SECONDS)


def _summary(devices: Sequence[FleetDevice]) -> str:
    status = Counter(one.status for one in devices)
    known = [one.telemetry for one in devices if one.telemetry]
    facts = {
        **{name: status[name] for name in ("online", "offline")},
        "not connected yet": status["registered"],
        "held by the guard": sum(one.holding for one in known),
        "with a model that waits": sum(bool(one.candidate) for one in known),
        "cannot save": sum(one.saving_fails for one in known),
    }
    parts = [counted(len(devices), "device"), *(f"{number:,} {words}" for words, number in facts.items() if number)]
    return " · ".join(parts)


def _row(device: FleetDevice, now: float) -> list[str]:
    """Return the cells of a device as HTML."""
    name = f'<a href="{PATH}/{quote(device.name, safe="")}">{breakable(printable(device.name, NAME_LENGTH))}</a>'
    first = [name, _status(device), _seen(device, now)]
    one = device.telemetry
    if one is None:
        return first + ["–"] * (len(HEAD) - len(first))
    cells = [
        _guard(one),
        _weight(one),
        _share(one.estimated_accuracy),
        text(None if one.drift is None else f"{one.drift:.2f}"),
        f"{one.samples:,}",
        text(printable(one.model, WORDS)),
        text(printable(one.candidate, WORDS)),
        text(printable(f"{one.adapter}: {one.choice}" if one.choice else one.adapter, WORDS)),
        _latency(one),
        f"{size(one.disk_used)}, {size(one.disk_free)} free" if one.knows_disk else "–",
        size(one.memory) if one.memory else "–",
        text(one.software.get("fedtta")),
    ]
    return [*first, *(f"<span>{cell}</span>" for cell in cells)]


def _status(device: FleetDevice) -> str:
    words = "not connected yet" if device.status == "registered" else device.status
    return f'<span class="{CLASSES.get(device.status, "state-idle")}">{words}</span>'


def _seen(device: FleetDevice, now: float) -> str:
    if device.last_seen is None:
        return "–"
    seen = f'<time datetime="{_moment(device.last_seen)}">{_ago(now - device.last_seen)}</time>'
    old = device.telemetry_at is not None and now - device.telemetry_at > STALE
    if not old or device.telemetry_at == device.last_seen:
        return seen
    return f'<span>{seen} <span class="sd">telemetry {_ago(now - (device.telemetry_at or 0.0))}</span></span>'


def _weight(one: Telemetry) -> str:
    if one.weight is None and not one.weights:
        return "–"
    last = one.weight if one.weight is not None else one.weights[-1]
    title = (
        f"Weight e of the global head over time: {min(one.weights):.2f} to {max(one.weights):.2f}"
        if one.weights
        else ""
    )
    return f"{last:.2f} {sparkline(one.weights, title)}" if len(one.weights) > 1 else f"{last:.2f}"


def _guard(one: Telemetry) -> str:
    state = '<strong class="state-gone">holds</strong>' if one.holding else "free"
    events = sum(one.guard_events.values())
    return f"{state}, {counted(events, 'event')}" if events else state


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def _latency(one: Telemetry) -> str:
    found = [latency(one, share) for share in (0.5, 0.95)]
    return " / ".join("–" if value is None else _milliseconds(value) for value in found) if any(found) else "–"


def _milliseconds(seconds: float) -> str:
    small = seconds < 0.9995  # which reads 1 s, and 1e+03 ms
    return f"{1000 * seconds:.3g}\N{NO-BREAK SPACE}ms" if small else f"{seconds:.3g}\N{NO-BREAK SPACE}s"


# The page of a device


def device_page(device: FleetDevice, past: Sequence[tuple[float, Telemetry]], now: float) -> View:
    """Return the page of a device.

    Parameters
    ----------
    device : FleetDevice
    past : sequence of (float, Telemetry)
        Its last telemetry as (seconds since the epoch, telemetry), oldest first.
    now : float
        Seconds since the epoch.
    """
    name, one = printable(device.name, NAME_LENGTH), device.telemetry
    state = definitions([("Status", _status(device)), ("Last seen", _seen(device, now))], "facts")
    parts = {
        "device": f'<p class="kicker"><a href="{PATH}">Devices</a></p><h1>{escape(name)}</h1>{state}',
        "device-now": missing(HOW) if one is None else f"<h2>Now</h2>{definitions(_facts(one, device), 'facts')}",
    }
    if one is not None:
        parts["device-series"] = f"<h2>Over time</h2>{_series(one, past)}"
        parts["device-guard"] = f"<h2>Guard</h2>{_events(one)}"
        parts["device-software"] = f"<h2>Software</h2>{_software(one)}"
    return View(name, {key: section(key, content) for key, content in parts.items()}, seconds=SECONDS)


def _facts(one: Telemetry, device: FleetDevice) -> list[tuple[str, str]]:
    telemetry = _moment(device.telemetry_at) if device.telemetry_at is not None else None
    return [
        ("Telemetry", text(telemetry)),
        ("Node", text(device.node_id)),
        ("Running for", duration(one.uptime) if one.uptime else "–"),
        ("Model", text(one.model)),
        ("New model", text(one.candidate)),
        ("Last refused model", text(one.refused)),
        ("Adapter", text(one.adapter)),
        ("Its choice", text(one.choice)),
        ("Federated request", text(one.phase)),
        ("Images predicted", f"{one.predictions:,}"),
        ("Requests refused", f"{one.refusals:,}"),
        ("Samples seen by the adapter", f"{one.samples:,}, {one.unsaved_samples:,} in no snapshot"),
        ("State", "cannot be saved" if one.saving_fails else "saved"),
        ("Weight e", _weight(one)),
        ("Accuracy, estimated", _share(one.estimated_accuracy)),
        ("Drift", text(None if one.drift is None else f"{one.drift:.2f}")),
        ("Guard", _guard(one)),
        ("Own data", f"{counted(one.data_samples, 'file')}, {one.data_skipped:,} skipped"),
        ("Disk", f"{size(one.disk_used)} used, {size(one.disk_free)} free" if one.knows_disk else "–"),
        ("Memory", size(one.memory) if one.memory else "–"),
        ("Latency, median / 95th percentile", _latency(one)),
    ]


def _series(one: Telemetry, past: Sequence[tuple[float, Telemetry]]) -> str:
    """Return a chart of each series that has values, and one of the weights by images instead of time."""
    charts = []
    for caption, value, limits, words in SERIES:
        points: list[Point] = [(at, value(then)) for at, then in past]
        if any(known is not None for _, known in points):
            charts.append(line_chart(caption, points, words, limits, _moment))
    if one.weights:
        means = enumerate(one.weights, start=-len(one.weights))
        weights: list[Point] = [(WEIGHT_WINDOW * number, value) for number, value in means]
        caption = "Weight e of the global head, by images before now"
        charts.append(line_chart(caption, weights, "{:.2f}".format, (0, 1), lambda images: f"{-images:,.0f}"))
    if not charts:
        return missing("Nothing has been recorded over time.")
    grid = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr));gap:0 1.5rem"
    return f'<div style="{grid}">{"".join(charts)}</div>'


def _events(one: Telemetry) -> str:
    state = "The guard holds: predictions are those of the unadapted model." if one.holding else "The guard is free."
    rows = [[breakable(kind), f"{number:,}"] for kind, number in sorted(one.guard_events.items())]
    table = data_table(["event", "times"], rows, "<strong>Times that the guard has acted.</strong>") if rows else ""
    return f"<p>{state}</p>{table}"


def _software(one: Telemetry) -> str:
    rows = [[breakable(name), escape(version)] for name, version in sorted(one.software.items())]
    return data_table(["package", "version"], rows, "<strong>Software.</strong>") if rows else missing("Unknown.")


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))


def _ago(seconds: float) -> str:
    """Format an age in its largest unit, so that the page changes seldom."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length):,} {unit} ago"
    return "just now"
