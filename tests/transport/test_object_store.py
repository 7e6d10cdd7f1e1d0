"""Objects in shared memory: each reader has a private view of one copy, freed with its last reader, within a limit."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorrpc import _time
from actorrpc.errors import LimitError, ObjectStoreFullError, ProtocolError
from actorrpc.transport import object_store
from actorrpc.transport.object_store import OWN_SEGMENT, ObjectStore, StoredRange
from tests.agent.together import in_threads
from tests.forks import exit_code, fork
from tests.transport.object_stores import (
    MIB,
    SUFFIX,
    Host,
    descriptors,
    hand_over,
    inode,
    make_host,
    put,
    receive,
    segments,
    send,
)

__all__ = ["make_host"]

_SMALL = 256 << 10


def fill(store: ObjectStore, nbytes: int, label: str = "a thing") -> StoredRange:
    """Write an object, so that each of its pages takes memory."""
    return put(store, bytes([len(label)]) * nbytes, label)


# -- values ---------------------------------------------------------------------------------------------------


def test_threads_that_write_read_and_drop_objects_always_read_their_own_content(host: Host) -> None:
    # Each of the eight objects in use at a time may hold a segment of 64 MiB.
    store, reader = host.store(1024 * MIB), host.store(1024 * MIB)
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(12):
            content = bytes([16 * number + turn]) * (_SMALL * (1 + 7 * (turn % 5)))
            there = hand_over(put(store, content, until=_time.now() + 30), reader)
            view = there.map()
            if view != content:
                wrong.append((number, turn))
            view[:1] = b"\0"
            reader.trim()  # as the scheduler of its process does soon after a release

    in_threads(work, [(number,) for number in range(4)])
    assert not wrong


# -- lifetime of the memory ----------------------------------------------------------------------------------

_READERS: dict[str, Callable[[StoredRange, ObjectStore], Any]] = {
    "a reference": lambda stored, there: stored,
    "another process's": lambda stored, there: hand_over(stored, there),
    "a view": lambda stored, there: stored.map(),
    "a slice": lambda stored, there: stored.map()[100:200],
    "an array": lambda stored, there: np.frombuffer(stored.map(), np.float32)[3:9].reshape(2, 3).T,
    "a tensor": lambda stored, there: torch.frombuffer(stored.map(), dtype=torch.int64)[4:7].view(3, 1),
    "a tensor elsewhere": lambda stored, there: torch.frombuffer(
        hand_over(stored, there).map(), dtype=torch.uint8
    ),
    "a cycle": lambda stored, there: _cycle(stored.map()),
}


def _cycle(view: memoryview) -> list[Any]:
    made: list[Any] = [view]
    made.append(made)
    return made


@pytest.mark.parametrize("kind", _READERS)
@pytest.mark.parametrize("nbytes", [_SMALL, OWN_SEGMENT])
def test_memory_is_not_reused_while_a_reader_holds_it_and_is_freed_afterwards(
    host: Host, kind: str, nbytes: int
) -> None:
    store, there = host.store(), host.store()
    stored = put(store, b"\5" * nbytes)
    memory = inode(stored)
    reader = _READERS[kind](stored, there)
    del stored
    gc.collect()
    host.pass_time(5)
    others = [fill(store, OWN_SEGMENT) for _ in range(3)]
    assert memory not in map(inode, others)
    assert memory in segments()
    assert _content(reader) == {5}
    del reader
    gc.collect()
    host.pass_time(5)
    assert memory not in segments()


def _content(reader: Any) -> set[int]:
    """Return the set of the bytes that a reader reads."""
    if isinstance(reader, StoredRange):
        reader = reader.map()
    if isinstance(reader, list):
        reader = reader[0]
    if isinstance(reader, torch.Tensor):
        reader = reader.numpy()
    content = bytes(reader)
    return {content[0]} if content.count(content[:1]) == len(content) else set(content)


def test_an_object_in_flight_to_another_process_is_not_reused(host: Host) -> None:
    store, reader = host.store(), host.store()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        stored = put(store, b"\5" * OWN_SEGMENT)
        memory = inode(stored)
        send(here, stored)
        del stored
        host.pass_time(5)
        fill(store, OWN_SEGMENT)
        assert _content(receive(there, reader)) == {5}
        host.pass_time(5)
        assert memory not in segments()


# -- protection of readers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [_SMALL, OWN_SEGMENT])
def test_a_stored_object_cannot_be_written_truncated_or_extended(host: Host, nbytes: int) -> None:
    stored = fill(host.store(), nbytes)
    size = stored.segment.size
    again = os.open(f"/proc/self/fd/{stored.fileno()}", os.O_RDWR | os.O_CLOEXEC)
    try:
        for fd in (stored.fileno(), again):
            for use in (
                lambda fd: mmap.mmap(fd, size),
                lambda fd: mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE),
                lambda fd: os.ftruncate(fd, 0),
                lambda fd: os.ftruncate(fd, size + 4096),
                lambda fd: os.pwrite(fd, b"x", 0),
                lambda fd: os.posix_fallocate(fd, 0, size + 4096),
                lambda fd: _punch(fd, size),
            ):
                with pytest.raises(OSError, match=r"Operation not permitted|Permission|Bad file|Invalid arg"):
                    use(fd)
    finally:
        os.close(again)
    assert _content(stored) == {len("a thing")}


def _punch(fd: int, size: int) -> None:
    """Punch a hole into a file: its bytes become zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(size)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _memfd(size: int, *seals: int) -> int:
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    for seal in seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
    return fd


