"""The ``.grad`` of leaves, one user at a time.

Hooks of a leaf run on a gradient only while the engine puts it into ``.grad``, and a local optimizer takes it from
there: both are done with the slot borrowed, and what was in it is put back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from actorrpc import moments
from actorrpc.errors import RpcTimeoutError

__all__ = ["borrowed"]

_SLICE_S: Final = 1.0

# Guards ``_taken`` only; held for microseconds. Re-entrant: the collector may run under it.
_changed = threading.Condition(threading.RLock())
_taken: set[torch.Tensor] = set()  # tensors hash by identity


@contextmanager
def borrowed(
    leaves: Iterable[torch.Tensor], deadline: float | None = None
) -> Iterator[list[torch.Tensor | None]]:
    """Have the ``.grad`` of leaves for oneself, empty; afterwards it is what it was.

    All are taken at once, so that two users of overlapping sets cannot wait for each other. The block is given what was in
    the slots, in order, and what it puts into that list is what is there afterwards.

    Args:
        leaves: the tensors; each once.
        deadline: on the monotonic clock; None waits for as long as others use them.

    Raises:
        RpcTimeoutError: others did not give them back in time. Nothing was taken.
    """
    mine = list(leaves)
    wanted = set(mine)
    with _changed:
        while not wanted.isdisjoint(_taken):
            left = _SLICE_S if deadline is None else deadline - moments.now()
            if left <= 0:
                raise RpcTimeoutError(
                    "another backward pass or optimizer did not give the gradients of a leaf back in time"
                )
            _changed.wait(min(moments.patience(left), _SLICE_S))
        _taken.update(wanted)
    try:
        before = [leaf.grad for leaf in mine]
        for leaf in mine:
            leaf.grad = None
        try:
            yield before
        finally:
            for leaf, grad in zip(mine, before, strict=True):
                leaf.grad = grad
    finally:
        with _changed:
            _taken.difference_update(wanted)
            _changed.notify_all()
