"""The codec: nesting, out-of-band buffers, contexts, and errors that name the part that cannot be sent."""

from __future__ import annotations

import collections
import copyreg
import functools
import operator
import os
import pickle
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actorrpc.errors import ProtocolError, RRefError, SerializationError
from actorrpc.serialization import codec
from actorrpc.serialization.codec import (
    DefinitionStore,
    current_decoding,
    current_encoding,
    decode,
    dumps,
    encode,
    loads,
    register,
)
from actorrpc.serialization.tensors import message


def trip(obj: Any) -> Any:
    """Encode and decode an object as if for another process."""
    encoded = encode(obj)
    store = DefinitionStore()
    for key, data in encoded.definitions.items():
        store.add(key, data)
    buffers = [memoryview(bytearray(span.view())) for span in encoded.spans]
    return decode(encoded.body, buffers, definitions=store)


class Record:
    def __init__(self, *values: Any) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)


Pair = collections.namedtuple("Pair", "left right")

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=30)
    | st.binary(max_size=30)
    | st.sampled_from(
        [os.path.join, Record, len, torch.float32, torch.Size([1, 2]), torch.device("cpu"), ...]
    )
)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.builds(Record, inner)
        | st.builds(Pair, inner, inner)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=25,
)


@settings(max_examples=75, deadline=None)
@given(values, st.booleans())
def test_arbitrarily_nested_values_survive(obj: Any, remote_main: bool) -> None:
    encoded = encode(obj, remote_main=remote_main)
    assert decode(encoded.body, (), definitions=None) == obj
    assert decode(memoryview(bytearray(encoded.body)), (), definitions=None) == obj
    assert loads(dumps(obj)) == obj


class Columns:
    """Pickles its memory, in Fortran order, as a buffer."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Columns, (pickle.PickleBuffer(self.memory),)


@pytest.mark.parametrize("remote_main", [True, False])
def test_dumps_embeds_long_buffers(remote_main: bool) -> None:
    array = np.arange(20_000).reshape(100, 200)
    columns, again, long = loads(
        dumps([Columns(np.asfortranarray(array)), array, bytearray(100_000)], remote_main=remote_main)
    )
    assert bytes(columns.memory) == array.tobytes("F")
    assert np.array_equal(again, array)
    assert long == bytearray(100_000)


@pytest.mark.parametrize("size", [4096, 4097, 65536, 300_000])
def test_bytes_texts_arrays_and_tensors_of_all_sizes_survive(size: int) -> None:
    data = random.Random(size).randbytes(size)
    text = "é" * (size // 2)
    array = np.frombuffer(bytearray(data), dtype=np.uint8)
    sent = {
        "bytes": [data, {"deep": data + b"1"}],
        "bytearray": bytearray(data),
        "text": text,
        "array": array,
        "fortran": np.asfortranarray(np.ones((size // 32, 4))),
        "strided": array[::3],
        "tensor": torch.frombuffer(array, dtype=torch.uint8),
        "tail": list(range(100)),
    }
    arrived = trip(sent)
    assert arrived["bytes"] == sent["bytes"]
    assert type(arrived["bytes"][0]) is bytes
    assert arrived["bytearray"] == sent["bytearray"]
    assert type(arrived["bytearray"]) is bytearray
    assert arrived["text"] == text
    assert arrived["tail"] == sent["tail"]
    for name in ("array", "fortran", "strided"):
        assert np.array_equal(arrived[name], sent[name])
        assert arrived[name].flags.writeable
    assert arrived["fortran"].flags.f_contiguous
    assert torch.equal(arrived["tensor"], sent["tensor"])
    assert loads(dumps(sent))["bytes"] == sent["bytes"]
    large = [span.nbytes for span in encode(sent).spans]
    if size > 65536:
        assert len(encode(sent).body) < 5000 + size // 3 + 200
        assert large.count(size) >= 4
    if size <= 4096:
        assert not large


def test_large_bodies_without_buffers_survive() -> None:
    sent = [Record(n, str(n)) for n in range(20_000)]
    encoded = encode(sent)
    assert not encoded.spans
    assert decode(encoded.body, (), definitions=None) == sent
    # Bytes that look like the header of an out-of-band buffer survive as well.
    tricky = [b"B" + (70_000).to_bytes(4, "little")] * 5 + [bytes(70_000), "x" * 70_000, b"\x8e" * 200_000]
    assert trip(tricky) == tricky


def test_decoded_numpy_arrays_use_the_received_buffer() -> None:
    array = np.arange(5000)
    encoded = encode((array, array))
    memory = bytearray(encoded.spans[0].view())
    a, b = decode(encoded.body, [memoryview(memory)], definitions=None)
    assert a is b
    a[0] = 77
    assert memory[0] == 77


def test_read_only_arrays_stay_read_only() -> None:
    array = np.arange(5000)
    array.flags.writeable = False
    assert not trip(array).flags.writeable


def test_encoded_spans_refer_to_the_memory_of_the_tensor() -> None:
    t = torch.zeros(5000)
    encoded = encode(t)
    t.fill_(3)
    assert encoded.spans[0].view().cast("f")[0] == 3.0
    assert encoded.nbytes == len(encoded.body) + 20_000


# -- registered types and contexts -------------------------------------------------------------------


class Ref:
    """A type with a registered reducer that uses the context of the message."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        raise RRefError("only in a message")


