"""Workers find each other through every kind of store, or all raise the reason."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from torch.distributed import FileStore, HashStore, TCPStore

from actorrpc import rpc
from actorrpc.config import Settings
from actorrpc.errors import AuthenticationError, ConfigError, RendezvousError
from actorrpc.group import group as groups
from actorrpc.group import rank0
from actorrpc.group.dynamic import DynamicRendezvous
from actorrpc.group.fixed import FixedRendezvous
from actorrpc.group.store import StoreMeeting, open_store, use_store
from actorrpc.transport import signals
from actorrpc.wire.identity import WorkerRecord, host_identity, new_incarnation
from actorrpc.wire.keys import Key
from tests.ports import free_port
from tests.ranks import run_group

HOST = host_identity()
KEY = Key.from_text("correct horse battery staple")
LONG = 30.0


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACTORRPC_RUNTIME_DIR", str(tmp_path / "run"))
    for name in ("ACTORRPC_KEY", "ACTORRPC_KEY_FILE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # The tests start agents on several threads at once. Only one thread at a time may wrap signal handlers, so wrap them before.
    signals.install(_do_nothing)
    yield
    signals.uninstall(_do_nothing)


def _do_nothing() -> None:
    """Stand in for the function that makes the main thread run deferred handlers."""


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


def dynamic(store: Any, timeout: float = LONG) -> DynamicRendezvous:
    return DynamicRendezvous(store, timeout=timeout)


def enter(point: DynamicRendezvous, worker: WorkerRecord, key: Key | None = None) -> WorkerRecord:
    return point.enter(worker, key, Settings())[0]


def join(
    store: Any,
    rank: int,
    size: int | None,
    *,
    name: str = "",
    key: Key | None = None,
    timeout: float = LONG,
    **settings: Any,
) -> Any:
    """Become worker ``w{rank}`` of a group; return the Group, which serves calls."""
    made = groups.join(
        name or f"w{rank}", rank, size, store, settings=Settings(**settings), key=key, timeout=timeout
    )
    made.start()
    return made


def run_together(*tasks: Callable[[], Any]) -> list[Any]:
    """Run all tasks at once; return their results or errors."""

    def run(task: Callable[[], Any]) -> Any:
        try:
            return task()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))


def meet(*tasks: Callable[[], Any]) -> list[Any]:
    """Run tasks that join; return the error or the names of the group's workers for each, and close the groups."""
    found = run_together(*tasks)
    results = [
        each if isinstance(each, Exception) else [r.name for r in each.agent.members()] for each in found
    ]
    for each in found:
        if not isinstance(each, Exception):
            each.close()
    return results


def meet_all(store: Any, size: int, **options: Any) -> None:
    """Check that ranks 0 to ``size`` - 1 meet at a store."""
    names = [f"w{rank}" for rank in range(size)]
    tasks = [lambda rank=rank: join(store, rank, size, **options) for rank in range(size)]
    assert meet(*tasks) == [names] * size


