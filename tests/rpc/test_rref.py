"""RRefs: their methods, RRefs as arguments and results, and the lifetime of their values.

`tests/conformance` compares with torch's own RRefs.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from actorrpc import errors, rpc
from actorrpc.rpc import api
from tests.actors.e2e.kit import until
from tests.migration.rows import row
from tests.ranks import rpc_group

_TINY = 0.05  # a time-out that must expire

# -- values and functions ------------------------------------------------------------------------


_change = threading.Condition()
_alive: set[int] = set()


class Value:
    """A value that cannot be sent; `_alive` has the numbers of all living values."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.lock = threading.Lock()  # cannot be pickled
        with _change:
            _alive.add(number)

    def __del__(self) -> None:
        with _change:
            _alive.discard(self.number)
            _change.notify_all()

    def get(self) -> int:
        return self.number

    def add(self, amount: int, *, times: int = 1) -> int:
        self.number += amount * times
        return self.number

    def fail(self, text: str) -> None:
        raise LookupError(text)

    def same(self, rref: Any) -> bool:
        return rref.local_value() is self

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> int:
        return self.number + index

    def __call__(self, factor: int) -> int:
        return self.number * factor

    @staticmethod
    def static(x: int) -> int:
        return x + 1

    @classmethod
    def cls_name(cls) -> str:
        return cls.__name__


def alive() -> set[int]:
    with _change:
        return set(_alive)


def gone(number: int) -> bool:
    """Collect garbage, and wait until the value with this number is freed; return False after 30 s."""
    gc.collect()
    return dead(number)


def dead(number: int) -> bool:
    """Wait without collecting garbage until the value with this number is freed; return False after 30 s."""
    with _change:
        return _change.wait_for(lambda: number not in _alive, timeout=30)


_gate = threading.Event()


def gated(value: Any) -> Any:
    assert _gate.wait(30)
    return value


def open_gate() -> None:
    _gate.set()


def close_gate() -> None:
    _gate.clear()


def fail(text: str) -> Any:
    raise LookupError(text)


def own(value: Any) -> Any:
    return value


_kept: dict[str, Any] = {}


def keep(name: str, thing: Any) -> None:
    _kept[name] = thing


def kept(name: str) -> Any:
    return _kept[name]


def drop(name: str) -> None:
    del _kept[name]
    gc.collect()


def fetch(rref: Any) -> Any:
    return rref.to_here()


def use(rref: Any) -> Any:
    return rref.rpc_sync().get()


def pass_on(rref: Any, to: list[Any], then: Callable[[Any], Any]) -> Any:
    """Send the RRef from worker to worker along ``to``, and call ``then`` on the last worker."""
    if not to:
        return then(rref)
    return rpc.rpc_sync(to[0], pass_on, (rref, to[1:], then))


def make_here(number: int) -> Any:
    return rpc.RRef(Value(number))


def tell(rref: Any) -> tuple[bool, str, bool]:
    return rref.is_owner(), rref.owner_name(), rref.confirmed_by_owner()


def make_there(number: int) -> Any:
    return rpc.remote("worker2", Value, (number,))


# -- the interface -------------------------------------------------------------------------------


