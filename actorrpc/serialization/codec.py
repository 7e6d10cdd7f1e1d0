"""Encode one message (function and arguments, or a result) into bytes, and decode it.

:func:`encode` returns a body, memory that is sent without a copy (tensors, numpy arrays, long bytes), and the definitions of
functions and classes that the peer cannot import. The body is a pickle; if the message has more than a pickle, a short table
follows it. :func:`decode` rebuilds the message, where possible without copying the memory. In the common case, the C pickler
runs once with a dispatch table. Functions by value, names of the main module and errors take slower paths. The body for workers
that take data only is not a pickle (:mod:`actorrpc.serialization.data_only`).

All functions may be called from any thread, by several threads at once. Reducers may encode or decode other messages. No I/O is
done, and an error leaves nothing half sent. Do not pass bytes from a peer to this module before the peer is authenticated.

Long bytes and texts are sent outside of the pickle. The C pickler passes a long payload to its file as the object itself;
:func:`punch` leaves such objects out of the body, which leaves *holes* in the pickle. At the receiver, :class:`Pieces` reads the
body and the payloads as the original stream. A :class:`Pieces` is used by one thread at a time.
"""

from __future__ import annotations

import copyreg
import pickle
import platform
import struct
import sys
from collections import ChainMap
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from types import MappingProxyType, MethodType
from typing import Any, Final, NoReturn

import cloudpickle
import torch

from actorrpc._exceptions import is_of_handler, line_of
from actorrpc.errors import ProtocolError, RefusedError, RpcError, SerializationError
from actorrpc.serialization import by_value, data_only
from actorrpc.serialization import tensors as tensors_module
from actorrpc.serialization.by_value import (
    ByValuePickler,
    DefinitionStore,
    UnknownDefinitionError,
    load_here,
    loads_here,
    reduce_method,
    refuse,
)
from actorrpc.serialization.diagnostics import describe, path_to
from actorrpc.serialization.reducers import SCRIPT_REDUCERS
from actorrpc.serialization.tensors import (
    ENTRY,
    INLINE_BYTES,
    Outgoing,
    PlacedSpan,
    SharedStorageError,
    TensorSpan,
    message,
    read_storages,
)

__all__ = [
    "HOLE",
    "DefinitionStore",
    "Encoded",
    "Pieces",
    "PlacedSpan",
    "TensorSpan",
    "UnknownDefinitionError",
    "current_decoding",
    "current_encoding",
    "decode",
    "defined",
    "dumper",
    "dumps",
    "encode",
    "encode_body",
    "loads",
    "not_rebuilt",
    "punch",
    "register",
    "restrict",
    "unpickle",
]

_LONG: Final = 64 << 10  # the C pickler passes bytes and texts of at least this length to write() uncopied
HOLE: Final = struct.Struct("<QQ")  # position in the pickle, number of bytes that are left out there
_HEADERS: Final = {0x42: 4, 0x58: 4, 0x8E: 8, 0x8D: 8, 0x96: 8}  # opcode -> bytes of the length after it


