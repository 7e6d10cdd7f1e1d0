"""``actorrpc up`` in jobs of a real Slurm with two nodes: places of actors, preemption, and the end of a job."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.cluster.drive import until
from tests.cluster.machines import Machines, Program
from tests.faults.hosts import Network, needs_hosts

pytestmark = [
    needs_hosts,
    pytest.mark.skipif(
        not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "srun"))),
        reason="Slurm and munge are not installed (Debian: slurm-wlm)",
    ),
    pytest.mark.slow,
    pytest.mark.limit(90),
    pytest.mark.prints(
        "^munged: ",
        "^actorrpc up: 4 workers on 2 hosts",
        "^[ab]: slurmstepd-[ab]: error: .* CANCELLED AT ",
        "^[ab]: joining waits for a driver to answer at ",  # on a busy machine, the driver starts later than the workers
    ),
]
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=a
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldDebug=fatal
SlurmdDebug=fatal
SlurmdParameters=config_overrides
TaskProlog={folder}/prolog
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
MpiDefault=none
NodeName=a NodeAddr={a} CPUs=2
NodeName=b NodeAddr={b} CPUs=2
PartitionName=low Nodes=a,b Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=a,b PriorityTier=2
"""
_PROLOG = """#!/bin/sh
# The variables of this node, where those of the job's first node have no meaning.
echo "export TMPDIR={folder}/../$SLURMD_NODENAME/tmp"
echo "export ACTORRPC_RUNTIME_DIR={folder}/../$SLURMD_NODENAME/run"
echo "export ACTORRPC_LOG_DIR={folder}/../$SLURMD_NODENAME/log"
"""
_PROGRAM = """
import os, sys, threading
import actorrpc
from tests.cluster.drive import until
from tests.cluster.remotes import Counter

with actorrpc.init(num_cpus=1):
    print("cpus", sorted((each["NodeManagerHostname"], each["Resources"]["CPU"]) for each in actorrpc.nodes()), flush=True)
    counters = [Counter.options(spread=True).remote() for _ in range(5)]
    places = actorrpc.get([each.where.remote() for each in counters])
    print("placed", sorted(each.partition("-")[0] for each in places), flush=True)
    stop, seen = threading.Event(), [[] for _ in counters]

    def call(counter, results):
        try:
            while not stop.is_set():
                results.append(actorrpc.get(counter.add.remote()))
        except actorrpc.RpcError as error:
            print("failed", error, flush=True)
            os._exit(1)

    callers = [threading.Thread(target=call, args=each) for each in zip(counters, seen)]
    for each in callers:
        each.start()
    until(lambda: all(seen))
    print("called", flush=True)
    until(lambda: not any(each.state == "alive" and each.name[:2] in ("a-", "b-") for each in actorrpc.workers()))
    before = [len(each) for each in seen]
    until(lambda: all(len(each) > count for each, count in zip(seen, before)))
    stop.set()
    for each in callers:
        each.join()
    print("lost", [each != list(range(1, len(each) + 1)) for each in seen].count(True), flush=True)
sys.exit(3)
"""


class Slurm:
    """A controller on host a, and a node on each of hosts a and b. All files are in the directory of the network."""

    def __init__(self, machines: Machines) -> None:
        network = machines.network
        folder = network.directory / "slurm"
        folder.mkdir()
        names = {"folder": folder, "a": network["a"].address, "b": network["b"].address}
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(**names))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # loaded, and not used
        (folder / "prolog").write_text(_PROLOG.format(**names))
        (folder / "prolog").chmod(0o755)
        (folder / "munge.key").write_bytes(os.urandom(64))
        (folder / "munge.key").chmod(0o600)
        for name in ("state", "spool-a", "spool-b"):
            (folder / name).mkdir()
        self._machines = machines
        self._env = {"SLURM_CONF": str(folder / "slurm.conf")}
        files = [
            f"--{name}={folder}/munge.{name.partition('-')[0]}"
            for name in ("key-file", "socket", "pid-file", "seed-file")
        ]
        self.start("munged", "--foreground", "--force", *files)
        until((folder / "munge.socket").exists)
        self.start("slurmctld", "-D")
        for name in ("a", "b"):
            self.start("slurmd", "-D", host=name)
        until(lambda: self.run("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D") == "2\n")

    def start(self, *command: str, host: str = "a", **env: str) -> Program:
        """Start a command on a host."""
        directory = self._machines.network[host].directory
        return self._machines.start(host, *command, directory=directory, env={**self._env, **env})

    def run(self, *command: str) -> str:
        """Run a command on host a; return its output."""
        program = self.start(*command)
        out, _ = program.process.communicate()
        return out


@pytest.fixture
def machines() -> Iterator[Machines]:
    with Network("a", "b") as network, Machines(network) as made:
        yield made


def _up(machines: Machines, source: str, *options: str) -> list[str]:
    """Return the command that runs a program by ``actorrpc up`` on host a."""
    path = machines.network["a"].directory / "program.py"
    path.write_text(source)
    return [sys.executable, "-m", "actorrpc", "up", *options, sys.executable, str(path)]


def test_a_preempted_job_of_slurm_loses_no_call(machines: Machines) -> None:
    slurm, daemons = Slurm(machines), _processes(machines)
    job = slurm.start(
        *("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"),
        *_up(machines, _PROGRAM, "--count", "2"),
        ACTORRPC_BIND=machines.network["a"].address,  # for this host only
    )
    # The driver has one CPU of host a, and runs one of the actors in a process of its own.
    assert job.expect("cpus") == "[('a', 1.0), ('a', 1.0), ('a', 1.0), ('b', 1.0), ('b', 1.0)]"
    assert job.expect("placed") == "['Counter', 'a', 'a', 'b', 'b']"
    job.expect("called")
    other = slurm.run("srun", "--quiet", "--partition=high", "--nodes=2", "hostname")
    assert sorted(other.split()) == ["a", "b"]
    assert job.expect("lost") == "0"
    job.ends(3)
    until(lambda: _processes(machines) == daemons)
    assert not machines.network.left_behind()


_WAITS = """
import pathlib, sys, threading
import actorrpc

with actorrpc.init(num_cpus=1):
    pathlib.Path(sys.argv[1]).touch()
    threading.Event().wait()
"""


def test_no_process_survives_a_cancelled_job_of_slurm(machines: Machines) -> None:
    slurm, daemons = Slurm(machines), _processes(machines)
    folder = machines.network["a"].directory
    command = shlex.join([*_up(machines, _WAITS), str(folder / "ready")])
    job = slurm.run("sbatch", "--parsable", "--nodes=2", f"--output={folder}/out", f"--wrap=exec {command}")
    until((folder / "ready").exists)
    assert _processes(machines)["b"] > daemons["b"]
    slurm.run("scancel", job.strip())
    until(lambda: _processes(machines) == daemons)


def _processes(machines: Machines) -> dict[str, set[psutil.Process]]:
    """Return the processes of each host."""
    return {name: machines.running(name) for name in machines.network.hosts}
