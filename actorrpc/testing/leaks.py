"""Find what a test leaves behind: compare threads, processes, descriptors, files and a worker's objects before and after.

    before = leaks.LeakSnapshot.capture(whole_session=False)
    ...
    found = leaks.settle(before)
    assert not found, f"left behind:\n{found}"

Runs in the main thread of the process that is checked. Threads and processes need a moment to end, so a leak is only reported
if it still exists after a bounded wait. If the process was the same worker before and after, its references, autograd
contexts, calls and large objects are counted, too.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import os
import socket
import termios
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from actorrpc import _stacks
from actorrpc._python import DummyThread
from actorrpc.agent.agent import Agent
from actorrpc.autograd.api import contexts
from actorrpc.rpc import api
from actorrpc.testing import processes

__all__ = ["WAIT", "Holdings", "LeakSnapshot", "Leaks", "find_leaks", "settle"]

WAIT = 5.0
# Descriptors of these files are not counted: libraries open the files on first use and keep them open.
_HARMLESS = (
    "/dev/null",
    "/dev/nvidia",
    "/dev/random",
    "/dev/urandom",
    "/proc/",
    "/sys/",
)
_SHM = Path("/dev/shm")
_libuv_lock: list[str] = []  # the pipe of libuv's lock in this process, once it was made


def _threads() -> dict[Hashable, str]:
    """Threads that run Python code: all threads of `threading`, and other threads while they have a Python frame.

    A thread of a torch pool is not counted between two tasks, when it has no Python frame; nor is a thread that `_thread` has
    started but that has not run yet.
    """
    frames = _stacks.top_frames()
    found: dict[Hashable, str] = {}
    known = {thread.ident: thread for thread in threading.enumerate()}
    for ident, thread in known.items():
        # A dummy stands for a thread that `threading` did not start, and may outlive it: counted below if it has a frame.
        if not isinstance(thread, DummyThread):
            found[thread] = (
                f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}{_where(frames, ident)}"
            )
    for ident in frames:
        if ident not in known or isinstance(known[ident], DummyThread):
            found[ident] = f"thread {ident} (not started by threading){_where(frames, ident)}"
    return found


def _where(frames: Mapping[int, FrameType], ident: int | None) -> str:
    frame = frames.get(ident) if ident is not None else None
    code = getattr(frame, "f_code", None)
    return f" in {code.co_name} ({code.co_filename}:{getattr(frame, 'f_lineno', '?')})" if code else ""


def _open_descriptors() -> Iterator[tuple[int, str]]:
    """The descriptors of this process, and their targets."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listdir() itself used is closed
            yield int(name), os.readlink(f"/proc/self/fd/{name}")


def _descriptors() -> Counter[str]:
    helpers = processes.helper_fds()
    return Counter(
        target
        for number, target in _open_descriptors()
        if number not in helpers and not target.startswith(_HARMLESS)
    )


def _is_libuv_lock(target: str) -> bool:
    """Whether the target is the pipe that libuv, which torch's TCPStore uses, makes once per process and keeps.

    libuv uses the pipe as a lock: this process has both ends, and the pipe holds one byte.
    """
    ends = [number for number, each in _open_descriptors() if each == target]
    if len(ends) != 2 or not target.startswith("pipe:"):
        return False
    unread = array.array("i", [0])
    fcntl.ioctl(ends[0], termios.FIONREAD, unread)
    return unread[0] == 1


def _describe_descriptor(target: str, count: int) -> str:
    text = f"descriptor of {target}" + (f" ({count} of them)" if count > 1 else "")
    numbers = [number for number, each in _open_descriptors() if each == target]
    if numbers and target.startswith("socket:"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(numbers[0])) as sock:
            text += f" {sock!r}"
    return text


def _leaked_descriptors(before: Counter[str], now: Counter[str]) -> list[str]:
    grown = now - before
    if not _libuv_lock:
        _libuv_lock.extend(target for target in grown if _is_libuv_lock(target))
    return [_describe_descriptor(*each) for each in sorted(grown.items()) if each[0] not in _libuv_lock[:1]]


