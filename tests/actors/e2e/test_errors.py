"""What goes wrong in an actor, and how its callers hear of it."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc.errors import ConfigError, SerializationError
from tests.actors.e2e.kit import open_gate, pass_gate, until

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


class Odd(Exception):
    """A user's exception that cannot be made from its args."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class Sealed:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("sealed")


@actorrpc.remote
class Faulty:
    def __init__(self, broken: str = "") -> None:
        if broken:
            raise KeyError(broken)
        self.calls = 0

    def ping(self) -> str:
        self.calls += 1
        return "pong"

    def boom(self, what: str) -> None:
        raise ValueError(what)

    def odd(self) -> None:
        raise Odd(7, detail="of the user")

    def chained(self) -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise RuntimeError("outer") from error

    def base(self, kind: str) -> None:
        if kind == "exit":
            sys.exit(3)
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "generator":
            raise GeneratorExit
        if kind == "stop":
            raise StopIteration(4)
        raise BaseException("of the user")

    async def async_base(self, kind: str) -> None:
        self.base(kind)

    def give(self, what: Any) -> Any:
        return what

    def sealed(self) -> Any:
        return [1, Sealed()]

    def sealed_error(self) -> Any:
        raise ValueError(Sealed())

    def leaving(self) -> Any:
        return Leaving()

    def leaving_items(self) -> Any:
        yield Leaving()

    def lock(self) -> Any:
        return threading.Lock()

    def huge(self, count: int) -> Any:
        return torch.arange(count)

    def local_class(self) -> Any:
        class Local(Exception):
            pass

        raise Local("from a local class")


class Collecting(Exception):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []


@actorrpc.remote
def collecting(_: Any = None) -> None:
    raise Collecting


class Kept:
    pass


def _collected(reference: Any) -> None:
    """Wait until an object is collected: another thread may be about to drop the call."""

    def is_collected() -> bool:
        gc.collect()
        return reference() is None

    until(is_collected)


def test_an_error_that_its_reader_gives_the_reference_keeps_nothing() -> None:
    def read() -> Any:
        here = Kept()
        ref = collecting.remote()
        with pytest.raises(Collecting) as caught:
            actorrpc.get(ref)
        caught.value.values += (ref, here)
        return weakref.ref(here)

    _collected(read())


def test_raising_the_error_of_an_argument_and_that_of_its_task_keeps_nothing() -> None:
    def read() -> Any:
        here = Kept()
        actor = Faulty.remote("of the constructor")
        argument = actor.ping.remote()
        refs = [argument, collecting.remote(argument)]
        for ref in refs:
            with pytest.raises(actorrpc.RpcError):
                actorrpc.get(ref)
        return weakref.ref(here)

    _collected(read())


# -- the constructor ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_the_constructor_raised_reaches_every_call() -> None:
    actor = Faulty.remote("of the constructor")
    early = actor.ping.remote()
    for call in (
        lambda: actorrpc.get(early),
        lambda: actorrpc.get(actor.ping.remote()),
        actor.rpc_sync().ping,
    ):
        with pytest.raises(actorrpc.ActorDiedError, match="of the constructor") as caught:
            call()
        assert isinstance(caught.value.cause, KeyError)
        assert isinstance(caught.value.__cause__, KeyError)
        assert "__init__" in str(caught.value.__cause__.__cause__)  # the traceback of the other worker
    with pytest.raises(actorrpc.ActorDiedError) as caught:
        actorrpc.get(actorrpc.ready(actor))
    assert isinstance(caught.value.cause, KeyError)
    assert not actorrpc.is_alive(actor)
    assert isinstance(actorrpc.monitor(actor).wait(10), actorrpc.ActorDiedError)
    del caught


@actorrpc.remote
class Exits:
    def __init__(self, how: str) -> None:
        if how == "exit":
            sys.exit(5)
        if how == "exit_actor":
            actorrpc.exit_actor()
        raise KeyboardInterrupt

    def ping(self) -> None: ...


@pytest.mark.parametrize("how", ["exit", "interrupt", "exit_actor"])
def test_a_constructor_that_wants_to_leave(how: str) -> None:
    actor = Exits.remote(how)
    with pytest.raises(actorrpc.ActorDiedError):
        actorrpc.get(actor.ping.remote())


def test_a_constructor_whose_argument_failed() -> None:
    failing = Faulty.remote()
    actor = Faulty.remote(failing.boom.remote("of the argument"))
    with pytest.raises(actorrpc.ActorDiedError, match="of the argument"):
        actorrpc.get(actor.ping.remote())


# -- exceptions of methods -----------------------------------------------------------------------------------------