def _interface(rank: int, world_size: int) -> None:
    if rank:
        return
    here = rpc.RRef(Value(1))
    there = rpc.remote("worker1", Value, (2,))
    # RRefs are equal if they refer to the same value.
    back = rpc.rpc_sync("worker1", own, (there,))
    assert back == there
    assert hash(back) == hash(there)
    assert back is not there
    assert rpc.rpc_sync("worker1", own, (here,)) == here
    assert here != there
    assert here != 1
    assert rpc.RRef(1) != rpc.RRef(1)
    assert len({here, there, back}) == 2
    assert back.confirmed_by_owner()
    # Types and hints.
    assert isinstance(there, rpc.RRef)
    typed: rpc.RRef[int] = rpc.RRef(1, type_hint=int)
    assert typed.to_here() == 1
    assert rpc.RRef[int] is not None
    # Owners.
    assert there.owner() == rpc.get_worker_info("worker1")
    assert rpc.rpc_sync(there.owner(), Value.static, (1,)) == 2
    assert rpc.rpc_sync("worker2", pass_on, (there, ["worker1", "worker0", "worker2"], use)) == 2
    assert rpc.rpc_sync("worker2", pass_on, (there, ["worker1"], tell)) == (True, "worker1", True)
    assert rpc.rpc_sync("worker2", pass_on, (here, ["worker0"], tell)) == (True, "worker0", True)
    assert rpc.rpc_sync("worker2", tell, (here,)) == (False, "worker0", True)
    assert rpc.rpc_sync("worker2", tell, (there,)) == (False, "worker1", True)
    # On its owner, an RRef refers to the object itself.
    assert there.rpc_sync().same(there)
    assert here.rpc_sync().same(here)
    with pytest.raises(RuntimeError, match="local_value"):
        there.local_value()
    with pytest.raises(errors.RRefError, match="rref_id="):
        there.local_value()
    # Fetching a value that cannot be pickled raises; the RRef still works.
    with pytest.raises(errors.SerializationError):
        there.to_here()
    assert there.rpc_sync().get() == 2
    # An RRef as the result of a call, owned by the callee or by a third worker.
    made = rpc.rpc_sync("worker1", make_here, (11,))
    assert tuple(tell(made)) == (False, "worker1", True)
    assert made.rpc_sync().get() == 11
    third = rpc.rpc_sync("worker1", make_there, (12,))
    assert third.owner_name() == "worker2"
    assert third.rpc_sync().get() == 12
    nested = rpc.remote("worker1", make_there, (13,))
    assert nested.to_here().rpc_sync().get() == 13
    # The method of a proxy as the called function, with the RRef as argument, as in torch's tutorial.
    assert rpc.rpc_async(there.owner(), there.rpc_sync().same, args=(there,)).wait()
    assert rpc.rpc_sync("worker2", there.rpc_sync().add, (5,), {"times": 2}) == 12
    assert rpc.rpc_sync("worker1", own, ({"twice": [there, there]},)) == {"twice": [there, there]}
    # Proxies.
    for rref in (here, there):
        number = rref.rpc_sync().get()
        for style, end in (("rpc_sync", own), ("rpc_async", rpc.Future.wait), ("remote", rpc.RRef.to_here)):
            proxy = getattr(rref, style)()
            assert style in repr(proxy)
            assert end(proxy.static(4)) == 5
            assert end(proxy.cls_name()) == "Value"
            assert end(proxy.__len__()) == number
            assert end(proxy.__getitem__(2)) == number + 2
            assert end(proxy(3)) == end(proxy.__call__(3)) == 3 * number
            with pytest.raises(AttributeError, match="nothing"):
                end(proxy.nothing())
    for style in ("rpc_sync", "rpc_async", "remote"):
        for wrong in ("1", -2, float("nan"), None, True):
            with pytest.raises((TypeError, ValueError), match="timeout"):
                getattr(there, style)(timeout=wrong).get()
    for wrong in ("1", -2, float("nan"), None, True):
        for rref in (here, there):
            with pytest.raises((TypeError, ValueError), match="timeout"):
                rref.to_here(timeout=wrong)  # type: ignore[arg-type]
    proxy = there.rpc_sync()
    for name in ("__array__", "__wrapped__", "__torch_function__", "__setstate__", "__name__"):
        assert not hasattr(proxy, name)
    assert copy.copy(proxy).get() == proxy.get()
    first, second = proxy.get(), proxy.get()
    assert first == second
    assert rpc.rpc_async("worker1", own, (there.rpc_async(),)).wait().get().wait() == first


def test_rrefs_compare_by_id_know_their_owner_and_refuse_wrong_arguments() -> None:
    rpc_group(_interface, 3)


# -- pending and failed values -------------------------------------------------------------------


def _early(rank: int, world_size: int) -> None:
    if rank:
        return
    for to in ("worker1", "worker0"):
        rpc.rpc_sync(to, close_gate)
        rref = rpc.remote(to, gated, (5,))
        assert rref.owner_name() == to
        for call in (
            lambda rref=rref: rref.to_here(timeout=_TINY),
            lambda rref=rref: rref.rpc_sync(timeout=_TINY).bit_length(),
            lambda rref=rref: rref.rpc_async(timeout=_TINY).bit_length().wait(),
        ):
            with pytest.raises(TimeoutError) as caught:
                call()
            assert isinstance(caught.value, RuntimeError)
        # An RRef can be sent before its value exists; the receiver waits for the value.
        waits = rpc.rpc_async("worker2", fetch, (rref,))
        method = rref.rpc_async().bit_length()
        follows = rref.remote().bit_length()
        assert not waits.done()
        rpc.rpc_sync(to, open_gate)
        assert waits.wait() == 5
        assert method.wait() == 3
        assert follows.to_here() == 3
        assert rref.to_here() == 5
        # -- failed
        bad = rpc.remote(to, fail, ("no value",))
        for call in (
            lambda bad=bad: bad.to_here(),
            lambda bad=bad: bad.to_here(),
            lambda bad=bad: bad.rpc_sync().anything(),
            lambda bad=bad: bad.rpc_async().anything().wait(),
            lambda bad=bad: bad.remote().anything().to_here(),
            lambda bad=bad: rpc.rpc_sync("worker2", fetch, (bad,)),
        ):
            with pytest.raises(LookupError, match="no value") as failed:
                call()
            assert isinstance(failed.value, errors.RemoteError)
            assert failed.value.args == ("no value",)
            assert isinstance(failed.value.__cause__, errors.RemoteTraceback)
    unsendable = rpc.remote("worker1", threading.Lock)
    with pytest.raises(errors.SerializationError, match="lock"):
        unsendable.to_here()
    assert unsendable.rpc_sync().locked() is False
    with pytest.raises(errors.SerializationError):
        rpc.remote("worker1", own, (threading.Lock(),))
    with pytest.raises(LookupError, match="of a value"):
        rpc.remote("worker1", Value, (1,)).remote().fail("of a value").to_here()
    own_bad = rpc.remote("worker0", fail, ("local",))
    with pytest.raises(LookupError, match="local"):
        own_bad.local_value()


