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
from actorrpc.transport.stream import CLOSED
from actorrpc.wire.handshake import Acceptor, Dialler, Purpose
from actorrpc.wire.identity import new_incarnation
from tests.agent.agents import KEY
from tests.intruders.doors import dialler, knock, reset, secure, tcp_agents, until

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


def _pair(
    versions: tuple[int, int] = (1, 3),
    ours: str = "",
    theirs: str = "",
    **options: Any,
) -> tuple[Dialler, Acceptor]:
    """Return two sides that have the key."""
    given: dict[str, Any] = {"key": KEY.reveal(), "versions": versions}
    return (
        Dialler(name="dialler", incarnation=ours or new_incarnation(), **given, **options),
        Acceptor(name="acceptor", incarnation=theirs or new_incarnation(), **given),
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
    runs = {"ours": new_incarnation(), "theirs": new_incarnation()}
    one, other = _pair(**runs)
    old = _talk(*_pair(**runs))
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


def test_a_proof_is_valid_for_one_role_and_one_pair_of_workers_only() -> None:
    one, other = _pair()
    proof = one.feed(other.feed(one.start()))
    with pytest.raises(AuthenticationError, match="did not prove"):  # as the proof of an acceptor
        one.feed(proof[:4] + b"\x04" + proof[5:])
    theirs = new_incarnation()
    one, other = _pair(theirs=theirs)
    hello = one.start()
    proof = one.feed(other.feed(hello))
    third = _pair(theirs=theirs)[1]
    third.feed(hello)
    with pytest.raises(ProtocolError):  # to another acceptor
        third.feed(proof)
    one, other = _pair()
    second = _pair()[0]
    second.start()
    proof = second.feed(other.feed(one.start()))
    with pytest.raises(AuthenticationError, match="key"):  # of another dialler
        other.feed(proof)


@pytest.mark.parametrize(("low", "high"), [(1, 2), (2, 2)])
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


# -- real workers ----------------------------------------------------------------------------------------


def _connected(agent: Agent) -> Any:
    """Return a socket that is connected to an agent, after the TLS handshake, if any."""
    return knock(agent) if agent.connector.tls is None else secure(agent, knock(agent))


def _recorded(agent: Agent) -> tuple[list[bytes], list[bytes]]:
    """Do a handshake with an agent; return the sent messages and the answers."""
    sock, side = _connected(agent), dialler(agent)
    sent, answers = [side.start(getattr(sock, "binding", b""))], []
    sock.sendall(sent[0])
    while not side.done:
        answers.append(sock.recv(4096))
        data = side.feed(answers[-1])
        if data:
            sent.append(data)
            sock.sendall(data)
    sock.close()
    return sent, answers


@pytest.mark.prints(
    "'stranger' did not prove to worker 'a0'",
    r"message \d came in the handshake where \d must come",
    r"the other side of the handshake sent \d+ bytes before their turn",
)
@pytest.mark.parametrize("tls", [True, False])
def test_a_recorded_handshake_cannot_be_replayed_to_a_worker(tls: bool) -> None:
    with tcp_agents(1, tls=tls) as (agent,):
        sent, answers = _recorded(agent)
        for messages in (
            sent,
            [sent[1]],
            answers,
            [b"".join(sent)],
            [sent[0], sent[0]],
        ):
            sock = _connected(agent)
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


def test_a_side_connection_without_a_main_connection_is_closed() -> None:
    """The peer has the key, but not the token of a main connection."""
    with tcp_agents(1, tls=False) as (agent,):
        sock, side = knock(agent), dialler(agent, purpose=Purpose.LANE, attach=bytes(16))
        sock.sendall(side.start())
        sock.sendall(side.feed(sock.recv(4096)))
        assert until(sock) == b""
        assert not agent.connector.connections()
        sock.close()


@pytest.mark.prints("message 2 came in the handshake where 1 must come")
def test_two_connections_to_one_worker_cannot_be_wired_together() -> None:
    """The attacker forwards the messages of each connection to the other."""
    with tcp_agents(1, tls=False) as (agent,):
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
        assert not agent.connector.connections()
        reset(one)
        reset(other)
