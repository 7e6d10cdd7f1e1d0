"""Finds the groups of this user on this host, and queries their workers from a process outside the groups. Does not import torch.

Groups are found by the group files in the user's private directory (:mod:`actorrpc.observe.startup`). The workers that the files
name are queried first, all at once and each over its own connection, then further workers that their answers name. For a worker
that does not answer in time, the result has the reason, from ``/proc`` if the worker is on this host. If this process cannot
reach a worker on another host, it queries that worker through a worker that is connected to it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgpack

from actorrpc.config import Settings, host_and_port
from actorrpc.errors import AuthenticationError, ConfigError, ProtocolError, RpcError, VersionError
from actorrpc.observe import processes
from actorrpc.observe.assemble import Silent, assemble
from actorrpc.observe.model import GroupState
from actorrpc.observe.trace import Recording
from actorrpc.observe.visitor import KeptVisits, Question, Target
from actorrpc.wire import keys
from actorrpc.wire.identity import WorkerRecord, host_identity, new_incarnation
from actorrpc.wire.keys import Key

__all__ = ["FoundGroup", "GroupLook", "at_address", "find_groups", "look", "members_of"]

_AT_ONCE: Final = 64
_DUMP_S: Final = 0.25  # the seconds of the time-out that are reserved for stack dumps by signal
_SOON_S: Final = 0.2  # a driver that has not answered after this time is assumed to hang, and its child processes are queried
# The most workers that are asked, one after the other, about a worker that cannot be reached.
_THROUGH: Final = 3
_THROUGH_AT_ONCE: Final = 8
_SCHEME: Final = "tcp://"
_SOCKET: Final = re.compile(r"\d+-(\d+)-\d+-[0-9a-f]{8}\.sock", re.ASCII)

Answer = tuple[WorkerRecord, "dict[str, Any] | Silent"]
#: Returns the answer of a worker, or the reason why there is none. Raises OSError, RpcError or ValueError if the query failed;
#: TimeoutError if there was no answer in time.
Query = Callable[[Question], "dict[str, Any] | Silent"]


@dataclass(slots=True, kw_only=True)
class FoundGroup:
    """A group that was found on this host or by its address.

    Attributes:
        what: describes the worker that wrote the group file; ``program`` is the program that this worker runs.
        pids: the processes that have written a group file of this group.
        key: the key of the group; None if the group has no key, or a key that this process does not know.
        is_closed: whether the group has a key that this process does not know.
        targets: the workers to query first.
    """

    what: str = ""
    program: str = ""
    pids: list[int] = field(default_factory=list)
    key: Key | None = None
    is_closed: bool = False
    targets: list[Target] = field(default_factory=list)


@dataclass(slots=True)
class GroupLook:
    """The result of a query of a whole group.

    Attributes:
        answers: the record and the answer of each worker, by the worker's incarnation.
        took: seconds that the query took.
    """

    group: FoundGroup
    answers: dict[str, Answer]
    took: float

    @property
    def state(self) -> GroupState:
        """The state of the group, built from the answers."""
        return assemble(self.answers.values(), self.took)

    @property
    def silence(self) -> str:
        """Why no worker has answered at the address of the group; empty if a worker has answered or has refused the visitor."""
        found = [
            each.reason if isinstance(each, Silent) and each.state == "silent" and record.rank < 0 else ""
            for record, each in self.answers.values()
        ]
        return found[0] if all(found) and found else ""

    def recordings(self, since: float | None = None) -> list[Recording]:
        """Return the records of all workers' flight recorders, by rank; ``since``: without calls that ended before this time."""
        answers = sorted(self.answers.values(), key=lambda each: (each[0].rank, each[0].name))
        found = [Recording.of(record.name, record.pid, answer) for record, answer in answers]
        if since is not None:
            for each in found:
                each.since(since)
        return found

    def target(self, record: WorkerRecord) -> Target:
        """Return the target for visiting one worker of the group."""
        return Target.of(record, self.group.key, self.group.targets[0].settings)