@row("rref.to_here(), .local_value()", "from-torch-rpc")
def test_rrefs_of_pending_values_wait_and_rrefs_of_failed_values_raise() -> None:
    rpc_group(_early, 3)


# -- creations that fail before their function runs ------------------------------------------------


_entered = threading.Semaphore(0)


def await_entered() -> None:
    _entered.acquire()


class Unreadable:
    """Fails to unpickle when the gate of the receiving worker is opened."""

    def __reduce__(self) -> Any:
        return _unreadable, ()


def _unreadable() -> None:
    _entered.release()
    _gate.wait()
    raise LookupError("cannot be opened: " + "x" * (6 << 20))  # longer than a frame may be


def take_in(rref: Any) -> str:
    """Use an RRef, as its owner or as a user, without a time-out."""
    _entered.release()
    with pytest.raises(errors.RpcError, match="cannot be opened"):
        rref.local_value() if rref.is_owner() else rref.to_here(timeout=0)
    return "told"


def _fail_all_waits() -> None:
    rref = rpc.remote("worker1", own, (Unreadable(),), timeout=0)
    rpc.rpc_sync("worker1", await_entered)
    waits = [
        rref._to_future(),
        rref.rpc_async(timeout=0).bit_length(),
        rpc.rpc_async("worker1", take_in, (rref,), timeout=0),
        rpc.rpc_async("worker2", take_in, (rref,), timeout=0),
    ]
    follows = rref.remote(timeout=0).bit_length()
    follows_too = follows._to_future()
    for to in ("worker1", "worker2"):
        rpc.rpc_sync(to, await_entered)
    assert not rref.confirmed_by_owner()
    assert not any(each.done() for each in waits)
    rpc.rpc_sync("worker1", open_gate)
    for each in (*waits[:2], follows_too):
        with pytest.raises(errors.RpcError, match="cannot be opened"):
            each.wait()
    assert [each.wait() for each in waits[2:]] == ["told", "told"]
    # Later uses fail as well.
    assert not rref.confirmed_by_owner()
    for call in (
        lambda: rref.to_here(timeout=0),
        lambda: rref.rpc_sync(timeout=0).bit_length(),
        lambda: rref.remote(timeout=0).bit_length(),
        lambda: follows.to_here(timeout=0),
        lambda: rpc.rpc_sync("worker2", take_in, (rref,)),
    ):
        with pytest.raises(errors.RpcError, match="cannot be opened"):
            call()


def _unopened(rank: int, world_size: int) -> None:
    if rank:
        return
    _fail_all_waits()
    rref = rpc.remote("worker1", own, (Unreadable(),))
    for _ in range(3):
        with contextlib.suppress(errors.RpcError):
            rref.to_here()
    trace = weakref.ref(rref)
    del rref
    assert trace() is None  # the stored error does not keep the RRef alive


@pytest.mark.limit(60)
def test_a_creation_whose_arguments_cannot_be_unpickled_fails_all_waits_and_frees_the_rref() -> None:
    rpc_group(_unopened, 3)


# -- RRefs in arguments --------------------------------------------------------------------------


def with_result(_rref: Any, result: Any) -> Any:
    return result


def unconfirmed_rrefs() -> int:
    """Return the number of sent RRefs whose arrival is not confirmed."""
    return api.references().table.pending_counts().children


