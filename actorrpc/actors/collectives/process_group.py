"""Process groups of ``torch.distributed`` that are made without its default group, and that another thread can end.

torch makes groups as parts of one default group per process. Actors need independent groups: several at once, some in a process
that already has a default group. So a group is made of the same parts that ``init_process_group`` uses (a store, a backend, a
``ProcessGroup``) and entered into the same tables, but it never becomes the default group.

The store is a Python class (:class:`CallStore`): data that torch's backends exchange before they connect is sent in calls, which
are authenticated and encrypted like all calls. After that, the backends use sockets of their own, as in torch.

gloo operations cannot be aborted: a thread in an operation waits for its peers until the time-out. :func:`cut` shuts the
backend's sockets down, which ends the operation at once on both sides. It finds the sockets by the addresses in the store.

Any thread may call the functions of this module.
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
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from actorrpc import _torch
from actorrpc.errors import ConfigError

__all__ = ["BACKENDS", "CallStore", "check_backend", "connections", "cut", "forget", "make"]

BACKENDS: Final = ("gloo", "nccl")
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)


class CallStore(Store):
    """torch's key-value store, kept by the worker that answers ``query``.

    Args:
        query: called with ``"put"``, ``"get"``, ``"add"``, ``"has"``, ``"swap"`` or ``"drop"``, and arguments.
            ``"get"`` waits until all of the keys exist.

    Attributes:
        seen: the values that were written or read, by key.
    """

    def __init__(self, query: Callable[..., Any]) -> None:
        super().__init__()
        self._query = query
        self.seen: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.seen[key] = data
        self._query("put", key, data)

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        if key not in self.seen:
            self.wait([key])
        return self.seen[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for values, and keep them for :meth:`get`: torch reads them next, and does not change them."""
        del timeout  # ``query`` has the time-out of making the group
        missing = [key for key in keys if key not in self.seen]
        if missing:
            self.seen.update(zip(missing, self._query("get", missing), strict=True))

    def check(self, keys: list[str]) -> bool:
        """Say whether all of these keys have values."""
        return bool(self._query("has", list(keys)))

    def add(self, key: str, value: int) -> int:
        """Add to a number, which starts at 0; return the sum."""
        return int(self._query("add", key, int(value)))

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        """Replace a value if it equals the expected value; return the value after that (the expected value if there is none)."""
        old, new = (
            each.encode() if isinstance(each, str) else bytes(each)
            for each in (expected_value, desired_value)
        )
        return bytes(self._query("swap", key, old, new))

    def clone(self) -> CallStore:
        """Return the same object, which any thread may use. (NCCL clones a store to get a connection per thread.)"""
        return self

    def delete_key(self, key: str) -> bool:
        """Remove a value; say whether there was a value."""
        self.seen.pop(key, None)
        return bool(self._query("drop", key))


def check_backend(backend: Any) -> str:
    """Return a backend after checking that it can be used.

    Raises:
        ConfigError: ``backend`` is not in :data:`BACKENDS`, or this torch does not support it.
    """
    if backend not in BACKENDS:
        raise ConfigError(f'backend must be "gloo" (CPU) or "nccl" (CUDA), not {backend!r}')
    if backend == "gloo" and not dist.is_gloo_available():
        raise ConfigError("this torch was built without gloo: backend='gloo' cannot be used")
    if backend == "nccl" and not dist.is_nccl_available():
        raise ConfigError(
            "backend='nccl' needs a build of torch with CUDA and NCCL; backend='gloo' works on the CPU"
        )
    return str(backend)


