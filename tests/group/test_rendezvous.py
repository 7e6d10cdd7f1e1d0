"""Workers find each other through every kind of store, or all raise the reason."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from actorrpc.errors import AuthenticationError, ConfigError, RendezvousError
from actorrpc.group import store as store_module
from actorrpc.group.rendezvous import Rendezvous, open_store
from actorrpc.group.store import StoreMeeting
from actorrpc.wire import keys
from actorrpc.wire.identity import WorkerRecord, host_identity, new_incarnation
from actorrpc.wire.keys import Key
from tests.ports import free_port
from tests.ranks import run_group

HOST = host_identity()
KEY = Key.from_text("correct horse battery staple")
LONG = 30.0


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_RUNTIME_DIR", str(tmp_path / "run"))
    for name in ("ACTORRPC_KEY", "ACTORRPC_KEY_FILE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["hash", "file", "tcp"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """A function that opens the same store again at each call."""
    if request.param == "hash":
        store = HashStore()
        yield lambda: store
    elif request.param == "file":
        yield lambda: FileStore(str(tmp_path / "store"), -1)
    else:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Only two connections: torch's client looks up names, which may take seconds without a network.
        held = [server, TCPStore("127.0.0.1", server.port, is_master=False)]
        turns = itertools.count()
        yield lambda: held[next(turns) % 2]
        del server
        held.clear()  # pytest keeps the function alive


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def record(rank: int, name: str | None = None, **changes: Any) -> WorkerRecord:
    made = WorkerRecord(
        name=f"w{rank}" if name is None else name,
        rank=rank,
        incarnation=new_incarnation(),
        host=HOST,
        unix_path=f"/run/w{rank}",
        pid=os.getpid(),
    )
    return replace(made, **changes)


def fixed(store: Any, rank: int, size: int, timeout: float = LONG) -> Rendezvous:
    return Rendezvous(store, rank=rank, world_size=size, timeout=timeout)


def dynamic(store: Any, rank: int = -1, timeout: float = LONG) -> Rendezvous:
    return Rendezvous(store, rank=rank, world_size=None, timeout=timeout)


def run_together(*tasks: Callable[[], Any]) -> list[Any]:
    """Run all tasks at once; return their results or errors."""

    def run(task: Callable[[], Any]) -> Any:
        try:
            return task()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))


def meet(connect: Callable[[], Any], records: list[WorkerRecord], timeout: float = LONG) -> list[Any]:
    size = len(records)
    return run_together(
        *(lambda r=r, n=n: fixed(connect(), n, size, timeout).join(r) for n, r in enumerate(records))
    )


# -- fixed groups ------------------------------------------------------------------------------------


def test_groups_of_any_size_meet_at_one_store_one_after_the_other(connect: Callable[[], Any]) -> None:
    for size in (1, 3, 3, 2, 7):
        points = [fixed(connect(), n, size) for n in range(size)]
        records = [record(n) for n in range(size)]
        tables = run_together(*(lambda p=p, r=r: p.join(r) for p, r in zip(points, records, strict=True)))
        assert tables == [{each.name: each for each in records}] * size
        for point in points:
            assert point.members() == records
            assert point.resolve("w0") == point.resolve(0) == records[0]
            assert point.resolve("w9") is point.resolve(9) is None
            point.close()
            point.close()


def test_duplicate_names_fail_on_all_workers_and_do_not_affect_the_next_group(
    connect: Callable[[], Any],
) -> None:
    results = meet(connect, [record(0), record(1, "w0"), record(2)])
    for error in results:
        assert isinstance(error, RendezvousError)
        assert "name of its own: 'w0' (rank 0" in str(error)
        assert "'w0' (rank 1" in str(error)
        assert "'w2'" not in str(error)
    assert meet(connect, [record(n) for n in range(3)])[0].keys() == {"w0", "w1", "w2"}


@pytest.mark.parametrize("wrong", [0, 7])
def test_duplicate_and_out_of_range_ranks_fail_on_all_workers(store: HashStore, wrong: int) -> None:
    points = [fixed(store, n, 3) for n in range(3)]
    records = [record(0), record(wrong, "other"), record(2)]
    results = run_together(*(lambda p=p, r=r: p.join(r) for p, r in zip(points, records, strict=True)))
    for error in results:
        assert isinstance(error, RendezvousError)
        assert f"'other' (rank {wrong}" in str(error)


def test_groups_on_several_hosts_need_tcp_addresses(store: HashStore) -> None:
    far = record(1, host="elsewhere", tcp=(("10.0.0.2", 5),))
    for error in meet(lambda: store, [record(0), far]):
        assert isinstance(error, RendezvousError)
        assert "2 hosts" in str(error)
        assert "'w0' (rank 0" in str(error)
        assert "'w1'" not in str(error)
        assert "Set ACTORRPC_KEY" in str(error)
    near = record(0, tcp=(("10.0.0.1", 5),))
    assert all(len(each) == 2 for each in meet(lambda: store, [near, far]))
    for error in meet(lambda: store, [record(0), record(1, unix_path=None)]):
        assert "'w1'" in str(error)
        assert "'w0'" not in str(error)


def test_a_time_out_names_the_missing_ranks(connect: Callable[[], Any]) -> None:
    def in_a_hurry() -> Any:
        ready, pause = PrefixStore("fixed/5/0", connect()), threading.Event()
        while ready.add("0/ready", 0) < 2:  # wait until two others, with long time-outs, have arrived
            pause.wait(0.005)
        return fixed(connect(), 0, 5, 0.3).join(record(0))

    results = run_together(in_a_hurry, *(lambda n=n: fixed(connect(), n, 5).join(record(n)) for n in (2, 3)))
    for error in results:
        assert isinstance(error, RendezvousError)
        assert "3 of 5 workers came within 0.3 s; missing: rank 1, 4; here: " in str(error)
        assert "'w2' (rank 2" in str(error)


def test_a_worker_that_comes_after_a_time_out_joins_the_next_group(store: HashStore) -> None:
    with pytest.raises(RendezvousError, match="missing: rank 1"):
        fixed(store, 0, 2, 0.05).join(record(0))
    records = [record(n) for n in range(2)]
    assert meet(lambda: store, records) == [{each.name: each for each in records}] * 2


@pytest.mark.parametrize(
    "value", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x92\xa5other\xa0", b"\x92\xa5table\xa0"]
)
def test_malformed_data_in_the_store_raises_rendezvous_error(store: HashStore, value: bytes) -> None:
    PrefixStore("fixed/2/0", store).set("0/outcome", value or b"x")
    with pytest.raises(RendezvousError):
        fixed(store, 0, 2, 1.0).join(record(0))


def test_a_failing_store_raises_rendezvous_error() -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            def fail(*args: Any) -> Any:
                raise RuntimeError("socket closed\nframe #0: c10::Error\nframe #1")

            return fail

    for point in (fixed(Failing(), 0, 2), dynamic(Failing(), 0)):
        with pytest.raises(RendezvousError, match=r"socket closed\. The process that serves it") as caught:
            point.join(record(0))
        assert "frame" not in str(caught.value)
        point.record = record(0)
        point.close()  # does not raise


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    return process.pid


# -- dynamic groups ------------------------------------------------------------------------------------


def test_workers_join_and_leave_a_dynamic_group(connect: Callable[[], Any]) -> None:
    one, two, three = (dynamic(connect()) for _ in range(3))
    one.enter(record(-1, "a"))
    assert {each.name for each in one.members()} == {"a"}
    assert one.record is not None
    assert one.record.rank == 0
    two.enter(record(-1, "b"))
    assert {each.name for each in two.members()} == {"a", "b"}
    three.enter(record(7, "c"))
    assert {each.name for each in three.members()} == {"a", "b", "c"}
    assert [each.name for each in one.members()] == ["a", "b", "c"]
    assert one.resolve("b") == two.record == three.resolve(1)
    assert two.resolve(7) == three.record
    assert one.resolve("d") is None
    assert one.resolve(3) is None
    two.leave()
    two.leave()
    assert [each.name for each in one.members()] == ["a", "c"]
    assert one.resolve("b") is None
    assert one.resolve(1) is None
    again = dynamic(connect())
    again.enter(record(1, "b"))
    assert {each.name for each in again.members()} == {"a", "b", "c"}
    assert one.resolve("b") == again.record == one.resolve(1)
    assert [each.name for each in one.members()] == ["a", "b", "c"]


def test_taken_names_and_ranks_are_refused_until_their_holder_leaves(store: HashStore) -> None:
    one = dynamic(store)
    one.enter(record(5, "a"))
    with pytest.raises(RendezvousError, match=r"the name is taken: 'a' \(rank 5"):
        dynamic(store).enter(record(-1, "a"))
    with pytest.raises(RendezvousError, match="rank 5 is taken by 'a'"):
        dynamic(store).enter(record(5, "b"))
    assert dynamic(store, 6).enter(record(-1, "b")).rank == 6
    one.leave()
    assert dynamic(store).enter(record(5, "a")).rank == 5


def test_assigned_ranks_avoid_chosen_ranks(store: HashStore) -> None:
    for rank in (0, 1, 3):
        dynamic(store).enter(record(rank))
    assert [dynamic(store).enter(record(-1, name)).rank for name in "abc"] == [2, 4, 5]


def test_simultaneous_joins_get_unique_ranks_and_names(connect: Callable[[], Any]) -> None:
    names = [f"n{n % 6}" for n in range(12)]  # two workers want each name
    results = run_together(*(lambda n=n: dynamic(connect()).enter(record(-1, n)) for n in names))
    joined = [each for each in results if isinstance(each, WorkerRecord)]
    assert sorted(each.name for each in joined) == [f"n{n}" for n in range(6)]
    assert len({each.rank for each in joined}) == 6
    assert sum(isinstance(each, RendezvousError) for each in results) == 6
    assert sorted(dynamic(connect()).members(), key=str) == sorted(joined, key=str)


def test_the_name_of_a_dead_worker_can_be_reused(store: HashStore) -> None:
    dynamic(store).enter(record(0, "a", pid=_dead_pid()))
    far = dynamic(store)
    far.enter(record(1, "b", host="elsewhere", pid=1))
    assert dynamic(store).enter(record(0, "a")).pid == os.getpid()
    with pytest.raises(RendezvousError, match="taken"):  # the state of a process on another host is unknown
        dynamic(store).enter(record(-1, "b"))
    found = far.resolve("b")
    assert found is not None
    far.leave()
    again = dynamic(store)
    again.enter(record(1, "b"))
    far.record = found
    far.leave()  # must not remove the new record
    assert far.resolve("b") == again.record


# -- keys ----------------------------------------------------------------------------------------------


def agree(point: Rendezvous, own: Key | None = None, host: str = HOST) -> Key:
    key = point.agree_key(own, host)
    join = point.enter if point.world_size is None else point.join
    join(record(point.rank, host=host, tcp=(("10.0.0.1", 1),)))
    return key


def test_rank_0_creates_a_key_file_that_is_removed_when_all_have_read_it(
    connect: Callable[[], Any], tmp_path: Path
) -> None:
    keys_of = []
    for _ in range(2):
        points = [fixed(connect(), n, 3) for n in range(3)]
        found = run_together(*(lambda p=p: agree(p) for p in points))
        assert isinstance(found[0], Key)
        assert found[0] == found[1] == found[2]
        keys_of.append(found[0])
        assert os.listdir(tmp_path / "run") == []  # all workers have read the key file
    assert keys_of[0] != keys_of[1]


def test_workers_on_several_hosts_need_a_given_key(store: HashStore) -> None:
    points = [fixed(store, n, 2) for n in range(2)]
    results = run_together(lambda: agree(points[0]), lambda: agree(points[1], host="elsewhere"))
    assert isinstance(results[1], AuthenticationError)
    assert isinstance(results[0], RendezvousError)
    for error in results:
        assert "set ACTORRPC_KEY" in str(error)


@pytest.mark.parametrize("given", [0, 1])
def test_a_key_given_to_only_some_workers_fails_on_all(store: HashStore, given: int) -> None:
    points = [fixed(store, n, 2) for n in range(2)]
    results = run_together(*(lambda n=n: agree(points[n], KEY if n == given else None) for n in range(2)))
    assert isinstance(results[1], AuthenticationError)
    assert isinstance(results[0], RendezvousError)
    assert "ACTORRPC_KEY" in str(results[0])
    points[0].close()


def packed(*parts: str) -> bytes:
    data: bytes = msgpack.packb(parts)
    return data


class Recording:
    """A store that records all arguments of its operations."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.written: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self.written.append(repr(args).encode())
            return operation(*args)

        return call


