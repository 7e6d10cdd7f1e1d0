"""Random programs between real workers: their gradients equal those of local autograd.

Every worker of a group drives several programs at a time, each in a separate context. Worker n of a program is the worker n
places after the driving one. Values stay on their worker; the seed chooses the public function that sends a tensor.
"""

from __future__ import annotations

import os
import random
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import actorrpc
import actorrpc.autograd as dist_autograd
from actorrpc import rpc
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.autograd.api import contexts, participant
from actorrpc.autograd.messages import Message
from actorrpc.wire.identity import WorkerKey
from tests.actors.e2e.kit import until
from tests.agent.together import in_threads
from tests.autograd import programs
from tests.ranks import rpc_group

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"
THREADS = 2  # threads of each worker that drive programs
TIMES = 85 if NIGHTLY else 1

Gradients = dict[int, Tensor]


# -- the part of one worker -------------------------------------------------------------------------------


class Part:
    """The values, leaves and kept messages of one worker in one program."""

    def __init__(self, first: int, workers: int) -> None:
        self.first = first  # the rank of the program's worker 0
        self.workers = workers
        self.values: dict[int, Tensor] = {}
        self.leaves: dict[int, Tensor] = {}
        self.kept: dict[int, Snapshot] = {}

    def name(self, worker: int) -> str:
        return f"worker{(self.first + worker) % self.workers}"

    def arrive(self, names: tuple[int, ...], tensors: list[Tensor]) -> None:
        # Sent tensors keep their strides, but the program was generated for contiguous tensors.
        for name, each in zip(names, tensors, strict=True):
            self.values[name] = each.contiguous()


_parts: dict[str, Part] = {}
_finished = threading.Event()


def _begin(program: str, first: int, workers: int, leaves: list[programs.Leaf]) -> None:
    part = _parts[program] = Part(first, workers)
    for leaf in leaves:
        part.values[leaf.name] = part.leaves[leaf.name] = programs.make_leaf(leaf)


def _end(program: str) -> None:
    del _parts[program]


def _get(program: str, names: tuple[int, ...]) -> list[Tensor]:
    values = _parts[program].values
    return [values[name] for name in names]


@rpc.functions.async_execution
def _get_later(program: str, names: tuple[int, ...]) -> rpc.Future[list[Tensor]]:
    future: rpc.Future[list[Tensor]] = rpc.Future()
    future.set_result(_get(program, names))
    return future


def _put(program: str, names: tuple[int, ...], tensors: list[Tensor]) -> None:
    _parts[program].arrive(names, tensors)


def _put_reference(program: str, names: tuple[int, ...], tensors: actorrpc.ObjectRef[list[Tensor]]) -> None:
    _parts[program].arrive(names, actorrpc.get(tensors))


def _kept(program: str, message: int) -> Snapshot:
    return _parts[program].kept[message]


def _gradients(program: str, context: int, in_grad: bool) -> Gradients:
    leaves = _parts[program].leaves
    found = {} if in_grad else dist_autograd.get_gradients(context)
    given = {name: leaf.grad if in_grad else found.get(leaf) for name, leaf in leaves.items()}
    return {name: each.clone() for name, each in given.items() if each is not None}


#: Ways in which a worker sends tensors to another worker in a call.
PUSH: tuple[Callable[..., Any], ...] = (
    lambda to, *args: rpc.rpc_sync(to, _put, args),
    lambda to, *args: rpc.rpc_async(to, _put, args).wait(),
    lambda to, *args: rpc.remote(to, _put, args).to_here(),
    lambda to, program, names, tensors: rpc.rpc_sync(
        to, _put_reference, (program, names, actorrpc.put(tensors))
    ),
)
#: Ways in which a worker fetches tensors from another worker by a call.
PULL: tuple[Callable[..., list[Tensor]], ...] = (
    lambda worker, *args: rpc.rpc_sync(worker, _get, args),
    lambda worker, *args: rpc.rpc_async(worker, _get, args).wait(),
    lambda worker, *args: rpc.rpc_sync(worker, _get_later, args),
    lambda worker, *args: rpc.remote(worker, _get, args).to_here(),
)
_BY_REFERENCE = 3  # in PULL; the owner of a value would get the value itself, not a copy


def _run_step(program: str, step: programs.Step, way: int) -> None:
    """Run a step, on the worker that starts it."""
    part = _parts[program]
    if isinstance(step, (programs.Compute, programs.InPlace)):
        programs.perform(step, part.values)
    elif isinstance(step, programs.Keep):
        part.kept[step.message] = Snapshot.of(_get(program, step.values))
    elif isinstance(step, programs.Open):
        if step.message not in part.kept:
            part.kept[step.message] = rpc.rpc_sync(part.name(way), _kept, (program, step.message))
        part.arrive(step.outs, part.kept[step.message].open())
    elif way < len(PUSH):
        PUSH[way](part.name(step.to), program, step.outs, _get(program, step.values))
    else:
        part.arrive(step.outs, PULL[way - len(PUSH)](part.name(step.worker), program, step.values))


# -- the driver --------------------------------------------------------------------------------------------------


