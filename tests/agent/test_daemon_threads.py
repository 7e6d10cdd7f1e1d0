"""Threads that leave while the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from actorrpc.agent import daemon_threads
from actorrpc.agent.daemon_threads import Daemon
from tests import output

# What torch keeps for a thread is let go when Python is done with it; it takes its time over it, and needs the interpreter.
_SCRIPT = """if True:
    import sys, time
    import torch
    import actorrpc.rpc as rpc

    class Slow:
        def __del__(self):
            time.sleep(0.3)
            print("let go", flush=True)

    def keep():
        torch._C._stash_obj_in_tls("of this thread", Slow())

    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[1]))
    rpc.rpc_sync("worker0", keep)
    rpc.shutdown()
"""


@pytest.mark.slow
def test_the_end_of_the_interpreter_waits_for_threads_on_their_way_out(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, f"file://{tmp_path}/store"],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (0, "let go\n"), done.stderr
    output.check(done.stderr)


def test_threads_that_are_gone_are_forgotten() -> None:
    gates = [threading.Event() for _ in range(100)]
    threads = [Daemon(gate.wait, "t") for gate in gates]
    for thread, gate in zip(threads, gates, strict=True):
        thread.start()
        gate.set()
        thread.join()
    while any(daemon_threads._is_there(thread.native_id) for thread in threads if thread.native_id):
        time.sleep(0.001)
    daemon_threads._forget()
    assert not {thread.native_id for thread in threads} & set(daemon_threads._leaving)


def test_nobody_is_waited_for_who_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_threads, "_WAIT_S", 0.01)
    daemon_threads._leaving.append(threading.get_native_id())
    daemon_threads._see_off()
    daemon_threads._leaving.remove(threading.get_native_id())


def test_a_thread_in_our_own_code_is_waited_for_and_one_in_code_of_others_is_not() -> None:
    namespace: dict[str, object] = {"__name__": "actorrpc.made", "ended": (ended := []), "time": time}
    ours = str(Path(daemon_threads.__file__).with_name("made.py"))
    exec(compile("def run():\n    time.sleep(0.2)\n    ended.append(1)\n", ours, "exec"), namespace)
    gate = threading.Event()
    of_others, of_ours = Daemon(lambda: gate.wait(), "others"), Daemon(namespace["run"], "ours")  # type: ignore[arg-type]
    of_others.start()
    of_ours.start()
    try:
        daemon_threads._see_off()
        assert ended == [1]
        assert of_others.is_alive()
    finally:
        gate.set()
        of_others.join()
    assert not {of_others, of_ours} & daemon_threads._running


@pytest.mark.prints("the thread wrong has ended unexpectedly")
@pytest.mark.parametrize("error", [LookupError("no"), SystemExit(3)])
def test_one_that_raises_says_so_and_leaves_as_well(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[object] = []

    def wrong() -> None:
        raise error

    thread = Daemon(wrong, "wrong", told.append)
    thread.start()
    thread.join()
    assert told == [error]
    assert "the thread wrong has ended unexpectedly\nTraceback" in caplog.text
    caplog.clear()
    daemon_threads._see_off()
    assert thread.native_id not in daemon_threads._leaving
