"""Reads the rank and the number of ranks from a launcher's variables, and derives the arguments of ``init_rpc`` from them.

The Kubernetes operators set the same variables as torchrun (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``). If these
are missing, the variables of Slurm and MPI are read. The functions only read variables. Thread-safe.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from actorrpc import _limits
from actorrpc.errors import ConfigError

__all__ = ["VARIABLES", "Launch", "fill_in", "first_host", "of_environment", "own_cpus"]

VARIABLES: Final = "RANK and WORLD_SIZE (or SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK and their sizes)"
# For jobs whose launcher sets no port: the lowest port, and the number of ports.
_PORTS: Final = (20_000, 10_000)
#: launcher, and its variables of the rank, the size and the rank on this host; the first launcher with such variables is used
_NATIVE: Final = (
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The data that a launcher has set.

    Attributes:
        launcher: the launcher's name in messages.
        run: identifies this start of the job. A restart by torchrun changes ``run`` only if the job is on one host; on several
            hosts, the store may contain data of the previous start under the same ``run``.
        master: the host of rank 0, with ``port``, where the ranks meet.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    master: str
    port: int
    run: str

    @property
    def name(self) -> str:
        """The name of the worker of this rank."""
        return f"rank{self.rank}"


def _number(environment: Mapping[str, str], name: str, launcher: str) -> int:
    text = environment.get(name)
    if text is None or text == "":
        raise ConfigError(
            f"{launcher} has set some of its variables, but not {name}: set it, or unset the others to start a cluster "
            "of this process alone"
        )
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} ({launcher}) is not a number") from None


def of_environment(environment: Mapping[str, str] | None = None) -> Launch | None:
    """Read the variables of a launcher; return None if there is no launcher.

    Raises:
        ConfigError: a variable is missing, is not valid, or contradicts another variable.
    """
    given = os.environ if environment is None else environment
    if given.get("ACTORRPC_LAUNCHER") == "none":
        return None
    if "RANK" in given or "WORLD_SIZE" in given or "TORCHELASTIC_RUN_ID" in given:
        return _of_torchrun(given)
    for launcher, rank, size, local in _NATIVE:
        if rank in given and (size in given or launcher != "Slurm"):
            return _of_native(given, launcher, rank, size, local)
    return None


def _check(rank: int, size: int, names: tuple[str, str]) -> None:
    if size < 1 or not 0 <= rank < size:
        raise ConfigError(
            f"{names[0]}={rank} and {names[1]}={size} contradict each other: ranks are 0..{names[1]}-1"
        )


def _of_torchrun(given: Mapping[str, str]) -> Launch:
    what = "torchrun" if "TORCHELASTIC_RUN_ID" in given else "the launcher"
    rank, size = _number(given, "RANK", what), _number(given, "WORLD_SIZE", what)
    _check(rank, size, ("RANK", "WORLD_SIZE"))
    local = int(given.get("LOCAL_RANK") or 0) if (given.get("LOCAL_RANK") or "0").isdigit() else -1
    local_size = given.get("LOCAL_WORLD_SIZE") or ""
    if local < 0 or (local_size.isdigit() and not local < int(local_size) <= size):
        raise ConfigError(
            f"LOCAL_RANK={given.get('LOCAL_RANK')!r}, LOCAL_WORLD_SIZE={local_size or None!r} and WORLD_SIZE={size} "
            "contradict each other"
        )
    for launcher, rank_name, size_name, _ in _NATIVE[:2]:
        # Under srun, torchrun assigns its own ranks. A script that sets RANK from the variables of Slurm must set the same rank.
        if "TORCHELASTIC_RUN_ID" in given or rank_name not in given or size_name not in given:
            continue
        same_size = given[size_name] == str(size)
        if same_size and given[rank_name] != str(rank):
            raise ConfigError(
                f"RANK={rank} and {rank_name}={given[rank_name]} ({launcher}) contradict each other"
            )
    master = given.get("MASTER_ADDR") or ("127.0.0.1" if size == 1 else "")
    if not master:
        raise ConfigError(
            f"{what} has set RANK and WORLD_SIZE, but not MASTER_ADDR: the host of rank 0, where all ranks meet"
        )
    port = _number(given, "MASTER_PORT", what) if size > 1 or given.get("MASTER_PORT") else 29500
    if not 1 <= port <= 65535:
        raise ConfigError(f"MASTER_PORT={port} is not a port: a number from 1 to 65535")
    # torchrun keeps its store over restarts. Each host counts its own restarts, so the count is used only on a single host.
    alone = (given.get("GROUP_WORLD_SIZE") or "1") == "1"
    restart = (given.get("TORCHELASTIC_RESTART_COUNT") or "0") if alone else "0"
    run = f"{given.get('TORCHELASTIC_RUN_ID') or 'none'}/{restart}"
    return Launch(launcher=what, rank=rank, size=size, local_rank=local, master=master, port=port, run=run)


def _of_native(given: Mapping[str, str], launcher: str, rank: str, size: str, local: str) -> Launch:
    own, count = _number(given, rank, launcher), _number(given, size, launcher)
    _check(own, count, (rank, size))
    master = given.get("MASTER_ADDR") or ""
    job = next(
        (given[name] for name in ("SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid", "PMI_JOBID") if given.get(name)),
        "",
    )
    step = given.get("SLURM_STEP_ID") or ""
    if not master and count == 1:
        master = "127.0.0.1"
    if not master and launcher == "Slurm":
        nodes = (
            given.get("SLURM_STEP_NODELIST") or given.get("SLURM_NODELIST") or given.get("SLURM_JOB_NODELIST")
        )
        if not nodes:
            raise ConfigError("Slurm has set SLURM_PROCID, and neither SLURM_NODELIST nor MASTER_ADDR is set")
        master = first_host(nodes)
    if not master:
        local_size = given.get("OMPI_COMM_WORLD_LOCAL_SIZE") or given.get("MPI_LOCALNRANKS") or ""
        if local_size != str(count):
            raise ConfigError(
                f"{launcher} does not say where rank 0 runs, and MASTER_ADDR is not set: set it to the host of rank 0"
            )
        master = "127.0.0.1"
    if given.get("MASTER_PORT"):
        port = _number(given, "MASTER_PORT", launcher)
    else:
        # Every rank computes the same port. Two jobs on one host should get different ports.
        mark = hashlib.sha256(f"{job}.{step}.{os.getuid()}".encode()).digest()
        port = _PORTS[0] + int.from_bytes(mark[:4], "big") % _PORTS[1]
    return Launch(
        launcher=launcher,
        rank=own,
        size=count,
        local_rank=_number(given, local, launcher) if given.get(local) else 0,
        master=master,
        port=port,
        run=f"{job}.{step}/{given.get('SLURM_RESTART_COUNT') or 0}",
    )


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it: ``node[07-09,12],gpu1`` begins with ``node07``.

    Raises:
        ConfigError: the list cannot be parsed.
    """
    found = re.match(r"([^,\[\]\s]+)(?:\[(\d+)[^\]]*\]([^,\[\]\s]*))?", nodes)
    if found is None:
        raise ConfigError(f"SLURM_NODELIST={nodes!r} cannot be read; set MASTER_ADDR to the host of rank 0")
    return found[1] + (found[2] or "") + (found[3] or "")


