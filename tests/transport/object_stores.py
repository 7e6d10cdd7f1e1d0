"""Object stores of several simulated processes in one process, each with its own accounts file."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from actorrpc.transport.object_accounts import ObjectAccounts
from actorrpc.transport.object_store import ObjectStore, StoredRange

MIB = 1 << 20
SUFFIX = ".00000000.objects"


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.hook: Callable[[], object] | None = None  # called whenever the clock is read

    def __call__(self) -> float:
        if self.hook is not None:
            self.hook()
        return self.now


def address_of(view: memoryview) -> int:
    """Return the address of a writable view's first byte."""
    return ctypes.addressof((ctypes.c_char * 0).from_buffer(view))


@dataclass
class Host:
    """The stores of one group on one host."""

    directory: Path
    clock: Clock = field(default_factory=Clock)
    stores: list[ObjectStore] = field(default_factory=list)
    reread_s: float = 0.1

    def store(self, limit: int = 256 * MIB, spill_dir: Path | None = None) -> ObjectStore:
        """Create the store of another simulated process."""
        name = f"1-{os.getpid()}-{len(self.stores)}-{os.urandom(4).hex()}{SUFFIX}"
        made = ObjectStore(
            ObjectAccounts(str(self.directory / name), SUFFIX, f"w{len(self.stores)}"),
            limit_bytes=limit,
            spill_dir=None if spill_dir is None else str(spill_dir),
            clock=self.clock,
            reread_s=self.reread_s,
        )
        self.stores.append(made)
        return made

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and trim each store every 0.5 s, as the scheduler of each process does."""
        for _ in range(max(1, round(seconds / 0.5))):
            self.clock.now += 0.5
            for each in self.stores:
                each.trim()

    def close(self) -> None:
        """Close all stores."""
        for each in self.stores:
            each.close()


def put(store: ObjectStore, content: bytes, label: str = "a thing", *, until: float = 0.0) -> StoredRange:
    """Write an object."""
    room = store.allocate(len(content), label=label, site="here.py:1", until=until)
    assert room is not None
    write(room.address, content)
    return room.stored


def write(address: int, content: bytes) -> None:
    """Fill memory."""
    ctypes.memmove(address, content, len(content))


def send(sock: socket.socket, stored: StoredRange) -> None:
    """Send an object to another process, as a message does."""
    segment = stored.segment
    words = f"{segment.id.hex()} {segment.size} {stored.offset} {stored.nbytes}"
    socket.send_fds(sock, [words.encode()], [stored.fileno()])


def receive(sock: socket.socket, store: ObjectStore) -> StoredRange:
    """Receive an object that was sent."""
    words, fds, _, _ = socket.recv_fds(sock, 1000, 1)
    segment_id, *numbers = words.decode().split()
    size, offset, nbytes = map(int, numbers)
    return store.adopt(fds[0], bytes.fromhex(segment_id), size, "a thing", "here.py:1").range(offset, nbytes)


def hand_over(stored: StoredRange, store: ObjectStore) -> StoredRange:
    """Send an object to another store, which then holds it as well."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        send(here, stored)
        return receive(there, store)


def segments() -> set[int]:
    """Return the inodes of the segments that this process has mapped or open."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "actorrpc-object" in line:
            found.add(int(line.split()[4]))
    for name in os.listdir("/proc/self/fd"):
        if "actorrpc-object" in _link(name):
            found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
    return found


def inode(stored: StoredRange) -> int:
    """Return the inode of the segment that contains an object."""
    return os.fstat(stored.fileno()).st_ino


@pytest.fixture(name="host")
def make_host(tmp_path: Path) -> Iterator[Host]:
    """Yield a host; then check that no segment and no accounts file is left."""
    before = segments()
    made = Host(tmp_path)
    yield made
    made.close()
    gc.collect()  # errors that the test caught may keep its frame in a reference cycle
    assert segments() <= before
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(SUFFIX)]


def descriptors() -> int:
    """Return the number of open descriptors of segments in this process."""
    return sum("actorrpc-object" in link for link in map(_link, os.listdir("/proc/self/fd")))


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        return ""  # the descriptor of the listing itself
