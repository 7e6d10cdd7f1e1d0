"""How the ranks of a launch meet: rank 0 announces the address of its driver in a store of torch, and the others join there.

The store is torchrun's own, or a store that rank 0 serves; see :mod:`actorrpc.group.rank0`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from actorrpc import _time
from actorrpc.cluster.join import new_secret
from actorrpc.errors import RendezvousError
from actorrpc.group.launchers import Launch
from actorrpc.group.rank0 import MeetingAtRank0
from actorrpc.group.rendezvous import StoreLike
from actorrpc.group.store import StoreMeeting, remaining, some, wait_until
from actorrpc.wire import keys
from actorrpc.wire.identity import host_identity
from actorrpc.wire.keys import Key

__all__ = ["LaunchMeeting", "open_meeting"]

T = TypeVar("T")


class LaunchMeeting(MeetingAtRank0):
    """One rank's part in the meeting. Not thread-safe.

    Attributes:
        secret: on rank 0, the key of all ranks: the given key, or a new key.
    """

    def __init__(self, launched: Launch, store: StoreLike, timeout: float) -> None:
        super().__init__(store, f"cluster/{launched.run}/{launched.size}/", timeout)
        self._launch = launched
        self._deadline = _time.now() + timeout
        self.secret = keys.given_secret()
        self.key_is_given = bool(self.secret)
        if not self.key_is_given and launched.rank == 0:
            self.secret = new_secret()

    def announce(self, address: str) -> None:
        """Publish the address of rank 0. If no key was given, write the key to a file that the ranks on this host can read."""
        if not self.key_is_given:
            self._key_file = keys.create_key_file(self.secret.encode())
        self._announce(Key.from_text(self.secret), address.encode(), host_identity())

    def reach(self, join: Callable[[str, Key, float], T]) -> T:
        """Join at the address that rank 0 announces; try again until joining succeeds or the time has passed.

        Args:
            join: called with the address, the key and the remaining seconds; may raise the errors of :func:`join.join`.

        Raises:
            AuthenticationError, ProtocolError: the ranks do not share a key or a version.
            RendezvousError: joining has not succeeded in time.
        """

        def visit(address: bytes, key: Key | None) -> T:
            assert key is not None
            try:
                return join(address.decode(), key, remaining(self._deadline))
            except RendezvousError as error:
                # The address may be from an earlier run of the job. After a ConnectionError, _reach() tries again.
                raise ConnectionError(str(error)) from error

        own_key = Key.from_text(self.secret) if self.key_is_given else None
        return self._reach(visit, own_key, host_identity(), rank=self._launch.rank, caller="init()")

    def wait_for(self, joined: set[int], timeout: float) -> None:
        """Wait until all other ranks have joined, then remove the key file.

        Args:
            joined: the ranks that have joined; other threads add to this set.

        Raises:
            RendezvousError: some ranks have not joined in time.
        """
        size, deadline = self._launch.size, _time.now() + timeout

        def absent() -> list[int]:
            return sorted(set(range(1, size)) - joined.copy())

        def what() -> str:
            return f"{len(absent())} of {size} ranks to join: {some(absent())}"

        try:
            if not wait_until(lambda: not absent(), deadline, "init() on rank 0", what):
                missing = absent()
                raise RendezvousError(
                    f"only {size - len(missing)} of {size} ranks have joined within {timeout:g} s (missing: {some(missing)}): "
                    "have all called actorrpc.init()?"
                )
        finally:
            self.close()


def open_meeting(launched: Launch, timeout: float) -> LaunchMeeting:
    """Open the store in which the ranks meet.

    Raises:
        RendezvousError: the store was not reached in time.
    """
    serves = launched.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = StoreMeeting(
        url="env://",
        kind="tcp",
        rank=launched.rank,
        world_size=launched.size,
        host=launched.master,
        port=launched.port,
        hosts=serves,
    ).open(timeout)
    return LaunchMeeting(launched, store, timeout)
