"""Cases in which breakpoints do not hold calls, or not for long."""

from __future__ import annotations

import inspect
import sys

import pytest

import actorrpc
from actorrpc.agent.context import current_worker
from actorrpc.errors import RpcError
from actorrpc.testing import InProcessCluster
from tests.debugger.test_calls import Counter, enter

pytestmark = [pytest.mark.limit(60), pytest.mark.prints]


def _stop_here() -> int:
    breakpoint()
    return 7


@pytest.mark.prints("is ignored on worker 'worker0'")
def test_a_data_only_worker_holds_no_call(caplog: pytest.LogCaptureFixture) -> None:
    with InProcessCluster(data_only=True) as cluster, cluster["worker0"]:
        worker = current_worker()
        assert worker is not None
        worker.debugger.breakpoint(inspect.currentframe(), None)
        assert not worker.debugger.sessions()
        assert sys.gettrace() is None
    assert "is ignored on worker 'worker0': it takes data only" in caplog.text


@pytest.mark.prints("is ignored on worker 'worker1'")
def test_in_a_group_without_a_key_breakpoints_are_ignored_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with InProcessCluster() as cluster:
        cluster["worker1"].run(_forget_key)
        assert cluster["worker0"].rpc_sync("worker1", _stop_here) == 7
        assert cluster["worker0"].rpc_sync("worker1", _stop_here) == 7
    logged = caplog.text
    assert (
        logged.count("is ignored on worker 'worker1': its group has no key: anybody could run code in it")
        == 1
    )


def _forget_key() -> None:
    worker = current_worker()
    assert worker is not None
    worker.agent.connector._key = None


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"ACTORRPC_DEBUG": "0"}, id="off"),
        pytest.param({"ACTORRPC_DEBUG_WAIT": "0.2"}, id="no front end", marks=pytest.mark.slow),
    ],
)
def test_calls_continue_if_the_debugger_is_off_or_no_front_end_attaches(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with actorrpc.init(num_cpus=1):
        actor = Counter.remote()
        assert actorrpc.get([actor.add.remote(1), actor.add.remote(1)]) == [1, 2]
        if "ACTORRPC_DEBUG" in variables:
            with pytest.raises(
                RpcError, match="refuses the debugger: ACTORRPC_DEBUG=0 has switched the debugger off"
            ):
                enter(actor)
    logged = capfd.readouterr().err
    assert (
        "This is logged once"
        if "ACTORRPC_DEBUG" in variables
        else "no front end has attached to it within 0.2 s"
    ) in logged
