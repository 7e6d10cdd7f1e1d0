"""Tensors whose memory readers map: the values of ObjectRefs that :func:`actorrpc.share` has made.

The *owner* is the process that called ``share()``; it is the only process that may write. On the CPU, the memory is a segment of
the object store, into which the owner's tensor was moved. Readers map the segment privately: a page follows the writes of the
owner until the reader writes to the page. The kernel knows which processes have the segment.

On a GPU, readers open the memory of the owner's tensor by a handle. Each descriptor that is sent contains an RRef to the owner's
tensor, and each opened storage keeps that RRef. Therefore the owner's memory stays allocated until the last reader has dropped
its tensors or its process has died.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from actorrpc._torch import tensor_use_count, use_count
from actorrpc.actors.context import runtime
from actorrpc.actors.refs.storing import located, received, store
from actorrpc.agent.peers import MessageContext
from actorrpc.errors import LimitError, PeerDiedError, SerializationError
from actorrpc.rpc import rref as rrefs
from actorrpc.rpc.rref import RRef
from actorrpc.serialization import codec
from actorrpc.serialization.tensors import is_strided
from actorrpc.transport.cuda_memory import cuda_memory
from actorrpc.transport.object_accounts import amount
from actorrpc.transport.object_store import StoredRange

if TYPE_CHECKING:
    from actorrpc.agent.agent import Agent
    from actorrpc.agent.peers import Peer
    from actorrpc.transport.device_memory import DeviceMemory

__all__ = ["SharedTensor", "check_sharable"]

# An attribute of storages: the owner and the location of a storage that was shared, and its address then, as (_Worker, location,
# address). torch keeps the Python object of a storage, with its attributes, as long as any tensor uses the storage, also if
# share_memory_() gives the storage other memory.
_LOCATION: Final = "actorrpc_location"
# An attribute of storages on memory of another process: the _OpenedMemory.
_OPENED: Final = "actorrpc_opened"

# Guards the locations of storages, so that two threads do not move a tensor to two places. No thread waits for room, or copies,
# under it. Re-entrant, because the garbage collector may run finalisers that share tensors.
_lock = threading.RLock()


class _Worker(NamedTuple):
    """One run of a worker."""

    name: str
    incarnation: str
    host: str
    hostname: str

    @classmethod
    def of(cls, agent: Agent) -> _Worker:
        record = agent.record
        return cls(record.name, record.incarnation, record.host, record.hostname)

    def __str__(self) -> str:
        return f"worker {self.name!r} on host {self.hostname or self.host[:8]}"


class _OnDevice(NamedTuple):
    """The location of memory on a device: the UUID of the device, and the handle that opens the memory."""

    uuid: str
    handle: list[Any]


class _Layout(NamedTuple):
    device: str  # the name of the device at the owner
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int


class _OpenedMemory:
    """Keeps device memory of another process allocated, while a storage of this process uses the memory."""

    __slots__ = ("device", "keeper", "memory")

    def __init__(self, keeper: RRef[Any], memory: DeviceMemory, device: torch.device) -> None:
        self.keeper, self.memory, self.device = keeper, memory, device

    def __del__(self) -> None:
        # This finaliser waits: the owner may reuse the memory as soon as the RRef is released, and queued work may still read the
        # memory. torch's own finaliser of such a storage waits for the same stream.
        try:
            self.memory.synchronize(self.device)
        except (AttributeError, RuntimeError):  # the interpreter shuts down, or the device had an error
            pass


class SharedTensor:
    """Describes a tensor whose memory readers map. It can be sent to all workers. Thread-safe; never changed."""

    __slots__ = ("_layout", "_location", "_owner", "keeper")

    def __init__(
        self,
        owner: _Worker,
        layout: _Layout,
        location: StoredRange | _OnDevice | None,
        keeper: RRef[torch.Tensor] | None,
    ) -> None:
        self._owner, self._layout = owner, layout
        self._location = location  # None: a CPU tensor of a worker that shares no memory with this process
        #: refers to the owner's tensor; None for the CPU
        self.keeper = keeper

    @classmethod
    def of(cls, tensor: torch.Tensor, agent: Agent, label: str, site: str) -> SharedTensor:
        """Share the memory of a tensor that :func:`check_sharable` has accepted.

        Args:
            label, site: the name of the tensor, and the line that shares it, for ObjectStoreFullErrors.

        Raises: as :func:`actorrpc.share`.
        """
        owner, memory, device = _Worker.of(agent), _device_memory(agent), tensor.device
        layout = _Layout(str(device), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.nbytes)
        uuid = "" if memory is None else memory.uuid(device)
        location: StoredRange | _OnDevice | None
        if memory is not None and uuid:
            with _lock:
                location = _location(tensor, owner)
                if location is None:
                    _locate(tensor, owner, location := _OnDevice(uuid, _exported(tensor, memory)))
        elif device.type == "cpu":
            location = _move(tensor, layout, owner, agent, label, site)
        elif device.type == "cuda":
            raise ValueError(
                f"share() cannot share a tensor on {device}: this torch ({torch.__version__}) cannot share memory of CUDA "
                "devices between processes. Use put()"
            )
        else:
            raise ValueError(
                f"share() cannot share a tensor on {device}: only memory of the host and of CUDA devices can be shared"
            )
        keeper = RRef(tensor.detach()) if type(location) is _OnDevice else None
        return cls(owner, layout, location, keeper)

    def open(self, copy: bool | None = None) -> torch.Tensor:
        """Return a tensor on the shared memory, or with ``copy=True`` a tensor with memory of its own.

        Raises:
            TypeError: ``copy`` is False: torch has no read-only tensors.
            SerializationError: this process cannot map the memory.
            PeerDiedError: the owner has ended, and the memory was on a GPU.
            LimitError: there is no address space for the memory, or this is a forked child.
        """
        if copy is False:
            raise TypeError("the value is a tensor, and torch has no read-only tensors: leave copy=False out")
        tensor = _tensor_on(self._storage(), self._layout)
        return tensor.clone() if copy else tensor

    def view(self) -> torch.Tensor:
        """Return the result of :meth:`open`. Snapshot has a method of the same name."""
        return self.open()

    def is_mappable_for(self, peer: Peer) -> bool:
        """Return whether ``peer`` can map the memory. For memory of a GPU, return whether ``peer`` is on the owner's host.

        Whether the peer sees the GPU is checked later, when the peer calls :meth:`open`.
        """
        location = self._location
        if type(location) is StoredRange:
            return runtime().agent.shares_memory(peer)
        return location is not None and peer.record.host == self._owner.host

    def _storage(self) -> torch.UntypedStorage:
        location, keeper = self._location, self.keeper
        if type(location) is StoredRange:
            return torch.frombuffer(location.map(), dtype=torch.uint8).untyped_storage()
        agent = runtime().agent
        here, memory = _Worker.of(agent), _device_memory(agent)
        if type(location) is not _OnDevice or keeper is None:
            raise self._unreachable(here, "shares no memory with that worker")
        if keeper.is_owner():
            return keeper.local_value().untyped_storage()
        if here.host != self._owner.host:
            raise self._unreachable(here, "is on another host, or in another container")
        if type(error := rrefs.failure(keeper)) is PeerDiedError:
            raise PeerDiedError(
                f"{self} is lost: {self._owner}, which had it in the memory of its GPU, has ended. Share it again in another "
                "process",
                maybe_executed=False,
                worker=self._owner.name,
            ) from error
        if memory is None:
            raise self._unreachable(here, "has a torch that cannot use memory of CUDA devices")
        try:
            storage = memory.attach(location.uuid, location.handle)
        except OSError as caught:
            raise self._unreachable(here, f"cannot open it: {caught}") from caught
        setattr(storage, _OPENED, _OpenedMemory(keeper, memory, storage.device))
        return storage

    def _unreachable(self, here: _Worker, reason: str) -> SerializationError:
        on_cpu = "" if self._layout.device == "cpu" else ".cpu()"
        return SerializationError(
            f"{self} of {self._owner} cannot be mapped: {here} {reason}. Send a copy: put(tensor{on_cpu}) on "
            f"worker {self._owner.name!r}, or ref.read_into(tensor) on worker {here.name!r}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        context = codec.current_encoding()
        if not isinstance(context, MessageContext):
            raise SerializationError(f"{self} can only be sent in the arguments and results of calls")
        agent, location, keeper = runtime().agent, self._location, self.keeper
        sent: tuple[Any, ...] | None = None
        if type(location) is _OnDevice:
            sent = tuple(location)
            memory = _device_memory(agent)
            if memory is not None and keeper is not None and keeper.is_owner():
                memory.synchronize(torch.device(self._layout.device))
        elif type(location) is StoredRange and agent.shares_memory(context.peer):
            sent = located(location, context)
        return _rebuild, (tuple(self._owner), tuple(self._layout), sent, keeper)

    def __str__(self) -> str:
        return f"a shared tensor on {self._layout.device}, of {amount(self._layout.nbytes)},"


def _rebuild(
    owner: tuple[Any, ...],
    layout: tuple[Any, ...],
    location: tuple[Any, ...] | None,
    keeper: RRef[torch.Tensor] | None,
) -> SharedTensor:
    """Rebuild a shared tensor (wire format).

    Raises:
        ProtocolError, LimitError: as :func:`received`.
    """
    found: StoredRange | _OnDevice | None = None
    if location is not None:
        found = received(*location) if keeper is None else _OnDevice(*location)
    return SharedTensor(_Worker(*owner), _Layout(*layout), found, keeper)


def check_sharable(tensor: object) -> None:
    """Raise an error if ``tensor`` has no memory that can be shared.

    Raises:
        TypeError, ValueError: as :func:`actorrpc.share`.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"share() takes a torch.Tensor or a torch.nn.Parameter, not a {type(tensor).__name__}: share each tensor, for "
            "example {name: share(each) for name, each in module.named_parameters()}"
        )
    assert isinstance(tensor, torch.Tensor)
    if not is_strided(tensor) or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "share() takes dense tensors whose elements are in memory, not sparse, quantized, nested, meta, named, conjugate or "
            "negated tensors: use put()"
        )
    if tensor.grad_fn is not None:
        raise ValueError(
            f"share() takes no result of a computation with gradients ({type(tensor.grad_fn).__name__}): "
            "share a copy, tensor.detach().clone(), and write to the copy from then on"
        )
    if not tensor.numel():
        raise ValueError(
            "share() takes no tensor without elements, because there is no memory to share: use put()"
        )
    size = tensor.untyped_storage().nbytes()
    if size != tensor.nbytes:
        raise ValueError(
            f"share() takes no view: the tensor has {tensor.nbytes} bytes of a storage of {size} bytes. Share the whole tensor, "
            "and let readers take the part; or share a copy, tensor.clone(), and write to the copy from then on"
        )


