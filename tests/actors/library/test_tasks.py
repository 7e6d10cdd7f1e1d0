"""Tasks: results, retries and placement, in a group and on the embedded cluster."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import ObjectRefGenerator, errors, get
from tests.actors import things
from tests.forks import exit_at_once
from tests.migration.rows import row
from tests.ranks import rpc_group

Remote: Any = actorrpc.remote


# -- results (on one worker) ----------------------------------------------------------------------------------------


@row("an async def task", "from-ray")
@row("Process(target=f", "from-multiprocessing")
@row("Pool(4).map", "from-multiprocessing")
def test_plain_async_generator_local_and_partial_functions_run_as_tasks(one_worker: None) -> None:
    assert get(things.add.remote(1)) == 3
    assert get(things.add.remote(1, b=5)) == 6
    assert get(things.later.remote(4)) == 4
    stream = things.count_to.remote(3)
    assert isinstance(stream, ObjectRefGenerator)
    assert [get(ref) for ref in stream] == [0, 1, 2]
    assert [get(ref) for ref in things.tick.remote(3)] == [0, 1, 2]
    local = Remote(lambda x: x + 1)
    assert get(local.remote(1)) == 2
    assert get(Remote(functools.partial(max, 3)).remote(5)) == 5
    assert get(things.add.options(worker="w0").remote(1)) == 3
    assert asyncio.run(_awaited()) == 3


async def _awaited() -> int:
    return await things.add.remote(1)


# -- placement and retries ---------------------------------------------------------------------------------------------


@Remote
def _die_once(path: str) -> str:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "again"
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@Remote
def _die() -> None:
    exit_at_once(7)


@Remote
def _variable(name: str) -> Any:
    return os.environ.get(name)


@Remote
def _ask(box: Any) -> Any:
    return get(box.get.remote())


def _members_die(rank: int, world_size: int, path: str) -> Any:
    if rank != 0:
        return None
    before = {get(things.process.remote()) for _ in range(3)}
    assert get(_die_once.remote(path)) == "again"  # in another worker
    after = {get(things.process.remote()) for _ in range(4)}
    with pytest.raises(
        errors.PeerDiedError, match=r"task _die was not finished.*where it lived, has ended"
    ) as caught:
        get(_die.options(max_retries=0).remote())
    assert caught.value.maybe_executed
    left = {get(things.process.remote()) for _ in range(3)}
    # The last one: a worker does not run its own task that may end the process.
    with pytest.raises(errors.PeerDiedError, match="no other worker is left"):
        get(_die.remote())
    return (
        len(before),
        len(after),
        len(left),
        before > after > left,
        get(things.process.remote()) == os.getpid(),
    )


@pytest.mark.limit(60)
def test_a_task_is_retried_on_another_worker_of_the_group_if_its_worker_dies(tmp_path: Path) -> None:
    found = rpc_group(_members_die, 4, str(tmp_path / "once"), may_die=(1, 2, 3))
    assert found[0] == (3, 2, 1, True, True)


def test_the_error_of_an_argument_lost_with_an_actor_names_the_actor_and_is_no_death_of_the_task(
    tmp_path: Path,
) -> None:
    with actorrpc.init(num_cpus=1):
        before = get(things.process.remote(), timeout=30)
        box = things.Box.remote(1)
        get(actorrpc.ready(box), timeout=30)
        actorrpc.kill(box)
        with pytest.raises(errors.ActorDiedError) as caught:
            get(things.add.remote(actorrpc.call(box, lambda _: 1)), timeout=30)
        assert caught.value.actor_id == box.actor_id
        assert get(things.process.remote(), timeout=30) == before


@pytest.mark.limit(60)
def test_tasks_of_the_embedded_cluster_nest_retry_and_can_be_killed(tmp_path: Path) -> None:
    with actorrpc.init(num_cpus=2):
        pids = set(get([things.process.remote() for _ in range(20)]))
        assert os.getpid() not in pids
        assert 1 <= len(pids) <= 2
        # More nested calls than processes, and tasks from an actor.
        assert get(things.fib.remote(7)) == 13
        nested = things.Box.remote(1)
        assert get(actorrpc.call(nested, lambda _: get(things.process.remote()))) in pids
        assert get(_variable.options(env={"ACTORRPC_TEST_X": "y"}).remote("ACTORRPC_TEST_X")) == "y"
        assert get(_variable.remote("ACTORRPC_TEST_X")) is None
        # The death of a process costs only a retry.
        assert get(_die_once.remote(str(tmp_path / "once"))) == "again"
        with pytest.raises(
            errors.PeerDiedError, match=r"task _die was not finished.*exited with code 7"
        ) as caught:
            get(_die.options(max_retries=1).remote())
        assert caught.value.maybe_executed
        assert get(things.add.remote(1)) == 3
        # force=True ends the process of a task.
        ref = things.slowly.remote()
        assert actorrpc.cancel(ref, force=True)
        with pytest.raises(errors.CancelledError):
            get(ref)
        assert get(things.add.remote(1)) == 3
        assert {row.class_name for row in actorrpc.list_actors()} == {"Box"}
        # A task that gets ActorDiedError is not considered dead.
        actorrpc.kill(nested)
        with pytest.raises(errors.ActorDiedError) as met:
            get(_ask.options(max_retries=0).remote(nested))
        assert isinstance(met.value, errors.RemoteError)
        assert get(things.add.remote(1)) == 3
        del nested


@Remote
def _size(given: list[int]) -> int:
    return len(given)


@Remote
class Submitter:
    """At first, an instance has no process for tasks. A blocked event loop is logged, which would fail the test."""

    async def one(self) -> Any:
        given = [1, 2]
        ref = _size.remote(given)
        given.append(3)
        return await ref

    async def many(self) -> list[int]:
        return await asyncio.gather(*[things.process.remote() for _ in range(20)])

    async def stream(self) -> list[int]:
        return [await each async for each in things.count_to.remote(3)]

    async def parts(self) -> list[int]:
        both = actorrpc.remote(lambda: (1, 2)).options(num_returns=2).remote()
        return [await each for each in both]

    async def nested(self) -> Any:
        return await things.add.remote(things.add.remote(1))

    async def refused(self) -> Any:
        return await things.add.remote(threading.Lock())

    async def cancelled(self) -> Any:
        ref = things.slowly.remote()
        assert actorrpc.cancel(ref)
        return await ref


@pytest.mark.limit(60)
def test_submitting_the_first_tasks_from_a_coroutine_does_not_block_its_event_loop() -> None:
    with actorrpc.init(num_cpus=2):
        assert get(Submitter.remote().one.remote()) == 2
        assert len(set(get(Submitter.remote().many.remote()))) == 2
        assert get(Submitter.remote().stream.remote()) == [0, 1, 2]
        assert get(Submitter.remote().parts.remote()) == [1, 2]
        assert get(Submitter.remote().nested.remote()) == 5
        with pytest.raises(errors.SerializationError, match="add"):
            get(Submitter.remote().refused.remote())
        with pytest.raises(errors.CancelledError):
            get(Submitter.remote().cancelled.remote())


@pytest.mark.slow
@pytest.mark.limit(60)
def test_the_first_task_starts_the_embedded_cluster() -> None:
    assert not actorrpc.is_initialized()
    try:
        assert get(things.add.remote(1)) == 3
        assert actorrpc.is_initialized()
    finally:
        actorrpc.shutdown()
    try:  # and again: the processes of the first cluster are forgotten
        assert get(things.add.remote(2)) == 4
    finally:
        actorrpc.shutdown()


# -- tasks that share a process --------------------------------------------------------------------------------------


@Remote
class Plain:
    def add(self, number: int) -> int:
        return number + 1


@Remote
class Signal:
    def __init__(self) -> None:
        self.event = asyncio.Event()

    async def put(self) -> None:
        self.event.set()

    async def take(self) -> str:
        await self.event.wait()
        return "taken"


@Remote
def _inner(actor: Any) -> Any:
    return get(actor.add.remote(1))


@Remote
def _outer(actor: Any) -> Any:
    return get(actor.add.remote(_inner.remote(actor)))


@Remote
def _fib(n: int) -> Any:
    return n if n < 2 else get(things.add.remote(_fib.remote(n - 1), b=_fib.remote(n - 2)))


@Remote
def _depth(n: int) -> Any:
    return 1 + get(_depth.remote(n - 1)) if n else 0


@Remote
def _in_threads(n: int) -> Any:
    with ThreadPoolExecutor(3) as threads:
        return sum(threads.map(lambda each: get(things.add.remote(each)), range(n)))


@Remote
def _receive(mails: Any) -> Any:
    return get(mails.take.remote())


@Remote
def _correspond(mails: Any) -> Any:
    """The first task cannot end before this one has continued."""
    received = _receive.remote(mails)
    get(things.add.remote(1))
    get(mails.put.remote())
    return get(received)


@pytest.mark.slow
@pytest.mark.limit(60)
def test_tasks_that_wait_for_other_tasks_do_not_deadlock_on_one_process() -> None:
    with actorrpc.init(num_cpus=1):
        plain, mails = Plain.remote(), Signal.remote()
        assert get(_outer.remote(plain)) == 3
        assert get(_fib.remote(4)) == 3
        assert get(_depth.remote(70)) == 70
        assert get(_in_threads.remote(4)) == 14
        assert get(_correspond.remote(mails)) == "taken"
        # A task with a pending argument does not block later tasks.
        assert get(things.add.remote(_after.remote(plain, _release.remote(mails)))) == 4
        del plain, mails


@Remote
def _after(actor: Any, _: Any) -> Any:
    return get(actor.add.remote(1))


@Remote
def _release(mails: Any) -> Any:
    get(mails.put.remote())
