"""``actorrpc up``, with a stand-in for ssh: missing hosts and their phases, the workers' output, and the end of all processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from actorrpc import rpc
from actorrpc.cluster import init
from actorrpc.errors import PeerDiedError
from tests.cluster.drive import cluster, python, until
from tests.cluster.joiners import KEY

# The host's name says what happens. Messages and exit statuses are those of OpenSSH 9.2 with -v.
_SSH = r"""#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
host=$1; shift
say() { echo "$*" >&2; }
say "OpenSSH_9.2p1 Debian-2+deb12u10, OpenSSL 3.0.17 1 Jul 2025"
[[ $host == unknown ]] && { say "ssh: Could not resolve hostname unknown: Name or service not known"; exit 255; }
say "debug1: Connecting to $host [192.0.2.1] port 22."
[[ $host == refused ]] && { say "ssh: connect to host refused port 22: Connection refused"; exit 255; }
[[ $host == silent ]] && exec sleep 1000
say "debug1: Connection established."
[[ $host == denied ]] && { say "me@denied: Permission denied (publickey)."; exit 255; }
say "Authenticated to $host ([192.0.2.1]:22) using \"publickey\"."
[[ $host == old ]] && { echo '{"actorrpc": "0.0.1", "python": "/usr/bin/python3"}'; exec cat >/dev/null; }
[[ $host == binary ]] && { head -c 200000 /dev/zero | tr '\0' '\377'; exit 4; }
[[ $host == bare ]] && { say "bash: line 1: exec: python: not found"; exit 127; }
cd / && exec sh -c "$*"
"""
_PROGRAM = """
import glob, os, sys
import actorrpc
from actorrpc import rpc

def where():
    print("here is", rpc.get_worker_info().name)
    return os.getpid()

with actorrpc.init():
    names = [each.name for each in actorrpc.workers() if each.rank]
    pids = [rpc.rpc_sync(name, where) for name in names]
    key = open(os.environ["ACTORRPC_KEY_FILE"], "rb").read()
    for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        try:
            assert key not in open(path, "rb").read(), path
        except OSError:  # it has ended
            pass
    os.write(1, f"ran {' '.join(map(str, pids))}\\n".encode())  # in one piece, beside the lines of the workers
    try:
        sys.stdin.read()
    except KeyboardInterrupt:
        rpc.rpc_sync(names[0], where)
        os.write(1, b"saved\\n")
        raise
