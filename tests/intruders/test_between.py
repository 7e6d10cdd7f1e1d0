"""An attacker between two workers, or with recordings of their handshakes, cannot complete a handshake."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from actorrpc.agent.agent import Agent
from actorrpc.errors import AuthenticationError, ProtocolError
from actorrpc.transport.connection_state import CLOSED
from actorrpc.wire import handshake
from actorrpc.wire.handshake import Acceptor, Dialler, Purpose
from actorrpc.wire.identity import new_incarnation
from tests.agent.agents import KEY
from tests.intruders.doors import dialler, knock, reset, tcp_agents, until

_HEAD = 6
# The fields of messages: (message, field) -> (first byte, number of bytes).
_FIELDS: dict[tuple[int, str], tuple[int, int]] = {
    (0, "lowest version"): (0, 1),
    (0, "highest version"): (1, 1),
    (0, "purpose"): (2, 1),
    (0, "flags"): (3, 1),
    (0, "nonce"): (4, 32),
    (0, "attach token"): (36, 16),
    (0, "incarnation"): (52, 16),
    (0, "name"): (69, 7),
    (1, "lowest version"): (0, 1),
    (1, "highest version"): (1, 1),
    (1, "chosen version"): (2, 1),
    (1, "flags"): (3, 1),
    (1, "nonce"): (4, 32),
    (1, "incarnation"): (36, 16),
    (1, "name"): (53, 8),
    (2, "proof"): (0, 32),
    (3, "proof"): (0, 32),
}
_Change = Callable[[int, bytes], bytes]


def _pair(versions: tuple[int, int] = (1, 3), **options: Any) -> tuple[Dialler, Acceptor]:
    return (
        Dialler(
            name="dialler", incarnation=new_incarnation(), key=KEY.reveal(), versions=versions, **options
        ),
        Acceptor(name="acceptor", incarnation=new_incarnation(), key=KEY.reveal(), versions=versions),
    )


def _talk(one: Dialler, other: Acceptor, change: _Change = lambda number, message: message) -> list[bytes]:
    """Carry messages between both sides, changed by ``change``; return the unchanged messages."""
    sent = [one.start()]
    sides: list[Any] = [other, one]
    with contextlib.suppress(ProtocolError):
        for number in range(4):
            answer = sides[number % 2].feed(change(number, sent[-1]))
            if not answer:
                break
            sent.append(answer)
    return sent


def _assert_refused(one: Dialler, other: Acceptor, number: int) -> None:
    """Check that no side completed the handshake, except the acceptor if only the last message was changed."""
    assert not one.done
    assert other.done == (number == 3)


def test_unchanged_messages_complete_the_handshake() -> None:
    one, other = _pair()
    assert len(_talk(one, other)) == 4
    assert one.done
    assert other.done
    assert one.result.key == other.result.key
    assert one.result.version == 3


@pytest.mark.parametrize(("number", "field"), _FIELDS)
def test_changing_any_field_fails_the_handshake(number: int, field: str) -> None:
    start, size = _FIELDS[number, field]
    for at in range(start, start + size):
        for flip in (1, 2, 0x20, 0x80):

            def change(which: int, message: bytes, at: int = at, flip: int = flip) -> bytes:
                changed = bytearray(message)
                if which == number:
                    changed[_HEAD + at] ^= flip
                return bytes(changed)

            one, other = _pair()
            sent = _talk(one, other, change)
            assert len(sent[0]) == _HEAD + 69 + 7
            _assert_refused(one, other, number)


@pytest.mark.parametrize("number", range(4))
def test_truncated_or_extended_messages_fail_the_handshake(number: int) -> None:
    whole = len(_talk(*_pair())[number])
    for size in range(whole):
        one, other = _pair()
        _talk(one, other, lambda which, message, size=size: message[:size] if which == number else message)  # type: ignore[misc]
        assert not one.done
        assert not (other.done and number < 3)
    if number < 3:  # bytes after the last message belong to the next protocol layer
        one, other = _pair()
        _talk(one, other, lambda which, message: message + b"x" if which == number else message)
        _assert_refused(one, other, number)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("source", range(4))
def test_messages_replayed_from_another_handshake_are_refused(number: int, source: int) -> None:
    """Recorded from the same two workers, and replayed at any position."""
    one, other = _pair()
    ours, theirs = one._incarnation.hex(), other._incarnation.hex()
    old = _talk(
        Dialler(name="dialler", incarnation=ours, key=KEY.reveal(), versions=(1, 3)),
        Acceptor(name="acceptor", incarnation=theirs, key=KEY.reveal(), versions=(1, 3)),
    )
    _talk(one, other, lambda which, message: old[source] if which == number else message)
    _assert_refused(one, other, number)


@pytest.mark.parametrize("number", range(1, 4))
def test_messages_reflected_to_their_sender_are_refused(number: int) -> None:
    for back in range(number):
        one, other = _pair()
        said: list[bytes] = []

        def reflect(which: int, message: bytes, back: int = back, said: list[bytes] = said) -> bytes:
            said.append(message)
            return said[back] if which == number else message

        _talk(one, other, reflect)
        _assert_refused(one, other, number)


def test_a_proof_is_valid_for_one_role_only_and_does_not_reveal_the_key() -> None:
    """A dialler's proof is not accepted as an acceptor's, and no message contains the session key."""
    one, other = _pair()
    proof = one.feed(other.feed(one.start()))
    with pytest.raises(AuthenticationError, match="did not prove"):
        one.feed(proof[:4] + b"\x04" + proof[5:])
    one, other = _pair()
    sent = b"".join(_talk(one, other))
    assert one.result.key not in sent
    assert one.result.key != KEY.reveal()
    assert len({one.result.key, sent[-32:], sent[-70:-38]}) == 3


def test_the_challenge_or_proof_of_one_acceptor_cannot_be_used_with_another() -> None:
    one, other = _pair(peer_name="acceptor")
    third = Acceptor(name="third", incarnation=new_incarnation(), key=KEY.reveal(), versions=(1, 3))
    hello = one.start()
    with pytest.raises(AuthenticationError, match="wrong peer"):
        one.feed(third.feed(hello))
    one, other = _pair()
    hello = one.start()
    proof = one.feed(other.feed(hello))
    third = Acceptor(name="acceptor", incarnation=other._incarnation.hex(), key=KEY.reveal(), versions=(1, 3))
    third.feed(hello)
    with pytest.raises(ProtocolError):
        third.feed(proof)


def test_the_proof_of_another_dialler_is_refused() -> None:
    one, other = _pair()
    second = Dialler(name="dialler", incarnation=new_incarnation(), key=KEY.reveal(), versions=(1, 3))
    hello, _ = one.start(), second.start()
    challenge = other.feed(hello)
    proof = second.feed(challenge)
    with pytest.raises(AuthenticationError, match="key"):
        other.feed(proof)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 2), (2, 2)])
def test_an_attacker_cannot_force_an_older_version(low: int, high: int) -> None:
    """Both support versions 1 to 3; the attacker lowers the announced range of one side."""
    for number in (0, 1):

        def lower(which: int, message: bytes, number: int = number) -> bytes:
            changed = bytearray(message)
            if which == number:
                changed[_HEAD : _HEAD + 2] = bytes((low, high))
                if number == 1:
                    changed[_HEAD + 2] = high
            return bytes(changed)

        one, other = _pair()
        _talk(one, other, lower)
        _assert_refused(one, other, number)


def test_an_attacker_cannot_force_a_connection_without_a_key() -> None:
    """The attacker sets the flag by which a side announces that it has no key."""
    for number in (0, 1):

        def strip(which: int, message: bytes, number: int = number) -> bytes:
            changed = bytearray(message)
            if which == number:
                changed[_HEAD + 3] |= 1
            return bytes(changed)

        one, other = _pair()
        for side in (one, other):
            assert side._key
        _talk(one, other, strip)
        _assert_refused(one, other, number)


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(handshake.hmac, "compare_digest", compare)
    _talk(*_pair())
    assert [len(one) for one, _ in compared] == [32, 32]


# -- real workers ----------------------------------------------------------------------------------------


def _recorded(agent: Agent, **options: Any) -> tuple[list[bytes], list[bytes]]:
    """Do a handshake with an agent; return the sent messages and the answers."""
    sock, side = knock(agent), dialler(agent, **options)
    sent, answers = [side.start()], []
    sock.sendall(sent[0])
    while not side.done:
        answers.append(sock.recv(4096))
        data = side.feed(answers[-1])
        if data:
            sent.append(data)
            sock.sendall(data)
    reset(sock)
    return sent, answers


def _mains(agent: Agent) -> int:
    return len(agent.connector.connections())


@pytest.mark.prints(
    "'stranger' did not prove to worker 'a0'",
    r"message \d came in the handshake where \d must come",
    r"the other side of the handshake sent \d+ bytes before their turn",
)
def test_a_recorded_handshake_cannot_be_replayed_to_a_worker() -> None:
    with tcp_agents(1) as (agent,):
        sent, answers = _recorded(agent)
        for messages in (
            sent,
            sent[::-1],
            [sent[1]],
            answers,
            [b"".join(sent)],
            [sent[0], sent[0]],
            [sent[1], sent[1]],
        ):
            sock = knock(agent)
            with contextlib.suppress(OSError):
                for message in messages:
                    sock.sendall(message)
                sock.shutdown(socket.SHUT_WR)
            until(sock)
            sock.close()
        assert not [
            conn
            for conn in agent.connector.connections()
            if conn.state is not CLOSED and conn.peer is not None
        ]


@pytest.mark.parametrize("purpose", [Purpose.LANE])
def test_a_side_connection_without_a_main_connection_is_closed(purpose: Purpose) -> None:
    """The peer has the key, but not the token of a main connection."""
    with tcp_agents(1) as (agent,):
        sock, side = knock(agent), dialler(agent, purpose=purpose, attach=bytes(16))
        sock.sendall(side.start())
        sock.sendall(side.feed(sock.recv(4096)))
        assert until(sock) == b""
        assert _mains(agent) == 0
        sock.close()


@pytest.mark.prints("message 2 came in the handshake where 1 must come")
def test_two_connections_to_one_worker_cannot_be_wired_together() -> None:
    """The attacker forwards the messages of each connection to the other."""
    with tcp_agents(1) as (agent,):
        one, other = knock(agent), knock(agent)

        def carry(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(4096):
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        one.sendall(dialler(agent).start())
        threads = [threading.Thread(target=carry, args=pair) for pair in ((one, other), (other, one))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert _mains(agent) == 0
        reset(one)
        reset(other)
