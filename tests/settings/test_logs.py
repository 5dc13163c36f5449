"""Lines of logs: one JSON object each, with fields of process, thread and record, and without passwords."""

from __future__ import annotations

import json
import logging
import threading
from datetime import datetime
from typing import Any

import pytest
from flwr.common.logger import FLOWER_LOGGER, console_handler
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtta.settings.logs import JsonFormatter, TextFormatter, about, configure, line_of, redacted

KEY = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIB\nAwEHoUQDQg==\n-----END EC PRIVATE KEY-----"
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=5,
)


@settings(max_examples=40)
@given(st.text(), st.dictionaries(st.text(), values, max_size=4))
def test_whatever_is_logged_a_line_is_one_json_object_with_its_own_fields(message: str, fields: dict[str, Any]) -> None:
    line = line_of(logging.INFO, "fedtta.x", message, fields, seconds=0.0015)
    assert len(line.splitlines()) == 1
    found = json.loads(line)
    assert (found["time"], found["level"], found["logger"]) == ("1970-01-01T00:00:00.001+00:00", "info", "fedtta.x")
    assert found["message"] == redacted(message)
    assert set(found) == {"time", "level", "logger", "message", *fields}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("at https://me:secret@host:1/x?y=1, https://token@b.c", "at https://***@host:1/x?y=1, https://***@b.c"),
        ("mail a@b.c, ssh://host/a@b", "mail a@b.c, ssh://host/a@b"),
        ("http://me:se@cr@et@host:1/x", "http://***@host:1/x"),
        ("http://me:se/cr@et@host:1/x,ftp://:12/3@b.c", "http://***@host:1/x,ftp://***@b.c"),
        ("http://to@ken@host/x http://host:1/x", "http://***@host/x http://host:1/x"),
        (f"the key {KEY} of a device", "the key <EC PRIVATE KEY> of a device"),
        (KEY[:40], "<EC PRIVATE KEY>"),
        ("-----BEGIN CERTIFICATE-----\nMII", "-----BEGIN CERTIFICATE-----\nMII"),
    ],
)
def test_passwords_in_addresses_and_private_keys_are_left_out(text: str, told: str) -> None:
    assert redacted(text) == told
    line = json.loads(line_of(logging.INFO, "x", text, {"reason": [{"error": text}]}))
    assert (line["message"], line["reason"]) == (told, [{"error": told}])
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s", (text,), None)
    assert TextFormatter().format(record).endswith(told)


def formatted(formatter: JsonFormatter, **extra: Any) -> dict[str, Any]:
    record = logging.getLogger("fedtta.x").makeRecord("fedtta.x", logging.INFO, "", 0, "text", (), None, extra=extra)
    found: dict[str, Any] = json.loads(formatter.format(record))
    return found


def test_fields_are_those_of_the_process_the_thread_and_the_record() -> None:
    device = {"device": "site-a", "version": "1"}
    formatter, seen = JsonFormatter(lambda: device), list[dict[str, Any]]()
    with about(run="r1", round=2):
        with about(round=3):
            first = formatted(formatter, fields={"version": "2", "level": "odd", "part": "x"})
        thread = threading.Thread(target=lambda: seen.append(formatted(formatter)))
        thread.start()
        thread.join()
        seen.append(formatted(formatter))
    assert {key: first[key] for key in ("device", "run", "round", "version", "part", "level")} == {
        "device": "site-a", "run": "r1", "round": 3, "version": "2", "part": "x", "level": "info",
    }  # fmt: skip
    assert "run" not in seen[0]  # another thread works for another run
    assert seen[1]["round"] == 2
    assert "round" not in formatted(formatter)


def test_an_exception_is_a_field_and_the_line_is_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), (ValueError, error, error.__traceback__))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: two\nlines")
    assert json.loads(line)["level"] == "error"


def test_one_format_for_our_lines_and_flowers_and_what_was_before_comes_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FLOWER_LOGGER, "handlers", [console_handler])
    monkeypatch.setattr(FLOWER_LOGGER, "level", logging.DEBUG)
    monkeypatch.setattr(console_handler, "stream", None)  # what it writes as its own would fail
    before = list(logging.getLogger().handlers)
    ours, other = logging.getLogger("fedtta.x"), logging.getLogger("elsewhere")
    restore = configure("json", "warning")
    again = configure("json", "debug", lambda: {"device": "a"})
    ours.debug("one")
    FLOWER_LOGGER.info("two")
    other.info("not shown")
    other.warning("three")
    again()
    ours.info("not shown")
    FLOWER_LOGGER.warning("four")
    restore()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    found = [(line["logger"].partition(".")[0], line["level"], line["message"], line.get("device")) for line in lines]
    assert found == [
        ("fedtta", "debug", "one", "a"), ("flwr", "info", "two", "a"), ("elsewhere", "warning", "three", "a"),
        ("flwr", "warning", "four", None),
    ]  # fmt: skip
    assert FLOWER_LOGGER.handlers == [console_handler]
    assert logging.getLogger().handlers == before
    assert datetime.fromisoformat(lines[0]["time"]).utcoffset() is not None


def test_as_text_flower_writes_its_lines_itself(capsys: pytest.CaptureFixture[str]) -> None:
    restore = configure("text", "info")
    logging.getLogger("fedtta.x").info("one")
    logging.getLogger("fedtta.x").debug("not shown")
    logging.getLogger("flwr.x").warning("its own")
    restore()
    assert [line.split(" ", 2)[2] for line in capsys.readouterr().err.splitlines() if "its own" not in line] == [
        "INFO one"
    ]


@pytest.mark.parametrize(("number", "text"), [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf")])
def test_numbers_that_json_does_not_have_are_text(number: float, text: str) -> None:
    assert f'"loss": ["{text}", 1.5]' in line_of(logging.INFO, "fedtta", "m", {"loss": [number, 1.5]})
