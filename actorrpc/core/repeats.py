"""Repeats: a request that comes a second time is not executed a second time, and an answer's references are taken up once.

A connection delivers each byte once, also when another socket takes its place, so none comes twice unless something is
broken: a peer, or the code that resumes. What it would do then cannot be taken back, so every request's number is looked
up before anything of it runs.
"""

from __future__ import annotations

from typing import Final

__all__ = ["KEPT", "Begun"]

KEPT: Final = 4096  # numbers; between one and two times as many are remembered


class Begun:
    """The numbers of one peer's requests, or answers, that have been taken up lately. Thread-safe, without a lock.

    Each step is atomic by itself. Where two threads find the younger half full at once, one of them alone moves it.
    """

    __slots__ = ("_older", "_younger")

    def __init__(self) -> None:
        self._younger: dict[int, object] = {}
        self._older: dict[int, object] = {}

    def __contains__(self, id: int) -> bool:
        return id in self._younger or id in self._older

    def first(self, id: int) -> bool:
        """Note that one is taken up; say whether it is so for the first time."""
        younger, mark = self._younger, object()
        # The older half before it is put in: another thread may make that half of the younger one at any moment.
        if id in self._older or younger.setdefault(id, mark) is not mark:
            return False
        if len(younger) >= KEPT and younger is self._younger:
            # The older half first: in between, what is in ``younger`` is found in both.
            self._older = younger
            self._younger = {}
        return True
