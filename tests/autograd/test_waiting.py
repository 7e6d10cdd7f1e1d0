"""The thread that waits for a backward pass works off the gradients that it reads meanwhile: those of its own pass only."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from typing import Any

import pytest
import torch

from actorrpc import autograd, rpc
from actorrpc.autograd.messages import Gradient
from actorrpc.autograd.startup import participant
from actorrpc.futures import WAITING
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


def _here(rank: int, _: int) -> None:
    if rank:
        return
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


def test_gradients_are_worked_off_where_the_pass_is_waited_for() -> None:
    rpc_group(_here, 2)


def _side_by_side(rank: int, _: int) -> None:
    if rank:
        return
    threads = [threading.Thread(target=_passes) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
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


def test_passes_of_several_threads() -> None:
    rpc_group(_side_by_side, 2)


def _others(rank: int, _: int) -> None:
    if rank:
        return
    part, worker = participant(), threading.get_ident()
    advanced: list[int] = []
    done = threading.Event()
    advance = part.advance

    def noted(of: Any) -> None:
        advanced.append(threading.get_ident())
        advance(of)
        done.set()

    part.advance = noted  # type: ignore[method-assign]
    with autograd.context() as context:
        known = part.contexts.get(context)
        with known.lock:
            mine, others = part._join(known, 1, None), part._join(known, 2, None)
        assert mine is not None
        assert others is not None
        outer = part.transport.attend(mine)
        try:
            part._take(known, part.me, Gradient(context, 1, 0, 0, []))
            assert advanced == [worker]
            done.clear()
            part._take(known, part.me, Gradient(context, 2, 0, 0, []))
            assert done.wait(30)
            assert advanced[1] != worker
        finally:
            part.transport.leave(outer)
            known.passes.clear()


def test_those_of_other_passes_are_left_to_others() -> None:
    rpc_group(_others, 2)


def _interrupted(rank: int, _: int) -> None:
    if rank:
        return
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


def test_ctrl_c_in_a_hook_gives_the_pass_up() -> None:
    rpc_group(_interrupted, 2)


def _left_over(rank: int, _: int) -> None:
    if rank:
        return
    agent = rpc.api.references().agent  # type: ignore[attr-defined]
    transport = participant().transport
    executed = threading.Event()
    post, genuine = ("a post", None, 0.0), agent.pool._execute
    # The other rank asks for the end of the group meanwhile.
    agent.pool._execute = lambda task: executed.set() if task is post else genuine(task)
    try:
        outer = transport.attend(None)
        assert isinstance(WAITING.posts, deque)
        WAITING.posts.append(post)
        transport.leave(outer)
        assert executed.wait(30)
    finally:
        agent.pool._execute = genuine
    assert WAITING.posts is None


def test_what_has_not_been_worked_off_is_left_to_others() -> None:
    rpc_group(_left_over, 2)
