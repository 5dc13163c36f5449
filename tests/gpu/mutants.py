"""Device bugs made on purpose: what moves a tensor to a device, or names one, is left out.

    python -m tests.gpu.mutants [modules...]

breaks one place after another, runs the cases that come by it, and lists the bugs that none of them shows. Those may be
equivalent: an index on the CPU is allowed, for example, and only makes the host wait. A module is given by its dotted
name or a prefix of it (`tta client.device`). A function gets the code of the changed source for a while; nothing is
written.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from tests.gpu.cases import CASES
from tests.gpu.devices import differences, gpu, on_host
from tests.mutants import Mutant
from tests.mutations import ROOT, product

PACKAGES = ("data", "models", "tta", "client")
DEVICE = re.compile(r"\bdevice\b|\bcuda\b")


def device_mutants(module: str, source: str) -> dict[str, list[Mutant]]:
    """Return "module:qualified.name" of each function, a method's class included → its device bugs."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[str, list[Mutant]] = {}
    for name, tree in functions(ast.parse(source)):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (after := without_device(node)) is not None:
                start = starts[node.lineno - 1] + node.col_offset
                end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
                before = source.encode()[start:end].decode()
                bug = Mutant(module, node.lineno, "device", before, text(after), start, end)
                found.setdefault(f"{module}:{name}", []).append(bug)
    return found


def text(tree: ast.expr) -> str:
    """Return an expression's source, as it can stand in any place."""
    atom = isinstance(tree, ast.Call | ast.Name | ast.Attribute | ast.Subscript)
    return ast.unparse(tree) if atom else f"({ast.unparse(tree)})"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the qualified name of every function that is in no other function, and its tree."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def without_device(call: ast.Call) -> ast.expr | None:
    """Return a call without its device: `x.to(d)` and `to_device(x, d)` as `x`, `f(n, device=d)` as `f(n)`; or None."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cpu"):
        value, words = call.func.value, [ast.unparse(one) for one in call.args]
        if call.func.attr == "cpu" or (len(words) == 1 and DEVICE.search(words[0])):
            return value
        if len(words) == 1 and words[0].isidentifier() and words[0] != "dtype":  # like another tensor
            return ast.Call(call.func, [ast.Attribute(call.args[0], "dtype")], call.keywords)
    if isinstance(call.func, ast.Name) and call.func.id == "to_device":
        return call.args[0]
    numpy = isinstance(call.func, ast.Attribute) and call.func.attr == "numpy"
    kept = [one for one in call.keywords if not (one.arg == "device" or (numpy and one.arg == "force"))]
    return ast.Call(call.func, call.args, kept) if len(kept) < len(call.keywords) else None


def function(name: str) -> tuple[Any, Any]:
    """Return a function by "module:qualified.name", as it is found there and without decorators."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    inner = getattr(found, "fget", None) or getattr(found, "func", None) or getattr(found, "__func__", found)
    return found, inspect.unwrap(inner)


@contextmanager
def broken(name: str, bug: Mutant) -> Iterator[None]:
    """Let a function have a bug; what it has cached is forgotten before and after."""
    found, changed = function(name)
    source = bug.apply(inspect.getsource(importlib.import_module(bug.module)))
    code = compile(source, inspect.getfile(changed), "exec", dont_inherit=True)
    same = [one for one in codes(code) if one.co_qualname == changed.__qualname__]
    assert len(same) == 1
    forget = getattr(found, "cache_clear", lambda: None)
    forget()
    before, changed.__code__ = changed.__code__, same[0]
    try:
        yield
    finally:
        changed.__code__ = before
        forget()


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def shows(case: str, name: str, bug: Mutant) -> str:
    """Return how a case shows a bug: an error or a difference from the CPU's results; empty if it does not."""
    with broken(name, bug), gpu() as there:
        try:
            found = on_host(CASES[case](there.device))
        except (RuntimeError, TypeError, ValueError, FloatingPointError) as error:
            return f"{type(error).__name__}: {error}"
    return "; ".join(differences(found, on_host(CASES[case](torch.device("cpu")))))


def visited(case: str) -> set[tuple[str, int]]:
    """Return the functions that a case calls, as (file, first line)."""
    found: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    with gpu() as there:
        sys.setprofile(note)
        try:
            CASES[case](there.device)
        finally:
            sys.setprofile(None)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the mutation check."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", default=list(PACKAGES), help="dotted names or prefixes; all by default")
    prefixes = tuple(f"fedtta.{prefix}." for prefix in parser.parse_args(arguments).modules)
    calls = {case: visited(case) for case in CASES}
    counts = {"found": 0, "survived": 0, "not run": 0}
    for module, path in product().items():
        if not f"{module}.".startswith(prefixes):
            continue
        for name, bugs in device_mutants(module, (ROOT / path).read_text("utf-8")).items():
            code = function(name)[1].__code__
            cases = [case for case in CASES if (code.co_filename, code.co_firstlineno) in calls[case]]
            for bug in bugs:
                case = next((case for case in cases if shows(case, name, bug)), None)
                result = "found" if case else "survived" if cases else "not run"
                counts[result] += 1
                if result != "found":
                    print(f"{result:9} {path}:{bug.line} {bug.before!r} -> {bug.after!r}", flush=True)
    print(counts)


if __name__ == "__main__":
    main()
