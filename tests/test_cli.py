"""The command `fedtta`: what each command calls, how its help looks, and how it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from fedtta import cli
from fedtta.client.agent.store import Lock
from fedtta.client.config import AgentConfig
from fedtta.settings import GROUPS, Settings, keys_in
from fedtta.simulation import devices
from tests.client.agent import fake

ROOT = Path(__file__).parent.parent
TREE: Any = get_command(cli.app)
#: Commands of typer's; the others show the help of the program that they call.
OTHERS = {"agent", "bench", "data", "demo", "deploy-local", "export", "keys", "report", "supernode", "watch"}
OWN = sorted(set(TREE.commands) - OTHERS)


def invoke(*words: str, width: int = 80) -> Result:
    return CliRunner().invoke(cli.app, list(words), env={"COLUMNS": str(width), "TERM": "dumb"}, prog_name="fedtta")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """The programs that were called, in place of calling them; each "fails" with the number of its words."""
    calls: list[tuple[str, list[str]]] = []

    def find(name: str) -> ModuleType:
        def main(words: list[str]) -> int:
            calls.append((name, words))
            return 0 if "fails" not in words else 1

        module = ModuleType(name)
        module.main = main  # type: ignore[attr-defined]
        return module

    monkeypatch.setattr(cli, "import_module", find)
    return calls


# Help


@pytest.mark.parametrize("command", ["", *OWN, "devices list", "devices enrol", "devices remove"])
def test_help_fits_a_screen(command: str) -> None:
    done = invoke(*command.split(), "--help")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert 6 < len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert f"fedtta {command}".strip() in done.output


def test_help_lists_every_command_and_groups_them() -> None:
    shown = invoke("--help").output
    assert all(f" {name} " in shown for name in TREE.commands)
    assert all(panel in shown for panel in (cli.TRY, cli.FEDERATION, cli.DEVICE, cli.RESULTS))


def test_the_usual_settings_are_in_the_help_of_run() -> None:
    shown = invoke("run", "--help").output
    for key in cli.COMMON:
        assert f"--{key} " in shown
        assert f"({Settings().flat()[key] or 'none'}"[:18] in shown


def test_settings_are_shown_by_group() -> None:
    groups = invoke("settings", width=200).output
    assert all(name in groups for name in GROUPS)
    for group in GROUPS:
        shown = [line.split()[0] for line in invoke("settings", group, width=200).output.splitlines()[1:]]
        assert set(keys_in(group)) <= set(shown)
    assert "0.05" in invoke("settings", "learning-rate", width=200).output


def test_options_in_brackets_are_shown() -> None:
    assert "fedthe[beta=1;objective=em]" in invoke("settings", "methods", width=400).output
    assert "tent[lr=0.001]" in invoke("serve", "--help", width=200).output


def test_help_imports_neither_torch_nor_flower() -> None:
    code = (
        "import sys; from fedtta.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as end: print(end.code)\n"
        "print([name for name in ('torch', 'flwr', 'ray', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-2:] == ["0", "[]"]


# What is called


@pytest.mark.parametrize(
    ("words", "module", "given"),
    [
        ("run --rounds 3 --settings s.toml --seed=2", "simulation.__main__", "--settings s.toml --rounds 3 --seed=2"),
        ("run --rounds 3 --watch", "simulation.__main__", "--rounds 3 --watch"),
        ("run --watch 127.0.0.1:9000 --seed 2", "simulation.__main__", "--watch 127.0.0.1:9000 --seed 2"),
        ("watch results --run r --listen 127.0.0.1:1", "watch.__main__", "results --run r --listen 127.0.0.1:1"),
        ("supernode --insecure", "client.supernode", "--insecure"),
        ("agent --config device.toml", "client.agent.__main__", "--config device.toml"),
        ("bench run brfl --cells a,b --seeds 3", "benchmarks.__main__", "run brfl --cells a,b --seeds 3"),
        ("keys --nodes 3 --host a --host b", "simulation.keys", "--nodes 3 --host a --host b"),
        ("deploy-local --set rounds=1 seed=2 --nodes 2", "simulation.deploy_local", "--set rounds=1 seed=2 --nodes 2"),
        ("report results/r --plots", "server.report.__main__", "results/r --plots"),
        ("export results/r --format onnx", "models.export", "results/r --format onnx"),
        ("audit --config device.toml --run 3f", "client.agent.audit", "--config device.toml --run 3f"),
        ("data folder:/d --classes a,b", "data.sources.__main__", "folder:/d --classes a,b"),
        ("demo --help", "simulation.demo.__main__", "--help"),
        ("models --agent unix:/a", "client.agent.control", "--socket unix:/a models"),
        ("status --agent b:1 --ca c --certificate d --key e", "client.agent.control",
         "--socket b:1 --ca c --certificate d --key e status"),
        ("rollback --agent unix:/a", "client.agent.control", "--socket unix:/a rollback"),
        ("approve v3 --agent unix:/a", "client.agent.control", "--socket unix:/a approve v3"),
        ("submit rounds=3 --superlink h:1 --root-certificates c", "simulation.submit",
         "--superlink h:1 --root-certificates c run --set rounds=3"),
    ],
)  # fmt: skip
def test_a_command_calls_its_program(words: str, module: str, given: str, called: list[tuple[str, list[str]]]) -> None:
    assert invoke(*words.split()).exit_code == 0
    assert called == [(f"fedtta.{module}", given.split())]


def test_the_status_of_a_program_is_the_commands(called: list[tuple[str, list[str]]]) -> None:
    assert invoke("report", "fails").exit_code == 1


def test_all_agents_are_asked_and_the_worst_status_counts(called: list[tuple[str, list[str]]]) -> None:
    done = invoke("rollback", "--agent", "fails", "--agent", "unix:/b")
    assert done.exit_code == 1
    assert [words[1] for _, words in called] == ["fails", "unix:/b"]
    assert "unix:/b:" in done.output


def test_serve_writes_the_agents_config(tmp_path: Path, called: list[tuple[str, list[str]]]) -> None:
    model = tmp_path / "model.safetensors"
    model.touch()
    state = tmp_path / "state"
    assert invoke("serve", str(model), "--state-dir", str(state), "--listen", "unix:/l").exit_code == 0
    called.clear()
    assert invoke("serve", str(model), "--state-dir", str(state), "--adapter", "tent", "--name", "a").exit_code == 0
    assert called == [("fedtta.client.agent.__main__", ["--config", str(state / "device.toml")])]
    content = tomllib.loads((state / "device.toml").read_text())
    assert content == {"name": "a", "model": str(model), "state-dir": str(state), "adapter": "tent"}


def test_a_relative_socket_of_serve_is_where_the_other_commands_look(
    tmp_path: Path, called: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").touch()
    assert invoke("serve", "m", "--state-dir", "state", "--listen", "unix:run/a.sock").exit_code == 0
    assert AgentConfig.from_toml(tmp_path / "state/device.toml").listen_address == f"unix:{tmp_path}/run/a.sock"


def test_serve_leaves_the_config_of_a_running_agent_alone(tmp_path: Path, called: list[tuple[str, list[str]]]) -> None:
    (tmp_path / "m").touch()
    (tmp_path / "device.toml").write_text('name = "a"\n')
    lock = Lock(tmp_path)
    done = invoke("serve", str(tmp_path / "m"), "--state-dir", str(tmp_path), "--name", "b")
    assert (done.exit_code, called) == (1, [])
    assert f"error: {tmp_path} is in use by the agent with process id {os.getpid()}" in done.stderr
    assert (tmp_path / "device.toml").read_text() == 'name = "a"\n'
    lock.release()
    assert invoke("serve", str(tmp_path / "m"), "--state-dir", str(tmp_path), "--name", "b").exit_code == 0
    assert tomllib.loads((tmp_path / "device.toml").read_text())["name"] == "b"


@pytest.mark.parametrize(
    ("text", "adapter", "told"),
    [
        (
            'name = "a"\ndata = "folder:/d"\n[policy]\n',
            "none",
            "device.toml has keys that serve does not write (data, pol",
        ),
        ("name =", "none", "device.toml: Invalid value"),
        ('name = "a"\n', "nonsense[", "adapter = 'nonsense['"),
    ],
)
def test_serve_leaves_a_config_alone_that_it_did_not_write(
    tmp_path: Path, called: list[tuple[str, list[str]]], text: str, adapter: str, told: str
) -> None:
    (tmp_path / "m").touch()
    (tmp_path / "device.toml").write_text(text)
    done = invoke("serve", str(tmp_path / "m"), "--state-dir", str(tmp_path), "--adapter", adapter)
    assert (done.exit_code, called) == (2, [])
    assert told in done.stderr
    assert (tmp_path / "device.toml").read_text() == text


def test_an_agent_answers_its_owner() -> None:
    pytest.importorskip("fedtta.client.agent.control")
    with fake.running() as (agent, _):
        address = agent.config.listen_address
        done = invoke("status", "--agent", address)
        assert done.exit_code == 0
        assert "run/ce/3/abcd" in done.output
        several = invoke("status", "--agent", f"unix:{agent.config.state_dir}/nowhere", "--agent", address)
        assert several.exit_code == 1
        assert "run/ce/3/abcd" in several.output
        assert f"no agent answers at unix:{agent.config.state_dir}/nowhere" in several.stderr


# What is refused


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("run --round 3", "unknown setting 'round' (did you mean rounds?)"),
        ("run --rounds many", "rounds = 'many'"),
        ("run --rounds", "--rounds"),
        ("run extra", "extra"),
        ("run --settings nowhere.toml", "nowhere.toml"),
        ("runs", "runs"),
        ("settings wether", "no group and no key is called 'wether'"),
        ("serve nowhere.safetensors --state-dir s", "nowhere.safetensors"),
        ("serve file --state-dir file", "File exists: 'file'"),
        ("serve file --state-dir file/state", "'file"),
        ("models", "--agent"),
        ("devices list --root-certificates nowhere.crt", "nowhere.crt"),
        ("devices enrol nowhere.pub --insecure", "nowhere.pub"),
        ("report nowhere", "nowhere"),
        ("watch --listen 0.0.0.0:1", "--listen 0.0.0.0:1"),
        ("keys --nodes 0 --folder k", "0"),
        ("data folder:nowhere --classes a,b", "nowhere"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    done = invoke(*words.split(), width=200)
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert told in line


@pytest.mark.parametrize("words", ["", "devices"])
def test_without_a_command_there_is_the_help_alone(words: str) -> None:
    done = invoke(*words.split())
    assert (done.exit_code, done.stderr) == (2, "")
    assert "Usage: fedtta" in done.stdout


def test_a_superlink_that_does_not_answer_is_status_1(tmp_path: Path) -> None:
    done = invoke("devices", "list", "--superlink", "127.0.0.1:1", "--insecure", width=200)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("failed: no SuperLink answers at 127.0.0.1:1")


@pytest.mark.parametrize("agents", [["a=unix:x", "a=unix:y"], ["unix:x"], ["a="], ["b=unix:x"]])
def test_agents_of_a_list_of_devices_are_each_named_once(agents: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of two was asked, and one of a device that is not enrolled for nothing."""
    found = [devices.Device("a", 1, "online", None)]
    monkeypatch.setattr(devices, "listed", lambda *_: found)
    monkeypatch.setattr(devices, "from_agent", lambda _: devices.Known("d", "m"))
    done = invoke("devices", "list", "--insecure", *(word for one in agents for word in ("--agent", one)))
    assert done.exit_code == 2
    assert f"--agent {agents[-1].partition('=')[0]}" in done.stderr
    assert invoke("devices", "list", "--insecure", "--agent", "a=unix:x").exit_code == 0