def check_devices(backend: str) -> None:
    """Check that this process can use a backend.

    Raises:
        ConfigError: the backend is NCCL, and no GPU is visible here.
    """
    check_backend(backend)
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            "backend='nccl' needs a GPU, and this process sees none (an actor in a process of its own sees the GPUs that "
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
    """Make a group together with the other members; waits for them. See :func:`check_devices` for ``backend``.

    Args:
        name: the group's name for torch, unique in this process.
        timeout_s: seconds that an operation may take.
        join_s: seconds that connecting may take.
        address: the address, a name or a number, by which other members reach this host. ``GLOO_SOCKET_IFNAME`` overrides it.

    Raises:
        RuntimeError: the others cannot be reached.
    """
    # As in init_process_group: prefixes separate the keys of different backends.
    outer = PrefixStore("group/", store)
    group = dist.ProcessGroup(outer, rank, size)
    parts: Any = c10d  # many attributes are missing in torch's stubs
    kinds = dist.ProcessGroup.BackendType
    if backend == "gloo":
        options = _torch.gloo_options(parts.ProcessGroupGloo)()
        setattr(options, _torch.TIMEOUT, timedelta(seconds=join_s))
        setattr(options, _torch.DEVICES, _devices(address))
        made = parts.ProcessGroupGloo(PrefixStore("cpu/", outer), rank, size, options)
        _torch.set_default_timeout(made)(timedelta(seconds=timeout_s))
        kind, devices = kinds.GLOO, ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    else:
        options = parts.ProcessGroupNCCL.Options()
        setattr(options, _torch.TIMEOUT, timedelta(seconds=timeout_s))
        made = parts.ProcessGroupNCCL(PrefixStore("cuda/", outer), rank, size, options)
        kind, devices = kinds.NCCL, ("cuda",)
    set_kind, set_backend, set_name, set_description = _torch.setters(group)
    set_kind(kind)
    for device in devices:
        set_backend(torch.device(device), kind, made)
    set_name(name)
    set_description(f"actorrpc collective {name}")
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
        # The address is of another machine, which forwards connections (NAT): let gloo use the address of the host's name.
        return [create()]


def _enter(group: dist.ProcessGroup, name: str, backend: str, config: str, store: Any, size: int) -> None:
    """Enter a group into the tables of torch.distributed. The members' global ranks, for torch, are their ranks in the group."""
    world: Any = _torch.world_of(c10d)
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    world.pg_backend_config[group] = config
    tag = f"user:{name}"
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    _torch.enter_group(name, group)


def cut(group: dist.ProcessGroup | None, store: CallStore | None, backend: str) -> int:
    """End running and later operations of a group, here and at its peers. Idempotent.

    Returns:
        How many sockets were shut down; 0 for NCCL, which aborts operations itself.
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
    """Return how many of the group's gloo connections are still open in this process."""
    count = 0
    for sock in _sockets(store):
        with sock:
            try:
                # A socket that was shut down stays open for a moment, but returns end of file.
                count += sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
            except BlockingIOError:
                count += 1
            except OSError:
                pass
    return count


def forget(group: dist.ProcessGroup) -> None:
    """Remove a group from torch's tables. The group's threads end when no object refers to the group."""
    with contextlib.suppress(ValueError, AssertionError, KeyError, RuntimeError):  # it was removed before
        dist.destroy_process_group(group)
    world: Any = _torch.world_of(c10d)
    for tag in [tag for tag, groups in world.tags_to_pg.items() if not groups]:
        if tag.startswith("user:"):
            world.tags_to_pg.pop(tag, None)


def _sockets(store: CallStore) -> Iterator[socket.socket]:
    """Yield duplicates of the sockets whose local or remote address is in the store; the caller closes them."""
    published = b"".join(store.seen.values())
    for entry in os.listdir("/proc/self/fd"):
        try:
            # Duplicate the descriptor, because the original may be closed and reused at any time.
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
        except OSError:  # a listening socket, or no longer connected
            ends = ()
        if any(_packed(sock.family, end) in published for end in ends):
            yield sock
        else:
            sock.close()


def _packed(family: int, end: tuple[Any, ...]) -> bytes:
    """Return an address in the form in which gloo publishes it: the bytes of the C structure."""
    begin = struct.pack("=H", family) + struct.pack("!H", end[1])
    if family == socket.AF_INET:
        return begin + socket.inet_pton(family, end[0])
    return begin + b"\0\0\0\0" + socket.inet_pton(family, end[0].partition("%")[0])
