"""The meeting of the ranks of one launch: where rank 0 listens, and by which key.

They meet in a store of torch's: torchrun's own, or one that rank 0 serves. Rank 0 puts its address there, never the key.
On one host the key goes through a file that only this user can read; on several, each must be given it.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Final

from actorrpc import moments
from actorrpc.cluster import addresses
from actorrpc.core import keys
from actorrpc.core.identity import host_identity
from actorrpc.core.launch import VARIABLES, Launch, of_environment
from actorrpc.core.meeting import Meeting, poll
from actorrpc.errors import AuthenticationError, RendezvousError

__all__ = ["VARIABLES", "Launch", "LaunchMeeting", "meet", "of_environment"]

_AGAIN_S: Final = 1.0


class LaunchMeeting:
    """The ranks of one launch, in their store. One thread at a time.

    Attributes:
        secret: the key, as all ranks have it.
    """

    def __init__(self, launched: Launch, store: Any, deadline: float) -> None:
        self._launch = launched
        self._store = store
        self._prefix = f"cluster/{launched.run}/{launched.size}/"
        self._deadline = deadline
        self._key_file = ""
        self.secret = self._agree()

    def _get(self, name: str, what: str) -> str:
        key = self._prefix + name
        if not poll(lambda: bool(self._store.check([key])), self._deadline):
            raise RendezvousError(
                f"rank 0 of {self._launch.launcher}'s {self._launch.size} has not said {what} in time: has it called "
                f"actorrpc.init(), and does it run? (met at {self._launch.master}:{self._launch.port})"
            )
        return bytes(self._store.get(key)).decode("utf-8", "replace")

    def _agree(self) -> str:
        """Agree on the key; nothing of it goes through the store."""
        given = addresses.given_secret()
        if self._launch.rank == 0:
            if given:
                self._store.set(self._prefix + "key", "given")
                return given
            secret = addresses.new_secret()
            self._key_file = addresses.write_secret(secret, self._launch.port)
            try:
                self._store.set(self._prefix + "key", f"file {host_identity()} {self._key_file}")
            except BaseException:
                self.close()
                raise
            return secret
        kind, _, rest = self._get("key", "which key they use").partition(" ")
        if kind == "given":
            if given:
                return given
            raise AuthenticationError(
                f"rank 0 was given a key and rank {self._launch.rank} was not: give all ranks the same ACTORRPC_KEY or "
                "ACTORRPC_KEY_FILE"
            )
        host, _, path = rest.partition(" ")
        if given:
            raise AuthenticationError(
                f"rank {self._launch.rank} was given a key and rank 0 was not: give it to all ranks"
            )
        if host != host_identity():
            raise AuthenticationError(
                f"rank {self._launch.rank} ({socket.gethostname()}) runs on another host than rank 0, and there is no key: "
                "give all ranks the same ACTORRPC_KEY, or ACTORRPC_KEY_FILE with a file that only you can read"
            )
        keys.read_key_file(path)  # checks that it is ours, and whole
        with open(path, encoding="ascii") as file:
            return file.read()

    def announce(self, address: str) -> None:
        """Say where rank 0 listens."""
        self._store.set(self._prefix + "address", address)

    def address(self) -> str:
        """Return where rank 0 listens."""
        return self._get("address", "where it listens")

    def renew(self, stale: str, deadline: float) -> None:
        """Wait a moment for another address and key than one that did not do: it may be of an earlier start."""
        self._deadline = deadline
        poll(lambda: self.address() != stale, min(deadline, moments.now() + _AGAIN_S))
        self.secret = self._agree()

    def arrived(self, address: str) -> None:
        """Say that this rank has joined the driver at an address."""
        self._store.add(f"{self._prefix}arrived/{address}", 1)

    def wait_for(self, address: str, timeout: float) -> None:
        """Wait until all other ranks have joined.

        Raises:
            RendezvousError: they have not in time.
        """
        key, count = f"{self._prefix}arrived/{address}", self._launch.size - 1
        deadline = moments.now() + timeout
        try:
            if not poll(lambda: bool(self._store.add(key, 0) >= count), deadline):
                raise RendezvousError(
                    f"only {self._store.add(key, 0) + 1} of {count + 1} ranks have joined within {timeout:g} s: have all called "
                    "actorrpc.init()?"
                )
        finally:
            self.close()

    def close(self) -> None:
        """Take the key away again that other ranks of this host were to find: all have it, or none will come. Idempotent."""
        path, self._key_file = self._key_file, ""
        if path:
            keys.remove_file(path)


def meet(launched: Launch, timeout: float) -> LaunchMeeting:
    """Open the store in which the ranks meet, and agree on the key.

    Raises:
        RendezvousError: the store cannot be reached, or rank 0 does not come, in time.
        AuthenticationError: the ranks do not share a key.
    """
    deadline = moments.now() + timeout
    serves = launched.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = Meeting(
        url="env://",
        kind="tcp",
        rank=launched.rank,
        world_size=launched.size,
        host=launched.master,
        port=launched.port,
        hosts=serves,
    ).open(timeout)
    return LaunchMeeting(launched, store, deadline)
