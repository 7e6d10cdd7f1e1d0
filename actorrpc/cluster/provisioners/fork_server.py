"""The fork server: a process that has imported torch and actorrpc, and forks workers from itself on command.

It has one thread, and only communicates with the driver, over an inherited socket. It reaps its children and reports how
each ended. When the driver has ended, for whatever reason, the server kills its children, removes their files, and ends. If it is
killed itself, the kernel kills its children (PR_SET_PDEATHSIG). It imports the modules that the driver wants preloaded before
it is ready; if that fails, it reports the failure and ends.

Messages of the driver: first the data for all children, then ``{"do": "fork", "id": ..., ...}`` with two descriptors (the child's
stdout and stderr; the other fields are for ``cluster/worker_process.py``), or ``{"do": "kill", "pid": ...}``. Messages of the
server: ``{"is": "ready"}`` or ``{"is": "not_preloaded", "module", "why"}``, ``{"is": "forked", "id", "pid"}``, ``{"is": "failed",
"id", "why"}``, ``{"is": "ended", "id", "pid", "code", "signal", "memory", "uptime"}``.
"""

from __future__ import annotations

import asyncio  # noqa: F401 (imported once here, and not in each child)
import contextlib
import importlib
import multiprocessing  # noqa: F401
import os
import select
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from actorrpc._limits import explain_fork
from actorrpc._torch import LATE_MODULE
from actorrpc.cluster import worker_process
from actorrpc.cluster.provisioners.fork_client import MessageReader, send
from actorrpc.cluster.provisioners.forks import Forks, settle
from actorrpc.wire import keys

__all__ = ["main"]

_GONE_S: Final = 5.0
# After this time without a command, the server imports more modules for later children.
_IDLE_MS: Final = 1000
_LATER: Final = (LATE_MODULE,)
_COMES_WITH: Final = {"torch.optim": _LATER}  # torch imports them when a process makes its first optimizer


def main(fd: int, before: dict[str, str | None], preload: Sequence[str]) -> None:
    """Serve the driver at the other end of ``fd`` until the driver ends. Never returns.

    Args:
        before: the values that the variables ``fork_client._SINGLE`` had before; they are restored after the imports.
        preload: modules to import before the first child is forked.
    """
    # Objects of the user's main module that are sent by value must not find this program as the main module.
    sys.modules["__main__"] = types.ModuleType("__main__")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=False
        )
    torch.set_num_threads(1)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    server = _Server(sock)
    server.preload(preload)
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    job = server.run()
    if job is not None:
        worker_process.main(job)
    os._exit(0)


