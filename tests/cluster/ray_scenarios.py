"""Scenarios of the tests of the Ray engine, each in a separate process: ``python -m tests.cluster.ray_scenarios NAME``.

Ray leaves threads and descriptors in its process, and may end it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray._private.state
import torch
from ray.cluster_utils import Cluster

import actorrpc
from actorrpc import autograd
from actorrpc.cluster.driver import current_cluster, leave
from actorrpc.errors import ConfigError, PlacementError, RendezvousError
from actorrpc.wire import keys
from tests.ports import free_port

# Ray's settings for a quick detection of lost nodes.
_SOON = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 3,
}
_QUICK = {"heartbeat": 0.5, "heartbeat_misses": 3}


@actorrpc.remote
class Probe:
    """An actor that returns its place, counts, and has a weight."""

    def __init__(self) -> None:
        self.count = 0
        self.weight = torch.full((3,), 2.0, requires_grad=True)

    def where(self) -> tuple[str, str, int]:
        node = ray.get_runtime_context().get_node_id()
        return actorrpc.get_worker_info().name, node, os.getpid()

    def devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def next(self) -> int:
        self.count += 1
        return self.count

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def times(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.weight

    def gradient(self, context: int) -> torch.Tensor:
        return autograd.get_gradients(context)[self.weight]


def until(condition: Callable[[], Any], description: str, seconds: float = 60.0) -> None:
    """Wait until the condition is true, for at most ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{description}: not within {seconds} s"
        time.sleep(0.05)


def alive(name: str) -> list[Any]:
    """Return the live workers of a name."""
    return [each for each in actorrpc.workers() if each.name == name and each.state == "alive"]


def gradients_equal_local(first: Any, second: Any) -> None:
    """Check that gradients of a pass through two actors equal those of a local pass."""
    value = torch.arange(3.0, requires_grad=True)
    with autograd.context() as context:
        between = actorrpc.get(first.times.remote(value))
        loss = actorrpc.get(second.times.remote(between)).sum()
        autograd.backward(context, [loss])
        mine = autograd.get_gradients(context)[value]
        theirs = actorrpc.get([each.gradient.remote(context) for each in (first, second)])
    here, one, two = (torch.arange(3.0), torch.full((3,), 2.0), torch.full((3,), 2.0))
    for each in (here, one, two):
        each.requires_grad_()
    (here * one * two).sum().backward()
    assert all(
        torch.equal(*pair) for pair in zip((mine, *theirs), (here.grad, one.grad, two.grad), strict=True)
    )


@contextlib.contextmanager
def nodes(*each: dict[str, Any], **head: Any) -> Iterator[tuple[Cluster, list[Any]]]:
    """Run a Ray cluster with a head node without CPUs, and further nodes."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": _SOON, **head},
    )
    try:
        yield cluster, [cluster.add_node(**node) for node in each]
    finally:
        ray.shutdown()
        cluster.shutdown()


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def key_is_in_no_log_and_no_command_line() -> None:
    """Check that the key is in no log of Ray and in no command line of a process."""
    key = current_cluster().reception.secret.encode()  # type: ignore[union-attr]
    assert len(key) > 20
    session = Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[1]
    logs = [path for path in (session / "logs").rglob("*") if path.is_file()]
    assert len(logs) > 3
    assert not [path for path in logs if key in path.read_bytes()]
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert key not in arguments.read_bytes()


def _actor_states() -> list[str]:
    """Return the state of each actor of Ray. Ray's public list of actors needs its dashboard, which does not run here."""
    return [each["State"] for each in ray._private.state.actors().values()]


def nothing_is_left_in_ray() -> None:
    """Check that all actors of Ray are dead, and all placement groups removed."""
    until(
        lambda: set(_actor_states()) <= {"DEAD"},
        "dead actors",
        10,
    )
    groups = ray.util.placement_group_table()
    assert {each["state"] for each in groups.values()} <= {"REMOVED"}, groups


# -- scenarios -------------------------------------------------------------------------------------------


