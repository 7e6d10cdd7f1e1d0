"""The data-only mode: data arrives unchanged; messages that would run code, or have false sizes, are refused without effect."""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import itertools
import math
import operator
import pickle
import random
import struct
import sys
import tracemalloc
import types
import zoneinfo
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import actorrpc
import actorrpc.rpc as rpc
from actorrpc import errors
from actorrpc.agent import outbound
from actorrpc.rpc import Named, allow, exposed
from actorrpc.serialization import codec, data_only, exceptions
from actorrpc.transport.stream import CLOSED
from actorrpc.wire.frames import FAILURE, REPLY, REQUEST, Frame, pack_frame
from tests.agent.agents import KEY, Stranger, agents
from tests.intruders import payloads, service
from tests.intruders.mutations import mutate
from tests.intruders.payloads import DANGEROUS, FIRED, NONSENSE, PAYLOADS, PICKLES, Kind, body, row
from tests.ranks import run_group, unused_path

_WATCHED = (
    "exec",
    "import",
    "open",
    "compile",
    "os.",
    "subprocess.",
    "socket.",
    "shutil.",
    "ctypes.",
    "pickle.find_class",
)
_events: list[str] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _events is not None and event.startswith(_WATCHED):
        _events.append(f"{event} {args!r:.200}")


sys.addaudithook(_audit)  # cannot be removed; it has an effect only within `_watched`


@pytest.fixture(autouse=True)
def _nothing_has_fired() -> None:
    FIRED.clear()


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """Yield a list that receives Python's audit events of commands, code, imports and files."""
    global _events
    _events = found = []
    try:
        yield found
    finally:
        _events = None


@pytest.fixture
def restricted() -> Iterator[None]:
    """Decode messages as a data-only worker does."""
    codec.restrict(1)
    yield
    codec.restrict(-1)


def _trip(value: Any) -> Any:
    """Encode and decode a value."""
    encoded = codec.encode(value, remote_main=None)
    buffers = [bytearray(span.view()) for span in encoded.spans]
    return codec.decode(encoded.body, buffers, definitions=None)


# -- refused messages -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_malicious_payload_is_refused_without_any_effect(name: str) -> None:
    with _watched() as events, pytest.raises(errors.RefusedError) as caught:
        data_only.loads(PAYLOADS[name])
    assert not FIRED
    assert not events
    assert caught.value.maybe_executed is False
    assert len(str(caught.value)) < 500


def test_dangerous_names_are_refused_in_every_form() -> None:
    """As a function, as a class created with or without its constructor, as an exception, and as a kind of data."""
    known = {
        ("tests.intruders.service.add", "function"),
        ("same/1", "function"),
        ("builtins.ValueError", "exception"),
        ("actorrpc.rpc.rref._rebuild", "kind"),
    }
    empty = Kind("dict")
    with _watched() as events:
        for name, values in DANGEROUS.items():
            args = Kind("tuple", *values)
            forms = {
                "function": Kind("function", name),
                "called": Kind("object", name, False, args, None),
                "made": Kind("object", name, True, args, Kind("dict", "x", 1)),
                "exception": Kind("exception", name, args, args, empty, empty),
                "kind": Kind(name, *values),
            }
            for form, value in forms.items():
                if (name, form) not in known:
                    with pytest.raises(errors.RefusedError):
                        data_only.loads(row(value))
    assert not FIRED
    assert not events


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a call of os.system", r"os\.system is refused"),
        ("the function os.system", r"os\.system is refused.*exposed\(\)"),
        ("the exception os.system", r"os\.system is refused.*allow\(\)"),
        ("a numpy array of objects", r"'\|O' is refused"),
    ],
)
def test_the_error_names_the_refused_object_and_the_remedy(name: str, says: str) -> None:
    with pytest.raises(errors.RefusedError, match=says):
        data_only.loads(PAYLOADS[name])


@pytest.mark.parametrize("name", NONSENSE)
def test_malformed_messages_raise_without_allocating_memory(name: str) -> None:
    data = NONSENSE[name]
    tracemalloc.start()
    try:
        with _watched() as events, pytest.raises(errors.ProtocolError):
            data_only.loads(data)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()
    assert not events


