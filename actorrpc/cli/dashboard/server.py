"""The HTTP server of ``actorrpc dashboard``: starlette and uvicorn (extra ``dashboard``), on an address of this host.

The page itself contains no data, and is sent to everybody who knows its path. The data comes from ``api/``, which requires a
cookie. A browser gets the cookie for the token of the one-time link. The token is sent in the body of a request, so that it is
in no log. No request changes a job, except for the request that ``--allow-actions`` adds.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from importlib import resources
from typing import Any, BinaryIO, Final
from urllib.parse import parse_qsl, urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from actorrpc.cli.dashboard import payloads
from actorrpc.cli.dashboard.feed import Feed, encoded
from actorrpc.errors import ConfigError, RpcError

__all__ = ["Access", "Dashboard", "is_loopback", "make_app"]

_ACTS: Final = "x-actorrpc-action"
_COOKIE: Final = "actorrpc-dashboard"
_CONNECTIONS: Final = 100
_STREAMS: Final = 32  # greatest number of open event streams; further pages poll
_PATIENCE_S: Final = 10.0  # for a whole request to arrive, and for a client to read the response
_BODY: Final = 1024
_SMALL: Final = 1024  # smaller bodies are not compressed
_ROWS: Final = 200
_LINES: Final = 500
_QUERY: Final = 2000
_SECONDS: Final = 86_400  # longest time span of the timeline
_CHUNK: Final = 1 << 16
_BROWSERS: Final = 32  # greatest number of logged-in browsers; a further login logs out the earliest
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")
_ACTIONS: Final = ("kill", "restart", "drain")

_Answer = Callable[[Request], Awaitable[Any]]

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}


# -- access: the one-time link, the cookies for which it is exchanged, and the allowed hosts and origins ----


def is_loopback(host: str) -> bool:
    """Say whether an address is reached from this host only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_of(netloc: str) -> str | None:
    """Return the host name in a ``Host`` header or an origin, without the port; None if there is no valid name."""
    try:
        parts = urlsplit(f"//{netloc}")
        _ = parts.port
        odd = parts.path or parts.query or parts.fragment or "@" in parts.netloc
        return None if odd else parts.hostname
    except ValueError:
        return None


class Access:
    """Decides which requests and which browsers one server accepts. Not thread-safe.

    A page of another site can send requests to this server, and by DNS rebinding it can do so under a name of its own. Therefore
    the ``Host`` header must be a name of this server, and the ``Origin`` of every request except GET and HEAD must be the
    address of this server. Only hashes of secrets are stored, so that the time of a comparison tells an attacker nothing.

    Args:
        bound: the address on which the server listens.
        more: further names of the server, such as the name of a proxy.
    """

    def __init__(self, bound: str, more: Iterable[str] = ()) -> None:
        given = {each.lower() for each in more}
        self._proxies = frozenset(given)
        own = {bound.lower()} if bound not in ("0.0.0.0", "::") else set()
        self._hosts = frozenset({*_LOCAL_NAMES, *own, *given} if is_loopback(bound) else {*own, *given})
        self._token = b""
        self._sessions: dict[bytes, None] = {}
        #: A random part of this server's path. Browsers send the cookie only with this path, so not to other ports of this host.
        self.place = secrets.token_hex(8)

    def new_token(self) -> str:
        """Return a token with which one browser can log in once; earlier tokens become invalid."""
        token = secrets.token_urlsafe(32)
        self._token = _digest(token)
        return token

    def exchange(self, token: str) -> str | None:
        """Return a cookie for the token; None if the token is wrong or was used."""
        if not self._token or not hmac.compare_digest(self._token, _digest(token)):
            return None
        self._token = b""
        cookie = secrets.token_urlsafe(32)
        self._sessions[_digest(cookie)] = None
        if len(self._sessions) > _BROWSERS:
            del self._sessions[next(iter(self._sessions))]
        return cookie

    def knows(self, cookie: str | None) -> bool:
        """Say whether a cookie belongs to a browser that is logged in."""
        # Hashes are compared, so the time of the comparison tells an attacker nothing about the cookies.
        return cookie is not None and _digest(cookie) in self._sessions

    def is_host(self, header: str) -> bool:
        """Say whether a ``Host`` header names this server. Any port is accepted, because a tunnel has another port."""
        return _host_of(header) in self._hosts

    def is_origin(self, header: str, host: str) -> bool:
        """Say whether an ``Origin`` header is this server's page, given the ``Host`` header of the request."""
        scheme, separator, netloc = header.lower().partition("://")
        if not separator or scheme not in ("http", "https"):
            return False
        # A proxy may send another name in ``Host`` than the name under which browsers know the page.
        return netloc == host.lower() or _host_of(netloc) in self._proxies


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


