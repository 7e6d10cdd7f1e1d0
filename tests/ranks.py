"""Run a function on several ranks, each a real process.

Ranks are forked from a server that has imported torch and actorrpc and started no thread, so a rank starts in some tens of
milliseconds. The test receives the result or error of each rank, its output and, if it does not end in time, its stacks. Ranks
have the interpreter settings and the environment of the test.

    def add(rank, world_size, a, b):                  # at module level: the ranks import it
        return rpc.rpc_sync("worker0", operator.add, (a, b))

    def test_add():
        assert rpc_group(add, 2, 3, 4) == [7, 7]
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import torch

from actorrpc.testing import leaks, processes
from actorrpc.wire import keys
from tests.ports import free_port

__all__ = [
    "Died",
    "GroupError",
    "remember_environment",
    "rpc_group",
    "run_group",
    "show_errors",
    "start_server",
    "stop_server",
    "unused_path",
]

_ROOT = str(Path(__file__).resolve().parent.parent)
# Seconds that other ranks may still run after a rank has failed, and that a rank may take to end after
# its function has returned.
_GRACE = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_OUTPUT_TAIL = 8_000
_environment: dict[str, str] = {}  # environment of the session before the first test


@dataclass(frozen=True, slots=True)
class Died:
    """Result of a rank that died and was allowed to."""

    exitcode: int


class GroupError(AssertionError):
    """At least one rank failed.

    Attributes:
        failures: by rank, a traceback or a sentence, with the rank's output.
    """

    def __init__(self, failures: Mapping[int, str]) -> None:
        super().__init__("\n\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        self.failures = dict(failures)


@dataclass(slots=True)
class _Rank:
    process: ForkServerProcess
    results: Connection
    output: Path
    errors: Path
    answer: tuple[bool, Any] | None = None  # (True, result) or (False, traceback)
    over: bool = False
    exitcode: int | None = None
    must_end_by: float = float("inf")
    shown: int = 0  # bytes of its standard error that were shown to a test


_running: list[_Rank] = []  # ranks of all groups that run


# -- the server ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _for_children() -> Iterator[None]:
    """Let the server and the ranks import this repository and keep them from importing pytest's script.

    The server has the environment of the session, not of the test that starts it, because processes of other tests are
    forked from it as well. Ranks receive the environment of their test.
    """
    main, before = sys.modules["__main__"], dict(os.environ)
    sys.modules["__main__"] = ModuleType("__main__")
    wanted = _environment or before
    _replace_environment(
        wanted | {"PYTHONPATH": os.pathsep.join(filter(None, [_ROOT, wanted.get("PYTHONPATH")]))}
    )
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        _replace_environment(before)


def _replace_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def remember_environment() -> None:
    """Save the environment of the session for the server; without this call, the server has that of ``start_server``'s caller."""
    _environment.clear()
    _environment.update(os.environ)


def start_server() -> None:
    """Start the server from which ranks are forked, unless it runs; it imports in the background."""
    with _for_children():
        multiprocessing.set_forkserver_preload(["tests.preload"])
        forkserver.ensure_running()


def unused_path(name: str) -> str:
    """Return the path of a file that does not exist yet, for example for a group's store."""
    return tempfile.mktemp(prefix=f"{name}-", dir=processes.scratch())


