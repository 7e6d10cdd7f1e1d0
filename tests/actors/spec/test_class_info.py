"""ClassInfo: which methods a class has, how they run, and which arguments they take.

Argument checks are compared with calls of the functions in Python.
"""

from __future__ import annotations

import abc
import functools
import inspect
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.actors.client.typed_methods import method
from actorrpc.actors.spec.class_info import ClassInfo, MethodInfo, Signature
from actorrpc.errors import ConfigError

T = TypeVar("T")


class Base:
    def inherited(self, a: int) -> int:
        return a

    def replaced(self) -> None: ...


class Everything(Base):
    """One of each kind.

    And more.
    """

    constant = 3

    class Inner:
        pass

    def __init__(self, a: int, b: int = 2, /, *rest: int, c: int, d: int = 4) -> None:
        self.x = lambda: None

    def plain(self, a: int, b: int = 2) -> None: ...

    async def coroutine(self) -> None: ...

    async def async_generator(self) -> AsyncIterator[int]:
        yield 1

    @staticmethod
    def static(a: int) -> None: ...

    @property
    def value(self) -> int:
        return 1

    @functools.lru_cache  # noqa: B019
    def remembered(self, a: int) -> int:
        return a

    @functools.singledispatchmethod
    def dispatched(self, a: int) -> None: ...

    partial = functools.partialmethod(plain, 1)

    @method(num_returns=2, timeout=3)
    def marked(self) -> tuple[int, int]:
        return 1, 2

    replaced = None  # type: ignore[assignment]

    def __call__(self, a: int) -> None: ...

    def _private(self) -> None: ...


def test_class_info_lists_all_methods_with_their_kind() -> None:
    info = ClassInfo.of(Everything)
    assert {name: each.kind for name, each in info.methods.items()} == {
        **dict.fromkeys(("inherited", "plain", "static", "remembered", "partial", "marked"), "sync"),
        "dispatched": "sync",
        "__call__": "sync",
        "_private": "sync",
        "coroutine": "async",
        "async_generator": "async_generator",
    }
    assert (info.name, info.module, info.doc) == ("Everything", __name__, "One of each kind.")
    assert (info.is_async, ClassInfo.of(Base).is_async) == (True, False)


def test_the_method_decorator_can_be_combined_with_staticmethod_and_classmethod() -> None:
    class Actor:
        @method(num_returns=2)
        @staticmethod
        def over() -> None: ...

        @staticmethod
        @method(num_returns=3)
        def under() -> None: ...

        @classmethod
        @method
        @method(timeout=1)
        def twice(cls) -> None: ...

    methods = ClassInfo.of(Actor).methods
    assert methods["over"].options.num_returns == 2
    assert methods["under"].options.num_returns == 3
    assert methods["twice"].options.timeout == 1
    with pytest.raises(ConfigError, match="not an option of a method"):
        method(name_="x")
    with pytest.raises(TypeError, match="is for the methods of a class"):
        method(int)
    with pytest.raises(TypeError, match="is for the methods of a class"):
        method(3)  # type: ignore[call-overload]


def _python_error(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    try:
        function(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _check_error(info: MethodInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    try:
        info.check(args, kwargs)
    except TypeError as error:
        return str(error)
    return None


_CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1,), {}),
    ((1, 2), {}),
    ((1, 2, 3), {}),
    ((1, 2, 3, 4), {}),
    ((1,), {"a": 1}),
    ((), {"a": 1}),
    ((), {"a": 1, "b": 2, "c": 3}),
    ((1,), {"c": 1}),
    ((1, 2, 3), {"c": 1}),
    ((), {"z": 1}),
    ((1,), {"z": 1}),
]


def test_wrong_arguments_raise_the_same_errors_as_in_python() -> None:
    class Actor:
        def none(self) -> None: ...
        def one(self, a: int) -> None: ...
        def two(self, a: int, b: int = 2) -> None: ...
        def names(self, *, a: int, b: int = 2) -> None: ...
        def mixed(self, a: int, /, b: int, *, c: int = 3) -> None: ...
        def three(self, a: int, b: int, c: int) -> None: ...
        def rest(self, a: int, *args: int, **kwargs: int) -> None: ...
        def only(self, a: int = 1, b: int = 2, /) -> None: ...
        def odd(*args: Any) -> None: ...

        @staticmethod
        def static(a: int, b: int = 2) -> None: ...

        @classmethod
        def of_class(cls, a: int) -> None: ...

    actor = Actor()
    for name, each in ClassInfo.of(Actor).methods.items():
        for args, kwargs in _CALLS:
            theirs = _python_error(getattr(actor, name), args, kwargs)
            if theirs is not None:
                theirs = theirs.rpartition("<locals>.")[2]
            assert _check_error(each, args, kwargs) == theirs, (name, args, kwargs)