# Real processes


def test_the_help_of_run_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedtta", "run", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "fedtta run" in done.stdout
    assert done.stderr == ""


def test_an_unexpected_error_shows_no_values() -> None:
    """They may be a private key, a token or an image."""
    program = """
from fedtta.cli import app
@app.command()
def broken():
    token = "-".join(["a", "secret"])
    raise RuntimeError("broken")
app(["broken"])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "RuntimeError: broken" in done.stderr
    assert "a-secret" not in done.stderr


@pytest.mark.parametrize("lines", [1, 50_000])  # fewer than the pipe holds, and more
def test_a_reader_that_ends_first_is_no_error(tmp_path: Path, lines: int) -> None:
    (tmp_path / "audit.jsonl").write_text('{"time": "2026-01-01T00:00:00+00:00", "phase": "train"}\n' * lines)
    words = [sys.executable, "-m", "fedtta", "audit", "--state-dir", str(tmp_path)]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        words, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_where_only_a_light_agent_is_installed_the_other_commands_are_named(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')\n")
    done = subprocess.run(
        [sys.executable, "-m", "fedtta", "status", "--agent", "unix:a.sock"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the command fedtta needs typer, which is not installed here; ")
    assert "python -m fedtta.client.agent.control --socket ADDRESS status" in line
