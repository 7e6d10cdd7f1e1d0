"""get, wait, as_completed and progress: order, first failures, reports and timeouts, from threads, asyncio and calls."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import tqdm
from hypothesis import given, settings

from actorrpc import errors, rpc
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.snapshot import Snapshot, StoredResult
from actorrpc.actors.refs.wait import GetTimeoutError, as_completed, gather, get, progress, wait
from actorrpc.agent.calls import CURRENT, Execution
from actorrpc.agent.context import current_worker
from actorrpc.futures import Future, Progress
from tests.actors.bare import alone
from tests.actors.e2e.kit import until
from tests.migration.rows import row
from tests.reports import LAST, Reports

_TINY = 0.05  # a timeout that is expected to expire


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A group of one worker."""
    with alone():
        yield


class _Work:
    """References whose results the test sets."""

    def __init__(self, count: int) -> None:
        self.futures: list[Future[Any]] = [Future() for _ in range(count)]
        self.refs: list[ObjectRef[Any]] = [
            ObjectRef(future, label=f"w{n}") for n, future in enumerate(self.futures)
        ]

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.futures[number].set_result(number)


def _stored(value: Any) -> StoredResult:
    return StoredResult(rpc.RRef(Snapshot.of(value)))


def _start_thread(target: Any) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def _until_watched(future: Future[Any], others: int = 0) -> None:
    """Wait until a thread waits for the future."""
    while len(future._parked) <= others and not future.completed:
        threading.Event().wait(0.001)


# -- get -----------------------------------------------------------------------------------------------------


def test_get_accepts_references_lists_tuples_and_nested_lists() -> None:
    work = _Work(3)
    work.end(0, 1, 2)
    assert get(work.refs[0]) == 0
    assert get(work.refs) == [0, 1, 2]
    assert get(tuple(work.refs)) == [0, 1, 2]
    assert get([work.refs[0], work.refs[0]]) == [0, 0]
    assert get([]) == []
    assert get([[work.refs[0], work.refs[1]], work.refs[2], []]) == [[0, 1], 2, []]


def test_get_and_wait_accept_torch_futures_futures_and_rrefs() -> None:
    theirs: torch.futures.Future[int] = torch.futures.Future()
    theirs.set_result(1)
    mine: Future[int] = Future()
    mine.set_result(2)
    rref = rpc.RRef(3)
    assert get([theirs, mine, rref]) == [1, 2, 3]
    assert get(theirs) == 1
    assert get(mine) == 2
    assert get(rref) == 3
    broken: torch.futures.Future[int] = torch.futures.Future()
    broken.set_exception(ValueError("theirs"))
    with pytest.raises(ValueError, match="theirs"):
        get(broken)
    assert wait([mine, theirs, rref], num_returns=3) == ([mine, theirs, rref], [])
    assert set(as_completed([mine, theirs, rref])) == {mine, theirs, rref}


@pytest.mark.parametrize("wrong", [1, "text", None, {"a": 1}, [1], [[[]]], (None,), b""])
def test_get_refuses_other_objects(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"get\(\) takes ObjectRefs"):
        get(wrong)


@pytest.fixture
def reports() -> Iterator[Reports]:
    """Collect log messages about failures that were never retrieved."""
    with Reports() as found:
        yield found


_GETS = ["one", "with a timeout", "several", "nested", "awaited"]


class _Source(Progress):
    """The source of a future."""


class _MadeUpError(ValueError):
    """Unlike a ValueError, it supports weak references."""


@pytest.mark.parametrize("how", ["wait", "result", "exception", *_GETS])
def test_a_raised_error_leaves_no_reference_cycles(how: str) -> None:
    gc.disable()
    try:
        future: Future[Any] = Future()
        source = future.source = _Source()
        ref = ObjectRef(future, label="w")
        error = _MadeUpError()
        thread = threading.Thread(target=future.set_exception, args=(error,))
        thread.start()
        left = weakref.ref(future), weakref.ref(source), weakref.ref(error)
        box: list[Any] = [ref] if how in _GETS else [future]
        del future, source, ref, error
        with contextlib.suppress(ValueError):
            if how not in _GETS:
                getattr(box.pop(), how)()
            elif how == "awaited":
                asyncio.run(_awaited(box))
            elif how == "several":
                get([box.pop(), ObjectRef.of(1)])
            elif how == "nested":
                get([[box.pop()], ObjectRef.of(1)])
            else:
                get(box.pop(), timeout=30.0 if how == "with a timeout" else None)
        thread.join()
        for each in left:
            until(lambda each=each: each() is None)  # type: ignore[misc]
    finally:
        gc.enable()


