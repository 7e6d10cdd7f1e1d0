"""Lets a worker answer and send questions (:mod:`~actorrpc.observe.visitor`) while it is in its group.

Command line tools of the same user find a group through group files in the user's private directory. The driver of a cluster,
workers that have joined it, and every worker of a group without a driver write such a file. It contains the key of the group if
the key was generated and not given by the user.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgpack

from actorrpc.agent.context import Worker, here
from actorrpc.agent.peers import Peer
from actorrpc.cluster.draining import DRAIN_S, drain_soon
from actorrpc.cluster.worker_process import RemoteDirectory
from actorrpc.debugger import debugger as _debugger  # noqa: F401  # its on_start hook runs before the hook of this module
from actorrpc.errors import ConfigError, RpcError
from actorrpc.futures import Future
from actorrpc.group.rendezvous import Rendezvous
from actorrpc.observe import collect, processes
from actorrpc.observe.call_sums import CallSums
from actorrpc.observe.torch_profiles import KeptProfiles
from actorrpc.observe.visitor import ACTING, ANSWER, ASK, pack, unpack
from actorrpc.rpc import api
from actorrpc.transport.stream import CLOSED
from actorrpc.validation import number
from actorrpc.wire import keys
from actorrpc.wire.keys import Key

__all__ = ["Observer", "start"]

_log = logging.getLogger("actorrpc.observe")
_LONG: Final = frozenset(
    {"logs", "records", "profiles", "metrics"}
)  # large parts, which a pool thread gathers, so that they do not block the read thread
_TEXT: Final = 1000
_PASSED_ON: Final = 256  # the most questions without an answer of a worker that passes on further questions
_PASS_ON_S: Final = 10.0  # how long a worker waits for the answer to a question that it has passed on


class Observer:
    """Answers the questions that a worker receives, and sends questions. Thread-safe: uses ``_asked`` in single, atomic steps."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[Peer, Future[dict[str, Any]]]] = {}
        self._sums: CallSums | None = None
        #: the profiles that :func:`~actorrpc.observe.keep_profile` has stored
        self.profiles = KeptProfiles()

    def metrics(self) -> dict[str, Any]:
        """Return sums over the calls of this worker. The first call creates the sums, from the records that exist then."""
        agent = self._worker.agent
        if self._sums is None and agent.flight_recorder is not None:
            self._sums = CallSums(agent.flight_recorder, agent.clock, agent.submit)
        return {} if self._sums is None else self._sums.read()

    def query(self, peer: Peer, question: dict[str, Any]) -> Future[dict[str, Any]]:
        """Send a question to a connected worker; return a future that completes when the answer arrives.

        Does not wait. The future never completes if no answer arrives, so the caller calls :meth:`forget` when it stops waiting.
        """
        future: Future[dict[str, Any]] = Future()
        future.label = f"the answer of {peer.name!r} about its state"
        future.add_done_callback(Future.acknowledge)
        number = next(self._numbers)
        future.number = number  # type: ignore[attr-defined]
        self._asked[number] = peer, future
        self._worker.agent.notify(peer, ASK, pack({**question, "id": number}))
        return future

    def forget(self, future: Future[dict[str, Any]]) -> None:
        """Discard a question; a late answer is ignored."""
        self._asked.pop(getattr(future, "number", 0), None)

    # -- handlers of notices: on the read thread ----------------------------------------------------------------

    def answered(self, peer: Peer, body: bytes) -> None:
        """Complete the future of the question that a received answer belongs to."""
        found = unpack(body)
        asked = self._asked.get(found["id"])
        if asked is None or asked[0] is not peer:
            return  # the question was discarded
        del self._asked[found["id"]]
        asked[1].try_complete(found, self._worker.agent.submit)

    def asked(self, peer: Peer, body: bytes) -> None:
        """Answer a received question."""
        question = unpack(body)
        agent = self._worker.agent
        near = "through" not in question and (peer.is_self or any(each.local for each in list(peer.conns)))
        if "do" in question:
            agent.submit(partial(_act, self._worker, peer, question))
            return
        if agent.settings.data_only and not near:
            # A peer that may only call exposed functions must not learn names of files and functions.
            agent.notify(peer, ANSWER, pack(collect.figures(self._worker, question)))
            return
        if "of" in question:
            agent.submit(partial(self._pass_on, peer, question))
            return
        what = question.get("what")
        if isinstance(what, list) and not _LONG.isdisjoint(map(str, what)):
            self._worker.agent.submit(partial(self._answer, peer, question))
        else:
            self._answer(peer, question)

    def _pass_on(self, peer: Peer, question: dict[str, Any]) -> None:
        """Pass a question on to a connected worker, and the answer back; on a pool thread. Opens no connection."""
        agent, number = self._worker.agent, question["id"]
        found = next((each for each in agent.peers() if each.record.incarnation == question["of"]), None)
        conn = None if found is None or found.state != "alive" else found.conn
        if found is None or conn is None or conn.state is CLOSED:
            problem = "it has no connection to this worker"
        elif len(self._asked) >= _PASSED_ON:
            problem = f"it waits for the answers of {_PASSED_ON} workers"
        else:

            def answered(done: Future[dict[str, Any]]) -> None:
                if done.error is None and not agent.closed_down:
                    answer = {**done.wait(), "id": number, "through": agent.name}
                    agent.notify(peer, ANSWER, pack(answer))

            parts = {"what": question.get("what"), "from": question.get("from"), "through": agent.name}
            asked = self.query(found, parts)
            asked.add_done_callback(answered)
            agent.clock.after(_PASS_ON_S, partial(self.forget, asked))
            return
        agent.notify(peer, ANSWER, pack({"id": number, "problem": problem}))

    def _answer(self, peer: Peer, question: dict[str, Any]) -> None:
        try:
            found = collect.answer(self._worker, question)
        except Exception as error:
            if self._worker.agent.closed_down:
                return
            _log.exception("a question of %r about this worker could not be answered", peer.name)
            found = {"id": question["id"], "error": f"{type(error).__name__}: {error}"[:1000]}
        self._worker.agent.notify(peer, ANSWER, pack(found))


