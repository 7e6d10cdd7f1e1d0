"""Fan-out: send a large value to many actors, so that it leaves its host only a few times.

The calls are sent directly to the actors, so that each actor gets them in its caller's order. Each call contains an ObjectRef of
the value. The value is sent along a tree of the hosts on which the actors live. The host of the value is the root. One worker
per host fetches a snapshot from the host above, and the actors of the host read it from shared memory. (A worker that shares no
memory with others counts as a host.) If the worker above has died, or has failed to get the value, a worker fetches it from the
root.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import torch

from actorrpc._exceptions import is_of_handler
from actorrpc.actors.client.handle import ActorHandle, route_to
from actorrpc.actors.context import runtime
from actorrpc.actors.refs.host_copies import place_of
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.results import ATOMS, StoredResult
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.refs.wait import future_of
from actorrpc.actors.spec.actor_spec import Location
from actorrpc.agent.executor import Deferred
from actorrpc.futures import Future, collect_all
from actorrpc.rpc import api
from actorrpc.rpc.rref import RRef

__all__ = ["DIRECT", "LARGE", "WIDTH", "broadcast", "parent_of", "share", "weight_of"]

T = TypeVar("T")

DIRECT: Final = 8
"""For at most this many receivers, the caller sends an argument directly, however large it is."""
LARGE: Final = 1 << 20
"""Arguments of at least this many bytes are passed on from worker to worker."""
WIDTH: Final = 4
"""How many workers fetch from the root, and from each worker in the tree."""

_LOOKED_AT: Final = 1000  # the most items that are examined to compute the size of an argument


def weight_of(value: Any) -> int:
    """Return the approximate number of bytes of tensors, arrays and strings in an argument; 0 if it has to be sent directly.

    Looks into lists, tuples, sets and dicts, at most at 1 000 items. An argument with a tensor that requires gradients, or with a
    module, must be sent directly, because workers of the tree pass on copies.
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
            # Numpy arrays and similar objects.
            nbytes = getattr(type(item), "nbytes", None) and getattr(item, "nbytes", 0)
            if isinstance(nbytes, int):
                total += nbytes
    return total


def parent_of(place: int) -> int | None:
    """Return the place of the worker from which the worker at ``place`` fetches; None: it fetches from the root."""
    return None if place < WIDTH else place // WIDTH - 1


def share(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], located: Sequence[Future[Location]]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """Return the arguments for each receiver, with ObjectRefs in place of large arguments.

    Args:
        located: the location of each receiver, as a future.

    Returns:
        None if there are at most :data:`DIRECT` receivers, or no argument of at least :data:`LARGE` bytes.

    Raises:
        SerializationError: an argument cannot be sent.
    """
    for each in located:
        each.add_done_callback(Future.acknowledge)  # the call of that receiver reports the error
    if len(located) <= DIRECT:
        return None
    places: list[int | str] = [at for at, value in enumerate(args) if weight_of(value) >= LARGE]
    places += [name for name, value in kwargs.items() if weight_of(value) >= LARGE]
    if not places:
        return None
    given: list[tuple[list[Any], dict[str, Any]]] = [(list(args), dict(kwargs)) for _ in located]
    for place in places:
        value = args[place] if isinstance(place, int) else kwargs[place]
        kind = type(value).__name__
        ref: ObjectRef[Any] = ObjectRef.of(Snapshot.of(value), label=f"a shared argument ({kind})")
        for (mine, named), near in zip(given, _copy_to_all(ref, located), strict=True):
            if isinstance(place, int):
                mine[place] = near
            else:
                named[place] = near
    return [(tuple(mine), named) for mine, named in given]


