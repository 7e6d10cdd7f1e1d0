"""Networks that part: a group split and healed, the driver or the store cut off, one-way reachability.

What is promised today: a peer that is silent is dead after `heartbeat` times `heartbeat_misses` (here 0.2 s and 5, so 1 s; 10 s
by default), in this incarnation for good, whether or not calls to it are under way. Where no connection comes about at all,
calls are bounded by their own time-outs, and nobody is taken for dead.

The ranks of a test tell each other how far they are by files (`network.signals`): no network is needed for that.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import rpc
from actorrpc.errors import ActorError, PeerDiedError, RpcError, RpcTimeoutError
from actorrpc.futures import Future
from actorrpc.group import group as group_module
from tests.faults.figures import NIGHTLY, note
from tests.faults.hosts import Network, host_group, needs_hosts

pytestmark = [
    needs_hosts,
    # The store of torch says so: these hosts have addresses without names.
    pytest.mark.prints("The hostname of the client socket cannot be retrieved"),
]

_TUNED = {"heartbeat": 0.2, "rpc_timeout": 20.0}
# What a call that touches a host which cannot be reached may end with. Never with nothing.
_ENDS = (PeerDiedError, RpcTimeoutError)

_for_ever = threading.Event()
_entered = threading.Semaphore(0)


def _stay() -> None:
    _entered.release()
    _for_ever.wait()


def _let_go() -> None:
    """End the calls that would stay for ever; their callers were told long ago."""
    _for_ever.set()


def _entered_times(times: int) -> None:
    for _ in range(times):
        _entered.acquire()


def _add(a: int, b: int) -> int:
    return rpc.rpc_sync("worker2", operator.add, (a, b))


def _state(name: str) -> str:
    return str(rpc.api._require().agent.peer(name).state)  # type: ignore[attr-defined]


def _until(condition: Callable[[], Any]) -> None:
    """Wait for something that nothing announces; bounded by the test's limit."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


def _dies(future: Future[Any], worker: str) -> PeerDiedError:
    """Have a call without a time-out end because its worker is gone."""
    with pytest.raises(PeerDiedError, match=worker) as caught:
        future.wait()
    return caught.value


def _works(*workers: str) -> None:
    for each in workers:
        for n in range(10):
            assert rpc.rpc_sync(each, operator.add, (n, 1)) == n + 1


# -- split and healed ------------------------------------------------------------------------------------------------


def _split(rank: int, world_size: int, network: Network, how: str) -> None:
    meet = network.signals.meet
    _works(*(f"worker{n}" for n in range(world_size) if n != rank))
    others = ["worker1", "worker2"] if rank == 0 else ["worker0"]
    held = [rpc.rpc_async(each, _stay, timeout=0) for each in others]
    _entered_times(2 if rank == 0 else 1)
    meet("calls are under way", rank, world_size)
    if rank == 0:
        network.split("a") if how == "switch" else network.unplug("a")
    meet("split", rank, world_size)
    if rank:  # the larger part goes on at once
        _works(f"worker{3 - rank}")
    for future, name in zip(held, others, strict=True):
        assert _dies(future, name).maybe_executed is True
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
    # Dead is dead: no message of before or after comes through, and who has stayed together works.
    for name in others:
        with pytest.raises(PeerDiedError):
            rpc.rpc_sync(name, operator.add, (1, 1))
    if rank:
        _works(f"worker{3 - rank}")
        with pytest.raises(PeerDiedError):
            rpc.rpc_sync("worker0", operator.add, (1, 1))
    _let_go()
    # `shutdown` comes next: it waits for nobody who is dead.


@pytest.mark.parametrize("how", ["switch", "cable"])
def test_a_group_split_and_healed(how: str) -> None:
    with Network("a", "b", "c") as network:
        host_group(_split, network, ["a", "b", "c"], network, how, options=_TUNED)