def _act(worker: Worker, peer: Peer, asked: dict[str, Any]) -> None:
    """Carry out a visitor's request to kill or restart an actor or drain a worker, and answer it; called on a pool thread.

    Only visitors whose names have the prefix ``ACTING`` may request actions. The handshake authenticates the name, so the
    connection of a command that only reads cannot be used to trigger an action. A holder of the group's key can always connect
    under such a name, or kill actors by calls.
    """
    what, whom = str(asked.get("do"))[:20], str(asked.get("whom"))[:_TEXT]
    where = f"visitor {peer.name!r} (pid {peer.record.pid})"
    problem = ""
    try:
        if not (peer.record.is_visitor and peer.name.startswith(ACTING)):
            raise RpcError("this visitor may only read the state of the group")
        if worker.agent.settings.data_only:
            raise RpcError(f"worker {worker.agent.name!r} takes data only")
        _log.warning("%s: %s %s", where, what, whom)
        _do(worker, what, whom, asked.get("seconds", 0.0))
    except (RpcError, ValueError) as error:
        problem = (str(error) or type(error).__name__)[:_TEXT]
        _log.warning("%s: %s %s: not done: %s", where, what, whom, problem)
    if not worker.agent.closed_down:
        worker.agent.notify(peer, ANSWER, pack({"id": asked["id"], "problem": problem}))


def _do(worker: Worker, what: str, whom: str, seconds: object) -> None:
    if what in ("kill", "restart"):
        if worker.actors is None:
            raise ConfigError(f"worker {worker.agent.name!r} supervises no actors")
        worker.actors.supervisor.kill(int(whom, 16), what == "kill")
    elif what == "drain":
        if worker.cluster is None:
            raise ConfigError(f"worker {worker.agent.name!r} is not the driver of a cluster")
        if worker.agent.peer(whom).is_self:
            raise ConfigError("the driver cannot be drained: it leaves with actorrpc.shutdown()")
        drain_soon(whom, number("seconds", seconds) or DRAIN_S, logging.WARNING)
    else:
        raise ConfigError(f"there is no action {what!r}")


def start(worker: Worker) -> Callable[[bool], None]:
    """Register the handlers of a worker, and write its group file; return a function that undoes this."""
    agent = worker.agent
    made = worker.observer = Observer(worker)
    agent.on_notice[ASK] = made.asked
    agent.on_notice[ANSWER] = made.answered
    agent.inbox.prompt |= {ASK, ANSWER}
    path = _write(worker)
    # A process may have several workers; only one of them registers the signal handler, which dumps all threads of the process.
    unprepare = processes.prepare_dumps(agent.settings.dump_signal if here.worker is worker else 0)

    def shut_down(_graceful: bool) -> None:
        if path:
            keys.remove_file(path)
        unprepare()
        worker.observer = None

    return shut_down


def _write(worker: Worker) -> str:
    """Write the group file if this worker needs one; return its path, or an empty string."""
    agent, membership = worker.agent, worker.group.membership
    if here.worker is not worker:
        return ""
    if isinstance(membership, RemoteDirectory) and not membership.joined:
        return ""  # tools find the group through the driver's file, which is on this host
    path = keys.group_path(agent.record.unix_path)
    key = agent.connector.key
    revealed = b"" if key is None or _is_given(key, membership) else key.reveal()
    about = {
        "record": agent.record.to_bytes(),
        "what": worker.what,
        "keyless": key is None,
        # without the arguments, which may be secrets
        "program": sys.argv[0][:1000] if sys.argv else "",
    }
    try:
        keys.create_group_file(path, revealed, msgpack.packb(about))
    except ConfigError as error:
        _log.info("tools of this user cannot find this group: %s", error)
        return ""
    return path


def _is_given(key: Key, membership: Any) -> bool:
    """Return whether the user gave the key; such a key must not be written to a file."""
    if isinstance(membership, Rendezvous) and membership.key_is_given:
        return True
    try:
        given = keys.find_key()
    except ConfigError:
        return True
    return given == key


api.on_start.append(start)