def _files() -> set[str]:
    """Files of shared memory and of the runtime directory."""
    found = {str(path) for path in _SHM.iterdir()} if _SHM.is_dir() else set()
    runtime = os.environ.get("ACTORRPC_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        found.update(str(path) for path in Path(runtime).rglob("*"))
    return found


@dataclass(frozen=True, slots=True)
class Holdings:
    """Objects that the worker of this process holds.

    Attributes:
        agent: the worker's agent; None if the process is no worker.
        counts: the number of objects by the name of their kind.
    """

    agent: Agent | None
    counts: Counter[str]

    @classmethod
    def capture(cls) -> Holdings:
        """Count the objects now."""
        if not api.is_initialized():
            return cls(None, Counter())
        agent, table = api.group().agent, api.references().table
        info = table.debug_info()
        peers = agent.peers()
        counts = {
            "RRef of a value of another worker": info["num_users"],
            "value of this worker that other workers have an RRef to": info["num_owner_rrefs"],
            "autograd context": len(contexts().all()),
            "call that is under way": sum(len(peer.pending) for peer in peers),
            "call that is executed here": sum(len(peer.running) for peer in peers),
            "piece of memory with large objects": len(agent.objects.stats().held),
        }
        return cls(agent, Counter(counts))

    def remaining(self, before: Holdings) -> list[str]:
        """Describe the kinds of which the worker holds more objects than before; empty if the worker has another agent now."""
        if self.agent is None or self.agent is not before.agent:
            return []
        return [f"{name} ({count} of them)" for name, count in (self.counts - before.counts).items()]


def _held_elsewhere(path: str) -> bool:
    """Whether a process outside this session has opened the file, or mapped it, perhaps under an older name (semaphores)."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return True  # the file was removed meanwhile, so the file is no leak
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
    """The threads, processes, descriptors, files and objects of the worker that exist at one moment."""

    threads: dict[Hashable, str]
    processes: set[psutil.Process]
    descriptors: Counter[str]
    files: set[str]
    holdings: Holdings
    whole_session: bool

    @classmethod
    def capture(cls, *, whole_session: bool = True) -> LeakSnapshot:
        """Take a snapshot of files and the session's processes, or only (without files) of this process and its descendants."""
        if whole_session:
            found, files = processes.of_session(), _files()
        else:
            found, files = processes.descendants(), set()
        return cls(_threads(), found, _descriptors(), files, Holdings.capture(), whole_session)


@dataclass(frozen=True, slots=True)
class Leaks:
    """Things that exist now and did not exist before. An instance is false if there are none.

    Attributes:
        processes: the processes.
        others: descriptions of threads, descriptors, files, and objects that the worker holds.
    """

    processes: set[psutil.Process]
    others: list[str]

    def __bool__(self) -> bool:
        return bool(self.processes or self.others)

    def __str__(self) -> str:
        return "\n".join(f"  {each}" for each in (*map(processes.describe, self.processes), *self.others))


def find_leaks(before: LeakSnapshot) -> Leaks:
    """Compare the present state with an earlier snapshot, once."""
    now = LeakSnapshot.capture(whole_session=before.whole_session)
    others = sorted(text for key, text in now.threads.items() if key not in before.threads)
    others += _leaked_descriptors(before.descriptors, now.descriptors)
    for path in sorted(now.files - before.files):
        if not (path.startswith(str(_SHM)) and _held_elsewhere(path)):
            others.append(f"file {path}")
    return Leaks(now.processes - before.processes, others + now.holdings.remaining(before.holdings))


def settle(before: LeakSnapshot, wait: float = WAIT) -> Leaks:
    """Compare with an earlier snapshot until no leak is left or ``wait`` seconds have passed; return the leaks."""
    leaks = find_leaks(before)
    if not leaks:
        return leaks
    give_up, pause = time.monotonic() + wait, 0.001
    while True:
        # Objects in a reference cycle are no leak. Collect in each round: threads that end may make more cycles.
        gc.collect()
        leaks = find_leaks(before)
        if not leaks or time.monotonic() >= give_up:
            return leaks
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