def rebuild_ref(name: str) -> tuple[str, Any]:
    return name, current_decoding()


@pytest.fixture(autouse=True)
def _unregister() -> Any:
    yield
    for table in (codec._own, codec._table, codec._refused):
        table.pop(Ref, None)
    assert message.encoding is None
    assert message.decoding is None


def count_refs(calls: list[Any]) -> None:
    def reduce(ref: Ref) -> tuple[Any, ...]:
        calls.append((ref.name, current_encoding()))
        return rebuild_ref, (ref.name,)

    register(Ref, reduce)


def test_reducers_of_registered_types_see_the_context_of_the_message() -> None:
    calls: list[Any] = []
    count_refs(calls)
    ref = Ref("a")
    encoded = encode([ref, ref, Ref("b")], context="out")
    assert calls == [("a", "out"), ("b", "out")]
    a, again, b = decode(encoded.body, (), definitions=None, context="in")
    assert a is again
    assert (a, b) == (("a", "in"), ("b", "in"))
    assert current_encoding() is None
    assert current_decoding() is None
    with pytest.raises(RRefError):
        pickle.dumps(ref)


def test_a_reducer_runs_once_although_pickling_is_tried_twice() -> None:
    calls: list[Any] = []
    count_refs(calls)
    ref = Ref("a")
    encoded = encode((ref, Ref("b"), lambda: ref), context=1)
    assert calls == [("a", 1), ("b", 1)]
    store = DefinitionStore()
    a, _, function = decode(encoded.body, (), definitions=store, context=2)
    assert function() is a
    assert not encoded.definitions  # a function that captures a reference is no definition
    calls.clear()
    with pytest.raises(SerializationError, match="argument 1: cannot pickle"):
        encode((print, (ref, threading.Lock()), {}))
    assert calls == [("a", None)]


def test_nested_messages_have_their_own_context() -> None:
    def reduce(ref: Ref) -> tuple[Any, ...]:
        inner = encode([ref.name, torch.ones(2)], context=f"inner {ref.name}") if ref.name else None
        assert current_encoding() == "outer"
        return rebuild_nested, (inner.body if inner else b"",)

    register(Ref, reduce)
    t = torch.zeros(2)
    encoded = encode([t, Ref("x"), t], context="outer")
    assert len(encoded.tensors) == 1
    found: list[Any] = []
    a, (name, inner, context), b = decode(encoded.body, (), definitions=None, context="outer", tensors=found)
    assert a is b
    assert (name, inner.tolist(), context) == ("x", [1, 1], "outer")
    assert len(found) == 1


def rebuild_nested(body: bytes) -> Any:
    name, t = decode(body, (), definitions=None, context="inner")
    return name, t, current_decoding()


def test_an_error_of_a_reducer_restores_the_context() -> None:
    def reduce(ref: Ref) -> tuple[Any, ...]:
        raise RRefError(f"{ref.name} is gone") if ref.name else ValueError("odd")

    register(Ref, reduce)
    with pytest.raises(RRefError, match="x is gone"):
        encode([Ref("x")])
    with pytest.raises(SerializationError, match="ValueError: odd"):
        encode([Ref("")])
    assert encode(1).body == pickle.dumps(1, 5)
    with pytest.raises(ProtocolError):
        decode(b"\x80\x05garbage.", (), definitions=None, context=1)


def test_changes_in_copyreg_take_effect() -> None:
    class Odd:
        def __reduce__(self) -> Any:
            raise TypeError("not by itself")

    try:
        copyreg.pickle(Odd, lambda _: (int, ("7",)))
        assert trip([Odd()]) == [7]
        copyreg.pickle(Odd, lambda _: (int, ("8",)))
        assert trip([Odd()]) == [8]
    finally:
        copyreg.dispatch_table.pop(Odd, None)
    with pytest.raises(SerializationError):
        encode(Odd())


# -- errors --------------------------------------------------------------------------------------------


class Locked:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fine = 1


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Raises:
    def __getstate__(self) -> Any:
        raise KeyError("no state")


def outer(x: Any) -> Record:
    record = Record()
    record.x = x
    return record


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        ((print, (1, threading.Lock()), {}), "argument 1: cannot pickle '_thread.lock' object"),
        (
            (print, (), {"lock": outer(Locked())}),
            "argument 'lock' -> attribute 'x._lock': cannot pickle '_thread.lock' object",
        ),
        (
            (print, ([1, {"k": (Locked(),)}],), {}),
            "argument 0 -> index 1 -> key 'k' -> index 0 -> attribute '_lock'",
        ),
        (
            (print, (Slotted([Locked()]),), {}),
            "argument 0 -> attribute 'inner' -> index 0 -> attribute '_lock'",
        ),
        ((Locked().__init__, (), {}), "function 'Locked.__init__'"),
        ([1, {"a": threading.Lock()}], "index 1 -> key 'a': cannot pickle"),
        (
            (print, (functools.partial(print, threading.Lock()),), {}),
            "argument 0 -> .*cannot pickle '_thread.lock'",
        ),
        ((print, ((n for n in ()),), {}), "argument 0: cannot pickle 'generator' object"),
        ((print, (Raises(),), {}), "argument 0: cannot be sent: KeyError: 'no state'"),
        (threading.Lock(), "^cannot pickle '_thread.lock' object"),
    ],
)
def test_the_error_names_the_part_that_cannot_be_sent(obj: Any, expected: str) -> None:
    with pytest.raises(SerializationError, match=expected):
        encode(obj)


