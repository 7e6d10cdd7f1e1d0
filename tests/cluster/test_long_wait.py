"""Log messages about long waits of scale(), init() and joining."""

from __future__ import annotations

import gc
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from actorrpc.cluster import LaunchedEngine, LaunchRequest, Node, init, scale
from actorrpc.cluster.join import join
from actorrpc.cluster.launch_meeting import LaunchMeeting
from actorrpc.errors import RendezvousError
from actorrpc.group.launchers import Launch
from actorrpc.wire.keys import Key
from tests.ports import free_port

_BOUND_S = 20.0  # bound of waits that would not end without the log message


class _Lines(logging.Handler):
    """Collects log messages, and calls ``then`` after each."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.then: Callable[[], None] = lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.then()


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Lines]:
    """Log messages about waits, with every wait considered long."""
    monkeypatch.setattr("actorrpc.group.store.SOON_S", 0.0)
    handler, logger = _Lines(), logging.getLogger("actorrpc.cluster")
    logger.propagate = False
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.propagate = True


class _BlockedEngine(LaunchedEngine):
    """An engine whose starts fail when the gate is opened."""

    name = "held"

    def __init__(self) -> None:
        super().__init__(start_timeout=_BOUND_S)
        self.gate = threading.Event()

    def nodes(self) -> list[Node]:
        return [Node(host="here", num_cpus=2)]

    def launch(self, order: LaunchRequest) -> None:
        self.gate.wait(_BOUND_S)
        raise OSError(f"nothing is started for {order.name}")

    def stop(self, worker: str) -> None:
        """Do nothing: no worker was started."""


def test_scale_logs_the_workers_that_have_not_started(messages: _Lines) -> None:
    engine = _BlockedEngine()
    messages.then = engine.gate.set

    def fails() -> None:
        with init(engine=engine), pytest.raises(OSError, match="nothing is started for"):
            scale(2)

    fails()
    gc.collect()  # the unretrieved error of the other start is not reported
    assert [text for text in messages.texts if "waits for" in text] == [
        "scale(2) waits for the start of 'worker-held-1', the start of 'worker-held-2'"
    ]


def _launch(rank: int) -> Launch:
    return Launch(
        launcher="test", rank=rank, size=3, local_rank=rank, master="127.0.0.1", port=29400, run="one"
    )


def _meetings(store: Any, timeout: float = _BOUND_S) -> list[LaunchMeeting]:
    return [LaunchMeeting(_launch(rank), store, timeout) for rank in range(2)]


def _arrive(address: str, key: Key, left: float) -> tuple[str, Key]:
    return address, key


def test_init_logs_the_ranks_that_have_not_joined(messages: _Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorrpc.group.rank0.SILENT_S", 0.0)
    monkeypatch.setenv("ACTORRPC_KEY", "0" * 32)
    first, second = _meetings(HashStore())
    messages.then = lambda: first.announce("tcp://here:1")
    assert second.reach(_arrive)[0] == "tcp://here:1"
    joined: set[int] = set()
    messages.then = lambda: joined.update((1, 2))
    first.wait_for(joined, _BOUND_S)
    assert messages.texts == [
        "init() on rank 1 waits for rank 0",
        "init() on rank 0 waits for 2 of 3 ranks to join: 1, 2",
    ]


def test_a_rank_waits_for_the_next_rank_0_if_the_key_file_was_removed(
    messages: _Lines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("actorrpc.group.rank0.SILENT_S", 0.0)
    for name in ("ACTORRPC_KEY", "ACTORRPC_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACTORRPC_RUNTIME_DIR", str(tmp_path / "run"))
    store = HashStore()
    (ended, rank), (later, _) = _meetings(store), _meetings(store)
    ended.announce("tcp://here:1")
    ended.close()
    messages.then = lambda: later.announce("tcp://here:2")
    assert rank.reach(_arrive) == ("tcp://here:2", Key.from_text(later.secret))
    later.close()


def test_joining_logs_the_address_that_does_not_answer(messages: _Lines) -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(RendezvousError, match="no driver answers"):
        join(where, key=Key.from_text("0" * 32), timeout=0.01)
    assert len(messages.texts) == 1
    assert re.match(f"joining waits for a driver to answer at {where}: .*refused", messages.texts[0])
