"""Debugging calls of a running cluster: holding, entering, stepping, detaching."""

from __future__ import annotations

import asyncio
import ctypes
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import actorrpc
from actorrpc.cli import commands
from actorrpc.cli.debug import Attached, talk
from actorrpc.debugger import OVER
from actorrpc.errors import CancelledError, RpcError
from actorrpc.observe import HeldCall, ObservedActor
from actorrpc.observe.outside import find_groups, look
from actorrpc.observe.visitor import Target
from tests.actors.e2e.kit import open_gate, until

pytestmark = [pytest.mark.limit(60), pytest.mark.prints]
_S = 30.0


@actorrpc.remote
class Counter:
    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        before = self.n
        breakpoint()
        self.n = before + k
        return self.n

    def spin(self, path: str) -> int:
        turns = 0
        while not os.path.exists(path):
            turns += 1
        return turns

    def ask(self, other: Any, k: int) -> int:
        return int(actorrpc.get(other.add.remote(k)))

    def count(self) -> int:
        return self.n

    def fail(self) -> int:
        known = {"a": 1}
        return known["b"]

    def in_c(self, path: str) -> None:
        ctypes.PyDLL(None).open(path.encode(), os.O_RDONLY)  # holds the GIL

    def items(self, n: int) -> Iterator[int]:
        for number in range(n):
            if number == 1:
                breakpoint()
            yield number


@actorrpc.remote
class Coroutines:
    def __init__(self) -> None:
        self.value = 3

    async def step(self) -> int:
        await asyncio.sleep(0)
        breakpoint()
        found = self.value
        await asyncio.sleep(0)
        return found


@actorrpc.remote
def task(k: int) -> int:
    breakpoint()
    return k + 1


@pytest.fixture(scope="module")
def job() -> Iterator[None]:
    with actorrpc.init(num_cpus=4, log_to_driver=False):
        yield


@pytest.fixture
def counter(job: None) -> Iterator[Any]:
    made = Counter.remote()
    yield made
    actorrpc.kill(made)


def _held() -> list[HeldCall]:
    return [each for worker in actorrpc.state(_S).workers for each in worker.held if each.is_held]


def _soon_held(count: int = 1) -> list[HeldCall]:
    until(lambda: len(_held()) == count)
    return _held()


def _targets() -> dict[str, Target]:
    (group,) = find_groups(os.getpid())
    found = look(group, ["process"], _S)
    settings = group.targets[0].settings
    return {record.name: Target.of(record, group.key, settings) for record, _ in found.answers.values()}


@contextmanager
def _attached(held: HeldCall) -> Iterator[Attached]:
    made = Attached.to(held.session, _targets()[held.session.rpartition(":")[0]], time.monotonic() + _S)
    try:
        yield made
    finally:
        made.detach()


def _say(attached: Attached, *lines: str) -> str:
    """Send commands; return the answer to the last command."""
    text = ""
    for line in lines:
        attached.shown()
        attached.say(line)
        while not attached.asks and attached.state != OVER:
            attached.hear(time.monotonic() + 1.0)
        text = attached.shown()
    return text.removesuffix("(Pdb) ").strip()


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = commands.main(["debug", "--pid", str(os.getpid()), "--timeout", str(_S), *arguments])
    return status, capsys.readouterr().out


def test_a_held_call_can_be_inspected_and_changed(counter: Any) -> None:
    ref = counter.add.remote(5)
    (held,) = _soon_held()
    assert (held.function, held.why, held.attached) == ("add", "breakpoint()", False)
    assert os.path.basename(held.file) == "test_calls.py"
    with _attached(held) as front_end:
        assert "self.n = before + k" in front_end.shown()
        assert _say(front_end, "p before, k") == "(0, 5)"
        assert _say(front_end, "k + 1") == "6"
        assert _say(front_end, "print('seen')") == "seen"
        assert _say(front_end, "nothing") == "*** NameError: name 'nothing' is not defined"
        assert _say(front_end, "interact").startswith("***")
        assert _say(front_end, "!before = 100") == ""
        assert "return self.n" in _say(front_end, "next")
        assert "executor" not in _say(front_end, "where")
        front_end.say("continue")
        assert actorrpc.get(ref) == 105
        until(lambda: front_end.hear(time.monotonic() + 0.1) or front_end.state == OVER)
    assert not _held()


