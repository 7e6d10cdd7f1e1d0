"""The thread that waits for a backward pass works off the gradients that it reads meanwhile: those of its own pass only."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

from actorrpc import autograd, rpc
from actorrpc.futures import WAITING
from tests.agent.together import in_threads
from tests.ranks import rpc_group

_HOPS = 5


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _there_and_back(leaf: torch.Tensor, hook: Any = None) -> torch.Tensor:
    """Return what has gone to the other worker several times; ``hook`` runs on the way back, here."""
    found = leaf
    for _ in range(_HOPS):
        found = rpc.rpc_sync("worker1", twice, (found * 1.0,))
        if hook is not None:
            found = found * 1.0
            found.register_hook(hook)
    return found


def _here() -> None:
    leaf, threads = torch.ones(2, requires_grad=True), list[int]()
    for _ in range(20):
        with autograd.context() as context:
            loss = _there_and_back(leaf, lambda _: threads.append(threading.get_ident())).sum()
            autograd.backward(context, [loss])
            assert autograd.get_gradients(context)[leaf].tolist() == [2.0**_HOPS] * 2
        assert WAITING.posts is None
    assert len(threads) == 20 * _HOPS
    # A gradient that comes before this thread has begun to wait is read by another one.
    assert threads.count(threading.get_ident())
    # Its own waits afterwards read for others again.
    assert rpc.rpc_sync("worker1", twice, (torch.ones(1),)).item() == 2.0


def _side_by_side() -> None:
    in_threads(_passes, [() for _ in range(4)])
    assert not _wrong, _wrong


_wrong: list[object] = []


def _passes() -> None:
    try:
        leaf, held = torch.ones(2, requires_grad=True), threading.Lock()

        def hook(_: torch.Tensor) -> None:
            # Held over the pass by the thread that waits for it: no other thread's wait may run this one's hooks under its own.
            assert held.locked()

        for _ in range(15):
            with held, autograd.context() as context:
                autograd.backward(context, [_there_and_back(leaf, hook).sum()])
                assert autograd.get_gradients(context)[leaf].tolist() == [2.0**_HOPS] * 2
    except BaseException as error:
        _wrong.append(error)
        raise


def _interrupted() -> None:
    leaf = torch.ones(2, requires_grad=True)
    asked = 0

    def hook(_: torch.Tensor) -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with autograd.context() as context:
        loss = _there_and_back(leaf, hook).sum()
        with pytest.raises(KeyboardInterrupt):
            autograd.backward(context, [loss])
        assert autograd.get_gradients(context) == {}
        assert WAITING.posts is None
    with autograd.context() as context:
        autograd.backward(context, [_there_and_back(leaf).sum()])
        assert autograd.get_gradients(context)[leaf].tolist() == [2.0**_HOPS] * 2


def _passes_of_all_kinds(rank: int, _: int) -> None:
    if rank == 0:
        _here()
        _side_by_side()
        _interrupted()


def test_gradients_are_worked_off_where_the_pass_is_waited_for_until_ctrl_c() -> None:
    rpc_group(_passes_of_all_kinds, 2)
