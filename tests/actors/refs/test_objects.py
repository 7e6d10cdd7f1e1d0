"""``put()``, ``get()`` and messages give separate values of all kinds and sizes, and all memory is released.

Here one process sends to itself; ``e2e/test_objects.py`` has the tests between processes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from actorrpc import rpc
from actorrpc.actors.refs.object_ref import ObjectRef, put
from actorrpc.actors.refs.snapshot import LARGE
from actorrpc.actors.refs.wait import get
from actorrpc.agent.agent import Agent
from actorrpc.rpc import rref as rrefs
from tests.actors.bare import alone
from tests.migration.rows import row

pytestmark = pytest.mark.usefixtures("group")

_COUNT = LARGE // 8  # float64 numbers


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A group of one worker."""
    with alone():
        put(bytearray(LARGE))  # opens the accounting file, which stays open
        yield


def _agent() -> Agent:
    return rrefs.runtime().agent


def _send(*things: Any) -> Any:
    """Send objects in a message and return what comes back in the reply."""
    return rpc.rpc_sync(0, _echo, (things,))


def _echo(things: tuple[Any, ...]) -> tuple[Any, ...]:
    return things


def _held() -> int:
    """Return the shared memory that live objects use."""
    gc.collect()
    return _agent().objects.stats().held_bytes


