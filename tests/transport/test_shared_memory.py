"""The shared-memory lane for tensors: data stays intact while it has readers, memory is reused, and nothing leaks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import resource
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actorrpc.errors import LimitError, ProtocolError
from actorrpc.serialization.tensors import TensorSpan
from actorrpc.transport import shared_memory
from actorrpc.transport.buffers import MemoryRange, sealed_memfd
from actorrpc.transport.shared_memory import MOST_SEGMENTS, Borrower, Lender
from tests.forks import exit_code, fork
from tests.transport.object_stores import Clock, address_of

KIB = 1 << 10
SEGMENT = 256 * KIB  # the smallest segment


def span(data: bytes | bytearray) -> MemoryRange:
    return TensorSpan.of(bytearray(data))


@dataclass
class Lane:
    """Both ends of a lane in one process, and the messages that their connection would carry."""

    lender: Lender
    borrower: Borrower
    ours: socket.socket
    theirs: socket.socket
    clock: Clock = field(default_factory=Clock)

    @classmethod
    def open(
        cls,
        *,
        limit: int = 64 << 20,
        threshold: int = 1,
        kind: int = socket.SOCK_STREAM,
        sndbuf: int = 0,
        max_segments: int = MOST_SEGMENTS,
    ) -> Lane:
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        ours.setblocking(False)
        theirs.setblocking(False)
        if sndbuf:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
        clock = Clock()
        lender = Lender(ours, limit_bytes=limit, threshold=threshold, clock=clock)
        return cls(lender, Borrower(theirs, max_segments=max_segments), ours, theirs, clock)

    def send(self, *data: bytes) -> list[memoryview]:
        return self.receive(self.place(*data), *map(len, data))

    def place(self, *data: bytes) -> tuple[int, int]:
        placement = self.lender.place([span(each) for each in data])
        assert placement is not None
        return placement

    def receive(self, placement: Iterable[int], *sizes: int) -> list[memoryview]:
        segment, loan = placement
        return self.borrower.views(segment, loan, sizes)

    def settle(self) -> None:
        """Exchange the messages about freed and retired segments."""
        self.lender.reclaim(self.borrower.drain_freed())
        self.lender.trim()
        self.borrower.retire(self.lender.drain_retired())

    def close(self) -> None:
        self.lender.close()
        self.borrower.close()


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane.open()
    yield lane
    lane.close()


@contextlib.contextmanager
def full() -> Iterator[None]:
    """Keep this process from opening further descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:actorrpc")


# -- sending and reusing ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_buffers_arrive_whole_aligned_and_writable(kind: int) -> None:
    lane = Lane.open(kind=kind)
    data = [os.urandom(n) for n in (1, 0, 64, 100_000, 65, 3 << 20)]
    views = lane.send(*data)
    assert [bytes(view) for view in views] == data
    assert all(not view.readonly and view.format == "B" for view in views)
    assert all(address_of(view) % 64 == 0 for view in views if len(view))
    lane.close()


def test_a_segment_is_reused_after_all_its_views_were_freed(lane: Lane) -> None:
    first, second = lane.send(b"a" * 100_000, b"b" * 100_000)
    address = address_of(first)
    tensor = torch.frombuffer(first, dtype=torch.uint8)[5:6]
    array_ = np.frombuffer(second, dtype=np.uint8)[1:]
    del first
    lane.settle()
    assert not lane.borrower.freed
    del second, tensor
    gc.collect()
    assert lane.borrower.drain_freed() == []
    assert bytes(array_[:2]) == b"bb"
    del array_
    assert lane.borrower.freed
    assert lane.borrower.held_bytes
    lane.settle()
    assert not lane.borrower.held_bytes
    assert not lane.borrower.freed
    views = lane.send(b"c" * 200_000)
    assert address_of(views[0]) == address
    assert lane.lender.stats().segments == 1
    assert mappings() == 2


# -- limits ---------------------------------------------------------------------------------------------


