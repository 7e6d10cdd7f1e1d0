"""A program with five simultaneous faults: each command names all of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorrpc.cli.dashboard.feed import Feed
from actorrpc.observe.outside import find_groups, look
from tests.cluster.drive import python
from tests.dashboard.fakes import served

pytestmark = [pytest.mark.slow, pytest.mark.limit(120)]

_PROGRAM = """
import ctypes, os, signal, sys, threading
import actorrpc

@actorrpc.remote
class Left:
    def meet(self, right):
        return actorrpc.get(right.meet_again.remote(actorrpc.current_actor()))

    def end(self):
        return 1

@actorrpc.remote(reentrant=False)
class Right:
    def meet_again(self, left):
        return actorrpc.get(left.end.remote())

@actorrpc.remote
class Stuck:
    def in_c(self, path):
        ctypes.PyDLL(None).open(path.encode(), os.O_RDONLY)

@actorrpc.remote
class Worker:
    def pid(self):
        return os.getpid()

@actorrpc.remote
class Source:
    def numbers(self):
        yield from range(10_000)

if __name__ == "__main__":
    # With this heartbeat, the stopped worker is not declared dead during the tests.
    actorrpc.init(num_cpus=8, log_to_driver=False, heartbeat=60.0)
    left, right = Left.options(reentrant=False).remote(), Right.remote()
    stuck, stopped, dead, source = Stuck.remote(), Worker.remote(), Worker.remote(), Source.remote()
    actorrpc.get([actorrpc.ready(each) for each in (left, right, stuck, stopped, dead, source)])
    circle = left.meet.remote(right)
    in_c = stuck.in_c.remote(sys.argv[1])
    stream = source.numbers.options(backpressure=8).remote()
    print(actorrpc.get(next(stream)))
    os.kill(actorrpc.get(stopped.pid.remote()), signal.SIGSTOP)
    os.kill(actorrpc.get(dead.pid.remote()), signal.SIGKILL)
    try:
        actorrpc.get(circle)
    except actorrpc.DeadlockError:
        pass
    print("all of it has happened", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a shell in which the program can be found; it runs until the end of the module."""
    folder = tmp_path_factory.mktemp("five")
    run = folder / "run"
    run.mkdir(mode=0o700)
    gate = folder / "gate"
    os.mkfifo(gate)
    program = folder / "program.py"
    program.write_text(textwrap.dedent(_PROGRAM))
    found = {"ACTORRPC_RUNTIME_DIR": str(run)}
    streams = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with python(str(program), str(gate), env=found, **streams) as process:
        try:
            assert process.stdout is not None
            while "all of it" not in (line := process.stdout.readline()):
                assert line, "the program has ended"
            yield found | {"PROGRAM_PID": str(process.pid)}  # this user may have other groups
        finally:
            process.kill()


def _actorrpc(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    words = (arguments[0], "--pid", environment["PROGRAM_PID"], *arguments[1:])
    process = python("-m", "actorrpc", *words, env=environment)
    out, err = process.communicate()
    assert err == ""
    return process.returncode, out


_FAULTS = (
    r"worker 'Worker-\d' \(pid \d+\) is stopped: .*SIGSTOP",
    r"worker 'Stuck-\d' \(pid \d+\) is busy: .*code in C holds the GIL.*; on it: Stuck#",
    r"worker '(Left|Right)-\d' broke a deadlock \d+ s ago: .* wait for each other in a circle",
    r"Worker#\w+ is dead .*SIGKILL",
    r"the stream of Source#\w+\.numbers\(\) on 'Source-\d' pauses: 'driver' has not taken 8 items",
)


@pytest.mark.parametrize(("command", "status"), [("status", 1), ("stack", 1), ("trace", 1), ("logs", 0)])
def test_status_stack_trace_and_logs_name_each_fault(
    environment: dict[str, str], command: str, status: int, tmp_path: Path
) -> None:
    options = ["-o", str(tmp_path / "trace.json")] if command == "trace" else []
    found, text = _actorrpc(environment, command, *options)
    assert found == status
    for fault in _FAULTS:
        assert re.search(rf"(?m)^\* {fault}", text), fault
    if command == "stack":
        assert re.search(r"worker Stuck-\d \(pid \d+\) is busy: .*its stacks were dumped by a signal", text)
        assert re.search(r"(?m)^    in_c  .*program\.py:\d+$", text)
        assert re.search(
            r"numbers\(\) for 'driver', .* old; waits for 'driver' to take some of 8 items", text
        )


def test_filtered_logs_print_only_log_lines(environment: dict[str, str]) -> None:
    for options in (["--grep", "x^"], ["driver"], ["--json"]):
        _, text = _actorrpc(environment, "logs", *options)
        assert "is stopped" not in text


def test_the_dashboard_names_each_fault(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_RUNTIME_DIR", environment["ACTORRPC_RUNTIME_DIR"])
    (group,) = find_groups(int(environment["PROGRAM_PID"]))
    feed = Feed(lambda parts, begin=None: look(group, parts, 5.0, begin=begin), lambda: [group])
    with served(feed) as page:
        status, _, body = page.ask("api/now", Cookie=page.log_in())
    assert status == 200
    descriptions = [each["what"] for each in json.loads(body)["findings"]]
    for fault in _FAULTS:
        assert any(re.search(fault, each) for each in descriptions), (fault, descriptions)