def _asymmetric(rank: int, world_size: int, network: Network) -> None:
    meet = network.signals.meet
    other = f"worker{1 - rank}"
    _works(other)
    held = rpc.rpc_async(other, _stay, timeout=0)
    _entered_times(1)
    meet("under way", rank, world_size)
    if rank == 0:
        network.lose("b", "a")  # a hears nothing of b any more; b still hears a
    meet("lost", rank, world_size)
    _dies(held, other)
    meet("all know", rank, world_size)
    if rank == 0:
        network.find("b", "a")
    meet("found", rank, world_size)
    with pytest.raises(PeerDiedError):
        rpc.rpc_sync(other, operator.add, (1, 1))
    _let_go()


def test_a_way_that_is_lost_in_one_direction_is_lost_for_both() -> None:
    with Network("a", "b") as network:
        host_group(_asymmetric, network, ["a", "b"], network, options=_TUNED)


def _negate(worker: str, results: list[Any]) -> None:
    results.append(rpc.rpc_sync(worker, torch.neg, (torch.ones(500_000),)))


def _short(rank: int, world_size: int, network: Network) -> None:
    meet = network.signals.meet
    other = f"worker{1 - rank}"
    _works(other)
    futures = []
    for n in range(3):
        meet(f"before {n}", rank, world_size)
        if rank == 0:
            network.split("a")
        meet(f"split {n}", rank, world_size)
        # All of them leave for nowhere, the large one in the middle of the split.
        futures = [rpc.rpc_async(other, operator.add, (n, each)) for each in range(20)]
        # Who sends much waits until it is sent: so on a thread of its own.
        large: list[Any] = []
        thread = threading.Thread(target=_negate, args=(other, large))
        thread.start()
        meet(f"called {n}", rank, world_size)
        if rank == 0:
            network.heal()
        assert [each.wait() for each in futures] == [n + each for each in range(20)]
        thread.join()
        assert torch.equal(large[0], -torch.ones(500_000))
        assert _state(other) == "alive"


def test_a_split_shorter_than_the_silence_that_means_death_loses_nothing() -> None:
    with Network("a", "b") as network:
        host_group(_short, network, ["a", "b"], network, options={"heartbeat": 2.0})


def _never_connected(rank: int, world_size: int, network: Network) -> None:
    """Calls that have to dial into the silence end within their own time-outs, and say that nothing was executed."""
    meet = network.signals.meet
    meet("begun", rank, world_size)
    if rank == 0:
        network.split("c")
    meet("split", rank, world_size)
    if rank == 1:
        with pytest.raises(_ENDS) as caught:
            rpc.rpc_sync("worker2", operator.add, (1, 1), timeout=0.5)
        assert caught.value.maybe_executed is False
        with pytest.raises(_ENDS):
            rpc.rpc_async("worker2", operator.add, (1, 1), timeout=0.5).wait()
        with pytest.raises(_ENDS):
            rpc.remote("worker2", operator.add, (1, 1), timeout=0.5).to_here(timeout=0.5)
    meet("tried", rank, world_size)
    if rank == 0:
        network.heal()
    meet("healed", rank, world_size)
    if rank == 1:
        _works("worker2")  # nobody had declared anybody dead


def test_dialling_into_a_split_ends_and_works_after_it() -> None:
    with Network("a", "b", "c") as network:
        host_group(_never_connected, network, ["a", "b", "c"], network, options=_TUNED)


# -- the driver cut off ----------------------------------------------------------------------------------------------


@actorrpc.remote
class Keeper:
    """An actor of the driver's."""

    def echo(self, value: Any) -> Any:
        return value

    def stay(self) -> None:
        _stay()


