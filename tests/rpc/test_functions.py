"""`functions.async_execution`: a call is answered when the returned future completes. Also: errors over max_message."""

from __future__ import annotations

import inspect
import operator
import threading
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc

import actorrpc
from actorrpc import errors, rpc
from actorrpc.rpc.functions import async_execution
from actorrpc.testing import InProcessCluster
from tests.migration.rows import row
from tests.ranks import rpc_group

_TINY = 0.05  # a time-out that must expire
_gate: torch.futures.Future[str] = torch.futures.Future()
_waiting = threading.Semaphore(0)


def done(value: Any, cls: Any = rpc.Future) -> Any:
    future = cls()
    future.set_result(value)
    return future


@async_execution
def add_one(x: Any, cls: str = "ours") -> Any:
    """Add one."""
    return done(x + 1, {"ours": rpc.Future, "torch": torch.futures.Future}[cls])


@async_execution
def elsewhere(to: str, x: torch.Tensor, y: int) -> Any:
    return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda future: future.wait() + 1)


@async_execution
def no_future(x: int) -> Any:
    return x


@async_execution
def raises(text: str) -> Any:
    raise LookupError(text)


@async_execution
def fails(text: str) -> Any:
    future: Any = rpc.Future()
    future.set_exception(LookupError(text))
    return future


@async_execution
def fails_in_then(to: str) -> Any:
    return rpc.rpc_async(to, operator.add, (1, 2)).then(lambda f: operator.truediv(f.wait(), 0))


@async_execution
def completed_by_a_thread(x: int) -> Any:
    future: Any = rpc.Future()
    threading.Thread(target=future.set_result, args=(x,)).start()
    return future


@async_execution
def gated(number: int) -> Any:
    _waiting.release()
    return _gate.then(lambda f: (f.wait(), number))


def open_gate(arrivals: int) -> None:
    for _ in range(arrivals):
        assert _waiting.acquire(timeout=30)
    _gate.set_result("open")


@torch_rpc.functions.async_execution
def by_torchs_decorator(x: int) -> Any:
    return done(x + 1)


def plain_future() -> Any:
    """Not marked: its future cannot be sent."""
    return done(1)


class Calculator:
    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    @staticmethod
    @async_execution
    def static_add(to: str, x: Any, y: Any) -> Any:
        return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda future: future.wait() + 1)

    @classmethod
    @async_execution
    def class_add(cls, to: str, x: Any, y: Any) -> Any:
        made = cls(1)
        return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda future: future.wait() + made.offset)

    @async_execution
    def bound_add(self, to: str, x: Any, y: Any) -> Any:
        return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda future: future.wait() + self.offset)

    @async_execution
    def bad(self) -> Any:
        return 5


def styles(to: Any) -> list[Any]:
    return [
        lambda *args: rpc.rpc_sync(to, *args),
        lambda *args: rpc.rpc_async(to, *args).wait(),
        lambda *args: rpc.remote(to, *args).to_here(),
    ]


def raised(call: Any, types: Any, match: str) -> BaseException:
    with pytest.raises(types, match=match) as caught:
        call()
    assert isinstance(caught.value, RuntimeError)
    return caught.value


_NO_FUTURE = "must return a torch.futures.Future object"


def _everything(rank: int, world_size: int) -> None:
    if rank:
        return
    x = torch.ones(2, 2)
    for to in ("worker1", "worker0"):
        for call in styles(to):
            assert call(add_one, (1,)) == 2
            assert call(add_one, (1,), {"cls": "torch"}) == 2
            assert call(by_torchs_decorator, (1,)) == 2
            assert call(completed_by_a_thread, (7,)) == 7
            assert torch.equal(call(elsewhere, ("worker2", x, 1)), x + 2)
            assert torch.equal(call(elsewhere, (to, x, 1)), x + 2)
            assert torch.equal(call(Calculator.static_add, ("worker2", x, 1)), x + 2)
            assert torch.equal(call(Calculator.class_add, ("worker2", x, 1)), x + 2)
            assert torch.equal(call(Calculator(5).bound_add, ("worker2", x, 1)), x + 6)
            local = async_execution(lambda n: done(n + 3))
            assert call(local, (4,)) == 7
            # -- errors
            raised(lambda call=call: call(no_future, (1,)), TypeError, _NO_FUTURE)
            raised(lambda call=call: call(raises, ("in it",)), LookupError, "in it")
            raised(lambda call=call: call(fails, ("in its future",)), LookupError, "in its future")
            raised(lambda call=call: call(fails_in_then, ("worker2",)), ZeroDivisionError, "division")
            raised(lambda call=call: call(Calculator().bad), TypeError, _NO_FUTURE)
        # Through all three proxies of an RRef, as in torch's examples.
        rref = rpc.remote(to, Calculator, (10,))
        assert torch.equal(rref.rpc_sync().bound_add("worker2", x, 1), x + 11)
        assert torch.equal(rref.rpc_async().bound_add("worker2", x, 1).wait(), x + 11)
        assert torch.equal(rref.remote().bound_add("worker2", x, 1).to_here(), x + 11)
        raised(lambda rref=rref: rref.rpc_sync().bad(), TypeError, _NO_FUTURE)
        with pytest.raises(errors.SerializationError):
            rpc.rpc_sync(to, plain_future)
        # The call times out although its future is pending.
        raised(
            lambda to=to: rpc.rpc_sync(to, gated, (0,), timeout=_TINY), TimeoutError, "RPC ran for more than"
        )