def find_groups(pid: int = 0) -> list[FoundGroup]:
    """Return this user's groups on this host, the oldest first.

    Args:
        pid: return only groups for which this process, or else an ancestor or a descendant of it, wrote a group file; 0: all
            groups.

    Raises:
        ConfigError: the private directory or an ``ACTORRPC_*`` variable cannot be used, or the user's key cannot be read.
    """
    given = keys.find_key()
    settings = Settings.from_environment()  # a visitor only uses the settings of TLS
    found: dict[bytes, FoundGroup] = {}
    for owner, path in keys.group_files():
        try:
            read = keys.read_group_file(path)
            if read is None:
                continue
            made, about = read
            facts = msgpack.unpackb(about)
            record = WorkerRecord.from_bytes(facts["record"])
            keyless = facts["keyless"] is True
        except (AuthenticationError, RpcError, ValueError, TypeError, KeyError, msgpack.UnpackException):
            continue
        key = made or (None if keyless else given)
        # A generated key identifies one group. Several groups may use a key that the user gave, so the path identifies the group.
        name = made.reveal() if made is not None else path.encode()
        group = found.setdefault(
            name,
            FoundGroup(
                what=str(facts.get("what", "")),
                program=str(facts.get("program", "")),
                key=key,
                is_closed=key is None and not keyless,
            ),
        )
        group.pids.append(owner)
        group.targets.append(Target.of(record, key, settings))
    groups = list(found.values())
    if not pid:
        return groups
    # Prefer an exact match: the driver of a group may be a descendant of a process of another group.
    return (
        [each for each in groups if pid in each.pids]
        or [each for each in groups if any(pid in processes.descendants(one) for one in each.pids)]
        or [each for each in groups if not processes.descendants(pid).isdisjoint(each.pids)]
    )


def at_address(text: str) -> FoundGroup:
    """Return the group of the worker that listens at an address: ``tcp://host:port``, or the path of a Unix socket.

    The key is the key that the user gave, else the key of a group of this user that listens at the address.

    Raises:
        ConfigError: the text is no such address.
        AuthenticationError: no key was found, and ``ACTORRPC_INSECURE`` is not set.
    """
    address: str | tuple[str, int]
    if text.startswith("/"):
        address = text
    else:
        host, port = host_and_port(text.removeprefix(_SCHEME))
        if port is None:
            raise ConfigError(
                f"--connect {text}: an address is tcp://HOST:PORT, or the path of a Unix socket"
            )
        address = (host, port)
    settings = Settings.from_environment()
    key = keys.find_key()
    if key is None:
        for group in find_groups():
            for target in group.targets:
                record = target.record
                ports = [port for _, port in record.tcp] if record is not None else []
                if address in target.addresses or (not isinstance(address, str) and address[1] in ports):
                    key = group.key
    if key is None and not settings.insecure:
        raise AuthenticationError(
            f"there is no key for {text}: set ACTORRPC_KEY to the key of its group, or ACTORRPC_KEY_FILE to "
            "the path of a file with that key, which only you can read"
        )
    target = Target(record=None, addresses=[address], key=key, settings=settings)
    return FoundGroup(what=f"the group of {text}", key=key, targets=[target])


# -- querying ----------------------------------------------------------------------------------------------------


def _query(query_worker: Query, question: Question) -> dict[str, Any] | Silent:
    """Query one worker. Errors are returned as :class:`Silent`."""
    pid = 0 if question.of else question.target.local_pid
    dumps = bool(pid) and "threads" in question.parts
    try:
        # If the worker does not answer, it must dump its stacks within the same time-out.
        return query_worker(replace(question, until=question.until - _DUMP_S) if dumps else question)
    except (OSError, RpcError, ValueError) as error:
        if question.of:
            return Silent("silent", str(error) or type(error).__name__)
        silent = _silence(question.target, error)
        if dumps and silent.state == "busy":
            silent.dump(pid, question.until)
        return silent


def _silence(target: Target, error: BaseException) -> Silent:
    pid = target.local_pid
    if isinstance(error, VersionError):
        return Silent("incompatible", f"it runs another version of actorrpc than this process: {error}")
    if isinstance(error, ProtocolError):
        return Silent("refused", str(error))
    if pid:
        state, reason = processes.why_silent(pid)
        if state == "busy" and not isinstance(error, TimeoutError):
            state, reason = "silent", f"its process runs, and cannot be reached: {error}"
        return Silent(state, reason, processes.figures(pid))
    return Silent("silent", str(error) or type(error).__name__)


