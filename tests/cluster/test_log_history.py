"""The history of printed lines: bounded, fair to processes that print little, and read in pages."""

from __future__ import annotations

from actorrpc.cluster.logs import HISTORY_BYTES, History


def test_printed_lines_are_kept_in_order_and_read_in_pages() -> None:
    history = History()
    history.add(7, False, [("A", "one"), ("A", "two")])
    history.add(8, True, [("B", "three")], "B-1", "far")
    lines, following, more = history.since(1, 2, 1 << 20)
    assert [[line[0], *line[2:6]] for line in lines] == [[1, 7, "A", False, "one"], [2, 7, "A", False, "two"]]
    assert (following, more) == (3, True)
    lines, following, more = history.since(following, 2, 1 << 20)
    assert [[line[0], *line[2:]] for line in lines] == [[3, 8, "B", True, "three", "B-1", "far"]]
    assert (following, more) == (4, False)
    assert history.since(following, 10, 1 << 20) == ([], 4, False)
    # A line larger than a page is returned alone.
    assert len(history.since(1, 10, 1)[0]) == 1


def test_a_process_that_prints_much_evicts_only_its_own_lines() -> None:
    history = History()
    history.add(8, False, [("B", "the last words of a process")], "B-1")
    history.add(6, False, [("C", "x" * (HISTORY_BYTES + 1))], "C-1")  # larger than the history
    for number in range(1000):
        history.add(7, False, [("A", f"{number} {'x' * 10_000}")], "A-1")
    texts = [line[5] for line in history.since(1, 10_000, 1 << 30)[0]]
    assert texts[0] == "the last words of a process"
    assert texts[-1].startswith("999 ")
    assert HISTORY_BYTES / 2 < sum(map(len, texts)) <= HISTORY_BYTES
    assert sorted(history.workers()) == [(7, "A-1"), (8, "B-1")]  # workers whose lines are kept
