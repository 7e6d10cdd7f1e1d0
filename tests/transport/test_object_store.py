"""Objects in shared memory: independent for all who read them, recycled only when nobody does, gone when everybody is."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from actorrpc.errors import LimitError, ObjectStoreFullError, ProtocolError
from actorrpc.transport import object_store
from actorrpc.transport.object_accounts import ObjectAccounts
from actorrpc.transport.object_store import ObjectStore, StoredRange

MIB = 1 << 20
SMALL, LARGE = 300 << 10, 9 * MIB


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[ObjectStore]:
    made = ObjectStore(ObjectAccounts(None), limit_bytes=256 * MIB, clock=clock)
    yield made
    made.close()


def put(store: ObjectStore, data: bytes, label: str = "a value", until: float = 0.0) -> StoredRange:
    room = store.allocate(len(data), label=label, site="here.py:1", until=until)
    assert room is not None
    ctypes.memmove(room.address, data, len(data))
    return room.finish()


def give(stored: StoredRange, to: ObjectStore) -> StoredRange:
    """Hand an object to another store as a connection does: its descriptor, and where it is."""
    segment = stored.segment
    theirs = to.adopt(os.dup(segment.fd), segment.id, segment.size, segment.label, segment.site)
    return theirs.range(stored.offset, stored.nbytes)


def inode(stored: StoredRange) -> int:
    return os.fstat(stored.fileno()).st_ino


def memfds() -> int:
    return sum(
        "actorrpc-object" in os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    )


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("actorrpc-object")


# -- values are values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, SMALL, LARGE])
def test_each_map_is_independent(store: ObjectStore, size: int) -> None:
    data = os.urandom(size)
    stored = put(store, data)
    one, other = stored.map(), stored.map()
    one[:1] = bytes([data[0] ^ 1])
    assert bytes(other) == data
    other[-1:] = bytes([data[-1] ^ 2])
    assert bytes(stored.map()) == data
    assert one[0] == data[0] ^ 1


def test_a_range_that_was_written_to_is_as_it_was_when_it_is_given_out_again(store: ObjectStore) -> None:
    stored = put(store, b"a" * SMALL)
    first = stored.map()
    first[:] = b"b" * SMALL
    del first
    assert bytes(stored.map()) == b"a" * SMALL


def test_objects_that_share_a_segment_share_a_mapping(store: ObjectStore) -> None:
    many = [put(store, bytes([n]) * SMALL) for n in range(100)]
    views = [each.map() for each in many]
    assert len({each.segment.id for each in many}) == 1
    assert mappings() == 2  # the writer's and the reader's
    assert [view[-1] for view in views] == list(range(100))
    again = many[7].map()
    again[0] = 99
    assert views[7][0] == 7
    assert mappings() == 3


def test_nothing_is_an_object_as_well(store: ObjectStore) -> None:
    assert bytes(put(store, b"").map()) == b""


def test_views_outlive_everything_else(store: ObjectStore) -> None:
    view = put(store, b"x" * LARGE).map()
    store.close()
    gc.collect()
    assert bytes(view) == b"x" * LARGE


# -- recycled, and given back -------------------------------------------------------------------------------


def test_a_segment_is_filled_again_when_nobody_reads_it(store: ObjectStore) -> None:
    stored = put(store, b"1" * LARGE)
    used = inode(stored)
    name = stored.segment.id
    del stored
    stored = put(store, b"2" * LARGE)
    assert inode(stored) == used
    assert stored.segment.id != name


@pytest.mark.parametrize("holder", ["a reference", "a view", "another store", "in flight"])
def test_a_segment_is_not_filled_under_a_reader(store: ObjectStore, holder: str) -> None:
    stored = put(store, b"1" * LARGE)
    held: Any = stored
    ends = socket.socketpair()
    other = ObjectStore(ObjectAccounts(None), limit_bytes=MIB)
    if holder == "a view":
        held = stored.map()
    elif holder == "another store":
        held = give(stored, other)
    elif holder == "in flight":
        socket.send_fds(ends[0], [b"x"], [stored.segment.fd])
        held = None
    del stored
    inodes = {inode(put(store, b"2" * LARGE)) for _ in range(3)}
    if holder == "a view":
        assert bytes(held) == b"1" * LARGE
    elif held is not None:
        assert bytes(held.map()) == b"1" * LARGE
    else:
        _, fds, _, _ = socket.recv_fds(ends[1], 1, 1)
        assert os.fstat(fds[0]).st_ino not in inodes
        os.close(fds[0])
    del held
    for end in ends:
        end.close()
    other.close()


def test_memory_goes_back_when_it_was_not_used_for_a_while(store: ObjectStore, clock: Clock) -> None:
    kept, dropped = put(store, b"1" * LARGE), put(store, b"2" * LARGE)
    del dropped
    store.trim()
    assert store.stats().free_bytes >= LARGE
    clock.now += 2.0
    store.trim()
    assert store.stats().free_bytes == 0
    assert memfds() == 3  # of the one that is kept: the writer's, its probe, the readers'
    del kept
    store.trim()
    clock.now += 2.0
    store.trim()
    assert not store.writes
    assert memfds() == mappings() == 0


def test_the_segment_that_is_being_shared_goes_back_as_well(store: ObjectStore, clock: Clock) -> None:
    put(store, b"1" * SMALL)
    store.trim()
    clock.now += 2.0
    store.trim()
    assert not store.writes
    assert bytes(put(store, b"3" * SMALL).map()) == b"3" * SMALL


def test_many_small_objects_take_few_descriptors(store: ObjectStore) -> None:
    many = [put(store, b"x" * SMALL) for _ in range(500)]
    assert memfds() <= 3 * (500 * SMALL // (64 * MIB) + 1)
    del many


def test_room_that_is_not_filled_is_free_again(store: ObjectStore) -> None:
    room = store.allocate(LARGE, label="x")
    assert room is not None
    room.discard()
    del room
    store.trim()
    assert store.stats().free_bytes >= LARGE


def test_without_leases_nothing_is_filled_again(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, command: int, argument: Any = 0) -> Any:
        if command == object_store._F_SETLEASE:
            raise OSError(errno.EINVAL, "no leases")
        return fcntl_fcntl(fd, command, argument)

    fcntl_fcntl = fcntl.fcntl
    stored = put(store, b"1" * LARGE)
    monkeypatch.setattr(object_store.fcntl, "fcntl", refuse)
    put(store, b"2" * LARGE)
    last = put(store, b"3" * LARGE)
    assert bytes(stored.map()) == b"1" * LARGE
    assert bytes(last.map()) == b"3" * LARGE


# -- from process to process -----------------------------------------------------------------------------------


@pytest.fixture
def reader() -> Iterator[ObjectStore]:
    made = ObjectStore(ObjectAccounts(None), limit_bytes=MIB)
    yield made
    made.close()


def test_another_store_reads_it_and_changes_nothing(store: ObjectStore, reader: ObjectStore) -> None:
    stored = put(store, b"1" * LARGE)
    theirs = give(stored, reader)
    view = theirs.map()
    view[:4] = b"2222"
    assert bytes(stored.map()) == b"1" * LARGE
    assert bytes(theirs.map()) == b"1" * LARGE


def test_a_segment_that_is_there_already_is_not_held_twice(store: ObjectStore, reader: ObjectStore) -> None:
    stored = put(store, b"1" * LARGE)
    before = memfds()
    first, second = give(stored, reader), give(stored, reader)
    assert first.segment is second.segment
    assert memfds() == before + 1


def test_it_outlives_its_writer(reader: ObjectStore, store: ObjectStore) -> None:
    theirs = give(put(store, b"1" * LARGE), reader)
    store.close()
    assert bytes(theirs.map()) == b"1" * LARGE


def test_readers_can_neither_write_nor_cut(store: ObjectStore) -> None:
    stored = put(store, b"1" * LARGE)
    fd = stored.fileno()
    with pytest.raises(OSError, match="Permission denied"):
        mmap.mmap(fd, LARGE)
    with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument"):
        os.ftruncate(fd, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"2", 0)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        for refused in (
            lambda: mmap.mmap(again, LARGE),
            lambda: os.ftruncate(again, 0),
            lambda: os.pwrite(again, b"2", 0),
        ):
            with pytest.raises(OSError, match="not permitted"):
                refused()
    finally:
        os.close(again)
    assert bytes(stored.map()) == b"1" * LARGE


def _unsealed() -> int:
    fd = os.memfd_create("actorrpc-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, LARGE)
    return fd


def _pipe() -> int:
    ends = os.pipe()
    os.close(ends[1])
    return ends[0]


@pytest.mark.parametrize("make", [_unsealed, _pipe, lambda: os.open("/dev/null", os.O_RDWR)])
def test_memory_that_could_be_taken_away_is_refused(reader: ObjectStore, make: Callable[[], int]) -> None:
    fd = make()
    with pytest.raises(ProtocolError):
        reader.adopt(fd, b"x" * 16, LARGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("place", [(-4096, 10), (1, 10), (0, LARGE + 64 * MIB), (1 << 60, 10), (0, -1)])
def test_a_place_outside_of_a_segment_is_refused(store: ObjectStore, place: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError):
        put(store, b"1" * LARGE).segment.range(*place)


def test_a_segment_is_not_found_again_while_its_descriptor_is_closed(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finaliser of the segment itself could be overtaken: the table would give it out with its descriptor closed."""
    stored = put(store, b"1" * LARGE)
    name, seen = stored.segment.id, []
    closed = os.close

    def close(fd: int) -> None:
        seen.append(store._held.get(name))
        closed(fd)

    monkeypatch.setattr(object_store.os, "close", close)
    del stored
    assert seen == [None]


