"""Objects of modules that are registered to be pickled by value: they are never sent by a name that other workers lack."""

from __future__ import annotations

import functools
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from actorrpc.actors.client.actor_class import is_importable
from actorrpc.errors import SerializationError
from actorrpc.serialization import by_value, codec
from actorrpc.serialization.codec import DefinitionStore, decode, encode, encode_body
from tests.serialization.beside import Calls, Plain, in_main, made, registered


@pytest.fixture
def aside() -> Iterator[types.ModuleType]:
    with made("aside") as (module,), registered(module):
        yield module


def body_of(obj: Any) -> Any:
    """Encode on the fast path that each call uses."""
    encode_body(0, True, (), None, None)  # from now on, this thread has an idle pickler
    return encode_body(obj, True, (), None, None)


def decode_without(obj: Any, *names: str, by: Callable[[Any], Any] = encode) -> Any:
    """Encode an object, and decode it while modules of these names cannot be imported."""
    encoded = by(obj)
    assert isinstance(encoded, codec.Encoded)
    store = DefinitionStore()
    for key, data in encoded.definitions.items():
        store.add(key, data)
    buffers = [memoryview(bytearray(span.view())) for span in encoded.spans]
    kept = {name: sys.modules.pop(name) for name in names}
    try:
        return decode(encoded.body, buffers, definitions=store)
    finally:
        sys.modules.update(kept)


_OBJECTS: dict[str, Callable[[Any], Any]] = {
    "a function": lambda aside: aside.outer,
    "a class": lambda aside: aside.Box,
    "an object": lambda aside: aside.Box(1),
    "a member of an enumeration": lambda aside: aside.Colour.RED,
    "a named tuple": lambda aside: aside.Pair(1, 2),
    "a dataclass": lambda aside: aside.Point(1, 2),
    "a type variable": lambda aside: aside.T,
    "a method": lambda aside: aside.Box(1).open,
    "a class method": lambda aside: aside.Box.make,
    "a static method": lambda aside: aside.Box.still,
    "a method bound by hand": lambda aside: types.MethodType(aside.bound, Plain(1)),
    "partial": lambda aside: functools.partial(operator.add, aside.Box(1)),
    "in containers": lambda aside: [{1: (frozenset([aside.inner]),)}],
    "behind its own name": lambda aside: [
        aside.__name__,
        aside.inner.__module__,
        aside.inner,
    ],
    "in a reducer": lambda aside: Calls(aside.Box, 1),
    "in a reducer in a reducer": lambda aside: Calls(Plain, Calls(aside.inner, 1)),
    "a generic alias": lambda aside: aside.Box[int],
    "the module": lambda aside: aside,
    "in a closure": lambda aside: lambda: aside.inner(1),
    "next to long bytes": lambda aside: [
        b"x" * 200_000,
        aside.inner,
        torch.ones(5000),
    ],
    "an exception's part": lambda aside: ValueError(aside.Box(1)),
}


@pytest.mark.parametrize("by", [encode, body_of])
@pytest.mark.parametrize("case", _OBJECTS)
def test_objects_of_a_registered_module_are_decoded_without_importing_it(
    aside: types.ModuleType, case: str, by: Callable[[Any], Any]
) -> None:
    decode_without((len, ("abc", _OBJECTS[case](aside)), {}), "aside", by=by)
    assert body_of((len, (), {})) == codec.encode((len, (), {})).body  # the pickler still works


def test_submodules_of_a_registered_package_are_sent_by_value(aside: types.ModuleType) -> None:
    with made("aside.deep.below", "asides", "aside_") as (below, *others):
        assert decode_without(below.inner, "aside", "aside.deep.below")(2) == [2, 1]
        for other in others:
            assert not encode(other.inner).definitions
        assert not is_importable(below.inner)
        assert is_importable(others[0].inner)


def test_a_class_with_a_wrong_module_attribute_is_sent_by_value(aside: types.ModuleType) -> None:
    aside.Box.__module__ = "nowhere.at.all"
    aside.Rich.__module__ = None
    assert decode_without(aside.Box(1), "aside").open() == (1, ())
    assert decode_without(aside.Rich(1), "aside").open() == ("rich", (1, ()))
    with made("elsewhere") as (elsewhere,):
        elsewhere.Box.__module__ = "aside"
        vars(aside)["Box"] = elsewhere.Box
        assert encode(elsewhere.Box).definitions


def test_modules_may_be_registered_while_other_threads_encode(aside: types.ModuleType) -> None:
    ended = threading.Event()
    errors: list[BaseException] = []

    def toggle() -> None:
        with made("further", "further.below") as modules:
            while not ended.is_set():
                with registered(*modules):
                    pass

    def run() -> None:
        try:
            for n in range(300):
                function, number = decode_without((aside.inner, n), by=encode)
                assert function(number) == [n, 1]
                assert isinstance(encode_body((operator.add, (n, 1), {}), True, (), None, None), bytes)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    toggling = threading.Thread(target=toggle)
    toggling.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    toggling.join()
    assert not errors


def test_registering_a_module_affects_only_later_messages() -> None:
    with made("aside") as (aside,):
        message: Any = (aside.inner, (1,), {})
        before = body_of(message)
        with registered(aside):
            assert decode_without(message, "aside", by=body_of)[0](2) == [2, 1]
        assert body_of(message) == before
        assert decode_without([Plain, torch.ones(3)])[0] is Plain


@pytest.mark.parametrize("count", [0, 6_000])
@pytest.mark.parametrize("long", [b"", b"\x95" * 100_000, bytearray(100_000)])
def test_references_to_the_main_module_are_found_anywhere_in_a_message(count: int, long: Any) -> None:
    local = type("Local", (), {"__module__": "__main__"})
    texts = [f"text {n}" for n in range(count)]  # with many texts, the pickle has several frames
    amid = [*texts[: count // 2], local, *texts[count // 2 :], long]
    with in_main({"Local": local}):
        by_value.note_main()  # as if the class had been defined before joining
        for obj in ([texts, long, local], [local, long, texts], [long, texts, local, texts], amid):
            assert encode(obj, remote_main=False).definitions
            assert not encode(obj, remote_main=True).definitions
        assert not encode([texts, long, Plain, b"__main__" * 10_000], remote_main=False).definitions


class Wrapping(Plain):
    def shown(function: Any) -> Any:
        def wrapper(self: Any) -> Any:
            return function(self)

        return wrapper

    @shown
    def get_content(self) -> Any:
        return self.content


@pytest.mark.parametrize(
    "method", [types.MethodType(lambda self: self.content, Plain(5)), Wrapping(5).get_content]
)
def test_methods_that_are_no_attribute_of_their_object_are_sent_by_value(method: Any) -> None:
    assert decode_without([method])[0]() == 5
    assert decode_without([Plain(6).show])[0](1) == ("plain", 6, (1,))


def test_an_error_names_the_part_of_a_class_of_the_main_module() -> None:
    lock = threading.Lock()

    class Holds:
        def get(self) -> Any:
            return lock

    Holds.__module__, Holds.__qualname__ = "__main__", "Holds"
    with (
        in_main({"Holds": Holds}),
        pytest.raises(SerializationError, match=r"index 0 -> attribute 'get' -> .*'lock': cannot pickle"),
    ):
        encode([Holds], remote_main=False)
