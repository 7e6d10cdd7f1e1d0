"""Exceptions as results of calls: the caller gets the raised exception, however unusual its class is."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import contextlib
import copy
import dataclasses
import enum
import gc
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from actorrpc import errors
from actorrpc.errors import RemoteError, RemoteTraceback, SerializationError
from actorrpc.serialization import codec, exceptions
from actorrpc.serialization.exceptions import dump, load
from tests import unruly


def original(error: BaseException) -> Any:
    return exceptions.original(error)


def caught(error: Any) -> Any:
    try:
        raise error
    except BaseException as raised:
        return raised


def send(
    error: BaseException,
    worker: str = "callee",
    dumps: Callable[[object], bytes] = cloudpickle.dumps,
    loads: Callable[[bytes], object] = pickle.loads,
    **options: Any,
) -> Any:
    arrived = load(dump(caught(error), worker=worker, dumps=dumps, **options), loads=loads)
    assert isinstance(arrived, RemoteError)
    assert isinstance(arrived, Exception)
    assert isinstance(arrived, RuntimeError)
    cause = BaseException.__dict__["__cause__"].__get__(arrived)
    assert type(cause) is RemoteTraceback
    assert f"On worker {worker}:\n" in cause.text
    return arrived


def both(error: BaseException, **options: Any) -> Any:
    """Send an exception, and check that the result is an instance of both its class and RemoteError."""
    cls = type(error)
    arrived = send(error, **options)
    assert isinstance(arrived, cls)
    assert type(arrived) is not cls
    assert type(original(arrived)) is cls
    assert type(arrived).__name__ == cls.__name__
    assert type(arrived).__qualname__ == cls.__qualname__
    assert type(arrived).__module__ == cls.__module__
    return arrived


# -- built-in exceptions ---------------------------------------------------------------------------------


def member_values(error: BaseException) -> dict[str, object]:
    names = {*dir(OSError), *dir(ImportError), *dir(SyntaxError), *dir(UnicodeError), *dir(BlockingIOError)}
    names |= {*dir(UnicodeDecodeError), *dir(StopIteration), *dir(SystemExit), *dir(NameError)}
    names = {name for name in names if name not in dir(BaseException)}
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


def made_by(source: str) -> Callable[[], BaseException]:
    def make() -> BaseException:
        try:
            exec(source, {})
        except BaseException as error:
            return error
        raise AssertionError

    make.__name__ = source
    return make


NATURAL = [
    "open('/nonexistent/file')",
    "b'\\xff'.decode()",
    "'\\ud800'.encode()",
    "import nonexistent_module.part",
    "next(iter(()))",
    "compile('a = = b', 'file.py', 'exec')",
    "{}['missing']",
    "nonexistent",
    "object().nonexistent",
    "import json; json.loads('[1, oops]')",
    "import subprocess, sys; raise subprocess.CalledProcessError(3, ['ls'], b'out', b'err')",
    "import asyncio; raise asyncio.IncompleteReadError(b'part', 10)",
    "import configparser; raise configparser.DuplicateSectionError('s', 'f', 3)",
    "import re; re.compile('(')",
    "import xml.parsers.expat as x; x.ParserCreate().Parse('<', True)",
    "import ssl; raise ssl.SSLError(1, 'reason')",
    "raise FileNotFoundError(2, 'no', 'a', None, 'b')",
    "raise FileNotFoundError(2, 'no', '\\udcff')",
    "raise BlockingIOError(11, 'again', 7)",
    "raise ImportError('m', name='n', path='/p')",
    "raise StopIteration([1])",
    "def f(): f()\nf()",
]


@pytest.mark.parametrize("source", NATURAL)
def test_exceptions_raised_by_python_itself_arrive_equal(source: str) -> None:
    error = made_by(source)()
    arrived = both(error)
    assert str(arrived) == str(error)
    assert arrived.args == error.args
    assert repr(arrived) == repr(error)
    assert member_values(arrived) == {**member_values(error)}
    again = pickle.loads(pickle.dumps(arrived))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert len(arrived.traceback) <= exceptions.MAX_TEXT + 100


def test_the_obj_of_an_attribute_error_is_not_sent() -> None:
    class Model:
        def __reduce__(self) -> Any:
            raise AssertionError

    try:
        Model().missing  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as error:
        arrived = both(error)
    assert arrived.name == "missing"
    assert arrived.obj is None


# -- exceptions that would end the caller ----------------------------------------------------------------


@pytest.mark.parametrize("cls", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_base_exceptions_arrive_as_the_cause_of_a_remote_error(cls: type[BaseException]) -> None:
    arrived = send(cls(3))
    assert type(arrived) is RemoteError
    assert type(arrived.cause) is cls
    assert arrived.cause.args == (3,)
    assert "On worker callee:\nTraceback" in arrived.traceback
    assert cls.__name__ in str(arrived)
    onward = send(arrived, "middle")
    assert type(onward) is RemoteError
    assert type(onward.cause) is cls
    assert onward.type_name == arrived.type_name
    assert str(onward) == str(arrived)
    assert onward.worker == "callee"
    assert send(cls(3), executed=False).maybe_executed is False


# -- errors of actorrpc ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"RemoteTraceback", "RemoteError"}))
def test_errors_of_actorrpc_arrive_as_their_own_class(name: str) -> None:
    cls = getattr(errors, name)
    arrived = both(cls("text"))
    assert str(arrived) == "text"
    assert arrived.maybe_executed is True
    assert send(cls("text"), executed=False).maybe_executed is False
    assert type(pickle.loads(pickle.dumps(arrived))) is cls


def test_a_nested_peer_died_error_keeps_its_fields_and_the_outer_call_counts_as_executed() -> None:
    arrived = both(errors.PeerDiedError("gone", maybe_executed=False, worker="third"))
    assert issubclass(type(arrived), ConnectionError)
    assert arrived.maybe_executed is True
    assert arrived.worker == "third"
    assert arrived.cause.maybe_executed is False
    assert arrived.cause.worker == "third"
    onward = both(errors.RpcTimeoutError("late", maybe_executed=None, worker="x"))
    assert isinstance(onward, TimeoutError)
    twice = send(arrived, "middle")
    assert twice.cause.maybe_executed is False
    assert twice.maybe_executed is True
    again = pickle.loads(pickle.dumps(arrived))
    assert (type(again), again.maybe_executed, again.worker) == (errors.PeerDiedError, False, "third")


def test_base_classes_raised_by_user_code_arrive() -> None:
    for cls in (RemoteError, RuntimeError, Exception, errors.RpcError):
        arrived = both(cls("by hand", 2))
        assert arrived.args == ("by hand", 2)
        assert arrived.type_name.endswith(cls.__name__)


# -- unusual classes -------------------------------------------------------------------------------------


class Keyword(Exception):
    def __init__(self, *, code: int, detail: Any) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail


class Two(ValueError):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left}-{right}")
        self.left, self.right = left, right


class NewNeeds(Exception):
    def __new__(cls, code: int, text: str) -> NewNeeds:
        made = super().__new__(cls, text)
        made.code = code  # type: ignore[attr-defined]
        return made

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


class Slots(Exception):
    __slots__ = ("__private", "first", "never")

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.__private = -first

    def both(self) -> tuple[int, int]:
        return self.first, self.__private


class MoreSlots(Slots):
    __slots__ = ("first", "more")


class Trap(Exception):
    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


class Owner(Exception):
    worker = "mine"

    @property
    def cause(self) -> str:
        return "my cause"

    @property
    def traceback(self) -> str:
        return "my traceback"

    @property
    def args(self) -> Any:  # type: ignore[override]
        return "my args"

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ZeroDivisionError


@dataclasses.dataclass
class Data(Exception):
    code: int
    names: list[str]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Abstract(abc.ABC, Exception):
    @abc.abstractmethod
    def method(self) -> None: ...


class Metaclass(type):
    registered: ClassVar[list[str]] = []

    def __init__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any], *, needed: int) -> None:
        super().__init__(name, bases, space)
        Metaclass.registered.append(name)

    def __new__(mcls, name: str, bases: tuple[type, ...], space: dict[str, Any], *, needed: int) -> Metaclass:
        return super().__new__(mcls, name, bases, space)

    def __eq__(cls, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = type.__hash__


class WithMetaclass(Exception, metaclass=Metaclass, needed=1):
    pass


class Registered(Exception):
    known: ClassVar[dict[str, type]] = {}
    code = "base"

    def __init_subclass__(cls, *, code: str) -> None:
        Registered.known[code] = cls


class Special(Registered, code="special"):
    code = "special"


class Closed(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("final")


class Reducing(Exception):
    def __init__(self, code: int, secret: str = "") -> None:
        super().__init__(f"code {code}")
        self.code, self.secret = code, secret

    def __reduce__(self) -> Any:
        return type(self), (self.code,)


class WrongReduce(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(left)
        self.right = right

    def __reduce__(self) -> Any:
        return type(self), (1,)


class HugeStr(Exception):
    def __str__(self) -> str:
        return "x" * 10_000_000


class StrOfAnotherKind(Exception):
    class Text(str):
        __slots__ = ()

    def __str__(self) -> str:
        return StrOfAnotherKind.Text("text")


class Empty(Exception):
    def __len__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = None  # type: ignore[assignment]


class Diamond(KeyError, OSError):
    pass


def filled(error: Any, **attributes: Any) -> Any:
    error.__setstate__(attributes)
    return error


UNUSUAL: dict[str, Callable[[], BaseException]] = {
    "keyword": lambda: Keyword(code=3, detail={"a": [1]}),
    "two": lambda: Two(1, 2),
    "new": lambda: NewNeeds(3, "text"),
    "slots": lambda: Slots(4),
    "more slots": lambda: filled(MoreSlots(4), more=[5]),
    "trap": lambda: Trap("t"),
    "owner": lambda: Owner("o"),
    "data": lambda: Data(1, ["n"]),
    "frozen": lambda: Frozen(1),
    "abstract": lambda: Abstract("a"),  # type: ignore[abstract]
    "metaclass": lambda: WithMetaclass("m"),
    "registered": lambda: Special("s"),
    "closed": lambda: Closed("c"),
    "reducing": lambda: Reducing(3),
    "wrong reduce": lambda: WrongReduce(1, 2),
    "huge str": lambda: HugeStr("h"),
    "str": lambda: StrOfAnotherKind("k"),
    "empty": lambda: Empty("e"),
    "diamond": lambda: Diamond("d"),
    "futures": lambda: concurrent.futures.CancelledError("f"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_exception_classes_arrive_as_themselves_and_as_remote_error(name: str) -> None:
    error = UNUSUAL[name]()
    arrived = both(error)
    made: list[Any] = [arrived, original(arrived), pickle.loads(pickle.dumps(arrived)), copy.copy(arrived)]
    for other in made:
        base = BaseException.__dict__
        assert base["args"].__get__(other) == base["args"].__get__(error)
        assert base["__dict__"].__get__(other) == base["__dict__"].__get__(error)
    for other in made[1:]:
        assert type(other) is type(error)
    twice = send(arrived, "middle")
    assert type(original(twice)) is type(error)
    text = BaseException.__dict__["__cause__"].__get__(twice).text
    assert text.index("On worker callee:") < text.index("On worker middle:")
    assert text.count("On worker callee:") == 1
    assert len(text) <= exceptions.MAX_TEXT + 100


def test_unusual_exception_classes_keep_their_attributes() -> None:
    assert both(Keyword(code=3, detail=(1, 2))).detail == (1, 2)
    assert both(NewNeeds(3, "text")).code == 3
    assert both(Slots(4)).both() == (4, -4)
    assert not hasattr(both(Slots(4)), "never")
    more = both(filled(MoreSlots(4), more=[5]))
    assert more.more == [5]
    assert more.both() == (4, -4)
    owner = both(Owner("o"))
    assert (owner.worker, owner.cause, owner.traceback) == ("mine", "my cause", "my traceback")
    assert original(owner) is not owner
    assert owner.type_name == f"{__name__}.Owner"
    assert both(Data(1, ["n"])).names == ["n"]
    assert both(Frozen(2)).code == 2
    assert both(filled(ValueError(), worker="own", cause=5)).cause == 5
    assert str(both(StrOfAnotherKind())) == "text"


def test_the_class_created_for_raising_does_not_run_subclass_hooks() -> None:
    before = list(Metaclass.registered), dict(Registered.known)
    both(WithMetaclass("m"))
    both(Special("s"))
    assert before == (Metaclass.registered, Registered.known)


def test_the_reduce_method_of_an_exception_is_used() -> None:
    arrived = both(Reducing(3, secret="hidden"))
    assert arrived.code == 3
    assert arrived.secret == ""
    assert original(pickle.loads(pickle.dumps(arrived))).secret == ""


def test_exceptions_that_are_enum_members_arrive_as_a_cause() -> None:
    arrived = send(next(iter(Colour)))
    assert type(arrived) is RemoteError
    assert arrived.cause is next(iter(Colour))


class Colour(Exception, enum.Enum):
    RED = "red"
    BLUE = "blue"


def test_an_exception_class_that_cannot_be_subclassed_arrives_as_a_cause() -> None:
    class Refusing(type):
        def mro(cls) -> list[type]:
            made = super().mro()
            if len(made) > 5:
                raise ZeroDivisionError
            return made

    class Refused(Exception, metaclass=Refusing):
        pass

    arrived = send(Refused("r"), loads=cloudpickle.loads)
    assert type(arrived) is RemoteError
    assert type(arrived.cause) is Refused
    assert str(arrived).endswith("Refused: r")


def test_an_exception_with_a_metaclass_that_raises_on_any_access_arrives_as_text() -> None:
    class Hiding(type):
        def __getattribute__(cls, name: str) -> Any:
            raise SystemExit(name)

    class Hidden(Exception, metaclass=Hiding):
        pass

    error = caught(Hidden("h"))
    for dumps in (pickle.dumps, lambda _: b"anything"):
        arrived: Any = load(dump(error, worker="w", dumps=dumps), loads=lambda _: error)
        assert type(arrived) is RemoteError
        assert "Hidden" in str(arrived)
        assert "Hidden" in arrived.traceback


def test_cycles_and_shared_values_in_attributes_survive() -> None:
    error: Any = ValueError("cycle")
    other: Any = Keyword(code=1, detail=error)
    error.me, error.other, error.shared, error.again = error, other, [1], None
    error.again = error.shared
    error.many = [other, {"k": (other,)}]
    cause = original(both(error))
    assert cause.me is cause
    assert type(cause.other) is Keyword
    assert cause.other.detail is cause
    assert cause.shared is cause.again
    assert cause.many[0] is cause.other
    assert cause.many[1]["k"][0] is cause.other
    again = pickle.loads(pickle.dumps(both(error)))
    assert again.me is again
    del error.other, error.many
    deep: Any = copy.deepcopy(both(error))
    assert issubclass(type(deep), ValueError)
    assert not issubclass(type(deep), RemoteError)
    assert deep.me is deep
    assert deep.shared is deep.again


def test_copies_of_an_arrived_exception_do_not_share_notes() -> None:
    error = ValueError("x")
    error.add_note("first")
    arrived = both(error)
    arrived.add_note("second")
    assert arrived.__notes__ == ["first", "second"]
    assert original(arrived).__notes__ == ["first"]
    deep = copy.deepcopy(arrived)
    deep.__notes__.append("third")
    assert arrived.__notes__ == ["first", "second"]
    assert "first" in arrived.traceback
    onward = send(arrived, "middle")
    assert onward.__notes__ == ["first", "second"]
    odd: Any = ValueError()
    odd.__notes__ = 5
    assert both(odd).__notes__ == ["5"]


# -- parts that cannot be sent ---------------------------------------------------------------------------


def test_attributes_that_cannot_be_pickled_or_are_too_large_are_left_out_and_named_in_a_note() -> None:
    error: Any = Two(1, 2)
    error.lock, error.good, error.nested = threading.Lock(), [1], [threading.Lock()]
    error.inner = filled(Keyword(code=1, detail=2), lock=threading.Lock())
    arrived = both(error)
    assert arrived.left == 1
    assert arrived.good == [1]
    assert not hasattr(arrived, "lock")
    assert not hasattr(arrived, "nested")
    assert arrived.inner.code == 1
    assert not hasattr(arrived.inner, "lock")
    (note,) = arrived.__notes__
    assert note.startswith("worker callee cut parts of this error, as it cannot be sent whole: ")
    assert "lock" in note
    assert "nested" in note
    lock = threading.Lock()
    arrived = both(ValueError("text", lock))
    assert arrived.args == ("text", repr(lock))
    assert both(StopIteration(lock)).args == (repr(lock),)
    arrived = both(filled(ValueError(), big=b"y" * 200_000, small=1), limit=100_000)
    assert arrived.small == 1
    assert not hasattr(arrived, "big")
    assert "big" in arrived.__notes__[0]


def failing(*_: object) -> Any:
    raise ModuleNotFoundError("No module named 'theirs'", name="theirs")


@pytest.mark.parametrize("same_main", [True, False])
def test_large_arrays_and_tensors_in_exceptions_arrive(same_main: bool) -> None:
    array, tensor = np.arange(100_000), torch.arange(100_000)
    error = ValueError(array, [array, "text"], tensor)
    error.data = {"array": array}  # type: ignore[attr-defined]
    arrived = send(error, dumps=codec.dumper(same_main), loads=codec.loads)
    assert np.array_equal(arrived.args[0], array)
    assert np.array_equal(arrived.args[1][0], array)
    assert torch.equal(arrived.args[2], tensor)
    assert np.array_equal(arrived.data["array"], array)


def test_long_notes_of_an_exception_arrive_whole_within_the_size_limit() -> None:
    error = ValueError("noted")
    error.add_note("n" * 100_000)
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    first, second = send(error).__notes__
    assert first == "n" * 100_000
    assert "lock" in second
    first, second = send(error, limit=50_000).__notes__
    assert "characters left out" in first
    assert second.endswith("as it cannot be sent whole: lock")


def test_members_of_an_exception_group_share_the_size_limit() -> None:
    group = ExceptionGroup("both", [ValueError("x" * 80_000), ValueError("y" * 80_000), KeyError("small")])
    long, short, small = send(group, limit=100_000).exceptions
    assert long.args == ("x" * 80_000,)
    assert "characters left out" in short.args[0]
    assert small.args == ("small",)


def test_an_exception_group_with_too_many_members_is_shortened_to_the_limit() -> None:
    group = ExceptionGroup("many", [ValueError("x" * 5000) for _ in range(3000)])
    arrived = send(group, limit=100_000).exceptions
    assert 10 < len(arrived) < 100
    assert "more exceptions of this group are too large" in str(arrived[-1])


def test_an_exception_class_that_cannot_be_sent_arrives_as_remote_error_with_its_text() -> None:
    arrived = send(Keyword(code=3, detail=None), loads=failing)
    assert type(arrived) is RemoteError
    assert arrived.type_name == f"{__name__}.Keyword"
    assert str(arrived) == f"{__name__}.Keyword: code 3"
    assert arrived.cause is None
    assert "Keyword: code 3" in arrived.traceback
    assert "theirs" in arrived.__notes__[0]
    onward = send(arrived, "middle")
    assert type(onward) is RemoteError
    assert (str(onward), onward.type_name) == (str(arrived), arrived.type_name)
    assert onward.traceback.index("On worker callee") < onward.traceback.index("On worker middle")
    assert onward.__notes__ == arrived.__notes__
    unpicklable = send(Two(1, 2), dumps=failing)
    assert type(unpicklable) is RemoteError
    assert str(unpicklable).endswith("Two: 1-2")


def nothing_to_load() -> object:
    raise ModuleNotFoundError("only on the other side")


class Theirs:
    def __reduce__(self) -> Any:
        return nothing_to_load, ()


def test_an_attribute_that_the_caller_cannot_unpickle_is_left_out() -> None:
    error: Any = Two(1, 2)
    error.value = Theirs()
    arrived = both(error)
    assert (arrived.left, arrived.right) == (1, 2)
    assert not hasattr(arrived, "value")
    assert "only on the other side" in arrived.__notes__[0]


class Interrupting:
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def test_base_exceptions_raised_while_pickling_or_unpickling_are_contained() -> None:
    error: Any = ValueError("x")
    error.bad = Interrupting()
    assert not hasattr(both(error), "bad")

    def exits(_: bytes) -> object:
        raise SystemExit(1)

    assert type(send(ValueError("x"), loads=exits)) is RemoteError
    assert type(send(ValueError("x"), loads=lambda _: 5)) is RemoteError


@hypothesis.settings(max_examples=50)
@hypothesis.given(st.binary(max_size=200))
def test_random_bytes_load_as_remote_error(data: bytes) -> None:
    assert isinstance(load(data, loads=pickle.loads), RemoteError)


# -- groups ----------------------------------------------------------------------------------------------


def test_exception_groups_arrive_with_their_members() -> None:
    inner = ExceptionGroup("inner", [caught(KeyError("k"))])
    group = ExceptionGroup("outer", [Two(1, 2), inner, errors.PeerDiedError("gone", worker="x")])
    group.add_note("noted")
    arrived = both(group)
    assert arrived.message == "outer"
    assert [type(member) for member in arrived.exceptions] == [Two, ExceptionGroup, errors.PeerDiedError]
    assert arrived.exceptions[0].right == 2
    assert arrived.exceptions[1].exceptions[0].args == ("k",)
    assert arrived.__notes__ == ["noted"]
    assert "KeyError: 'k'" in arrived.traceback
    try:
        raise arrived
    except* Two as found:
        members = found.exceptions
    except* (KeyError, errors.PeerDiedError):
        pass
    assert [type(member) for member in members] == [Two]
    again = pickle.loads(pickle.dumps(arrived))
    assert type(again) is ExceptionGroup
    assert repr(again) == repr(group)
    assert type(copy.copy(arrived)) is ExceptionGroup
    assert len(original(send(arrived, "middle")).exceptions) == 3


def test_a_group_member_that_cannot_be_rebuilt_becomes_a_remote_error() -> None:
    def loads(data: bytes) -> Any:
        if b"Two" in data:
            raise ModuleNotFoundError("theirs")
        return pickle.loads(data)

    arrived = both(ExceptionGroup("g", [Two(1, 2), KeyError("k")]), loads=loads)
    first, second = arrived.exceptions
    assert type(first) is RemoteError
    assert first.type_name.endswith("Two")
    assert type(second) is KeyError


def test_groups_of_base_exceptions_arrive_as_a_cause() -> None:
    arrived = send(BaseExceptionGroup("g", [KeyboardInterrupt(), ValueError("v")]))
    assert type(arrived) is RemoteError
    assert type(arrived.cause) is BaseExceptionGroup
    assert [type(member) for member in arrived.cause.exceptions] == [KeyboardInterrupt, ValueError]


# -- the traceback's text --------------------------------------------------------------------------------


def raise_deep(depth: int) -> None:
    if depth:
        raise_deep(depth - 1)
    raise ValueError("ünï")


@pytest.mark.parametrize("depth", [0, 1, 2, 50])
def test_the_traceback_text_equals_pythons(depth: int) -> None:
    try:
        try:
            raise_deep(depth)
        except ValueError as error:
            error.add_note("note")
            raise KeyError("second") from error
    except KeyError as error:
        text = exceptions.dump(error, worker="w", dumps=pickle.dumps)
        arrived = load(text, loads=pickle.loads)
        expected = "".join(traceback.format_exception(error))

    def lines(text: str) -> list[str]:  # without lines of markers, which differ
        return [line for line in text.splitlines() if set(line) - set(" ^~")]

    got = lines(arrived.traceback)  # type: ignore[attr-defined]
    assert got[0] == "On worker w:"
    if depth < 3:
        assert got[1:] == lines(expected)
    else:
        assert f"  [Previous line repeated {depth - 3} more times]" in got


def test_long_and_cyclic_chains_of_exceptions_are_shortened() -> None:
    first = error = ValueError("0")
    for i in range(1000):
        nearer = ValueError(str(i))
        nearer.__context__ = error
        error = nearer
    assert "earlier exceptions left out" in send(error).traceback
    first.__context__ = error
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert "ValueError: other" in send(one).traceback
    quiet = ValueError("quiet")
    quiet.__context__, quiet.__suppress_context__ = KeyError("hidden"), True
    assert "hidden" not in send(quiet).traceback


def test_tracebacks_of_mutual_recursion_are_shortened() -> None:
    def ping(n: int) -> None:
        pong(n)

    def pong(n: int) -> None:
        ping(n)

    try:
        ping(0)
    except RecursionError as error:
        text = send(error).traceback
    assert "frames left out" in text
    assert "RecursionError: maximum recursion depth exceeded" in text


# -- over several workers --------------------------------------------------------------------------------


def test_an_arrived_exception_can_be_the_cause_of_a_sent_exception() -> None:
    arrived = both(Keyword(code=1, detail="d"), worker="far")
    try:
        try:
            raise arrived
        except Keyword as error:
            raise Two(1, 2) from error
    except Two as error:
        outer = both(error, worker="near")
    text = outer.traceback
    assert text.index("On worker far:") < text.index("On worker near:") < text.index("Two: 1-2")
    assert outer.worker == "near"
    inner = filled(ValueError("v"), inner=arrived)
    assert type(both(inner).inner) is Keyword


def test_changes_to_an_arrived_exception_are_sent_on() -> None:
    arrived = both(Two(1, 2))
    arrived.left = 7
    arrived.args = ("changed",)
    onward = original(send(arrived, "middle"))
    assert onward.left == 7
    assert onward.args == ("changed",)


# -- the raised class ------------------------------------------------------------------------------------


def test_classes_created_for_arrived_exceptions_are_freed() -> None:
    references = []
    for i in range(600):
        cls = type(f"Gone{i}", (Exception,), {})
        error = cls("x")
        loads: Any = lambda _, error=error: error  # noqa: E731
        error_type = type(load(dump(error, worker="w", dumps=lambda _: b""), loads=loads))
        assert issubclass(error_type, cls)
        references.append(weakref.ref(cls))
        del cls, error, error_type, loads
    gc.collect()
    assert sum(reference() is not None for reference in references) <= 300


def test_an_uncaught_arrived_exception_prints_the_original_class_and_remote_traceback() -> None:
    arrived = both(Keyword(code=3, detail=None), worker="far")
    printed = "".join(traceback.format_exception(arrived))
    assert printed.rstrip().endswith(f"{__name__}.Keyword: code 3")
    assert "On worker far:" in printed


def test_exceptions_can_be_taken_apart_and_reassembled_without_pickle() -> None:
    """The data-only mode sends exceptions in parts."""

    def again(error: BaseException) -> Any:
        return exceptions.assemble(*exceptions.parts(error))

    for error in (Keyword(code=1, detail=None), Two(3, 4), SystemExit(3), OSError(2, "no", "file")):
        found = again(error)
        assert type(found) is type(error)
        assert found.args == error.args
        assert vars(found) == vars(error)
    assert again(OSError(2, "no", "file")).filename == "file"
    raised = both(Two(3, 4))
    assert type(again(raised)) is Two
    with pytest.raises(SerializationError, match="enum"):
        exceptions.parts(next(iter(Colour)))


@pytest.mark.parametrize("kind", unruly.KINDS)
def test_arrived_exceptions_can_be_raised_through_context_managers(kind: str) -> None:
    error = send(unruly.make(kind))

    @contextlib.contextmanager
    def through() -> Any:
        yield  # contextlib sets the traceback of the exception that is raised below

    with pytest.raises(RemoteError) as raised, through():
        raise error
    assert raised.value is error
    assert not isinstance(error, KeyError)
    assert type(error.__cause__) is RemoteTraceback
    error.__context__ = None
    error.__traceback__ = None
    assert exceptions.traceback_of(error) == error.__cause__.text


# -- errors renamed for another interface -----------------------------------------------------------------------


class Named(RemoteError):
    """The error class of another interface for exceptions of called functions."""


def test_an_arrived_exception_can_be_raised_as_another_interfaces_class() -> None:
    arrived = send(OSError(2, "no", "file"))
    named: Any = exceptions.raised_as(arrived, Named)
    original = type(arrived.cause)
    assert isinstance(named, Named)
    assert isinstance(named, original)
    assert type(named).__name__ == f"Named({original.__name__})"
    assert (str(named), named.cause, named.traceback) == (str(arrived), arrived.cause, arrived.traceback)
    assert isinstance(named.__cause__, RemoteTraceback)
    assert type(exceptions.raised_as(arrived, Named)) is type(named)
    # When it is sent on, it has the original class again.
    further = send(named)
    assert not isinstance(further, Named)
    assert type(further.cause) is original
    assert not isinstance(arrived, Named)


def test_raised_as_returns_base_exceptions_and_local_exceptions_unchanged() -> None:
    for error in (send(SystemExit(3)), ValueError("here")):
        assert exceptions.raised_as(error, Named) is error
