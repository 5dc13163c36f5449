"""The owner's commands against an agent's sockets."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedtta.client.agent import control
from fedtta.client.agent.control import Connection, main
from fedtta.client.agent.status import Status
from fedtta.simulation.keys import make_keys
from tests.client.agent.fake import FakeAgent, folder, running
from tests.client.agent.test_sockets import over_tls

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["status"],
            """model      run/ce/3/abcd
adapter    fedthe (held by the guard)
choice     btfl since sample 7 (the samples after drift)
classes    a, b, c
samples    0 predicted, 2 not saved, 0 requests wait
accuracy   75% (50% to 100%), estimated without labels
candidate  shadow run/ce/4/bbbbbbbb
refused    run/ce/2/cccccccc: not finite
training   train
data       61 files, 1 skipped
guard      one-class 4
snapshots  1, 2
up         2 s
note: n
note: 1 damaged""",
        ),
        (
            ["models"],
            """kept      1970-01-01 00:01Z  run/ce/3/aaaaaaaa  (rolled back; accuracy 0.5)
candidate 1970-01-01 00:02Z  run/ce/4/bbbbbbbb""",
        ),
        (["approve"], "served run/ce/4/bbbbbbbb after 7 samples"),
        (["reject", "v"], "refused v"),
        (["rollback"], "served run/ce/3/aaaaaaaa after 9 samples"),
        (["rollback", "v"], "served v after 9 samples"),
        (["rescan"], "61 samples, 60 used, 1 skipped\n'bad.png': damaged"),
    ],
)
def test_a_command_prints_what_the_agent_says(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running() as (_, sockets):
        assert main(["--socket", sockets.listen, *words]) == 0
    assert capsys.readouterr().out == told + "\n"


def test_no_text_of_an_agent_moves_the_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = FakeAgent.status
    monkeypatch.setattr(FakeAgent, "status", lambda agent: replace(said(agent), notes=["a\x1b[2J\u202eb"]))
    with running() as (_, sockets):
        assert main(["--socket", sockets.listen, "status"]) == 0
        monkeypatch.setattr(FakeAgent, "status", refuse)
        assert main(["--socket", sockets.listen, "status"]) == 1
    told = capsys.readouterr()
    assert "\nnote: a\ufffd[2J\ufffdb\n" in told.out
    assert told.err == "a\ufffd[2J\n"


def refuse(_: FakeAgent) -> Status:
    raise ValueError("a\x1b[2J")


def test_a_refusal_and_a_missing_agent_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as (_, sockets):
        assert main(["--socket", sockets.listen, "approve", "x"]) == 1
    assert capsys.readouterr().err == "no model x waits to be served\n"
    with folder() as path:
        assert main(["--socket", f"unix:{path}/none.sock", "status"]) == 1
        assert f"no agent answers at unix:{path}/none.sock" in capsys.readouterr().err
    assert main(["--socket", "localhost:7000", "status"]) == 2
    assert "needs --ca, --certificate and --key" in capsys.readouterr().err
    assert main(["--socket", "/run/agent.sock", "status"]) == 2
    assert "/run/agent.sock: allowed are unix:PATH, such as" in capsys.readouterr().err
    files = [word for name in ("ca", "certificate", "key") for word in (f"--{name}", "/no/such.pem")]
    assert main(["--socket", "localhost:7000", *files, "status"]) == 2
    assert "/no/such.pem" in capsys.readouterr().err


def test_an_agent_on_tcp_is_reached_with_certificates(tmp_path: Path) -> None:
    make_keys(tmp_path, nodes=1, agents=["localhost"])
    with running(**over_tls(tmp_path)) as (_, sockets):
        pair = (str(tmp_path / "program.crt"), str(tmp_path / "program.key"))
        agent = Connection(sockets.listen, str(tmp_path / "agents-ca.crt"), *pair)
        assert control.rollback(agent).startswith("served")


def test_the_command_needs_no_torch() -> None:
    run = "from fedtta.client.agent.control import main; main(['--socket', 'x', 'models'])"
    with running() as (_, sockets):
        code = run.replace("'x'", repr(sockets.listen)) + "; import sys; print('torch' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.stdout.splitlines()[-1] == "False", done.stderr
