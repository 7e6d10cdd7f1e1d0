"""Functions of the API: finding, watching, cancelling, killing and listing actors, and the runtime context."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import actorrpc
from actorrpc import ActorHandle, get
from actorrpc.errors import (
    ActorDiedError,
    ConfigError,
    NotInitializedError,
    UnknownActorError,
)
from tests.actors import things
from tests.actors.e2e.kit import until
from tests.migration.rows import row


class Node:
    """A value that can refer to another one."""

    to: Any = None


class NodeError(Exception, Node):
    pass


@actorrpc.remote(num_returns=2)
def two_nodes() -> tuple[Node, Node]:
    return Node(), Node()


@actorrpc.remote
def fail() -> None:
    raise NodeError


@pytest.mark.parametrize(
    "make",
    [
        lambda: things.Counter.remote().echo.remote(Node()),
        lambda: two_nodes.remote()[0],
        lambda: actorrpc.put(Node()),
        fail.remote,
    ],
    ids=["actor", "part of a task", "put", "error"],
)
def test_a_value_or_error_that_refers_to_its_own_reference_can_be_collected(
    one_worker: None, make: Callable[[], Any]
) -> None:
    ref = make()
    try:
        value = get(ref)
    except NodeError as error:
        value = error
    value.to = ref
    found = weakref.ref(value)
    del value, ref

    def is_collected() -> bool:
        gc.collect()
        return found() is None

    until(is_collected)  # the thread that completed the call may still have it in its frame


@row("Manager().Namespace()", "from-multiprocessing")
@row("drivers without namespace=", "from-ray")
def test_get_actor_finds_an_actor_by_name_and_namespace(one_worker: None) -> None:
    with pytest.raises(UnknownActorError, match="no actor has a name there"):
        actorrpc.get_actor("one", "space")
    named = things.Counter.options(name="one", namespace="space").remote(3)
    found = actorrpc.get_actor("one", "space")
    assert found == named
    assert get(found.add.remote()) == 4
    with pytest.raises(UnknownActorError, match="there is one in namespace 'space': give namespace="):
        actorrpc.get_actor("one")
    with pytest.raises(UnknownActorError, match="did you mean 'one'"):
        actorrpc.get_actor("onee", namespace="space")
    with pytest.raises(ValueError, match="there are: 'one'"):
        actorrpc.get_actor("zzz", namespace="space")
    for wrong in ("", 3, None):
        with pytest.raises(TypeError, match="takes the name of an actor"):
            actorrpc.get_actor(wrong)  # type: ignore[arg-type]


def test_functions_that_need_a_runtime_raise_before_init() -> None:
    with pytest.raises(NotInitializedError):
        actorrpc.get_actor("one")
    with pytest.raises(NotInitializedError):
        actorrpc.list_actors()
    with pytest.raises(NotInitializedError):
        actorrpc.get_runtime_context()


def test_list_actors_shows_state_calls_and_death_cause(counter: ActorHandle[Any]) -> None:
    named = things.Box.options(name="box", namespace="space").remote(1)
    # The supervisor learns that an actor is alive after its calls can already run.
    get([actorrpc.ready(named), actorrpc.ready(counter)])
    blocked, waits = counter.wait.remote(), counter.add.remote()
    rows = {row.actor_id: row for row in _until_running(counter)}
    assert list(rows) == sorted(rows)
    row, box = rows[counter.actor_id], rows[named.actor_id]
    assert (row.class_name, row.name, row.state, row.worker) == ("Counter", None, "ALIVE", "w0")
    assert (row.running_calls, row.pending_calls, row.restarts, row.death_cause) == (1, 1, 0, "")
    assert (box.class_name, box.name, box.namespace) == ("Box", "box", "space")
    things.Counter.gate.set()
    assert get([blocked, waits]) == [True, 4]
    actorrpc.kill(named)
    assert get(things.add.remote(1)) == 3  # tasks are not listed
    assert {row.actor_id for row in actorrpc.list_actors()} == rows.keys()
    dead = {row.actor_id: row for row in actorrpc.list_actors()}[named.actor_id]
    assert (dead.state, dead.worker, dead.pid) == ("DEAD", "", 0)
    assert "kill()" in dead.death_cause


def _until_running(counter: ActorHandle[Any]) -> list[actorrpc.actors.ActorInfo]:
    # An answered call counts as running until its thread looks for the next call, so both calls may still wait.
    while True:
        rows = actorrpc.list_actors()
        if any(
            row.actor_id == counter.actor_id and row.running_calls == row.pending_calls == 1 for row in rows
        ):
            return rows


@pytest.mark.parametrize(
    "function",
    [actorrpc.kill, actorrpc.ready, actorrpc.is_alive, actorrpc.monitor, lambda x: actorrpc.call(x, len)],
)
def test_functions_of_handles_refuse_other_arguments(function: Any, counter: ActorHandle[Any]) -> None:
    with pytest.raises(TypeError, match="takes the handle of an actor, not a int"):
        function(3)
    with pytest.raises(TypeError, match=r"a call is cancelled with cancel\(ref\)"):
        function(counter.add.remote())
    with pytest.raises(TypeError, match="this is one of its methods"):
        function(counter.add)


@row("cancel(ref, recursive=False)", "from-ray")
def test_cancel_refuses_other_arguments_and_options(counter: ActorHandle[Any]) -> None:
    with pytest.raises(TypeError, match="takes what remote"):
        actorrpc.cancel(3)
    with pytest.raises(TypeError, match=r"an actor is ended with kill\(handle\)"):
        actorrpc.cancel(counter)
    ref = counter.add.remote()
    with pytest.raises(ConfigError, match="force=True is for tasks"):
        actorrpc.cancel(ref, force=True)
    with pytest.raises(ConfigError, match="recursive=False"):
        actorrpc.cancel(ref, recursive=False)


@row("calls have no priorities and no deadlines", "from-ray")
def test_monitor_reports_the_death_of_an_actor_once(counter: ActorHandle[Any]) -> None:
    reported: list[Any] = []
    futures = [actorrpc.monitor(counter, reported.append), actorrpc.monitor(counter)]
    assert not any(each.done() for each in futures)
    actorrpc.kill(counter)
    futures.append(actorrpc.monitor(counter))
    assert [type(each.wait(10)) for each in futures] == [ActorDiedError] * 3
    until(lambda: reported)
    assert [type(each) for each in reported] == [ActorDiedError]
    with pytest.raises(TypeError, match="callback must be callable"):
        actorrpc.monitor(counter, 3)  # type: ignore[arg-type]


def _sum(counter: Any, x: int, *, y: int = 0) -> int:
    return int(counter.n + x + y)


@row("actor.__ray_ready__.remote()", "from-ray")
def test_call_runs_a_plain_function_with_the_instance(counter: ActorHandle[Any]) -> None:
    assert get(actorrpc.call(counter, _sum, 1)) == 4
    assert get(actorrpc.call(counter, _sum, 1, y=2)) == 6
    assert get(actorrpc.call(counter, lambda _, **given: sorted(given), self=1, function=2)) == [
        "function",
        "self",
    ]
    assert get(actorrpc.call(counter, lambda actor: type(actor).__name__)) == "Counter"
    assert get(actorrpc.call(counter, getattr, "n")) == 3
    get(actorrpc.call(counter, setattr, "n", 10))
    assert counter.rpc_sync().n == 10
    assert (
        get(actorrpc.call(counter, _sum, counter.add.remote())) == 22
    )  # references are replaced by their values
    for function in (things.later.__wrapped__, things.tick.__wrapped__, things.count_to.__wrapped__):
        with pytest.raises(TypeError, match=r"takes a plain function, and .* only returns a"):
            actorrpc.call(counter, function)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a function, not 'n'"):
        actorrpc.call(counter, "n")  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        get(actorrpc.call(counter, getattr, "nothing"))


@row("context().actor_instance", "from-monarch")
def test_the_runtime_context_describes_worker_actor_and_caller(one_worker: None) -> None:
    outside = actorrpc.get_runtime_context()
    assert (outside.worker.name, outside.actor_id, outside.caller) == ("w0", None, None)
    assert outside.get_actor_id() is None
    with pytest.raises(RuntimeError, match="outside of an actor"):
        actorrpc.current_actor()
    with pytest.raises(RuntimeError, match="outside of an actor"):
        _ = outside.current_actor
    named = things.Counter.options(name="one").remote()
    inside: Any = get(named.context.remote())
    assert inside.actor_id == named.actor_id
    assert inside.get_actor_id() == f"{named.actor_id:016x}"
    assert (inside.actor_name, inside.get_actor_name(), inside.get_worker_id()) == ("one", "one", "w0")
    assert inside.caller.name == "w0"
    assert not inside.was_current_actor_reconstructed
    own: Any = get(named.own_handle.remote())
    assert own == named
    assert get(own.add.remote()) == 1
    aio = things.Aio.remote()
    assert get(aio.own_handle.remote()) == aio
    assert get(actorrpc.remote(lambda: actorrpc.get_runtime_context().actor_id).remote()) is None
    with pytest.raises(RuntimeError, match="outside of an actor"):
        get(actorrpc.remote(actorrpc.current_actor).remote())