@pytest.mark.parametrize("given", [KEY, None])
def test_the_key_is_never_written_to_the_store(store: HashStore, given: Key | None) -> None:
    stores = [Recording(store) for _ in range(3)]
    points = [fixed(stores[0], 0, 2), fixed(stores[1], 1, 2), dynamic(stores[2], 0)]
    found = [
        *run_together(lambda: agree(points[0], given), lambda: agree(points[1], given)),
        agree(points[2], given),
    ]
    for key in found:
        secret = key.reveal()
        for text in (written for each in stores for written in each.written):
            assert repr(secret)[2:-1].encode() not in text
            assert secret.hex().encode() not in text
            assert b"battery" not in text
    points[2].close()


def test_a_key_file_outside_of_the_runtime_directory_is_refused(store: HashStore, tmp_path: Path) -> None:
    other = tmp_path / "1-1-1-0123456789abcdef.key"
    other.write_bytes(b"x" * 32)
    other.chmod(0o600)
    PrefixStore("fixed/2/0", store).set("0/key", packed("file", str(other), HOST))
    with pytest.raises(AuthenticationError, match="runtime directory"):
        fixed(store, 1, 2).agree_key(None, HOST)


@pytest.mark.parametrize("parts", [("file",), ("file", "a", "b", "c"), ("other",), ("given", "x")])
def test_malformed_data_about_the_key_raises_authentication_error(
    store: HashStore, parts: tuple[str, ...]
) -> None:
    PrefixStore("fixed/2/0", store).set("0/key", packed(*parts))
    with pytest.raises(AuthenticationError, match="cannot be read"):
        fixed(store, 1, 2).agree_key(None, HOST)


