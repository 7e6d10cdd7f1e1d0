"""What is kept of what processes have printed: bounded, fair to those that say little, and read page by page."""

from __future__ import annotations

import pytest

from actorrpc.cluster import logs
from actorrpc.cluster.logs import History


def _texts(history: History, since: int = 1) -> list[tuple[int, str]]:
    return [(line[2], line[5]) for line in history.since(since, 10_000, 1 << 30)[0]]


def test_lines_are_kept_in_order() -> None:
    history = History()
    history.add(7, False, [("A", "one"), ("A", "two")])
    history.add(8, True, [("B", "three")])
    lines, following, more = history.since(1, 10, 1 << 20)
    assert [[line[0], *line[2:]] for line in lines] == [
        [1, 7, "A", False, "one"],
        [2, 7, "A", False, "two"],
        [3, 8, "B", True, "three"],
    ]
    assert (following, more) == (4, False)
    assert history.since(following, 10, 1 << 20) == ([], 4, False)


def test_one_that_prints_a_lot_does_not_push_out_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "HISTORY_BYTES", 64 << 10)
    history = History()
    history.add(8, False, [("B", "the last words of a process")])
    for number in range(1000):
        history.add(7, False, [("A", f"{number} {'x' * 400}")])
    found = _texts(history)
    assert found[0] == (8, "the last words of a process")
    assert found[-1][1].startswith("999 ")
    assert 64 < len(found) < 200
    assert history._size <= 64 << 10
    assert history._size == sum(history._sizes.values())
