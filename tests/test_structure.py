"""The structure of the code: imports without cycles, one direction, and facts that are stated once."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fedtta.settings import GROUPS, Settings, keys_in
from fedtta.settings.schema import fields_by_key

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "benchmarks", "client", "data", "messages", "models", "privacy", "server", "settings", "simulation", "strategies",
    "tta", "watch",
)  # fmt: skip
#: Package → the packages of ours that it may import.
ALLOWED: dict[str, set[str]] = {
    "settings": set(),
    "messages": set(),
    "models": {"settings"},
    "privacy": {"messages", "settings"},
    "data": {"models", "settings"},
    "tta": {"models", "settings"},
    "strategies": {"messages", "settings"},
    "client": {"data", "messages", "models", "privacy", "settings", "tta"},
    "server": {"messages", "models", "privacy", "settings", "strategies", "tta"},
    "simulation": {"client", "data", "messages", "models", "privacy", "server", "settings", "strategies", "tta"},
    "watch": {"messages", "server", "settings", "simulation"},
    "benchmarks": set(PACKAGES),
}


def files() -> dict[str, Path]:
    """Return module name → file of the product."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = {".".join(("fedtta", *path.relative_to(ROOT).with_suffix("").parts)): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


@functools.cache
def parsed(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, in the order of `ast.walk`."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(known: dict[str, Path]) -> dict[str, set[str]]:
    """Return module → the modules of ours that it imports, wherever in the file; type checking counts, too."""
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        found: set[str] = set()
        inside = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        for node in parsed(path):
            if isinstance(node, ast.Import):
                found |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = inside[: len(inside) + 1 - node.level] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                members = {f"{source}.{one.name}" for one in node.names}
                found |= {one if one in known else source for one in members}
        graph[name] = {one for one in found if one in known} - {name}
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return one cycle of a graph, or nothing."""
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for following in sorted(graph.get(node, ())):
            if found := search(following, [*path, node]):
                return found
        done.add(node)
        return []

    for node in sorted(graph):
        if found := search(node, []):
            return found
    return []


def folder(module: str, known: dict[str, Path]) -> str:
    """Return the folder that a module is in, as a dotted name."""
    return ".".join(known[module].relative_to(ROOT).parent.parts)


KNOWN = files()


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return imports(KNOWN)


def test_no_file_imports_itself_around_a_corner(graph: dict[str, set[str]]) -> None:
    assert len(graph) > 120
    assert cycle(graph) == []


def test_no_folder_imports_itself_around_a_corner(graph: dict[str, set[str]]) -> None:
    folders: dict[str, set[str]] = {}
    for module, found in graph.items():
        if module.endswith(".__main__"):
            continue  # a program, which nothing imports, is above all folders
        home = folder(module, KNOWN)
        others = {folder(one, KNOWN) for one in found} - {home}
        if KNOWN[module].stem == "__init__":  # a package shows what its folders have
            others = {one for one in others if not one.startswith(f"{home}.")}
        folders.setdefault(home, set()).update(others)
    assert not any("__main__" in one for found in graph.values() for one in found)
    assert cycle(folders) == []


def test_imports_point_one_way(graph: dict[str, set[str]]) -> None:
    for module, found in graph.items():
        home = module.split(".")[1]
        others = {one.split(".")[1] for one in found} - {home}
        assert others <= ALLOWED[home], f"{module} imports {sorted(others - ALLOWED[home])}"


#: A line without which no file has what `bare` looks for: to parse a file takes ten times as long.
SUSPECT = re.compile(rf"^\s*(from\s+|import\s+(.*[\s,])?)({'|'.join(PACKAGES)})\b", re.MULTILINE)


def bare(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield every import of a part by a name without `fedtta`."""
    for node in nodes:
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from (f"line {node.lineno}: {name}" for name in names if name.split(".")[0] in PACKAGES)


def test_there_is_one_import_name() -> None:
    """A module that is imported under two names is there twice: its classes are not its classes."""
    paths = [
        path for folder in (*PACKAGES, "docs", "examples", "fedtta", "tests") for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(paths) > 300
    suspects = [path for path in paths if SUSPECT.search(path.read_text(encoding="utf-8"))]
    found = [f"{path.relative_to(ROOT)}, {one}" for path in suspects for one in bare(parsed(path))]
    assert not found


@pytest.mark.parametrize("text", ["import os, data", "  from tta.btfl import BTFL", "import client.app as x"])
def test_a_second_import_name_is_noticed(text: str) -> None:
    assert SUSPECT.search(f"x = 1\n{text}\n")
    assert len(list(bare(ast.walk(ast.parse(text.strip()))))) == 1
    assert not list(bare(ast.walk(ast.parse("from fedtta import tta"))))


def test_no_file_is_imported_twice() -> None:
    """Two modules of each part in one process: none under a bare name, none through a link beside the package."""
    usable = [name for name in KNOWN if not name.endswith(("__main__", "_pb2_grpc"))]
    names = [name for part in PACKAGES for name in [one for one in usable if one.startswith(f"fedtta.{part}")][:2]]
    assert len(names) == 2 * len(PACKAGES)
    code = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
print(sorted(set({list(PACKAGES)}) & set(sys.modules)))
files = [module.__file__ for name, module in sys.modules.items() if name.startswith("fedtta.")]
print(len(files) - len(set(files)), [file for file in files if "/fedtta/{PACKAGES[0]}" in file])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.split("\n")[:2] == ["[]", "0 []"]


def test_the_checks_see_a_cycle() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_checks_see_every_way_to_import(tmp_path: Path) -> None:
    texts = {
        "p": "from .a import x", "p.a": "from . import b", "p.b": "def f():\n    from .c import x",
        "p.c": "from ..p import a as other", "p.d": "import p.c", "p.e": "from p.d import x",
    }  # fmt: skip
    known = {name: tmp_path / ("__init__.py" if name == "p" else f"{name}.py") for name in texts}
    for name, path in known.items():
        path.write_text(texts[name])
    found = {"p": {"p.a"}, "p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.a"}, "p.d": {"p.c"}, "p.e": {"p.d"}}
    assert imports(known) == found


# -- facts that are stated once

#: A collection of at least this many keys of settings is a list of settings.
LISTED = 4
#: Where single settings are named on purpose: the schema itself, and the arguments of a call that builds from settings.
NAMES = set(fields_by_key()) | {key.replace("-", "_") for key in fields_by_key()}


def listed(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the keys of every literal collection of settings' keys."""
    for node in nodes:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            words = [one.value for one in node.elts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            keys = [word for word in words if word in NAMES]
            if len(keys) >= LISTED and len(keys) == len(node.elts):
                yield node.lineno, keys


def test_no_list_of_settings_stands_beside_the_groups() -> None:
    found = [f"{module}, line {line}: {keys}" for module, path in KNOWN.items() for line, keys in listed(parsed(path))]
    assert not found


def test_the_check_sees_a_list_of_settings() -> None:
    assert list(listed(ast.walk(ast.parse('X = ("dataset", "alpha", "step-ratio", "clients")'))))
    assert not list(listed(ast.walk(ast.parse('X = ("dataset", "alpha", "of", "clients")'))))


def test_every_setting_has_a_group_and_every_group_settings() -> None:
    for key, field in fields_by_key().items():
        assert field.metadata["groups"], f"{key} has no group"
        assert set(field.metadata["groups"]) <= set(GROUPS)
    assert all(keys_in(group) for group in GROUPS)
    with pytest.raises(ValueError, match="unknown groups"):
        Settings().select("weather")


#: Variables and attributes that hold the name of a method, a local algorithm, an aggregation or a rule.
DISPATCHED = re.compile(r"\b(adapter|algorithm|aggregation|method|rule|training|collaboration)(\.name)?$")


def dispatches(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield every comparison of such a name with a text."""
    for node in nodes:
        if isinstance(node, ast.Compare) and DISPATCHED.search(ast.unparse(node.left)):
            if not all(isinstance(one, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for one in node.ops):
                continue
            # a text, or a literal collection of some; the text in `names["own"]` is a key of something else
            found = [one for right in node.comparators for one in getattr(right, "elts", [right])]
            if any(isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value for one in found):
                yield node.lineno, ast.unparse(node)


def test_no_method_algorithm_or_aggregation_is_named_in_an_if() -> None:
    found = [
        f"{module}, line {line}: {text}" for module, path in KNOWN.items() for line, text in dispatches(parsed(path))
    ]
    assert not found


def test_the_check_sees_a_dispatch() -> None:
    assert list(dispatches(ast.walk(ast.parse('if settings.aggregation == "fedprox":\n    pass'))))
    assert list(dispatches(ast.walk(ast.parse('x = task.algorithm in ("a", "b")'))))
    assert not list(dispatches(ast.walk(ast.parse("if settings.aggregation == own:\n    pass"))))
    assert not list(dispatches(ast.walk(ast.parse('if adapter in costs["adapters"]:\n    pass'))))