class Recording:
    """A store that records which values are written, and all arguments of its operations."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.values: dict[str, bytes] = {}
        self.arguments = b""

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self.arguments += repr(args).encode() + b"".join(each for each in args if isinstance(each, bytes))
            if name in ("set", "compare_set"):
                self.values[args[0]] = args[-1]
            elif name == "add":
                self.values[args[0]] = b""
            return operation(*args)

        return call


def leader_of(store: Any, size: int, **options: Any) -> tuple[str, bytes]:
    """Let rank 0 come and time out; return the name and the value that it has written to the store."""
    recording = Recording(store)
    with pytest.raises(RendezvousError, match="missing: rank 1"):
        join(recording, 0, size, timeout=0.05, **options)
    ((name, value),) = recording.values.items()
    return name, value


# -- fixed groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"key": KEY, "transport": "tcp"}])
def test_groups_of_any_size_meet_at_one_store_one_after_the_other(
    connect: Callable[[], Any], options: dict[str, Any]
) -> None:
    for size in (1, 3, 3, 2, 5):
        meet_all(connect(), size, **options)


def test_workers_that_come_before_rank_0_wait_for_the_next_group(store: HashStore) -> None:
    """The store has the address of the rank 0 of a group that has met and of one that has ended."""
    first = run_together(*(lambda rank=rank: join(store, rank, 2) for rank in range(2)))
    early = threading.Event()

    class Noting(Recording):
        def __getattr__(self, name: str) -> Any:
            early.set()
            return super().__getattr__(name)

    def rank_0() -> Any:
        assert early.wait(LONG)
        return join(store, 0, 2)

    assert meet(rank_0, lambda: join(Noting(store), 1, 2)) == [["w0", "w1"]] * 2
    for each in first:
        each.close()
    early.clear()
    assert meet(rank_0, lambda: join(Noting(store), 1, 2)) == [["w0", "w1"]] * 2


def test_duplicate_names_fail_on_all_workers_and_do_not_affect_the_next_group(
    connect: Callable[[], Any],
) -> None:
    for error in meet(
        lambda: join(connect(), 0, 3),
        lambda: join(connect(), 1, 3, name="w0"),
        lambda: join(connect(), 2, 3),
    ):
        assert isinstance(error, RendezvousError)
        assert "name of its own: 'w0' (rank 0" in str(error)
        assert "'w0' (rank 1" in str(error)
        assert "'w2'" not in str(error)
    meet_all(connect(), 3)


@pytest.mark.parametrize("wrong", [2, 7])
def test_duplicate_and_out_of_range_ranks_fail_on_all_workers(store: HashStore, wrong: int) -> None:
    for error in meet(
        lambda: join(store, 0, 3), lambda: join(store, wrong, 3, name="other"), lambda: join(store, 2, 3)
    ):
        assert isinstance(error, RendezvousError)
        assert f"'other' (rank {wrong}" in str(error)


def test_an_earlier_rank_0_raises_when_another_rank_0_has_come(store: HashStore) -> None:
    recording, over = Recording(store), threading.Event()

    def earlier() -> Any:
        try:
            return join(recording, 0, 2)
        finally:
            over.set()

    def later() -> Any:
        while not recording.values:
            over.wait(0.01)
        return join(store, 0, 2)

    def other() -> Any:
        assert over.wait(LONG)
        return join(store, 1, 2)

    first, *others = meet(earlier, later, other)
    assert isinstance(first, RendezvousError)
    assert "another rank 0 has come" in str(first)
    assert others == [["w0", "w1"]] * 2


def test_workers_on_another_host_need_tcp_addresses(store: HashStore) -> None:
    far = record(1, host="elsewhere")

    def follow() -> Any:
        return FixedRendezvous(store, size=2, timeout=LONG).enter(far, KEY, Settings())

    for error in run_together(lambda: join(store, 0, 2, key=KEY, transport="tcp"), follow):
        assert isinstance(error, RendezvousError)
        assert "2 hosts" in str(error)
        assert "'w1' (rank 1" in str(error)
        assert "'w0'" not in str(error)
        assert "the same key (ACTORRPC_KEY_FILE)" in str(error)


def test_device_maps_that_do_not_fit_raise_the_same_error_on_all_workers(store: HashStore) -> None:
    def mapped() -> Any:
        maps = (("nobody", "cpu", "cpu"),)
        return groups.join("w0", 0, 2, store, settings=Settings(), key=None, timeout=LONG, maps=maps)

    for error in run_together(mapped, lambda: join(store, 1, 2)):
        assert isinstance(error, ConfigError)
        assert "there is no worker 'nobody'" in str(error)


def test_a_record_that_is_too_large_raises_on_its_worker_at_once(store: HashStore) -> None:
    large = record(1, device_maps=(("w0", "cpu", "cpu"),) * 30_000)

    def follow() -> Any:
        with pytest.raises(RendezvousError, match=r"rank 0 refuses this worker: .* may have 262144"):
            FixedRendezvous(store, size=2, timeout=LONG).enter(large, None, Settings())
        return join(store, 1, 2)

    assert meet(lambda: join(store, 0, 2), follow) == [["w0", "w1"]] * 2


@pytest.mark.parametrize("hasty", [0, 2])
def test_a_time_out_names_the_missing_ranks_on_all_workers(connect: Callable[[], Any], hasty: int) -> None:
    tasks = [
        lambda rank=rank: join(connect(), rank, 5, timeout=1.0 if rank == hasty else LONG)
        for rank in (0, 2, 3)
    ]
    for error in meet(*tasks):
        assert isinstance(error, RendezvousError)
        assert "of 5 workers came within 1 s; missing: rank 1, " in str(error)
        assert f"'w{hasty}' (rank {hasty}" in str(error)


def test_a_missing_rank_0_is_named_after_the_time_out(store: HashStore) -> None:
    for error in meet(*(lambda rank=rank: join(store, rank, 3, timeout=0.1) for rank in (1, 2))):
        assert isinstance(error, RendezvousError)
        assert "rank 0 did not come within 0.1 s" in str(error)
    leader_of(store, 3)
    (error,) = meet(lambda: join(store, 1, 3, timeout=0.1))
    assert "rank 0 did not come within 0.1 s" in str(error)
    assert "a run that has ended" in str(error)


def test_a_long_wait_logs_the_missing_ranks(
    store: HashStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank0, "SILENT_S", 0.05)
    meet(*(lambda rank=rank: join(store, rank, 3, timeout=0.5) for rank in (0, 1)))
    assert re.search("init_rpc on rank 0 waits for rank (1, )?2$", caplog.text, re.MULTILINE)
    meet(lambda: join(HashStore(), 1, 2, timeout=0.2))
    assert "init_rpc on rank 1 waits for rank 0" in caplog.text


def test_a_worker_that_has_lost_its_connection_to_rank_0_gets_the_table_again(store: HashStore) -> None:
    worker, point = record(1), FixedRendezvous(store, size=2, timeout=LONG)

    def follow() -> Any:
        point.enter(worker, None, Settings())
        return [each.name for each in point.members()]

    group, names = run_together(lambda: join(store, 0, 2), follow)
    assert [names, follow()] == [["w0", "w1"]] * 2
    group.close()


def test_workers_raise_if_rank_0_cannot_start_after_they_have_met(store: HashStore) -> None:
    def rank_0() -> None:
        groups.join("w0", 0, 2, store, settings=Settings(), key=None, timeout=LONG).close()

    with pytest.raises(RendezvousError, match="rank 0 could not start"):
        raise run_together(rank_0, lambda: join(store, 1, 2))[1]


_JOIN = """
import sys
from torch.distributed import FileStore
from actorrpc.config import Settings
from actorrpc.group import group
from actorrpc.transport.visit import Visitor

