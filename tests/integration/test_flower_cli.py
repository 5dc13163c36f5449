"""The app through Flower's own CLI: what is bundled, what a run leaves, and that no process outlives it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tomllib
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from flwr.cli.build import build_fab_from_disk

from fedtta.settings import Settings, SettingsError
from fedtta.simulation import flower_cli, gpus, superlink
from fedtta.simulation.flower_cli import main, parse
from fedtta.simulation.superlink import PROJECT, FlowerError, free_ports, program, stop, wait_until_healthy

PACKAGES = ("server", "client", "strategies", "tta", "models", "data", "messages", "privacy", "settings")
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
PATIENCE = 900  # seconds that what takes some ten may take on a busy machine
pytestmark = pytest.mark.timeout(3 * PATIENCE)
SMALL = (
    "--clients", "2", "--cpus", "1", "--timeout", str(PATIENCE),
    "--set", "rounds=1", "local-epochs=1", "methods=fedavg,personal,btfl", "shifts=original,corrupted", "fraction=0.2",
)  # fmt: skip
FILES = (
    "settings.toml", "metrics.jsonl", "table.csv", "model.safetensors", "statistics.safetensors", "report.html",
)  # fmt: skip


class Mark:
    """A variable that all processes started by a test have in their environment."""

    def __init__(self, value: str) -> None:
        self.text = f"FEDTTA_TEST_MARK={value}".encode()

    def living(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.text in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mark]:
    """Mark what the test starts, and leave nothing even when the test fails."""
    value = uuid.uuid4().hex
    monkeypatch.setenv("FEDTTA_TEST_MARK", value)
    made = Mark(value)
    yield made
    for pid in made.living():
        os.kill(pid, signal.SIGKILL)


def test_every_setting_is_declared_to_flower_with_its_default() -> None:
    declared = PYPROJECT["tool"]["flwr"]["app"]["config"]
    defaults = Settings().flat()
    assert declared == defaults
    assert {key: type(value) for key, value in declared.items()} == {key: type(defaults[key]) for key in declared}


def test_the_bundle_holds_the_rooms_and_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "fedtta"  # `flwr build` wants letters, digits and hyphens
    heavy = shutil.ignore_patterns(".*", "__pycache__", "results", "*.egg-info")
    shutil.copytree(PROJECT, copy, ignore=heavy, symlinks=True)
    shutil.copy(PROJECT / ".gitignore", copy)
    for unwanted in ("results/run/metrics.json", "benchmarks/results/table.json", "data/note.md", "notes.md"):
        (copy / unwanted).parent.mkdir(parents=True, exist_ok=True)
        (copy / unwanted).write_text("{}", encoding="utf-8")
    subprocess.run(
        [program("flwr"), "build", "--app", str(copy)], cwd=tmp_path, check=True, timeout=PATIENCE,
        env={**os.environ, "FLWR_HOME": str(tmp_path / "home"), "FLWR_DISABLE_UPDATE_CHECK": "1"},
    )  # fmt: skip
    (bundle,) = tmp_path.glob("*.fab")
    with superlink.app_files() as app:  # from which we submit
        assert build_fab_from_disk(app) == bundle.read_bytes()
    modules = {str(path.relative_to(copy)) for package in PACKAGES for path in (copy / package).rglob("*.py")}
    with zipfile.ZipFile(bundle) as file:
        assert set(file.namelist()) == modules | {
            "client_app.py",
            "server_app.py",
            "fedtta/__init__.py",
            "LICENSE",
            "pyproject.toml",
            ".info/CONTENT",
        }
    assert {"server/app.py", "client/app.py", "tta/btfl.py"} <= modules
    assert bundle.stat().st_size < 3_000_000  # sources alone; data or weights would not fit


def test_everything_the_rooms_need_can_enter_a_bundle() -> None:
    files = [path for package in PACKAGES for path in (PROJECT / package).rglob("*") if path.is_file()]
    runtime = [path for path in files if "__pycache__" not in path.parts]
    written = {path.name for path in runtime if path.suffix != ".py"}
    assert written == {"agent.proto", "agent_pb2.pyi"}  # no process reads them: modules are generated from one
    assert not [path for path in runtime if path.name.startswith("test_") or path.name.endswith("_test.py")]


def test_settings_on_the_command_line_become_flowers_two_configurations(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ["0", "1"])
    words = ["rounds=3", "methods=fedavg,fedthe[beta=1;objective=em]", "download=yes", "num-gpus=0.5"]
    submission = parse(["--clients", "7", "--cpus", "3", "--set", *words, "--set", "run-name=a", "init=b.safetensors"])
    assert submission.config == {
        "rounds": 3, "methods": "fedavg,fedthe[beta=1;objective=em]", "download": True, "num-gpus": 0.5,
        "device": "cuda", "run-name": "a", "clients": 7, "workers": 3,
        "results": str(tmp_path / "results"), "init": str(tmp_path / "b.safetensors"),
    }  # fmt: skip
    assert submission.folder == tmp_path / "results" / "a"
    options = dict(word.split("=") for word in submission.federation().split())
    assert options["num-supernodes"] == "7"
    assert options["init-args-num-cpus"] == "3"
    assert options["client-resources-num-cpus"] == "1"
    assert options["client-resources-num-gpus"] == "0.5"
    assert options["init-args-num-gpus"] == "2"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("round=1", "did you mean rounds"),
        ("rounds=many", "allowed is a value of type int"),
        ("rounds", "allowed is key=value"),
        ("clients=3", "--clients"),
    ],
)
def test_words_that_flower_would_refuse_without_a_name_are_refused_by_name(word: str, message: str, capsys) -> None:
    with pytest.raises(SettingsError, match=message):
        parse(["--set", word])
    assert main(["--set", word]) == 2
    assert message in capsys.readouterr().err


def test_a_superlink_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", "print('no room'); raise SystemExit(3)"], stdout=file)
    (port,) = free_ports(1)
    with pytest.raises(FlowerError, match=r"(?s)status 3.*no room"):
        wait_until_healthy(process, f"http://127.0.0.1:{port}/health", log)


def test_stop_ends_processes_that_ignore_the_request(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(superlink, "STOPPING", ((signal.SIGTERM, 1.0), (signal.SIGKILL, 10.0)))
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", deaf], env={**os.environ, "FLWR_HOME": str(tmp_path)},
        stdout=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        assert superlink.started(tmp_path) == [process.pid]
        assert stop(tmp_path) == []
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_run_through_flowers_cli_completes_and_leaves_files_but_no_process(mark: Mark, tmp_path: Path, capfd) -> None:
    status = main([*SMALL, f"results={tmp_path}", "run-name=cli"])
    assert status == 0, capfd.readouterr()
    assert mark.living() == []
    folder = tmp_path / "cli"
    assert [name for name in FILES if not (folder / name).is_file() or not (folder / name).stat().st_size] == []
    settings = tomllib.loads((folder / "settings.toml").read_text(encoding="utf-8"))
    assert (settings["clients"], settings["rounds"], settings["fraction"]) == (2, 1, 0.2)
    rows = (folder / "table.csv").read_text(encoding="utf-8").splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == ["fedavg", "personal", "btfl"]


def test_a_failed_run_has_an_exit_status_of_its_own(mark: Mark, tmp_path: Path, capsys, monkeypatch) -> None:
    """`test_deployment` has a real one, which Flower's CLI reports with status 0."""

    def failed(*_: object, **__: object) -> None:
        raise FlowerError("finished:failed: rounds = -1")

    monkeypatch.setattr(flower_cli, "run", failed)
    assert main([*SMALL, f"results={tmp_path}"]) == 1
    assert "run failed: finished:failed: rounds = -1" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_script_leaves_no_process(mark: Mark, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "fedtta.simulation.flower_cli", *SMALL, f"results={tmp_path}"],
        cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        heard = list(until(process.stdout, "Starting Flower Simulation"))
        assert len(mark.living()) > 3, heard  # the script, flwr, SuperLink, SuperExec, simulation
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert mark.living() == []


def until(lines: IO[str], word: str) -> Iterator[str]:
    """Yield lines up to the one that has `word` in it."""
    for line in lines:
        yield line
        if word in line:
            return
    raise AssertionError(f"no line with {word!r}")
