"""The driver's side of the workers: the peers, and groups of their workers, from start to end.

A :class:`Rig` is one running group of one peer at one placement: callers are ranks ``0 .. pairs-1``, and
caller ``i`` calls worker ``i + pairs``. Everything is bounded: a worker that does not answer in time
makes the request fail with :class:`RigError`, and the group is killed, not waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["PEERS", "Peer", "Placement", "Rig", "RigError", "Stable", "Worker", "placements"]

TORCH, ACTORRPC, RAW = "torch.distributed.rpc", "actorrpc.rpc", "benchmarks.raw"


class RigError(RuntimeError):
    """A worker failed, died, or did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One compared configuration: a backend and its settings.

    A peer that ``polls`` uses processors while it is idle, so it must be stopped while other peers are
    measured. torch's default transport between processes of one host polls.
    """

    backend: str
    polls: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    family: str = "unix"


NO_SPIN = {"ACTORRPC_SPIN_US": "0"}
ENCRYPTED = {"ACTORRPC_TRANSPORT": "tcp"}
TCP = ENCRYPTED | {"ACTORRPC_TLS": "off"}  # as torch and raw

# (name in the tables, transport) -> peer
PEERS: dict[tuple[str, str], Peer] = {
    ("torch", "same host"): Peer(backend=TORCH, polls=True),
    ("torch", "TCP"): Peer(backend=TORCH, options={"_transports": ["uv"], "_channels": ["basic"]}),
    ("actorrpc", "same host"): Peer(backend=ACTORRPC),
    ("actorrpc", "TCP"): Peer(backend=ACTORRPC, environment=TCP),
    ("encrypted", "TCP"): Peer(backend=ACTORRPC, environment=ENCRYPTED),
    ("no spin", "same host"): Peer(backend=ACTORRPC, environment=NO_SPIN),
    ("no spin", "TCP"): Peer(backend=ACTORRPC, environment=TCP | NO_SPIN),
    ("no lane", "same host"): Peer(backend=ACTORRPC, environment={"ACTORRPC_LANE": "0"}),
    ("switch 0.5 ms", "same host"): Peer(
        backend=ACTORRPC, environment={"ACTORRPC_SWITCH_INTERVAL": "0.0005"}
    ),
    ("raw", "same host"): Peer(backend=RAW, family="unix"),
    ("raw", "TCP"): Peer(backend=RAW, family="tcp"),
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where callers and callees may run."""

    name: str
    callers: tuple[int, ...]
    callees: tuple[int, ...]


def placements() -> dict[str, Placement]:
    """Return the placements this machine can give: own, one, and both (not pinned further).

    ``own`` is missing where only one CPU is allowed.
    """
    cpus = sorted(os.sched_getaffinity(0))
    first, pair = (cpus[0],), tuple(cpus[:2])
    found = {"one": Placement("one", first, first), "both": Placement("both", pair, pair)}
    if len(cpus) > 1:
        found["own"] = Placement("own", first, (cpus[1],))
    return found


