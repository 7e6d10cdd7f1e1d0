"""A process of a cluster other than the driver: from its fork, or from when it has joined, to its exit.

:func:`main` runs in the main thread of a process that was just forked. It sets the process up (random seeds, variables,
directory), joins the group, and waits for the end. The user's ``__main__`` is not imported here. From :func:`enter` on, forked
processes and processes that joined over the network (``join.py``) do the same. No locks.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import logging
import multiprocessing.util
import os
import random
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn

import torch

from actorrpc._exceptions import undo_on_error
from actorrpc.actors.host.actor import HostedActor
from actorrpc.agent.context import Worker
from actorrpc.agent.peers import Peer
from actorrpc.cluster import logs
from actorrpc.cluster.driver_client import RemoteDirectory
from actorrpc.cluster.exit import Member
from actorrpc.config import Settings
from actorrpc.errors import PeerDiedError, ShutdownError
from actorrpc.group import group
from actorrpc.group.group import Group
from actorrpc.rpc import api, rref
from actorrpc.wire.identity import WorkerRecord
from actorrpc.wire.keys import Key

__all__ = ["enter", "exit_process", "main"]


def main(job: dict[str, Any]) -> NoReturn:
    """Run a worker, and end the process; ``job`` is the fork command with the data for all children (``fork_server.py``)."""
    code = 1
    try:
        # After a crash in C, the last lines of stderr, which the death report contains, show the Python stack.
        faulthandler.enable(file=2, all_threads=False)
        # Drop exit functions that libraries have registered in the fork server (they take 50 ms), as multiprocessing does.
        atexit._clear()
        atexit.register(logging.shutdown)
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        HostedActor.on_imported = _freeze
        HostedActor.on_shown = logs.Labels().change
        _work(job)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        exit_process(code)


def _work(job: dict[str, Any]) -> None:
    _reseed()
    torch.set_num_threads(job["threads"])
    directory = RemoteDirectory(WorkerRecord.from_bytes(job["driver"]))
    entered = group.enter(  # before _dress() sets variables, so that the socket is in the driver's directory
        job["name"],
        job["rank"],
        directory,
        settings=Settings(**job["settings"]),
        key=Key(job["key"]),
    )
    try:
        member = enter(
            entered,
            directory,
            timeout=job["timeout"],
            what=f"a process of an actor ({job['name']!r}) in the embedded cluster",
            namespace=job["namespace"],
            dress=lambda: _dress(job),
        )
    except (PeerDiedError, ShutdownError):
        # The last handle of this process's actor was deleted, or the program ended, before this process had joined.
        return
    try:
        member.wait()
    finally:
        api.shutdown(False)


def _freeze() -> None:
    """Exclude objects that importing the actor's class has made from garbage collection: a full collection would take 0.1 s."""
    gc.collect()
    gc.freeze()


def _reseed() -> None:
    """Reseed random number generators: a fork would continue the sequence of its parent."""
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
    sys.argv[:] = job["arguments"]
    if job["directory"] is not None:
        os.chdir(job["directory"])


def exit_process(code: int) -> NoReturn:
    """End the process as an interpreter would, but without finalising its modules.

    Finalising is slow, and a thread that is still in C++ at that time (in a method that has not returned) would abort
    the whole process.
    """
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(code)


_JOIN_S: Final = 30.0


def enter(
    group: Group,
    directory: RemoteDirectory,
    *,
    timeout: float,
    what: str,
    namespace: str,
    facts: dict[str, Any] | None = None,
    dress: Callable[[], None] = lambda: None,
    limit: float = _JOIN_S,
) -> Member:
    """Make this process a member of the group, and tell the driver that it has joined.

    Args:
        timeout: the default time-out of calls, in seconds.
        what: describes this process, for messages.
        facts: data for the driver in addition to the record; None for a process that the driver has forked.
        dress: called when the sockets exist, before any call is served.
        limit: how long the driver may take to answer, in seconds.

    Raises:
        RpcError: the driver refuses this worker, or does not answer. Then this process is in no group.
        RuntimeError: this process is already in a group.
    """
    agent = group.agent
    directory.attach(agent)
    members: list[Member] = []

    def ready(worker: Worker) -> None:
        member = worker.exit_member = Member(agent, worker.references, directory.announce_leaving)
        members.append(member)

        def ended(peer: Peer) -> None:
            if peer.name == directory.driver.name:
                if peer.state == "dead":
                    member.driver_lost = peer.cause or "it died"
                member.leave(False)

        agent.on_peer_end.append(ended)
        if worker.actors is not None:
            worker.actors.spawner = directory

    def stop(graceful: bool, _seconds: float) -> None:
        if graceful:
            references = rref.runtime()
            references.carry_out(references.table.delete_all_users())
        for member in members:  # user code may have called shutdown(): end the main thread, too
            member.leave(graceful)

    with undo_on_error(group.close):  # api.install() fails if this process is in another group
        dress()
        api.install(lambda: group, timeout, what, namespace=namespace, ready=ready, stop=stop)
    with undo_on_error(partial(api.shutdown, False)):
        directory.register(facts, limit)
    return members[0]
