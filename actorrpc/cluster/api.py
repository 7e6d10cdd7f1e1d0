""":func:`init` makes this process the driver or a worker of a cluster.

The default is the embedded local cluster: no daemon, no port, and no files except, in the private runtime directory, the
workers' sockets and a file by which this user's tools find the cluster. The driver is worker 0. Other workers are forked for
actors when they are needed (``provisioners/local.py``), and end when the driver ends or is killed. With ``listen=``, processes
on any host may join; with ``engine=``, an engine starts them elsewhere.

No function of this module holds a lock while it waits. Waits are bounded by the caller's time-out (except that of launched
ranks that serve in ``init()``), and can be interrupted.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final

from actorrpc import _time
from actorrpc._exceptions import say, undo_on_error
from actorrpc._python import interpreter_options
from actorrpc.actors import context as context_module
from actorrpc.agent.context import Worker, on_fork
from actorrpc.cluster import join as join_module
from actorrpc.cluster.driver import Cluster, Reception, current_cluster
from actorrpc.cluster.join import JoinedResources, join
from actorrpc.cluster.launch_meeting import LaunchMeeting, open_meeting
from actorrpc.cluster.logs import LogFile, log_directory
from actorrpc.cluster.provisioners import ray
from actorrpc.cluster.provisioners.base import Engine, LaunchedEngine
from actorrpc.cluster.provisioners.fork_client import import_path
from actorrpc.cluster.provisioners.local import LocalCluster
from actorrpc.cluster.worker_process import Member
from actorrpc.config import Settings, host_and_port
from actorrpc.errors import (
    ConfigError,
    RendezvousError,
    RpcError,
    WrongTypeError,
)
from actorrpc.group import group
from actorrpc.group.group import Group, MemberDirectory
from actorrpc.group.launchers import VARIABLES, Launch, of_environment, own_cpus
from actorrpc.group.store import wait_until
from actorrpc.rpc import api
from actorrpc.rpc.options import DEFAULT_RPC_TIMEOUT_SEC, check_timeout
from actorrpc.validation import checks_of, text
from actorrpc.wire import keys
from actorrpc.wire.identity import check_name
from actorrpc.wire.keys import MAKE_ONE, Key

__all__ = ["ClusterContext", "init", "page_address"]

_TRY_S: Final = 5.0  # how long a rank tries to join at an address before it reads the launcher's store again
_SETTINGS: Final = checks_of(Settings)
_END_S: Final = 0.5  # how long the child may take to send a last event to open pages
# The program of the child. `-m` cannot replace it: the child must set the driver's sys.path to find this package.
_BOOT: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from actorrpc.cli.commands import main
sys.exit(main())
"""
_PAGE: Final = "use dashboard=True, or dashboard='127.0.0.1:PORT', for the page of actorrpc dashboard"
_OWN_LOGGING: Final = "configure Python's logging; this package's loggers are below 'actorrpc'"
#: Options of Ray's init() that do not exist here, and what to use instead.
_OF_RAY: Final = {
    "dashboard_host": _PAGE,
    "dashboard_port": _PAGE,
    "include_dashboard": _PAGE,
    "object_store_memory": "use object_memory= for the bytes of large objects that all processes on a host may hold",
    "local_mode": "actors always run in processes; to debug, call the class itself",
    "runtime_env": "processes have the driver's environment; use env= for an actor",
    "job_config": "there are no jobs",
    "storage": "nothing is stored",
    "configure_logging": _OWN_LOGGING,
    "logging_level": _OWN_LOGGING,
    "logging_config": _OWN_LOGGING,
    "logging_format": _OWN_LOGGING,
    "log_level": _OWN_LOGGING,
}


