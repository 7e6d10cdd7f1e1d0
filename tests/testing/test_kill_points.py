"""Kill points: each is reached, and the actions at a point."""

from __future__ import annotations

import operator
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import rpc, testing
from actorrpc.agent import hooks
from actorrpc.errors import PeerDiedError, RpcTimeoutError
from actorrpc.rpc import api
from actorrpc.testing import processes
from tests.actors.e2e.kit import until
from tests.harness.every_message import Keeper, everything
from tests.harness.kill_points import POINTS, KillPointError, kill_at
from tests.ranks import Died, rpc_group, run_group

_NEVER = 1 << 60


def test_a_kill_point_acts_only_at_the_nth_time_and_only_while_active() -> None:
    with kill_at("shutdown.*", nth=3, action="raise") as kill:
        hooks.reach("shutdown.called")
        hooks.reach("actor.made")
        hooks.reach("shutdown.closing")
        with pytest.raises(KillPointError, match=r"kill_at.*shutdown\.called"):
            hooks.reach("shutdown.called")
        hooks.reach("shutdown.called")
        assert kill.count == 4
    hooks.reach("shutdown.called")
    assert kill.count == 4


def _member(rank: int, world_size: int, store: str) -> dict[str, int]:
    kills = [kill_at(name, nth=_NEVER).start() for name in POINTS]
    options = rpc.TensorPipeRpcBackendOptions(init_method=store)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    everything(rank)
    rpc.shutdown()
    for kill in kills:
        kill.stop()
    return {name: kill.count for name, kill in zip(POINTS, kills, strict=True)}


def test_every_kill_point_is_reached() -> None:
    """Except the point of the restart of an actor, which the next test checks."""
    each = run_group(_member, 3, f"file://{tempfile.mkdtemp(dir=processes.scratch())}/store")
    missed = {name for name in POINTS if not any(counts[name] for counts in each)}
    assert missed == {"actor.restoring"}
    for counts in each:
        for name in ("join.listening", "join.met"):
            assert counts[name] == 1
        assert counts["shutdown.called"] == counts["shutdown.together"] == counts["shutdown.closed"] == 1
    for name in POINTS:
        before, _, stage = name.partition(".")
        if stage == "sent":  # no message was dropped, and no worker died
            sent, sending = sum(c[name] for c in each), sum(c[f"{before}.sending"] for c in each)
            # The last messages may be in flight when their worker has already counted.
            late = sending if before == "rref_delete" else len(each)
            assert 0 < sent <= sending <= sent + late, name


class Fragile(Keeper):
    """A keeper that cannot restore its state."""

    def __init__(self) -> None:
        super().__init__()
        kill_at("actor.restoring", action="raise").start()


def restarted(rank: int, world_size: int) -> None:
    actorrpc.init()
    try:
        handle: Any = actorrpc.remote(Fragile).options(max_restarts=1).remote()
        assert actorrpc.get(handle.add.remote(2)) == 2
        with pytest.raises((actorrpc.errors.ActorUnavailableError, actorrpc.errors.ActorDiedError)):
            actorrpc.get(handle.add.remote(13), timeout=20)
        with pytest.raises(actorrpc.errors.ActorDiedError, match="KillPointError"):
            actorrpc.get(handle.add.remote(1), timeout=20)
    finally:
        actorrpc.shutdown()


@pytest.mark.slow
def test_an_error_at_the_restoring_point_fails_the_restart_of_the_actor() -> None:
    run_group(restarted, 1)


# -- actions ---------------------------------------------------------------------------------------


_held: list[Any] = []


def _arm(point: str, action: Any = "exit", nth: int = 1, code: int = 1, seconds: float = 0.0) -> int:
    """Start a kill point for calls of add(); return the process's id."""
    _held.append(kill_at(point, action=action, nth=nth, code=code, seconds=seconds, function="add").start())
    return os.getpid()


def _disarm() -> int:
    kill = _held.pop()
    kill.stop()
    return int(kill.count)


def calling(rank: int, world_size: int, *kill: Any) -> str:
    """Make three calls; return for each "a" (answered), or for an error whether it may have run: "p" (perhaps) or "n" (no)."""
    if rank:
        rpc.shutdown()
        return ""
    rpc.rpc_sync("worker1", _arm, kill)
    ends = ""
    for _ in range(3):
        try:
            assert rpc.rpc_sync("worker1", operator.add, (1, 2), timeout=20) == 3
            ends += "a"
        except PeerDiedError as error:
            ends += "p" if error.maybe_executed else "n"
    rpc.shutdown(graceful=False)
    return ends


@pytest.mark.parametrize(
    ("kill", "ends", "code"),
    [
        (("call.starting", "exit", 2, 7), "apn", 7),
        (("answer.sending", "kill", 2), "apn", -signal.SIGKILL),
        # The first answer has left; another thread may answer further calls before the process has ended.
        (("answer.sent",), "a+p?n*", 1),
    ],
)
def test_a_kill_point_ends_its_process_and_errors_say_whether_calls_may_have_run(
    kill: tuple[Any, ...], ends: str, code: int
) -> None:
    found, died = rpc_group(calling, 2, *kill, may_die={1}, leak_wait=None)
    assert re.fullmatch(ends, found)
    assert died == Died(code)


def stopped(rank: int, world_size: int) -> None:
    if rank:
        return
    pid = rpc.rpc_sync("worker1", _arm, ("answer.sending", "stop"))
    future = rpc.rpc_async("worker1", operator.add, (1, 2))
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    assert not future.done()  # a stopped process is noticed some seconds later at the earliest
    os.kill(pid, signal.SIGCONT)
    assert future.wait() == 3


def test_a_kill_point_with_action_stop_stops_its_process() -> None:
    rpc_group(stopped, 2)


def raised(rank: int, world_size: int) -> None:
    if rank:
        return
    for to in ("worker1", "worker0"):
        for stage in ("sending", "sent"):
            with kill_at(f"call.{stage}", function=operator.add, action="raise") as kill:
                with pytest.raises(KillPointError, match=stage):
                    rpc.rpc_sync(to, operator.add, (1, 2))
                assert rpc.rpc_sync(to, operator.add, (1, 2)) == 3
                assert rpc.rpc_async(to, operator.add, (1, 2)).wait() == 3
                assert kill.count == 3
        for stage in ("starting", "finished"):
            rpc.rpc_sync(to, _arm, (f"call.{stage}", "raise"))
            with pytest.raises(KillPointError, match=stage):
                rpc.rpc_sync(to, operator.add, (1, 2))
            assert rpc.rpc_sync(to, operator.add, (1, 2)) == 3
            assert rpc.rpc_sync(to, _disarm) == 2
        rpc.rpc_sync(to, _arm, ("call.starting", "sleep", 1, 1, 0.1))
        begun = time.monotonic()
        assert rpc.rpc_sync(to, operator.add, (1, 2)) == 3
        assert time.monotonic() - begun >= 0.1
        rpc.rpc_sync(to, _disarm)
    assert not api.group().agent.hooks.active
    with testing.drop("call", function="add", total=1), kill_at("call.sent", nth=_NEVER) as kill:
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", operator.add, (1, 2), timeout=0.03)
        assert kill.count == 0  # the call was dropped, not sent
        tensor = torch.arange(100_000)
        assert rpc.rpc_sync("worker1", torch.add, (tensor, 1)).sum() == tensor.sum() + len(tensor)
        assert kill.count == 1


def test_kill_points_may_raise_or_sleep_in_the_caller_or_callee() -> None:
    rpc_group(raised, 2)
