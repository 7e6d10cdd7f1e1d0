"""The rows of docs/migration/from-multiprocessing.md."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import actorrpc
from actorrpc import get, testing
from tests.actors.e2e.kit import Gate, until
from tests.announced import LAST_WORDS
from tests.cluster.drive import script
from tests.forks import exit_at_once
from tests.migration import test_from_monarch, test_from_ray
from tests.migration.rows import check, row


def test_each_row_of_the_page_has_a_test() -> None:
    check("from-multiprocessing.md", globals(), test_from_monarch, test_from_ray)


def double(x: int) -> int:
    return 2 * x


@actorrpc.remote
class Counter:
    """An actor that replaces a lock, a value, a pipe and a namespace."""

    def __init__(self) -> None:
        self.count = 0
        self.made: list[int] = []

    def add(self) -> int:
        before = self.count
        for _ in range(100):
            pass
        self.count = before + 1
        return self.count

    def numbers(self, n: int) -> Iterator[int]:
        for number in range(n):
            self.made.append(number)
            yield number

    def what_is_made(self) -> list[int]:
        return self.made

    def fill(self, x: torch.Tensor) -> float:
        return float(x.fill_(1).sum())

    def die(self) -> None:
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("near")
@row("Process(target=f")
@row("Pool(4).map")
def test_a_task_returns_its_result_or_raises_its_error() -> None:
    task = actorrpc.remote(double)
    assert get([task.remote(x) for x in range(4)]) == [0, 2, 4, 6]
    assert get(actorrpc.remote(lambda x: x + 1).remote(1)) == 2
    with pytest.raises(ZeroDivisionError):
        get(actorrpc.remote(lambda: 1 / 0).remote())


@pytest.mark.usefixtures("passing")
@row("pool.apply_async")
def test_a_reference_can_be_waited_for_awaited_passed_on_and_cancelled() -> None:
    task, gate = actorrpc.remote(double), Gate.remote()
    ref = task.remote(1)
    assert get(ref, timeout=5) == 2
    assert get(task.remote(ref)) == 4

    async def awaits() -> Any:
        return await ref

    assert asyncio.run(awaits()) == 2
    held = gate.wait.remote()
    with pytest.raises(TimeoutError):
        get(held, timeout=5)
    assert actorrpc.cancel(held)
    with pytest.raises(actorrpc.CancelledError):
        get(held)


@pytest.mark.usefixtures("near")
@row("pool.imap_unordered")
def test_as_completed_yields_results_in_the_order_of_completion() -> None:
    gate, task = Gate.remote(), actorrpc.remote(double)
    held, free = gate.wait.remote(), task.remote(1)
    done = actorrpc.as_completed([held, free])
    assert next(done) is free
    get(gate.open.remote())
    assert next(done) is held

    async def reads() -> list[Any]:
        return sorted([get(each) async for each in actorrpc.as_completed([task.remote(x) for x in range(3)])])

    assert asyncio.run(reads()) == [0, 2, 4]


@row("Queue(maxsize=2)")
@row("Channel.open()", "from-monarch.md")
def test_a_queue_can_be_sent_to_another_worker(near: testing.InProcessCluster) -> None:
    queue = actorrpc.Queue(maxsize=2)
    queue.put("item")
    assert near["worker0"].rpc_sync("worker1", _read_and_answer, (queue,)) == "item"
    assert [queue.get(), queue.get()] == ["back", "again"]
    queue.put("unread")  # shutdown does not wait for a reader


def _read_and_answer(queue: Any) -> Any:
    item = queue.get()
    queue.put("back")
    queue.put("again")
    with pytest.raises(actorrpc.actors.Full):
        queue.put("too much", block=False)
    return item


@pytest.mark.usefixtures("near")
@row("Pipe()")
@row("Channel.open()", "from-monarch.md")
def test_a_stream_pauses_its_producer() -> None:
    counter = Counter.options(max_concurrency=2).remote()
    stream = counter.numbers.options(max_buffered_items=2).remote(100).values()
    assert [next(stream), next(stream)] == [0, 1]
    assert len(get(counter.what_is_made.remote())) < 100
    assert list(stream) == list(range(2, 100))


@row("Lock(), Value(")
def test_an_actor_runs_one_call_at_a_time(near: testing.InProcessCluster) -> None:
    counter = Counter.remote()
    near["worker0"].rpc_sync("worker1", _adds, (counter,))
    assert get(_many(counter))[-1] == 100


def _many(counter: Any) -> list[Any]:
    return [counter.add.remote() for _ in range(50)]


def _adds(counter: Any) -> None:
    get(_many(counter))


@row("Manager().Namespace()")
def test_an_actor_is_found_by_its_name(near: testing.InProcessCluster) -> None:
    counter = Counter.options(name="counter").remote()
    assert get(actorrpc.get_actor("counter").add.remote()) == 1
    assert near["worker0"].rpc_sync("worker1", _adds_one_by_name, ("counter",)) == 2
    assert get(counter.add.remote()) == 3


def _adds_one_by_name(name: str) -> Any:
    return get(actorrpc.get_actor(name).add.remote())


@pytest.mark.usefixtures("near")
@row("SharedMemory, torch.multiprocessing")
def test_arguments_are_copies() -> None:
    x = torch.zeros(1 << 12)
    assert get(Counter.remote().fill.remote(x)) == 1 << 12
    assert x.sum() == 0


def _exits(_: Any) -> None:
    exit_at_once(3)


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
@pytest.mark.prints(LAST_WORDS)  # may be printed during a later test
class TestProcesses:
    """Rows that need processes."""

    @row("process.exitcode, process.sentinel")
    @row('"The actor is dead because', "from-ray.md")
    @pytest.mark.prints("its error was never retrieved.*exited with code 3")
    def test_a_monitor_gets_the_death_report_of_a_process_once(self) -> None:
        counter = Counter.remote()
        reports: list[Any] = []
        ended = actorrpc.monitor(counter, reports.append)
        with pytest.raises(actorrpc.ActorDiedError) as caught:
            get(counter.die.remote())
        for part in ("SIGKILL", "the last words", "peak memory", "up ", "die"):
            assert part in str(caught.value)
        assert caught.value.maybe_executed is True
        with pytest.raises(actorrpc.ActorDiedError) as after:
            get(counter.add.remote())
        assert after.value.maybe_executed is False
        error: Any = ended.wait(30)
        report = error.report
        assert report.signal == signal.SIGKILL
        assert "the last words" in "".join(report.stderr)
        assert report.peak_memory > 0
        actorrpc.kill(counter)
        until(lambda: reports)
        assert len(reports) == 1
        ended = actorrpc.monitor(counter := Counter.remote())
        actorrpc.call(counter, _exits)
        assert ended.wait(30).report.exit_code == 3

    @row('set_start_method("fork")')
    @row("init() starts a head node", "from-ray.md")
    def test_workers_are_forked_from_a_child_with_torch_and_a_single_thread(self) -> None:
        [parent] = {psutil.Process(get(actorrpc.remote(os.getppid).remote())) for _ in range(2)}
        assert parent.ppid() == os.getpid()
        assert parent.num_threads() == 1
        assert any("libtorch" in each.path for each in parent.memory_maps())
        assert not any("/dev/nvidia" in each.path for each in parent.open_files())


@pytest.mark.slow
@row('if __name__ == "__main__":')
@row("Queue(maxsize=2)")
def test_a_script_needs_no_main_guard_and_ends_with_unread_queue_items(tmp_path: Path) -> None:
    source = """
        import actorrpc
        print("here", flush=True)
        actorrpc.init()
        queue = actorrpc.Queue()
        actorrpc.get(actorrpc.remote(lambda queue: queue.put(bytes(1 << 22))).remote(queue))
        """
    with script(tmp_path, source) as process:
        out, _ = process.communicate(timeout=50)
    assert (process.returncode, out) == (0, "here\n")