# -- the guard ----------------------------------------------------------------------------------------------------


class _RequestGuard:
    """Refuses requests with a wrong host, origin (except GET and HEAD) or path; adds security headers to all responses."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        app: ASGIApp = self._app if refusal is None else refusal
        await app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._access.is_host(hosts[0]):
            text = "This server is not known by that name. See actorrpc dashboard --allow-host."
            return PlainTextResponse(text, 421)
        if scope["method"] not in ("GET", "HEAD"):
            origins = headers.getlist("origin")
            if len(origins) != 1 or not self._access.is_origin(origins[0], hosts[0]):
                return PlainTextResponse("This request comes from another page.", 403)
        # A proxy may add a prefix to the path. The rest is only looked up in the table of routes, so it cannot name a file.
        _, found, path = scope["path"].partition(f"/{self._access.place}/")
        if not found:
            return PlainTextResponse(
                "There is nothing here: use the link that actorrpc dashboard has printed.", 404
            )
        scope["path"] = "/" + path
        scope["raw_path"] = scope["path"].encode("utf-8", "replace")
        scope["root_path"] = ""
        return None


# -- responses -------------------------------------------------------------------------------------------------------


def _response(request: Request, body: bytes, media_type: str, **headers: str) -> Response:
    """Return a response with this body, compressed if the browser accepts that."""
    headers["Vary"] = "Accept-Encoding"
    if len(body) > _SMALL and _takes_gzip(request):
        body = gzip.compress(body, 5, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(body, headers=headers, media_type=media_type)


def _json(request: Request, value: Any) -> Response:
    return _response(request, encoded(value), "application/json")


async def _body(request: Request) -> bytes | Response:
    """Return the body of a request, or the response that refuses a body that is too large or too slow."""
    body = b""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _BODY:
                    return PlainTextResponse("That is too long.", 413, headers={"Connection": "close"})
    except (TimeoutError, ClientDisconnect):
        return PlainTextResponse("That took too long.", 408, headers={"Connection": "close"})
    return body


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK):
            yield chunk


def _takes_gzip(request: Request) -> bool:
    names = [each.partition(";") for each in request.headers.get("accept-encoding", "").lower().split(",")]
    return any(name.strip() == "gzip" and options.replace(" ", "") != "q=0" for name, _, options in names)


def _number(query: dict[str, str], name: str, most: int) -> int:
    text = query.get(name, "")
    return min(int(text), most) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _seconds(request: Request) -> float:
    return float(_number(_query(request), "seconds", _SECONDS) or _SECONDS)


def _query(request: Request) -> dict[str, str]:
    text = request.scope["query_string"][:_QUERY].decode("ascii", "replace")
    return dict(parse_qsl(text, keep_blank_values=True, errors="replace"))


def _request_of(body: bytes) -> tuple[str, str]:
    """Return the action of a request, and the actor or worker that it names.

    Raises:
        ConfigError: the request cannot be understood.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if (
        not isinstance(found, dict)
        or found.get("do") not in _ACTIONS
        or not isinstance(found.get("whom"), str)
    ):
        raise ConfigError("there is no such action")
    return found["do"], found["whom"]


