"""No secret stands in a log: a run with masks, an agent with TLS and trackers with passwords, each at level debug."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedtta.client.agent.server import serve as serve_agent
from fedtta.messages.flower import allow_messages
from fedtta.messages.requests import Request, Train
from fedtta.privacy import masking
from fedtta.server.app import serve
from fedtta.server.events import Events
from fedtta.server.trackers import Trackers
from fedtta.settings import Settings, logs
from fedtta.simulation.keys import make_keys
from tests.client.agent.fake import TIMEOUT, predictor, refused, request
from tests.hostile.device import OPEN, agent_in
from tests.server.test_trackers import RUN, a_round
from tests.transports import devices

SECURE = Settings(
    clients=4, fraction=0.15, rounds=1, local_epochs=1, image_size=16, methods="fedavg,btfl", shifts="original",
    device="cpu", node_timeout=5, round_timeout=60, secure_aggregation=True, log_format="json", log_level="debug",
)  # fmt: skip


def parts(keys: Path) -> set[str]:
    """The lines of all private keys."""
    texts = [path.read_text() for path in keys.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    return {line for text in texts for line in text.splitlines() if len(line) >= 16 and "-----" not in line}


def written(secret: bytes) -> set[str]:
    return {secret.hex(), base64.b64encode(secret).decode().rstrip("="), str(secret), str(list(secret))[1:-1]}


def test_neither_keys_nor_masks_are_in_the_logs_of_a_run_and_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path / "keys", nodes=4, agents=["localhost"])
    secrets: list[bytes] = []
    for name in ("new_secret", "shared_key"):
        original = getattr(masking, name)

        def kept(*values: Any, original: Any = original) -> bytes:
            secrets.append(original(*values))
            return secrets[-1]

        monkeypatch.setattr(masking, name, kept)

    def watch(partition: int, message: Request) -> None:
        if partition == 1 and isinstance(message, Train):
            raise RuntimeError("unplugged")  # the others' shares take its masks away

    caplog.set_level(logging.DEBUG)
    allow_messages()
    own = {"certificate": "agent-localhost.crt", "key": "agent-localhost.key", "client_ca": "agents-ca.crt"}
    tls = {key: str(tmp_path / "keys" / name) for key, name in own.items()}
    agent = agent_in(tmp_path, OPEN, name="2", listen="localhost:0", relay=f"unix:{tmp_path}/r.sock", **tls)
    transport = devices(SECURE, watch=watch)
    transport.clients[900 - 2] = agent.perform
    sockets = serve_agent(agent, agent.config)
    restore = logs.configure("json", "debug", agent.log.fields)
    try:
        for line in (
            grpc.insecure_channel(sockets.listen),
            grpc.secure_channel(sockets.listen, grpc.ssl_channel_credentials()),
        ):
            with line:
                refused(
                    lambda line=line: predictor(line).Predict(request(), timeout=TIMEOUT), grpc.StatusCode.UNAVAILABLE
                )
        serve(transport, SECURE, tmp_path / "run")
    finally:
        sockets.stop(TIMEOUT)
        agent.close()
        restore()
    stderr, log = capfd.readouterr().err, (tmp_path / "state" / "agent.log").read_text()
    everything = "\n".join((stderr, log, caplog.text, (tmp_path / "run" / "metrics.jsonl").read_text()))
    private = parts(tmp_path / "keys")
    assert len(private) > 10
    assert len(secrets) > 20
    assert [one for secret in secrets for one in written(secret) if one in everything] == []
    assert [one for one in private if one in everything] == []
    # what was searched is what there is to search
    lines = [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]
    assert {"debug", "info", "warning"} <= {line["level"] for line in lines}
    assert any(line.get("event") == "failed" and line["device"] == "1" for line in lines)
    assert {json.loads(line)["event"] for line in log.splitlines()} > {"start", "request", "stop"}


def test_trackers_do_not_tell_their_passwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MLflow's own error has the whole address of a server that is not there."""
    for name, value in {
        "MLFLOW_TRACKING_URI": "http://operator:pass-1234@127.0.0.1:9",
        "MLFLOW_TRACKING_TOKEN": "token-5678",
        "WANDB_API_KEY": "key-9012",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.DEBUG)
    caplog.handler.setFormatter(logs.TextFormatter())
    events = Events(Trackers(SECURE.replace(track="mlflow"), tmp_path))
    events("run", **RUN)
    events("round", **a_round(1))
    events("end", seconds=1.0, status="completed")
    assert "tracker mlflow: MlflowException: API request to http://***@127.0.0.1:9/" in caplog.text
    assert "3 writes failed" in caplog.text  # to begin, the round, to end
    assert not any(secret in caplog.text for secret in ("pass-1234", "token-5678", "key-9012"))