# -- each type -------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    name: str
    parts: dict[str, Any]


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(_COUNT, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def _numbers() -> torch.Tensor:
    return torch.arange(2 * _COUNT, dtype=torch.float64)


def _array() -> np.ndarray[Any, Any]:
    return np.arange(2 * _COUNT, dtype=np.float64)


def _script() -> torch.jit.ScriptModule:
    return torch.jit.script(Scaled())


def _clear(value: Any) -> None:
    """Overwrite all memory of a value with zeros."""
    if isinstance(value, torch.nn.Module):
        with torch.no_grad():
            for each in value.parameters():
                each.zero_()
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.zero_()
    elif isinstance(value, np.ndarray):
        value[...] = np.zeros((), value.dtype)
    elif isinstance(value, (bytearray, memoryview)):
        value[:] = bytes(len(value))
    elif isinstance(value, Batch):
        _clear(value.parts)
    elif isinstance(value, dict):
        for each in value.values():
            _clear(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _clear(each)


def _contents(value: Any) -> Any:
    """Return the contents of a value in a form that can be compared."""
    if isinstance(value, torch.nn.Module):
        return [(name, _contents(each)) for name, each in value.state_dict().items()]
    if isinstance(value, torch.Tensor):
        return (
            value.dtype,
            value.shape,
            value.stride(),
            value.detach().contiguous().view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.strides, value.tobytes()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, Batch):
        return value.name, _contents(value.parts)
    if isinstance(value, dict):
        return {name: _contents(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_contents(each) for each in value]
    return value


_KINDS: dict[str, Callable[[], Any]] = {
    "a tensor": _numbers,
    "a view": lambda: _numbers()[64:-64],
    "a transposed one": lambda: _numbers().reshape(64, -1).t(),
    "every other number": lambda: _numbers()[::2],
    "shared memory": lambda: (lambda whole: [whole, whole[8:16], whole.reshape(4, -1)[1]])(_numbers()),
    "bfloat16": lambda: _numbers().to(torch.bfloat16).repeat(4),
    "a parameter": lambda: torch.nn.Parameter(_numbers()),
    "an array": _array,
    "columns": lambda: np.asfortranarray(_array().reshape(64, -1)),
    "records": lambda: np.zeros(_COUNT, dtype=[("key", "<i8"), ("value", "<f4")]),
    "bytearray": lambda: bytearray(range(256)) * (LARGE // 128),
    "nested": lambda: {"batch": Batch("first", {"x": _numbers(), "y": [_array(), "text", (1, None)]})},
    "a module": Scaled,
    "a script module": _script,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", _KINDS)
@row("numpy arrays come read-only", "from-ray")
def test_each_get_returns_a_separate_value(kind: str) -> None:
    value = _KINDS[kind]()
    before = _contents(value)
    ref = put(value)
    _clear(value)
    first, second = get(ref), get(ref)
    assert _contents(first) == before
    _clear(first)
    assert _contents(second) == before
    assert _contents(get(ref, copy=True)) == before
    (arrived,) = _send(ref)
    there = get(arrived)
    assert _contents(there) == before
    _clear(there)
    assert _contents(get(ref)) == before
    del first, second, ref, arrived, there
    assert not _held()


def test_a_pandas_frame_is_stored_in_shared_memory_and_copied_by_get() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"number": np.arange(_COUNT), "half": np.arange(_COUNT) / 2})
    before = frame.copy()
    ref = put(frame)
    frame.iloc[:, :] = 0
    assert _held() >= 2 * 8 * _COUNT  # outside the pickle
    first, second = get(ref), get(ref)
    first.iloc[:, :] = 0
    for each in (second, get(ref), get(ref, copy=True), get(_send(ref)[0])):
        pandas.testing.assert_frame_equal(each, before)
    del first, second, ref, each
    assert not _held()


def test_a_pyarrow_table_is_stored_in_shared_memory() -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"number": np.arange(_COUNT), "text": ["a", "b"] * (_COUNT // 2)})
    ref = put(table)
    assert _held() >= 8 * _COUNT
    for each in (get(ref), get(ref, copy=True), get(ref, copy=False), get(_send(ref)[0])):
        assert each.equals(table)
    del ref, each
    assert not _held()


def test_views_of_the_same_memory_stay_views_of_the_same_memory() -> None:
    whole, part, _ = get(put(_KINDS["shared memory"]()))
    whole[8] = -1
    assert part[0] == -1


def test_an_immutable_value_is_not_copied() -> None:
    text = "x" * LARGE
    assert get(put(text)) is text


def test_copy_false_gives_read_only_arrays() -> None:
    array = np.arange(_COUNT * 2)
    ref = put({"array": array, "raw": bytearray(LARGE), "small": [1]})
    seen = get(ref, copy=False)
    assert np.array_equal(seen["array"], array)
    with pytest.raises(ValueError, match="read-only"):
        seen["array"][0] = 1
    get(ref)["array"][0] = 7
    assert seen["array"][0] == 0
    with pytest.raises(TypeError, match="leave copy=False out"):
        get(put(torch.zeros(_COUNT)), copy=False)


def test_memory_is_not_reused_while_a_view_of_a_value_lives() -> None:
    ref = put(_array())
    value = get(ref)
    part = value[10:20]
    del ref, value
    other = put(np.full(2 * _COUNT, 5.0))  # would overwrite the memory if it were free
    assert part.tolist() == list(range(10, 20))
    del part, other
    assert not _held()


def _of_segments() -> tuple[int, int]:
    """Return how many descriptors and mappings this process has for segments."""
    links = [os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
    descriptors = sum("actorrpc-object" in os.readlink(each) for each in links if os.path.islink(each))
    with open("/proc/self/maps", encoding="utf-8") as file:
        return descriptors, sum("actorrpc-object" in line for line in file)


@pytest.mark.slow
def test_many_objects_take_few_descriptors_and_mappings() -> None:
    before = _of_segments()
    count = 2048  # 512 MiB in total; 100 000 objects would need 49 times as many segments
    refs = [put(np.full(LARGE // 8, number, np.float64)) for number in range(count)]
    values = [get(ref) for ref in refs]
    assert [float(each[-1]) for each in values[:: count // 8]] == list(range(0, count, count // 8))
    for more in (now - then for now, then in zip(_of_segments(), before, strict=True)):
        assert more * 100_000 / count <= 1000, (before, _of_segments())
    del refs, values
    assert not _held()


def test_an_object_can_contain_references_to_objects() -> None:
    inner = put(_array())
    outer = put({"inner": inner, "more": _array()})
    found = get(outer)
    del inner, outer
    assert np.array_equal(get(found["inner"]), _array())
    del found
    assert not _held()


# -- random programs -------------------------------------------------------------------------------------------

_SIZES = st.sampled_from([1, 100, _COUNT - 1, _COUNT, _COUNT + 1, 3 * _COUNT, (9 << 20) // 8])


class Programs(RuleBasedStateMachine):
    """Puts, gets, sends, changes and drops in any order, compared with a model.

    Rules return numbers, because hypothesis keeps what they return.
    """

    refs: Bundle[int] = Bundle("refs")
    values: Bundle[int] = Bundle("values")

    def __init__(self) -> None:
        super().__init__()
        self.next = 0
        self.known: dict[
            int, tuple[ObjectRef[Any], int, int]
        ] = {}  # reference, number of elements, and their value
        self.found: dict[int, tuple[Any, int, int]] = {}

    def _number(self) -> int:
        self.next += 1
        return self.next

    def _enter(self, value: Any, count: int, number: int) -> int:
        at = self._number()
        self.found[at] = np.asarray(value), count, number
        return at

    @rule(target=refs, count=_SIZES, tensor=st.booleans())
    def put(self, count: int, tensor: bool) -> int:
        at = self._number()
        value: Any = np.full(count, at)
        self.known[at] = put(torch.from_numpy(value) if tensor else value), count, at
        value[...] = 0  # changes of the original must not matter
        return at

    @rule(target=values, at=refs, copy=st.sampled_from([None, True]))
    def get(self, at: int, copy: bool | None) -> int:
        ref, count, number = self.known[at]
        return self._enter(get(ref, copy=copy), count, number)

    @rule(target=refs, at=refs)
    def send(self, at: int) -> int:
        ref, count, number = self.known[at]
        arrived, again = _send(ref, ref)
        assert arrived == again == ref
        new = self._number()
        self.known[new] = arrived, count, number
        return new

    @rule(several=st.lists(refs, min_size=1, max_size=4))
    def get_several(self, several: list[int]) -> None:
        found = get([self.known[at][0] for at in several])
        for value, at in zip(found, several, strict=True):
            _, count, number = self.known[at]
            assert np.array_equal(value, np.full(count, number))
            value[...] = 0

    @rule(target=refs, at=values)
    def put_again(self, at: int) -> int:
        value, count, number = self.found[at]
        new = self._number()
        self.known[new] = put(value), count, number
        return new

    @rule(at=values)
    def change(self, at: int) -> None:
        value, count, _ = self.found[at]
        number = self._number()
        value[...] = number
        self.found[at] = value, count, number

    @rule(at=consumes(refs))
    def drop_reference(self, at: int) -> None:
        del self.known[at]

    @rule(at=consumes(values))
    def drop_value(self, at: int) -> None:
        del self.found[at]

    @rule()
    def trim(self) -> None:
        _agent().objects.trim()

    @invariant()
    def all_are_what_they_were(self) -> None:
        for value, count, number in self.found.values():
            assert value.shape == (count,)
            assert value[0] == value[-1] == value[count // 2] == number

    def teardown(self) -> None:
        for value, count, number in self.found.values():
            assert np.array_equal(value, np.full(count, number))
        value = None
        self.known.clear()
        self.found.clear()
        assert not _held()


_run = settings(max_examples=10, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow])


class TestRandomPrograms(Programs.TestCase):  # type: ignore[name-defined,misc]
    settings = _run


@pytest.mark.slow
@pytest.mark.limit(900)
class TestManyRandomPrograms(Programs.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(_run, max_examples=300, stateful_step_count=60)
