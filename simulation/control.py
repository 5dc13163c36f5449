"""Flower's Control API without its command line, which is a process of a second for each question."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from cryptography.x509 import load_pem_x509_certificate

from fedtta.server.events import RunError

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

PATIENCE = 10.0  # seconds for a SuperLink to show its certificate
REGISTERED = "Public key already in use"  # Flower's answer to a known key


class FlowerError(RunError):
    """Flower could not be started or stopped, refused a run, or the run did not complete."""


@dataclass(frozen=True)
class Run:
    """A run of a SuperLink.

    Parameters
    ----------
    number : int
    config : mapping
        The settings that it was submitted with.
    status : str
        Such as "running", "finished:completed", "finished:failed", "finished:stopped".
    details : str
        Flower's reason for its end.
    """

    number: int
    config: Mapping[str, Any]
    status: str
    details: str

    @property
    def over(self) -> bool:
        """Return whether it has ended."""
        return self.status.startswith("finished")


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
        It does not answer, or refuses a call, or is another server; or the certificate is none.
    FileNotFoundError
        There is no such certificate.
    """
    import httpx
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    try:
        trust = ssl.create_default_context(cafile=existing(ca)) if ca else True
    except ssl.SSLError as error:
        raise FlowerError(f"{ca} is no certificate: {error}") from error
    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")  # the SuperLink compares versions
    address = f"http{'s' if ca else ''}://{superlink}"
    try:
        with closing(ControlHttpClient(address, verify=trust, interceptors=[version])) as made:
            yield made
    except httpx.HTTPStatusError as error:
        raise FlowerError(f"the SuperLink at {superlink} refuses: {error.response.text}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FlowerError(f"no SuperLink answers at {superlink}: {error}") from error
    except ValueError as error:  # another server, or a proxy before one
        raise FlowerError(f"what answers at {superlink} is no SuperLink: {error}") from error


def certificate_ends(superlink: str) -> float:
    """Return when the certificate that a SuperLink shows ends, in seconds since 1970; it need not be trusted or valid.

    Raises
    ------
    FlowerError
        It does not answer, or not with TLS.
    """
    host, _, port = superlink.rpartition(":")
    try:
        shown = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=PATIENCE)
        return load_pem_x509_certificate(shown.encode()).not_valid_after_utc.timestamp()
    except (OSError, ValueError) as error:
        raise FlowerError(f"no certificate is shown at {superlink}: {error}") from error


def runs(superlink: str, ca: Path | None, number: int | None = None) -> list[Run]:
    """Return the runs of a SuperLink, or the one with a number; errors are those of `client`."""
    from flwr.common.serde import user_config_from_proto
    from flwr.proto.control_pb2 import ListRunsRequest

    with client(superlink, ca) as control:
        found = control.ListRuns(ListRunsRequest(run_id=number)).run_dict
    return [
        Run(
            number,
            user_config_from_proto(run.override_config),
            ":".join(filter(None, (run.status.status, run.status.sub_status))),
            run.status.details,
        )
        for number, run in found.items()
    ]


def stop(superlink: str, ca: Path | None, number: int) -> None:
    """Stop a run; errors are those of `client`."""
    from flwr.proto.control_pb2 import StopRunRequest

    with client(superlink, ca) as control:
        control.StopRun(StopRunRequest(run_id=number))


def log(superlink: str, ca: Path | None, number: int) -> str:
    """Return the log of a run that has ended, or why it cannot be read."""
    from flwr.proto.control_pb2 import StreamLogsRequest

    try:
        with client(superlink, ca) as control:
            return "".join(part.log_output for part in control.StreamLogs(StreamLogsRequest(run_id=number)))
    except FlowerError as error:
        return f"no log: {error}"


def register(superlink: str, ca: Path | None, key: Path, name: str) -> int | None:
    """Register a node's public key under a name; return the node's id, or None if the key is registered already.

    Raises
    ------
    FlowerError
        The file is no public key of a node, or as `client`.
    FileNotFoundError
        There is no such file.
    """
    from flwr.proto.control_pb2 import RegisterNodeRequest

    request = RegisterNodeRequest(public_key=public_key(key), name=name)
    try:
        with client(superlink, ca) as control:
            return control.RegisterNode(request).node_id
    except FlowerError as error:
        if REGISTERED in str(error):
            return None
        raise


def public_key(path: Path) -> bytes:
    """Return a node's public key as PEM; errors are those of `register` about the file."""
    try:
        public = load_ssh_public_key(existing(path).read_bytes())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FlowerError(f"{path} is not the public key of a node: {error}") from error
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def existing(path: Path) -> Path:
    """Return the path of a key; FileNotFoundError says how keys are made."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; `fedtta keys` makes keys")
    return path