def test_truncated_messages_raise_protocol_error() -> None:
    whole = data_only.dumps([1.5, "text", b"bytes", {"x": (2**40, 2**100)}, service.Point(1, 2)], {})
    for end in range(len(whole)):
        with pytest.raises(errors.ProtocolError):
            data_only.loads(whole[:end])


def _reply(body: bytes) -> Frame:
    return Frame(REPLY, 0, 1, math.inf, 0, b"", body)


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_are_refused_even_if_they_contain_only_data(restricted: None, name: str) -> None:
    """In every function that decodes messages."""
    assert pickle.loads(PICKLES["the canary"]) == "fired"
    FIRED.clear()
    with agents(1, data_only=True) as (agent,), _watched() as events:
        for opens in (codec.loads, lambda data: outbound.opened(agent, None, _reply(data), agent.self_peer)):
            with pytest.raises((errors.RefusedError, errors.ProtocolError)):
                opens(PICKLES[name])
        with pytest.raises((errors.RefusedError, errors.ProtocolError)):
            codec.decode(PICKLES[name], [bytearray(10)], definitions=agent.self_peer.definitions)
    assert not FIRED
    assert not [
        event for event in events if not event.startswith(("socket.", "os.", "open"))
    ]  # events of the agent


_HEAD = struct.Struct("<QIIIIIB")


def _about(tensor: torch.Tensor, *args: Any, name: str = "tensor") -> Any:
    """Decode a message with the memory of a tensor and the given, possibly false, description of it."""
    encoded = codec.encode(tensor, remote_main=None)
    length, *rest = _HEAD.unpack_from(encoded.body, len(encoded.body) - _HEAD.size)
    description = row(Kind(name, *args))
    whole = description + encoded.body[length : -_HEAD.size] + _HEAD.pack(len(description), *rest)
    return codec.decode(whole, [bytearray(span.view()) for span in encoded.spans], definitions=None)


@pytest.mark.parametrize("count", [4, 10_000])
def test_a_tensor_with_a_false_description_of_its_memory_is_refused(count: int) -> None:
    float32 = 6
    tensor = torch.arange(float(count))
    assert torch.equal(_about(tensor, 0, float32, 0, count, 1), tensor)
    for false_description in (
        # The index of the memory:
        *((1, float32, 0, count, 1), (-1, float32, 0, count, 1), ("cpu", float32, 0, count, 1)),
        *((0, 99, 0, count, 1), (0, float32 + 1, 0, count, 1)),  # the dtype
        *((0, float32, 1, count, 1), (0, float32, -1, count, 1), (0, float32, 1 << 62, 1, 1)),  # the offset
        *((0, float32, 0, count + 1, 1), (0, float32, 0, 1 << 62, 1), (0, float32, 0, -count, 1)),  # the size
        *((0, float32, 0, 2, count), (0, float32, 0, 2, -1), (0, float32, 0, 2, 1 << 62)),  # the stride
        (0, float32, 0, 1 << 32, 1 << 32, 0, 1),
        *((0, float32, 0, count), (0, float32, 0, count, 1, 1), ()),
        (0, float32, 0, str(count), 1),
        (0, float32 | 1 << 8, 0, count, 1),  # conjugate, but not complex
    ):
        with pytest.raises(errors.ProtocolError):
            _about(tensor, *false_description)
    far = Kind("tuple", 0, 4, 0, 1, 1, 1, 1), Kind("tuple", 0, float32, 0, 1, 1), Kind("tuple", 1 << 40)
    with pytest.raises(errors.ProtocolError, match="found index"):
        _about(tensor + 1e9, *far, False, False, name="sparse_coo")
    for index in (1, -2, "x", 0.0):
        with pytest.raises(errors.ProtocolError):
            _about(tensor, index, name="untyped_storage")
    with pytest.raises(errors.ProtocolError):
        _about(tensor, 0, 99, name="typed_storage")


