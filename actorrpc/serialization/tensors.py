"""Tensors outside of the pickle: which bytes of which storage are sent, and how the receiver builds tensors on them.

A tensor is reduced to a few integers (storage, dtype, offset, sizes, strides). Its bytes stay in place as :class:`TensorSpan`
objects until the message is written. Bytes of a storage that no tensor of the message uses are left out, or sent as zeros
(:mod:`actorrpc.serialization.blocks`), and tensors that overlap share memory again at the receiver. Pickles contain the names of
:func:`tensor` and the functions next to it: names and arguments are the wire format.

Runs in any thread that encodes or decodes. The state of one message is in the thread-local :data:`message`. Does no I/O, and
never reads or builds beyond a storage's end, whatever the peer sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, filterfalse
from operator import attrgetter, methodcaller
from typing import Any, Final

import torch

from actorrpc import _torch
from actorrpc._torch import dispatch_keys, dispatch_modes, forward_ad, function_modes, innermost_transform
from actorrpc.errors import ProtocolError, SerializationError
from actorrpc.serialization import blocks

__all__ = [
    "ENTRY",
    "INLINE_BYTES",
    "Outgoing",
    "PlacedSpan",
    "SharedStorageError",
    "TensorSpan",
    "follow",
    "is_strided",
    "message",
    "read_storages",
    "settle",
    "tensor_reducers",
]

# Bytes. Tensors up to this size are part of the body, because copying them is cheaper than sending a separate buffer.
INLINE_BYTES: Final = 4096
# Small tensors among the first _FEW tensors of a message are pickled one by one, as are the next _ALIKE small tensors of each
# layout. Further small tensors are stacked, which is faster from three members on.
_FEW: Final = 8
_ALIKE: Final = 3
# Bytes. Tensors of a stack share memory at the receiver in portions of this size, because a tensor keeps its portion alive.
_PORTION: Final = 16 << 10
_AT_ONCE: Final = 32 << 10  # elements; torch stacks fewer elements than this in the calling thread alone
_PINNED: Final = 64 << 10  # data from a GPU of at least this many bytes is copied into pinned memory
_ALIGN: Final = 16  # the size of the widest element; blocks that share a span start at multiples of it
# If storages are sent in several blocks each, the blocks of all these storages are copied into one span. The exceptions are the
# first _OWN_SPANS blocks of each storage that have no gaps and at least _OWN_SPAN bytes: each of them is a span of its own.
_OWN_SPAN: Final = 1 << 20
_OWN_SPANS: Final = 64

_CONJ: Final = 1 << 8
_NEG: Final = 1 << 9
_GRAD: Final = 1 << 10
_OFF_CPU: Final = 1 << 11  # never sent: tells `_describe` to look up the target device

# The position of a dtype is the code that is sent for it, so names are only appended. An older torch may lack some dtypes.
_NAMES: Final = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "bfloat16", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
)
_CODES: Final[dict[torch.dtype, int]] = {
    getattr(torch, name): code for code, name in enumerate(_NAMES) if hasattr(torch, name)
}
_QUANTISED: Final = _NAMES.index("qint8")  # this code and higher codes are for storages only


class _Dtypes(dict[int, torch.dtype]):
    """Code -> dtype. Raises ProtocolError for other codes, because a peer may send any code."""

    def __missing__(self, code: int) -> torch.dtype:
        raise ProtocolError(f"dtype {code} is not known here")


_OF_STORAGES: Final = _Dtypes({code: d for d, code in _CODES.items()})
_STRIDED: Final = _Dtypes({code: d for code, d in _OF_STORAGES.items() if code < _QUANTISED})
_COMMON: Final = _NAMES.index("bfloat16")  # all versions of torch can stack the dtypes up to this code
_COMPLEX_HALF: Final = _NAMES.index("complex32")  # torch warns when it stacks this dtype


def _find_arrays() -> tuple[Any, dict[torch.dtype, Any]]:
    """Return numpy's frombuffer(), and a table: torch's dtype -> numpy's. None and an empty table if torch cannot use numpy."""
    try:
        import numpy  # noqa: PLC0415 - torch works without numpy

        torch.from_numpy(numpy.zeros(1))
    except (ImportError, RuntimeError):  # RuntimeError: torch was built for another numpy
        return None, {}
    names = _NAMES[:_COMMON]
    return numpy.frombuffer, {
        dtype: numpy.dtype(name) for name in names if (dtype := getattr(torch, name)) is not torch.complex32
    }


_frombuffer, _ARRAYS = _find_arrays()


class _Message(threading.local):
    """The innermost messages that this thread is encoding and decoding; when they end, codec.py restores the outer messages."""

    encoding: Any = None
    decoding: Any = None
    pickler: Any = None  # the thread's idle pickler
    spare: Any = None  # the thread's unused Encoded


message: Final = _Message()


# -- raw memory ---------------------------------------------------------------------------------


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer``."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("rest", ctypes.c_byte * 56),  # shape, strides and so on, which are not needed
    ]


# Not attributes of `ctypes.pythonapi`: all code of the process shares these, and may change their argument types.
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))
_READ: Final = 0x100
_copy_out, _copy_writable = (
    ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)((name, ctypes.pythonapi))
    for name in ("PyBytes_FromStringAndSize", "PyByteArray_FromStringAndSize")
)


