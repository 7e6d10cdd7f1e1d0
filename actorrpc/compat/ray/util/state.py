"""``ray.util.state``: the actors and machines of the cluster, and the output of processes, from :func:`actorrpc.state`.

Rows of actors have no job and no placement group. Thread-safe.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import actorrpc.observe.api as observe
from actorrpc.cluster import resources
from actorrpc.compat.ray.names import missing
from actorrpc.errors import ConfigError
from actorrpc.observe import ObservedActor

__all__ = [
    "ActorRow",
    "NodeRow",
    "get_actor",
    "get_log",
    "get_node",
    "list_actors",
    "list_nodes",
    "summarize_actors",
]

_AGAIN_S: Final = 0.25
#: actorrpc's state -> Ray's, where they differ
_STATES: Final = {"ENDING": "ALIVE", "UNKNOWN": "ALIVE"}

Filters = Sequence[tuple[str, str, Any]]


class _Row:
    """A row whose fields can be read as attributes and, like Ray's rows, with ``row[name]``."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        """Return a field."""
        if name not in type(self).__slots__:
            raise KeyError(name)
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default if there is no such field."""
        try:
            return self[name]
        except KeyError:
            return default


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActorRow(_Row):
    """An actor, with Ray's names; ``state`` is ``"PENDING_CREATION"``, ``"ALIVE"``, ``"RESTARTING"`` or ``"DEAD"``."""

    actor_id: str
    class_name: str
    state: str
    name: str
    node_id: str
    pid: int
    ray_namespace: str
    is_detached: bool
    num_restarts: int
    death_cause: str
    repr_name: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow(_Row):
    """A node in Ray's sense: a machine, or a joined worker, which takes several actors. The fields have Ray's names."""

    node_id: str
    node_ip: str
    node_name: str
    is_head_node: bool
    state: str
    resources_total: dict[str, float]
    labels: dict[str, str]


def _filtered(rows: list[Any], filters: Filters | None, limit: int) -> list[Any]:
    """Return at most ``limit`` rows for which all conditions hold.

    Raises:
        ConfigError: a condition is not valid.
    """
    for each in filters or ():
        if len(each) != 3 or each[1] not in ("=", "!="):
            raise ConfigError(f"filters= are tuples of a name, '=' or '!=', and a value, not {each!r}")
        key, predicate, value = each
        rows = [
            row for row in rows if (str(row.get(key)).lower() == str(value).lower()) == (predicate == "=")
        ]
    return rows[:limit]


def _nodes() -> dict[str, str]:
    """Return the ids of nodes, by the names of their hosts and workers."""
    return {name: resources.id_of(each["names"]) for each in resources.machines() for name in each["names"]}


def _row(actor: ObservedActor, hosts: dict[str, str], nodes: dict[str, str]) -> ActorRow:
    node = nodes.get(actor.worker) or nodes.get(hosts.get(actor.worker, ""), "")
    return ActorRow(
        actor_id=actor.actor_id,
        class_name=actor.class_name,
        state=_STATES.get(actor.state, actor.state),
        name=actor.name or "",
        node_id=node,
        pid=actor.pid,
        ray_namespace=actor.namespace,
        is_detached=actor.detached,
        num_restarts=actor.restarts,
        death_cause=actor.death_cause,
        repr_name=actor.title,
    )


def _actors(timeout: float) -> list[ActorRow]:
    seen = observe.state(timeout)
    hosts = {each.name: each.host for each in seen.workers}
    nodes = _nodes()
    return [_row(each, hosts, nodes) for each in seen.actors]


def list_actors(
    *_address: Any, filters: Filters | None = None, limit: int = 100, timeout: float = 30, **_ignored: Any
) -> list[ActorRow]:
    """Return the actors of the cluster, including recently dead actors.

    Args:
        filters: conditions ``(field, "=" or "!=", value)``, which must all hold for an actor.
        limit: the largest number of actors to return.
        timeout: seconds that all workers together may take to answer.

    Ray's other arguments are ignored: rows are those of the present cluster, with all fields.
    """
    return _filtered(_actors(timeout), filters, limit)


def get_actor(id: str, *_address: Any, timeout: float = 30, **_ignored: Any) -> ActorRow | None:
    """Return the actor with this id, as text; None if there is none."""
    return next((each for each in _actors(timeout) if each.actor_id == id), None)


def list_nodes(
    *_address: Any, filters: Filters | None = None, limit: int = 100, **_ignored: Any
) -> list[NodeRow]:
    """Return the machines of the cluster; arguments as for :func:`list_actors`."""
    rows = [
        NodeRow(
            node_id=each["NodeID"],
            node_ip=each["NodeManagerAddress"],
            node_name=each["NodeName"],
            is_head_node=place == 0,
            state="ALIVE",
            resources_total=each["Resources"],
            labels=each["Labels"],
        )
        for place, each in enumerate(resources.nodes())
    ]
    return _filtered(rows, filters, limit)


def get_node(id: str, *_address: Any, **_ignored: Any) -> NodeRow | None:
    """Return the machine with this node id; None if there is none."""
    return next((each for each in list_nodes() if each.node_id == id), None)


def summarize_actors(*_address: Any, timeout: float = 30, **_ignored: Any) -> dict[str, Any]:
    """Return the number of actors of each class in each state, in Ray's form."""
    rows = _actors(timeout)
    classes: dict[str, Counter[str]] = {}
    for row in rows:
        classes.setdefault(row.class_name, Counter())[row.state] += 1
    summary = {name: {"class_name": name, "state_counts": dict(states)} for name, states in classes.items()}
    return {"cluster": {"summary": summary, "total_actors": len(rows), "summary_by": "class"}}


def get_log(
    *_nodes: Any,
    filename: str | None = None,
    actor_id: str | None = None,
    task_id: str | None = None,
    pid: int | None = None,
    follow: bool = False,
    tail: int = -1,
    timeout: float = 30,
    suffix: str = "out",
    **_ignored: Any,
) -> Iterator[str]:
    """Yield the output of a process, line by line. The last 8 MiB of the output of all processes of the cluster are kept.

    Args:
        actor_id, pid: the actor that lives in the process, or the process id.
        follow: continue with later output.
        tail: the number of lines at most; -1: all.
        suffix: ``"out"`` for standard output, ``"err"`` for standard error.
        filename, task_id: refused: there are no files, and tasks share processes.

    Ray's other arguments are ignored: the process id identifies a process of the cluster.

    Raises:
        ConfigError: neither ``actor_id`` nor ``pid`` is given, or there is no such actor.
    """
    if filename is not None or task_id is not None:
        raise ConfigError(
            "get_log(): there are no log files, and tasks share processes: give pid= or actor_id="
        )
    if actor_id is not None:
        found = get_actor(actor_id, timeout=timeout)
        if found is None or not found.pid:
            raise ConfigError(f"get_log(): there is no actor {actor_id!r} that lives in a process: give pid=")
        pid = found.pid
    if pid is None:
        raise ConfigError("get_log(): give actor_id= or pid=")
    return _lines(pid, suffix == "err", follow, tail, timeout)


def _lines(pid: int, of_errors: bool, follow: bool, tail: int, timeout: float) -> Iterator[str]:
    number = 1
    while True:
        rows, number = observe.printed(number, timeout)
        mine = [
            f"{text}\n" for _, _, of, _, is_error, text, *_ in rows if of == pid and is_error == of_errors
        ]
        yield from mine[-tail:] if tail > 0 else mine
        if not follow:
            return
        tail = -1
        time.sleep(_AGAIN_S)


__getattr__ = missing("ray.util.state", __all__)