@pytest.mark.parametrize(
    "value",
    [
        operator.add,
        lambda: 1,
        service.hidden,
        int,
        types.SimpleNamespace(x=1),
        service.Secret(1),
        np.array([print], dtype=object),
        np.zeros(2, dtype=[("x", "f8")]),
        torch.nn.Linear(1, 1),
        pytest,
        {"x": [(1, print)]},
        ...,
        iter([1]),
        torch.ones(1).sum,
        datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    ],
    ids=lambda value: type(value).__name__ + "-" + getattr(value, "__name__", ""),
)
def test_values_that_are_no_data_are_refused(restricted: None, value: Any) -> None:
    with pytest.raises(errors.RefusedError, match=r"takes data only|is refused"):
        _trip((value,))


def test_cyclic_or_too_deep_values_are_refused_by_the_sender(restricted: None) -> None:
    itself: list[Any] = [1]
    itself.append((itself, {"x": itself}))
    deep: Any = 1
    for _ in range(data_only.MAX_DEPTH):
        deep = [deep]
    assert _trip(deep) == deep
    for value in (itself, [deep]):
        with pytest.raises(
            errors.RefusedError, match="a list that is nested deeper than 100, or part of itself"
        ):
            codec.encode(value, remote_main=None)
    error = ValueError("round")
    error.args = (error,)
    found = exceptions.load(exceptions.dump(error, worker="w", dumps=codec.dumper(None)), loads=codec.loads)
    assert isinstance(found, errors.RemoteError)


def test_randomly_changed_messages_raise_typed_errors_or_decode_to_data() -> None:
    """With flipped, cut and mixed bytes."""
    rng = random.Random(20260)
    whole = [data_only.dumps(value, {}) for value in (_all_kinds(), [service.Point(1, 2)], ValueError("x"))]
    whole += [*PAYLOADS.values(), *NONSENSE.values()]
    whole = [each for each in whole if 0 < len(each) < 10_000]
    with _watched() as events:
        for _ in range(3000):
            with contextlib.suppress(errors.ProtocolError, errors.RefusedError):
                data_only.loads(mutate(rng, rng.choice(whole), whole))
    assert not FIRED
    assert not events


# -- accepted messages ------------------------------------------------------------------------------


def _all_kinds() -> list[Any]:
    return [
        *(None, True, False, 1.5, float("inf"), 1j),
        *(0, -1, 255, 2**31, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, -(2**200)),
        *("", "x" * 300, "\ud800", b"", b"y" * 300, bytearray(b"z"), range(1, 9, 2), slice(1, None)),
        [1, [2, [3]]],
        (1, (2, (3, (4, 5, 6, 7)))),
        {"a": {1: {(1, 2): None}}},
        {1, 2},
        frozenset({(1, 2), 3}),
        collections.OrderedDict(a=1, b=2),
        collections.deque([1, 2], 3),
        collections.deque(),
        decimal.Decimal("1.20"),
        datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "X")),
        datetime.date(2026, 1, 2),
        datetime.time(1, 2),
        torch.float16,
        torch.Size([1, 2]),
        torch.device("cpu"),
        torch.device("cuda", 1),
        service.add,
        rpc.WorkerInfo("a", 1),
        service.Point(1, 2),
        service.Bag([1]),
        service.Pair(1, service.Pair(2, 3)),
        service.Colour.BLUE,
        service.Shade.LIGHT,
    ]


def test_data_of_every_kind_arrives_equal(restricted: None) -> None:
    values = _all_kinds()
    found = _trip(values)
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]
    inner = [1]
    once, again = _trip((inner, {"x": inner}))
    assert once == again["x"] == inner
    assert once is not again["x"]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x", 1),
        OSError(2, "no"),
        KeyError((1, 2)),
        errors.PeerDiedError("gone", maybe_executed=True, worker="w"),
    ],
)
def test_builtin_exceptions_arrive_with_their_class_and_notes(restricted: None, error: Exception) -> None:
    error.add_note("a note")
    found = exceptions.load(exceptions.dump(error, worker="w", dumps=codec.dumper(None)), loads=codec.loads)
    assert isinstance(found, type(error))
    assert isinstance(found, errors.RpcError)
    assert found.args == error.args
    assert "a note" in found.__notes__


