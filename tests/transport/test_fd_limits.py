"""The limit of file descriptors: the soft limit is raised for many connections.

At the hard limit, existing connections keep working, new peers wait or are refused, and the log says why.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actorrpc._limits import SPARE_DESCRIPTORS, make_room
from actorrpc.agent import acceptor
from actorrpc.errors import LimitError
from actorrpc.wire.frames import PING, PONG, pack_frame
from actorrpc.wire.identity import WorkerRecord
from tests import certificates
from tests.agent.agents import Stranger, agents
from tests.ranks import run_group


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.fixture
def soft() -> Iterator[int]:
    before = _limits()
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield 512
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_doubled_when_more_than_half_of_it_is_needed(soft: int) -> None:
    assert make_room(soft // 2)
    assert _limits()[0] == soft
    assert make_room(soft // 2 + 1)
    assert _limits()[0] == 2 * soft


@pytest.mark.prints(r"the limit is \d+ and cannot be raised \(not allowed to raise maximum limit\)")
def test_a_soft_limit_that_cannot_be_raised_is_logged_without_an_error(
    soft: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert not make_room(soft - 1)
    assert "cannot be raised" in caplog.text


# -- many at once ------------------------------------------------------------------------------------------


class _Pair:
    """Messages between two ranks, as files in a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._pause = threading.Event()

    def send(self, name: str, data: bytes = b"") -> None:
        made = self._directory / f"{name}.new"
        made.write_bytes(data)
        made.rename(self._directory / name)

    def wait(self, name: str) -> None:
        while not (self._directory / name).exists():
            self._pause.wait(0.01)

    def receive(self, name: str) -> bytes:
        self.wait(name)
        return (self._directory / name).read_bytes()


_plain = pytest.mark.skipif(certificates.OVER_TLS, reason="its strangers speak no TLS")


class _RemoteAgent:
    """Stands for the agent of another process; a Stranger connects to it."""

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record
        self.connector: Any = None


def _strangers(to: _RemoteAgent, count: int, name: str = "s") -> list[Stranger]:
    return [Stranger(to, name=f"{name}{number}", attach=os.urandom(16)) for number in range(count)]  # type: ignore[arg-type]


def _answers(stranger: Stranger) -> bool:
    stranger.sock.sendall(pack_frame(PING))
    return any(frame.kind == PONG for frame in stranger.frames())


def _open() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


def _serve_many(rank: int, _size: int, directory: str, count: int) -> int:
    pair = _Pair(directory)
    if rank:
        to = _RemoteAgent(WorkerRecord.from_bytes(pair.receive("there")))
        found = _strangers(to, count)  # all connect before the first sends anything
        for each in found:
            each.shake_hands()
            each.introduce()
        assert all(map(_answers, found))
        for each in found:
            each.close()
        pair.send("done")
        return 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(4096, _limits()[1])))
    with agents(1) as (agent,):
        pair.send("there", agent.record.to_bytes())
        pair.receive("done")
        assert len(agent.peers()) >= count
    return _limits()[0]


@_plain
def test_many_simultaneous_connections_near_a_small_soft_limit_are_all_accepted(tmp_path: Path) -> None:
    # More connections than one late doubling of the limit would have had room for.
    assert 64 < run_group(_serve_many, 2, str(tmp_path), 64)[0] <= 4096


# -- the hard limit ------------------------------------------------------------------------------------------


class _Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _connect_beyond_the_limit(rank: int, _size: int, directory: str) -> list[str]:
    pair = _Pair(directory)
    if rank:
        to = _RemoteAgent(WorkerRecord.from_bytes(pair.receive("there")))
        inside = _strangers(to, 6)
        for each in inside:
            each.shake_hands()
            each.introduce()
        for each in inside:
            assert _answers(each)
        pair.send("six")
        pair.receive("limited")
        waiting = _strangers(to, 12, "late")
        pair.receive("full")
        for each in inside:  # existing connections still work
            assert _answers(each)
        for number, each in enumerate(waiting):  # each closed connection makes room for another one
            each.shake_hands()
            each.introduce()
            assert _answers(each), number
            each.close()
        assert all(map(_answers, inside))
        for each in inside:
            each.close()
        pair.send("done")
        return []
    said = _Recorder()
    logging.getLogger("actorrpc.links").addHandler(said)
    with agents(1, handshake_timeout=60.0) as (agent,), pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptor, "_PATIENCE_S", float("inf"))
        pair.send("there", agent.record.to_bytes())
        pair.receive("six")
        limit = _open() + SPARE_DESCRIPTORS + 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        agent.connector.admission._scarce = True  # set by hand, because only a test lowers the limit
        pair.send("limited")
        pause = threading.Event()
        while not said.lines:
            pause.wait(0.01)
        pair.send("full")
        pair.receive("done")
        assert _open() <= limit
    return said.lines


