"""Objects to bytes and back: one message's function, arguments, result.

:func:`encode` gives a body (a pickle, after a short table where anything lies outside of it), the memory
that leaves as it is (tensors, numpy arrays, long bytes) and the definitions of what the peer cannot import.
:func:`decode` takes these apart again, without a copy where that can be. The common case is one pass of the C
pickler with a dispatch table; by-value functions, the main module and errors take slower ways, each only where
a message has them. To workers that take data only the body is no pickle (:mod:`actorrpc.serialization.data_only`).

Runs on whichever thread calls, any number of them; within reducers messages may nest. Pure: does no I/O, and
an error leaves nothing half sent. Nothing from a peer may come here before the peer has proved who it is.

Long bytes and texts leave the pickle, travel beside it, and come back into it. The C pickler hands long payloads to its file as
the very objects that they are; :func:`punch` leaves them out of the body, and :class:`Pieces` reads body and payloads as the
one stream that they were. No I/O; used by one thread at a time.
"""

from __future__ import annotations

import copyreg
import pickle
import struct
import sys
from collections import ChainMap
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from types import MappingProxyType, MethodType
from typing import Any, Final, NoReturn

import cloudpickle
import torch

from actorrpc._exception_text import is_of_handler, line_of
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
from actorrpc.serialization.tensors import (
    ENTRY,
    INLINE_BYTES,
    Outgoing,
    SharedStorageError,
    TensorSpan,
    arrive,
    message,
)