class _Server:
    """The server's state. In a child, :meth:`run` returns the child's job: the data for ``worker_process.main``."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = MessageReader(sock)
        self._hello: dict[str, Any] | None = None
        self._forks = Forks()
        self._driver = -1
        self._todo: list[tuple[dict[str, Any], list[int]]] = []  # commands that were received
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._look = select.poll()
        self._look.register(self._sock, select.POLLIN)
        self._look.register(self._forks.alarm, select.POLLIN)

    def preload(self, names: Sequence[str]) -> None:
        """Import modules. If an import fails, or children cannot use the module, tell the driver and end the process."""
        for name in [each for given in names for each in (given, *_COMES_WITH.get(given, ()))]:
            why = _import_module(name, self.glance)
            if why:
                with contextlib.suppress(OSError):  # the driver has ended
                    self._say({"is": "not_preloaded", "module": name, "why": why})
                self._kill_children()

    def run(self) -> dict[str, Any] | None:
        """Serve until the driver ends, then end; in a child, return its job."""
        try:
            # With a pidfd, the server ends even if another process has inherited the driver's end of the socket.
            self._driver = os.pidfd_open(os.getppid())
            self._look.register(self._driver, select.POLLIN)
        except OSError:
            pass  # the kernel has no pidfds, or the driver has ended: then the closed socket ends the loop below
        settle()
        prepared = False
        try:
            self._say({"is": "ready"})
            while True:
                ready = {fd for fd, _ in self._look.poll(None if prepared else _IDLE_MS)}
                if not ready and not prepared:
                    prepared = True
                    _prepare(self.glance)
                if not self._receive(ready):
                    break
                while self._todo:
                    job = self._act(*self._todo.pop(0))
                    if job is not None:
                        for _, unused in self._todo:
                            for fd in unused:
                                os.close(fd)
                        return job
        except OSError:  # the driver has ended
            pass
        self._kill_children()
        return None

    def _receive(self, ready: set[int]) -> bool:
        """Reap children and append commands to ``_todo``, without blocking; return False when the driver has ended."""
        if self._forks.alarm in ready:
            self._forks.signals()
            self._reap()
        if self._sock.fileno() in ready:
            messages = self._reader.feed()
            if messages is None:
                return False
            self._todo += messages
            return True
        return self._driver not in ready

    def glance(self) -> None:
        """During an import, run kill commands and reap children, and exit if the driver has ended. Fork commands stay queued."""
        ready = {fd for fd, _ in self._look.poll(0)}
        if not ready:
            return
        try:
            if not self._receive(ready):
                self._kill_children()
            for message, fds in self._todo:
                if message.get("do") == "kill":  # the first message, with data for all children, has no "do"
                    self._act(message, fds)
        except OSError:  # the driver has ended
            self._kill_children()
        self._todo = [each for each in self._todo if each[0].get("do") != "kill"]

    def _say(self, message: dict[str, Any]) -> None:
        send(self._sock, message)

    def _act(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
        if self._hello is None:
            self._hello = message
        elif message["do"] == "kill":
            self._forks.kill(message["pid"])
        elif message["do"] == "fork":
            return self._fork(message, fds)
        return None

    def _fork(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
        try:
            pid = self._forks.fork(message["id"], message["label"])
        except OSError as error:
            self._say({"is": "failed", "id": message["id"], "why": explain_fork(error)})
            pid = -1
        if pid == 0:
            self._close_in_child(fds)
            assert self._hello is not None
            return {**self._hello, **message}
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._say({"is": "forked", "id": message["id"], "pid": pid})
        return None

    def _close_in_child(self, fds: list[int]) -> None:
        """Close the server's descriptors, and use ``fds`` as stdout and stderr."""
        self._sock.close()
        self._reader.close()
        if self._driver >= 0:
            os.close(self._driver)
        for number, fd in enumerate(fds, 1):
            os.dup2(fd, number)
            os.close(fd)

    # -- ends ------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        for ended in self._forks.reap():
            self._say(
                {
                    "is": "ended",
                    "id": ended.worker,
                    "pid": ended.pid,
                    "code": ended.exit_code,
                    "signal": ended.signal,
                    "memory": ended.peak_memory,
                    "uptime": ended.uptime,
                }
            )

    def _kill_children(self) -> None:
        self._forks.kill_all(_GONE_S)
        if self._hello is not None:
            socket = self._hello["socket"]
            keys.remove_file(socket)
            if socket:
                keys.remove_file(keys.group_path(socket))
        with contextlib.suppress(Exception):
            keys.sweep()
        os._exit(0)


def _import_module(name: str, glance: Callable[[], None]) -> str:
    """Import a module; return the reason why children cannot use it, or an empty text. Calls ``glance()`` before each import."""
    # An import hook that finds no module, but calls glance().
    between: Any = types.SimpleNamespace(find_spec=lambda _name, _path=None, _target=None: glance())
    sys.meta_path.insert(0, between)
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
    finally:
        sys.meta_path.remove(between)
    others = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    if others:
        return f"importing it has started the thread {others[0]!r}, which forked processes would not have"
    if torch.cuda.is_initialized():
        return "importing it has initialised CUDA, which forked processes cannot use then"
    return ""


def _prepare(glance: Callable[[], None]) -> None:
    """Import the modules that torch imports for an optimizer. Otherwise, most children would need a second to import them.

    ``glance()`` is called before each import, so that kill commands are run meanwhile.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _LATER:
            _import_module(name, glance)
    settle()
