"""Joining: how a process on any host becomes a worker of a running cluster, given the driver's address and key.

1. The process does a handshake with the listening process, so that a wrong key or version is found first.
2. As a visitor with a random name, it asks the driver whether it may join under its own name; the answer contains its rank and
   the cluster's settings.
3. It enters the group. One time-out covers all steps; a failure leaves nothing running.

``python -m actorrpc.worker`` is :func:`serve` on a command line; :func:`serve_order` is for processes that an engine starts.

**Addresses and keys.** A driver that listens without a given key makes a key, and writes it into a file that only this user can
read. (The driver of an embedded cluster does so only if it listens on the loopback interface; on other addresses it needs a given
key.) A process that joins on the same host finds the file by the port.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, Final

import torch

from actorrpc import _time
from actorrpc._exceptions import say
from actorrpc.agent.agent import Agent
from actorrpc.cluster import forwarding, user_code
from actorrpc.cluster.driver import VISITOR
from actorrpc.cluster.driver import serve as serve_request
from actorrpc.cluster.scheduler import Devices, totals_of
from actorrpc.cluster.worker_process import Member, RemoteDirectory, enter
from actorrpc.config import Settings, host_and_port
from actorrpc.errors import (
    AuthenticationError,
    ConfigError,
    LimitError,
    ProtocolError,
    RendezvousError,
    RpcError,
    RpcTimeoutError,
    VersionError,
    WrongTypeError,
)
from actorrpc.group import group
from actorrpc.group.group import is_loopback
from actorrpc.group.launchers import own_cpus
from actorrpc.group.store import addresses_towards, remaining, wait_until
from actorrpc.rpc import api
from actorrpc.transport.signals import REPEATS_S
from actorrpc.transport.tls import Tls, authenticate
from actorrpc.validation import amounts, check_fields, number, option, words
from actorrpc.wire import keys, versions
from actorrpc.wire.handshake import Dialler
from actorrpc.wire.identity import (
    FIRST_VISITOR,
    WorkerRecord,
    check_name,
    name_part,
    new_incarnation,
)
from actorrpc.wire.keys import Key

__all__ = [
    "GRACE_S",
    "JoinedResources",
    "default_name",
    "describe_loss",
    "find_key",
    "join",
    "new_secret",
    "own_address",
    "parse",
    "serve",
    "serve_order",
    "show",
    "write_secret",
]

_SCHEME: Final = "tcp://"


def parse(text: object, what: str = "address", *, listen: bool = False) -> tuple[str, int]:
    """Parse ``tcp://host:port`` (the scheme is optional; IPv6 in brackets); return host and port.

    Args:
        what: the name of the address in messages.
        listen: the address is for listening: the port may be 0 (any) or missing.

    Raises:
        ConfigError: ``text`` is not such an address.
    """
    right = "tcp://HOST:PORT, like tcp://10.0.0.5:7777 or tcp://[fd00::5]:7777"
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{what} must be {right}, not {say(text, repr)}")
    rest = text[len(_SCHEME) :] if text.startswith(_SCHEME) else text
    if "://" in rest:
        raise ConfigError(f"{what}={text!r} cannot be used: it must be {right}")
    any_port = listen and rest.endswith(":0")
    try:
        host, port = host_and_port(rest[:-2] if any_port else rest)
    except ConfigError as error:
        raise ConfigError(f"{what}={text!r} cannot be used: {error}. It must be {right}") from None
    if port is None and not listen:
        hint = "; leave it out to start a cluster here" if what == "address" else ""
        raise ConfigError(f"{what}={text!r} has no port: it must be {right}{hint}")
    return host, port or 0


def show(host: str, port: int) -> str:
    """Return an address in the form that :func:`parse` reads."""
    return f"{_SCHEME}[{host}]:{port}" if ":" in host else f"{_SCHEME}{host}:{port}"


def own_address(host: str = "") -> str:
    """Return the address of this host from which packets to ``host`` are sent. Sends no packet to ``host``.

    Without ``host``: the address towards other networks, or the loopback address on a host without network.
    """
    targets = [host] if host else ["192.0.2.1", "2001:db8::1"]
    return next(itertools.chain.from_iterable(map(addresses_towards, targets)), "127.0.0.1")


# -- keys ------------------------------------------------------------------------------------------------


def new_secret() -> str:
    """Return a new key as text."""
    return secrets.token_hex(16)


def _ending(port: int) -> str:
    return f"-{port:016x}.key"


def write_secret(secret: str, port: int) -> str:
    """Write a key into a file that this user's processes on this host find by the port; return the file's path.

    Raises:
        ConfigError: the runtime directory cannot be used.
    """
    made = keys.create_key_file(secret.encode())
    path = made.rpartition("-")[0] + _ending(port)
    os.replace(made, path)
    return path


def find_key(host: str, port: int) -> Key:
    """Return the key for joining the driver at an address: from the environment, or from the file of a driver on this host.

    Raises:
        AuthenticationError: there is no key; RendezvousError: there is none yet, and a driver on this host may make one.
        ConfigError: the given key cannot be used.
    """
    found = keys.find_key()
    if found is not None:
        return found
    if is_loopback(host):
        directory = keys.runtime_directory()
        for name in sorted(os.listdir(directory)):
            if name.endswith(_ending(port)) and not keys.is_stale(name):
                return keys.read_key_file(os.path.join(directory, name))
    # Without a given key, a driver on this host makes a key, so this process may find the key when the driver has started.
    raise (RendezvousError if is_loopback(host) else AuthenticationError)(
        f"there is no key for joining {show(host, port)}: set ACTORRPC_KEY, or ACTORRPC_KEY_FILE to a file that only you can "
        "read, to the key of the driver (on the driver's own host, a driver that was started without a key and listens "
        "on the loopback makes one that its user's processes find by themselves)"
    )


_log = logging.getLogger("actorrpc.cluster")
GRACE_S: Final = 30.0
"""How long the drain of a worker that has received SIGTERM may take by default, in seconds."""

_TIMEOUT_S: Final = 30.0
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 10.0
#: Settings that a worker decides itself, whatever the driver's settings are.
_OWN: Final = (
    *("transport", "bind", "advertise", "port", "insecure", "log_dir"),
    *("tls", "tls_cert", "tls_key", "tls_ca", "tls_min_version"),
)


_amount = partial(number, none=True, error=WrongTypeError)


def seconds(timeout: Any) -> float:
    """Return a time-out after checking that it is above 0.

    Raises:
        WrongTypeError: ``timeout`` is not a number of seconds above 0.
    """
    found = number("timeout", timeout, unit="seconds", most=math.inf, above=True, error=WrongTypeError)
    return float(found)


def check_takes_code(settings: Settings) -> None:
    """Check that the settings allow a process of a cluster to receive code.

    Raises:
        ConfigError: the settings allow data only.
    """
    if settings.data_only:
        raise ConfigError(
            "the processes of a cluster run what the driver sends them, and cannot take data only: unset "
            "ACTORRPC_DATA_ONLY, or serve exposed functions with init_rpc"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JoinedResources:
    """The resources of a worker, for placement.

    Attributes:
        num_cpus, num_gpus: how many of this host's processors and CUDA devices actors may book; None: all that this process sees.
        resources: further amounts by name.
        labels: the labels, name -> value.
    """

    num_cpus: float | None = option(None, _amount)
    num_gpus: float | None = option(None, _amount)
    resources: Mapping[str, float] = option(dict, partial(amounts, error=WrongTypeError))
    labels: Mapping[str, str] = option(dict, words)

    def __post_init__(self) -> None:
        check_fields(self)

    def facts(self, hosts: list[str]) -> dict[str, Any]:
        """Return these resources, and the names and addresses of this host, in the form that is sent to the driver."""
        cpus = float(own_cpus()) if self.num_cpus is None else float(self.num_cpus)
        gpus = float(Devices(None).total) if self.num_gpus is None else float(self.num_gpus)
        resources = {name: float(amount) for name, amount in self.resources.items()}
        return {"hosts": hosts, "totals": totals_of(cpus, gpus, resources), "labels": dict(self.labels)}

    def take_share(self, index: int, count: int) -> JoinedResources:
        """Restrict this process to its share, as one of ``count`` workers of this host; return its resources.

        The workers share all processors and devices that this process sees, unless the amounts of each worker are given. Sets the
        number of torch's threads, and ``CUDA_VISIBLE_DEVICES``; CUDA must not have been used.

        Raises:
            ConfigError: this host has fewer devices than the workers were given.
        """
        totals = JoinedResources().facts([])["totals"]
        cpus = totals["CPU"] / count if self.num_cpus is None else self.num_cpus
        torch.set_num_threads(max(1, int(cpus)))
        devices = Devices(None)
        gpus = each = self.num_gpus
        if gpus is None and devices.total:
            gpus = devices.total // count or 1 / math.ceil(count / devices.total)
            index, each = index % devices.total, max(1, gpus)
        if devices.total and each:
            held = [devices.allocate(str(number), each) for number in range(index + 1)][-1]
            if held is None:
                raise ConfigError(
                    f"{count} workers with num_gpus={gpus:g} each need more CUDA devices than the {devices.total} of this host"
                )
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(held)
        return dataclasses.replace(self, num_cpus=cpus, num_gpus=gpus)


def default_name() -> str:
    """Return the host's name and the process id, as the name of a worker."""
    host = name_part(socket.gethostname(), "-")
    return f"{host}-{os.getpid()}"