class Thing:
    """A value that RRefs lead to; how many there are is counted."""

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
            held = [rpc.rpc_async(f"worker{n}", _stay, timeout=0) for n in (1, 2)]
            staying = actor.stay.remote()
            for n, times in ((1, 2), (2, 1)):
                rpc.rpc_sync(f"worker{n}", _entered_times, (times,))
        network.split("a")
        signals.say("cut")
        if not idle:
            for n, future in enumerate(held, 1):
                _dies(future, f"worker{n}")
            with pytest.raises((ActorError, PeerDiedError)):
                actorrpc.get(staying)
            with pytest.raises((ActorError, PeerDiedError)):
                actorrpc.get(actor.echo.remote("gone"))
        signals.wait("freed-1", "freed-2")
        del things
        return
    other = f"worker{3 - rank}"
    _works(other)
    signals.wait("cut")
    _works(other)
    if not idle:
        with pytest.raises(_ENDS):
            rpc.rpc_sync("worker0", operator.add, (1, 1))
    _until(lambda: Thing.living == 0)  # what the driver held is nobody's any more
    assert _state("worker0") == "dead"
    signals.say(f"freed-{rank}")
    _works(other)
    _let_go()


def test_the_driver_cut_off() -> None:
    """Both sides end their calls, the workers give back what the driver held and go on, and all of them can leave."""
    with Network("a", "b", "c") as network:
        host_group(_driver, network, ["a", "b", "c"], network, False, options=_TUNED)


def test_the_driver_cut_off_while_nobody_calls_anybody() -> None:
    with Network("a", "b", "c") as network:
        host_group(_driver, network, ["a", "b", "c"], network, True, options=_TUNED, timeout=20)


# -- the store cut off -----------------------------------------------------------------------------------------------


def _without_store(rank: int, world_size: int, network: Network, how: str) -> None:
    meet, signals = network.signals.meet, network.signals
    meet("begun", rank, world_size)
    if rank == 0:
        if how == "ended":
            signals.say("store may end")
        else:
            network.split("store")
    meet("lost", rank, world_size)
    # Nobody has called anybody before: all that is needed was learned at the start.
    _works(*(f"worker{n}" for n in range(world_size) if n != rank))
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
def test_the_store_lost_after_the_start(how: str) -> None:
    """A fixed group goes on, and ends, without the host through which it has met."""
    with Network("a", "b", "c", "store") as network:
        host_group(_lost_store, network, ["a", "b", "c"], network, how, options=_TUNED)


# -- one-way reachability --------------------------------------------------------------------------------------------

_NOWHERE = "10.77.0.200"  # in the network, but nobody's: as the address of a host behind NAT


def _hidden(rank: int, world_size: int, network: Network, hidden: int) -> None:
    """A worker that dials, and that nobody can dial.

    What works: its calls, and everything the other way over the connections that it has made. What does not: calls of
    workers that it has never called; they end within their time-outs.
    """
    meet = network.signals.meet
    me, it = f"worker{rank}", f"worker{hidden}"
    open_ones = [n for n in range(world_size) if n != hidden]
    meet("begun", rank, world_size)
    if rank != hidden:
        _works(*(f"worker{n}" for n in open_ones if n != rank))
        with pytest.raises(_ENDS, match=it) as caught:
            rpc.rpc_sync(it, operator.add, (1, 1), timeout=1.0)
        assert caught.value.maybe_executed is False
        assert _state(it) == "alive"
    meet("tried", rank, world_size)
    first, second = open_ones
    if rank == hidden:
        _works(f"worker{first}")
        rref = rpc.RRef(torch.ones(3))
        # It has called the first one, which can therefore call it; the second one can not.
        assert torch.equal(rpc.rpc_sync(f"worker{first}", _fetch, (rref,)), torch.ones(3))
        with pytest.raises(RpcError):
            rpc.rpc_sync(f"worker{first}", _hand_on, (rref, f"worker{second}"))
    meet("called one", rank, world_size)
    if rank == first:
        _works(it)
        large = torch.arange(6 << 20)
        assert torch.equal(rpc.rpc_sync(it, torch.neg, (large,)), -large)
    elif rank == second:
        with pytest.raises(_ENDS, match=it):
            rpc.rpc_sync(it, operator.add, (1, 1), timeout=1.0)
    meet("called", rank, world_size)
    if rank == hidden:
        _works(f"worker{second}")
    meet("called both", rank, world_size)
    if rank == second:
        _works(it)
    assert _state(me) == "alive"


