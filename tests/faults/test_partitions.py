"""Groups on several hosts, and network partitions: a group split and healed, the driver or the store cut off, one-way
reachability.

A silent peer is declared dead after `heartbeat` times `heartbeat_misses` (here 0.2 s times 5, by default 10 s), whether or not
calls to it are in flight, and this incarnation stays dead. If no connection can be opened, calls end by their own time-outs,
and no worker is declared dead.

The ranks of a test synchronise through files (`network.signals`), which need no network.
"""

from __future__ import annotations

import operator
import socket
import threading
import time
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import autograd, rpc
from actorrpc.errors import ActorError, PeerDiedError, RpcError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.group import group as group_module
from tests.actors.e2e.kit import until
from tests.faults.figures import NIGHTLY, note
from tests.faults.hosts import Network, host_group, needs_hosts

pytestmark = [
    needs_hosts,
    # torch's store prints this, as these hosts have addresses without names.
    pytest.mark.prints("The hostname of the client socket cannot be retrieved"),
]

_TUNED = {"heartbeat": 0.2, "rpc_timeout": 20.0}
# Errors of calls that need an unreachable host. Such calls never hang.
_ENDS = (PeerDiedError, RpcTimeoutError)

_released = threading.Event()
_entered = threading.Semaphore(0)


def _block() -> None:
    _entered.release()
    _released.wait()


def _release_blocked_calls() -> None:
    """End the blocked calls, whose callers have their errors already."""
    _released.set()


def _wait_until_blocked(times: int) -> None:
    for _ in range(times):
        _entered.acquire()


def _add(a: int, b: int) -> int:
    return rpc.rpc_sync("worker2", operator.add, (a, b))


def _state(name: str) -> str:
    return str(rpc.api.group().agent.peer(name).state)  # type: ignore[attr-defined]


def _fails_with_peer_died(future: Future[Any], worker: str) -> PeerDiedError:
    """Wait for a call without a time-out to fail because its worker died."""
    with pytest.raises(PeerDiedError, match=worker) as caught:
        future.wait()
    return caught.value


def _calls_work(*workers: str) -> None:
    for each in workers:
        for n in range(10):
            assert rpc.rpc_sync(each, operator.add, (n, 1)) == n + 1


# Inline; the least size for shared memory on one host; several chunks; many chunks.
_SIZES = (100, 64 << 10, 3 << 20, 24 << 20)


def _host_name() -> str:
    return socket.gethostname()


def _connections() -> dict[str, bool]:
    agent = rpc.api.group().agent  # type: ignore[attr-defined]
    return {peer.name: conn.local for peer in agent.peers() for conn in peer.conns}