__all__ = [
    "HOLE",
    "DefinitionStore",
    "Encoded",
    "Pieces",
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

_LONG: Final = 64 << 10  # from here on the C pickler hands bytes and text over as they are
HOLE: Final = struct.Struct("<QQ")  # position in the pickle as sent, length of what is missing there
_HEADERS: Final = {0x42: 4, 0x58: 4, 0x8E: 8, 0x8D: 8, 0x96: 8}  # opcode before long bytes -> width of length


def punch(chunks: list[Any], spans: list[TensorSpan], inline: bool) -> tuple[bytes, tuple[bytes, ...]]:
    """Join what the pickler wrote, leaving long bytes and texts out: they become spans.

    A chunk is taken for such a payload if the one before ends with an opcode that announces its length. To be
    wrong does no harm, as the receiver puts the same stream together again.
    """
    pieces: list[Any] = []
    holes: list[bytes] = []
    position = 0
    before: Any = b""
    for chunk in chunks:
        if not isinstance(chunk, bytes):
            chunk = pickle.PickleBuffer(chunk).raw()  # bytes in order, also of an array in Fortran's
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
    """A file over a pickle with holes and what fills them; long bytes are read straight into their object."""

    __slots__ = ("_at", "_parts")

    def __init__(self, body: memoryview, holes: Sequence[tuple[int, int]], fillings: Sequence[Any]) -> None:
        self._parts: list[memoryview] = []
        self._at = 0
        position = start = 0
        for (where, size), filling in zip(holes, fillings, strict=True):
            view = memoryview(filling).cast("B")
            length = where - position
            if length < 0 or start + length > len(body) or len(view) != size:
                raise ProtocolError("the holes in a message do not fit its buffers")
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


_KEEP_PICKLER: Final = 8 << 10  # one that wrote more has grown its buffer, and would allocate it every time
_STOP: Final = 0x2E
_MAGIC: Final = 1  # the last byte of a body with a table; a bare pickle ends with a full stop
_DATA: Final = 2  # the same, of one that is no pickle
_EMBEDDED: Final = 3  # the last byte of a pickle with small tensors and nothing outside of it
_WITH_TENSORS: Final = bytes([_EMBEDDED])
_NOTHING: Final[Mapping[bytes, bytes]] = MappingProxyType({})


class Encoded:
    """A message's contents, ready to be sent.

    Attributes:
        body: the pickle, with a table in front where something lies outside of it.
        spans: the memory that follows, in order, each as one buffer for :func:`decode`. It is read when the
            message is written: a sender that returns to the caller before that copies it first.
        definitions: hash -> definition of what the peer does not know yet; for its store, before it decodes.
        context: what :func:`encode` was given.
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
        self.layouts: dict[Any, int] = {}  # of small tensors behind the first few -> how many there are
        self.stacks: dict[Any, list[Any]] = {}  # by sizes, the stacks that take more of them
        self.outgoing: Outgoing | None = None
        self.buffers: list[memoryview] | None = None
        self.reduced: dict[int, tuple[object, Any]] | None = None

    def start_over(self) -> None:
        """Forget what was noted of tensors and buffers: the object is encoded once more, with all tensors in the table."""
        self.tensors, self.grad = [], False
        self.embeds, self.embedded, self.layouts, self.stacks = False, set(), {}, {}
        self.outgoing = self.buffers = None

    @property
    def nbytes(self) -> int:
        """The size of body and spans together."""
        return len(self.body) + sum([span.nbytes for span in self.spans])


class _Decoding:
    """What hangs on the thread while a message is decoded."""

    __slots__ = ("arrived", "context", "definitions", "tensors")

    def __init__(
        self, context: object, definitions: DefinitionStore | None, tensors: list[Any] | None
    ) -> None:
        self.context = context
        self.definitions = definitions
        self.tensors = [] if tensors is None else tensors
        self.arrived: Sequence[list[Any]] = ()


# -- reducers -----------------------------------------------------------------------------------

_TENSOR_REDUCERS: Final = tensors_module.tensor_reducers()
_own: Final[dict[type, Any]] = dict(_TENSOR_REDUCERS)
# What the C pickler looks types up in: copyreg's table and, over it, ours. A copy, because a lookup that
# fails in Python costs 0.3 us for each object of a user's class; `_seen` tells when it is out of date.
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

    It runs at most once per object and message, and finds the message's context in
    :func:`current_encoding`; ``callable`` finds the receiver's in :func:`current_decoding`. What it did for a
    message that then cannot be encoded is for the caller of :func:`encode` to undo. Thread-safe.
    """

    def reduce(obj: Any) -> tuple[Any, ...]:
        encoding = message.encoding
        done = encoding.reduced
        if done is None:
            done = encoding.reduced = {}
        # Both the fast and the by-value attempt ask: a reducer with effects (a new fork) must have them once.
        found = done.get(id(obj))
        if found is None:
            found = done[id(obj)] = (obj, reducer(obj))
        reduced: tuple[Any, ...] = found[1]
        return reduced

    _refused[cls] = refuse
    _own[cls] = reduce
    _table[cls] = reduce


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
    """Where a pickler writes to: a list. Long bytes arrive here as the very objects that they are."""

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
    """What the fast pickler becomes while modules are to go by value."""

    reducer_override = by_value.stop


def _take_buffer(buffer: pickle.PickleBuffer) -> bool:
    """Take a buffer out of band, or return True for those that stay in the pickle."""
    encoding = message.encoding
    raw = buffer.raw()
    if encoding.inline or raw.nbytes <= INLINE_BYTES:
        return True
    if encoding.buffers is None:
        encoding.buffers = []
    encoding.buffers.append(raw)
    return False


def _new_pickler() -> _FastPickler:
    sink = _Sink()
    pickler = _FastPickler(sink, 5, buffer_callback=_take_buffer)
    pickler.chunks = sink.chunks
    return pickler


def encode_body(
    obj: object,
    remote_main: bool | None,
    known: Container[bytes],
    device_map: Mapping[str, str] | None,
    context: object,
    listed: bool = True,
) -> bytes | Encoded:
    """Do as :func:`encode` does, and return the mere body where there is nothing else. For the path of every call.

    ``listed``: small tensors are something else, also where none of them requires grad.
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
    if encoded is None or device_map:
        encoded = Encoded(context, device_map, False)
    else:
        message.spare = None
        encoded.context = context
    message.encoding = encoded
    message.pickler = None
    chunks: list[Any] = pickler.chunks
    try:
        pickler.dump(obj)
    except Exception as error:
        # What reducers did for this object is kept in ``encoded``.
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
                if not device_map:
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
    """Go on after the fast attempt: ``error`` has stopped it, or what ``pickler`` wrote is no mere body."""
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
            # By all other errors the pickler is lost, and one that has grown is not kept.
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
        if idle is not None:  # not before its chunk is gone: a signal handler may raise there
            message.pickler = idle
    finally:
        message.encoding = outer
        encoded.reduced = None
        del error  # its traceback holds this frame, and the frame the whole message
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
        remote_main: the peer runs the same program: what is in the main module may go by reference. None: it takes data only.
        known: hashes of the definitions that the peer has.
        device_map: device here -> device there, for tensors that are not on the CPU.
        context: for registered reducers, see :func:`current_encoding`.

    Raises:
        SerializationError: a part cannot be sent; the message says which.
        RpcError: as raised by a registered reducer.
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
        # A message within a message finds no idle pickler and makes its own.
        pickler = message.pickler
        if pickler is None:
            pickler = _new_pickler()
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
    """Make the body from what the pickler wrote, with a table behind it where something lies outside."""
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
    """Encode once more, with functions and classes by value; ``error`` is what stopped the fast attempt.

    Raises:
        SerializationError: it cannot be done.
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
        del error  # its traceback holds this frame, and the frame the whole message


def _unpicklable_part(obj: object, encoded: Encoded, remote_main: bool) -> tuple[str, str]:
    """Return the way to the part that cannot be pickled, and a remedy; registered reducers are left alone."""
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
    except (
        Exception
    ) as error:  # iterating over a user's object, or its repr, may raise: the error itself matters more
        if is_of_handler(error):
            raise
        return "", ""
    finally:
        message.encoding = encoded


class _Nowhere:
    """A file that forgets what is written to it."""

    @staticmethod
    def write(_data: Any) -> None:
        pass


def _stand_in(_obj: object) -> tuple[Any, ...]:
    return (object, ())


# The table stands at the end, where the unpickler does not look. From the end: magic, length of device names,
# holes, storages, buffers, definitions, length of the pickle; before them one entry for each storage.
_HEAD: Final = "QIIIIIB"
_HEAD_SIZE: Final = struct.calcsize("<" + _HEAD)
_ENTRY_SIZE: Final = struct.calcsize("<" + ENTRY)
_read_head: Final = struct.Struct("<" + _HEAD).unpack_from


class _Tails(dict[int, struct.Struct]):
    """The structures of tables, by their number of storages. Those of small tables are kept."""

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
    """Append the table of what lies outside of the pickle; fill ``encoded.spans``."""
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
_restricted = 0  # agents in this process that take data only


def restrict(by: int) -> None:
    """Note that there is an agent more (1) or less (-1) that takes data only: while there is one, no pickle is opened here."""
    global unpickle, _restricted
    _restricted += by
    unpickle = _refuse_pickle if _restricted else pickle.loads


def _refuse_pickle(_body: Any) -> NoReturn:
    raise RefusedError("a pickle is refused, whatever is in it: this worker takes data only")


def decode(
    body: bytes | memoryview,
    buffers: Sequence[Any] = (),
    *,
    definitions: DefinitionStore | None,
    context: object = None,
    tensors: list[Any] | None = None,
) -> Any:
    """Rebuild what :func:`encode` was given.

    Tensors and arrays are built on ``buffers`` without a copy: they must be writable, nobody else's, and stay
    valid as long as they are referenced. The body is not referenced after the return.

    Arguments:
        definitions: where this message's definitions have been put, and earlier ones are.
        context: for what registered reducers left in the pickle, see :func:`current_decoding`.
        tensors: a list to which the plain tensors are appended, in the order of ``Encoded.tensors``.

    Raises:
        UnknownDefinitionError: definitions are missing; nothing has been unpickled yet.
        ProtocolError: the bytes make no sense.
        SerializationError: an object cannot be rebuilt here (not importable, or its class says no).
    """
    outer = message.decoding
    decoding = message.decoding = _Decoding(context, definitions, tensors)
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
    except (
        BaseException
    ) as error:  # users' classes may raise SystemExit here, which must not end the reader's program
        if is_of_handler(error):
            raise
        raise not_rebuilt(error) from error
    finally:
        message.decoding = outer


def not_rebuilt(error: BaseException, what: str = "a message") -> RpcError:
    """Return what says that unpickling has raised ``error``, which is to be its cause."""
    if isinstance(error, pickle.UnpicklingError):  # all else users' classes may raise as well
        return ProtocolError(f"{what} cannot be unpickled: {error}")
    if isinstance(error, AttributeError) and "on <module '__main__'" in str(error):
        return SerializationError(
            f"{error}. The sender wrote the name of an object of its main module, and the main module of this process does "
            "not have the name. The RPC pickler does not serialize function code that can be imported where it is called: "
            "between processes that run the same program, define functions and classes on all ranks, or below init() or "
            "init_rpc(). An object whose __reduce__ returns a name is always sent by name: define it in a module that both "
            "processes import"
        )
    if isinstance(error, (AttributeError, ImportError)):
        return SerializationError(
            f"{error}. The RPC pickler does not serialize function code that can be imported where it is called: "
            "make sure that functions and classes are defined in a module that both sides have"
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
        raise ProtocolError("a message's table does not fit into it")
    if defined:
        keys = [bytes(body[n : n + 16]) for n in range(definitions_at, holes_at, 16)]
        store = decoding.definitions
        missing = keys if store is None else store.missing(keys)
        if missing:
            raise UnknownDefinitionError(missing)
    # Entries and head are one structure, so that a message is packed and unpacked in one go.
    numbers = _tails[stored].unpack_from(body, entries)[: 3 * stored] if stored else ()
    names = bytes(body[names_at:entries])
    decoding.arrived = arrive(numbers, body[length:definitions_at], names, buffers[direct:last])
    if torch.is_inference_mode_enabled():
        # A caller decodes its own reply, in whatever mode it is: tensors arrive as ordinary ones even so.
        with torch.inference_mode(False):
            return _decode_table(body, buffers, decoding)
    if magic == _DATA:
        return data_only.loads(body[:length])
    if not holes:
        return loads_here(body, buffers[:direct])
    pieces = [HOLE.unpack_from(body, n) for n in range(holes_at, names_at, 16)]
    return load_here(Pieces(memoryview(body)[:length], pieces, buffers[last:]), buffers[:direct])


def dumps(obj: object, *, remote_main: bool | None = True) -> bytes:
    """Encode into bytes that stand by themselves: tensors and definitions are in them.

    Raises:
        SerializationError: a part cannot be sent.
    """
    return _encode(obj, Encoded(None, None, True), remote_main, ()).body


def defined(cls: type) -> by_value.DefinedClass:
    """Return a class of the main module with the definition that it has now.

    Without a definition if the class cannot be sent by value: that does no harm where it is sent by name, and elsewhere
    sending it raises the error.
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
    """Return :func:`dumps` for a peer that runs the same program, that does not, or that takes data only."""
    return partial(dumps, remote_main=remote_main)


def loads(data: bytes | memoryview) -> Any:
    """Rebuild what :func:`dumps` was given. Raises as :func:`decode` does."""
    return decode(data, (), definitions=None)