def stop_server() -> None:
    """Stop the server and its resource tracker, at the end of the session."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


# -- in a rank -----------------------------------------------------------------------------------


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    results: Connection,
    output: str,
    errors: str,
    environment: Mapping[str, str],
    leak_wait: float | None,
) -> None:
    # The server ends with the test process, and this process with the server.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)  # py-spy may read its stacks
    for descriptor, path in (1, output), (2, errors):
        with open(path, "ab", buffering=0) as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    # The test's environment now, not at the start of the server.
    _replace_environment(environment)
    if leak_wait == leaks.WAIT and torch.cuda.device_count():
        leak_wait = None  # the first backward pass opens all GPUs, and the process keeps threads and descriptors for them
    before = leaks.LeakSnapshot.capture(whole_session=False)
    try:
        answer = (True, fn(rank, world_size, *args))
        found = None if leak_wait is None else leaks.settle(before, leak_wait)
        if found:
            processes.kill(found.processes)
            answer = (False, f"left behind when its function returned:\n{found}")
    except BaseException as error:
        answer = (False, _explain(error))
    try:
        message = pickle.dumps(answer)
    except Exception as error:
        message = pickle.dumps((False, f"its result cannot be pickled: {error!r}"))
    sys.stdout.flush()
    results.send_bytes(message)
    results.close()


def _explain(error: BaseException) -> str:
    """Format a traceback, with the local variables of the frame in which a bare `assert` failed.

    In ranks, pytest does not rewrite assertions.
    """
    text = "".join(traceback.format_exception(error))
    tb = error.__traceback__
    if not isinstance(error, AssertionError) or error.args or tb is None:
        return text
    while tb.tb_next is not None:
        tb = tb.tb_next
    for name, value in list(tb.tb_frame.f_locals.items()):
        try:
            shown = repr(value)
        except Exception as failed:
            shown = f"<no repr: {failed!r}>"
        text += f"    {name} = {shown[:300]}\n"
    return text


def rpc_main(
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    init_method: str,
    options: Mapping[str, Any],
) -> Any:
    """Run ``fn`` in a rank of an ``init_rpc`` group."""
    rpc: Any = importlib.import_module("actorrpc.rpc")
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=init_method, **options),
    )
    try:
        result = fn(rank, world_size, *args)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to show
            rpc.shutdown(graceful=False)
        raise
    rpc.shutdown()
    return result


# -- in the test ---------------------------------------------------------------------------------


def run_group(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 50.0,
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
    leak_wait: float | None = leaks.WAIT,
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in `world_size` processes; return their results, by rank.

    Args:
        fn: a function at module level of a test module.
        timeout: seconds for the whole group; the default is below a test's default limit, so this report comes first.
        env: variables to add to the test's environment in the ranks.
        may_die: ranks that may end without a result (`Died` takes its place), as in tests that kill them.
        leak_wait: seconds after which a rank whose `fn` has returned must have no more threads, processes and
            descriptors than before; None: no check, which is the default on machines with GPUs.

    Raises:
        GroupError: a rank raised, died, or did not end in time; describes every such rank.
    """
    start_server()
    context = multiprocessing.get_context("forkserver")
    directory = Path(tempfile.mkdtemp(prefix="group-", dir=processes.scratch()))
    environment = {**os.environ, **(env or {})}
    ranks: list[_Rank] = []
    failures: dict[int, str] = {}
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            output, errors = directory / f"rank{rank}.out", directory / f"rank{rank}.err"
            output.touch()
            errors.touch()
            process = context.Process(
                target=_rank_main,
                args=(fn, rank, world_size, args, sender, str(output), str(errors), environment, leak_wait),
                name=f"rank{rank}",
            )
            try:
                with _for_children():
                    process.start()
            except BaseException:
                receiver.close()
                raise
            finally:
                sender.close()
            ranks.append(_Rank(process, receiver, output, errors))
            _running.append(ranks[-1])
        failures = _collect(ranks, time.monotonic() + timeout, may_die)
    finally:
        _end(ranks)
        for state in ranks:
            _running.remove(state)
        printed = [
            {"output": state.output.read_text(errors="replace").rstrip(), "errors": _errors(state)}
            for state in ranks
        ]
        shutil.rmtree(directory, ignore_errors=True)
        for rank, texts in enumerate(printed):
            if rank not in failures:
                # On the same stream of the test: unannounced entries on standard error fail it.
                for (what, text), stream in zip(texts.items(), (sys.stdout, sys.stderr), strict=True):
                    _show(what, rank, text, stream)
    for rank in failures:
        for what, text in printed[rank].items():
            if text:
                failures[rank] += f"\n{what}:\n{text[-_OUTPUT_TAIL:]}"
    if failures:
        raise GroupError(failures)
    return [_result(state) for state in ranks]


