"""The kill points of tests/harness."""

from __future__ import annotations

import operator
import re
import signal
from typing import Any

import pytest

from actorrpc import rpc
from actorrpc.errors import PeerDiedError
from actorrpc.rpc import api
from tests.harness.kill_points import KillPointError, kill_at
from tests.ranks import Died, rpc_group

_held: list[Any] = []


def _arm(point: str, action: Any = "exit", nth: int = 1, code: int = 1) -> None:
    """Start a kill point for calls of add()."""
    _held.append(kill_at(point, action=action, nth=nth, code=code, function="add").start())


def _disarm() -> None:
    _held.pop().stop()


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


def _raise_at_each_stage(rank: int, world_size: int) -> None:
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
            rpc.rpc_sync(to, _disarm)
    assert not api.group().agent.hooks.active


def test_calls_work_after_an_error_at_each_stage_of_a_call() -> None:
    rpc_group(_raise_at_each_stage, 2)
