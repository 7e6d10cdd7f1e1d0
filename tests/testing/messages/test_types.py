"""Which type a message has."""

from __future__ import annotations

import operator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actorrpc.actors.supervision import supervisor
from actorrpc.agent.hooks import RECEIPT
from actorrpc.agent.mail import MailHeader
from actorrpc.autograd import transport
from actorrpc.autograd.messages import Discover, Gradient, Release, Run, Verdict
from actorrpc.cluster import driver_rpc
from actorrpc.compat.rpc import api as compat_api
from actorrpc.group import group
from actorrpc.rpc import rref
from actorrpc.rpc.refcount import messages as forks
from actorrpc.testing.messages.types import MESSAGES, Message, names_of, type_of_notice, type_of_request

RREF, FORK = forks.RRefId(0, 1, "a"), forks.ForkId(0, 2, "a")
SERVE = transport.serve
GRADIENT = transport.fields_of(Gradient(1, 2, 3, 4, []))
RUN = transport.fields_of(Run(1, 2, [], False, False, "context", 0.0, []))
DISCOVER = transport.fields_of(Discover(1, [2]))


@torch.jit.script
def scripted(t):  # type: ignore[no-untyped-def]
    return t


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (operator.add, (1, 2), ("call", operator.add, None)),
        (scripted, (1,), ("call", scripted, None)),
        (partial(operator.add, 1), (), ("call", None, None)),
        (rref._create, (RREF, FORK, operator.add, (1, 2), {}), ("remote", operator.add, RREF)),
        (rref._create, (RREF, FORK, rref._invoke_kept, (None, RREF, "m", (), {}), {}), ("remote", "m", RREF)),
        (rref._invoke, (RREF, "m", (), {}), ("call", "m", RREF)),
        (rref._with_value, (RREF, operator.add, ()), ("call", operator.add, RREF)),
        (rref._fetch, (RREF,), ("to_here", None, RREF)),
        (rref._backward, (RREF, 1, False), ("autograd_backward", None, RREF)),
        (SERVE, GRADIENT, ("autograd_gradient", None, None)),
        (SERVE, RUN, ("autograd_backward", None, None)),
        (SERVE, DISCOVER, ("autograd_backward", None, None)),
        (supervisor.Supervisor.locate, (), ("actor_control", None, None)),
        (group._arrive, (0, "a"), ("group_control", None, None)),
        (driver_rpc.ask, ("register", b""), ("group_control", None, None)),
        (compat_api._by_name, ("x",), ("group_control", None, None)),
        (compat_api._run_packed, (b"", []), ("call", compat_api._run_packed, None)),
    ],
)
def test_requests(function: Any, args: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    found = type_of_request(function, args, None, "label")
    assert found[0] in MESSAGES
    assert found[0::2] == expected[0::2]
    assert found[1] == (function if isinstance(function, partial) else expected[1])


def test_letters() -> None:
    method = type_of_request(None, (), MailHeader({"mailbox": 1, "method": "add"}), "Counter.add")
    assert method == ("actor_call", "Counter.add", None)
    assert (
        type_of_request(None, (), MailHeader({"mailbox": 1, "creates": True}), "Counter()")[0]
        == "actor_control"
    )


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        (RECEIPT, forks.pack_message(forks.UserDelete(((RREF, FORK),))), "rref_delete"),
        (RECEIPT, forks.pack_message(forks.ForkRequest(((RREF, FORK),))), "rref_fork"),
        (RECEIPT, forks.pack_message(forks.ForkAck(((RREF, FORK, True),))), "rref_fork_ack"),
        (RECEIPT, forks.pack_message(forks.ChildAccept(((FORK,),))), "rref_accept"),
        (transport.NOTICE, transport.pack_notice(Verdict(1, 2, True)), "autograd_verdict"),
        (transport.NOTICE, transport.pack_notice(Release(1)), "autograd_release"),
        ("another", b"", None),
    ],
)
def test_notices(name: str, body: bytes, expected: str | None) -> None:
    assert type_of_notice(name, body) == expected
    assert expected is None or expected in MESSAGES


def test_names() -> None:
    assert names_of("Counter.add") == ("Counter.add", "add", ":Counter.add")
    assert names_of(partial(partial(operator.add, 1), 2))[1] == "add"
    assert names_of(scripted)[0] == "scripted"
    assert names_of(torch.add)[1] == "add"
    assert names_of(3) == ()


def test_the_key_of_a_message_is_that_of_its_contents() -> None:
    one, two = (SimpleNamespace(name=name) for name in ("a", "b"))
    keys = [
        Message(type, peer, None, parts).key()  # type: ignore[arg-type]
        for type, peer, parts in (
            ("call", one, [b"x"]),
            ("call", two, [b"x"]),
            ("remote", one, [b"x"]),
            ("call", one, [b"y"]),
        )
    ]
    assert len(set(keys)) == 4
    assert Message("call", one, operator.add, [b"x"]).key() == keys[0]  # type: ignore[arg-type]