def test_a_missing_rank_0_is_named_after_the_time_out(store: HashStore) -> None:
    points = [fixed(store, n, 3, 0.1) for n in (1, 2)]
    for error in run_together(*(lambda p=p: p.agree_key(None, HOST) for p in points)):
        assert isinstance(error, RendezvousError)
        assert "rank 0 did not come within 0.1 s" in str(error)


_CREATE_KEY = "import os; from actorrpc.wire import keys; print(keys.create_key_file(), os.getpid())"


@pytest.mark.parametrize("recorded_ranks", [[0], [0, 1]])
def test_records_and_the_key_of_a_killed_run_are_ignored(store: HashStore, recorded_ranks: list[int]) -> None:
    """The store has data of a run that was killed during its rendezvous."""
    made = subprocess.run([sys.executable, "-c", _CREATE_KEY], check=True, capture_output=True, text=True)
    stale, pid = made.stdout.split()
    old = PrefixStore("fixed/3/0", store)
    for n in recorded_ranks:
        assert old.add("arrivals", 1) == n + 1
        old.set(f"0/record/{n}", record(n, pid=int(pid)).to_bytes())
        old.add("0/ready", 1)
    old.set("0/key", packed("file", stale, HOST))
    points = [fixed(store, n, 3) for n in range(3)]
    found = run_together(*(lambda p=p: agree(p) for p in points))
    assert found[0] == found[1] == found[2] != keys.read_key_file(stale)
    assert {each.pid for each in points[0].members()} == {os.getpid()}


