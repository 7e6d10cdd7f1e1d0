"""Hosts that run programs: network namespaces with names, and with files that other hosts do not see.

    with Network("a", "b") as network, Machines(network) as machines:
        driver = machines.start("a", sys.executable, "script.py", directory=...)
        worker = machines.join("b", "tcp://10.77.0.1:7777", "--labels", "zone=b")
        machines.power_off("b")

Each host hides the directories of all other hosts, so programs cannot exchange files, and resolves the names of all hosts.
Not thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from actorrpc.testing import processes
from tests.cluster.drive import environment, until
from tests.faults.hosts import Network

__all__ = ["Machines", "Program", "program"]

_PROGRAMS = Path(__file__).resolve().parent / "programs"
# Set the host's name, hide the files of other hosts, and stay: later programs enter the namespaces of this process.
_BOOT = """
hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 || exit 1
for each; do mount -t tmpfs hidden "$each" || exit 1; done
echo up; exec cat
"""


class Program:
    """A program that runs on a host, with its standard input and output."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self._errors = errors
        self.said: list[str] = []
        self.begun = time.monotonic()

    @property
    def errors(self) -> str:
        """Its standard error so far."""
        return self._errors.read_text(errors="replace")

    def expect(self, word: str) -> str:
        """Read lines until a line begins with this word; return the rest of that line. Bounded by the test's limit."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(f"{time.monotonic() - self.begun:.1f} {line.rstrip()}")
            if line.split(maxsplit=1)[:1] == [word]:
                return line.rstrip()[len(word) + 1 :]
        raise AssertionError(f"it ended without {word!r}: {self.said}\n{self.errors}")

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ends(self, code: int = 0) -> None:
        """Wait until it ends, and check its exit code."""
        out, _ = self.process.communicate()
        self.said += out.splitlines()
        print(*self.said, sep="\n")
        assert self.process.returncode == code, f"{self.process.returncode}: {self.said}\n{self.errors}"


class Machines:
    """The hosts of a network as machines. A context manager, which ends all their programs."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._boots: dict[str, subprocess.Popen[str]] = {}
        self._programs: list[Program] = []

    def __enter__(self) -> Machines:
        try:
            for name in self.network.hosts:
                self._boot(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._boots:
            self.power_off(name)
        for program in self._programs:
            program.process.communicate()
            sys.stderr.write(program.errors)  # counts as output of the test
        for boot in self._boots.values():
            boot.communicate()

    def _boot(self, name: str) -> None:
        host = self.network[name]
        others = [str(each.directory) for each in self.network.hosts.values() if each is not host]
        names = host.directory / "hosts"
        known = [f"{each.address} {each.name}" for each in self.network.hosts.values()]
        names.write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *known, ""]))
        boot = subprocess.Popen(
            [
                *("nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--uts", "--mount"),
                *("sh", "-c", _BOOT, "sh", name, str(names), *others),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._boots[name] = boot
        assert boot.stdout is not None
        assert boot.stdout.readline() == "up\n"

    def start(
        self, name: str, *command: str, directory: str | Path = "/", env: dict[str, str] | None = None
    ) -> Program:
        """Start a program on a host, with the host's key, in a directory of the host."""
        host = self.network[name]
        errors = self.network.directory / f"{name}-{len(self._programs)}.err"
        given = {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(host.directory / "tmp"),
            "ACTORRPC_RUNTIME_DIR": str(host.directory / "run"),
            "ACTORRPC_KEY_FILE": str(host.directory / "key"),
            "ACTORRPC_LOG_DIR": str(host.directory / "log"),
            **(env or {}),
        }
        spaces = ("--net", "--uts", "--mount", f"--wd={directory}")
        where = ("nsenter", "-t", str(self._boots[name].pid), *spaces)
        with errors.open("wb") as file:
            process = subprocess.Popen(
                [*where, *command],
                env=environment(**given),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._programs.append(Program(process, errors))
        return self._programs[-1]

    def join(self, name: str, address: str, *arguments: str, env: dict[str, str] | None = None) -> Program:
        """Start a worker on a host that joins a cluster under the host's name."""
        command = (sys.executable, "-m", "actorrpc.worker", "--join", address, "--name", name)
        return self.start(name, *command, *arguments, env=env)

    def running(self, name: str) -> set[psutil.Process]:
        """Return the processes that run on a host."""
        boot = self._boots[name]
        space = os.stat(f"/run/netns/{self.network[name].namespace}").st_ino
        found = set()
        for process in processes.of_session():
            with contextlib.suppress(OSError):
                if process.pid != boot.pid and os.stat(f"/proc/{process.pid}/ns/net").st_ino == space:
                    found.add(process)
        return found

    def power_off(self, name: str) -> float:
        """Kill all processes of a host; return the time."""
        when = time.time()
        while there := self.running(name):
            processes.kill(there)
        return when

    def lose(self, name: str, how: str) -> float:
        """Lose a host by ``how``: "power", "link" or "silence"; return the time, as of `time.time`."""
        if how == "power":
            return self.power_off(name)
        when = time.time()
        if how == "link":
            self.network.unplug(name)
        else:
            self.network.split(name)
        return when

    def are_empty(self, *names: str, killed: bool = False) -> None:
        """Wait until no process runs on these hosts; check that no files are left, unless ``killed``."""
        for name in names:
            until(lambda name=name: not self.running(name))  # type: ignore[misc]
            folder = self.network[name].directory
            left = [str(path) for path in (folder / "run").rglob("*")]
            # torchrun and torch's compiler leave directories.
            left += [str(path) for path in (folder / "tmp").iterdir() if not path.name.startswith("torch")]
            assert killed or not left, left


def program(machines: Machines, name: str, *files: Path | str) -> Path:
    """Copy files (by default from programs/) into a directory of one host, and return it; other hosts do not see it."""
    directory = machines.network[name].directory / "program"
    directory.mkdir(exist_ok=True)
    for file in files:
        shutil.copy(_PROGRAMS / file, directory)
    return directory