class TensorSpan:
    """A range of memory that is sent without a copy. ``keep`` keeps the memory alive while the span lives.

    The bytes are read when the message is written. A sender that returns to its caller earlier has to copy the bytes first.
    """

    __slots__ = ("address", "keep", "nbytes")

    def __init__(self, address: int, nbytes: int, keep: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self.keep = keep

    @classmethod
    def of(cls, data: Any) -> TensorSpan:
        """Return the span of a contiguous buffer. The buffer cannot be resized while the span lives."""
        view = memoryview(data)
        found = _PyBuffer()
        _get_buffer(view, ctypes.byref(found), 0)
        try:
            return cls(found.buf or 0, found.len, view)
        finally:
            _release_buffer(ctypes.byref(found))

    def view(self) -> memoryview:
        """Return a read-only view, which is only valid while the span is referenced."""
        view: memoryview = _memory_view(self.address, self.nbytes, _READ)
        return view


class PlacedSpan(TensorSpan):
    """The bytes of a tensor that the receiver moves to the device ``target``.

    The bytes are copied to host memory when ``address`` is first read. A sender that copies them from device to device does not
    read it.
    """

    __slots__ = ("target", "tensor")

    def __init__(self, tensor: torch.Tensor, target: str) -> None:
        self.tensor = tensor
        self.target = target
        self.nbytes = tensor.nbytes
        self.keep = None

    @property
    def address(self) -> int:  # type: ignore[override]
        """The address of the bytes in host memory."""
        if self.keep is None:
            self.keep = _on_cpu(self.tensor)
        address: int = self.keep.data_ptr()  # type: ignore[attr-defined]
        return address


# -- encoding -----------------------------------------------------------------------------------


ENTRY: Final = "BQQ"  # a block in the table: kind, size, offset in the sender's storage
_IN_BODY: Final = 1
# The bytes are the elements of the block's only tensor, in order; its strides are ignored.
_COMPACT: Final = 2
_PLACED: Final = 4  # the receiver moves the bytes to a device, whose name is in the list of names
# The bytes follow the bytes of the previous gathered block, in the one span of all gathered blocks.
_GATHERED: Final = 8
# The rows are closer together in the message than at the sender; a _PITCH entry has both distances.
_PITCHED: Final = 16
# An entry for each further tensor of a block, which has the number of an earlier tensor's entry in place of a size.
_SAME: Final = 32  # the earlier tensor overlaps this tensor
_BESIDE: Final = 64  # the earlier tensor is the first of the block, and does not overlap this tensor
# The last entries of the table, one for each pitched block in order: the distance of rows at the sender, and in the message.
_PITCH: Final = 128


_FREED: Final = "a tensor's storage was freed or resized: it has no bytes to send"
_untyped_storage, _storage_offset = torch.Tensor.untyped_storage, torch.Tensor.storage_offset
_nbytes, _cdata = torch.UntypedStorage.nbytes, attrgetter("_cdata")


class SharedStorageError(Exception):
    """Two tensors share memory, and the bytes of one are in the pickle. Encode again, with all tensors in the table."""


# The items of a list that describes a tensor of a message (an object would cost a third of a microsecond): the storage, the
# range [low, high) of bytes that the tensor uses, whether the tensor is contiguous, the tensor itself (None: the whole storage
# is sent), the device at the receiver, and the block that is sent, if it was computed and differs from the range.
# For a stack, the first item is the _Stack, and later the stack's bytes. For a tensor that is sent in the block of an earlier
# tensor, the first item is the number of the earlier tensor, and the second is the kind of the entry (_SAME or _BESIDE).
_STORAGE, _LOW, _HIGH, _CONTIGUOUS, _TENSOR, _DEVICE, _BLOCK = range(7)
# Size of an element -> the dtype with which such elements are copied, because a copy with this dtype keeps every bit.
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Outgoing:
    """The tensors and storages of one message while it is encoded.

    Args:
        device_map: device of this worker -> device of the receiver.
        embedded: the storages whose bytes are in the pickle already, by ``_cdata``.

    Attributes:
        cpu: the receiver's device for CPU tensors; empty if they stay on the CPU.
    """

    __slots__ = ("_device_map", "_embedded", "_shared", "by_storage", "cpu", "pieces")

    def __init__(self, device_map: Mapping[str, str] | None, embedded: Set[int] = frozenset()) -> None:
        self.by_storage: dict[int, int] = {}
        # The number of a storage's first tensor -> the numbers of all tensors of the storage, if there are several.
        self._shared: dict[int, list[int]] = {}
        self._device_map = {} if device_map is None else device_map
        self._embedded = embedded
        cpu = device_map.get("cpu", "") if device_map else ""
        self.cpu = "" if cpu == "cpu" else cpu
        self.pieces: list[list[Any]] = []

    def touch(
        self,
        storage: torch.UntypedStorage,
        t: torch.Tensor | None,
        low: int,
        high: int,
        is_contiguous: bool,
        off_cpu: int,
    ) -> int:
        """Record that ``t`` (None: no tensor) uses bytes [low, high) of a storage, perhaps with gaps; return its number."""
        key = storage._cdata  # unique, because self.pieces keeps the storage alive
        number = len(self.pieces)
        first = self.by_storage.setdefault(key, number)
        if first == number:
            if key in self._embedded:
                raise SharedStorageError
            device = self.target(storage.device) if off_cpu else self.cpu
        else:
            self._shared.setdefault(first, [first]).append(number)
            device = self.pieces[first][_DEVICE]
        self.pieces.append([storage, low, high, is_contiguous, t, device, None])
        return number

    def target(self, device: torch.device) -> str:
        """Return the receiver's device for a device of this process.

        Raises:
            SerializationError: the device map does not have the device.
        """
        try:
            return self._device_map[str(device)]  # the map may raise a SerializationError of its own
        except KeyError:
            raise SerializationError(
                "RPC only supports CPU tensors by default, please move your tensors to CPU before sending "
                "them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly configure "
                f"device mapping. Request or Response device mapping is not available for device: {device}"
            ) from None

    def close_stacks(self) -> None:
        """Copy the tensors of stacks, after one check of all their storages, which is faster than a check for each tensor.

        Raises:
            SharedStorageError: a storage is also used by another tensor of the message.
            SerializationError: a storage is shorter than its tensor (it was freed or resized).
        """
        keys = set(self._embedded)
        expected = len(keys)
        stacks = [piece for piece in self.pieces if type(piece[_STORAGE]) is _Stack]
        for piece in stacks:
            members = piece[_STORAGE].members
            storages = list(map(_untyped_storage, members))
            keys.update(map(_cdata, storages))
            expected += len(members)
            size = members[0].nbytes
            if any(map(_storage_offset, members)) or set(map(_nbytes, storages)) != {size}:
                for t, storage in zip(members, storages, strict=True):
                    if t.storage_offset() * t.itemsize + size > storage.nbytes():
                        raise SerializationError(_FREED)
        if len(keys) != expected or not keys.isdisjoint(self.by_storage):
            raise SharedStorageError
        with torch.no_grad():
            for piece in stacks:
                piece[_STORAGE] = _joined(piece[_STORAGE].members)

    def finish(self, spans: list[TensorSpan], inline: bool) -> tuple[list[int], bytes, bytes]:
        """Append the memory that is sent after the body to ``spans``; return the numbers of the table, the bytes that follow the
        pickle in the body, and the names of devices.

        Raises:
            SerializationError: a storage is shorter than its tensors (it was freed or resized).
        """
        numbers: list[int] = []
        pitches: list[int] = []
        small = []
        names = b""
        apart = {block for tensors in self._shared.values() for block in self._divide(tensors)}
        if inline or sum([block.size for block in apart]) <= INLINE_BYTES:
            apart = set()
        # The blocks of ``apart``: offset in their common span, address, size, and the object that keeps the memory alive.
        gathered: list[tuple[int, int, int, object]] = []
        gathered_size = 0
        for number, piece in enumerate(self.pieces):
            storage, low, high, contiguous, t, device, block = piece
            if type(storage) is bytes:
                small.append(storage)
                numbers += (_IN_BODY, len(storage), 0)
                continue
            if type(storage) is int:
                numbers += (low, storage, 0)
                continue
            if high > storage.nbytes():
                raise SerializationError(_FREED)
            if not contiguous and block is None:
                view = blocks.View(number, t, low, high, False)
                if view.step:
                    (block,) = blocks.plan([view])
            kind, size = 0, high - low
            if block is not None:
                low, size = block.low, block.size
                if block.pitch:
                    kind = _PITCHED
                    pitches += (_PITCH, block.step, block.pitch)
            start = low
            if block is not None and not block.is_dense:
                kind |= _COMPACT * block.is_compact
                filled = _filled(block, storage)
                storage, start = filled.untyped_storage(), filled.storage_offset() * filled.itemsize
            keep: Any = storage
            if device:
                kind |= _PLACED
                names += bytes((len(device),)) + device.encode()
                placed = torch.empty(0, dtype=torch.uint8, device=storage.device)
                placed.set_(storage, start, (size,), (1,))
                if not (block in apart or inline or size <= INLINE_BYTES):
                    spans.append(PlacedSpan(placed, device))
                    numbers += (kind, size, low)
                    continue
                keep, start = _on_cpu(placed), 0
            address = keep.data_ptr() + start
            if block in apart:
                kind |= _GATHERED
                if not gathered:
                    place = len(spans)
                    spans.append(TensorSpan(0, 0, None))
                gathered.append((gathered_size, address, size, keep))
                gathered_size += -(-size // _ALIGN) * _ALIGN
            elif inline or size <= INLINE_BYTES:
                kind |= _IN_BODY
                small.append(_copy_out(address, size))
            else:
                spans.append(TensorSpan(address, size, keep))
            numbers += (kind, size, low)
        if gathered:
            start, _, size, _ = gathered[-1]
            spans[place] = TensorSpan.of(bytearray(start + size))
            for start, address, size, _ in gathered:
                ctypes.memmove(spans[place].address + start, address, size)
        return numbers + pitches, small[0] if len(small) == 1 else b"".join(small), names

    def _divide(self, numbers: list[int]) -> list[blocks.Block]:
        """Find the blocks in which the tensors of one storage are sent; return the blocks that are copied to the common span."""
        pieces = self.pieces
        views = []
        for number in numbers:
            storage, low, high, contiguous, t, _, _ = pieces[number]
            if high > storage.nbytes():
                raise SerializationError(_FREED)
            views.append(blocks.View(number, t, low, high, contiguous))
        found = blocks.plan(views)
        apart = []
        own = 0
        for block in found:
            first = min([view.number for group in block.groups for view in group])
            for group in block.groups:
                leader = min([view.number for view in group])
                for view in group:
                    if view.number != leader:
                        pieces[view.number][:_HIGH] = leader, _SAME
                if leader != first:
                    pieces[leader][:_HIGH] = first, _BESIDE
            pieces[first][_BLOCK] = block
            own += block.is_dense and block.size >= _OWN_SPAN
            if not block.is_dense or block.size < _OWN_SPAN or own > _OWN_SPANS:
                apart.append(block)
        return apart if len(found) > 1 else []


def _filled(block: blocks.Block, storage: torch.UntypedStorage) -> torch.Tensor:
    """Copy the bytes to send for a block with unused bytes (gaps). Most gaps are left out; the others are sent as zeros."""
    if block.is_compact:
        return _raw(block.groups[0][0].tensor).contiguous()
    made = torch.zeros(block.size, dtype=torch.uint8, device=storage.device)
    for view in block.parts:
        item = view.item
        dtype = _BITS[item]
        strides, sizes = list(zip(*view.steps, strict=True)) or ((), ())
        start: int = view.low - block.low
        placed: Sequence[int] = strides
        if block.pitch:
            start, placed = blocks.repitch(start, strides, block.step, block.pitch)
        source, target = (
            torch.empty(0, dtype=dtype, device=storage.device).set_(
                where, at // item, sizes, [stride // item for stride in steps]
            )
            for where, at, steps in (
                (storage, view.low, strides),
                (made.untyped_storage(), start, placed),
            )
        )
        target.copy_(source)
    return made


def _on_cpu(t: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor itself, or a copy on the CPU if it is on another device.

    At least ``_PINNED`` bytes from a GPU are copied into pinned memory, which torch reuses. For 256 MiB from an H100, a copy
    into fresh memory takes 149 ms, into pinned memory 5 ms.
    """
    if t.is_cuda and t.nbytes >= _PINNED:
        try:
            pinned = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
        except RuntimeError:  # the system cannot pin more memory
            return t.cpu()
        return pinned.copy_(t)
    return t.cpu()


def _joined(members: list[torch.Tensor]) -> bytes:
    """Return the concatenated bytes of tensors of one layout."""
    parts = []
    most = (_AT_ONCE - 1) // members[0].numel()
    for at in range(0, len(members), most):
        part = torch.stack(members[at : at + most])
        parts.append(_copy_out(part.data_ptr(), part.nbytes))
    return b"".join(parts)


def settle() -> None:
    """Wait for the current stream of each GPU, unless it is the default stream.

    Call this before other threads use tensors made here: these threads use the default streams, which do not wait for the
    streams of this thread. Not needed for a message: the thread that encodes the message copies the bytes on the same streams.
    """
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            stream = torch.cuda.current_stream(device)
            if stream != torch.cuda.default_stream(device):
                stream.synchronize()


def follow(tensors: Iterable[Any]) -> None:
    """Let the current streams wait for the default streams, on which other threads have made the tensors of GPUs in ``tensors``.

    The allocator reuses the memory of a tensor only after the work that is queued on the current stream when the tensor is freed.
    """
    for each in tensors:
        if isinstance(each, torch.Tensor) and each.is_cuda:
            stream, default = torch.cuda.current_stream(each.device), torch.cuda.default_stream(each.device)
            if stream != default:
                stream.wait_stream(default)
                each.record_stream(stream)


def _raw(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its elements as in memory: without autograd, conjugate bit and negative bit."""
    plain = torch.empty(0, dtype=t.dtype, device=t.device)
    return plain.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


_COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_unbind_copy: Final[Any] = torch.unbind_copy  # torch's stubs declare no return value
_PLAIN: Final[dict[int, int]] = {}  # dispatch key set -> the flags that all tensors with this set share


def is_strided(t: torch.Tensor) -> bool:
    """Return whether a tensor is a plain dense tensor with a storage. Its conjugate bit or negative bit may be set.

    False for sparse, quantized, nested, meta and named tensors, for zero tensors, and for tensors of torch.func transforms.
    """
    return (
        t.layout is torch.strided
        and not (t.is_quantized or t.is_nested or t.is_meta or _torch.is_zerotensor(t))
        and not any(getattr(t, "names", ()))
        and not _torch.is_transformed(t)
    )


def _flags(t: torch.Tensor) -> int:
    """Return the flags of a tensor, and store them in ``_PLAIN`` for all tensors with the same dispatch key set.

    -1: the tensor is not strided, so :func:`_reduce_special` reduces it.
    """
    flags = _CONJ * t.is_conj() | _NEG * t.is_neg() | _OFF_CPU * (not t.is_cpu) if is_strided(t) else -1
    _PLAIN[dispatch_keys(t).raw_repr()] = flags
    return flags


def _outgoing() -> Outgoing:
    encoding = message.encoding
    out: Outgoing | None = encoding.outgoing
    if out is None:
        out = encoding.outgoing = Outgoing(encoding.device_map, encoding.embedded)
    return out


def _describe(out: Outgoing, t: torch.Tensor, flags: int) -> tuple[Any, ...]:
    """Return the arguments with which :func:`tensor` rebuilds a strided tensor.

    A tensor without elements has its device, or -1 for the CPU, in place of the number of its storage.
    """
    stride = t.stride()
    offset: Any = t.storage_offset()
    index: int | str
    size = t.itemsize
    count = t.numel()
    if count == 0:
        # A tensor without elements needs no bytes of a storage, and the code for blocks cannot handle an empty range.
        offset = 0
        index = out.target(t.device) if flags & _OFF_CPU else out.cpu or -1
    elif t.is_contiguous():
        low = offset * size
        index = out.touch(t.untyped_storage(), t, low, low + count * size, True, flags & _OFF_CPU)
    else:
        last = offset + sum([(n - 1) * s for n, s in zip(t.shape, stride, strict=True)])
        low, high = offset * size, (last + 1) * size
        index = out.touch(t.untyped_storage(), t, low, high, False, flags & _OFF_CPU)
    code = _CODES[t.dtype] | flags & ~_OFF_CPU
    if t.requires_grad:
        code |= _GRAD
        message.encoding.grad = True
    return (index, code, offset, *t.shape, *stride)


def _part(out: Outgoing, t: torch.Tensor) -> tuple[Any, ...]:
    """Describe a plain tensor that is a component of another tensor."""
    t = t.detach()
    flags = _flags(t)
    if flags < 0:
        raise SerializationError(f"cannot send a tensor made of {t.layout} tensors")
    return _describe(out, t, flags)


def _reduce_tensor(t: torch.Tensor) -> tuple[Any, ...]:
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        raise SerializationError(
            "a tensor with a forward-mode tangent cannot be sent, because its tangent would be lost: take it apart with "
            "torch.autograd.forward_ad.unpack_dual() and send primal and tangent"
        )
    encoding = message.encoding
    stacks = encoding.stacks
    if stacks:
        try:
            shape = t.shape
        except RuntimeError:  # nested tensors have no shape
            shape = None
        for fits, append, rebuild in stacks.get(shape, ()):
            if fits(t) and not t.__dict__:
                append(t)
                encoding.tensors.append(t)
                taken: tuple[Any, ...] = rebuild
                return taken
    flags = _PLAIN.get(dispatch_keys(t).raw_repr())
    if flags is None:
        flags = _flags(t)
    encoding.tensors.append(t)
    made: tuple[Any, ...] | None = None
    if flags == 0 and encoding.embeds and 0 < (size := t.nbytes) <= INLINE_BYTES and t.is_contiguous():
        # Put the bytes into the pickle, so that most messages with a tensor need no table.
        storage = t.untyped_storage()
        key = storage._cdata  # unique, because encoding.tensors keeps the storage alive
        if key in encoding.embedded:
            raise SharedStorageError
        out, shape = encoding.outgoing, t.shape
        if (
            (out is None or key not in out.by_storage)
            and t.storage_offset() * t.itemsize + size <= storage.nbytes()
            # A contiguous tensor may have any stride in a dimension of one element.
            and (1 not in shape or t.stride() == _packed(shape))
        ):
            code = _CODES[t.dtype]
            if t.requires_grad:
                code |= _GRAD
                encoding.grad = True
            if (
                len(encoding.tensors) > _FEW
                and code & 0xFF <= _COMMON
                and code & 0xFF != _COMPLEX_HALF
                and not t.__dict__
            ):
                made = _begin_stack(encoding, t, code, shape)
            if made is None:
                encoding.embedded.add(key)
                made = embedded, (_copy_writable(t.data_ptr(), size), code, *shape)
    if made is None:
        made = (tensor, _describe(_outgoing(), t, flags)) if flags >= 0 else _reduce_special(_outgoing(), t)
    return (*made[:2], t.__dict__, None, None, set_attributes) if t.__dict__ else made


def _packed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives to a contiguous tensor."""
    strides = [1]
    for n in shape[:0:-1]:
        strides.append(strides[-1] * n)
    return tuple(reversed(strides)) if shape else ()


class _Stack:
    """Small tensors of equal layout; their bytes are stored one after the other, behind the pickle.

    The stack is pickled as an iterator, and each of its tensors as ``next(iterator)``. This reduction is the same object for
    all tensors of the stack, so the pickle contains the reduction once and refers to it.
    """

    __slots__ = ("_layout", "members")

    def __init__(self, index: int, code: int, shape: torch.Size) -> None:
        self._layout = index, code, *shape
        self.members: list[torch.Tensor] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return stacked, self._layout


def _begin_stack(encoding: Any, t: torch.Tensor, code: int, shape: torch.Size) -> tuple[Any, ...] | None:
    """Start a stack with a tensor; return its reduction. None: it cannot be stacked, or too few tensors had its layout."""
    layout = code, shape
    alike = encoding.layouts.get(layout, 0)
    if alike < _ALIKE or _torch.TensorGuards is None or _is_altered() or torch.is_autocast_enabled("cpu"):
        encoding.layouts[layout] = alike + 1
        return None
    pieces = _outgoing().pieces
    stack = _Stack(len(pieces), code, shape)
    pieces.append([stack, 0, 0, True, None, "", None])
    stack.members.append(t)
    # One call compares all relevant properties: the kind of tensor, dtype, sizes, strides, and whether it requires grad.
    fits = _torch.TensorGuards(t, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    rebuild = next, (stack,)
    encoding.stacks.setdefault(shape, []).append((fits, stack.members.append, rebuild))
    return rebuild


def _reduce_special(out: Outgoing, t: torch.Tensor) -> tuple[Any, ...]:
    """Reduce a tensor that is not just a strided view of one storage."""
    if _torch.is_transformed(t):
        raise SerializationError("a tensor inside torch.func (vmap, grad, ...) cannot be sent")
    if not t.is_nested and any(getattr(t, "names", ())):
        raise SerializationError("a tensor with named dimensions cannot be sent: drop its names first")
    grad = t.requires_grad
    message.encoding.grad |= grad
    bare = t.detach()
    layout = t.layout
    if layout is torch.sparse_coo:
        parts = (_part(out, _torch.sparse_indices(bare)), _part(out, _torch.sparse_values(bare)))
        return sparse_coo, (*parts, tuple(t.shape), t.is_coalesced(), grad)
    if layout in _COMPRESSED:
        columns = layout in (torch.sparse_csc, torch.sparse_bsc)
        compressed = bare.ccol_indices() if columns else bare.crow_indices()
        plain = bare.row_indices() if columns else bare.col_indices()
        parts3 = (_part(out, compressed), _part(out, plain), _part(out, bare.values()))
        return sparse_compressed, (_COMPRESSED.index(layout), *parts3, tuple(t.shape), grad)
    if layout is _torch.MKLDNN:
        return mkldnn, (_part(out, bare.to_dense()), grad)
    if t.is_nested:
        return nested, (tuple([_part(out, each) for each in bare.unbind()]), grad)
    if t.is_meta:
        return meta, (_CODES[t.dtype], tuple(t.shape), t.stride(), t.storage_offset(), grad)
    if _torch.is_zerotensor(t):
        return tensor, _describe(out, torch.zeros(t.shape, dtype=t.dtype), _GRAD * grad)
    # A quantised tensor. torch reduces it to its whole storage, which our reducers put outside of the pickle.
    if t.nbytes < t.untyped_storage().nbytes():
        t = t.clone()
    reduced: tuple[Any, ...] = t.__reduce_ex__(5)
    return reduced


def _reduce_parameter(p: torch.nn.Parameter) -> tuple[Any, ...]:
    out = _outgoing()
    flags = _flags(p)
    rebuild: tuple[Any, ...]
    if flags >= 0:
        message.encoding.tensors.append(p)
        rebuild = (parameter, (p.requires_grad, *_describe(out, p, flags)))
    else:
        # p.detach() is a new tensor. The pickler keeps it alive, because it is in the arguments of the reduction.
        rebuild = (torch.nn.Parameter, (p.detach(), p.requires_grad))
    return (*rebuild, p.__dict__, None, None, set_attributes) if p.__dict__ else rebuild


def _reduce_untyped(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    size, kind = storage.nbytes(), storage.device.type
    if not size:
        return untyped_storage, (-1,)
    if kind == "meta":
        raise SerializationError("a storage on the meta device has no bytes to send")
    return untyped_storage, (_outgoing().touch(storage, None, 0, size, True, kind != "cpu"),)


def _reduce_typed(storage: torch.TypedStorage) -> tuple[Any, ...]:
    index, dtype = _reduce_untyped(_torch.untyped(storage))[1][0], storage.dtype
    return typed_storage, (index, _CODES[dtype])


def tensor_reducers() -> dict[type, Any]:
    """Return the reducers of tensors, parameters and storages, by exact type."""
    return {
        torch.Tensor: _reduce_tensor,
        torch.nn.Parameter: _reduce_parameter,
        torch.UntypedStorage: _reduce_untyped,
        torch.TypedStorage: _reduce_typed,
    }


# -- decoding ----------------------------------------------------------------------------------


# The items of a list that describes an entry of the table while a message is decoded: a writable buffer, the buffer's offset in
# the sender's storage, kind, device, the first tensor that was built on the buffer, the distances of rows in a pitched block,
# and the entry whose storage is also used for this entry. Tensors that overlap use the same list; tensors of one block that do
# not overlap have lists that lead to the same storage.
_DATA, _START, _KIND, _PLACE, _FIRST, _ROWS, _BLOCK_OF = range(7)


def read_storages(
    numbers: tuple[int, ...], small: Any, names: bytes, buffers: Any, devices: Mapping[str, str]
) -> list[list[Any]]:
    """Return the entries of a message's table of storages with the buffers of the message.

    A buffer is memory, or a one-dimensional tensor of uint8 on its device.

    Args:
        devices: device in the message -> device of this process that is used in its place.

    Raises:
        ProtocolError: table and buffers do not fit together.
    """
    storages: list[list[Any]] = []
    at = 0
    pending = iter(buffers)
    pitches: list[tuple[int, ...]] = []
    end = len(numbers)
    while end and numbers[end - 3] == _PITCH:
        pitches.append(numbers[end - 2 : end])
        end -= 3
    gathered: Any = None
    for n in range(0, end, 3):
        kind, size, low = numbers[n : n + 3]
        if kind in (_SAME, _BESIDE):
            storages.append(_joined_entry(storages, size, kind))
            continue
        device = ""
        if kind & _PLACED:
            if not names:
                raise ProtocolError("a message's table of storages lacks the name of a device")
            last = 1 + names[0]
            device, names = names[1:last].decode(), names[last:]
            device = devices.get(device, device)
        data: Any
        if kind & _IN_BODY:
            data = bytearray(small[at : at + size])  # a copy: tensors must not change or keep the body
            at += size
        elif kind & _GATHERED:
            if gathered is None:
                gathered = _writable(next(pending, b""))
            data = gathered[:size]
            gathered = gathered[-(-size // _ALIGN) * _ALIGN :]
        else:
            data = next(pending, b"")
            if not (device and isinstance(data, torch.Tensor)):
                data = _writable(data)
        if len(data) != size or size == 0:
            raise ProtocolError(f"a storage has {size} bytes in the table, but {len(data)} bytes were sent")
        rows = None
        if kind & _PITCHED:
            rows = pitches.pop() if pitches else (0, 0)
            if not rows[0]:
                raise ProtocolError("a message's table of storages lacks the distances of rows")
        storages.append([data, low, kind, device, None, rows, None])
    if at != len(small) or names or pitches or gathered or next(pending, None) is not None:
        raise ProtocolError("a message's table of storages has the wrong length")
    return storages


def _writable(buffer: Any) -> memoryview:
    if isinstance(buffer, torch.Tensor):
        raise ProtocolError("a message has memory of a device where it needs memory of the host")
    data = memoryview(buffer).cast("B")
    return memoryview(bytearray(data)) if data.readonly else data


def _joined_entry(storages: list[list[Any]], number: int, kind: int) -> list[Any]:
    """Return the entry of a tensor in the block of an earlier tensor."""
    if number >= len(storages):
        raise ProtocolError(f"tensor {len(storages)} uses the storage of the later tensor {number}")
    earlier = storages[number]
    if kind == _SAME:
        return earlier
    entry = earlier.copy()
    entry[_FIRST], entry[_BLOCK_OF] = None, earlier
    return entry


def _piece(index: int) -> list[Any]:
    storages: list[list[Any]] = message.decoding.storages
    if not 0 <= index < len(storages):
        raise ProtocolError(f"a tensor uses storage {index}, but the message has {len(storages)} storages")
    return storages[index]


@contextlib.contextmanager
def _placing(device: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, RuntimeError) as error:  # AssertionError: torch was built without CUDA
        raise SerializationError(f"a tensor cannot be moved to {device}: {error}") from error


def _storage(piece: list[Any]) -> torch.UntypedStorage:
    while piece[_BLOCK_OF] is not None:
        piece = piece[_BLOCK_OF]
    first = piece[_FIRST]
    if first is None:
        first = piece[_DATA]
        if not isinstance(first, torch.Tensor):
            first = torch.frombuffer(first, dtype=torch.uint8)
        if piece[_PLACE]:
            with _placing(piece[_PLACE]):
                first = first.to(piece[_PLACE])
        piece[_FIRST] = first
    storage: torch.UntypedStorage = first.untyped_storage()
    return storage


def _build(index: int | str, code: int, offset: int, *geometry: int) -> torch.Tensor:
    """Build a strided tensor; checks all numbers, because the peer chose them."""
    dtype = _STRIDED[code & 0xFF]
    rank = len(geometry) >> 1
    shape, stride = geometry[:rank], geometry[rank:]
    if index == -1 or isinstance(index, str):
        if 0 not in shape or min(geometry) < 0:
            raise ProtocolError(f"a tensor of sizes {shape} has elements, but no storage")
        device = "cpu" if index == -1 else str(index)
        device = message.decoding.devices.get(device, device)
        with _placing(device):
            return _marked(torch.empty_strided(shape, stride, dtype=dtype, device=device), code)
    storages: list[list[Any]] = message.decoding.storages
    piece = storages[index] if 0 <= index < len(storages) else _piece(index)  # _piece() raises
    data, low, kind, device, first, rows, block = piece
    size = dtype.itemsize
    start = offset * size - low
    if kind & (_COMPACT | _PITCHED):
        if rows is None:
            start, stride = 0, _packed(shape)
        else:
            start, strides = blocks.repitch(start, [step * size for step in stride], *rows)
            stride = tuple([step // size for step in strides])
    if len(stride) != rank:
        raise ProtocolError(f"a tensor has {rank} sizes, but {len(stride)} strides")
    last = 0
    for n, step in zip(shape, stride):  # noqa: B905 - `strict` costs more than the whole loop
        if n <= 0 or step < 0:
            raise ProtocolError(f"a tensor has sizes {shape} and strides {stride}, which are not valid")
        last += (n - 1) * step
    # All terms are at least 0, so the last element has the highest offset.
    if start < 0 or start % size or start + (last + 1) * size > len(data):
        raise ProtocolError(f"a tensor of sizes {shape}, strides {stride} is not inside of its storage")
    if first is None and block is None and not device and len(data) % size == 0:
        t = torch.frombuffer(data, dtype=dtype)
        piece[_FIRST] = t
        if start or stride != (1,) or shape[0] * size != len(data):
            # In place, so that the result is not a view: no received tensor should be a view.
            t.as_strided_(shape, stride, start // size)
    elif first is None:
        storage = _storage(piece)
        t = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, start // size, shape, stride)
        piece[_FIRST] = t
    else:
        t = _beside(first, dtype, shape, stride, start // size)
    return _marked(t, code) if code & (_CONJ | _NEG) else t


def _beside(
    first: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Build a tensor on the storage of ``first``; the two tensors share torch's version counter.

    Therefore autograd raises an error if one tensor is changed in place after the other was saved for a backward pass. Neither
    tensor is a view, because torch refuses to change views in place that a custom autograd function has returned.
    """
    base = first.detach()
    _torch.set_conj(base, False)
    _torch.set_neg(base, False)
    if dtype is not base.dtype:
        room = base.untyped_storage().nbytes()
        raw = base.as_strided((room // base.itemsize,), (1,), 0).view(torch.uint8)
        base = raw.as_strided((room // dtype.itemsize * dtype.itemsize,), (1,), 0).view(dtype)
    return base.as_strided(shape, stride, offset).detach()


def _marked(t: torch.Tensor, code: int) -> torch.Tensor:
    if code & _CONJ:
        if not t.dtype.is_complex:
            raise ProtocolError(f"a conjugate tensor of {t.dtype}")
        _torch.set_conj(t, True)
    if code & _NEG:
        _torch.set_neg(t, True)
    return t


def _arrives(t: torch.Tensor, grad: bool = False) -> torch.Tensor:
    if grad:
        t.requires_grad_(True)
    message.decoding.tensors.append(t)
    return t


def tensor(index: int | str, code: int, offset: int, *geometry: int) -> torch.Tensor:
    """Rebuild a strided tensor (wire format)."""
    t = _build(index, code, offset, *geometry)
    if code & _GRAD:
        t.requires_grad_(True)
    message.decoding.tensors.append(t)
    return t


def embedded(data: bytearray, code: int, *shape: int) -> torch.Tensor:
    """Rebuild a small tensor whose elements are in the pickle, in order (wire format)."""
    dtype = _STRIDED[code & 0xFF]
    if (
        type(data) is not bytearray
        or len(data) != math.prod(shape) * dtype.itemsize
        or (shape and min(shape) <= 0)
    ):
        raise ProtocolError(f"a tensor of sizes {shape} cannot have {len(data)} bytes")
    t = torch.frombuffer(data, dtype=dtype)
    if len(shape) != 1:
        # In place, so that the result is not a view. If the sizes were a tuple, torch would take half a microsecond more.
        t.resize_(*shape or _SCALAR)
    if code & _GRAD:
        t.requires_grad_(True)
    message.decoding.tensors.append(t)
    return t


_SCALAR: Final[Any] = ((),)


def stacked(index: int, code: int, *shape: int) -> Iterator[torch.Tensor]:
    """Yield the tensors of a stack, which have the same layout (wire format)."""
    dtype = _STRIDED[code & 0xFF]
    size = math.prod(shape) * dtype.itemsize
    piece = _piece(index)
    data = piece[_DATA]
    if (
        piece[1:] != [0, _IN_BODY, "", None, None, None]
        or (shape and min(shape) <= 0)
        or not data
        or len(data) % size
    ):
        raise ProtocolError(f"a stack of {len(data)} bytes does not consist of tensors of sizes {shape}")
    # Use each byte once, so that a peer cannot make many tensors of a short message by building the stack several times.
    piece[_DATA] = b""
    found: Iterator[torch.Tensor] = chain.from_iterable(_unstack(data, size, dtype, shape))
    if code & _GRAD:
        found = map(_require_grad, found)
    return filterfalse(message.decoding.tensors.append, found)  # yields all tensors: append() returns None


_require_grad: Final = methodcaller("requires_grad_")


def _is_altered() -> bool:
    """Say whether a mode (fake tensors, ...) or a transform (``torch.func.grad``) changes the tensors that this thread makes."""
    return bool(dispatch_modes() or function_modes() or innermost_transform() is not None)


def _unstack(
    data: bytearray, size: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Iterator[Iterable[torch.Tensor]]:
    """Yield the tensors of a stack in portions, so that few tensors are made before they are requested."""
    step = size * max(1, _PORTION // size)
    # numpy is not used for scalars: iterating over a one-dimensional array yields numbers instead of arrays.
    array_dtype = _ARRAYS.get(dtype) if shape else None
    if _is_altered():
        for at in range(0, len(data), size):
            t = torch.frombuffer(data[at : at + size], dtype=dtype)
            yield (t if len(shape) == 1 else t.resize_(shape),)
        return
    for at in range(0, len(data), step):
        part = data[at : at + step]
        if array_dtype is not None:
            # Each tensor has its own storage object on the memory of the portion. A copy by torch would take twice as long.
            yield map(torch.from_numpy, _frombuffer(part, array_dtype).reshape(-1, *shape))
        else:
            yield _unbind_copy(torch.frombuffer(part, dtype=dtype).view(-1, *shape))
    raise ProtocolError(f"a message uses more tensors of a stack than its {len(data)} bytes contain")


def parameter(requires_grad: bool, index: int | str, code: int, offset: int, *geometry: int) -> torch.Tensor:
    """Rebuild a parameter (wire format)."""
    return _arrives(torch.nn.Parameter(_build(index, code, offset, *geometry), requires_grad))


def set_attributes(t: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Set the Python attributes of a tensor (wire format)."""
    t.__dict__.update(attributes)


def sparse_coo(indices: Any, values: Any, shape: Any, coalesced: bool, grad: bool) -> torch.Tensor:
    """Rebuild a sparse COO tensor after checking its indices (wire format)."""
    a, b = _build(*indices), _build(*values)
    # Without a device, torch would use the device of a block `with torch.device(...)` in which this thread may be.
    options: Any = {"device": b.device, "check_invariants": True, "is_coalesced": coalesced}
    t = torch.sparse_coo_tensor(a, b, shape, **options)
    return _arrives(t, grad)


def sparse_compressed(
    layout: int, compressed: Any, plain: Any, values: Any, shape: Any, grad: bool
) -> torch.Tensor:
    """Rebuild a CSR, CSC, BSR or BSC tensor after checking its indices (wire format)."""
    a, b, c = _build(*compressed), _build(*plain), _build(*values)
    options: Any = {"device": c.device, "check_invariants": True, "layout": _COMPRESSED[layout]}
    t = torch.sparse_compressed_tensor(a, b, c, shape, **options)
    return _arrives(t, grad)


def mkldnn(dense: Any, grad: bool) -> torch.Tensor:
    """Rebuild a tensor in oneDNN's own layout from its dense elements (wire format)."""
    return _arrives(_build(*dense).to_mkldnn(), grad)


def nested(parts: Any, grad: bool) -> torch.Tensor:
    """Rebuild a strided nested tensor from copies of its components (wire format)."""
    built = [_build(*part) for part in parts]
    return _arrives(torch.nested.nested_tensor(built, device=built[0].device if built else None), grad)


def meta(code: int, shape: Any, stride: Any, offset: int, grad: bool) -> torch.Tensor:
    """Rebuild a tensor that has no data (wire format)."""
    reach = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True) if n) + 1
    t = torch.empty(reach, dtype=_STRIDED[code], device="meta").as_strided_(shape, stride, offset)
    return _arrives(t, grad)


def untyped_storage(index: int) -> torch.UntypedStorage:
    """Rebuild a whole storage (wire format)."""
    return torch.UntypedStorage(0) if index == -1 else _storage(_piece(index))


def typed_storage(index: int, code: int) -> torch.TypedStorage:
    """Rebuild a whole storage with a dtype (wire format)."""
    storage = untyped_storage(index)
    return torch.TypedStorage(wrap_storage=storage, dtype=_OF_STORAGES[code], _internal=True)