class ClusterContext:
    """The result of :func:`init`. As a context manager, it shuts down the cluster, or leaves the cluster that init() has joined.

    Attributes:
        name: this worker's name.
        namespace: the default namespace of names of actors.
        address: where other processes can join, ``tcp://host:port``; empty if they cannot, or if init() found a running cluster.
    """

    def __init__(self, name: str, namespace: str, *, owned: bool, address: str = "") -> None:
        self.name = name
        self.namespace = namespace
        self.address = address
        self._owned = owned

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """End the cluster, or leave it, as :func:`actorrpc.shutdown` does."""
        api.shutdown(graceful, timeout)

    def __enter__(self) -> ClusterContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # If init() found a running cluster, do nothing. After Ctrl-C, which is no Exception, do not wait for actors.
        if self._owned:
            api.shutdown(graceful=kind is None or issubclass(kind, Exception))

    def __repr__(self) -> str:
        return f"<actorrpc.Context of {self.name!r}, namespace {self.namespace!r}>"


def init(
    address: str | None = None,
    *,
    listen: str | None = None,
    engine: Engine | str | None = None,
    engine_options: Mapping[str, Any] | None = None,
    spmd: bool = False,
    num_cpus: float | None = None,
    num_gpus: int | None = None,
    resources: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    namespace: str | None = None,
    log_to_driver: bool = True,
    ignore_reinit_error: bool = False,
    name: str | None = None,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    join_timeout: float = 30.0,
    dashboard: bool | str = False,
    preload: Sequence[str] = (),
    **settings: Any,
) -> ClusterContext:
    """Start a cluster, with this process as its driver. Or join the cluster at ``address``, or the cluster of a launcher.

    Without arguments, this starts the embedded local cluster, and returns at once: the process from which workers are forked
    imports torch meanwhile (1-2 s), and actors that are created earlier wait until then. Using actors before
    ``init()`` calls it. The cluster ends with :func:`actorrpc.shutdown`, with ``with actorrpc.init(): ...``, or with this
    process.

    Under torchrun, ``srun`` or ``mpirun`` (more than one task), the launched processes form one cluster: rank 0
    is the driver. Without ``spmd``, the other ranks serve inside of this function until rank 0 releases them. Then they
    end with ``SystemExit(0)``, or with exit code 1 if rank 0 has died.

    Args:
        address: ``tcp://host:port`` of a driver that listens: join it, as a worker that can also use the cluster. Or the
            address of an engine, ``ray://...``.
        listen: ``tcp://host:port`` where others may join: ``python -m actorrpc.worker --join ...``. For addresses other than
            the loopback interface, a key is required (``ACTORRPC_KEY``, ``ACTORRPC_KEY_FILE``). Default: ``ACTORRPC_LISTEN``.
        engine: starts processes: ``"local"`` (the default), ``"ray"``, or an
            :class:`~actorrpc.cluster.provisioners.base.Engine`.
        engine_options: the engine's options, by name. For an engine given by name, keywords that are not settings are also
            engine options, and ``num_cpus``, ``num_gpus``, ``resources`` apply to each of its workers:
            ``init("ray://head", num_workers=8)``.
        spmd: under a launcher: every rank continues with the script, as a worker.
        num_cpus: the CPUs of this machine that actors and tasks can book with ``num_cpus``; default: as many as the affinity
            mask, the control groups and Slurm allow, divided among the ranks of a launcher. Actors that book none can always be
            created, unless this is below 1.
        num_gpus: how many CUDA devices can be assigned; default: all that this process sees.
        resources: further amounts that this machine has, by name, for ``options(resources=...)``.
        labels: labels of this machine, name -> word, for ``options(labels=...)``.
        namespace: the default namespace of names of actors; default ``""``.
        log_to_driver: show the output of actors, and of workers that join by ``python -m actorrpc.worker``, here.
        ignore_reinit_error: return, instead of raising, if this process is already in a cluster or group.
        name: this worker's name; default ``"driver"``; for a worker that joins, the host's name and the process id.
        rpc_timeout: the default time-out of calls (``rpc_sync`` and the like), in seconds; 0 means none.
        join_timeout: how long joining, and waiting for the ranks of a launcher, may take, in seconds.
        dashboard: also serve the page of ``actorrpc dashboard`` (extra ``dashboard``), by a separate process that prints a link
            on stderr and ends with the cluster, or with this process. True: at 127.0.0.1 and any port; or ``"127.0.0.1:8265"``.
        preload: names of modules that the process from which others are forked imports before it forks: ``["torch.optim",
            "my_module"]``. The processes of actors then share these modules, instead of importing them one by one. Each module
            must be importable, and must not start threads or use CUDA when it is imported. Workers that join, the engine
            ``"ray"`` and ranks of a launcher other than 0 do not preload.
        settings: fields of :class:`actorrpc.config.Settings`, for all processes of the cluster.

    Raises:
        ConfigError: an argument, or the environment of a launcher, cannot be used.
        RendezvousError, AuthenticationError, VersionError: the cluster at ``address`` could not be joined.
        PlacementError, PeerDiedError, RpcTimeoutError: the engine could not start its first workers.
        RpcError: this process is already in a cluster or group, and ``ignore_reinit_error`` is False.
        OSError: the process from which workers are forked cannot be started.
    """
    options = _InitOptions(
        means=JoinedResources(
            num_cpus=num_cpus, num_gpus=num_gpus, resources=resources or {}, labels=labels or {}
        ),
        namespace=namespace,
        log_to_driver=log_to_driver,
        ignore_reinit_error=ignore_reinit_error,
        name=name,
        rpc_timeout=rpc_timeout,
        join_timeout=join_timeout,
        preload=_modules(preload),
        settings=settings,
    )
    if isinstance(address, str) and address.startswith("ray"):
        if engine not in (None, "ray"):
            raise ConfigError(f"address={address!r} is for engine='ray', not {engine!r}")
        engine, engine_options = "ray", {**(engine_options or {}), "address": address}
        address = None
    page = page_address(dashboard)
    running = api.what(wait=True)
    if running is not None:
        return _found_running(running, ignore_reinit_error)
    if address is not None:
        drives = listen is not None or engine is not None
        return _join(address, options, has_page=page is not None, drives=drives)
    awaited = 0
    if listen is None and engine is None and os.environ.get("ACTORRPC_LISTEN"):
        listen, awaited = os.environ["ACTORRPC_LISTEN"], _awaited_workers()
    launched = of_environment() if listen is None and engine is None else None
    if launched is not None and launched.size > 1:
        context = _launched(launched, spmd, options)
        return _with_page(context, page if launched.rank == 0 else None)
    if spmd and launched is None:
        raise ConfigError(
            "spmd=True is for the ranks of a launcher (torchrun, srun, mpirun), and this process is not one: "
            f"{VARIABLES} are not set"
        )
    found = _engine(engine, engine_options or {}, options)
    slots_first = isinstance(found, LaunchedEngine) and found.num_workers > 0
    driver = _Driver(options, listen, found, slots_first=slots_first)
    context = driver.start(options.ignore_reinit_error)
    if awaited:
        with undo_on_error(partial(api.shutdown, False)):
            _wait_for_workers(awaited, join_timeout)
    return _with_page(context, page)