def test_a_dynamic_group_keeps_its_key_until_its_last_member_leaves(store: HashStore, tmp_path: Path) -> None:
    points = [dynamic(store, n) for n in range(3)]
    first = agree(points[0])
    assert agree(points[1]) == first
    # In this test all members are one process and share one link, so keep it from being removed.
    points[0]._key_file = None
    points[0].leave()
    assert agree(points[2]) == first
    with pytest.raises(AuthenticationError, match="another host"):
        dynamic(store).agree_key(None, "elsewhere")
    with pytest.raises(AuthenticationError, match="was given a key"):
        dynamic(store).agree_key(KEY, HOST)
    points[1].close()
    with pytest.raises(AuthenticationError, match="was removed"):
        dynamic(store).agree_key(None, HOST)
    points[2].close()
    fresh = dynamic(store, 0)  # all members have left, so this is a new group
    assert agree(fresh) not in (first, KEY)
    fresh.close()
    assert os.listdir(tmp_path / "run") == []


def test_members_that_join_at_the_same_time_agree_on_one_key(connect: Callable[[], Any]) -> None:
    points = [dynamic(connect()) for _ in range(6)]
    found = run_together(*(lambda p=p: p.agree_key(None, HOST) for p in points))
    assert all(each == found[0] for each in found)
    assert isinstance(found[0], Key)
    for point in points:
        point.close()
    given = dynamic(HashStore())
    assert given.agree_key(KEY, HOST) == KEY