def punch(chunks: list[Any], spans: list[TensorSpan], inline: bool) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the joined chunks of the pickler, and the holes: long bytes and texts become spans, unless ``inline`` is true.

    A long chunk counts as long bytes or text if the chunk before it ends with an opcode and the chunk's length. A wrong guess
    does no harm: the receiver joins body and spans to the same stream again.
    """
    pieces: list[Any] = []
    holes: list[bytes] = []
    position = 0
    before: Any = b""
    for chunk in chunks:
        if not isinstance(chunk, bytes):
            chunk = pickle.PickleBuffer(chunk).raw()  # in memory order, also for Fortran order
        size = len(chunk)
        if size >= _LONG and not inline and _announces(before, size):
            holes.append(HOLE.pack(position, size))
            spans.append(TensorSpan.of(chunk))
            before = b""
        else:
            pieces.append(chunk)
            before = chunk
        position += size
    return b"".join(pieces), tuple(holes)


def _announces(before: Any, size: int) -> bool:
    for width in (8, 4):
        if len(before) > width and _HEADERS.get(before[-1 - width]) == width:
            if int.from_bytes(before[-width:], "little") == size:
                return True
    return False


class Pieces:
    """The file that the unpickler reads: the pickle, with its holes filled by the payloads that were sent outside of it."""

    __slots__ = ("_at", "_parts")

    def __init__(self, body: memoryview, holes: Sequence[tuple[int, int]], fillings: Sequence[Any]) -> None:
        self._parts: list[memoryview] = []
        self._at = 0
        position = start = 0
        for (where, size), filling in zip(holes, fillings, strict=True):
            view = memoryview(filling).cast("B")
            length = where - position
            if length < 0 or start + length > len(body) or len(view) != size:
                raise ProtocolError("the buffers of a message do not fit the holes in its pickle")
            self._parts += [body[start : start + length], view]
            start += length
            position = where + size
        self._parts.append(body[start:])
        self._parts.reverse()

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        done = 0
        while done < len(view) and self._parts:
            part = self._parts[-1]
            step = min(len(view) - done, len(part) - self._at)
            view[done : done + step] = part[self._at : self._at + step]
            done += step
            self._at += step
            if self._at == len(part):
                self._parts.pop()
                self._at = 0
        return done

    def read(self, size: int) -> Any:
        if self._parts and size <= len(self._parts[-1]) - self._at:
            self._at += size
            return self._parts[-1][self._at - size : self._at]
        if size > sum(map(len, self._parts)) - self._at:
            raise pickle.UnpicklingError("pickle data was truncated")
        found = bytearray(size)
        self.readinto(found)
        return found

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("a pickle of an old protocol")


# A pickler that has written a longer pickle is discarded, because it would allocate its grown buffer again for each message.
_KEEP_PICKLER: Final = 8 << 10
_STOP: Final = 0x2E
_MAGIC: Final = 1  # the last byte of a body with a table; a pickle without a table ends with a full stop
_DATA: Final = 2  # the last byte of a body with a table in the data-only mode
_EMBEDDED: Final = 3  # the last byte of a body without a table whose pickle contains small tensors
_WITH_TENSORS: Final = bytes([_EMBEDDED])
_NOTHING: Final[Mapping[bytes, bytes]] = MappingProxyType({})
_HERE: Final[Mapping[str, str]] = MappingProxyType({})  # a message names devices of this process


class Encoded:
    """A message's contents, ready to be sent.

    Attributes:
        body: the pickle, followed by a table if a part of the message is outside of the pickle.
        spans: the memory that is sent after the body, in order; each span is one buffer for :func:`decode`. The memory is read
            when the message is written. A sender that returns to its caller earlier has to copy the memory first.
        definitions: hash -> definition, for functions and classes that the peer does not have; the peer stores them before it
            decodes.
        context: the ``context`` that :func:`encode` was given.
        tensors: the plain tensors of the message, in the order in which :func:`decode` lists them.
        grad: whether one of the plain tensors requires grad.
    """

    __slots__ = (
        "body",
        "buffers",
        "context",
        "definitions",
        "device_map",
        "embedded",
        "embeds",
        "grad",
        "inline",
        "layouts",
        "outgoing",
        "reduced",
        "spans",
        "stacks",
        "tensors",
    )

    def __init__(self, context: object, device_map: Mapping[str, str] | None, inline: bool) -> None:
        self.body = b""
        self.spans: Sequence[TensorSpan] = ()
        self.definitions = _NOTHING
        self.context = context
        self.tensors: list[Any] = []
        self.grad = False
        # -- only while encoding
        self.device_map = device_map
        self.inline = inline
        self.embeds = not inline and (device_map is None or "cpu" not in device_map)
        self.embedded: set[int] = set()  # the storages whose bytes are in the pickle
        self.layouts: dict[Any, int] = {}  # layout -> how many small tensors of it are not in a stack
        self.stacks: dict[Any, list[Any]] = {}  # sizes -> stacks that accept more tensors of these sizes
        self.outgoing: Outgoing | None = None
        self.buffers: list[memoryview] | None = None
        self.reduced: dict[int, tuple[object, Any]] | None = None

    def start_over(self) -> None:
        """Discard the records of tensors and buffers before the object is pickled again, with all tensors in the table."""
        self.tensors, self.grad = [], False
        self.embeds, self.embedded, self.layouts, self.stacks = False, set(), {}, {}
        self.outgoing = self.buffers = None

    @property
    def nbytes(self) -> int:
        """The size of body and spans together."""
        return len(self.body) + sum([span.nbytes for span in self.spans])

    @property
    def is_placed(self) -> bool:
        """Whether the receiver moves a part of the spans to a device."""
        return any(isinstance(span, PlacedSpan) for span in self.spans)


class _Decoding:
    """The thread-local state while a message is decoded."""

    __slots__ = ("context", "definitions", "devices", "storages", "tensors")

    def __init__(
        self,
        context: object,
        definitions: DefinitionStore | None,
        tensors: list[Any] | None,
        devices: Mapping[str, str],
    ) -> None:
        self.context = context
        self.definitions = definitions
        self.devices = devices
        self.tensors = [] if tensors is None else tensors
        self.storages: Sequence[list[Any]] = ()


# -- reducers -----------------------------------------------------------------------------------

_TENSOR_REDUCERS: Final = tensors_module.tensor_reducers()
_own: Final[dict[type, Any]] = dict(_TENSOR_REDUCERS)
# The C pickler's dispatch table: copyreg's table, overridden by ours. It is a copy, because a ChainMap would cost 0.3 us for
# each object of a user's class. ``_seen`` is compared with copyreg's table to detect changes.
_table: Final[dict[Any, Any]] = {MethodType: reduce_method, **copyreg.dispatch_table, **_own}
_seen: dict[Any, Any] = dict(copyreg.dispatch_table)
_by_value_table: Final = ChainMap(_own, cloudpickle.Pickler._dispatch_table, copyreg.dispatch_table)
_refused: Final = dict.fromkeys(_own, refuse)
_definition_table: Final = ChainMap(_refused, cloudpickle.Pickler._dispatch_table, copyreg.dispatch_table)


def _follow_copyreg() -> None:
    global _seen
    now = dict(copyreg.dispatch_table)
    for gone in _seen.keys() - now.keys():
        _table.pop(gone, None)
    _table.update({MethodType: reduce_method, **now})
    _table.update(_own)
    _seen = now


def register(cls: type, reducer: Callable[[Any], tuple[Any, ...]]) -> None:
    """Reduce objects of exactly this class with ``reducer(obj) -> (callable, args)`` in messages.

    The reducer runs at most once per object and message, and gets the message's context from :func:`current_encoding`. The
    callable gets the receiver's context from :func:`current_decoding`. If the message then cannot be encoded, the caller of
    :func:`encode` has to undo effects of the reducer. Thread-safe.
    """

    def reduce(obj: Any) -> tuple[Any, ...]:
        encoding = message.encoding
        done = encoding.reduced
        if done is None:
            done = encoding.reduced = {}
        # The fast and the by-value pickler may both reach the object, but a reducer that makes a fork of an RRef must run once.
        found = done.get(id(obj))
        if found is None:
            found = done[id(obj)] = (obj, reducer(obj))
        reduced: tuple[Any, ...] = found[1]
        return reduced

    _refused[cls] = refuse
    _own[cls] = reduce
    _table[cls] = reduce


for _cls, _reducer in SCRIPT_REDUCERS.items():
    register(_cls, _reducer)


def current_encoding() -> object:
    """Return the ``context`` of the message that this thread is encoding, or ``None``."""
    encoding = message.encoding
    return None if encoding is None else encoding.context


def current_decoding() -> object:
    """Return the ``context`` of the message that this thread is decoding, or ``None``."""
    decoding = message.decoding
    return None if decoding is None else decoding.context


# -- encoding -----------------------------------------------------------------------------------


class _Sink:
    """A file for a pickler that appends to a list. The pickler writes long bytes as the original objects."""

    __slots__ = ("chunks", "write")

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.write = self.chunks.append


class _FastPickler(pickle.Pickler):
    dispatch_table = _table
    chunks: list[Any]

    def unwatch(self) -> None:
        self.__class__ = _FastPickler


class _WatchingPickler(_FastPickler):
    """The class of the fast pickler while modules are registered for pickling by value."""

    reducer_override = by_value.stop


def _take_buffer(buffer: pickle.PickleBuffer) -> bool:
    """Store a large buffer outside of the pickle, and return False. Return True for a buffer that stays in the pickle."""
    encoding = message.encoding
    raw = buffer.raw()
    if encoding.inline or raw.nbytes <= INLINE_BYTES:
        return True
    if encoding.buffers is None:
        encoding.buffers = []
    encoding.buffers.append(raw)
    return False


def encode_body(
    obj: object,
    remote_main: bool | None,
    known: Container[bytes],
    device_map: Mapping[str, str] | None,
    context: object,
    listed: bool = True,
) -> bytes | Encoded:
    """Like :func:`encode`, but return only the body if the message consists of nothing else. Every call uses this function.

    ``listed``: also return an :class:`Encoded` if the message has small tensors of which none requires grad.
    """
    pickler = message.pickler
    encoded: Encoded | None = message.spare
    if (
        pickler is None
        or remote_main is None
        or message.encoding is not None
        or copyreg.dispatch_table != _seen
    ):
        return encode(obj, remote_main=remote_main, known=known, device_map=device_map, context=context)
    if _by_value_modules:
        pickler.__class__ = _WatchingPickler
    if encoded is None:
        encoded = Encoded(context, device_map, False)
    else:
        message.spare = None
        encoded.context = context
        if encoded.device_map is not device_map:
            encoded.device_map = device_map
            encoded.embeds = device_map is None or "cpu" not in device_map
    message.encoding = encoded
    message.pickler = None
    chunks: list[Any] = pickler.chunks
    try:
        pickler.dump(obj)
    except Exception as error:
        # Go on with the same ``encoded``, because it has the results of the reducers that have run for this object.
        return _finish(obj, encoded, pickler, error, remote_main, known)
    finally:
        message.encoding = None
    pickler.clear_memo()
    if len(chunks) == 1:
        body: bytes = chunks[0]
        space, count, late = by_value.late_seen
        if len(space) != count:
            late = by_value.has_late()
        if len(body) <= _KEEP_PICKLER and ((remote_main and not late) or not _find_main(body)):
            if encoded.buffers is None and encoded.reduced is None and not encoded.stacks:
                chunks.clear()
                message.pickler = pickler
                if encoded.outgoing is not None:
                    encoded.body = _with_table(body, chunks, encoded, _NOTHING)
                    return encoded
                if encoded.tensors:
                    body += _WITH_TENSORS
                    if listed or encoded.grad:
                        encoded.body = body
                        return encoded
                    encoded.tensors.clear()
                    encoded.embedded.clear()
                    if encoded.layouts:
                        encoded.layouts.clear()
                message.spare = encoded
                encoded.context = None
                return body
    return _finish(obj, encoded, pickler, None, remote_main, known)


def _finish(
    obj: object,
    encoded: Encoded,
    pickler: _FastPickler,
    error: Exception | None,
    remote_main: bool,
    known: Container[bytes],
) -> Encoded:
    """Finish a message after the fast pickler: ``error`` stopped the pickler, or the message is more than one short pickle."""
    if error is None and encoded.stacks:
        assert encoded.outgoing is not None
        try:
            encoded.outgoing.close_stacks()
        except SharedStorageError as shared:
            error = shared
    if isinstance(error, SharedStorageError):
        encoded.start_over()
        return _encode(obj, encoded, remote_main, known)
    outer = message.encoding
    message.encoding = encoded
    named: dict[bytes, bytes] | None = None
    idle: _FastPickler | None = None
    try:
        if error is not None:
            # After any other error, the pickler cannot be used again. A pickler with a grown buffer is not kept.
            if isinstance(error, by_value.GoesByValueError) and sys.getsizeof(pickler) <= 2 * _KEEP_PICKLER:
                pickler.clear_memo()
                pickler.chunks.clear()
                message.pickler = pickler
            chunks, named = _encode_by_value(obj, encoded, remote_main, error)
        elif (not remote_main or by_value.has_late()) and by_value.names_main(pickler.chunks):
            chunks, named = _encode_by_value(obj, encoded, remote_main, error)
        else:
            chunks = pickler.chunks
            if len(chunks) == 1 and len(chunks[0]) <= _KEEP_PICKLER:
                idle = pickler
        _close_body(encoded, chunks, named, known)
        # Keep the pickler only after its chunk was removed, because a signal handler may raise at any time.
        if idle is not None:
            message.pickler = idle
    finally:
        message.encoding = outer
        encoded.reduced = None
        del error  # its traceback refers to this frame, which refers to the whole message
    return encoded


_by_value_modules: Final = by_value.modules
_find_main: Final = by_value.find_main


def encode(
    obj: object,
    *,
    remote_main: bool | None = True,
    known: Container[bytes] = (),
    device_map: Mapping[str, str] | None = None,
    context: object = None,
) -> Encoded:
    """Turn an object, often ``(function, args, kwargs)``, into bytes and spans.

    Arguments:
        remote_main: whether the peer runs the same program (names of the main module may be sent); None: it takes data only.
        known: hashes of the definitions that the peer has.
        device_map: device of this worker -> device of the peer.
        context: the context for registered reducers, see :func:`current_encoding`.

    Raises:
        SerializationError: a part cannot be sent; the message says which.
        RpcError: a registered reducer raised it.
    """
    return _encode(obj, Encoded(context, device_map, False), remote_main, known)


def _encode(obj: object, encoded: Encoded, remote_main: bool | None, known: Container[bytes]) -> Encoded:
    outer = message.encoding
    message.encoding = encoded
    try:
        if remote_main is None:
            encoded.embeds = False
            encoded.body = _with_table(data_only.dumps(obj, _own), [], encoded, {}, _DATA)
            encoded.reduced = None
            return encoded
        if copyreg.dispatch_table != _seen:
            _follow_copyreg()
        # There is no idle pickler if a reducer encodes this message while the thread's pickler writes an outer message.
        pickler = message.pickler
        if pickler is None:
            sink = _Sink()
            pickler = _FastPickler(sink, 5, buffer_callback=_take_buffer)
            pickler.chunks = sink.chunks
        else:
            message.pickler = None
        if _by_value_modules:
            pickler.__class__ = _WatchingPickler
        try:
            pickler.dump(obj)
        except Exception as error:
            return _finish(obj, encoded, pickler, error, remote_main, known)
        pickler.clear_memo()
        return _finish(obj, encoded, pickler, None, remote_main, known)
    finally:
        message.encoding = outer


def _close_body(
    encoded: Encoded,
    chunks: list[Any],
    named: dict[bytes, bytes] | None,
    known: Container[bytes],
) -> None:
    """Make the body from the pickler's chunks; append a table if a part of the message is outside of the pickle."""
    body = chunks.pop() if len(chunks) == 1 else b""
    outgoing = encoded.outgoing
    if (outgoing is not None and outgoing.pieces) or chunks or named or encoded.buffers is not None:
        body = _with_table(body, chunks, encoded, named or {})
        if named:
            encoded.definitions = {key: data for key, data in named.items() if key not in known}
    elif encoded.tensors:
        body += _WITH_TENSORS
    encoded.body = body


