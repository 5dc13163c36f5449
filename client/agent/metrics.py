"""The agent's metrics over HTTP, for Prometheus: `GET /metrics` at the address `metrics` of `device.toml`.

The numbers are those of `fedtta.messages.exposition` for this device alone. Each scrape has a thread of its own, the
TLS handshake included, and is cut off after `SECONDS`: prometheus-client's own server shakes hands on the thread that
accepts connections, where one that stays silent would block all others.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from fedtta.client.agent.tls import tls_context
from fedtta.client.config import AgentConfig
from fedtta.messages.exposition import metrics
from fedtta.messages.replies import Telemetry

LOG = logging.getLogger("fedtta.agent")
PATH = "/metrics"
SECONDS = 10.0  # for a scrape
SCRAPES = 8  # at a time; further connections are closed
LOOK = 0.2  # seconds between two looks at scrapes that take too long


class MetricsServer:
    """An HTTP server of this process, on a thread of its own.

    Parameters
    ----------
    telemetry : callable
        Returns the device's telemetry; called on other threads.
    config : AgentConfig
        With `metrics`; with certificates, clients must show one.

    Attributes
    ----------
    address : str
        "<host>:<port>", with the port that was chosen for port 0.

    Raises
    ------
    ValueError
        A TLS file is missing or invalid.
    OSError
        The address is in use, or cannot be bound.
    """

    def __init__(self, telemetry: Callable[[], Telemetry], config: AgentConfig) -> None:
        host, _, port = config.metrics.rpartition(":")
        registry = CollectorRegistry()
        registry.register(_Live(telemetry))
        try:
            self._server = _Server(host.strip("[]"), int(port), tls_context(config) if config.certificate else None)
        except OSError as error:
            raise OSError(f"metrics = {config.metrics!r}: cannot listen there: {error}") from error
        self._server.set_app(_only_metrics(make_wsgi_app(registry)))
        self.address = f"{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(LOOK,), name="metrics", daemon=True).start()
        LOG.info("metrics at %s://%s%s", "https" if config.certificate else "http", self.address, PATH)

    def close(self) -> None:
        """Accept no more scrapes and cut off those in progress."""
        self._server.shutdown()
        self._server.server_close()
        self._server.cut()


class _Live(Collector):
    """The metrics of a device at the moment of a scrape."""

    def __init__(self, telemetry: Callable[[], Telemetry]) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterable[Metric]:
        return metrics([self._telemetry()])


class _Server(ThreadingWSGIServer):
    """A server whose connections have a deadline, and of which there are few."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._due: dict[socket.socket, float] = {}  # connection → when it is cut off
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind; WSGIServer would look up the name of the host, which can take long where there is no network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; its handshake comes later, in its own thread."""
        connection, client = self.socket.accept()
        connection.settimeout(SECONDS)
        if self._tls is None:
            return connection, client
        try:
            return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), client
        except OSError:
            connection.close()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, or close it if there are too many."""
        if len(self._due) >= SCRAPES:
            self.shutdown_request(request)
            return
        self._due[request] = time.monotonic() + SECONDS
        try:
            super().process_request(request, client_address)
        except Exception:  # its thread cannot be started
            self._due.pop(request, None)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._due.pop(request, None)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._tls is not None:
            request.do_handshake()
        super().finish_request(request, client_address)

    def service_actions(self) -> None:
        """Cut off the scrapes whose time is over; called between two connections, and every `LOOK` seconds."""
        self.cut(time.monotonic())

    def cut(self, now: float = float("inf")) -> None:
        """Cut off the scrapes that are due."""
        for connection, due in list(self._due.items()):
            if due <= now:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)  # SSLSocket's would go on in plain text

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a scrape was not answered: its client disappeared, showed no certificate, or spoke no HTTP."""
        LOG.debug("a scrape of the metrics was not answered", exc_info=True)


class _Handler(WSGIRequestHandler):
    """A request for metrics, without a log."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: there is a scrape every few seconds."""


def _only_metrics(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Return an application that answers `PATH` alone, and an error as one line of the log."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != PATH:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [f"there is {PATH} only\n".encode()]
        try:
            return app(environ, start_response)
        except Exception as error:  # the text may be about this machine, and stays here
            LOG.error("the metrics cannot be told: %s: %s", type(error).__name__, error)
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b"the agent's log says why\n"]

    return answer