# -- stores and addresses ------------------------------------------------------------------------------


def test_init_methods_and_environment_variables_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = StoreMeeting.parse
    found = parse("tcp://h:5?rank=1&world_size=2")
    assert (found.kind, found.host, found.port, found.rank, found.world_size) == ("tcp", "h", 5, 1, 2)
    assert not found.hosts
    assert parse("tcp://[::1]:5", 0, 2).host == "::1"
    assert parse("tcp://h:5", 0, 2).hosts
    assert parse("tcp://h:0", 0, 1).port == 0
    found = parse("file:///a/b?rank=0", -1, None)
    assert (found.kind, found.path, found.rank, found.world_size) == ("file", "/a/b", 0, None)
    assert parse("file:///a", 3, 4) == parse("file:///a", 3, 4)
    monkeypatch.setenv("MASTER_ADDR", "m")
    monkeypatch.setenv("MASTER_PORT", "77")
    assert parse("env://").rank == -1
    assert parse("env://", 0, None).hosts
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    found = parse("env://")
    assert (found.host, found.port, found.rank, found.world_size) == ("m", 77, 1, 3)
    assert parse("env://", 2, 4).world_size == 4  # arguments take precedence
    assert parse("env://?rank=0&world_size=2").rank == 0
    assert parse("file:///a").world_size is None  # other methods ignore these variables
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not parse("env://", 0, 2).hosts


@pytest.mark.parametrize(
    ("method", "rank", "size"),
    [
        ("", 0, 1),
        ("nonsense", 0, 1),
        (None, 0, 1),
        ("tcp://h", 0, 1),
        ("tcp://:5", 0, 1),
        ("tcp://h:99999", 0, 1),
        ("tcp://h:0", 1, 2),
        ("file://", 0, 1),
        ("file://host/path", 0, 1),
        ("file:///", 0, 1),
        ("env://", 0, 1),
        ("file:///a", -1, 2),
        ("file:///a", 2, 2),
        ("file:///a?rank=x", -1, None),
        ("file:///a?rank=1", 0, None),
        ("file:///a?rank=0&world_size=2", 0, 3),
    ],
)
def test_invalid_init_methods_raise_config_error(method: Any, rank: int, size: int | None) -> None:
    with pytest.raises(ConfigError):
        open_store(method, rank, size, 1.0)


def test_a_store_file_that_cannot_be_created_raises_rendezvous_error(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "such", tmp_path):
        with pytest.raises(RendezvousError, match="cannot be made"):
            open_store(f"file://{path}", 0, 1, 5.0)


