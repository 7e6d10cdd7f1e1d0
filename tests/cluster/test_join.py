"""Workers that join a cluster by hand, also over TLS: their work, how they leave, and the error for each failed attempt."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import actorrpc
from actorrpc import autograd, rpc
from actorrpc import worker as command
from actorrpc.cli.commands import main
from actorrpc.cluster import ClusterContext, init, join
from actorrpc.errors import (
    ActorDiedError,
    AuthenticationError,
    ConfigError,
    PeerDiedError,
    PlacementError,
    ProtocolError,
    RendezvousError,
    RpcError,
    RpcTimeoutError,
)
from tests import certificates
from tests.cluster.drive import cluster, python, until
from tests.cluster.joiners import KEY, driver_process, is_there, joiner, output, wait_for
from tests.migration.rows import row
from tests.ports import free_port

# The driver of several tests logs the number of refused connections at its end.
pytestmark = pytest.mark.prints(r"^\d+ more connections were refused within a minute.*'joining-\w+'")


@actorrpc.remote
class Place:
    def where(self) -> tuple[int, str]:
        return os.getpid(), rpc.get_worker_info().name

    def scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 3


@pytest.fixture
def driver() -> Iterator[ClusterContext]:
    with init(listen="tcp://127.0.0.1:0", num_cpus=2) as context:
        yield context


# -- joining ----------------------------------------------------------------------------------------


@pytest.mark.limit(90)
@row("setup of hosts by HostMesh", "from-monarch")
def test_a_joined_worker_serves_actors_calls_and_backward_passes_and_leaves_at_sigterm(
    driver: ClusterContext,
) -> None:
    with joiner(driver.address, "--name", "gpu7", "--labels", "zone=a,kind=test") as process:
        # The actor waits for the only worker with its label.
        handle = Place.options(labels={"zone": "a"}, placement_timeout=80).remote()
        assert actorrpc.get(handle.where.remote()) == (process.pid, "gpu7")
        named = Place.options(worker="gpu7").remote()
        assert actorrpc.get(named.where.remote()) == (process.pid, "gpu7")
        other = Place.remote()  # without options, the driver still starts a new process
        assert actorrpc.get(other.where.remote())[0] != process.pid

        # Calls, references and gradients.
        assert rpc.rpc_sync("gpu7", lambda x: (x + 1, os.getpid()), args=(1,)) == (2, process.pid)
        kept = rpc.remote("gpu7", torch.ones, args=(3,))
        assert kept.to_here().sum() == 3
        leaf = torch.ones(4, requires_grad=True)
        with autograd.context() as number:
            out = actorrpc.get(handle.scaled.remote(leaf))
            autograd.backward(number, [out.sum()])
            assert torch.equal(autograd.get_gradients(number)[leaf], torch.full((4,), 3.0))
        assert {row.name: row.state for row in rpc.workers()} == {
            "driver": "alive",
            "gpu7": "alive",
            actorrpc.get(other.where.remote())[1]: "alive",
        }

        process.send_signal(signal.SIGTERM)
        code, err = output(process)
        assert code == 0, err
        until(lambda: not is_there("gpu7"))
        with pytest.raises((ActorDiedError, PeerDiedError)):
            actorrpc.get(named.where.remote())
        with pytest.raises(PlacementError, match=r"label zone=a.*there are"):
            Place.options(labels={"zone": "a"}).remote()


def _state() -> tuple[int, float, int]:
    return os.getpid(), torch.rand(1).item(), torch.get_num_threads()


@pytest.mark.limit(90)
def test_the_workers_of_one_command_share_the_host_and_end_with_its_worst_status(
    driver: ClusterContext, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["many-0", "many-1", "many-2"]
    died = r"the process of worker 'many-1' \(pid \d+\) was ended by SIGKILL"
    with joiner(driver.address, "--name", "many", "--count", "3", prints=died) as process:
        wait_for(*names)
        found = {name: rpc.rpc_sync(name, _state) for name in names}
        assert {psutil.Process(pid).ppid() for pid, _, _ in found.values()} == {process.pid}
        assert len({value for _, value, _ in found.values()}) == 3  # each has its own random numbers
        holders = {each.name: each for each in cluster().resources()}
        cpus = {name: holders[name].totals["CPU"] for name in names}
        assert sum(cpus.values()) == pytest.approx(os.cpu_count())
        assert {threads for _, _, threads in found.values()} == {max(1, int(cpus["many-0"]))}

        status = partial(main, ["health", "--pid", str(process.pid), "--timeout", "30"])
        assert status() == 0
        assert capsys.readouterr().out.startswith("healthy: many-0, many-1, many-2 answered")
        os.kill(found["many-1"][0], signal.SIGSTOP)
        assert status() == 1
        assert re.match("unhealthy: worker 'many-1': its process was stopped", capsys.readouterr().out)
        os.kill(found["many-1"][0], signal.SIGKILL)
        until(lambda: not is_there("many-1"))
        deaths = [each.what for each in actorrpc.state().findings if "'many-1'" in each.what]
        assert [bool(re.match(r"worker 'many-1' .* on host '.*' died: ", each)) for each in deaths] == [True]
        assert rpc.rpc_sync("many-2", os.getpid) == found["many-2"][0]
        process.send_signal(signal.SIGTERM)
        code, err = output(process)
        assert code == 128 + signal.SIGKILL
        assert re.search(f"; 2 other worker.*\n.* ends with status 137: {died}.*\n$", err)
        until(lambda: not any(is_there(name) for name in names))


@pytest.mark.limit(90)
def test_the_workers_of_one_command_leave_at_ctrl_c_and_end_with_a_killed_command(
    driver: ClusterContext,
) -> None:
    for number, status in ((signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)):
        with joiner(driver.address, "--name", "both", "--count", "2") as process:
            wait_for("both-0", "both-1")
            process.send_signal(number)
            assert output(process)[0] == status
            until(lambda: not is_there("both-0") and not is_there("both-1"))


_SCRIPT = """
import actorrpc