@row("@rpc.functions.async_execution", "from-torch-rpc")
def test_async_execution_answers_with_the_result_or_error_of_its_future() -> None:
    rpc_group(_everything, 3)


def _no_threads(rank: int, world_size: int) -> None:
    """Ten times as many calls as the pool has threads wait for the last of them to arrive."""
    if rank:
        return
    number = 40
    calls = [rpc.rpc_async("worker1", gated, (i,)) for i in range(number)]
    rrefs = [rpc.remote("worker1", gated, (i,)) for i in range(number)]
    rpc.rpc_sync("worker1", open_gate, (2 * number,))
    assert [future.wait() for future in calls] == [("open", i) for i in range(number)]
    assert [rref.to_here() for rref in rrefs] == [("open", i) for i in range(number)]


def test_pending_async_execution_futures_occupy_no_thread() -> None:
    rpc_group(_no_threads, 2, options={"max_threads": 8})


def test_async_execution_functions_can_be_called_locally_and_keep_their_metadata() -> None:
    assert add_one(1).wait() == 2
    assert Calculator(5).bound_add.__name__ == "bound_add"
    assert add_one.__name__ == "add_one"
    assert add_one.__doc__ == "Add one."
    assert list(inspect.signature(add_one).parameters) == ["x", "cls"]
    # The attribute by which torch's code recognizes the decorator.
    assert hasattr(add_one, "_wrapped_async_rpc_function")
    assert rpc.functions.async_execution is async_execution
    for wrong in (3, None, "name"):
        with pytest.raises((TypeError, AttributeError)):
            async_execution(wrong)  # type: ignore[type-var]


# -- limits --------------------------------------------------------------------------------------


def test_a_class_definition_over_max_message_is_refused_before_sending() -> None:
    table = b"t" * (3 << 20)

    class Large:
        rows = table

    with InProcessCluster(2, clock="real", max_message=2 << 20):
        with pytest.raises(errors.LimitError, match="over the limit of 2097152") as caught:
            rpc.rpc_async("worker1", type, (Large(),))
        assert caught.value.maybe_executed is False
        assert rpc.rpc_sync("worker1", operator.add, (1, 2)) == 3


class Wrong(ExceptionGroup[Exception]):
    """A user's exception."""


def _raise_large() -> None:
    error = Wrong("several", [ValueError("x" * 100_000), LookupError("y")])
    for _ in range(100):
        error.add_note("n" * 8000)
    raise error


@actorrpc.remote
class Streaming:
    def numbers(self) -> Any:
        yield 1
        _raise_large()


def test_an_exception_group_over_max_message_is_shortened_but_keeps_its_class() -> None:
    with InProcessCluster(2, clock="real", max_message=256 << 10, chunk=64 << 10):
        stream = Streaming.options(worker="worker1").remote().numbers.remote()  # type: ignore[attr-defined]
        assert actorrpc.get(next(stream)) == 1
        for raise_large in (
            lambda: rpc.rpc_sync("worker1", _raise_large),
            lambda: actorrpc.get(next(stream)),
        ):
            with pytest.raises(Wrong, match="several") as caught:
                raise_large()
            assert [str(each) for each in caught.value.exceptions] == [
                "2 more exceptions of this group are too large to be sent"
            ]
            (note,) = caught.value.__notes__
            assert note.endswith(
                "as it cannot be sent whole: all but its class and the beginning of its text"
            )
