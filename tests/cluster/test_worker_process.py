"""A process of an actor: what it does when it starts, also if nobody wants it by then."""

from __future__ import annotations

import gc

import actorrpc

_MADE_BY_AN_IMPORT = [[]]  # type: ignore[var-annotated]


class Collector:
    """Say what the garbage collector of a process goes through."""

    def __init__(self) -> None:
        self.own = [[]]  # type: ignore[var-annotated]

    def goes_through(self) -> tuple[bool, bool]:
        """Say whether it goes through what an import has made, and through what the actor has made."""
        found = {id(each) for each in gc.get_objects()}
        return id(_MADE_BY_AN_IMPORT) in found, id(self.own) in found


def test_the_collector_of_an_actors_process_passes_over_what_imports_have_made() -> None:
    frozen = gc.get_freeze_count()
    with actorrpc.init():
        actor = actorrpc.remote(Collector).remote()
        assert actorrpc.get(actor.goes_through.remote(), timeout=30) == (False, True)
    assert gc.get_freeze_count() <= frozen  # leak tools of the driver see everything
