"""Messages of serialization and task errors name the argument, the method, the result or the task."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc.errors import SerializationError
from tests.actors.e2e.kit import Gate, until

pytestmark = [pytest.mark.usefixtures("embedded"), pytest.mark.limit(20)]

_lock = threading.Lock()


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()


@actorrpc.remote
class Speaker:
    def __init__(self, *parts: Any) -> None: ...

    def take(self, first: Any, /, *rest: Any, more: Any = None) -> int:
        return 1

    def give(self) -> Any:
        return {"a": [Locked()]}

    async def give_later(self) -> Any:
        return Locked()

    def stream(self) -> Any:
        yield 0
        yield Locked()

    def big(self) -> torch.Tensor:
        return torch.ones(1 << 20)


@actorrpc.remote
def take(what: Any) -> int:
    return 1


@actorrpc.remote
def give() -> Locked:
    return Locked()


@actorrpc.remote
def wait_for(gate: Any) -> None:
    actorrpc.get(gate.wait.remote())


def test_the_error_of_an_unpicklable_argument_names_argument_method_and_path() -> None:
    actor = Speaker.remote()
    actorrpc.get(actor.take.remote(1))
    for call, expected in (
        (lambda: actor.take.remote(_lock), "argument 'first' of Speaker.take(): cannot pickle"),
        (lambda: actor.take.remote(1, 2, [_lock]), "argument number 3 of Speaker.take() -> index 0: cannot"),
        (
            lambda: actor.take.remote(1, more={"k": Locked()}),
            "argument 'more' of Speaker.take() -> key 'k' -> attribute 'lock': ",
        ),
        (lambda: actor.rpc_sync().take(_lock), "argument 'first' of Speaker.take(): "),
        (lambda: Speaker.remote(_lock), "argument number 1 of Speaker.__init__(): "),
        (lambda: take.remote(Locked()), "argument 'what' of take() -> attribute 'lock': "),
        (lambda: actorrpc.remote(lambda: _lock).remote(), "the function <lambda> -> global '_lock': "),
    ):
        with pytest.raises(SerializationError) as caught:
            call()
        assert str(caught.value).startswith(expected), str(caught.value)


def test_the_error_of_an_unpicklable_result_names_method_and_path() -> None:
    actor = Speaker.remote()
    for call, expected in (
        (actor.give, "the result of Speaker.give cannot be sent: key 'a' -> index 0 -> attribute 'lock': "),
        (actor.give_later, "the result of Speaker.give_later cannot be sent: attribute 'lock': "),
        (give, "the result of task give cannot be sent: attribute 'lock': "),
    ):
        with pytest.raises(SerializationError) as caught:
            actorrpc.get(call.remote())
        assert str(caught.value).startswith(expected), str(caught.value)
    with pytest.raises(SerializationError, match="item 1 of the stream cannot be sent: attribute 'lock'"):
        list(actor.stream.remote().values())


def test_errors_of_tasks_name_the_task() -> None:
    gate = Gate.remote()
    with pytest.raises(actorrpc.RpcTimeoutError, match=r"the call of task wait_for .*timed out"):
        actorrpc.get(wait_for.options(timeout=0.1).remote(gate))
    late = wait_for.options(name="patience").remote(gate)
    until(lambda: actorrpc.get(gate.count.remote()))
    actorrpc.cancel(late)
    with pytest.raises(actorrpc.CancelledError, match="the call of task patience"):
        actorrpc.get(late)
    with pytest.raises(actorrpc.PlacementError, match="'task worker' needs CPU 1000"):
        actorrpc.get(take.options(num_cpus=1000).remote(1))
