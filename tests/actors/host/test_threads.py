"""Threads of actors: where methods may and may not be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import gc
import importlib
import inspect
import itertools
import ssl
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, ClassVar

import pytest

import actorrpc
from actorrpc import CancelledError, Future, cancel, get, rpc
from actorrpc._stacks import top_frames
from actorrpc.actors.host import threads
from actorrpc.actors.host.threads import Interrupted, Runner, bears_interruption
from actorrpc.futures import INTERRUPTED
from actorrpc.testing import InProcessCluster
from tests.actors.alone import alone
from tests.actors.e2e.kit import until


@actorrpc.remote
class Starts:
    """Starts a thread that touches a file, and loops until it is interrupted."""

    def ready(self) -> None:
        """Answer."""

    def starts(self, note: Path) -> None:
        threading.Thread(target=note.touch).start()
        while True:
            time.sleep(0.001)


class Dropped:
    """An object that lingers while it is dropped, so that a test can interrupt the method then."""

    dropping = threading.Event()
    looked = threading.Semaphore(0)
    may_end = threading.Event()

    @classmethod
    def linger(cls, *_: object) -> None:
        """Stay in code whose exceptions the interpreter only prints."""
        cls.dropping.set()
        for _ in range(2):
            cls.looked.acquire(timeout=20)


class Finalized(Dropped):
    """Lingers in its finalizer."""

    def __del__(self) -> None:
        self.linger()


def _drop_a_finalized_object() -> None:
    Finalized()


def _drop_a_weakly_referenced_object() -> None:
    dropped = Dropped()
    watch = weakref.ref(dropped, Dropped.linger)
    del dropped
    del watch


def _collect() -> None:
    def linger(phase: str, _: object) -> None:
        if phase == "start":
            Dropped.linger()

    gc.callbacks.append(linger)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(linger)


@actorrpc.remote
class Drops:
    """Drops an object, and loops until it is interrupted or told to end."""

    def ready(self) -> None:
        """Answer."""

    def drops(self, drop: Callable[[], None]) -> None:
        drop()
        while not Dropped.may_end.is_set():
            time.sleep(0.001)


@pytest.mark.parametrize("drop", [_drop_a_finalized_object, _drop_a_weakly_referenced_object, _collect])
def test_an_interruption_is_not_lost_in_finalizers_and_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop: Callable[[], None]
) -> None:
    """The interpreter ignores exceptions there, so the method would not end."""
    for event in (Dropped.dropping, Dropped.may_end):
        event.clear()
    interrupt = Runner.interrupt

    def look(runner: Runner, *arguments: Any) -> None:
        interrupt(runner, *arguments)
        Dropped.looked.release()

    with alone(tmp_path):
        actor = Drops.remote()
        get(actor.ready.remote())
        monkeypatch.setattr(Runner, "interrupt", look)
        ref = actor.drops.remote(drop)
        assert Dropped.dropping.wait(20)
        assert cancel(ref)
        with pytest.raises(CancelledError):
            get(ref)
        try:
            get(actor.ready.remote(), timeout=20)
        finally:
            Dropped.may_end.set()
        del actor, ref


class EndlessCall:
    """Whether the endless method has begun, and whether it was interrupted."""

    begun = threading.Event()
    interrupted = threading.Event()


@actorrpc.remote
class Calls:
    """Calls the library in an endless loop and ignores its errors."""

    def ready(self) -> None:
        """Answer."""

    def numbers(self) -> Iterator[int]:
        yield from itertools.count()

    def calls(self, how: str, me: Any, other: Any) -> None:
        ref, never = actorrpc.put(1), Future[None]()
        stream = other.numbers.remote()
        calls: dict[str, Callable[[], Any]] = {
            "put": lambda: actorrpc.put(1),
            "remote": other.ready.remote,
            "rpc_async": lambda: rpc.rpc_async("w0", threading.get_ident),
            "get": lambda: get(ref),
            "wait": lambda: actorrpc.wait([ref]),
            "as_completed": lambda: next(actorrpc.as_completed([ref])),
            "next": lambda: next(stream),
            "values": lambda: next(stream.values()),
            "await": lambda: asyncio.run(_all_of(itertools.repeat(ref))),
            "a future without a result": never.wait,
            "a call to itself": lambda: get(me.ready.remote()),
            "a call to another actor": lambda: get(other.ready.remote()),
            "rpc_sync": lambda: rpc.rpc_sync("w0", threading.get_ident),
        }
        try:
            while True:
                EndlessCall.begun.set()
                with contextlib.suppress(Exception):
                    calls[how]()
        except Interrupted:
            EndlessCall.interrupted.set()
            raise


def _on_actor_thread() -> bool:
    return threading.current_thread().name.startswith("actorrpc-actor-")


async def _all_of(refs: Iterable[Any]) -> None:
    for ref in refs:
        await ref


_CALLS = (
    *("put", "remote", "rpc_async", "get", "wait", "as_completed", "next", "values", "await"),
    *("a future without a result", "a call to itself", "a call to another actor", "rpc_sync"),
)


def test_a_method_is_interrupted_while_it_waits_in_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone(tmp_path):
        actor, other = Calls.remote(), Calls.remote()
        for how in _CALLS:
            EndlessCall.begun.clear()
            EndlessCall.interrupted.clear()
            get([actor.ready.remote(), other.ready.remote()])
            ref = actor.calls.remote(how, actor, other)
            assert EndlessCall.begun.wait(20), how
            with monkeypatch.context() as patch:
                # Inspection from another thread always finds it in the library's code.
                patch.setattr(
                    threads,
                    "bears_interruption",
                    lambda frame: _on_actor_thread() and bears_interruption(frame),
                )
                assert cancel(ref)
                with pytest.raises(CancelledError):
                    get(ref)
                assert EndlessCall.interrupted.wait(20), how
            get(actor.ready.remote())
            until(lambda: not INTERRUPTED)  # the stream is cancelled as well
        del actor, other, ref


@actorrpc.remote
class MovesOn:
    """Runs user code until it is inspected, and then waits for another actor."""

    begun, looked_at, asked = threading.Event(), threading.Event(), threading.Event()
    ident = 0
    raised_in: ClassVar[list[str]] = []

    def waits(self, other: Any) -> None:
        MovesOn.ident = threading.get_ident()
        MovesOn.begun.set()
        MovesOn.looked_at.wait()
        try:
            get(other.never.remote())
        except Interrupted as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            MovesOn.raised_in.append(frame.f_globals["__name__"])
            raise

    def asks(self, other: Any) -> str:
        return str(get(other.answer.remote()))


@actorrpc.remote
class Other:
    async def never(self) -> None:
        MovesOn.asked.set()
        await asyncio.Event().wait()

    async def answer(self) -> str:
        return "here"


def test_a_thread_that_enters_the_library_while_it_is_inspected_is_not_interrupted_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be sending on a connection, which an interruption would close; its peer would then be considered dead."""

    def look(frame: FrameType | None) -> bool:
        found = bears_interruption(frame)
        if found and not MovesOn.looked_at.is_set():
            MovesOn.looked_at.set()
            assert MovesOn.asked.wait(20)
            until(lambda: _module_of(MovesOn.ident).startswith("actorrpc."))
        return found

    with InProcessCluster(3, clock="real"):
        actor, other = MovesOn.options(worker="worker1").remote(), Other.options(worker="worker2").remote()
        assert get(actor.asks.remote(other)) == "here"
        ref = actor.waits.remote(other)
        assert MovesOn.begun.wait(20)
        monkeypatch.setattr("actorrpc.actors.host.threads.bears_interruption", look)
        assert cancel(ref)
        with pytest.raises(CancelledError):
            get(ref)
        assert get(actor.asks.remote(other)) == "here"
        assert MovesOn.raised_in == [
            "actorrpc.actors.host.threads"
        ]  # raised by the thread itself where it is allowed
        del actor, other, ref


