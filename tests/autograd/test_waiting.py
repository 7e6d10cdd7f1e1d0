"""The thread that waits for a backward pass processes gradients of its own pass, and of no other pass."""

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
    """Send a tensor to the other worker several times; ``hook`` runs here in each step of the backward pass."""
    found = leaf
    for _ in range(_HOPS):
        found = rpc.rpc_sync("worker1", twice, (found * 1.0,))
        if hook is not None:
            found = found * 1.0
            found.register_hook(hook)
    return found


def _hooks_run_in_the_waiting_thread() -> None:
    leaf, threads = torch.ones(2, requires_grad=True), list[int]()
    for _ in range(20):
        with autograd.context() as context:
            loss = _there_and_back(leaf, lambda _: threads.append(threading.get_ident())).sum()
            autograd.backward(context, [loss])
            assert autograd.get_gradients(context)[leaf].tolist() == [2.0**_HOPS] * 2
        assert WAITING.casts is None
    assert len(threads) == 20 * _HOPS
    # Another thread reads gradients that arrive before this thread waits.
    assert threads.count(threading.get_ident())
    # Later waits of this thread read messages of other calls again.
    assert rpc.rpc_sync("worker1", twice, (torch.ones(1),)).item() == 2.0


def _four_threads() -> None:
    in_threads(_passes, [() for _ in range(4)])
    assert not _wrong, _wrong


_wrong: list[object] = []


def _passes() -> None:
    try:
        leaf, held = torch.ones(2, requires_grad=True), threading.Lock()

        def hook(_: torch.Tensor) -> None:
            # The waiting thread holds this lock during the pass. Another thread's wait must not run this pass's hooks.
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
    calls = 0

    def hook(_: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with autograd.context() as context:
        loss = _there_and_back(leaf, hook).sum()
        with pytest.raises(KeyboardInterrupt):
            autograd.backward(context, [loss])
        assert autograd.get_gradients(context) == {}
        assert WAITING.casts is None
    with autograd.context() as context:
        autograd.backward(context, [_there_and_back(leaf).sum()])
        assert autograd.get_gradients(context)[leaf].tolist() == [2.0**_HOPS] * 2


def _passes_of_all_kinds(rank: int, _: int) -> None:
    if rank == 0:
        _hooks_run_in_the_waiting_thread()
        _four_threads()
        _interrupted()


def test_the_waiting_thread_runs_hooks_of_its_own_pass_and_ctrl_c_ends_the_pass() -> None:
    rpc_group(_passes_of_all_kinds, 2)
