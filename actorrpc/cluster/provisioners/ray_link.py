"""The driver's link to Ray: imports it, connects to it within a time-out, and reads its resources.

Ray is an optional dependency: only :func:`package` imports it. The module has no state of its own.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from actorrpc.cluster.join import own_address
from actorrpc.config import host_and_port
from actorrpc.errors import ConfigError, RendezvousError

__all__ = ["STRATEGIES", "Link", "fits", "labels_here", "missing", "package"]

STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_CLIENT_PORT: Final = 10001
_PORT: Final = 6379
#: The first bytes of an HTTP/2 client, and an empty SETTINGS frame: any gRPC server answers with its own settings.
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_SETTINGS_FRAME: Final = 4
_SLACK: Final = 1e-6


def package() -> Any:
    """Return the module ``ray``.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"engine 'ray' needs Ray, which cannot be imported here ({error}): pip install 'actorrpc[ray]'"
        ) from error


class Link:
    """This process's connection to a Ray cluster.

    Attributes:
        ray: the module.
        owned: whether this object has connected the process to Ray and will disconnect it; otherwise it stays connected.
        alone: whether this object has started this Ray, so that no machines will be added to it.

    Args:
        address: None or ``"ray://"``: the Ray to which this process is connected, or the one named by ``RAY_ADDRESS``,
            or one that runs on this machine, or a new one; ``"local"``: a new one; ``"auto"``: a running one;
            ``"host:port"``: a head node (default port 6379); ``"ray://host:port"``: by Ray's client (default port 10001).
        timeout: how long connecting may take, in seconds.
        log_to_driver: show the output of the workers here.
        options: further arguments of ``ray.init``.

    Raises:
        ConfigError: Ray is not installed, or an argument cannot be used.
        RendezvousError: no Ray answers there.
    """

    def __init__(
        self, address: str | None, timeout: float, log_to_driver: bool, options: Mapping[str, Any]
    ) -> None:
        self.ray = package()
        self.owned = self.alone = False
        self.client = False
        wanted = _normal(address)
        if self.ray.is_initialized():
            if wanted is not None or options:
                raise ConfigError(
                    "this process is connected to Ray already: leave the address and ray_options out to use that Ray, "
                    "or call ray.shutdown() first"
                )
            self.client = bool(self.ray.util.client.ray.is_connected())
            return
        given = {"log_to_driver": log_to_driver, "logging_level": "warning", **options}
        if wanted is None:
            wanted = os.environ.get("RAY_ADDRESS") or None
        try:
            if wanted == "local":
                self._start(given)
            elif wanted in (None, "auto"):
                self._find(wanted, given)
            else:
                self._dial(str(wanted), timeout, given)
        except ConnectionError as error:
            raise RendezvousError(_unreachable(wanted or "auto", str(error))) from error
        self.owned = True

    def _start(self, given: dict[str, Any]) -> None:
        self.ray.init("local", **{"include_dashboard": False, **given})
        self.alone = True

    def _find(self, wanted: str | None, given: dict[str, Any]) -> None:
        here = {
            name: value for name, value in given.items() if name not in ("num_cpus", "num_gpus", "resources")
        }
        try:
            self.ray.init("auto", **here)
        except ConnectionError:
            if wanted == "auto":
                raise
            self._start(given)

    def _dial(self, wanted: str, timeout: float, given: dict[str, Any]) -> None:
        self.client = wanted.startswith("ray://")
        try:
            host, port = host_and_port(wanted.removeprefix("ray://"))
        except ConfigError as error:
            raise ConfigError(f"the address of Ray, {wanted!r}, cannot be used: {error}") from None
        port = port or (_CLIENT_PORT if self.client else _PORT)
        # Check first whether a server answers: Ray itself would try for two minutes, and may then end this process.
        _knock(wanted, host, port, timeout)
        if self.client:
            given = {name: value for name, value in given.items() if name != "log_to_driver"}
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.ray.init(f"ray://{where}" if self.client else where, **given)
        except (ImportError, RuntimeError, SystemExit) as error:
            raise RendezvousError(_unreachable(wanted, str(error) or type(error).__name__)) from error

    def close(self) -> None:
        """Disconnect, if this object has connected; this also ends a Ray that this object has started. Idempotent."""
        if self.owned:
            self.owned = False
            self.ray.shutdown()

    def host(self) -> str:
        """Return the address at which Ray's nodes reach this machine."""
        if self.client:
            nodes = self.alive()
            return own_address(str(nodes[0]["NodeManagerAddress"])) if nodes else "127.0.0.1"
        return str(self.ray.util.get_node_ip_address())

    def alive(self) -> list[dict[str, Any]]:
        """Return Ray's descriptions of the living nodes."""
        return [node for node in self.ray.nodes() if node.get("Alive")]


