"""Large objects between processes: every get returns a separate value, no bytes are sent, and memory is released."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import actorrpc
from actorrpc.actors.refs.snapshot import LARGE
from actorrpc.agent import outbound
from actorrpc.agent.context import current_worker
from actorrpc.agent.peers import MessageContext
from actorrpc.errors import LimitError
from actorrpc.transport.object_store import Segment
from tests.actors.e2e.kit import alive, open_gate, pass_gate, until
from tests.forks import exit_code, fork
from tests.migration.rows import row

# Tests kill processes, so each actor has its own.
pytestmark = [pytest.mark.usefixtures("embedded"), pytest.mark.limit(60)]

_COUNT = 1 << 17  # float64 numbers


@actorrpc.remote
class Keeper:
    """Makes objects, and keeps references and values by number."""

    def __init__(self) -> None:
        self.refs: dict[int, Any] = {}
        self.values: dict[int, Any] = {}
        self.state = np.zeros(_COUNT)

    def pid(self) -> int:
        return os.getpid()

    def make(self, count: int, number: float) -> Any:
        return np.full(count, number)

    def several(self, n: int, count: int) -> Any:
        for number in range(n):
            yield np.full(count, float(number))

    def fail(self, value: Any) -> None:
        raise ValueError("made up")

    def take(self, at: int, refs: list[Any]) -> None:
        self.refs[at] = refs[0]

    def count(self, refs: list[Any]) -> float:
        """Return the sum of the first numbers of many objects."""
        return sum(float(value[0]) for value in actorrpc.get(refs))

    def give(self, at: int) -> list[Any]:
        return [self.refs[at]]

    def open(self, at: int) -> float:
        self.values[at] = actorrpc.get(self.refs[at])
        return _common_value(self.values[at])

    def put(self, at: int, count: int, number: float) -> None:
        self.refs[at] = actorrpc.put(torch.full((count,), number, dtype=torch.float64))

    def change(self, at: int, number: float) -> None:
        self.values[at][...] = number

    def look(self) -> dict[int, float]:
        return {at: _common_value(value) for at, value in self.values.items()}

    def drop(self, at: int) -> None:
        self.refs.pop(at, None)
        self.values.pop(at, None)

    def argument(self, value: Any) -> float:
        found = _common_value(value)
        value[...] = -1
        return found

    def fork(self, at: int, path: str) -> float:
        """Fork a child that reads a value after this process has released it."""
        value = self.values[at]
        ours, theirs = os.pipe()
        child = fork(partial(_send_common_value, value, path, theirs))
        os.close(theirs)
        self.child = child, ours
        del value
        self.drop(at)
        gc.collect()
        return float(child)

    def joined(self) -> float:
        child, ours = self.child
        try:
            return float(os.read(ours, 100))
        finally:
            os.close(ours)
            exit_code(child)


def _common_value(value: Any) -> float:
    """Return the value of all elements; nan if they differ."""
    array = np.asarray(value)
    return float(array[0]) if (array == array[0]).all() else float("nan")


def _send_common_value(value: Any, path: str, to: int) -> None:
    pass_gate(path)
    os.write(to, str(_common_value(value)).encode())


def _host_bytes() -> int:
    """Return the shared memory that objects of all processes of the group use on this host."""
    gc.collect()
    worker = current_worker()
    assert worker is not None
    return worker.agent.objects.stats().host_bytes


@pytest.fixture(autouse=True)
def _nothing_is_held() -> Any:
    """Check that no shared memory is used before and after each test."""
    until(lambda: not _host_bytes())
    yield
    until(lambda: not _host_bytes())


def _sent_bytes() -> int:
    """Return how many bytes all workers have sent so far, over sockets and through shared buffers."""
    state = actorrpc.state(30)
    return sum(each.sent + each.placed for worker in state.workers for each in worker.connections)


def test_a_large_result_outlives_the_process_of_its_actor() -> None:
    maker, keeper = Keeper.remote(), Keeper.remote()
    pid = actorrpc.get(maker.pid.remote())
    first, second = maker.make.remote(_COUNT, 1.0), maker.make.remote(_COUNT, 2.0)
    actorrpc.wait([first, second], num_returns=2, fetch_local=False)
    actorrpc.get(keeper.take.remote(2, [second]))
    del second
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    assert _common_value(actorrpc.get(first)) == 1
    assert actorrpc.get(keeper.open.remote(2)) == 2
    assert actorrpc.get(keeper.argument.remote(first)) == 1
    assert _common_value(actorrpc.get(first)) == 1


@row("RDMABuffer", "from-monarch")
@row("SharedMemory, torch.multiprocessing", "from-multiprocessing")
def test_large_objects_are_not_copied_between_processes() -> None:
    maker, keeper = Keeper.remote(), Keeper.remote()
    actorrpc.get([maker.pid.remote(), keeper.pid.remote()])
    before = _sent_bytes()
    result = maker.make.remote(32 * _COUNT, 1.0)  # 32 MiB
    actorrpc.wait([result])
    put = actorrpc.put(np.full(32 * _COUNT, 2.0))
    actorrpc.get([keeper.take.remote(1, [result]), maker.take.remote(2, [put])])
    assert actorrpc.get([keeper.open.remote(1), maker.open.remote(2)]) == [1, 2]
    assert actorrpc.get(keeper.argument.remote(put)) == 2
    assert _common_value(actorrpc.get(result)) == 1
    text = actorrpc.put("x" * (32 << 20))  # its references are sent without it
    actorrpc.get([keeper.take.remote(3, [text]), maker.take.remote(3, [text])])
    assert _sent_bytes() - before < 4 << 20
    assert _host_bytes() <= 1.1 * (64 << 20)


def test_large_items_of_a_stream_are_written_to_memory_once() -> None:
    keeper = Keeper.remote()
    items = keeper.several.remote(3, 4 * _COUNT)
    refs = list(items)
    assert [_common_value(actorrpc.get(each)) for each in refs] == [0, 1, 2]
    mine = actorrpc.get(refs[1])
    mine[...] = 7
    assert [_common_value(each) for each in actorrpc.get(refs)] == [0, 1, 2]
    del mine
    assert _host_bytes() <= 1.1 * 3 * 4 * 8 * _COUNT
    assert [_common_value(each) for each in keeper.several.remote(2, _COUNT).values()] == [0, 1]


def test_arguments_of_a_failed_call_are_released_without_the_garbage_collector() -> None:
    worker = current_worker()
    assert worker is not None
    objects = worker.agent.objects
    gc.collect()
    gc.disable()
    try:
        # The arguments are kept in shared memory until the actor exists.
        with contextlib.suppress(ValueError):
            actorrpc.get(Keeper.remote().fail.remote(np.full(_COUNT, 1.0)))
        until(lambda: not objects.stats().host_bytes)
    finally:
        gc.enable()


def test_a_forked_child_can_read_a_value_that_its_parent_released(gate: Path) -> None:
    keeper = Keeper.remote()
    ref = actorrpc.put(np.full(2 * _COUNT, 1.0))
    actorrpc.get(keeper.take.remote(1, [ref]))
    assert actorrpc.get(keeper.open.remote(1)) == 1
    del ref
    actorrpc.get(keeper.fork.remote(1, str(gate)))
    # Only the child maps the value: new objects must not overwrite it.
    others = [actorrpc.put(np.full(2 * _COUNT, float(number))) for number in range(2, 6)]
    open_gate(gate)
    assert actorrpc.get(keeper.joined.remote()) == 1
    assert [_common_value(actorrpc.get(each)) for each in others] == [2, 3, 4, 5]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 22))])
def test_all_values_are_correct_in_random_programs_with_killed_processes(seed: int) -> None:
    """Objects are created, passed on, opened, changed and dropped, and processes are killed; each value must be as expected."""
    dice = random.Random(seed)
    keepers: list[Any] = [Keeper.remote() for _ in range(3)]
    refs: dict[int, tuple[Any, float]] = {}  # references of this process and their values
    there: list[dict[int, float]] = [{} for _ in keepers]  # references of the actors
    values: list[dict[int, float]] = [{} for _ in keepers]
    sizes = [1000, _COUNT // 4, _COUNT // 4 + 1, _COUNT, 9 * _COUNT]
    for step in range(1, 40 if seed == 1 else 120):
        number, which = float(step), dice.randrange(3)
        keeper = keepers[which]
        do = dice.choice(
            ["put", "make", "put there", "hand on", "hand on", "back", "open", "open", "change"]
            + ["drop"] * 3
        )
        if do == "put":
            refs[step] = actorrpc.put(np.full(dice.choice(sizes), number)), number
        elif do == "make":
            refs[step] = keeper.make.remote(dice.choice(sizes), number), number
        elif do == "put there":
            actorrpc.get(keeper.put.remote(step, dice.choice(sizes), number))
            there[which][step] = number
        elif do == "hand on" and refs:
            at = dice.choice(sorted(refs))
            actorrpc.get(keeper.take.remote(at, [refs[at][0]]))
            there[which][at] = refs[at][1]
            values[which].pop(at, None)
            actorrpc.get(keeper.open.remote(at))
            values[which][at] = refs[at][1]
        elif do == "back" and there[which]:
            at = dice.choice(sorted(there[which]))
            (found,) = actorrpc.get(keeper.give.remote(at))
            refs[at] = found, there[which][at]
        elif do == "open" and there[which]:
            at = dice.choice(sorted(there[which]))
            assert actorrpc.get(keeper.open.remote(at)) == there[which][at]
            values[which][at] = there[which][at]
        elif do == "change" and values[which]:
            at = dice.choice(sorted(values[which]))
            actorrpc.get(keeper.change.remote(at, number))
            values[which][at] = number
        elif do == "drop":
            if dice.random() < 0.5 and refs:
                del refs[dice.choice(sorted(refs))]
            elif there[which]:
                at = dice.choice(sorted(there[which]))
                actorrpc.get(keeper.drop.remote(at))
                there[which].pop(at, None)
                values[which].pop(at, None)
        if step % 20 == 0:
            # Wait for pending small results, which would be lost with their process; this process holds all others.
            actorrpc.wait([ref for ref, _ in refs.values()], num_returns=len(refs)) if refs else None
            pid = actorrpc.get(keeper.pid.remote())
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: not alive(pid))  # type: ignore[misc]
            keepers[which], there[which], values[which] = Keeper.remote(), {}, {}
        assert [actorrpc.get(each.look.remote()) for each in keepers] == values
        for ref, wanted in refs.values():
            assert _common_value(actorrpc.get(ref)) == wanted


def _own_segment_for_each(context: MessageContext, segment: Segment) -> int:
    """Send the segment's descriptor once for each object, as if each object had its own segment."""
    if context.objects is None:
        context.objects = []
    context.objects.append(segment)
    return len(context.objects) - 1


def test_one_message_can_refer_to_more_objects_than_a_socket_passes_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A socket accepts only a limited number of descriptors before the receiver reads some."""
    monkeypatch.setattr(MessageContext, "place_of", _own_segment_for_each)
    keeper = Keeper.remote()
    refs = [actorrpc.put(np.full(LARGE // 8, number, np.float64)) for number in range(400)]
    assert actorrpc.get(keeper.count.remote(refs)) == sum(range(400))


def test_too_many_objects_in_one_message_are_refused_before_any_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbound, "_MAX_SHARED", 2)
    keeper = Keeper.remote()
    refs = [actorrpc.put(np.full(_COUNT * 8, 1.0)) for _ in range(3)]
    with pytest.raises(
        LimitError, match=r"3 large objects .* limit of 2: send fewer at once; nothing was sent"
    ):
        actorrpc.get(keeper.count.remote(refs))
    assert actorrpc.get(keeper.count.remote(refs[:2])) == 2.0
