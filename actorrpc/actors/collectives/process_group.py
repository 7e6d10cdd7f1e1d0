"""Process groups of ``torch.distributed``, made without its default group, and broken from outside.

torch makes groups as parts of one default group for each process. Actors need groups of their own: several at once, some in a
process that has a default group already. So a group is put together from the same parts that ``init_process_group`` uses
(a store, a backend, a ``ProcessGroup``) and entered into the same tables, but it never becomes the default.

The store is a Python one (:class:`CallStore`): what torch's backends say to each other before they connect travels as
calls, authenticated and encrypted as all calls are. What they say afterwards goes over sockets of their own, as in torch.

gloo cannot be aborted: a thread in a collective waits for its peers until the time-out. :func:`cut` shuts those
sockets down, which ends it at once, on both sides. They are found by the addresses that went through the store.

The functions here may be called on any thread; a store belongs to the thread that makes the group.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _register_process_group
from torch.distributed import distributed_c10d as c10d

from actorrpc.errors import ConfigError

__all__ = ["BACKENDS", "CallStore", "check_backend", "connections", "cut", "forget", "make"]

BACKENDS: Final = ("gloo", "nccl")
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)


class CallStore(Store):
    """torch's key-value store, kept by the worker that answers ``ask``. Remembers what it has seen.

    Args:
        ask: called with ``"put"``, ``"take"``, ``"add"``, ``"has"``, ``"swap"`` or ``"drop"`` and what that takes.
            ``"take"`` waits until all of the keys are there.

    Attributes:
        seen: the values that went through it, by key.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        super().__init__()
        self._ask = ask
        self.seen: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.seen[key] = data
        self._ask("put", key, data)

    def get(self, key: str) -> bytes:
        """Return a value; waits for it."""
        if key not in self.seen:
            self.wait([key])
        return self.seen[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for values. They are fetched at once: what is waited for is read next, and no key changes its value."""
        del timeout  # that of the whole making of a group is the one that counts
        missing = [key for key in keys if key not in self.seen]
        if missing:
            self.seen.update(zip(missing, self._ask("take", missing), strict=True))

    def check(self, keys: list[str]) -> bool:
        """Say whether all of these keys have values."""
        return bool(self._ask("has", list(keys)))

    def add(self, key: str, value: int) -> int:
        """Add to a number, which begins with 0; return the sum."""
        return int(self._ask("add", key, int(value)))

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        """Replace a value if it is the expected one; return what is there then."""
        old, new = (
            each.encode() if isinstance(each, str) else bytes(each)
            for each in (expected_value, desired_value)
        )
        return bytes(self._ask("swap", key, old, new))

    def clone(self) -> CallStore:
        """Return itself, which any thread may use: NCCL's has threads that want a connection of their own."""
        return self

    def delete_key(self, key: str) -> bool:
        """Forget a value; say whether there was one."""
        self.seen.pop(key, None)
        return bool(self._ask("drop", key))


def check_backend(backend: Any) -> str:
    """Return a backend that can be used.

    Raises:
        ConfigError: it is none of :data:`BACKENDS`, or this torch has not got it.
    """
    if backend not in BACKENDS:
        raise ConfigError(f'backend must be "gloo" (CPU) or "nccl" (CUDA), not {backend!r}')
    if backend == "gloo" and not dist.is_gloo_available():
        raise ConfigError("this torch was built without gloo: backend='gloo' cannot be used")
    if backend == "nccl" and not dist.is_nccl_available():
        raise ConfigError(
            "backend='nccl' needs a torch with CUDA and NCCL, which this one is not; backend='gloo' works on the CPU"
        )
    return str(backend)


def check_devices(backend: str) -> None:
    """See whether a backend can be used by this process.

    Raises:
        ConfigError: NCCL is wanted, and no GPU can be seen here.
    """
    check_backend(backend)
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            "backend='nccl' needs a GPU, and this process sees none (an actor in a process of its own sees those that "
            "num_gpus= gives it)"
        )