class Driver:
    """Executes one program from its worker 0, which is this worker, in the current context."""

    def __init__(self, id: str, program: programs.Program, first: int, workers: int) -> None:
        self.id = id
        self.program = program
        self.rng = random.Random(program.seed)
        self.keepers = {
            step.message: step.worker for step in program.steps if isinstance(step, programs.Keep)
        }
        self.me = Part(first, workers)
        for worker in range(program.workers):
            leaves = [leaf for leaf in program.leaves if leaf.worker == worker]
            self.at(worker, _begin, first, workers, leaves)

    def at(self, worker: int, function: Callable[..., Any], *args: Any) -> Any:
        args = (self.id, *args)
        return rpc.rpc_sync(self.me.name(worker), function, args) if worker else function(*args)

    def forward(self) -> list[Tensor]:
        for step in self.program.steps:
            worker, way = step.worker, 0
            if isinstance(step, programs.Send):
                way = self.rng.randrange(len(PUSH) + len(PULL))
                if step.worker == step.to and way == len(PUSH) + _BY_REFERENCE:
                    way = 0
                if way >= len(PUSH):
                    worker = step.to
            elif isinstance(step, programs.Open):
                way = self.keepers[step.message]
            self.at(worker, _run_step, step, way)
        values = _parts[self.id].values
        return [programs.make_root(names, values) for names in self.program.roots]

    def gradients(self, context: int, in_grad: bool = False) -> Gradients:
        found: Gradients = {}
        for worker in range(self.program.workers):
            found |= self.at(worker, _gradients, context, in_grad)
        return found

    def end(self) -> None:
        for worker in range(self.program.workers):
            self.at(worker, _end)


def _run(seed: int, kind: str, rank: int, workers: int) -> Counter[str]:
    """Run the program of a seed; return counts of its leaves and steps."""
    program = programs.generate(seed, workers=2 + seed % (workers - 1))
    want = programs.expected(program)
    driver = Driver(f"{seed} of {rank}", program, rank, workers)
    with dist_autograd.context() as context:
        roots = driver.forward()
        if kind == "grad":
            dist_autograd.backward(context, roots, accumulate="grad")
            assert driver.gradients(context) == {}
        else:
            dist_autograd.backward(context, roots, retain_graph=kind == "twice")
        found = driver.gradients(context, kind == "grad")
        programs.compare(program, found, want)
        if kind == "twice":
            dist_autograd.backward(context, roots)
            again = driver.gradients(context)
            assert again.keys() == found.keys()
            for name, each in found.items():
                assert torch.equal((each + each).to_dense(), again[name].to_dense()), f"leaf {name}"
    driver.end()
    sends = sum(isinstance(step, (programs.Send, programs.Open)) for step in program.steps)
    return Counter({kind: 1, "leaves": len(found), "sends": sends, "opened": len(driver.keepers)})


KINDS = ("once", "twice", "grad")


def _is_finished() -> bool:
    return _finished.is_set()


def _programs(rank: int, workers: int, seeds: range) -> Counter[str]:
    done: Counter[str] = Counter()
    wrong: list[str] = []
    handled: list[str] = []
    handle = participant().handle

    def counted(sender: WorkerKey, message: Message) -> Any:
        handled.append(type(message).__name__)
        return handle(sender, message)

    participant().handle = counted  # type: ignore[method-assign]

    def drive(mine: range) -> None:
        for seed in mine:
            kind = KINDS[seed // 2 % len(KINDS)]
            try:
                done.update(_run(seed, kind, rank, workers))
            except BaseException as error:
                error.add_note(f"program {seed} ({kind}) of {workers} workers, driven by worker{rank}")
                raise

    def guarded(mine: range) -> None:
        try:
            drive(mine)
        except BaseException as error:
            wrong.append("".join(traceback.format_exception(error)))

    shares = [seeds[rank * THREADS + n :: workers * THREADS] for n in range(THREADS)]
    in_threads(guarded, [(each,) for each in shares])
    assert not wrong, "\n".join(wrong)
    # When all workers have finished, nothing is left.
    _finished.set()
    for other in range(workers):
        until(lambda other=other: rpc.rpc_sync(f"worker{other}", _is_finished))
    until(lambda: len(contexts().live) == 0)
    assert not _parts
    return done + Counter(handled)


@pytest.mark.slow
@pytest.mark.limit(3600 if NIGHTLY else 90)
@pytest.mark.parametrize(
    ("workers", "count", "transport"), [(2, 24, "auto"), (3, 36, "tcp"), (5, 60, "auto")]
)
def test_random_programs_between_real_workers_have_the_gradients_of_local_autograd(
    workers: int, count: int, transport: str
) -> None:
    count *= TIMES
    seeds = range(10_000 * workers, 10_000 * workers + count)
    environment = {"ACTORRPC_TRANSPORT": transport}
    timeout = 3500.0 if NIGHTLY else 80.0
    done = sum(rpc_group(_programs, workers, seeds, env=environment, timeout=timeout), Counter())
    assert sum(done[kind] for kind in KINDS) == count
    # the programs must have done something, or they prove nothing
    assert min(done[kind] for kind in KINDS) > 0
    assert done["leaves"] > 1.5 * count
    assert done["sends"] > 2 * count
    assert done["opened"] > 0
    assert done["Run"] > count / 2
    assert done["Gradient"] > count / 2
    assert done["Discover"] > 0
