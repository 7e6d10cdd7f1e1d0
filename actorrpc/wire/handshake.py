"""The handshake: mutual authentication at the start of every connection.

    dialler                                   acceptor
    HELLO      versions, purpose, names ->
                                          <-  CHALLENGE  versions, name, nonce
    AUTH       proof of the key         ->
                                          <-  WELCOME    proof of the key

Instead of CHALLENGE or WELCOME, the acceptor may send REFUSE (a code and a short text). It sends its proof only after it has
checked the dialler's proof. Each proof is an HMAC-SHA256 under the group's key over all earlier messages of both sides, the
digest of the TLS handshake, if any (``binding``), and a role string. Therefore a proof cannot be reflected, replayed, used on
another connection, or used to make a side choose an older version.

Sans-I/O: the owner of the socket feeds bytes in and sends the returned bytes; one thread at a time. The dialler's owner reads
:attr:`Dialler.wanted` bytes at a time, so that it reads no bytes that follow the handshake. A message has at most 256 bytes, and
at most one message is buffered. This module and its imports must never import pickle or call anything that the peer names.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Final, NoReturn

from actorrpc.errors import (
    AuthenticationError,
    ConfigError,
    LimitError,
    ProtocolError,
    RpcError,
    VersionError,
)
from actorrpc.wire.identity import check_name

__all__ = [
    "LANE",
    "MAIN",
    "MAX_MESSAGE",
    "VERSIONS",
    "Acceptor",
    "Dialler",
    "Purpose",
    "Refusal",
    "Session",
]

MAX_MESSAGE = 256
VERSIONS = (10, 10)
"""The lowest and the highest version of the protocol that this code supports."""

_MAGIC = b"aRPC"
_HEAD = len(_MAGIC) + 2  # magic, kind, length of the body
_HELLO, _CHALLENGE, _AUTH, _WELCOME, _REFUSE = 1, 2, 3, 4, 5
# dialler: lowest and highest version, purpose, flags, nonce, attach token, incarnation, length of the name
_HELLO_FIXED = struct.Struct("!BBBB32s16s16sB")
# acceptor: lowest, highest and chosen version, flags, nonce, incarnation, length of the name
_CHALLENGE_FIXED = struct.Struct("!BBBB32s16sB")
_REFUSE_FIXED = struct.Struct("!BB")
_SIZES = {
    _HELLO: (_HELLO_FIXED.size + 1, _HELLO_FIXED.size + 127),
    _CHALLENGE: (_CHALLENGE_FIXED.size + 1, _CHALLENGE_FIXED.size + 127),
    _AUTH: (32, 32),
    _WELCOME: (32, 32),
    _REFUSE: (_REFUSE_FIXED.size, _REFUSE_FIXED.size + 200),
}
_KEYLESS = 1  # flag: this side has no key, and the user has allowed that
_MIN_KEY = 16
_GIVE_KEY = "start every worker with the same ACTORRPC_KEY (or ACTORRPC_KEY_FILE)"


class Purpose(enum.IntEnum):
    """The purpose of a connection."""

    MAIN = 0
    LANE = 1  # carries descriptors of shared memory
    RESUME = 2  # replaces the broken connection that ``attach`` identifies


MAIN, LANE = Purpose.MAIN, Purpose.LANE
_PURPOSES = frozenset(int(purpose) for purpose in Purpose)


class Refusal(enum.IntEnum):
    """The reason why an acceptor refused a connection."""

    KEY = 1
    VERSION = 2
    BUSY = 4
    PROTOCOL = 5


# The dialler's error for the acceptor's reason, and advice. Other reasons are ProtocolErrors.
_REFUSALS: Final[dict[Refusal, tuple[type[RpcError], str]]] = {
    Refusal.KEY: (AuthenticationError, f"; {_GIVE_KEY}"),
    Refusal.VERSION: (VersionError, "; install the same version of actorrpc on both sides"),
    Refusal.BUSY: (LimitError, ""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The result of a handshake.

    Attributes:
        peer_name: the name that the peer has sent. If the group has a key, the peer has proved that it has the key.
        attach: 16 bytes that identify a connection. For MAIN, this connection; for LANE, the connection to which the lane
            belongs; for RESUME, the connection that is resumed.
    """

    peer_name: str
    peer_incarnation: str
    purpose: Purpose
    attach: bytes
    version: int


