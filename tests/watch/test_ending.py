"""When the SuperLink's certificate ends: read off a real handshake, trusted or not, valid or not."""

from __future__ import annotations

import datetime
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedtta.simulation import certificates
from fedtta.simulation.control import certificate_ends
from fedtta.simulation.keys import Keys, make_keys
from fedtta.simulation.superlink import FlowerError
from fedtta.watch.listing import LOOK, PAUSE, Ending


@contextmanager
def served(keys: Keys | None) -> Iterator[str]:
    """A server with the SuperLink's certificate, or without TLS; returns its address."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    if keys is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*keys.server)
        made.socket = context.wrap_socket(made.socket, server_side=True)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


@pytest.mark.parametrize("made", [0, 400])
def test_the_end_of_a_certificate_that_is_valid_and_of_one_that_has_ended(
    made: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=made)
    monkeypatch.setattr(certificates, "_now", lambda: past)
    keys, _ = make_keys(tmp_path, 1, days=365)
    with served(keys) as address:
        left = (certificate_ends(address) - time.time()) / 86_400
    assert left == pytest.approx(365 - made, abs=0.01)


def test_without_tls_or_an_answer_it_is_not_known() -> None:
    with served(None) as address, pytest.raises(FlowerError, match=f"no certificate is shown at {address}: "):
        certificate_ends(address)
    for wrong in (address, "nowhere", "127.0.0.1:x"):
        with pytest.raises(FlowerError, match=f"no certificate is shown at {wrong}: "):
            certificate_ends(wrong)


def test_it_is_asked_for_now_and_then_and_the_last_answer_stays() -> None:
    now, answers, asked = 0.0, [FlowerError("down"), 100.0, FlowerError("down"), 200.0], []

    def ask() -> float:
        answer = answers[len(asked)]
        asked.append(now)
        if isinstance(answer, FlowerError):
            raise answer
        return answer

    ends, found = Ending(ask, lambda: now), []
    for moment in (0.0, 5.0, PAUSE, 20.0, PAUSE + LOOK, PAUSE + LOOK + 5.0, PAUSE + 2 * LOOK):
        now = moment
        found.append(ends())
    assert found == [None, None, 100.0, 100.0, 100.0, 100.0, 200.0]
    assert asked == [0.0, PAUSE, PAUSE + LOOK, PAUSE + 2 * LOOK]
