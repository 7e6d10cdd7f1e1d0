"""The data-only mode: data arrives as it was sent, and of all known attacks on pickle none runs a step."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime
import decimal
import itertools
import operator
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import actorrpc
import actorrpc.rpc as rpc
from actorrpc.agent import outbound
from actorrpc.errors import (
    ConfigError,
    PeerDiedError,
    ProtocolError,
    RefusedError,
    RemoteError,
    RpcError,
    WrongTypeError,
)
from actorrpc.rpc import Named, allow, exposed
from actorrpc.serialization import codec, data_only, exceptions
from actorrpc.wire.frames import REPLY, REQUEST, pack_frame
from tests.agent.agents import KEY, Stranger, agents
from tests.intruders import payloads, service
from tests.intruders.payloads import FIRED, NONSENSE, PAYLOADS
from tests.layers import rest_is_slow
from tests.ranks import rpc_group

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


sys.addaudithook(_audit)  # it cannot be taken away again; it does nothing but in `_watched`


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """Give what Python reports of commands, code, imports and files meanwhile."""
    global _events
    FIRED.clear()
    _events = found = []
    try:
        yield found
    finally:
        _events = None


@pytest.fixture
def restricted() -> Iterator[None]:
    """Open messages as a data-only worker does."""
    outbound.restrict(1)
    yield
    outbound.restrict(-1)


def _there(value: Any) -> Any:
    """Send a value, so to speak."""
    encoded = codec.encode(value, remote_main=True, known=set(), device_map=None, context=None)
    buffers = [bytearray(span.view()) for span in encoded.spans]
    return codec.decode(encoded.body, buffers, definitions=None)


# -- what is refused ------------------------------------------------------------------------------


def test_there_are_enough_of_them() -> None:
    assert len(PAYLOADS) >= 100
    assert len(set(PAYLOADS.values())) == len(PAYLOADS)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_is_refused_before_it_does_anything(name: str) -> None:
    with _watched() as events, pytest.raises(RefusedError) as caught:
        data_only.loads(PAYLOADS[name])
    assert not FIRED
    assert not events
    assert caught.value.maybe_executed is False


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("os.system", "os.system"),
        ("GLOBAL", "os.system"),
        ("INST, protocol 5", "os.system"),
        ("getattr chain", "builtins.getattr"),
        ("dotted name", "builtins.object.__subclasses__"),
        ("STACK_GLOBAL from the memo", "os.system"),
        ("NEWOBJ of a number", "builtins.complex"),
        ("EXT1", "0x82"),
        ("a call of a function that is exposed", "add"),
        ("a name that is not exposed", "os.system"),
    ],
)
def test_the_error_names_what_is_refused(name: str, says: str) -> None:
    with pytest.raises(RefusedError, match=r"refused|exposed") as caught:
        data_only.loads(PAYLOADS[name])
    assert says in str(caught.value)


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_an_error_and_nothing_else(name: str) -> None:
    with _watched() as events, pytest.raises((ProtocolError, RefusedError)):
        data_only.loads(NONSENSE[name])
    assert not events


@pytest.mark.prints("^fired$")
def test_some_payloads_would_have_run() -> None:
    """The list is not one of duds: pickle runs those whose parts are here."""
    for name in ("operator.call", "the canary itself", "STACK_GLOBAL from the memo", "functools.reduce"):
        with _watched() as events:
            pickle.loads(PAYLOADS[name])
        assert FIRED or any(event.startswith("os.system") for event in events), name


def test_an_extension_that_pickle_has_seen_is_refused() -> None:
    """Python's unpickler asks nobody about an extension that it has used before."""
    FIRED.clear()
    copyreg.add_extension(payloads.__name__, "fire", 0x77)
    try:
        pickle.loads(b"\x80\x05\x82\x77.")
        with pytest.raises(RefusedError, match="0x82"):
            data_only.loads(b"\x80\x05\x82\x77)R.")
    finally:
        copyreg.remove_extension(payloads.__name__, "fire", 0x77)
    assert not FIRED