def _awaited_workers() -> int:
    said = os.environ.get("ACTORRPC_WORKERS") or "0"
    try:
        return int(said)
    except ValueError:
        raise ConfigError(
            f"ACTORRPC_WORKERS={said!r} cannot be used: it must be a number of workers"
        ) from None


def _wait_for_workers(count: int, timeout: float) -> None:
    """Wait until a number of workers have joined.

    Raises:
        RendezvousError: not all have joined in time.
    """
    cluster = current_cluster()
    assert cluster is not None
    joined = cluster.book.workers
    if not wait_until(
        lambda: len(joined) >= count,
        _time.now() + timeout,
        "init()",
        lambda: f"{count - len(joined)} of {count} workers to join",
    ):
        raise RendezvousError(
            f"only {len(joined)} of {count} workers (ACTORRPC_WORKERS) have joined within {timeout:g} s: actorrpc up names "
            "the hosts that are missing; join_timeout= sets the time"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _InitOptions:
    """Options of :func:`init` for all ways of starting a cluster; ``means`` are the resources of this process."""

    means: JoinedResources
    namespace: str | None
    log_to_driver: bool
    ignore_reinit_error: bool
    name: str | None
    rpc_timeout: float
    join_timeout: float
    preload: tuple[str, ...]
    settings: dict[str, Any]


def _join(address: str, options: _InitOptions, *, has_page: bool, drives: bool) -> ClusterContext:
    """Join the cluster at an address.

    Raises:
        ConfigError: an option for drivers was given.
    """
    if has_page:
        raise ConfigError(
            "address= joins a cluster, and its driver has the page: use dashboard= there, or run: "
            f"actorrpc dashboard --connect {address}"
        )
    if drives:
        raise ConfigError("address= joins a cluster: leave listen= and engine= to its driver")
    if options.preload:
        raise ConfigError("address= joins a cluster: leave preload= to its driver")
    _known(options.settings)
    member = join(
        address,
        name=options.name,
        means=options.means,
        timeout=options.join_timeout,
        settings=options.settings,
    )
    return ClusterContext(member.agent.name, api.namespace(), owned=True, address=address)


def _engine(engine: Engine | str | None, given: Mapping[str, Any], options: _InitOptions) -> Engine | None:
    """Return the engine with a name, or the given engine itself; None for the embedded engine.

    Args:
        given: the engine's options.
        options: for a named engine, resources and keywords that are not settings are further options of the engine, and are
            removed from the settings.

    Raises:
        ConfigError: the name is unknown, Ray is not installed, or the options cannot be used.
    """
    if engine is None or engine == "local":
        if given:
            raise ConfigError(f"the embedded engine takes no engine_options, not {', '.join(given)}")
        return None
    if options.preload:
        raise ConfigError(
            f"preload= is for the processes that this driver forks, but engine={getattr(engine, 'name', engine)!r} starts "
            "other processes: leave it out"
        )
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str):
        raise WrongTypeError(f"engine must be a name or an Engine, not {engine!r}")
    if engine != "ray":
        raise ConfigError(f"there is no engine {engine!r}; there are: local, ray")
    means, settings = options.means, options.settings
    own = {option: settings.pop(option) for option in list(settings) if option not in _SETTINGS}
    known = {
        "log_to_driver": options.log_to_driver,
        "num_cpus": means.num_cpus,
        "num_gpus": means.num_gpus,
        "resources": means.resources or None,
    }
    booked = {option: value for option, value in known.items() if value is not None}
    return ray.make(**{**booked, **own, **given})


