"""A TCP proxy of this machine that is slow, narrow and, when told to, cut off."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

PIECE = 1 << 14  # bytes


class Proxy:
    """Forwards connections to `target`, host:port.

    Pieces of what is sent go one after another, each for `delay` seconds and as long as `rate`, bytes a second, says.
    """

    def __init__(self, target: str, delay: float = 0.0, rate: float = float("inf")) -> None:
        host, _, port = target.rpartition(":")
        self.target, self.delay, self.rate = (host, int(port)), delay, rate
        self.connections = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._off = False
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Break all connections, and every new one for so long."""
        self._off = True
        self._break_all()
        time.sleep(seconds)
        self._off = False

    def close(self) -> None:
        self._off = True
        self._door.close()
        self._break_all()

    def _break_all(self) -> None:
        with self._lock:
            broken, self._open = self._open, set()
        for each in broken:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:  # closed
                return
            if self._off:
                near.close()
                continue
            try:
                far = socket.create_connection(self.target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self.connections += 1
            with self._lock:
                self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                time.sleep(self.delay + len(piece) / self.rate)
                sink.sendall(piece)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(target: str, delay: float = 0.0, rate: float = float("inf")) -> Iterator[Proxy]:
    """Forward while this is open."""
    made = Proxy(target, delay, rate)
    try:
        yield made
    finally:
        made.close()
