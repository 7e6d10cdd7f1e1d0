"""Output of the commands for a running cluster, as text and as JSON. Words in capitals stand for varying figures."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import actorrpc
from actorrpc.agent.context import current_worker
from actorrpc.cli import doctor, gpu
from actorrpc.cli.commands import main
from actorrpc.observe import findings
from actorrpc.wire import keys
from actorrpc.wire.keys import Key
from tests.actors.e2e.kit import open_gate, pass_gate, until
from tests.cluster.drive import python
from tests.fake_devices import FakeMemory

pytestmark = [pytest.mark.limit(60)]
_ROOT = Path(__file__).resolve().parents[2]


@actorrpc.remote
class Store:
    def __init__(self) -> None:
        print("a store is made", flush=True)

    def pass_gate(self, path: str) -> str:
        return pass_gate(path)


@actorrpc.remote
class Reader:
    def __init__(self, store: Any) -> None:
        self.store = store

    def read(self, path: str) -> str:
        return str(actorrpc.get(self.store.pass_gate.remote(path)))

    def wait(self) -> None:
        pass


def _rows() -> dict[str, actorrpc.observe.ObservedActor]:
    return {each.class_name: each for each in actorrpc.state(30).actors}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster in which a reader waits for a store that is busy in C code, and a call waits for the reader."""
    gate = tmp_path_factory.mktemp("gate") / "gate"
    os.mkfifo(gate)
    with pytest.MonkeyPatch.context() as patch, actorrpc.init(num_cpus=4, log_to_driver=False):
        patch.setattr(findings, "_LONG_S", float("inf"))  # the waiting call must not become a finding
        store = Store.options(name="store").remote()
        actorrpc.get(actorrpc.ready(store))  # wait, so that its worker has number 1
        reader = Reader.options(name="reader").remote(store)
        calls = [reader.read.remote(str(gate)), reader.wait.remote()]
        until(lambda: _rows()["Store"].running and _rows()["Reader"].running[0].waits_for)
        yield
        open_gate(gate)
        actorrpc.get(calls)


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main([arguments[0], "--pid", str(os.getpid()), "--timeout", "30", *arguments[1:]])
    found = capsys.readouterr()
    assert found.err == ""
    return status, found.out


_VARIES = (
    (r"\b\d+ min\b|\b\d+ h \d\d min|\b\d+ d \d+ h|\b\d+(\.\d)? m?s\b", "TIME"),
    (r"\b\d+(\.\d)? [KMGT]?i?B\b", "SIZE"),
    (r"\bpid \d+", "pid PID"),
    (re.escape(f"({sys.argv[0]})"), "(PROGRAM)"),
    (r"\b[0-9a-f]{16}\b", "ID"),
    (rf"{re.escape(str(_ROOT))}/", ""),
    (r"\.py:\d+", ".py:LINE"),
)


def _normalized(text: str) -> str:
    for pattern, word in _VARIES:
        text = re.sub(pattern, word, text)
    return re.sub(r" +", " ", text)


def _expected(text: str) -> str:
    return re.sub(r" +", " ", text.lstrip("\n"))


def _columns(text: str) -> str:
    """Replace the figures of table rows by one word, as their width varies."""
    return re.sub(r"(?m)^(\s*\d+ \S+ \w+) .*$", r"\1 FIGURES", text)