def make(
    store: CallStore,
    rank: int,
    size: int,
    *,
    backend: str,
    name: str,
    timeout_s: float,
    join_s: float,
    address: str,
) -> dist.ProcessGroup:
    """Make a group together with the other members; waits for them.

    Args:
        name: what torch knows it by in this process; no other group here has it.
        timeout_s: seconds that an operation may take.
        join_s: seconds that connecting may take.
        address: this host's, as the others reach it: a name or a number. ``GLOO_SOCKET_IFNAME`` goes first.

    Raises:
        RuntimeError: the others cannot be reached.
        ConfigError: the backend cannot be used here.
    """
    check_devices(backend)
    # As init_process_group makes its own: prefixes keep the backends' keys apart.
    outer = PrefixStore("group/", store)
    group = dist.ProcessGroup(outer, rank, size)
    parts: Any = c10d  # much of it is not in torch's stubs
    kinds = dist.ProcessGroup.BackendType
    if backend == "gloo":
        options = parts.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=join_s)
        options._devices = _devices(address)
        made = parts.ProcessGroupGloo(PrefixStore("cpu/", outer), rank, size, options)
        made._set_default_timeout(timedelta(seconds=timeout_s))
        kind, devices = kinds.GLOO, ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    else:
        options = parts.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        made = parts.ProcessGroupNCCL(PrefixStore("cuda/", outer), rank, size, options)
        kind, devices = kinds.NCCL, ("cuda",)
    made._set_sequence_number_for_group()
    entered: Any = group
    entered._set_default_backend(kind)
    for device in devices:
        entered._register_backend(torch.device(device), kind, made)
    entered._set_group_name(name)
    entered._set_group_desc(f"actorrpc collective {name}")
    _enter(group, name, backend, ",".join(f"{device}:{backend}" for device in devices), outer, size)
    return group


def _devices(address: str) -> list[Any]:
    create: Any = c10d.ProcessGroupGloo.create_device
    named = [each.strip() for each in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")]
    if any(named):
        return [create(interface=each) for each in named if each]
    try:
        return [create(hostname=address)]
    except RuntimeError:
        # What others reach this host by is not its own (a translated address): gloo takes that of the host's name.
        return [create()]


def _enter(group: dist.ProcessGroup, name: str, backend: str, config: str, store: Any, size: int) -> None:
    """Enter a group where the functions of torch.distributed look it up. Its ranks are all the ranks that it knows."""
    world: Any = c10d._world
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    world.pg_backend_config[group] = config
    tag = f"user:{name}"
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    enter: Any = _register_process_group
    enter(name, group)


def cut(group: dist.ProcessGroup | None, store: CallStore | None, backend: str) -> int:
    """End what a group is doing, here and at its peers, and whatever it would do later. Idempotent.

    Returns:
        How many sockets were shut down.
    """
    if backend == "nccl":
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()
        return 0
    if store is None:
        return 0
    found = 0
    for sock in _sockets(store):
        with sock, contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
            found += 1
    return found


def connections(store: CallStore) -> int:
    """Return how many ends of gloo's connections of a group live in this process."""
    count = 0
    for sock in _sockets(store):
        with sock:
            try:
                # One that has been shut down is still open for a moment.
                count += sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
            except BlockingIOError:
                count += 1
            except OSError:
                pass
    return count


def forget(group: dist.ProcessGroup) -> None:
    """Take a group out of torch's tables. Its threads end with the last reference to it."""
    with contextlib.suppress(ValueError, AssertionError, KeyError, RuntimeError):  # somebody else has done so
        dist.destroy_process_group(group)
    world: Any = c10d._world
    for tag in [tag for tag, groups in world.tags_to_pg.items() if not groups]:
        if tag.startswith("user:"):
            world.tags_to_pg.pop(tag, None)


def _sockets(store: CallStore) -> Iterator[socket.socket]:
    """Find the sockets of which one end has an address that was published; the descriptors are to be closed."""
    published = b"".join(store.seen.values())
    for entry in os.listdir("/proc/self/fd"):
        try:
            # A descriptor of our own: the other may be closed, and used again, at any time.
            copy = os.dup(int(entry))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        try:
            ends = (sock.getsockname(), sock.getpeername()) if sock.family in _FAMILIES else ()
        except OSError:  # a listener, or not connected any more
            ends = ()
        if any(_packed(sock.family, end) in published for end in ends):
            yield sock
        else:
            sock.close()


def _packed(family: int, end: tuple[Any, ...]) -> bytes:
    """Return an address as it is in memory: gloo publishes it like this."""
    begin = struct.pack("=H", family) + struct.pack("!H", end[1])
    if family == socket.AF_INET:
        return begin + socket.inet_pton(family, end[0])
    return begin + b"\0\0\0\0" + socket.inet_pton(family, end[0].partition("%")[0])