with actorrpc.init(listen="tcp://127.0.0.1:0") as context:
    import helper  # after init()
    print(context.address, flush=True)
    far = actorrpc.remote(helper.Scale).options(labels={"where": "far"}, placement_timeout=60).remote(5)
    print(actorrpc.get(far.apply.remote(helper.Point(2))).x)
"""
_HELPER = """
class Point:
    def __init__(self, x):
        self.x = x

class Scale:
    def __init__(self, factor):
        self.factor = factor
    def apply(self, point):
        return Point(self.factor * point.x)
"""


@pytest.mark.slow
@pytest.mark.limit(90)
def test_a_joined_worker_gets_the_drivers_modules_by_value_and_ends_with_the_driver(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    (tmp_path / "helper.py").write_text(_HELPER)
    with python(str(tmp_path / "script.py"), stderr=None) as script:
        assert script.stdout is not None
        address = script.stdout.readline().strip()
        # Remove the files before the worker starts, as if it ran on another host.
        (tmp_path / "script.py").unlink()
        (tmp_path / "helper.py").unlink()
        with joiner(address, "--labels", "where=far") as worker:
            assert script.communicate() == ("10\n", None)
            assert script.returncode == 0
            assert output(worker)[0] == 0


_OTHER = "import sys, actorrpc; actorrpc.__version__ = '9.9'; from actorrpc.worker import main; sys.exit(main(sys.argv[1:]))"
_DIFFERS = f"worker 'other' on host '{socket.gethostname()}' has actorrpc 9.9 (the driver has {actorrpc.__version__})"


@pytest.mark.slow
@pytest.mark.parametrize("require_same", [False, True])
@pytest.mark.prints(re.escape(_DIFFERS))
def test_a_worker_with_another_version_is_reported_or_refused(
    require_same: bool,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", KEY)
    with (
        init(listen="tcp://127.0.0.1:0", require_same=require_same) as context,
        python(
            *("-c", _OTHER, "--join", context.address, "--name", "other"),
            env={"ACTORRPC_KEY": KEY},
            stdout=None,
        ) as process,
    ):
        assert process.stderr is not None
        said = process.stderr.readline()
        logged = [each.getMessage() for each in caplog.records if "other" in each.getMessage()]
        assert [_DIFFERS in each for each in logged] == [True]
        if require_same:
            assert f"{_DIFFERS}, and the driver requires the same versions (require_same): install" in said
            assert output(process)[0] == 3
            return
        assert main(["doctor", "--timeout", "30"]) == 1
        shown = capsys.readouterr().out
        # Both processes have a group file, and the group is checked once.
        assert shown.count("WRONG versions: workers have different versions of actorrpc: ") == 1
        monkeypatch.delenv("ACTORRPC_KEY")
        assert main(["doctor"]) == 1
        assert capsys.readouterr().out.count("was given a key") == 1
        process.terminate()


def test_a_worker_listens_on_the_first_free_port_of_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    while True:  # until two ports in a row are free
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            with socket.create_server(("127.0.0.1", port + 1)):
                break
    monkeypatch.setenv("ACTORRPC_PORT", f"{port}-{port + 1}")
    with socket.create_server(("127.0.0.1", port)), init(listen="tcp://127.0.0.1:0") as context:
        assert context.address == f"tcp://127.0.0.1:{port + 1}"
        rpc.shutdown()
        with (
            socket.create_server(("127.0.0.1", port + 1)),
            pytest.raises(ConfigError, match=f"no port of the range {port}-{port + 1} is free"),
        ):
            init(listen="tcp://127.0.0.1:0")


# -- failed attempts ---------------------------------------------------------------------------------------


def _join_fails(kind: type[Exception], says: str, address: str, **options: Any) -> None:
    threads = set(os.listdir("/proc/self/task"))
    with pytest.raises(kind, match=says):
        join.join(address, **{"name": "one", "timeout": 5.0, **options})
    assert not rpc.is_initialized()
    until(lambda: set(os.listdir("/proc/self/task")) <= threads)


@pytest.mark.limit(60)
def test_joining_an_address_without_a_driver_raises_rendezvous_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", KEY)
    port = free_port()
    _join_fails(
        RendezvousError,
        rf"no driver answers at tcp://127.0.0.1:{port}.*listen=",
        f"127.0.0.1:{port}",
        timeout=0.3,
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        port = silent.getsockname()[1]
        _join_fails(
            RendezvousError, r"no driver answers at .*timed out", f"tcp://127.0.0.1:{port}", timeout=0.3
        )


@pytest.fixture(scope="module")
def driver_elsewhere() -> Iterator[str]:
    """Run a driver with a worker named "twice"; yield its address."""
    with driver_process() as address, joiner(address, "--name", "twice", ACTORRPC_KEY=KEY) as first:
        assert first.stderr is not None
        assert "has joined" in first.stderr.readline()
        yield address
        assert first.poll() is None  # refused attempts did not end it
        first.send_signal(signal.SIGINT)
        assert output(first)[0] == 0


def test_a_process_that_joins_removes_the_files_of_killed_processes(
    driver_elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", KEY)
    monkeypatch.setenv("ACTORRPC_RUNTIME_DIR", str(tmp_path / "run"))
    leaves_a_file = "from actorrpc.wire import keys; keys.create_key_file(b'k' * 32)"
    assert output(python("-c", leaves_a_file)) == (0, "")
    assert len(os.listdir(tmp_path / "run")) == 1
    _join_and_leave(driver_elsewhere)
    assert not os.listdir(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.limit(60)
@pytest.mark.parametrize(
    ("case", "kind", "says", "status"),
    [
        ("wrong key", AuthenticationError, r"cannot join .* at tcp://127.*another key.*ACTORRPC_KEY", 3),
        ("driver", RendezvousError, r"the name 'driver' is taken by worker 0", 1),
        ("twice", RendezvousError, r"the name 'twice' is taken by worker \d+ \(pid \d+\); choose another", 1),
        ("joining-x", RendezvousError, r"no worker may be called 'joining-x'", 1),
    ],
)
@pytest.mark.prints(r"'joining-\w+' did not prove to worker 'driver'")
def test_joining_with_a_wrong_key_or_name_raises_an_error(
    driver_elsewhere: str,
    case: str,
    kind: type[Exception],
    says: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", KEY if case != "wrong key" else KEY[::-1])
    name = case if case in ("driver", "twice", "joining-x") else "one"
    _join_fails(kind, says, driver_elsewhere, name=name)
    assert command.main(["--join", driver_elsewhere, "--name", name, "--timeout", "5"]) == status
    assert re.match(f"python -m actorrpc.worker: .*{says}", capsys.readouterr().err)


def test_the_time_out_of_join_includes_the_registration(
    driver_elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def slow(group: Any, *_: object, limit: float, **__: object) -> None:
        limits.append(limit)
        group.close()
        raise RpcTimeoutError("it has not answered")

    monkeypatch.setenv("ACTORRPC_KEY", KEY)
    with monkeypatch.context() as patch:
        patch.setattr(join, "enter", slow)
        says = "has not registered 'late': it has not answered"  # the driver then reserves this name for 60 s
        _join_fails(RendezvousError, says, driver_elsewhere, name="late", timeout=9.0)
    assert 0 < limits[0] <= 9.0


def test_joining_a_worker_that_is_not_the_driver_raises_rendezvous_error(
    driver_elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", KEY)
    with init(driver_elsewhere, name="knocked") as context:  # a client, whose end does not end the cluster
        assert (context.address, rpc.get_worker_info().name) == (driver_elsewhere, "knocked")
        host, port = rpc.rpc_sync("twice", _own_address)
    _join_fails(RendezvousError, "drives no cluster", join.show(host, port))


def _own_address() -> tuple[str, int]:
    return rpc.api.group().agent.record.tcp[0]  # type: ignore[attr-defined, no-any-return]


def test_joining_or_listening_without_a_key_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACTORRPC_KEY", raising=False)
    monkeypatch.delenv("ACTORRPC_KEY_FILE", raising=False)
    _join_fails(
        AuthenticationError,
        "there is no key for joining tcp://192.0.2.1:7777: set ACTORRPC_KEY",
        "192.0.2.1:7777",
    )
    with pytest.raises(ConfigError, match=r"listen='tcp://0.0.0.0:0' can be reached.*ACTORRPC_KEY"):
        init(listen="tcp://0.0.0.0:0")
    assert not rpc.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required: --join"),
        (["--join", "nowhere"], "--join='nowhere' has no port"),
        (["--join", "http://a:1"], "tcp://HOST:PORT"),
        (["--join", "a:1", "--labels", "zone"], "name=value"),
        (["--join", "a:1", "--resources", "disk=much"], "takes numbers"),
        (["--join", "a:1", "--num-cpus", "-1"], "num_cpus must be a number"),
        (["--join", "a:1", "--name", "no spaces"], "Worker name"),
        (["--join", "a:1", "--timeout", "0"], "--timeout"),
        (["--join", "a:1", "--count", "0"], "--count"),
        (["--join", "a:1", "--key", "secret-that-must-not-be-printed"], "not taken from the command line"),
        (["--join", "a:1", "--key=secret-that-must-not-be-printed"], "not taken from the command line"),
    ],
)
def test_wrong_arguments_of_the_worker_command_exit_with_2_and_never_print_the_key(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = command.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    err = capsys.readouterr().err
    assert says in err
    assert "secret-that" not in err


# -- secured connections ---------------------------------------------------------------------------------


def _join_and_leave(address: str, **settings: Any) -> None:
    """Join that driver as a worker, and call it."""
    join.join(address, name="one", settings={"transport": "tcp", **settings})
    try:
        assert rpc.rpc_sync("driver", os.getpid) != os.getpid()
    finally:
        rpc.shutdown()


def _join_is_refused(address: str, kind: type[RpcError], says: str, **settings: Any) -> None:
    """Check that joining fails at once with this error, and not with RendezvousError at the time-out."""
    _join_fails(kind, says, address, timeout=60.0, settings={"transport": "tcp", **settings})


@pytest.mark.slow
@pytest.mark.limit(90)
@pytest.mark.prints(
    "refuses the certificate of this worker: .*unknown ca",
    r"certificate of the process that connected from 127\.0\.0\.1 is refused: self.signed certificate",
    "has no certificates: peer did not return a certificate",
)
def test_joining_over_tls_works_only_with_certificates_of_the_same_ca(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", KEY)
    ours, others = certificates.files(), certificates.foreign()
    with driver_process(ACTORRPC_TRANSPORT="tcp", **ours.environment) as address:
        _join_and_leave(address, **ours.options)
        _join_is_refused(
            address, AuthenticationError, "the certificate of the driver .* is refused", **others.options
        )
        # The worker trusts the driver, but the driver does not trust the worker.
        both = tmp_path / "both.pem"
        both.write_text(Path(ours.ca).read_text() + Path(others.ca).read_text())
        _join_is_refused(
            address, AuthenticationError, "refuses the cert", **{**others.options, "tls_ca": str(both)}
        )
        _join_is_refused(address, AuthenticationError, "the driver .* has certificates of a CA")


@pytest.mark.slow
@pytest.mark.limit(90)
@pytest.mark.prints("it has TLS, and this worker has ACTORRPC_TLS=off")
def test_joining_a_driver_without_tls_needs_the_same_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", KEY)
    with driver_process(ACTORRPC_TRANSPORT="tcp", ACTORRPC_TLS="off") as address:
        _join_and_leave(address, tls=False)
        _join_is_refused(address, ProtocolError, "has ACTORRPC_TLS=off, and this connection has TLS")


@pytest.mark.slow
@pytest.mark.limit(90)
def test_a_worker_is_invisible_to_others_until_it_has_joined() -> None:
    changes: list[tuple[str, str]] = []
    with init(listen="tcp://127.0.0.1:0", num_cpus=1, transport="tcp") as context:
        rpc.on_member_change(lambda worker, old, new, reason: changes.append((worker.name, new)))
        with joiner(context.address, "--name", "far", ACTORRPC_TRANSPORT="tcp") as process:
            until(lambda: is_there("far"))
            assert actorrpc.get(actorrpc.remote(os.getpid).options(worker="far").remote()) == process.pid
            process.terminate()
            until(lambda: ("far", "left") in changes)
        assert changes == [("far", "left")]  # no change of the visitor as which it has connected first
        assert [row.name for row in rpc.workers()] == ["driver", "far"]
