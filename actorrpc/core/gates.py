"""The gate: what sees every message of an agent before it leaves, and may keep it.

There is none in most agents, and then it costs a look at one attribute. It is there for tests that lose and hold up
messages on purpose (``actorrpc.testing``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from actorrpc.core.calls import Call, Execution
    from actorrpc.core.codec import Encoded
    from actorrpc.core.letters import Letter
    from actorrpc.core.messages import Parcel, Plain
    from actorrpc.core.peer import Peer

__all__ = ["Gate"]


class Gate(Protocol):
    """Decides of messages that are packed and about to leave. Called on the thread that sends; thread-safe.

    Where a method returns False the gate has taken the message over: it sends it later, or ends what waits for it.
    """

    def request(
        self,
        call: Call,
        function: Any,
        args: tuple[Any, ...],
        encoded: Encoded | bytes,
        header: dict[str, Any] | None,
        letter: Letter | None,
        parcel: Parcel,
    ) -> bool:
        """Say whether a call leaves now. It is in no table yet."""

    def post(
        self,
        peer: Peer,
        function: Any,
        args: tuple[Any, ...],
        encoded: Encoded,
        header: dict[str, Any] | None,
        chain: int,
        parcel: Parcel,
    ) -> bool:
        """Say whether a post leaves now.

        Raises:
            RpcError: it will not arrive.
        """

    def answer(
        self,
        conn: Any,
        kind: int,
        id: int,
        encoded: Encoded | Plain,
        header: dict[str, Any] | None,
        execution: Execution | None,
        parcel: Parcel | None,
    ) -> bool:
        """Say whether the answer to a call leaves now. ``conn`` is None for one of this worker to itself."""

    def notice(self, peer: Peer, name: str, body: bytes) -> bool:
        """Send a notice, or see to it otherwise; return what :meth:`Agent.notify` is to return."""
