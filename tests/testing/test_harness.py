"""The tools of tests/harness: the fault proxy between sockets and before workers, and the kill points."""

from __future__ import annotations

import operator
import re
import signal
import socket
import tempfile
import threading
from typing import Any

import pytest
import torch

from actorrpc import rpc
from actorrpc.errors import PeerDiedError
from actorrpc.rpc import api
from actorrpc.testing import processes
from tests.harness.kill_points import KillPointError, kill_at
from tests.harness.proxy import Disturbance, FaultProxy
from tests.ranks import Died, rpc_group, run_group

# -- the fault proxy -------------------------------------------------------------------------------


def _passed(size: int, seed: int, **disturbance: Any) -> tuple[bytes, FaultProxy]:
    """Send ``size`` zero bytes through a proxy with one disturbance; return the bytes that arrive before the stream ends."""
    disturbances = [Disturbance(direction="to", **disturbance)]
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        FaultProxy(listener.getsockname(), disturbances=disturbances, seed=seed) as proxy,
        socket.create_connection(proxy.address.split(":"), timeout=20) as sock,  # type: ignore[arg-type]
        listener.accept()[0] as behind,
    ):
        sender = threading.Thread(target=lambda: (sock.sendall(bytes(size)), sock.shutdown(socket.SHUT_WR)))
        sender.start()
        found = b""
        while data := behind.recv(1 << 16):
            found += data
        sender.join()
    return found, proxy


def test_a_proxy_disturbs_the_bytes_that_its_seed_selects() -> None:
    one, two, other = (
        _passed(20_000, seed, action="bit_flips", every=500, after=100)[0] for seed in (1, 1, 2)
    )
    assert one == two != other
    assert not any(one[:100])
    assert 10 < sum(each.bit_count() for each in one) < 200
    cut, proxy = _passed(1000, 0, action="half_close", after=700)
    assert (cut, proxy.connections, proxy.struck) == (bytes(700), 1, {"half_close": 1})


def _behind_a_proxy(rank: int, world_size: int, store: str, each: list[dict[str, Any]]) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=store, **each[rank])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    tensor = torch.arange(500_000)
    assert rpc.rpc_sync(f"worker{1 - rank}", torch.add, (tensor, 1)).sum() == tensor.sum() + len(tensor)
    rpc.shutdown()


def test_workers_with_the_options_of_proxies_connect_through_the_proxies() -> None:
    store = f"file://{tempfile.mkdtemp(dir=processes.scratch())}/store"
    with FaultProxy() as zero, FaultProxy() as one:
        run_group(_behind_a_proxy, 2, store, [zero.options, one.options])
        assert zero.connections + one.connections


# -- kill points -----------------------------------------------------------------------------------


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
