"""Tensors in the codec: layouts, shared memory, identity, and forged metadata."""

from __future__ import annotations

import gc
import random
import struct
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from actorrpc.errors import ProtocolError, SerializationError
from actorrpc.serialization import tensors as tensors_module
from actorrpc.serialization.codec import DefinitionStore, decode, encode
from tests.migration.rows import row
from tests.tensors import is_view


def trip(obj: Any, *, tensors: list[Any] | None = None, **options: Any) -> Any:
    """Encode and decode an object as if for another process."""
    encoded = encode(obj, **options)
    store = DefinitionStore()
    for key, data in encoded.definitions.items():
        store.add(key, data)
    buffers = [memoryview(bytearray(span.view())) for span in encoded.spans]
    return decode(encoded.body, buffers, definitions=store, tensors=tensors)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert type(a) is type(b)
    assert (a.dtype, a.shape, a.layout, a.requires_grad) == (b.dtype, b.shape, b.layout, b.requires_grad)
    assert (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
    assert b.is_leaf
    bits(a, b)


def bits(a: torch.Tensor, b: torch.Tensor) -> None:
    a, b = a.detach(), b.detach()
    if not a.numel():
        return
    if a.is_conj() or a.is_neg():
        a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg()
    if a.layout is torch.strided:
        a, b = a.contiguous(), b.contiguous()
        a = torch.empty(0, dtype=torch.uint8).set_(
            a.untyped_storage(), a.storage_offset() * a.itemsize, (a.nbytes,)
        )
        b = torch.empty(0, dtype=torch.uint8).set_(
            b.untyped_storage(), b.storage_offset() * b.itemsize, (b.nbytes,)
        )
    assert torch.equal(a, b)


_NAMES = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "bfloat16", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
)
DTYPES = [getattr(torch, name) for name in _NAMES if hasattr(torch, name)]  # an older torch lacks some dtypes


def code_of(dtype: torch.dtype) -> int:
    """Return the number that is sent for a dtype, for forged metadata."""
    return tensors_module._CODES[dtype]


def filled(nbytes: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    raw = random.Random(seed).randbytes(nbytes)
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw), dtype=dtype)


