"""The object store against a model: random steps of three processes of a host, which end and are replaced at random."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actorrpc.errors import ObjectStoreFullError
from actorrpc.transport.object_store import Allocation, StoredRange
from tests.transport.object_stores import (
    MIB,
    SUFFIX,
    Host,
    hand_over,
    memory_by_inode,
    segments,
    write,
)

_LIMIT = 48 * MIB


_ANY = st.integers(0, 1 << 30)
_SIZES = st.sampled_from([1, 256 << 10, MIB + 7, 7 * MIB, 8 * MIB, 9 * MIB, 12 * MIB, 20 * MIB])


class Objects(RuleBasedStateMachine):
    """Objects keep their content, memory stays within the limit, and no memory is left at the end."""

    @initialize()
    def begin(self) -> None:
        self.before = segments()
        self.folder = tempfile.TemporaryDirectory()
        self.host = Host(Path(self.folder.name), reread_s=0.0)
        self.stores = [self.host.store(_LIMIT) for _ in range(3)]
        self.ranges: list[tuple[StoredRange, int, int]] = []  # the range, its store, the byte that fills it
        self.rooms: list[tuple[Allocation, int, int]] = []
        self.views: list[tuple[memoryview, dict[int, int], int]] = []
        self.made = 0

    @rule(nbytes=_SIZES, store=_ANY)
    def allocate(self, nbytes: int, store: int) -> None:
        """Allocate an object, if there is room."""
        store %= len(self.stores)
        try:
            room = self.stores[store].allocate(nbytes, label="a thing", site="here.py:1")
        except ObjectStoreFullError:
            return
        assert room is not None
        self.made = self.made % 250 + 1
        # Pages that were never written take no memory, but count.
        for place in _places(nbytes):
            write(room.address + place, bytes([self.made]))
        self.rooms.append((room, store, self.made))

    @precondition(lambda self: self.rooms)
    @rule(which=_ANY)
    def finish(self, which: int) -> None:
        """Fill an allocation."""
        room, store, content = self.rooms.pop(which % len(self.rooms))
        for place in _places(room.stored.nbytes):
            write(room.address + place, bytes([content]))
        self.ranges.append((room.stored, store, content))

    @precondition(lambda self: self.rooms)
    @rule(which=_ANY)
    def give_up(self, which: int) -> None:
        """Drop an allocation."""
        del self.rooms[which % len(self.rooms)]

    @precondition(lambda self: self.ranges)
    @rule(which=_ANY, store=_ANY)
    def hand_over(self, which: int, store: int) -> None:
        """Send an object to any of the processes, including its own."""
        stored, _, content = self.ranges[which % len(self.ranges)]
        store %= len(self.stores)
        self.ranges.append((hand_over(stored, self.stores[store]), store, content))

    @precondition(lambda self: self.ranges and len(self.views) < 12)
    @rule(which=_ANY)
    def open(self, which: int) -> None:
        """Get a value."""
        stored, _, content = self.ranges[which % len(self.ranges)]
        self.views.append((stored.map(), {}, content))

    @precondition(lambda self: self.views)
    @rule(which=_ANY, place=_ANY, value=st.integers(0, 255))
    def change(self, which: int, place: int, value: int) -> None:
        """Write to a value."""
        view, changes, _ = self.views[which % len(self.views)]
        places = _places(len(view))
        at = places[place % len(places)]
        view[at] = changes[at] = value

    @precondition(lambda self: self.ranges)
    @rule(which=_ANY)
    def let_go(self, which: int) -> None:
        """Drop a reference."""
        del self.ranges[which % len(self.ranges)]

    @precondition(lambda self: self.views)
    @rule(which=_ANY)
    def drop(self, which: int) -> None:
        """Drop a value."""
        del self.views[which % len(self.views)]

    @rule(seconds=st.sampled_from([0.5, 1.5]))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.host.pass_time(seconds)

    @rule(store=_ANY)
    def end(self, store: int) -> None:
        """End a process: its references are dropped, views of its objects stay valid."""
        store %= len(self.stores)
        self.ranges = [each for each in self.ranges if each[1] != store]
        self.rooms = [each for each in self.rooms if each[1] != store]
        self.stores[store].close()
        self.host.stores.remove(self.stores[store])
        self.stores[store] = self.host.store(_LIMIT)

    @invariant()
    def values_are_what_they_were(self) -> None:
        """Each view has the content of its object, apart from its own changes."""
        for view, changes, content in getattr(self, "views", []):
            for place in _places(len(view)):
                assert view[place] == changes.get(place, content)

    @invariant()
    def no_more_memory_is_taken_than_may_be(self) -> None:
        """All segments of the processes together, including free segments, stay within the limit."""
        if hasattr(self, "before"):
            assert sum(memory_by_inode(each) for each in segments() - self.before) <= _LIMIT
            for each in self.stores:
                stats = each.stats()
                assert stats.held_bytes <= stats.host_bytes <= _LIMIT

    def teardown(self) -> None:
        """Check all ranges, release everything, and check that no memory is left."""
        if not hasattr(self, "before"):
            return
        for stored, _, content in self.ranges:
            view = stored.map()
            assert {view[place] for place in _places(len(view))} == {content}
            del view, stored
        self.ranges.clear()
        self.rooms.clear()
        self.views.clear()
        self.host.pass_time(2)
        for each in self.stores:
            assert not each.writes
            assert each.stats().held == ()
            assert each.stats().host_bytes == 0
        assert segments() <= self.before
        self.host.close()
        assert not [path for path in Path(self.folder.name).iterdir() if path.name.endswith(SUFFIX)]
        self.folder.cleanup()


def _places(nbytes: int) -> list[int]:
    """Return the offsets that are checked: both ends, the middle, and both sides of some page boundaries."""
    return sorted(
        {0, nbytes - 1, nbytes // 2, *(at for at in (4095, 4096, nbytes // 4096 * 4096) if at < nbytes)}
    )


TestObjects = Objects.TestCase
TestObjects.settings = settings(max_examples=12, stateful_step_count=30)


@pytest.mark.slow
@pytest.mark.limit(600)  # 43 s on an idle machine
class TestObjectsLonger(Objects.TestCase):  # type: ignore[misc,name-defined]
    """The same with more and longer examples."""

    settings = settings(max_examples=400, stateful_step_count=80)