# -- exposed() and allow() ----------------------------------------------------------------------------


def test_exposed_and_allow_refuse_wrong_objects() -> None:
    with pytest.raises(errors.WrongTypeError, match="allow"):
        exposed(service.Secret)
    with pytest.raises(errors.WrongTypeError, match="exposed"):
        allow(service.add)  # type: ignore[type-var]
    with pytest.raises(errors.ConfigError, match="name"):
        exposed(lambda: 1)
    with pytest.raises(errors.ConfigError, match="already"):
        exposed(name="same/1")(service.hidden)
    with pytest.raises(errors.WrongTypeError, match="str"):
        exposed(name=3)(service.hidden)  # type: ignore[call-overload]
    with pytest.raises(errors.WrongTypeError, match="called"):
        allow(type("Calls", (), {"__call__": print}))
    with pytest.raises(errors.WrongTypeError, match="called"):
        allow(type)


def test_named_calls_the_exposed_function_of_its_name() -> None:
    assert Named("same/1")(3) == 3
    assert Named("tests.intruders.service.add")(1, 2) == 3
    assert pickle.loads(pickle.dumps(Named("same/1"))) is service.same
    with pytest.raises(errors.RefusedError, match="nobody"):
        Named("nobody")()


def test_the_data_only_mode_ends_with_the_last_data_only_agent() -> None:
    def foreign() -> bool:
        try:
            return bool(codec.loads(pickle.dumps(operator.add)) is operator.add)
        except errors.RefusedError:
            return False

    with agents(1, data_only=True):
        with agents(1, data_only=True), agents(1):
            assert not foreign()
        assert not foreign()
    assert foreign()


# -- a service -----------------------------------------------------------------------------------------


_numbers = itertools.count(1)


def _ask(stranger: Stranger, body: bytes, kind: int = REQUEST) -> Any:
    stranger.sock.sendall(pack_frame(kind, next(_numbers), body))
    (frame, *_) = stranger.frames()
    if frame.kind == FAILURE:
        return exceptions.load(frame.body, loads=pickle.loads)
    return pickle.loads(frame.body)  # the stranger is not data-only, so it gets pickles


def _request(*call: Any) -> bytes:
    return codec.dumps(call, remote_main=None)


def test_init_refuses_the_data_only_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_DATA_ONLY", "1")
    with pytest.raises(errors.ConfigError, match="exposed"):
        actorrpc.init()


def test_a_peer_that_sends_payloads_gets_errors_and_is_still_served() -> None:
    """An authenticated peer sends every payload as the body of a call, and calls functions that are not exposed."""
    with agents(1, key=KEY, data_only=True) as (worker,):
        stranger = Stranger(worker)
        stranger.shake_hands()
        stranger.introduce()
        with _watched() as events:
            for name, data in {**PAYLOADS, **NONSENSE}.items():
                if data:
                    assert isinstance(
                        _ask(stranger, body(data)), (errors.RefusedError, errors.ProtocolError)
                    ), name
            for name, data in PICKLES.items():
                assert isinstance(_ask(stranger, data), (errors.RefusedError, errors.ProtocolError)), name
            for function in (operator.add, print, service.hidden):
                assert isinstance(_ask(stranger, _request(function, (1, 1), {})), errors.RefusedError), (
                    function
                )
            assert isinstance(
                _ask(stranger, body(row(Kind("tuple", "same/1", Kind("tuple"), Kind("dict"))))), TypeError
            )
        assert not FIRED
        # Without the events of formatting tracebacks.
        events = [event for event in events if not event.startswith(("open", "import", "compile", "pickle."))]
        assert not events
        assert _ask(stranger, _request(service.add, (1, 2), {})) == 3
        assert _ask(stranger, _request(Named("same/1"), ([1],), {})) == [1]
        stranger.close()