@st.composite
def strided(draw: Any) -> torch.Tensor:
    """A view of any geometry: sizes of 0 and 1, strides of 0, gaps, overlaps, offsets."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    stride = draw(st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 40))
    room = draw(st.sampled_from([0, 0, 3, 2000]))
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n) + 1 + room
    base = filled(last * dtype.itemsize, dtype, draw(st.integers(0, 255)))
    t = base.as_strided(shape, stride, offset)
    if dtype.is_complex and dtype is not torch.complex32 and draw(st.booleans()):
        t = t.conj()
        if draw(st.booleans()):
            t = t.imag
    if t.dtype.is_floating_point or t.dtype.is_complex:
        t = t.detach().requires_grad_(draw(st.booleans()))
    return t


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=150, deadline=None)
@given(strided())
def test_views_of_any_geometry_survive(t: torch.Tensor) -> None:
    arrived = trip(t)
    same(t, arrived)
    if t.is_contiguous() or t.transpose(0, -1).is_contiguous():
        assert arrived.stride() == t.stride()
    assert not is_view(arrived)


def test_decoded_small_tensors_own_their_memory() -> None:
    encoded = encode(torch.ones(4))
    assert not encoded.spans
    body = bytearray(encoded.body)
    t = decode(memoryview(body), (), definitions=None)
    body[:] = bytes(len(body))
    body.extend(b"no longer referenced")
    t += 1
    assert t.tolist() == [2.0] * 4


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_small_tensors_that_share_memory_share_it_on_arrival(large: bool, first: bool) -> None:
    base = torch.zeros(5000 if large else 10)
    parts = [base[2:5], base] if first else [base, base[2:5]]
    lonely = torch.ones(3)
    found = trip([lonely, *parts])
    found[1].fill_(7)
    assert found[2].count_nonzero() == 3 if first else found[2].tolist() == [7.0] * 3
    assert found[0].tolist() == [1.0] * 3
    storage = torch.arange(4.0)
    twin, untyped = trip([storage, storage.untyped_storage()])
    assert twin.untyped_storage().data_ptr() == untyped.data_ptr()


@pytest.mark.parametrize(
    ("data", "code", "shape"),
    [
        (bytearray(12), 99, (3,)),
        (bytearray(12), -1, (3,)),
        (bytearray(11), 6, (3,)),
        (bytearray(12), 6, (4,)),
        (bytearray(12), 6, (-3, -1)),
        (bytearray(12), 6, (3, 0)),
        (bytearray(), 6, (0,)),
        (bytearray(12), 6, ()),
        (bytes(12), 6, (3,)),
        (bytearray(16), code_of(torch.qint8), (16,)),
    ],
)
def test_malformed_small_tensors_raise_protocol_error(data: Any, code: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError):
        tensors_module.embedded(data, code, *shape)


def _variant(kind: str, like: torch.Tensor, before: list[torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the same shape as ``like`` that differs in one property, or an earlier tensor for "again"."""
    match kind:
        case "turned":
            return like.t().clone().t()
        case "part":
            return torch.cat([like, like])[: len(like)]
        case "shared":
            return before[-1].detach()
        case "again":
            return before[-1]
        case "grad":
            return like.clone().requires_grad_()
        case "inference":
            with torch.inference_mode():
                return like.clone()
        case "parameter":
            return torch.nn.Parameter(like.clone())
        case "subclass":
            return like.clone().as_subclass(Tagged)
        case "marked":
            found = like.clone()
            found.mark = "here"  # type: ignore[attr-defined]
            return found
        case "negative":
            return torch.complex(like, like).conj().imag
        case "double":
            return like.double()
        case "sparse":
            return like.to_sparse()
        case "meta":
            return like.to("meta")
        case "quantised":
            return torch.quantize_per_tensor(like, 0.1, 3, torch.qint8)
        case "nested":
            return torch.nested.nested_tensor([like, like])
    return like.clone()


ODD = (
    *(
        "turned",
        "part",
        "shared",
        "again",
        "grad",
        "inference",
        "parameter",
        "subclass",
        "marked",
        "negative",
        "double",
    ),
    *("sparse", "meta", "quantised", "nested"),
)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["plain"] * 2 * len(ODD) + list(ODD)), min_size=1, max_size=60), st.booleans()
)
def test_tensors_that_differ_from_their_stacked_neighbours_survive(kinds: list[str], early: bool) -> None:
    sent: list[torch.Tensor] = []
    for n, kind in enumerate([*["plain"] * (20 * early), *kinds]):
        like = torch.arange(6.0).view(2, 3) + n
        sent.append(_variant(kind if sent else "plain", like, sent))
    listed: list[torch.Tensor] = []
    found = trip(sent, tensors=listed)
    for a, b in zip(sent, found, strict=True):
        if a.is_nested:
            assert torch.equal(a.to_padded_tensor(0.0), b.to_padded_tensor(0.0))
            continue
        assert type(a) is type(b)
        assert (a.dtype, a.shape, a.layout, a.requires_grad) == (b.dtype, b.shape, b.layout, b.requires_grad)
        assert a.is_neg() == b.is_neg()
        assert not b.is_inference()
        assert vars(a) == vars(b)
        if not a.is_meta:
            assert torch.equal(a.detach().to_dense(), b.detach().to_dense())
        if a.layout is torch.strided:
            assert a.stride() == b.stride()
    for seen in (sent, found):
        stored = [
            t
            for t in seen
            if t.layout is torch.strided and t.numel() and not (t.is_meta or t.is_nested or t.is_quantized)
        ]
        first: dict[int, int] = {}
        shared = [first.setdefault(t.untyped_storage().data_ptr(), place) for place, t in enumerate(stored)]
        if seen is sent:
            expected = shared
        same_object = [next(n for n, t in enumerate(seen) if t is each) for each in seen]
        if seen is sent:
            once = same_object
    assert shared == expected
    assert same_object == once
    kept = {id(t) for t in listed}
    assert all(id(t) in kept for t in found if type(t) is torch.Tensor and not t.is_quantized)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_stacked_tensors_do_not_share_memory(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = trip([torch.zeros(shape, dtype=dtype) for _ in range(40)])
    found[20].fill_(1)
    assert [bool(t.any()) for t in found] == [n == 20 for n in range(40)]
    kept = found[20]
    del found
    gc.collect()
    assert kept.all()


def test_decoding_within_a_torch_mode_or_transform_gives_plain_tensors() -> None:
    tensors = [torch.full((6,), float(n)) for n in range(40)]
    message = encode(tensors)

    def opened() -> Any:
        buffers = [memoryview(bytearray(span.view())) for span in message.spans]
        return decode(message.body, buffers, definitions=DefinitionStore())

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(opened())
        return x.sum()

    found: list[Any] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        found.append(opened())
    torch.func.grad(look)(torch.ones(2))
    for arrived in found:
        assert {type(each) for each in arrived} == {torch.Tensor}
        for sent, each in zip(tensors, arrived, strict=True):
            same(sent, each)  # reads the storage, which a tensor that a transform has wrapped lacks


def test_tensors_with_a_freed_storage_raise_serialization_error() -> None:
    lonely = torch.zeros(64, 4096)
    views = [lonely[0], lonely[:, 3], lonely[40]]
    lonely.untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match="freed or resized"):
        encode(views)
    for free in (0, 8):
        tensors = [torch.ones(4) for _ in range(40)]
        tensors[30].untyped_storage().resize_(free)
        with pytest.raises(SerializationError, match="freed or resized"):
            encode(tensors)


