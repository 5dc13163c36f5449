"""Mutation check: break one line of the product on purpose and see whether a test fails.

    python -m tests.mutations [modules...] [--per-module 2] [--seed 1] [--jobs 1] [--limit 240] [--out FILE]

A module is given by its dotted name or a prefix of it (`client server.rounds`). Each mutant changes one node of the
syntax tree (`tests.mutants`) in a copy of the checkout and runs the tests of that module: the files named after it or
importing it, then the rest of the package's folder. A mutant that no test notices has survived: it is equivalent to the
original, or shows a gap in the tests. A test that also fails on the original kills nothing.

The outcomes are appended to a file of JSON lines; mutants that are already in it are not run again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.mutants import Mutant, chosen

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "client", "server", "messages", "simulation", "data", "models", "strategies", "settings", "tta", "privacy", "watch",
    "benchmarks",
)  # fmt: skip


def product() -> dict[str, Path]:
    """Return module → file, relative to the checkout, without generated modules."""
    files = [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = {".".join(("fedtta", *path.with_suffix("").parts)): path for path in files if "_pb2" not in path.name}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def tests_of(module: str) -> tuple[list[str], list[str]]:
    """Return the test files near a module and the rest of its package's.

    Near are those named after it, importing it, or named after its folder; where there are none, the contract tests.
    """
    *parents, last = module.split(".")
    folder = ROOT / "tests" / ("report" if module.startswith("fedtta.server.report") else module.split(".")[1])
    package, others = _files_of(folder)

    def named(part: str) -> list[Path]:
        pattern = re.compile(rf"test_(\w+_)?{part.strip('_').rstrip('s')}s?(_\w+)?\.py")
        return [path for path in package if pattern.fullmatch(path.name)]

    imported = re.compile(rf"(from|import) {re.escape(module)}\b(?!\.)|from {'.'.join(parents)} import .*\b{last}\b")
    near = named(last) + [path for path in package + others if imported.search(_imports(path))]
    near = (
        list(dict.fromkeys(near + [path for part in parents[2:] for path in named(part)]))
        or named("contract")
        or package
    )
    rest = [path for path in package if path not in near]
    return [str(path.relative_to(ROOT)) for path in near], [str(path.relative_to(ROOT)) for path in rest]


@functools.cache
def _files_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the test files of a folder, and those of the other folders that start no processes."""
    package = sorted(folder.rglob("test_*.py"))
    others = [path for path in sorted(folder.parent.rglob("*/test_*.py")) if path not in package]
    return package, [path for path in others if not {"integration", "faults", "docker"} & set(path.parts)]


@functools.cache
def _imports(path: Path) -> str:
    """Return the lines of a file that import something."""
    return "\n".join(line for line in path.read_text("utf-8").splitlines() if "import " in line)


