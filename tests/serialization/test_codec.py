"""The codec: nesting, out-of-band buffers, contexts, and errors that name the part that cannot be sent."""

from __future__ import annotations

import collections
import copyreg
import functools
import operator
import os
import pickle
import random
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actorrpc.errors import ProtocolError, RRefError, SerializationError
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


def test_decoded_numpy_arrays_use_the_received_buffer_and_stay_read_only() -> None:
    array = np.arange(5000)
    encoded = encode((array, array))
    memory = bytearray(encoded.spans[0].view())
    a, b = decode(encoded.body, [memoryview(memory)], definitions=None)
    assert a is b
    a[0] = 77
    assert memory[0] == 77
    array.flags.writeable = False
    assert not trip(array).flags.writeable


# -- registered types and contexts -------------------------------------------------------------------


class Ref:
    """A type with a registered reducer."""

    def __init__(self, reduce: Callable[[], Any]) -> None:
        self.reduce = reduce


register(Ref, lambda ref: ref.reduce())


def rebuild_ref(name: str) -> tuple[str, Any]:
    return name, current_decoding()


def test_a_reducer_runs_once_and_sees_the_context_although_pickling_is_tried_twice() -> None:
    calls: list[Any] = []

    def reduce() -> tuple[Any, ...]:
        calls.append(current_encoding())
        return rebuild_ref, (f"ref {len(calls)}",)

    ref = Ref(reduce)
    encoded = encode((ref, Ref(reduce), lambda: ref), context=1)
    assert calls == [1, 1]
    store = DefinitionStore()
    a, b, function = decode(encoded.body, (), definitions=store, context=2)
    assert (a, b) == (("ref 1", 2), ("ref 2", 2))
    assert function() is a
    assert not encoded.definitions  # a function that captures a reference is no definition
    calls.clear()
    with pytest.raises(SerializationError, match="argument 1: cannot pickle"):
        encode((print, (ref, threading.Lock()), {}))
    assert calls == [None]


def test_an_error_of_a_reducer_restores_the_context() -> None:
    def gone() -> Any:
        raise RRefError("x is gone")

    def odd() -> Any:
        raise ValueError("odd")

    with pytest.raises(RRefError, match="x is gone"):
        encode([Ref(gone)], context=1)
    with pytest.raises(SerializationError, match="ValueError: odd"):
        encode([Ref(odd)], context=1)
    assert current_encoding() is None
    assert encode(1).body == pickle.dumps(1, 5)
    with pytest.raises(ProtocolError):
        decode(b"\x80\x05garbage.", (), definitions=None, context=1)
    assert current_decoding() is None


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
def test_the_error_names_the_part_that_cannot_be_sent_and_its_cause_is_the_users_exception(
    obj: Any, expected: str
) -> None:
    with pytest.raises(SerializationError, match=expected) as caught:
        encode(obj)
    assert type(caught.value.__cause__) in (TypeError, KeyError)


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
    text = f"No module named .* on host '{socket.gethostname()}'.*register_pickle_by_value"
    with pytest.raises(SerializationError, match=text):
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
