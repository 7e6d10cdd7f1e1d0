"""Headers: what may be said of a message ahead of its body."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorrpc.errors import ProtocolError
from actorrpc.wire.headers import Header, pack_header, unpack_header


def test_fields_travel_by_their_names() -> None:
    header: Header = {"mailbox": 3, "method": "step", "keep": True, "sizes": [1, 2], "placement": [1, 2]}
    assert unpack_header(pack_header(header)) == header
    assert all(name.isidentifier() and len(name) > 2 for name in Header.__annotations__)


@pytest.mark.parametrize(
    "extra",
    [
        b"",
        b"\xc1",
        b"\x01",
        b"\x90",
        b"\x81\x01\x01",
        b"\x82\xa1a\x01",
        b"\x80\x80",
        struct.pack("<Q", 2**63),
    ],
)
def test_headers_that_are_no_maps_are_refused(extra: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_header(extra)


@given(st.binary(max_size=200))
def test_any_header_is_a_map_or_a_protocol_error(extra: bytes) -> None:
    try:
        header = unpack_header(extra)
    except ProtocolError:
        return
    assert all(isinstance(key, str) for key in header)
