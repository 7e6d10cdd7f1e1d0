"""Mailbox messages that a worker cannot accept."""

from __future__ import annotations

from typing import Any

import pytest

from actorrpc.agent.calls import MAILBOX_BIT, MailHeader
from actorrpc.agent.executor import path_of
from actorrpc.errors import ProtocolError, RpcError
from actorrpc.futures import Future
from tests.agent.agents import agents


def test_a_worker_without_actors_refuses_mailbox_messages() -> None:
    with agents(2) as (a0, _):
        for to in ("a1", "a0"):
            future: Future[Any] = Future()
            a0.call(a0.peer(to), None, (1,), {}, 10.0, future=future, mail=MailHeader({"method": "hello"}))
            with pytest.raises(RpcError, match="has no actors") as raised:
                future.wait(20)
            assert raised.value.maybe_executed is False


_EXECUTIONS = [1 << MAILBOX_BIT | 5, 1 << MAILBOX_BIT | 7]


def test_a_malformed_execution_path_is_a_protocol_error() -> None:
    assert path_of({}, 5) == ()
    assert path_of({"path": [1]}, _EXECUTIONS[0]) == (1, _EXECUTIONS[0])
    for wrong in ("x", 5, [None]):
        with pytest.raises(ProtocolError):
            path_of({"path": wrong}, _EXECUTIONS[0])
