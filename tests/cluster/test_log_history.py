"""The history of printed lines: bounded, fair to processes that print little, and read in pages."""

from __future__ import annotations

import pytest

from actorrpc.cluster import logs
from actorrpc.cluster.logs import History


def _texts(history: History, since: int = 1) -> list[tuple[int, str]]:
    return [(line[2], line[5]) for line in history.since(since, 10_000, 1 << 30)[0]]


def test_printed_lines_are_kept_in_order() -> None:
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


def test_workers_are_listed_as_long_as_their_printed_lines_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "HISTORY_BYTES", 1 << 10)
    history = History()
    history.add(7, False, [("A", "one")], "A-1")
    history.add(8, False, [("fork server", "it is no worker")])
    assert history.workers() == [(7, "A-1")]
    history.add(7, False, [("A", "x" * 5000)], "A-1")
    assert history.workers() == []


def test_printed_lines_are_read_in_pages() -> None:
    history = History()
    history.add(7, False, [("A", "x" * 500) for _ in range(5)])
    found, at, more = [], 1, True
    while more:
        lines, at, more = history.since(at, 2, 1 << 20)
        assert len(lines) <= 2
        found += lines
    assert [line[0] for line in found] == [1, 2, 3, 4, 5]
    # A line larger than a page is returned alone.
    assert len(history.since(1, 10, 1)[0]) == 1


def test_a_process_that_prints_much_does_not_evict_lines_of_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_a_line_larger_than_the_history_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "HISTORY_BYTES", 1 << 10)
    history = History()
    history.add(7, False, [("A", "x" * 5000)])
    assert _texts(history) == []
    history.add(7, False, [("A", "next")])
    assert _texts(history) == [(7, "next")]
