"""Mutual authentication: it completes only between two holders of the key. Attackers: tests/intruders."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from actorrpc.errors import AuthenticationError, ConfigError, ProtocolError, VersionError
from actorrpc.wire import handshake
from actorrpc.wire.handshake import MAX_MESSAGE, Acceptor, Dialler, Purpose, Refusal

KEY = hashlib.sha256(b"the key").digest()
OTHER = hashlib.sha256(b"another key").digest()
INC_A, INC_B, INC_C = "a" * 32, "b" * 32, "c" * 32


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
    assert not two.greeted
    run(one, two, piece)
    assert two.greeted
    assert one.done
    assert two.done
    mine, theirs = one.result, two.result
    assert (mine.peer_name, mine.peer_incarnation) == (names[1], INC_B)
    assert (theirs.peer_name, theirs.peer_incarnation) == (names[0], INC_A)
    assert mine.purpose is theirs.purpose is Purpose.RESUME
    assert mine.attach == theirs.attach == token
    assert mine.version == theirs.version == handshake.VERSIONS[1]


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


def test_a_missing_key_needs_insecure_true() -> None:
    for make in (dialler, acceptor):
        with pytest.raises(ConfigError, match="ACTORRPC_KEY"):
            make(key=b"")
        with pytest.raises(ConfigError):
            make(key=b"short")
        with pytest.raises(ConfigError):
            make(key=b"short", insecure=True)
    run(dialler(key=b"", insecure=True), acceptor(key=b"", insecure=True))


def test_a_side_with_a_key_refuses_a_side_without_one() -> None:
    one, two = dialler(key=b"", insecure=True), acceptor(insecure=True)
    with pytest.raises(AuthenticationError, match="'bob' has a key and 'alice' has none"):
        run(one, two)
    with pytest.raises(AuthenticationError, match="it needs a key"):
        one.feed(two.refusal)
    one, two = dialler(insecure=True), acceptor(key=b"", insecure=True)
    with pytest.raises(AuthenticationError, match="'alice' has a key and 'bob' has none"):
        run(one, two)


# -- identity of the peer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"peer_name": "carol"}, "dialled worker 'carol', but 'bob' answers"),
        ({"peer_name": "bob", "peer_incarnation": INC_C}, "another run of it"),
        ({"peer_incarnation": INC_C}, "another run of it"),
    ],
)
def test_a_dialler_sends_no_proof_to_another_worker_than_the_dialled_one(
    wanted: dict[str, str], says: str
) -> None:
    one, two = dialler(**wanted), acceptor()
    challenge = two.feed(one.start())
    with pytest.raises(AuthenticationError, match=says):
        one.feed(challenge)
    assert one.replaced is (wanted.get("peer_name") != "carol")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Acceptor.refuse(Refusal.KEY, "abc").replace(b"abc", b"\x1b[m"), ""),
        (Acceptor.refuse(Refusal.KEY, "abc").replace(b"abc", b"a\nb"), ""),
        (Acceptor.refuse(Refusal.KEY, "abc").replace(b"abc", b"a\xc3\xa9"), ""),
        (Acceptor.refuse(Refusal.KEY, "")[:-2] + b"\x63\x00", "unknown code 99"),
    ],
)
def test_a_refusal_of_an_unknown_kind_or_with_other_than_printable_ascii_is_not_shown(
    message: bytes, says: str
) -> None:
    one = dialler()
    one.start()
    with pytest.raises(ProtocolError) as caught:
        one.feed(message)
    assert says in str(caught.value)
    assert message[-3:].decode("utf-8") not in str(caught.value)
    assert one.refused is None


# -- versions and arguments --------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ((1, 1), (2, 2), "speaks versions 2 of the protocol and 'alice' speaks 1;"),
        ((3, 4), (1, 2), "speaks versions 1 to 2 of the protocol and 'alice' speaks 3 to 4;"),
    ],
)
def test_without_a_common_version_both_sides_raise_version_error(ours: Any, theirs: Any, words: str) -> None:
    one, two = dialler(versions=ours, peer_name="bob"), acceptor(versions=theirs)
    with pytest.raises(VersionError, match="worker 'bob' " + words):
        run(one, two)
    with pytest.raises(VersionError, match=r"worker 'bob' refused worker 'alice'.*install the same version"):
        one.feed(two.refusal)


def test_invalid_dialler_arguments_raise_config_error() -> None:
    with pytest.raises(ConfigError, match="LANE"):
        dialler(purpose=Purpose.LANE)
    for wrong in (
        {"attach": b"short"},
        {"purpose": 9},
        {"incarnation": "zz"},
        {"versions": (0, 1)},
        {"versions": (2, 1)},
        {"versions": (1, 256)},
        {"key": b"x" * 15},
    ):
        with pytest.raises(ConfigError):
            dialler(**wrong)
    dialler(key=b"x" * 16, versions=(1, 255))


def test_the_error_for_another_protocol_says_another_program() -> None:
    for start in (b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"aRPX"):
        with pytest.raises(ProtocolError, match="another program"):
            acceptor().feed(start)