def _encode_by_value(
    obj: object, encoded: Encoded, remote_main: bool, error: Exception | None
) -> tuple[list[Any], dict[bytes, bytes] | None]:
    """Pickle the object again, with functions and classes by value; return the pickler's chunks, and the definitions by hash.

    Raises:
        SerializationError: a part of the object cannot be sent.
        RpcError: ``error``, the error of the fast pickler, if a registered reducer raised it.
    """
    named: dict[bytes, bytes] | None = None if encoded.inline else {}
    if error is not None and is_of_handler(error):
        raise error
    if not isinstance(error, (RpcError, RecursionError)):
        encoded.start_over()
        sink = _Sink()
        try:
            ByValuePickler(
                sink,
                _by_value_table,
                remote_main=remote_main,
                named=named,
                refusing=_definition_table,
                buffer_callback=_take_buffer,
            ).dump(obj)
            return sink.chunks, named
        except Exception as second:
            if is_of_handler(second):
                raise
            error = second
    try:
        if isinstance(error, RpcError) and not isinstance(error, SerializationError):
            raise error
        where, remedy = _unpicklable_part(obj, encoded, remote_main)
        assert error is not None
        why = describe(error) + remedy
        raise SerializationError(f"{where}: {why}" if where else why) from error
    finally:
        del error  # its traceback refers to this frame, which refers to the whole message