# -- forks and deaths ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def forked(run: Callable[[], None]) -> Iterator[int]:
    """A child that runs something and then stays until it is let go."""
    (ready, says), (waits, go) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(go)
            run()
            os.write(says, b"x")
            os.read(waits, 1)
            status = 0
        finally:
            os._exit(status)
    os.close(waits)
    os.close(says)
    try:
        assert os.read(ready, 1) == b"x"
        yield pid
    finally:
        os.close(go)
        os.close(ready)
        os.waitpid(pid, 0)


def test_what_a_fork_has_mapped_is_never_filled_again(store: ObjectStore) -> None:
    stored = put(store, b"1" * LARGE)
    views = [stored.map()]
    used = inode(stored)

    def check() -> None:
        store.abandon()
        assert bytes(views[0]) == b"1" * LARGE

    with forked(check):
        del stored
        views.clear()
        others = {inode(put(store, b"2" * LARGE)) for _ in range(3)}
        assert used not in others
    # Its end is all that was waited for.
    kept = [put(store, b"3" * LARGE) for _ in range(3)]
    assert used in {inode(each) for each in kept}


def test_a_fork_lets_go_of_what_it_does_not_need(store: ObjectStore) -> None:
    stored = put(store, b"1" * LARGE)

    def check() -> None:
        store.abandon()
        assert memfds() == mappings() == 0
        with pytest.raises(LimitError):
            stored.map()

    with forked(check):
        pass
    assert bytes(stored.map()) == b"1" * LARGE


