"""Views of parts of a storage: unused bytes are not sent, and overlapping tensors share memory after they were received."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actorrpc.serialization.codec import Encoded, decode, dumps, encode, loads
from tests.tensors import is_view

SECRET, USED = 0xAA, 0x11


def secret(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), SECRET, dtype=torch.uint8)


def trip(obj: Any) -> tuple[Any, Encoded]:
    """Encode and decode an object as if for another process; return the result and the message."""
    encoded = encode(obj)
    buffers = [memoryview(bytearray(span.view())) for span in encoded.spans]
    return decode(encoded.body, buffers, definitions=None), encoded


def memory(tensors: Any) -> bytes:
    """Return the bytes of the storages of the tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return b"".join(bytes(torch.empty(0, dtype=torch.uint8).set_(each).numpy()) for each in storages.values())


def mark(base: torch.Tensor, views: list[torch.Tensor]) -> None:
    """Mark all bytes of a storage that the views use."""
    all_elements = torch.arange(len(base))
    for t in views:
        elements = all_elements.as_strided(t.shape, t.stride(), t.storage_offset())
        base.view(-1, t.itemsize)[elements.flatten()] = USED


@st.composite
def views_of_one_storage(draw: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A storage, and rows, columns, blocks, and views of any geometry."""
    base = secret(1 << 15)
    found = []
    for _ in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from([torch.uint8, torch.int32, torch.int32, torch.float64]))
        whole = base.view(dtype)
        width = draw(st.sampled_from([8, 8, 64, 2048])) * 4 // dtype.itemsize
        rows = whole.view(-1, width)
        kind = draw(st.sampled_from(["rows", "columns", "block", "slice", "any"]))
        first, last = sorted(draw(st.lists(st.integers(0, len(rows)), min_size=2, max_size=2)))
        left, right = sorted(draw(st.lists(st.integers(0, min(width, 8)), min_size=2, max_size=2)))
        match kind:
            case "rows":
                t = rows[first : last : draw(st.integers(1, 3))]
            case "columns":
                t = rows[:, left:right]
            case "block":
                t = rows[first:last, left:right]
            case "slice":
                t = whole[first : last : draw(st.integers(1, 9))]
            case _:
                shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
                stride = [draw(st.sampled_from([0, 1, 2, 3, 8, 100])) for _ in shape]
                t = whole.as_strided(shape, stride, draw(st.integers(0, 300)))
        found.append(t.t() if t.dim() == 2 and draw(st.booleans()) else t)
    return base, found


@settings(max_examples=100, deadline=None)
@given(views_of_one_storage(), st.booleans())
def test_only_used_bytes_arrive_and_overlapping_views_share_memory(
    storage: tuple[torch.Tensor, list[torch.Tensor]], by_themselves: bool
) -> None:
    base, views = storage
    mark(base, views)
    before = [t.clone() for t in views]
    if by_themselves:
        arrived, sent = loads(dumps(views)), dumps(views)
    else:
        arrived, encoded = trip(views)
        sent = encoded.body + b"".join(bytes(span.view()) for span in encoded.spans)
    assert bytes([SECRET]) * 2 not in sent
    assert SECRET not in memory(arrived)
    for a, b in zip(before, arrived, strict=True):
        assert torch.equal(a, b)
        assert not is_view(b)
    # Changing a received tensor changes the same elements of the others as at the sender.
    for here, there in zip(views, arrived, strict=True):
        if here.numel() and 0 not in here.stride():
            here.fill_(5)
            there.fill_(5)
            for a, b in zip(views, arrived, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[3:90],
        lambda x: x.t(),
        lambda x: x.unbind(1),
        lambda x: (x, x[:, 0]),
        lambda x: x.chunk(4, 1),
    ],
    ids=["whole", "rows", "transposed", "all columns", "whole and column", "column blocks"],
)
def test_views_without_gaps_are_sent_without_a_copy(view: Any) -> None:
    base = torch.arange(512.0 * 64).view(512, 64)
    encoded = encode(view(base))
    (span,) = encoded.spans
    assert base.data_ptr() <= span.address < base.data_ptr() + base.nbytes


def test_a_single_view_with_gaps_sends_at_most_twice_its_bytes() -> None:
    base = torch.arange(1000.0 * 3000).view(1000, 3000)
    for view in (
        base[:, :2],
        base[::7],
        base[:, :2].expand(50, 1000, 2),
        base[2:5, 3:6].t(),
        base[:, :2000:2],
    ):
        arrived, encoded = trip(view)
        assert torch.equal(view, arrived)
        used = view.nbytes if 0 not in view.stride() else view[0].nbytes
        assert encoded.nbytes <= 2 * used + 500
    assert trip(base[:, :2000])[0].stride() == (3000, 1)  # few bytes are unused, so the view keeps its gaps


@pytest.mark.filterwarnings("ignore")
def test_a_row_of_a_quantised_tensor_is_sent_without_the_other_rows() -> None:
    whole = torch.quantize_per_tensor(torch.arange(1000.0).repeat(100, 1), 0.1, 0, torch.qint8)
    arrived, encoded = trip(whole[3])
    assert torch.equal(arrived.int_repr(), whole[3].int_repr())
    assert encoded.nbytes < 2000
