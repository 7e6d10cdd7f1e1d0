"""Joining: how a process anywhere becomes a worker of a cluster that runs, given its driver's address and key.

It shakes hands with whoever listens there (so a wrong key or version is known before anything is sent), asks, under a name
that nobody else has, whether it may come under the one it wants, and is told its rank and the cluster's settings. Then
it enters, and is a member as any other. All of it within one time-out; what fails leaves nothing running.

``python -m actorrpc.worker`` is :func:`serve` on a command line; :func:`serve_order` is for processes that an engine starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import secrets
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final

from actorrpc import moments
from actorrpc.cluster import addresses, script, serving
from actorrpc.cluster.devices import Devices
from actorrpc.cluster.driver import VISITOR
from actorrpc.cluster.member import Member, enter
from actorrpc.cluster.remote import RemoteDirectory
from actorrpc.config import Settings
from actorrpc.core.agent import Agent
from actorrpc.core.handshake import Dialler
from actorrpc.core.identity import (
    FIRST_VISITOR,
    MAX_NAME,
    WorkerRecord,
    check_name,
    host_identity,
    new_incarnation,
)
from actorrpc.core.keys import Key
from actorrpc.core.meeting import poll
from actorrpc.core.tls import Stream, Tls, explain
from actorrpc.errors import (
    ConfigError,
    LimitError,
    ProtocolError,
    RendezvousError,
    RpcError,
    RpcTimeoutError,
    WrongTypeError,
)
from actorrpc.rpc import api, group

__all__ = ["Means", "join", "serve", "serve_order"]

_log = logging.getLogger("actorrpc.cluster")
_TIMEOUT_S: Final = 30.0
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_:-]+", re.ASCII)
#: what a worker decides for itself, whatever the driver's settings are
_OWN: Final = (
    *("transport", "bind", "advertise", "port", "insecure"),
    *("tls_cert", "tls_key", "tls_ca", "tls_min_version", "frame_integrity"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a worker has, for placement.

    Attributes:
        num_cpus, num_gpus: None for all that this process sees.
        resources: further amounts by name.
        labels: words by name.
    """

    num_cpus: float | None = None
    num_gpus: float | None = None
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_cpus", "num_gpus"):
            value = getattr(self, name)
            if value is not None and not _is_amount(value):
                raise WrongTypeError(f"{name} must be a number >= 0, not {value!r}")
        if not isinstance(self.resources, Mapping) or not all(
            isinstance(name, str) and name and _is_amount(amount) for name, amount in self.resources.items()
        ):
            raise WrongTypeError(
                f"resources must be a dict of numbers >= 0 by name, like {{'disk': 2}}, not {self.resources!r}"
            )
        for name in ("CPU", "GPU"):
            if name in self.resources:
                raise ConfigError(f"resources: say {name} with num_{name.lower()}s")
        if not isinstance(self.labels, Mapping) or not all(
            isinstance(name, str) and name and isinstance(value, str) for name, value in self.labels.items()
        ):
            raise WrongTypeError(
                f"labels must be a dict of words by name, like {{'zone': 'a'}}, not {self.labels!r}"
            )

    def facts(self, hosts: list[str]) -> dict[str, Any]:
        """Return it as the driver is told."""
        cpus = float(os.cpu_count() or 1) if self.num_cpus is None else float(self.num_cpus)
        gpus = float(Devices(None).total) if self.num_gpus is None else float(self.num_gpus)
        return {
            "hosts": hosts,
            "num_cpus": cpus,
            "num_gpus": gpus,
            "resources": {name: float(amount) for name, amount in self.resources.items()},
            "labels": dict(self.labels),
        }


def _is_amount(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= float(value) < float("inf")
    )


