"""Mutual TLS of an agent's TCP addresses, from the files that its config names."""

from __future__ import annotations

import functools
import ssl
from pathlib import Path

import grpc

from fedtta.client.config import AgentConfig


def tls_context(config: AgentConfig) -> ssl.SSLContext:
    """Return a server's context that demands a certificate of the client; ValueError names an invalid file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    pair = f"certificate = {config.certificate}, key = {config.key}"
    for what, load in (
        (pair, functools.partial(context.load_cert_chain, config.certificate, config.key, _no_password)),
        (f"client-ca = {config.client_ca}", functools.partial(context.load_verify_locations, config.client_ca)),
    ):
        try:
            load()
        except OSError as error:  # ssl.SSLError too
            raise ValueError(f"{what}: {error}") from error
    return context


def credentials(config: AgentConfig) -> grpc.ServerCredentials:
    """Return the credentials of a gRPC server; ValueError names an invalid file."""
    tls_context(config)  # gRPC would not name the problem
    certificate, key, authority = (
        Path(path).read_bytes() for path in (config.certificate, config.key, config.client_ca)
    )
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)


def _no_password() -> str:
    raise OSError("the key has a password")
