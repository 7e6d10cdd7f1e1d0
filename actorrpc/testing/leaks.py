"""What a test may leave behind: nothing. Threads, processes, descriptors, files and what a worker holds, before and after.

    before = leaks.Snapshot.take(whole_session=False)
    ...
    found = leaks.settle(before)
    assert not found, f"left behind:\n{found}"

Runs in the main thread of the test process, or of any process that is to be looked at. A leak is reported only when it is
still there after a bounded wait: threads and processes need a moment to end. Where the process is a worker before and
after, of the same group, its references, autograd contexts, calls and large objects are counted, too.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import os
import socket
import struct
import termios
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from actorrpc import _stacks
from actorrpc.agent.agent import Agent
from actorrpc.autograd.startup import contexts
from actorrpc.rpc import api
from actorrpc.testing import processes

__all__ = ["WAIT", "Holdings", "LeakSnapshot", "Leaks", "find_leaks", "settle"]

WAIT = 5.0
# Opened once and kept, by libraries, on first use.
_HARMLESS = (
    "/dev/null",
    "/dev/nvidia",
    "/dev/random",
    "/dev/urandom",
    "/proc/",
    "/sys/",
)
_SHM = Path("/dev/shm")
_libuv_lock: list[str] = []  # the pipe of this process, once there is one


def _threads() -> dict[Hashable, str]:
    """Threads that run Python code: those of `threading`, and others while they have a Python frame.

    So threads of torch's own pools, which have none between two pieces of work, are not counted; nor is a
    thread that `_thread` has started but that has not run yet.
    """
    frames = _stacks.top_frames()
    found: dict[Hashable, str] = {}
    known = {thread.ident: thread for thread in threading.enumerate()}
    for ident, thread in known.items():
        # A "dummy" stands for a thread started elsewhere and outlives it: its frame decides, below.
        if not isinstance(thread, threading._DummyThread):
            found[thread] = (
                f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}{_where(frames, ident)}"
            )
    for ident in frames:
        if ident not in known or isinstance(known[ident], threading._DummyThread):
            found[ident] = f"thread {ident} (not started by threading){_where(frames, ident)}"
    return found


def _where(frames: Mapping[int, FrameType], ident: int | None) -> str:
    frame = frames.get(ident) if ident is not None else None
    code = getattr(frame, "f_code", None)
    return f" in {code.co_name} ({code.co_filename}:{getattr(frame, 'f_lineno', '?')})" if code else ""


def _descriptors() -> Counter[str]:
    helpers = processes.helper_fds()
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        if int(name) in helpers:
            continue
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of this very listing
        if not target.startswith(_HARMLESS):
            found[target] += 1
    return found


def _is_libuv_lock(target: str) -> bool:
    """Whether it is the pipe that libuv, under torch's TCPStore, makes once in a process and keeps.

    It is told by what it is: a lock made of a pipe, both ends here, with the one byte of its owner in it.
    """
    ends = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == target:
                ends.append(int(name))
    if len(ends) != 2 or not target.startswith("pipe:"):
        return False
    unread = array.array("i", [0])
    fcntl.ioctl(ends[0], termios.FIONREAD, unread)
    return unread[0] == 1


def _about(target: str) -> str:
    """Describe an open socket of this process and the objects that hold it; empty for other descriptors."""
    if not target.startswith("socket:"):
        return ""
    numbers = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == target:
                numbers.add(int(name))
    for number in numbers:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as sock:
            return f" ({_ends(sock)}; {_holders(numbers)})"
    return ""


def _ends(sock: socket.socket) -> str:
    unread = array.array("i", [0])
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        said = ["listening"]
    else:
        try:
            said = [f"peer {sock.getpeername()!r}"]
        except OSError as error:
            said = [f"no peer: {error.strerror}"]
        fcntl.ioctl(sock, termios.FIONREAD, unread)
        said.append(f"{unread[0]} bytes unread")
    if sock.family == socket.AF_UNIX:
        # The process that listens at the other end, or has connected, as it was then.
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        said.append(f"of process {pid}")
    return f"{sock.family.name}, {sock.type.name}, at {sock.getsockname()!r}, {', '.join(said)}"


def _holders(numbers: set[int]) -> str:
    """Name the socket objects that have one of these descriptors, and what refers to them."""
    # By its type: some objects of torch print a warning when they are asked for their class.
    sockets = [each for each in gc.get_objects() if issubclass(type(each), socket.socket)]
    found = [each for each in sockets if each.fileno() in numbers]
    names = [f"{type(each).__name__} in {sorted(map(_name, gc.get_referrers(each)))}" for each in found]
    return ", ".join(names) or "no socket object has it"


def _name(holder: object) -> str:
    return holder.f_code.co_qualname if isinstance(holder, FrameType) else type(holder).__qualname__


def _leaked_descriptors(before: Counter[str], now: Counter[str]) -> list[str]:
    grown = sorted((now - before).elements())
    if not _libuv_lock:
        _libuv_lock.extend(target for target in dict.fromkeys(grown) if _is_libuv_lock(target))
    return [target for target in grown if target not in _libuv_lock[:1]]


def _files() -> set[str]:
    """Shared memory, and whatever is in the runtime directory."""
    found = {str(path) for path in _SHM.iterdir()} if _SHM.is_dir() else set()
    runtime = os.environ.get("ACTORRPC_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        found.update(str(path) for path in Path(runtime).rglob("*"))
    return found


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the worker that this process is holds.

    Attributes:
        agent: of which life it is; None where the process is no worker.
        counts: how many there are of each kind, by its name.
    """

    agent: Agent | None
    counts: Counter[str]

    @classmethod
    def take(cls) -> Holdings:
        """Look around now."""
        if not api.is_initialized():
            return cls(None, Counter())
        agent, table = api.group().agent, api.references().table
        info = table.debug_info()
        peers = agent.peers()
        counts = {
            "RRef of a value of another worker": info["num_users"],
            "value of this worker that others have an RRef to": info["num_owner_rrefs"],
            "autograd context": len(contexts().all()),
            "call that is under way": sum(len(peer.pending) for peer in peers),
            "call that is executed here": sum(len(peer.running) for peer in peers),
            "piece of memory with large objects": len(agent.objects.stats().held),
        }
        return cls(agent, Counter(counts))

    def left(self, before: Holdings) -> list[str]:
        """Return what there is more of than there was before, in words; nothing where this is another life."""
        if self.agent is None or self.agent is not before.agent:
            return []
        return [f"{name} ({count} of them)" for name, count in (self.counts - before.counts).items()]