def test_a_reader_that_is_killed_has_let_go(store: ObjectStore) -> None:
    stored = put(store, b"1" * LARGE)
    used = inode(stored)
    fd = os.dup(stored.segment.fd)

    def hold() -> None:
        mmap.mmap(fd, LARGE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)

    with forked(hold) as pid:
        os.close(fd)
        del stored
        assert inode(put(store, b"2" * LARGE)) != used
        os.kill(pid, signal.SIGKILL)
    kept = [put(store, b"3" * LARGE) for _ in range(2)]
    assert used in {inode(each) for each in kept}


# -- limits ---------------------------------------------------------------------------------------------------------


def test_full_says_who_holds_what(clock: Clock) -> None:
    store = ObjectStore(ObjectAccounts(None), limit_bytes=3 * LARGE, clock=clock)
    kept = [put(store, b"x" * LARGE, label="put(Tensor)") for _ in range(3)]
    with pytest.raises(ObjectStoreFullError) as caught:
        store.allocate(LARGE, label="the result of A.m")
    for part in (
        "the result of A.m",
        "put(Tensor) made at here.py:1",
        f"process {os.getpid()}",
        "object_memory",
    ):
        assert part in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    del kept
    store.close()


def test_those_that_are_free_make_room(clock: Clock) -> None:
    store = ObjectStore(ObjectAccounts(None), limit_bytes=3 * LARGE, clock=clock)
    for _ in range(20):
        put(store, b"x" * LARGE)
    put(store, b"y" * (2 * LARGE))
    put(store, b"z" * SMALL)
    store.close()