async def _awaited(box: list[Any]) -> None:
    with contextlib.suppress(ValueError):  # otherwise the asyncio task would keep the error
        await box.pop()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.prints(LAST)
def test_failures_of_references_given_to_a_failed_get_are_not_reported(when: str, reports: Reports) -> None:
    work = _Work(4)
    work.end(0)

    def fail(futures: list[Future[Any]]) -> None:
        if when == "meanwhile":
            _until_watched(futures[3])
        for number in (1, 2):
            futures[number].set_exception(ValueError(f"number {number}"))

    thread = _start_thread(partial(fail, work.futures))
    if when == "before":
        thread.join()
    with pytest.raises(ValueError, match=r"number [12]"):
        get([work.refs[:2], work.refs[2:]])
    thread.join()
    work.futures[3].set_exception(ValueError("number 3"))
    del work, thread
    assert reports.so_far() == []


@pytest.mark.prints(LAST)
def test_only_the_first_failed_argument_of_a_call_is_raised_and_none_is_reported(reports: Reports) -> None:
    work = _Work(2)
    values = gather(work.refs, "all")
    for number in (0, 1):
        work.futures[number].set_exception(ValueError(f"number {number}"))
    with pytest.raises(ValueError, match="number 0"):
        values.wait()
    del work, values
    assert reports.so_far() == []


@pytest.mark.parametrize(
    "look",
    [lambda refs: get(refs[0]), get, lambda refs: wait(refs)[0][0], lambda refs: next(as_completed(refs))],
    ids=["get one", "get all", "wait", "as_completed"],
)
@pytest.mark.prints(LAST)
def test_failures_of_references_awaited_by_a_call_that_timed_out_are_not_reported(
    look: Callable[[Any], Any], reports: Reports
) -> None:
    work = _Work(1)
    worker = current_worker()
    assert worker is not None
    token = CURRENT.set(Execution(None, worker.agent.self_peer, 1, 0.0, 1))
    try:
        with pytest.raises((errors.RpcTimeoutError, IndexError)):
            look(work.refs)
    finally:
        CURRENT.reset(token)
    work.futures[0].set_exception(errors.RpcTimeoutError("late, too"))
    del work
    assert reports.so_far() == []


@pytest.mark.prints(LAST, r"its error was never retrieved: ValueError\('later'\)")
def test_a_failure_after_the_timeout_of_a_get_is_reported(reports: Reports) -> None:
    work = _Work(2)
    for refs in (work.refs, work.refs[1]):
        with pytest.raises(errors.RpcTimeoutError):
            get(refs, timeout=0)
    work.end(0)
    work.futures[1].set_exception(ValueError("later"))
    del work, refs
    assert reports.so_far() == ["a future failed and its error was never retrieved: ValueError('later')"]


@row("TaskCancelledError; WorkerCrashedError; GetTimeoutError", "from-ray")
@row("pool.apply_async", "from-multiprocessing")
def test_get_raises_timeout_error_and_can_be_repeated() -> None:
    assert GetTimeoutError is errors.RpcTimeoutError
    work = _Work(2)
    for refs in (work.refs, work.refs[0], work.refs[:1]):
        with pytest.raises(errors.RpcTimeoutError, match=rf"within {_TINY} s; it is still running"):
            get(refs, timeout=_TINY)
        with pytest.raises(TimeoutError):
            get(refs, timeout=0)
    work.end(0)
    assert get(work.refs[0], timeout=0) == 0
    with pytest.raises(TimeoutError):
        get(work.refs, timeout=_TINY)
    work.end(1)
    assert get(work.refs, timeout=0) == [0, 1]


@pytest.mark.parametrize("wrong", [-1, "1", True, float("nan")])
def test_invalid_timeouts_are_refused(wrong: Any) -> None:
    for call in (lambda: get([], timeout=wrong), lambda: wait([], timeout=wrong)):
        with pytest.raises((TypeError, ValueError), match="timeout"):
            call()