def look(
    group: FoundGroup,
    parts: list[str],
    timeout: float,
    *,
    silence: float = float("inf"),
    begin: dict[str, int] | None = None,
    kept: KeptVisits | None = None,
    query_worker: Query | None = None,
) -> GroupLook:
    """Query all workers of a group.

    Args:
        parts: the parts of the state to request; see :mod:`actorrpc.observe.visitor`.
        timeout: for the whole query, in seconds.
        silence: the query of a worker ends if the worker has sent nothing for so many seconds.
        begin: by part: where the first page begins, for parts that are sent in pages.
        kept: provides the open connections of the previous query, and stores connections for the next query.
        query_worker: is called for each target of the group, each in its own thread. By default, a visitor queries each target,
            and each further worker that an answer names.
    """
    query = query_worker or (kept or KeptVisits(keeps=False)).query
    begun = time.monotonic()
    until = begun + timeout
    at_once = _AT_ONCE if query_worker is None else max(_AT_ONCE, len(group.targets))
    own = (
        ThreadPoolExecutor(at_once, "observe") if kept is None else contextlib.nullcontext(kept.pool(at_once))
    )
    # All threads of ``pool`` may be waiting for hosts that drop packets. So ``further`` sends the questions that workers pass on.
    with own as pool, ThreadPoolExecutor(_THROUGH_AT_ONCE, "observe-through") as further:

        def submit(target: Target, wanted: list[str], of: str = "") -> Future[dict[str, Any] | Silent]:
            question = Question(target, wanted, until, begin or {}, silence, of)
            return (further if of else pool).submit(_query, query, question)

        search = _Search(submit, parts, everybody=query_worker is None)
        for target in group.targets:
            search.query(target)
        while search.running or search.passed_on:
            done, late = wait([*search.running, *search.passed_on], _SOON_S, FIRST_COMPLETED)
            for future in done:
                if future in search.running:
                    search.add_answer(search.running.pop(future), future.result())
                else:
                    search.add_passed_on(*search.passed_on.pop(future), future.result())
            if time.monotonic() - begun >= _SOON_S:
                for target in [search.running[future] for future in late if future in search.running]:
                    search.ask_children(target)
                    search.miss(target)
            search.pass_on()
    if kept is not None:
        kept.keep_only(search.answers)
    return GroupLook(group, search.answers, time.monotonic() - begun)


class _Search:
    """Queries workers, and the workers that their answers name, each once.

    Args:
        query_worker: starts the query of one worker for some parts; returns a future. The third argument is the incarnation of
            the worker to which the question is passed on.
        parts: the parts of the state to request.
        everybody: also query the workers that answers name.

    Attributes:
        running: the workers that are queried at present.
        passed_on: by future, each question that is being passed on: the worker in question, and the worker that passes it on.
        answers: the results of finished queries, by incarnation.
    """

    def __init__(
        self,
        query_worker: Callable[..., Future[dict[str, Any] | Silent]],
        parts: list[str],
        everybody: bool,
    ) -> None:
        self._begin = query_worker
        self._parts = parts
        self._wanted = [*parts, "members"] if everybody else parts
        self._everybody = everybody
        self._asked: set[str] = set()
        self._descended: set[str] = set()  # incarnations of silent drivers whose children were queried
        self._seen: set[bytes] = set()  # packed records of members that were processed already
        self._reached: dict[str, Target] = {}  # workers that have answered themselves, by incarnation
        # By incarnation: workers without an answer, and the workers that were asked about them.
        self._missed: dict[str, tuple[WorkerRecord, list[str]]] = {}
        self.running: dict[Future[dict[str, Any] | Silent], Target] = {}
        self.passed_on: dict[Future[dict[str, Any] | Silent], tuple[WorkerRecord, WorkerRecord]] = {}
        self.answers: dict[str, Answer] = {}

    def query(self, target: Target) -> None:
        name = target.record.incarnation if target.record is not None else repr(target.addresses)
        if name not in self._asked:
            self._asked.add(name)
            self.running[self._begin(target, self._wanted)] = target

    def ask_children(self, target: Target) -> None:
        """Query the child processes of a driver that has not sent the list of workers."""
        record = target.record
        if self._everybody and record is not None and record.rank == 0 and target.local_pid:
            if record.incarnation not in self._descended:
                self._descended.add(record.incarnation)
                for each in _children(target):
                    self.query(each)

    def miss(self, target: Target) -> None:
        """Note that a worker on another host does not answer, so that :meth:`pass_on` asks other workers about it."""
        record = target.record
        if record is not None and not target.local_pid and record.incarnation not in self.answers:
            self._missed.setdefault(record.incarnation, (record, []))

    def pass_on(self) -> None:
        """Ask the driver, then workers that are connected to a missed worker, about it: one at a time, at most ``_THROUGH``."""
        busy = {record.incarnation for record, _ in self.passed_on.values()}
        for incarnation, (record, asked) in list(self._missed.items()):
            if incarnation in busy or len(asked) >= _THROUGH or incarnation in self._reached:
                continue
            for other in sorted(self._reached, key=lambda each: self.answers[each][0].rank):
                by, found = self.answers[other]
                if other not in asked and (by.rank == 0 or _is_connected(found, record.name)):
                    asked.append(other)
                    future = self._begin(self._reached[other], self._parts, incarnation)
                    self.passed_on[future] = record, by
                    break

    def add_passed_on(self, record: WorkerRecord, by: WorkerRecord, found: dict[str, Any] | Silent) -> None:
        """Store the answer that the worker ``by`` has passed on; if there is none, append ``by``'s reason to the known reason."""
        known = self.answers.get(record.incarnation)
        if not isinstance(found, Silent):
            self._missed.pop(record.incarnation, None)
            if known is None or isinstance(known[1], Silent):
                self.answers[record.incarnation] = record, found
        elif known is not None and isinstance(known[1], Silent):
            known[1].reason += f"; {by.name!r} was asked about it: {found.reason}"

    def add_answer(self, target: Target, found: dict[str, Any] | Silent) -> None:
        """Store the result of a query. Query the members that an answer names, or the children of a worker without an answer."""
        record = target.record or _record_of(target, found)
        if record is None:
            return
        known = self.answers.get(record.incarnation)
        if known is None or isinstance(known[1], Silent):
            self.answers[record.incarnation] = record, found
        self._asked.add(record.incarnation)
        if isinstance(found, Silent):
            self.ask_children(target)
            if found.state == "silent" and (known is None or isinstance(known[1], Silent)):
                self._missed.setdefault(record.incarnation, (record, []))
            return
        self._reached[record.incarnation] = target
        if self._everybody:
            if found.get("members_all") is True:
                self._wanted = self._parts  # the list is complete: no other worker needs to send the members
            for member in members_of(found, self._seen):
                if (
                    member.incarnation in self.answers
                ):  # so far, only the address of this worker may have been known
                    self.answers[member.incarnation] = member, self.answers[member.incarnation][1]
                self.query(Target.of(member, target.key, target.settings))


