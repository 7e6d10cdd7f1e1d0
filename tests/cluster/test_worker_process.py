"""A process of an actor: what it does where it is not wanted any more when it is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
