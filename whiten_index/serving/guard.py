"""Checks of every request (token, host, size, number, time), security headers and the log."""

import asyncio
import contextlib
import hmac
import logging
import re
import time
from http import HTTPStatus

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whiten_index.serving.metrics import Metrics
from whiten_index.serving.problems import problem
from whiten_index.serving.serve_options import PROBES, ServeOptions

_LOG = logging.getLogger("whiten_index.serving")
# They show no data.
_OPEN = ("/", "/page.js", "/page.css", *PROBES)
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


class Guard:
    """ASGI middleware around the whole server."""

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self._token, self._most = options.token, options.body_bytes
        self._under_way = 0
        metrics.under_way.set_function(lambda: self._under_way)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        started, status, begun = time.perf_counter(), 500, False

        async def send_on(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            # The rest of the request was no HTTP, and it is refused already.
            with contextlib.suppress(h11.LocalProtocolError):
                await send(message)

        self._under_way += 1
        try:
            if (refused := self._refused(scope)) is not None:
                await refused(scope, receive, send_on)
            else:
                async with asyncio.timeout(self._options.max_seconds) as limit:
                    await self._app(scope, self._bounded(receive), send_on)
        except TimeoutError:
            if begun or not limit.expired():
                raise
            late = problem(
                HTTPStatus.GATEWAY_TIMEOUT,
                f"the request took more than {self._options.max_seconds:g} seconds; ask for less",
            )
            await late(scope, receive, send_on)
        finally:
            self._under_way -= 1
            spent = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.request(route, status, spent)
            _LOG.info("%s %s %d %.1f ms", scope["method"], route, status, 1000 * spent)

    def _refused(self, scope: Scope) -> Response | None:
        """Return the response to a request that goes no further."""
        headers, path = Headers(scope=scope), scope["path"]
        host = re.sub(r":\d*$", "", headers.get("host", ""))
        if (
            self._token is None
            and self._options.loopback
            and host not in (*_LOCAL, self._options.host)
        ):
            # A web page may have its own name point to this machine.
            return problem(
                HTTPStatus.MISDIRECTED_REQUEST,
                "this server answers to localhost; use that name, or give the server a token",
            )
        if self._token is not None and path not in _OPEN:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(given.encode(), self._token.encode())
            if scheme.lower() != "bearer" or not same:
                return problem(
                    HTTPStatus.UNAUTHORIZED,
                    "send the server's token: Authorization: Bearer TOKEN",
                    headers={"www-authenticate": "Bearer"},
                )
        if path not in _OPEN and self._under_way > self._options.max_requests:
            return problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self._options.max_requests} requests are under way; try again",
                headers={"retry-after": "1"},
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._most:
            return problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large)
        return None

    @property
    def _too_large(self) -> str:
        return f"a request has {self._most:,} bytes at most; send fewer texts at once"

    def _bounded(self, receive: Receive) -> Receive:
        """Return what reads a body of bounded size, whatever its header says."""
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large)
            return message

        return bounded
