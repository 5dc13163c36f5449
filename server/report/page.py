"""`report.html`: one self-contained page about a run, without scripts or external resources.

`build_page` is a pure function of the results so far. The live page of `fedtta.watch` has the same sections. A section
without data says so, or is left out if the run is not of its kind.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fedtta.server.report import plots
from fedtta.server.report.accuracy import accuracy_section, client_section, collaboration_section
from fedtta.server.report.clients import LISTED as _INCIDENTS
from fedtta.server.report.clients import data_section, served_table
from fedtta.server.report.collaboration import Matrix, matrix
from fedtta.server.report.drawing import Plot, plot_figure
from fedtta.server.report.events import AdaptRound, RatesRound, Round
from fedtta.server.report.journal import METRICS_FILE
from fedtta.server.report.markup import (
    breakable,
    counted,
    data_table,
    definitions,
    document,
    duration,
    folded,
    instant,
    missing,
    section,
    size,
    text,
)
from fedtta.server.report.rates import block_of, module_type, variant_labels
from fedtta.server.report.results import Results, read_results
from fedtta.server.report.scores import Row, percent, table
from fedtta.server.report.tables import COLLABORATION_FILE, write_collaboration
from fedtta.settings import Settings
from fedtta.settings.files import write_atomically

REPORT_FILE = "report.html"
MODEL_FILE = "model.safetensors"
_FLOAT32 = 4  # bytes
_UNCOMPRESSED = ("–", "–", "–")  # columns of what compressed updates save and cost


def write_report(run_dir: Path) -> Path:
    """Write `report.html` of a run folder atomically and return its path.

    A run with collaborative rounds at test time also gets `collaboration.csv`.

    Raises
    ------
    FileNotFoundError
        The folder has no metrics.
    ValueError
        A line of the metrics is invalid; the message names file and line.
    """
    results = read_results(run_dir / METRICS_FILE)
    write_collaboration(results, run_dir / COLLABORATION_FILE)
    page = build_page(results, run_dir.resolve().name, network_bytes_of(run_dir))
    return write_atomically(run_dir / REPORT_FILE, page.encode())


def network_bytes_of(run_dir: Path) -> int | None:
    """Return the size of a run's network file; None before it is written."""
    model = run_dir / MODEL_FILE
    return model.stat().st_size if model.exists() else None


def build_page(results: Results, name: str, network_bytes: int | None = None) -> str:
    """Return the page as HTML; parameters are those of `build_sections`."""
    sections = build_sections(results, name, network_bytes)
    return document(f"{name} · FedTTA", "<main>\n" + "\n".join(sections.values()) + "\n</main>")


def build_sections(results: Results, name: str, network_bytes: int | None = None) -> dict[str, str]:
    """Return id → section of the page as HTML, in order.

    Parameters
    ----------
    results : Results
        All that the run has written so far.
    name : str
        Name of the run.
    network_bytes : int, optional
        Size of the network, shown next to the traffic.
    """
    found = matrix(results)
    contents = {
        "summary": _header(results, name),
        "accuracy": accuracy_section(results) if results.evaluations or found is None else "",
        "collaboration": collaboration_section(results, found),
        "client-accuracy": client_section(results),
        "weights": _weights(results),
        "rates": _rates(results),
        "training": _training(results),
        "clients": data_section(results),
        "time": _time(results, found, network_bytes),
        "checks": _checks(results),
        "settings": _settings(results),
        "source": f"<footer>Generated from {METRICS_FILE} by python -m fedtta.server.report results/{escape(name)}"
        "</footer>",
    }
    return {key: section(key, content) for key, content in contents.items() if content}


# Header


def _header(results: Results, name: str) -> str:
    number = len(results.members) if results.clients else results.setting("clients")
    rounds = len({entry.round for entry in results.rounds})
    parts = [
        "devices' own data" if _own_data(results) else escape(str(results.setting("dataset") or "")),
        escape(str(results.setting("model") or "")),
        counted(number, "client") if isinstance(number, int) else "",
        counted(rounds, "round") if rounds else "",
        f"seed {text(results.setting('seed'))}" if results.setting("seed") is not None else "",
    ]
    state = ""
    if results.end is None:
        state = missing("This run has not ended. The page shows its results so far.")
    elif results.end.status != "completed":
        state = f'<p class="warning">This run ended with status “{escape(results.end.status)}”.</p>'
    lead = " · ".join(part for part in parts if part)
    return (
        f'<header><p class="kicker">FedTTA run</p><h1>{escape(name)}</h1><p class="lead">{lead}</p>'
        f"{state}{_best_method(table(results))}{_facts(results)}</header>"
    )