class FirstFailure:
    """A pytest plugin that writes the id of the first failure to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: object) -> None:
        """Note a test that fails."""
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: object) -> None:
        """Note a file that cannot be collected."""
        if report.failed and not self.path.exists():  # type: ignore[attr-defined]
            self.path.write_text(report.nodeid, encoding="utf-8")  # type: ignore[attr-defined]


def run_tests(copy: Path, files: list[str], limit: float, *options: str) -> tuple[str, str]:
    """Run test files in a copy of the checkout; return "passed", "failed" or "timeout" and the first failure.

    A forked process runs them: it finds PyTorch and Flower already imported.
    """
    first = copy / "first-failure"
    first.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        os.setsid()  # the tests' own processes end with them
        gc.freeze()  # what is imported already is not looked through again, page by copied page
        os.chdir(copy)
        sys.path[:] = [str(copy)] + [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
        for name in [name for name in sys.modules if name.split(".")[0] in ("fedtta", "tests")]:
            del sys.modules[name]
        with (copy / "log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        import pytest

        arguments = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not faults and not images"]
        status = pytest.main([*arguments, *options, *files], plugins=[FirstFailure(first)])
        os._exit(0 if status in (0, 5) else 1)  # 5: there was no test
    deadline = time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        late = time.monotonic() > deadline
        if done or late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            break
        time.sleep(0.05)
    if not done:
        os.waitpid(child, 0)
        return "timeout", ""
    failure = first.read_text("utf-8") if first.exists() else ""
    return ("passed" if status == 0 else "failed"), failure


def outcome(
    copy: Path, path: Path, one: Mutant, files: list[str], limit: float, sound: dict[str, bool]
) -> tuple[str, str]:
    """Return what becomes of a mutant in these test files (killed, survived, timeout) and the test that kills it.

    `sound` says of each test that has failed whether it passes on the original; those that do not are left out.
    """
    source = (ROOT / path).read_text("utf-8")
    while files := [name for name in files if sound.get(name, True)]:
        (copy / path).write_text(one.apply(source), encoding="utf-8")
        skipped = [f"--deselect={test}" for test, passes in sound.items() if "::" in test and not passes]
        result, failure = run_tests(copy, files, limit, *skipped)
        (copy / path).write_text(source, encoding="utf-8")
        if result == "failed" and failure not in sound:
            collect = [] if "::" in failure else ["--collect-only"]
            sound[failure] = run_tests(copy, [failure], limit, *collect)[0] == "passed"
        if result == "passed":
            break
        if result == "timeout" or sound[failure]:
            return {"failed": "killed"}.get(result, result), failure
    return "survived", ""


def work(todo: list[Mutant], part: int, limit: float, out: Path) -> None:
    """Run mutants in a copy of the checkout with one part of their tests and append what becomes of them to a file."""
    sys.dont_write_bytecode = True  # a mutant of the same size and second would be taken for its predecessor
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    for name in ("torch", "flwr.app", "flwr.serverapp", "hypothesis", "scipy.stats"):
        importlib.import_module(name)  # once, for all that are forked
    files, sound = product(), {"": True}  # "": the process died
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder)
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        for one in todo:
            start, path = time.monotonic(), files[one.module]
            result, test = outcome(copy, path, one, tests_of(one.module)[part], limit, sound)
            seconds = round(time.monotonic() - start, 1)
            record = {"outcome": result, "test": test, "part": part, "seconds": seconds, "file": f"{path}:{one.line}"}
            with out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({**record, "mutant": dataclasses.asdict(one)}) + "\n")
            print(f"{result:9} {path}:{one.line} {one.kind}: {one.before!r} -> {one.after!r} {test}", flush=True)


def records(out: Path) -> dict[Mutant, dict[str, Any]]:
    """Return mutant → its last record in a file of outcomes."""
    lines = map(json.loads, out.read_text("utf-8").splitlines() if out.exists() else [])
    return {Mutant(**record["mutant"]): record for record in lines}


def main(arguments: list[str] | None = None) -> None:
    """Run the mutation check."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", default=list(PACKAGES), help="dotted names or prefixes; all by default")
    parser.add_argument("--per-module", type=int, default=2, help="mutants of a module")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--near", action="store_true", help="leave out the rest of the package's tests")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--limit", type=float, default=240, help="seconds for the tests of a mutant")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "mutations.jsonl")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    asked: list[Mutant] = []
    for prefix in options.modules:
        for module, path in product().items():
            if f"{module}.".startswith(f"fedtta.{prefix}."):
                asked += chosen(module, (ROOT / path).read_text("utf-8"), options.per_module, options.seed)
    fork = multiprocessing.get_context("fork")
    for part in range(1 if options.near else 2):
        known = records(options.out)
        survivors = [one for one in asked if one in known and known[one]["outcome"] == "survived"]
        todo = (
            [one for one in survivors if not known[one]["part"]] if part else [one for one in asked if one not in known]
        )
        shares = [todo[job :: options.jobs] for job in range(options.jobs)]
        workers = [fork.Process(target=work, args=(share, part, options.limit, options.out)) for share in shares]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    found = [record for one, record in records(options.out).items() if one in set(asked)]
    for record in found:
        if record["outcome"] != "killed":
            one = Mutant(**record["mutant"])
            print(f"{record['outcome']:9} {record['file']} {one.kind}: {one.before!r} -> {one.after!r}")
    print(f"{len(found)} mutants:", dict(collections.Counter(record["outcome"] for record in found)))


if __name__ == "__main__":
    main()
