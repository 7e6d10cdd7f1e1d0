"""Names, records and host identities of workers."""

from __future__ import annotations

import runpy
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgpack
import pytest

from actorrpc.errors import ConfigError, RendezvousError
from actorrpc.wire.identity import (
    WorkerInfo,
    WorkerRecord,
    check_name,
)

_NAMES = st.text(string.ascii_letters + string.digits + "-_:", min_size=1, max_size=127)
_DEVICES = st.sampled_from(["cpu", "cuda:0", "cuda:15", "meta"])
_RECORDS = st.builds(
    WorkerRecord,
    name=_NAMES,
    rank=st.integers(-1, 2**31 - 1),
    incarnation=st.binary(min_size=16, max_size=16).map(bytes.hex),
    host=st.text(string.hexdigits, min_size=1, max_size=64),
    unix_path=st.none()
    | st.text(st.characters(blacklist_characters="\0", codec="utf-8"), min_size=1, max_size=108),
    tcp=st.lists(
        st.tuples(
            st.text(string.ascii_letters + string.digits + ":%-", min_size=1, max_size=60),
            st.integers(1, 65535),
        ),
        max_size=4,
    ).map(tuple),
    pid=st.integers(0, 2**31 - 1),
    gpus=st.lists(st.text(string.hexdigits, min_size=1), max_size=3).map(tuple),
    devices=st.lists(_DEVICES, max_size=3).map(tuple),
    device_maps=st.none() | st.lists(st.tuples(_NAMES, _DEVICES, _DEVICES), max_size=3).map(tuple),
    data_only=st.booleans(),
    hostname=st.text(string.ascii_letters, max_size=64),
)


def _record(**changes: Any) -> WorkerRecord:
    return replace(WorkerRecord(name="a", rank=0, incarnation="0" * 32, host="h"), **changes)


@pytest.mark.parametrize("name", ["", " ", "abc*", "a.b", "a/b", "é", "a\n", "x" * 128, None, 3, b"a", "٣"])
def test_invalid_worker_names_raise_torchs_error(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"Worker name must match .*must be non-empty and shorter than 128"):
        check_name(name)
    with pytest.raises(RuntimeError):  # as torch
        WorkerInfo(name, 0)


@pytest.mark.parametrize("id", [None, "1", 1.0, True])
def test_a_worker_id_that_is_no_integer_raises(id: Any) -> None:
    with pytest.raises(ConfigError):
        WorkerInfo("a", id)


@hypothesis.settings(max_examples=150)
@hypothesis.given(st.binary(max_size=300))
def test_random_bytes_are_refused_as_a_record(data: bytes) -> None:
    with pytest.raises(RendezvousError):
        WorkerRecord.from_bytes(data)


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@hypothesis.settings(max_examples=150)
@hypothesis.given(_RECORDS, st.integers(0, 10), _ANY)
def test_a_record_with_one_random_field_is_read_or_refused(
    record: WorkerRecord, index: int, value: Any
) -> None:
    assert WorkerRecord.from_bytes(record.to_bytes()) == record
    row = msgpack.unpackb(record.to_bytes())
    row[index % len(row)] = value
    try:
        read = WorkerRecord.from_bytes(msgpack.packb(row))
    except RendezvousError:
        return
    assert WorkerRecord.from_bytes(read.to_bytes()) == read


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": -2},
        {"rank": True},
        {"incarnation": "0" * 31},
        {"incarnation": "G" * 32},
        {"host": ""},
        {"unix_path": ""},
        {"unix_path": "a\0b"},
        {"unix_path": "x" * 109},
        {"tcp": [("a", 1)]},
        {"tcp": (("a", 0),)},
        {"tcp": (("", 1),)},
        {"tcp": (("h..h", 1),)},
        {"tcp": (("a", 1, 2),)},
        {"tcp": (("a", 1),) * 65},
        {"pid": -1},
        {"main": "x" * 65},
        {"device_maps": (("no name!", "cuda:0", "cuda:0"),)},
        {"device_maps": (("a", "cuda:0"),)},
        {"data_only": 1},
    ],
)
def test_a_record_with_invalid_fields_cannot_be_created(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        _record(**changes)


def test_a_record_over_the_size_limit_is_refused() -> None:
    with pytest.raises(RendezvousError, match="bytes"):
        WorkerRecord.from_bytes(b"\x99" * (1 << 20))


def test_main_identity_depends_on_the_content_of_the_main_file(tmp_path: Path) -> None:
    def identity(before: str = "", after: str = "") -> Any:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"
        file.write_text(
            f"import os\nfrom actorrpc.wire import identity\n{before}\nfound = identity.main_identity()\n{after}"
        )
        return runpy.run_path(str(file), run_name="__main__")["found"]

    assert identity() == identity() != ""
    assert identity(after="x = 2") not in ("", identity())
    assert identity(before="os.unlink(__file__)") == ""
    assert identity(before="del __file__") == ""
