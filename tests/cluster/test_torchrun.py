"""Launchers: reading their environment variables, and real runs of torchrun with restarts."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from actorrpc._limits import host_cpus
from actorrpc.errors import ConfigError
from actorrpc.group.launchers import Launch, first_host, of_environment, own_cpus
from tests import output
from tests.cluster.drive import python
from tests.cluster.joiners import run_ranks

_nightly = pytest.mark.skipif(os.environ.get("ACTORRPC_NIGHTLY") != "1", reason="ACTORRPC_NIGHTLY is not 1")
_TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "1",
}
_SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "gpu[07-09,12],cpu1",
    "SLURM_JOB_ID": "4711",
}
_ONLY_SLURM = {**dict.fromkeys(_TORCHRUN), **_SLURM}
_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def _read(environment: dict[str, str]) -> Launch:
    found = of_environment(environment)
    assert found is not None
    return found


# -- environments --------------------------------------------------------------------------------------


def test_no_launcher_is_found_without_variables_of_a_rank() -> None:
    assert of_environment({}) is None
    assert of_environment({"MASTER_ADDR": "x", "SLURM_JOB_ID": "1"}) is None
    assert of_environment({**_TORCHRUN, "ACTORRPC_LAUNCHER": "none"}) is None


def test_variables_of_torchrun_and_pytorchjob_are_read() -> None:
    found = _read(_TORCHRUN)
    assert (found.rank, found.size, found.local_rank) == (2, 4, 0)
    assert (found.master, found.port, found.name) == ("node1", 29500, "rank2")
    again = {"TORCHELASTIC_RESTART_COUNT": "2"}
    assert found.run != _read({**_TORCHRUN, **again}).run
    # Each host counts only its own restarts, so with several hosts the count must not identify the run.
    several = {**_TORCHRUN, "GROUP_WORLD_SIZE": "2"}
    assert _read(several).run == _read({**several, **again}).run
    # PyTorchJob sets only these variables.
    plain = {name: _TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert _read(plain).rank == 2
    assert _read({"RANK": "0", "WORLD_SIZE": "1"}).size == 1


def test_variables_of_slurm_are_read() -> None:
    found = _read(_SLURM)
    assert (found.rank, found.size, found.local_rank, found.master) == (3, 8, 1, "gpu07")
    assert 20_000 <= found.port < 30_000
    assert found.port == _read({**_SLURM, "SLURM_PROCID": "5"}).port
    assert found.port != _read({**_SLURM, "SLURM_JOB_ID": "4712"}).port
    assert _read({**_SLURM, "MASTER_ADDR": "other", "MASTER_PORT": "7000"}).master == "other"
    lists = ("n1", "n[1-3]", "a-b[007,9]-x,c", "a,b[1-2]", "n.example.org")
    assert [first_host(each) for each in lists] == ["n1", "n1", "a-b007-x", "a", "n.example.org"]


def test_variables_of_mpi_are_read() -> None:
    assert (_read(_MPI).rank, _read(_MPI).master) == (1, "127.0.0.1")
    several = {**_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        of_environment(several)
    assert _read({**several, "MASTER_ADDR": "node1"}).master == "node1"
    found = _read({"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "node1"})
    assert (found.rank, found.size) == (0, 2)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"RANK": None}, "RANK"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
        ({"MASTER_PORT": None}, "MASTER_PORT"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0"),
        ({"RANK": "four"}, "RANK='four'"),
        ({"RANK": "4"}, "RANK=4 and WORLD_SIZE=4 contradict"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK='2', LOCAL_WORLD_SIZE='2'"),
        (
            {"TORCHELASTIC_RUN_ID": None, "SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
            "RANK=2 and SLURM_PROCID=1",
        ),
        ({**_ONLY_SLURM, "SLURM_LOCALID": "one"}, r"SLURM_LOCALID='one' .* is not a number"),
        ({**_ONLY_SLURM, "SLURM_NODELIST": None}, "SLURM_NODELIST"),
    ],
)
def test_missing_or_contradictory_variables_raise_config_error(
    change: dict[str, str | None], names: str
) -> None:
    given = {name: value for name, value in {**_TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=names):
        of_environment(given)


@pytest.mark.parametrize(
    ("given", "cpus"),  # on a host of 16 CPUs, with 8 in the affinity mask
    [
        ({}, 8),
        ({"LOCAL_WORLD_SIZE": "4"}, 2),  # torchrun does not bind its processes
        ({"LOCAL_WORLD_SIZE": "4", "ACTORRPC_LAUNCHER": "none"}, 8),
        ({"LOCAL_WORLD_SIZE": "64"}, 1),
        ({"SLURM_CPUS_PER_TASK": "6"}, 6),
        ({"SLURM_CPUS_PER_TASK": "6", "LOCAL_WORLD_SIZE": "2"}, 3),
        ({"SLURM_CPUS_PER_TASK": "6", "SLURM_STEP_TASKS_PER_NODE": "2"}, 6),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),4", "SLURM_NODEID": "2"}, 8),  # bound to half of the host
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),4", "SLURM_NODEID": "3"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_CPUS_ON_NODE": "8"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "16"}, 1),
    ],
)
def test_the_ranks_on_a_host_share_its_cpus(given: dict[str, str], cpus: int) -> None:
    assert own_cpus(given, 8, 16) == cpus


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/a/b", {"a/cpu.max": "250000 100000", "a/b/cpu.max": "max 100000"}, 2),
        ("0::/a", {"a/cpu.max": "50000 100000"}, 1),
        # In a container, version 1 shows the path on the host.
        ("1:cpu,cpuacct:/on/host", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, os.cpu_count()),
        ("2:cpuset:/a", {}, os.cpu_count()),
    ],
)
def test_control_groups_limit_the_cpus(groups: str, files: dict[str, str], cpus: int, tmp_path: Path) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_cpus(tmp_path / "groups", tmp_path) == min(cpus, os.cpu_count() or 1)


# -- real runs ----------------------------------------------------------------------------------------------

_SPMD = """
import actorrpc, torch
from actorrpc import rpc

