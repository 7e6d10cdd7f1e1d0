"""Snapshots: copies of objects at one moment, from which equal objects can be made later, in this process or on another worker.

The value of a result's future is an object of a class in :data:`ATOMS`, a :class:`Snapshot`, a :class:`SharedTensor`, a
:class:`StoredResult`, or an object that came with the reply. Readers may share the first four. An object that came with the reply
is given to the first reader only: before that, a Snapshot replaces the object in the future (:func:`replace`), and all other
readers get values that are made from the Snapshot. An object that has a gradient history or cannot be copied is not replaced, so
all readers share the object.

Objects that wait before they are sent (the arguments of a call to an actor that is being restarted, an item that a generator
yielded) are snapshots, too: later changes of the object do not change the snapshot, and an object that cannot be sent is refused
at once.
"""

from __future__ import annotations

import ctypes
import pickle
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from actorrpc.actors.context import current
from actorrpc.actors.refs.shared import SharedTensor
from actorrpc.actors.refs.storing import located, received, store
from actorrpc.agent.peers import MessageContext
from actorrpc.errors import ProtocolError, RpcError
from actorrpc.futures import Future
from actorrpc.rpc.rref import RRef
from actorrpc.serialization import codec
from actorrpc.serialization import tensors as tensor_bytes
from actorrpc.serialization.local_refs import LocalReferences
from actorrpc.transport import buffers as memory
from actorrpc.transport.object_store import StoredRange

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent

__all__ = ["ATOMS", "LARGE", "Snapshot", "StoredResult", "of_promise", "readable", "replace"]

ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis)})
"""Classes of immutable objects, which all readers may share."""

LARGE: Final = 256 << 10
"""A snapshot of at least this many bytes of tensors, arrays and buffers is put into memory that processes of a host share."""

_OUT_OF_BAND: Final = 4096  # the codec leaves buffers of up to this many bytes in the pickle
_ATTEMPTS: Final = 4

_find_main: Final = re.compile(b"__(?:mp_)?main__").search

# For snapshots without tensors of a GPU, and for snapshots without definitions. Must not be changed.
_NO_DEVICES: Final[Mapping[str, torch.Tensor]] = {}
_NOTHING: Final[Mapping[bytes, bytes]] = {}

# Functions and classes ("definitions") that snapshots contain as pickles. Each is loaded once, even if its snapshot is opened
# often. A definition that was evicted from this store is loaded from the snapshot again.
_definitions: Final = codec.DefinitionStore()