class Worker:
    """One worker process and the channel to it."""

    __slots__ = ("_buffer", "channel", "pid", "process")

    def __init__(
        self, channel: socket.socket, pid: int, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.channel, self.pid, self.process = channel, pid, process
        self._buffer = b""

    def send(self, do: str, **fields: Any) -> None:
        """Send one request.

        Raises:
            RigError: the worker has ended.
        """
        try:
            self.channel.sendall(json.dumps({"do": do, **fields}).encode() + b"\n")
        except OSError as error:
            raise RigError(f"worker {self.pid} has ended ({error})") from error

    def receive(self, timeout: float) -> dict[str, float]:
        """Return the answer to the oldest unanswered request.

        Raises:
            RigError: the worker failed, ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            self.channel.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                chunk = self.channel.recv(65536)
            except TimeoutError as error:
                raise RigError(f"worker {self.pid} did not answer in {timeout:.0f} s") from error
            except OSError as error:
                raise RigError(f"worker {self.pid} has ended ({error})") from error
            finally:
                self.channel.settimeout(None)
            if not chunk:
                raise RigError(f"worker {self.pid} has ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise RigError(str(reply["error"]).strip())
        value: dict[str, float] = reply["value"]
        return value

    def close(self, *, kill: bool) -> None:
        """Let the worker end, or kill it; never waits long."""
        self.channel.close()
        if kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        if self.process is not None:
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Stable:
    """Makes workers: one fork server for each set of CPUs and modules, started when first needed."""

    __slots__ = ("_seen", "_servers", "log", "root", "scratch")

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.root = Path(__file__).resolve().parents[1]
        self._seen = 0
        self.log = (scratch / "workers.log").open("ab")
        self._servers: dict[tuple[tuple[int, ...], str], tuple[subprocess.Popen[bytes], socket.socket]] = {}

    def _start(
        self, how: str, cpus: tuple[int, ...], modules: str, python: str = sys.executable
    ) -> tuple[Any, socket.socket]:
        here, there = socket.socketpair()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ACTORRPC_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.root), "PYTHONWARNINGS": "ignore"}
        listed = ",".join(map(str, cpus))
        with there:
            process = subprocess.Popen(
                [python, "-m", "benchmarks.workers", how, str(there.fileno()), listed, modules],
                cwd=self.root,
                env=environment,
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,  # Ctrl-C is the driver's
            )
        return process, here

    def prepare(self, cpus: tuple[int, ...], modules: str = "benchmarks.scenarios") -> socket.socket:
        """Start the fork server for these CPUs and modules, if it does not run yet.

        Raises:
            RigError: it does not start.
        """
        key = (cpus, modules)
        if key not in self._servers:
            process, orders = self._start("fork", cpus, modules)
            self._servers[key] = (process, orders)
            orders.settimeout(120.0)
            if orders.recv(16) != b"ready\n":
                del self._servers[key]
                orders.close()
                raise RigError(f"the fork server ended with {process.wait()}: {self.news()}")
        return self._servers[key][1]

    def fork(self, cpus: tuple[int, ...], modules: str = "benchmarks.scenarios") -> Worker:
        """Return a new worker, forked from a warm process on these CPUs."""
        orders = self.prepare(cpus, modules)
        here, there = socket.socketpair()
        with there:
            socket.send_fds(orders, [b"f"], [there.fileno()])
            pid = int(orders.recv(32))
        return Worker(here, pid)

    def solo(
        self,
        cpus: tuple[int, ...],
        modules: str = "benchmarks.scenarios",
        python: str = sys.executable,
    ) -> Worker:
        """Return a new worker that shares no memory with another process; ``python``: its interpreter."""
        process, here = self._start("solo", cpus, modules, python)
        return Worker(here, process.pid, process)

    def rendezvous(self, how: str) -> str:
        """Return a new rendezvous for a group: a file, or a TCP port that is free now."""
        if how == "file":
            return f"file://{self.scratch}/store-{time.monotonic_ns()}"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    def news(self) -> str:
        """Return the last lines that workers wrote to standard error since the previous call."""
        written = Path(self.log.name).read_bytes()
        fresh, self._seen = written[self._seen :], len(written)
        lines = fresh.decode(errors="replace").strip().splitlines()[-3:]
        return "workers wrote: " + (" | ".join(lines) if lines else "nothing")

    def close(self) -> None:
        """End the fork servers and all remaining workers."""
        for process, orders in self._servers.values():
            orders.close()
            process.kill()
            process.wait()
        self._servers.clear()
        self.log.close()


class Rig:
    """One running group of one peer."""

    __slots__ = ("broken", "pairs", "peer", "workers")

    def __init__(self, peer: Peer, workers: list[Worker]) -> None:
        self.peer, self.workers, self.pairs, self.broken = peer, workers, len(workers) // 2, False

    @classmethod
    def start(
        cls, stable: Stable, peer: Peer, placement: Placement, *, pairs: int = 1, solo: bool = False
    ) -> Rig:
        """Start a group and wait until all have joined.

        Raises:
            RigError: a worker failed to start or to join.
        """
        make = stable.solo if solo else stable.fork
        workers: list[Worker] = []  # the rig closes these workers if a later one fails to start
        rig = cls(peer, workers)
        try:
            for cpus in [placement.callers] * pairs + [placement.callees] * pairs:
                workers.append(make(cpus))
            rig.pairs = pairs
            rig.begin()
            if peer.backend == RAW:
                rig.join_raw(stable.scratch)
            else:
                rig.join(stable.rendezvous("file"))
        except BaseException:
            rig.close(kill=True)
            raise
        return rig

    def pids(self) -> list[int]:
        """Return the process ids of all workers."""
        return [worker.pid for worker in self.workers]

    def pause(self) -> None:
        """Stop the processes of a peer that polls, until ``resume``."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the processes of a peer that polls run again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.peer.polls:
            for worker in self.workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, number)

    def begin(self) -> None:
        """Give every worker its environment and its scenarios."""
        module = RAW if self.peer.backend == RAW else "benchmarks.scenarios"
        self._all("begin", {"environment": self.peer.environment, "module": module}, 60.0)

    def join(self, init_method: str) -> float:
        """Let all workers call ``init_rpc``; return the time when the last call ended (shared clock)."""
        for rank, worker in enumerate(self.workers):
            fields = {
                "backend": self.peer.backend,
                "rank": rank,
                "world_size": len(self.workers),
                "partner": (rank + self.pairs) % len(self.workers),
                "init_method": init_method,
                "options": self.peer.options,
            }
            worker.send("init", **{"with": fields})
        return max(reply["done"] for reply in self._replies(self.workers, 60.0))

    def join_raw(self, scratch: Path) -> None:
        """Connect a raw pair."""
        place = {"family": self.peer.family, "address": f"{scratch}/raw-{self.workers[1].pid}"}
        port = int(self._ask(self.workers[1:], "listen", place, 20.0)[0]["port"])
        self._ask(self.workers[:1], "connect", place | {"port": port}, 20.0)

    def _replies(self, workers: list[Worker], timeout: float) -> list[dict[str, float]]:
        try:
            return [worker.receive(timeout) for worker in workers]
        except RigError:
            self.broken = True
            raise

    def _ask(
        self, workers: list[Worker], do: str, fields: dict[str, Any], timeout: float
    ) -> list[dict[str, float]]:
        if self.broken:
            raise RigError("this group has failed before")
        for worker in workers:
            worker.send(do, **{"with": fields})
        return self._replies(workers, timeout)

    def _all(self, do: str, fields: dict[str, Any], timeout: float) -> list[dict[str, float]]:
        for worker in self.workers:
            worker.send(do, **fields)
        return self._replies(self.workers, timeout)

    def caller(self, do: str, *, timeout: float = 120.0, **fields: Any) -> dict[str, float]:
        """Run a scenario on the first caller."""
        return self._ask(self.workers[:1], do, fields, timeout)[0]

    def callee(self, do: str, *, timeout: float = 30.0, **fields: Any) -> dict[str, float]:
        """Run a scenario on the first callee."""
        return self._ask(self.workers[self.pairs : self.pairs + 1], do, fields, timeout)[0]

    def callers(self, do: str, *, timeout: float = 120.0, **fields: Any) -> list[dict[str, float]]:
        """Run a scenario on all callers at once."""
        return self._ask(self.workers[: self.pairs], do, fields, timeout)

    def everyone(self, do: str, *, timeout: float = 60.0, **fields: Any) -> list[dict[str, float]]:
        """Run a scenario on all workers at once."""
        return self._ask(self.workers, do, fields, timeout)

    def close(self, *, kill: bool = False) -> None:
        """Shut the group down: gracefully if it still answers, otherwise by killing it."""
        kill = kill or self.broken
        self.resume()
        if not kill:
            try:
                self.everyone("shutdown", timeout=20.0)
            except RigError:
                kill = True
        for worker in self.workers:
            worker.close(kill=kill)
