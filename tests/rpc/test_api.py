"""The calls of `actorrpc.rpc`: they return, or raise, the same as a local call of the function.

`tests/conformance` compares with torch's own RPC.
"""

from __future__ import annotations

import collections
import decimal
import fractions
import functools
import inspect
import itertools
import operator
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc

from actorrpc import errors, rpc
from tests.announced import TORCHSCRIPT
from tests.migration.rows import row
from tests.ranks import rpc_group, run_group, unused_path

pytestmark = pytest.mark.prints(TORCHSCRIPT)

_TINY = 0.05  # a time-out that must expire

# -- called functions and classes ----------------------------------------------------------------


def none() -> None:
    return None


def defaults(a: Any, b: Any = 2, *rest: Any, c: Any = 3, **more: Any) -> tuple[Any, ...]:
    return a, b, rest, c, tuple(sorted(more.items()))


def keyword_only(*, x: int, y: int = 5) -> int:
    return x * y


def positional_only(x: int, y: int, /) -> int:
    return x - y


def halves(numbers: list[int]) -> dict[str, Any]:
    middle = len(numbers) // 2
    return {"low": numbers[:middle], "high": tuple(numbers[middle:]), "set": set(numbers)}


@torch.jit.script
def script_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.add(x, y)


@torch.jit.script
def script_default(x: torch.Tensor, scale: int = 3) -> torch.Tensor:
    return x * scale


@torch.jit.script
def script_raise(x: torch.Tensor) -> torch.Tensor:
    if x.numel() > 1:
        raise RuntimeError("from TorchScript")
    return x


class Account:
    """A class whose objects, methods and constructor are called."""

    kind = "current"

    def __init__(self, balance: int = 0) -> None:
        self.balance = balance

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Account) and other.balance == self.balance

    def __call__(self, times: int) -> int:
        return self.balance * times

    def deposit(self, amount: int, *, twice: bool = False) -> int:
        self.balance += amount * (1 + twice)
        return self.balance

    @staticmethod
    def static(x: int) -> int:
        return x + 1

    @classmethod
    def make(cls, balance: int) -> Account:
        return cls(balance)

    class Inner:
        """A class in a class."""

        def __init__(self, x: int) -> None:
            self.x = x

        def get(self) -> int:
            return self.x


Point = collections.namedtuple("Point", ["x", "y"])


class Plain(Exception):
    pass


