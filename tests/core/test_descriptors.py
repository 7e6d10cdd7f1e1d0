"""The soft limit of descriptors: raised for those who are in contact with many, and left alone otherwise."""

from __future__ import annotations

import operator
import os
import resource
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


def _all_to_all(rank: int, world_size: int) -> tuple[int, int]:
    few = len(os.listdir("/proc/self/fd")) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, _limits()[1]))
    others = [f"worker{(rank + n) % world_size}" for n in range(1, world_size)]
    futures = [rpc.rpc_async(each, operator.add, (rank, 1)) for each in others]
    assert [each.wait() for each in futures] == [rank + 1] * len(others)
    return few, _limits()[0]


def test_a_worker_that_is_in_contact_with_many_has_room_for_them() -> None:
    for before, after in rpc_group(_all_to_all, 8):
        assert after > before