def _call_all(rank: int, world_size: int) -> None:
    if rank:
        return
    names = [f"worker{n}" for n in range(world_size)]
    assert [rpc.rpc_sync(name, _host_name) for name in names] == ["a", "b", "c", "b"]
    for through in names[1:]:
        for to in names:
            assert rpc.rpc_sync(through, rpc.rpc_sync, (to, operator.add, (1, 2))) == 3
    # Unix sockets on one host, TCP between hosts.
    assert rpc.rpc_sync("worker1", _connections) == {"worker0": False, "worker2": False, "worker3": True}
    for size in _SIZES:
        tensor = torch.arange(size // 4, dtype=torch.int32)
        for each in [
            rpc.rpc_async(name, torch.mul, (tensor, 2)) for name in ("worker1", "worker2", "worker2")
        ]:
            assert torch.equal(each.wait(), tensor * 2)
        # Forwarded from host a to b to c and back.
        forwarded = rpc.rpc_sync("worker1", rpc.rpc_sync, ("worker2", torch.mul, (tensor, 2)))
        assert torch.equal(forwarded, tensor * 2)
    x = torch.ones(4, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync("worker2", torch.mul, (rpc.rpc_sync("worker1", torch.mul, (x, 2)), 3))
        autograd.backward(context, [y.sum()])
        assert torch.equal(autograd.get_gradients(context)[x], torch.full((4,), 6.0))


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_calls_tensors_and_gradients_work_between_three_hosts(family: str) -> None:
    with Network("a", "b", "c", ipv4=family == "ipv4", ipv6=family == "ipv6") as network:
        host_group(_call_all, network, ["a", "b", "c", "b"])


def _split(rank: int, world_size: int, network: Network, how: str) -> None:
    meet = network.signals.meet
    _calls_work(*(f"worker{n}" for n in range(world_size) if n != rank))
    others = ["worker1", "worker2"] if rank == 0 else ["worker0"]
    held = [rpc.rpc_async(each, _block, timeout=0) for each in others]
    _wait_until_blocked(2 if rank == 0 else 1)
    meet("calls are under way", rank, world_size)
    if rank == 0:
        network.split("a") if how == "switch" else network.unplug("a")
    meet("split", rank, world_size)
    if rank:  # the two workers on the other side still work
        _calls_work(f"worker{3 - rank}")
    for future, name in zip(held, others, strict=True):
        assert _fails_with_peer_died(future, name).maybe_executed is True
        assert _state(name) == "dead"
        with pytest.raises(PeerDiedError) as caught:
            rpc.rpc_sync(name, operator.add, (1, 1))
        assert caught.value.maybe_executed is False
        with pytest.raises(PeerDiedError):
            rpc.remote(name, operator.add, (1, 1))
    meet("all know", rank, world_size)
    if how == "switch" and rank == 0:
        network.heal()
    meet("healed", rank, world_size)
    # Dead workers stay dead after the network has healed, and connected workers still work.
    for name in others:
        with pytest.raises(PeerDiedError):
            rpc.rpc_sync(name, operator.add, (1, 1))
    if rank:
        _calls_work(f"worker{3 - rank}")
        with pytest.raises(PeerDiedError):
            rpc.rpc_sync("worker0", operator.add, (1, 1))
    _release_blocked_calls()
    # The `shutdown` that follows does not wait for dead workers.


@pytest.mark.parametrize("how", ["switch", "cable"])
def test_after_a_split_each_side_declares_the_other_dead_and_keeps_working(how: str) -> None:
    with Network("a", "b", "c") as network:
        host_group(_split, network, ["a", "b", "c"], network, how, options=_TUNED)


@actorrpc.remote
class Keeper:
    """An actor whose owner is the driver."""

    def echo(self, value: Any) -> Any:
        return value

    def stay(self) -> None:
        _block()


class Thing:
    """A value for RRefs, whose instances are counted."""

    living = 0

    def __init__(self) -> None:
        Thing.living += 1

    def __del__(self) -> None:
        Thing.living -= 1


def _living() -> int:
    return Thing.living


def _driver(rank: int, world_size: int, network: Network, idle: bool) -> None:
    signals = network.signals
    if rank == 0:
        things = [rpc.remote(f"worker{1 + n % 2}", Thing) for n in range(20)]
        for each in things:
            each.to_here()
        assert [rpc.rpc_sync(f"worker{n}", _living) for n in (1, 2)] == [10, 10]
        actor = Keeper.options(worker="worker1").remote()
        assert actorrpc.get(actor.echo.remote("here")) == "here"
        if not idle:
            held = [rpc.rpc_async(f"worker{n}", _block, timeout=0) for n in (1, 2)]
            staying = actor.stay.remote()
            for n, times in ((1, 2), (2, 1)):
                rpc.rpc_sync(f"worker{n}", _wait_until_blocked, (times,))
        network.split("a")
        signals.say("cut")
        if not idle:
            for n, future in enumerate(held, 1):
                _fails_with_peer_died(future, f"worker{n}")
            with pytest.raises((ActorError, PeerDiedError)):
                actorrpc.get(staying)
            with pytest.raises((ActorError, PeerDiedError)):
                actorrpc.get(actor.echo.remote("gone"))
        signals.wait("freed-1", "freed-2")
        del things
        return
    other = f"worker{3 - rank}"
    _calls_work(other)
    signals.wait("cut")
    _calls_work(other)
    if not idle:
        with pytest.raises(_ENDS):
            rpc.rpc_sync("worker0", operator.add, (1, 1))
    until(lambda: Thing.living == 0)  # the workers release values that only the driver referred to
    assert _state("worker0") == "dead"
    signals.say(f"freed-{rank}")
    _calls_work(other)
    _release_blocked_calls()


@pytest.mark.parametrize("idle", [False, True])
def test_workers_release_the_references_of_a_driver_that_is_cut_off_and_keep_working(idle: bool) -> None:
    """Calls on both sides fail, the workers release the driver's references and keep working, and all can shut down."""
    with Network("a", "b", "c") as network:
        host_group(_driver, network, ["a", "b", "c"], network, idle, options=_TUNED)


def _without_store(rank: int, world_size: int, network: Network, how: str) -> None:
    meet, signals = network.signals.meet, network.signals
    meet("begun", rank, world_size)
    if rank == 0:
        if how == "ended":
            signals.say("store may end")
        else:
            network.split("store")
    meet("lost", rank, world_size)
    # These are the first calls: workers learned all addresses at the start.
    _calls_work(*(f"worker{n}" for n in range(world_size) if n != rank))
    if rank == 0:
        assert rpc.rpc_sync("worker1", _add, (1, 2)) == 3
        rref = rpc.remote("worker1", torch.ones, (3,))
        assert torch.equal(rpc.rpc_sync("worker2", _fetch, (rref,)), torch.ones(3))
        actor = Keeper.options(worker="worker2").remote()
        assert actorrpc.get(actor.echo.remote(1)) == 1
    meet("worked", rank, world_size)


def _fetch(rref: rpc.RRef) -> Any:
    return rref.to_here()


def _lost_store(rank: int, world_size: int, network: Network, how: str) -> None:
    try:
        _without_store(rank, world_size, network, how)
        rpc.shutdown()
    finally:
        network.signals.meet("left", rank, world_size)
        network.signals.say("store may end")


@pytest.mark.parametrize("how", ["ended", "silent"])
def test_a_fixed_group_works_and_shuts_down_after_losing_its_store(how: str) -> None:
    """The store is only needed for the rendezvous."""
    with Network("a", "b", "c", "store") as network:
        host_group(_lost_store, network, ["a", "b", "c"], network, how, options=_TUNED)


_NOWHERE = "10.77.0.200"  # an unused address of the network, like that of a host behind NAT


def _hidden(rank: int, world_size: int, network: Network, hidden: int) -> None:
    """Use a worker that can dial others but cannot be dialled.

    Its own calls work, and so do calls to it over connections that it has opened. Calls of workers that it has never called end
    by their time-outs.
    """
    meet = network.signals.meet
    me, hidden_name = f"worker{rank}", f"worker{hidden}"
    visible = [n for n in range(world_size) if n != hidden]
    meet("begun", rank, world_size)
    if rank != hidden:
        _calls_work(*(f"worker{n}" for n in visible if n != rank))
        with pytest.raises(_ENDS, match=hidden_name) as caught:
            rpc.rpc_sync(hidden_name, operator.add, (1, 1), timeout=1.0)
        assert caught.value.maybe_executed is False
        assert _state(hidden_name) == "alive"
    meet("tried", rank, world_size)
    first, second = visible
    if rank == hidden:
        _calls_work(f"worker{first}")
        rref = rpc.RRef(torch.ones(3))
        # The first worker can call the hidden one over its connection; the second worker cannot.
        assert torch.equal(rpc.rpc_sync(f"worker{first}", _fetch, (rref,)), torch.ones(3))
        with pytest.raises(RpcError):
            rpc.rpc_sync(f"worker{first}", _forward, (rref, f"worker{second}"))
    meet("called one", rank, world_size)
    if rank == first:
        _calls_work(hidden_name)
        large = torch.arange(6 << 20)
        assert torch.equal(rpc.rpc_sync(hidden_name, torch.neg, (large,)), -large)
    elif rank == second:
        with pytest.raises(_ENDS, match=hidden_name):
            rpc.rpc_sync(hidden_name, operator.add, (1, 1), timeout=1.0)
    meet("called", rank, world_size)
    if rank == hidden:
        _calls_work(f"worker{second}")
    meet("called both", rank, world_size)
    if rank == second:
        _calls_work(hidden_name)
    assert _state(me) == "alive"


def _forward(rref: rpc.RRef, to: str) -> Any:
    return rpc.rpc_sync(to, _fetch_with_timeout, (rref,), timeout=3.0)


def _fetch_with_timeout(rref: rpc.RRef) -> Any:
    return rref.to_here(timeout=1.0)


def test_a_worker_that_cannot_be_dialled_is_called_over_connections_that_it_opened() -> None:
    with Network("a", "b", "c") as network:
        host_group(_hidden, network, ["a", "b", "c"], network, 1, options=_TUNED, advertise={1: _NOWHERE})


def _time_of_shutdown_while_split(rank: int, world_size: int, network: Network) -> float:
    if not NIGHTLY:
        group_module.PATIENCE_S = 0.5  # type: ignore[misc] # instead of 10 s
    network.signals.meet("begun", rank, world_size)
    if rank == 0:
        network.split("a", "b", "c")
    network.signals.meet("split", rank, world_size)
    begun = time.monotonic()
    rpc.shutdown()
    return round(time.monotonic() - begun, 1)


@pytest.mark.prints(
    r"shutdown does not wait for 'worker\d' any longer: worker 'worker\d' .* cannot be reached"
)
def test_shutdown_ends_in_a_split_group_without_connections() -> None:
    """Without connections, no worker knows of the split; `shutdown` must still end on both sides.

    The workers on d and e shut down only after giving up on the three others, one after the other.
    """
    with Network("a", "b", "c", "d", "e") as network:
        took = host_group(
            _time_of_shutdown_while_split,
            network,
            ["a", "b", "c", "d", "e"],
            network,
            options=_TUNED,
            timeout=50,
        )
    note("leaving a split group", {"s": took})
    assert max(took) <= 30.0 or not NIGHTLY


def _time_of_detection(rank: int, world_size: int, network: Network, how: str) -> float:
    meet = network.signals.meet
    other = f"worker{1 - rank}"
    _calls_work(other)
    held = rpc.rpc_async(other, _block, timeout=0)
    _wait_until_blocked(1)
    meet("under way", rank, world_size)
    if rank == 0:
        if how == "switch":
            network.split("a")
        elif how == "cable":
            network.unplug("a")
        else:
            network.lose("b", "a")
    meet("cut", rank, world_size)
    begun = time.monotonic()
    _fails_with_peer_died(held, other)
    took = time.monotonic() - begun
    meet("known", rank, world_size)
    _release_blocked_calls()
    return round(took, 2)


@pytest.mark.limit(900)
@pytest.mark.skipif(not NIGHTLY, reason="21 groups, one after the other: nightly")
@pytest.mark.parametrize("how", ["switch", "cable", "one way"])
def test_silence_is_detected_within_the_promised_time(how: str) -> None:
    for heartbeat, runs in ((0.2, 20), (2.0, 1)):
        took: list[float] = []
        for _ in range(runs):
            with Network("a", "b") as network:
                took += host_group(
                    _time_of_detection, network, ["a", "b"], network, how, options={"heartbeat": heartbeat}
                )
        note("silence noticed", {"how": how, "heartbeat_s": heartbeat, "runs": runs, "s": sorted(took)})
        # The promise is 10 s by default and 1 s here, plus 1 s for a busy machine. A worker that still receives from its peer is
        # told by the peer, after TCP has retransmitted a full send buffer at growing intervals, so it takes up to twice as long.
        assert max(took) <= 5 * heartbeat * (2 if how == "one way" else 1) + 1.0