class _Api:
    """The requests for data and actions.

    Args:
        secure: the page is served over TLS.
        logged_in: called when a browser has used the link to log in.
        ends: returns whether the server is shutting down; then the server sends no more states to the pages.
    """

    def __init__(
        self,
        feed: Feed,
        access: Access,
        secure: bool,
        logged_in: Callable[[], object],
        ends: Callable[[], bool],
    ) -> None:
        self._feed = feed
        self._access = access
        self._secure = secure
        self._logged_in = logged_in
        self._ends = ends
        self._streams = 0

    def routes(self) -> list[Route]:
        shown = (self.now, self.events, self.actors, self.calls, self.stacks, self.memory)
        recorded = (self.timeline, self.trace, self.logs)
        found = [
            Route(f"/api/{each.__name__}", self._for_those_logged_in(each)) for each in (*shown, *recorded)
        ]
        found.append(Route("/login", self.log_in, methods=["POST"]))
        if self._feed.acts:
            found.append(Route("/api/act", self._for_those_logged_in(self.act), methods=["POST"]))
        return found

    def _for_those_logged_in(self, answer: _Answer) -> Callable[[Request], Any]:
        """Return an endpoint for browsers that are logged in; ``answer`` returns a response, or a value for JSON."""

        async def answer_them(request: Request) -> Response:
            if not self._access.knows(request.cookies.get(_COOKIE)):
                return PlainTextResponse(
                    "Open the link that actorrpc dashboard has printed; it works once.", 401
                )
            # Browsers also send our cookie with requests of pages at other ports of this host. Such requests are refused.
            if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
                return PlainTextResponse("This request comes from another page.", 403)
            found = await answer(request)
            return found if isinstance(found, Response) else _json(request, found)

        return answer_them

    async def log_in(self, request: Request) -> Response:
        body = await _body(request)
        if isinstance(body, Response):
            return body
        cookie = self._access.exchange(body.decode("utf-8", "replace"))
        if cookie is None:
            return PlainTextResponse("That link was used before, or there is a newer one.", 401)
        answer = Response(status_code=204)
        # Without ``path``, the browser uses the path that it sees, so the cookie also works behind a proxy that adds a prefix.
        answer.set_cookie(_COOKIE, cookie, path=None, httponly=True, samesite="strict", secure=self._secure)
        self._logged_in()
        return answer

    async def act(self, request: Request) -> Any:
        # The guard has checked that the origin is this page. This header cannot be set by forms, images, or scripts of other
        # sites (their preflight request is refused); and the cookie is not sent with requests that other sites cause.
        if request.headers.getlist(_ACTS) != ["1"]:
            return PlainTextResponse("This request comes from another page.", 403)
        body = await _body(request)
        if isinstance(body, Response):
            return body
        try:
            said = await self._feed.act(*_request_of(body))
        except (RpcError, OSError) as error:
            return {"said": "", "problem": str(error) or type(error).__name__}
        return {"said": said, "problem": ""}

    async def now(self, request: Request) -> Response:
        look = await self._feed.after(_number(_query(request), "after", 1 << 30))
        return _response(request, look.body(), "application/json")

    async def events(self, request: Request) -> Response:
        if self._streams >= _STREAMS:
            return PlainTextResponse("Too many pages are open.", 503)
        headers = {"X-Accel-Buffering": "no", "Vary": "Accept-Encoding"}
        if _takes_gzip(request):
            headers["Content-Encoding"] = "gzip"
        return StreamingResponse(self._looks(request), headers=headers, media_type="text/event-stream")

    async def _looks(self, request: Request) -> AsyncIterator[bytes]:
        cookie = request.cookies.get(_COOKIE)
        packer = zlib.compressobj(5, zlib.DEFLATED, 31) if _takes_gzip(request) else None
        self._streams += 1
        try:
            number = 0
            while self._access.knows(cookie) and not self._ends():
                look = await self._feed.after(number)
                number = look.number
                event = b"data: " + look.body() + b"\n\n"
                yield event if packer is None else packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH)
        finally:
            self._streams -= 1

    async def actors(self, request: Request) -> Any:
        query = _query(request)
        sort = query.get("sort", "")
        look = await self._feed.after(0)
        found = payloads.actors(
            look.picture,
            look.rates,
            query.get("q", ""),
            sort if sort in payloads.SORTS else payloads.SORTS[0],
            _number(query, "first", 1 << 30),
            _number(query, "most", _ROWS) or _ROWS,
        )
        found["age"] = look.now.get("actors_age", 0.0)
        return {"number": look.number, "problem": look.problem, **found}

    async def calls(self, request: Request) -> Any:
        look = await self._feed.after(_number(_query(request), "after", 1 << 30), calls=True)
        return {"number": look.number, "problem": look.problem, "rows": look.calls or []}

    async def stacks(self, _request: Request) -> Any:
        return await self._feed.stacks()

    async def memory(self, _request: Request) -> Any:
        return await self._feed.memory()

    async def timeline(self, request: Request) -> Response:
        # Encode in a thread, so that events for other pages are sent meanwhile: there may be some 100 000 numbers.
        return await asyncio.to_thread(_json, request, await self._feed.timeline(_seconds(request)))

    async def trace(self, request: Request) -> Response:
        file = await self._feed.trace(_seconds(request))
        if isinstance(file, str):
            return PlainTextResponse(file, 503)
        return StreamingResponse(
            _chunks(file),
            media_type="application/json",
            headers={"Content-Disposition": 'attachment; filename="actorrpc-trace.json"'},
        )

    async def logs(self, request: Request) -> Any:
        query = _query(request)
        return await self._feed.logs(query.get("q", ""), query.get("whom", ""), _LINES)