class Snapshot:
    """A copy of an object.

    Tensors, arrays and long bytes are copied once, into memory of the snapshot; tensors of a GPU are copied into memory of that
    GPU. Functions and classes that other workers cannot import are included. RRefs, ObjectRefs and handles of actors are kept as
    references, which all opened objects share. In a distributed autograd context, gradients flow from the opened object, on any
    worker, to the copied object.
    Thread-safe; its content is never changed.

    In a message, the snapshot's memory follows its pickle, or the pickle names the memory if both workers share it. The
    references in the snapshot become references of the receiver. Objects of the main module are sent by name to workers that
    run the same program, and by value to other workers.
    """

    __slots__ = (
        "_body",
        "_buffers",
        "_by_name",
        "_definitions",
        "_devices",
        "_held",
        "_sizes",
        "_tag",
        "host_copies",
        "nbytes",
        "stored",
    )

    def __init__(
        self,
        body: bytes | memoryview,
        buffers: Sequence[Any],
        definitions: Mapping[bytes, bytes],
        held: Sequence[Any],
        by_name: bool,
        tag: Any = None,
        stored: StoredRange | None = None,
        sizes: tuple[int, ...] = (),
        devices: Mapping[str, torch.Tensor] = _NO_DEVICES,
    ) -> None:
        self._body = body
        # Each entry is a memoryview of host memory, or for a tensor of a GPU, a tensor of uint8 on that GPU. None: open_once()
        # was called.
        self._buffers: list[Any] | None = []
        self._definitions = definitions
        self._held = held
        self._by_name = by_name  # whether objects of the main module are pickled by name
        self._tag = tag  # for the autograd recorder
        #: The location of the memory in a segment that all processes of the host share; None if the memory is in `_buffers`.
        self.stored = stored
        self._sizes = sizes
        # Device in the body -> an empty tensor on that device. A message moves the empty tensor to a device of the receiver, and
        # the receiver's copy of this snapshot opens its tensors on that device.
        self._devices = devices
        #: host -> the worker of that host that has fetched this snapshot, and the id under which it has requested the snapshot.
        self.host_copies: dict[str, tuple[Any, Any]] | None = None
        #: The size of the snapshot in bytes.
        self.nbytes: int = len(body) + sum(sizes)
        if buffers:
            self._buffers = [
                each if isinstance(each, torch.Tensor) else memoryview(each).cast("B") for each in buffers
            ]
            self.nbytes += sum(each.nbytes for each in self._buffers)
        if definitions:
            self.nbytes += sum(map(len, definitions.values()))

    @classmethod
    def of(
        cls,
        obj: object,
        *,
        remote_main: bool = True,
        context: int | None = None,
        label: str = "",
        site: str = "",
        recorded: bool = True,
        on_cpu: bool = False,
    ) -> Snapshot:
        """Copy an object as it is now.

        Args:
            recorded: True records the object's tensors that require grad for autograd; False refuses a gradient history.
            label, site: the name of the snapshot, and the line that made it, for the ObjectStoreFullErrors of other snapshots.
            remote_main: False pickles objects of the main module by value even for workers that run the same program.
            context: the id of the autograd context that records the object; by default the current context, if there is one.
            on_cpu: refuse tensors that are not on the CPU.

        Raises:
            SerializationError: a part of the object cannot be copied; the message names the part.
            RpcError: ``recorded`` is False, and a tensor of the object has a gradient history.
            ObjectStoreFullError: the object is large, and shared memory has no room for it.
        """
        holder = LocalReferences()
        devices = None if on_cpu else _SameDevices()
        encoded = codec.encode_body(obj, remote_main, (), devices, holder)
        if isinstance(encoded, bytes):
            return cls(encoded, (), _NOTHING, holder.objects, remote_main)
        if not recorded and any(each.grad_fn is not None for each in encoded.tensors):
            raise RpcError("gradients may flow through it")
        runtime = current()
        spans = encoded.spans
        room = None
        if runtime is not None and sum([span.nbytes for span in spans]) >= LARGE and not devices:
            room = store(runtime.agent, spans, label or f"a {type(obj).__name__}", site)
        stored = None if room is None else room.stored
        copies = [_copy_of(span) for span in spans] if stored is None else ()
        tag = None
        if encoded.grad and recorded and runtime is not None:
            tag = runtime.agent.recorder.sent(encoded.tensors, None, context)
        sizes = () if stored is None else tuple([span.nbytes for span in spans])
        definitions = dict(encoded.definitions)
        places = {each: torch.empty(0, device=each) for each in devices.values()} if devices else _NO_DEVICES
        if devices:
            tensor_bytes.settle()
        return cls(encoded.body, copies, definitions, holder.objects, remote_main, tag, stored, sizes, places)

    def open(self, copy: bool | None = None) -> Any:
        """Make a new object from the snapshot.

        Args:
            copy: for a large object, True makes a copy; None uses the shared pages, and each page is copied when it is written
                to; False uses the shared pages, and forbids writes.

        Raises:
            SerializationError: the object cannot be rebuilt in this process.
            RuntimeError: :meth:`open_once` was called.
            TypeError: ``copy`` is False, and the object contains a tensor: torch has no read-only tensors.
        """
        buffers, is_mapped = self._whole()
        if copy is not False and (copy or not is_mapped):
            buffers = buffers and [
                each.clone() if isinstance(each, torch.Tensor) else _copy_of(codec.TensorSpan.of(each))
                for each in buffers
            ]
        elif copy is False:
            tensors: list[Any] = []
            opened = self._decode([each if self._devices else each.toreadonly() for each in buffers], tensors)
            if tensors:
                raise TypeError(
                    "the value contains tensors, and torch has no read-only tensors: leave copy=False out"
                )
            return opened
        return self._decode(buffers)

    def view(self) -> Any:
        """Make an object on the snapshot's own memory, without a copy. The caller must not change it; no gradients flow from it.

        Raises: as :meth:`open`.
        """
        return self._decode(self._whole()[0], recorded=False)

    def open_once(self) -> Any:
        """Make the object from the snapshot's own memory, without a copy; the snapshot must not be opened again.

        Raises: as :meth:`open`.
        """
        buffers, is_mapped = self._whole()
        if not is_mapped:
            self._buffers = None
        return self._decode(buffers)

    def move_to_segment(self, agent: Agent) -> None:
        """Move the snapshot's memory into a segment that all processes of this host can map.

        Raises:
            ObjectStoreFullError: shared memory has no room for it.
        """
        buffers = self._buffers
        if not buffers or self.stored is not None or self._devices:
            return
        room = store(agent, [codec.TensorSpan.of(each) for each in buffers], "a copy from another host", "")
        if room is not None:
            self._sizes = tuple([each.nbytes for each in buffers])
            self.stored = room.stored
            self._buffers = []

    def _whole(self) -> tuple[list[Any], bool]:
        """Return the snapshot's memory, and whether it is a new mapping, to which no other code has access."""
        # Read `_buffers` before `stored`, because move_to_segment() sets `stored` before it empties the buffers.
        buffers = self._buffers
        stored = self.stored
        if stored is not None:
            return _slices(stored.map(), self._sizes), True
        if buffers is None:
            raise RuntimeError("this snapshot was opened by open_once() before")
        if self._devices:
            tensor_bytes.follow(buffers)
        return buffers, False

    def _decode(
        self, buffers: Sequence[Any], tensors: list[Any] | None = None, *, recorded: bool = True
    ) -> Any:
        definitions, store = self._definitions, _definitions
        holder = LocalReferences(self._held)
        tensors = [] if tensors is None else tensors
        devices = {name: str(place.device) for name, place in self._devices.items()}
        for attempt in range(_ATTEMPTS):
            if attempt == _ATTEMPTS - 1:
                # Other threads keep evicting the definitions that this thread adds to the common store: use a store of its own.
                store = codec.DefinitionStore()
            if attempt:
                for key in store.missing(definitions):
                    store.add(key, definitions[key])
            try:
                opened = codec.decode(
                    self._body,
                    buffers,
                    definitions=store,
                    context=holder,
                    tensors=tensors,
                    devices=devices,
                )
            except codec.UnknownDefinitionError:
                continue  # a definition is missing or was evicted; no part of the object was unpickled
            if recorded and self._tag is not None and (runtime := current()) is not None:
                runtime.agent.recorder.received(self._tag, tensors, None)
            return opened
        raise RpcError(
            "a value cannot be opened, because it contains too many functions and classes that cannot be imported: define them "
            "in a module"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        context = codec.current_encoding()
        if (
            self._tag is not None
            and isinstance(context, MessageContext)
            and (runtime := current()) is not None
        ):
            runtime.agent.recorder.forwarded(self._tag, context.peer)
        if (
            self._by_name
            and isinstance(context, MessageContext)
            and not context.peer.same_main
            and any(_find_main(each) for each in (self._body, *self._definitions.values()))
        ):
            in_context = self._tag[0] if self._tag else None
            return Snapshot.of(self.open(), remote_main=False, context=in_context).__reduce_ex__(protocol)
        stored = self.stored
        rest = dict(self._definitions), tuple(self._held), self._by_name, self._tag
        if stored is not None and isinstance(context, MessageContext) and (runtime := current()) is not None:
            if runtime.agent.shares_memory(context.peer):
                return _rebuild, ((*located(stored, context), self._sizes), bytes(self._body), *rest)
        body: Any = self._body
        if len(body) > _OUT_OF_BAND:
            body = pickle.PickleBuffer(body)
        elif not isinstance(body, bytes):
            body = bytes(body)
        buffers = tuple(
            each if isinstance(each, torch.Tensor) else pickle.PickleBuffer(each) for each in self._whole()[0]
        )
        return Snapshot, (body, buffers, *rest, *((None, (), self._devices) if self._devices else ()))

    def __repr__(self) -> str:
        return f"<Snapshot of {self.nbytes} bytes>"


def _rebuild(
    where: tuple[int, int, int, tuple[int, ...]],
    body: bytes,
    definitions: Mapping[bytes, bytes],
    held: Sequence[Any],
    by_name: bool,
    tag: Any,
) -> Snapshot:
    """Rebuild a snapshot whose memory is shared (wire format).

    Raises:
        ProtocolError, LimitError: as :func:`received`.
    """
    *place, sizes = where
    stored = received(*place)
    if memory.layout(sizes)[1] > stored.nbytes:
        raise ProtocolError("the parts of an object are larger than the whole")
    return Snapshot(body, (), definitions, held, by_name, tag, stored, sizes)


def _slices(whole: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    offsets, _ = memory.layout(sizes)
    return [whole[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]


class _SameDevices(dict[str, str]):
    """The device map of a snapshot: tensors stay on their devices. After encoding, it contains the devices of the tensors."""

    def __missing__(self, device: str) -> str:
        return self.setdefault(device, device)


def _copy_of(span: codec.TensorSpan) -> Any:
    """Copy memory into a buffer to which no other code writes: memory of the host, or of the span's device."""
    if isinstance(span, codec.PlacedSpan):
        return span.tensor.clone()
    nbytes = span.nbytes
    runtime = current()
    # Recycled pages are several times faster to fill than new ones.
    target = runtime.agent.buffers.allocate(nbytes) if runtime is not None else memoryview(bytearray(nbytes))
    if nbytes:
        memory.copy(ctypes.addressof(ctypes.c_char.from_buffer(target)), span)
    return target


# -- the values of results -------------------------------------------------------------------------------------


class ResultPolicy(Protocol):
    """The methods of a CallTemplate with which a caller says where later large results of a method are kept."""

    def inline_results(self) -> None:
        """Request that replies contain later results, because the caller calls ``get()`` for them."""

    def leave_results(self) -> None:
        """Request that replies leave out later large results, because the caller passes them on or uses ``read_into()``."""


class StoredResult:
    """Stands for a result that stayed on the worker that made it.

    Attributes:
        rref: refers to the result, or to a Snapshot of the result. Never changed.
        policy: is notified when the caller fetches the result.
    """

    __slots__ = ("policy", "rref")

    def __init__(self, rref: RRef[Any]) -> None:
        self.rref = rref
        self.policy: ResultPolicy | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredResult, (self.rref,)

    def __repr__(self) -> str:
        return f"StoredResult({self.rref!r})"


_SHARED: Final = ATOMS | {Snapshot, SharedTensor, StoredResult}

# Guards the values of completed futures while Snapshots replace them. Re-entrant, because the garbage collector may run
# finalisers that use ObjectRefs.
_lock = threading.RLock()


def replace(value: Any, futures: Iterable[Future[Any]]) -> tuple[Any, bool]:
    """Replace an object that came with a reply by a Snapshot.

    Args:
        futures: the completed futures that may have the object as their value.

    Returns:
        1. The value that the futures have now: the Snapshot; or the object itself, which all readers then share, if it cannot be
        copied or has a gradient history. 2. True if this call has replaced the object, so that only its caller has the object.
    """
    try:
        snapshot = Snapshot.of(value, recorded=False)
    except RpcError:
        snapshot = None
    with _lock:
        having = [each for each in futures if each.value_or_none is value]
        if not having:
            # Another thread has replaced the object by a Snapshot and given it to a reader, which may have changed it while this
            # thread copied it.
            return next(
                (each.value_or_none for each in futures if type(each.value_or_none) is Snapshot), value
            ), False
        if snapshot is None:
            return value, False
        for each in having:
            each.replace_value(snapshot)
    return snapshot, True


def readable(value: Any, futures: Iterable[Future[Any]]) -> Any:
    """Return an object that all readers may share: ``value``, the value of completed futures, or a Snapshot of it."""
    return value if type(value) in _SHARED else replace(value, futures)[0]


def of_promise(found: Any) -> Any:
    """Return the object to send to readers of the RRef whose value is ``found``. The value of a promise is a completed future."""
    # Use type(): isinstance() would read the object's __class__, which may run user code.
    return readable(found.value_or_none, (found,)) if issubclass(type(found), Future) else found
