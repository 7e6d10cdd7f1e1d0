"""Hosts for tests: network namespaces, each with its own addresses, name and directory, on a switch that can be split.

The switch is a namespace as well, so the network of the machine does not change. It has two bridges: "one", with all ports,
and "other", to which `split` moves ports. Frames between the bridges are dropped silently: no reset, no unreachable.
Needs root and the command `ip`; `needs_hosts` skips tests without them.

    def work(rank, world_size, network): ...          # at module level: the ranks import it

    with Network("a", "b") as network:
        host_group(work, network, ["a", "b"], network)   # worker0 on host a, worker1 on host b

A `Network` may be given to ranks: any of them may cut and heal. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from actorrpc.testing import processes
from tests.ranks import rpc_main, run_group

__all__ = ["Host", "Network", "Signals", "host_group", "needs_hosts"]

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUTS = 0x04000000
_PORT = 29400  # no other programs use these networks
_numbers = itertools.count()

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and the command `ip`",
)


def _ip(*words: str, lines: Sequence[str] = ()) -> None:
    """Run `ip`, with ``lines`` as batch commands on its standard input."""
    done = subprocess.run(
        ["ip", *words], input="\n".join(lines), capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode:
        raise OSError(f"ip {' '.join(words)} {list(lines)}: {done.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with its name and addresses."""

    name: str
    namespace: str
    directory: Path
    ipv4: str | None
    ipv6: str | None

    @property
    def address(self) -> str:
        """The address under which other hosts reach it."""
        address = self.ipv4 or self.ipv6
        assert address is not None
        return address

    def enter(self) -> None:
        """Move this process onto the host. Call it before starting threads, as each thread has its own network namespace.

        The process gets the host's name, temporary directory, runtime directory and copy of the group's key.
        """
        # The thread that dumps stacks uses no network.
        assert {thread.name for thread in threading.enumerate()} <= {"MainThread", "stacks"}
        libc = self._enter_network()
        if libc.unshare(_CLONE_NEWUTS) == 0:
            socket.sethostname(self.name)
        os.environ["TMPDIR"] = str(self.directory / "tmp")
        tempfile.tempdir = None
        os.environ["ACTORRPC_RUNTIME_DIR"] = str(self.directory / "run")
        os.environ["ACTORRPC_KEY_FILE"] = str(self.directory / "key")

    def _enter_network(self) -> ctypes.CDLL:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespace}") as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return libc

    def socket(self, *arguments: int) -> socket.socket:
        """Return a new socket in the host's network, without moving this thread."""
        made: list[socket.socket] = []

        def make() -> None:
            self._enter_network()
            made.append(socket.socket(*arguments))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return made[0]