def one_node() -> None:
    """A local Ray: a pool of workers, calls, gradients; a dead worker is replaced; nothing is left at the end."""
    with actorrpc.init(
        "ray://local", num_workers=2, num_cpus=1, ray_options={"num_cpus": 4}, log_to_driver=False, **_QUICK
    ) as context:
        assert context.address.startswith("tcp://127.0.0.1:")  # no other machine can reach it
        first, second = Probe.options(worker="ray-0").remote(), Probe.options(worker="ray-1").remote()
        places = actorrpc.get([each.where.remote() for each in (first, second)])
        assert [name for name, _, _ in places] == ["ray-0", "ray-1"]
        assert {name for name, _, _ in actorrpc.get([Probe.remote().where.remote() for _ in range(4)])} == {
            "ray-0",
            "ray-1",
        }
        assert [actorrpc.get(first.next.remote()) for _ in range(3)] == [1, 2, 3]
        gradients_equal_local(first, second)

        key_is_in_no_log_and_no_command_line()
        before = alive("ray-0")[0].pid
        waiting = first.sleep.remote(60)
        os.kill(before, signal.SIGKILL)
        with pytest.raises(actorrpc.ActorDiedError):
            actorrpc.get(waiting)
        assert actorrpc.get(second.next.remote()) == 1
        until(lambda: alive("ray-0") and alive("ray-0")[0].pid != before, "a new incarnation")
        again = Probe.options(worker="ray-0").remote()
        assert actorrpc.get(again.next.remote()) == 1
        gradients_equal_local(again, second)
        assert actorrpc.scale(1, timeout=60) in (["ray-0"], ["ray-1"])  # counts workers of the pool
        until(lambda: ray.available_resources().get("CPU") == 3.0, "resources of the removed worker are free")
    assert not ray.is_initialized()


def one_actor() -> None:
    """Without a pool, every actor has its own worker, which ends with it; supervision requests a new worker."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with actorrpc.init(engine="ray", **_QUICK):
        probe = Probe.options(num_cpus=1, max_restarts=1, max_task_retries=-1).remote()
        name, _, pid = actorrpc.get(probe.where.remote())
        assert name.startswith("Probe-ray-")
        assert ray.available_resources()["CPU"] == 1.0
        os.kill(pid, signal.SIGKILL)
        other, _, new = actorrpc.get(probe.where.remote(), timeout=60)
        assert other != name
        assert new != pid
        with pytest.raises(actorrpc.ActorDiedError, match="CPU 3"):
            actorrpc.get(Probe.options(num_cpus=3).remote().next.remote())
        del probe
        until(
            lambda: ray.available_resources().get("CPU") == 2.0,
            "an actor without references releases its place",
        )
    assert ray.is_initialized()  # not started by actorrpc
    nothing_is_left_in_ray()
    ray.shutdown()


def several_nodes() -> None:
    """SPREAD uses different nodes. After the loss of a node, its calls fail and its worker is replaced elsewhere."""
    with nodes({"num_cpus": 2, "num_gpus": 1}, {"num_cpus": 2, "num_gpus": 1}) as (cluster, each):
        ray.init(address=cluster.address, log_to_driver=False)
        with actorrpc.init(
            engine="ray", num_workers=2, num_cpus=1, num_gpus=0.5, strategy="SPREAD", **_QUICK
        ) as context:
            assert not context.address.startswith("tcp://127.")  # reachable from other machines
            probes = [Probe.options(worker=f"ray-{number}").remote() for number in range(2)]
            places = actorrpc.get([probe.where.remote() for probe in probes])
            assert len({node for _, node, _ in places}) == 2
            assert actorrpc.get([probe.devices.remote() for probe in probes]) == ["0", "0"]  # set by Ray
            there = Probe.options(labels={"ray.io/node-id": places[1][1]}).remote()
            assert actorrpc.get(there.where.remote())[0] == "ray-1"
            gradients_equal_local(*probes)

            lost = next(node for node in each if node.node_id == places[0][1])
            going, ending = probes[1].sleep.remote(3), probes[0].sleep.remote(60)
            cluster.remove_node(lost, allow_graceful=False)
            with pytest.raises(actorrpc.ActorDiedError):
                actorrpc.get(ending, timeout=30)
            assert actorrpc.get(going) == 3
            before = places[0][2]
            until(lambda: alive("ray-0") and alive("ray-0")[0].pid != before, "the worker elsewhere")
            again = Probe.options(worker="ray-0").remote()
            assert actorrpc.get(again.where.remote())[1] == places[1][1]
            gradients_equal_local(again, probes[1])
        nothing_is_left_in_ray()


def strict() -> None:
    """STRICT_SPREAD and STRICT_PACK also hold for later workers; impossible requests are refused in time."""
    with nodes({"num_cpus": 3}, {"num_cpus": 3}, {"num_cpus": 3}) as (cluster, _):
        ray.init(address=cluster.address, log_to_driver=False)
        for strategy, count in (("STRICT_SPREAD", 3), ("STRICT_PACK", 1)):
            with actorrpc.init(engine="ray", num_workers=2, num_cpus=1, strategy=strategy, **_QUICK):
                engine: Any = current_cluster().engine  # type: ignore[union-attr]
                with pytest.raises(ConfigError, match="are all alike"):
                    actorrpc.scale(3, num_cpus=2)
                assert set(actorrpc.scale(3)) == {"ray-0", "ray-1", "ray-2"}
                probes = [Probe.options(worker=f"ray-{number}").remote() for number in range(3)]
                assert (
                    len({node for _, node, _ in actorrpc.get([each.where.remote() for each in probes])})
                    == count
                )
                actorrpc.rpc_sync("ray-0", leave)
                until(lambda: not alive("ray-0"), "a worker that leaves")
                until(lambda hosts=engine._hosts: "ray-0" not in hosts, "its actor's end")
                assert set(actorrpc.scale(3)) == {"ray-1", "ray-2", "ray-3"}  # in the free place
                if strategy == "STRICT_SPREAD":
                    with pytest.raises(PlacementError, match="every node has one"):
                        actorrpc.scale(4)
            nothing_is_left_in_ray()
        with pytest.raises(PlacementError, match="needs 4 nodes"):
            actorrpc.init(engine="ray", num_workers=4, num_cpus=1, strategy="STRICT_SPREAD", start_timeout=1)
        assert not actorrpc.is_initialized()
        taken = ray.util.placement_group([{"CPU": 3}] * 2, strategy="SPREAD")
        assert taken.wait(30)
        with pytest.raises(PlacementError, match="others have booked"):
            actorrpc.init(engine="ray", num_workers=3, num_cpus=3, strategy="SPREAD", start_timeout=2)
        with pytest.raises(actorrpc.RpcTimeoutError, match=r"ray-\d.* have not joined within 8 s"):
            actorrpc.init(engine="ray", num_workers=4, num_cpus=1, start_timeout=8)
        assert not actorrpc.is_initialized()
        ray.util.remove_placement_group(taken)
        nothing_is_left_in_ray()


def frozen() -> None:
    """A worker that is stopped but not dead is replaced by Ray."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with actorrpc.init(engine="ray", num_workers=1, **_QUICK):
        before = alive("ray-0")[0].pid
        os.kill(before, signal.SIGSTOP)
        until(lambda: alive("ray-0") and alive("ray-0")[0].pid != before, "a new incarnation")
        assert actorrpc.get(Probe.options(worker="ray-0").remote().next.remote()) == 1
    nothing_is_left_in_ray()
    ray.shutdown()