def test_nothing_is_imported_for_a_name(restricted: None) -> None:
    before = set(sys.modules)
    with pytest.raises(RefusedError, match=r"antigravity\.geohash"):
        data_only.loads(b"\x80\x05\x8c\x0bantigravity\x8c\x07geohash\x93.")
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "value",
    [
        print,
        operator.add,
        torch.add,
        lambda: 1,
        service.hidden,
        int,
        ValueError,
        np.ndarray,
        types.SimpleNamespace(x=1),
        service.Secret(1),
        np.array([print], dtype=object),
        np.zeros(2, dtype=[("x", "f8")]),
        torch.nn.Linear(1, 1),
        pytest,
        {"x": [(1, print)]},
        RemoteError,
        [dict],
    ],
    ids=lambda value: type(value).__name__ + "-" + getattr(value, "__name__", ""),
)
def test_what_is_no_data_does_not_arrive(restricted: None, value: Any) -> None:
    with pytest.raises(RpcError) as caught:
        _there((value,))
    assert isinstance(caught.value, (RefusedError, ProtocolError))


def test_random_changes_of_messages_are_errors_or_data(restricted: None) -> None:
    """Flipped, cut and mixed: what comes out is data, or one of two errors."""
    rng = random.Random(20260)
    whole = [codec.dumps(value) for value in (_all_kinds(), [service.Point(1, 2)], ValueError("x"))]
    whole += list(PAYLOADS.values())
    with _watched() as events:
        for _ in range(6000):
            data = bytearray(rng.choice(whole))
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(len(data))
                kind = rng.randrange(4)
                if kind == 0:
                    data[at] ^= 1 << rng.randrange(8)
                elif kind == 1:
                    data[at] = rng.randrange(256)
                elif kind == 2:
                    other = rng.choice(whole)
                    start = rng.randrange(len(other))
                    data[at:at] = other[start : start + rng.randrange(40)]
                else:
                    del data[at : at + rng.randrange(1, 5)]
                if not data:
                    break
            with contextlib.suppress(ProtocolError, RefusedError):
                data_only.loads(bytes(data))
    assert not FIRED
    assert not events


# -- what arrives -----------------------------------------------------------------------------------


def _all_kinds() -> list[Any]:
    return [
        *(None, True, False, 0, -1, 255, 2**31, -(2**31), 2**63, -(2**200), 1.5, float("inf"), 1j),
        *("", "x" * 300, "\ud800", b"", b"y" * 300, bytearray(b"z"), range(1, 9, 2), slice(1, None)),
        [1, [2, [3]]],
        (1, (2, (3, (4, 5, 6, 7)))),
        {"a": {1: {(1, 2): None}}},
        {1, 2},
        frozenset({(1, 2), 3}),
        collections.OrderedDict(a=1, b=2),
        collections.deque([1, 2], 3),
        decimal.Decimal("1.20"),
        datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "X")),
        datetime.date(2026, 1, 2),
        datetime.time(1, 2),
        torch.float16,
        torch.Size([1, 2]),
        torch.device("cpu"),
        rpc.WorkerInfo("a", 1),
        service.Point(1, 2),
        service.Bag([1]),
        service.Pair(1, service.Pair(2, 3)),
        service.Colour.BLUE,
    ]


def test_data_arrives_as_it_was_sent(restricted: None) -> None:
    values = _all_kinds()
    found = _there(values)
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]
    assert repr(found[-5]) == repr(values[-5])


def test_what_is_the_same_object_stays_one(restricted: None) -> None:
    inner: list[Any] = [1]
    inner.append(inner)
    found = _there((inner, {"x": inner}))
    assert found[0] is found[1]["x"] is found[0][1]