def test_exceptions_have_both_types() -> None:
    actor = Faulty.remote()
    ref = actor.boom.remote("both")
    with pytest.raises(ValueError, match="both") as caught:
        actorrpc.get(ref)
    error = caught.value
    assert isinstance(error, actorrpc.RemoteError)
    assert isinstance(error.cause, ValueError)
    assert error.cause.args == ("both",)
    assert "in boom" in error.traceback
    with pytest.raises(actorrpc.RemoteError):
        actorrpc.get(ref)  # again
    with pytest.raises(Odd) as odd:
        actorrpc.get(actor.odd.remote())
    assert (odd.value.code, odd.value.detail) == (7, "of the user")
    with pytest.raises(RuntimeError, match="outer") as outer:
        actorrpc.get(actor.chained.remote())
    assert "KeyError: 'inner'" in outer.value.traceback
    with pytest.raises(actorrpc.RemoteError, match="from a local class"):
        actorrpc.get(actor.local_class.remote())
    with pytest.raises(actorrpc.RemoteError):
        actorrpc.get(actor.sealed_error.remote())
    assert actorrpc.get(actor.ping.remote()) == "pong"
    del error, caught, odd, outer


@pytest.mark.parametrize(
    "kind",
    [
        "interrupt",
        pytest.param("generator", marks=pytest.mark.slow),
        pytest.param("stop", marks=pytest.mark.slow),
        "base",
    ],
)
@pytest.mark.parametrize("method", ["base", "async_base"])
def test_no_exception_ends_the_worker(method: str, kind: str) -> None:
    actor = Faulty.remote()
    with pytest.raises(actorrpc.RemoteError) as caught:
        actorrpc.get(getattr(actor, method).remote(kind))
    names = {"interrupt": "KeyboardInterrupt", "generator": "GeneratorExit"}
    if kind in names:
        assert names[kind] in str(caught.value) + caught.value.type_name
    assert actorrpc.get(actor.ping.remote()) == "pong"
    del caught


# -- arguments and results -------------------------------------------------------------------------------------------


def test_an_argument_that_cannot_be_sent() -> None:
    actor = Faulty.remote()
    actorrpc.get(actor.ping.remote())
    for bad in (Sealed(), [Sealed()], threading.Lock(), {"x": threading.Lock()}):
        with pytest.raises(SerializationError):
            actor.give.remote(bad)
        with pytest.raises(SerializationError):
            actor.rpc_sync().give(bad)
        with pytest.raises(SerializationError):
            Faulty.remote(bad)
        with pytest.raises(SerializationError):
            actorrpc.put(bad)
    assert actorrpc.get(actor.ping.remote()) == "pong"


def test_an_argument_that_cannot_be_sent_while_the_actor_is_made() -> None:
    actor = Faulty.remote()
    with pytest.raises(SerializationError):
        actor.give.remote(Sealed())
    assert actorrpc.get(actor.ping.remote()) == "pong"


def test_a_result_that_cannot_be_sent() -> None:
    actor = Faulty.remote()
    for method in ("sealed", "lock"):
        with pytest.raises(SerializationError, match=method):
            actorrpc.get(getattr(actor, method).remote())
        with pytest.raises(SerializationError):
            getattr(actor.rpc_sync(), method)()
    assert actorrpc.get(actor.ping.remote()) == "pong"


@pytest.mark.slow
def test_a_huge_result() -> None:
    actor = Faulty.remote()
    count = 20_000_000  # 160 MB
    found = actorrpc.get(actor.huge.remote(count))
    assert int(found[-1]) == count - 1
    assert actor.rpc_sync().huge(3_000_000).numel() == 3_000_000