_names = st.sampled_from("abcdef")


@st.composite
def _functions(draw: st.DrawFn) -> tuple[Callable[..., Any], str]:
    names = draw(st.lists(_names, unique=True, max_size=5))
    cuts = sorted(draw(st.lists(st.integers(0, len(names)), min_size=2, max_size=2)))
    only, plain, keyword = names[: cuts[0]], names[cuts[0] : cuts[1]], names[cuts[1] :]
    required = draw(st.integers(0, len(only) + len(plain)))
    parts, at = ["self"], 0
    for name in only:
        parts.append(name if at < required else f"{name}=0")
        at += 1
    if only:
        parts.append("/")
    for name in plain:
        parts.append(name if at < required else f"{name}=0")
        at += 1
    varargs = draw(st.booleans())
    if varargs:
        parts.append("*args")
    elif keyword:
        parts.append("*")
    parts.extend(name if draw(st.booleans()) else f"{name}=0" for name in keyword)
    if draw(st.booleans()):
        parts.append("**kwargs")
    source = f"def method({', '.join(parts)}): pass"
    space: dict[str, Any] = {}
    exec(source, space)
    return space["method"], source


@given(
    _functions(),
    st.lists(st.integers(), max_size=6),
    st.dictionaries(_names, st.integers(), max_size=4),
    st.booleans(),
)
def test_arguments_of_random_signatures_raise_the_same_errors_as_in_python(
    made: tuple[Callable[..., Any], str], args: list[int], kwargs: dict[str, int], by_inspect: bool
) -> None:
    function, source = made
    if by_inspect:  # the path for callables that are not plain functions
        function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    info = MethodInfo("method", "sync", Signature.of(function, "method", 1))
    for checked in (info, pickle.loads(pickle.dumps(info))):
        ours = _check_error(checked, tuple(args), kwargs)
        assert ours == _python_error(function, (None, *args), kwargs), source


def test_constructor_arguments_are_checked_for_all_kinds_of_classes() -> None:
    class Nothing:
        pass

    class New:
        def __new__(cls, a: int) -> New:
            return object.__new__(cls)

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return object.__new__(cls)

    class Made(metaclass=Meta):
        def __init__(self, a: int) -> None: ...

    @dataclass
    class Data(Generic[T]):
        a: T
        b: int = 2

    class Abstract(abc.ABC):
        @abc.abstractmethod
        def m(self) -> None: ...

    def takes(cls: type, *args: Any, **kwargs: Any) -> bool:
        return _check_error(ClassInfo.of(cls).constructor, args, kwargs) is None

    assert takes(Everything, 1, c=1)
    assert not takes(Everything, 1)
    assert not takes(Everything, a=1, c=1)
    assert takes(Nothing)
    assert not takes(Nothing, 1)
    assert takes(New, 1)
    assert not takes(New)
    assert takes(Made, 1, 2, 3, x=4)
    assert takes(Data, 1)
    assert takes(Data, a=1, b=2)
    assert not takes(Data)
    assert takes(Abstract)
    assert takes(torch.nn.Linear, 1, 2, bias=False)
    assert not takes(torch.nn.Linear, 1)


def test_a_checkpoint_method_with_other_parameters_is_not_a_checkpoint_hook() -> None:
    class Has:
        def checkpoint(self) -> int:
            return 1

        def restore(self, state: int) -> None: ...

    class Other:
        def checkpoint(self, path: str) -> None: ...
        def restore(self, state: int) -> None: ...

    assert ClassInfo.of(Has).has_checkpoint
    assert not ClassInfo.of(Other).has_checkpoint
    assert not ClassInfo.of(Base).has_checkpoint


def test_pickled_class_info_keeps_the_exceptions_to_retry() -> None:
    class Actor:
        @method(retry_exceptions=[KeyError])
        def m(self) -> None: ...

    found = pickle.loads(pickle.dumps(ClassInfo.of(Actor)))
    assert found.methods["m"].options.retry_exceptions == (KeyError,)


def test_thread_true_marks_plain_methods_and_is_refused_for_coroutines() -> None:
    class Both:
        @method(thread=True)
        def blocking(self) -> None: ...

        @method(thread=True, timeout=1)
        def generator(self) -> Iterator[int]:
            yield 1

        @method(thread=False)
        def plain(self) -> None: ...

    info = pickle.loads(pickle.dumps(ClassInfo.of(Both)))
    assert {name: each.threaded for name, each in info.methods.items()} == {
        "blocking": True,
        "generator": True,
        "plain": False,
    }
    assert info.methods["generator"].options.timeout == 1

    async def coroutine(self: Any) -> None: ...

    with pytest.raises(ConfigError, match="coroutine is async"):
        method(thread=True)(coroutine)
    with pytest.raises(ConfigError, match="thread must be True or False"):
        method(thread=1)