def _named(directory: Path, flags: int, unlinked: bool) -> int:
    path = directory / "file"
    path.write_bytes(bytes(MIB))
    fd = os.open(path, flags | os.O_CLOEXEC)
    if unlinked:
        path.unlink()
    return fd


@pytest.mark.parametrize(
    "make",
    [
        lambda _: _memfd(MIB),
        lambda _: _memfd(MIB, fcntl.F_SEAL_SHRINK),
        lambda _: _memfd(MIB, fcntl.F_SEAL_GROW),
        lambda _: _memfd(MIB - 1, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW),
        lambda path: _named(path, os.O_RDONLY, False),
        lambda path: _named(path, os.O_RDWR, True),
        lambda path: os.open(path, os.O_RDONLY | os.O_CLOEXEC),
        lambda _: os.eventfd(0, os.EFD_CLOEXEC),
        lambda _: os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC),
    ],
    ids=["unsealed", "grows", "shrinks", "shorter", "named", "written", "folder", "eventfd", "device"],
)
def test_adopting_a_descriptor_whose_memory_could_change_is_refused(
    host: Host, tmp_path: Path, make: Callable[[Path], int]
) -> None:
    store = host.store()
    fd = make(tmp_path)
    with pytest.raises(ProtocolError, match="take away"):
        store.adopt(fd, bytes(range(16)), MIB)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_ranges_outside_of_a_segment_are_refused(host: Host) -> None:
    stored, reader = fill(host.store(), OWN_SEGMENT), host.store()
    segment = hand_over(stored, reader).segment
    for offset, nbytes in ((-4096, 4096), (0, -1), (1, 10), (segment.size, 1), (0, segment.size + 1)):
        with pytest.raises(ProtocolError, match="cannot have an object"):
            segment.range(offset, nbytes)
    with pytest.raises(ProtocolError, match="one name"):
        reader.adopt(os.dup(stored.fileno()), segment.id, segment.size + 4096)


# -- the limit ----------------------------------------------------------------------------------------------------