def _open(method: str, rank: int, size: int | None, timeout: float = LONG) -> Rendezvous:
    store, rank, size = open_store(method, rank, size, timeout)
    return Rendezvous(store, rank=rank, world_size=size, timeout=timeout)


def test_an_unreachable_store_is_named_in_the_error() -> None:
    port = free_port()
    with pytest.raises(RendezvousError, match=f"127.0.0.1:{port} cannot be reached: .*refused.*Rank 0"):
        open_store(f"tcp://127.0.0.1:{port}", 1, 2, 0.2)


def test_a_store_port_in_use_raises_rendezvous_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{port} cannot be opened"):
            open_store(f"tcp://127.0.0.1:{port}", 0, 2, 5.0)


@pytest.mark.prints(
    r"\[c10d\] (recvValue failed|TCP client failed to connect|The client socket has timed out)"
)
def test_a_store_server_that_does_not_answer_raises_rendezvous_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(RendezvousError, match="does not answer"):
            open_store(f"tcp://127.0.0.1:{other.getsockname()[1]}", 1, 2, 0.3)
        held = [thread for thread in threading.enumerate() if thread.name == "actorrpc-store"]
        assert len(held) == 1
    # Closing the listener resets the unaccepted connection; then the thread ends.
    held[0].join(LONG)
    assert not held[0].is_alive()


def test_ctrl_c_interrupts_the_wait_for_other_workers(store: HashStore) -> None:
    operations = itertools.count()

    class Interrupting:
        def __getattr__(self, name: str) -> Any:
            if next(operations) == 20:  # while the store is polled
                signal.raise_signal(signal.SIGINT)
            return getattr(store, name)

    with pytest.raises(KeyboardInterrupt):
        fixed(Interrupting(), 0, 2, 300.0).join(record(0))


def _meet_by_environment(rank: int, world_size: int, folder: str) -> Any:
    os.environ["RANK"] = str(rank)
    point = _open("env://", -1, None)
    key = agree(point)
    # The process with the store must not end before the others have read the table.
    (Path(folder) / str(rank)).touch()
    assert store_module.poll(lambda: len(os.listdir(folder)) == world_size, time.monotonic() + LONG)
    own = point.own_address()
    point.close()
    names = [each.name for each in point.members()]
    return point.rank, point.world_size, names, key.reveal().hex(), own


@pytest.mark.parametrize("agent", [False, True])
def test_processes_meet_through_the_environment(agent: bool, tmp_path: Path) -> None:
    """Rank 0 serves the store; under torchrun, its agent does."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if agent else None
    port = server.port if server is not None else free_port()
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    if agent:
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
    (tmp_path / "met").mkdir()
    found = run_group(_meet_by_environment, 3, str(tmp_path / "met"), env=environment, leak_wait=None)
    assert [each[:3] for each in found] == [(rank, 3, ["w0", "w1", "w2"]) for rank in range(3)]
    assert len({each[3] for each in found}) == 1
    assert [each[4] for each in found] == [None] * 3


def test_own_address_is_the_local_address_that_reaches_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SimpleNamespace(host="198.51.100.7", port=4711)
    point = dynamic(store)
    connected: list[tuple[Any, ...]] = []
    for answer, expected in [
        (("192.0.2.1", 9), "192.0.2.1"),
        (("127.0.0.1", 9), None),
        (("0.0.0.0", 9), None),
        (("2001:db8::1", 9, 0, 0), "2001:db8::1"),
        (("fe80::1", 9, 0, 2), "fe80::1%eth2"),
        (("::1", 9, 0, 0), None),
    ]:
        probe = SimpleNamespace(connect=connected.append, getsockname=lambda answer=answer: answer)
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", lambda *_, probe=probe: contextlib.nullcontext(probe))
            patch.setattr(socket, "if_indextoname", lambda index: f"eth{index}")
            assert point.own_address() == expected
    assert set(connected) == {("198.51.100.7", 4711)}
    store.host = "no such host"
    assert point.own_address() is None
    assert dynamic(HashStore()).own_address() is None