hear = Visitor.hear

def waits(*arguments):
    print("waits", flush=True)
    return hear(*arguments)

Visitor.hear = waits
rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
group.join(f"w{rank}", rank, size, FileStore(path, -1), settings=Settings(), key=None, timeout=60.0)
"""


@contextlib.contextmanager
def worker_that_waits(rank: int, size: int, path: Path) -> Iterator[Any]:
    """Run a worker in another process and kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", _JOIN, str(rank), str(size), str(path)], stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_killed_workers_leave_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with worker_that_waits(0, 3, path), worker_that_waits(1, 3, path) as other:
        assert other.stdout.readline() == b"waits\n"
    meet_all(FileStore(str(path), -1), 3)
    with worker_that_waits(1, 3, path) as other:
        rank_0: list[Any] = []
        thread = threading.Thread(target=lambda: rank_0.append(join(FileStore(str(path), -1), 0, 3)))
        thread.start()
        assert other.stdout.readline() == b"waits\n"
        other.kill()
        other.wait(60)
        rest = [lambda rank=rank: join(FileStore(str(path), -1), rank, 3) for rank in (1, 2)]
        assert meet(*rest) == [["w0", "w1", "w2"]] * 2
        thread.join()
    rank_0[0].close()


def test_a_failing_store_raises_rendezvous_error() -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            def fail(*args: Any) -> Any:
                raise RuntimeError("socket closed\nframe #0: c10::Error\nframe #1")

            return fail

    for size in (2, None):
        with pytest.raises(RendezvousError, match=r"socket closed\. The process that serves it") as caught:
            join(Failing(), 0, size)
        assert "frame" not in str(caught.value)


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    return process.pid