class Detailed(Exception):
    """Cannot be created from its text alone, so torch's RPC cannot raise it at the caller."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.hint = hint


class Both(RuntimeError, KeyError):
    """An exception with two bases of compatible layouts."""


def throw(cls: type[BaseException], *args: Any) -> Any:
    raise cls(*args)


def throw_detailed(code: int, hint: str) -> Any:
    raise Detailed(code, hint=hint)


def throw_chained() -> Any:
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("while looking") from error


def asserts(value: Any) -> None:
    assert value, "the value is false"


def returns_type() -> type:
    return Account


def returns_function() -> Callable[..., Any]:
    return defaults


def module_forward(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(x)


# -- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def _table() -> list[Scenario]:
    torch.manual_seed(0)
    ones = torch.ones(2, 3)
    counting = torch.arange(6).view(2, 3)
    linear = torch.nn.Linear(3, 2)
    return [
        Scenario("no arguments", none),
        Scenario("defaults", defaults, (1,)),
        Scenario("all sorts of arguments", defaults, (1, "b", 7.5, None), {"c": [1], "extra": {"k": b"v"}}),
        Scenario("keywords only", defaults, (), {"a": 1}),
        Scenario("keyword-only parameters", keyword_only, (), {"x": 6}),
        Scenario("positional-only parameters", positional_only, (9, 4)),
        Scenario("containers", halves, ([5, 1, 4, 2],)),
        Scenario("large text and bytes", operator.add, ("é" * 50_000, "x" * 70_000)),
        Scenario("large bytes", operator.add, (b"a" * 200_000, b"b")),
        Scenario("huge int", operator.pow, (7, 4000)),
        Scenario("complex, float", operator.mul, (1 + 2j, float("inf"))),
        Scenario("None, Ellipsis", defaults, (None, ...)),
        Scenario("builtin", min, (3, 1, 2)),
        Scenario("builtin with keyword", sorted, ([3, 1, 2],), {"reverse": True}),
        Scenario("type", int, ("ff", 16)),
        Scenario("class of the library", fractions.Fraction, (3, 6)),
        Scenario("class in C", decimal.Decimal, ("1.50",)),
        Scenario("class of the user", Account, (5,)),
        Scenario("class with keyword", Account, (), {"balance": 8}),
        Scenario("namedtuple", Point, (1, 2)),
        Scenario("bound method", Account(10).deposit, (5,), {"twice": True}),
        Scenario("method by its class", Account.deposit, (Account(1), 2)),
        Scenario("static method", Account.static, (1,)),
        Scenario("class method", Account.make, (4,)),
        Scenario("method of an inner class", Account.Inner(7).get),
        Scenario("callable object", Account(3), (4,)),
        Scenario("method of a builtin object", "a-b-c".split, ("-",)),
        Scenario("unbound method of a builtin", str.upper, ("abc",)),
        Scenario("partial", functools.partial(defaults, 1, c=9), (5,)),
        Scenario("itemgetter", operator.itemgetter(1), ([1, 2, 3],)),
        Scenario("a class as argument and result", returns_type),
        Scenario("a function as argument", functools.reduce, (operator.mul, [1, 2, 3, 4])),
        Scenario("a function as result", returns_function),
        Scenario("torch.add", torch.add, (ones, 1)),
        Scenario("torch.add of tensors with keyword", torch.add, (ones, ones), {"alpha": 3}),
        Scenario("torch.matmul", torch.matmul, (ones, ones.t())),
        Scenario("torch.zeros", torch.zeros, (2, 2)),
        Scenario("torch.zeros of a shape", torch.zeros, ((2, 2),)),
        Scenario("torch.split", torch.split, (torch.arange(10), 4)),
        Scenario("torch.nn.functional", torch.nn.functional.relu, (counting - 3,)),
        Scenario("method of a tensor", ones.mul, (2,)),
        Scenario("unbound method of a tensor", torch.Tensor.view, (counting, 3, 2)),
        Scenario("script function", script_add, (ones, ones)),
        Scenario("script function with default", script_default, (ones,)),
        Scenario("script function with keyword", script_default, (ones,), {"scale": 5}),
        Scenario("nn.Module as argument", module_forward, (linear, ones)),
        Scenario("nn.Module as function", torch.nn.Flatten(), (counting.view(1, 2, 3),)),
        Scenario("tensors in containers", defaults, ({"a": ones, "b": [counting]},)),
        # -- errors
        Scenario("ValueError", throw, (ValueError, "v")),
        Scenario("TypeError", throw, (TypeError, "t")),
        Scenario("KeyError", throw, (KeyError, "k")),
        Scenario("RuntimeError", throw, (RuntimeError, "r")),
        Scenario("user's exception", throw, (Plain, "p")),
        Scenario("mixed exception", throw, (Both, "b")),
        Scenario("OSError", throw, (OSError, "o")),
        Scenario("FileNotFoundError", open, ("/no/such/file",)),
        Scenario("ZeroDivisionError", operator.truediv, (1, 0)),
        Scenario("StopIteration", next, (iter([]),)),
        Scenario("NotImplementedError", throw, (NotImplementedError,)),
        Scenario("AssertionError", asserts, (0,)),
        Scenario("AttributeError", getattr, (1, "nothing")),
        Scenario("chained", throw_chained),
        Scenario("wrong number of arguments", positional_only, (1,)),
        Scenario("unexpected keyword", keyword_only, (), {"x": 1, "z": 2}),
        Scenario("torch's own error", torch.matmul, (ones, ones)),
        Scenario("error in TorchScript", script_raise, (ones,)),
        Scenario("UnicodeDecodeError", b"\xff".decode, ("utf-8",)),
        Scenario("arguments of an exception", throw_detailed, (4, "look")),
        Scenario("a text longer than a chunk", throw, (LookupError, "x" * (3 << 20))),
        Scenario("StopAsyncIteration", throw, (StopAsyncIteration, 3)),
        Scenario("group", throw, (ExceptionGroup, "g", [ValueError(1), KeyError(2)])),
        Scenario("SystemExit", throw, (SystemExit, 3)),
        Scenario("KeyboardInterrupt", throw, (KeyboardInterrupt,)),
        # -- by value
        Scenario("lambda", lambda a: a * 2, (21,)),
        Scenario("closure", _closure(3), (4,)),
        Scenario("local class", _local_class(), (5,)),
        Scenario("method of a local class", _local_class()(6).get),
        Scenario("lambda as argument", functools.reduce, (lambda a, b: a - b, [10, 3])),
        Scenario("recursive closure", _recursive(), (6,)),
    ]


def _closure(factor: int) -> Callable[[int], int]:
    def times(x: int) -> int:
        return x * factor

    return times


def _recursive() -> Callable[[int], int]:
    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n else 1

    return factorial


@functools.cache
def _local_class() -> Any:
    class Local:
        def __init__(self, x: int) -> None:
            self.x = x

        def get(self) -> int:
            return self.x

        def __eq__(self, other: object) -> bool:
            return type(other).__qualname__ == type(self).__qualname__ and getattr(other, "x", None) == self.x

    return Local


def same(a: Any, b: Any) -> bool:
    """Compare with types; tensors by value, dtype and shape."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b) and type(a).__qualname__ != type(b).__qualname__:
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _check_error(error: errors.RemoteError, local: BaseException, label: str) -> None:
    """Compare type, arguments, attributes and cause with the error of the local call."""
    assert isinstance(error, RuntimeError), label
    assert type(error.cause) is type(local), label
    if not isinstance(local, Exception):
        assert error.cause.args == local.args, label  # the original exception would end the caller
        return
    assert isinstance(error, type(local)), label
    assert error.maybe_executed is True, label
    if not isinstance(local, BaseExceptionGroup):
        assert (error.args, str(error)) == (local.args, str(local)), label
    for name in ("code", "hint", "errno", "filename", "value", "reason", "name"):
        if hasattr(local, name):
            assert getattr(error, name) == getattr(local, name), (label, name)
    assert isinstance(error.__cause__, errors.RemoteTraceback), label
    assert type(local).__name__ in str(error.__cause__), label
    assert "On worker" in str(error.__cause__), label


