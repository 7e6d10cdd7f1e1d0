"""Random mixtures of objects that are sent by name and by value. The nightly run has more examples."""

from __future__ import annotations

import collections
import enum
import fractions
import functools
import operator
import os
import sys
import types
import typing
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actorrpc.serialization.codec import DefinitionStore, Encoded, decode, encode, encode_body
from tests.serialization.beside import Calls, Plain, defined, in_main, made, registered

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"


def decode_without(sent: bytes | Encoded) -> Any:
    """Decode a message, while the test modules cannot be imported."""
    kept = {name: sys.modules.pop(name) for name in ("aside", "aside.below")}
    try:
        if isinstance(sent, bytes):
            return decode(sent, (), definitions=DefinitionStore())
        store = DefinitionStore()
        for key, data in sent.definitions.items():
            store.add(key, data)
        buffers = [memoryview(bytearray(span.view())) for span in sent.spans]
        return decode(sent.body, buffers, definitions=store)
    finally:
        sys.modules.update(kept)


def describe(value: Any) -> str:
    """Describe a value, so that two values have the same description if a program cannot distinguish them.

    Functions and methods are called. Lists, dicts and objects that occur twice are described once and then referred to.
    """
    return _describe(value, {}, [])


def _describe(value: Any, seen: dict[int, int], kept: list[Any]) -> str:
    def describe_part(part: Any) -> str:
        return _describe(part, seen, kept)

    if value is None or isinstance(value, (bool, int, float, str, bytes, enum.Enum)):
        words = repr(value)
        return f"{type(value).__module__}.{words if len(words) < 99 else (len(words), zlib.crc32(words.encode()))}"
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {tuple(value.shape)} {value.requires_grad} {value.sum().item()}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {value.sum()}"
    if isinstance(value, type):
        names = sorted(name for name in vars(value) if not name.startswith("_"))
        return f"class {value.__module__} {value.__qualname__} {names} {[each.__name__ for each in value.__mro__]}"
    if isinstance(value, types.MethodType):
        return f"method {describe_part(value.__self__)} gives {_outcome(value, describe_part)}"
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return f"function {value.__module__} {value.__qualname__} gives {_outcome(value, describe_part)}"
    if isinstance(value, (types.ModuleType, typing.TypeVar, torch.dtype, types.GenericAlias)):
        return f"{type(value).__name__} {getattr(value, '__name__', value)}"
    if isinstance(value, Calls):
        return describe_part(value.result())
    if isinstance(value, tuple):
        return f"{type(value).__qualname__}({', '.join(map(describe_part, value))})"
    if id(value) in seen:
        return f"again {seen[id(value)]}"
    seen[id(value)] = len(seen)
    kept.append(value)  # keeps results of methods alive, so that their id() is not reused
    if isinstance(value, list):
        return f"[{', '.join(map(describe_part, value))}]"
    if isinstance(value, dict):
        return (
            f"{{{', '.join(f'{describe_part(key)}: {describe_part(each)}' for key, each in value.items())}}}"
        )
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__} {sorted(map(describe_part, value))}"
    if isinstance(value, functools.partial):
        return (
            f"partial {describe_part(value.func)} {describe_part(value.args)} {describe_part(value.keywords)}"
        )
    return f"object of {describe_part(type(value))} with {describe_part(getattr(value, '__dict__', None) or str(value))}"


def _outcome(function: Any, describe_part: Any) -> str:
    try:
        found = function(3)
    except Exception as error:
        return f"{type(error).__name__}"
    return str(describe_part(found))


# Objects are drawn as functions that create them from the modules.
Maker = Callable[[dict[str, types.ModuleType]], Any]

_MEMBERS = (
    "inner",
    "outer",
    "Box",
    "Rich",
    "Point",
    "Pair",
    "Colour",
    "T",
    "Box.make",
    "Rich.make",
    "Box.still",
)
_members: st.SearchStrategy[Maker] = st.builds(
    lambda where, name: lambda modules: operator.attrgetter(name)(modules[where]),
    st.sampled_from(["aside", "below", "main"]),
    st.sampled_from(_MEMBERS),
)
_colours: st.SearchStrategy[Maker] = st.sampled_from(["aside", "below", "main"]).map(
    lambda where: lambda modules: modules[where].Colour.RED
)
_common: st.SearchStrategy[Maker] = st.sampled_from(
    [
        *(os.path.join, len, operator.add, collections.OrderedDict, Plain, Plain(1).show, torch.float32),
        *(fractions.Fraction(1, 3), torch.nn.functional.relu, np.arange(5), np.ones(3000)),
        *(torch.arange(4.0), torch.ones(2000), torch.ones(2, requires_grad=True), b"\x8c\x05aside" * 20_000),
        *("aside", "aside.below", "__main__", "x" * 70_000, b"aside", lambda x: [x], lambda *all: all),
        *(None, 7, 0.5, (), True),
    ]
).map(lambda value: lambda modules: value)


def _made_of(inner: st.SearchStrategy[Maker]) -> st.SearchStrategy[Maker]:
    def of(make: Callable[..., Any], *parts: st.SearchStrategy[Maker]) -> st.SearchStrategy[Maker]:
        return st.tuples(*parts).map(
            lambda makers: lambda modules: make(modules, *[maker(modules) for maker in makers])
        )

    def in_a_closure(value: Any) -> Any:
        return lambda *rest: (value, rest)

    places = st.sampled_from(["aside", "below", "main"]).map(lambda where: lambda modules: modules[where])
    return st.one_of(
        of(lambda _, *parts: list(parts), inner, inner),
        of(lambda _, *parts: parts, inner, inner, inner),
        of(lambda _, part: [part, {"twice": part}, (part,)], inner),
        of(lambda _, a, b: {"a": a, "b": b}, inner, inner),
        of(lambda _, part: functools.partial(print, part, sep=part), inner),
        of(lambda _, part: in_a_closure(part), inner),
        of(lambda _, part: Plain(part), inner),
        of(lambda _, part: Plain(part).show, inner),
        of(lambda _, part: Calls(Plain, part), inner),
        of(lambda _, place, part: Calls(place.Box, part), places, inner),
        of(lambda _, place, part: place.Box(part), places, inner),
        of(lambda _, place, part: place.Rich(part).open, places, inner),
        of(lambda _, place, a, b: place.Point(a, y=b), places, inner, inner),
        of(lambda _, place, a, b: place.Pair(a, b), places, inner, inner),
        of(lambda _, place, part: types.MethodType(place.bound, Plain(part)), places, inner),
        of(lambda _, place, part: functools.partial(place.outer, part), places, inner),
    )


_mixtures = st.recursive(_members | _colours | _common, _made_of, max_leaves=8)


@pytest.mark.limit(3600 if NIGHTLY else 60)
@settings(max_examples=5000 if NIGHTLY else 150)
@given(maker=_mixtures, of_every_call=st.booleans())
def test_mixtures_of_objects_sent_by_name_and_by_value_survive(maker: Maker, of_every_call: bool) -> None:
    main, real = types.ModuleType("__main__"), sys.modules["__main__"]
    defined(main)
    names = {name: value for name, value in vars(main).items() if not hasattr(real, name)}
    with made("aside", "aside.below") as (aside, below), registered(aside):
        with in_main(names):
            value = maker({"aside": aside, "below": below, "main": main})
            sent = (
                encode_body(value, False, (), None, None)
                if of_every_call
                else encode(value, remote_main=False)
            )
        found = decode_without(sent)
        assert describe(found) == describe(value)
