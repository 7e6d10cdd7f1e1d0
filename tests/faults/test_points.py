"""Faults at each named kill point: worker1 is killed, stopped or delayed, or its messages are lost.

worker0 and worker2 use worker1 in one way (a call, an RRef, a backward pass, an actor) until the point is reached. Each of their
waits must end with a value or an error of this package, and afterwards worker0 and worker2 call each other ten times. A failed
backward pass must leave the gradients unchanged. The cases are derived from all points and message types, so new ones are
included automatically.
"""

from __future__ import annotations

import operator
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import autograd, rpc
from actorrpc.errors import RpcError
from actorrpc.testing import drop
from actorrpc.testing.message_types import ANSWER, CONTROL, MESSAGES
from actorrpc.wire import keys
from tests.faults.figures import NIGHTLY, note
from tests.faults.hosts import Signals
from tests.harness.every_message import Keeper
from tests.harness.kill_points import POINTS, KillPointError, kill_at
from tests.ranks import run_group

# Prefixes of the points that each use of worker1 reaches.
USES = {
    "call": ("call", ANSWER),
    "rref": ("remote", "to_here", ANSWER, "rref_"),
    "backward": ("call", ANSWER, "autograd_"),
    "actor": ("actor_call", "actor_control", "actor.", ANSWER),
    "end": ("join.", "shutdown.", CONTROL),
}
_TIMEOUT = 3.0  # of the calls; calls that are lost or held by a stopped worker end by it
_HEARTBEAT = 0.2
_SLEEP = 0.3

Case = tuple[str, str, str]  # use of worker1, fault, kill point or message type


# At this point there is no group yet: the others would wait for worker1 until the time-out for joining.
_WITHOUT_A_GROUP = "join.listening"


def _cases() -> list[Case]:
    """Return all cases: every point with each action, and every type of message that can be lost."""
    found: list[Case] = []
    for use, parts in USES.items():
        for point in POINTS:
            if point.startswith(parts):
                actions = ("sleep",) if point == _WITHOUT_A_GROUP else ("kill", "stop", "sleep", "raise")
                found += [(use, action, point) for action in actions]
        for type in MESSAGES:
            if type.startswith(parts) and type != CONTROL:
                found.append((use, "drop", type))
    return found


def test_every_kill_point_has_a_case() -> None:
    tried = {where for _, action, where in _cases() if action == "sleep"}
    assert tried == set(POINTS)


_held: list[Any] = []


def _square(t: torch.Tensor) -> torch.Tensor:
    return t * t


def _keep(rref: Any) -> None:
    _held.append(rref)


def _forward(rref: Any, to: str) -> None:
    rpc.rpc_sync(to, _keep, (rref,), timeout=_TIMEOUT)


def _forget() -> None:
    _held.clear()


def _ends(wait: Callable[[], Any], outcomes: list[str]) -> Any:
    """Call ``wait`` and record its outcome: a value or an error of this package."""
    try:
        value = wait()
    except (RpcError, KillPointError) as error:
        outcomes.append(type(error).__name__)
        return None
    outcomes.append("value")
    return value


def _call(outcomes: list[str]) -> None:
    for _ in range(3):
        _ends(lambda: rpc.rpc_sync("worker1", operator.add, (1, 2), timeout=_TIMEOUT), outcomes)
        _ends(lambda: rpc.rpc_async("worker1", operator.add, (1, 2), timeout=_TIMEOUT).wait(), outcomes)


def _rref(outcomes: list[str]) -> None:
    for _ in range(2):
        rref = _ends(lambda: rpc.remote("worker1", operator.add, (1, 2), timeout=_TIMEOUT), outcomes)
        if rref is None:
            continue
        _ends(lambda rref=rref: rref.to_here(timeout=_TIMEOUT), outcomes)
        _ends(lambda rref=rref: rpc.rpc_sync("worker2", _keep, (rref,), timeout=_TIMEOUT), outcomes)
        _ends(
            lambda rref=rref: rpc.rpc_sync("worker1", _forward, (rref, "worker2"), timeout=_TIMEOUT), outcomes
        )
        mine = rpc.RRef(7)
        _ends(
            lambda mine=mine: rpc.rpc_sync("worker1", _forward, (mine, "worker2"), timeout=_TIMEOUT), outcomes
        )
        for name in ("worker1", "worker2"):
            _ends(lambda name=name: rpc.rpc_sync(name, _forget, timeout=_TIMEOUT), outcomes)
        del rref, mine


def _backward(outcomes: list[str]) -> None:
    leaf = torch.ones(3, requires_grad=True)
    for mode in ("smart", "fast"):
        with autograd.context() as context:
            _backward_in(context, leaf, mode, outcomes)