# TorchScript includes the place of the call in its message, which differs.
_OWN_TEXT = {"error in TorchScript"}


_STYLES: dict[str, Callable[..., Any]] = {
    "rpc_sync": lambda *args: rpc.rpc_sync(*args),
    "rpc_async": lambda *args: rpc.rpc_async(*args).wait(),
    "remote": lambda *args: rpc.remote(*args).to_here(),
}


def _scenarios() -> None:
    """Compare remote calls with local calls."""
    for scenario in _table():
        local: Any = None
        local_error: BaseException | None = None
        try:
            local = scenario.func(*scenario.args, **scenario.kwargs)
        except BaseException as error:
            local_error = error
        for (style, call), to in itertools.product(_STYLES.items(), ("worker1", "worker0")):
            label = f"{scenario.name}, {style}, {to}"
            # Each call needs new arguments: some functions change their arguments.
            again = next(each for each in _table() if each.name == scenario.name)
            arguments = to, again.func, again.args, dict(again.kwargs)
            if local_error is None:
                value = call(*arguments)
                assert same(local, value), (label, local, value)
                continue
            with pytest.raises(errors.RemoteError) as caught:
                call(*arguments)
            if scenario.name not in _OWN_TEXT:
                _check_error(caught.value, local_error, label)


# -- signatures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["init_rpc", "rpc_sync", "rpc_async", "remote", "shutdown", "get_worker_info"]
)
@row("rpc.init_rpc(name", "from-torch-rpc")
def test_functions_have_torchs_parameters_and_defaults(name: str) -> None:
    ours, theirs = inspect.signature(getattr(rpc, name)), inspect.signature(getattr(torch_rpc, name))

    def shape(signature: inspect.Signature) -> list[Any]:
        return [(each.name, each.kind, each.default) for each in signature.parameters.values()]

    found = shape(ours)
    if name == "init_rpc":  # its first parameter is optional here, for use under a launcher
        assert found[0][2] is None
        found[0] = (*found[0][:2], inspect.Parameter.empty)
    assert found == shape(theirs)