with actorrpc.init(spmd=True):
    me = rpc.get_worker_info()
    other = "driver" if me.name == "rank1" else "rank1"
    for _ in range(1 if me.id == 0 else 200):  # rank 0 finishes first, and waits
        found = rpc.rpc_sync(other, torch.add, args=(torch.ones(1), 1))
    print("spmd", me.name, float(found), flush=True)
"""

_IN_RAYS_ORDER = """
import actorrpc

class Early:
    def __init__(self, value):
        self.value = value

actorrpc.init()  # rank 1 stays inside init()

class Refused(ValueError):
    pass

class Late(Early):
    pass

def twice(x):
    return 2 * x

@actorrpc.remote
class A:
    def me(self, early, late):
        assert isinstance(late, Late) and type(early) is Early
        return Early(twice(early.value)), Late(twice(late.value))

    def refuse(self):
        raise Refused("no", actorrpc.get_worker_info().name)

a = A.remote()
early, late = actorrpc.get(a.me.remote(Early(1), Late(2)))
assert (type(early), early.value, type(late), late.value) == (Early, 2, Late, 4)
try:
    actorrpc.get(a.refuse.remote())
except Refused as error:
    print("refused", *error.args, flush=True)
"""


def _torchrun(directory: Path, source: str, *arguments: str) -> tuple[int, list[str], str]:
    path = directory / "script.py"
    path.write_text(textwrap.dedent(source))
    process = python("-m", "torch.distributed.run", "--standalone", *arguments, str(path), cwd=directory)
    out, err = process.communicate()
    if not process.returncode:
        output.check(err, what="torchrun, or one of its children,")
    return process.returncode, sorted(out.splitlines()), err


@pytest.mark.limit(120)
@_nightly
def test_with_spmd_every_rank_runs_the_script(tmp_path: Path) -> None:
    code, lines, err = _torchrun(tmp_path, _SPMD, "--nproc-per-node", "2")
    assert code == 0, err
    assert lines == ["spmd driver 2.0", "spmd rank1 2.0"]


def test_rank_0_drives_and_sends_classes_defined_after_init_to_the_other_ranks(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(_IN_RAYS_ORDER)
    codes, said = run_ranks(path, 2, "SLURM_PROCID", "SLURM_NTASKS")
    assert codes == [0, 0], said
    assert [out for out, _ in said] == ["refused no rank1\n", ""]