def test_a_process_waiting_for_room_gives_up_its_own_free_memory_and_times_out(host: Host) -> None:
    store, other = host.store(64 * MIB), host.store(64 * MIB)
    kept = fill(other, 28 * MIB)
    fill(store, 33 * MIB)  # of the same size class as the object that is waited for
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(store.allocate, 40 * MIB, label="a thing", until=_time.now() + 0.5)
        while not waits.done():
            host.pass_time(0.5)
            futures.wait([waits], 0.02)
    assert isinstance(waits.exception(), ObjectStoreFullError)
    begun = _time.now()
    with pytest.raises(ObjectStoreFullError):  # larger than the limit: does not wait
        store.allocate(65 * MIB, label="a thing", until=begun + 60.0)
    assert _time.now() < begun + 30.0
    more = fill(other, 30 * MIB)
    assert _content(kept) == _content(more) == {len("a thing")}


def test_small_objects_fit_into_the_memory_of_a_larger_object_that_was_released(host: Host) -> None:
    store = host.store(4 * _SMALL)
    fill(store, 4 * _SMALL)
    kept = [fill(store, _SMALL) for _ in range(4)]
    assert set().union(*map(_content, kept)) == {len("a thing")}


def test_a_wait_for_room_can_be_interrupted_by_ctrl_c(host: Host) -> None:
    store = host.store(16 * MIB)
    kept = fill(store, OWN_SEGMENT)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            store.allocate(12 * MIB, label="a thing", until=_time.now() + 60)
    finally:
        signal.signal(signal.SIGALRM, before)
    del kept
    fill(store, 12 * MIB)


# -- spilling to disk ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "tmpfs"])
def spill_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        folder = tmp_path / "spilled"
    else:
        folder = Path("/dev/shm", f"actorrpc-test-{os.getpid()}")
    folder.mkdir()
    yield folder
    assert not list(folder.iterdir())  # spilled files have no name
    folder.rmdir()


@pytest.mark.parametrize("nbytes", [_SMALL, 3 * MIB, 12 * MIB])
def test_an_object_without_room_in_memory_is_spilled_to_disk(
    host: Host, spill_dir: Path, nbytes: int
) -> None:
    store, reader = host.store(20 * MIB, spill_dir), host.store(20 * MIB, spill_dir)
    kept = fill(store, 20 * MIB)
    fds = descriptors()
    content = bytes(range(256)) * (nbytes // 256)
    stored = put(store, content)
    there = hand_over(stored, reader)
    first, second = there.map(), stored.map()
    assert first == second == content
    first[:2] = b"zz"
    assert second[:2] == there.map()[:2] == content[:2]
    assert _content(kept) == {len("a thing")}
    del first, second, stored
    gc.collect()
    assert _content(there) == set(content)
    with pytest.raises(OSError, match=r"not permitted|Bad file|Permission|Invalid"):
        os.ftruncate(there.fileno(), 0)
    del there
    gc.collect()
    assert descriptors() == fds


def test_a_full_disk_raises_the_store_full_error_naming_the_directory(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    store = host.store(20 * MIB, tmp_path)
    kept = fill(store, 20 * MIB)
    fds = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ObjectStoreFullError, match="No space left") as caught:
        store.allocate(12 * MIB, label="a thing")
    assert str(tmp_path) in str(caught.value)
    assert descriptors() == fds
    assert _content(kept) == {len("a thing")}


# -- missing resources --------------------------------------------------------------------------------------------


def test_allocating_near_the_descriptor_limit_leaks_no_descriptor_and_keeps_objects(host: Host) -> None:
    store = host.store()
    kept = fill(store, OWN_SEGMENT)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = [int(name) for name in os.listdir("/proc/self/fd")]
    try:
        for more in range(4):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(fds) + 1 + more, limits[1]))
            taken = []
            try:
                while True:
                    taken.append(os.dup(0))
            except OSError:
                pass
            for fd in taken[:more]:
                os.close(fd)
            try:
                found = store.allocate(OWN_SEGMENT, label="a thing")
                del found
            finally:
                for fd in taken[more:]:
                    os.close(fd)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    host.pass_time(2)
    assert len(os.listdir("/proc/self/fd")) == len(fds)
    assert _content(kept) == {len("a thing")}


