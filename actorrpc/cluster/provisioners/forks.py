"""Forks children from this process, which has imported torch and actorrpc and runs one thread, and reaps them.

Each child has a process group of its own, which is killed when the child has ended. If this process is killed, the kernel kills
its children (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Final

from actorrpc.actors.spec.actor_spec import DeathReport
from actorrpc.transport.signals import die_with

__all__ = ["Forks", "settle"]

_PR_SET_NAME: Final = 15
_HELD: Final = (signal.SIGINT, signal.SIGTERM)


def settle() -> None:
    """Freeze all present objects and disable the garbage collector, which would write to memory that children share."""
    gc.collect()
    gc.disable()
    gc.freeze()


class Forks:
    """The children of this process: the fork server, or ``python -m actorrpc.worker --count N``.

    Not thread-safe: this process has one thread.

    Attributes:
        alarm: a descriptor that is readable when this process has received a signal that has a handler.
    """

    def __init__(self) -> None:
        self._children: dict[int, tuple[str, float]] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._pid = os.getpid()
        self.alarm, self._alarm_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        signal.set_wakeup_fd(self._alarm_write, warn_on_full_buffer=False)

    def __len__(self) -> int:
        return len(self._children)

    def signals(self) -> bytes:
        """Return the numbers of the signals that this process has received since the last call; does not wait."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.alarm, 4096)
        return b""

    def fork(self, name: str, label: str) -> int:
        """Fork a child; return its process id, or 0 in the child, where the signal handlers are reset.

        Args:
            name: identifies the child in its :class:`DeathReport`.
            label: the child's name in lists of processes.

        Raises:
            OSError: the system allows no further process.
        """
        # Block the signals until the child has reset the handlers: the handlers of this process would discard them in the child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
        try:
            with warnings.catch_warnings():
                # Python warns that other threads run. They are threads of C libraries, and hold no locks.
                warnings.simplefilter("ignore")
                pid = os.fork()
            if not pid:
                self._become_child(label)
                before = set()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if pid:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self._children[pid] = (name, time.monotonic())
        return pid

    def _become_child(self, label: str) -> None:
        die_with(self._pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd in (self.alarm, self._alarm_write):
            os.close(fd)
        self._children.clear()
        self._libc.prctl(_PR_SET_NAME, label.encode("ascii", "replace")[:15], 0, 0, 0)
        gc.enable()

    def reap(self) -> Iterator[DeathReport]:
        """Yield a report on each child that has ended, and kill the child's process group; does not wait."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            # The child's pid cannot be reused before the child is reaped.
            _signal(found.si_pid, signal.SIGKILL)
            pid, status, usage = os.wait4(found.si_pid, 0)
            name, begun = self._children.pop(pid, ("", time.monotonic()))
            yield DeathReport(
                worker=name,
                pid=pid,
                exit_code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                peak_memory=usage.ru_maxrss * 1024,
                uptime=time.monotonic() - begun,
            )

    def kill(self, pid: int) -> None:
        """Kill a child and its process group; ignore other process ids."""
        if pid in self._children:  # the child was not reaped, so its pid was not reused
            _signal(pid, signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal to all children, without their process groups."""
        for pid in self._children:
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def kill_all(self, seconds: float) -> None:
        """Kill all children and their process groups, and wait at most some seconds until they have ended."""
        for pid in self._children:
            _signal(pid, signal.SIGKILL)
        until = time.monotonic() + seconds
        while self._children and time.monotonic() < until:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid:
                self._children.pop(pid, None)
            else:
                time.sleep(0.001)


def _signal(pid: int, number: int) -> None:
    """Send a signal to a child and to its process group. The caller has not reaped the child yet, so its pid is not reused."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            send(pid, number)
