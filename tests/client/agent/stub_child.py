"""A child of a light agent without torch: it refuses the first piece of work, and is never done with the second."""

from __future__ import annotations

import json
import signal
import sys
from multiprocessing.connection import Connection

TEXT = "no work is done here"
BEGUN = "the second piece has begun"


def main() -> None:
    """Take the config and two pieces of work, two frames each; then wait to be killed."""
    line = Connection(int(sys.argv[1]))
    for _ in range(3):
        line.recv_bytes()
    line.send_bytes(json.dumps({"error": FloatingPointError.__name__, "text": TEXT}).encode())
    line.send_bytes(b"")
    for _ in range(2):
        line.recv_bytes()
    line.send_bytes(json.dumps({"note": BEGUN}).encode())
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