def _with_page(context: ClusterContext, page: tuple[str, int] | None) -> ClusterContext:
    if page is not None:
        with undo_on_error(partial(api.shutdown, False)):
            _start_page(page)
    return context


def page_address(dashboard: bool | str) -> tuple[str, int] | None:
    """Return the address and port of the page, with 0 for any port; None if there should be no page.

    Raises:
        ConfigError: other hosts can reach the address, or the server's packages are not installed.
    """
    if dashboard is False:
        return None
    host, port = "127.0.0.1", None
    if dashboard is not True:
        given = text("dashboard", dashboard) or ""
        host, port = host_and_port(given.removesuffix(":0"))
        if not group.is_loopback(host):
            raise ConfigError(
                f"dashboard={given!r}: other hosts can reach that address. With a certificate, `actorrpc dashboard --bind {host} "
                "--tls-cert FILE --tls-key FILE` serves the page there; without one, use dashboard=True and a tunnel: "
                "ssh -L PORT:127.0.0.1:PORT HOST"
            )
    if any(importlib.util.find_spec(each) is None for each in ("starlette", "uvicorn")):
        raise ConfigError(
            "dashboard=: pip install 'actorrpc[dashboard]' brings starlette and uvicorn, which serve the page"
        )
    return host, port or 0


def _start_page(where: tuple[str, int]) -> None:
    """Start ``actorrpc dashboard`` as a child process, and do not wait: it prints a link to the page on stderr.

    The child reads the state of the group as a command does, so the driver needs no port and no thread for the page. The child
    ends with the cluster, and when the driver ends: the child watches the driver's pidfd, because a pipe would stay open in
    forks of the driver.

    Raises:
        OSError: the process cannot be started.
    """
    host, port = where
    flags = interpreter_options()
    own = str(os.getpid())
    process = subprocess.Popen(
        [
            *(sys.executable, *flags, "-P", "-c", _BOOT, json.dumps(import_path())),
            *("dashboard", "--bind", host, "--port", str(port), "--pid", own, "--ends-with", own),
        ],
        stdin=subprocess.DEVNULL,
        stdout=2,  # not the driver's stdout, which another program may read
        start_new_session=True,  # Ctrl-C in the terminal is for the driver only
    )

    def shut_down(_graceful: bool) -> None:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    api.add_shutdown_hook(shut_down)


