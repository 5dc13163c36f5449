"""Section of the page on the clients: their data, who came and went, and what their agents did with the model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from fedtta.server.report.events import Membership
from fedtta.server.report.journal import METRICS_FILE
from fedtta.server.report.markup import breakable, counted, data_table, folded, missing, text
from fedtta.server.report.results import Member, Results
from fedtta.settings import name_order

LISTED = 50  # clients and incidents shown; the metrics file has them all
UNFOLDED = 12  # parts of a divided data set that are listed without being asked for
WORDS = {"joined": "joined", "left": "left", "rejoined": "came back", "left_alone": "left alone"}


def data_section(results: Results) -> str:
    """Return the section on the data of the clients, with the clients that joined, left or were left alone."""
    title = "<h2>Data of the clients</h2>"
    if results.clients is None:
        return title + missing("The run has not recorded its clients.")
    members = sorted(results.members.values(), key=lambda member: name_order(member.name))
    counts = _class_counts(results, members)
    return title + _sizes(members) + _data_table(members) + _notes(members) + counts + _memberships(results)


def served_table(results: Results) -> str:
    """Return the table of what the agents did with the models that they got; empty without agents."""
    body = [
        [breakable(results.name(entry.partition)), breakable(entry.training), text(entry.served)]
        for entry in results.served[:LISTED]
    ]
    caption = "<strong>Model of each agent</strong>: what it did with the one it got." + _first(len(results.served))
    return data_table(["client", "training", "model"], body, caption, kind="text") if body else ""


def _sizes(members: Sequence[Member]) -> str:
    """Return one sentence on the numbers of samples."""
    totals = [sum(member.sizes) for member in members]
    if not totals:
        return ""
    train, validation, test = (sum(member.sizes[part] for member in members) for part in range(3))
    low, high = min(totals), max(totals)
    median = f"{low:,} to {high:,} samples (median {statistics.median(totals):,.0f})"
    return (
        f"<p>{counted(len(totals), 'client')} with {median if low < high else f'{low:,} samples each'}; in total "
        f"{train:,} for training, {validation:,} for validation, {test:,} for testing.</p>"
    )


def _data_table(members: Sequence[Member]) -> str:
    """Return the table of each client's samples; long ones of a divided data set are folded."""
    head = ["client", "data", "role", "samples", "training", "validation", "test", "skipped", "classes"]
    body = [
        [
            breakable(member.name),
            _kind(member),
            text(member.role),
            f"{_samples(member):,}",
            *(f"{size:,}" for size in member.sizes),
            f"{member.data.get('skipped', 0):,}",
            _classes(member),
        ]
        for member in members[:LISTED]
    ]
    caption = (
        "<strong>Data of each client.</strong> Skipped: files that cannot be used. Classes: how many occur in its "
        f"training split.{_first(len(members))}"
    )
    table = data_table(head, body, caption, kind="cards") if body else ""
    own_data = any(member.data.get("own_data") for member in members)
    return table if own_data or len(members) <= UNFOLDED else folded("Data of each client", table)


def _kind(member: Member) -> str:
    labels = "" if member.labelled else ", no labels"
    return ("its own" if member.data.get("own_data") else "part of the data set") + labels


def _samples(member: Member) -> int:
    return int(member.data.get("samples") or sum(member.sizes))


def _classes(member: Member) -> str:
    """Return how many classes a client has, as far as that is known."""
    if not member.labelled:
        return "no labels"
    present = member.data.get("classes_present")
    if present is None and member.counts is not None:
        present = sum(count > 0 for count in member.counts)
    return "unknown" if present is None else str(present)


def _notes(members: Sequence[Member]) -> str:
    """Return the clients' own notes, such as the files that were skipped, by reason."""
    lines = [
        f"<li><strong>{escape(member.name)}</strong>: {escape('; '.join(map(str, notes)))}</li>"
        for member in members[:LISTED]
        if (notes := member.data.get("notes"))
    ]
    return f'<ul class="small">{"".join(lines)}</ul>' if lines else ""


def _class_counts(results: Results, members: Sequence[Member]) -> str:
    """Return the folded table of samples of each class, which only a simulation knows."""
    known = [member for member in members if member.counts is not None]
    if not known or results.clients is None:
        return missing("Class counts stay on the devices.")
    body = [
        [
            f"{breakable(member.name)} {escape(member.role)}" if member.role != "both" else breakable(member.name),
            *map(str, member.counts or []),
        ]
        for member in known[:LISTED]
    ]
    caption = f"<strong>Samples of each class</strong> by client.{_first(len(known))}"
    head = ["client", *(breakable(str(name)) for name in results.clients.classes)]
    return folded("Samples of each class", data_table(head, body, caption))


def _memberships(results: Results) -> str:
    """Return the table of the clients that joined, left or came back, and the nodes that take no part."""
    events = results.memberships
    if not events:
        return ""
    body = [
        [WORDS[entry.event], _who(results, entry), _when(entry), text(entry.node_id), text(entry.reason)]
        for entry in events[:LISTED]
    ]
    caption = (
        f"<strong>Clients that came and went</strong>, and nodes that take no part.{_first(len(events), 'events')}"
    )
    return data_table(["", "client", "when", "node", "reason"], body, caption, kind="text")


def _who(results: Results, entry: Membership) -> str:
    name = entry.name or ("" if entry.partition is None else results.name(entry.partition))
    return breakable(name) if name else "–"


def _when(entry: Membership) -> str:
    return "at the start" if entry.round is None else escape(f"{entry.training}, round {entry.round}")


def _first(number: int, noun: str = "clients") -> str:
    return f" The first {LISTED} {noun}; all are in {METRICS_FILE}." if number > LISTED else ""