def _unpicklable_part(obj: object, encoded: Encoded, remote_main: bool) -> tuple[str, str]:
    """Return the path to the part that cannot be pickled, and a remedy. Registered reducers do not run."""
    probe = Encoded(None, encoded.device_map, False)
    foreign = {cls: _stand_in for cls in _own if cls not in _TENSOR_REDUCERS}
    table = ChainMap(foreign, _by_value_table)

    def passes(part: object) -> bool:
        probe.start_over()
        try:
            pickler = ByValuePickler(_Nowhere, table, remote_main=remote_main, buffer_callback=_take_buffer)
            pickler.dump(part)
        except Exception as error:
            if is_of_handler(error):
                raise
            return False
        return True

    message.encoding = probe
    try:
        return path_to(obj, passes)
    # A user's object may raise when it is iterated over or shown. Ignore that, and report the error of pickling alone.
    except Exception as error:
        if is_of_handler(error):
            raise
        return "", ""
    finally:
        message.encoding = encoded


class _Nowhere:
    """A file that discards its data."""

    @staticmethod
    def write(_data: Any) -> None:
        pass


def _stand_in(_obj: object) -> tuple[Any, ...]:
    return (object, ())


# The table comes after the pickle, where the unpickler does not read. The table's last fields (the head) are, in order: length of
# the pickle, number of definitions, buffers, storages and holes, length of the device names, magic. Before the head is one entry
# per storage.
_HEAD: Final = "QIIIIIB"
_HEAD_SIZE: Final = struct.calcsize("<" + _HEAD)
_ENTRY_SIZE: Final = struct.calcsize("<" + ENTRY)
_read_head: Final = struct.Struct("<" + _HEAD).unpack_from


