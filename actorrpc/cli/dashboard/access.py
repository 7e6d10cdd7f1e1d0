"""Access to the page: the one-time link, the cookies for which it is exchanged, and the allowed hosts and origins. No I/O."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

__all__ = ["Access", "is_loopback"]

_SESSIONS: Final = 32  # greatest number of logged-in browsers; a further login logs out the earliest
_NAMES: Final = ("localhost", "127.0.0.1", "::1")


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
        self._hosts = frozenset({*_NAMES, *own, *given} if is_loopback(bound) else {*own, *given})
        self._token = b""
        self._sessions: dict[bytes, None] = {}
        #: A random part of this server's path. Browsers send the cookie only with this path, so not to other ports of this host.
        self.place = secrets.token_hex(8)

    def new_token(self) -> str:
        """Return a token with which one browser can log in once; earlier tokens become invalid."""
        token = secrets.token_urlsafe(32)
        self._token = _hash(token)
        return token

    def exchange(self, token: str) -> str | None:
        """Return a cookie for the token; None if the token is wrong or was used."""
        if not self._token or not hmac.compare_digest(self._token, _hash(token)):
            return None
        self._token = b""
        cookie = secrets.token_urlsafe(32)
        self._sessions[_hash(cookie)] = None
        if len(self._sessions) > _SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return cookie

    def knows(self, cookie: str | None) -> bool:
        """Say whether a cookie belongs to a browser that is logged in."""
        # Hashes are compared, so the time of the comparison tells an attacker nothing about the cookies.
        return cookie is not None and _hash(cookie) in self._sessions

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


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