def labels_here() -> dict[str, str]:
    """Return the labels that Ray has for the node of this process, and the node's id as a label. Only in a process of Ray's."""
    context = package().get_runtime_context()
    labels: dict[str, str] = getattr(context, "get_node_labels", dict)()
    return {
        **{str(name): str(value) for name, value in labels.items()},
        "ray.io/node-id": str(context.get_node_id()),
    }


def fits(shape: Mapping[str, float], there: Mapping[str, float]) -> bool:
    """Say whether a node with the total resources ``there`` could hold a worker with the resources ``shape``."""
    return all(there.get(name, 0.0) + _SLACK >= amount for name, amount in shape.items())


def missing(
    shape: Mapping[str, float], count: int, strategy: str | None, nodes: Sequence[Mapping[str, float]]
) -> str:
    """Describe what the nodes lack for ``count`` workers with these resources; empty if the nodes could hold them all.

    Args:
        shape: the resources of each worker; ``nodes``: the total resources of each node.
    """
    what = ", ".join(f"{name} {amount:g}" for name, amount in shape.items()) or "nothing"
    if not shape and strategy != "STRICT_SPREAD":
        return "" if nodes else "Ray has no nodes"
    lacking = [
        f"{name} {amount:g} (the most on one node: {max((node.get(name, 0.0) for node in nodes), default=0.0):g})"
        for name, amount in shape.items()
        if not any(fits({name: amount}, node) for node in nodes)
    ]
    if lacking:
        return f"no node has {', '.join(lacking)}, which each worker needs"
    suited = [node for node in nodes if fits(shape, node)]
    if not suited:
        return f"no single node has all that one worker needs ({what})"
    if strategy == "STRICT_SPREAD":
        if len(suited) < count:
            return f"STRICT_SPREAD needs {count} nodes with {what} each, and there are {len(suited)}"
        return ""
    room = [
        min(
            (int((node.get(name, 0.0) + _SLACK) / amount) for name, amount in shape.items() if amount),
            default=count,
        )
        for node in suited
    ]
    if strategy == "STRICT_PACK":
        if max(room) < count:
            return f"STRICT_PACK needs {count} workers with {what} each on one node, and no node holds more than {max(room)}"
    elif sum(room) < count:
        return f"{count} workers with {what} each are wanted, and all nodes together hold {sum(room)}"
    return ""


def _normal(address: str | None) -> str | None:
    """Return None for an empty address or one without a host, ``auto`` or ``local`` without scheme, or the address as it is."""
    if address is None:
        return None
    if not isinstance(address, str):
        raise ConfigError(f"the address of Ray must be a str, not {address!r}")
    word = address.removeprefix("ray://")
    if word in ("", "ray"):
        return None
    return word if word in ("auto", "local") else address


def _unreachable(address: str, why: str) -> str:
    return (
        f"no Ray cluster answers at {address!r}: {why.strip()}. Is it running there (ray start --head), is that its port "
        f"({_PORT} of the head node, {_CLIENT_PORT} with ray://), and can this machine reach it? Ray's version must be the "
        "same on both sides"
    )


def _knock(address: str, host: str, port: int, timeout: float) -> None:
    """Check that a gRPC server (with RAY_USE_TLS=1: any server) answers, within the time-out and without Ray's retries."""
    until = time.monotonic() + timeout
    try:
        with socket.create_connection((host, port), timeout) as sock:
            if os.environ.get("RAY_USE_TLS") == "1":
                return  # Ray's servers use TLS, with which this check would fail
            sock.sendall(_PREFACE)
            head = b""
            while len(head) < 9:
                sock.settimeout(max(0.01, until - time.monotonic()))
                more = sock.recv(9 - len(head))
                if not more:
                    break
                head += more
    except OSError as error:
        raise RendezvousError(_unreachable(address, f"{error}")) from error
    if len(head) < 9 or head[3] != _SETTINGS_FRAME:
        raise RendezvousError(_unreachable(address, "what listens there is not Ray"))