def client() -> None:
    """Use Ray's client: this process is not part of the Ray cluster."""
    port = free_port()
    # Ray's processes must find the package.
    os.environ["PYTHONPATH"] = os.getcwd()
    head = {"num_cpus": 2, "ray_client_server_port": port}
    with nodes(**head):
        until(lambda: _listens(port), "Ray's server for clients")
        with actorrpc.init(f"ray://127.0.0.1:{port}", num_workers=2, num_cpus=1, strategy="PACK", **_QUICK):
            probes = [Probe.options(worker=f"ray-{number}").remote() for number in range(2)]
            gradients_equal_local(*probes)
            before = alive("ray-0")[0].pid
            os.kill(before, signal.SIGKILL)
            until(lambda: alive("ray-0") and alive("ray-0")[0].pid != before, "a new incarnation")
            assert actorrpc.get(probes[1].next.remote()) == 1


def driver_killed() -> None:
    """A killed driver leaves no actor and no placement group in a running Ray cluster."""
    with nodes({"num_cpus": 2}) as (cluster, _):
        body = (
            "import actorrpc, os, signal\n"
            f"actorrpc.init(engine='ray', engine_options={{'address': {cluster.address!r}}}, num_workers=2, strategy='PACK')\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        assert subprocess.run([sys.executable, "-c", body], check=False).returncode == -signal.SIGKILL
        ray.init(address=cluster.address, log_to_driver=False)
        assert len(_actor_states()) == 2
        until(lambda: ray.available_resources().get("CPU") == 2.0, "resources of the driver are free", 30)
        nothing_is_left_in_ray()


def refused() -> None:
    """Wrong addresses and options raise a clear error in time, and leave nothing running."""
    for address, kind, text in (
        ("127.0.0.1:9", RendezvousError, "no Ray cluster answers at '127.0.0.1:9'"),
        ("ray://127.0.0.1:9", RendezvousError, "no Ray cluster answers at 'ray://127.0.0.1:9'"),
        ("ray://127.0.0.1:port", ConfigError, "cannot be used"),
    ):
        with pytest.raises(kind, match=text):
            actorrpc.init(engine="ray", engine_options={"address": address})
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(RendezvousError, match="timed out"):
            actorrpc.init(f"ray://127.0.0.1:{other.getsockname()[1]}", start_timeout=1)
    with pytest.raises(ConfigError, match="has no option 'workers'"):
        actorrpc.init(engine="ray", workers=2)
    assert not ray.is_initialized()
    assert not actorrpc.is_initialized()
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    with pytest.raises(ConfigError, match="connected to Ray already"):
        actorrpc.init("ray://127.0.0.1:9")
    ray.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    keys.sweep()  # remove files of the killed driver
    print("done")
