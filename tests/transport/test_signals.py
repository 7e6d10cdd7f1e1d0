"""Deferral of signal handlers in uninterruptible sections, and many interrupts during calls of other threads."""

from __future__ import annotations

import _signal
import _weakrefset
import operator
import os
import signal
import sys
import threading
import weakref
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import pytest
import torch

from actorrpc import rpc
from actorrpc.transport import signals
from tests.agent.together import in_threads
from tests.announced import BETWEEN_STEPS
from tests.interruptions import Interrupted, Steps, raising
from tests.ranks import rpc_group


def _raise_signal() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def rings() -> Any:
    """Install the deferral of signals; the list has one item for each time that the clock was asked to wake the main thread."""
    asked: list[None] = []

    def later() -> None:
        asked.append(None)

    signals.install(later)
    yield asked
    signals.uninstall(later)
    assert (
        _signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # without the shield of the deferral
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_agents_that_start_and_end_at_once_on_threads_leave_no_descriptor() -> None:
    begin = threading.Barrier(4)

    def start_and_end() -> None:
        for _ in range(100):
            later = partial(int)  # each agent has a function of its own
            begin.wait()
            signals.install(later)
            signals.uninstall(later)

    interval, before = sys.getswitchinterval(), os.listdir("/proc/self/fd")
    sys.setswitchinterval(1e-6)
    try:
        in_threads(start_and_end, [()] * 4)
    finally:
        sys.setswitchinterval(interval)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    signals.install(int)  # in the main thread, which can remove the wrapper of signal.signal again
    signals.uninstall(int)


class _Value:
    """A value that supports weak references."""


def _filled(kind: str, value: _Value) -> Any:
    if kind == "WeakValueDictionary":
        return WeakValueDictionary({1: value})
    return WeakKeyDictionary({value: 1}) if kind == "WeakKeyDictionary" else WeakSet([value])


@pytest.mark.parametrize("kind", ["WeakValueDictionary", "WeakKeyDictionary", "WeakSet"])
def test_keyboard_interrupt_in_a_weakref_callback_is_deferred(kind: str, rings: list[None]) -> None:
    """The interpreter would print and discard an exception raised there."""
    value = _Value()
    collection = _filled(kind, value)
    came: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename in (weakref.__file__, _weakrefset.__file__):
            came.append(frame.f_code.co_name)
            sys.setprofile(None)
            _raise_signal()

    sys.setprofile(profile)
    try:
        del value
    finally:
        sys.setprofile(None)
    assert len(came) == 1
    assert not collection
    assert len(rings) == 1
    with pytest.raises(KeyboardInterrupt):
        signals.checkpoint()


def test_handlers_of_the_program_are_deferred_once_per_signal_and_getsignal_returns_them(
    rings: list[None],
) -> None:
    @signals.uninterruptible
    def section() -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
            signal.raise_signal(number)

    with raising() as raised, raising(signal.SIGUSR2):
        handler = signal.getsignal(signal.SIGUSR1)
        assert getattr(handler, "__name__", "") == "handler"
        section()
        assert not raised
        for _ in range(2):
            with pytest.raises(Interrupted):
                signals.checkpoint()
        signals.checkpoint()
        assert raised == [signal.SIGUSR1]  # one pending signal of each kind, as in the kernel
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGUSR1)
        assert signal.signal(signal.SIGUSR1, handler) is handler
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_signal_at_any_step_of_running_a_deferred_handler_is_handled_as_well(rings: list[None]) -> None:
    handled: list[int] = []

    @signals.uninterruptible
    def work() -> None:
        signal.raise_signal(signal.SIGUSR1)
        signals.checkpoint()

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, lambda number, _: handled.append(number)) for number in numbers]
    steps, at = Steps(signal.SIGUSR2), 0
    while at == 0 or steps.place:
        at += 1
        del handled[:]
        steps.run(work, at)
        signals.checkpoint()
        assert set(handled) == {signal.SIGUSR1, *([signal.SIGUSR2] if steps.place else [])}, steps.place
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_deferred_signal_is_delivered_before_its_handler_is_replaced(rings: list[None]) -> None:
    @signals.uninterruptible
    def section() -> None:
        signal.raise_signal(signal.SIGUSR1)

    with raising() as raised:
        section()
        with pytest.raises(Interrupted):
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        assert len(raised) == 1


