"""How rank 0 announces its address in a store, and how the other ranks reach it.

Rank 0 writes one value into the store: its address, how the others get the group's key, and an HMAC of the key. The key itself is
never in the store: each rank was given it, or rank 0 writes it to a file that only its user can read, and the ranks on its host
read the file. Each other rank reads the value and visits rank 0.

Several groups may use one store, one after the other: each rank 0 overwrites the value. A rank that reads the value of an earlier
run finds no rank 0 there, or a rank 0 that has met its group already, and polls the store for the next value. The store does not
protect the value, so an attacker can replace it by an earlier one; the handshake with the worker at that address then fails.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Final, TypeVar

from actorrpc import _time
from actorrpc.errors import AuthenticationError, LimitError, ProtocolError, RendezvousError, RpcError
from actorrpc.group.rendezvous import FILE, GIVEN, OTHERS, Rendezvous, StoreLike, pack, unpack
from actorrpc.group.store import attempts
from actorrpc.wire import keys
from actorrpc.wire.keys import Key

__all__ = ["LEADER", "SILENT_S", "MeetingAtRank0"]

T = TypeVar("T")

LEADER: Final = "leader"
"""The name of the value in the store."""

SILENT_S = 10.0
"""How long a worker waits for other workers before it logs, once, for which workers it waits."""

# A third kind of value, besides GIVEN and FILE: the group is insecure and has no key.
_NONE: Final = "none"
# How long a problem with a value must last before it is raised: an earlier run in this store may have left the value.
_STALE_S: Final = 2.0
_AGAIN_S: Final = 0.2  # the time between two visits with the same value
_log = logging.getLogger("actorrpc.cluster")


class MeetingAtRank0(Rendezvous):
    """One worker's part in a meeting at rank 0. The arguments are those of :class:`Rendezvous`."""

    def __init__(self, store: StoreLike, prefix: str, timeout: float) -> None:
        super().__init__(store, prefix, timeout)
        self._value = b""  # the value that rank 0 has written
        self._keys: dict[str, Key] = {}  # the keys that this worker has read, by the path of the file

    def _announce(self, key: Key | None, address: bytes, host: str) -> None:
        """Write the value of rank 0, which runs on ``host`` (its identity). ``key`` is None if the group has no key."""
        kind = GIVEN if self.key_is_given else _NONE if key is None else FILE
        path = self._key_file or ""
        # The store is readable by others: it gets the host and the path only if the workers need them to find the key.
        body = pack(kind, path, host if path else "", address)
        self._value = pack(body, b"" if key is None else key.sign(self._purpose(), body))
        self._store_op("set", LEADER, self._value)

    def _purpose(self) -> str:
        return f"the address of rank 0 in {self._prefix}"

    def _reach(
        self,
        visit: Callable[[bytes, Key | None], T | RpcError | None],
        own_key: Key | None,
        host: str,
        *,
        insecure: bool = False,
        rank: int,
        caller: str,
        slowest: float = 0.05,
    ) -> T:
        """Visit rank 0 until a visit has a result, and return the result. Repeat this while the store has an earlier run's value.

        Args:
            visit: called with the address of rank 0 and the group's key. It returns the result; an error, which is then raised;
                or None if the rank 0 at this address has met its group already. After an OSError or LimitError, it is called
                again; a ProtocolError or RendezvousError is raised only if it has lasted for 2 s with the same value.
            own_key: the key that this worker was given; None if it was given no key.
            host: the identity of this worker's host.
            insecure: whether a group without a key is accepted.
            rank: this worker's rank.
            caller: the function that waits, for messages.
            slowest: the longest pause between two looks into the store, in seconds.

        Raises:
            AuthenticationError, ProtocolError: the workers do not share a key or a protocol.
            RendezvousError: no visit has a result in time, or the store failed.
        """
        problem: Exception | None = None  # of the last visit
        over = b""  # the value of a rank 0 that has met its group already
        tried, again_at = b"", 0.0  # the value of the last visit, and when it may be used again
        refused, since = b"", 0.0  # the value with which visits have failed, and since when
        log_at = _time.now() + SILENT_S
        for _ in attempts(self._deadline, slowest):
            if _time.now() >= log_at:
                log_at = math.inf
                why = "" if problem is None else f": {problem}"
                _log.warning("%s on rank %d waits for rank 0%s", caller, rank, why)
            value = self._find(LEADER)
            if value is None or value == over or (value == tried and _time.now() < again_at):
                continue
            try:
                found = visit(*self._read(value, own_key, host, insecure))
            except (ProtocolError, RendezvousError) as error:
                if value != refused:
                    refused, since = value, _time.now()
                elif _time.now() - since >= _STALE_S:
                    raise
                problem = error
            except (OSError, LimitError) as error:
                problem = error
            else:
                if isinstance(found, RpcError):
                    raise found
                if found is not None:
                    return found
                over, problem = value, RendezvousError("rank 0 has met other workers already")
            tried, again_at = value, _time.now() + _AGAIN_S
        if isinstance(problem, ProtocolError):
            raise problem
        why = "" if problem is None else f"; the last attempt to reach it failed: {problem}"
        raise RendezvousError(
            f"rank 0 did not come within {self.timeout:g} s: has it called {caller}, and does it run?{why}"
        )

    def _read(self, value: bytes, own_key: Key | None, host: str, insecure: bool) -> tuple[bytes, Key | None]:
        """Return the address of rank 0 and the key of the group, or None if the group has no key.

        Raises:
            OSError: the run that has written the value has ended.
            AuthenticationError: the workers do not share a key.
            RendezvousError: the value cannot be read.
        """
        body, mac = unpack(value, bytes, bytes)
        kind, path, there, address = unpack(body, str, str, str, bytes)
        if kind == _NONE:
            if own_key is None and insecure:
                return address, None
            raise AuthenticationError(
                "rank 0 has no key, because it was started with insecure=True: give all workers the same settings and key"
            )
        key = self._keys.get(path)  # the file is removed when all workers have read it
        if key is None:
            if kind == FILE and there == host and (keys.is_stale(path) or not os.path.lexists(path)):
                raise ConnectionRefusedError("the store has the address of a run that has ended")
            key = self._accept(kind, path, there, own_key, host)
        if kind == FILE:
            self._keys[path] = key
        if not key.has_signed(self._purpose(), body, mac):
            raise AuthenticationError(
                "the address of rank 0 in the store was not written with this worker's key: give all workers the same "
                f"ACTORRPC_KEY. If they have it, {OTHERS}"
            )
        return address, key