def _found_running(running: str, ignore: bool) -> ClusterContext:
    if not ignore:
        raise RpcError(
            f"init() has nothing to do: this process is {running} already, and actors can be used at once. Call "
            "shutdown() first to start again, or init(ignore_reinit_error=True) to use the running one"
        )
    return ClusterContext(api.get_worker_info().name, api.namespace(), owned=False)


def _launched(launched: Launch, spmd: bool, options: _InitOptions) -> ClusterContext:
    """Make one cluster of the processes of a launcher. Without ``spmd``, ranks other than 0 serve here, and then exit."""
    meeting = open_meeting(launched, options.join_timeout)
    if launched.rank == 0:
        with undo_on_error(meeting.close):
            listen = join_module.show(join_module.own_address(launched.master), 0)
            driver = _Driver(options, listen, None, secret=meeting.secret, slots_first=True, waits=spmd)
            context = driver.start(ignore_reinit_error=False)
        with undo_on_error(meeting.close, partial(api.shutdown, False)):
            meeting.announce(context.address)
            cluster = current_cluster()
            assert cluster is not None
            meeting.wait_for(cluster.launched, options.join_timeout)
        return context
    _known(options.settings)
    member, where = _join_rank_0(launched, meeting, options, serves=not spmd)
    if spmd:
        return ClusterContext(member.agent.name, api.namespace(), owned=True, address=where)
    try:
        member.wait()
    finally:
        api.shutdown(False)
    if member.driver_lost:
        # SystemExit with a text means exit code 1. After exit code 0, a launcher would consider the job finished on this host,
        # and restart only the other hosts.
        raise SystemExit(join_module.describe_loss(member, where))
    raise SystemExit(0)


def _join_rank_0(
    launched: Launch, meeting: LaunchMeeting, options: _InitOptions, serves: bool
) -> tuple[Member, str]:
    """Join the cluster of rank 0, and return its address, too."""

    def attempt(where: str, key: Key, left: float) -> tuple[Member, str]:
        member = join(
            where,
            name=launched.name if options.name is None else f"{options.name}-{launched.rank}",
            means=options.means,
            key=key,
            timeout=min(left, _TRY_S),
            settings=options.settings,
            serves=serves,
            launch_rank=launched.rank,
        )
        return member, where

    return meeting.reach(attempt)


