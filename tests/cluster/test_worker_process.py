"""A process of an actor: what it does when it starts, also if nobody wants it by then."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

import actorrpc
from actorrpc.cluster import worker_process
from actorrpc.errors import PeerDiedError, RpcError, ShutdownError
from actorrpc.wire.identity import WorkerRecord


@pytest.mark.parametrize("error", [ShutdownError, PeerDiedError, RpcError])
def test_a_process_that_nobody_waits_for_any_more_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, error: type[RpcError]
) -> None:
    record = WorkerRecord(name="driver", rank=0, incarnation="a" * 32, host="here")
    job: dict[str, Any] = {
        "threads": 1,
        "driver": record.to_bytes(),
        "name": "Counter-1",
        "rank": 1,
        "settings": {},
        "key": b"k" * 32,
        "timeout": 60.0,
        "namespace": "",
    }

    def refused(*_: Any, **__: Any) -> Any:
        raise error("nobody waits for 'Counter-1' any more")

    monkeypatch.setattr(worker_process.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(worker_process, "group", SimpleNamespace(enter=lambda *_, **__: None))
    monkeypatch.setattr(worker_process, "enter", refused)
    if error is RpcError:
        with pytest.raises(RpcError):
            worker_process._work(job)
    else:
        worker_process._work(job)


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