def rpc_group(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    init: str = "file",
    timeout: float = 50.0,
    options: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
    leak_wait: float | None = leaks.WAIT,
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` between `init_rpc` and `shutdown`; workers are `worker0`, ...

    Args:
        init: the store through which the workers meet: "file", "tcp" or "env".
        options: keywords for the back-end's options, such as `rpc_timeout`.

    The other arguments and the errors are those of `run_group`.
    """
    environment = dict(env or {})
    store = tempfile.mkdtemp(prefix="store-", dir=processes.scratch())
    try:
        if init == "file":
            method = f"file://{store}/store"
        elif init == "tcp":
            method = f"tcp://127.0.0.1:{free_port()}"
        elif init == "env":
            method = "env://"
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        else:
            raise ValueError(f"init must be 'file', 'tcp' or 'env', not {init!r}")
        return run_group(
            rpc_main,
            world_size,
            fn,
            args,
            method,
            dict(options or {}),
            timeout=timeout,
            env=environment,
            may_die=may_die,
            leak_wait=leak_wait,
        )
    finally:
        shutil.rmtree(store, ignore_errors=True)
        if may_die:
            keys.sweep()  # remove the sockets of killed ranks now, not when the next worker starts


def show_errors() -> None:
    """Print what running ranks have written to standard error since the last call, so that it counts for the current test."""
    for rank, state in enumerate(list(_running)):
        _show("errors", rank, _errors(state), sys.stderr)


def _errors(state: _Rank) -> str:
    """Return what a rank has written to standard error since the last call."""
    new = state.errors.read_bytes()[state.shown :]
    state.shown += len(new)
    return new.decode(errors="replace").rstrip()


def _show(what: str, rank: int, text: str, stream: TextIO) -> None:
    if text:
        print(f"--- {what} of rank {rank} ---\n{text}\n---", file=stream)


def _collect(ranks: list[_Rank], deadline: float, may_die: Collection[int]) -> dict[int, str]:
    """Wait for all ranks; return descriptions of their failures, by rank."""
    failures: dict[int, str] = {}
    while pending := [number for number, state in enumerate(ranks) if not state.over]:
        now = time.monotonic()
        late = [number for number in pending if now >= min(deadline, ranks[number].must_end_by)]
        if late:
            for number in late:
                failures.setdefault(number, _why_late(ranks[number]))
            _end([ranks[number] for number in late])
            continue
        sources: dict[Any, int] = {}
        for number in pending:
            sources[ranks[number].process.sentinel] = number
            if not ranks[number].results.closed:
                sources[ranks[number].results] = number
        wake = min([deadline, *(ranks[number].must_end_by for number in pending)])
        ready = connection.wait(list(sources), timeout=max(0.0, wake - now))
        for number in {sources[source] for source in ready}:
            _advance(ranks[number])
            failure = _failure(ranks[number], number in may_die)
            if failure is not None and number not in failures:
                failures[number] = failure
                for other in ranks:  # they may wait for the rank that failed
                    other.must_end_by = min(other.must_end_by, time.monotonic() + _GRACE)
    return failures


def _advance(state: _Rank) -> None:
    """Receive the rank's result, the end of its pipe, and the end of its process, without waiting."""
    ended = bool(
        connection.wait([state.process.sentinel], timeout=0)
    )  # checked before the pipe: if the process has ended, the pipe is complete
    if not state.results.closed and state.results.poll():
        try:
            message = state.results.recv_bytes()
        except EOFError:
            pass
        else:
            state.answer = pickle.loads(message)
        state.results.close()
        state.must_end_by = min(state.must_end_by, time.monotonic() + _GRACE)
    if ended:
        _release(state)


def _release(state: _Rank) -> None:
    """Release the resources of an ended process."""
    state.process.join()
    state.over, state.exitcode = True, state.process.exitcode
    state.process.close()
    state.results.close()


def _failure(state: _Rank, may_die: bool) -> str | None:
    if state.answer is not None:
        return None if state.answer[0] else str(state.answer[1])
    if not state.over or may_die:
        return None
    code = state.exitcode
    cause = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return f"ended without a result ({cause})"


def _why_late(state: _Rank) -> str:
    what = "did not end in time" if state.answer is None else "did not end after its function returned"
    pid = state.process.pid
    found = {process for process in processes.of_session() if process.pid == pid}
    return f"{what}\n{processes.dump_stacks(found)}"


def _end(ranks: list[_Rank]) -> None:
    """Kill the ranks that still run, and release the resources of all of them."""
    running = [state for state in ranks if not state.over]
    for state in running:
        state.process.kill()
    for state in running:
        _release(state)


def _result(state: _Rank) -> Any:
    if state.answer is not None:
        return state.answer[1]
    return Died(state.exitcode if state.exitcode is not None else 0)