class Interrupting(Recording):
    """A store that sends SIGINT to this process, from another thread, after a number of operations."""

    def __init__(self, store: Any, after: int) -> None:
        super().__init__(store)
        self._left = itertools.count(after, -1)

    def __getattr__(self, name: str) -> Any:
        if next(self._left) == 0:
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
        return super().__getattr__(name)


def test_ctrl_c_interrupts_the_wait_for_other_workers(store: HashStore) -> None:
    with pytest.raises(KeyboardInterrupt):
        join(Interrupting(store, 20), 1, 2, timeout=300.0)  # while it polls the store
    with pytest.raises(KeyboardInterrupt):
        join(Interrupting(store, 0), 0, 2, timeout=300.0)
    results: list[Any] = []
    written = Recording(store)
    thread = threading.Thread(target=lambda: results.extend(meet(lambda: join(written, 0, 3, timeout=2.0))))
    thread.start()
    while not written.values:
        thread.join(0.01)
    with pytest.raises(KeyboardInterrupt):
        join(Interrupting(store, 1), 1, 3, timeout=300.0)  # when it has read the address of rank 0
    thread.join()
    assert isinstance(results[0], RendezvousError)


@pytest.mark.slow
def test_a_store_that_does_not_answer_blocks_neither_ctrl_c_nor_the_time_out(store: HashStore) -> None:
    """torch's client waits without limit for a server that was stopped, or whose host has died."""
    answers = threading.Event()

    class Silent(Interrupting):
        def __getattr__(self, name: str) -> Any:
            operation = super().__getattr__(name)
            return lambda *args: answers.wait(LONG) and operation(*args)

    try:
        for rank in (0, 1):
            with pytest.raises(KeyboardInterrupt):
                join(Silent(store, 0), rank, 2, timeout=300.0)
        with pytest.raises(RendezvousError, match="it does not answer"):
            use_store(Silent(store, -1), 0.0, "num_keys")
    finally:
        answers.set()


# -- what the store has --------------------------------------------------------------------------------


def test_the_store_gets_one_value_without_names_hosts_and_paths(store: HashStore, tmp_path: Path) -> None:
    stores = [Recording(store) for _ in range(3)]
    options: dict[str, Any] = {"key": KEY, "transport": "tcp"}
    assert (
        meet(*(lambda rank=rank: join(stores[rank], rank, 3, **options) for rank in range(3)))
        == [["w0", "w1", "w2"]] * 3
    )
    assert [len(each.values) for each in stores] == [1, 0, 0]
    for text in (b"w0", b"w1", HOST.encode(), str(tmp_path).encode(), b"run/"):
        assert text not in b"".join(each.arguments for each in stores)


@pytest.mark.parametrize("size", [2, None])
@pytest.mark.parametrize("given", [KEY, None])
def test_the_key_is_never_written_to_the_store(store: HashStore, given: Key | None, size: int | None) -> None:
    stores = [Recording(store) for _ in range(2)]
    found = run_together(*(lambda rank=rank: join(stores[rank], rank, size, key=given) for rank in range(2)))
    secrets = {each.agent.connector.key.reveal() for each in found}
    for each in found:
        each.close()
    (secret,) = secrets
    for text in (secret, repr(secret)[2:-1].encode(), secret.hex().encode(), b"battery"):
        assert text not in b"".join(each.arguments for each in stores)