def test_status_and_describe_show_a_held_call(counter: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ref = counter.add.remote(1)
    (held,) = _soon_held()
    assert commands.main(["status", "--pid", str(os.getpid()), "--timeout", str(_S)]) == 0
    assert f"actorrpc debug {held.session} attaches to it" in capsys.readouterr().out
    assert commands.main(["describe", "--pid", str(os.getpid()), "--timeout", str(_S), held.actor_id]) == 0
    described = capsys.readouterr().out
    assert f"held by breakpoint() at {held.file}:{held.line}, in add(), for " in described
    assert f"; to debug it: actorrpc debug {held.session}\n" in described
    status, text = _run(capsys)
    assert status == 0
    assert held.session in text
    assert _run(capsys, held.session, "--cast", "c")[0] == 0
    assert actorrpc.get(ref) == 1


@pytest.mark.slow
def test_time_outs_of_callers_are_suspended_while_a_call_is_held(counter: Any) -> None:
    first = Counter.remote()
    actorrpc.get([actorrpc.ready(first), actorrpc.ready(counter)])
    ref = first.ask.options(timeout=0.5).remote(counter, 2)
    (held,) = _soon_held()
    begun = time.monotonic()
    until(lambda: time.monotonic() - begun > 1.0)  # longer than the time-out
    with _attached(held) as front_end:
        front_end.say("c")
        assert actorrpc.get(ref) == 2
    actorrpc.kill(first)


def test_stepping_past_the_return_of_a_call_ends_the_session(counter: Any) -> None:
    ref, others = counter.add.remote(1), [counter.count.remote() for _ in range(3)]
    (held,) = _soon_held()
    with _attached(held) as front_end:
        assert "--Return--" in _say(front_end, "return")
        front_end.say("step")
        assert actorrpc.get([ref, *others]) == [1, 1, 1, 1]


def test_a_breakpoint_set_in_a_session_ends_with_the_call(counter: Any) -> None:
    ref = counter.add.remote(1)
    (held,) = _soon_held()
    with _attached(held) as front_end:
        assert "Breakpoint" in _say(front_end, f"b {held.line + 2 - 1}")
        assert "return self.n" in _say(front_end, "c")
        front_end.say("c")
        assert actorrpc.get(ref) == 1
    again = counter.add.remote(1)
    (held,) = _soon_held()
    with _attached(held) as front_end:
        assert "return self.n" not in front_end.shown()
        front_end.say("c")
        assert actorrpc.get(again) == 2


def test_a_coroutine_can_be_stepped_over_its_awaits(job: None) -> None:
    actor = Coroutines.remote()
    ref = actor.step.remote()
    (held,) = _soon_held()
    with _attached(held) as front_end:
        assert "await asyncio.sleep(0)" in _say(front_end, "n")
        assert "return found" in _say(front_end, "n")
        assert _say(front_end, "found") == "3"
        front_end.say("q")
        assert actorrpc.get(ref) == 3
    actorrpc.kill(actor)


def test_sys_exit_in_the_debugger_does_not_end_the_worker(counter: Any) -> None:
    ref = counter.add.remote(1)
    (held,) = _soon_held()
    with _attached(held) as front_end:
        assert _say(front_end, "import sys; sys.exit(3)") == "*** SystemExit: 3"
        assert _say(front_end, "raise SystemExit") == "*** SystemExit"
        assert _say(front_end, "class Bad: __repr__ = lambda self: __import__('sys').exit(4)") == ""
        assert _say(front_end, "k = Bad()", "args").endswith("*** SystemExit: 4")
        assert _say(front_end, "k = 1") == ""
        front_end.say("c")
        assert actorrpc.get(ref) == 1


def test_breakpoints_hold_tasks_and_streams(counter: Any) -> None:
    ref = task.remote(1)
    (held,) = _soon_held()
    with _attached(held) as front_end:
        front_end.say("c")
        assert actorrpc.get(ref) == 2
    items = counter.items.remote(3)
    (held,) = _soon_held()
    with _attached(held) as front_end:
        assert _say(front_end, "number") == "1"
        front_end.say("c")
        assert [actorrpc.get(each) for each in items] == [0, 1, 2]


def test_a_call_continues_when_its_front_end_disconnects(counter: Any) -> None:
    ref = counter.add.remote(1)
    (held,) = _soon_held()
    with _attached(held) as front_end:
        front_end.visit.close()
        assert actorrpc.get(ref) == 1


def test_detaching_leaves_the_call_held(counter: Any) -> None:
    ref = counter.add.remote(1)
    (held,) = _soon_held()
    with _attached(held) as front_end:
        with pytest.raises(RpcError, match="another front end is attached"), _attached(held):
            pass
        shown: list[str] = []
        assert not talk(front_end, io.StringIO("p k\ndetach\n"), shown.append, False)
        assert "1" in "".join(shown)
    assert [each.attached for each in _held()] == [False]
    with _attached(held) as front_end:
        assert talk(front_end, io.StringIO("c\n"), shown.append, True)
    assert actorrpc.get(ref) == 1


def enter(actor: Any) -> Attached:
    found = _observed(actor)
    return Attached.entering(found.title, found.actor_id, _targets()[found.worker], time.monotonic() + _S)


def _observed(actor: Any) -> ObservedActor:
    id = f"{actor.actor_id:016x}"
    (found,) = [each for each in actorrpc.state(_S).actors if each.actor_id == id]
    return found


def test_a_running_call_can_be_entered(counter: Any, tmp_path: Any) -> None:
    ref = counter.spin.remote(str(tmp_path / "end"))
    until(lambda: [each.method for each in _observed(counter).running] == ["spin"])
    front_end = enter(counter)
    for _ in range(5):
        if "NameError" in _say(front_end, "p turns"):
            _say(front_end, "up")  # the call may be in a nested function
    assert int(_say(front_end, "p turns")) > 0
    (tmp_path / "end").touch()
    assert "spin" in _say(front_end, "where")
    front_end.say("c")
    assert actorrpc.get(ref) > 0
    front_end.detach()


def test_a_call_that_waits_for_another_can_be_entered(counter: Any) -> None:
    other = Counter.options(name="other").remote()
    ref = counter.ask.remote(other, 4)
    (held,) = _soon_held()
    front_end = enter(counter)
    assert _say(front_end, "p k") == "4"
    front_end.say("c")
    with _attached(held) as inner:
        inner.say("c")
        assert actorrpc.get(ref) == 4
    front_end.detach()
    actorrpc.kill(other)


def test_on_error_debug_holds_a_call_where_it_fails(job: None) -> None:
    actor = Counter.options(on_error="debug").remote()
    ref = actor.fail.remote()
    (held,) = _soon_held()
    assert held.why.startswith("KeyError")
    with _attached(held) as front_end:
        assert _say(front_end, "p known") == "{'a': 1}"
        front_end.say("c")
        with pytest.raises(KeyError):
            actorrpc.get(ref)
    assert actorrpc.get(actor.count.remote()) == 0
    actorrpc.kill(actor)


def test_entering_an_actor_of_a_busy_worker_fails_with_the_reason(
    counter: Any, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    assert actorrpc.get(counter.count.remote()) == 0
    actor = _observed(counter)
    ref = counter.in_c.remote(str(gate))
    until(lambda: actorrpc.state().worker(actor.worker).state == "busy")  # type: ignore[union-attr]
    arguments = ["debug", "--pid", str(os.getpid()), "--timeout", "1", actor.actor_id, "--now"]
    assert commands.main(arguments) == 2
    assert f"its worker {actor.worker!r} does not answer: it is busy" in capsys.readouterr().err
    open_gate(gate)
    actorrpc.get(ref)


def test_a_cancelled_call_is_no_longer_held(counter: Any) -> None:
    ref = counter.add.remote(1)
    _soon_held()
    actorrpc.cancel(ref)
    with pytest.raises(CancelledError):
        actorrpc.get(ref)
    until(lambda: not _held())
    assert actorrpc.get(counter.count.remote()) in (0, 1)


def test_debugging_an_unknown_or_unspecified_call_exits_with_2(
    job: None, capsys: pytest.CaptureFixture[str]
) -> None:
    status = commands.main(["debug", "--pid", str(os.getpid()), "--timeout", str(_S), "stranger"])
    assert status == 2
    assert "no call of 'stranger' is held" in capsys.readouterr().err
    status = commands.main(["debug", "--pid", str(os.getpid()), "--timeout", str(_S), "--now"])
    assert status == 2
    assert "say which" in capsys.readouterr().err
