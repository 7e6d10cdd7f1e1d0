"""Actor handles: Ray's calls, torch's proxies and RRefs, functions of the handle, pickling."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest

import actorrpc
from actorrpc import ActorHandle, Future, ObjectRef, RRef, get
from actorrpc.errors import (
    ActorDiedError,
    ConfigError,
    RpcTimeoutError,
    SerializationError,
)
from actorrpc.serialization import codec
from tests.actors import things
from tests.migration.rows import row

Handle = ActorHandle[Any]


# -- Ray's interface -------------------------------------------------------------------------------------------------


def test_wrong_arguments_raise_at_the_call_and_do_not_run(counter: Handle) -> None:
    with pytest.raises(
        TypeError, match=r"Counter.add\(\) takes from 1 to 2 positional arguments but 3 were given"
    ):
        counter.add.remote(1, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'n'"):
        counter.rpc_sync().add(n=1)
    assert get(counter.add.remote(0)) == 3


def test_an_unknown_method_raises_and_suggests_similar_names(counter: Handle) -> None:
    with pytest.raises(AttributeError, match=r"Counter has no method 'ad'; did you mean 'add'"):
        counter.ad.remote()
    with pytest.raises(AttributeError, match=r"its methods are: add, boom"):
        counter.xyzzy.remote()
    with pytest.raises(AttributeError, match="rpc_sync"):
        _ = counter.rpc_snyc
    assert not hasattr(counter, "__array__")


def test_calling_a_method_directly_raises_and_names_remote(counter: Handle) -> None:
    with pytest.raises(TypeError, match=r"instead of handle.add\(...\) write handle.add.remote\(...\)"):
        counter.add(1)  # type: ignore[operator]
    with pytest.raises(
        TypeError, match=r"instead of handle.__call__\(...\) write handle.__call__.remote\(...\)"
    ):
        counter(1)
    with pytest.raises(AttributeError, match="the actor is elsewhere"):
        counter.n = 4


def test_num_returns_gives_one_reference_per_result(counter: Handle) -> None:
    refs: Any = counter.two.remote()
    assert [type(each) for each in refs] == [ObjectRef, ObjectRef]
    assert get(refs[0]) == 1
    assert get(refs[1]).sum() == 100_000
    one: Any = counter.two.options(num_returns=1).remote()
    assert get(one)[0] == 1
    assert counter.add.options(num_returns=0).remote() is None
    assert get(counter.add.remote(0)) == 4
    for ref in counter.wrong.remote():  # type: ignore[attr-defined]
        with pytest.raises((TypeError, ValueError), match="num_returns"):
            get(ref)
    three: Any = counter.echo.options(num_returns=3).remote([1, 2])
    with pytest.raises(ValueError, match="num_returns=3"):
        get(three[2])


def test_timeouts_of_calls_and_handles_and_unknown_call_options(counter: Handle) -> None:
    blocked = counter.wait.remote()
    hurried = counter.options(timeout=0.01)
    for call in (counter.add.options(timeout=0.01).remote, hurried.add.remote):
        with pytest.raises(RpcTimeoutError):
            get(call())
    with pytest.raises(RpcTimeoutError):
        hurried.rpc_sync().add()
    things.Counter.gate.set()
    assert get(blocked)
    assert get(counter.add.remote(0)) == 3  # the call that timed out was not started
    with pytest.raises(ConfigError, match="not an option of a method"):
        counter.add.options(max_restarts=1)
    with pytest.raises(ConfigError, match="has no concurrency group 'io'; it has: none"):
        counter.add.options(concurrency_group="io")


def test_top_level_references_are_replaced_by_values_and_nested_ones_are_not(counter: Handle) -> None:
    ref = counter.add.remote()
    assert get(counter.echo.remote(ref)) == 4
    assert get(counter.kinds.remote(ref, [ref], x=ref, y=[ref])) == (
        ["int", "list"],
        {"x": "int", "y": "list"},
    )
    inner: Any = get(counter.echo.remote([ref]))
    assert isinstance(inner[0], ObjectRef)
    assert get(inner[0]) == 4
    other = things.Counter.remote(counter.wait.remote())  # a constructor argument that is pending
    things.Counter.gate.set()
    assert get(other.add.remote()) == 2  # True + 1


# -- torch's interface -----------------------------------------------------------------------------------------------


@row("no API of torch's RPC", "from-ray")
def test_rpc_sync_rpc_async_and_remote_proxies_call_methods(counter: Handle) -> None:
    assert counter.rpc_sync().add(1) == 4
    assert counter.rpc_sync(timeout=10).add(times=1) == 5
    future = counter.rpc_async().add()
    assert isinstance(future, Future)
    assert future.wait() == 6
    assert get(counter.remote().add()) == 7
    assert counter.rpc_sync().two()[0] == 1  # num_returns does not apply to torch's proxies
    assert counter.rpc_async().two().wait()[1].sum() == 100_000
    assert [get(ref) for ref in counter.rpc_sync().stream(2)] == [0, 1]
    assert counter.rpc_sync()(4) == 5
    assert counter.rpc_sync().__len__() == 5
    with pytest.raises(KeyError):
        counter.rpc_sync().boom()
    assert repr(counter.rpc_sync()).startswith("<rpc_sync proxy of <ActorHandle of Counter ")
    with pytest.raises(ConfigError):
        counter.rpc_sync(timeout=-3)
    with pytest.raises(TypeError, match="Picky is not callable"):
        things.Picky.remote(fail=False).rpc_sync()()


def test_proxies_read_attributes_of_the_actor(counter: Handle) -> None:
    assert counter.rpc_sync().n == 3
    assert counter.rpc_sync().half == 1.5
    assert counter.rpc_sync().STEP == 1
    assert counter.rpc_async().n.wait() == 3
    assert get(counter.remote().n) == 3
    with pytest.raises(AttributeError, match="nothing"):
        _ = counter.rpc_sync().nothing
    assert not hasattr(counter.rpc_sync(), "__array__")


def test_a_method_of_a_proxy_can_be_sent_as_a_function(counter: Handle) -> None:
    assert actorrpc.rpc_sync("w0", counter.rpc_sync().add, (2,)) == 5
    assert actorrpc.rpc_async("w0", counter.rpc_sync().add).wait() == 6


def _through(rref: RRef[Any], style: str, name: str, *args: Any) -> Any:
    """Call a method through an RRef and wait for its result."""
    made = getattr(getattr(rref, style)(), name)(*args)
    return {"rpc_sync": lambda: made, "rpc_async": lambda: made.wait(), "remote": lambda: made.to_here()}[
        style
    ]()


_STYLES = ("rpc_sync", "rpc_async", "remote")


def test_calls_through_an_rref_run_on_the_actors_thread(one_worker: None) -> None:
    actor, aio = things.Recorder.remote(), things.Aio.remote()
    assert isinstance(actor.rref, RRef)
    assert actor.rref is actor.rref
    for style in _STYLES:
        assert _through(actor.rref, style, "thread") == get(actor.thread.remote())
        assert _through(actor.rref, style, "attribute_that_is_called") == get(actor.thread.remote())
        assert _through(aio.rref, style, "add", 4) == 5


def test_calls_through_an_rref_and_a_handle_keep_the_order_of_their_caller(one_worker: None) -> None:
    actor = things.Recorder.remote()
    rref = actor.rref
    made = [
        call(number)
        for number in range(0, 40, 4)
        for call in (
            lambda number: rref.rpc_async().record(number),
            lambda number: rref.remote().record(number + 1),
            lambda number: actor.record.remote(number + 2),
            lambda number: rref.rpc_sync().record(number + 3),
        )
    ]
    assert len(made) == 40
    assert get(actor.recorded.remote()) == list(range(40))


def test_calls_through_an_rref_raise_errors_of_the_method_timeouts_and_death(counter: Handle) -> None:
    rref = counter.rref
    for style in _STYLES:
        with pytest.raises(KeyError, match="there"):
            _through(rref, style, "boom")
        with pytest.raises(AttributeError, match="nothing"):
            _through(rref, style, "nothing")
        with pytest.raises(TypeError, match="positional"):
            _through(rref, style, "add", 1, 2)
    blocked = counter.wait.remote()
    with pytest.raises(RpcTimeoutError):
        rref.remote(timeout=0.01).add().to_here()
    things.Counter.gate.set()
    assert get(blocked)
    actorrpc.kill(counter)
    for style in _STYLES:
        with pytest.raises(ActorDiedError, match="kill"):
            _through(rref, style, "add")


# -- functions of the handle --------------------------------------------------------------------------------------------


def test_methods_of_the_class_take_precedence_over_functions_of_the_handle(one_worker: None) -> None:
    own = things.Own.remote()
    for name in ("ready", "is_alive", "options", "remote", "rpc_sync", "kill", "actor_id", "rref"):
        method: Any = getattr(own, name)
        assert get(method.remote()) == name
    # The module's functions still work.
    assert actorrpc.is_alive(own)
    assert get(actorrpc.ready(own)) is None
    assert own.rpc_async().ready().wait() == "ready"
    actorrpc.kill(own)
    assert not actorrpc.is_alive(own)


def test_a_handle_has_functions_that_its_class_does_not_define(counter: Handle) -> None:
    assert counter.is_alive()
    assert get(counter.ready()) is None
    assert isinstance(counter.actor_id, int)
    assert get(things.Box.remote(1).call(lambda box: box.value)) == 1
    with pytest.raises(AttributeError, match="this is a function of the handle"):
        counter.is_alive.remote()  # type: ignore[attr-defined]
    assert {"add", "rpc_sync", "is_alive", "rref"} <= set(dir(counter))
    ended = counter.monitor()
    counter.kill()
    assert isinstance(ended.wait(10), ActorDiedError)


def test_handles_of_the_same_actor_are_equal(counter: Handle) -> None:
    other = things.Counter.remote()
    assert counter == counter.options(timeout=1)
    assert counter != other
    assert counter != 3
    assert len({counter, other, counter.options(timeout=1)}) == 2
    assert repr(counter) == f"<ActorHandle of Counter {counter.actor_id:016x}>"
    assert repr(counter.add) == f"<remote method Counter.add of Counter#{counter.actor_id % 0x10000:04x}>"
    assert copy.copy(counter) is counter
    assert copy.deepcopy([counter])[0] is counter


# -- pickling and lifetime -----------------------------------------------------------------------------------------------


def test_pickling_a_handle_with_an_exception_raises_and_names_get_actor(counter: Handle) -> None:
    with pytest.raises(SerializationError, match=r"not with an exception.*get_actor"):
        codec.dumps(counter)
    assert pickle.loads(pickle.dumps(counter)) == counter


def test_handles_and_their_methods_can_be_arguments_and_results(counter: Handle) -> None:
    back: Any = get(counter.echo.remote(counter))
    assert isinstance(back, ActorHandle)
    assert back == counter
    assert get(back.add.remote()) == 4
    other = things.Counter.remote(100)
    assert get(counter.call.remote(other)) == 110
    method: Any = get(counter.echo.remote(other.add))
    assert get(method.remote()) == 111
    assert actorrpc.rpc_sync("w0", operator.eq, (counter, counter))