def test_a_changed_address_of_rank_0_raises_authentication_error(store: HashStore) -> None:
    name, value = leader_of(store, 2, key=KEY, transport="tcp")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.0)
        body, mac = msgpack.unpackb(value)
        *fields, leader = msgpack.unpackb(body)
        changed = replace(WorkerRecord.from_bytes(leader), tcp=(listener.getsockname(),))
        store.set(name, msgpack.packb([msgpack.packb([*fields, changed.to_bytes()]), mac]))
        with pytest.raises(AuthenticationError, match="not written with this worker's key"):
            join(store, 1, 2, key=KEY, transport="tcp")
        with pytest.raises(BlockingIOError):  # the worker has not connected
            listener.accept()


def test_a_replayed_address_of_rank_0_does_no_harm(store: HashStore) -> None:
    """A program without the key listens at the address of an earlier rank 0."""
    name, value = leader_of(store, 2, key=KEY, transport="tcp")
    leader = WorkerRecord.from_bytes(msgpack.unpackb(msgpack.unpackb(value)[0])[-1])
    with socket.create_server(leader.tcp[0]) as listener:
        store.set(name, value)
        accepted: list[socket.socket] = []

        def rank_0() -> Any:
            accepted.append(listener.accept()[0])
            accepted[0].close()
            return join(store, 0, 2, key=KEY, transport="tcp")

        options: dict[str, Any] = {"key": KEY, "transport": "tcp"}
        assert meet(rank_0, lambda: join(store, 1, 2, **options)) == [["w0", "w1"]] * 2


@pytest.mark.parametrize(
    "value", [b"x", b"\xc1", b"\x93\x01\x02\x03", b"\x92\xa5other\xa0", b"\x92\xc4\x01\x90\xc4\x00"]
)
def test_malformed_data_in_the_store_raises_rendezvous_error(store: HashStore, value: bytes) -> None:
    name, _ = leader_of(store, 2)
    store.set(name, value)
    with pytest.raises(RendezvousError, match="cannot be read"):
        join(store, 1, 2)


# -- dynamic groups ------------------------------------------------------------------------------------


def test_workers_join_and_leave_a_dynamic_group(connect: Callable[[], Any]) -> None:
    one, two, three = (dynamic(connect()) for _ in range(3))
    assert enter(one, record(-1, "a")).rank == 0
    assert {each.name for each in one.members()} == {"a"}
    second = enter(two, record(-1, "b"))
    assert {each.name for each in two.members()} == {"a", "b"}
    third = enter(three, record(7, "c"))
    assert {each.name for each in three.members()} == {"a", "b", "c"}
    assert [each.name for each in one.members()] == ["a", "b", "c"]
    assert one.resolve("b") == second == three.resolve(1)
    assert two.resolve(7) == third
    assert one.resolve("d") is None
    assert one.resolve(3) is None
    two.leave()
    two.leave()
    assert [each.name for each in one.members()] == ["a", "c"]
    assert one.resolve("b") is None
    assert one.resolve(1) is None
    again = dynamic(connect())
    second = enter(again, record(1, "b"))
    assert {each.name for each in again.members()} == {"a", "b", "c"}
    assert one.resolve("b") == second == one.resolve(1)
    assert [each.name for each in one.members()] == ["a", "b", "c"]


def test_taken_names_and_ranks_are_refused_until_their_holder_leaves(store: HashStore) -> None:
    one = dynamic(store)
    enter(one, record(5, "a"))
    with pytest.raises(RendezvousError, match=r"the name is taken: 'a' \(rank 5"):
        enter(dynamic(store), record(-1, "a"))
    with pytest.raises(RendezvousError, match="rank 5 is taken by 'a'"):
        enter(dynamic(store), record(5, "b"))
    assert enter(dynamic(store), record(6, "b")).rank == 6
    one.leave()
    assert enter(dynamic(store), record(5, "a")).rank == 5


