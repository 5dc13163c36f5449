"""What a run notes about the machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fedtta.server import environment


def test_the_processor_is_named_as_linux_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it is what the platform says; the number of GPUs depends on the machine, so the end is left open."""
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 2: GHz\nmodel name\t: another\n")
    monkeypatch.setattr(environment, "Path", lambda path: info)
    assert environment.hardware().startswith("Fast CPU @ 2: GHz, ")
    info.unlink()
    monkeypatch.setattr("platform.processor", lambda: "risc")
    assert environment.hardware().startswith("risc, ")


def test_a_commit_has_changes_when_code_differs_and_not_when_results_do(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    code, installed = tmp_path / "server" / "code.py", tmp_path / ".venv" / "code.py"
    kept = tmp_path / "benchmarks" / "results" / "protocol" / "cell-1.json"
    for file in (code, kept, installed):
        file.parent.mkdir(parents=True)
        file.write_text("1")
    git("init", "-q")
    git("add", "server", "benchmarks")
    git("commit", "-qm", "first")
    (tmp_path / "untracked").touch()
    head = git("rev-parse", "--short=12", "HEAD")
    kept.write_text("2")
    assert environment.commit_of(code) == head
    code.write_text("2")
    assert environment.commit_of(code) == f"{head}+changes"
    with pytest.raises(subprocess.CalledProcessError):
        environment.commit_of(installed)