class _Tails(dict[int, struct.Struct]):
    """Number of storages -> the struct of entries and head of their table. The structs of small tables are kept."""

    def __missing__(self, count: int) -> struct.Struct:
        return struct.Struct("<" + ENTRY * count + _HEAD)


_tails: Final = _Tails()
_tails.update((count, _tails[count]) for count in range(33))


def _with_table(
    body: bytes,
    chunks: list[Any],
    encoded: Encoded,
    named: Mapping[bytes, bytes],
    magic: int = _MAGIC,
) -> bytes:
    """Append the table of the parts outside of the pickle; fill ``encoded.spans``."""
    spans: list[TensorSpan] = []
    buffers = encoded.buffers or ()
    for raw in buffers:
        spans.append(TensorSpan.of(raw))
    numbers: Sequence[int] = ()
    small = names = b""
    outgoing = encoded.outgoing
    if outgoing is not None:
        numbers, small, names = outgoing.finish(spans, encoded.inline)
    count = len(numbers) // 3
    holes: tuple[bytes, ...] = ()
    if chunks:
        body, holes = punch(chunks, spans, encoded.inline)
    encoded.spans = spans
    tail = _tails[count].pack(
        *numbers, len(body), len(named), len(buffers), count, len(holes), len(names), magic
    )
    if named or holes or names:
        return b"".join((body, small, *named, *holes, names, tail))
    return b"".join((body, small, tail))


