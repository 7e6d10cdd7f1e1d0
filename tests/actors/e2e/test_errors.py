"""Errors in actors, as their callers see them: constructors, methods, arguments, results, long exceptions."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import actorrpc
from actorrpc.errors import SerializationError
from tests.migration.rows import row

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(20)]


class Odd(Exception):
    """An exception that cannot be created from its args."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class Unpicklable:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("sealed")


class OnlyHere:
    """Is rebuilt from a module that does not exist."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("only_here",)


def test_an_actor_whose_module_is_missing_names_worker_host_and_remedy() -> None:
    with pytest.raises(actorrpc.ActorDiedError) as caught:
        actorrpc.get(Faulty.remote(OnlyHere()).ping.remote())
    worker, host, text = caught.value.worker, socket.gethostname(), str(caught.value)
    assert f"could not be made on worker {worker!r}: " in text
    assert f"No module named 'only_here', in a process on host {host!r}" in text
    assert "install the module on that host" in text


@actorrpc.remote
class Faulty:
    def __init__(self, broken: str = "", how: str = "") -> None:
        if broken:
            raise KeyError(broken)
        if how:
            self.base(how)
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
        if kind == "exit_actor":
            actorrpc.exit_actor()
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

    def sealed_error(self) -> Any:
        raise ValueError(Unpicklable())

    def leaving(self) -> Any:
        return ExitsWhenUnpickled()

    def leaving_items(self) -> Any:
        yield ExitsWhenUnpickled()

    def local_class(self) -> Any:
        class Local(Exception):
            pass

        raise Local("from a local class")


# -- the constructor ---------------------------------------------------------------------------------------------


def test_an_error_of_the_constructor_is_the_cause_of_every_failed_call() -> None:
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
        assert caught.value.__cause__ is caught.value.cause
        assert caught.value.maybe_executed is False
        assert "__init__" in str(caught.value.__cause__.__cause__)  # the traceback on the other worker
    with pytest.raises(actorrpc.ActorDiedError) as caught:
        actorrpc.get(actorrpc.ready(actor))
    assert isinstance(caught.value.cause, KeyError)
    assert not actorrpc.is_alive(actor)
    assert isinstance(actorrpc.monitor(actor).wait(10), actorrpc.ActorDiedError)
    del caught


@pytest.mark.parametrize("how", ["exit", "interrupt", "exit_actor"])
def test_a_constructor_that_exits_leaves_a_dead_actor(how: str) -> None:
    actor = Faulty.remote(how=how)
    with pytest.raises(actorrpc.ActorDiedError):
        actorrpc.get(actor.ping.remote())


def test_an_actor_whose_constructor_argument_failed_is_dead() -> None:
    failing = Faulty.remote()
    actor = Faulty.remote(failing.boom.remote("of the argument"))
    with pytest.raises(actorrpc.ActorDiedError, match="of the argument"):
        actorrpc.get(actor.ping.remote())


# -- exceptions of methods -----------------------------------------------------------------------------------------


@row("RayTaskError, also an instance of the user's type", "from-ray")
def test_a_remote_exception_is_a_remote_error_and_has_the_original_type() -> None:
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


@pytest.mark.parametrize("method", ["base", "async_base"])
def test_base_exceptions_of_methods_do_not_end_the_worker(method: str) -> None:
    actor = Faulty.remote()
    names = {"interrupt": "KeyboardInterrupt", "generator": "GeneratorExit", "stop": "", "base": ""}
    for kind, name in names.items():
        with pytest.raises(actorrpc.RemoteError) as caught:
            actorrpc.get(getattr(actor, method).remote(kind))
        assert name in str(caught.value) + caught.value.type_name
        assert actorrpc.get(actor.ping.remote()) == "pong"
        del caught


# -- arguments and results -------------------------------------------------------------------------------------------


def test_an_unpicklable_argument_raises_at_the_call_even_before_the_actor_exists() -> None:
    actor = Faulty.remote()
    with pytest.raises(SerializationError):
        actor.give.remote(Unpicklable())
    assert actorrpc.get(actor.ping.remote()) == "pong"


class ExitsWhenUnpickled:
    """Calls sys.exit() where it is unpickled."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def test_sys_exit_during_unpickling_is_a_serialization_error() -> None:
    actor = Faulty.remote()
    for call in (
        lambda: actorrpc.get(actor.leaving.remote()),
        lambda: actorrpc.get(actorrpc.put(ExitsWhenUnpickled())),
        lambda: actorrpc.get(actor.give.remote(ExitsWhenUnpickled())),
        lambda: actorrpc.get(actor.give.remote(actorrpc.put(ExitsWhenUnpickled()))),
        lambda: [actorrpc.get(ref) for ref in actor.leaving_items.remote()],
    ):
        with pytest.raises(SerializationError, match="SystemExit: 3"):
            call()
    never = Faulty.remote(ExitsWhenUnpickled())
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


