"""The agent's sockets: who reaches what, in which version, with which certificate, and what stands in their way."""

from __future__ import annotations

import grp
import os
import re
import socket
import stat
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedtta.client.agent import server
from fedtta.messages import agent_pb2 as pb
from fedtta.simulation.keys import make_keys
from tests.client.agent.fake import (
    TIMEOUT,
    FakeAgent,
    channel,
    config,
    first,
    folder,
    predictor,
    refused,
    request,
    running,
)


def test_messages_over_the_limit_are_refused() -> None:
    with running(message_limit_mb=1) as (fake, sockets), channel(sockets.listen) as line:
        large = pb.PredictRequest(images=pb.Images(values=bytes(1 << 20)))
        text = refused(lambda: predictor(line).Predict(large, timeout=TIMEOUT), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert "larger than max" in text
        assert fake.seen == []
        predictor(line).Predict(request(), timeout=TIMEOUT)


def test_each_socket_offers_its_own_service_and_other_versions_are_told_which_is_spoken() -> None:
    with running() as (_, sockets), channel(sockets.listen) as own, channel(sockets.relay) as relay:

        def ask(line: grpc.Channel, method: str) -> str:
            call = line.unary_unary(method)
            return refused(lambda: call(b"", timeout=TIMEOUT), grpc.StatusCode.UNIMPLEMENTED)

        for method in ("Predict", "PredictStream", "Status", "Snapshot", "Rollback", "Reset"):
            name = f"/fedtta.agent.v1.Predictor/{method}"
            assert ask(relay, name) == f"{name}: this socket offers fedtta.agent.v1.Relay"
        name = "/fedtta.agent.v1.Relay/Perform"
        assert ask(own, name) == f"{name}: this socket offers fedtta.agent.v1.Predictor"
        name = "/fedtta.agent.v1.Predictor/Explain"
        assert ask(own, name) == f"{name}: this socket offers fedtta.agent.v1.Predictor"
        for line in (own, relay):
            name = "/fedtta.agent.v2.Predictor/Predict"
            assert ask(line, name) == f"{name}: this agent speaks fedtta.agent.v1"


def test_bytes_that_are_no_message_are_refused_with_a_line_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with running() as (fake, sockets), channel(sockets.listen) as own, channel(sockets.relay) as relay:
        names = [f"Predictor/{name}" for name in ("Predict", "Status", "Rollback")] + ["Relay/Perform"]
        for name in names:
            call = (relay if name.startswith("Relay") else own).unary_unary(f"/fedtta.agent.v1.{name}")
            refused(lambda call=call: call(b"\xff\xff no message", timeout=TIMEOUT), grpc.StatusCode.INVALID_ARGUMENT)
        stream = own.stream_stream("/fedtta.agent.v1.Predictor/PredictStream")
        refused(lambda: list(stream(iter([b"\xff\xff"]), timeout=TIMEOUT)), grpc.StatusCode.INVALID_ARGUMENT)
        predictor(own).Predict(request(), timeout=TIMEOUT)
    assert [event for event, _ in fake.log.events] == ["request refused"] * (len(names) + 1)
    assert not [record for record in caplog.records if record.exc_info]


def test_what_fails_unexpectedly_is_one_line_that_names_its_place(caplog: pytest.LogCaptureFixture) -> None:
    with running() as (fake, sockets), channel(sockets.listen) as line:
        fake.status = lambda: {}["nothing"]  # type: ignore[method-assign]
        refused(lambda: predictor(line).Status(pb.StatusRequest(), timeout=TIMEOUT), grpc.StatusCode.INTERNAL)
    (record,) = [record for record in caplog.records if "a call failed" in record.message]
    assert re.search(r"KeyError: 'nothing' at .*test_sockets\.py:\d+$", record.message)
    assert not record.exc_info


def test_health_says_whether_the_adapters_state_is_saved() -> None:
    with running() as (fake, sockets), channel(sockets.listen) as line:
        stub, asked = health_pb2_grpc.HealthStub(line), health_pb2.HealthCheckRequest(service=server.STATE)
        assert stub.Check(asked, timeout=TIMEOUT).status == health_pb2.HealthCheckResponse.SERVING
        fake.trouble = "[Errno 28] No space left on device"
        assert stub.Check(asked, timeout=TIMEOUT).status == health_pb2.HealthCheckResponse.NOT_SERVING
        other = health_pb2.HealthCheckRequest(service=server.PREDICTOR)
        assert stub.Check(other, timeout=TIMEOUT).status == health_pb2.HealthCheckResponse.SERVING


def test_both_sockets_say_that_they_serve() -> None:
    with running() as (_, sockets):
        for address, name in ((sockets.listen, "Predictor"), (sockets.relay, "Relay")):
            with channel(address) as line:
                asked = health_pb2.HealthCheckRequest(service=f"fedtta.agent.v1.{name}")
                answer = health_pb2_grpc.HealthStub(line).Check(asked, timeout=TIMEOUT)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_sockets_are_their_users_alone_and_go_with_the_agent() -> None:
    with running() as (_, sockets):
        paths = [Path(address.removeprefix("unix:")) for address in (sockets.listen, sockets.relay)]
        assert [path.name for path in paths] == ["agent.sock", "relay.sock"]
        for path in paths:
            assert stat.S_ISSOCK(path.stat().st_mode)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        sockets.stop(TIMEOUT)
        assert not [path for path in paths if path.exists()]


def test_a_socket_is_shared_with_a_group_that_there_is(tmp_path: Path) -> None:
    path = tmp_path / "relay.sock"
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        server.share(path, grp.getgrgid(os.getgid()).gr_name)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with pytest.raises(ValueError, match="relay-group = 'no-such-group'"):
            server.share(path, "no-such-group")


def test_what_a_dead_agent_has_left_is_removed_and_nothing_else() -> None:
    with folder() as path:
        left = path / "agent.sock"
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(left))
        dead.close()
        server.free(left)
        assert not left.exists()
        left.write_text("mine")
        with pytest.raises(FileExistsError, match=r"agent\.sock exists and is not a socket"):
            server.free(left)
    with running() as (_, sockets):
        with pytest.raises(FileExistsError, match=r"agent\.sock: another process listens there"):
            server.free(Path(sockets.listen.removeprefix("unix:")))
        # a second agent whose relay is free does not keep its first socket either
        with folder() as path:
            other = config(path, relay=sockets.relay)
            with pytest.raises(FileExistsError, match=r"relay\.sock: another process"):
                server.serve(FakeAgent(other), other)  # type: ignore[arg-type]
            assert not (path / "agent.sock").exists()
        with channel(sockets.listen) as line:
            predictor(line).Predict(request(), timeout=TIMEOUT)