def test_a_data_only_caller_refuses_payloads_in_replies() -> None:
    with agents(2, key=KEY, data_only=True) as (caller, server):
        conn = caller.connector.connect(caller.peer("a1"), float("inf"), "x")
        original = server.executor.answer

        replies = [body(PAYLOADS[f"a call of {payloads.__name__}.fire"]), PICKLES["the canary"]]

        def answer(execution: Any, value: Any, keep: Any = None) -> None:
            execution.conn.outbox.append(pack_frame(REPLY, execution.id, replies.pop()))

        server.executor.answer = answer  # type: ignore[method-assign]
        while replies:
            with pytest.raises(errors.RefusedError, match=r"fire|a pickle"):
                caller.call_sync(caller.peer("a1"), service.add, (1, 2), {}, 0)
        server.executor.answer = original  # type: ignore[method-assign]
        assert caller.call_sync(caller.peer("a1"), service.add, (1, 2), {}, 0) == 3
        assert conn.state is not CLOSED
        assert not FIRED


def _refused(to: str, function: Callable[..., Any], *args: Any) -> bool:
    try:
        rpc.rpc_sync(to, function, args)
    except errors.RefusedError:
        return True
    return False


def test_an_ordinary_worker_sends_errors_as_data_to_a_data_only_caller() -> None:
    """Errors of late, malformed and failed calls, and of results that cannot be sent."""
    with agents(1, key=KEY, max_message=1 << 20, chunk=1 << 16) as (worker,):
        stranger = Stranger(worker)
        stranger.record = replace(stranger.record, data_only=True)
        stranger.shake_hands()
        stranger.introduce()
        whole = _request(service.fail, ("why",), {})
        for request, remaining, expected in (
            (whole, -1.0, errors.RpcTimeoutError),
            (whole, float("inf"), ValueError),
            (body(row(Kind("list", count=3))), float("inf"), errors.ProtocolError),
            (_request(service.give, (), {}), float("inf"), errors.SerializationError),
            (_request(service.grow, (2 << 20,), {}), float("inf"), errors.LimitError),
        ):
            stranger.sock.sendall(pack_frame(REQUEST, next(_numbers), request, remaining=remaining))
            (frame,) = stranger.frames()
            codec.restrict(1)
            try:
                assert isinstance(exceptions.load(frame.body, loads=codec.loads), expected)
            finally:
                codec.restrict(-1)
        stranger.close()


def _mixed(rank: int, world_size: int, method: str) -> dict[str, Any]:
    """Rank 0 is data-only, rank 1 is not."""
    options = rpc.RpcBackendOptions(init_method=method, data_only=rank == 0)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    other = f"worker{1 - rank}"
    tensor = torch.ones(100_000)
    found: dict[str, Any] = {
        "sum": rpc.rpc_sync(other, service.add, (tensor, tensor)).sum().item(),
        "numbers": rpc.rpc_sync(other, service.add, (1, 2)),
        "named": rpc.rpc_async(other, Named("same/1"), (service.Point(1, 2),)).wait(),
        "rref": rpc.remote(other, service.add, ([1], [2])).to_here(),
        "hidden": _refused(other, service.hidden),
        "lambda": _refused(other, lambda: 1),
        "class": _refused(other, service.same, service.Secret(1)),
    }
    try:
        rpc.rpc_sync(other, service.fail, ("why",))
    except ValueError as error:
        found["error"] = str(error)
    try:
        rpc.rpc_sync(other, service.complain)
    except errors.RemoteError as error:
        found["own"] = isinstance(error, service.Complaint)
    kept = rpc.remote(other, service.complain)
    try:
        kept.to_here()
    except errors.RemoteError as error:
        found["kept"] = "why" in str(error)
    rpc.shutdown()
    return found


def test_a_data_only_and_an_ordinary_worker_call_each_other() -> None:
    """The data-only worker may still call any function of the ordinary worker."""
    data, ordinary = run_group(_mixed, 2, f"file://{unused_path('data-only')}")
    expected = {
        "sum": 200_000.0,
        "numbers": 3,
        "named": service.Point(1, 2),
        "rref": [1, 2],
        "error": "why",
        "class": True,
        "kept": True,
    }
    assert ordinary == {**expected, "hidden": True, "lambda": True, "own": True}
    assert data == {**expected, "hidden": False, "lambda": False, "own": False}
