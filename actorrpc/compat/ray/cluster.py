"""``ray.init``, ``shutdown``, and the contents of the cluster: ``nodes``, ``cluster_resources``, ``available_resources``."""

from __future__ import annotations

import atexit
import json
import os
import platform
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final

from actorrpc import cluster
from actorrpc._exceptions import say
from actorrpc.agent.context import current_worker
from actorrpc.cluster.join import own_address
from actorrpc.cluster.resources import (
    available_resources,
    cluster_resources,
    host_of,
    hosts,
    node_id,
    nodes,
    on_driver,
    totals,
)
from actorrpc.compat.ray import runtime_env as environments
from actorrpc.errors import ConfigError
from actorrpc.observe import api as observe
from actorrpc.observe.tracing.trace import events_of
from actorrpc.rpc import api

__all__ = [
    "IGNORED",
    "VERSION",
    "RayContext",
    "available_resources",
    "cluster_resources",
    "host_of",
    "hosts",
    "identity",
    "init",
    "is_initialized",
    "node_id",
    "nodes",
    "on_driver",
    "shutdown",
    "timeline",
    "totals",
]

VERSION: Final = "2.51.0"
"""The version of Ray from which the names and keywords are taken."""

_END_S: Final = 2.0  # how long busy actors may continue when the program shuts down (Ray ends them at once)

#: ignored keywords of Ray's init, and why; keywords that begin with an underscore are ignored, too
IGNORED: Final = {
    "configure_logging": "Python's logging is left as it is",
    "dashboard_host": "there is no dashboard",
    "dashboard_port": "there is no dashboard",
    "enable_resource_isolation": "processes are not confined",
    "include_dashboard": "there is no dashboard",
    "local_mode": "actors always run in processes",
    "logging_config": "Python's logging is left as it is",
    "logging_format": "Python's logging is left as it is",
    "logging_level": "Python's logging is left as it is",
    "object_store_memory": "actorrpc.init(object_memory=...) limits the memory of large objects",
    "storage": "there is no storage",
    "system_reserved_cpu": "processes are not confined",
    "system_reserved_memory": "processes are not confined",
}
_before: dict[str, str | None] = {}  # changed environment variable -> its value before init(), or None


class RayContext(Mapping[str, Any]):
    """The return value of ``ray.init``: facts about the cluster. As a context manager, it shuts the cluster down.

    Attributes:
        address_info: addresses and the node's id.
        dashboard_url: None: there is no dashboard.
        namespace: the default namespace of actors' names.
        python_version, ray_version, ray_commit: the version of Python, :data:`VERSION`, and an empty string.
    """

    dashboard_url: str | None = None
    ray_commit: str = ""
    ray_version: str = VERSION

    def __init__(self, context: cluster.ClusterContext) -> None:
        self._ours = context
        self.namespace = context.namespace
        self.python_version = platform.python_version()
        self.address_info: dict[str, Any] = {
            "address": context.address or "local",
            "gcs_address": context.address or "local",
            "node_id": node_id(),
            "node_ip_address": own_address(),
            "webui_url": None,
        }

    def __getitem__(self, name: str) -> Any:
        return self.address_info[name]

    def __iter__(self) -> Any:
        return iter(self.address_info)

    def __len__(self) -> int:
        return len(self.address_info)

    def disconnect(self) -> None:
        """Shut down."""
        shutdown()

    def __enter__(self) -> RayContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutdown()

    def __repr__(self) -> str:
        return f"RayContext(python_version={self.python_version!r}, ray_version={self.ray_version!r})"


def init(
    address: str | None = None,
    *,
    num_cpus: float | None = None,
    num_gpus: int | None = None,
    resources: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    namespace: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    ignore_reinit_error: bool = False,
    log_to_driver: bool | None = True,
    job_config: Any = None,
    **options: Any,
) -> RayContext:
    """Start the embedded cluster, or join the actorrpc cluster at ``tcp://host:port``.

    Args:
        address: None or ``"local"``: a new cluster.
        runtime_env: the default ``runtime_env`` of all actors and tasks.
        job_config: must be None.
        options: see :func:`actorrpc.init`; names in ``IGNORED`` are ignored.

    Raises:
        RuntimeError: this process is in a cluster already, and ``ignore_reinit_error`` is False.
        ConnectionError: no cluster is at ``address``.
        ConfigError: an option is not supported here; the message says what to do (a ValueError).
    """
    if job_config is not None:
        raise ConfigError("init(): job_config= is not possible here: say namespace= and runtime_env=")
    ours = {
        name: value for name, value in options.items() if name not in IGNORED and not name.startswith("_")
    }
    where = _address(address)
    env = environments.checked(runtime_env)
    set_here = not is_initialized() and bool(env)
    if set_here:
        _set_environment(env)
    try:
        context = cluster.init(
            where,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            resources=resources,
            labels=labels,
            namespace=namespace,
            ignore_reinit_error=ignore_reinit_error,
            log_to_driver=log_to_driver is not False,
            **ours,
        )
    except BaseException:
        if set_here:
            _restore_environment()
        raise
    atexit.unregister(shutdown)
    atexit.register(shutdown)  # runs before actorrpc's exit handler, which gives busy actors more time
    return RayContext(context)


def _address(address: str | None) -> str | None:
    if address is None or address == "local":
        return None
    if not isinstance(address, str):
        raise TypeError(f"init(): address must be a str, not {say(address, repr)}")
    if address.startswith("tcp://"):
        return address
    if address == "auto":
        raise ConnectionError(
            "init(address='auto'): a running cluster is not found by itself; leave address= out to start a cluster, or give the "
            "tcp://host:port of a driver that was started with listen="
        )
    raise ConnectionError(
        f"init(address={address!r}): a cluster of Ray cannot be joined from here; an actorrpc driver that was started with "
        "listen= has an address like tcp://host:port"
    )


def _set_environment(env: Mapping[str, Any]) -> None:
    """Set the environment of this process, which the processes of the cluster inherit."""
    rest = {name: value for name, value in env.items() if name != "env_vars"}
    variables = dict(env.get("env_vars", {}))
    if rest:
        variables[environments.VARIABLE] = json.dumps(rest)
    for name, value in variables.items():
        _before[name] = os.environ.get(name)
        os.environ[name] = value
    for path in environments.options_of(rest)[1]:
        if path not in sys.path:
            sys.path.insert(0, path)


def _restore_environment() -> None:
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()


def shutdown(*_ignored: Any, **_options: Any) -> None:
    """End the cluster, or leave it. Does nothing if this process is in no cluster. Busy actors have 2 s to end."""
    api.shutdown(timeout=_END_S)
    _restore_environment()


def is_initialized() -> bool:
    """Say whether this process is in a cluster or group."""
    return api.is_initialized()


def identity() -> str:
    """Return an id of the present cluster of this process; empty if there is none."""
    worker = current_worker()
    return "" if worker is None else worker.agent.record.incarnation


def timeline(filename: str | None = None) -> list[dict[str, Any]] | None:
    """Return the last calls of the cluster as events of a Chrome trace, or write them into a file.

    Args:
        filename: the file, which is replaced; None: return the events.

    Raises:
        NotInitializedError: this process is in no cluster.
        OSError: the file cannot be written.

    A worker keeps its last 32 768 calls; see :func:`actorrpc.trace`.
    """
    if filename is None:
        return list(events_of(observe.recordings()))
    observe.trace(filename)
    return None