# -- decoding -----------------------------------------------------------------------------------

unpickle: Any = pickle.loads
_restricted = 0  # number of agents in this process that take data only


def restrict(by: int) -> None:
    """Add 1 or -1 to the number of agents that take data only. While there is such an agent, this process refuses pickles."""
    global unpickle, _restricted
    _restricted += by
    unpickle = _refuse_pickle if _restricted else pickle.loads


def _refuse_pickle(_body: Any) -> NoReturn:
    raise RefusedError("a pickle is refused, whatever it contains: this worker takes data only")


def decode(
    body: bytes | memoryview,
    buffers: Sequence[Any] = (),
    *,
    definitions: DefinitionStore | None,
    context: object = None,
    tensors: list[Any] | None = None,
    devices: Mapping[str, str] = _HERE,
) -> Any:
    """Rebuild the object that :func:`encode` was given.

    Tensors and arrays use the memory of ``buffers`` without a copy. The buffers must be writable, must not be used for
    anything else, and must stay valid as long as they are referenced. The body is not referenced after the return.

    Arguments:
        definitions: the store with the definitions of this and earlier messages.
        context: the context for registered reducers, see :func:`current_decoding`.
        tensors: a list to which the plain tensors are appended, in the order of ``Encoded.tensors``.
        devices: device in the message -> device of this process that is used in its place.

    Raises:
        UnknownDefinitionError: definitions are missing; nothing was unpickled.
        RefusedError: this process takes data only, and the message is a pickle or has values other than data.
        ProtocolError: the bytes are not a valid message.
        SerializationError: an object cannot be rebuilt here (it cannot be imported, or its class raises).
    """
    outer = message.decoding
    decoding = message.decoding = _Decoding(context, definitions, tensors, devices)
    try:
        if not body:
            raise ProtocolError("an empty message")
        if _restricted and body[-1] != _DATA:
            _refuse_pickle(body)
        if body[-1] == _STOP and not buffers:
            return loads_here(body)
        if body[-1] == _EMBEDDED and not buffers:
            if torch.is_inference_mode_enabled():  # as in _decode_table
                with torch.inference_mode(False):
                    return loads_here(body)
            return loads_here(body)
        return _decode_table(body, buffers, decoding)
    except RpcError:
        raise
    # A user's class may raise SystemExit, which must not end the program that decodes the message.
    except BaseException as error:
        if is_of_handler(error):
            raise
        raise not_rebuilt(error) from error
    finally:
        message.decoding = outer


