"""Addresses of drivers, and the keys that go with them: how they are written, read and found.

A driver that was given no key and listens on this host's loopback only makes one, and writes it into a file that only
this user can read; whoever joins on the same host finds it by the port. Nothing here waits for anyone. Thread-safe.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from typing import Final

from actorrpc.config import host_and_port
from actorrpc.core import keys
from actorrpc.core.keys import Key
from actorrpc.errors import AuthenticationError, ConfigError
from actorrpc.rpc.group import is_loopback

__all__ = ["find_key", "new_secret", "own_address", "parse", "show", "write_secret"]

_SCHEME: Final = "tcp://"
_LIKELY_S: Final = 1


def parse(text: object, what: str = "address", *, listen: bool = False) -> tuple[str, int]:
    """Read ``tcp://host:port`` (the scheme may be left out; IPv6 in brackets).

    Args:
        what: what messages call it.
        listen: whether it is for listening: then the port may be 0 (any) or missing.

    Raises:
        ConfigError: it is no such address.
    """
    right = "tcp://HOST:PORT, like tcp://10.0.0.5:7777 or tcp://[fd00::5]:7777"
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{what} must be {right}, not {text!r}")
    rest = text[len(_SCHEME) :] if text.startswith(_SCHEME) else text
    if "://" in rest:
        raise ConfigError(f"{what}={text!r} cannot be used: it must be {right}")
    any_port = listen and rest.endswith(":0")
    try:
        host, port = host_and_port(rest[:-2] if any_port else rest)
    except ConfigError as error:
        raise ConfigError(f"{what}={text!r} cannot be used: {error}. It must be {right}") from None
    if port is None and not listen:
        raise ConfigError(f"{what}={text!r} has no port: it must be {right}")
    return host, port or 0


def show(host: str, port: int) -> str:
    """Return an address as :func:`parse` reads it."""
    return f"{_SCHEME}[{host}]:{port}" if ":" in host else f"{_SCHEME}{host}:{port}"


def own_address(host: str = "") -> str:
    """Return an address of this host: the one that packets to ``host`` would leave from. Nothing is sent.

    Without ``host``, the one towards other networks; the loopback where there is no network.
    """
    targets = [host] if host else ["192.0.2.1", "2001:db8::1"]
    for target in targets:
        try:
            found = socket.getaddrinfo(target, _LIKELY_S, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, address in found:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    text = str(probe.getsockname()[0])
                if not ipaddress.ip_address(text.partition("%")[0]).is_unspecified:
                    return text
            except (OSError, ValueError):
                continue
    return "127.0.0.1"


# -- keys ------------------------------------------------------------------------------------------------


def new_secret() -> str:
    """Return a new key as text."""
    return secrets.token_hex(16)


def given_secret() -> str:
    """Return the key that ``ACTORRPC_KEY`` or ``ACTORRPC_KEY_FILE`` gives, as text; empty without either.

    Raises:
        ConfigError: it cannot be used.
    """
    if keys.find_key() is None:
        return ""
    text = os.environ.get("ACTORRPC_KEY")
    if text:
        return text.strip()
    with open(os.environ["ACTORRPC_KEY_FILE"], "rb") as file:
        return os.fsdecode(file.read().strip())


def _ending(port: int) -> str:
    return f"-{port:016x}.key"


def write_secret(secret: str, port: int) -> str:
    """Write a key where this user's processes on this host find it by the port; return the file's path.

    Raises:
        ConfigError: the runtime directory cannot be used.
    """
    made = keys.create_key_file(secret.encode())
    path = made.rpartition("-")[0] + _ending(port)
    os.replace(made, path)
    return path


def find_key(host: str, port: int) -> Key:
    """Return the key for joining the driver at an address: the given one, else that of a driver on this host.

    Raises:
        AuthenticationError: there is none.
        ConfigError: the given one cannot be used.
    """
    found = keys.find_key()
    if found is not None:
        return found
    if is_loopback(host):
        directory = keys.runtime_directory()
        for name in sorted(os.listdir(directory)):
            if name.endswith(_ending(port)) and not keys.is_stale(name):
                return keys.read_key_file(os.path.join(directory, name))
    raise AuthenticationError(
        f"there is no key for joining {show(host, port)}: set ACTORRPC_KEY, or ACTORRPC_KEY_FILE to a file that only you can "
        "read, to the key of the driver (on the driver's own host, a driver that was started without a key and listens "
        "on the loopback makes one that its user's processes find by themselves)"
    )
