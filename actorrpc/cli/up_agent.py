"""The program that ``actorrpc up`` runs on each host: it starts the workers of the host, and ends them with its connection.

The agent writes a line of JSON with its version to stdout, and reads a line of JSON from stdin: the arguments for ``python -m
actorrpc.worker``, environment variables, and the key. The workers read the key from the agent's memory, so the key is in no
argument, no environment variable and no file. When the agent reads END, or its stdin ends because ``actorrpc up`` or the
connection has ended, the agent sends SIGTERM to the workers, and later SIGKILL. If its stdin ends after END, it sends SIGKILL.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any, Final

from actorrpc import __version__
from actorrpc._python import interpreter_options
from actorrpc.transport.signals import die_with
from actorrpc.wire import keys

__all__ = ["END", "main"]

END: Final = b"\n"
"""The line that ends the workers."""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    """Serve one ``actorrpc up``; return the exit status of the workers."""
    hello = {"actorrpc": __version__, "host": socket.gethostname(), "python": sys.executable}
    sys.stdout.write(f"{json.dumps(hello)}\n")
    sys.stdout.flush()
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # without buffer: _run() reads the rest
        line = stdin.readline()
    if not line.endswith(b"\n"):
        return 0  # the other end does not accept this version, or has ended
    orders = json.loads(line)
    alarm, alarm_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in _SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    signal.set_wakeup_fd(alarm_write, warn_on_full_buffer=False)
    _, key_file = keys.create_key_in_memory(orders["key"].encode())
    return _run(orders, key_file, alarm)


def _run(orders: dict[str, Any], key_file: str, alarm: int) -> int:
    own = os.getpid()
    process = subprocess.Popen(
        [sys.executable, *interpreter_options(), "-m", "actorrpc.worker", *orders["arguments"]],
        env={
            **os.environ,
            **orders["environment"],
            "ACTORRPC_KEY": "",
            "ACTORRPC_KEY_FILE": key_file,
            "PYTHONUNBUFFERED": "1",
        },
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: die_with(own, signal.SIGTERM),  # this process has one thread
        start_new_session=True,
    )
    look = select.poll()
    ended = os.pidfd_open(process.pid)
    for fd in (0, alarm, ended):
        look.register(fd, select.POLLIN)
    limit = None
    while ended not in (ready := {fd for fd, _ in look.poll(limit)}):
        has_closed = 0 in ready and not os.read(0, 4096)
        if not ready or (has_closed and limit is not None):
            os.killpg(process.pid, signal.SIGKILL)
            break
        if alarm in ready:
            os.read(alarm, 4096)
        if has_closed:
            look.unregister(0)
        if limit is None:
            limit = 1000 * orders["grace"]
            process.terminate()
    status = process.wait()
    return status if status >= 0 else 128 - status
