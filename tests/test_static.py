"""No module can be made to run foreign code: no pickle that runs what it names, no eval, no weights that are code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedtta.data.datasets.files import read_pickle

ROOT = Path(__file__).parent.parent
MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "code", "codeop", "builtins",
}  # fmt: skip
#: The one module that reads a pickle, CIFAR's archives; `test_the_unpickler_runs_nothing` says how.
UNPICKLES = Path("data/datasets/files.py")
CALLS = {"eval", "exec", "compile", "__import__"}
#: Callable → the keyword that makes it safe, and its safe value.
GUARDED = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
UNSAFE = {"yaml.load", "yaml.unsafe_load", "os.system", "subprocess.getoutput", "torch.hub.load", "torch.jit.load"}


def complaints(tree: ast.AST) -> Iterator[str]:
    """Yield what a module must not do, with its line."""
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
            imported = {f"{node.module}.{one.name}" for one in node.names}  # under a name that is not looked for below
            yield from (f"line {node.lineno}: from ... import {one}" for one in imported & {*GUARDED, *UNSAFE})
        yield from (f"line {node.lineno}: import {name}" for name in names if name.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in CALLS or called in UNSAFE:
            yield f"line {node.lineno}: {called}"
        given = {one.arg: one.value for one in node.keywords}
        for key, safe in {pair for name, pair in GUARDED.items() if name == called or pair[0] in given}:
            value = given.get(key)  # also of a function under another name
            if not (isinstance(value, ast.Constant) and value.value is safe):
                yield f"line {node.lineno}: {called} without {key}={safe}"
        if isinstance(shell := given.get("shell"), ast.Constant) and shell.value:
            yield f"line {node.lineno}: {called} through a shell"


def modules() -> list[Path]:
    skipped = {"tests", ".venv", ".cache", "build", "results"}  # and an environment takes seconds to walk through
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in skipped]
    return sorted([*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))])


def test_no_module_can_be_made_to_run_foreign_code() -> None:
    found = modules()
    assert len(found) > 150
    bad = [f"{path.relative_to(ROOT)}, {one}" for path in found for one in complaints(ast.parse(path.read_text()))]
    assert [one for one in bad if not one.startswith(f"{UNPICKLES}, ")] == []
    assert len(bad) == 1  # the import of pickle


def test_the_unpickler_runs_nothing(tmp_path: Path) -> None:
    tree = ast.parse((ROOT / UNPICKLES).read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_pickle(node.value)}
    assert used == {"Unpickler", "UnpicklingError"}
    (reader,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and any(map(_is_base, node.bases)))
    assert sum(map(_is_base, ast.walk(tree))) == 1  # it is only inherited from ...
    assert "find_class" in {one.name for one in reader.body if isinstance(one, ast.FunctionDef)}  # ... and restricted
    for number, code in enumerate((b"cos\nsystem\n(S'true'\ntR.", b"cbuiltins\neval\n(S'1'\ntR.", b"cnumpy\nload\n.")):
        path = tmp_path / str(number)
        path.write_bytes(code)
        with pytest.raises(ValueError, match="which is not data"):
            read_pickle(path)


def _is_pickle(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "pickle"


def _is_base(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and _is_pickle(node.value) and node.attr == "Unpickler"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "torch.load('x', weights_only=False)",
        "np.load('x')",
        "np.load('x', allow_pickle=True)",
        "eval('1')",
        "exec('1')",
        "yaml.load(text)",
        "subprocess.run('ls', shell=True)",
        "__import__('os')",
        "import builtins",
        "from builtins import eval",
        "from torch import load",
        "from os import system as run",
        "import torch as t\nt.load('x', weights_only=False)",
        "load('x', allow_pickle=True)",
    ],
)
def test_the_check_sees(code: str) -> None:
    assert list(complaints(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "torch.load('x', weights_only=True)",
        "np.load('x', allow_pickle=False)",
        "re.compile('x')",
        "import safetensors",
    ],
)
def test_the_check_lets_pass(code: str) -> None:
    assert not list(complaints(ast.parse(code)))