class _Side:
    """The base class of both sides: checks the constructor's arguments, and parses messages.

    After the handshake has failed, each further call of ``feed`` raises an error of the same type with the same text.
    """

    __slots__ = (
        "_binding",
        "_buffer",
        "_challenge",
        "_failure",
        "_hello",
        "_incarnation",
        "_key",
        "_name",
        "_result",
        "_versions",
    )

    def __init__(
        self,
        name: str,
        incarnation: str,
        key: bytes,
        insecure: bool,
        binding: bytes,
        versions: tuple[int, int],
    ) -> None:
        if not key and not insecure:
            raise ConfigError(
                f"worker {name!r} has no key: {_GIVE_KEY}, or set insecure=True (ACTORRPC_INSECURE=1) if nobody else can use "
                f"the network"
            )
        if key and len(key) < _MIN_KEY:
            raise ConfigError(f"a key has at least {_MIN_KEY} bytes, this one has {len(key)}")
        if not 1 <= versions[0] <= versions[1] <= 255:
            raise ConfigError(f"versions must be a pair low <= high from 1 to 255, not {versions!r}")
        self._name = check_name(name)
        self._incarnation = _incarnation_bytes(incarnation)
        self._key = key
        self._binding = binding
        self._versions = versions
        self._buffer = b""
        self._hello = b""
        self._challenge = b""
        self._result: Session | None = None
        self._failure: RpcError | None = None

    @property
    def done(self) -> bool:
        """Whether the handshake has finished. (The acceptor's owner still has to send the last message.)"""
        return self._result is not None

    @property
    def result(self) -> Session:
        """The result of the handshake.

        Raises:
            ProtocolError: the handshake has not finished.
        """
        if self._result is None:
            raise ProtocolError("the handshake has not finished")
        return self._result

    def _fail(self, error: RpcError) -> NoReturn:
        self._buffer = b""
        self._failure = error
        raise error

    def _receive(self, data: bytes, expected: int) -> tuple[int, bytes] | None:
        """Add ``data`` to the buffer; return the kind and the bytes of the message, or None if it is incomplete."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        if self._result is not None:
            raise ProtocolError("the handshake has finished; these bytes belong to the frames that follow it")
        held = len(self._buffer)
        whole = self._buffer + data[: MAX_MESSAGE - held]
        if whole[: len(_MAGIC)] != _MAGIC[: len(whole)]:
            self._fail(
                ProtocolError(
                    "these bytes are not an actorrpc handshake: another program is at the other end"
                )
            )
        if len(whole) < _HEAD:
            self._buffer = whole
            return None
        kind, size = whole[4], whole[5]
        if kind != expected and kind != _REFUSE:
            self._fail(ProtocolError(f"message {kind} came in the handshake where {expected} must come"))
        low, high = _SIZES[kind]
        if not low <= size <= high:
            self._fail(
                ProtocolError(f"message {kind} of the handshake has {size} bytes, not {low} to {high}")
            )
        end = _HEAD + size
        if len(whole) < end:
            self._buffer = whole
            return None
        self._buffer = b""
        rest = held + len(data) - end
        if rest:
            self._fail(ProtocolError(f"the other side of the handshake sent {rest} bytes before their turn"))
        return kind, whole

    def _proof(self, role: bytes, *more: bytes) -> bytes:
        # The concatenation is unambiguous: each message contains its length, and a length precedes the binding to TLS.
        mac = hmac.new(self._key, b"actorrpc handshake 1\0" + role + b"\0", hashlib.sha256)
        for part in (
            struct.pack("!I", len(self._binding)),
            self._binding,
            self._hello,
            self._challenge,
            *more,
        ):
            mac.update(part)
        return mac.digest()

    def _flags(self) -> int:
        return 0 if self._key else _KEYLESS

    def _decode_name(self, body: bytes, size: int, at: int) -> str:
        raw = body[at:]
        try:
            if len(raw) != size:
                raise ValueError
            return check_name(raw.decode("ascii"))
        except (ValueError, ConfigError):
            self._fail(ProtocolError("the other side of the handshake sent a name that no worker may have"))

    def _decode_flags(self, flags: int) -> bool:
        """Return whether the other side has no key."""
        if flags & ~_KEYLESS:
            self._fail(ProtocolError(f"the other side of the handshake sent unknown flags {flags:#x}"))
        return bool(flags & _KEYLESS)


class Dialler(_Side):
    """The side that opened the connection. It sends its proof first. Not thread-safe.

    If ``peer_name`` or ``peer_incarnation`` is given and the acceptor is another worker, the handshake fails before the dialler
    has sent a proof.
    """

    __slots__ = (
        "_attach",
        "_auth",
        "_peer",
        "_peer_name",
        "_purpose",
        "_started",
        "_version",
        "_wanted",
        "refused",
        "replaced",
    )

    def __init__(
        self,
        *,
        name: str,
        incarnation: str,
        key: bytes,
        peer_name: str | None = None,
        peer_incarnation: str | None = None,
        purpose: int = Purpose.MAIN,
        attach: bytes | None = None,
        insecure: bool = False,
        versions: tuple[int, int] = VERSIONS,
    ) -> None:
        super().__init__(name, incarnation, key, insecure, b"", versions)
        if purpose not in _PURPOSES:
            raise ConfigError(f"a connection is for one of {list(Purpose)}, not {purpose!r}")
        if attach is None:
            if purpose != Purpose.MAIN:
                raise ConfigError(
                    f"a {Purpose(purpose).name} connection needs the attach token of its main connection"
                )
            attach = secrets.token_bytes(16)
        if len(attach) != 16:
            raise ConfigError(f"an attach token has 16 bytes, not {len(attach)}")
        self._peer_name = peer_name
        self._wanted = None if peer_incarnation is None else _incarnation_bytes(peer_incarnation)
        self._purpose = Purpose(purpose)
        self._attach = attach
        self._started = False
        self._auth = b""
        self._peer: tuple[str, bytes] | None = None
        self._version = 0
        self.refused: Refusal | None = None
        """The reason of the acceptor, if it has sent REFUSE."""
        self.replaced = False
        """Whether another run of the intended worker has answered. Not authenticated: the acceptor has proved nothing yet."""

    def start(self, binding: bytes = b"") -> bytes:
        """Return the first message; ``binding``: the digest of the TLS handshake, if there was one."""
        if self._started:
            raise ProtocolError("this handshake was started before")
        self._started = True
        self._binding = binding
        nonce = secrets.token_bytes(32)
        name = self._name.encode("ascii")
        fixed = _HELLO_FIXED.pack(
            *self._versions, self._purpose, self._flags(), nonce, self._attach, self._incarnation, len(name)
        )
        self._hello = _message(_HELLO, fixed + name)
        return self._hello

    @property
    def wanted(self) -> int:
        """How many bytes of the acceptor's next message are missing, as far as is known; read no more bytes than this."""
        held = len(self._buffer)
        return (_HEAD if held < _HEAD else _HEAD + self._buffer[5]) - held

    def feed(self, data: bytes) -> bytes:
        """Process bytes from the acceptor; return the bytes to send to it.

        Raises:
            AuthenticationError: the acceptor does not have the key, or is not the intended worker.
            VersionError: the two sides support no common version.
            LimitError: the acceptor cannot accept another connection now.
            ProtocolError: the bytes are not valid, or the acceptor has refused the connection for another reason.
        """
        if not self._started:
            raise ProtocolError("this handshake was not started")
        taken = self._receive(data, _WELCOME if self._auth else _CHALLENGE)
        if taken is None:
            return b""
        kind, message = taken
        if kind == _REFUSE:
            self._refused(message)
        if kind == _CHALLENGE:
            self._read_challenge(message)
            self._auth = _message(_AUTH, self._proof(b"dialler"))
            return self._auth
        self._read_welcome(message)
        return b""

    def _target(self) -> str:
        return f"worker {self._peer_name!r}" if self._peer_name is not None else "the worker that was dialled"

    def _refused(self, message: bytes) -> NoReturn:
        code, size = _REFUSE_FIXED.unpack_from(message, _HEAD)
        raw = message[_HEAD + _REFUSE_FIXED.size :]
        if len(raw) != size or not all(32 <= byte < 127 for byte in raw):
            self._fail(ProtocolError("the other side refused the handshake without a readable reason"))
        try:
            self.refused = Refusal(code)
        except ValueError:
            self._fail(ProtocolError(f"the other side refused the handshake with an unknown code {code}"))
        text = f"{self._target()} refused worker {self._name!r}: {raw.decode('ascii')}"
        kind, advice = _REFUSALS.get(self.refused, (ProtocolError, ""))
        self._fail(kind(text + advice))

    def _read_challenge(self, message: bytes) -> None:
        body = message[_HEAD:]
        low, high, chosen, flags, _nonce, incarnation, size = _CHALLENGE_FIXED.unpack_from(body)
        name = self._decode_name(body, size, _CHALLENGE_FIXED.size)
        keyless = self._decode_flags(flags)
        if (self._peer_name is not None and name != self._peer_name) or (
            self._wanted is not None and incarnation != self._wanted
        ):
            self.replaced = self._peer_name in (None, name)
            was = name if not self.replaced else f"{name} (another run of it)"
            self._fail(
                AuthenticationError(
                    f"wrong peer: worker {self._name!r} dialled {self._target()}, but {was!r} answers at its "
                    "address; the intended worker has ended or restarted"
                )
            )
        if incarnation == self._incarnation:
            self._fail(
                AuthenticationError(f"worker {self._name!r} reached itself: its messages were reflected")
            )
        if keyless != (not self._key):
            self._fail(AuthenticationError(_keyless_text(self._name, name, bool(self._key))))
        agreed = _choose(self._versions, (low, high))
        if agreed is None or agreed != chosen:
            self._fail(VersionError(_version_text(self._name, self._versions, name, (low, high))))
        self._version = chosen
        self._challenge = message
        self._peer = (name, incarnation)

    def _read_welcome(self, message: bytes) -> None:
        assert self._peer is not None  # set when the CHALLENGE was read; before that, a WELCOME is refused
        name, incarnation = self._peer
        if not hmac.compare_digest(message[_HEAD:], self._proof(b"acceptor", self._auth)):
            self._fail(
                AuthenticationError(
                    f"{name!r} did not prove to worker {self._name!r} that it holds the group's key; "
                    f"{_GIVE_KEY}"
                )
            )
        self._result = Session(
            peer_name=name,
            peer_incarnation=incarnation.hex(),
            purpose=self._purpose,
            attach=self._attach,
            version=self._version,
        )