def _backward_in(context: int, leaf: torch.Tensor, mode: Any, outcomes: list[str]) -> None:
    autograd.backward(context, [(leaf * 2).sum()])
    before = autograd.get_gradients(context)[leaf].clone()

    def forward() -> torch.Tensor:
        squared = rpc.rpc_sync("worker1", _square, (leaf,), timeout=_TIMEOUT)
        squared = rpc.rpc_sync("worker2", _square, (squared,), timeout=_TIMEOUT)
        squared = rpc.rpc_sync("worker1", _square, (squared,), timeout=_TIMEOUT)
        return squared.sum()

    loss = _ends(forward, outcomes)
    if loss is None:
        return
    _ends(lambda: autograd.backward(context, [loss], mode=mode, timeout=_TIMEOUT), outcomes)
    after = autograd.get_gradients(context)[leaf]
    if outcomes[-1] == "value":
        assert torch.equal(after, before + 8)
    else:
        assert torch.equal(after, before), "a failed pass has changed gradients"


def _actor(outcomes: list[str]) -> None:
    handle = _ends(lambda: actorrpc.remote(Keeper).options(worker="worker1").remote(), outcomes)
    if handle is None:
        return
    for _ in range(3):
        _ends(lambda: actorrpc.get(handle.add.remote(2), timeout=_TIMEOUT), outcomes)
    _ends(lambda: actorrpc.kill(handle), outcomes)


def _end(outcomes: list[str]) -> None:
    _ends(lambda: rpc.rpc_sync("worker1", operator.add, (1, 2), timeout=_TIMEOUT), outcomes)


_USE = {"call": _call, "rref": _rref, "backward": _backward, "actor": _actor, "end": _end}


def _member(rank: int, world_size: int, directory: str, cases: Sequence[Case]) -> Any:
    cell, role = divmod(rank, 3)
    use, action, where = cases[cell]
    place = f"{directory}/{cell}"
    signals = Signals(Path(place))
    options = rpc.RpcBackendOptions(
        init_method=f"file://{place}/store", heartbeat=_HEARTBEAT, rpc_timeout=_TIMEOUT
    )
    fault: Any = None
    if role == 1:
        signals_pid = Path(place) / "pid"
        signals_pid.write_text(str(os.getpid()))
        if action == "drop":
            fault = drop(where, total=2)
        else:
            fault = kill_at(where, action=action, seconds=_SLEEP)
        fault.start()
    try:
        rpc.init_rpc(f"worker{role}", rank=role, world_size=3, rpc_backend_options=options)
    except (RpcError, KillPointError) as error:
        return [type(error).__name__]
    if role:
        # Serve calls until worker0 has finished.
        signals.wait("over")
        outcomes: list[str] = []
        _ends(lambda: rpc.shutdown(timeout=20.0), outcomes)
        signals.say(f"{role} has left")
        if fault is not None:
            fault.stop()
        return outcomes
    outcomes = []
    _USE[use](outcomes)
    # The remaining workers still work; lost calls have timed out.
    for _ in range(10):
        assert rpc.rpc_sync("worker2", operator.add, (1, 2), timeout=20.0) == 3
        assert rpc.rpc_sync("worker2", rpc.rpc_sync, ("worker0", operator.add, (1, 2)), timeout=20.0) == 3
    signals.say("over")
    _ends(lambda: rpc.shutdown(timeout=20.0), outcomes)
    signals.wait("2 has left")
    pid = int((Path(place) / "pid").read_text())
    if _is_stopped(pid):
        os.kill(pid, signal.SIGKILL)
    return outcomes


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except OSError:
        return False


def _chosen() -> list[list[Case]]:
    every = _cases()
    if NIGHTLY:
        return [every[at : at + 4] for at in range(0, len(every), 4)]
    # Four random cases; all cases run nightly.
    dice = random.Random(5)
    pairs = (("call", "kill"), ("rref", "stop"), ("backward", "kill"), ("actor", "drop"))
    return [[dice.choice([case for case in every if case[:2] == pair]) for pair in pairs]]


@pytest.mark.limit(150)
@pytest.mark.parametrize("cases", _chosen(), ids=lambda cases: "; ".join(map(" ".join, cases)))
@pytest.mark.prints(
    r"the state of actor Keeper#\w+ could not be kept$",
    r"^actorrpc\.errors\.RpcTimeoutError: the call of an internal function of actorrpc on .*drop\('actor_control'",
    r"shutdown does not wait for 'worker1' any longer: worker 'worker1' .* cannot be reached",  # worker1 was stopped
)
def test_a_fault_at_a_kill_point_ends_all_waits_and_other_workers_keep_working(
    cases: list[Case], tmp_path: Path
) -> None:
    for number in range(len(cases)):
        (tmp_path / str(number)).mkdir()
    mortal = [3 * number + 1 for number, (_, action, _) in enumerate(cases) if action in ("kill", "stop")]
    found = run_group(_member, 3 * len(cases), str(tmp_path), cases, may_die=mortal, timeout=120)
    keys.sweep()
    for number, case in enumerate(cases):
        outcomes = found[3 * number]
        assert outcomes, case
        note("at a point: " + " ".join(case), {"ends": outcomes})