def test_an_undetected_generator_method_raises_an_error_that_names_the_option() -> None:
    actor, on_loop = Decorated.remote(), DecoratedOnLoop.remote()
    by_option = r'call it with \.options\(num_returns="streaming"\)'
    by_wrapper = "have the decorator's wrapper be an async generator function"
    for method, advice in (
        (actor.plain, by_option),
        (on_loop.plain, by_option),
        (actor.coroutine, by_wrapper),
    ):
        with pytest.raises(SerializationError, match=advice):
            actorrpc.get(method.remote())
    for method in (actor.plain, on_loop.plain, on_loop.coroutine):
        assert list(method.options(num_returns="streaming").remote().values()) == [1]
    with pytest.raises(TypeError, match=by_wrapper):
        list(actor.coroutine.options(num_returns="streaming").remote().values())


def test_a_name_defined_after_its_class_was_sent_raises_with_a_hint() -> None:
    space: dict[str, Any] = {"__name__": "__main__", "actorrpc": actorrpc}
    exec("@actorrpc.remote\nclass Cell:\n    def call(self):\n        return helper()", space)
    actor = space["Cell"].remote()
    with pytest.raises(NameError, match="helper") as caught:
        actorrpc.get(actor.call.remote())
    assert "run the class statement (in a notebook, its cell) again" in caught.value.__notes__[0]
    del caught


# -- exceptions that are longer than one chunk of a message (1 MiB) ------------------------------------------

_LONG = 3 << 20


class Big(Exception):
    """A user's exception with an attribute."""

    data: Any = None


def _long_error() -> BaseException:
    big = Big(b"y" * _LONG)
    big.data = np.arange(_LONG // 8)
    group = ExceptionGroup("several", [big, ValueError(1)])
    group.add_note("z" * _LONG)
    return group


def _too_long_error() -> BaseException:
    return Big("x" * (20 << 20))


def _check_long_error(error: BaseException) -> None:
    assert isinstance(error, ExceptionGroup)
    big, plain = error.exceptions
    assert isinstance(big, Big)
    assert isinstance(plain, ValueError)
    assert big.args == (b"y" * _LONG,)
    assert np.array_equal(big.data, np.arange(_LONG // 8))
    assert error.__notes__ == ["z" * _LONG]


def _check_too_long_error(error: BaseException) -> None:
    assert isinstance(error, Big)
    assert len(str(error)) < 10_000
    assert "characters left out" in str(error)
    assert error.__notes__[0].endswith("as it cannot be sent whole: args[0]")


@actorrpc.remote
class Failing:
    def __init__(self, error: Any = None) -> None:
        if error:
            raise error()

    def plain(self, error: Any) -> None:
        raise error()

    async def coroutine(self, error: Any) -> None:
        raise error()

    def stream(self, error: Any) -> Iterator[int]:
        yield 1
        raise error()

    async def async_stream(self, error: Any) -> AsyncIterator[int]:
        yield 1
        raise error()


@actorrpc.remote
def failing(error: Any) -> None:
    raise error()


@pytest.mark.limit(60)
@pytest.mark.parametrize(
    ("error", "check"), [(_long_error, _check_long_error), (_too_long_error, _check_too_long_error)]
)
def test_long_exceptions_keep_their_class_and_as_much_as_can_be_sent(error: Any, check: Any) -> None:
    actor = Failing.remote()
    for way in (
        lambda: actorrpc.get(failing.remote(error)),
        lambda: actorrpc.get(actor.plain.remote(error)),
        lambda: actorrpc.get(actor.coroutine.remote(error)),
        lambda: actor.rpc_sync().plain(error),
        lambda: list(actor.stream.remote(error).values()),
        lambda: list(actor.async_stream.remote(error).values()),
    ):
        with pytest.raises(actorrpc.RemoteError) as caught:
            way()
        check(caught.value)
    with pytest.raises(actorrpc.ActorDiedError) as died:
        actorrpc.get(actorrpc.ready(Failing.remote(error)))
    assert died.value.cause is not None
    check(died.value.cause)
    del caught, died
