"""Several workers of one command, ``python -m actorrpc.worker --count N``: forked from its process, which watches them.

The workers share the memory of what the process has imported, so that a further worker costs a tenth of a process of its own.
The process passes SIGTERM and SIGINT on to the workers, reports each worker that has failed, and ends when all have ended.
Workers are not restarted.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from actorrpc._limits import explain_fork
from actorrpc.actors.spec.actor_spec import DeathReport
from actorrpc.cluster import forwarding
from actorrpc.cluster.provisioners.forks import Forks, settle
from actorrpc.cluster.worker_process import begin_fork, exit_process

__all__ = ["run"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_FAILED: Final = 1


def run(names: Sequence[str], work: Callable[[int], int]) -> int:
    """Fork a worker for each name, and wait until all have ended; return the greatest exit status, and print its cause.

    The status of a worker that a signal has ended is 128 + the signal's number, as in a shell; it is 0 if this process has passed
    that signal on.

    Args:
        work: called in each worker with the index of its name; returns the worker's exit status.
    """
    forks = Forks()
    for number in _SIGNALS:
        signal.signal(number, lambda _signal, _frame: None)  # the number arrives at the alarm
    passed: set[int] = set()
    worst = 0, ""
    # Import cryptography before the forks, so that the workers share its memory. If it is missing, they do not need it.
    with contextlib.suppress(ImportError):
        importlib.import_module("actorrpc.transport.certificate").make()
    settle()
    forwarding.start()  # after the imports, so that the forwarder shares their memory, too
    for index, name in enumerate(names):
        worst = max(worst, _watch(forks, passed))
        if passed:
            break
        try:
            pid = forks.fork(name, name)
        except OSError as error:
            why = f"cannot start {name!r}: {explain_fork(error)}"
            _say(why)
            worst = max(worst, (_FAILED, why))
            break
        if not pid:
            _become_worker(index, work)
    while forks:
        select.select([forks.alarm], [], [])
        worst = max(worst, _watch(forks, passed))
    status, why = worst
    if status:
        _say(f"this command ends with status {status}: {why}")
    return status


def _say(text: str) -> None:
    sys.stderr.write(f"python -m actorrpc.worker: {text}\n")
    sys.stderr.flush()


def _watch(forks: Forks, passed: set[int]) -> tuple[int, str]:
    """Pass received signals on to the workers, and report ended workers; return their greatest exit status, and its cause."""
    for number in forks.signals():
        if number in _SIGNALS:
            passed.add(number)
            forks.send(number)
    # If this process is process 1 of a container, it also reaps orphans of the workers; their reports have an empty name.
    workers = [each for each in forks.reap() if each.worker]
    return max((_report(each, passed, len(forks)) for each in workers), default=(0, ""))


def _report(ended: DeathReport, passed: set[int], rest: int) -> tuple[int, str]:
    """Print a line about a worker that has failed; return its exit status, and how it has ended."""
    status = ended.exit_code or 0
    if ended.signal is not None and ended.signal not in passed:
        status = 128 + ended.signal
    if status:
        _say(f"{ended.describe()}; {rest} other worker(s) continue")
    return status, ended.describe()


def _become_worker(index: int, work: Callable[[int], int]) -> NoReturn:
    """Run a worker in a process that was just forked, and end the process."""
    code = _FAILED
    try:
        null = os.open(os.devnull, os.O_RDONLY)  # the workers do not share the terminal's input
        os.dup2(null, 0)
        os.close(null)
        begin_fork()
        code = work(index)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else _FAILED
    except KeyboardInterrupt:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        exit_process(code)