@given(st.data())
@settings(max_examples=60)
def test_get_returns_all_values_or_raises_a_failure_in_any_order_of_completion(data: st.DataObject) -> None:
    outcomes = data.draw(st.lists(st.sampled_from(["value", "kept", "error"]), min_size=1, max_size=6))
    order = data.draw(st.permutations(range(len(outcomes))))
    early = data.draw(st.integers(0, len(outcomes)))
    work = _Work(len(outcomes))
    results: dict[str, Any] = {"value": lambda n: n, "kept": lambda n: _stored(n)}

    def end(number: int) -> None:
        if outcomes[number] == "error":
            work.futures[number].set_exception(LookupError(number))
        else:
            work.futures[number].set_result(results[outcomes[number]](number))

    for number in order[:early]:
        end(number)
    thread = _start_thread(lambda: [end(number) for number in order[early:]])
    if "error" in outcomes:
        with pytest.raises(LookupError):
            get(work.refs)
    else:
        assert get(work.refs) == list(range(len(outcomes)))
    thread.join()
    for ref, outcome in zip(work.refs, outcomes, strict=True):
        if outcome == "error":
            assert isinstance(ref.future().exception(), LookupError)


# -- wait ----------------------------------------------------------------------------------------------------


def test_wait_returns_ready_references_in_the_order_of_the_list() -> None:
    work = _Work(4)
    a, b, c, d = work.refs
    work.end(3, 1)
    assert wait(work.refs, num_returns=2) == ([b, d], [a, c])
    assert wait(work.refs) == ([b], [a, c, d])
    assert wait(work.refs, num_returns=4, timeout=0) == ([b, d], [a, c])
    assert wait(work.refs, num_returns=3, timeout=_TINY) == ([b, d], [a, c])
    thread = _start_thread(lambda: (_until_watched(work.futures[2]), work.end(2)))
    assert wait(work.refs, num_returns=3) == ([b, c, d], [a])
    thread.join()
    assert wait([]) == ([], [])


def test_wait_fetches_large_values_unless_fetch_local_is_false() -> None:
    ref: ObjectRef[Any] = ObjectRef.of(_stored(torch.ones(50_000)))
    assert wait([ref], fetch_local=False, timeout=0) == ([ref], [])
    assert "elsewhere" in repr(ref)
    assert wait([ref]) == ([ref], [])
    assert "fetched" in repr(ref)


def test_wait_refuses_duplicates_other_objects_and_wrong_counts() -> None:
    work = _Work(2)
    a, _ = work.refs
    work.end(0, 1)
    for wrong in (a, iter([a]), {a}, None):
        with pytest.raises(TypeError, match="takes a list"):
            wait(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes ObjectRefs"):
        wait([a, 1])
    with pytest.raises(ValueError, match="occurs twice"):
        wait([a, a])
    for count in (0, 3, -1):
        with pytest.raises(ValueError, match="num_returns"):
            wait(work.refs, num_returns=count)
    with pytest.raises(TypeError, match="num_returns"):
        wait(work.refs, num_returns="1")  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.data())
def test_wait_in_a_loop_returns_each_reference_once_while_the_list_changes(data: st.DataObject) -> None:
    work = _Work(8)
    rest: list[ObjectRef[Any]] = list(work.refs[:5])
    left = list(rest)
    ended: set[int] = set()
    for _ in range(data.draw(st.integers(0, 30))):
        step = data.draw(
            st.sampled_from(["wait", "wait", "end", "append", "insert", "remove", "shuffle", "copy"])
        )
        if step == "end":
            number = data.draw(st.integers(0, 7))
            if number not in ended:
                ended.add(number)
                work.end(number)
        elif step in ("append", "insert"):
            new = [ref for ref in work.refs if ref not in left]
            if new:
                at = len(left) if step == "append" else data.draw(st.integers(0, len(left)))
                rest.insert(at, new[0])
                left.insert(at, new[0])
        elif step == "remove" and left:
            at = data.draw(st.integers(0, len(left) - 1))
            del rest[at], left[at]
        elif step == "shuffle":
            left = data.draw(st.permutations(left))
            rest[:] = left
        elif step == "copy":
            rest = list(rest)
        elif step == "wait" and left:
            count = data.draw(st.integers(1, len(left)))
            expected = [ref for ref in left if work.refs.index(ref) in ended][:count]
            left = [ref for ref in left if ref not in expected]
            ready, rest = wait(rest, num_returns=count, timeout=0)
            assert (ready, rest) == (expected, left)