def _default_name() -> str:
    host = _NOT_IN_NAMES.sub("-", socket.gethostname())[: MAX_NAME - 20] or "worker"
    return f"{host}-{os.getpid()}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """Who answers at an address, and from which of our own we reach it."""

    name: str
    incarnation: str
    own: str


def _knock(host: str, port: int, key: Key, settings: Settings, deadline: float) -> _Found:
    """Shake hands with whoever listens at an address, and hang up.

    Raises:
        RendezvousError: nobody answers there in time, or not as a worker does.
        AuthenticationError, VersionError: it does not share the key, or a version of the protocol.
    """
    where = addresses.show(host, port)
    tls = Tls.load(settings)
    problem: list[OSError] = []
    found: list[_Found] = []

    def once() -> bool:
        limit = max(0.05, min(5.0, deadline - moments.now()))
        try:
            plain = socket.create_connection((host, port), limit)
            limit = min(deadline, moments.now() + settings.handshake_timeout)
            secured = None if tls is None else tls.dial(plain, limit)
            sock: Stream = plain if secured is None else secured
            with contextlib.closing(sock):
                dialler = Dialler(
                    name=VISITOR + secrets.token_hex(4),
                    incarnation=new_incarnation(),
                    key=key.reveal(),
                    binding=b"" if secured is None else secured.binding,
                    seals=settings.frame_integrity and tls is None,
                )
                data = dialler.start()
                while not dialler.done:
                    sock.settimeout(max(0.05, limit - moments.now()))
                    if data:
                        sock.sendall(data)
                    data = sock.recv(4096)
                    if not data:
                        raise ConnectionResetError("it closed the connection during the handshake")
                    data = dialler.feed(data)
                result = dialler.result
                found.append(_Found(result.peer_name, result.peer_incarnation, str(sock.getsockname()[0])))
        except ssl.SSLError as error:
            raise explain(error, f"the driver at {where}") from error
        except OSError as error:
            if isinstance(error, RpcError):
                raise
            problem[:] = [error]
            return False
        return True

    try:
        there = poll(once, deadline, 0.25)
    except (ProtocolError, LimitError) as error:
        raise type(error)(f"cannot join the cluster at {where}: {error}") from error
    if not there:
        why = problem[0] if problem else "no answer"
        raise RendezvousError(
            f"no driver answers at {where}: {why}. Was it started with actorrpc.init(listen={where!r}), does it still run, "
            "and does this host reach that address?"
        )
    return found[0]


def _ask(
    driver: WorkerRecord, key: Key, request: dict[str, Any], settings: Settings, deadline: float
) -> dict[str, Any]:
    """Ask the driver whether this process may join."""
    record = WorkerRecord(
        name=VISITOR + secrets.token_hex(8),
        rank=FIRST_VISITOR + secrets.randbits(29),
        incarnation=new_incarnation(),
        host=f"visitor-{secrets.token_hex(8)}",
    )
    left = max(0.1, deadline - moments.now())
    agent = Agent(
        record,
        settings=dataclasses.replace(settings, transport="tcp", connect_timeout=left, data_only=False),
        key=key,
        resolve=lambda to: driver if to in (driver.name, driver.rank) else None,
        members=lambda: [driver, record],
    )
    try:
        agent.start([])
        answer: dict[str, Any] = agent.call(
            agent.peer(driver.name), serving.admit, (request,), {}, left
        ).result()
        return answer
    finally:
        agent.close()


def join(
    address: str,
    *,
    name: str | None = None,
    means: Means | None = None,
    key: Key | None = None,
    timeout: float = _TIMEOUT_S,
    settings: Mapping[str, Any] | None = None,
    serves: bool = False,
) -> Member:
    """Become a worker of the cluster whose driver listens at an address; returns when the driver has taken it up.

    Args:
        address: ``tcp://host:port``.
        name: this worker's; default the host's name and the process id.
        means: what it has; default all that this process sees.
        key: default that of the environment, or of a driver on this host.
        timeout: for all of it, in seconds.
        settings: fields of :class:`actorrpc.config.Settings`, over the environment's and the driver's.
        serves: this process serves from here on, and does not go on with its script.

    Raises:
        ConfigError: an argument cannot be used.
        RendezvousError: nobody answers there, it is no driver, or the name is taken.
        AuthenticationError: there is no key, or it is not the driver's.
        VersionError: the two speak different versions of the protocol.
        RuntimeError: this process is in a group already.
    """
    host, port = addresses.parse(address)
    where = addresses.show(host, port)
    own_name = check_name(_default_name() if name is None else name)
    if api.what() is not None:
        raise RuntimeError(f"RPC is already initialized: this process is {api.what()}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise WrongTypeError(f"timeout must be a number of seconds > 0, not {timeout!r}")
    found_key = addresses.find_key(host, port) if key is None else key
    deadline = moments.now() + timeout
    here = Settings.from_environment(**(settings or {}))
    found = _knock(host, port, found_key, here, deadline)
    first = WorkerRecord(
        name=found.name, rank=0, incarnation=found.incarnation, host="unknown", tcp=((host, port),)
    )
    try:
        answer = _ask(first, found_key, {"name": own_name}, here, deadline)
    except RpcTimeoutError as error:
        raise RendezvousError(f"the driver at {where} has not answered within {timeout:g} s") from error
    except (OSError, RpcError) as error:
        raise RendezvousError(f"the driver at {where} could not be asked: {error}") from error
    if "error" in answer:
        raise RendezvousError(f"cannot join the cluster at {where} as {own_name!r}: {answer['error']}")
    driver = WorkerRecord.from_bytes(answer["driver"])
    # The way that has worked goes first: what it advertises may be for others.
    tcp = tuple(dict.fromkeys(((host, port), *driver.tcp)))
    driver = dataclasses.replace(driver, tcp=tcp)
    made = _settings(answer["settings"], found.own, settings or {})
    has_code = script.has_code(answer["script"])
    place = answer["directory"]
    if has_code and place is not None and place not in sys.path:
        sys.path.append(place)
    directory = RemoteDirectory(driver)
    shown = made.advertise or found.own
    facts = (means or Means()).facts(sorted({socket.gethostname(), shown, found.own}))
    entered = group.enter(own_name, answer["rank"], directory, settings=made, key=found_key, serves=serves)
    try:
        return enter(
            entered,
            directory,
            driver,
            timeout=answer["timeout"],
            what=f"worker {own_name!r} of the cluster at {where}",
            namespace=answer["namespace"],
            facts={**facts, "has_code": has_code, "host": host_identity()},
            limit=max(0.1, deadline - moments.now()),
        )
    except RpcError as error:
        raise RendezvousError(f"the driver at {where} has not taken up {own_name!r}: {error}") from error


def _settings(of_driver: Mapping[str, Any], own: str, given: Mapping[str, Any]) -> Settings:
    """Return the settings of this worker: the driver's, but for what each host decides itself."""
    here = Settings.from_environment(**given)
    if here.data_only:
        raise ConfigError(
            "the workers of a cluster run what the driver sends them, and cannot take data only: unset "
            "ACTORRPC_DATA_ONLY, or serve exposed functions with init_rpc"
        )
    values = {**of_driver, **{name: getattr(here, name) for name in _OWN}, **given}
    if values["bind"] is None:
        values["bind"] = own
    if values["transport"] == "unix":
        values["transport"] = "auto"
    return Settings(**values)


