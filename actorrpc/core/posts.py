"""Posts: requests that nobody waits for and that have no answer.

For protocols that hear of their failures in another way: an answer costs a worker as much as half of the request. A post
is executed like any call, on a pool thread, in no order with others; what it raises is logged there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from actorrpc.core import frames, messages
from actorrpc.core.calls import CURRENT
from actorrpc.core.interceptors import recorded
from actorrpc.errors import ShutdownError

if TYPE_CHECKING:
    from actorrpc.core.agent import Agent
    from actorrpc.core.peer import Peer

__all__ = ["post"]

_INFINITE: Final = float("inf")


def post(
    agent: Agent, peer: Peer, function: Any, args: tuple[Any, ...], label: str, *, record: bool = True
) -> None:
    """Have a worker call ``function(*args)`` some time; it is on its way when this returns. Thread-safe.

    Args:
        record: show the tensors to the agent's recorder.

    Raises:
        SerializationError, LimitError: it cannot be sent.
        PeerDiedError, ShutdownError: it was not sent, or not all of it.
    """
    if agent.closed_down:
        raise ShutdownError(f"worker {agent.name!r} has shut down", maybe_executed=False)
    if peer.state != "alive":
        peer.check_alive(f"cannot call {label}")
    current = CURRENT.get()
    parcel = messages.Parcel(peer)
    header: dict[str, Any] | None = None
    if current is not None and len(current.path) > 1:
        header = {"w": current.path[:-1]}
    try:
        encoded = agent.encode((function, args, {}), parcel)
        if record and (agent.recorder.live or encoded.grad):
            header = recorded(agent.recorder, header, encoded.tensors, peer)
        if parcel.sent:
            header = agent.announce(parcel, header)
        id, chain = next(peer.ids), 0 if current is None else current.chain
        gate = agent.gate
        if gate is not None and not gate.post(peer, function, args, encoded, header, chain, parcel):
            return
        if peer.is_self:
            agent.loop_back(frames.REQUEST, id, encoded, header, _INFINITE, chain, frames.POST)
            return
        conn = peer.conn
        if conn is None or conn.broken:
            agent.links.connect(peer, _INFINITE, label)
            conn = peer.conn
            assert conn is not None
        messages.send(
            agent,
            conn,
            frames.REQUEST,
            id,
            encoded,
            remaining=_INFINITE,
            chain=chain,
            header=header,
            flags=frames.POST,
        )
    except BaseException:
        if parcel.sent:
            agent.roll_back(parcel)
        raise
    conn.flush()
