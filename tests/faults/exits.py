"""Random programs of three processes, to test how processes exit: ``python -m tests.faults.exits RUNS SEED FOLDER``.

Processes are forked from this process, which has imported everything and started no thread, and end as ordinary Python processes.
Prints, as JSON, each process that ended with another status than its program's, or that printed anything.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import actorrpc
from actorrpc import autograd, optim, rpc
from actorrpc.errors import RpcError

_WORKERS = 3
_LIMIT_S = 40.0
_kept: list[Any] = []  # objects that live until the interpreter ends
_over = threading.Event()


# -- functions that run on workers ----------------------------------------------------------------------------------------


def _finish() -> None:
    _over.set()


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _keep(thing: Any) -> None:
    _kept.append(thing)


class _Slow:
    """An object whose finaliser sleeps, and needs the interpreter."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __del__(self) -> None:
        time.sleep(self._seconds)


def _store_in_thread(seconds: float) -> None:
    """Store an object in torch's thread-local storage, as torch's inductor does in each thread that imports it."""
    torch._C._stash_obj_in_tls("of this thread", _Slow(seconds))


@actorrpc.remote
class _Serial:
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def items(self) -> Iterator[torch.Tensor]:
        for n in itertools.count():
            yield torch.full((100,), n)


@actorrpc.remote
class _Async:
    async def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


# -- actions of worker0 -----------------------------------------------------------------------------


def _calls(to: str, dice: random.Random) -> None:
    futures = [rpc.rpc_async(to, _double, (torch.ones(dice.choice((1, 50_000))),)) for _ in range(10)]
    _kept.append(futures)
    if dice.random() < 0.7:
        assert futures[0].wait()[0] == 2


def _references(to: str, dice: random.Random) -> None:
    reference = rpc.remote(to, torch.nn.Linear, (3, 3))
    reference.rpc_sync().forward(torch.ones(3))
    rpc.rpc_sync(f"worker{dice.randrange(_WORKERS)}", _keep, (reference,))
    if dice.random() < 0.5:
        _kept.append(reference)


def _gradients(to: str, dice: random.Random) -> None:
    module = rpc.remote(to, torch.nn.Linear, (3, 3))
    leaf = torch.ones(3, requires_grad=True)
    leaf.register_hook(lambda gradient: gradient * 2)
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, [module, rpc.RRef(leaf)], lr=0.1)
    for _ in range(2):
        with autograd.context() as context:
            loss = module.rpc_sync().forward(rpc.rpc_sync(to, _double, (leaf * 1,))).sum()
            autograd.backward(context, [loss], retain_graph=dice.random() < 0.2)
            if dice.random() < 0.7:
                optimizer.step(context)
    if dice.random() < 0.5:
        _kept.append((optimizer, loss, module))


def _thread_locals(to: str, dice: random.Random) -> None:
    seconds = dice.choice((0.01, 0.05, 0.2))
    for future in [rpc.rpc_async(to, _store_in_thread, (seconds,)) for _ in range(dice.randrange(1, 6))]:
        future.wait()


def _actors(to: str, dice: random.Random) -> None:
    cls = dice.choice((_Serial, _Async))
    actor = cls.options(worker=to).remote()
    reference = actor.double.remote(torch.ones(dice.choice((2, 100_000))))
    if dice.random() < 0.7:
        assert actorrpc.get(reference)[0] == 2
    if dice.random() < 0.7:
        _kept.append((actor, reference))


def _streams(to: str, dice: random.Random) -> None:
    actor = _Serial.options(worker=to).remote()
    items = actor.items.remote()
    for _ in range(dice.randrange(3)):
        actorrpc.get(next(items))
    if dice.random() < 0.5:
        _kept.append((actor, items))


_ACTIONS = (_calls, _references, _gradients, _thread_locals, _actors, _streams)


# -- a process -----------------------------------------------------------------------------------------------------


def _common_end(dice: random.Random) -> str:
    """Choose how all processes of a program end. They end in the same way: others would report a worker that exits silently."""
    return dice.choice(("shutdown", "shutdown", "forced shutdown", "return", "exit"))


def _process(rank: int, seed: int, store: Path) -> int:
    dice = random.Random(seed)
    end = _common_end(dice)
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=_WORKERS,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}"),
    )
    if rank:
        assert _over.wait(_LIMIT_S)
    else:
        for _ in range(dice.randrange(1, 6)):
            dice.choice(_ACTIONS)(f"worker{dice.randrange(_WORKERS)}", dice)
        for future in [rpc.rpc_async(f"worker{other}", _finish) for other in range(1, _WORKERS)]:
            with contextlib.suppress(RpcError):  # the worker may have ended before it could answer
                future.wait()
    if dice.random() < 0.3:
        gc.collect()
    if "shutdown" in end:
        rpc.shutdown(graceful=end == "shutdown")
    return 3 if end == "exit" else 0


def _fork(rank: int, seed: int, folder: Path) -> int | None:
    """Return the process id of the child; None in the child."""
    pid = os.fork()
    if pid:
        return pid
    said = os.open(folder / f"said{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.close(said)
    return None


def _outcome(pid: int, until: float) -> int | None:
    """Wait for a process; return its status, None if it had to be killed."""
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGABRT)
    os.waitpid(pid, 0)
    return None


def _run(seed: int, folder: Path) -> list[dict[str, Any]] | int:
    """Run one program; return its failures, or, in a child, the rank."""
    store = folder / "store"
    store.unlink(missing_ok=True)
    pids = []
    for rank in range(_WORKERS):
        pid = _fork(rank, seed, folder)
        if pid is None:
            return rank
        pids.append(pid)
    until = time.monotonic() + _LIMIT_S
    statuses = [_outcome(pid, until) for pid in pids]
    dice = random.Random(seed)
    wanted = 3 if _common_end(dice) == "exit" else 0
    wrong = []
    for rank, status in enumerate(statuses):
        said = (folder / f"said{rank}").read_text(errors="replace")
        if status != wanted or said:
            wrong.append(
                {"seed": seed, "rank": rank, "status": status, "wanted": wanted, "said": said[-4000:]}
            )
    return wrong


def main(runs: int, seed: int, folder: Path) -> None:
    """Run ``runs`` programs, with consecutive seeds."""
    wrong: list[dict[str, Any]] = []
    for number in range(seed, seed + runs):
        found = _run(number, folder)
        if isinstance(found, int):
            faulthandler.enable()
            sys.exit(_process(found, number, folder / "store"))
        wrong += found
    print(json.dumps(wrong))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