@pytest.mark.parametrize("answer", [9999, 0], ids=["refused", "never free"])
def test_without_file_leases_released_memory_is_freed_instead_of_reused(
    host: Host, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    """Without leases, the store cannot know whether a released segment still has readers."""
    real = fcntl.fcntl

    def refusing(fd: int, command: int, *rest: Any) -> Any:
        if command == fcntl.F_SETLEASE and rest == (fcntl.F_WRLCK,):
            raise OSError(22, "Invalid argument") if answer else OSError(11, "Try again")
        return real(fd, command, *rest)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    store, reader = host.store(), host.store()
    stored = [fill(store, nbytes) for nbytes in (_SMALL, OWN_SEGMENT)]
    memory = {inode(each) for each in stored}
    there = [hand_over(each, reader) for each in stored]
    more = [fill(store, OWN_SEGMENT) for _ in range(3)]
    assert not memory & {inode(each) for each in more}
    assert {frozenset(_content(each)) for each in there} == {frozenset({len("a thing")})}
    del stored, there, more
    gc.collect()
    host.pass_time(2)
    assert not segments()


def test_an_object_that_cannot_be_mapped_raises_limit_error(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = [fill(host.store(), nbytes) for nbytes in (_SMALL, OWN_SEGMENT)]

    def full(*_: object, **__: object) -> Any:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(object_store, "reserve", full)
        for each in stored:
            with pytest.raises(LimitError, match="cannot be mapped here: Cannot allocate memory"):
                each.map()
    for each in stored:
        assert _content(each) == {len("a thing")}


# -- several processes ---------------------------------------------------------------------------------------------


def test_a_forked_child_can_read_its_objects_but_owns_none(host: Host) -> None:
    store = host.store()
    stored = [put(store, b"\5" * nbytes) for nbytes in (_SMALL, OWN_SEGMENT)]
    memory = {inode(each) for each in stored}
    views = [each.map() for each in stored]
    go, end = os.pipe()

    def child() -> None:
        os.close(end)
        store.abandon()
        os.read(go, 1)  # returns when the parent has finished
        for view in views:
            assert set(bytes(view)) == {5}
            view[:] = b"\6" * len(view)
        for each in stored:
            with pytest.raises(LimitError):
                each.map()
            with pytest.raises(OSError, match="fork"):
                each.fileno()
        assert store.allocate(_SMALL, label="a thing") is None
        stored.clear()
        views.clear()
        gc.collect()

    pid = fork(child)
    os.close(go)
    for view in views:
        assert set(bytes(view)) == {5}
    stored.clear()
    views.clear()
    del view
    host.pass_time(3)
    assert len({inode(fill(store, OWN_SEGMENT)) for _ in range(2)} & memory) == 0
    assert len({inode(fill(store, _SMALL)) for _ in range(2)} & memory) == 0
    assert store.stats().host_bytes > 0
    os.close(end)
    assert exit_code(pid) == 0
    host.pass_time(3)
    assert not segments()
    assert store.stats().host_bytes == 0


def test_empty_or_foreign_accounts_files_are_ignored(host: Host) -> None:
    (host.directory / f"1-1-1-00000000{SUFFIX}").touch()
    (host.directory / f"1-1-1-00000001{SUFFIX}").mkdir()
    (host.directory / "1-1-1-00000000.11111111.objects").write_bytes(b"another group's")
    store = host.store()
    stored = fill(store, OWN_SEGMENT)
    assert store.stats().host_bytes == store.stats().held_bytes
    assert _content(stored) == {len("a thing")}
    for path in host.directory.iterdir():
        if path.name.startswith("1-1-1-"):
            path.rmdir() if path.is_dir() else path.unlink()


def test_without_an_accounts_directory_a_process_counts_only_its_own_memory(tmp_path: Path) -> None:
    host = Host(tmp_path / "missing")
    store = host.store(20 * MIB)
    kept = fill(store, 12 * MIB)
    with pytest.raises(ObjectStoreFullError):
        store.allocate(12 * MIB, label="a thing")
    assert _content(kept) == {len("a thing")}
    del kept
    host.close()
