"""A worker process of the cluster, from its fork to its exit.

:func:`main` runs on the main thread of a process that was forked a moment ago. It dresses the process (seeds, variables,
directory), joins the group, and waits for the end. The user's ``__main__`` is not imported here.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import multiprocessing.util
import os
import random
import sys
import traceback
from typing import Any, NoReturn

import torch

from actorrpc.actors.resident import Resident
from actorrpc.cluster import logs
from actorrpc.cluster.member import enter
from actorrpc.cluster.remote import RemoteDirectory
from actorrpc.config import Settings
from actorrpc.core.identity import WorkerRecord
from actorrpc.core.keys import Key
from actorrpc.rpc import api, group

__all__ = ["main"]


def main(job: dict[str, Any]) -> NoReturn:
    """Be a worker; ends the process."""
    code = 1
    try:
        # A crash in C shows where it was, in the death report, which has the last lines only.
        faulthandler.enable(file=2, all_threads=False)
        # What libraries have registered in the fork server is for its exit, and takes 50 ms; as multiprocessing does.
        atexit._clear()
        atexit.register(logging.shutdown)
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        Resident.on_shown = logs.Labels().change
        _work(job)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        _exit(code)


def _work(job: dict[str, Any]) -> None:
    _reseed()
    torch.set_num_threads(job["threads"])
    driver = WorkerRecord.from_bytes(job["driver"])
    directory = RemoteDirectory(driver)
    entered = group.enter(  # before the variables are set: its socket lies where the driver's does
        job["name"],
        job["rank"],
        directory,
        settings=Settings(**job["settings"]),
        key=Key(job["key"]),
    )
    member = enter(
        entered,
        directory,
        driver,
        timeout=job["timeout"],
        what=f"a process of an actor ({job['name']!r}) in the embedded cluster",
        namespace=job["namespace"],
        dress=lambda: _dress(job),
    )
    try:
        member.wait()
    finally:
        api.shutdown(False)


def _reseed() -> None:
    """Give every process random numbers of its own: a fork goes on with those of its parent."""
    random.seed()
    torch.default_generator.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _dress(job: dict[str, Any]) -> None:
    for name in job["unset"]:
        os.environ.pop(name, None)
    os.environ.update(job["set"])
    sys.path[:] = job["path"]
    if job["directory"] is not None:
        os.chdir(job["directory"])


def _exit(code: int) -> NoReturn:
    """End the process as an interpreter would, without taking its modules down: that is slow and proves nothing."""
    try:
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    os._exit(code)
