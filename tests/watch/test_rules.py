"""`alerts.toml`: the example is read, and what is wrong is named with key, value and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedtta.settings import SettingsError
from fedtta.watch.rules import Rules

ROOT = Path(__file__).parent.parent.parent


def read(tmp_path: Path, text: str) -> Rules:
    (tmp_path / "alerts.toml").write_text(text)
    return Rules.from_toml(tmp_path / "alerts.toml")


def test_the_example_sets_every_key() -> None:
    rules = Rules.from_toml(ROOT / "examples" / "alerts.toml")
    text = (ROOT / "examples" / "alerts.toml").read_text()
    assert all(f"{name.replace('_', '-')} = " in text for name in Rules.__dataclass_fields__ if name != "devices")
    assert rules.webhook == ""
    assert rules.limits_of("van-3").silent_minutes > rules.limits_of("ward-3").silent_minutes == 10
    assert rules.limits_of("van-3").saving_fails


def test_the_documentation_shows_the_example() -> None:
    page = (ROOT / "docs" / "deployment" / "watching.md").read_text()
    (shown,) = re.findall(r'```toml title="alerts.toml"\n(.*?)```', page, re.DOTALL)
    assert shown == (ROOT / "examples" / "alerts.toml").read_text()
    keys = [name.replace("_", "-") for name in Rules.__dataclass_fields__]
    assert all(f"`{key}`" in page for key in keys if key not in ("devices", "webhook"))


def test_an_empty_file_has_the_defaults(tmp_path: Path) -> None:
    rules = read(tmp_path, "")
    assert rules == Rules()
    assert (rules.silent_minutes, rules.guard_holding_samples, rules.model_refused_by) == (10, 1000, 3)
    assert rules.saving_fails
    assert not rules.webhook


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("silent-minute = 3", r"unknown key 'silent-minute' \(did you mean silent-minutes\?\); there are: cert"),
        ('silent-minutes = "3"', r"silent-minutes = '3': allowed is a value of type float"),
        ("silent-minutes = nan", r"silent-minutes = nan: allowed is a finite number"),
        ("silent-minutes = -1", r"silent-minutes = -1.0: allowed is 0 or more"),
        ("guard-holding-samples = 0.5", r"guard-holding-samples = 0.5: allowed is a value of type int"),
        ("saving-fails = 1", r"saving-fails = 1: allowed is a value of type bool"),
        ("least-estimated-accuracy = 60", r"least-estimated-accuracy = 60.0: allowed is at most 1"),
        ("most-drift = 1.5", r"most-drift = 1.5: allowed is at most 1"),
        ("model-refused-by = true", r"model-refused-by = True: allowed is a value of type int"),
        ("devices = 3", r'devices = 3: allowed are tables \[devices."<pattern>"\]'),
        ("[devices]\na = 3", r'devices = .*: allowed are tables \[devices."<pattern>"\]'),
        ('[devices."a*"]\nsilent = 3', r'\[devices."a\*"\]: unknown key .silent.'),
        ('[devices."a*"]\nmodel-refused-by = 3', r'\[devices."a\*"\]: unknown key .model-refused-by.'),
        ('[devices."a*"]\nmost-drift = 2', r'\[devices."a\*"\]: most-drift = 2.0: allowed is at most 1'),
        ("[other]\na = 3", r"table \[other\]"),
        ("silent-minutes = ", r"alerts.toml: "),
        ('webhook = "http://example.org/x"', r"webhook = 'http://example.org': allowed are https:"),
        ('webhook = "ftp://127.0.0.1/x"', r"webhook = 'ftp://127.0.0.1': allowed are https:"),
        ('webhook = "https:///x"', r"webhook = 'https://': allowed are https:"),
        ('webhook = "https://example.org:port/x"', r"webhook: .*; allowed are https:"),
        ('webhook = "https://me:secret@example.org/"', r"webhook = 'https://...@example.org': no user or password"),
        ('webhook = "http://127.0.0.1.example.org/x"', r"allowed are https:"),
        ('webhook = "https://me:s3cret/x"', r"webhook: its host, port or characters are not those of a URL"),
        ("webhook = 3", r"webhook = 3: allowed is a value of type str"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "alerts.toml") in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml: .*No such file"):
        Rules.from_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "url", ["https://hooks.example.org/a/b?c=d", "http://127.0.0.1:1/", "http://[::1]:1/", "http://localhost"]
)
def test_webhooks_that_are_allowed(tmp_path: Path, url: str) -> None:
    assert read(tmp_path, f'webhook = "{url}"').webhook == url