def test_a_path_too_long_for_a_socket_is_named() -> None:
    with folder() as path:
        long = config(path / ("x" * 100))
        with pytest.raises(ValueError, match=r"xxx/agent\.sock: \d+ bytes; the path of a socket has at most 107"):
            server.serve(FakeAgent(long), long)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of an agent on TCP and of a program; beside them in `other` those of another authority."""
    path = tmp_path_factory.mktemp("keys")
    for one in (path, path / "other"):
        make_keys(one, nodes=1, agents=["localhost"])
    return path


def over_tls(keys: Path) -> dict[str, str]:
    return {
        "listen": "localhost:0",
        "certificate": str(keys / "agent-localhost.crt"),
        "key": str(keys / "agent-localhost.key"),
        "client-ca": str(keys / "agents-ca.crt"),
    }


def test_over_tcp_both_sides_show_a_certificate(keys: Path) -> None:
    def credentials(trusted: Path, own: Path | None) -> grpc.ChannelCredentials:
        pair = [(own / f"program.{kind}").read_bytes() for kind in ("key", "crt")] if own else [None, None]
        return grpc.ssl_channel_credentials((trusted / "agents-ca.crt").read_bytes(), *pair)

    with running(**over_tls(keys)) as (fake, sockets):
        assert re.fullmatch(r"localhost:[1-9]\d*", sockets.listen)

        def ask(line: grpc.Channel) -> float:
            with line:
                return first(predictor(line).Predict(request(0.5), timeout=TIMEOUT))

        other = keys / "other"
        for refused_one in (
            grpc.insecure_channel(sockets.listen),
            grpc.secure_channel(sockets.listen, credentials(keys, None)),  # no certificate
            grpc.secure_channel(sockets.listen, credentials(keys, other)),  # one of another authority
            grpc.secure_channel(sockets.listen, credentials(other, keys)),  # who takes the agent for an impostor
        ):
            refused(lambda line=refused_one: ask(line), grpc.StatusCode.UNAVAILABLE)
        assert fake.seen == []
        assert ask(grpc.secure_channel(sockets.listen, credentials(keys, keys))) == 0.5
        # a port is not shared either
        with folder() as path:
            again = config(path, **{**over_tls(keys), "listen": sockets.listen})
            with pytest.raises(OSError, match=r"cannot listen at localhost:\d+: it is in use"):
                server.serve(FakeAgent(again), again)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"certificate": "gone.crt"}, r"certificate = .*gone\.crt, key = .*agent-localhost\.key: .*No such file"),
        ({"key": "program.key"}, r"key = .*program\.key: .*mismatch"),
        ({"client-ca": "agent-localhost.key"}, r"client-ca = .*agent-localhost\.key: .*"),
        ({"client-ca": "gone.crt"}, r"client-ca = .*gone\.crt: .*No such file"),
    ],
)
def test_tls_files_that_do_not_fit_are_named(keys: Path, changes: dict[str, str], told: str) -> None:
    with folder() as path:
        wrong = config(path, **{**over_tls(keys), **{key: str(keys / name) for key, name in changes.items()}})
        with pytest.raises(ValueError, match=told):
            server.serve(FakeAgent(wrong), wrong)  # type: ignore[arg-type]