_METHODS = {
    "owner": [],
    "owner_name": [],
    "is_owner": [],
    "confirmed_by_owner": [],
    "local_value": [],
    "to_here": [("timeout", -1.0)],
    "rpc_sync": [("timeout", -1.0)],
    "rpc_async": [("timeout", -1.0)],
    "remote": [("timeout", -1.0)],
    "__init__": [("value", inspect.Parameter.empty), ("type_hint", None)],
}


@pytest.mark.parametrize("name", _METHODS)
def test_methods_of_rref_have_torchs_parameters_and_defaults(name: str) -> None:
    found = list(inspect.signature(getattr(rpc.RRef, name)).parameters.values())[1:]
    assert [(each.name, each.default) for each in found] == _METHODS[name]
    # torch's methods are written in C++: their docstrings contain the parameters.
    theirs = (getattr(torch_rpc.RRef, name).__doc__ or getattr(torch_rpc.PyRRef, name).__doc__).splitlines()[
        0
    ]
    for parameter, default in _METHODS[name]:
        assert f"{parameter}: " in theirs
        assert default is inspect.Parameter.empty or f"= {default}" in theirs


# -- wrong arguments -----------------------------------------------------------------------------

_counted = 0
_lock = threading.Lock()


def count(*args: Any, **kwargs: Any) -> None:
    global _counted
    with _lock:
        _counted += 1


def counted() -> int:
    return _counted


def _bad(
    to: Any = "worker1", func: Any = count, args: Any = None, kwargs: Any = None, timeout: Any = -1.0
) -> Any:
    return to, func, args, kwargs, timeout


def _wrong_calls() -> list[tuple[str, Any, tuple[type[BaseException], ...], str]]:
    lock = threading.Lock()
    return [
        ("unknown name", _bad("worker9"), (errors.UnknownWorkerError, RuntimeError), "worker0, worker1"),
        ("unknown rank", _bad(7), (errors.UnknownWorkerError, RuntimeError), "7"),
        ("negative rank", _bad(-1), (errors.UnknownWorkerError, RuntimeError), "-1"),
        ("unknown info", _bad(rpc.WorkerInfo("other", 1)), (errors.UnknownWorkerError,), "other"),
        ("empty name", _bad(""), (errors.UnknownWorkerError,), "worker0"),
        ("no worker", _bad(None), (TypeError, ValueError), "NoneType"),
        ("float as worker", _bad(1.0), (TypeError, ValueError), "float"),
        ("bool as worker", _bad(True), (TypeError, ValueError), "bool"),
        ("list as worker", _bad(["worker1"]), (TypeError, ValueError), "list"),
        ("no function", _bad(func=None), (TypeError,), "callable"),
        ("a name as function", _bad(func="count"), (TypeError,), "callable"),
        ("args is no tuple", _bad(args=5), (TypeError,), "args"),
        ("args is a str", _bad(args="ab"), (TypeError,), "args"),
        ("args is a tensor", _bad(args=torch.ones(2)), (TypeError,), "args"),
        ("args is a dict", _bad(args={"a": 1}), (TypeError,), "args"),
        ("kwargs is a list", _bad(kwargs=[1]), (TypeError,), "kwargs"),
        ("kwargs has a number", _bad(kwargs={1: 2}), (TypeError,), "kwargs"),
        ("negative timeout", _bad(timeout=-2), (ValueError,), "timeout"),
        ("timeout is a str", _bad(timeout="1"), (TypeError, ValueError), "timeout"),
        ("timeout is None", _bad(timeout=None), (TypeError, ValueError), "timeout"),
        ("timeout is NaN", _bad(timeout=float("nan")), (ValueError,), "timeout"),
        ("timeout is True", _bad(timeout=True), (TypeError, ValueError), "timeout"),
        ("a lock in args", _bad(args=(1, {"key": [lock]})), (errors.SerializationError, TypeError), "lock"),
        ("a lock in kwargs", _bad(kwargs={"name": lock}), (errors.SerializationError, TypeError), "lock"),
        ("a generator", _bad(args=((i for i in range(3)),)), (errors.SerializationError,), "generator"),
        ("a method of a lock", _bad(func=lock.acquire), (errors.SerializationError,), "lock"),
        ("a future", _bad(args=(rpc.Future(),)), (errors.SerializationError, TypeError), "Future"),
    ]


