"""``actorrpc up``: start workers on several hosts, by ssh or in a job of Slurm, and end them together.

This process runs one agent (``up_agent.py``) on each host, by ssh or srun, and the agent starts the workers of its host. This
process sends the key to the agent's stdin and forwards the agent's output. The messages of ``ssh -v`` and the output of the agent
show in which phase of :data:`PHASES` the host is. At the end, this process sends END to the agents. If the workers do not end in
time, or at a second Ctrl-C at least 1 s later, the agents kill them. If this process is killed, the stdin of each agent ends, and
the agents end their workers. One thread waits for all events.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from actorrpc import __version__
from actorrpc.cli.up_agent import END
from actorrpc.config import ENVIRONMENT, Settings, host_and_port, ports_of
from actorrpc.errors import ConfigError, RendezvousError
from actorrpc.transport.signals import REPEATS_S, die_with
from actorrpc.wire import keys

__all__ = ["PHASES", "HostLaunch", "Up", "slurm_hosts"]

PHASES: Final = {"resolve": 10.0, "connect": 10.0, "authenticate": 30.0, "version": 60.0, "join": 120.0}
"""The phases of the start on a host, with the seconds that each may take by default."""

_JOINED: Final = "joined"
_SSH: Final = ("ssh", "-v", "-T", "-o", "BatchMode=yes")
_SRUN: Final = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--unbuffered", "--quiet")
# Lines of `ssh -v` that are not shown, and the phase that begins with some of them.
_OF_SSH: Final = re.compile(r"debug1: |OpenSSH_|Authenticated to |Transferred: sent |Bytes per second: ")
_BEGINS: Final = (
    (re.compile(r"debug1: Connecting to "), "connect"),
    (re.compile(r"debug1: Connection established"), "authenticate"),
    (re.compile(r"Authenticated to "), "version"),
)
_HAS_JOINED: Final = re.compile(r"worker '.*' has joined tcp://")
#: Variables that belong to one host or process; all other variables of actorrpc are sent to the workers.
_OWN: Final = {
    f"ACTORRPC_{name}"
    for name in ("KEY", "KEY_FILE", "RUNTIME_DIR", "BIND", "ADVERTISE", "LISTEN", "WORKERS")
}
#: Variables of a Slurm job about each of its tasks. They do not apply to the agent, the only task of its step, which gets all
#: CPUs and devices that the job has on the node.
_OF_TASKS: Final = re.compile(r"(SLURM|SRUN)_(\w+_PER_TASK|NTASKS_PER_\w+)$")
_LOOK_S: Final = 1.0
_LINE: Final = 1 << 16  # a longer line is shown in parts
_KILL_S: Final = 2.0  # an agent kills workers that have not ended this long after ``grace``
_END_S: Final = 4.0  # this process kills ssh or srun if it has not ended this long after ``grace``
_LAST_S: Final = 1.0  # how long the agents may take to kill their workers
_FAILED: Final = 1


def slurm_hosts() -> list[str]:
    """Return the hosts of the Slurm job that this process is in; empty if it is in none.

    Raises:
        ConfigError: ``scontrol`` does not list them.
    """
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if not listed:
        return []
    try:
        found = subprocess.run(
            ["scontrol", "show", "hostnames", listed], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"scontrol does not list the hosts of SLURM_JOB_NODELIST={listed}: {error}"
        ) from error
    return found.stdout.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLaunch:
    """What to start.

    Attributes:
        hosts: the names of the hosts.
        count: the number of workers on each host.
        slurm: whether ``srun`` starts the agents on the hosts; otherwise, ``ssh`` starts them.
        ssh: the words of the ssh command, before the name of the host.
        python: the interpreter on the hosts.
        worker: further arguments for ``python -m actorrpc.worker``.
        join: the address of the driver; empty if ``program`` is the driver.
        program: the command to run on this host as the driver; empty: none.
        limits: how many seconds each phase of :data:`PHASES` may take on a host.
        grace: seconds that workers may take to leave at the end.
    """

    hosts: Sequence[str]
    count: int
    slurm: bool
    ssh: Sequence[str] = _SSH
    python: str
    worker: Sequence[str]
    join: str
    program: Sequence[str]
    limits: Mapping[str, float]
    grace: float

    def command(self, host: str) -> list[str]:
        """Return the command that runs the agent of a host."""
        agent = [self.python, "-m", "actorrpc", "up-agent"]
        if self.slurm:
            return [*_SRUN, f"--nodelist={host}", *agent]
        return [*self.ssh, host, f"exec {shlex.join(agent)}"]

    def environment(self) -> dict[str, str] | None:
        """Return the environment of that command, which srun passes on to the agent; None: the environment of this process."""
        if not self.slurm:
            return None
        left_out = {name for name in os.environ if name in _OWN or _OF_TASKS.match(name)}
        return {name: value for name, value in os.environ.items() if name not in left_out}


@dataclass(slots=True, eq=False)
class _UpHost:
    """A host: the process that runs its agent, its phase, and the last line on stderr that is not one of ssh's."""

    name: str
    process: subprocess.Popen[bytes]
    phase: str
    until: float
    workers: int = 0
    ended: bool = False
    failure: str = ""
    last: str = ""
    rest: dict[int, bytes] = field(default_factory=dict)


