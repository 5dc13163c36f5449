"""Where Flower finds the ServerApp in its bundle; see `client_app`."""

import fedtta  # noqa: F401  (first, and by its own name)
from fedtta.server.app import app

__all__ = ["app"]
