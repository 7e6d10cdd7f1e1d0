"""The process of an actor: its start, also if the driver no longer waits for it, and its garbage collector."""

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
def test_a_worker_whose_driver_is_gone_or_no_longer_expects_it_ends_quietly(
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
        raise error("'Counter-1' is no longer expected")

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
    """An actor that inspects the garbage collector of its process."""

    def __init__(self) -> None:
        self.own = [[]]  # type: ignore[var-annotated]

    def examines(self) -> tuple[bool, bool]:
        """Return whether the collector examines objects of imports, and objects of the actor."""
        found = {id(each) for each in gc.get_objects()}
        return id(_MADE_BY_AN_IMPORT) in found, id(self.own) in found


def test_the_garbage_collector_of_an_actors_process_skips_objects_of_imports() -> None:
    frozen = gc.get_freeze_count()
    with actorrpc.init():
        actor = actorrpc.remote(Collector).remote()
        assert actorrpc.get(actor.examines.remote(), timeout=30) == (False, True)
    assert gc.get_freeze_count() <= frozen  # the driver's objects are not frozen