def test_room_is_waited_for(clock: Clock) -> None:
    store = ObjectStore(ObjectAccounts(None), limit_bytes=LARGE + MIB, clock=clock)
    kept: list[Any] = [put(store, b"x" * LARGE)]
    waits = threading.Event()

    def sleep(seconds: float) -> None:
        waits.set()
        kept.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_store._time, "sleep", sleep)
        stored = put(store, b"y" * LARGE, until=float("inf"))
    assert waits.is_set()
    assert bytes(stored.map()) == b"y" * LARGE
    del stored
    store.close()


def test_what_finds_no_room_is_on_disk(tmp_path: Path, reader: ObjectStore, clock: Clock) -> None:
    store = ObjectStore(ObjectAccounts(None), limit_bytes=LARGE + MIB, spill_dir=str(tmp_path), clock=clock)
    kept = put(store, b"1" * LARGE)
    spilled = put(store, b"2" * LARGE)
    small = put(store, b"3" * SMALL)
    assert not list(tmp_path.iterdir())
    assert store.stats().host_bytes <= LARGE + MIB
    theirs = give(spilled, reader)
    view = theirs.map()
    view[:1] = b"9"
    assert bytes(spilled.map()) == b"2" * LARGE
    assert bytes(small.map()) == b"3" * SMALL
    with pytest.raises(OSError, match="Permission denied"):
        mmap.mmap(spilled.fileno(), LARGE)
    assert bytes(kept.map()) == b"1" * LARGE
    del kept, spilled, small, theirs, view
    store.close()


