"""Which state of a connection may follow which, and that none is lost between threads."""

from __future__ import annotations

import itertools
import threading

import pytest

from actorrpc.transport.connection_state import CLOSED, OPEN, SUSPENDED, ConnectionState, StateMachine

_MAY_FOLLOW = {(OPEN, SUSPENDED), (OPEN, CLOSED), (SUSPENDED, OPEN), (SUSPENDED, CLOSED)}


@pytest.mark.parametrize(("old", "new"), [*itertools.product(ConnectionState, repeat=2)])
def test_transitions(old: ConnectionState, new: ConnectionState) -> None:
    machine = StateMachine()
    machine.state = old
    assert machine.enter(new) is ((old, new) in _MAY_FOLLOW)
    assert machine.state is (new if (old, new) in _MAY_FOLLOW else old)
    assert machine.lapses == ((old, new) == (OPEN, SUSPENDED))


def test_what_is_closed_stays_closed_whatever_others_do_meanwhile() -> None:
    machine = StateMachine()
    begin = threading.Barrier(3)
    entered: list[bool] = []

    def swing() -> None:
        begin.wait(20)
        while machine.enter(SUSPENDED) | machine.enter(OPEN):
            pass

    threads = [threading.Thread(target=swing) for _ in range(2)]
    for thread in threads:
        thread.start()
    begin.wait(20)
    for _ in range(2):
        entered.append(machine.enter(CLOSED))
    for thread in threads:
        thread.join()
    assert entered == [True, False]
    assert machine.state is CLOSED
