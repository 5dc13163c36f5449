"""Clients that stall do not hold the places of the pages' server."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import uvicorn

from fedtta.watch import __main__ as program
from fedtta.watch import prompt
from fedtta.watch.access import Access
from fedtta.watch.app import make_app

TOKEN = "a-token-of-the-server"
HEAD = b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n"
DEADLINE = 60.0


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(prompt, "SECONDS", 0.5)
    options = program.parser().parse_args([str(tmp_path)])
    server = uvicorn.Server(program._loaded(make_app(tmp_path, Access(TOKEN)), options))
    listening = program.listen("127.0.0.1", 0, exact=True)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(DEADLINE)


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", HEAD, HEAD + b"token"])
def test_a_request_that_does_not_arrive_gives_up_its_place(
    begun: bytes, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        stalled = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(70)]
        for one in stalled:
            one.settimeout(DEADLINE)
            one.sendall(begun)
        for one in stalled:
            while one.recv(1 << 16):  # a refusal at most
                pass
        with httpx.Client() as client:
            for _ in range(12):  # longer than the limit, on a connection that is kept
                assert client.get(f"http://127.0.0.1:{port}/login").status_code == 401  # the form
                time.sleep(0.1)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_the_rest_of_a_second_request_is_waited_for_as_shortly(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.settimeout(DEADLINE)
        one.sendall(b"GET /login HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 401")
        one.sendall(b"GET /login HTTP/1.1\r\nHo")
        begin = time.monotonic()
        while one.recv(1 << 16):
            pass
        assert time.monotonic() - begin < DEADLINE
