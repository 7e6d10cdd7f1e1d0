"""RRefs: their methods, RRefs as arguments and results, and the lifetime of their values.

For the common interface, the same script runs over torch's RRefs, and the results are compared.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import operator
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.rpc as torch_rpc

from actorrpc import errors, rpc
from tests.announced import TORCH_RPC
from tests.ranks import rpc_group, run_group, unused_path

_TINY = 0.05  # a time-out that must expire

# -- values and functions ------------------------------------------------------------------------


class Value:
    """A value that cannot be sent; the class records the numbers of all living values."""

    _change = threading.Condition()
    _alive: ClassVar[set[int]] = set()

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.lock = threading.Lock()  # cannot be pickled
        with Value._change:
            Value._alive.add(number)

    def __del__(self) -> None:
        with Value._change:
            Value._alive.discard(self.number)
            Value._change.notify_all()

    def get(self) -> int:
        return self.number

    def add(self, amount: int, *, times: int = 1) -> int:
        self.number += amount * times
        return self.number

    def fail(self, text: str) -> None:
        raise LookupError(text)

    def thread_name(self) -> str:
        return threading.current_thread().name

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
    with Value._change:
        return set(Value._alive)


def gone(number: int) -> bool:
    """Collect garbage, and wait until the value with this number is freed; return False after 30 s."""
    gc.collect()
    return dead(number)


def dead(number: int) -> bool:
    """Wait without collecting garbage until the value with this number is freed; return False after 30 s."""
    with Value._change:
        return Value._change.wait_for(lambda: number not in Value._alive, timeout=30)


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


# -- the same script with torch.distributed.rpc and actorrpc.rpc ---------------------------------


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "value", call()
    except Exception as error:
        return "error", [cls.__name__ for cls in type(error).__mro__]


def _both(module: Any, me: int) -> dict[str, tuple[str, Any]]:
    """Return the results of the script on rank 0. It creates the first RRefs of the group, so ids can be compared."""
    found: dict[str, tuple[str, Any]] = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        found[name] = outcome(call)

    user = module.remote("worker1", torch.add, (torch.ones(2), 1))
    note("user: repr", lambda: repr(user))
    owner = module.RRef([1, 2])
    note("owner: repr", lambda: repr(owner))  # before the loop below creates more RRefs
    note("user: to_here", lambda: user.to_here().tolist())
    # The owner's confirmation may arrive after the value.
    note(
        "user: confirmed",
        lambda: any(user.confirmed_by_owner() or user.rpc_sync().sum() < 0 for _ in range(9999)),
    )
    note("user: is_owner", user.is_owner)
    note("user: owner_name", user.owner_name)
    note("user: owner", lambda: (user.owner().name, user.owner().id))
    note("user: local_value", user.local_value)
    note("owner: to_here", owner.to_here)
    note("owner: local_value", owner.local_value)
    note("owner: identity", lambda: owner.local_value() is owner.to_here())
    note("owner: confirmed", owner.confirmed_by_owner)
    note("owner: is_owner", owner.is_owner)
    note("owner: owner", lambda: (owner.owner().name, owner.owner_name()))
    own_remote = module.remote("worker0", operator.add, (1, 2))
    note("remote to self: to_here", own_remote.to_here)
    note("remote to self: is_owner", own_remote.is_owner)
    note("remote to self: local_value", own_remote.local_value)
    bad = module.remote("worker1", fail, ("made badly",))
    note("failed: to_here", bad.to_here)
    own_bad = module.remote("worker0", fail, ("made badly",))
    note("failed here: to_here", own_bad.to_here)
    for name, rref in (("user", module.remote("worker1", Value, (3,))), ("owner", module.RRef(Value(3)))):
        for style, finish in (
            ("rpc_sync", own),
            ("rpc_async", lambda f: f.wait()),
            ("remote", lambda r: r.to_here()),
        ):
            proxy = getattr(rref, style)

            def note_call(what: str, call: Callable[[], Any], style: str = style, name: str = name) -> None:
                note(f"{name}: {style}: {what}", call)

            note_call("get", lambda proxy=proxy, finish=finish: finish(proxy().get()))
            note_call("keyword", lambda proxy=proxy, finish=finish: finish(proxy().add(2, times=3)))
            note_call("static", lambda proxy=proxy, finish=finish: finish(proxy().static(4)))
            note_call("class", lambda proxy=proxy, finish=finish: finish(proxy().cls_name()))
            note_call("missing", lambda proxy=proxy, finish=finish: finish(proxy().nothing()))
            note_call("raises", lambda proxy=proxy, finish=finish: finish(proxy().fail("it")))
            note_call("len", lambda proxy=proxy, finish=finish: finish(proxy().__len__()))
            note_call("item", lambda proxy=proxy, finish=finish: finish(proxy().__getitem__(2)))
            note_call("call", lambda proxy=proxy, finish=finish: finish(proxy().__call__(2)))
            note_call("timeout", lambda proxy=proxy, finish=finish: finish(proxy(timeout=30).get()))
            note_call("no timeout", lambda proxy=proxy, finish=finish: finish(proxy(0).get()))
        note(f"{name}: as an argument", lambda rref=rref: module.rpc_sync("worker1", use, (rref,)))
        note(f"{name}: to its owner", lambda rref=rref: module.rpc_sync(rref.owner(), owners_view, (rref,)))
        note(f"{name}: and back", lambda rref=rref: module.rpc_sync("worker1", own, (rref,)).rpc_sync().get())
        note(f"{name}: pickled", lambda rref=rref: pickle.dumps(rref))
        note(f"{name}: deep copy", lambda rref=rref: copy.deepcopy(rref))
        note(
            f"{name}: in a container", lambda rref=rref: module.rpc_sync("worker1", in_dict, ({"k": [rref]},))
        )
        note(f"{name}: twice", lambda rref=rref: module.rpc_sync("worker1", in_dict, ({"k": [rref, rref]},)))
        note(f"{name}: on to worker2", lambda rref=rref: module.rpc_sync("worker1", relay, (rref, "worker2")))
    tensor = module.remote("worker1", torch.ones, ((2, 3),))
    note("tensor: size", lambda: list(tensor.rpc_sync().size()))
    note("tensor: view", lambda: tensor.remote().view(6).to_here().tolist())
    note("tensor: sum", lambda: tensor.rpc_async().sum().wait().item())
    note("none", lambda: module.remote("worker1", own, (None,)).to_here())
    note("of an RRef", lambda: module.remote("worker1", own, (owner,)).to_here().to_here())
    return found


def owners_view(rref: Any) -> tuple[bool, int]:
    return rref.is_owner(), rref.local_value().get()


def in_dict(things: dict[str, list[Any]]) -> list[Any]:
    return [rref.rpc_sync().get() for rref in things["k"]]


def relay(rref: Any, to: str) -> Any:
    module = rpc if isinstance(rref, rpc.RRef) else torch_rpc
    return module.rpc_sync(to, use, (rref,))  # type: ignore[attr-defined]


def _over_ours(rank: int, world_size: int) -> dict[str, tuple[str, Any]]:
    return {} if rank else _both(rpc, rank)


def _over_torch(rank: int, world_size: int, path: str) -> dict[str, tuple[str, Any]]:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    given = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", num_worker_threads=4)
    torch_rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=given)
    try:
        return {} if rank else _both(torch_rpc, rank)
    finally:
        torch_rpc.shutdown()


# Intended differences.
_BETTER = {
    # Torch returns a new list each time; here, `local_value()` is the value itself.
    "owner: identity": ("value", True),
}


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.prints(*TORCH_RPC)
def test_rrefs_give_the_same_results_as_torchs_rrefs() -> None:
    ours = rpc_group(_over_ours, 3)[0]
    theirs = run_group(_over_torch, 3, unused_path("rref"), leak_wait=None, timeout=240)[
        0
    ]  # torch's agent is not checked for leaks
    assert list(ours) == list(theirs)
    problems = []
    for name, (kind, value) in theirs.items():
        our_kind, our_value = ours[name]
        if name in _BETTER:
            assert ours[name] == _BETTER[name] != (kind, value)
            continue
        if kind == our_kind == "error":
            # The error has the type that torch raises, and is always a RuntimeError.
            if value[0] not in our_value or "RuntimeError" not in our_value:
                problems.append(f"{name}: {our_value}, torch {value}")
        elif (our_kind, our_value) != (kind, value):
            problems.append(f"{name}: {our_kind} {our_value!r}, torch {kind} {value!r}")
    assert not problems, "\n".join(problems)


# -- the rest of the interface -------------------------------------------------------------------


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
    # Proxies.
    assert there.rpc_sync()(3) == 36
    for style in ("rpc_sync", "rpc_async", "remote"):
        assert style in repr(getattr(there, style)())
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
    raise LookupError("cannot be opened")


def take_in(rref: Any) -> str:
    """Use an RRef, as its owner or as a user, without a time-out."""
    _entered.release()
    with pytest.raises(errors.RpcError, match="cannot be opened"):
        rref.local_value() if rref.is_owner() else rref.to_here(timeout=0)
    return "told"


def _unopened(rank: int, world_size: int) -> None:
    if rank:
        return
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


def _fail_and_drop(rank: int, world_size: int) -> None:
    if rank:
        return
    rpc.rpc_sync("worker1", open_gate)
    rref = rpc.remote("worker1", own, (Unreadable(),))
    for _ in range(3):
        with contextlib.suppress(errors.RpcError):
            rref.to_here()
    trace = weakref.ref(rref)
    del rref
    assert trace() is None  # the stored error does not keep the RRef alive


@pytest.mark.limit(60)
def test_a_failed_rref_is_freed_although_its_error_was_raised() -> None:
    rpc_group(_fail_and_drop, 2)


@pytest.mark.limit(60)
def test_a_creation_whose_arguments_cannot_be_unpickled_fails_all_waits() -> None:
    rpc_group(_unopened, 3)


class UnreadableAtLength:
    """Raises a long error during unpickling when the gate of the receiving worker is opened."""

    def __getstate__(self) -> int:
        return 1

    def __setstate__(self, state: object) -> None:
        _entered.release()
        _gate.wait()
        raise ValueError("cannot be opened: " + "x" * (6 << 20))


def _fail_at_length(size: int) -> None:
    raise LookupError("x" * size)


def _long_errors(rank: int, world_size: int) -> None:
    if rank:
        return
    for to in ("worker0", "worker1"):
        for call in (
            lambda to=to: rpc.rpc_sync(to, _fail_at_length, (3 << 20,)),
            lambda to=to: rpc.rpc_async(to, _fail_at_length, (3 << 20,)).wait(),
            lambda to=to: rpc.remote(to, _fail_at_length, (3 << 20,)).to_here(),
        ):
            with pytest.raises(LookupError) as caught:
                call()
            assert caught.value.args == ("x" * (3 << 20),)
    # The owner learns the error of the failed creation in one frame, which must not exceed the limit of frames.
    rref = rpc.remote("worker1", own, (UnreadableAtLength(),))
    rpc.rpc_sync("worker1", await_entered)
    told = rpc.rpc_async("worker1", take_in, (rref,))  # must be sent before the error has arrived here
    rpc.rpc_sync("worker1", await_entered)
    rpc.rpc_sync("worker1", open_gate)
    assert told.wait() == "told"
    assert rpc.rpc_sync("worker1", operator.add, (1, 2)) == 3


@pytest.mark.limit(60)
def test_error_texts_longer_than_a_chunk_arrive_whole() -> None:
    rpc_group(_long_errors, 2)


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
        rpc.rpc_sync("worker2", fail_with, (rref,))
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


def fail_with(rref: Any) -> None:
    raise LookupError("with an RRef in hand")


@pytest.mark.slow
def test_values_are_freed_with_their_last_reference_and_not_before() -> None:
    rpc_group(_counting, 3)


# -- shutdown ------------------------------------------------------------------------------------


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _held_at_the_end(rank: int, world_size: int) -> None:
    warnings = _Warnings()
    logging.getLogger("actorrpc").addHandler(warnings)
    me, others = f"worker{rank}", [i for i in range(world_size) if i != rank]
    keep("mine", [rpc.remote(i, Value, (rank * 10 + i,)) for i in others])
    keep("own", rpc.RRef(Value(rank * 10 + rank)))
    for i in others:
        rpc.rpc_sync(i, keep, (f"from {me}", [kept("own"), *kept("mine")]))
    rpc.shutdown()
    assert warnings.texts == []
    # RRefs that are still held raise.
    for rref in kept("mine"):
        with pytest.raises(errors.RpcError):
            rref.rpc_sync().get()
    # Values that other workers held are freed.
    with Value._change:
        left = {number for number in Value._alive if number // 10 != rank}
    assert left == set()
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
