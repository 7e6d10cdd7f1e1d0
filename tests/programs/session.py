"""Run programs one after the other on a cluster or a group, and check that they leave nothing behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import actorrpc
from actorrpc import rpc
from actorrpc.testing import leaks, processes
from tests import output, ranks
from tests.harness.proxy import Disturbance, FaultProxy
from tests.programs import library
from tests.programs.generator import Features
from tests.programs.model import Model, complaints
from tests.programs.program import Program

__all__ = ["ANNOUNCED", "MODES", "PRELUDE", "Options", "Session", "features_of"]

PRELUDE = """\
import asyncio
import time

import numpy
import torch

import actorrpc
from actorrpc import rpc
from tests.programs.library import *

"""
MODES = ("embedded", "group", "tcp", "cuts")
_CUTS = (
    Disturbance("cut", after=(500, 60_000), part=0.5),
    Disturbance("reset", after=(500, 60_000), part=0.5),
    Disturbance("half_close", after=(500, 80_000), part=0.5),
)
# Workers may hold these after the end of a program: leases of tasks hold RRefs, and the other workers of a group wait in calls.
_STAYS = re.compile("RRef|executed here")
# Log messages that programs cause by cancelling calls and ending actors.
ANNOUNCED = (
    r"on the actor's event loop",
    r"failed and its error was never retrieved",
    r"^Executing <(Task|Handle)",
)


@dataclass(frozen=True, slots=True)
class Options:
    """How programs run.

    Attributes:
        mode: "embedded" (cluster), "group" (``init_rpc``), "tcp" (a group over TCP), or "cuts" (TCP connections that are cut).
        bound: seconds that a call of a program may take.
        settle: seconds after which no object and no actor of a program may be left.
        collect: if not 0, the garbage collector runs after this many allocations, in all processes.
        switch_interval: if not 0, the interpreter's switch interval in seconds, in all processes.
    """

    mode: str = "embedded"
    bound: float = 30.0
    settle: float = 10.0
    collect: int = 0
    switch_interval: float = 0.0


def features_of(mode: str) -> Features:
    """Return the features of programs in a mode."""
    if mode == "embedded":
        return Features()
    return Features(own_processes=False, remote_workers=("worker1", "worker2"))


@dataclass
class Session:
    """A context manager that runs programs. Use it in the main thread only, and only one at a time in a process.

    Attributes:
        left: complaints about the session's end, such as processes or files that are left. ``__exit__`` fills the list.
    """

    options: Options = field(default_factory=Options)
    left: list[str] = field(default_factory=list)

    def __enter__(self) -> Session:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._environment())
            self._errors = stack.enter_context(_errors())
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            ranks.start_server()
            self._before = leaks.LeakSnapshot.capture(whole_session=False)
            stack.push(self._settle_all)
            self._workers = stack.enter_context(
                _cluster() if self.options.mode == "embedded" else _group(self.options, self.left)
            )
            self._offset = 0
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *given: Any) -> None:
        self._stack.__exit__(*given)

    def run(self, program: Program) -> list[str]:
        """Run a program; return complaints about all that the model does not allow and all that the program leaves behind."""
        before = leaks.Holdings.capture()
        observations = library.begin(self.options.bound)
        namespace: dict[str, Any] = {"workers": self._workers}
        exec(_prelude(), namespace)
        exec(compile(program.source, f"<program {program.seed}>", "exec"), namespace)
        actor_ids = {make.actor: namespace[make.actor].actor_id for make in program.actors}
        model = Model(program)
        found = [*observations.failures]
        found += [f"{name}: was not over within {observations.bound} s" for name in observations.late]
        found += self._answers(program, namespace, observations.bound)
        namespace.clear()
        found += self._settled(before, actor_ids, model)
        events, self._offset = library.read_journal(self._offset)
        events = [event for event in events if event.call in model.calls]
        found += complaints(model, observations.outcomes, events, actor_ids)
        return found + [f"printed: {text}" for text in self._errors.unasked()]

    def _answers(self, program: Program, namespace: dict[str, Any], bound: float) -> Iterator[str]:
        """Call each actor once more, and complain if a call of the program still occupies the actor."""
        refs = {
            make.actor: namespace[make.actor].value.remote(f"{program.seed}_{make.actor}")
            for make in program.actors
        }
        for name, ref in refs.items():
            try:
                actorrpc.get(ref, timeout=bound)
            except actorrpc.GetTimeoutError:
                yield f"{name} is occupied: it does not answer within {bound} s"
            except actorrpc.ActorError:
                pass  # the program has ended the actor
            except actorrpc.RpcError as error:
                yield f"{name} does not answer: {type(error).__name__}: {error}"

    def _settled(self, before: leaks.Holdings, actor_ids: dict[str, int], model: Model) -> Iterator[str]:
        """Wait until no object and no actor of the program is left; complain if some are left after ``settle`` seconds."""
        began = time.monotonic()
        ids = set(actor_ids.values())
        collect_at = began + 0.05
        while True:
            held = [each for each in leaks.Holdings.capture().remaining(before) if not _STAYS.search(each)]
            alive = [row for row in actorrpc.list_actors() if row.actor_id in ids and row.state != "DEAD"]
            if not held and not alive:
                return
            now = time.monotonic()
            if now >= began + self.options.settle:
                break
            if now >= collect_at:  # exceptions that methods caught are in reference cycles, with handles
                collect_at = now + 0.5
                gc.collect()
                for worker in actorrpc.workers():
                    with contextlib.suppress(actorrpc.PeerDiedError):
                        rpc.rpc_sync(worker.name, gc.collect)
            time.sleep(0.002)
        yield from (f"left behind: {each}" for each in held)
        yield from (f"left behind: actor {row}" for row in alive)

    def _settle_all(self, *_: Any) -> None:
        left = leaks.settle(self._before)
        if left:
            processes.kill(left.processes)
            self.left.append(f"left behind:\n{left}")
        self.left += [f"printed: {text}" for text in self._errors.unasked()]

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="programs-") as directory:
            journal = Path(directory, "journal")
            journal.touch()
            variables = {library.JOURNAL: str(journal)}
            interval, collect = sys.getswitchinterval(), gc.get_threshold()
            if self.options.collect:
                variables[library.COLLECT] = str(self.options.collect)
                gc.set_threshold(self.options.collect, 2, 2)
            if self.options.switch_interval:
                variables["ACTORRPC_SWITCH_INTERVAL"] = str(self.options.switch_interval)
                sys.setswitchinterval(self.options.switch_interval)
            os.environ.update(variables)
            try:
                yield
            finally:
                for name in variables:
                    del os.environ[name]
                sys.setswitchinterval(interval)
                gc.set_threshold(*collect)


@functools.cache
def _prelude() -> Any:
    return compile(PRELUDE, "<prelude>", "exec")


# -- clusters and groups --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _cluster() -> Iterator[list[str]]:
    with actorrpc.init():
        yield actorrpc.scale(2)


def _join(rank: int, store: str, mode: str, stack: contextlib.ExitStack) -> None:
    given: dict[str, Any] = {}
    if mode == "tcp":
        given = {"transport": "tcp"}
    elif mode == "cuts":
        given = stack.enter_context(FaultProxy(disturbances=_CUTS, seed=rank)).options
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=3,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}/store", **given),
    )


def _serve(rank: int, _: int, store: str, mode: str) -> None:
    with contextlib.ExitStack() as stack:
        _join(rank + 1, store, mode, stack)
        rpc.shutdown()


@contextlib.contextmanager
def _group(options: Options, left: list[str]) -> Iterator[list[str]]:
    """Join a group of three as worker 0. A thread starts the two other workers, which serve calls until the end of the block.

    If these workers fail or leave something behind, their error is added to ``left``.
    """

    def others(store: str) -> None:
        try:
            ranks.run_group(_serve, 2, store, options.mode, timeout=3_600, leak_wait=10)
        except ranks.GroupError as error:
            left.append(str(error))

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="programs-"))
        thread = threading.Thread(target=others, args=(store,), name="others")
        thread.start()
        stack.callback(thread.join)
        _join(0, store, options.mode, stack)
        try:
            yield ["worker1", "worker2"]
        except BaseException:
            rpc.shutdown(graceful=False)
            raise
        rpc.shutdown()


# -- output -----------------------------------------------------------------------------------------------------


class _Errors:
    """Reads the standard error of all processes of a session."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def unasked(self) -> list[str]:
        """Return the entries that were written since the last call and do not match ``ANNOUNCED``."""
        sys.stderr.flush()
        return output.unasked(self._file.read().decode(errors="replace"), ANNOUNCED)


@contextlib.contextmanager
def _errors() -> Iterator[_Errors]:
    with tempfile.NamedTemporaryFile(prefix="programs-") as sink, open(sink.name, "rb") as source:
        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(sink.fileno(), 2)
        try:
            yield _Errors(source)
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