def _own_data(results: Results) -> bool:
    """Return whether clients have data of their own: as they say, or as the settings say before any of them does."""
    if results.members:
        return any(member.data.get("own_data") for member in results.members.values())
    return bool(results.setting("devices") or results.setting("classes"))


def _best_method(rows: list[Row]) -> str:
    """Name the methods with the highest average, and the next one."""
    ranked = sorted((row for row in rows if row.average is not None), key=lambda row: -(row.average or 0))
    if not ranked:
        return ""
    top = percent(ranked[0].average)
    leaders = [row for row in ranked if percent(row.average) == top]
    names = " and ".join(f"<strong>{escape(row.label)}</strong>" for row in leaders)
    rest = ranked[len(leaders) :]
    behind = f"; next is {escape(rest[0].label)} with {percent(rest[0].average)} %" if rest else ""
    return (
        f'<p class="finding">Highest average accuracy: {names} with <strong>{top} %</strong> over '
        f"{counted(len(ranked[0].cells), 'distribution')}{behind}. One run, one seed.</p>"
    )


def _facts(results: Results) -> str:
    run, end = results.run, results.end
    facts = [("Started", text(instant(run.time)))] if run else []
    facts += [("Wall time", duration(end.seconds))] if end else []
    if run:
        versions = ", ".join(f"{name}\N{NO-BREAK SPACE}{version}" for name, version in run.versions.items())
        code = [("Commit", run.commit), ("App bundle", run.bundle)]
        facts += [(name, text(value)) for name, value in code if value] or [("Commit", "not recorded")]
        facts += [("Hardware", text(run.hardware)), ("Versions", text(versions))]
    return definitions(facts, "facts") if facts else missing("Time, hardware and versions were not recorded.")


# Weights, rates and training


def _figure_section(title: str, plot: Plot | None, caption: str, *more: str) -> str:
    """Return a section around a plot; empty without one."""
    return "".join([f"<h2>{title}</h2>", plot_figure(plot, caption), *more]) if plot else ""


def _weights(results: Results) -> str:
    caption = (
        "<strong>Weight e of the global head</strong>, chosen for each test sample: 0 is the personal head alone, 1 "
        "the global head alone. Shares of all clients' samples; line and number are the mean."
    )
    return _figure_section("Weight of the global head", plots.weight_histograms(results), caption)


def _rates(results: Results) -> str:
    caption = (
        "<strong>Learned adaptation rates</strong>, a dot for each module; bars are means. Above the size, below with "
        "the sign: a negative rate moves against the direction found without labels."
    )
    sizes = {name: number for entry in results.rates for name, number in entry.sizes.items()}
    blocks = block_of(list(sizes))
    body = [
        [escape(name), escape(blocks[name]), module_type(name, sizes), f"{number:,}"]
        + [f"{entry.rates.get(name, 0):+.4g}" if entry.rates.get(name) else "0" for entry in results.rates]
        for name, number in sizes.items()
    ]
    labels = variant_labels((entry.training, entry.variant) for entry in results.rates).values()
    head = ["module", "block", "type", "values", *map(breakable, labels)]
    details = data_table(head, body, "<strong>All rates</strong>, in the network's order of definition.")
    plot = plots.rates_by_module(results)
    return _figure_section("Adaptation rates", plot, caption, folded(f"All {counted(len(sizes), 'rate')}", details))