def _greet(
    host: str, port: int, key: Key, settings: Settings, tls: Tls | None, deadline: float
) -> tuple[WorkerRecord, str]:
    """Connect once, do the handshake, and close the connection; return the same values as :func:`_knock`."""
    plain = socket.create_connection((host, port), max(0.05, min(5.0, deadline - _time.now())))
    own = str(plain.getsockname()[0])
    limit = min(deadline, _time.now() + settings.handshake_timeout)
    dialler = Dialler(name=VISITOR + secrets.token_hex(4), incarnation=new_incarnation(), key=key.reveal())
    sock, found = authenticate(plain, tls, dialler, limit, f"the driver at {show(host, port)}")
    sock.close()
    tcp = ((host, port),)
    name, incarnation = found.peer_name, found.peer_incarnation
    return WorkerRecord(name=name, rank=0, incarnation=incarnation, host="unknown", tcp=tcp), own


def _knock(
    host: str, port: int, key: Key, settings: Settings, deadline: float, once: bool
) -> tuple[WorkerRecord, str]:
    """Do a handshake with the driver at an address; retry until ``deadline`` while the connection fails, unless ``once``.

    Returns:
        The driver's record (its rank and host are not known yet), and this host's address on the connection.

    Raises:
        RendezvousError: there is no answer in time.
        ProtocolError, LimitError: the answer is not a worker's; or (AuthenticationError, VersionError) key or version differ.
    """
    where = show(host, port)
    tls = Tls.load(settings)
    problem: list[OSError] = []
    found: list[tuple[WorkerRecord, str]] = []

    def greets() -> bool:
        try:
            found.append(_greet(host, port, key, settings, tls, deadline))
        except OSError as error:
            if isinstance(error, RpcError):
                raise
            problem[:] = [error]
            return False
        return True

    try:
        there = greets() or (
            not once
            and wait_until(
                greets, deadline, "joining", lambda: f"a driver to answer at {where}: {problem[0]}", 0.25
            )
        )
    except (ProtocolError, LimitError) as error:
        raise type(error)(f"cannot join the cluster at {where}: {error}") from error
    if not there:
        why = problem[0] if problem else "no answer"
        raise RendezvousError(
            f"no driver answers at {where}: {why}. Was it started with actorrpc.init(listen={where!r}), does it still run, "
            "and does this host reach that address?"
        )
    return found[0]