@row("tensors go through pickle", "from-ray")
def test_decoded_large_tensors_use_the_received_buffers() -> None:
    t = torch.arange(10000.0)
    encoded = encode((t, t[5:]))
    memory = bytearray(encoded.spans[0].view())
    a, b = decode(encoded.body, [memoryview(memory)], definitions=None)
    a[5] = -7
    assert b[0] == -7
    assert struct.unpack_from("f", memory, 20) == (-7.0,)
    with pytest.raises(BufferError):
        memory.append(1)  # the tensors hold the buffer
    del a, b
    gc.collect()
    memory.append(1)


def test_tensors_from_read_only_buffers_are_writable_copies() -> None:
    encoded = encode(torch.arange(10000.0))
    t = decode(encoded.body, [encoded.spans[0].view()], definitions=None)
    t += 1
    assert t[0] == 1


def test_tensors_arrive_as_leaves_and_parameters_and_buffers_keep_their_class() -> None:
    leaf = torch.ones(3, requires_grad=True)
    p = torch.nn.Parameter(torch.ones(4, 4))
    p.note = "kept"
    for t in (leaf * 2, p[1:3]):
        arrived = trip(t)
        assert type(arrived) is torch.Tensor
        assert arrived.requires_grad
        assert arrived.is_leaf
    arrived = trip(p)
    assert type(arrived) is torch.nn.Parameter
    assert arrived.note == "kept"
    assert not trip(torch.nn.Parameter(torch.ones(2), requires_grad=False)).requires_grad
    hooked = torch.ones(3, requires_grad=True)
    hooked.register_hook(print)
    assert trip(hooked)._backward_hooks is None
    b = trip(torch.nn.Buffer(torch.ones(2), persistent=False))
    assert isinstance(b, torch.nn.Buffer)
    assert not b.persistent


def test_a_tensor_attribute_may_refer_to_the_tensor_itself() -> None:
    t = torch.ones(3)
    t.me = t
    arrived = trip(t)
    assert arrived.me is arrived


class Tagged(torch.Tensor):
    """A user's subclass."""