@_plain
def test_at_the_hard_limit_new_connections_wait_and_existing_ones_keep_working(tmp_path: Path) -> None:
    lines = run_group(_connect_beyond_the_limit, 2, str(tmp_path))[0]
    assert "accepts no more connections until some have ended" in lines[0]
    assert "RLIMIT_NOFILE" in lines[0]
    assert "ulimit -Hn" in lines[0]
    assert len(lines) <= 5  # not one line for each attempt


def _hog() -> list[int]:
    """Open files until no descriptor is left."""
    found = []
    with contextlib.suppress(OSError):
        while True:
            found.append(os.open(os.devnull, os.O_RDONLY))
    return found


def _call_one_that_is_full(rank: int, _size: int, directory: str, unix: bool) -> int:
    pair = _Pair(directory)
    with agents(1, unix=unix) as (agent,):
        if not rank:
            logging.getLogger("actorrpc.links").addHandler(_Recorder())
            pair.send("there", agent.record.to_bytes())
            limit = _open() + SPARE_DESCRIPTORS + 8
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            taken = _hog()
            os.close(taken.pop())
            pair.send("full")
            taken += _hog()
            pair.wait("refused")
            for fd in taken:
                os.close(fd)
            pair.send("free")
            pair.receive("done")
            return _open()
        to = agent.peer_table.adopt(WorkerRecord.from_bytes(pair.receive("there")))
        pair.receive("full")
        for _ in range(2):
            with pytest.raises(
                LimitError, match=r"call here: worker 'a0' refused.*ulimit -n.*nothing was sent"
            ):
                agent.call(to, os.getpid, (), {}, 40.0, label="here")
        assert to.state == "alive"
        pair.send("refused")
        pair.receive("free")
        assert agent.call_sync(to, os.getpid, (), {}, 40.0) == to.record.pid
        pair.send("done")
        return 0


@_plain
@pytest.mark.limit(30)
@pytest.mark.parametrize("unix", [True, False])
def test_calling_a_worker_without_descriptors_raises_limit_error_and_works_again_later(
    tmp_path: Path, unix: bool
) -> None:
    """Over TCP, the refusal is sent without TLS."""
    run_group(_call_one_that_is_full, 2, str(tmp_path), unix)


@contextlib.contextmanager
def _no_eventfd(number: int, *, dialling: bool) -> Iterator[None]:
    """Let ``os.eventfd`` fail in the main thread, which dials, or in all other threads, which accept."""
    eventfd = os.eventfd

    def none(*given: Any, **_: Any) -> int:
        if (threading.current_thread() is threading.main_thread()) is dialling:
            raise OSError(number, os.strerror(number))
        return eventfd(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "eventfd", none)
        yield


@pytest.mark.limit(15)
def test_a_refusal_for_lack_of_descriptors_on_the_host_names_fs_file_max() -> None:
    with agents(2) as (first, _):
        with (
            _no_eventfd(errno.ENFILE, dialling=False),
            pytest.raises(LimitError, match=r"'a1' refused worker 'a0': no process of its host.*fs.file-max"),
        ):
            first.call(first.peer("a1"), os.getpid, (), {}, 60.0)
        assert first.call_sync(first.peer("a1"), os.getpid, (), {}, 10.0) == os.getpid()


def test_a_call_that_cannot_open_a_socket_names_rlimit_nofile(monkeypatch: pytest.MonkeyPatch) -> None:
    make = socket.socket.__init__

    def no_socket(*given: Any, **named: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        make(*given, **named)

    with agents(2) as (first, second):
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "__init__", no_socket)
            with pytest.raises(LimitError, match=r"call here: .*'a1'.*nothing was sent.*RLIMIT_NOFILE"):
                first.call(first.peer("a1"), os.getpid, (), {}, 10.0, label="here")
        with _no_eventfd(errno.EMFILE, dialling=True), pytest.raises(LimitError, match="RLIMIT_NOFILE"):
            first.call(first.peer("a1"), os.getpid, (), {}, 10.0)
        assert first.peer("a1").state == "alive"
        assert first.call_sync(first.peer("a1"), os.getpid, (), {}, 10.0) == os.getpid()
        assert len(second.peers()) == 1