def _request_admission(
    driver: WorkerRecord, name: str, key: Key, settings: Settings, deadline: float
) -> tuple[WorkerRecord, dict[str, Any]]:
    """Ask the driver whether this process may join under a name; return the driver's whole record, and the answer.

    Raises:
        RendezvousError: the driver refuses this process, or does not answer.
        VersionError: the driver requires the same versions of actorrpc, Python and torch.
    """
    shown, left = show(*driver.tcp[0]), remaining(deadline)
    record = WorkerRecord(
        name=VISITOR + secrets.token_hex(8),
        rank=FIRST_VISITOR + secrets.randbits(29),
        incarnation=new_incarnation(),
        host=f"visitor-{secrets.token_hex(8)}",
    )
    agent = Agent(
        record,
        settings=dataclasses.replace(
            settings, transport="tcp", session_grace=left, data_only=False, recorder=False
        ),
        key=key,
        resolve=lambda to: driver if to in (driver.name, driver.rank) else None,
        members=lambda: [driver, record],
    )
    try:
        agent.start([])
        request = {"name": name, "host": socket.gethostname(), "versions": versions.here()}
        answer: dict[str, Any] = agent.call_sync(
            agent.peer(driver.name), serve_request, ("admit", request), {}, left
        )
    except RpcTimeoutError as error:
        raise RendezvousError(f"the driver at {shown} has not answered within {left:.3g} s") from error
    except (OSError, RpcError) as error:
        raise RendezvousError(f"the driver at {shown} could not be asked: {error}") from error
    finally:
        agent.close()
    if "error" in answer:
        kind = VersionError if answer.get("differs") else RendezvousError
        raise kind(f"cannot join the cluster at {shown} as {name!r}: {answer['error']}")
    found = WorkerRecord.from_bytes(answer["driver"])
    # The address that has worked comes first: the advertised addresses may be for other hosts.
    return dataclasses.replace(found, tcp=tuple(dict.fromkeys((*driver.tcp, *found.tcp)))), answer