@pytest.mark.parametrize("size", [1, 100, 100_000])
def test_memory_arrives(restricted: None, size: int) -> None:
    torch.manual_seed(size)
    tensor = torch.randn(size, 3)
    array = np.arange(size * 2, dtype=">i4").reshape(size, 2)
    values = {
        "tensor": tensor,
        "view": tensor[:, 1],
        "parameter": torch.nn.Parameter(tensor.clone()),
        "whole": tensor.to(torch.int64),
        "bytes": b"x" * size,
        "text": "y" * size,
        "array": array,
        "slice": array[:, ::2],
        "fortran": np.asfortranarray(array),
        "scalar": np.float32(size),
        "texts": np.array(["a", "bcd"]),
        "flags": np.array([True, False]),
    }
    found = _there(values)
    for name, value in values.items():
        assert type(found[name]) is type(value), name
        equal = torch.equal if isinstance(value, torch.Tensor) else np.array_equal
        assert equal(found[name], value), name
    assert found["tensor"].untyped_storage().data_ptr() == found["view"].untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors_arrive(restricted: None) -> None:
    for value in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        assert torch.equal(_there(value).to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x", 1),
        OSError(2, "no"),
        KeyError((1, 2)),
        PeerDiedError("gone", maybe_executed=True, worker="w"),
    ],
)
def test_errors_arrive_as_what_they_are(restricted: None, error: Exception) -> None:
    error.add_note("a note")
    found = exceptions.load(exceptions.dump(error, worker="w", dumps=codec.dumps), loads=codec.loads)
    assert isinstance(found, type(error))
    assert isinstance(found, RpcError)
    assert found.args == error.args
    assert "a note" in found.__notes__


def test_an_error_of_an_unknown_class_arrives_as_text(restricted: None) -> None:
    class Own(Exception):
        pass

    found = exceptions.load(exceptions.dump(Own("why"), worker="w", dumps=codec.dumps), loads=codec.loads)
    assert type(found) is RemoteError
    assert "why" in str(found)


# -- what users register ------------------------------------------------------------------------------


def test_functions_and_classes_are_told_apart() -> None:
    with pytest.raises(WrongTypeError, match="allow"):
        exposed(service.Secret)
    with pytest.raises(WrongTypeError, match="exposed"):
        allow(service.add)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="name"):
        exposed(lambda: 1)
    with pytest.raises(ConfigError, match="already"):
        exposed(name="same/1")(service.hidden)
    with pytest.raises(WrongTypeError, match="str"):
        exposed(name=3)(service.hidden)  # type: ignore[call-overload]
    with pytest.raises(WrongTypeError, match="called"):
        allow(type("Calls", (), {"__call__": print}))
    with pytest.raises(WrongTypeError, match="called"):
        allow(type)


def test_a_name_finds_the_function() -> None:
    assert Named("same/1")(3) == 3
    assert Named("tests.intruders.service.add")(1, 2) == 3
    assert pickle.loads(pickle.dumps(Named("same/1"))) is service.same
    with pytest.raises(RefusedError, match="nobody"):
        Named("nobody")()


def test_a_slot_of_a_class_is_no_way_out(restricted: None) -> None:
    """State with other attributes than plain ones is refused, in objects that may have state, too."""
    body = b"\x80\x05\x8c\x17tests.intruders.service\x8c\x03Bag\x93)\x81}\x8c\x09__class__Nsb."
    with pytest.raises(ProtocolError, match="__class__"):
        data_only.loads(body)


def test_the_mode_ends_with_the_last_agent_that_wants_it() -> None:
    def foreign() -> bool:
        try:
            return bool(codec.loads(pickle.dumps(operator.add)) is operator.add)
        except RefusedError:
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
    return exceptions.load(frame.body, loads=pickle.loads) if frame.kind == 3 else pickle.loads(frame.body)


def test_a_cluster_cannot_be_data_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_DATA_ONLY", "1")
    with pytest.raises(ConfigError, match="exposed"):
        actorrpc.init()


def test_a_peer_that_sends_payloads_gets_errors_and_is_served_on() -> None:
    """An authenticated peer, every payload as the body of a call, and as its function."""
    with agents(1, key=KEY, data_only=True) as (worker,):
        stranger = Stranger(worker)
        stranger.shake_hands()
        stranger.introduce()
        with _watched() as events:
            for name, body in {**PAYLOADS, **NONSENSE}.items():
                if body:
                    error = _ask(stranger, body)
                    assert isinstance(error, RpcError), name
            names = (
                (operator.add, (1, 1), {}),
                (print, (), {}),
                (service.hidden, (), {}),
                (ValueError, (), {}),
            )
            for call in names:
                assert isinstance(_ask(stranger, pickle.dumps(call, 5)), RefusedError), call
        assert not FIRED
        events = [
            event for event in events if not event.startswith(("open", "import", "compile"))
        ]  # our tracebacks'
        assert not [event for event in events if "find_class" not in event]
        assert _ask(stranger, pickle.dumps((service.add, (1, 2), {}), 5)) == 3
        assert _ask(stranger, pickle.dumps((Named("same/1"), ([1],), {}), 5)) == [1]
        stranger.close()


