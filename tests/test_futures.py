"""Futures: completion, callbacks, torch's functions, asyncio, concurrent.futures, error reports, and futures of RPC calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import gc
import operator
import pickle
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError as StdCancelledError
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorrpc import errors, rpc
from actorrpc.futures import ConcurrentFuture, Future, collect_all, wait_all
from tests.layers import rest_is_slow
from tests.migration.rows import row
from tests.ranks import rpc_group
from tests.reports import LAST, Reports

_TINY = 0.02  # a time-out that is meant to pass


def failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def outcome_of(future: torch.futures.Future[Any]) -> Any:
    try:
        return future.value()
    except Exception as error:
        return error


# -- completion and retrieval ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, "text", [1, 2], torch.ones(2), object(), ValueError("a value")])
def test_a_result_is_returned_by_every_getter(value: Any) -> None:
    future: Future[Any] = Future()
    assert isinstance(future, torch.futures.Future)
    assert not future.done()
    assert "pending" in repr(future)
    future.set_result(value)
    assert future.done()
    assert not future.cancelled()
    assert future.wait() is value
    assert future.result() is value
    assert future.value() is value
    assert future.wait(timeout=0) is value
    assert future.exception() is None
    assert "complete" in repr(future)


def test_an_error_is_raised_by_every_getter() -> None:
    error = KeyError("k")
    future = failed(error)
    assert future.done()
    for getter in (future.wait, future.result, future.value, lambda: future.wait(1.0)):
        with pytest.raises(KeyError) as caught:
            getter()
        assert caught.value is error
    assert future.exception() is error
    assert "KeyError" in repr(future)


def test_getters_of_a_pending_future_raise_or_time_out() -> None:
    future: Future[int] = Future()
    with pytest.raises(RuntimeError, match="not complete"):
        future.value()
    for wait in (future.wait, future.result, future.exception):
        for timeout in (0, _TINY):
            with pytest.raises(errors.RpcTimeoutError) as caught:
                wait(timeout)
            assert isinstance(caught.value, TimeoutError)
            assert isinstance(caught.value, RuntimeError)
    # torch's futures raise the same error; they have no time-outs.
    with pytest.raises(RuntimeError):
        torch.futures.Future().value()


@pytest.mark.parametrize(
    "first", [lambda f: f.set_result(1), lambda f: f.set_exception(ValueError()), Future.cancel]
)
@pytest.mark.parametrize("second", [lambda f: f.set_result(2), lambda f: f.set_exception(ValueError())])
def test_a_second_completion_raises_and_keeps_the_first_outcome(
    first: Callable[[Any], Any], second: Callable[[Any], Any]
) -> None:
    future: Future[int] = Future()
    first(future)
    before = outcome_of(future)
    with pytest.raises(RuntimeError, match="only be marked completed once"):
        second(future)
    assert not future.cancel()
    assert outcome_of(future) is before


@pytest.mark.parametrize("first", [lambda f: f.try_complete(1), lambda f: f.try_fail(ValueError())])
def test_try_complete_claim_and_follow_do_nothing_on_a_completed_future(first: Callable[[Any], Any]) -> None:
    future: Future[int] = Future()
    assert first(future)
    before = outcome_of(future)
    assert not future.try_complete(2)
    assert not future.try_fail(KeyError())
    assert not future.follow(done(3))
    assert not future.claim()
    assert outcome_of(future) is before


def test_a_waiter_is_notified_once_and_a_removed_waiter_never() -> None:
    early: list[Any] = []
    late: list[Any] = []
    removed: list[Any] = []
    future: Future[int] = Future()
    future.add_waiter(early.append)
    future.add_waiter(removed.append)
    assert future.remove_waiter(removed.append)
    future.set_result(1)
    future.add_waiter(late.append)
    assert not future.remove_waiter(early.append)
    assert early == late == [future]
    assert not removed


def test_wrong_argument_types_and_copying_raise() -> None:
    future: Future[int] = Future()
    for wrong in ("text", None, ValueError):
        with pytest.raises((TypeError, AssertionError)):
            future.set_exception(wrong)  # type: ignore[arg-type]
    for wrong in (None, 3):
        with pytest.raises(TypeError):
            future.then(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            future.add_done_callback(wrong)  # type: ignore[arg-type]
    for wrong in ("1", [], float("nan")):
        with pytest.raises((TypeError, ValueError)):
            future.wait(wrong)  # type: ignore[arg-type]
    assert not future.done()
    for copying in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="Future"):
            copying(future)


def test_a_cancelled_future_raises_cancelled_error_and_runs_callbacks() -> None:
    future: Future[int] = Future()
    seen: list[bool] = []
    future.add_done_callback(lambda f: seen.append(f.cancelled()))
    assert future.cancel()
    assert future.done()
    assert future.cancelled()
    assert seen == [True]
    with pytest.raises(errors.CancelledError) as caught:
        future.wait()
    assert isinstance(caught.value, StdCancelledError)
    assert isinstance(caught.value, RuntimeError)


def test_only_one_of_several_racing_threads_completes_a_future() -> None:
    for _ in range(20):
        future: Future[int] = Future()
        start = threading.Barrier(4)
        won: list[int] = []

        def attempt(number: int, future: Any = future, start: Any = start, won: Any = won) -> None:
            start.wait()
            try:
                future.set_result(number)
            except RuntimeError:
                return
            won.append(number)

        threads = [threading.Thread(target=attempt, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [future.value()]


@row("fut.wait() has no time-out", "from-torch-rpc")
def test_an_exception_of_a_signal_handler_interrupts_wait() -> None:
    future: Future[None] = Future()
    main = threading.main_thread().ident
    assert main is not None
    waits = threading.Event()
    before = signal.getsignal(signal.SIGUSR1)

    def raise_it(*_: Any) -> None:
        raise InterruptedError("woken")

    signal.signal(signal.SIGUSR1, raise_it)
    try:
        thread = threading.Thread(target=lambda: waits.wait() and signal.pthread_kill(main, signal.SIGUSR1))
        thread.start()

        def wait() -> None:
            waits.set()
            future.wait()

        with pytest.raises(InterruptedError, match="woken"):
            wait()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    future.set_result(None)
    assert future.wait() is None


# -- callbacks -----------------------------------------------------------------------------------


def test_callbacks_run_in_order_of_registration_with_the_completed_future() -> None:
    future: Future[int] = Future()
    seen: list[tuple[int, bool]] = []
    for number in range(3):
        future.add_done_callback(lambda f, number=number: seen.append((number, f is future and f.done())))
    assert seen == []
    future.set_result(1)
    assert seen == [(0, True), (1, True), (2, True)]
    future.add_done_callback(lambda f: seen.append((3, f is future)))
    assert seen[-1] == (3, True)


@pytest.mark.prints("a done callback of a future raised.*ZeroDivisionError")
def test_an_error_in_a_callback_is_logged_and_other_callbacks_run(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[int] = Future()
    seen: list[int] = []
    future.add_done_callback(lambda f: 1 / 0)
    future.add_done_callback(lambda f: seen.append(f.value()))
    future.set_result(5)
    assert seen == [5]
    assert future.wait() == 5
    assert "ZeroDivisionError" in caplog.text


def test_then_returns_a_future_of_the_callbacks_result() -> None:
    future: Future[int] = Future()
    doubled = future.then(lambda f: f.value() * 2)
    text = doubled.then(lambda f: str(f.wait()))
    assert type(doubled) is Future
    assert not text.done()
    future.set_result(21)
    assert text.wait() == "42"
    assert future.then(lambda f: f.wait() + 1).value() == 22
    # As in torch, a future that a callback returns is a plain value.
    inner = done(3)
    assert future.then(lambda f: inner).value() is inner
    assert torch_future(1).then(lambda f: f.value() + 1).value() == 2


def torch_future(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def test_then_after_a_failure_propagates_or_handles_the_error() -> None:
    first: Future[int] = Future()
    passed_on = first.then(lambda f: f.wait())
    handled = first.then(lambda f: type(outcome_of(f)).__name__)
    new = first.then(lambda f: operator.truediv(1, 0))
    first.set_exception(KeyError("k"))
    with pytest.raises(KeyError):
        passed_on.wait()
    assert handled.wait() == "KeyError"
    with pytest.raises(ZeroDivisionError):
        new.wait()


# -- long chains -----------------------------------------------------------------------------------


def _linked_by_then(first: Future[int], links: int) -> Future[int]:
    last = first
    for _ in range(links):
        last = last.then(lambda f: f.value() + 1)
    return last


def _linked_by_collect_all(first: Future[int], links: int) -> Future[int]:
    last = first
    for _ in range(links):
        last = collect_all([last]).then(lambda f: f.value()[0].value() + 1)
    return last


def _linked_by_set_result(first: Future[int], links: int) -> Future[int]:
    last: Any = first
    for number in range(links):
        following: Any = torch.futures.Future() if number % 3 == 1 else Future()

        def complete(f: Any, following: Any = following) -> None:
            try:
                following.set_result(f.value() + 1)
            except ValueError as error:
                following.set_exception(error)

        last.add_done_callback(complete)
        last = following
    return last.then(lambda f: f.value())  # type: ignore[no-any-return]


_LINKED = [_linked_by_then, _linked_by_collect_all, _linked_by_set_result]


@pytest.mark.parametrize("link", _LINKED)
@pytest.mark.parametrize("links", rest_is_slow([3_000, 100_000]))
def test_a_chain_of_thousands_of_futures_completes(link: Callable[..., Any], links: int) -> None:
    first: Future[int] = Future()
    last = link(first, links)
    first.set_result(0)
    assert last.done()
    assert last.value() == links


@pytest.mark.parametrize("links", rest_is_slow([3_000, 100_000]))
def test_an_error_propagates_through_a_chain_of_thousands_of_futures(links: int) -> None:
    first: Future[int] = Future()
    last = _linked_by_then(first, links)
    error = ValueError("x")
    first.set_exception(error)
    assert last.exception() is error
    assert len(traceback.extract_tb(error.__traceback__)) < 10
    assert len(str(last.label)) < 200


@pytest.mark.parametrize(
    "retrieve",
    [
        lambda future: future.done() and future.value(),
        lambda future: future.value(),
        lambda future: future.wait(),
        lambda future: collect_all([future]).wait()[0].value(),
    ],
)
def test_a_callback_that_completes_another_future_can_read_the_results_of_its_callbacks(
    retrieve: Callable[[Any], Any],
) -> None:
    futures: list[Future[int]] = [Future() for _ in range(41)]
    following = [future.then(lambda f: f.value() * 2) for future in futures]
    seen: list[int] = []
    for number, future in enumerate(futures[:-1]):

        def complete(f: Future[int], number: int = number) -> None:
            futures[number + 1].set_result(number + 1)
            seen.append(retrieve(following[number + 1]))

        future.add_done_callback(complete)
    futures[0].set_result(0)
    assert sorted(seen) == [2 * number for number in range(1, 41)]


@pytest.mark.parametrize("depth", [1, 20])
def test_keyboard_interrupt_in_a_callback_does_not_skip_other_callbacks(depth: int) -> None:
    first: Future[int] = Future()
    last = _linked_by_then(first, depth)

    def interrupt(_: Future[int]) -> None:
        raise KeyboardInterrupt

    first.add_done_callback(interrupt)
    after = first.then(lambda f: f.value() + 5)
    last.add_done_callback(interrupt)
    later = last.then(lambda f: f.value() + 7)
    with pytest.raises(KeyboardInterrupt):
        first.set_result(0)
    assert after.value() == 5
    assert later.value() == depth + 7


# -- collect_all and wait_all of torch and of actorrpc -----------------------------------------------------------------


@pytest.mark.parametrize("wait", [torch.futures.wait_all, wait_all])
def test_wait_all_returns_all_values_or_raises_an_error(wait: Callable[..., Any]) -> None:
    assert wait([done(1), done("b")]) == [1, "b"]
    assert wait([]) == []
    with pytest.raises(KeyError):
        wait([done(1), failed(KeyError("k"))])


def test_collect_all_and_wait_all_accept_mixed_futures_and_time_outs() -> None:
    assert collect_all([]).wait() == []
    bad = failed(KeyError("k"))
    mixed = collect_all([bad, torch_future(2), done(3)])
    assert [type(outcome_of(future)) for future in mixed.wait()] == [KeyError, int, int]
    assert wait_all([torch_future(2), done(3)]) == [2, 3]
    pending: Future[int] = Future()
    with pytest.raises(errors.RpcTimeoutError):
        wait_all([pending, done(1)], timeout=_TINY)
    with pytest.raises(errors.RpcTimeoutError):
        collect_all([pending]).wait(_TINY)
    pending.set_result(0)
    twice = collect_all([pending, pending])
    assert len(twice.wait()) == 2
    for wrong in ([1], None, [None]):
        with pytest.raises((TypeError, AttributeError)):
            collect_all(wrong)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        wait_all([Future()], timeout="1")  # type: ignore[arg-type]


@given(st.lists(st.sampled_from(["value", "error", "cancel"]), min_size=1, max_size=8), st.data())
def test_collect_all_and_then_give_the_same_results_in_any_order_of_completion(
    outcomes: list[str], data: st.DataObject
) -> None:
    futures: list[Future[int]] = [Future() for _ in outcomes]
    everything = collect_all(futures)
    chained = [future.then(outcome_of) for future in futures]
    order = data.draw(st.permutations(range(len(outcomes))))
    for place, number in enumerate(order):
        assert not everything.done()
        future = futures[number]
        if outcomes[number] == "value":
            future.set_result(number)
        elif outcomes[number] == "error":
            future.set_exception(ValueError(number))
        else:
            future.cancel()
        assert sum(f.done() for f in futures) == place + 1
    expected = {"value": int, "error": ValueError, "cancel": errors.CancelledError}
    assert [type(outcome_of(f)) for f in everything.wait()] == [expected[outcome] for outcome in outcomes]
    assert [type(f.wait()) for f in chained] == [expected[outcome] for outcome in outcomes]


# -- reports of errors that are never retrieved ---------------------------------------------------------------


@pytest.fixture
def reports() -> Iterator[Reports]:
    """Reports of the futures' logger."""
    with Reports() as found:
        yield found