def test_assigned_ranks_avoid_chosen_ranks(store: HashStore) -> None:
    for rank in (0, 1, 3):
        enter(dynamic(store), record(rank))
    assert [enter(dynamic(store), record(-1, name)).rank for name in "abc"] == [2, 4, 5]


def test_simultaneous_joins_get_unique_ranks_and_names(connect: Callable[[], Any]) -> None:
    names = [f"n{n % 6}" for n in range(12)]  # two workers want each name
    results = run_together(*(lambda n=n: enter(dynamic(connect()), record(-1, n)) for n in names))
    joined = [each for each in results if isinstance(each, WorkerRecord)]
    assert sorted(each.name for each in joined) == [f"n{n}" for n in range(6)]
    assert len({each.rank for each in joined}) == 6
    assert sum(isinstance(each, RendezvousError) for each in results) == 6
    assert sorted(dynamic(connect()).members(), key=str) == sorted(joined, key=str)


def test_the_name_of_a_dead_worker_can_be_reused(store: HashStore) -> None:
    dead, far = dynamic(store), dynamic(store)
    enter(dead, record(0, "a", pid=_dead_pid()), KEY)
    enter(far, record(1, "b", host="elsewhere", pid=1), KEY)
    again = enter(dynamic(store), record(0, "a"), KEY)
    assert again.pid == os.getpid()
    with pytest.raises(RendezvousError, match="taken"):  # the state of a process on another host is unknown
        enter(dynamic(store), record(-1, "b"), KEY)
    dead.leave()  # must not remove the new record
    assert far.resolve("a") == again


# -- keys ----------------------------------------------------------------------------------------------


def test_rank_0_creates_a_key_file_that_is_removed_when_all_have_read_it(
    connect: Callable[[], Any], tmp_path: Path
) -> None:
    found = run_together(*(lambda rank=rank: join(connect(), rank, 3) for rank in range(3)))
    first, *others = [each.agent.connector.key for each in found]
    assert isinstance(first, Key)
    assert others == [first, first]
    assert not list((tmp_path / "run").rglob("*.key"))
    for each in found:
        each.close()


def test_workers_on_several_hosts_need_a_given_key(store: HashStore) -> None:
    leader = threading.Thread(target=lambda: meet(lambda: join(store, 0, 2, timeout=4.0)))
    leader.start()
    far = record(1, host="elsewhere")
    with pytest.raises(AuthenticationError, match="set ACTORRPC_KEY"):
        FixedRendezvous(store, size=2, timeout=LONG).enter(far, None, Settings())
    leader.join()


@pytest.mark.parametrize("given", [0, 1])
def test_a_key_given_to_only_some_workers_raises_authentication_error(store: HashStore, given: int) -> None:
    rank_0, rank_1 = meet(
        *(lambda n=n: join(store, n, 2, key=KEY if n == given else None, timeout=4.0) for n in range(2))
    )
    assert isinstance(rank_1, AuthenticationError)
    assert "ACTORRPC_KEY" in str(rank_1)
    assert isinstance(rank_0, RendezvousError)
    assert "missing: rank 1" in str(rank_0)
    assert "another key" in str(rank_0)


@pytest.mark.prints("WITHOUT a key")
def test_insecure_workers_without_a_key_meet(store: HashStore) -> None:
    meet_all(store, 3, insecure=True, transport="tcp")


def test_a_key_file_outside_of_the_runtime_directory_is_refused(store: HashStore, tmp_path: Path) -> None:
    other = tmp_path / f"{os.getpid()}-1-1-0123456789abcdef.key"
    other.write_bytes(b"x" * 32)
    other.chmod(0o600)
    name, value = leader_of(store, 2)
    body, mac = msgpack.unpackb(value)
    fields = [str(other) if str(each).endswith(".key") else each for each in msgpack.unpackb(body)]
    store.set(name, msgpack.packb([msgpack.packb(fields), mac]))
    with pytest.raises(AuthenticationError, match="runtime directory"):
        join(store, 1, 2)


