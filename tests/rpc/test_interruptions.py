"""Signal handlers that raise, at every step of the library's code: nothing is lost but what they were raised in."""

from __future__ import annotations

import gc
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc import autograd, rpc
from actorrpc.optim import DistributedOptimizer
from actorrpc.transport.connection_state import CLOSED
from tests.interruptions import Steps, raising
from tests.layers import rest_is_slow
from tests.ranks import rpc_group

_OPTIONS = {"rpc_timeout": 8.0}  # a call that is lost ends the test soon


class _Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, n: int) -> int:
        self.count += n
        return self.count

    def echo(self, value: Any) -> Any:
        return value

    def numbers(self, n: int) -> Any:
        yield from range(n)


def _echo(value: Any) -> Any:
    return value


class _Aside:
    """Another thread, which makes calls all the time; what it gets has to be right."""

    def __init__(self, to: str) -> None:
        self._to = to
        self._wanted, self._over = threading.Semaphore(0), threading.Event()
        self._done = threading.Semaphore(0)
        self.wrong: list[object] = []
        self.calls = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._wanted.acquire()
                if self._over.is_set():
                    return
                self.calls += 1
                if rpc.rpc_sync(self._to, operator.add, (self.calls, 1), timeout=8) != self.calls + 1:
                    self.wrong.append(self.calls)
                self._done.release()
        except BaseException as error:
            self.wrong.append(error)
        finally:
            self._done.release()

    def check(self, place: str) -> None:
        """Have a call made, and see that it was right."""
        self._wanted.release()
        if not self._done.acquire(timeout=10) or self.wrong:
            raise AssertionError(f"after a handler had raised at {place}: {self.wrong or 'no answer'}")

    def close(self) -> None:
        self._over.set()
        self._wanted.release()
        self._thread.join()


def _works() -> dict[str, Callable[[], Any]]:
    tensor = torch.arange(262_144)
    small = torch.arange(100.0)
    held = rpc.remote("worker1", _echo, (5,))
    held.to_here()
    actor = actorrpc.remote(_Counter).options(worker="worker1").remote()
    actorrpc.get(actor.add.remote(1))
    trained = rpc.RRef(torch.ones(3, requires_grad=True))
    optimizer = DistributedOptimizer(torch.optim.SGD, [trained], lr=1.0)

    def many() -> None:
        futures = [rpc.rpc_async("worker1", operator.add, (i, 1)) for i in range(6)]
        assert [each.wait() for each in futures] == list(range(1, 7))

    def chained() -> None:
        assert rpc.rpc_async("worker1", operator.add, (1, 1)).then(lambda done: done.wait() + 1).wait() == 3

    def remote() -> None:
        assert rpc.remote("worker1", operator.add, (1, 2)).to_here() == 3

    def held_rref() -> None:
        assert rpc.rpc_sync("worker1", rpc.RRef.to_here, (held,)) == 5

    def own() -> None:
        assert rpc.rpc_sync("worker0", operator.add, (1, 2)) == 3

    def actor_call() -> None:
        actorrpc.get(actor.add.remote(1))

    def actor_tensor() -> None:
        assert torch.equal(actorrpc.get(actor.echo.remote(small)), small)

    def waits() -> None:
        refs = [actor.echo.remote(i) for i in range(4)]
        ready, rest = actorrpc.wait(refs, num_returns=4)
        assert not rest
        assert sorted(actorrpc.get(ready)) == [0, 1, 2, 3]

    def put() -> None:
        assert actorrpc.get(actor.echo.remote(actorrpc.put(7))) == 7

    def stream() -> None:
        assert [actorrpc.get(each) for each in actor.numbers.options(num_returns="streaming").remote(4)] == [
            0,
            1,
            2,
            3,
        ]

    def created() -> None:
        other = actorrpc.remote(_Counter).options(worker="worker1").remote()
        assert actorrpc.get(other.add.remote(1)) == 1
        actorrpc.kill(other)

    def backward() -> None:
        weight = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.mul, (weight, 2.0)).sum()
            autograd.backward(context_id, [loss])
            assert autograd.get_gradients(context_id)[weight].tolist() == [2.0] * 3

    def accumulated() -> None:
        weight = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.mul, (weight, 2.0)).sum()
            autograd.backward(context_id, [loss], accumulate="grad")
            assert weight.grad is not None
            assert weight.grad.tolist() == [2.0] * 3

    def stepped() -> None:
        before = trained.local_value().tolist()
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.mul, (trained.local_value(), 2.0)).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        # The step of an earlier time, which was interrupted, may have been under way.
        assert all(
            now <= each - 2.0 for now, each in zip(trained.local_value().tolist(), before, strict=True)
        )

    def returned(value: Any, wanted: Any) -> None:
        got = rpc.rpc_sync("worker1", _echo, (value,))
        assert got.tolist() == wanted.tolist() if isinstance(wanted, torch.Tensor) else got() == wanted

    def added() -> None:
        assert rpc.rpc_sync("worker1", operator.add, (1, 2)) == 3

    def fails() -> None:
        with pytest.raises(ZeroDivisionError):
            rpc.rpc_sync("worker1", operator.truediv, (1, 0))

    return {
        "small tensor": lambda: returned(small, small),
        "sync": added,
        "tensor": lambda: returned(tensor, tensor),
        "by value": lambda: returned(lambda: 3, 3),
        "fails": fails,
        "many": many,
        "chained": chained,
        "remote": remote,
        "rref": held_rref,
        "own": own,
        "actor": actor_call,
        "actor tensor": actor_tensor,
        "waits": waits,
        "put": put,
        "stream": stream,
        "created": created,
        "backward": backward,
        "accumulated": accumulated,
        "stepped": stepped,
    }


def _interrupted(rank: int, world_size: int, name: str) -> int:
    if rank:
        return 0
    agent = rpc.api._require().agent  # type: ignore[attr-defined]
    works = _works()
    peer = agent.peer("worker1")
    conn = peer.conn
    aside = _Aside("worker1")
    count = 0
    try:
        with raising() as raised:
            count = Steps().at_each(works[name], raised, aside.check)
        works[name]()
    finally:
        aside.close()
        gc.collect()  # frames and what traces them
    assert peer.conn is conn
    assert conn.state is not CLOSED
    return count


_WORKS = (
    "small tensor",
    "sync",
    "tensor",
    "by value",
    "fails",
    "many",
    "chained",
    "remote",
    "rref",
    "own",
    "actor",
    "actor tensor",
    "waits",
    "put",
    "stream",
    "created",
    "backward",
    "accumulated",
    "stepped",
)


# Of calls whose caller was interrupted before it had their futures.
_UNSEEN = r"the call of (step|backward \(\w+\)) on 'worker\d' failed and nobody looked at the error"


@pytest.mark.limit(60)
@pytest.mark.prints(_UNSEEN)
@pytest.mark.parametrize("name", rest_is_slow(_WORKS, 1))
def test_each_step(name: str) -> None:
    assert rpc_group(_interrupted, 2, name, timeout=50, options=_OPTIONS)[0] > 30


@pytest.mark.slow
@pytest.mark.limit(60)
@pytest.mark.prints(_UNSEEN)
@pytest.mark.parametrize("name", _WORKS)
def test_each_step_between_hosts(name: str) -> None:
    options = {"transport": "tcp", "lane": False}
    assert rpc_group(_interrupted, 2, name, timeout=50, options=_OPTIONS | options)[0] > 30