@pytest.mark.prints(
    r"a future failed and its error was never retrieved: ZeroDivisionError\('unretrieved'\)", LAST
)
def test_an_error_that_is_never_retrieved_is_logged(reports: Reports) -> None:
    future = failed(ZeroDivisionError("unretrieved"))
    del future
    assert reports.so_far() == [
        "a future failed and its error was never retrieved: ZeroDivisionError('unretrieved')"
    ]


@pytest.mark.parametrize(
    "retrieve",
    [
        lambda f: f.wait(),
        lambda f: f.value(),
        lambda f: f.exception(),
        lambda f: f.then(outcome_of).wait(),
        lambda f: wait_all([f]),
        lambda f: asyncio.run(_await(f)),
        lambda f: [outcome_of(each) for each in collect_all([f]).wait()],
        lambda f: torch.futures.wait_all([f]),
        lambda f: torch.futures.collect_all([f]).wait(),
    ],
    ids=[
        "wait",
        "value",
        "exception",
        "then",
        "wait_all",
        "await",
        "collect_all",
        "torch's wait_all",
        "torch's collect_all",
    ],
)
@pytest.mark.prints(LAST)
def test_a_retrieved_error_is_not_logged(reports: Reports, retrieve: Callable[[Any], Any]) -> None:
    future = failed(KeyError("seen"))
    with contextlib.suppress(KeyError):
        retrieve(future)
    del future
    assert reports.so_far() == []