def join(
    address: str,
    *,
    name: str | None = None,
    means: JoinedResources | None = None,
    key: Key | None = None,
    timeout: float = _TIMEOUT_S,
    settings: Mapping[str, Any] | None = None,
    serves: bool = False,
    launch_rank: int | None = None,
    once: bool = False,
) -> Member:
    """Become a worker of the cluster whose driver listens at an address; returns when the driver has registered it.

    Args:
        address: ``tcp://host:port``.
        name: this worker's name; default the host's name and the process id.
        means: this worker's resources; default all that this process sees.
        key: default the key from the environment, or from the file of a driver on this host.
        timeout: for the whole operation, in seconds.
        settings: fields of :class:`actorrpc.config.Settings`, which override the environment's and the driver's.
        serves: this process only serves from now on, and does not continue its script. The caller must call :meth:`Member.wait`.
        launch_rank: the rank of this process in its launch; None if no launcher has started it.
        once: raise at once if no driver answers; by default, try again until the time-out.

    Raises:
        ConfigError: an argument cannot be used.
        RendezvousError: there is no answer, the answer is from a worker that is no driver, or the name is taken.
        ProtocolError, LimitError: the answer is not a worker's.
        AuthenticationError: there is no key, or the driver has another key.
        VersionError: the driver has another version of the protocol, or (with ``require_same``) of actorrpc, Python or torch.
        RuntimeError: this process is in a group already.
    """
    host, port = parse(address)
    where = show(host, port)
    own_name = check_name(default_name() if name is None else name)
    if api.what() is not None:
        raise RuntimeError(f"RPC is already initialized: this process is {api.what()}")
    deadline = _time.now() + seconds(timeout)
    here = _own_settings(where, settings or {})
    keys.sweep()
    found_key = find_key(host, port) if key is None else key
    driver, own = _knock(host, port, found_key, here, deadline, once)
    driver, answer = _request_admission(driver, own_name, found_key, here, deadline)
    made = _settings(here, answer["settings"], own, settings or {})
    user_code.use(answer["script"], answer["directory"])
    directory = RemoteDirectory(driver, joined=True)
    facts = (means or JoinedResources()).facts(sorted({socket.gethostname(), made.advertise or own, own}))
    # Before the driver registers this process: afterwards, the driver may run methods here, which print.
    forwards = serves and forwarding.begin(own_name, driver, found_key, made)
    facts |= {"forwards": forwards, "launch_rank": launch_rank}
    entered = group.enter(own_name, answer["rank"], directory, settings=made, key=found_key, serves=serves)
    try:
        return enter(
            entered,
            directory,
            timeout=answer["timeout"],
            what=f"worker {own_name!r} of the cluster at {where}",
            namespace=answer["namespace"],
            facts=facts,
            limit=remaining(deadline),
        )
    except RpcError as error:
        raise RendezvousError(f"the driver at {where} has not registered {own_name!r}: {error}") from error


def _own_settings(where: str, given: Mapping[str, Any]) -> Settings:
    """Return the settings in ``given``, and otherwise from the environment.

    Raises:
        ConfigError: they exclude TCP.
    """
    found = Settings.from_environment(**given)
    if found.transport == "unix":
        raise ConfigError(
            f"this host takes Unix sockets only (ACTORRPC_TRANSPORT=unix, or transport='unix'), and the driver at {where} is "
            "reached over TCP: unset it; with auto, the default, workers of one host still use Unix sockets among themselves"
        )
    return found


def _settings(here: Settings, of_driver: Mapping[str, Any], own: str, given: Mapping[str, Any]) -> Settings:
    """Return the settings of this worker.

    Settings in ``given`` come first. The settings in ``_OWN`` come from ``here``, the settings of this process, and all others
    from the driver. Without a given address, the worker listens on ``own``, this host's address towards the driver.
    """
    check_takes_code(here)
    known = {each.name for each in dataclasses.fields(Settings)}  # the driver may have a later version
    sent = {name: value for name, value in of_driver.items() if name in known}
    values = {**sent, **{name: getattr(here, name) for name in _OWN}, **given}
    # Drivers of earlier versions, which do not send this setting, keep no output of workers that join.
    values["log_forward"] = bool(sent.get("log_forward"))
    if values["bind"] is None:
        values["bind"] = own
    return Settings(**values)