def own_cpus(
    environment: Mapping[str, str] | None = None, mask: int | None = None, host: int | None = None
) -> int:
    """Return how many CPUs this process may offer to a cluster, at least 1.

    The affinity mask, the control groups and ``SLURM_CPUS_PER_TASK`` limit the number. The processes that a launcher has started
    on this host share it: each offers an equal part of the CPUs of the host, or fewer if it is bound to fewer.

    Args:
        mask: the number of CPUs in the affinity mask; None: read it.
        host: the result of :func:`actorrpc._limits.host_cpus`; None: call it.
    """
    given = os.environ if environment is None else environment
    host = _limits.host_cpus() if host is None else host
    own = min(host, len(os.sched_getaffinity(0)) if mask is None else mask)
    per_task = _count(given, "SLURM_CPUS_PER_TASK")
    if per_task:
        own = min(own, per_task)
    if given.get("ACTORRPC_LAUNCHER") == "none":
        return own
    local = _count(given, "LOCAL_WORLD_SIZE")
    if local:  # torchrun: its processes have the same mask, and are one task of Slurm together
        return max(1, own // local)
    local = (
        _count(given, "OMPI_COMM_WORLD_LOCAL_SIZE") or _count(given, "MPI_LOCALNRANKS") or _slurm_tasks(given)
    )
    if not local or per_task:
        return own
    # `srun` and `mpirun` may have bound each process to its part already, so the mask is not divided.
    return max(1, min(own, (_count(given, "SLURM_CPUS_ON_NODE") or host) // local))


def _count(given: Mapping[str, str], name: str) -> int:
    text = given.get(name) or ""
    return int(text) if text.isdecimal() else 0


def _slurm_tasks(given: Mapping[str, str]) -> int:
    """Return how many tasks of a step Slurm has started on this node: ``2(x3),1`` are 2 on each of three nodes, and 1."""
    counts: list[int] = []
    for part in filter(None, (given.get("SLURM_STEP_TASKS_PER_NODE") or "").split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return 0
        counts += [int(found[1])] * int(found[2] or 1)
    node = _count(given, "SLURM_NODEID")
    return counts[node] if node < len(counts) else 0


def fill_in(name: str | None, rank: Any, world_size: Any, options: Any) -> tuple[str, Any, Any, Any]:
    """Return the arguments of ``init_rpc``, completed from the launcher's variables.

    A missing name becomes ``worker`` and the launcher's rank, for example ``worker3``. Rank, world size and ``init_method`` are
    replaced together, and only if all three have their defaults. They are also kept if a name is given and ``RANK`` or
    ``WORLD_SIZE`` is set: the default ``init_method``, ``env://``, reads these variables itself.

    Raises:
        ConfigError: no name was given, and there is no launcher; or the launcher's variables are not valid.
    """
    is_given = rank != -1 or world_size is not None or options.init_method != "env://"
    if name is not None and (is_given or "RANK" in os.environ or "WORLD_SIZE" in os.environ):
        return name, rank, world_size, options
    launch = of_environment()
    if launch is None:
        if name is None:
            raise ConfigError(
                f"init_rpc() needs a name, because no launcher has set the rank of this process: {VARIABLES} are not set"
            )
        return name, rank, world_size, options
    name = f"worker{launch.rank}" if name is None else name
    if is_given:
        return name, rank, world_size, options
    where = f"[{launch.master}]" if ":" in launch.master else launch.master
    options = copy.copy(options)
    options.init_method = f"tcp://{where}:{launch.port}"
    return name, launch.rank, launch.size, options