def _held_elsewhere(path: str) -> bool:
    """Whether a process that is not of this session has the file open or mapped (under whatever name: a semaphore is renamed)."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return True  # it was somebody's, and is gone
    mapped = f" {os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x} {found.st_ino} "
    mine = {process.pid for process in processes.of_session()} | {os.getpid()}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in mine:
            continue
        with contextlib.suppress(OSError):
            if mapped in Path(f"/proc/{entry}/maps").read_text(errors="replace"):
                return True
            if any(os.readlink(fd) == path for fd in Path(f"/proc/{entry}/fd").iterdir()):
                return True
    return False


@dataclass(frozen=True, slots=True)
class LeakSnapshot:
    """What exists at one moment."""

    threads: dict[Hashable, str]
    processes: set[processes.ProcessId]
    descriptors: Counter[str]
    files: set[str]
    holdings: Holdings
    whole_session: bool

    @classmethod
    def take(cls, *, whole_session: bool = True) -> LeakSnapshot:
        """Look around now: in the whole session, or only at this process and its descendants."""
        if whole_session:
            found, files = processes.of_session(), _files()
        else:
            found, files = processes.descendants(), set()
        return cls(_threads(), found, _descriptors(), files, Holdings.take(), whole_session)


@dataclass(frozen=True, slots=True)
class Leaks:
    """What is there now and was not before; false when that is nothing."""

    threads: list[str]
    processes: set[processes.ProcessId]
    descriptors: list[str]
    files: list[str]
    holdings: list[str]

    def __bool__(self) -> bool:
        return bool(self.threads or self.processes or self.descriptors or self.files or self.holdings)

    def __str__(self) -> str:
        lines = [*self.threads, *map(processes.describe, sorted(self.processes))]
        lines += [
            f"descriptor of {target}" + (f" ({count} of them)" if count > 1 else "") + _about(target)
            for target, count in Counter(self.descriptors).items()
        ]
        lines += [f"file {path}" for path in self.files]
        lines += self.holdings
        return "\n".join(f"  {line}" for line in lines)


def find_leaks(before: LeakSnapshot) -> Leaks:
    """Compare now with before, once."""
    now = LeakSnapshot.take(whole_session=before.whole_session)
    helpers = processes.helper_pids()
    files = sorted(now.files - before.files)
    return Leaks(
        threads=sorted(text for key, text in now.threads.items() if key not in before.threads),
        processes={process for process in now.processes - before.processes if process.pid not in helpers},
        descriptors=_leaked_descriptors(before.descriptors, now.descriptors),
        files=[path for path in files if not (path.startswith(str(_SHM)) and _held_elsewhere(path))],
        holdings=now.holdings.left(before.holdings),
    )


def settle(before: LeakSnapshot, wait: float = WAIT) -> Leaks:
    """Compare now with before until nothing is left over, or the wait is over; return what is left."""
    leaks = find_leaks(before)
    if not leaks:
        return leaks
    give_up, pause = time.monotonic() + wait, 0.001
    while True:
        # What only a reference cycle keeps is not a leak; threads that are still ending may make more of them.
        gc.collect()
        leaks = find_leaks(before)
        if not leaks or time.monotonic() >= give_up:
            return leaks
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