sys.exit(3)
"""


def _up(directory: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    (directory / "ssh").write_text(_SSH)
    (directory / "ssh").chmod(0o755)
    (directory / "program.py").write_text(textwrap.dedent(_PROGRAM))
    # The hosts have no addresses.
    env = {"PATH": f"{directory}:{os.environ['PATH']}", "ACTORRPC_BIND": "127.0.0.1", **environment}
    return python("-m", "actorrpc", "up", *arguments, env=env, stdin=subprocess.PIPE, start_new_session=True)


def _program(directory: Path) -> list[str]:
    return [sys.executable, str(directory / "program.py")]


@pytest.mark.limit(60)
def test_up_names_the_missing_hosts_and_the_phase_in_which_each_failed(tmp_path: Path) -> None:
    hosts = "unknown,refused,silent,denied,old,bare"
    up = _up(tmp_path, "--hosts", hosts, "--limit", "connect=0.5", *_program(tmp_path))
    out, err = up.communicate()
    assert (up.returncode, out) == (1, "")
    for expected in (
        "unknown is missing: resolve: ssh ended with status 255: ssh: Could not resolve hostname unknown",
        "refused is missing: connect: ssh ended with status 255: .*Connection refused",
        r"silent is missing: connect: no result within 0\.5 s",
        r"denied is missing: authenticate: ssh ended with status 255: .*Permission denied \(publickey\)",
        r"old is missing: version: it has actorrpc 0\.0\.1 \(/usr/bin/python3\), and this host ",
        "bare is missing: version: ssh ended with status 127: .*python: not found",
        f"6 of 6 hosts are missing: {hosts}$",
    ):
        assert re.search(f"^actorrpc up: {expected}", err, re.MULTILINE), err
    assert "\nrefused: ssh: connect to host" in f"\n{err}"  # the output of a host, without what ssh -v adds
    assert "debug1" not in err


@pytest.mark.slow
@pytest.mark.limit(90)
def test_up_runs_a_program_as_the_driver_of_workers_on_all_hosts(tmp_path: Path) -> None:
    up = _up(tmp_path, "--hosts", "a,b", "--count", "2", *_program(tmp_path))
    out, err = up.communicate("")
    assert up.returncode == 3, err
    lines = sorted(line.rpartition(" ")[0] for line in out.splitlines() if " is " in line)
    assert lines == ["a: here is", "a: here is", "b: here is", "b: here is"]
    assert len(re.findall(r"^ran( \d+){4}$", out, re.MULTILINE)) == 1, out
    assert re.search("^actorrpc up: 4 workers on 2 hosts have joined tcp://127", err, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.limit(90)
def test_up_says_that_the_program_has_not_called_init(tmp_path: Path) -> None:
    up = _up(
        tmp_path, "--hosts", "a", "--limit", "join=0.5", sys.executable, "-c", "import signal; signal.pause()"
    )
    out, err = up.communicate()
    assert (up.returncode, out) == (1, "")
    assert re.search(r"^actorrpc up: the program has not called actorrpc\.init\(\)", err, re.MULTILINE), err


@pytest.mark.slow
@pytest.mark.limit(90)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_workers_end_with_a_killed_up(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "run").mkdir(0o700)
    up = _up(tmp_path, "--hosts", "a,b", *_program(tmp_path), ACTORRPC_RUNTIME_DIR=str(tmp_path / "run"))
    assert up.stdout is not None
    for line in up.stdout:
        if line.startswith("ran "):
            break
    family = psutil.Process(up.pid).children(recursive=True)
    assert {int(word) for word in line.split()[1:]} < {each.pid for each in family}
    up.send_signal(number)
    shown = up.stdout.read()  # to the end, before communicate() closes the program's stdin
    up.communicate()
    assert up.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert ("saved" in shown) == (number == signal.SIGINT)  # the program may use the workers when it ends
    until(lambda: not any(each.is_running() for each in family))
    assert not list(tmp_path.glob("run/*.key"))


@pytest.mark.slow
@pytest.mark.limit(90)
def test_a_signal_after_a_second_kills_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", KEY)
    with init(listen="tcp://127.0.0.1:0", log_show=False) as context:
        up = _up(tmp_path, "--hosts", "a", "--join", context.address, "--grace", "1000", ACTORRPC_KEY=KEY)
        until(lambda: len(cluster().joined()) == 1)
        (worker,) = cluster().joined()
        running = tmp_path / "running"
        code = f"(open({str(running)!r}, 'w').close(), __import__('time').sleep(1000))"
        call = rpc.rpc_async(worker.name, eval, (code,))
        until(running.exists)
        up.send_signal(signal.SIGINT)
        until(lambda: any(each.draining for each in cluster().resources()))
        later = time.monotonic() + 1.0
        until(lambda: time.monotonic() > later)
        up.send_signal(signal.SIGINT)
        up.communicate()
        assert up.returncode == 128 + signal.SIGINT
        with pytest.raises(PeerDiedError):
            call.wait()


@pytest.mark.limit(60)
def test_ssh_ends_with_a_killed_up_before_it_has_started_the_agent(tmp_path: Path) -> None:
    up = _up(tmp_path, "--hosts", "silent", *_program(tmp_path))
    family: list[psutil.Process] = []
    until(lambda: family.extend(psutil.Process(up.pid).children()) or family)
    up.kill()
    up.communicate()
    until(lambda: not any(each.is_running() for each in family))


@pytest.mark.limit(60)
def test_output_that_has_no_newline_or_cannot_be_encoded_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    out, err = _up(tmp_path, "--hosts", "binary", *_program(tmp_path)).communicate()
    assert out.startswith("binary: ?")
    assert out.count("?") == 200_000
    assert "binary is missing: version: ssh ended with status 4" in err