@pytest.mark.usefixtures("job")
def test_status_lists_workers_and_classes_of_actors(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _run(capsys, "status")
    assert status == 0
    assert _columns(_normalized(text)) == _expected("""
the driver of an embedded cluster (PROGRAM), pid PID: 3 workers, 2 actors; asked in TIME

rank worker state pid host age cpu memory fds threads actors sent received
 0 driver alive FIGURES
 1 Store-1 alive FIGURES
 2 Reader-2 alive FIGURES

class alive waiting running oldest
Reader 1 1 1 TIME
Store 1 0 1 -

Nothing is wrong.
""")


def _shape(value: Any) -> Any:
    """Replace the values in JSON by the names of their types."""
    if isinstance(value, dict):
        return {key: _shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shape(value[0])] if value else []
    return type(value).__name__


@pytest.mark.usefixtures("job")
def test_status_as_json_has_workers_and_running_calls(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _run(capsys, "status", "--json")
    found = json.loads(text)
    assert (status, found["wrong"]) == (0, False)
    (group,) = found["groups"]
    assert sorted(group) == ["actors", "findings", "pids", "program", "took", "what", "workers"]
    assert [each["name"] for each in group["workers"]] == ["driver", "Store-1", "Reader-2"]
    (call,) = next(each["running"] for each in group["actors"] if each["class_name"] == "Reader")
    assert (call["method"], call["waits_for"]) == ("read", ["the call of Store.pass_gate on 'Store-1'"])


@pytest.mark.usefixtures("job")
def test_stack_shows_what_threads_run_and_wait_for(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _run(capsys, "stack", "store")
    assert status == 0
    assert _normalized(text) == _expected("""
the driver of an embedded cluster: 1 thread of 1 worker

1 thread (worker Store-1: actorrpc-actor-TITLE)
 runs Store('store').pass_gate() for Reader('reader').read() on 'Reader-2', TIME old
 pass_gate tests/actors/e2e/kit.py:LINE
 Store.pass_gate tests/cli/test_commands.py:LINE
""").replace("TITLE", re.findall(r"actorrpc-actor-(\w+)", text)[0])
    _, everything = _run(capsys, "stack")
    assert "waits for the call of Store.pass_gate on 'Store-1'" in everything
    assert "threads of the library that wait for work" in everything
    assert "epoll" not in everything
    _, idle = _run(capsys, "stack", "--all")
    assert "Pool._loop" in idle
    _, worker = _run(capsys, "stack", "Reader-2")
    assert "Reader.read" in worker
    assert "Store.pass_gate tests" not in _normalized(worker)


@pytest.mark.usefixtures("job")
def test_describe_shows_an_actor_by_name_title_or_id(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _run(capsys, "describe", "reader")
    assert status == 0
    assert _normalized(text).partition("\n\n")[0] + "\n" == _expected("""
Reader('reader')
 id ID
 class Reader
 name reader (namespace '')
 state ALIVE
 worker Reader-2 (pid PID)
 looked after by driver
 restarts 0
 handles 1 on driver
 age TIME
 calls done 0
 mailbox: 1 waiting, 1 of 1 running; the first, wait(), for TIME
 runs Reader('reader').read() for 'driver', TIME old; waits for the call of Store.pass_gate on 'Store-1'
""")
    _, text = _run(capsys, "describe", "--json", "Store")
    (store,) = json.loads(text)["actors"]
    assert store["waiting_for_it"] == ["Reader('reader').read() on 'Reader-2'"]
    # Also by title and by part of its id.
    for name in (store["title"], store["actor_id"], store["actor_id"][-6:]):
        assert json.loads(_run(capsys, "describe", "--json", name)[1])["actors"][0]["title"] == store["title"]


@pytest.mark.usefixtures("job")
def test_logs_are_filtered_by_worker_pattern_and_number(capsys: pytest.CaptureFixture[str]) -> None:
    until(lambda: "a store is made" in _run(capsys, "logs")[1])
    status, text = _run(capsys, "logs", "--grep", "is m[a]de", "-n", "1")
    assert (status, _normalized(text)) == (
        0,
        "(Store pid=" + text.partition("pid=")[2].partition(")")[0] + ") a store is made\n",
    )
    _, text = _run(capsys, "logs", "--json", "Store-1")
    line = json.loads(text.splitlines()[0])
    texts = dict.fromkeys(["label", "worker", "host", "stream", "text"], "str")
    assert _shape(line) == {"time": "float", "pid": "int", **texts}
    assert (line["text"], line["stream"]) == ("a store is made", "stdout")
    assert _run(capsys, "logs", "Reader-2") == (0, "")
    assert _run(capsys, "logs", "-n", "0", "--grep", "made") == (0, "")


@pytest.mark.usefixtures("job")
def test_followed_logs_show_new_lines_until_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = current_worker()
    assert worker is not None
    history = worker.cluster.engine.logs.history
    shown: list[str] = []

    class Output(io.StringIO):
        def write(self, line: str) -> int:
            text = line.partition(") ")[2].rstrip()
            shown.append(text)
            if text == "the last":
                raise KeyboardInterrupt
            history.add(4, False, [("Other", f"behind {text}"), ("Other", "the last")])
            return len(line)

    monkeypatch.setattr(sys, "stdout", Output())
    history.add(3, False, [("Follow", "the first")])
    assert main(["logs", "--pid", str(os.getpid()), "-f", "--grep", "first|last"]) == 130
    assert shown == ["the first", "behind the first", "the last"]


@pytest.fixture
def _large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the machine's limits of descriptors and shared memory."""
    monkeypatch.setattr(doctor, "_FEW", 0)
    monkeypatch.setattr(doctor, "_LITTLE", 0)


@pytest.mark.usefixtures("job", "_large_machine")
def test_doctor_reports_all_checks_and_no_faults(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _run(capsys, "doctor")
    assert status == 0, text
    kinds = re.findall(r"(?m)^(?:ok|WRONG) +([a-z ]+):", text)
    assert ", ".join(kinds) == "versions, key, directory, settings, descriptors, shared memory, reachability"
    assert "3 of 3 workers answered" in text
    assert text.endswith("\nNo faults.\n")
    checks = json.loads(_run(capsys, "doctor", "--json")[1])["checks"]
    assert [each["kind"] for each in checks] == kinds


@pytest.mark.usefixtures("job")
def test_top_prints_tables_with_rates_from_the_second_table_on(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = _run(capsys, "top", "--count", "2", "--interval", "0.001")
    assert status == 0
    looks = _normalized(text).split("\n\nthe driver of")
    assert len(looks) == 2
    # The first look has no processor share and no rates, and the width of tables varies.
    assert (
        re.sub(r"(?m)^(\S+ alive) .*$", r"\1 FIGURES", looks[0]).strip()
        == _expected("""
the driver of an embedded cluster (PROGRAM), pid PID: 3 workers, 2 actors; asked in TIME

worker state cpu % memory fds threads calls out queued
driver alive FIGURES
Store-1 alive FIGURES
Reader-2 alive FIGURES

actor worker state waiting oldest calls/s p50 p99 runs
Reader('reader') Reader-2 alive 1 TIME - - - read() TIME
Store('store') Store-1 alive 0 - - - - pass_gate() TIME
""").strip()
    )
    assert re.search(r"(?m)^Reader\('reader'\) Reader-2 alive 1 TIME 0 - - read\(\) TIME$", looks[1])
    _, text = _run(capsys, "top", "--count", "1", "--json")
    assert len(json.loads(text)["groups"][0]["workers"]) == 3


_OTHER_GROUP = """
import sys
from actorrpc import rpc
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method="file://" + sys.argv[1]))
print("there", flush=True)
sys.stdin.read()
rpc.shutdown()
"""


@pytest.mark.usefixtures("job")
def test_commands_about_one_group_fail_if_several_groups_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = ("-c", _OTHER_GROUP, str(tmp_path / "store"))
    with python(*script, stdin=subprocess.PIPE, stderr=None) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        for command in ("stack", "trace", "profile", "metrics"):
            assert main([command, "--timeout", "30"]) == 2
            error = capsys.readouterr().err
            assert "there are several groups: say which one with --pid" in error
            assert str(os.getpid()) in error
            assert str(other.pid) in error
        assert main(["stack", "--timeout", "30", "--pid", str(other.pid), "--json"]) == 0
        (group,) = json.loads(capsys.readouterr().out)["groups"]
        assert [each["name"] for each in group["workers"]] == ["alone"]
        other.communicate()
    assert other.returncode == 0


# -- without a group, and arguments that cannot be used --------------------------------------------------------------


@pytest.fixture
def _no_group(monkeypatch: pytest.MonkeyPatch, default_parent: Path) -> None:
    monkeypatch.setenv("ACTORRPC_RUNTIME_DIR", str(default_parent / "run"))


@pytest.mark.usefixtures("_no_group")
@pytest.mark.parametrize(
    "command", [["status"], ["stack"], ["describe", "x"], ["logs"], ["top"], ["profile"]]
)
def test_commands_without_a_running_group_fail_and_say_so(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert re.fullmatch(
        rf"actorrpc {command[0]}: there is no group to look into: .*\n", capsys.readouterr().err
    )


@pytest.mark.usefixtures("_no_group")
def test_health_reports_each_failure_with_status_1_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", "k" * 32)
    for arguments in ([], ["nowhere"], ["tcp://127.0.0.1:7"]):
        assert main(["health", *arguments]) == 1
        assert re.fullmatch(rf"unhealthy: .*{''.join(arguments)}.*\n", capsys.readouterr().out)


@pytest.mark.usefixtures("_no_group", "_large_machine")
def test_doctor_needs_no_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert re.search(
        r"ok +group: no group was checked.*\n\nNo faults on this host\.\n$", capsys.readouterr().out
    )


@pytest.mark.usefixtures("_no_group", "_large_machine")
def test_doctor_reports_a_fault_if_gpus_are_to_be_checked_and_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor", "--gpu"]) == 1
    assert re.search(r"WRONG cuda: .*\n +-> .*", capsys.readouterr().out)


def test_doctor_compares_the_bytes_that_a_second_process_reads_in_device_memory(tmp_path: Path) -> None:
    memory, second = FakeMemory(tmp_path), FakeMemory(tmp_path)

    def findings(*read: Any) -> str:
        return "\n".join(doctor.lines(gpu.check_memory(memory, [torch.device("cpu")], *read)))

    assert re.search(
        r"ok +other process: .*right bytes of cpu at \d+ GB/s",
        findings(lambda requests: [gpu.answer(second, each) for each in requests]),
    )
    assert re.search(
        r"WRONG other process: .* cannot read memory of cpu", findings()
    )  # it has no fake memory
    second.spare = 0
    assert "out of memory" in findings(lambda requests: [gpu.answer(second, each) for each in requests])
    memory.room = 0
    assert (
        "WRONG allocator: this process cannot allocate memory that other processes can open: cpu: cpu has no"
        in findings()
    )


@pytest.mark.gpu
@pytest.mark.limit(120)
def test_doctor_finds_that_a_second_process_reads_memory_of_each_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["doctor", "--gpu"])
    found = capsys.readouterr().out
    assert found.count("reads the right bytes of cuda:") == torch.cuda.device_count(), found


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["status", "--timeout", "0"],
        ["describe"],
        ["top", "--interval", "soon"],
        ["profile", "--rate", "0"],
        ["top", "--count", "0"],
        ["logs", "-n", "-1"],
        ["metrics", "--port", "70000"],
        ["metrics", "--port", "-1"],
        ["metrics", "--json"],
        ["dashboard", "--port", "70000"],
    ],
)
def test_wrong_arguments_exit_with_2_and_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("actorrpc")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("address", "key", "says"),
    [
        ("nowhere", "", "an address is tcp://"),
        ("tcp://127.0.0.1", "", "an address is tcp://"),
        ("tcp://127.0.0.1:7", "", "there is no key for tcp://127.0.0.1:7"),
        ("tcp://127.0.0.1:7", "k" * 32, "the group of tcp://127.0.0.1:7 does not answer: .*refused"),
    ],
)
@pytest.mark.usefixtures("_no_group")
def test_an_address_without_a_group_exits_with_2(
    address: str, key: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", key)
    assert main(["status", "--connect", address]) == 2
    assert re.match(f"actorrpc status: .*{says}", capsys.readouterr().err)


@pytest.mark.usefixtures("job")
def test_unknown_names_and_wrong_patterns_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("stack", "describe", "profile"):
        assert main([command, "--pid", str(os.getpid()), "stranger"]) == 2
        assert "'stranger'; actorrpc status lists them" in capsys.readouterr().err
    assert main(["logs", "--pid", str(os.getpid()), "stranger"]) == 2
    assert re.search(r"there is no worker 'stranger'.* Store-1", capsys.readouterr().err)
    assert main(["logs", "--pid", str(os.getpid()), "--grep", "("]) == 2
    assert "not a regular expression" in capsys.readouterr().err


@pytest.mark.usefixtures("job")
def test_connect_accepts_the_socket_of_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    path = actorrpc.agent.context.current_worker().agent.record.unix_path  # type: ignore[attr-defined]
    assert main(["status", "--connect", path, "--timeout", "30"]) == 0
    assert "3 workers, 2 actors" in capsys.readouterr().out


@pytest.mark.usefixtures("job")
def test_trace_writes_a_file_and_counts_calls_in_progress(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    status, text = _run(capsys, "trace", "-o", str(path))
    assert status == 0
    assert re.fullmatch(
        r".*/trace.json: \d+ calls?, \d+ executions? of 3 workers, .* from the first to the last; https://ui.perfetto.dev and "
        r"chrome://tracing open it\n\d unfinished, shown as ending with the file\n",
        text,
    )
    assert json.loads(path.read_text())["otherData"]["workers"] == 3
    status, text = _run(capsys, "trace", "-o", str(path), "--seconds", "0.001", "--json")
    assert json.loads(text)["path"] == str(path)
    assert json.loads(text)["findings"] == []
    assert (json.loads(text)["unfinished"] > 0, status) == (True, 0)


@pytest.mark.usefixtures("_no_group")
def test_an_unwritable_output_file_is_reported_before_any_group_is_sought(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "nowhere" / "file")
    for command in ("trace", "profile", "metrics"):
        assert main([command, "-o", path]) == 2
        assert (
            capsys.readouterr().err == f"actorrpc {command}: [Errno 2] No such file or directory: '{path}'\n"
        )
        assert main([command, "-o", str(tmp_path)]) == 2
        assert "[Errno 21] Is a directory" in capsys.readouterr().err


@pytest.mark.usefixtures("job")
def test_profile_writes_files_for_speedscope_and_flamegraph(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    short = ("--seconds", "0.02", "--rate", "100", "-o", str(path))
    status, text = _run(capsys, "profile", *short)
    assert status == 0
    assert re.fullmatch(
        r".*/profile.json: \d+ threads of 3 workers, \d samples in \d+ ms; \d late, \d lost; "
        r"https://www.speedscope.app opens it\n",
        text,
    )
    found = json.loads(path.read_text())
    names = {each["name"] for each in found["shared"]["frames"]}
    assert {"Reader.read", "Store.pass_gate", "pass_gate"} <= names
    assert "Pool._loop" not in names
    assert {each["name"].partition(":")[0] for each in found["profiles"]} == {"driver", "Store-1", "Reader-2"}

    status, text = _run(capsys, "profile", "Store-1", *short, "--all", "--json")
    summary = json.loads(text)
    assert (summary["path"], summary["missing"]) == (str(path), {})
    assert (status, summary["workers"], summary["samples"] + summary["lost"]) == (0, 1, 2)
    assert "Pool._loop" in path.read_text()

    status, text = _run(capsys, "profile", "store", *short, "--collapsed")
    assert re.fullmatch(
        r".*/profile.json: 1 thread of 1 worker, \d samples? in .* lost; for flamegraph.pl\n", text
    )
    (line,) = path.read_text().splitlines()
    assert re.fullmatch(
        r"Store-1;actorrpc-actor-\w+;Store.pass_gate \(test_commands.py\);pass_gate \(kit.py\) [12]", line
    )


@pytest.mark.usefixtures("job")
def test_metrics_are_printed_or_written_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, text = _run(capsys, "metrics")
    assert status == 0
    assert 'actorrpc_mailbox_depth{class="Reader"} 1.0' in text.splitlines()
    path = tmp_path / "actorrpc.prom"
    assert _run(capsys, "metrics", "-o", str(path)) == (0, "")
    assert 'actorrpc_workers{state="alive"} 3.0' in path.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_metrics_are_served_over_http() -> None:
    command = ("-m", "actorrpc", "metrics", "--pid", str(os.getpid()), "--port", "0")
    with python(*command, stderr=None) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().partition(",")[0]
            for _ in range(2):
                with urllib.request.urlopen(address, timeout=30) as answer:
                    assert 'actorrpc_workers{state="alive"} 3.0' in answer.read().decode().splitlines()
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 130


@pytest.mark.usefixtures("job")
def test_a_port_in_use_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        for command in ("metrics", "dashboard"):
            assert main([command, "--pid", str(os.getpid()), "--port", str(port)]) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"actorrpc {command}: ")
            assert str(port) in error
            assert error.count("\n") == 1


# -- the process -----------------------------------------------------------------------------------------------------


def _run_python(*arguments: str) -> tuple[str, str]:
    """Run Python, check its exit status, and return its output and its standard error."""
    process = python(*arguments)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


def _imported(times: str) -> set[str]:
    """Return the modules in the output of ``python -X importtime``."""
    return {line.rpartition("|")[2].strip() for line in times.splitlines()}


@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_top_without_a_terminal_prints_tables_and_imports_neither_torch_nor_textual() -> None:
    command = ("-m", "actorrpc", "top", "--pid", str(os.getpid()), "--timeout", "30", "--count", "1")
    out, times = _run_python("-X", "importtime", *command)
    assert "cpu %" in out
    assert not {"textual", "rich", "torch"} & _imported(times)


@pytest.mark.parametrize("as_script", [False, True])
def test_the_command_line_does_not_import_torch(as_script: bool, tmp_path: Path) -> None:
    script = tmp_path / "actorrpc"  # like the script that pip generates from pyproject.toml
    module, _, name = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["scripts"][
        "actorrpc"
    ].partition(":")
    script.write_text(f"import sys\nfrom {module} import {name}\nsys.exit({name}())\n")
    out, times = _run_python(
        "-X", "importtime", *([str(script)] if as_script else ["-m", "actorrpc"]), "--help"
    )
    modules = _imported(times)
    assert "actorrpc.observe.visitor" in modules
    assert not {"torch", "numpy", "prometheus_client", "textual", "actorrpc.agent.agent"} & modules
    names = "status stack describe logs doctor top trace metrics profile run worker"
    assert [name for name in names.split() if name not in out] == []


@pytest.mark.slow
def test_run_and_worker_start_programs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, torch.distributed.rpc as rpc; print(rpc.__name__, sys.argv[1:])")
    run = ("-m", "actorrpc", "run")
    assert _run_python(*run, str(script), "--flag", "x")[0] == "actorrpc.compat.rpc ['--flag', 'x']\n"
    script.write_text("import ray; print(ray.__name__)")
    assert _run_python(*run, "--ray", str(script))[0] == "actorrpc.compat.ray\n"
    assert "python -m actorrpc.worker" in _run_python("-m", "actorrpc", "worker", "--help")[0]


def test_key_makes_a_private_file_and_replaces_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "group key"
    assert main(["key", str(path)]) == 0
    assert capsys.readouterr().out == f"export ACTORRPC_KEY_FILE='{path}'\n"
    assert path.stat().st_mode & 0o777 == 0o600
    made = path.read_text()
    assert keys.find_key({"ACTORRPC_KEY_FILE": str(path)}) == Key.from_text(made)
    assert main(["key", str(path)]) == 2
    assert "File exists, and is not replaced: use this key" in capsys.readouterr().err
    assert path.read_text() == made