def test_lent_segments_stay_within_the_limit() -> None:
    lane = Lane.open(limit=4 * SEGMENT)
    assert lane.lender.place([span(b"a" * (4 * SEGMENT + 1))]) is None
    views = [lane.send(b"a" * SEGMENT) for _ in range(4)]
    assert lane.lender.place([span(b"a" * 1000)]) is None
    views.pop()
    lane.settle()
    views.append(lane.send(b"b" * 1000))
    assert lane.lender.stats().lent_bytes == 4 * SEGMENT
    lane.close()


def test_idle_shared_memory_segments_are_freed_oldest_first() -> None:
    lane = Lane.open(limit=8 * SEGMENT)
    views = [lane.send(b"a" * SEGMENT) for _ in range(6)]
    del views[:3]
    lane.settle()
    lane.clock.now += 10
    del views[:]
    lane.settle()  # more than half of the limit is free, and some segments have been free for more than 3 s
    assert lane.lender.stats().segments == 4
    assert mappings() == 2 * 4
    lane.clock.now += 29
    lane.send(b"a" * SEGMENT).clear()
    lane.settle()
    lane.clock.now += 2
    lane.lender.trim()
    lane.settle()
    assert lane.lender.stats().segments == 1
    assert mappings() == 2
    assert bytes(lane.send(b"b")[0]) == b"b"
    lane.close()


def test_retiring_a_segment_that_was_never_read_drops_its_descriptor(lane: Lane) -> None:
    placement = lane.lender.place([span(b"a" * SEGMENT)])
    assert placement is not None
    lane.lender.reclaim([placement])
    lane.lender.trim()
    lane.clock.now += 100
    lane.lender.trim()
    lane.settle()
    assert mappings() == 0
    with pytest.raises(BlockingIOError):
        lane.theirs.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    lane.borrower.retire([1, 2, 3])


def test_a_retired_segment_stays_mapped_until_its_last_view_is_freed(lane: Lane) -> None:
    tensor = torch.frombuffer(lane.send(b"a" * 1000)[0], dtype=torch.uint8)
    lane.borrower.retire([1])
    assert mappings() == 2
    assert bool((tensor == 97).all())
    del tensor
    assert mappings() == 1
    assert lane.borrower.drain_freed() == [(1, 1)]


# -- falling back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_full_descriptor_socket_falls_back_to_the_main_socket(kind: int) -> None:
    lane = Lane.open(kind=kind, sndbuf=4608)
    placements = []
    while placement := lane.lender.place([span(b"a" * 1000)]):
        placements.append(placement)
    assert len(placements) > 1
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        lane.clock.now += 1
        assert lane.lender.place([span(b"a" * 1000)]) is None
    assert lane.lender.stats().segments == len(placements)
    assert len(os.listdir("/proc/self/fd")) == before
    views = [lane.receive(placement, 1000) for placement in placements]
    lane.clock.now += 1
    views.append(lane.send(b"b" * 1000))
    assert {bytes(view) for each in views for view in each} == {b"a" * 1000, b"b" * 1000}
    lane.close()


