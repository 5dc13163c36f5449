"""Where Flower finds the ClientApp in its bundle.

Flower looks a component up in one thread while another thread imports the app. A module of a package would then be
searched before `fedtta/__init__.py` has put the parts on the package's path; this module is found in any case, and the
first import waits until `fedtta` is complete.
"""

import fedtta  # noqa: F401  (first, and by its own name)
from fedtta.client.app import app

__all__ = ["app"]
