"""Objects made of the answers of workers, even of malformed answers, and findings."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from actorrpc.errors import ProtocolError
from actorrpc.observe import (
    BrokenDeadlock,
    Finding,
    GroupState,
    MailboxState,
    ObservedActor,
    ObservedCall,
    ObservedConnection,
    ObservedStream,
    ObservedWait,
    ObservedWorker,
    WorkerDeath,
)
from actorrpc.observe.assemble import Silent, assemble
from actorrpc.observe.findings import findings
from actorrpc.observe.model import made_of
from actorrpc.observe.visitor import pack, unpack
from actorrpc.wire.identity import WorkerRecord, new_incarnation


@pytest.mark.parametrize(
    "row",
    [
        None,
        [],
        {"name": 3, "rank": "x", "connections": "no list", "pool": [1]},
        {"connections": [None, 3, {"worker": b"bytes", "sockets": True}]},
        {"threads": [{"frames": [{"line": "one"}]}], "unknown": 1},
    ],
)
def test_malformed_answers_become_default_values(row: Any) -> None:
    made = made_of(ObservedWorker, row)
    for each in dataclasses.fields(ObservedWorker):
        assert type(getattr(made, each.name)) is type(getattr(ObservedWorker(), each.name))


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", pack({"id": 1})[:-1], pack({"what": []}), pack({"id": "1"}), b"\x91\x01"]
)
def test_malformed_questions_raise_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        unpack(body)


# -- the state of a group -------------------------------------------------------------------------------------------------


def _record(name: str, rank: int) -> WorkerRecord:
    return WorkerRecord(name=name, rank=rank, incarnation=new_incarnation(), host="h", pid=100 + rank)


_DRIVER, _WORKER = _record("driver", 0), _record("w", 1)


def test_the_finding_about_a_silent_worker_names_the_calls_to_it() -> None:
    def calls(number: int, method: str, oldest: float) -> dict[str, Any]:
        made = {"worker": "w", "calls_out": number, "oldest_call": method, "oldest": oldest}
        return {"process": {"connections": [made, {"worker": "driver"}]}}

    other = _record("other", 2)
    answers = [
        (_DRIVER, calls(2, "C.a", 1.0)),
        (other, calls(1, "C.b", 3.0)),
        (_WORKER, Silent("busy", "it runs")),
    ]
    state = assemble(answers)
    driver, worker = state.workers[:2]
    assert (driver.calls_to, worker.calls_to, worker.oldest_call, worker.oldest) == (0, 3, "C.b", 3.0)
    (found,) = state.findings
    assert "is busy: it runs; 3 calls to it unfinished, the oldest (of C.b) for 3.0 s" in found.what


def _kinds(*, workers: tuple[ObservedWorker, ...] = (), actors: tuple[ObservedActor, ...] = ()) -> list[Any]:
    return [(each.kind, each.wrong) for each in findings(GroupState(workers=workers, actors=actors))]


def _in_rounds(waits: dict[str, ObservedWait]) -> list[str]:
    workers = tuple(ObservedWorker(name=name, waits=(wait,)) for name, wait in waits.items())
    return [each.what for each in findings(GroupState(workers=workers)) if each.kind == "rounds"]


def test_workers_that_wait_for_each_other_in_shutdown_and_in_a_barrier_are_a_fault() -> None:
    shutdown = ObservedWait(round="shutdown", since=61.0)
    barrier = ObservedWait(round="a barrier", members=("a", "b"), since=60.0)
    assert _in_rounds({"a": shutdown, "b": barrier}) == [
        "workers wait for each other in different rounds: 'a' in shutdown for 61.0 s, 'b' in a barrier for 60.0 s"
    ]
    assert _in_rounds({"a": shutdown, "b": shutdown}) == []
    # A passive worker may wait in shutdown while others meet without it, and short waits are no fault.
    assert _in_rounds({"c": shutdown, "a": barrier, "b": barrier}) == []
    assert _in_rounds({"a": shutdown, "b": dataclasses.replace(barrier, since=1.0)}) == []


def test_each_kind_of_fault_is_a_finding() -> None:
    assert _kinds(workers=(ObservedWorker(name="a"),), actors=(ObservedActor(state="ALIVE"),)) == []
    assert _kinds(workers=(ObservedWorker(state="stopped"),)) == [("worker", True)]
    assert _kinds(workers=(ObservedWorker(descriptors=95, descriptor_limit=100),)) == [("descriptors", True)]
    deadlocks = tuple(BrokenDeadlock(error="a circle", since=each) for each in (301.0, 299.0))
    (broken,) = findings(GroupState(workers=(ObservedWorker(name="a", deadlocks=deadlocks),)))
    assert broken == Finding(
        kind="deadlock", wrong=True, what="worker 'a' broke a deadlock 299 s ago: a circle"
    )
    deaths = tuple(WorkerDeath(what="worker 'b' died", since=each) for each in (301.0, 299.0))
    assert _kinds(workers=(ObservedWorker(deaths=deaths),)) == [("worker", True)]
    assert _kinds(workers=(ObservedWorker(pool={"threads": 4, "listening": 0, "queued": 9}),)) == [
        ("threads", True)
    ]
    assert _kinds(workers=(ObservedWorker(calls=(ObservedCall(left=-5.0),)),)) == [("deadline", True)]
    suspect = ObservedConnection(worker="b", state="suspect")
    alive = ObservedWorker(name="b")
    assert _kinds(workers=(ObservedWorker(name="a", connections=(suspect,)), alive)) == [("suspect", True)]
    paused = ObservedStream(pauses=True)
    assert _kinds(workers=(ObservedWorker(streams=(paused, ObservedStream())),)) == [("stream", False)]
    assert _kinds(actors=(ObservedActor(state="RESTARTING"),)) == [("actor", True)]
    assert _kinds(actors=(ObservedActor(mailbox=(MailboxState(waiting=1, oldest=20.0),)),)) == [
        ("mailbox", True)
    ]
    assert _kinds(actors=(ObservedActor(running=(ObservedCall(left=-5.0),)),)) == [("deadline", True)]