def make_app(
    feed: Feed,
    access: Access,
    *,
    secure: bool = False,
    logged_in: Callable[[], object] = bool,
    ends: Callable[[], bool] = bool,
) -> ASGIApp:
    """Return the application; the arguments are as for :class:`_Api`."""
    files = _files()
    routes = [Route("/" + name, _file(name, body)) for name, body in files.items()]
    routes += [
        Route("/", _file("index.html", files["index.html"])),
        Route("/offline.txt", _file("offline.txt", _offline(files))),
        *_Api(feed, access, secure, logged_in, ends).routes(),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False  # a redirect would omit the random part of the path
    return _RequestGuard(app, access)


def _files() -> dict[str, bytes]:
    """Return the contents of the page's files, by name. They are read once, so that no request can name another file."""
    folder = resources.files("actorrpc.cli.dashboard") / "static"
    return {
        each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in _TYPES
    }


#: Each module comes after the modules that it imports.
_MODULES: Final = ("dom.js", "timeline.js", "views.js", "saved.js", "app.js")
_IMPORT: Final = re.compile(r"^import \{[^}]*\} from [^;]*;\n", re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ", re.MULTILINE)


def _offline(files: dict[str, bytes]) -> bytes:
    """Return the page as one file that makes no requests. The page puts the data of its views into the element "saved".

    The policy contains the hashes of the script and the style: no other code runs, whatever the data contains.
    """
    texts = {name: body.decode() for name, body in files.items()}
    modules = [_EXPORT.sub("", _IMPORT.sub("", texts[name])) for name in _MODULES]
    script = '\n(() => {\n"use strict";\n' + "".join(modules) + "})();\n"
    style = "\n" + texts["style.css"]
    policy = (
        f"default-src 'none'; script-src {_hash_of(script)}; style-src {_hash_of(style)}; base-uri 'none'; "
        "form-action 'none'"
    )
    page = re.sub(r"^<(?:link|script) [^\n]*\n", "", texts["index.html"], flags=re.MULTILINE)
    head, body = page.split("</head>\n")
    head = head.replace(
        '<meta charset="utf-8">\n',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
    )
    data = '<script id="saved" type="application/json"></script>\n'
    body = body.replace("</body>", f"{data}<script>{script}</script>\n</body>")
    return f"{head}<style>{style}</style>\n</head>\n{body}".encode()


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _file(name: str, body: bytes) -> Callable[[Request], Any]:
    media_type = _TYPES[name.rpartition(".")[2]]

    async def answer(request: Request) -> Response:
        return _response(request, body, media_type, **{"Cache-Control": "no-cache"})

    return answer


# -- the server ----------------------------------------------------------------------------------------------------


class _BoundedProtocol(H11Protocol):
    """Closes the connections of slow clients. uvicorn limits neither how long a request may take to arrive, nor how long a client
    may take to read the response; this class has a timer for each. Runs in the event loop's thread."""

    _request: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    patience = _PATIENCE_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._request = self.loop.call_later(self.patience, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Between requests, uvicorn's own timer runs. The timer ``_request`` starts with the first bytes of a request.
        comes = self.cycle is None or self.cycle.response_complete
        if not comes and self._request is not None:
            self._request.cancel()
            self._request = None
        elif comes and self._request is None:
            self._request = self.loop.call_later(self.patience, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reading is None:
            self._reading = self.loop.call_later(self.patience, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request, self._reading):
            if timer is not None:
                timer.cancel()
        self._request = self._reading = None
        super().connection_lost(exc)


class Dashboard:
    """A server that listens when it is made, and serves when :meth:`run` is called.

    Args:
        host, port: the address; port 0: any free port.
        names: further host names of the page.
        tls: the files of a certificate and its key; required for addresses that other hosts can reach.
        patience: how many seconds a request may take to arrive, and a client may take to read the response; then the connection
            is closed.
        say: called with the one-time link, and with a new link each time a browser has used the last one.

    Raises:
        ConfigError: other hosts can reach the address, and there is no certificate; or it is a wildcard address without names.
        OSError: the address is not available, or a file cannot be read.
    """

    def __init__(
        self,
        feed: Feed,
        host: str,
        port: int,
        *,
        say: Callable[[str], object],
        names: Iterable[str] = (),
        tls: tuple[str, str] | None = None,
        patience: float = _PATIENCE_S,
    ) -> None:
        if tls is None and not is_loopback(host):
            raise ConfigError(
                f"--bind {host}: other hosts can reach this address and read the traffic: give --tls-cert and --tls-key, or keep "
                "127.0.0.1 and use a tunnel: ssh -L PORT:127.0.0.1:PORT HOST"
            )
        names = tuple(names)
        if host in ("0.0.0.0", "::") and not names:
            raise ConfigError(f"--bind {host}: give the name that browsers use for this host by --allow-host")
        self._feed = feed
        self._say = say
        self.access = Access(host, names)
        app = make_app(feed, self.access, secure=tls is not None, logged_in=self._say_link, ends=self._ends)
        config = uvicorn.Config(
            app,
            http=type("BoundedProtocol", (_BoundedProtocol,), {"patience": patience}),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=int(_PATIENCE_S),
            timeout_graceful_shutdown=3,  # time to send a last look to the pages
            ssl_certfile=tls[0] if tls else None,
            ssl_keyfile=tls[1] if tls else None,
        )
        try:
            config.load()
        except ssl.SSLError as error:
            raise ConfigError(f"--tls-cert, --tls-key: these cannot be used: {error}") from error
        self._server = uvicorn.Server(config)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_CONNECTIONS)
        named = names[0] if host in ("0.0.0.0", "::") else host
        shown = f"[{named}]" if ":" in named else named
        scheme = "https" if tls else "http"
        self.port: int = self._socket.getsockname()[1]
        self.address = f"{scheme}://{shown}:{self.port}/{self.access.place}/"

    def _say_link(self) -> None:
        # The token is behind "#": browsers do not send that part, so it is in no log of a proxy.
        self._say(f"{self.address}#token={self.access.new_token()}")

    def run(self) -> None:
        """Serve until a signal or :meth:`stop` ends the server."""
        self._say_link()
        try:
            # A signal that ends uvicorn also cancels the coroutine of asyncio.run(), so the cleanup is outside of it.
            asyncio.run(self._server.serve(sockets=[self._socket]))
        finally:
            self._feed.hang_up()

    def _ends(self) -> bool:
        return self._server.should_exit

    def stop(self) -> None:
        """Make :meth:`run` return soon. Thread-safe."""
        self._server.should_exit = True