def _settled(rank: int, world_size: int) -> None:
    if rank:
        return
    rref = rpc.remote("worker1", str, ("here",))
    assert rref.to_here() == "here"
    for result in (1, None, "text", [1, 2], rref, b"x" * 3_000_000):
        rpc.rpc_sync("worker1", with_result, (rref, result))
        assert unconfirmed_rrefs() == 0, result
    with pytest.raises(LookupError):
        rpc.rpc_sync("worker1", fail, (rref,))
    assert unconfirmed_rrefs() == 0
    with pytest.raises(errors.SerializationError):
        rpc.rpc_sync("worker1", lambda _: threading.Lock(), (rref,))
    assert unconfirmed_rrefs() == 0
    # The function still runs, and its answer will be discarded; this must not keep the sent RRef.
    rref = rpc.remote("worker2", str, ("here",))
    assert rref.to_here() == "here"
    with pytest.raises(errors.RpcTimeoutError):
        rpc.rpc_sync("worker1", gated, (rref,), timeout=0.5)
    until(lambda: unconfirmed_rrefs() == 0)
    assert rpc.rpc_async("worker1", gated, (rref,)).cancel()
    until(lambda: unconfirmed_rrefs() == 0)
    rpc.rpc_sync("worker1", open_gate)


def test_answered_timed_out_and_cancelled_calls_keep_no_rrefs() -> None:
    rpc_group(_settled, 3)


# -- pickling ------------------------------------------------------------------------------------


def _pickling(rank: int, world_size: int) -> None:
    if rank:
        return
    for rref in (rpc.RRef(1), rpc.remote("worker1", own, (1,))):
        for call in (
            lambda rref=rref: pickle.dumps(rref),
            lambda rref=rref: pickle.dumps({"deep": [rref]}),
            lambda rref=rref: torch.save(rref, os.devnull),
            lambda rref=rref: copy.deepcopy(rref),
        ):
            with pytest.raises(RuntimeError):
                call()
        assert copy.copy(rref) == rref
    with pytest.raises(RuntimeError, match="only be pickled when using RPC"):
        pickle.dumps(rpc.RRef(1))


def test_rrefs_can_only_be_pickled_by_rpc() -> None:
    rpc_group(_pickling, 2)


# -- reference counting --------------------------------------------------------------------------


def _counting(rank: int, world_size: int) -> None:
    if rank:
        return
    # A value with one user.
    rref = rpc.remote("worker1", Value, (1,))
    assert rref.rpc_sync().get() == 1
    assert 1 in rpc.rpc_sync("worker1", alive)
    del rref
    assert rpc.rpc_sync("worker1", gone, (1,))
    # An RRef that is dropped before its value is created.
    rpc.remote("worker1", Value, (2,))
    assert rpc.rpc_sync("worker1", gone, (2,))
    # G1: a value shared with another worker lives until both have dropped it; the creator may be the first.
    rref = rpc.remote("worker1", Value, (3,))
    rpc.rpc_sync("worker2", keep, ("three", rref))
    del rref
    gc.collect()
    assert rpc.rpc_sync("worker2", pass_on, (3, [], own)) == 3
    assert rpc.rpc_sync("worker2", kept_get, ("three",)) == 3
    rpc.rpc_sync("worker2", drop, ("three",))
    assert rpc.rpc_sync("worker1", gone, (3,))
    # G2: passed along a chain of workers that drop it at once.
    rref = rpc.remote("worker1", Value, (4,))
    future = rpc.rpc_async(
        "worker2", pass_on, (rref, ["worker0", "worker2", "worker1", "worker2"], keep_four)
    )
    del rref
    future.wait()
    assert rpc.rpc_sync("worker2", kept_get, ("four",)) == 4
    rpc.rpc_sync("worker2", drop, ("four",))
    assert rpc.rpc_sync("worker1", gone, (4,))
    # A value owned here lives while any worker holds it.
    mine = rpc.RRef(Value(5))
    rpc.rpc_sync("worker1", keep, ("five", mine))
    del mine
    gc.collect()
    assert 5 in alive()
    assert rpc.rpc_sync("worker1", kept_get, ("five",)) == 5
    rpc.rpc_sync("worker1", drop, ("five",))
    assert gone(5)
    # A value owned here and never shared.
    mine = rpc.RRef(Value(6))
    del mine
    assert gone(6)
    # A running call and its result hold the RRef.
    rref = rpc.remote("worker1", Value, (7,))
    rpc.rpc_sync("worker2", close_gate)
    future = rpc.rpc_async("worker2", gated, (rref,))
    del rref
    gc.collect()
    rpc.rpc_sync("worker2", open_gate)
    again = future.wait()
    assert again.rpc_sync().get() == 7
    del future, again
    assert rpc.rpc_sync("worker1", gone, (7,))
    # A proxy, its methods and the futures of its calls hold the RRef.
    future = rpc.remote("worker1", Value, (8,)).rpc_async().get()
    assert future.wait() == 8
    method = rpc.remote("worker1", Value, (9,)).rpc_sync().get
    assert method() == 9
    del future, method
    assert rpc.rpc_sync("worker1", gone, (8,))
    assert rpc.rpc_sync("worker1", gone, (9,))
    # Calls that fail before or after sending lose no reference.
    rref = rpc.remote("worker1", Value, (10,))
    with pytest.raises(errors.SerializationError):
        rpc.rpc_sync("worker2", own, (rref, threading.Lock()))
    with pytest.raises(TypeError):
        rpc.rpc_sync("worker2", own, (rref, rref))
    with pytest.raises(LookupError):
        rpc.rpc_sync("worker2", fail, (rref,))
    cancelled = rpc.rpc_async("worker2", own, (rref,))
    cancelled.cancel()
    del cancelled
    assert rref.rpc_sync().get() == 10
    del rref
    assert rpc.rpc_sync("worker1", gone, (10,))
    # Many RRefs, shared in all directions.
    many = [rpc.remote(f"worker{1 + i % 2}", Value, (100 + i,)) for i in range(60)]
    there = [rpc.rpc_async(f"worker{1 + (i + 1) % 2}", use, (each,)) for i, each in enumerate(many)]
    assert [future.wait() for future in there] == [100 + i for i in range(60)]
    del many, there
    gc.collect()
    for i in range(60):
        assert rpc.rpc_sync(f"worker{1 + i % 2}", dead, (100 + i,))
    # An RRef in a reference cycle.
    loop: list[Any] = [rpc.remote("worker1", Value, (11,))]
    loop.append(loop)
    del loop
    gc.collect()
    assert rpc.rpc_sync("worker1", gone, (11,))


