"""Who may read the pages: a token where one is set, addresses that are this machine's, and nothing but reading.

On a loopback address the Host header must name one, so that no page of another site reaches the app under a name that
leads to this machine (DNS rebinding). A token comes as ``Authorization: Bearer``, or from a form that sets a cookie
which is valid for some hours and only in this process; it is never part of an address.
"""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from pathlib import Path
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedtta.settings import SettingsError
from fedtta.settings.names import is_loopback
from fedtta.watch.layout import page

COOKIE = "fedtta-watch"
HOURS = 12  # that a login is valid
SHORTEST = 16  # characters of a token, at least
LONGEST = 4096  # bytes of a login form, and of a token file
LOGIN = "/login"
READ, SEND = ("GET", "HEAD"), "POST"  # methods of all routes, and of the login form
#: Scripts are files of the app. Style attributes are what plots and bars of the report need.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with no-referrer, browsers post the form with "Origin: null"
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def read_token(path: Path) -> str:
    """Return the token of a file.

    Raises
    ------
    SettingsError
        It is too short, or has characters that no header can carry.
    OSError
        The file cannot be read.
    """
    with path.open("rb") as file:
        token = file.read(LONGEST).decode("latin-1").strip()
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise SettingsError(
            f"--token-file {path}: allowed is a token of at least {SHORTEST} printable ASCII characters without "
            "spaces, such as that of `openssl rand -hex 32`"
        )
    return token


@dataclass(frozen=True)
class Access:
    """Who may read.

    Parameters
    ----------
    token : str
        Empty: everyone who reaches the address.
    loopback : bool
        Whether the app listens on a loopback address only.
    secure : bool
        Whether it is reached over TLS.
    """

    token: str = ""
    loopback: bool = True
    secure: bool = False
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        if not self.loopback and not (self.token and self.secure):
            raise SettingsError("an address that is not loopback: allowed only with a token and TLS")

    def known_host(self, host: str) -> bool:
        """Return whether a Host header names this app."""
        return not self.loopback or is_loopback(_hostname(host))

    def is_token(self, given: str) -> bool:
        """Compare with the token, in a time that does not depend on where they differ."""
        return bool(self.token) and hmac.compare_digest(given.encode(), self.token.encode())

    def admits(self, request: Request) -> bool:
        """Return whether a request may read."""
        if not self.token:
            return True
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.is_token(given.strip()):
            return True
        return self._valid(request.cookies.get(COOKIE, ""))

    def cookie(self) -> str:
        """Return the value of a cookie: when it expires, and a code that only this process can make."""
        until = str(int(time.time()) + HOURS * 3600)
        return f"{until}.{self._code(until)}"

    def _valid(self, cookie: str) -> bool:
        until, _, code = cookie.partition(".")
        known = hmac.compare_digest(code.encode(), self._code(until).encode())
        return known and until.isdecimal() and int(until) > time.time()

    def _code(self, until: str) -> str:
        return hmac.new(self._key, until.encode(), sha256).hexdigest()


class Guard:
    """ASGI middleware in front of all routes: refuses what may not be read, and adds the security headers.

    Parameters
    ----------
    app : ASGI application
    access : Access
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            request = Request(scope, receive)
            answer = await self._refusal(request)
            await (answer or self.app)(scope, receive, _with_headers(send))

    async def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is not for the app; None lets it through."""
        access, path = self.access, request.url.path
        if not access.known_host(request.headers.get("host", "")):
            return PlainTextResponse("This name is not this server's; allowed are localhost and 127.0.0.1.\n", 421)
        if path == LOGIN and access.token and request.method == SEND:
            return await self._login(request)
        if request.method not in READ:
            return PlainTextResponse("Reading only.\n", 405, {"allow": "GET, HEAD"})
        if path == LOGIN and access.token:
            return form(request, "/")
        if not access.admits(request):
            return form(request, request.scope["raw_path"].decode("latin-1"))  # as an address has it: "?" is "%3F"
        return None

    async def _login(self, request: Request) -> Response:
        """Set the cookie for the right token."""
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            return PlainTextResponse("A form of another site.\n", 403)
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > LONGEST:
                    return PlainTextResponse("Too long.\n", 413)
        except ClientDisconnect:  # no one is left to read it
            return PlainTextResponse("Half a form.\n", 400)
        fields = parse_qs(body.decode("latin-1"))
        there = fields.get("next", ["/"])[0]
        if not self.access.is_token(fields.get("token", [""])[0].strip()):
            return form(request, _local(there), "That is not the token.")
        answer = RedirectResponse(_local(there), 303)
        answer.set_cookie(
            COOKIE, self.access.cookie(), max_age=HOURS * 3600, httponly=True, samesite="strict",
            secure=self.access.secure,
        )  # fmt: skip
        return answer


def form(request: Request, there: str, problem: str = "") -> Response:
    """Return the form that asks for the token, which leads on to `there`."""
    wrong = f'<p class="warning" role="alert">{escape(problem)}</p>' if problem else ""
    main = (
        f'<main id="page"><h1>Token</h1><p>This page needs the token of the server.</p>{wrong}'
        f'<form method="post" action="{LOGIN}"><input type="hidden" name="next" value="{escape(there)}">'
        '<label for="token">Token</label><input id="token" name="token" type="password" required autofocus '
        'autocomplete="current-password"><button type="submit">Sign in</button></form></main>'
    )
    answer = page(request, "Token", main, status=401)
    answer.headers["www-authenticate"] = "Bearer"
    return answer


def _hostname(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.partition(":")[0]


def _local(path: str) -> str:
    """Return a path of this app; the first page for everything else."""
    fits = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if fits and path.isascii() else "/"


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