# -- serving ---------------------------------------------------------------------------------------------


def serve(
    address: str,
    *,
    name: str | None = None,
    means: Means | None = None,
    timeout: float = _TIMEOUT_S,
    signals: bool = True,
) -> int:
    """Join, and serve until this worker is released, the driver ends, or a signal comes; then leave.

    Args:
        signals: leave, with 0, at SIGTERM and SIGINT; only on the main thread.

    Returns:
        What the process should exit with: 0.

    Raises:
        RpcError: as :func:`join`.
    """
    early: list[int] = []
    members: list[Member] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        early.append(number)
        if not members:
            raise SystemExit(0)
        members[0].leaver.leave()

    before: dict[int, Any] = {}
    if signals and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, stop)
    try:
        member = join(address, name=name, means=means, timeout=timeout, serves=True)
        members.append(member)
        sys.stderr.write(f"worker {member.agent.name!r} has joined {address}\n")
        sys.stderr.flush()
        if early:
            member.leaver.leave()
        member.wait()
    finally:
        api.shutdown(False)
        for each, handler in before.items():
            signal.signal(each, handler)
    return 0


def serve_order(*, means: Means | None = None, timeout: float = _TIMEOUT_S, signals: bool = False) -> int:
    """Be the worker that an engine has ordered: its address, name and key are in the environment (``Order.environment``).

    Returns:
        What the process should exit with: 0.

    Raises:
        ConfigError: this process was not started by an engine.
        RpcError: as :func:`join`.
    """
    address, name = os.environ.get("ACTORRPC_JOIN"), os.environ.get("ACTORRPC_WORKER_NAME")
    if not address or not name:
        raise ConfigError(
            "ACTORRPC_JOIN and ACTORRPC_WORKER_NAME must be set: engines start workers with Order.environment()"
        )
    return serve(address, name=name, means=means, timeout=timeout, signals=signals)