# -- serving ---------------------------------------------------------------------------------------------


class _Signals:
    """The handlers of SIGTERM and SIGINT in a process that serves. A context manager; has no effect outside of the main thread.

    The first signal drains the worker, and a signal more than ``REPEATS_S`` later makes it leave at once. While the process is no
    worker, the first signal raises ``SystemExit(0)``.

    Attributes:
        member: the membership of the process at present.
        received: whether a signal was received.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._before: dict[int, Any] = {}
        self._again_from = 0.0
        self.member: Member | None = None
        self.received = False

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGTERM, signal.SIGINT):
                self._before[each] = signal.signal(each, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        member, first = self.member, not self.received
        if first:  # set before `received`, as another signal may interrupt this function
            self._again_from = _time.now() + REPEATS_S
        self.received = True
        if member is None:
            raise SystemExit(0)
        if first and self._grace > 0:
            member.drain(self._grace)
        elif first or _time.now() >= self._again_from:
            member.give_up("at this signal" if first else "at a further signal")


def serve(
    address: str,
    *,
    name: str | None = None,
    means: JoinedResources | None = None,
    timeout: float = _TIMEOUT_S,
    signals: bool = True,
    grace: float = GRACE_S,
    retry: bool = False,
) -> int:
    """Join, and serve until the driver releases this worker or ends, or a signal is received; then leave.

    Args:
        timeout: how long joining may take, in seconds.
        signals: drain this worker at SIGTERM and SIGINT, and leave at a signal 1 s later; ignored outside of the main thread.
        grace: how long the drain after a signal may take, in seconds; 0: leave at once.
        retry: if there is no driver, or the driver has ended, wait for a driver at the address, and join again. Only a drain or
            a signal ends this function then, or a driver that refuses the key or the version of this process.

    Returns:
        The exit status for the process: 0; 1, after a line on stderr, if the driver has died or considers this worker dead.

    Raises:
        RpcError: as :func:`join`.
    """
    name = default_name() if name is None else name
    with _Signals(grace) if signals else contextlib.nullcontext(_Signals(grace)) as ends:
        while True:
            attempt = partial(join, address, name=name, means=means, timeout=timeout, serves=True)
            member = _join_patiently(attempt, name) if retry else attempt()
            try:
                ends.member = member
                forwarding.say(f"worker {name!r} has joined {address}")
                member.wait()
            finally:
                api.shutdown(False)
                ends.member = None
            if ends.received or member.drained or not (member.driver_lost or retry):
                return 0
            forwarding.say(
                describe_loss(member, address) + ("" if retry else ". Start it again when its driver runs")
            )
            if not retry:
                return 1


def _join_patiently(attempt: Callable[..., Member], name: str) -> Member:
    """Join as soon as a driver admits this worker. Wait up to 15 s between two attempts; the time is drawn at random.

    Raises:
        RpcError: the driver refuses the key, the version or the settings of this process.
    """
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return attempt(once=True)
        except (RendezvousError, LimitError) as error:
            if pause == _FIRST_PAUSE_S:
                forwarding.say(f"worker {name!r} waits for a driver: {error}")
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def describe_loss(member: Member, address: str) -> str:
    """Return a sentence: the worker has lost its driver, or has left the cluster, at ``address``."""
    how = f"lost its driver at {address}" if member.driver_lost else f"left the cluster at {address}"
    return f"worker {member.agent.name!r} has {how}" + (
        f": {member.driver_lost}" if member.driver_lost else ""
    )


def serve_order(
    *, means: JoinedResources | None = None, timeout: float = _TIMEOUT_S, signals: bool = False
) -> int:
    """Serve as a worker that an engine has started, with address, name and key from the environment variables.

    Returns:
        The exit status for the process, as :func:`serve`.

    Raises:
        ConfigError: this process was not started by an engine.
        RpcError: as :func:`join`.
    """
    address, name = os.environ.get("ACTORRPC_JOIN"), os.environ.get("ACTORRPC_WORKER_NAME")
    if not address or not name:
        raise ConfigError(
            "ACTORRPC_JOIN and ACTORRPC_WORKER_NAME must be set: engines start workers with LaunchRequest.environment()"
        )
    return serve(address, name=name, means=means, timeout=timeout, signals=signals)
