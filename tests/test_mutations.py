"""The mutation check itself: what a mutant changes, what is left alone, and who notices."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests import mutations
from tests.mutants import Mutant, chosen, mutants
from tests.mutations import outcome, product


def behaviour(source: str) -> Any:
    """Return what `f` of a source does with a few arguments; an error counts as its type."""
    space: dict[str, Any] = {}
    exec(compile(source, "mutant", "exec"), space)
    found = []
    for pair in [(0, 1), (1, 1), (3, 2), (2, 5)]:
        try:
            found.append(space["f"](*pair))
        except Exception as error:
            found.append(type(error))
    return found


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("comparison", "return 1 if a == b else 0"),
        ("boundary", "return 1 if a < b else 0"),
        ("arithmetic", "return a * b"),
        ("arithmetic", "a += b\n    return a"),
        ("boolean", "return a and b"),
        ("boolean", "return not a"),
        ("boolean", "return True"),
        ("number", "return a + 2.5"),
        ("text", "return 'name'"),
        ("return", "return a"),
        ("call", "made = []\n    made.append(a)\n    return made"),
        ("raise", "if a == 1:\n        raise ValueError('one')\n    return a"),
        ("arguments", "return divmod(a, b)"),
        ("condition", "if a:\n        return 1\n    return 0"),
    ],
)
def test_each_kind_changes_what_a_function_does(kind: str, body: str) -> None:
    source = f"def f(a: int, b: int) -> object:\n    {body}\n"
    found = [one for one in mutants("f", source) if one.kind == kind]
    assert found
    for one in found:
        assert behaviour(one.apply(source)) != behaviour(source)


def test_all_but_the_changed_node_stays() -> None:
    """Comments, layout and characters of several bytes before and behind it, too; precedence is that of the tree."""
    source = "x = 'é'  # λ · 2\ny = 2 * (  3 + 4 )  # ü\n"
    changed = {one.apply(source) for one in mutants("m", source) if one.kind == "arithmetic"}
    assert changed == {source.replace("3 + 4", "(3 - 4)"), source.replace("2 * (  3 + 4 )", "(2 / (3 + 4))")}


@pytest.mark.parametrize(
    "source",
    [
        '"""A module."""\n',
        "def f(a: 'int | None') -> dict[str, 1]:\n    '''One.'''\n",
        "raise_ = f'{1 + 1}'\n",
        "import a\nfrom b import c\n",
        "log.warning('lost', 1 + 1)\n",
        "print(1 + 1)\n",
        "if __name__ == '__main__':\n    f(1, 2)\n",
        "@dataclass(frozen=True)\nclass A:\n    paper = 'Tent'\n    kind: Literal['a'] \n",
        "assert value, 'lost' + 'found'\n",
        "parser.add_argument('--seed', default=1)\n",
    ],
)
def test_what_decides_nothing_is_left_alone(source: str) -> None:
    assert mutants("m", source) == []


def test_the_text_of_an_error_is_left_alone() -> None:
    assert [one.kind for one in mutants("m", "raise ValueError(f(1, 'x') + 'y')\n")] == ["raise"]


def test_presentation_keeps_its_texts() -> None:
    source = "shown = cell('p', wide=True)\n"
    assert {one.kind for one in mutants("fedtta.server.report.page", source)} == {"boolean"}
    assert {one.kind for one in mutants("fedtta.server.rounds", source)} == {"boolean", "text"}


def test_every_mutant_of_the_runner_compiles() -> None:
    source = inspect.getsource(mutations)
    for one in mutants("tests.mutations", source):
        assert one.apply(source) != source
        compile(one.apply(source), "mutant", "exec")


def test_the_choice_depends_on_the_seed_alone_and_takes_each_kind_first() -> None:
    source = inspect.getsource(mutations)
    first = chosen("m", source, 5, 1)
    assert first == chosen("m", source, 5, 1) != chosen("m", source, 5, 2)
    assert len({one.kind for one in first}) == 5
    assert chosen("m", source, 3, 1) == first[:3]
    everything = chosen("m", source, 10_000, 1)
    assert sorted(everything, key=repr) == sorted(mutants("m", source), key=repr)


def test_every_module_has_tests() -> None:
    without = [module for module in product() if not any(mutations.tests_of(module))]
    assert without == []
    near, rest = mutations.tests_of("fedtta.client.device")
    assert near[0] == "tests/client/test_device.py"
    assert not set(near) & set(rest)
    assert all(path.startswith("tests/client/") for path in rest)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one module, a test for one of its functions and a test that fails by itself."""
    files = {
        "fedtta/__init__.py": (mutations.ROOT / "fedtta/__init__.py").read_text(),
        "client/__init__.py": "",
        "client/thing.py": "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n",
        "tests/client/test_thing.py": "import time\nfrom fedtta.client.thing import add\n\n\ndef test_broken():\n"
        "    assert False\n\n\ndef test_add():\n    assert add(1, 1) == 2 or time.sleep(add(60, 60))\n",
        "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\nmarkers =\n    slow: s\n    faults: f\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "after", "expected"),
    [
        (2, "None", ("killed", "tests/client/test_thing.py::test_add")),
        (6, "None", ("survived", "")),
    ],
)
def test_a_mutant_is_killed_or_survives(checkout: Path, line: int, after: str, expected: tuple[str, str]) -> None:
    """The test that fails by itself kills nothing; the copy is the original again."""
    path = Path("client/thing.py")
    source = (checkout / path).read_text()
    start = source.index("a + b" if line == 2 else "a - b")
    one = Mutant("fedtta.client.thing", line, "number", "", after, start, start + 5)
    sound = {"": True}
    files = ["tests/client/test_thing.py"]
    assert mutations.tests_of("fedtta.client.thing") == (files, [])
    assert outcome(checkout, path, one, files, 120, sound) == expected
    assert (checkout / path).read_text() == source
    assert sound["tests/client/test_thing.py::test_broken"] is False


def test_a_mutant_that_takes_too_long_is_a_timeout(checkout: Path) -> None:
    path, files = Path("client/thing.py"), ["tests/client/test_thing.py"]
    source = (checkout / path).read_text()
    start = source.index("a + b")
    one = Mutant("fedtta.client.thing", 2, "number", "", "a * 9", start, start + 5)
    sound = {"": True, "tests/client/test_thing.py::test_broken": False}
    assert outcome(checkout, path, one, files, 3, sound) == ("timeout", "")
    assert (checkout / path).read_text() == source
