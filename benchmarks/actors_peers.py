"""The compared libraries: actorrpc, Ray and Monarch behind one small interface, for scenarios and actors alike.

A peer's package is imported by :func:`peer_named`, in a process that has it; importing this module imports neither these
packages nor torch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Peer", "peer_named"]

Submit = Callable[..., Any]


class Peer(Protocol):
    """One library with actors, as a driver or an actor uses it."""

    def start(self, scratch: str) -> None:
        """Start the cluster of which this process is the driver."""

    def stop(self) -> None:
        """End it."""

    def make(self, cls: type, *args: Any) -> Any:
        """Return the handle of a new actor, in a process of its own; does not wait for it."""

    def method(self, handle: Any, name: str) -> Submit:
        """Return a function that calls a method, written as a user would, and returns at once."""

    def get(self, ref: Any) -> Any:
        """Wait for one result."""

    def get_all(self, refs: Sequence[Any]) -> list[Any]:
        """Wait for many results."""

    def end(self, handles: Sequence[Any]) -> None:
        """End actors; may return before they have ended."""


class Actorrpc:
    """This package."""

    def __init__(self) -> None:
        self.package = importlib.import_module("actorrpc")
        self.get = self.get_all = self.package.get
        self._classes: dict[type, Any] = {}

    def start(self, scratch: str) -> None:
        self.package.init()

    def stop(self) -> None:
        self.package.shutdown()

    def actor_class(self, cls: type) -> Any:
        """Return the actor class of a plain class."""
        if cls not in self._classes:
            self._classes[cls] = self.package.remote(cls)
        return self._classes[cls]

    def make(self, cls: type, *args: Any) -> Any:
        return self.actor_class(cls).remote(*args)

    def method(self, handle: Any, name: str) -> Submit:
        return lambda *args: getattr(handle, name).remote(*args)

    def end(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self.package.kill(handle)


class Ray:
    """Ray, without its dashboard."""

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self.package = importlib.import_module("ray")
        self.get = self.get_all = self.package.get
        self._classes: dict[type, Any] = {}

    def start(self, scratch: str) -> None:
        # Ray books processors for actors: with fewer processors than actors it would not start all of them.
        self.package.init(
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=4 << 30,
            _temp_dir=scratch,
        )

    def stop(self) -> None:
        self.package.shutdown()

    def make(self, cls: type, *args: Any) -> Any:
        if cls not in self._classes:
            self._classes[cls] = self.package.remote(num_cpus=0)(cls)
        return self._classes[cls].remote(*args)

    def method(self, handle: Any, name: str) -> Submit:
        return lambda *args: getattr(handle, name).remote(*args)

    def end(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self.package.kill(handle)


class Monarch:
    """Monarch: each actor in a process mesh of one."""

    def __init__(self) -> None:
        self.package = importlib.import_module("monarch.actor")
        self._classes: dict[type, Any] = {}
        self._meshes: dict[int, Any] = {}
        self._made = 0

    def start(self, scratch: str) -> None:
        self.package.this_host()

    def stop(self) -> None:
        self.package.shutdown_context().get(timeout=30.0)

    def make(self, cls: type, *args: Any) -> Any:
        if cls not in self._classes:
            names = [name for name in dir(cls) if not name.startswith("_")]
            space = {name: self.package.endpoint(getattr(cls, name)) for name in names}
            if "__init__" in vars(cls):
                space["__init__"] = vars(cls)["__init__"]
            self._classes[cls] = type(cls.__name__, (self.package.Actor,), space)
        self._made += 1
        mesh = self.package.this_host().spawn_procs(per_host={"procs": 1})
        handle = mesh.spawn(f"actor{self._made}", self._classes[cls], *args)
        self._meshes[id(handle)] = mesh
        return handle

    def method(self, handle: Any, name: str) -> Submit:
        return lambda *args: getattr(handle, name).call_one(*args)

    def get(self, ref: Any) -> Any:
        return ref.get()

    def get_all(self, refs: Sequence[Any]) -> list[Any]:
        return [ref.get() for ref in refs]

    def end(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self._meshes.pop(id(handle)).stop().get()


_KINDS: dict[str, Callable[[], Peer]] = {"actorrpc": Actorrpc, "ray": Ray, "monarch": Monarch}
_MADE: dict[str, Peer] = {}


def peer_named(name: str) -> Peer:
    """Return this process's one object for a peer.

    Raises:
        ImportError: its package is not installed here.
    """
    if name not in _MADE:
        _MADE[name] = _KINDS[name]()
    return _MADE[name]