def test_tensor_subclasses_keep_their_attributes_and_are_sent_out_of_band() -> None:
    t = torch.arange(5000.0).as_subclass(Tagged)
    t.tag = ["a"]
    encoded = encode(t)
    assert len(encoded.spans) == 1
    assert len(encoded.body) < 1000
    arrived = trip((t, t[2:]))
    assert type(arrived[0]) is Tagged
    assert arrived[0].tag == ["a"]
    assert torch.equal(arrived[1].as_subclass(torch.Tensor), torch.arange(5000.0)[2:])
    arrived[0][2] = -1
    assert arrived[1][0] == -1


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_survive_and_share_memory_with_their_tensors() -> None:
    t = torch.arange(2000.0)
    raw, typed, again, empty = trip((t.untyped_storage(), t.storage(), t[3:], torch.UntypedStorage(0)))
    assert raw.nbytes() == 8000
    assert empty.nbytes() == 0
    assert typed.dtype is torch.float32
    assert typed[5] == 5.0
    raw.fill_(0)
    assert not again.any()
    assert typed[5] == 0.0


def test_both_sides_list_the_tensors_of_a_message_in_the_same_order() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.zeros(3000)
    c = torch.eye(3).to_sparse()
    sent = {"a": [a, b], "p": torch.nn.Parameter(a.detach()), "c": (c, a), "e": torch.empty(0)}
    encoded = encode(sent)
    found: list[Any] = []
    arrived = trip(sent, tensors=found)
    assert encoded.grad
    assert [id(t) for t in encoded.tensors] == [id(a), id(b), id(sent["p"]), id(c), id(sent["e"])]
    arrived_in_order = [*arrived["a"], arrived["p"], arrived["c"][0], arrived["e"]]
    assert [id(t) for t in found] == [id(t) for t in arrived_in_order]


def test_tensors_within_torch_func_transforms_are_refused() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(SerializationError, match=r"argument 0: .*torch\.func"):
            encode((print, (x,), {}))
        return x

    torch.vmap(inside)(torch.ones(3))


def test_forward_mode_dual_tensors_are_refused() -> None:
    with forward_ad.dual_level():
        plain = torch.ones(3)
        dual = forward_ad.make_dual(plain, torch.ones(3))
        for sent in (dual, [torch.ones(3) for _ in range(20)] + [dual], torch.sin(dual)):
            with pytest.raises(SerializationError, match="tangent"):
                encode(sent)
        same(plain, trip(plain))


def test_the_error_for_a_missing_device_map_names_the_device() -> None:
    out = tensors_module.Outgoing({"cuda:0": "cuda:1"})
    assert out.target(torch.device("cuda:0")) == "cuda:1"
    with pytest.raises(SerializationError, match=r"only supports CPU tensors by default.*cuda:2"):
        out.target(torch.device("cuda:2"))


@pytest.mark.gpu
def test_cuda_tensors_need_and_follow_a_device_map() -> None:
    t = torch.arange(5000.0, device="cuda:0")
    with pytest.raises(SerializationError, match="argument 0: RPC only supports CPU"):
        encode((print, (t,), {}))
    a, b, c = trip((t, t[3:], t.cpu()), device_map={"cuda:0": "cuda:0"})
    assert (a.device, c.device.type) == (t.device, "cpu")
    a[3] = -1
    assert b[0] == -1
    assert trip(t[:0], device_map={"cuda:0": "cuda:0"}).device == t.device
    for view in (t[::3], t[:0], t.view(50, 100).t()):
        same(view.cpu(), trip(view, device_map={"cuda:0": "cpu"}))
    trip(torch.nn.Linear(3, 3).cuda(), device_map={"cuda:0": "cuda:0"})


# -- forged metadata -------------------------------------------------------------------------------


class Decoding:
    def __init__(self, size: int, kind: int = 0, low: int = 0) -> None:
        self.tensors: list[Any] = []
        self.devices: dict[str, str] = {}
        self.storages = [[bytearray(size), low, kind, "", None, None, None]]


@pytest.fixture
def piece() -> Any:
    def begin(size: int, kind: int = 0, low: int = 0) -> None:
        tensors_module.message.decoding = Decoding(size, kind, low)

    yield begin
    tensors_module.message.decoding = None