def _hand_on(rref: rpc.RRef, to: str) -> Any:
    return rpc.rpc_sync(to, _fetch_soon, (rref,), timeout=3.0)


def _fetch_soon(rref: rpc.RRef) -> Any:
    return rref.to_here(timeout=1.0)


def test_a_worker_that_can_dial_and_cannot_be_dialled() -> None:
    with Network("a", "b", "c") as network:
        host_group(_hidden, network, ["a", "b", "c"], network, 1, options=_TUNED, advertise={1: _NOWHERE})


def _only_leave(rank: int, world_size: int, network: Network) -> None:
    """Do nothing; end in the order of the ranks, so that others ask the first one to end before it does itself."""
    if rank == 0:
        network.signals.wait("others leave")
    elif rank == world_size - 1:
        network.signals.say("others leave")


def test_leaving_when_the_worker_that_is_asked_first_cannot_be_dialled() -> None:
    with Network("a", "b", "c") as network:
        host_group(
            _only_leave,
            network,
            ["a", "b", "c"],
            network,
            options=_TUNED,
            advertise={0: _NOWHERE},
            timeout=45,
        )


def _leave_unheard(rank: int, world_size: int, network: Network) -> float:
    if not NIGHTLY:
        group_module.PATIENCE_S = 0.5  # type: ignore[misc] # instead of 10 s
    network.signals.meet("begun", rank, world_size)
    if rank == 0:
        network.split("a", "b", "c")
    network.signals.meet("split", rank, world_size)
    begun = time.monotonic()
    rpc.shutdown()
    return round(time.monotonic() - begun, 1)


@pytest.mark.prints(r"shutdown does not wait for 'worker\d' any longer: .*'worker\d' cannot be reached")
def test_leaving_a_group_that_is_split_and_whose_members_have_never_met() -> None:
    """No connection tells anybody of the split; nobody waits for ever for those who are on the other side.

    Those of d and e are the ones to be asked last: they have to give up three others before.
    """
    with Network("a", "b", "c", "d", "e") as network:
        took = host_group(
            _leave_unheard, network, ["a", "b", "c", "d", "e"], network, options=_TUNED, timeout=50
        )
    note("leaving a split group", {"s": took})
    assert max(took) <= 30.0 or not NIGHTLY


# -- how long it takes -------------------------------------------------------------------------------------------------


def _notice(rank: int, world_size: int, network: Network, how: str) -> float:
    meet = network.signals.meet
    other = f"worker{1 - rank}"
    _works(other)
    held = rpc.rpc_async(other, _stay, timeout=0)
    _entered_times(1)
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
    _dies(held, other)
    took = time.monotonic() - begun
    meet("known", rank, world_size)
    _let_go()
    return round(took, 2)


@pytest.mark.limit(900)
@pytest.mark.skipif(not NIGHTLY, reason="21 groups, one after the other: nightly")
@pytest.mark.parametrize("how", ["switch", "cable", "one way"])
def test_how_long_it_takes_to_notice_silence(how: str) -> None:
    for heartbeat, runs in ((0.2, 20), (2.0, 1)):
        took: list[float] = []
        for _ in range(runs):
            with Network("a", "b") as network:
                took += host_group(
                    _notice, network, ["a", "b"], network, how, options={"heartbeat": heartbeat}
                )
        note("silence noticed", {"how": how, "heartbeat_s": heartbeat, "runs": runs, "s": sorted(took)})
        # What was promised: 10 s by default, 1 s tuned; and what a machine that does other things as well needs. Whoever
        # still hears the other one has to be told by it, past a send buffer that TCP tries again ever more seldom.
        assert max(took) <= 5 * heartbeat * (2 if how == "one way" else 1) + 1.0
