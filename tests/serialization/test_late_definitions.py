"""Classes and functions that a script defines after it has joined its group can be sent to other ranks of the script."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests import output
from tests.cluster.joiners import run_ranks

# A module that all ranks can import.
_SHARED = """
    import threading

    go, defined = threading.Event(), threading.Event()
    own = None  # the class as the script of this rank knows it


    def set_go():
        go.set()


    def is_own(thing):
        assert defined.wait(20)
        return isinstance(thing, own)
"""

_JOINS = """
    import os

    import shared

    import actorrpc
    from actorrpc import rpc


    class Early:
        pass


    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
"""

_DEFINES = """
    class Late(Early):
        def __init__(self, value):
            self.value = value

        def twin(self):
            return Late(self.value)


    class Refused(Exception):
        pass


    def made(value):
        return Late(value)


    def is_late(thing):
        return isinstance(thing, Late) and isinstance(thing, Early) and type(thing.twin()) is Late


    def refuse():
        raise Refused("no")


    def passed_on(to, thing):
        return rpc.rpc_sync(to, is_late, (thing,)), rpc.rpc_sync(to, list, ([thing],))[0]


    shared.own = Late
    shared.defined.set()
    if rank == 0:

        class Only(Late):
            pass

        def only(thing):
            return isinstance(thing, Only) and isinstance(thing, Late)

        def check(to):
            assert rpc.rpc_sync(to, is_late, (Late(1),))
            assert type(rpc.rpc_sync(to, made, (2,))) is Late
            assert rpc.rpc_sync(to, only, (Only(3),))
            assert rpc.rpc_sync(to, isinstance, (Late(4), Early))
            found = rpc.rpc_sync(to, list, ([Only(5), Late(6), Early()],))
            assert [type(each) for each in found] == [Only, Late, Early]
            try:
                rpc.rpc_sync(to, refuse)
            except Refused as error:
                assert str(error) == "no"
            else:
                raise AssertionError

        @actorrpc.remote
        class Actor:
            def twin(self, thing):
                assert isinstance(thing, Late)
                return thing.twin()

            def items(self):
                yield from map(Late, range(3))

            def refuse(self):
                raise Refused("no")

        def check_actor(worker):
            actor = Actor.options(worker=worker).remote()
            assert type(actorrpc.get(actor.twin.remote(Late(1)))) is Late
            assert [type(each) for each in actor.items.remote().values()] == [Late] * 3
            assert type(actorrpc.get(actor.twin.remote(actorrpc.put(Late(2))))) is Late
            try:
                actorrpc.get(actor.refuse.remote())
            except Refused:
                return
            raise AssertionError
"""

# Rank 1 executes the definitions after it has received objects that need them.
_DEFINES_LATER = (
    _JOINS
    + """
    if rank == 1:
        assert shared.go.wait(20)
"""
    + _DEFINES
    + """
        sent = [rpc.rpc_async("worker1", shared.is_own, (kind(1),)) for kind in (Late, Only)]
        rpc.rpc_sync("worker1", shared.set_go)
        assert [each.wait() for each in sent] == [True, True]
        check("worker1")
        check_actor("worker1")
    rpc.shutdown()
"""
)

# Rank 1 never executes the definitions; it only serves calls, and sends received objects on.
_NEVER_DEFINES = (
    _JOINS
    + """
    if rank == 1:
        rpc.shutdown()
        raise SystemExit
"""
    + _DEFINES
    + """
        for _ in range(2):
            check("worker1")
            check_actor("worker1")
            for kind in (Late, Only):
                right, thing = rpc.rpc_sync("worker1", passed_on, ("worker2", kind(5)))
                assert right and type(thing) is kind
                assert rpc.rpc_sync("worker1", rpc.rpc_sync, ("worker2", shared.is_own, (kind(6),)))
            check("worker2")
    rpc.shutdown()
"""
)


def _run(folder: Path, script: str, count: int) -> None:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    (folder / "shared.py").write_text(textwrap.dedent(_SHARED))
    codes, said = run_ranks(path, count)
    assert codes == [0] * count, said
    assert [out for out, _ in said] == [""] * count
    for _, errors in said:
        output.check(errors)


@pytest.mark.slow
def test_a_rank_may_receive_objects_before_it_executes_their_definitions(tmp_path: Path) -> None:
    _run(tmp_path, _DEFINES_LATER, 2)


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_rank_that_never_executes_the_definitions_can_use_and_forward_objects(tmp_path: Path) -> None:
    _run(tmp_path, _NEVER_DEFINES, 3)