def test_the_internal_sigurg_of_the_clock_never_reaches_a_handler_of_the_program(rings: list[None]) -> None:
    received: list[int] = []

    @signals.uninterruptible
    def section() -> None:
        signal.raise_signal(signal.SIGUSR1)

    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL
    signal.raise_signal(signal.SIGURG)
    before = signal.signal(signal.SIGURG, lambda number, _: received.append(number))
    assert before is signal.SIG_DFL
    try:
        with raising():
            section()
            with pytest.raises(Interrupted):
                signals.wake_main()
        assert not received
        signal.raise_signal(signal.SIGURG)
        assert received == [signal.SIGURG]
    finally:
        signal.signal(signal.SIGURG, before)


# -- many interrupts -------------------------------------------------------------------------------------


def _echo(value: Any) -> Any:
    return value


def _interrupt(number: int, _: Any) -> None:
    raise Interrupted


def _storm(rank: int, world_size: int, storm: int, large: bool, number: int) -> int | None:
    """Interrupt the main thread repeatedly during its calls; the results of all calls must be correct."""
    if rank:
        return None
    main = threading.main_thread().ident
    assert main is not None
    ready, over = threading.Semaphore(0), threading.Event()
    wrong: list[object] = []
    calls = 0

    def interrupt() -> None:
        for _ in range(storm):
            ready.acquire()
            signal.pthread_kill(main, number)

    def call() -> None:
        nonlocal calls
        tensor = torch.arange(40_000 if large else 40)
        try:
            while not over.is_set():
                calls += 1
                value = (calls, tensor + calls) if calls % 8 == 0 else (calls, "x" * (calls % 3000))
                got = rpc.rpc_sync("worker1", _echo, (value,))
                same = got[0] == calls and (
                    torch.equal(got[1], value[1])
                    if isinstance(value[1], torch.Tensor)
                    else got[1] == value[1]
                )
                if not same:
                    wrong.append((got, value))
                futures = [rpc.rpc_async("worker1", operator.add, (calls, i)) for i in range(4)]
                if [f.wait() for f in futures] != [calls + i for i in range(4)]:
                    wrong.append("futures")
        except BaseException as error:
            wrong.append(error)

    if number != signal.SIGINT:
        signal.signal(number, _interrupt)
    threads = [threading.Thread(target=each) for each in (interrupt, call)]
    for each in threads:
        each.start()
    caught, i = 0, 0
    mine = torch.arange(40_000 if large else 30)
    bad: list[object] = []
    while caught < storm:
        try:
            ready.release()
            while True:
                i += 1
                if i % 5 == 0:
                    got = rpc.rpc_async("worker1", _echo, (i,)).wait()
                elif i % 7 == 0:
                    got = i if torch.equal(rpc.rpc_sync("worker1", _echo, (mine,)), mine) else -1
                elif i % 11 == 0:
                    got = rpc.rpc_sync("worker0", _echo, (i,))
                elif i % 13 == 0:
                    got = rpc.remote("worker1", _echo, (i,)).to_here()
                else:
                    got = rpc.rpc_sync("worker1", operator.add, (i, 0))
                if got != i:
                    bad.append((i, got))
        except (Interrupted, KeyboardInterrupt):
            caught += 1
    over.set()
    for each in threads:
        each.join()
    assert not wrong, wrong[:3]
    assert not bad, bad[:3]
    # Calls still work, and no call is pending.
    assert [rpc.rpc_sync("worker1", _echo, (i,)) for i in range(100)] == list(range(100))
    agent = rpc.api.group().agent  # type: ignore[attr-defined]
    for peer in agent.peers():
        assert not peer.pending or not peer.is_self
        assert not peer.dial_lock.locked()
    return calls


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.prints(BETWEEN_STEPS)
@pytest.mark.parametrize(
    ("storm", "number", "options"),
    [
        (10_000, signal.SIGINT, {}),
        (1_500, signal.SIGUSR1, {"transport": "tcp", "lane": False}),
    ],
    ids=["unix", "tcp-usr1"],
)
def test_thousands_of_interrupts_of_the_main_thread_do_not_corrupt_calls(
    storm: int, number: int, options: dict[str, Any]
) -> None:
    calls = rpc_group(_storm, 2, storm, bool(options), number, timeout=100, options=options)[0]
    assert calls > 0
