"""progress() and as_completed(progress=True): what they return, and the bar that they show."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tqdm

from actorrpc import errors, rpc
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.refs.results import StoredResult
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.refs.wait import as_completed, get, progress
from actorrpc.futures import Future
from tests.actors.bare import alone


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A group of this process alone."""
    with alone():
        yield


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tqdm's thread, which stays for as long as the process."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


def _refs(count: int) -> tuple[list[Future[Any]], list[ObjectRef[Any]]]:
    futures: list[Future[Any]] = [Future() for _ in range(count)]
    return futures, [ObjectRef(future, label=f"w{n}") for n, future in enumerate(futures)]


def test_results_come_in_order_and_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    futures, refs = _refs(2)
    future: Future[Any] = Future()
    kept: ObjectRef[Any] = ObjectRef.of(StoredResult(rpc.RRef(Snapshot.of("kept"))))

    def end() -> None:
        for number, each in reversed(list(enumerate((*futures, future)))):
            each.set_result(number)

    thread = threading.Thread(target=end)
    thread.start()
    items: list[Any] = [*refs, future, kept, rpc.RRef("own"), refs[0]]
    assert progress(items, description="squares") == [0, 1, 2, "kept", "own", 0]
    thread.join()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.search(r"squares: 100%\|.*\| 6/6 \[.*\n$", shown.err)


def test_the_first_failure_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    futures, refs = _refs(3)
    futures[2].set_result(2)
    futures[1].set_exception(ValueError("the second one"))
    with pytest.raises(ValueError, match="the second one"):
        progress(refs)
    assert "1/3" in capsys.readouterr().err
    futures[0].set_exception(ValueError("which nobody looks at any more"))
    del futures, refs


def test_it_has_a_time_out(capsys: pytest.CaptureFixture[str]) -> None:
    futures, refs = _refs(2)
    futures[0].set_result(0)
    with pytest.raises(errors.RpcTimeoutError, match=r"one of 1 results was not complete within 0\.01 s"):
        progress(refs, timeout=0.01)
    futures[1].set_result(1)
    assert progress(refs) == [0, 1]
    assert capsys.readouterr().err.count("\n") == 2  # both bars have ended


def test_what_waits_shows_the_search_for_deadlocks_all_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    futures, refs = _refs(2)
    seen: list[list[Any]] = []
    wait = Future.wait

    def look(self: Future[Any], timeout: float | None = None) -> Any:
        if "several results" in self.label:
            seen.append([each.future for each in self.awaits])  # type: ignore[attr-defined]
            for each in futures:
                each.set_result(None)
        return wait(self, timeout)

    monkeypatch.setattr(Future, "wait", look)
    progress(refs)
    assert seen == [futures]
    assert "2/2" in capsys.readouterr().err


def test_nothing_to_wait_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress([]) == []
    assert list(as_completed([], progress=True)) == []
    with pytest.raises(TypeError, match=r"progress\(\) takes ObjectRefs"):
        progress([1])  # type: ignore[list-item]
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_as_completed_shows_what_was_taken(asynchronous: bool, capsys: pytest.CaptureFixture[str]) -> None:
    futures, refs = _refs(2)
    for number in (1, 0):
        futures[number].set_result(number)

    async def taken() -> list[Any]:
        return [get(ref) async for ref in as_completed(refs, progress=True)]

    if asynchronous:
        assert sorted(asyncio.run(taken())) == [0, 1]
    else:
        assert sorted(map(get, as_completed(refs, progress=True))) == [0, 1]
    assert re.search(r"100%\|.*\| 2/2 \[.*\n$", capsys.readouterr().err)
    list(as_completed(refs))
    assert capsys.readouterr().err == ""


def test_without_tqdm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    futures, refs = _refs(1)
    futures[0].set_result(0)
    for wait in (progress, lambda items: as_completed(items, progress=True)):
        with pytest.raises(errors.ConfigError, match=r"pip install 'actorrpc\[progress\]'"):
            wait(refs)


@pytest.mark.slow
def test_nothing_imports_tqdm_before_it_is_used() -> None:
    program = "import sys, actorrpc; print('tqdm.auto' in sys.modules)"  # torch imports tqdm
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "False\n"
