"""Named actors. Rank 0 is the registrar: it has the table of names. Every other worker asks rank 0.

Rank 0 gives a name to an actor in one step, under a lock: if several workers request a name at the same time, one worker gets it,
and with ``get_if_exists`` the others get the descriptor of its actor. A name is free again when its actor is dead for good. A
worker that requests the name of an actor that is about to end waits for this end.
"""

from __future__ import annotations

import difflib
import threading
from typing import TYPE_CHECKING, Any, Final

from actorrpc import _time
from actorrpc.actors.client.supervisor_client import peer_of
from actorrpc.actors.context import runtime
from actorrpc.actors.spec.actor_spec import ActorDescriptor
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.executor import Deferred
from actorrpc.errors import (
    NameTakenError,
    PeerDiedError,
    RpcError,
    RpcTimeoutError,
    UnknownActorError,
    UnknownWorkerError,
)
from actorrpc.futures import Future
from actorrpc.serialization import exceptions

if TYPE_CHECKING:
    from actorrpc.actors.context import Runtime
    from actorrpc.agent.peers import Peer

__all__ = ["Names"]

_ANSWER_S: Final = 30.0  # how long rank 0 may take to answer


class Names:
    """The registrar, or the access to it from another worker. Thread-safe.

    ``_lock`` guards ``_descriptors``; it is a leaf, and re-entrant, because the garbage collector may run while it is held.

    Attributes:
        namespace: the namespace of names that are given or searched without a namespace.
    """

    def __init__(self, runtime: Runtime, namespace: str = "") -> None:
        self._runtime = runtime
        self.namespace = namespace
        self._lock = threading.RLock()
        self._descriptors: dict[tuple[str, str], ActorDescriptor] = {}
        if self.is_registrar:
            runtime.agent.on_peer_end.append(self._peer_ended)

    @property
    def is_registrar(self) -> bool:
        """Whether this process is rank 0, which has the table of names."""
        return self._runtime.agent.record.rank == 0

    # -- on every worker -----------------------------------------------------------------------------------

    def register(self, descriptor: ActorDescriptor, *, get_if_exists: bool = False) -> ActorDescriptor | None:
        """Give ``descriptor.name`` in ``descriptor.namespace`` to the actor; waits for each answer of rank 0 for at most 30 s.

        If another actor has the name and is about to end (its last handle was dropped, or it was killed), this waits for the end,
        until 30 s after the beginning.

        Returns:
            None if the actor has got the name; with ``get_if_exists``, the other actor's descriptor, which keeps no actor alive.

        Raises:
            NameTakenError: another actor has the name.
            PeerDiedError, RpcTimeoutError: rank 0 has ended, or does not answer.
        """
        assert descriptor.name is not None
        until = _time.now() + _ANSWER_S
        while True:
            known = self._query("record_name", descriptor)
            if known is None:
                return None
            assert isinstance(known, ActorDescriptor)
            if not self._ends(known, until):
                break
            self._query("delete_name", descriptor.name, descriptor.namespace, known.actor_id)
        if get_if_exists:
            return known
        raise NameTakenError(
            f"there is an actor {descriptor.name!r} in {_shown(descriptor.namespace)} already, a {known.info.name}; give another "
            "name=, or get_if_exists=True to get a handle to that actor",
            maybe_executed=False,
            actor=known.title,
            actor_id=known.actor_id,
        )

    def _ends(self, known: ActorDescriptor, until: float) -> bool:
        """Say whether an actor is dead; waits for the end of an actor that is about to die."""
        self._runtime.references.collect()  # so that a handle that was just freed does not keep the actor alive
        left = max(0.1, until - _time.now())
        try:
            if known.supervisor == self._runtime.references.me:
                end: Future[bool] = self._runtime.supervisor.ends(known.actor_id)
                return end.wait(left)
            agent = self._runtime.agent
            peer = peer_of(agent, known.supervisor)
            return bool(agent.call_sync(peer, _ends, (known.actor_id,), {}, left))
        # The worker of the actor's supervisor has ended, and the actor with it.
        except (PeerDiedError, UnknownWorkerError):
            return True
        except RpcTimeoutError:
            return False

    def unregister(self, name: str, namespace: str, actor_id: int) -> None:
        """Free a name, if this actor has it. Does not wait, and ignores the end of rank 0."""
        if self.is_registrar:
            self.delete_name(name, namespace, actor_id)
            return

        def delete() -> None:
            try:
                self._query("delete_name", name, namespace, actor_id)
            except RpcError:  # rank 0 has ended, and the table with it
                pass

        self._runtime.agent.submit(delete)

    def lookup(self, name: str, namespace: str | None = None) -> ActorDescriptor:
        """Return the descriptor of the actor with a name; waits for rank 0, at most 30 s.

        The descriptor has no anchor, so it does not keep the actor alive.

        Args:
            namespace: None for the namespace of this worker.

        Raises:
            UnknownActorError: no actor has the name; the message lists similar names.
            PeerDiedError, RpcTimeoutError: rank 0 has ended, or does not answer.
        """
        found = self._query("find", name, self.namespace if namespace is None else namespace)
        assert isinstance(found, ActorDescriptor)
        return found

    # -- asking rank 0 ------------------------------------------------------------------------------------

    def _query(self, what: str, *args: Any) -> Any:
        """Call the method ``what`` of the registrar, on rank 0."""
        if self.is_registrar:
            return getattr(self, what)(*args)
        agent = self._runtime.agent
        try:
            return agent.call_sync(agent.peer(0), _serve, (what, *args), {}, _ANSWER_S)
        except UnknownActorError as error:
            # Raise the original error without the traceback of rank 0, which does not help the user.
            raise exceptions.original(error) from None
        except PeerDiedError as error:
            raise PeerDiedError(
                "actors' names are kept by rank 0, which has ended: names can no longer be given or found",
                maybe_executed=error.maybe_executed,
                worker=error.worker,
            ) from error

    # -- on rank 0 ----------------------------------------------------------------------------------------

    def record_name(self, descriptor: ActorDescriptor) -> ActorDescriptor | None:
        """Give a name to an actor, on rank 0; if another actor has the name, return its descriptor."""
        assert descriptor.name is not None
        key = (descriptor.namespace, descriptor.name)
        with self._lock:
            known = self._descriptors.setdefault(key, descriptor)
        return None if known is descriptor or known.actor_id == descriptor.actor_id else known

    def delete_name(self, name: str, namespace: str, actor_id: int) -> None:
        """Implement :meth:`unregister` on rank 0."""
        with self._lock:
            known = self._descriptors.get((namespace, name))
            if known is not None and known.actor_id == actor_id:
                del self._descriptors[namespace, name]

    def _peer_ended(self, peer: Peer) -> None:
        """Free the names of all actors that an ended worker has supervised."""
        with self._lock:
            for key, descriptor in list(self._descriptors.items()):
                if descriptor.supervisor == peer.key:
                    del self._descriptors[key]

    def find(self, name: str, namespace: str) -> ActorDescriptor:
        """Implement :meth:`lookup` on rank 0."""
        with self._lock:
            known = self._descriptors.get((namespace, name))
            keys = list(self._descriptors)
        if known is not None:
            return known
        here = [each for space, each in keys if space == namespace]
        close = difflib.get_close_matches(name, here, n=3)
        elsewhere = [space for space, each in keys if each == name]
        if elsewhere:
            hint = f"there is one in {', '.join(map(_shown, elsewhere[:3]))}: give namespace="
        elif close:
            hint = f"did you mean {' or '.join(map(repr, close))}?"
        elif here:
            hint = f"there are: {', '.join(map(repr, sorted(here)[:10]))}"
        else:
            hint = "no actor has a name there"
        raise UnknownActorError(
            f"there is no actor {name!r} in {_shown(namespace)}; {hint}", maybe_executed=False
        )


def _shown(namespace: str) -> str:
    return f"namespace {namespace!r}" if namespace else "the default namespace"


# -- called by RPC ------------------------------------------------------------------------------------------


def _serve(what: str, *args: Any) -> Any:
    """Call a method of the registrar. Runs on rank 0."""
    names: Names = runtime().names
    found = getattr(names, what)(*args)
    current = CURRENT.get()
    if what == "record_name" and found is None and current is not None and current.peer.state != "alive":
        # The worker that requested the name has died meanwhile, and will not free it.
        descriptor: ActorDescriptor = args[0]
        names.delete_name(descriptor.name or "", descriptor.namespace, descriptor.actor_id)
    return found


def _ends(actor_id: int) -> Deferred:
    """Call :meth:`Supervisor.ends`. Called by RPC on the worker that supervises the actor."""
    return Deferred(runtime().supervisor.ends(actor_id))
