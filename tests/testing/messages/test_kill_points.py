"""Kill points: their names, that each is reached, and the actions at a point."""

from __future__ import annotations

import operator
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import autograd, rpc, testing
from actorrpc.agent import hooks
from actorrpc.errors import ConfigError, PeerDiedError, RpcTimeoutError
from actorrpc.rpc import api
from actorrpc.testing import POINTS, KillPointError, faults_of, kill_at
from tests import processes
from tests.actors.e2e.kit import until
from tests.ranks import Died, rpc_group, run_group

_NEVER = 1 << 60


@pytest.mark.parametrize("name", ["call", "call.before", "sent", "", "shutdown"])
def test_unknown_kill_points_are_refused_and_the_known_points_are_listed(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kill_at(name)
    assert all(each in str(caught.value) for each in POINTS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: kill_at(3),  # type: ignore[arg-type]
        lambda: kill_at("call.sent", action="explode"),  # type: ignore[arg-type]
        lambda: kill_at("call.sent", nth=0),
        lambda: kill_at("call.sent", nth=True),
        lambda: kill_at("call.sent", code="1"),  # type: ignore[arg-type]
        lambda: kill_at("call.sent", seconds=-1),
        lambda: kill_at("call.sent", to=1.0),
        lambda: kill_at("call.sent", function=3),
        lambda: kill_at("call.sent", on=3),  # type: ignore[arg-type]
        lambda: faults_of("kill"),
        lambda: faults_of("kill call"),
        lambda: faults_of("kill call.sent times=3"),
        lambda: faults_of("kill call.sent nth=often"),
    ],
)
def test_invalid_kill_point_arguments_raise_config_error(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_a_kill_point_acts_only_at_the_nth_time_and_only_while_active() -> None:
    with kill_at("shutdown.*", nth=3, action="raise") as kill:
        hooks.reach("shutdown.called")
        hooks.reach("actor.made")
        hooks.reach("shutdown.closing")
        with pytest.raises(KillPointError, match=r"kill_at.*shutdown\.called"):
            hooks.reach("shutdown.called")
        hooks.reach("shutdown.called")
        assert kill.count == 4
        with pytest.raises(RuntimeError, match="already"):
            kill.start()
    hooks.reach("shutdown.called")
    assert kill.count == 4
    assert not kill.active
    kill.start().stop()  # again


# -- each is reached -------------------------------------------------------------------------------


class Keeper:
    """An actor that keeps its state over restarts."""

    def __init__(self) -> None:
        self.number = 0

    def add(self, number: int) -> int:
        """Add to the state; 13 ends the process."""
        if number == 13:
            os._exit(1)
        self.number += number
        return self.number

    def checkpoint(self) -> int:
        """Return the state."""
        return self.number

    def restore(self, state: int) -> None:
        """Restore a state."""
        self.number = state


def _square(t: torch.Tensor) -> torch.Tensor:
    return t * t


_held: list[Any] = []


def _hold(rref: Any) -> None:
    _held.append(rref)


def _drop_held() -> None:
    _held.clear()


def _hand_on(rref: Any, to: str) -> None:
    rpc.rpc_sync(to, _hold, (rref,))


def _everything(rank: int) -> None:
    if rank:
        return
    assert rpc.rpc_sync("worker1", operator.add, (1, 2)) == 3
    rref = rpc.remote("worker1", operator.add, (1, 2))
    assert rref.to_here() == 3
    rpc.rpc_sync("worker2", _hand_on, (rref, "worker0"))
    rpc.rpc_sync("worker2", _hold, (rref,))
    rpc.rpc_sync("worker2", _hold, (rpc.RRef(7),))
    for number in (1, 2):
        rpc.rpc_sync(f"worker{number}", _drop_held)
    del rref
    leaf = torch.ones(3, requires_grad=True)
    for fast in (False, True):
        with autograd.context() as id:
            one = rpc.rpc_sync("worker1", _square, (rpc.rpc_sync("worker2", _square, (leaf,)),))
            unused = rpc.rpc_sync("worker2", _square, (one,))
            autograd.backward(id, [(one if fast else unused * 0 + one).sum()])
    handle: Any = actorrpc.remote(Keeper).options(worker="worker1").remote()
    assert actorrpc.get(handle.add.remote(2)) == 2
    actorrpc.kill(handle)
    until(lambda: not int(api.references().table.debug_info()["num_forks"]))


def _member(rank: int, world_size: int, store: str) -> dict[str, int]:
    kills = [kill_at(name, nth=_NEVER).start() for name in POINTS]
    options = rpc.TensorPipeRpcBackendOptions(init_method=store)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    _everything(rank)
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


def restarted(rank: int, world_size: int) -> None:
    os.environ["ACTORRPC_FAULT"] = "kill actor.restoring action=raise"
    actorrpc.init()
    try:
        handle: Any = actorrpc.remote(Keeper).options(max_restarts=1).remote()
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


def calling(rank: int, world_size: int) -> str:
    """Make three calls; return for each "a" (answered), or for an error whether it may have run: "p" (perhaps) or "n" (no)."""
    if rank:
        rpc.shutdown()
        return ""
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
    ("fault", "ends", "code"),
    [
        ("kill call.starting nth=2 on=worker1 code=7", "apn", 7),
        ("kill answer.sending nth=2 function=add action=kill on=worker1", "apn", -signal.SIGKILL),
        # The first answer was sent; another thread may answer further calls before the process has ended.
        ("kill answer.sent nth=1 function=add on=worker1", "a+p?n*", 1),
    ],
)
def test_a_kill_point_ends_its_process_and_errors_say_whether_calls_may_have_run(
    fault: str, ends: str, code: int
) -> None:
    found, died = rpc_group(calling, 2, env={"ACTORRPC_FAULT": fault}, may_die={1}, leak_wait=None)
    assert re.fullmatch(ends, found)
    assert died == Died(code)