@functools.lru_cache(1024)
def _record(packed: bytes) -> WorkerRecord:
    return WorkerRecord.from_bytes(packed)  # cached, as repeated queries receive the same records


def members_of(found: dict[str, Any], seen: set[bytes]) -> Iterable[WorkerRecord]:
    """Yield the records of members in an answer that are not in ``seen``, and add them to ``seen``."""
    rows = found.get("members")
    for packed in rows if isinstance(rows, list) else []:
        if not isinstance(packed, bytes) or packed in seen:
            continue
        seen.add(packed)
        try:
            yield _record(packed)
        except (RpcError, TypeError):
            continue


def _is_connected(found: dict[str, Any] | Silent, worker: str) -> bool:
    """Return whether an answer lists an open connection to a worker."""
    process = {} if isinstance(found, Silent) else found.get("process")
    rows = process.get("connections") if isinstance(process, dict) else None
    return any(
        isinstance(each, dict) and each.get("worker") == worker and each.get("sockets")
        for each in (rows if isinstance(rows, (list, tuple)) else ())
    )


def _record_of(target: Target, found: dict[str, Any] | Silent) -> WorkerRecord | None:
    """Return a record made from a worker's answer, or None. A TCP address without answer gets a record named ``unknown``."""
    if isinstance(found, Silent):
        if target.record is None and isinstance(target.addresses[0], str):
            return None
        return WorkerRecord(name="unknown", rank=-1, incarnation=new_incarnation(), host="unknown")
    address = target.addresses[0]
    try:
        return WorkerRecord(
            name=found["name"],
            rank=found["rank"],
            incarnation=found["incarnation"],
            host=host_identity() if isinstance(address, str) else "unknown",
            unix_path=address if isinstance(address, str) else None,
            tcp=() if isinstance(address, str) else (address,),
            pid=found["pid"],
        )
    except (KeyError, TypeError, ConfigError):
        return None


def _children(target: Target) -> list[Target]:
    """Return targets for the child processes of a worker that does not answer, found by the names of their sockets."""
    record = target.record
    if record is None or record.unix_path is None:
        return []
    folder, family = os.path.dirname(record.unix_path), processes.descendants(record.pid)
    found = []
    for name in sorted(os.listdir(folder)):
        match = _SOCKET.fullmatch(name)
        if match is not None and int(match[1]) in family and not keys.is_stale(name):
            path = os.path.join(folder, name)
            found.append(Target(record=None, addresses=[path], key=target.key, settings=target.settings))
    return found