def test_a_reply_is_data_as_well() -> None:
    """A service cannot do to a data-only caller what the caller cannot do to it."""
    with agents(2, key=KEY, data_only=True) as (caller, server):
        conn = caller.links.connect(caller.peer("a1"), float("inf"), "x")
        original = server.executor.answer

        def answer(conn: Any, id: int, value: Any, execution: Any, keep: Any = None) -> None:
            conn.outbox.append(pack_frame(REPLY, id, PAYLOADS["the canary itself"]))

        server.executor.answer = answer  # type: ignore[method-assign]
        call = caller.call(caller.peer("a1"), service.add, (1, 2), {}, 0)
        with pytest.raises(RefusedError, match="fire"):
            call.result()
        server.executor.answer = original  # type: ignore[method-assign]
        assert caller.call(caller.peer("a1"), service.add, (1, 2), {}, 0).result() == 3
        assert not conn.broken
        assert not FIRED


def _refused(to: str, function: Callable[..., Any], *args: Any) -> bool:
    try:
        rpc.rpc_sync(to, function, args)
    except RefusedError:
        return True
    return False


def _serve(rank: int, world_size: int) -> Any:
    other = f"worker{1 - rank}"
    tensor = torch.ones(100_000)
    found: dict[str, Any] = {
        "sum": rpc.rpc_sync(other, service.add, (tensor, tensor)).sum().item(),
        "named": rpc.rpc_async(other, Named("same/1"), (service.Point(1, 2),)).wait(),
        "function": rpc.rpc_sync(other, service.same, (service.add,)) is service.add,
        "hidden": _refused(other, service.hidden),
        "lambda": _refused(other, lambda: 1),
        "builtin": _refused(other, operator.add, 1, 1),
        "itself": _refused(f"worker{rank}", operator.add, 1, 1),
        "bound": _refused(other, tensor.sum),
    }
    try:
        rpc.rpc_sync(other, service.fail, ("why",))
    except ValueError as error:
        found["error"] = (isinstance(error, RemoteError), str(error))
    kept = rpc.remote(other, service.add, ([1], [2]))
    found["rref"] = kept.to_here()
    found["held"] = rpc.rpc_sync(other, service.same, (kept,)).to_here()
    try:
        kept.rpc_sync().append(3)
    except RefusedError:
        found["proxy"] = True
    try:
        creation = rpc.remote(other, service.hidden)._creation
        assert creation is not None
        creation.wait()
    except RefusedError:
        found["remote"] = True
    return found


@pytest.mark.parametrize("lane", rest_is_slow(["0", "1"]))
def test_a_group_of_data_only_workers(monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    monkeypatch.setenv("ACTORRPC_DATA_ONLY", "1")
    monkeypatch.setenv("ACTORRPC_LANE", lane)
    expected = {
        "sum": 200_000.0,
        "named": service.Point(1, 2),
        "error": (True, "why"),
        "rref": [1, 2],
        "held": [1, 2],
        **dict.fromkeys(
            ("function", "hidden", "lambda", "builtin", "itself", "bound", "proxy", "remote"), True
        ),
    }
    for found in rpc_group(_serve, 2):
        assert found == expected


def _ordinary(rank: int, world_size: int) -> bool:
    return bool(
        data_only.is_allowed(service.Point)
        and outbound._loads is pickle.loads
        and rpc.rpc_sync(f"worker{1 - rank}", operator.add, (1, 1)) == 2
    )


@pytest.mark.slow
def test_without_the_mode_nothing_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACTORRPC_DATA_ONLY", raising=False)
    assert rpc_group(_ordinary, 2) == [True, True]