def _training(results: Results) -> str:
    plot = plots.training_curves(results)
    if plot is None:
        return "<h2>Training</h2>" + missing("No round was trained in this run.")
    caption = (
        "<strong>Training curves.</strong> Left: validation accuracy, mean over clients, of the global model as "
        "received in each round (the result of the last round is not in it); dashed: personal heads. Right: training "
        "loss."
    )
    if results.rates_rounds:
        caption += " Rates: accuracy and loss on source clients after adaptation with the rates received."
    diverged = [
        f"{entry.training}, round {entry.round}"
        for entry in results.rounds
        if entry.train_loss is not None and not math.isfinite(entry.train_loss)
    ]
    warning = f'<p class="warning">Training loss not finite: {escape("; ".join(diverged))}.</p>' if diverged else ""
    return "<h2>Training</h2>" + warning + plot_figure(plot, caption)


# Time, checks and settings


def local_training_seconds(entry: Round, workers: int | None) -> float:
    """Return the part of a round's wall time that local training explains.

    For clients simulated by `workers`: the sum over clients divided by the number of workers, or of clients if there
    are fewer. For clients on machines of their own (None): the time of the slowest client.
    """
    if not entry.train_seconds:
        return 0.0
    if workers is None:
        return min(max(entry.train_seconds), entry.wall_seconds)
    share = sum(entry.train_seconds) / min(workers, len(entry.train_seconds))
    return min(share, entry.wall_seconds)


def workers_of(results: Results) -> int | None:
    """Return the number of workers of a simulation; None in deployment, where class counts are unknown."""
    simulated = results.clients is not None and results.clients.class_counts is not None
    workers = results.setting("workers")
    return workers if simulated and isinstance(workers, int) and workers > 0 else None


def _time(results: Results, found: Matrix | None, network_bytes: int | None) -> str:
    title, workers = "<h2>Time and traffic</h2>", workers_of(results)
    body = []
    for training, rounds in results.by_training().items():
        local = statistics.fmean(local_training_seconds(entry, workers) for entry in rounds)
        body.append([breakable(training), *_costs(rounds), *_compression(rounds), f"{local:.2f}", "–", "–"])
    rates: dict[tuple[str, str], list[RatesRound]] = {}
    for entry in sorted(results.rates_rounds, key=lambda entry: entry.round):
        rates.setdefault((entry.training, entry.variant), []).append(entry)
    for pair, label in variant_labels(rates).items():
        context = statistics.fmean(entry.context_bytes for entry in rates[pair])
        body.append([f"rates: {breakable(label)}", *_costs(rates[pair]), *_UNCOMPRESSED, "–", "–", size(context)])
    for outcome in found.outcomes if found else []:
        pair = (outcome.method, outcome.collaboration)
        adapting = [entry for entry in results.adapt_rounds if (entry.method, entry.collaboration) == pair]
        adapting.sort(key=lambda entry: entry.round)
        if adapting:
            each = f"{1000 * outcome.seconds / outcome.total.sum():.2f}"
            context = statistics.fmean(entry.context_bytes for entry in adapting)
            body.append([breakable(outcome.label), *_costs(adapting), *_UNCOMPRESSED, "–", each, size(context)])
    if not body:
        return title + missing("No round has ended yet.")
    meaning = f"of all clients, divided by {counted(workers, 'worker')}" if workers else "of the slowest client"
    weights = max((_FLOAT32 * sum(entry.sizes.values()) for entry in results.rates), default=network_bytes)
    network = f" Size of the network: {size(weights)}." if weights else ""
    caption = (
        "<strong>Time and traffic of a round</strong>, means over rounds, bytes of all clients together. Local: time "
        f"of local training, {meaning}. Context: state of the clients that Flower ships with messages.{network}"
    )
    if any(entry.bytes_up_float32 is not None for entry in results.rounds):
        caption += (
            " In float32: bytes up without update-format. Trained, decoded: validation accuracy after local training, "
            "%, of the models as trained and as the server decoded them."
        )
    head = ["", "rounds", "s a round", "down, first", "down, later", "up", "up in float32", "trained, %", "decoded, %"]
    head += ["local, s", "ms a sample", "context"]
    shown = [column for column in range(len(head)) if any(row[column] not in ("–", "0 B") for row in body)]
    rows = [[row[column] for column in shown] for row in body]
    return title + data_table([head[column] for column in shown], rows, caption)