def _wrong() -> None:
    for name, arguments, types, text in _wrong_calls():
        for style in ("rpc_sync", "rpc_async", "remote"):
            with pytest.raises(types[0], match=text) as caught:
                getattr(rpc, style)(*arguments)
            assert all(isinstance(caught.value, each) for each in types), (name, style)
            if errors.SerializationError in types:
                assert caught.value.maybe_executed is False, (name, style)  # type: ignore[attr-defined]
    for wrong in (3.0, [], b"worker1"):
        with pytest.raises((TypeError, ValueError)):
            rpc.get_worker_info(wrong)  # type: ignore[arg-type]
    assert rpc.rpc_sync("worker1", counted) == 0
    # The connection still works.
    rpc.rpc_sync("worker1", count)
    assert rpc.rpc_sync("worker1", counted) == 1
    for to in (1.0, True):  # equal to a known rank
        with pytest.raises((TypeError, ValueError)):
            rpc.rpc_sync(to, count)  # type: ignore[arg-type]


# -- names and ranks of workers ------------------------------------------------------------------


def name_here() -> str:
    return rpc.get_worker_info().name


def _workers(rank: int) -> None:
    me = rpc.get_worker_info()
    assert (me.name, me.id) == (f"worker{rank}", rank)
    assert (
        repr(me) == repr(torch_rpc.WorkerInfo(me.name, rank)) == f"WorkerInfo(id={rank}, name=worker{rank})"
    )
    assert rpc.get_worker_info(me.name) == me == rpc.WorkerInfo(name=me.name, id=rank)
    assert me != rpc.WorkerInfo(me.name, 2)
    other = rpc.get_worker_info(f"worker{1 - rank}")
    assert other != me
    assert len({me, other, rpc.get_worker_info("worker0")}) == 2
    assert [info.id for info in rpc.get_worker_infos()] == [0, 1]
    for to in ("worker1", 1, rpc.get_worker_info("worker1"), torch_rpc.WorkerInfo("worker1", 1)):
        assert rpc.rpc_sync(to, name_here) == "worker1"  # type: ignore[arg-type]
    for to in ("worker0", 0, rpc.get_worker_info("worker0")):
        assert rpc.rpc_sync(to, name_here) == "worker0"
    # A WorkerInfo can be sent.
    assert rpc.rpc_sync(other, defaults, (me, other))[:2] == (me, other)
    with pytest.raises(errors.UnknownWorkerError, match="worker0, worker1"):
        rpc.get_worker_info("nobody")
    # args may be any sequence, as in torch.
    assert rpc.rpc_sync(other, operator.add, [1, 2]) == 3  # type: ignore[arg-type]
    assert rpc.rpc_sync(other, none, (), {}) is None
    assert rpc.rpc_sync(other, keyword_only, kwargs=collections.OrderedDict(x=2)) == 10
    assert isinstance(rpc.rpc_async(other, none), torch.futures.Future)
    # Exceptions may be results and arguments.
    kept = rpc.rpc_sync(other, defaults, (ValueError("no error"),))[0]
    assert type(kept) is ValueError
    assert kept.args == ("no error",)