def test_a_full_disk_is_said(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(object_store.os, "posix_fallocate", refuse)
    store = ObjectStore(ObjectAccounts(None), limit_bytes=MIB, spill_dir=str(tmp_path), clock=clock)
    with pytest.raises(ObjectStoreFullError, match="No space left"):
        store.allocate(LARGE, label="x")
    assert not list(tmp_path.iterdir())
    store.close()


def test_without_descriptors_there_is_no_room_here(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(object_store.os, "memfd_create", refuse)
    assert store.allocate(LARGE, label="x") is None


def test_one_in_the_middle_of_another_gets_none(store: ObjectStore) -> None:
    """A finaliser that the collector runs under the lock."""
    store._busy = True
    assert store.allocate(LARGE, label="x") is None
    store.trim()
    store._busy = False


# -- accounts of several processes --------------------------------------------------------------------------------


def two(folder: Path, limit: int = 64 * MIB) -> tuple[ObjectStore, ObjectStore]:
    made = [
        ObjectStore(ObjectAccounts(str(folder / f"1-{n}-3.objects"), ".objects"), limit_bytes=limit)
        for n in (11, 22)
    ]
    return made[0], made[1]


def test_a_segment_counts_once_for_all_that_hold_it(tmp_path: Path) -> None:
    one, other = two(tmp_path)
    stored = put(one, b"1" * LARGE)
    theirs = give(stored, other)
    assert one.stats().host_bytes == other.stats().host_bytes
    assert LARGE <= other.stats().host_bytes <= 1.3 * LARGE
    del stored
    one.trim()
    assert other.stats().host_bytes >= LARGE  # who reads it holds it
    del theirs
    other.trim()
    assert other.stats().host_bytes == one.stats().host_bytes == 0
    one.close()
    other.close()
    assert not list(tmp_path.iterdir())


def test_the_limit_is_for_all_of_them(tmp_path: Path) -> None:
    one, other = two(tmp_path, limit=2 * LARGE + MIB)
    kept = [put(one, b"1" * LARGE, label="theirs") for _ in range(2)]
    with pytest.raises(ObjectStoreFullError, match=r"theirs made at here.py:1, in process 11"):
        put(other, b"2" * LARGE)
    del kept
    one.close()
    assert bytes(put(other, b"2" * LARGE).map()) == b"2" * LARGE
    other.close()


def test_a_file_without_a_process_does_not_count_and_goes(tmp_path: Path) -> None:
    one, other = two(tmp_path)

    def hold() -> None:
        put(one, b"1" * LARGE)
        one.let_go.clear()

    with forked(hold):
        assert [each.name for each in tmp_path.iterdir()] == ["1-11-3.objects"]
        assert sum(each.nbytes for each in other._accounts.rows()) >= LARGE
    assert other._accounts.rows() == []
    assert not list(tmp_path.iterdir())
    one.close()
    other.close()


# -- against a model ----------------------------------------------------------------------------------------------


class Objects(RuleBasedStateMachine):
    """Two stores of one group, random steps, and what each value must be."""

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.accounts = [ObjectAccounts(None), ObjectAccounts(None)]
        self.stores = [ObjectStore(each, limit_bytes=1 << 30, clock=self.clock) for each in self.accounts]
        self.ranges: list[tuple[StoredRange, int, bytes]] = []
        self.views: list[tuple[memoryview, bytearray]] = []
        self.made = 0

    @rule(large=st.booleans(), store=st.integers(0, 1))
    def put(self, large: bool, store: int) -> None:
        self.made += 1
        data = self.made.to_bytes(4, "little") * ((LARGE if large else SMALL) // 4)
        self.ranges.append((put(self.stores[store], data), store, data[:4]))

    @rule(which=st.integers(0, 1 << 30))
    def give(self, which: int) -> None:
        if self.ranges:
            stored, store, data = self.ranges[which % len(self.ranges)]
            self.ranges.append((give(stored, self.stores[1 - store]), 1 - store, data))

    @rule(which=st.integers(0, 1 << 30))
    def map(self, which: int) -> None:
        if self.ranges and len(self.views) < 8:
            stored, _, data = self.ranges[which % len(self.ranges)]
            self.views.append((stored.map(), bytearray(data * (stored.nbytes // 4))))

    @rule(which=st.integers(0, 1 << 30), at=st.integers(0, 1 << 30), value=st.integers(0, 255))
    def write(self, which: int, at: int, value: int) -> None:
        if self.views:
            view, model = self.views[which % len(self.views)]
            view[at % len(view)] = model[at % len(view)] = value

    @rule(which=st.integers(0, 1 << 30))
    def let_go(self, which: int) -> None:
        if self.ranges:
            del self.ranges[which % len(self.ranges)]

    @rule(which=st.integers(0, 1 << 30))
    def drop(self, which: int) -> None:
        if self.views:
            del self.views[which % len(self.views)]

    @rule(seconds=st.sampled_from([0.0, 0.6, 2.0]), store=st.integers(0, 1))
    def trim(self, seconds: float, store: int) -> None:
        self.clock.now += seconds
        self.stores[store].trim()

    @invariant()
    def values_are_what_they_were(self) -> None:
        for view, model in getattr(self, "views", []):
            assert view[:4096] == model[:4096]
            assert view == model

    def teardown(self) -> None:
        if not hasattr(self, "stores"):
            return
        for stored, _, data in self.ranges:
            assert bytes(stored.map()[:4]) == data
        self.ranges.clear()
        self.views.clear()
        for store in self.stores:
            store.trim()
        self.clock.now += 2.0
        for store in self.stores:
            store.trim()
            assert not store.writes
            assert store.stats().held == ()
            store.close()
        assert memfds() == mappings() == 0


TestObjects = Objects.TestCase
TestObjects.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


@pytest.mark.slow
class TestObjectsLonger(Objects.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