class Leaving:
    """Calls sys.exit() where it is unpickled."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def test_unpickling_that_exits_ends_nothing() -> None:
    actor = Faulty.remote()
    for call in (
        lambda: actorrpc.get(actor.leaving.remote()),
        lambda: actorrpc.get(actorrpc.put(Leaving())),
        lambda: actorrpc.get(actor.give.remote(Leaving())),
        lambda: actorrpc.get(actor.give.remote(actorrpc.put(Leaving()))),
        lambda: [actorrpc.get(ref) for ref in actor.leaving_items.remote()],
    ):
        with pytest.raises(SerializationError, match="SystemExit: 3"):
            call()
    never = Faulty.remote(Leaving())
    with pytest.raises(actorrpc.ActorDiedError, match="SystemExit: 3"):
        actorrpc.get(never.ping.remote())
    assert actorrpc.get(actor.ping.remote()) == "pong"


def _decorated(method: Any) -> Any:
    return lambda *args: method(*args)


class Decorated(actorrpc.Actor):
    @_decorated
    def plain(self) -> Any:
        yield 1

    @_decorated
    async def coroutine(self) -> Any:
        yield 1


class DecoratedOnLoop(Decorated):
    async def ping(self) -> None: ...


@actorrpc.remote
@_decorated
def decorated_task() -> Any:
    yield 1


def _items(method: Any) -> list[Any]:
    return [actorrpc.get(ref) for ref in method.options(num_returns="streaming").remote()]


def test_generators_that_a_decorator_hides() -> None:
    actor, on_loop = Decorated.remote(), DecoratedOnLoop.remote()
    for method in (actor.plain, on_loop.plain, decorated_task):
        with pytest.raises(SerializationError, match=r'call it with \.options\(num_returns="streaming"\)'):
            actorrpc.get(method.remote())
        assert _items(method) == [1]
    for method in (actor.coroutine, on_loop.coroutine):
        with pytest.raises(
            SerializationError, match="have the decorator's wrapper be an async generator function"
        ):
            actorrpc.get(method.remote())
    with pytest.raises(TypeError, match="have the decorator's wrapper be an async generator function"):
        _items(actor.coroutine)
    assert _items(on_loop.coroutine) == [1]


def test_a_name_that_was_defined_after_its_class_was_sent() -> None:
    space: dict[str, Any] = {"__name__": "__main__", "actorrpc": actorrpc}
    exec("@actorrpc.remote\nclass Cell:\n    def call(self):\n        return helper()", space)
    actor = space["Cell"].remote()
    with pytest.raises(NameError, match="helper") as caught:
        actorrpc.get(actor.call.remote())
    assert "run the class statement (of a notebook, its cell) again" in caught.value.__notes__[0]
    del caught


def test_wrong_calls_are_refused_here() -> None:
    actor = Faulty.remote()
    with pytest.raises(AttributeError, match=r"pong.*ping"):
        _ = actor.pong
    with pytest.raises(TypeError, match=r"boom\(\) missing 1 required positional argument: 'what'"):
        actor.boom.remote()
    with pytest.raises(TypeError, match="takes"):
        actor.ping.remote(1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'how'"):
        actor.ping.remote(how=1)
    with pytest.raises(TypeError, match="takes"):
        actor.rpc_sync().ping(1)
    with pytest.raises(TypeError, match="takes"):
        Faulty.remote(1, 2)
    with pytest.raises(TypeError, match=r"Faulty\.remote"):
        Faulty()
    with pytest.raises(TypeError, match=r"handle\.ping\.remote"):
        actor.ping()
    with pytest.raises(ConfigError, match="Did you mean"):
        Faulty.options(max_restart=1)
    with pytest.raises(ConfigError, match="an int of at least"):
        Faulty.options(max_restarts=-2)
    with pytest.raises(ConfigError, match="num_returns"):
        actor.ping.options(num_return=2)
    with pytest.raises(AttributeError, match="elsewhere"):
        actor.x = 1
    assert actorrpc.get(actor.ping.remote()) == "pong"


def test_num_returns() -> None:
    actor = Faulty.remote()
    first, second = actor.give.options(num_returns=2).remote((1, torch.zeros(100_000)))
    assert actorrpc.get(first) == 1
    assert actorrpc.get(second).numel() == 100_000
    assert actor.give.options(num_returns=0).remote(3) is None
    refs = actor.give.options(num_returns=3).remote((1, 2))
    for ref in refs:
        with pytest.raises(ValueError, match="num_returns"):
            actorrpc.get(ref)
    for ref in actor.give.options(num_returns=2).remote(5):
        with pytest.raises((TypeError, ValueError), match="num_returns"):
            actorrpc.get(ref)


def test_get_of_many_fails_with_the_first_failure_at_once(gate: Path) -> None:
    actor = Faulty.remote()
    other = Blocker.remote()
    slow = other.block.remote(str(gate))
    with pytest.raises(ValueError, match="early"):
        actorrpc.get([slow, actor.boom.remote("early")])
    open_gate(gate)
    assert actorrpc.get(slow) == "go"


@actorrpc.remote
class Blocker:
    def block(self, path: str) -> str:
        return pass_gate(path)


def test_timeouts_of_waits_are_typed(gate: Path) -> None:
    actor = Blocker.remote()
    slow = actor.block.remote(str(gate))
    with pytest.raises(actorrpc.GetTimeoutError):
        actorrpc.get(slow, timeout=0.01)
    with pytest.raises(TimeoutError):
        actorrpc.get([slow], timeout=0)
    ready, left = actorrpc.wait([slow], timeout=0.01)
    assert (ready, left) == ([], [slow])
    open_gate(gate)
    assert actorrpc.get(slow, timeout=20) == "go"
