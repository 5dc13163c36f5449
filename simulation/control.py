"""Flower's Control API without its command line: what `flwr` does not offer, or does not print."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedtta.simulation.superlink import FlowerError

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient


@contextmanager
def client(superlink: str, ca: Path | None) -> Iterator[ControlHttpClient]:
    """Connect to a SuperLink.

    Parameters
    ----------
    superlink : str
        "<host>:<port>" of its Runtime HTTP API.
    ca : Path or None
        Certificate of the authority to trust; None: connect without TLS.

    Raises
    ------
    FlowerError
        It does not answer, or refuses a call.
    FileNotFoundError
        There is no such certificate.
    """
    import httpx
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    trust = ssl.create_default_context(cafile=existing(ca)) if ca else True
    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")  # the SuperLink compares versions
    made = ControlHttpClient(f"http{'s' if ca else ''}://{superlink}", verify=trust, interceptors=[version])
    try:
        yield made
    except httpx.HTTPStatusError as error:
        raise FlowerError(f"the SuperLink at {superlink} refuses: {error.response.text}") from error
    except httpx.HTTPError as error:
        raise FlowerError(f"no SuperLink answers at {superlink}: {error}") from error
    finally:
        made.close()


def existing(path: Path) -> Path:
    """Return the path of a key; FileNotFoundError says how keys are made."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; `fedtta keys` makes keys")
    return path