def not_rebuilt(error: BaseException, what: str = "a message") -> RpcError:
    """Return the exception to raise because unpickling has raised ``error``; the caller sets ``error`` as its cause."""
    if isinstance(error, pickle.UnpicklingError):  # any other error may have been raised by a user's class
        return ProtocolError(f"{what} cannot be unpickled: {error}")
    if isinstance(error, AttributeError) and "module '__main__'" in str(error):
        return SerializationError(
            f"{error}. The sender wrote the name of an object of its main module, and the main module of this process does "
            "not have the name. The RPC pickler does not serialize function code that can be imported where it is called: "
            "between processes that run the same program, define functions and classes on all ranks, or below init() or "
            "init_rpc(). An object whose __reduce__ returns a name is always sent by name: define it in a module that both "
            "processes import"
        )
    if isinstance(error, (AttributeError, ImportError)):
        return SerializationError(
            f"{error}, in a process on host {platform.node()!r}. The RPC pickler does not serialize function code that can "
            "be imported where it is called: install the module on that host, too, or send it by value with "
            "cloudpickle.register_pickle_by_value(module)"
        )
    return SerializationError(f"{what} cannot be rebuilt here: {line_of(error)}")


def _decode_table(body: bytes | memoryview, buffers: Sequence[Any], decoding: _Decoding) -> Any:
    head = len(body) - _HEAD_SIZE
    if head < 0:
        raise ProtocolError("a message's table is not whole")
    length, defined, direct, stored, holes, named, magic = _read_head(body, head)
    entries = head - stored * _ENTRY_SIZE
    names_at = entries - named
    holes_at = names_at - 16 * holes
    definitions_at = holes_at - 16 * defined
    last = len(buffers) - holes
    if magic not in (_MAGIC, _DATA) or not 0 < length <= definitions_at or direct > last:
        raise ProtocolError("a message's table does not fit into the message")
    if defined:
        keys = [bytes(body[n : n + 16]) for n in range(definitions_at, holes_at, 16)]
        store = decoding.definitions
        missing = keys if store is None else store.missing(keys)
        if missing:
            raise UnknownDefinitionError(missing)
    # The struct also has the head, because the sender packs entries and head in one call; only the entries are used here.
    numbers = _tails[stored].unpack_from(body, entries)[: 3 * stored] if stored else ()
    names = bytes(body[names_at:entries])
    decoding.storages = read_storages(
        numbers, body[length:definitions_at], names, buffers[direct:last], decoding.devices
    )
    if torch.is_inference_mode_enabled():
        # A caller decodes its reply in its own thread, perhaps in inference mode. Leave the mode: the tensors must be ordinary.
        with torch.inference_mode(False):
            return _decode_table(body, buffers, decoding)
    if magic == _DATA:
        return data_only.loads(body[:length])
    if not holes:
        return loads_here(body, buffers[:direct])
    pieces = [HOLE.unpack_from(body, n) for n in range(holes_at, names_at, 16)]
    return load_here(Pieces(memoryview(body)[:length], pieces, buffers[last:]), buffers[:direct])


def dumps(obj: object, *, remote_main: bool | None = True) -> bytes:
    """Encode an object into bytes that contain everything, including tensors and definitions.

    Raises:
        SerializationError: a part cannot be sent.
    """
    return _encode(obj, Encoded(None, None, True), remote_main, ()).body


def defined(cls: type) -> by_value.DefinedClass:
    """Return a class of the main module together with its present definition.

    If the class cannot be sent by value, the definition is None. Such a class can be sent by name to workers that run the same
    program; sending the class to another worker raises an error.
    """
    pickler = ByValuePickler(
        _Nowhere, _by_value_table, remote_main=False, named={}, refusing=_definition_table
    )
    try:
        definition = pickler.define_class(cls)
    except Exception as error:
        if is_of_handler(error):
            raise
        definition = None
    return by_value.DefinedClass(cls, definition)


def dumper(remote_main: bool | None) -> Callable[[object], bytes]:
    """Return :func:`dumps` for a peer that runs the same program (True) or another program (False), or takes data only (None)."""
    return partial(dumps, remote_main=remote_main)


def loads(data: bytes | memoryview) -> Any:
    """Rebuild the object that :func:`dumps` was given. Raises as :func:`decode` does."""
    return decode(data, (), definitions=None)
