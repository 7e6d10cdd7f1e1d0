"""Output of workers: complete, with prefixes, equal lines folded, long lines cut."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from actorrpc.cluster.logs import Labels, LogFile, Logs, Output
from tests.cluster.drive import script


class _Printer:
    """A process as the logs see it: two pipes."""

    def __init__(self, logs: Logs, label: str, pid: int) -> None:
        stdout, self.stdout = os.pipe()
        stderr, self.stderr = os.pipe()
        self.output = Output(label, pid, stdout, stderr)
        logs.add(self.output)

    def end(self) -> None:
        os.close(self.stdout)
        os.close(self.stderr)


def _run(
    capfd: pytest.CaptureFixture[str], *, show: bool = True, fold_s: float = 1.0, **written: list[bytes]
) -> tuple[str, str]:
    """Let processes (label and pid in the name, as `A1`) write in turn; return the shown output."""
    logs = Logs(show, fold_s=fold_s)
    logs.start()
    printers = {name: _Printer(logs, name[0], int(name[1:])) for name in written}
    for index in range(max(map(len, written.values()))):
        for name, pieces in written.items():
            if index < len(pieces):
                os.write(printers[name].stdout, pieces[index])
                _barrier(logs)
    for printer in printers.values():
        printer.end()
    logs.close()
    found = capfd.readouterr()
    return found.out, found.err


def _barrier(logs: Logs) -> None:
    """Wait until the thread of the logs has read all pipes."""
    for _ in range(2):  # an order runs after the reads of its iteration
        done = threading.Event()
        logs._order(done.set)
        done.wait()


def test_lines_have_a_prefix_with_label_and_pid_and_none_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    out, err = _run(capfd, A1=[b"one\ntw", b"o\n\nthree", b" and more"], B2=[b"\xff\xfe\n", b"last"])
    assert out.splitlines() == [
        "(A pid=1) one",
        "(B pid=2) \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}",
        "(A pid=1) two",
        "(A pid=1) three and more",
        "(B pid=2) last",
    ]
    assert err == ""


def test_the_prefix_follows_a_change_of_the_label(capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = _run(
        capfd,
        A1=[b"one\nbegun ", b"\x1eactorrpc label:A(n=1)\nand ended\ntw", b"o\n\x1eactorrpc label:C\nthree\n"],
        A2=[b"four\n"],
    )
    assert out.splitlines() == [
        "(A pid=1) one",
        "(A pid=2) four",
        "(A(n=1) pid=1) begun and ended",
        "(A(n=1) pid=1) two",
        "(C pid=1) three",
    ]


def test_a_stream_redirected_after_the_start_gets_no_labels(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w+b") as file:
        before = os.dup(1), os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            labels = Labels()
            os.dup2(file.fileno(), 1)
            labels.change("A(n=1)")
        finally:
            for fd, saved in enumerate(before, 1):
                os.dup2(saved, fd)
                os.close(saved)
        file.seek(0)
        assert file.read() == b"\x1eactorrpc label:A(n=1)\n"


def test_only_equal_lines_of_several_processes_are_folded(capfd: pytest.CaptureFixture[str]) -> None:
    lines = {f"A{pid}": [b"the same\n", b"own %d\n" % pid] for pid in range(1, 9)}
    out, _ = _run(capfd, fold_s=60.0, **lines, B9=[b"the same\n"])
    assert out.count("the same") == 3
    assert "(A pid=1) the same\n" in out
    assert "(A pid=8) the same [repeated 7x across processes]\n" in out
    assert "(B pid=9) the same\n" in out
    assert out.count("own") == 8
    # Repeated lines of one process are not folded.
    out, _ = _run(capfd, fold_s=60.0, A1=[b"tick\n"] * 5, A2=[b"tick\n"])
    assert out.count("(A pid=1) tick\n") == 5
    assert out.count("(A pid=2) tick\n") == 1


def test_long_lines_are_cut_and_progress_bars_show_their_end(capfd: pytest.CaptureFixture[str]) -> None:
    bar = b"".join(b"\r%3d%%" % percent for percent in range(101))
    out, _ = _run(
        capfd, A1=[b"x" * 40_000, b"y" * 40_000, b"z\n", b"short\n", bar + b"\n", b"a\r\n", bar * 100]
    )
    lines = out.splitlines()
    assert lines[0].startswith("(A pid=1) xxx")
    assert re.fullmatch(r".* \.\.\. \[\d+ bytes more\]", lines[0])
    assert len(lines[0]) < 17_000
    assert lines[1:] == ["(A pid=1) short", "(A pid=1) 100%", "(A pid=1) a", "(A pid=1) 100%"]


def test_a_pipe_held_open_by_a_grandchild_does_not_delay_the_end_of_a_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    logs = Logs()
    logs.start()
    printer = _Printer(logs, "A", 1)
    os.write(printer.stdout, b"first\nwithout an end")
    done = threading.Event()
    logs.finish(printer.output, done.set)
    assert done.wait(10)
    os.write(printer.stdout, b"\nof a grandchild\n")
    logs.close()
    printer.end()
    assert capfd.readouterr().out.splitlines() == [
        "(A pid=1) first",
        "(A pid=1) without an end",
        "(A pid=1) of a grandchild",
    ]


_PRINTING = """
with init(log_to_driver=sys.argv[1] == "on"):
    names = [spawn("Agent") for _ in range(3)]
    for name in names:
        rpc.rpc_sync(name, remotes.say, ("all the same", f"own of {name}"))
    rpc.rpc_sync(names[0], remotes.say, ("to stderr",), {"to": "stderr"})
    rpc.rpc_sync(names[1], remotes.say, ("partial",), {"end": ""})
    rpc.rpc_sync(names[2], remotes.say, tuple(f"number {i}" for i in range(5000)))
    try:
        rpc.rpc_sync(names[0], remotes.leave_with, (3,))
    except ConnectionError:
        pass
    rpc.shutdown()
    print("after shutdown")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["on", "off"])