class _Driver:
    """Makes this process the driver of a cluster: :func:`api.install` calls the methods ``_enter``, ``_ready`` and ``_stop``.

    Args:
        listen: where others may join; None for this machine alone, or for the engine's address.
        given: an engine; None for the embedded one. If the start fails, the engine is ended.
        secret: the key, if the ranks of a launcher have agreed on it; otherwise empty.
        slots_first, waits: as for :class:`~actorrpc.cluster.driver.Cluster`.
    """

    def __init__(
        self,
        options: _InitOptions,
        listen: str | None,
        given: Engine | None,
        *,
        secret: str = "",
        slots_first: bool = False,
        waits: bool = False,
    ) -> None:
        self._slots_first = slots_first
        self._waits = waits
        self._directory = MemberDirectory()
        self._worker: Worker | None = None
        with undo_on_error(partial(given.end, False, 0.0) if given is not None else bool):
            if given is not None and listen is None:
                # Prefer the engine's own address, if it has one.
                listen = join_module.show(getattr(given, "host", join_module.own_address)(), 0)
            self._settings = _settings(options.settings, listen)
            ports = Settings.from_environment().port
            # The ports for workers of this host: a range, or any port.
            self._ports = ports if isinstance(ports, str) else 0
            self._name = check_name("driver" if options.name is None else options.name)
            self._timeout = check_timeout(options.rpc_timeout, "rpc_timeout")
            self._namespace = text("namespace", options.namespace, none=True) or ""
            if not secret and listen is not None:
                secret = _given_secret(listen, given is None)
            self._writes_key = listen is not None and not secret
            self._secret = secret or join_module.new_secret()
            file = None
            if listen is not None and self._settings.log_forward:
                file = LogFile(log_directory(self._settings), socket.gethostname())
            self._engine = given or _embedded(options, file)

    def start(self, ignore_reinit_error: bool) -> ClusterContext:
        """Start the group, the cluster and the engine; if one of them fails, end the others."""
        is_local = isinstance(self._engine, LocalCluster)
        what = "the driver of " + ("an embedded cluster" if is_local else f"a cluster ({self._engine.name})")
        with undo_on_error(partial(self._engine.end, False, 0.0)):
            try:
                api.install(
                    self._enter,
                    self._timeout,
                    what,
                    namespace=self._namespace,
                    ready=self._ready,
                    stop=self._stop,
                )
            except RuntimeError:
                running = api.what()  # another thread may have initialized RPC meanwhile
                if running is None or self._worker is not None:
                    raise
                self._engine.end(False, 0.0)
                return _found_running(running, ignore_reinit_error)
            assert self._worker is not None
            cluster: Cluster = self._worker.cluster
            with undo_on_error(partial(api.shutdown, graceful=False)):
                self._engine.open(cluster.reception, cluster.joined)
        return ClusterContext(self._name, self._namespace, owned=True, address=cluster.reception.address)

    def _enter(self) -> Group:
        keys.sweep()
        return group.enter(
            self._name, 0, self._directory, settings=self._settings, key=Key.from_text(self._secret)
        )

    def _ready(self, worker: Worker) -> None:
        self._worker = worker
        agent, settings = worker.agent, self._settings
        self._directory.add(agent.record)
        address = ""
        if agent.record.tcp:
            host, port = agent.record.tcp[0]
            address = join_module.show(host, port)
            # The workers get these settings, and must not bind the driver's port.
            settings = dataclasses.replace(settings, port=self._ports, advertise=host)
            if self._writes_key:
                path = join_module.write_secret(self._secret, port)
                api.add_shutdown_hook(lambda _graceful: keys.remove_file(path))
        if not isinstance(self._engine, LocalCluster):  # other engines keep the output of their workers
            settings = dataclasses.replace(settings, log_forward=False)
        reception = Reception(
            address=address,
            secret=self._secret,
            settings=dataclasses.asdict(settings),
            namespace=self._namespace,
            timeout=self._timeout,
        )
        worker.cluster = Cluster(
            agent,
            self._directory,
            self._engine,
            reception,
            slots_first=self._slots_first,
            waits=self._waits,
        )
        api.add_shutdown_hook(worker.cluster.begin_end)
        if worker.actors is not None:
            worker.actors.spawner = worker.cluster

    def _stop(self, graceful: bool, seconds: float) -> None:
        worker = self._worker
        if worker is not None:
            try:
                if worker.cluster is not None:
                    worker.cluster.shut_down(graceful, seconds)
            finally:
                worker.cluster = None


def _embedded(options: _InitOptions, log_file: LogFile | None) -> LocalCluster:
    means = options.means
    gpus = means.num_gpus
    if gpus is not None and gpus != int(gpus):
        raise ConfigError(f"num_gpus of the cluster must be a whole number, not {say(gpus, repr)}")
    return LocalCluster(
        num_cpus=float(own_cpus()) if means.num_cpus is None else float(means.num_cpus),
        num_gpus=None if gpus is None else int(gpus),
        resources=means.resources,
        labels=means.labels,
        log_to_driver=bool(options.log_to_driver),
        preload=options.preload,
        log_file=log_file,
    )