@pytest.mark.prints(LAST)
def test_wait_all_retrieves_the_errors_of_all_futures(reports: Reports) -> None:
    futures = [failed(KeyError("first")), done(1), failed(KeyError("second"))]
    with pytest.raises(KeyError, match="first"):
        wait_all(futures)
    del futures
    assert reports.so_far() == []


# -- asyncio -------------------------------------------------------------------------------------


async def _await(future: Any) -> Any:
    return await future


def test_futures_can_be_awaited_gathered_and_timed_out_in_asyncio() -> None:
    async def main() -> list[Any]:
        pending: Future[int] = Future()
        threading.Timer(0, lambda: pending.set_result(1)).start()
        found: list[Any] = [await pending, await pending, await done("b")]
        bad: Future[int] = Future()
        asyncio.get_running_loop().call_soon(bad.set_exception, KeyError("k"))
        with pytest.raises(KeyError):
            await bad
        many: list[Future[int]] = [Future() for _ in range(5)]
        both = asyncio.gather(*[_await(future) for future in many], _await(collect_all(many)))
        for number, future in enumerate(many):
            threading.Timer(0, future.set_result, (number,)).start()
        *each, everything = await both
        found.append(each)
        found.append([future.value() for future in everything])
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(Future()), _TINY)
        return found

    assert asyncio.run(main()) == [1, 1, "b", [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_a_future_awaited_in_a_closed_event_loop_can_complete_and_be_awaited_again() -> None:
    pending: Future[int] = Future()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(pending), _TINY)

    asyncio.run(give_up())
    pending.set_result(1)  # its waiter's loop is closed
    assert asyncio.run(_await(pending)) == 1


# -- futures of RPC calls ------------------------------------------------------------------------------------


def fail(text: str) -> None:
    raise LookupError(text)


def back_and_forth(depth: int) -> int:
    if depth == 0:
        return 0
    there = 1 - rpc.get_worker_info().id
    return rpc.rpc_async(there, back_and_forth, (depth - 1,)).then(lambda f: f.wait() + 1).wait()


@rpc.functions.async_execution
def through_links(links: int) -> Future[int]:
    there = 1 - rpc.get_worker_info().id
    last = rpc.rpc_async(there, operator.add, (0, 0))
    for _ in range(links):
        last = last.then(lambda f: f.value() + 1)
    return last


def _calls(rank: int, world_size: int) -> None:
    if rank:
        return
    for to in ("worker1", "worker0"):
        future = rpc.rpc_async(to, operator.add, (1, 2))
        assert type(future) is rpc.Future
        assert future.wait() == future.result() == future.value() == 3
        assert future.done()
        # Callbacks make calls and wait for them, on the connection over which the reply came.
        chained = rpc.rpc_async(to, operator.add, (1, 2)).then(
            lambda f, to=to: rpc.rpc_sync(to, operator.mul, (f.wait(), 7))
        )
        assert chained.wait() == 21
        deeper = rpc.rpc_async(to, operator.add, (0, 1))
        for _ in range(20):
            deeper = deeper.then(lambda f, to=to: rpc.rpc_async(to, operator.add, (f.wait(), 1)).wait())
        assert deeper.wait() == 21
        long = rpc.rpc_async(to, operator.add, (0, 1))
        for _ in range(1000):
            long = long.then(lambda f: f.wait() + 1)
        assert long.wait() == 1001
        assert rpc.rpc_sync(to, through_links, (1000,)) == 1000
        # The error of a callback is the error of the future of `then`, also if a call in the callback raised it.
        with pytest.raises(LookupError, match="in a callback") as caught:
            rpc.rpc_async(to, operator.add, (1, 2)).then(
                lambda f, to=to: rpc.rpc_sync(to, fail, ("in a callback",))
            ).wait()
        assert isinstance(caught.value, errors.RemoteError)
        # Callbacks of a call run on a thread of the pool, never on the waiting thread.
        threads: list[Any] = []
        waited = rpc.rpc_async(to, operator.add, (1, 2))
        noted = waited.then(lambda f, threads=threads: threads.append(threading.current_thread()))
        waited.wait()
        noted.wait()
        assert threads[0] is not threading.main_thread() or waited.done()
        # torch's functions and actorrpc's accept these futures.
        futures = [rpc.rpc_async(to, operator.mul, (i, i)) for i in range(20)]
        assert [f.value() for f in torch.futures.collect_all(futures).wait()] == [i * i for i in range(20)]
        futures = [rpc.rpc_async(to, operator.mul, (i, i)) for i in range(20)]
        assert torch.futures.wait_all(futures) == [i * i for i in range(20)]
        futures = [rpc.rpc_async(to, operator.mul, (i, i)) for i in range(20)]
        assert wait_all(futures) == [i * i for i in range(20)]
        total = collect_all([rpc.rpc_async(to, operator.mul, (i, i)) for i in range(20)]).then(
            lambda f: sum(each.wait() for each in f.wait())
        )
        assert total.wait(30) == sum(i * i for i in range(20))
        with pytest.raises(LookupError, match="second"):
            wait_all([rpc.rpc_async(to, operator.add, (1, 1)), rpc.rpc_async(to, fail, ("second",))])
        with pytest.raises(LookupError):
            torch.futures.wait_all([rpc.rpc_async(to, fail, ("there",))])
        assert asyncio.run(_gather(to)) == [i + 1 for i in range(50)]
        # A second result is refused.
        with pytest.raises(RuntimeError, match="once"):
            future.set_result(4)
        assert future.value() == 3
    assert rpc.rpc_sync("worker1", back_and_forth, (12,)) == 12


async def _gather(to: str) -> list[int]:
    found = list(await asyncio.gather(*[_await(rpc.rpc_async(to, operator.add, (i, 1))) for i in range(50)]))
    with pytest.raises(LookupError, match="awaited"):
        await rpc.rpc_async(to, fail, ("awaited",))
    return found


@row("fut.wait(), fut.then(f)", "from-torch-rpc")
def test_futures_of_rpc_calls_support_waits_callbacks_and_collections() -> None:
    rpc_group(_calls, 2)


def _unseen(rank: int, world_size: int) -> None:
    if rank:
        return
    with Reports() as reports:
        future = rpc.rpc_async("worker1", fail, ("unretrieved in a call",))
        finished = threading.Event()
        future.add_done_callback(lambda _: finished.set())
        assert finished.wait(30)
        del future
        while not (found := reports.so_far()):  # the pool's thread may still hold the future
            threading.Event().wait(0.05)
    assert "unretrieved in a call" in found[0]
    assert "'worker1'" in found[0]


@pytest.mark.prints(
    LAST,
    r"the call of fail on 'worker1' failed and its error was never retrieved: LookupError\('unretrieved in a call'\)",
)
def test_an_error_of_a_call_that_is_never_retrieved_is_logged_with_function_and_worker() -> None:
    rpc_group(_unseen, 2)


class _Tracked:
    pass


def test_a_raised_error_does_not_keep_the_frames_of_waiters_alive() -> None:
    """The traceback refers to frames of waiters, and the garbage collector cannot see into torch's part of a future."""

    def wait(error: BaseException) -> Any:
        here = _Tracked()
        future: Future[None] = Future()
        future.set_exception(error)
        with pytest.raises(type(error)):
            future.wait()
        with pytest.raises(type(error)) as caught:
            torch.futures.collect_all([future]).wait()
        assert caught.value.args == error.args
        del caught
        return weakref.ref(here)

    for make in (
        lambda: KeyError("x"),
        lambda: OSError(2, "gone"),
        lambda: _Odd(1, detail="x"),
        lambda: SystemExit(3),
    ):
        found = wait(make())
        gc.collect()
        assert found() is None


def test_torchs_wait_all_raises_an_error_with_its_causes_and_group_members() -> None:
    cause = KeyError("x")
    cause.__cause__ = cause  # a chain may end in a loop
    failure = errors.ActorDiedError("the actor died", cause=cause)
    with pytest.raises(BaseExceptionGroup, match="several") as caught:
        torch.futures.wait_all([failed(BaseExceptionGroup("several", [failure, failure]))])
    first, second = caught.value.exceptions
    assert first is second
    assert isinstance(first, errors.ActorDiedError)
    assert first.args == failure.args
    assert first.cause is first.__cause__
    assert repr(first.cause) == "KeyError('x')"


class _Odd(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(code, detail)


# -- with concurrent.futures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("waits_first", [True, False])
def test_concurrent_futures_wait_accepts_a_concurrent_future(waits_first: bool) -> None:
    work: list[ConcurrentFuture[Any]] = [ConcurrentFuture() for _ in range(3)]

    def end() -> None:
        if waits_first:
            threading.Event().wait(0.05)
        work[0].set_result(7)
        work[1].set_exception(LookupError("gone"))
        work[2].cancel()

    thread = threading.Thread(target=end)
    thread.start()
    if not waits_first:
        thread.join()
    done, rest = concurrent.futures.wait(work)
    thread.join()
    assert (done, rest) == (set(work), set())
    assert list(concurrent.futures.as_completed(work[:1])) == work[:1]
    assert isinstance(work[1].exception(), LookupError)
    assert [future.cancelled() for future in work] == [False, False, True]
    assert not work[0].running()
    assert [future._get_snapshot() for future in (*work, ConcurrentFuture())] == [
        (True, False, 7, None),
        (True, False, None, work[1].exception()),
        (True, True, None, None),
        (False, False, None, None),
    ]
