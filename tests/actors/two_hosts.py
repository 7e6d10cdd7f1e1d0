"""A group of processes of one host that believe to be on two hosts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from actorrpc import rpc
from actorrpc.wire import keys
from tests.ports import free_port
from tests.ranks import run_group

__all__ = ["run"]


def _main(
    rank: int,
    world_size: int,
    port: int,
    here: int,
    work: Callable[[], Any],
    prepare: Callable[[], Any],
    finish: Callable[[], Any],
) -> None:
    group = importlib.import_module("actorrpc.group.group")
    host = ("a" if rank < here else "b") * 32
    group.host_identity = lambda: host
    prepare()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", bind="127.0.0.1")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    try:
        if rank == 0:
            work()
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    rpc.shutdown()
    finish()


def run(
    work: Callable[[], Any],
    world_size: int,
    *,
    here: int = 1,
    prepare: Callable[[], Any] = dict,
    finish: Callable[[], Any] = dict,
    may_die: tuple[int, ...] = (),
) -> None:
    """Run ``work()`` on rank 0 of a group, ``prepare()`` on each rank before it joins, and ``finish()`` after it has left.

    The first ``here`` ranks believe to be on one host, and all others on another host.
    """
    env = {"ACTORRPC_KEY": "a key for tests of two hosts, long enough"}
    try:
        run_group(_main, world_size, free_port(), here, work, prepare, finish, env=env, may_die=may_die)
    finally:
        keys.sweep()  # removes the files of killed processes
