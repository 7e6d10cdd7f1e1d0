"""Interceptors: who wraps the execution of a call, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actorrpc.agent import hooks


class Wrapper:
    """Notes its name around the call."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wrap(self, execution: Any, function: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> Any:
        def wrapped() -> Any:
            self.log.append(self.name)
            return call()

        return wrapped


@pytest.mark.parametrize(
    ("header", "order"),
    [
        ({"a": 1}, ["rider of a", "first", "second"]),
        ({"b": None, "z": 1}, ["rider of b", "first", "second"]),
        ({"z": 1}, ["first", "second"]),
    ],
)
def test_riders_take_part_where_their_field_is(
    header: dict[str, Any], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr(hooks, "RIDERS", {name: Wrapper(f"rider of {name}", log) for name in "ab"})
    everywhere: Any = [Wrapper(name, log) for name in ("first", "second")]
    who = hooks.riding(everywhere, header)
    execution: Any = None
    assert hooks.intercepted(who, execution, max, (1, 2), {})() == 2
    assert log == order