def test_all_output_of_workers_is_shown_before_shutdown_returns(tmp_path: Path, how: str) -> None:
    with script(tmp_path, _PRINTING, how, prints=("^to stderr$", "^about to exit$")) as process:
        out, err = process.communicate()
        assert process.returncode == 0, err
    if how == "off":
        assert (out, err) == ("after shutdown\n", "")
        return
    lines = out.splitlines()
    assert lines[-1] == "after shutdown"
    plain = [re.sub(r"^\(Agent pid=\d+\) ", "", line) for line in lines[:-1]]
    assert all(line.startswith("(Agent pid=") for line in lines[:-1])
    assert plain.count("all the same") + plain.count("all the same [repeated 2x across processes]") in (2, 3)
    assert [line for line in plain if line.startswith("number")] == [f"number {i}" for i in range(5000)]
    assert "partial" in plain
    assert [re.sub(r"\d+", "N", line) for line in err.splitlines()] == [
        "(Agent pid=N) to stderr",
        "(Agent pid=N) about to exit",
    ]


@pytest.mark.slow
def test_a_driver_that_cannot_write_to_stdout_keeps_working(tmp_path: Path) -> None:
    source = """
        with init():
            name = spawn()
            os.close(1)
            os.open("/dev/full", os.O_WRONLY)
            rpc.rpc_sync(name, remotes.say, ("unread",))
            assert rpc.rpc_sync(name, operator.add, (1, 2)) == 3
        sys.stdout = None
    """
    with script(tmp_path, source) as process:
        _, err = process.communicate()
        assert process.returncode in (0, 120), err  # 120: Python could not flush its output


def test_processes_of_a_host_share_a_file_of_bounded_size(tmp_path: Path) -> None:
    files = [LogFile(str(tmp_path / "made"), "h", most=1000) for _ in range(2)]
    output = Output("A", 7, -1, -1)
    for number in range(100):
        files[number % 2].add(output, [("A", f"line {number}")])
    for file in files:
        file.close()
    kept = [(tmp_path / "made" / name).read_text() for name in ("h.log.1", "h.log")]
    assert all(0 < len(each) < 1100 for each in kept)
    numbers = [int(line.rpartition(" ")[2]) for each in kept for line in each.splitlines()]
    assert numbers == list(range(numbers[0], 100))


def test_repeated_lines_are_counted_and_shown_after_a_second(capfd: pytest.CaptureFixture[str]) -> None:
    logs = Logs()
    logs.start()
    printers = [_Printer(logs, "A", pid) for pid in (1, 2)]
    for printer in printers:
        os.write(printer.stdout, b"the same\n")
    shown = ""
    while "pid=2" not in shown:  # without further output
        shown += capfd.readouterr().out
    for printer in printers:
        printer.end()
    logs.close()
    assert shown == "(A pid=1) the same\n(A pid=2) the same\n"