class Network:
    """Hosts on one switch. A context manager, which removes its namespaces and files at the end.

    Args:
        names: names of the hosts.
        ipv4, ipv6: kinds of addresses: 10.77.0.1, ... and fd77::1, ...
    """

    def __init__(self, *names: str, ipv4: bool = True, ipv6: bool = False) -> None:
        token = f"arpct{os.getpid()}x{next(_numbers)}{secrets.token_hex(2)}"
        self._switch = f"{token}-switch"
        self.directory = Path(tempfile.mkdtemp(prefix="net-", dir=processes.scratch()))
        self.signals = Signals(self.directory)
        self.hosts = {
            name: Host(
                name,
                f"{token}-{name}",
                self.directory / name,
                f"10.77.0.{n}" if ipv4 else None,
                f"fd77::{n}" if ipv6 else None,
            )
            for n, name in enumerate(names, 1)
        }

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in (*(host.namespace for host in self.hosts.values()), self._switch):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _ip("netns", "del", namespace)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _make(self) -> None:
        key = secrets.token_hex(32)
        for host in self.hosts.values():
            for folder in (host.directory, host.directory / "tmp", host.directory / "run"):
                folder.mkdir(mode=0o700)
            with open(os.open(host.directory / "key", os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(key)
        for namespace in (self._switch, *(host.namespace for host in self.hosts.values())):
            _ip("netns", "add", namespace)
        ports = []
        for host in self.hosts.values():
            ports += [
                f"link add port-{host.name} type veth peer name eth0 netns {host.namespace}",
                f"link set port-{host.name} up master one",
            ]
        bridges = [f"link add {each} type bridge mcast_snooping 0" for each in ("one", "other")]
        _ip(
            "-n",
            self._switch,
            "-batch",
            "-",
            lines=[*bridges, "link set one up", "link set other up", *ports],
        )
        for host in self.hosts.values():
            lines = ["link set lo up", "link set eth0 up"]
            lines += [f"address add {host.ipv4}/24 dev eth0"] if host.ipv4 else []
            lines += [f"address add {host.ipv6}/64 dev eth0 nodad"] if host.ipv6 else []
            _ip("-n", host.namespace, "-batch", "-", lines=lines)

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    # -- faults -----------------------------------------------------------------------

    def split(self, *names: str) -> None:
        """Silently disconnect these hosts from all others; they remain connected to each other."""
        _ip("-n", self._switch, "-batch", "-", lines=[f"link set port-{name} master other" for name in names])

    def heal(self) -> None:
        """Connect all hosts again."""
        _ip(
            "-n",
            self._switch,
            "-batch",
            "-",
            lines=[f"link set port-{name} master one" for name in self.hosts],
        )

    def unplug(self, name: str) -> None:
        """Take a host's link down on its own side, so that its kernel reports errors."""
        _ip("-n", self.hosts[name].namespace, "link", "set", "eth0", "down")

    def lose(self, name: str, to: str) -> None:
        """Drop packets from one host to another; the opposite direction still works."""
        _ip("-n", self.hosts[name].namespace, "route", "add", "blackhole", self.hosts[to].address)

    def close_port(self, name: str, port: int) -> None:
        """Drop the answers of a host to connections at a TCP port, as a firewall does; the host can still connect to others."""
        _ip(
            "-n", self.hosts[name].namespace, "rule", "add", "blackhole", "ipproto", "tcp", "sport", str(port)
        )

    def left_behind(self) -> list[str]:
        """Return the files that workers have left in the directories of their hosts."""
        return [
            str(path)
            for host in self.hosts.values()
            for folder in ("run", "tmp")
            for path in (host.directory / folder).rglob("*")
        ]


class Signals:
    """Signals between processes through files, independent of the network. Any process may set a signal and wait for it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def say(self, word: str) -> None:
        """Set the signal, for present and later calls of `wait`."""
        (self._directory / f"word-{word}").touch()

    def said(self, word: str) -> bool:
        """Return whether the signal is set."""
        return (self._directory / f"word-{word}").exists()

    def wait(self, *words: str) -> None:
        """Wait until all these signals are set; bounded by the group's limit."""
        pause = threading.Event()
        while not all(map(self.said, words)):
            pause.wait(0.005)

    def meet(self, word: str, rank: int, world_size: int) -> None:
        """Wait until every rank has called this method with this word."""
        self.say(f"{word}-{rank}")
        self.wait(*(f"{word}-{each}" for each in range(world_size)))


def _serve_store(network: Network, port: int) -> None:
    store = TCPStore(
        "::" if network.hosts["store"].ipv4 is None else "0.0.0.0",
        port,
        None,
        True,
        timedelta(seconds=30),
        False,
    )
    network.signals.say("store")
    network.signals.wait("store may end")
    del store


def _member(
    rank: int,
    count: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    network: Network,
    places: Sequence[str],
    init_method: str,
    options: Mapping[str, Any],
    advertise: Mapping[int, str],
) -> Any:
    world_size = len(places)
    if rank >= world_size:
        network.hosts["store"].enter()
        _serve_store(network, _PORT)
        return None
    network.hosts[places[rank]].enter()
    if count > world_size:
        network.signals.wait("store")
    options = {**options, "advertise": advertise.get(rank)}
    return rpc_main(rank, world_size, fn, args, init_method, options)


def host_group(
    fn: Callable[..., Any],
    network: Network,
    places: Sequence[str],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    advertise: Mapping[int, str] | None = None,
    timeout: float = 50.0,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` between `init_rpc` and `shutdown`, rank n on host `places[n]`.

    Rank 0 serves the store. If the network has a host named "store", a process on it serves the store instead, is no worker,
    and ends when the signal "store may end" is set.

    Args:
        options: keywords for the back-end's options, such as `heartbeat`.
        advertise: by rank, the address that a worker advertises instead of its own.

    The other arguments and the errors are those of `tests.ranks.run_group`.
    """
    apart = "store" in network.hosts
    address = network.hosts["store" if apart else places[0]].address
    method = f"tcp://[{address}]:{_PORT}" if ":" in address else f"tcp://{address}:{_PORT}"
    environment = {"ACTORRPC_KEY": ""}
    if apart:
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    begun = time.monotonic()
    found = run_group(
        _member,
        len(places) + apart,
        fn,
        args,
        network,
        tuple(places),
        method,
        dict(options or {}),
        dict(advertise or {}),
        timeout=timeout,
        env=environment,
        may_die=may_die,
    )
    print(f"{getattr(fn, '__name__', fn)}: {time.monotonic() - begun:.1f} s")
    if not may_die:
        assert not network.left_behind()
    return found[: len(places)]
