"""Markdown of tables, and of any JSON object as headings, tables and lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Keys of a result file that say when and where it was measured, in the order in which they are shown.
PROVENANCE = ("time", "commit", "hardware", "load_average", "versions")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; what would be markup outside code spans is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(str(cell)) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("*", "\\*") for part in parts[::2]]  # outside code spans
    return "`".join(parts)


def as_markdown(content: Mapping[str, Any], level: int = 2) -> str:
    """Return any JSON object as headings, tables and lists; what was measured first, where and when last.

    Lists of objects and objects of similar objects become tables, other objects sections, single values a list.
    """
    parts, single = [], []
    for key, value in content.items():
        if key in (*PROVENANCE, "settings", "title"):
            continue
        if rows := _rows(value):
            names = list(dict.fromkeys(name for row in rows for name in row))
            body = table(names, [[value_text(row.get(name, "")) for name in names] for row in rows])
        elif isinstance(value, Mapping) and value:
            body = as_markdown(value, level + 1)
        else:
            single.append(f"- {key}: {value_text(value)}")
            continue
        parts.append((f"{'#' * min(level, 6)} {_heading(key, value)}", body))
    alone = len(parts) == 1 and level > 2  # the heading above says what it is
    found = [body if alone else f"{heading}\n\n{body}" for heading, body in parts]
    if single:
        found.insert(0, "\n".join(single))
    if provenance := [value_text(content[key]) for key in PROVENANCE if key in content]:
        found.append(f"Measured: {'; '.join(provenance)}.")
    return "\n\n".join(found)


def _heading(key: str, value: Any) -> str:
    title = value.get("title") if isinstance(value, Mapping) else None
    return f"{title} (`{key}`)" if title else str(key)


def _rows(value: Any) -> list[dict[str, Any]]:
    """Return the rows of a table that a value is: a list of objects, or an object of flat objects; else nothing."""
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        return [_flat(one) for one in value]
    parts = list(value.values()) if isinstance(value, Mapping) else []
    flat = [isinstance(one, Mapping) and not any(isinstance(x, (list, Mapping)) for x in one.values()) for one in parts]
    if len(parts) > 1 and all(flat):
        return [{"": name, **one} for name, one in value.items()]
    return []


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return an object without objects in it: keys and list indices are separated by dots."""
    found: dict[str, Any] = {}
    for key, one in value.items():
        if isinstance(one, list) and any(isinstance(part, Mapping) for part in one):
            one = dict(enumerate(one))
        found.update(_flat(one, f"{before}{key}.") if isinstance(one, Mapping) else {f"{before}{key}": one})
    return found


def value_text(value: Any) -> str:
    """Return a value of a JSON object as words."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(value_text(one) for one in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {value_text(one)}" for key, one in value.items())
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)