class Up:
    """One run of ``actorrpc up``. Used by one thread.

    Args:
        launch: what to start.

    Raises:
        ConfigError: the key or the address cannot be used.
        RendezvousError: this host has no address that other hosts reach.
    """

    def __init__(self, launch: HostLaunch) -> None:
        self._launch = launch
        self._hosts: list[_UpHost] = []
        self._program: subprocess.Popen[bytes] | None = None
        self._select = selectors.DefaultSelector()
        self._alarm, self._alarm_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopped_by = 0
        self._hurries = False  # a second signal was received
        self._again_from = 0.0  # until then, signals repeat the first
        self._key_fd = -1
        self._secret = keys.given_secret() or secrets.token_hex(32)
        self._address = launch.join or _listen_address(launch.hosts)
        # Run in children between fork and exec, which is safe: this process has one thread.
        self._end_with_this = partial(die_with, os.getpid(), signal.SIGTERM)

    def run(self) -> int:
        """Start all, wait until the program or all workers have ended, and end the rest; return the exit status.

        Raises:
            OSError: ssh, srun or the program cannot be started.
        """
        before = {
            number: signal.signal(number, self._stop)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        signal.set_wakeup_fd(self._alarm_write, warn_on_full_buffer=False)
        self._select.register(self._alarm, selectors.EVENT_READ, partial(os.read, self._alarm, 4096))
        try:
            begun = time.monotonic()
            for name in self._launch.hosts:
                self._start(name)
            if not self._reach("join"):
                return self._status(_FAILED)
            if self._launch.program:
                self._start_program()
            if not self._reach(_JOINED):
                return self._status(_FAILED)
            count = sum(each.workers for each in self._hosts)
            _say(
                f"{count} workers on {len(self._hosts)} hosts have joined {self._address} in {time.monotonic() - begun:.1f} s"
            )
            while not self._is_over():
                self._step()
            return self._status(max(_code(each.process) for each in self._hosts))
        finally:
            self._end()
            signal.set_wakeup_fd(-1)
            for each, handler in before.items():
                signal.signal(each, handler)
            self._select.close()
            for host in self._hosts:
                for stream in filter(None, (host.process.stdout, host.process.stderr)):
                    stream.close()
            os.close(self._alarm)
            os.close(self._alarm_write)

    def _stop(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if not self._stopped_by:
            self._stopped_by, self._again_from = number, now + REPEATS_S
        self._hurries = self._hurries or now >= self._again_from

    def _status(self, status: int) -> int:
        """Return the exit status: of the program if it has ended, else of the signal that has ended this run, else ``status``."""
        if self._program is not None and self._program.poll() is not None:
            return _code(self._program)
        return 128 + self._stopped_by if self._stopped_by else status

    def _is_over(self) -> bool:
        if self._stopped_by or (self._program is not None and self._program.poll() is not None):
            return True
        return self._program is None and all(each.ended for each in self._hosts)

    # -- starting ----------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        phase = "connect" if self._launch.slurm else "resolve"
        process = subprocess.Popen(
            self._launch.command(name),
            env=self._launch.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for this process only
            preexec_fn=self._end_with_this,  # until the agent runs, ssh does not see the end of its stdin
        )
        assert process.stdout is not None
        assert process.stderr is not None
        host = _UpHost(name, process, phase, time.monotonic() + self._launch.limits[phase])
        self._hosts.append(host)
        for stream in (process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
            self._select.register(stream, selectors.EVENT_READ, partial(self._read, host, stream.fileno()))
        # ssh may leave a process behind that keeps the pipes open (ControlPersist), so the end of the pipes is not awaited.
        ended = os.pidfd_open(process.pid)
        self._select.register(ended, selectors.EVENT_READ, partial(self._host_ended, host, ended))

    def _send_orders(self, host: _UpHost) -> None:
        """Tell the agent of a host what to start. Only now it gets the key: ssh has authenticated its host."""
        orders = {
            "arguments": [
                *("--join", self._address, "--count", str(self._launch.count)),
                *("--timeout", str(self._launch.limits["join"]), "--grace", str(self._launch.grace)),
                *self._launch.worker,
            ],
            "environment": {
                name: os.environ[name] for name in ENVIRONMENT if name in os.environ and name not in _OWN
            },
            "grace": self._launch.grace + _KILL_S,
            "key": self._secret,
        }
        self._send(host, f"{json.dumps(orders)}\n".encode())

    def _start_program(self) -> None:
        environment = {
            **os.environ,
            "ACTORRPC_LISTEN": self._address,
            "ACTORRPC_LOG_SHOW": "0",  # this process shows the output of the workers
            "ACTORRPC_WORKERS": str(self._launch.count * len(self._hosts)),
        }
        if not (os.environ.get("ACTORRPC_KEY") or os.environ.get("ACTORRPC_KEY_FILE")):
            self._key_fd, path = keys.create_key_in_memory(self._secret.encode())
            environment["ACTORRPC_KEY_FILE"] = path
            _say(f"export ACTORRPC_KEY_FILE={path} gives the key to actorrpc status and other commands")
        self._program = subprocess.Popen(
            self._launch.program,
            env=environment,
            preexec_fn=self._end_with_this,
        )
        ended = os.pidfd_open(self._program.pid)
        self._select.register(ended, selectors.EVENT_READ, partial(self._forget, ended))

    def _reach(self, phase: str) -> bool:
        """Wait until each host has reached a phase or has failed, and report failed hosts; return whether no host has failed."""
        for host in self._hosts:
            if phase == _JOINED and host.phase == "join":  # the driver may have been started only now
                host.until = time.monotonic() + self._launch.limits["join"]
        while any(not each.failure and each.phase not in (phase, _JOINED) for each in self._hosts):
            if self._stopped_by or (self._program is not None and self._program.poll() is not None):
                return False
            self._step()
        missing = [each for each in self._hosts if each.failure]
        if missing and phase == _JOINED and self._program is not None and not _listens(self._address):
            _say(
                f"the program has not called actorrpc.init() so far: no driver listens at {self._address}, where the workers "
                "wait for it (--limit join=SECONDS sets for how long)"
            )
        for host in missing:
            _say(f"{host.name} is missing: {host.failure}")
        if missing:
            _say(
                f"{len(missing)} of {len(self._hosts)} hosts are missing: {','.join(each.name for each in missing)}"
            )
        return not missing

    # -- events -----------------------------------------------------------------------------------------

    def _step(self, limit: float = _LOOK_S) -> None:
        """Process events, and fail hosts whose phase takes too long. Waits at most a second."""
        for key, _ in self._select.select(limit):
            if self._select.get_map().get(key.fd) is key:  # an earlier event may have unregistered it
                key.data()
        now = time.monotonic()
        for host in self._hosts:
            if now >= host.until and not host.ended and not host.failure:
                self._fail(host, f"no result within {self._launch.limits[host.phase]:g} s")

    def _forget(self, fd: int) -> None:
        self._select.unregister(fd)
        os.close(fd)

    def _fail(self, host: _UpHost, why: str) -> None:
        last = f": {host.last}" if host.last else ""
        host.failure = f"{host.phase}: {why}{last}"
        host.until = float("inf")

    def _enter(self, host: _UpHost, phase: str) -> None:
        host.phase = phase
        host.until = time.monotonic() + self._launch.limits.get(phase, float("inf"))

    def _host_ended(self, host: _UpHost, fd: int) -> None:
        self._forget(fd)
        for stream in (host.process.stdout, host.process.stderr):
            assert stream is not None
            while stream.fileno() in self._select.get_map() and self._read(host, stream.fileno()):
                pass
        host.process.wait()
        host.ended = True
        code = _code(host.process)
        if host.failure:
            return
        if host.phase != _JOINED:
            command = "srun" if self._launch.slurm else os.path.basename(self._launch.ssh[0])
            self._fail(host, f"{command} ended with status {code}")
        elif code:
            _say(f"{host.name}: its workers have ended with status {code}")

    def _read(self, host: _UpHost, fd: int) -> bool:
        """Forward the lines that a host has written; return whether there may be more."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        assert host.process.stdout is not None
        is_output = fd == host.process.stdout.fileno()
        *lines, rest = (host.rest.pop(fd, b"") + data).split(b"\n")
        if data:
            host.rest[fd] = rest[-_LINE:]
            lines += [rest[:-_LINE]] if len(rest) > _LINE else []
        else:
            self._select.unregister(fd)
            lines += [rest] if rest else []
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            if is_output:
                self._on_output(host, text)
            else:
                self._on_error(host, text)
        return bool(data)

    def _on_output(self, host: _UpHost, line: str) -> None:
        if host.phase in (_JOINED, "join"):
            _show(sys.stdout, host.name, line)
            return
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and "actorrpc" in found:
                self._enter(host, "version")
                if found["actorrpc"] == __version__:
                    self._enter(host, "join")
                    self._send_orders(host)
                else:
                    self._fail(
                        host,
                        f"it has actorrpc {found['actorrpc']} ({found.get('python')}), and this host {__version__}",
                    )
                    self._close(host)
                return
        _show(sys.stdout, host.name, line)  # a message of the day, or of the shell

    def _on_error(self, host: _UpHost, line: str) -> None:
        if host.phase in ("resolve", "connect", "authenticate"):
            for pattern, phase in _BEGINS:
                if pattern.match(line):
                    self._enter(host, phase)
        if _OF_SSH.match(line) or not line:
            return
        if host.phase == "join" and _HAS_JOINED.match(line):
            host.workers += 1
            if host.workers == self._launch.count:
                self._enter(host, _JOINED)
            return
        host.last = line
        _show(sys.stderr, host.name, line)

    # -- the end ----------------------------------------------------------------------------------------

    def _send(self, host: _UpHost, line: bytes) -> None:
        """Send a line to the agent of a host. If the agent has ended, _host_ended() reports it with its last line."""
        assert host.process.stdin is not None
        with contextlib.suppress(OSError):
            host.process.stdin.write(line)
            host.process.stdin.flush()

    def _close(self, host: _UpHost) -> None:
        """Close the stdin of a host's agent. After END, the agent then kills its workers; otherwise, it ends them."""
        assert host.process.stdin is not None
        with contextlib.suppress(OSError):
            host.process.stdin.close()

    def _kill(self, host: _UpHost) -> None:
        if not host.ended:  # the process id of an ended ssh or srun may belong to another process now
            with contextlib.suppress(OSError):
                os.killpg(host.process.pid, signal.SIGKILL)

    def _step_until(self, limit: float, is_over: Callable[[], bool]) -> None:
        """Handle events until ``is_over()``, a second signal, or ``limit`` seconds have passed."""
        until = time.monotonic() + limit
        while not is_over() and not self._hurries and time.monotonic() < until:
            self._step(0.1)

    def _end(self) -> None:
        """End the program, and then the workers. Kill processes that do not end in time, or all processes at a second signal.

        The workers continue while the program ends, so that it can still use them.
        """
        for host in self._hosts:
            host.until = float("inf")
        program = self._program
        if program is not None and program.poll() is None:
            if self._stopped_by != signal.SIGINT:
                program.terminate()
            elif not _is_in_foreground():  # otherwise, Ctrl-C has interrupted the program, too
                program.send_signal(signal.SIGINT)
            self._step_until(self._launch.grace, lambda: program.poll() is not None)
            if program.poll() is None:
                program.kill()
                program.wait()
        for host in self._hosts:
            if host.phase in ("join", _JOINED):
                self._send(host, END)
            else:  # no workers were started
                self._kill(host)
        self._step_until(self._launch.grace + _END_S, lambda: all(each.ended for each in self._hosts))
        for host in self._hosts:
            self._close(host)
        until = time.monotonic() + _LAST_S
        while time.monotonic() < until and not all(each.ended for each in self._hosts):
            self._step(0.1)
        for host in self._hosts:
            if not host.ended:
                _say(f"{host.name}: its workers have not ended in time; the connection is closed")
                self._kill(host)
                host.process.wait()
        if self._key_fd >= 0:
            os.close(self._key_fd)


def _listens(address: str) -> bool:
    """Return whether a process listens at an address of this host."""
    host, port = host_and_port(address.removeprefix("tcp://"))
    try:
        socket.create_connection((host, port or 0), 1.0).close()
    except OSError:
        return False
    return True


def _is_in_foreground() -> bool:
    """Return whether Ctrl-C in the terminal interrupts the processes of this process group."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _code(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status of an ended process, or 128 + the number of its signal; 0 if it still runs."""
    status = process.poll() or 0
    return status if status >= 0 else 128 - status


def _show(stream: Any, host: str, line: str) -> None:
    text = f"{host}: {line}\n".encode(stream.encoding, "replace").decode(stream.encoding)
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:  # the reader, such as head(1), has ended; the hosts continue
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> None:
    sys.stderr.write(f"actorrpc up: {text}\n")
    sys.stderr.flush()


def _listen_address(hosts: Sequence[str]) -> str:
    """Return the address where the driver will listen: ``ACTORRPC_LISTEN``, or else an address of this host and a free port.

    Raises:
        RendezvousError: this host has no address at which ``hosts`` can reach it.
        ConfigError: ``ACTORRPC_LISTEN`` is not an address, or no port of ``ACTORRPC_PORT`` is free.
    """
    given = os.environ.get("ACTORRPC_LISTEN")
    if given:
        host_and_port(given.removeprefix("tcp://"))
        return given
    settings = Settings.from_environment()
    own = settings.bind if settings.bind not in (None, "0.0.0.0", "::") else _own_address(hosts)
    for port in ports_of(settings.port):
        with (
            contextlib.suppress(OSError),
            socket.create_server(
                (own, port), family=socket.AF_INET6 if ":" in own else socket.AF_INET
            ) as free,
        ):
            number = free.getsockname()[1]
            return f"tcp://[{own}]:{number}" if ":" in own else f"tcp://{own}:{number}"
    raise ConfigError(f"no port of {settings.port} (ACTORRPC_PORT) is free at {own}")


def _own_address(hosts: Sequence[str]) -> str:
    # Connecting a datagram socket sends nothing, and chooses the address from which packets would be sent.
    for name in (*(each.rpartition("@")[2] for each in hosts), "192.0.2.1", "2001:db8::1"):
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as sock:
                sock.connect(address)
                own = str(sock.getsockname()[0])
                if own != "127.0.0.1" or len(hosts) == 1:
                    return own
    raise RendezvousError("this host has no address that the hosts could reach: set ACTORRPC_BIND to one")