def _module_of(ident: int) -> str:
    return str(top_frames()[ident].f_globals["__name__"])


interruptible: list[bool] = []


def note_whether_interruptible() -> None:
    """Note whether this thread may be interrupted here."""
    interruptible.append(bears_interruption(inspect.currentframe()))


def test_an_import_and_the_start_of_a_thread_are_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Until it runs, the new thread has the id of the thread that starts it: an exception raised there would end the
    # new thread.
    class Looks(threading.Thread):
        def __hash__(self) -> int:  # Thread.start() calls it before it starts the thread
            note_whether_interruptible()
            return id(self)

    interruptible.clear()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_made_by_a_test.py").write_text(
        f"from {__name__} import note_whether_interruptible\nnote_whether_interruptible()\n"
    )
    importlib.import_module("half_made_by_a_test")
    note_whether_interruptible()
    assert interruptible == [False, True]
    thread = Looks()
    interruptible.clear()
    thread.start()
    thread.join()
    assert interruptible[0] is False


@pytest.mark.parametrize(
    ("library", "program"),
    [
        (ssl.SSLObject.read, "tls.read()"),
        (threading.Event.wait, "threading.Event().wait(0)"),
        (weakref.WeakValueDictionary.get, "weakref.WeakValueDictionary().get(1)"),
    ],
)
def test_the_standard_library_is_interrupted_only_in_code_of_users(
    library: FunctionType, program: str
) -> None:
    """For example, an interruption in ssl would end an encrypted connection to another worker."""
    found = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code is library.__code__ and event == "call":
            found.append(bears_interruption(frame))

    before = sys.getprofile()
    for module in ("actorrpc.package", "program"):
        tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="a")
        space = {"__name__": module, "tls": tls, "weakref": weakref, "threading": threading}
        exec(f"def run():\n    {program}", space)
        sys.setprofile(look)
        try:
            space["run"]()
        except ssl.SSLWantReadError:
            pass
        finally:
            sys.setprofile(before)
    assert found == [False, True]


class _InterruptAtStep:
    """Raises Interrupted at the n-th step at which ``asyncio.run`` may be interrupted before or after its coroutine."""

    def __init__(self, at: int) -> None:
        self.left = at

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code, looks = frame.f_code.co_code, True

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal looks
            if event == "opcode":
                looked, looks = looks, dis.opname[code[frame.f_lasti]].startswith(_LOOKS)
                codes = {each.f_code for each, _ in traceback.walk_stack(frame)}
                begins = asyncio.BaseEventLoop.run_forever.__code__ not in codes
                if (
                    looked
                    and asyncio.run.__code__ in codes
                    and (begins or asyncio.Runner.close.__code__ in codes)
                ):
                    self.left -= bears_interruption(frame)
                    if not self.left:
                        sys.settrace(None)
                        raise Interrupted
            elif event == "exception":
                looks = False
            return step

        return step


_LOOKS = (
    "CALL",
    "JUMP_BACKWARD",
    "RESUME",
)  # after these the interpreter raises asynchronous exceptions


@pytest.mark.slow
@pytest.mark.limit(300)
def test_interrupting_asyncio_run_as_it_starts_or_ends_prints_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = sys.gettrace()
    for at in itertools.count(1):
        cut = _InterruptAtStep(at)
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            sys.settrace(cut.trace)
            try:
                asyncio.run(asyncio.sleep(0))
            except Interrupted:
                pass
            finally:
                sys.settrace(before)
        assert not [each for each in caught_warnings if each.category is RuntimeWarning], at
        if cut.left > 0:
            break
    assert at > 20
    assert not caplog.records
