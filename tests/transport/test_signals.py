"""Ctrl-C never leaves anything in pieces: sections that it must not cut, and a storm of it beside other calls."""

from __future__ import annotations

import operator
import signal
import threading
from typing import Any

import pytest
import torch

from actorrpc import rpc
from actorrpc.transport import signals
from tests.announced import BETWEEN_STEPS
from tests.ranks import rpc_group


def _raise_signal() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def resends() -> Any:
    """Take over SIGINT; the list counts how often it was to be sent again."""
    asked: list[None] = []
    signals.install(lambda: asked.append(None))
    yield asked
    signals.uninstall()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_of_sections_it_is_raised_at_once(resends: list[None]) -> None:
    with pytest.raises(KeyboardInterrupt):
        _raise_signal()
    assert not resends


def test_in_a_section_it_waits_for_the_checkpoint(resends: list[None]) -> None:
    done: list[str] = []

    @signals.uninterruptible
    def section() -> None:
        _raise_signal()
        done.append("first")
        assert signals.pending_here()
        _raise_signal()
        done.append("second")

    section()
    assert done == ["first", "second"]
    assert len(resends) == 2
    with pytest.raises(KeyboardInterrupt):
        signals.checkpoint()
    signals.checkpoint()  # once is enough


def test_without_a_checkpoint_it_is_sent_again(resends: list[None]) -> None:
    @signals.uninterruptible
    def section() -> None:
        _raise_signal()

    section()
    with pytest.raises(KeyboardInterrupt):
        signals.resend()
    signals.resend()  # it has been raised
    signals.checkpoint()


def test_one_that_was_raised_meanwhile_does_not_come_twice(resends: list[None]) -> None:
    @signals.uninterruptible
    def section() -> None:
        _raise_signal()
        # The clock sends it again while the section is still running: it stays one interrupt.
        signals.resend()

    section()
    with pytest.raises(KeyboardInterrupt):
        signals.checkpoint()
    signals.resend()
    signals.checkpoint()


def test_other_threads_never_see_it(resends: list[None]) -> None:
    @signals.uninterruptible
    def section() -> None:
        _raise_signal()

    section()
    seen: list[bool] = []

    def look() -> None:
        seen.append(signals.pending_here())
        signals.checkpoint()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [False]
    with pytest.raises(KeyboardInterrupt):
        signals.checkpoint()


def test_a_handler_of_the_program_stays() -> None:
    def handler(*_: Any) -> None: ...

    before = signal.signal(signal.SIGINT, handler)
    try:
        signals.install(lambda: None)
        assert signal.getsignal(signal.SIGINT) is handler
        signals.uninstall()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


# -- a storm ---------------------------------------------------------------------------------------------


def _echo(value: Any) -> Any:
    return value


def _storm(rank: int, world_size: int, storm: int, large: bool) -> int | None:
    """The main thread is interrupted again and again; whatever it does, the other thread's calls are right."""
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
            signal.pthread_kill(main, signal.SIGINT)

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
        except KeyboardInterrupt:
            caught += 1
    over.set()
    for each in threads:
        each.join()
    assert not wrong, wrong[:3]
    assert not bad, bad[:3]
    # Nothing is left in the way, and nothing is kept.
    assert [rpc.rpc_sync("worker1", _echo, (i,)) for i in range(100)] == list(range(100))
    agent = rpc.api._require().agent  # type: ignore[attr-defined]
    for peer in agent.peers():
        assert not peer.pending or not peer.is_self
        assert not peer._credit._lock._is_owned()
        assert not peer.dial_lock.locked()
    return calls


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.prints(BETWEEN_STEPS)
@pytest.mark.parametrize(
    ("storm", "options"), [(10_000, {}), (1_500, {"transport": "tcp", "lane": False})], ids=["unix", "tcp"]
)
def test_a_storm_of_interrupts_does_not_harm_other_threads(storm: int, options: dict[str, Any]) -> None:
    calls = rpc_group(_storm, 2, storm, bool(options), timeout=100, options=options)[0]
    assert calls > 0
