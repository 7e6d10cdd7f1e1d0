"""Fan-out: how a large argument reaches many actors without leaving its caller once for each of them.

The calls themselves go straight to the actors, so that each gets them in its caller's order. Only the argument takes
another way: the workers on which the actors live form a tree below the caller, each fetches a snapshot of the argument
from the one above it, and the actors there open it. In the calls stands an ObjectRef for it. A worker whose upper
neighbour has died, or failed to get the argument, fetches it from the caller itself.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from actorrpc._exception_text import is_of_handler
from actorrpc.actors.refs.object_ref import ObjectRef, StoredResult
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.spec.actor_spec import Location
from actorrpc.agent.executor import Later
from actorrpc.futures import Future, collect_all
from actorrpc.rpc import api
from actorrpc.rpc.rref import RRef

__all__ = ["DIRECT", "LARGE", "WIDTH", "parent_of", "share", "weight_of"]

_log = logging.getLogger("actorrpc.actors")

DIRECT: Final = 8
"""Up to so many receivers get an argument from the caller, however large it is."""
LARGE: Final = 1 << 20
"""Arguments of so many bytes and more are passed on from worker to worker."""
WIDTH: Final = 4
"""How many workers fetch from the caller, and from each worker in the tree."""

_LOOKED_AT: Final = 1000  # items of containers that are looked at to find out how large an argument is


def weight_of(value: Any) -> int:
    """Return about how many bytes of tensors, arrays and strings an argument has; 0 if it has to go directly.

    Looks into lists, tuples, sets and dicts, at most at 1 000 items. A tensor that takes part in autograd goes directly:
    what is passed on are copies.
    """
    total = 0
    left = deque([value])
    opened: set[int] = set()  # containers may contain each other
    for _ in range(_LOOKED_AT):
        if not left:
            break
        item = left.popleft()
        if isinstance(item, (list, tuple, set, frozenset, dict)):
            if id(item) not in opened:
                opened.add(id(item))
                items = item.values() if isinstance(item, dict) else item
                left.extend(itertools.islice(items, _LOOKED_AT))
        elif isinstance(item, torch.Tensor):
            if item.requires_grad:
                return 0
            total += item.numel() * item.element_size()
        elif isinstance(item, (bytes, bytearray, str)):
            total += len(item)
        elif isinstance(item, memoryview):
            total += item.nbytes
        elif isinstance(item, torch.nn.Module):
            return 0
        else:
            # Numpy's arrays and the like.
            nbytes = getattr(type(item), "nbytes", None) and getattr(item, "nbytes", 0)
            if isinstance(nbytes, int):
                total += nbytes
    return total


def parent_of(place: int) -> int | None:
    """Return from which place in the tree a worker fetches; None: from the caller."""
    return None if place < WIDTH else place // WIDTH - 1


def share(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], located: Sequence[Future[Location]], here: str
) -> list[tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """Return the arguments for each receiver, with ObjectRefs in place of the large ones.

    Args:
        located: for each receiver, where it lives, or will.
        here: the name of this worker.

    Returns:
        None where nothing is gained: there are few receivers, or no large argument.

    Raises:
        SerializationError: an argument cannot be sent.
    """
    for each in located:
        each.add_done_callback(Future.acknowledge)  # its call fails in the same way
    if len(located) <= DIRECT:
        return None
    places: list[int | str] = [at for at, value in enumerate(args) if weight_of(value) >= LARGE]
    places += [name for name, value in kwargs.items() if weight_of(value) >= LARGE]
    if not places:
        return None
    given: list[tuple[list[Any], dict[str, Any]]] = [(list(args), dict(kwargs)) for _ in located]
    for place in places:
        value = args[place] if isinstance(place, int) else kwargs[place]
        root: RRef[Any] = RRef(Snapshot.of(value))
        found: list[Future[Any]] = []
        for mine, named in given:
            future: Future[Any] = Future()
            found.append(future)
            ref: ObjectRef[Any] = ObjectRef(future, label=f"a shared argument ({type(value).__name__})")
            if isinstance(place, int):
                mine[place] = ref
            else:
                named[place] = ref
        _plant(root, found, located, here)
    return [(tuple(mine), named) for mine, named in given]


def _plant(root: RRef[Any], found: list[Future[Any]], located: Sequence[Future[Location]], here: str) -> None:
    """Have the argument brought to all receivers, as soon as it is known where those are."""

    def known(_: Any) -> None:
        try:
            sources = _grow(root, [_worker_of(future) for future in located], here)
        except Exception:
            _log.exception("a large argument could not be passed on from worker to worker; all fetch it here")
            sources = [root] * len(found)
        for future, source in zip(found, sources, strict=True):
            future.set_result(StoredResult(source))

    collect_all(located).add_done_callback(known)


def _worker_of(located: Future[Location]) -> str | None:
    if located._error is None:
        return located._value.worker_name  # type: ignore[no-any-return]
    return None


def _grow(root: RRef[Any], workers: list[str | None], here: str) -> list[RRef[Any]]:
    """Return, for each receiver, the RRef of the copy that it is to use: that on its worker."""
    copies: dict[str, RRef[Any]] = {here: root}
    tree: list[RRef[Any]] = []
    for worker in dict.fromkeys(workers):
        if worker is None or worker in copies:
            continue
        above = parent_of(len(tree))
        try:
            copy: RRef[Any] = api.remote(
                worker, _fetch_copy, (root if above is None else tree[above], root), timeout=0
            )
        except Exception as error:  # it has died since: so has the receiver, whose call will say so
            if is_of_handler(error):
                raise
            continue
        tree.append(copy)
        copies[worker] = copy
    return [root if worker is None else copies.get(worker, root) for worker in workers]


def _fetch_copy(above: RRef[Any], root: RRef[Any]) -> Later:
    """Get the argument's snapshot from the worker above, or from the caller. Runs on each worker in the tree."""
    answer: Future[Any] = Future()
    answer.label = "a large argument"

    def first(done: Future[Any]) -> None:
        if done._error is None:
            answer.set_result(done._value)
            return
        done.acknowledge()
        root._to_future().add_done_callback(second)
        root._references.agent.flush()

    def second(done: Future[Any]) -> None:
        if done._error is None:
            answer.set_result(done._value)
        else:
            done.acknowledge()
            answer.set_exception(done._error)

    above._to_future().add_done_callback(first)
    above._references.agent.flush()
    return Later(answer)
