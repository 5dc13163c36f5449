"""`fedtta watch [RESULTS]`: serve the runs of a results folder as pages that follow them.

An address that is not loopback needs a token and TLS. `fedtta run --watch` starts this program for its run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote

import uvicorn
from fastapi import APIRouter, FastAPI

from fedtta.settings import Settings, SettingsError
from fedtta.settings.names import is_loopback
from fedtta.watch.access import Access, read_token
from fedtta.watch.app import make_app
from fedtta.watch.prompt import Prompt

HOST, PORT = "127.0.0.1", 8650
NICE = 5  # a page must not slow the run down that it shows
OPEN = 4.0  # seconds after its last request for which a page counts as open
LINGER = 10.0  # seconds after a run that open pages get for its final state, at most
SETTLED = 1.5  # seconds after the first of them got it


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="fedtta watch", description=__doc__, allow_abbrev=False)
    made.add_argument("results", nargs="?", type=Path, default=Path(Settings().results), help="the folder of the runs")
    made.add_argument("--run", default="", metavar="NAME", help="show this run only")
    made.add_argument(
        "--listen", default="", metavar="HOST:PORT",
        help=f"default {HOST}:{PORT}, or any free port; other hosts than loopback need a token and TLS",
    )  # fmt: skip
    made.add_argument("--token-file", type=Path, metavar="FILE", help="the pages need the token in this file")
    made.add_argument("--certificate", type=Path, metavar="FILE", help="TLS: the server's certificate, PEM")
    made.add_argument("--key", type=Path, metavar="FILE", help="TLS: its private key, PEM")
    made.add_argument("--superlink", default="", metavar="HOST:PORT", help="show the devices that it lists, too")
    made.add_argument(
        "--root-certificates", type=Path, default=Path("keys/ca.crt"), metavar="FILE", help="of the SuperLink"
    )
    made.add_argument("--insecure", action="store_true", help="the SuperLink has no TLS")
    made.add_argument("--alerts", type=Path, metavar="FILE", help="rules that the devices are to keep, TOML")
    made.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Serve until a signal; exit status 0, or 2 for what was refused."""
    options = parser().parse_args(words)
    try:
        if (options.certificate is None) != (options.key is None):
            raise SettingsError("--certificate and --key: allowed are both, or neither")
        host, port = address(options.listen)
        token = read_token(options.token_file) if options.token_file else ""
        if not is_loopback(host) and not (token and options.key):
            raise SettingsError(
                f"--listen {options.listen}: an address that others reach needs --token-file, --certificate and --key"
            )
        access = Access(token, is_loopback(host), options.key is not None)
        routers, links = fleet_routes(options)
        app = make_app(options.results.expanduser(), access, routers, links, options.run)
        server = uvicorn.Server(_loaded(app, options))
        listening = listen(host, port, bool(options.listen))
    except (SettingsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.nice(NICE)
    path = f"/runs/{quote(options.run, safe='')}" if options.run else "/"
    shown, actual = listening.getsockname()[:2]
    scheme = "https" if access.secure else "http"
    print(f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{actual}{path}", flush=True)
    if options.until_stdin_ends:
        threading.Thread(target=_follow, args=(server, app), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        server.run(sockets=[listening])
    return 0


def fleet_routes(options: argparse.Namespace) -> tuple[list[APIRouter], dict[str, str]]:
    """Return the routes of devices and metrics, and the links to them; a server of one run has none."""
    if options.run and options.alerts:
        raise SettingsError("--alerts: allowed without --run, since a server of one run shows no devices")
    if options.run:
        return [], {}
    from fedtta.simulation.control import certificate_ends  # what a page of one run need not load
    from fedtta.simulation.devices import listed
    from fedtta.watch import devices_page, metrics
    from fedtta.watch.alerting import Alerting
    from fedtta.watch.listing import Ending, Fleet
    from fedtta.watch.rules import Rules

    results, ca = options.results.expanduser(), None if options.insecure else options.root_certificates
    fleet = Fleet(results, partial(listed, options.superlink, ca) if options.superlink else None)
    if options.alerts is None:
        routers = [devices_page.router(fleet), metrics.router(results, fleet.devices)]
    else:
        certificate = Ending(partial(certificate_ends, options.superlink)) if options.superlink and ca else lambda: None
        alerting = Alerting(Rules.from_toml(options.alerts), fleet.devices, fleet.history, certificate)
        pages = devices_page.router(fleet, alerts=lambda: alerting.current)
        routers = [pages, metrics.router(results, fleet.devices, lambda: alerting.current), alerting.router()]
    return routers, {"Devices": devices_page.PATH}


def address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; of an empty text the default.

    Raises
    ------
    SettingsError
        It is not of this form.
    """
    if not text:
        return HOST, PORT
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(f"--listen {text}: allowed is HOST:PORT with a port from 0 to 65535")
    return (HOST if host.lower() == "localhost" else host), int(port)


def listen(host: str, port: int, exact: bool) -> socket.socket:
    """Return a listening socket; where the port is in use, one with any free port, unless it must be this one.

    Raises
    ------
    SettingsError
        The address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in (port,) if exact else (port, 0):
        try:
            return socket.create_server((host, wanted), family=family)
        except OSError as error:
            failed = error
    raise SettingsError(f"--listen {host}:{port}: {failed.strerror or failed}") from failed


def _loaded(app: FastAPI, options: argparse.Namespace) -> uvicorn.Config:
    """Return the server's settings: no log of requests, no names of software, bounded work.

    Raises
    ------
    SettingsError
        Certificate and key cannot be read, or are none that belong together; OpenSSL does not name the file.
    """
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
        http=Prompt, ws="none", limit_concurrency=64, timeout_keep_alive=15, timeout_graceful_shutdown=3,
        ssl_certfile=options.certificate, ssl_keyfile=options.key,
    )  # fmt: skip
    try:
        config.load()
    except OSError as error:
        raise SettingsError(
            f"--certificate {options.certificate} --key {options.key}: allowed are a certificate and its private key, "
            f"PEM: {error}"
        ) from error
    return config


def _follow(server: uvicorn.Server, app: FastAPI) -> None:
    """Stop with the process that holds the other end of stdin, but let open pages get the final state first."""
    while os.read(0, 4096):
        pass
    ended = time.monotonic()
    while (now := time.monotonic()) < ended + LINGER:
        told = app.state.final
        closed = not app.state.reading and now - app.state.seen > OPEN
        if closed or (told > ended - OPEN and now - told > SETTLED):
            break
        time.sleep(0.1)
    server.should_exit = True


if __name__ == "__main__":
    sys.exit(main())
