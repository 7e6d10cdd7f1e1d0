"""``actorrpc.state()`` and its parts, in a running cluster."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import rpc
from actorrpc.observe import ObservedActor, processes
from tests.actors.e2e.kit import open_gate, pass_gate, until

pytestmark = [pytest.mark.limit(60)]


@actorrpc.remote
class Busy:
    def __init__(self, other: Any = None) -> None:
        self.other = other

    def __repr__(self) -> str:
        raise RuntimeError("state() must not call this")

    @property
    def trap(self) -> int:
        raise RuntimeError("state() must not call this")

    def pass_gate(self, path: str) -> str:
        return pass_gate(path)

    def ask(self, path: str) -> str:
        return str(actorrpc.get(self.other.pass_gate.remote(path)))

    def numbers(self) -> Any:
        yield from range(1000)

    def hold_the_interpreter(self, path: str) -> int:
        """Wait at a gate in C code that holds the GIL."""
        return int(ctypes.PyDLL(None).open(path.encode(), os.O_RDONLY | os.O_CLOEXEC))

    def zeros(self, count: int) -> Any:
        return torch.zeros(count, dtype=torch.uint8)

    def keep(self, what: Any) -> int:
        self.kept = what
        return len(what)

    def size_of(self, what: Any) -> int:
        return int(what.nbytes) if isinstance(what, torch.Tensor) else len(what)

    def remove_handler(self, number: int) -> int:
        faulthandler.unregister(number)
        return os.getpid()

    def pid(self) -> int:
        return os.getpid()


@actorrpc.remote
class Async:
    async def wait_for(self, other: Any, path: str) -> str:
        return str(await other.pass_gate.remote(path))


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def _state_of(actor: Any) -> ObservedActor:
    wanted = f"{actor.actor_id:016x}"
    return next(each for each in actorrpc.state(30).actors if each.actor_id == wanted)


@pytest.mark.usefixtures("embedded")
def test_state_shows_running_calls_and_mailboxes(gate: Path) -> None:
    inner = Busy.remote()
    outer = Busy.options(name="outer").remote(inner)
    calls = [outer.ask.remote(str(gate)), outer.pid.remote(), outer.pid.remote()]
    until(lambda: _state_of(inner).running and any(each.waits_for for each in _state_of(outer).running))
    until(lambda: _state_of(outer).waiting == 2)
    seen, below = _state_of(outer), _state_of(inner)
    assert (seen.state, seen.class_name, seen.name, seen.supervisor) == ("ALIVE", "Busy", "outer", "driver")
    assert (seen.waiting, seen.mailbox[0].next, seen.calls_done) == (2, "pid", 0)
    (call,), (inner_call,) = seen.running, below.running
    assert (call.method, call.caller, call.left) == ("ask", "driver", None)
    assert call.waits_for == (f"the call of Busy.pass_gate on {below.worker!r}",)
    # The chain connects the nested call with its outer call.
    assert (inner_call.method, inner_call.caller) == ("pass_gate", seen.worker)
    assert call.execution in inner_call.chain
    open_gate(gate)
    assert actorrpc.get(calls)[0] == "go"
    until(lambda: _state_of(outer).calls_done == _state_of(outer).latest == 3)
    times = _state_of(outer)
    assert 0.0 < times.p50 < times.p99
    assert times.failed == 0
    with pytest.raises(FileNotFoundError):
        actorrpc.get(outer.ask.remote("/nowhere"))
    until(lambda: _state_of(outer).failed == 1)


@pytest.mark.usefixtures("embedded")
def test_state_shows_running_coroutines(gate: Path) -> None:
    inner, outer = Busy.remote(), Async.remote()
    call = outer.wait_for.remote(inner, str(gate))
    until(lambda: any(each.waits_for for each in _state_of(outer).running))
    (seen,) = _state_of(outer).running
    assert (seen.method, seen.thread) == ("wait_for", 0)
    assert seen.waits_for[0].startswith("the call of Busy.pass_gate on ")
    open_gate(gate)
    actorrpc.get(call)


@pytest.mark.usefixtures("embedded")
def test_state_shows_the_calls_for_which_threads_wait(gate: Path) -> None:
    actor = Busy.remote()
    actorrpc.get(actor.pid.remote())
    worker = _state_of(actor).worker
    call = actor.pass_gate.remote(str(gate))

    def coroutine() -> None:
        async def waits() -> None:
            await asyncio.gather(call, actor.pid.remote())

        asyncio.run(waits())

    waits: dict[str, Callable[[], object]] = {
        "get": lambda: actorrpc.get(call),
        "get with a bound": lambda: actorrpc.get(call, timeout=60.0),
        "get of two": lambda: actorrpc.get([call, actor.pid.remote()]),
        "wait": lambda: actorrpc.wait([call], timeout=60.0),
        "rpc_sync": lambda: rpc.rpc_sync(worker, pass_gate, args=(str(gate.with_name("other")),)),
        "coroutine": coroutine,
    }
    os.mkfifo(gate.with_name("other"))
    threads = [threading.Thread(target=run, name=name) for name, run in waits.items()]
    for each in threads:
        each.start()

    def seen() -> dict[str, set[str]]:
        driver = actorrpc.state(30, stacks=True).worker("driver")
        assert driver is not None
        return {
            each.name: set(each.waits_for) for each in driver.threads if each.name in waits and each.waits_for
        }

    method = f"the call of Busy.pass_gate on {worker!r}"
    both_calls = {method, f"the call of Busy.pid on {worker!r}"}
    expected = {
        "get": {method},
        "get with a bound": {method},
        "wait": {method},
        "get of two": both_calls,
        "coroutine": both_calls,
        "rpc_sync": {f"the call of pass_gate on {worker!r}"},
    }
    until(lambda: seen() == expected)
    open_gate(gate)
    open_gate(gate.with_name("other"))
    for each in threads:
        each.join()


@pytest.mark.usefixtures("embedded")
def test_state_shows_paused_streams() -> None:
    actor = Busy.remote()
    stream = actor.numbers.options(backpressure=3).remote()
    assert actorrpc.get(next(stream)) == 0

    def paused() -> list[Any]:
        return [each for worker in actorrpc.state(30).workers for each in worker.streams if each.pauses]

    # It pauses twice: first until its producer is notified that an item was read.
    found: list[Any] = []
    until(lambda: found.extend(paused()) or found)
    seen = found[0]
    assert (seen.method, seen.consumer, seen.limit, seen.items) == ("numbers", "driver", 3, 3)
    stream.close()


@pytest.mark.usefixtures("embedded")
def test_state_shows_memory_descriptors_and_threads_of_a_process() -> None:
    actor = Busy.remote()
    pid = actorrpc.get(actor.pid.remote())
    state = actorrpc.state(30)
    worker = next(each for each in state.workers if each.pid == pid)
    assert worker.state == "alive"
    assert worker.memory > 1 << 20
    assert 0 < worker.descriptors < worker.descriptor_limit
    assert worker.thread_count > 1
    assert worker.age > 0
    assert [each.worker for each in worker.connections] == ["driver"]
    assert state.workers[0].rank == 0
    json.dumps(state.as_dict())
    assert {each.name for each in state.workers} == {
        each.name for each in actorrpc.workers() if each.state == "alive"
    }


@pytest.mark.usefixtures("embedded")
def test_state_shows_the_holders_of_actors_and_rrefs() -> None:
    keeper, reader = Busy.remote(), Busy.remote()
    # The supervisor of an actor counts its handles.
    until(lambda: _state_of(keeper).handles == {"driver": 1})
    assert actorrpc.get(reader.keep.remote([keeper])) == 1
    until(lambda: _state_of(keeper).handles == {"driver": 1, _state_of(reader).worker: 1})
    assert _holders("driver", "actor")
    value = rpc.RRef(torch.zeros(1 << 18))
    (held,) = _holders("driver", "Tensor")
    assert (held.holder, held.references, held.bytes) == ("driver", 1, 1 << 20)
    del value


@pytest.mark.usefixtures("embedded")
def test_state_shows_the_holders_of_large_objects() -> None:
    keeper, reader = Busy.remote(), Busy.remote()
    large = keeper.zeros.remote(1 << 20)
    actorrpc.wait([large])  # otherwise the reader would get a reference to a pending result of the driver
    assert actorrpc.get(reader.keep.remote([large])) == 1
    reader_worker = _state_of(reader).worker
    until(lambda: set(_objects("the result of Busy.zeros")) == {"driver", reader_worker})
    keepers, ours = _objects("the result of Busy.zeros").values()
    assert keepers == ours  # both workers hold the same segment
    assert ours.bytes >= 1 << 20
    kept = actorrpc.put(bytearray(9 << 20))
    (put,) = _objects("put(bytearray)").values()
    assert put.bytes >= 9 << 20
    assert put.site.startswith(f"{__file__}:")
    seen = actorrpc.state(30).worker("driver")
    assert seen is not None
    held = seen.object_memory
    assert 10 << 20 <= held["held"] <= held["host"] <= held["limit"]
    del kept
    until(lambda: not _objects("put(bytearray)"))
    del large
    until(lambda: set(_objects("the result of Busy.zeros")) == {reader_worker})


def _objects(label: str) -> dict[str, actorrpc.observe.ObservedSegment]:
    """Return, by worker, the segment that holds objects with this label."""
    return {
        worker.name: each
        for worker in actorrpc.state(30).workers
        for each in worker.objects
        if each.label.startswith(label)
    }


def _holders(worker: str, what: str) -> list[actorrpc.observe.ObservedHolder]:
    seen = actorrpc.state(30).worker(worker)
    assert seen is not None
    return [each for each in seen.holders if each.what == what]


@pytest.mark.usefixtures("embedded")
def test_state_counts_bytes_by_peer_and_way_of_sending() -> None:
    actor = Busy.remote()
    actorrpc.get(actorrpc.ready(actor))
    before = _connection_to(actor)
    assert actorrpc.get(actor.size_of.remote(b"x" * 1000)) == 1000
    small = _connection_to(actor)
    assert small.sent - before.sent >= 1000
    assert (small.placed, small.chunks_sent) == (before.placed, before.chunks_sent)
    assert actorrpc.get(actor.size_of.remote(torch.zeros(1 << 18))) == 1 << 20
    through_memory = _connection_to(actor)
    assert through_memory.placed - small.placed >= 1 << 20
    seen = next(each for each in actorrpc.state(30).workers if each.name == before.worker)
    (connection_back,) = [each for each in seen.connections if each.worker == "driver"]
    assert connection_back.taken - small.placed >= 1 << 20
    assert connection_back.received >= through_memory.sent
    # A large pickle is sent in chunks.
    assert actorrpc.get(actor.size_of.remote(list(range(1 << 19)))) == 1 << 19
    as_chunks = _connection_to(actor)
    assert as_chunks.chunks_sent - through_memory.chunks_sent >= 1 << 20
    seen = next(each for each in actorrpc.state(30).workers if each.name == before.worker)
    (connection_back,) = [each for each in seen.connections if each.worker == "driver"]
    assert connection_back.chunks_received == as_chunks.chunks_sent


def _connection_to(actor: Any) -> actorrpc.observe.ObservedConnection:
    state = actorrpc.state(30)
    wanted = next(each.worker for each in state.actors if each.actor_id == f"{actor.actor_id:016x}")
    return next(each for each in state.workers[0].connections if each.worker == wanted)


@pytest.mark.usefixtures("embedded")
def test_a_stopped_process_is_named_and_the_others_answer() -> None:
    actor = Busy.remote()
    pid = actorrpc.get(actor.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: processes.why_silent(pid)[0] == "stopped")
        state = actorrpc.state(10)
        worker = next(each for each in state.workers if each.pid == pid)
        assert (worker.state, "SIGSTOP" in worker.reason) == ("stopped", True)
        assert worker.memory > 1 << 20
        assert all(each.state == "alive" for each in state.workers if each.pid != pid)
        (seen,) = [each for each in state.actors if each.pid == pid]
        assert (seen.state, seen.answered) == ("ALIVE", False)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert actorrpc.get(actor.pid.remote()) == pid


@pytest.mark.usefixtures("embedded")
def test_stacks_of_a_process_that_holds_the_gil_are_dumped(gate: Path) -> None:
    actor = Busy.remote()
    pid = actorrpc.get(actor.pid.remote())
    call = actor.hold_the_interpreter.remote(str(gate))
    until(lambda: _is_busy(pid))
    both_calls = actor.pid.remote()
    for _ in range(2):  # two dumps, one after the other
        state = actorrpc.state(0.5, stacks=True)
        worker = next(each for each in state.workers if each.pid == pid)
        assert (worker.state, worker.dumped) == ("busy", True)
        functions = [each.frames[-1].function for each in worker.threads]
        assert "hold_the_interpreter" in functions
        assert len(functions) > 3
        # Its callers report the calls that wait for it.
        assert (worker.calls_to, worker.oldest_call) == (2, "Busy.hold_the_interpreter")
        assert worker.oldest > 0.0
    open_gate(gate)
    assert actorrpc.get(call) >= 0
    assert actorrpc.get(both_calls) == pid


def _is_busy(pid: int) -> bool:
    return any(each.pid == pid and each.state == "busy" for each in actorrpc.state(0.1).workers)


@pytest.mark.usefixtures("embedded")
def test_no_signal_is_sent_to_a_process_without_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda fd, number: sent.append(number))
    with subprocess.Popen(["sleep", "60"]) as other:
        assert (
            processes.dump_stacks(other.pid, time.monotonic() + 1)
            == "it has no memfd into which its stacks could be dumped"
        )
        other.kill()
    assert "ended" in processes.dump_stacks(other.pid, time.monotonic() + 1)
    # A process whose program has removed the handler.
    actor = Busy.remote()
    number = signal.SIGRTMIN + 7
    pid = actorrpc.get(actor.remove_handler.remote(number))
    found = processes.dump_stacks(pid, time.monotonic() + 1)
    assert isinstance(found, str)
    assert "the program has removed the handler" in found
    assert sent == []
