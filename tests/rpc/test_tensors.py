"""Tensors in calls: every layout and dtype arrives equal, in both directions, over every transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from actorrpc import errors, rpc
from tests.announced import ODD_TENSORS, OUTSIDE_OF_A_CONTEXT
from tests.layers import rest_is_slow
from tests.ranks import rpc_group
from tests.tensors import is_view

_REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
_COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
_WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
_UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
_SMALL = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
_SIZES = (0, 1, 5, 2_000, 30_000)  # sent in the frame, next to the frame, in shared memory


# -- kinds of tensors ----------------------------------------------------------------------------


def by_dtype() -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for size in _SIZES:
        raw = torch.randint(0, 256, (size * 16,), dtype=torch.uint8, generator=generator)
        for dtype in [*_REAL, *_COMPLEX, *_WHOLE, *_UNSIGNED, *_SMALL]:
            yield f"{dtype}[{size}]", raw[: size * dtype.itemsize].clone().view(dtype)
        yield f"bool[{size}]", raw[:size] > 128


def by_geometry() -> Iterator[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    for n in (4, 120, 250):
        base = torch.arange(float(n * n * 2)).view(2, n, n)
        yield f"whole {n}", base
        yield f"transposed {n}", base.transpose(1, 2)
        yield f"permuted {n}", base.permute(2, 0, 1)
        yield f"one of two {n}", base[1]
        yield f"columns {n}", base[:, :, : n // 2 + 1]
        yield f"every third {n}", base[..., ::3]
        yield f"one column {n}", base[0, :, 1]
        yield f"flipped {n}", base.flip(0)
        yield f"expanded {n}", base[:1].expand(3, n, n)
        yield f"stride 0 {n}", torch.ones(1).expand(n)
        yield f"overlapping {n}", base.flatten().as_strided((n, 3), (1, 1))
        yield f"diagonal {n}", base[0].diagonal()
        yield f"channels last {n}", torch.randn(2, 3, n, n).to(memory_format=torch.channels_last)
        yield f"empty part {n}", base[:, 2:2]
    yield "scalar", torch.tensor(3.5)
    yield "scalar of a vector", torch.arange(5)[3]
    yield "nothing", torch.empty(0)
    yield "no rows", torch.empty(0, 3)
    yield "no columns", torch.empty(3, 0, 2)
    yield "many dimensions", torch.arange(64).view(2, 2, 2, 2, 2, 2)
    yield "conjugate", torch.randn(3, 4, dtype=torch.complex64).conj()
    yield "conjugate transposed", torch.randn(3, 4, dtype=torch.complex128).mH
    yield "negative bit", torch.randn(5, dtype=torch.complex64).conj().imag
    yield "real part", torch.randn(5, dtype=torch.complex64).real
    yield "zero tensor", torch._efficientzerotensor((3, 2))
    yield "not a number", torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])


def by_layout() -> Iterator[tuple[str, torch.Tensor]]:
    dense = torch.tensor([[0.0, 2.0, 0.0, 1.0], [3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 5.0], [0.0] * 4])
    indices = torch.tensor([[0, 0, 1], [1, 1, 2]])
    yield "coo", torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (4, 4))
    yield "coo, coalesced", dense.to_sparse().coalesce()
    yield "coo, hybrid", torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 3), (4, 3))
    yield "coo, empty", torch.sparse_coo_tensor(size=(2, 3))
    yield "coo, large", torch.eye(3_000).to_sparse()
    yield "csr", dense.to_sparse_csr()
    yield "csc", dense.to_sparse_csc()
    yield "bsr", dense.to_sparse_bsr((2, 2))
    yield "bsc", dense.to_sparse_bsc((2, 2))
    yield "csr of ints", torch.eye(50, dtype=torch.int64).to_sparse_csr()
    yield "quantised", torch.quantize_per_tensor(dense, 0.5, 3, torch.qint8)
    yield (
        "quantised by channel",
        torch.quantize_per_channel(
            dense, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.zeros(4, dtype=torch.int64), 0, torch.quint8
        ),
    )
    yield "mkldnn", dense.to_mkldnn()
    yield "meta", torch.empty(3, 4, device="meta")
    yield "nested", torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)])


def by_kind() -> Iterator[tuple[str, torch.Tensor]]:
    yield "parameter", torch.nn.Parameter(torch.ones(3))
    yield "frozen parameter", torch.nn.Parameter(torch.ones(3), requires_grad=False)
    yield "leaf", torch.ones(3, requires_grad=True)
    yield "view of a leaf", torch.ones(3, requires_grad=True)[1:].detach().requires_grad_()
    yield "sparse leaf", torch.eye(3).to_sparse().requires_grad_()
    # A tensor in memory of numpy, which torch does not own.
    yield "from numpy", torch.from_numpy(torch.arange(6.0).numpy().reshape(2, 3).copy())


def everything() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    for source in (by_dtype, by_geometry, by_layout, by_kind):
        found.update(source())
    return found


def elements(t: torch.Tensor) -> bytes:
    """Return the bytes of the elements in order, which also compares NaN and dtypes without `==`."""
    return t.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def describe(t: torch.Tensor) -> dict[str, Any]:
    """Return all properties of a tensor as plain data that can be compared."""
    d: dict[str, Any] = {"type": type(t), "dtype": t.dtype, "layout": t.layout, "grad": t.requires_grad}
    bare = t.detach()
    if t.is_nested:
        return {**d, "parts": [describe(part) for part in bare.unbind()]}
    d["shape"] = tuple(t.shape)
    if t.layout is torch.sparse_coo:
        d["coalesced"] = t.is_coalesced()
        return {**d, "parts": [describe(bare._indices()), describe(bare._values())]}
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {
            **d,
            "parts": [describe(each) for each in (bare.crow_indices(), bare.col_indices(), bare.values())],
        }
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return {
            **d,
            "parts": [describe(each) for each in (bare.ccol_indices(), bare.row_indices(), bare.values())],
        }
    if t.layout is not torch.strided:
        return {**d, "parts": [describe(bare.to_dense())]}
    d["stride"] = t.stride()
    d["bits"] = (t.is_conj(), t.is_neg())
    if t.is_meta:
        return d
    if t.is_quantized:
        scheme = t.qscheme()
        if scheme is torch.per_tensor_affine:
            d["scheme"] = (scheme, t.q_scale(), t.q_zero_point())
        else:
            d["scheme"] = (scheme, t.q_per_channel_scales().tolist(), t.q_per_channel_zero_points().tolist())
        return {**d, "parts": [describe(bare.int_repr())]}
    if is_zero_tensor(t):
        bare = torch.zeros(t.shape, dtype=t.dtype)
    d["elements"] = elements(bare) if t.numel() else b""
    return d


# An intended difference.
_PACKED = (
    "of a tensor that uses less than half of its range, only the elements are sent: they arrive contiguous"
)


def is_zero_tensor(t: torch.Tensor) -> bool:
    """Return whether autograd made a tensor of zeros without memory."""
    return t._is_zerotensor()


def differences(name: str, sent: torch.Tensor, got: dict[str, Any]) -> list[str]:
    wanted = describe(sent)
    if wanted.get("stride") != got.get("stride"):
        reach = 1 + sum((n - 1) * step for n, step in zip(sent.shape, sent.stride(), strict=True))
        if reach > 2 * sent.numel():
            assert got["stride"] == torch.empty(sent.shape).stride(), _PACKED
            got = {**got, "stride": wanted["stride"]}
    if sent.layout is torch.strided and is_zero_tensor(sent):
        got = {**got, "stride": wanted["stride"]}
    return [
        f"{name}: {key} {got.get(key)!r:.200} against {wanted[key]!r:.200}"
        for key in wanted
        if got.get(key) != wanted[key]
    ]


def see(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]:
    """Return descriptions of the received tensors, and the tensors."""
    return {name: describe(t) for name, t in tensors.items()}, tensors


def back(t: torch.Tensor) -> torch.Tensor:
    return t


def _travel(rank: int, world_size: int) -> list[str]:
    if rank:
        return []
    problems: list[str] = []
    tensors = everything()
    for to in ("worker1", "worker0"):
        # All tensors in one message, and each in its own message.
        seen, returned = rpc.rpc_sync(to, see, (tensors,))
        alone = {name: rpc.rpc_async(to, see, ({name: t},)) for name, t in tensors.items()}
        assert list(seen) == list(returned) == list(tensors)
        for name, t in tensors.items():
            problems += differences(f"{name}, there", t, seen[name])
            problems += differences(f"{name}, back", t, describe(returned[name]))
            seen_alone, returned_alone = alone[name].wait()
            problems += differences(f"{name}, there alone", t, seen_alone[name])
            problems += differences(f"{name}, back alone", t, describe(returned_alone[name]))
            if not t.is_nested and t.layout is torch.strided and not t.is_meta and is_view(returned[name]):
                problems.append(f"{name} arrived as a view")
    return problems


_WAYS: list[dict[str, Any]] = [{}, {"lane": False}, {"transport": "tcp", "lane": False}]


@pytest.mark.parametrize("options", rest_is_slow(_WAYS))
@pytest.mark.prints(*ODD_TENSORS)
def test_tensors_of_every_dtype_geometry_and_layout_arrive_equal(options: dict[str, Any]) -> None:
    problems = rpc_group(_travel, 2, options=options)[0]
    assert not problems, f"{len(problems)} differences:\n" + "\n".join(problems[:40])


# -- sharing within a message --------------------------------------------------------------------


def sharing(tensors: list[torch.Tensor], keyword: torch.Tensor) -> list[tuple[bool, bool, int]]:
    """Return for each tensor: whether it is the first tensor, whether it shares its memory, and its offset from it."""
    first = tensors[0]
    start, end = first.untyped_storage().data_ptr(), first.untyped_storage().nbytes()
    return [
        (t is first, 0 <= t.data_ptr() - start <= end, (t.data_ptr() - first.data_ptr()) // t.itemsize)
        for t in [*tensors, keyword]
    ]


def write_through(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    tensors[0].fill_(7)
    return tensors


def fresh(n: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    t = torch.arange(n)
    return t, t, [t[1:], torch.arange(n)]


def add_in_place(t: torch.Tensor, number: int) -> torch.Tensor:
    return t.add_(number)


def two_layers() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight  # tied
    return model


def _share() -> None:
    for to in ("worker1", "worker0"):
        for n in (10, 5_000, 200_000):
            base = torch.arange(n)
            other = torch.arange(n)
            tensors = [base, base, base[2:], base.view(2, -1)[1], other]
            found = rpc.rpc_sync(to, sharing, (tensors,), {"keyword": base})
            assert found[0] == (True, True, 0)
            assert found[1] == (True, True, 0)
            assert found[2] == (False, True, 2)
            assert found[3] == (False, True, n // 2)
            assert found[4][0] is False
            assert found[5] == (True, True, 0)
            # Writing to one received tensor changes the others that share its memory, but not the sent tensors.
            got = rpc.rpc_sync(to, write_through, (tensors,))
            assert all(bool((t == 7).all()) for t in got[:4])
            assert torch.equal(got[4], other)
            assert torch.equal(base, torch.arange(n))
            got[0].zero_()  # the returned tensors are writable
            assert not got[2].any()
            one, same, (part, separate) = rpc.rpc_sync(to, fresh, (n,))
            assert one is same
            one.fill_(3)
            assert bool((part == 3).all())
            assert torch.equal(separate, torch.arange(n))
            # A received tensor is a leaf that may be changed in place and sent again.
            assert torch.equal(rpc.rpc_sync(to, add_in_place, (got[4], 1)), other + 1)
            assert torch.equal(rpc.rpc_sync(to, add_in_place, (rpc.rpc_sync(to, back, (base,)), 2)), base + 2)
        tied = rpc.rpc_sync(to, two_layers)
        assert tied[0].weight is tied[1].weight
        tied = rpc.rpc_sync(to, back, (tied,))
        assert tied[0].weight is tied[1].weight
        assert all(
            isinstance(p, torch.nn.Parameter) and p.requires_grad and p.is_leaf for p in tied.parameters()
        )


# -- gradients, modes, subclasses ----------------------------------------------------------------


def flags(t: torch.Tensor) -> tuple[bool, bool, bool, bool]:
    return t.requires_grad, t.is_leaf, t.grad_fn is None, t.grad is None


def learn(t: torch.Tensor) -> torch.Tensor:
    (t * 2).sum().backward()
    assert t.grad is not None
    return t.grad


def in_mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _grad() -> None:
    x = torch.ones(3, requires_grad=True)
    x.sum().backward()
    y = x * 2
    for to in ("worker1", "worker0"):
        # Outside of an autograd context, the graph ends at the call: a leaf without a gradient arrives.
        assert rpc.rpc_sync(to, flags, (x,)) == (True, True, True, True)
        assert rpc.rpc_sync(to, flags, (torch.nn.Parameter(torch.ones(2)),)) == (True, True, True, True)
        assert rpc.rpc_sync(to, flags, (torch.ones(3),)) == (False, True, True, True)
        assert rpc.rpc_sync(to, flags, (y.detach(),)) == (False, True, True, True)
        inner = rpc.rpc_sync(to, flags, (y,))
        assert inner[1:] == (True, True, True)
        result = rpc.rpc_sync(to, torch.mul, (x, 2))
        assert result.grad_fn is None
        assert torch.equal(result, y)
        assert torch.equal(rpc.rpc_sync(to, learn, (x,)), torch.full((3,), 2.0))
        assert torch.equal(x.grad, torch.ones(3))  # type: ignore[arg-type]
        # The caller's modes do not apply to the callee.
        with torch.no_grad():
            assert rpc.rpc_sync(to, in_mode) == (True, False)
            assert rpc.rpc_sync(to, back, (x,)).requires_grad
        with torch.inference_mode():
            assert rpc.rpc_sync(to, in_mode) == (True, False)
            got = rpc.rpc_sync(to, back, (torch.ones(3) + 1,))
        assert not got.is_inference()
        got.add_(1).requires_grad_()
        with torch.device("meta"):
            assert rpc.rpc_sync(to, back, (x,)).device.type == "cpu"
        with torch.random.fork_rng():
            torch.set_default_dtype(torch.float64)
            try:
                assert rpc.rpc_sync(to, back, (x,)).dtype is torch.float32
            finally:
                torch.set_default_dtype(torch.float32)


def _storages() -> None:
    for n in (3, 9_000):
        t = torch.arange(n, dtype=torch.float32)
        for to in ("worker1", "worker0"):
            untyped = rpc.rpc_sync(to, back, (t.untyped_storage(),))
            assert isinstance(untyped, torch.UntypedStorage)
            assert bytes(untyped) == bytes(t.untyped_storage())
            tensor, storage = rpc.rpc_sync(to, pair, (t, t.untyped_storage()))
            assert tensor.untyped_storage().data_ptr() == storage.data_ptr()
    with pytest.raises(errors.SerializationError, match=r"torch\.func"):
        torch.func.vmap(lambda x: rpc.rpc_sync("worker1", back, (x,)))(torch.ones(3))
    assert rpc.rpc_sync("worker1", back, (torch.ones(1),)).item() == 1
    attributed = torch.ones(2)
    attributed.note = "kept"  # type: ignore[attr-defined]
    assert rpc.rpc_sync("worker1", back, (attributed,)).note == "kept"
    size = rpc.rpc_sync("worker1", torch.Tensor.size, (torch.ones(2, 3),))
    assert type(size) is torch.Size
    assert size == (2, 3)
    for thing in (torch.float16, torch.device("cpu"), torch.strided, torch.preserve_format, torch.Generator):
        assert rpc.rpc_sync("worker1", back, (thing,)) == thing  # type: ignore[arg-type]


def pair(a: Any, b: Any) -> tuple[Any, Any]:
    return a, b


def _values(rank: int, world_size: int) -> None:
    if rank == 0:
        _share()
        _grad()
        _storages()


@pytest.mark.prints(OUTSIDE_OF_A_CONTEXT)
def test_received_tensors_share_memory_as_sent_and_are_leaves_without_the_callers_modes() -> None:
    rpc_group(_values, 2)
