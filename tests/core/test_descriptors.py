"""The soft limit of descriptors: raised for those who are in contact with many, and left alone otherwise."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator

import pytest

from actorrpc import rpc
from actorrpc.core.descriptors import make_room
from tests.group import rpc_group


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.fixture
def soft() -> Iterator[int]:
    before = _limits()
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield 512
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_it_is_left_alone_until_it_is_near(soft: int) -> None:
    make_room(soft // 2)
    assert _limits()[0] == soft
    make_room(soft - 1)
    assert _limits()[0] == 2 * soft


def test_it_stays_within_the_hard_limit(soft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft + 10))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    make_room(soft - 1)
    assert asked == [(soft + 10, soft + 10)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    make_room(soft - 1)
    assert len(asked) == 1


def test_where_it_cannot_be_raised_that_is_said_and_no_error(
    soft: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    make_room(soft - 1)
    assert "cannot be raised" in caplog.text


_called = threading.Event()


def _call() -> int:
    _called.set()
    return 1


def _one_to_all(rank: int, world_size: int) -> tuple[int, int] | None:
    if rank:
        assert _called.wait(50)  # so that nobody comes to the first one by itself
        return None
    few = len(os.listdir("/proc/self/fd")) + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, _limits()[1]))
    for other in range(1, world_size):
        assert rpc.rpc_sync(f"worker{other}", _call) == 1
    return few, _limits()[0]


def test_a_worker_that_is_in_contact_with_many_has_room_for_them() -> None:
    few, after = rpc_group(_one_to_all, 12)[0]
    assert after > few
