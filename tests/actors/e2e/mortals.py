"""Actors that die in all the ways that there are, and make others."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import actors
from tests.actors.e2e.kit import pass_gate

__all__ = ["Fragile", "Keeper", "Parent", "Slow", "error_of"]


@actorrpc.remote
class Fragile:
    """Counts, and dies in all the ways that there are."""

    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError("a count cannot be negative")
        self.count = start

    def step(self) -> int:
        self.count += 1
        return self.count

    def pid(self) -> int:
        return os.getpid()

    def echo(self, value: Any) -> Any:
        return value

    def block(self, path: str) -> str:
        return pass_gate(path)

    def leave(self) -> None:
        actors.exit_actor()

    def crash(self, code: int = 3) -> None:
        sys.stderr.write("the last words\n")
        sys.stderr.flush()
        os._exit(code)

    def crash_once(self, path: str) -> str:
        if not os.path.exists(path):
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"


@actorrpc.remote
class Keeper:
    """Carries its state over a restart."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def add(self, number: int) -> list[int]:
        self.seen.append(number)
        return self.seen

    def checkpoint(self) -> list[int]:
        return self.seen

    def restore(self, state: list[int]) -> None:
        self.seen = [*state, -1]

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@actorrpc.remote
class Parent:
    """Makes actors of its own."""

    def make(self, **options: Any) -> Any:
        self.child = Fragile.options(**options).remote(10)
        return self.child

    def pid(self) -> int:
        return os.getpid()


@actorrpc.remote
class Slow(Fragile):
    """Takes its time to be made."""

    def __init__(self, path: str) -> None:
        super().__init__()
        pass_gate(path)


def error_of(ref: Any) -> BaseException:
    """What getting a result raises."""
    with pytest.raises(Exception) as caught:
        actorrpc.get(ref, timeout=30)
    return caught.value