def test_the_error_names_a_captured_variable_that_cannot_be_sent() -> None:
    lock = threading.Lock()

    def function() -> Any:
        return lock

    with pytest.raises(
        SerializationError, match=r"function '.*function' -> captured variable 'lock': cannot"
    ):
        encode((function, (), {}))


def test_the_cause_of_the_error_is_the_users_exception() -> None:
    with pytest.raises(SerializationError) as caught:
        encode(Raises())
    assert type(caught.value.__cause__) is KeyError


def test_cycles_survive_and_too_deep_nesting_raises_serialization_error() -> None:
    deep: list[Any] = []
    deep.append(deep)
    assert (lambda x: x[0] is x)(trip(deep))
    deep.append(threading.Lock())
    with pytest.raises(SerializationError, match="index 1: cannot pickle"):
        encode(deep)
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SerializationError, match="nested too deeply"):
        encode((print, (deep,), {}))
    while deep and type(deep[0]) is list and deep[0] is not deep:
        deep = deep[0]


def test_a_failure_to_unpickle_raises_serialization_error_with_its_reason() -> None:
    body = pickle.dumps(operator.add, 5).replace(b"add", b"adx")
    with pytest.raises(SerializationError, match="RPC pickler does not serialize function code"):
        decode(body, (), definitions=None)
    body = pickle.dumps(operator.add, 5).replace(b"_operator", b"_operatxx")
    with pytest.raises(SerializationError, match="No module named"):
        decode(body, (), definitions=None)
    body = pickle.dumps(Picky(), 5)
    with pytest.raises(SerializationError, match="cannot be rebuilt here: ValueError: picky") as caught:
        decode(body, (), definitions=None)
    assert type(caught.value.__cause__) is ValueError


class Picky:
    def __setstate__(self, state: Any) -> None:
        raise ValueError("picky")

    def __getstate__(self) -> Any:
        return {"a": 1}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b".",
        b"\x01",
        b"\x80\x05",
        b"\x80\x05.",
        b"\x80\x05K",
        b"\x00" * 29 + b"\x01",
        b"\xff" * 28 + b"\x01",
    ],
)
def test_malformed_bodies_raise_typed_errors(body: bytes) -> None:
    with pytest.raises((ProtocolError, SerializationError)):
        decode(body, (), definitions=None)


@settings(max_examples=75, deadline=None)
@given(st.binary(max_size=60), st.lists(st.binary(max_size=9), max_size=3))
def test_random_tables_of_buffers_decode_or_raise_protocol_error(tail: bytes, buffers: list[bytes]) -> None:
    body = pickle.dumps(1, 5) + tail + b"\x01"
    try:
        assert decode(body, buffers, definitions=DefinitionStore()) == 1
    except ProtocolError:
        pass


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_the_callers_torch_modes_do_not_affect_received_tensors(mode: Any) -> None:
    sent = (torch.ones(3, requires_grad=True), torch.ones(3, 3).to_sparse(), "x" * 70_000)
    with mode():
        dense, sparse, _ = trip(sent)
    assert not dense.is_inference()
    assert dense.requires_grad
    assert dense.device.type == sparse.device.type == "cpu"
    (dense * 2).sum().backward()


def test_missing_swapped_or_damaged_buffers_raise_typed_errors() -> None:
    encoded = encode([b"x" * 100_000, "y" * 100_000, list(range(50))])
    buffers = [bytes(span.view()) for span in encoded.spans]
    assert len(buffers) == 2
    for wrong in (buffers[:1], [*buffers[::-1], b""], [buffers[0][1:], buffers[1]], []):
        with pytest.raises(ProtocolError):
            decode(encoded.body, wrong, definitions=None)
    rng = random.Random(1)
    for _ in range(300):
        body = bytearray(encoded.body)
        at = len(body) - 1 - rng.randrange(61)
        body[at] ^= 1 << rng.randrange(8)
        try:
            decode(bytes(body), buffers, definitions=None)
        except (ProtocolError, SerializationError):
            pass


# -- threads, memory -----------------------------------------------------------------------------------


def test_the_codec_keeps_no_reference_to_encoded_objects() -> None:
    t = torch.ones(3)
    record = Record(t)
    refs = [weakref.ref(t), weakref.ref(record)]
    encoded = encode(record)
    with pytest.raises(SerializationError):
        encode([record, threading.Lock()])
    decode(encoded.body, (), definitions=None)
    del t, record, encoded
    assert [ref() for ref in refs] == [None, None]