def _costs(rounds: Sequence[Round] | Sequence[RatesRound] | Sequence[AdaptRound]) -> list[str]:
    """Return number, mean time and mean traffic of rounds; the first may also carry the network."""
    later = [entry.bytes_down for entry in rounds[1:]] or [rounds[0].bytes_down]
    return [
        str(len(rounds)),
        f"{statistics.fmean(entry.wall_seconds for entry in rounds):.2f}",
        size(rounds[0].bytes_down),
        size(statistics.fmean(later)),
        size(statistics.fmean(entry.bytes_up for entry in rounds)),
    ]


def _compression(rounds: Sequence[Round]) -> list[str]:
    """Return the mean traffic up without compressed updates, and mean accuracies as trained and as decoded."""
    before = [entry.bytes_up_float32 for entry in rounds if entry.bytes_up_float32 is not None]
    pairs = [(entry.trained_accuracy, entry.decoded_accuracy) for entry in rounds]
    accuracies = [(one, other) for one, other in pairs if one is not None and other is not None]
    if not accuracies:
        return [size(statistics.fmean(before)) if before else "–", "–", "–"]
    trained, decoded = (statistics.fmean(one) for one in zip(*accuracies, strict=True))
    return [size(statistics.fmean(before)), percent(trained, 2), percent(decoded, 2)]


def _checks(results: Results) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in results.notes)
    return (
        f"<h2>Checks and incidents</h2>{_leaks(results)}{_incidents(results)}{served_table(results)}"
        f"{f'<p>Notes of the run:</p><ul>{notes}</ul>' if notes else ''}"
    )


def _leaks(results: Results) -> str:
    if not results.leak_checks:
        return missing("No leak check was recorded.")
    clean = sum(check.checked for check in results.leak_checks if not check.leaked)
    published = results.setting("split") == "published"
    what = "Leak on purpose, split = published" if published else "Leak check failed"
    good = f'<p class="good">Leak check by index: none of {clean:,} test samples was trained on.</p>'
    lines = [good] if clean else []
    for check in results.leak_checks:
        if check.leaked:
            of = f" ({escape(check.training)})" if check.training else ""
            words = f"{check.leaked:,} of {check.checked:,} test samples were trained on."
            lines.append(f'<p class="warning">{what}{of}: {words}</p>')
    return "".join(lines)


def _incidents(results: Results) -> str:
    if not results.incidents:
        return '<p class="good">Every reply was accepted: none refused, limited, failed or late.</p>'
    totals = Counter(entry.event for entry in results.incidents)
    body = [
        [text(getattr(entry, name)) for name in ("event", "training", "round")]
        + [text(None if entry.partition is None else results.name(entry.partition))]
        + [text(entry.node_id), text(entry.reason)]
        for entry in results.incidents[:_INCIDENTS]
    ]
    left_out = len(results.incidents) - len(body)
    more = f" The first {_INCIDENTS} are listed, {left_out:,} more are in {METRICS_FILE}." if left_out else ""
    summary = ", ".join(f"{number:,} {event}" for event, number in totals.items())
    caption = f"<strong>Replies that did not count as they were sent:</strong> {summary}.{more}"
    return data_table(["event", "training", "round", "client", "node", "reason"], body, caption, kind="text")


def _settings(results: Results) -> str:
    """List the settings that differ from the defaults, and fold the others away."""
    if results.run is None:
        return "<h2>Settings</h2>" + missing("The run has not recorded its settings.")
    defaults = {one.name: one.default for one in dataclasses.fields(Settings)}
    changed: list[tuple[str, str]] = []
    unchanged: list[tuple[str, str]] = []
    for name, value in results.run.settings.items():
        key = str(name).replace("-", "_")
        item = escape(str(name)), breakable(str(value)) if isinstance(value, str) and value else text(value)
        (unchanged if key in defaults and defaults[key] == value else changed).append(item)
    first = definitions(changed, "settings") if changed else "<p>Every setting has its default.</p>"
    resumed = f"<p>Started {counted(results.starts, 'time')}: the run was resumed.</p>" if results.starts > 1 else ""
    rest = folded(
        f"{counted(len(unchanged), 'setting')} at the default", definitions(unchanged, "settings") if unchanged else ""
    )
    lead = '<p class="small">Settings that differ from the default:</p>' if changed else ""
    return f"<h2>Settings</h2>{lead}{first}{resumed}{rest}"
