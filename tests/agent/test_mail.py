"""Mailbox messages: they reach the mail router in the order of the wire, whatever their size."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from actorrpc.agent import outbound
from actorrpc.agent.agent import Agent
from actorrpc.agent.calls import MAILBOX_BIT, Execution, MailHeader
from actorrpc.agent.executor import path_of
from actorrpc.errors import ProtocolError, RpcError
from actorrpc.futures import Future
from actorrpc.wire.frames import Frame, unpack_header
from tests.agent.agents import agents


class Router:
    """Records the order in which messages arrive, and answers each complete message with its name."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.places: list[int] = []
        self.given_up: list[int] = []
        self.grew = threading.Condition()
        agent.inbox.mail_router = self

    def deliver(self, conn: Any, peer: Any, frame: Frame) -> None:
        with self.grew:
            if frame.id not in self.places:
                self.places.append(frame.id)
            self.grew.notify_all()
        self.agent.submit(lambda: self._open(conn, peer, frame))

    def _open(self, conn: Any, peer: Any, frame: Frame) -> None:
        header = unpack_header(frame.extra)
        args, _ = outbound.opened(self.agent, conn, frame, peer, header)
        self.agent.executor.answer(Execution(conn, peer, frame.id, 0.0, 0), (header["method"], len(args)))
        if conn is not None:
            conn.flush()

    def announce(self, conn: Any, peer: Any, frame: Frame) -> bool:
        with self.grew:
            self.places.append(frame.id)
        return True

    def complete(self, conn: Any, peer: Any, frame: Frame) -> None:
        assert frame.id in self.places
        self.deliver(conn, peer, frame)

    def abandon(self, peer: Any, id: int) -> None:
        with self.grew:
            self.given_up.append(id)
            self.grew.notify_all()


def _send(agent: Agent, to: str, name: str, *args: Any, timeout: float = 10.0) -> tuple[Any, Future[Any]]:
    future: Future[Any] = Future()
    call = agent.call(
        agent.peer(to),
        None,
        args,
        {},
        timeout,
        future=future,
        label=name,
        mail=MailHeader({"method": name}),
    )
    return call, future


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "stream"])
@pytest.mark.parametrize("to", ["a1", "a0"], ids=["another", "itself"])
def test_mailbox_messages_reach_the_router_in_order_whatever_their_size(lane: bool, to: str) -> None:
    with agents(2, lane=lane) as (a0, a1):
        router = Router(a1 if to == "a1" else a0)
        sizes = [0, 3_000_000, 10, 100_000, 0, 2_000_000, 1]
        sent = [_send(a0, to, f"n{number}", torch.zeros(size)) for number, size in enumerate(sizes)]
        assert [future.wait(20) for _, future in sent] == [(f"n{number}", 1) for number in range(len(sizes))]
        assert router.places == [call.id for call, _ in sent]


def test_a_worker_without_actors_refuses_mailbox_messages() -> None:
    with agents(2) as (a0, _):
        for to in ("a1", "a0"):
            with pytest.raises(RpcError, match="has no actors") as raised:
                _send(a0, to, "hello", 1)[1].wait(20)
            assert raised.value.maybe_executed is False


_EXECUTIONS = [1 << MAILBOX_BIT | 5, 1 << MAILBOX_BIT | 7]


def test_a_malformed_execution_path_is_a_protocol_error() -> None:
    assert path_of({}, 5) == ()
    assert path_of({"path": [1]}, _EXECUTIONS[0]) == (1, _EXECUTIONS[0])
    for wrong in ("x", 5, [None]):
        with pytest.raises(ProtocolError):
            path_of({"path": wrong}, _EXECUTIONS[0])