# -- as_completed --------------------------------------------------------------------------------------------


@row("pool.imap_unordered", "from-multiprocessing")
def test_as_completed_yields_references_in_order_of_completion() -> None:
    work = _Work(3)
    work.end(1)
    completed = as_completed(work.refs)
    assert next(completed) is work.refs[1]
    work.end(2)
    assert next(completed) is work.refs[2]
    thread = _start_thread(lambda: work.futures[0].set_exception(ValueError("last")))
    (last,) = completed
    thread.join()
    assert last is work.refs[0]
    with pytest.raises(ValueError, match="last"):
        get(last)
    assert list(completed) == []


def test_as_completed_raises_at_its_timeout_and_can_continue() -> None:
    work = _Work(2)
    work.end(0)
    completed = as_completed(work.refs, timeout=_TINY)
    assert next(completed) is work.refs[0]
    with pytest.raises(errors.RpcTimeoutError, match="one of 1 results"):
        next(completed)
    with pytest.raises(errors.RpcTimeoutError):
        asyncio.run(anext(completed))  # type: ignore[arg-type]
    work.end(1)
    assert next(completed) is work.refs[1]


# -- progress bars -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_monitor_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable tqdm's monitor thread, and its lock for processes: the thread and the lock's file exist until the process ends."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    monkeypatch.setattr(tqdm.tqdm, "_lock", threading.RLock(), raising=False)


def _refs(count: int) -> tuple[list[Future[Any]], list[ObjectRef[Any]]]:
    futures: list[Future[Any]] = [Future() for _ in range(count)]
    return futures, [ObjectRef(future, label=f"w{n}") for n, future in enumerate(futures)]


def test_progress_returns_results_in_order_and_shows_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    futures, refs = _refs(2)
    future: Future[Any] = Future()
    kept: ObjectRef[Any] = ObjectRef.of(StoredResult(rpc.RRef(Snapshot.of("kept"))))

    def end() -> None:
        for number, each in reversed(list(enumerate((*futures, future)))):
            each.set_result(number)

    thread = threading.Thread(target=end)
    thread.start()
    items: list[Any] = [*refs, future, kept, rpc.RRef("own"), refs[0]]
    assert progress(items, description="squares") == [0, 1, 2, "kept", "own", 0]
    thread.join()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.search(r"squares: 100%\|.*\| 6/6 \[.*\n$", shown.err)


def test_progress_raises_the_first_failure(capsys: pytest.CaptureFixture[str]) -> None:
    futures, refs = _refs(3)
    futures[2].set_result(2)
    futures[1].set_exception(ValueError("the second one"))
    with pytest.raises(ValueError, match="the second one"):
        progress(refs)
    assert "1/3" in capsys.readouterr().err
    futures[0].set_exception(ValueError("that is not retrieved"))
    del futures, refs


def test_progress_raises_at_its_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    futures, refs = _refs(2)
    futures[0].set_result(0)
    with pytest.raises(errors.RpcTimeoutError, match=r"one of 1 results was not complete within 0\.01 s"):
        progress(refs, timeout=0.01)
    futures[1].set_result(1)
    assert progress(refs) == [0, 1]
    assert capsys.readouterr().err.count("\n") == 2  # both bars were closed


def test_progress_of_an_empty_list_shows_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress([]) == []
    assert list(as_completed([], progress=True)) == []
    with pytest.raises(TypeError, match=r"progress\(\) takes ObjectRefs"):
        progress([1])  # type: ignore[list-item]
    assert capsys.readouterr().err.count("\n") == 2


def test_progress_without_tqdm_raises_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    futures, refs = _refs(1)
    futures[0].set_result(0)
    for waits in (progress, lambda items: as_completed(items, progress=True)):
        with pytest.raises(errors.ConfigError, match=r"pip install 'actorrpc\[progress\]'"):
            waits(refs)
