"""The embedded local cluster: :func:`init` makes this process the driver of worker processes on this machine.

There is no daemon, no port and no file but the workers' sockets in the private runtime directory. The driver is
worker 0; others are forked for actors as they are needed (``processes.py``), and end with the driver, however that ends.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import os
import secrets
from types import TracebackType
from typing import Any, Final

from actorrpc.actors import runtime
from actorrpc.cluster import serving
from actorrpc.cluster.directory import Directory
from actorrpc.cluster.processes import LocalCluster
from actorrpc.cluster.serving import set_cluster
from actorrpc.config import Settings
from actorrpc.core import keys
from actorrpc.core.agent import Agent
from actorrpc.core.identity import check_name
from actorrpc.core.keys import Key
from actorrpc.errors import ConfigError, RpcError, WrongTypeError
from actorrpc.rpc import api, group
from actorrpc.rpc.group import Group
from actorrpc.rpc.options import DEFAULT_RPC_TIMEOUT_SEC, check_timeout

__all__ = ["Context", "init"]

_log = logging.getLogger("actorrpc.cluster")
_SETTINGS: Final = tuple(field.name for field in dataclasses.fields(Settings))
_OPTIONS: Final = (
    "num_cpus",
    "num_gpus",
    "namespace",
    "log_to_driver",
    "ignore_reinit_error",
    "name",
    "rpc_timeout",
)
_NO_DASHBOARD: Final = "there is no dashboard"
_NO_RESOURCES: Final = (
    "there is no scheduler and there are no resources to book: say num_cpus and num_gpus for each actor"
)
_OWN_LOGGING: Final = "configure Python's logging; this package's loggers are below 'actorrpc'"
#: what Ray's init takes and this one does not, and what to do instead
_OF_RAY: Final = {
    "address": "init() starts a cluster in this process and joins none; across machines, use init_rpc (with "
    "torchrun, for example), where actors can be used as well",
    "dashboard_host": _NO_DASHBOARD,
    "dashboard_port": _NO_DASHBOARD,
    "include_dashboard": _NO_DASHBOARD,
    "resources": _NO_RESOURCES,
    "labels": _NO_RESOURCES,
    "object_store_memory": "there is no object store: values stay with their owner, and large tensors go through "
    "shared memory (lane_bytes)",
    "local_mode": "actors always run in processes; to debug, call the class itself",
    "runtime_env": "processes have the driver's environment; say env= for an actor",
    "job_config": "there are no jobs",
    "storage": "nothing is stored",
    "configure_logging": _OWN_LOGGING,
    "logging_level": _OWN_LOGGING,
    "logging_config": _OWN_LOGGING,
    "logging_format": _OWN_LOGGING,
    "log_level": _OWN_LOGGING,
}


class Context:
    """What :func:`init` returns; as a context manager it shuts the cluster down at its end.

    Attributes:
        name: this worker's name.
        namespace: where actors look for names unless they are told another one.
    """

    def __init__(self, name: str, namespace: str, *, owned: bool) -> None:
        self.name = name
        self.namespace = namespace
        self._owned = owned

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """End the cluster, as :func:`actorrpc.shutdown` does."""
        api.shutdown(graceful, timeout)

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Whoever found it running leaves it running. After Ctrl-C nobody wants to wait for what actors have to do.
        if self._owned:
            api.shutdown(graceful=kind is None or issubclass(kind, Exception))

    def __repr__(self) -> str:
        return f"<actorrpc.Context of {self.name!r}, namespace {self.namespace!r}>"


def init(
    *,
    num_cpus: float | None = None,
    num_gpus: int | None = None,
    namespace: str | None = None,
    log_to_driver: bool = True,
    ignore_reinit_error: bool = False,
    name: str = "driver",
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    **settings: Any,
) -> Context:
    """Start the embedded local cluster: this process becomes its driver.

    Returns at once: the process that workers are forked from imports torch meanwhile (1-2 s), and actors that are
    created before it is ready wait for it. Using actors before ``init()`` calls it. The cluster ends with
    :func:`actorrpc.shutdown`, with ``with actorrpc.init(): ...``, or with this process.

    Args:
        num_cpus: the most that one actor may ask for; default: the processors of this machine. More actors than
            processors may be created.
        num_gpus: how many CUDA devices there are to give; default: all that this process sees.
        namespace: where actors look for names unless they are told another one; default ``""``.
        log_to_driver: show here what actors print.
        ignore_reinit_error: return, instead of raising, where a cluster or group is in force already.
        name: this worker's name.
        rpc_timeout: the default time-out of calls (``rpc_sync`` and the like), in seconds; 0 means none.
        settings: fields of :class:`actorrpc.config.Settings`, for all processes of the cluster.

    Raises:
        ConfigError: an argument cannot be used.
        RpcError: a cluster or group is in force in this process already: actors can be used at once.
        OSError: the process that workers are forked from cannot be started.
    """
    made = _settings(settings)
    check_name(name)
    timeout = check_timeout(rpc_timeout, "rpc_timeout")
    if namespace is None:
        namespace = ""
    if not isinstance(namespace, str):
        raise WrongTypeError(f"namespace must be a str, not {namespace!r}")
    cpus = float(os.cpu_count() or 1) if num_cpus is None else _number(num_cpus, "num_cpus")
    if num_gpus is not None and _number(num_gpus, "num_gpus") != int(num_gpus):
        raise ConfigError(f"num_gpus of the cluster must be a whole number, not {num_gpus!r}")

    secret = secrets.token_bytes(32)
    directory = Directory()
    cluster: LocalCluster | None = None

    def make() -> Group:
        keys.sweep()
        return group.enter(name, 0, directory, settings=made, key=Key(secret))

    def ready(agent: Agent) -> None:
        nonlocal cluster
        directory.add(agent.record)
        hello = {
            "driver": agent.record.to_bytes(),
            "socket": agent.record.unix_path,
            "key": secret,
            "settings": dataclasses.asdict(made),
            "namespace": namespace,
            "timeout": timeout,
        }
        cluster = LocalCluster(
            agent,
            directory,
            hello,
            num_cpus=cpus,
            num_gpus=None if num_gpus is None else int(num_gpus),
            log_to_driver=bool(log_to_driver),
        )
        set_cluster(cluster)
        found = runtime.current()
        if found is not None:
            found.spawner = cluster

    def stop(graceful: bool, seconds: float) -> None:
        if cluster is not None:
            try:
                cluster.end(graceful, seconds)
            finally:
                set_cluster(None)

    running = api.what()
    if running is None:
        try:
            api.install(
                make,
                timeout,
                "the driver of an embedded cluster",
                namespace=namespace,
                ready=ready,
                stop=stop,
            )
        except RuntimeError:
            running = api.what()  # another thread was faster?
            if running is None or cluster is not None:
                raise
    if running is not None:
        if not ignore_reinit_error:
            raise RpcError(
                f"init() has nothing to do: this process is {running} already, and actors can be used at once. Call "
                "shutdown() first to start anew, or init(ignore_reinit_error=True) where either will do"
            )
        return Context(api.get_worker_info().name, api.namespace(), owned=False)
    try:
        assert cluster is not None
        cluster.start()
    except BaseException:
        api.shutdown(graceful=False)
        raise
    return Context(name, namespace, owned=True)


def _settings(given: dict[str, Any]) -> Settings:
    """Check the options that init does not name itself.

    Raises:
        ConfigError: there is no such option, or its value cannot be used.
    """
    for option in given:
        if option in _OF_RAY:
            raise ConfigError(f"init() has no option {option!r}: {_OF_RAY[option]}")
        if option not in _SETTINGS:
            known = (*_OPTIONS, *_SETTINGS)
            close = difflib.get_close_matches(option, known, 3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(f"init() has no option {option!r}{hint} There are: {', '.join(known)}")
    transport = given.get("transport")
    if transport not in (None, "auto", "unix"):
        raise ConfigError(
            f"transport={transport!r} cannot be used: the embedded cluster is on one machine and speaks over Unix "
            "sockets. For several machines, use init_rpc"
        )
    try:
        made = Settings.from_environment(**{**given, "transport": "unix"})
    except TypeError as error:
        raise WrongTypeError(f"an option of init() has a value of a wrong type: {error}") from error
    if made.data_only:
        raise ConfigError(
            "the processes of a cluster run what the driver sends them, and cannot take data only: unset "
            "ACTORRPC_DATA_ONLY, or serve exposed functions with init_rpc"
        )
    return made


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise WrongTypeError(f"{what} must be a number >= 0, not {value!r}")
    return float(value)


def _autostart() -> None:
    """Start a cluster because actors are used; another thread may do the same."""
    init(ignore_reinit_error=True)


runtime.set_autostart(_autostart)


def _after_fork() -> None:
    """In a forked child of the driver: let go of what is the driver's."""
    cluster = serving.current()
    if cluster is not None:
        set_cluster(None)
        runtime.set_runtime(None)
        cluster.abandon()


os.register_at_fork(after_in_child=_after_fork)
