"""The wheel: one name in site-packages, with types, that a user's own files of any name do not disturb."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a built wheel has been unpacked into, as an installer does with a pure wheel."""
    pytest.importorskip("hatchling", reason="the build backend; `pip install 'fedtta[dev]'`")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def test_a_wheel_holds_one_name_with_types(installed: Path) -> None:
    (info,) = installed.glob("*.dist-info")
    assert {path.name for path in installed.iterdir()} == {"fedtta", info.name}
    assert (info / "entry_points.txt").read_text().split() == ["[console_scripts]", "fedtta", "=", "fedtta.cli:app"]
    assert (installed / "fedtta" / "py.typed").is_file()
    packed = {path.relative_to(installed / "fedtta").as_posix() for path in installed.glob("fedtta/**/*.py")}
    parts = [path.name for path in (ROOT / "fedtta").iterdir() if path.is_symlink()]
    assert len(parts) == 12
    ours = {path.relative_to(ROOT).as_posix() for part in parts for path in (ROOT / part).rglob("*.py")}
    assert packed == ours | {"__init__.py", "__main__.py", "cli.py"}
    assert (installed / "fedtta" / "watch" / "live.js").is_file()
    assert not (installed / "fedtta" / "benchmarks" / "results").exists()


def test_a_users_own_settings_and_data_break_nothing(installed: Path, tmp_path: Path) -> None:
    """Neither imports nor the command, in one process: to import torch takes longer than the run."""
    for name in ("settings.py", "models.py", "data/__init__.py", "tta/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine = True\n")
    code = """
import settings, models, data, tta
assert settings.mine and models.mine and data.mine and tta.mine
from fedtta.tta import BTFL, NoAdaptation
from fedtta.models import build
from fedtta.settings import Settings
import fedtta.client.app, fedtta.data.federation, fedtta.server.app, fedtta.simulation
import sys
print(BTFL.name, NoAdaptation(build("cnn", 3, image_size=16)).name, Settings().seed, fedtta.data.__file__)
print(sys.modules["data"] is not fedtta.data)
from fedtta.cli import app
app()
"""
    small = {"rounds": 1, "clients": 2, "fraction": 0.1, "local-epochs": 1, "shifts": "original"}
    words = [word for key, value in small.items() for word in (f"--{key}", str(value))]
    (tmp_path / "mine.toml").write_text('methods = "fedavg"\nrounds = 3\n')
    words += ["--settings", "mine.toml", "--engine", "vectorised", "--run-name", "there"]
    done = fedtta(installed, tmp_path, "-c", code, "run", *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[:5] == ["btfl", "none", "1", str(installed / "fedtta/data/__init__.py"), "True"]
    assert "Results: results/there/" in done.stdout
    assert (tmp_path / "results" / "there" / "report.html").is_file()
    events = [json.loads(line) for line in (tmp_path / "results" / "there" / "metrics.jsonl").read_text().splitlines()]
    assert (events[0]["settings"]["rounds"], events[0]["settings"]["methods"]) == (1, "fedavg")
    assert events[-1]["status"] == "completed"


def test_the_command_runs_where_only_the_wheel_is(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("raise ImportError('not ours')")
    refused = fedtta(installed, tmp_path, "-m", "fedtta", "submit", "rounds=1")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "needs a checkout" in refused.stderr


def fedtta(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Start Python in a folder, with nothing but the wheel."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder, env={"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
