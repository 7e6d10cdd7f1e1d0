"""Validators of values: the values that each accepts and returns, and its error for other values."""

from __future__ import annotations

import enum
import math
from fractions import Fraction
from functools import partial
from typing import Any

import numpy
import pytest

from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.validation import (
    Check,
    amounts,
    choice,
    flag,
    integer,
    number,
    read,
    text,
    variables,
    wait_limit,
    words,
)

_port = partial(integer, least=0, most=65535)
_share = partial(number, most=1.0)
_time = partial(number, unit="seconds", above=True)


def _limit(name: str, value: Any) -> float:
    return wait_limit(value, name)


_direction = partial(choice, of=("to", "from"))


class _Direction(enum.StrEnum):
    TO = "to"


@pytest.mark.parametrize(
    ("check", "value", "kept"),
    [
        (partial(flag, none=True), None, None),
        (partial(text, empty=False, none=True), None, None),
        (text, numpy.str_("x"), "x"),
        (_direction, _Direction.TO, "to"),
        (partial(_direction, none=True), None, None),
        (_port, numpy.int64(80), 80),
        (integer, -(1 << 80), -(1 << 80)),
        (number, numpy.float32(0.5), 0.5),
        (number, numpy.int8(3), 3),
        (number, Fraction(1, 2), 0.5),
        (partial(number, most=math.inf), math.inf, math.inf),
        (partial(number, none=True), None, None),
        (partial(amounts, none=True), None, None),
    ],
)
def test_accepted_values_are_returned_as_plain_types(check: Check, value: Any, kept: Any) -> None:
    found = check("it", value)
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize(
    ("check", "value", "says", "wrong_type"),
    [
        (partial(text, empty=False), "", "it must be a non-empty str, not ''", False),
        (_port, 65536, "it must be an int of at least 0 and of at most 65535, not 65536", False),
        (_share, 1.5, "it must be a number of at least 0 and of at most 1, not 1.5", False),
        (partial(_time, none=True), -1, "a number of seconds above 0, finite, or None, not -1", False),
        (partial(number, kind=(int, float)), Fraction(1, 2), "it must be a number", True),
        (partial(number, error=WrongTypeError), -1, "it must be a number", True),
        (words, {"": "a"}, "it must be a dict of words by name", True),
        (variables, {"A": "a\0b"}, "it['A'] must be without zero bytes", False),
        (variables, {"A": True}, "it['A'] must be a str or a number", True),
    ],
)
def test_rejected_values_raise_config_error_with_the_accepted_range(
    check: Check, value: Any, says: str, wrong_type: bool
) -> None:
    with pytest.raises(ConfigError) as caught:
        check("it", value)
    assert says in str(caught.value)
    assert isinstance(caught.value, TypeError) is wrong_type


def test_environment_texts_are_parsed_by_the_type_of_the_field() -> None:
    assert [read("int", "3"), read("float | None", "0.5"), read("bool", "Yes"), read("str", "3")] == [
        3,
        0.5,
        True,
        "3",
    ]
    assert read("Any", "a,b") == ["a", "b"]
    for declared, said in (("int", "much"), ("bool", "perhaps")):
        with pytest.raises(ValueError, match=said if declared == "int" else "must be on or off"):
            read(declared, said)


class _Unprintable(str):
    __slots__ = ()

    def __repr__(self) -> str:
        raise KeyError("repr")


class _Odd:
    __repr__ = _Unprintable.__repr__


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (_port, 10**5000),
        (_share, 10**5000),
        (_share, Fraction(10**400)),
        (_share, -Fraction(10**400)),
        (number, Fraction(10**400)),
        (_direction, _Unprintable("x")),
        (_port, _Odd()),
        (variables, {"A": 10**5000}),
        (variables, {"A": _Odd()}),
        (_limit, _Odd()),
        (_limit, -(10**5000)),
    ],
    ids=lambda value: type(value).__name__,  # these values cannot be printed
)
def test_unprintable_and_huge_values_raise_config_error(check: Check, value: Any) -> None:
    with pytest.raises(ConfigError, match="must be"):
        check("timeout", value)


@pytest.mark.parametrize("value", [None, math.inf, 10**400, Fraction(10**400)])
def test_wait_limit_accepts_none_infinity_and_huge_numbers(value: Any) -> None:
    assert wait_limit(value) == math.inf
    assert wait_limit(numpy.float32(0.5)) == 0.5