def test_a_dynamic_group_keeps_its_key_until_its_last_member_leaves(store: HashStore, tmp_path: Path) -> None:
    points = [dynamic(store) for _ in range(3)]

    def agree(point: DynamicRendezvous, rank: int = -1, own: Key | None = None, host: str = HOST) -> Any:
        return point.enter(record(rank, f"n{rank}", host=host), own, Settings())[1]

    first = agree(points[0], 0)
    assert agree(points[1], 1) == first
    # In this test all members are one process and share one link, so keep it from being removed.
    points[0]._key_file = None
    points[0].leave()
    assert agree(points[2], 2) == first
    with pytest.raises(AuthenticationError, match="another host"):
        agree(dynamic(store), host="elsewhere")
    with pytest.raises(AuthenticationError, match="was given a key"):
        agree(dynamic(store), own=KEY)
    points[1].close()
    with pytest.raises(AuthenticationError, match="was removed"):
        agree(dynamic(store))
    points[2].close()
    fresh = dynamic(store)  # all members have left, so this is a new group
    assert agree(fresh, 0) not in (first, KEY)
    fresh.close()
    assert os.listdir(tmp_path / "run") == []


def test_members_that_join_at_the_same_time_agree_on_one_key(connect: Callable[[], Any]) -> None:
    points = [dynamic(connect()) for _ in range(6)]
    found = run_together(
        *(lambda p=p, n=n: p.enter(record(n), None, Settings()) for n, p in enumerate(points))
    )
    assert all(key == found[0][1] for _, key in found)
    assert isinstance(found[0][1], Key)
    for point in points:
        point.close()


def test_a_given_key_encrypts_what_a_dynamic_group_writes(connect: Callable[[], Any], tmp_path: Path) -> None:
    store, other = Recording(connect()), dynamic(connect())
    one = dynamic(store)
    enter(one, record(0, "secret-name", unix_path=str(tmp_path / "w")), KEY)
    enter(other, record(-1, "b"), KEY)
    assert [each.name for each in one.members()] == ["secret-name", "b"]
    for text in (b"secret-name", HOST.encode(), str(tmp_path).encode()):
        assert text not in store.arguments
    with pytest.raises(AuthenticationError, match="another key"):
        enter(dynamic(connect()), record(-1, "c"), Key.from_text("x" * 40))
    for name, value in store.values.items():
        if len(value) > 100:
            store.set(name, value[:-1] + bytes([value[-1] ^ 1]))
    with pytest.raises(AuthenticationError, match="give the group its own port or file"):
        other.resolve("secret-name")


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
        ("tcp://h..h:5", 0, 1),
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


def _one_port(rank: int, world_size: int, first: str) -> list[Any]:
    found: list[Any] = []
    for step in (first, "rpc" if first == "torch" else "torch"):
        if step == "torch":
            torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
            total = torch.tensor([float(rank)])
            torch.distributed.all_reduce(total)
            found.append(total.item())
        else:
            rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size)
            found.append(rpc.rpc_sync(f"w{(rank + 1) % world_size}", os.getenv, ("RANK",)))
    rpc.shutdown()
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize("first", ["torch", "rpc"])
@pytest.mark.parametrize("agent", [False, True])
def test_init_rpc_and_init_process_group_share_one_port(agent: bool, first: str) -> None:
    """Rank 0 serves the store; under torchrun, its agent does."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if agent else None
    port = server.port if server is not None else free_port()
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "RANK": "0"}
    if agent:
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
    found = run_group(_one_port, 3, first, env=environment, leak_wait=None)
    wanted: list[Any] = [3.0, "0"] if first == "torch" else ["0", 3.0]
    assert found == [wanted] * 3