def kept_get(name: str) -> int:
    number: int = _kept[name].rpc_sync().get()
    return number


def keep_four(rref: Any) -> None:
    keep("four", rref)


@pytest.mark.slow
def test_values_are_freed_with_their_last_reference_and_not_before() -> None:
    rpc_group(_counting, 3)


# -- shutdown ------------------------------------------------------------------------------------


def _held_at_the_end(rank: int, world_size: int) -> None:
    me, others = f"worker{rank}", [i for i in range(world_size) if i != rank]
    keep("mine", [rpc.remote(i, Value, (rank * 10 + i,)) for i in others])
    keep("own", rpc.RRef(Value(rank * 10 + rank)))
    for i in others:
        rpc.rpc_sync(i, keep, (f"from {me}", [kept("own"), *kept("mine")]))
    rpc.shutdown()
    # RRefs that are still held raise.
    for rref in kept("mine"):
        with pytest.raises(errors.RpcError):
            rref.rpc_sync().get()
    # Values that other workers held are freed.
    assert not {number for number in alive() if number // 10 != rank}
    _kept.clear()


def test_rrefs_held_at_shutdown_are_released_without_warnings() -> None:
    rpc_group(_held_at_the_end, 3)


def last_error(call: Callable[[], Any]) -> Exception:
    """Call until it fails."""
    while True:
        try:
            call()
        except Exception as error:
            return error


def _owner_dies(rank: int, world_size: int) -> None:
    if rank == 1:
        assert _gate.wait(30)
        rpc.shutdown(graceful=False)
        return
    if rank == 0:
        rref = rpc.remote("worker1", Value, (1,))
        assert rref.rpc_sync().get() == 1
        rpc.rpc_sync("worker2", keep, ("one", rref))
        mine = rpc.RRef(Value(2))
        rpc.rpc_sync("worker1", keep, ("two", mine))
        del mine
        rpc.rpc_async("worker1", open_gate).exception()  # the worker may leave before it answers
        error = last_error(rref.rpc_sync().get)
        assert isinstance(error, errors.PeerDiedError | errors.ShutdownError), repr(error)
        for call in (
            rref.to_here,
            lambda: rref.rpc_async().get().wait(),
            lambda: rref.remote().get().to_here(),
            lambda: rpc.rpc_sync("worker2", fetch, (rref,)),
        ):
            with pytest.raises(errors.RpcError):
                call()
        # The reference of the worker that left does not keep the value alive.
        assert gone(2)
        rpc.rpc_sync("worker2", open_gate)
    else:
        assert _gate.wait(30)
        with pytest.raises(errors.RpcError):
            kept("one").to_here()
        drop("one")


def test_rrefs_of_an_owner_that_left_raise_and_its_references_are_released() -> None:
    rpc_group(_owner_dies, 3)