def _given_secret(listen: str, is_embedded: bool) -> str:
    """Return the key from the environment for a driver that listens; empty if the driver must make a key.

    Raises:
        ConfigError: the key or the address is not valid; or an embedded cluster without a key can be reached from other hosts.
    """
    secret = keys.given_secret()
    host, _ = join_module.parse(listen, "listen", listen=True)
    if not secret and is_embedded and not group.is_loopback(host):
        raise ConfigError(
            f"listen={listen!r} can be reached from other hosts, and there is no key: give the driver and every worker "
            f"the same one (ACTORRPC_KEY, or ACTORRPC_KEY_FILE with a file that only you can read); {MAKE_ONE}"
        )
    return secret


def _modules(preload: Sequence[str]) -> tuple[str, ...]:
    """Check the names of modules to preload, and return them.

    Raises:
        WrongTypeError: ``preload`` is not a list of names.
        ConfigError: this process cannot find one of the modules.
    """
    if isinstance(preload, str) or not isinstance(preload, Sequence):
        raise WrongTypeError(
            f"preload must be a list of names of modules, such as ['torch.optim'], not {say(preload, repr)}"
        )
    for name in preload:
        if not isinstance(name, str):
            raise WrongTypeError(f"preload must have names of modules, and {say(name, repr)} is no str")
        top = name.partition(".")[0]
        try:
            found = importlib.util.find_spec(top) if top not in ("", "__main__") else None
        except ValueError:  # the module has no __spec__, so other processes cannot import it
            found = None
        if found is None:
            raise ConfigError(f"preload: there is no module {name!r} that other processes could import")
    return tuple(preload)


def _known(given: dict[str, Any]) -> None:
    """Check the names of options.

    Raises:
        ConfigError: a name is unknown.
    """
    for option in given:
        if option in _OF_RAY:
            raise ConfigError(f"init() has no option {option!r}: {_OF_RAY[option]}")
        if option not in _SETTINGS:
            known = ("address", *(init.__kwdefaults__ or {}), *_SETTINGS)
            close = difflib.get_close_matches(option, known, 3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(f"init() has no option {option!r}{hint} There are: {', '.join(known)}")


def _settings(given: dict[str, Any], listen: str | None) -> Settings:
    """Check the options that are not parameters of init(), and return them as settings; ``listen``: the address, if any.

    Raises:
        ConfigError: there is no such option, or its value cannot be used.
    """
    _known(given)
    transport = given.get("transport")
    if listen is None:
        if transport not in (None, "auto", "unix"):
            raise ConfigError(
                f"transport={transport!r} cannot be used: the embedded cluster is on one machine and speaks over Unix "
                "sockets. For several machines, say where others can join: init(listen='tcp://HOST:PORT')"
            )
        given = {**given, "transport": "unix"}
    else:
        if transport == "unix":
            raise ConfigError("transport='unix' and listen= contradict each other: others join over TCP")
        host, port = join_module.parse(listen, "listen", listen=True)
        if given.get("bind") is not None or given.get("port"):
            raise ConfigError("listen= says where to listen: leave bind= and port= out")
        given = {"transport": "auto", **given, "bind": host, "port": port or None}
        if given.get("advertise") is None and host in ("0.0.0.0", "::"):
            given["advertise"] = os.environ.get("ACTORRPC_ADVERTISE") or join_module.own_address()
    try:
        made = Settings.from_environment(**given)
    except TypeError as error:
        raise WrongTypeError(f"an option of init() has a value of a wrong type: {error}") from error
    join_module.check_takes_code(made)
    return made


def _autostart() -> None:
    """Start the embedded cluster when actors are used before ``init()``. Thread-safe."""
    init(ignore_reinit_error=True)


context_module.set_autostart(_autostart)


def _after_fork(worker: Worker) -> None:
    """Close the driver's descriptors in a forked child."""
    if worker.cluster is not None:
        worker.cluster.abandon()


on_fork.append(_after_fork)