def test_lack_of_shared_memory_falls_back_to_the_main_socket(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where, name in ((os, "memfd_create"), (os, "ftruncate"), (shared_memory, "reserve")):
        for error in (OSError(errno.ENOSPC, "No space left on device"), MemoryError()):
            with monkeypatch.context() as patched:
                patched.setattr(where, name, Mock(side_effect=error))
                assert lane.lender.place([span(b"b" * 1000)]) is None
            lane.clock.now += 2
            assert lane.lender.stats().segments == 0
    assert lane.send(b"d" * 1000) == [b"d" * 1000]


def test_a_closed_descriptor_socket_falls_back_to_the_main_socket(lane: Lane) -> None:
    lane.theirs.close()
    assert lane.lender.place([span(b"a" * 1000)]) is None
    assert lane.lender.stats().segments == 0


def test_the_lane_works_on_kernels_without_the_noexec_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.memfd_create

    def older(name: str, flags: int) -> int:
        if flags & 8:
            raise OSError(errno.EINVAL, "Invalid argument")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", older)
    lane = Lane.open()
    assert bytes(lane.send(b"a" * 1000)[0]) == b"a" * 1000
    lane.close()


def test_a_finaliser_that_sends_while_the_lane_is_locked_falls_back_to_the_main_socket(lane: Lane) -> None:
    results: list[object] = []

    def finaliser() -> None:
        results.append(lane.lender.place([span(b"a" * 1000)]))
        lane.lender.reclaim([(1, 1)])

    lane.clock.hook = finaliser
    placement = lane.lender.place([span(b"b" * 1000)])
    assert results
    assert set(results) == {None}
    assert placement is not None
    assert bytes(lane.receive(placement, 1000)[0]) == b"b" * 1000
    lane.clock.hook = None


# -- malicious peers -----------------------------------------------------------------------------------------


def announce(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    sock.sendmsg([data], rights)
    for fd in fds:
        os.close(fd)


def memfd(size: int, seals: int) -> int:
    fd = os.memfd_create("actorrpc-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def plain_file() -> int:
    return os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)


BOTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def _announced(number: int, size: int) -> bytes:
    return struct.pack("<QQ16s64s64s", number, size, b"", b"", b"")


GOOD = _announced(1, SEGMENT)
HOSTILE: dict[str, tuple[bytes, Callable[[], list[int]]]] = {
    "unsealed": (GOOD, lambda: [memfd(SEGMENT, 0)]),
    "may shrink": (GOOD, lambda: [memfd(SEGMENT, fcntl.F_SEAL_GROW)]),
    "shorter than announced": (GOOD, lambda: [memfd(SEGMENT // 2, BOTH)]),
    "longer than announced": (GOOD, lambda: [memfd(2 * SEGMENT, BOTH)]),
    "sealed against writing": (GOOD, lambda: [memfd(SEGMENT, BOTH | fcntl.F_SEAL_WRITE)]),
    "a file": (GOOD, lambda: [plain_file()]),
    "a pipe": (GOOD, lambda: list(os.pipe2(os.O_CLOEXEC))[:1]),
    "no descriptor": (GOOD, list),
    "two descriptors": (GOOD, lambda: [sealed_memfd(SEGMENT), sealed_memfd(SEGMENT)]),
    "short message": (GOOD[:9], lambda: [sealed_memfd(SEGMENT)]),
    "no size class": (_announced(1, SEGMENT + 4096), lambda: [memfd(SEGMENT + 4096, BOTH)]),
    "too small": (_announced(1, 4096), lambda: [sealed_memfd(4096)]),
    "no size at all": (_announced(1, 0), lambda: [memfd(0, BOTH)]),
    "huge": (_announced(1, (1 << 64) - 1), lambda: [sealed_memfd(SEGMENT)]),
    "more than may be lent": (_announced(1, 1 << 43), lambda: [sealed_memfd(1 << 43)]),
}


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize("case", HOSTILE)
def test_a_malformed_segment_announcement_is_refused(case: str, kind: int) -> None:
    lane = Lane.open(kind=kind)
    data, make = HOSTILE[case]
    # The case "a pipe" leaves its other end open: close all new descriptors.
    before = set(os.listdir("/proc/self/fd"))
    fds = make()
    announce(lane.ours, data, fds)
    with pytest.raises(ProtocolError):
        lane.borrower.views(1, 1, (10,))
    for name in set(os.listdir("/proc/self/fd")) - before:
        try:
            assert case == "a pipe" or not os.readlink(f"/proc/self/fd/{name}").startswith(("/memfd", "pipe"))
            os.close(int(name))
        except OSError:
            pass  # the descriptor of the listing itself
    assert mappings() == 0
    lane.close()


def test_a_segment_received_without_free_descriptors_raises_limit_error_and_can_be_sent_again(
    lane: Lane,
) -> None:
    for _ in range(2):
        placement = lane.lender.place([span(b"a" * (3 << 20))])
        assert placement is not None
        with (
            full(),
            pytest.raises(LimitError, match=r"3 MiB of shared memory cannot be taken here: .*RLIMIT_NOFILE"),
        ):
            lane.receive(placement, 3 << 20)
        lane.settle()
        assert lane.lender.stats().lent_bytes == 0
    assert lane.send(b"b" * (3 << 20)) == [b"b" * (3 << 20)]
    assert lane.lender.stats().segments == 1


def test_a_segment_retired_before_it_was_received_is_dropped(lane: Lane) -> None:
    announce(lane.ours, GOOD, [sealed_memfd(SEGMENT)])
    announce(lane.ours, _announced(2, SEGMENT), [sealed_memfd(SEGMENT)])
    with full():
        lane.borrower.retire([1])
    lane.borrower.views(2, 1, (10,))
    assert mappings() == 1


def test_announcing_a_shared_memory_segment_twice_is_refused(lane: Lane) -> None:
    announce(lane.ours, GOOD, [sealed_memfd(SEGMENT)])
    announce(lane.ours, GOOD, [sealed_memfd(SEGMENT)])
    lane.borrower.views(1, 1, (10,))
    with pytest.raises(ProtocolError):
        lane.borrower.views(2, 1, (10,))


def test_the_number_of_segments_a_peer_may_lend_is_limited() -> None:
    lane = Lane.open(max_segments=2)
    views = [lane.send(b"a" * 1000) for _ in range(2)]
    with pytest.raises(ProtocolError):
        lane.send(b"a" * 1000)
    del views
    lane.close()


@pytest.mark.parametrize(
    "sizes",
    [(SEGMENT + 1,), (SEGMENT, 1), (-1,), (10, -10), (1 << 63, 1 << 63), (1,) * 20_000],
)
def test_buffers_that_exceed_their_segment_are_refused(lane: Lane, sizes: tuple[int, ...]) -> None:
    placement = lane.place(b"a" * 1000)
    with pytest.raises(ProtocolError):
        lane.receive(placement, *sizes)
    assert bytes(lane.receive(placement, 1000)[0]) == b"a" * 1000


def test_a_segment_cannot_be_lent_twice_before_it_was_returned(lane: Lane) -> None:
    view = lane.send(b"a" * 1000)
    for loan in (1, 2, 0, -5):
        with pytest.raises(ProtocolError):
            lane.borrower.views(1, loan, (10,))
    view.clear()
    with pytest.raises(ProtocolError):  # unused, but not returned yet
        lane.borrower.views(1, 2, (10,))
    lane.settle()
    assert bytes(lane.send(b"b" * 1000)[0]) == b"b" * 1000


def test_a_segment_that_was_never_announced_is_an_error_after_a_short_wait(lane: Lane) -> None:
    with pytest.raises(ProtocolError, match="never announced"):
        lane.borrower.views(9, 1, (10,))
    lane.ours.close()
    with pytest.raises(ProtocolError, match="closed"):
        lane.borrower.views(9, 1, (10,))


def test_views_wait_for_a_late_segment_announcement(lane: Lane) -> None:
    found: list[list[memoryview]] = []
    thread = threading.Thread(target=lambda: found.append(lane.borrower.views(1, 1, (4,))))
    thread.start()
    placement = lane.lender.place([span(b"late")])
    thread.join(30)
    assert placement is not None
    assert [[bytes(view) for view in views] for views in found] == [[b"late"]]
    found.clear()


# -- the end -----------------------------------------------------------------------------------------------


def test_received_tensors_stay_valid_after_the_lane_is_closed() -> None:
    lane = Lane.open()
    tensor = torch.frombuffer(lane.send(b"a" * 100_000)[0], dtype=torch.uint8)
    lane.close()
    lane.close()
    assert mappings() == 1
    assert bool((tensor == 97).all())
    tensor.fill_(5)
    del lane
    gc.collect()
    assert int(tensor.sum()) == 500_000
    del tensor
    gc.collect()
    assert mappings() == 0


def test_a_closed_lane_ignores_messages_and_lends_nothing() -> None:
    lane = Lane.open()
    kept = lane.send(b"a" * 1000)
    lane.close()
    assert lane.lender.place([span(b"a" * 1000)]) is None
    lane.lender.reclaim([(1, 1)])
    lane.lender.trim()
    assert lane.lender.drain_retired() == []
    with pytest.raises(ProtocolError):
        lane.borrower.views(1, 2, (10,))
    kept.clear()
    assert lane.borrower.drain_freed() == []
    lane.borrower.retire([1, 2])


# -- two processes -----------------------------------------------------------------------------------------


def test_memory_inherited_by_a_child_is_not_reused_while_the_child_lives(lane: Lane) -> None:
    near, far = socket.socketpair()
    held = [torch.frombuffer(lane.send(b"a" * 1000)[0], dtype=torch.uint8)]

    def child() -> None:
        lane.lender.abandon()
        lane.borrower.abandon()
        assert lane.theirs.fileno() == -1  # the child cannot take the descriptors that the parent waits for
        near.close()
        far.recv(1)
        assert bool((held[0] == 97).all())
        assert lane.lender.place([span(b"x" * 1000)]) is None  # the lane belongs to the parent

    lane.borrower.before_fork()  # as the agent does
    pid = fork(child)
    lane.borrower.after_fork_in_parent()
    far.close()
    held.clear()
    for _ in range(3):
        lane.settle()
        assert bytes(lane.send(b"b" * 1000)[0]) == b"b" * 1000
    assert lane.lender.stats().lent_bytes >= SEGMENT
    near.send(b"!")
    assert exit_code(pid) == 0
    near.close()
    lane.settle()
    lane.settle()
    assert lane.lender.stats().lent_bytes == 0


# -- any order -----------------------------------------------------------------------------------------------


EVENTS = ["send", "send", "send", "drop", "drop", "settle", "twice", "unsent", "idle", "part"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(EVENTS),
            st.integers(0, 1 << 20),
        ),
        max_size=40,
    )
)
def test_random_event_sequences_keep_data_intact_and_memory_bounded(steps: list[tuple[str, int]]) -> None:
    limit = 2 << 20
    lane = Lane.open(limit=limit, threshold=1000)
    live: list[tuple[list[memoryview], list[bytes]]] = []
    history: list[tuple[int, int]] = []
    for number, (event, value) in enumerate(steps):
        if event in ("send", "unsent"):
            total = value % 900_000
            sizes = [total // 3, total - total // 3]
            data = [bytes([number]) * size for size in sizes]
            placement = lane.lender.place([span(each) for each in data])
            if placement is None:
                assert total < 1000 or lane.lender.stats().lent_bytes + sum(sizes) + 200_000 > limit // 2
            elif event == "unsent":
                lane.lender.reclaim([placement])
            else:
                live.append((lane.receive(placement, *sizes), data))
        elif event == "drop" and live:
            live.pop(value % len(live))
        elif event == "part" and live:
            views, data = live[value % len(live)]
            del views[1:], data[1:]
        elif event == "settle":
            freed = lane.borrower.drain_freed()
            history += freed
            lane.lender.reclaim(freed)
            lane.borrower.retire(lane.lender.drain_retired())
        elif event == "twice":
            lane.lender.reclaim(history)
        elif event == "idle":
            lane.clock.now += value % 60
            lane.lender.trim()
        for views, data in live:
            assert [bytes(view) for view in views] == data
        views = []
        stats = lane.lender.stats()
        assert stats.lent_bytes + stats.free_bytes <= limit
        assert stats.lent_bytes >= sum(len(each) for _, data in live for each in data)
    live.clear()
    lane.settle()
    assert lane.lender.stats().lent_bytes == 0
    assert mappings() <= 2 * lane.lender.stats().segments
    lane.close()
    assert mappings() == 0
