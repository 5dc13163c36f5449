"""Logs of servers and agents: text for people, or one JSON object a line for programs.

Each JSON line has `time` (ISO 8601, UTC), `level`, `logger` and `message`, and where they are known `run`, `round`,
`device` and `version` (of the model). Passwords in URLs and private keys in PEM are left out of both formats.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
TEXT = "%(asctime)s %(levelname)s %(message)s"
OURS, FLOWER = "fedtta", "flwr"  # the loggers that a log's level is for

Fields = Callable[[], Mapping[str, Any]]

#: User and password: after a colon up to the last @, as a password may have / and @; else up to the last @ before a /.
_PASSWORD = re.compile(r"""(?<=://)([^/\s"'@:]*:((?!://)[^\s"'])+|[^/\s"']+)(?=@)""")
_PRIVATE_KEY = re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(-----END \1-----|$)", re.DOTALL)
_context: ContextVar[Mapping[str, Any]] = ContextVar("fields of log lines", default={})  # noqa: B039 (never changed)


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Add fields to each line that this thread writes in the block."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def line_of(level: int, logger: str, message: str, fields: Mapping[str, Any], seconds: float | None = None) -> str:
    """Return a log line as a JSON object, without a line break.

    Parameters
    ----------
    level : int
        As the standard library counts them.
    fields : mapping
        Further fields; they win over those of `about`. Values that JSON does not have are written as text.
    seconds : float, optional
        Time since the epoch; default: now.
    """
    time = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    first = {
        "time": time.isoformat(timespec="milliseconds"),
        "level": logging.getLevelName(level).lower(),
        "logger": logger,
        "message": message,
    }
    return json.dumps(_plain({**first, **_context.get(), **fields, **first}))


def redacted(text: str) -> str:
    """Return a text without passwords in URLs and without private keys in PEM."""
    return _PRIVATE_KEY.sub(r"<\1>", _PASSWORD.sub("***", text))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, with redacted texts."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | None) else redacted(str(value))


class JsonFormatter(logging.Formatter):
    """Formats a record as a line of `line_of`.

    A record's own fields are the mapping `fields` in its `extra`; an exception is the field `exception`.

    Parameters
    ----------
    fields : callable
        Returns fields of every line of this process; called for each line.
    """

    def __init__(self, fields: Fields = dict) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {**self._fields(), **_context.get(), **getattr(record, "fields", {})}
        if record.exc_info and record.exc_info[0]:
            fields["exception"] = self.formatException(record.exc_info)
        return line_of(record.levelno, record.name, record.getMessage(), fields, record.created)


class TextFormatter(logging.Formatter):
    """Formats a record for people."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the lines of an exception."""
        return redacted(super().format(record))


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to what is stderr at that moment: Flower and tests replace it."""

    @property
    def stream(self) -> TextIO:
        """Return stderr."""
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """Ignore the stream that the constructor sets."""


def configure(format: str, level: str, fields: Fields = dict) -> Callable[[], None]:
    """Write this process's log to stderr, and return a function that restores what was before.

    The level is that of our own lines and, in JSON, of Flower's, which then have the same format. Other libraries log
    warnings and errors. A former call's handler is replaced.

    Parameters
    ----------
    format : str
        One of `FORMATS`.
    level : str
        One of `LEVELS`.
    fields : callable
        See `JsonFormatter`.
    """
    root, ours, flower = (logging.getLogger(name) for name in (None, OURS, FLOWER))
    is_json, least, former = format == "json", logging.getLevelNamesMapping()[level.upper()], ours.level
    handler = _Handler()
    handler.setFormatter(JsonFormatter(fields) if is_json else TextFormatter())
    handler.addFilter(lambda record: _passes(record, least, is_json))
    replaced: list[tuple[logging.Logger, logging.Handler]] = [
        (root, one) for one in root.handlers if isinstance(one, _Handler)
    ]
    if is_json:  # its own handler formats lines in a way of its own, whatever formatter it is given
        replaced += [(flower, one) for one in flower.handlers if type(one).__module__.startswith(f"{FLOWER}.")]
    for logger, one in replaced:
        logger.removeHandler(one)
    root.addHandler(handler)
    ours.setLevel(least)

    def restore() -> None:
        ours.setLevel(former)
        root.removeHandler(handler)
        for logger, one in replaced:
            logger.addHandler(one)

    return restore


def _passes(record: logging.LogRecord, least: int, is_json: bool) -> bool:
    """Return whether a log has this record; as text, Flower writes its own."""
    package = record.name.partition(".")[0]
    if package == FLOWER:
        return is_json and record.levelno >= least
    return record.levelno >= (least if package == OURS else logging.WARNING)
