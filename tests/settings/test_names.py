"""The order of clients, and class names from a file."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtta.server.app import serve
from fedtta.settings import Settings, SettingsError, add_arguments, class_names, from_arguments, is_number, name_order
from tests.transports import FakeTransport

names = st.text("ab01 29.-_", min_size=1, max_size=4)


def test_numbers_come_first_by_value_and_then_the_others_as_text() -> None:
    found = ["site-b", "10", "9", "007", "0", "Site", "2"]
    assert sorted(found, key=name_order) == ["0", "2", "9", "10", "007", "Site", "site-b"]
    assert [is_number(name) for name in ("0", "17", "007", "-1", "1.0", "²", "")] == [True, True, *[False] * 5]


@given(st.lists(names, unique=True), st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_the_order_of_arrival(found: list[str], random: object) -> None:
    mixed = list(found)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert sorted(mixed, key=name_order) == sorted(found, key=name_order)


def test_class_names_are_a_list_or_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("covid\n\n  normal sinus \npneumonia\n", encoding="utf-8")
    assert class_names(str(path)) == "covid,normal sinus,pneumonia"
    assert class_names(" covid, normal ") == "covid,normal"
    assert class_names(class_names(str(path))) == class_names(str(path))
    assert class_names("") == ""
    path.write_bytes(b"\xef\xbb\xbfcovid\r\nnormal\r\n")  # as an editor of Windows saves it
    assert class_names(str(path)) == "covid,normal"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "no such file; allowed are names 'a,b,...' or a file"),
        (b"covid\n", "1 class names; allowed are two or more"),
        (b"covid\nnormal\ncovid\n", "'covid' is named twice"),
        (b"covid,normal\nother\n", "class name 'covid,normal'; allowed are printable names without a comma"),
        (b"\xff\xfe\x00", "utf-8"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(text: bytes | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(SettingsError, match=r"classes.*classes\.txt") as caught:
        class_names(str(path))
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["a,,b", "a,a", ",", "a,b\x07"])
def test_a_list_with_names_that_are_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="classes = "):
        class_names(text)


def test_the_file_is_read_on_the_machine_that_submits_and_requests_have_the_names(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("cat\ndog\n", encoding="utf-8")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert from_arguments(parser.parse_args(["--classes", str(path)])).classes == "cat,dog"

    asked: list[str] = []

    def client(request: object) -> None:
        asked.append(request.settings)  # type: ignore[attr-defined]
        raise RuntimeError("enough")

    with pytest.raises(Exception, match="enough"):
        serve(FakeTransport({1: client}), Settings(clients=1, classes=str(path)), tmp_path / "run")
    assert '"classes": "cat,dog"' in asked[0]
