"""Mutual authentication: it completes only between two holders of the key, even if bytes are changed in transit."""

from __future__ import annotations

import ast
import hashlib
import importlib
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from actorrpc.errors import AuthenticationError, ConfigError, LimitError, ProtocolError, VersionError
from actorrpc.wire import handshake, identity
from actorrpc.wire.handshake import MAX_MESSAGE, Acceptor, Dialler, Purpose, Refusal, Session

KEY = hashlib.sha256(b"the key").digest()
OTHER = hashlib.sha256(b"another key").digest()
INC_A, INC_B, INC_C = "a" * 32, "b" * 32, "c" * 32


@pytest.fixture(autouse=True)
def _no_pickle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test if a handshake unpickles."""

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a handshake reached pickle")

    with monkeypatch.context() as patch:
        for name in ("loads", "load", "Unpickler"):
            patch.setattr(pickle, name, forbidden)
        yield


def dialler(**changes: Any) -> Dialler:
    return Dialler(**{"name": "alice", "incarnation": INC_A, "key": KEY, **changes})


def acceptor(**changes: Any) -> Acceptor:
    return Acceptor(**{"name": "bob", "incarnation": INC_B, "key": KEY, **changes})


def run(one: Dialler, two: Acceptor, piece: int = MAX_MESSAGE) -> None:
    """Carry bytes between both sides, in pieces, until none are left."""
    to_two, to_one = one.start(), b""
    while to_two or to_one:
        assert len(to_two) <= MAX_MESSAGE >= len(to_one)
        sent, to_two = to_two[:piece], to_two[piece:]
        if sent:
            to_one += two.feed(sent)
        sent, to_one = to_one[:piece], to_one[piece:]
        if sent:
            to_two += one.feed(sent)


@pytest.mark.parametrize("piece", [1, 2, 7, 100, MAX_MESSAGE])
@pytest.mark.parametrize("names", [("alice", "bob"), ("a", "b"), ("x" * 127, "y" * 127)])
def test_two_sides_with_the_same_key_agree_on_a_session(piece: int, names: tuple[str, str]) -> None:
    token = bytes(range(16))
    one = dialler(
        name=names[0], peer_name=names[1], peer_incarnation=INC_B, purpose=Purpose.RESUME, attach=token
    )
    two = acceptor(name=names[1])
    assert not one.done
    run(one, two, piece)
    assert one.done
    assert two.done
    mine, theirs = one.result, two.result
    assert (mine.peer_name, mine.peer_incarnation) == (names[1], INC_B)
    assert (theirs.peer_name, theirs.peer_incarnation) == (names[0], INC_A)
    assert mine.purpose is theirs.purpose is Purpose.RESUME
    assert mine.attach == theirs.attach == token
    assert mine.version == theirs.version == handshake.VERSIONS[1]
    assert mine.key == theirs.key
    assert len(mine.key) == 32


def test_each_connection_has_its_own_session_key_and_token() -> None:
    sessions = []
    for _ in range(20):
        one, two = dialler(), acceptor()
        run(one, two)
        sessions.append(one.result)
        assert two.result.attach == one.result.attach
    assert len({session.key for session in sessions}) == len({session.attach for session in sessions}) == 20
    assert KEY not in {session.key for session in sessions}


def test_a_dialler_reads_no_bytes_beyond_the_handshake() -> None:
    one, two = dialler(), acceptor()
    sent = two.feed(one.start())
    while not one.done:
        wanted = one.wanted
        assert wanted > 0
        taken, sent = sent[:wanted], sent[wanted:]
        answer = one.feed(taken)
        if answer:
            sent += two.feed(answer) + b"what follows"
    assert sent == b"what follows"
    with pytest.raises(ProtocolError, match="finished"):
        one.feed(b"more")


def test_surplus_bytes_during_the_handshake_are_refused() -> None:
    for extra in (1, 10_000):
        one, two = dialler(), acceptor()
        welcome = two.feed(one.feed(two.feed(one.start())))
        with pytest.raises(ProtocolError, match=f"sent {extra} bytes before their turn"):
            one.feed(welcome + bytes(extra))


def test_repr_of_handshake_objects_shows_no_secrets() -> None:
    one, two = dialler(), acceptor()
    run(one, two)
    for shown in (repr(one), repr(two), repr(one.result), str(two.result)):
        assert repr(KEY)[2:-1] not in shown
        assert repr(one.result.key)[2:-1] not in shown
        assert one.result.key.hex() not in shown


def test_reading_the_result_before_the_end_raises() -> None:
    one = dialler()
    with pytest.raises(ProtocolError):
        _ = one.result
    with pytest.raises(ProtocolError):
        one.feed(b"x")
    one.start()
    with pytest.raises(ProtocolError):
        one.start()


# -- the wrong key ---------------------------------------------------------------------------------


def test_a_dialler_with_a_wrong_key_is_refused_for_good() -> None:
    one, two = dialler(key=OTHER), acceptor()
    auth = one.feed(two.feed(one.start()))
    with pytest.raises(AuthenticationError, match=r"'alice'.*'bob'.*ACTORRPC_KEY"):
        two.feed(auth)
    assert not two.done
    with pytest.raises(AuthenticationError, match=r"refused worker 'alice'.*ACTORRPC_KEY"):
        one.feed(two.refusal)
    assert one.refused is Refusal.KEY
    for side in (one, two):
        with pytest.raises(AuthenticationError):  # permanently
            side.feed(b"x")


@pytest.mark.parametrize("binding", [(b"x", b"y"), (b"", b"y"), (b"x", b"")])
def test_different_channel_bindings_are_refused(binding: tuple[bytes, bytes]) -> None:
    with pytest.raises(AuthenticationError):
        run(dialler(binding=binding[0]), acceptor(binding=binding[1]))
    run(dialler(binding=binding[0]), acceptor(binding=binding[0]))


def test_a_missing_key_needs_insecure_true() -> None:
    for make in (dialler, acceptor):
        with pytest.raises(ConfigError, match="ACTORRPC_KEY"):
            make(key=b"")
        with pytest.raises(ConfigError):
            make(key=b"short")
        with pytest.raises(ConfigError):
            make(key=b"short", insecure=True)
    one, two = dialler(key=b"", insecure=True), acceptor(key=b"", insecure=True)
    run(one, two)
    assert one.result.key == two.result.key


def test_a_side_with_a_key_refuses_a_side_without_one() -> None:
    one, two = dialler(key=b"", insecure=True), acceptor(insecure=True)
    with pytest.raises(AuthenticationError, match="'bob' has a key and 'alice' has none"):
        run(one, two)
    with pytest.raises(AuthenticationError, match="it needs a key"):
        one.feed(two.refusal)
    one, two = dialler(insecure=True), acceptor(key=b"", insecure=True)
    with pytest.raises(AuthenticationError, match="'alice' has a key and 'bob' has none"):
        run(one, two)
    # The dialler also notices an acceptor that hides that it has no key.
    hello = dialler().start()
    challenge = bytearray(acceptor().feed(hello))
    one = dialler()
    one.start()
    challenge[handshake._HEAD + 3] = 1
    with pytest.raises(AuthenticationError, match="has none"):
        one.feed(bytes(challenge))


# -- identity of the peer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"peer_name": "carol"}, "dialled worker 'carol', but 'bob' answers"),
        ({"peer_name": "bob", "peer_incarnation": INC_C}, "another run of it"),
        ({"peer_incarnation": INC_C}, "wrong peer"),
    ],
)
def test_a_dialler_sends_no_proof_to_another_worker_than_the_dialled_one(
    wanted: dict[str, str], says: str
) -> None:
    one, two = dialler(**wanted), acceptor()
    challenge = two.feed(one.start())
    with pytest.raises(AuthenticationError, match=says):
        one.feed(challenge)
    assert one.replaced is (wanted.get("peer_name") == "bob")


def test_an_acceptor_may_refuse_an_authenticated_worker() -> None:
    asked: list[Session] = []

    def admit(session: Session) -> tuple[Refusal, str] | None:
        asked.append(session)
        return Refusal.PEER, "alice has been declared dead"

    one, two = dialler(), acceptor(admit=admit)
    with pytest.raises(AuthenticationError, match="'bob' refused 'alice': alice has been declared dead"):
        run(one, two)
    assert [session.peer_name for session in asked] == ["alice"]
    with pytest.raises(AuthenticationError, match="declared dead"):
        one.feed(two.refusal)
    two = acceptor(admit=admit)
    with pytest.raises(AuthenticationError):
        run(dialler(key=OTHER), two)
    assert len(asked) == 1  # admit() is not called for a peer without the key
    one, two = dialler(), acceptor(admit=lambda session: None)
    run(one, two)
    assert two.done


def test_a_busy_refusal_raises_limit_error_with_its_reason() -> None:
    one = dialler(peer_name="bob")
    one.start()
    with pytest.raises(LimitError, match="worker 'bob' refused worker 'alice': too many guests \\?"):
        one.feed(Acceptor.refuse(Refusal.BUSY, "too many guests \x1b"))
    assert one.refused is Refusal.BUSY
    assert len(Acceptor.refuse(Refusal.BUSY, "é" * 1000)) <= MAX_MESSAGE


@pytest.mark.parametrize("text", [b"\x1b[31m", b"caf\xc3\xa9", b"a\nb"])
def test_a_refusal_with_control_or_non_ascii_characters_is_not_shown(text: bytes) -> None:
    one = dialler()
    one.start()
    body = struct.pack("!BB", Refusal.KEY, len(text)) + text
    with pytest.raises(ProtocolError) as caught:
        one.feed(handshake._message(5, body))
    assert text.decode("utf-8") not in str(caught.value)
    assert one.refused is None


def test_a_refusal_of_an_unknown_kind_is_an_error() -> None:
    one = dialler()
    one.start()
    with pytest.raises(ProtocolError, match="unknown code 99"):
        one.feed(handshake._message(5, b"\x63\x00"))


# -- reflection, replay, other versions --------------------------------------------------------------


def test_reflected_messages_are_refused() -> None:
    one, two = dialler(), acceptor(name="alice", incarnation=INC_A)
    with pytest.raises(AuthenticationError, match="reflected"):
        two.feed(one.start())
    one = dialler()
    hello = one.start()
    with pytest.raises(ProtocolError):
        one.feed(hello)


@pytest.mark.parametrize(
    ("ours", "theirs", "chosen"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 3), (2, 5), 3),
        ((2, 5), (1, 3), 3),
        ((1, 9), (4, 4), 4),
        ((1, 255), (1, 255), 255),
    ],
)
def test_the_highest_common_version_is_chosen(ours: Any, theirs: Any, chosen: int) -> None:
    one, two = dialler(versions=ours), acceptor(versions=theirs)
    run(one, two)
    assert one.result.version == two.result.version == chosen


@pytest.mark.parametrize(("ours", "theirs"), [((1, 1), (2, 2)), ((3, 4), (1, 2))])
def test_without_a_common_version_both_sides_raise_version_error(ours: Any, theirs: Any) -> None:
    one, two = dialler(versions=ours, peer_name="bob"), acceptor(versions=theirs)
    with pytest.raises(VersionError, match="'bob' speaks versions"):
        run(one, two)
    with pytest.raises(VersionError, match=r"worker 'bob' refused worker 'alice'.*install the same version"):
        one.feed(two.refusal)


@pytest.mark.parametrize("versions", [(0, 1), (2, 1), (1, 256)])
def test_an_invalid_range_of_versions_raises_config_error(versions: tuple[int, int]) -> None:
    with pytest.raises(ConfigError):
        dialler(versions=versions)


def test_invalid_dialler_arguments_raise_config_error() -> None:
    with pytest.raises(ConfigError, match="LANE"):
        dialler(purpose=Purpose.LANE)
    with pytest.raises(ConfigError):
        dialler(attach=b"short")
    with pytest.raises(ConfigError):
        dialler(purpose=9)
    with pytest.raises(ConfigError):
        dialler(incarnation="zz")


# -- arbitrary bytes ---------------------------------------------------------------------------------


def meddle(change: Any) -> tuple[Dialler, Acceptor]:
    """Run a handshake whose messages ``change(index, message)`` alters; both sides must agree or raise a typed error."""
    one, two = dialler(peer_name="bob"), acceptor()
    try:
        challenge = two.feed(change(0, one.start()))
        auth = one.feed(change(1, challenge)) if challenge else b""
        welcome = two.feed(change(2, auth)) if auth else b""
        if welcome:
            one.feed(change(3, welcome))
    except (AuthenticationError, VersionError, ProtocolError):
        pass
    return one, two


def test_an_acceptor_buffers_at_most_one_message() -> None:
    for data in (b"x" * (1 << 20), b"aRPC" + b"\xff" * (1 << 20), b"aRPC\x01\xff" + b"\0" * (1 << 20)):
        two = acceptor()
        with pytest.raises(ProtocolError):
            two.feed(data)
        assert two.refusal == b""
        assert len(two._buffer) <= MAX_MESSAGE
    two = acceptor()
    hello = dialler().start()
    for byte in hello[:-1]:
        two.feed(bytes([byte]))
        assert len(two._buffer) <= MAX_MESSAGE


def test_the_error_for_another_protocol_says_another_program() -> None:
    for start in (b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"aRPX"):
        with pytest.raises(ProtocolError, match="another program"):
            acceptor().feed(start)


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    st.integers(0, 3),
    st.lists(
        st.tuples(st.integers(0, 255), st.integers(1, 255)), min_size=1, max_size=4, unique_by=lambda x: x[0]
    ),
    st.integers(1, 64),
)
def test_any_changed_byte_fails_the_handshake(index: int, changes: list[tuple[int, int]], piece: int) -> None:
    def change(at: int, message: bytes) -> bytes:
        if at != index:
            return message
        changed = bytearray(message)
        places = {}
        for place, by in changes:
            places[place % len(changed)] = by
        for place, by in places.items():
            changed[place] ^= by
        return bytes(changed)

    one, two = meddle(change)
    assert not one.done
    assert not two.done or index == 3


# -- imports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [handshake, identity])
def test_the_handshake_imports_no_module_that_can_unpickle(module: Any) -> None:
    seen: set[str] = set()
    todo = [module.__name__]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if not name.startswith("actorrpc"):
            continue
        path = importlib.import_module(name).__file__
        assert path is not None
        for node in ast.walk(ast.parse(Path(path).read_text())):
            if isinstance(node, ast.Import):
                todo += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                todo.append(node.module or "")
    assert not {name.partition(".")[0] for name in seen} & {
        "pickle",
        "_pickle",
        "cloudpickle",
        "marshal",
        "shelve",
        "torch",
    }