# -- arguments are copied when the call is made --------------------------------------------------


def echo(value: Any) -> Any:
    return value


def change(items: list[int], tensor: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    items.append(-1)
    tensor.add_(100)
    return items, tensor


def _copies() -> None:
    for to in ("worker1", "worker0"):
        for size in (3, 50_000, 600_000):
            items, tensor = [1], torch.arange(size)
            future = rpc.rpc_async(to, change, (items, tensor))
            tensor.fill_(-7)
            items.append(2)
            there, filled = future.wait()
            assert there == [1, -1]
            assert torch.equal(filled, torch.arange(size) + 100)
            # The callee works on a copy, even on the worker of the caller.
            assert items == [1, 2]
            assert bool((tensor == -7).all())
        array = bytearray(b"x" * 100_000)
        pending = rpc.rpc_async(to, bytes, (array,))
        array[:] = b"y" * 100_000
        assert pending.wait() == b"x" * 100_000


# -- nesting, time-outs --------------------------------------------------------------------------

_gate = threading.Event()


def wait_for_gate() -> str:
    assert _gate.wait(30)
    return "open"


def open_gate() -> None:
    _gate.set()


def close_gate() -> None:
    _gate.clear()


def ping_pong(depth: int) -> list[str]:
    here = name_here()
    if depth == 0:
        return [here]
    there = "worker1" if here == "worker0" else "worker0"
    return [here, *rpc.rpc_sync(there, ping_pong, (depth - 1,))]


def chain_of_errors(depth: int) -> None:
    if depth == 0:
        raise LookupError("at the bottom")
    rpc.rpc_sync("worker1" if rpc.get_worker_info().id == 0 else "worker0", chain_of_errors, (depth - 1,))


def call_gate_there(to: str) -> str:
    return rpc.rpc_sync(to, wait_for_gate)


def _nested() -> None:
    assert rpc.rpc_sync("worker1", ping_pong, (40,)) == ["worker1", "worker0"] * 20 + ["worker1"]
    assert rpc.rpc_sync("worker0", ping_pong, (21,)) == ["worker0", "worker1"] * 11
    futures = [rpc.rpc_async("worker1", ping_pong, (10,)) for _ in range(20)]
    assert all(future.wait() == ["worker1", "worker0"] * 5 + ["worker1"] for future in futures)
    with pytest.raises(LookupError, match="at the bottom") as caught:
        rpc.rpc_sync("worker1", chain_of_errors, (3,))
    assert isinstance(caught.value, errors.RemoteError)
    assert caught.value.args == ("at the bottom",)


def _timeouts() -> None:
    assert rpc.get_rpc_timeout() == 7.5
    for to in ("worker1", "worker0"):
        rpc.rpc_sync(to, close_gate)
        rpc.rpc_sync("worker1", close_gate)
        for call in (
            lambda to=to: rpc.rpc_sync(to, wait_for_gate, timeout=_TINY),
            lambda to=to: rpc.rpc_async(to, wait_for_gate, timeout=_TINY).wait(),
            lambda to=to: rpc.rpc_sync(to, call_gate_there, ("worker1",), timeout=_TINY),
            lambda to=to: rpc.remote(to, wait_for_gate).to_here(timeout=_TINY),
        ):
            with pytest.raises(TimeoutError) as caught:
                call()
            assert isinstance(caught.value, RuntimeError)
            assert isinstance(caught.value, errors.RpcTimeoutError)
            assert caught.value.maybe_executed is not False
            assert "RPC ran for more than" in str(caught.value)
        timed_out = threading.Event()
        future = rpc.rpc_async(to, wait_for_gate, timeout=_TINY)
        future.add_done_callback(lambda _, ended=timed_out: ended.set())
        assert timed_out.wait(30)  # although no thread waits for the future itself
        assert isinstance(future.exception(), errors.RpcTimeoutError)
        # The time-out of wait() ends the wait, not the call.
        future = rpc.rpc_async(to, wait_for_gate, timeout=0)
        with pytest.raises(TimeoutError):
            future.wait(_TINY)
        assert not future.done()
        rref = rpc.remote(to, wait_for_gate)
        with pytest.raises(TimeoutError):
            rref.to_here(_TINY)
        rpc.rpc_sync(to, open_gate)
        rpc.rpc_sync("worker1", open_gate)
        assert future.wait() == "open"
        assert rref.to_here(timeout=0) == "open"
        assert rpc.rpc_sync(to, wait_for_gate, timeout=float("inf")) == "open"


def _calls(rank: int, world_size: int) -> None:
    _workers(rank)
    if rank == 0:
        _copies()
        _nested()
        _timeouts()
        _wrong()
        _scenarios()


@row("rpc.rpc_sync, rpc.rpc_async", "from-torch-rpc")
@row("a remote exception is", "from-torch-rpc")
@row("nested and cyclic calls", "from-torch-rpc")
@row("functions must be importable", "from-torch-rpc")
@row("large tensors on one host", "from-torch-rpc")
def test_calls_return_and_raise_like_local_calls_and_wrong_calls_are_refused() -> None:
    rpc_group(_calls, 2, options={"rpc_timeout": 7.5})


# -- before and after ----------------------------------------------------------------------------


def _not_initialised() -> None:
    assert not rpc.is_initialized()
    for call in (
        lambda: rpc.rpc_sync("worker0", none),
        lambda: rpc.rpc_async("worker0", none),
        lambda: rpc.remote("worker0", none),
        lambda: rpc.get_worker_info(),
        lambda: rpc.get_rpc_timeout(),
        lambda: rpc.RRef(1),
    ):
        with pytest.raises(errors.NotInitializedError, match="RPC has not been initialized") as caught:
            call()
        assert isinstance(caught.value, RuntimeError)
    rpc.shutdown()  # unlike torch's, it does not raise, so that it may be called in any `finally`
    rpc.shutdown(graceful=False)


def _lives(rank: int, world_size: int, path: str) -> None:
    _not_initialised()
    for life in range(3):
        options = rpc.RpcBackendOptions(init_method=f"file://{path}{life}")
        name = f"{'abc'[life]}-{rank}"
        rpc.init_rpc(name, rpc.BackendType.TENSORPIPE, rank, world_size, options)
        assert rpc.is_initialized()
        assert rpc.get_rpc_timeout() == 60.0
        with pytest.raises(RuntimeError, match="RPC is already initialized"):
            rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
        for bad in (-1, "x", None, float("nan")):
            with pytest.raises((TypeError, ValueError), match="timeout"):
                rpc.shutdown(timeout=bad)  # type: ignore[arg-type]
        assert rpc.is_initialized()
        rref = rpc.remote(1 - rank, echo, (life,))
        assert rref.to_here() == life
        future = rpc.rpc_async(1 - rank, echo, (life,))
        assert future.wait() == life
        rpc.shutdown(timeout=(0, 30, 30.0)[life])
        assert future.value() == life
        for call in (
            lambda rref=rref: rref.to_here(),
            lambda rref=rref: rref.rpc_sync().bit_length(),
            lambda rref=rref: rref.rpc_async().bit_length(),
            lambda rref=rref: rref.remote().bit_length(),
        ):
            with pytest.raises(errors.RpcError):
                call()
        assert "RRef" in repr(rref)
        _not_initialised()


@row("a second group in one process", "from-torch-rpc")
def test_a_process_may_join_several_groups_one_after_the_other() -> None:
    run_group(_lives, 2, unused_path("lives"))