def _pid_before_stopping() -> int:
    kill_at("answer.sending", function="add", action="stop").start()
    return os.getpid()


def stopped(rank: int, world_size: int) -> None:
    if rank:
        return
    pid = rpc.rpc_sync("worker1", _pid_before_stopping)
    future = rpc.rpc_async("worker1", operator.add, (1, 2))
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    assert not future.done()  # a stopped process is noticed some seconds later at the earliest
    os.kill(pid, signal.SIGCONT)
    assert future.wait() == 3


def test_a_kill_point_with_action_stop_stops_its_process() -> None:
    rpc_group(stopped, 2)


def _arm(point: str, action: Any, seconds: float) -> None:
    _held.append(kill_at(point, function="add", action=action, seconds=seconds).start())


def _disarm() -> int:
    kill = _held.pop()
    kill.stop()
    return int(kill.count)


def sending(rank: int, world_size: int) -> bool:
    if rank:
        until(lambda: _held)
        return True
    kill_at("call.sent", function=_hold).start()
    rpc.rpc_sync("worker1", _hold, (1,))
    return False


def test_a_message_at_the_sent_point_arrives_although_its_process_dies() -> None:
    assert rpc_group(sending, 2, may_die={0}) == [Died(1), True]


def raised(rank: int, world_size: int) -> None:
    if rank:
        return
    handlers = dict(api.group().agent.on_notice)
    with kill_at("rref_delete.arrived", nth=_NEVER):
        assert api.group().agent.on_notice != handlers
    for to in ("worker1", "worker0"):
        for stage in ("sending", "sent"):
            with kill_at(f"call.{stage}", function=operator.add, to=to, action="raise") as kill:
                with pytest.raises(KillPointError, match=stage):
                    rpc.rpc_sync(to, operator.add, (1, 2))
                assert rpc.rpc_sync(to, operator.add, (1, 2)) == 3
                assert rpc.rpc_async(to, operator.add, (1, 2)).wait() == 3
                assert kill.count == 3
        for stage in ("starting", "finished"):
            rpc.rpc_sync(to, _arm, (f"call.{stage}", "raise", 0))
            with pytest.raises(KillPointError, match=stage):
                rpc.rpc_sync(to, operator.add, (1, 2))
            assert rpc.rpc_sync(to, operator.add, (1, 2)) == 3
            assert rpc.rpc_sync(to, _disarm) == 2
        rpc.rpc_sync(to, _arm, ("call.starting", "sleep", 0.1))
        begun = time.monotonic()
        assert rpc.rpc_sync(to, operator.add, (1, 2)) == 3
        assert time.monotonic() - begun >= 0.1
        rpc.rpc_sync(to, _disarm)
    agent = api.group().agent
    assert not agent.hooks.active
    assert agent.on_notice == handlers
    with testing.drop("call", function="add", total=1), kill_at("call.sent", nth=_NEVER) as kill:
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", operator.add, (1, 2), timeout=0.03)
        assert kill.count == 0  # the call was dropped, not sent
        tensor = torch.arange(100_000)
        assert rpc.rpc_sync("worker1", torch.add, (tensor, 1)).sum() == tensor.sum() + len(tensor)
        assert kill.count == 1


def test_kill_points_may_raise_or_sleep_in_the_caller_or_callee() -> None:
    rpc_group(raised, 2)