class Acceptor(_Side):
    """The side that accepted the connection. It sends its proof after the dialler has proved that it has the key. Not
    thread-safe.

    After an error, ``refusal`` has the bytes to send before the connection is closed; ``refusal`` may be empty.
    """

    __slots__ = ("_claim", "refusal")

    def __init__(
        self,
        *,
        name: str,
        incarnation: str,
        key: bytes,
        insecure: bool = False,
        binding: bytes = b"",
        versions: tuple[int, int] = VERSIONS,
    ) -> None:
        super().__init__(name, incarnation, key, insecure, binding, versions)
        self._claim: Session | None = None
        self.refusal = b""

    @property
    def greeted(self) -> bool:
        """Whether the dialler has sent a valid HELLO."""
        return self._claim is not None

    def feed(self, data: bytes) -> bytes:
        """Process bytes from the dialler; return the bytes to send to it.

        Raises:
            AuthenticationError: the dialler does not have the key.
            VersionError: the two sides support no common version.
            ProtocolError: the bytes are not valid.
        """
        taken = self._receive(data, _AUTH if self._claim is not None else _HELLO)
        if taken is None:
            return b""
        kind, message = taken
        if kind == _REFUSE:
            self._fail(ProtocolError("the dialler sent a refusal; it may only close the connection"))
        if self._claim is None:
            return self._read_hello(message)
        return self._read_auth(message, self._claim)

    @staticmethod
    def refuse(code: Refusal, text: str) -> bytes:
        """Return a REFUSE message. If the owner of the socket is too busy, it sends this message without a handshake."""
        reason = "".join(char if " " <= char <= "~" else "?" for char in text)[:200].encode("ascii")
        return _message(_REFUSE, _REFUSE_FIXED.pack(code, len(reason)) + reason)

    def _turn_away(self, code: Refusal, text: str, error: RpcError) -> NoReturn:
        self.refusal = self.refuse(code, text)
        self._fail(error)

    def _read_hello(self, message: bytes) -> bytes:
        body = message[_HEAD:]
        low, high, purpose, flags, _nonce, attach, incarnation, size = _HELLO_FIXED.unpack_from(body)
        name = self._decode_name(body, size, _HELLO_FIXED.size)
        keyless = self._decode_flags(flags)
        chosen = _choose(self._versions, (low, high))
        if chosen is None:
            text = _version_text(self._name, self._versions, name, (low, high))
            self._turn_away(
                Refusal.VERSION, f"it speaks versions {_span(self._versions)}", VersionError(text)
            )
        if keyless != (not self._key):
            why = "it needs a key" if self._key else "it runs without a key"
            text = _keyless_text(self._name, name, bool(self._key))
            self._turn_away(Refusal.KEY, why, AuthenticationError(text))
        if incarnation == self._incarnation:
            self._fail(
                AuthenticationError(
                    f"worker {self._name!r} was dialled by itself: its messages were reflected"
                )
            )
        if purpose not in _PURPOSES:
            self._fail(ProtocolError(f"{name!r} opened a connection for an unknown purpose {purpose}"))
        self._hello = message
        own = self._name.encode("ascii")
        fixed = _CHALLENGE_FIXED.pack(
            *self._versions, chosen, self._flags(), secrets.token_bytes(32), self._incarnation, len(own)
        )
        self._challenge = _message(_CHALLENGE, fixed + own)
        self._claim = Session(
            peer_name=name,
            peer_incarnation=incarnation.hex(),
            purpose=Purpose(purpose),
            attach=attach,
            version=chosen,
        )
        return self._challenge

    def _read_auth(self, message: bytes, claim: Session) -> bytes:
        if not hmac.compare_digest(message[_HEAD:], self._proof(b"dialler")):
            self._turn_away(
                Refusal.KEY,
                "it has another key",
                AuthenticationError(
                    f"a dialler that calls itself {claim.peer_name!r} did not prove to worker {self._name!r} "
                    f"that it holds the group's key; {_GIVE_KEY}"
                ),
            )
        self._result = claim
        return _message(_WELCOME, self._proof(b"acceptor", message))


def _message(kind: int, body: bytes) -> bytes:
    return _MAGIC + bytes((kind, len(body))) + body


def _incarnation_bytes(text: str) -> bytes:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != 16:
        raise ConfigError("an incarnation is 32 hexadecimal digits")
    return raw


def _choose(ours: tuple[int, int], theirs: tuple[int, int]) -> int | None:
    best = min(ours[1], theirs[1])
    return best if theirs[0] <= theirs[1] and best >= max(ours[0], theirs[0]) else None


def _span(versions: tuple[int, int]) -> str:
    return str(versions[0]) if versions[0] == versions[1] else f"{versions[0]} to {versions[1]}"


def _version_text(own: str, ours: tuple[int, int], peer: str, theirs: tuple[int, int]) -> str:
    return (
        f"worker {own!r} speaks versions {_span(ours)} of the protocol and {peer!r} speaks {_span(theirs)}; "
        "install the same version of actorrpc on both sides"
    )


def _keyless_text(own: str, peer: str, own_has_key: bool) -> str:
    with_key, without = (own, peer) if own_has_key else (peer, own)
    return f"worker {with_key!r} has a key and {without!r} has none; {_GIVE_KEY}"