def broadcast(ref: ObjectRef[T], actors: Iterable[ActorHandle[Any]]) -> list[ObjectRef[T]]:
    """Copy a value to the hosts on which actors live; return at once, with an ObjectRef for each actor to the copy on its host.

    The host of the value gets no copy. Each other host gets the value once, however many actors live there, from the host of
    the value or from a host that already has a copy. Each ObjectRef completes when the host has the value, and keeps that copy
    alive. Pass it to calls of its actor::

        refs = actorrpc.broadcast(weights, workers)
        get([worker.load.remote(ref) for worker, ref in zip(workers, refs)])

    Args:
        actors: handles, or an ActorGroup.

    Raises:
        TypeError: ``ref`` is not an ObjectRef, or one of the actors is not a handle.
    """
    if not isinstance(ref, ObjectRef):
        raise TypeError(f"broadcast() takes an ObjectRef, not a {type(ref).__name__}: put() the value first")
    located = [route_to(each, "broadcast()").located() for each in actors]
    for each in located:
        each.add_done_callback(Future.acknowledge)  # calls of the actor report the error
    return _copy_to_all(ref, located)


def _copy_to_all(ref: ObjectRef[T], located: Sequence[Future[Location]]) -> list[ObjectRef[T]]:
    """Copy a value to all receivers as soon as it exists and their locations are known."""
    source = ref._request()
    found: list[Future[Any]] = [Future() for _ in located]
    for future in found:
        future.label = ref._name()

    def known(_: Any) -> None:
        try:
            _copy_along_tree(ref, source.value(), found, [_worker_of(each) for each in located])
        except Exception as error:
            if is_of_handler(error):
                raise
            for future in found:
                future.follow(source, error)

    collect_all([source, *located]).add_done_callback(known)
    return [ObjectRef(future) for future in found]


def _worker_of(located: Future[Location]) -> str | None:
    location = located.value_or_none
    return None if location is None else location.worker_name


def _copy_along_tree(
    ref: ObjectRef[Any], value: Any, found: Sequence[Future[Any]], workers: Sequence[str | None]
) -> None:
    """Complete a future for each receiver with the value, or with a reference to the copy on its host."""
    if type(value) is StoredResult:
        root = value.rref
    elif type(value) in ATOMS:
        for future in found:
            future.set_result(value)
        return
    else:
        if type(value) is not Snapshot:  # the value came with a reply
            value = Snapshot.of(ref._value(value))
        root = RRef(value)
    agent = runtime().agent
    places = {worker: place_of(agent, worker) for worker in dict.fromkeys(workers) if worker is not None}
    roots_place = place_of(agent, root.owner_name())
    tree: list[RRef[Any]] = []
    copies: dict[str, RRef[Any]] = {}
    for future, worker in zip(found, workers, strict=True):
        place = roots_place if worker is None else places[worker]
        if place == roots_place:
            future.set_result(value)
            continue
        copy = copies.get(place)
        if copy is None:
            assert worker is not None
            above = parent_of(len(tree))
            try:
                copy = api.remote(
                    worker, _fetch_copy, (root if above is None else tree[above], root), timeout=0
                )
            except Exception as error:  # the worker has died with the receiver, whose call will fail
                if is_of_handler(error):
                    raise
                future.set_result(StoredResult(root))
                continue
            tree.append(copy)
            copies[place] = copy
        assert copy._creation is not None
        copy._creation.add_done_callback(partial(_complete_copy, future, copy, root))


def _complete_copy(future: Future[Any], copy: RRef[Any], root: RRef[Any], made: Future[None]) -> None:
    """Complete a receiver's future with a reference to its copy, or to the root if the copy could not be made."""
    future.set_result(StoredResult(copy if made.error is None else root))


def _fetch_copy(above: RRef[Any], root: RRef[Any]) -> Deferred:
    """Fetch the snapshot from the worker above or, if that fails, from the root. Runs on each worker in the tree."""
    answer: Future[Any] = Future()
    answer.label = what = "a value that is sent to many actors"
    agent = runtime().agent

    def first(done: Future[Any]) -> None:
        if done.error is None:
            answer.follow(done)
            return
        done.acknowledge()
        future_of(root, what).add_done_callback(answer.follow)
        agent.flush()

    future_of(above, what).add_done_callback(first)
    agent.flush()
    return Deferred(answer)