def _device_memory(agent: Agent) -> DeviceMemory | None:
    return agent.device_memory or cuda_memory()  # the agent has none if its messages use no memory of devices


def _exported(tensor: torch.Tensor, memory: DeviceMemory) -> list[Any]:
    try:
        return memory.export(tensor)
    except MemoryError as error:
        raise ValueError(
            f"share() cannot share a tensor on {tensor.device}, of {amount(tensor.nbytes)}: {error}"
        ) from error


def _location(tensor: torch.Tensor, owner: _Worker) -> StoredRange | _OnDevice | None:
    """Return where the memory of a tensor is shared; None if ``owner`` has not shared it."""
    storage = tensor.untyped_storage()
    known, location, address = getattr(storage, _LOCATION, (None, None, 0))
    return location if known == owner and address == storage.data_ptr() else None


def _locate(tensor: torch.Tensor, owner: _Worker, location: StoredRange | _OnDevice) -> None:
    storage = tensor.untyped_storage()
    setattr(storage, _LOCATION, (owner, location, storage.data_ptr()))


def _move(
    tensor: torch.Tensor, layout: _Layout, owner: _Worker, agent: Agent, label: str, site: str
) -> StoredRange | _OnDevice:
    """Move a tensor into shared memory, unless another thread does that meanwhile; return the location of the memory."""
    with _lock:
        location, storage = _location(tensor, owner), tensor.untyped_storage()
        if location is not None:
            return location
        # share() refuses a tensor if other objects use its memory:
        # 1. torch cannot resize memory that numpy or a message has allocated. Memory of share() in an earlier group cannot be
        #    resized either, but its storage has `_LOCATION`, so the memory is accepted.
        # 2. The storage has two users here: the tensor and the variable `storage`. A third user is a view or another tensor.
        # 3. The tensor has one user here: Python. DLPack adds a user to the tensor, and not to the storage. A tensor that
        #    requires grad is not checked, because autograd adds users, too, when it saves the tensor.
        if (
            storage.is_shared()
            or not (storage.resizable() or hasattr(storage, _LOCATION))
            or (use_count is not None and use_count(storage._cdata) > 2)
            or (not tensor.requires_grad and tensor_use_count is not None and tensor_use_count(tensor) > 1)
        ):
            raise ValueError(
                "share() would separate the tensor from other tensors or objects that use or own its memory (such as the base of "
                "a view, views, detach(), state_dict(), numpy arrays, DLPack, share_memory_(), a received message), from the "
                "tensor whose grad it is, or from the graph of a loss. Share the tensor before they exist, or share a copy, "
                "tensor.clone(), and write to the copy from then on"
            )
    room = store(agent, [codec.TensorSpan(storage.data_ptr(), tensor.nbytes, storage)], label, site)
    if room is None:
        raise LimitError(
            f"{label}, of {amount(tensor.nbytes)}, was not shared: the system provides no shared memory or no file descriptor"
        )
    moved = _tensor_on(torch.frombuffer(room.view(), dtype=torch.uint8).untyped_storage(), layout)
    with _lock:
        location = _location(tensor, owner)
        if location is None:
            tensor.data = moved
            _locate(tensor, owner, location := room.stored)
    return location


def _tensor_on(storage: torch.UntypedStorage, layout: _Layout) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(0, dtype=layout.dtype, device=storage.device)
        return made.set_(storage, 0, layout.shape, layout.stride)
