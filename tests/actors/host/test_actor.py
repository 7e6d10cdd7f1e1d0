"""Hosted actors: orders to make one that come in pieces."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import actorrpc
from actorrpc.actors.host.mailbox import Mailbox
from actorrpc.actors.host.registry import ActorRegistry
from actorrpc.testing import InProcessCluster


@actorrpc.remote
class Keeper:
    def __init__(self, given: list[float]) -> None:
        self.given = given

    def count(self) -> int:
        return len(self.given)


def test_an_actor_whose_order_is_whole_only_when_its_thread_has_looked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = threading.Event()
    look, take = Mailbox.take, ActorRegistry.take

    def looking(mailbox: Mailbox, *given: Any) -> Any:
        found = look(mailbox, *given)
        if found[0] is None:
            looked.set()
        return found

    def taking(registry: ActorRegistry, *given: Any) -> None:
        assert looked.wait(30)
        take(registry, *given)

    monkeypatch.setattr(Mailbox, "take", looking)
    with InProcessCluster(2, clock="real"):
        monkeypatch.setattr(ActorRegistry, "take", taking)
        large = [float(each) for each in range(20_000)]  # it travels in chunks
        keeper = Keeper.options(worker="worker1").remote(large)
        ready = actorrpc.ready(keeper)
        monkeypatch.setattr(ActorRegistry, "take", take)
        actorrpc.get(ready, timeout=30)
        assert actorrpc.get(keeper.count.remote(), timeout=30) == 20_000
