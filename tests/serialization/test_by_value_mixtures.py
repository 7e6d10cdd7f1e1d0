"""Random mixtures of objects that are sent by name and by value: the codec and plain cloudpickle give the same result.

Messages are decoded in a process that cannot import the modules that are sent by value. The nightly run has more examples.
"""

from __future__ import annotations

import collections
import fractions
import functools
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actorrpc.serialization.codec import encode, encode_body
from tests.serialization.beside import Calls, Plain, defined, made, registered
from tests.serialization.opening import Message, Opener, describe

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, types.ModuleType]]:
    """The test modules by name. The content of "main" is added to the real main module during the tests."""
    main, real = types.ModuleType("__main__"), sys.modules["__main__"]
    defined(main)
    added = [name for name in vars(main) if not name.startswith("__") and not hasattr(real, name)]
    with made("aside", "aside.below") as (aside, below), registered(aside):
        for name in added:
            setattr(real, name, getattr(main, name))
        try:
            yield {"aside": aside, "below": below, "main": main}
        finally:
            for name in added:
                delattr(real, name)


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    with Opener.started() as found:
        yield found


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


@pytest.mark.slow
@pytest.mark.limit(3600 if NIGHTLY else 60)
@settings(
    max_examples=5000 if NIGHTLY else 150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(maker=_mixtures, of_every_call=st.booleans())
def test_the_codec_and_cloudpickle_decode_to_the_same_value(
    modules: dict[str, types.ModuleType], opener: Opener, maker: Maker, of_every_call: bool
) -> None:
    value = maker(modules)
    if of_every_call:
        sent = encode_body(value, False, (), None, None)
    else:
        sent = encode(value, remote_main=False)
    fast: Message
    if isinstance(sent, bytes):
        fast = sent, (), {}
    else:
        fast = sent.body, [bytes(span.view()) for span in sent.spans], dict(sent.definitions)
    alone, ours = opener.ask((cloudpickle.dumps(value), (), {}), fast)
    assert ours == alone == describe(value)