FLOAT = code_of(torch.float32)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(-2, 2),
    st.integers(-1, 40) | st.integers(0, 1 << 12),
    st.integers(-(1 << 40), 1 << 70) | st.integers(0, 20),
    st.lists(st.integers(-1, 5) | st.integers(0, 1 << 66), max_size=7),
    st.integers(0, 64),
    st.sampled_from([0, 16]),
    st.sampled_from([0, 2]),
)
def test_forged_metadata_never_gives_access_beyond_the_storage(
    index: int, code: int, offset: int, geometry: list[int], size: int, low: int, kind: int
) -> None:
    assume(size)
    tensors_module.message.decoding = Decoding(size, kind, low)
    try:
        t = tensors_module.tensor(index, code, offset, *geometry)
    except (ProtocolError, ValueError, RuntimeError, OverflowError, TypeError):
        return
    finally:
        tensors_module.message.decoding = None
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    if t.numel():
        assert t.storage_offset() >= 0
        assert min(t.stride(), default=0) >= 0
        assert (t.storage_offset() + last + 1) * t.itemsize <= t.untyped_storage().nbytes() == size


IN_BODY = tensors_module._IN_BODY


@pytest.mark.parametrize(
    ("layout", "kind", "low"),
    [
        ((0, FLOAT, 0), IN_BODY, 0),
        ((0, FLOAT, -2, -2), IN_BODY, 0),
        ((0, FLOAT, 3), IN_BODY, 0),
        ((0, FLOAT, 17), IN_BODY, 0),
        ((0, FLOAT, 1 << 62, 1 << 62), IN_BODY, 0),
        ((0, 99, 4), IN_BODY, 0),
        ((0, -1, 4), IN_BODY, 0),
        ((0, code_of(torch.qint8), 4), IN_BODY, 0),
        ((1, FLOAT, 4), IN_BODY, 0),
        ((-1, FLOAT, 4), IN_BODY, 0),
        ((0, FLOAT, 4), 0, 0),
        ((0, FLOAT, 4), IN_BODY | tensors_module._COMPACT, 0),
        ((0, FLOAT, 4), IN_BODY, 16),
    ],
)
def test_inconsistent_stack_metadata_raise_protocol_error(
    piece: Any, layout: tuple[int, ...], kind: int, low: int
) -> None:
    piece(64, kind, low)
    with pytest.raises(ProtocolError):
        next(tensors_module.stacked(*layout))


def test_no_byte_of_a_stack_can_be_used_twice(piece: Any) -> None:
    piece(64, IN_BODY)
    stack = tensors_module.stacked(0, FLOAT, 2, 4)
    assert [next(stack).shape for _ in range(2)] == [(2, 4)] * 2
    with pytest.raises(ProtocolError):
        next(stack)
    for again in ((0, FLOAT, 2, 4), (0, FLOAT, 16), (0, FLOAT, 4)):
        with pytest.raises(ProtocolError):
            tensors_module.stacked(*again)
    with pytest.raises(ProtocolError):
        tensors_module.tensor(0, FLOAT, 0, 4, 1)


def test_sparse_tensors_with_indices_out_of_range_are_refused(piece: Any) -> None:
    piece(64)
    tensors_module.message.decoding.storages[0][0][:8] = b"\xff" * 7 + b"\x7f"
    long = code_of(torch.int64)
    with pytest.raises(RuntimeError):
        tensors_module.sparse_coo((0, long, 0, 1, 2, 2, 1), (0, FLOAT, 4, 2, 1), (3,), False, False)


# CPython prints this if the damage makes pickle drop an object whose buffer is exported.
@pytest.mark.prints("^SystemError: deallocated bytearray object has exported buffers$")
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_bodies_raise_typed_errors(data: Any) -> None:
    alike = [torch.ones(2) for _ in range(data.draw(st.sampled_from([0, 20])))]
    encoded = encode((torch.arange(3000.0), torch.ones(3), torch.eye(3).to_sparse(), alike))
    body = bytearray(encoded.body)
    table = len(body) - 200  # only the table and the inline bytes: a damaged pickle may have any meaning
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(table, len(body) - 1))] = data.draw(st.integers(0, 255))
    buffers = [memoryview(bytearray(span.view())) for span in encoded.spans]
    try:
        decode(bytes(body), buffers, definitions=DefinitionStore())
    except (ProtocolError, SerializationError):
        pass
