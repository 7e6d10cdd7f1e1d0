"""The examples of starting a cluster: manifests follow the rules of their operators, and scripts are valid shell."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from actorrpc.group.launchers import of_environment

yaml = pytest.importorskip("yaml")
_EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cluster"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # a DNS label, as Kubernetes requires
_SECRET = {"secretKeyRef": {"name": "actorrpc-key", "key": "key"}}


def _manifest(name: str) -> dict[str, Any]:
    """Return the only document of a file."""
    (found,) = yaml.safe_load_all((_EXAMPLES / name).read_text())
    assert _NAME.fullmatch(found["metadata"]["name"])
    assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
    return found  # type: ignore[no-any-return]


def _container(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the only container of a pod; check its fields, and that the key comes from a secret."""
    (container,) = pod["containers"]
    assert _NAME.fullmatch(container["name"])
    assert container["image"]
    assert container["command"][-1].endswith("pi.py")
    assert all(
        isinstance(each.get("value", ""), str) for each in container["env"]
    )  # Kubernetes refuses numbers
    given = {each["name"]: each for each in container["env"]}
    assert given["ACTORRPC_KEY"]["valueFrom"] == _SECRET
    return container  # type: ignore[no-any-return]


def test_the_pytorchjob_manifest_follows_the_rules_of_its_operator() -> None:
    job = _manifest("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1  # the operator requires this number
    assert replicas["Worker"]["replicas"] >= 1
    for spec in replicas.values():
        assert spec["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        container = _container(spec["template"]["spec"])
        assert (
            container["name"] == "pytorch"
        )  # the operator sets its variables only in a container of this name
        # The operator sets these four itself, so the manifest must not.
        assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & {
            each["name"] for each in container["env"]
        }
    size = sum(spec["replicas"] for spec in replicas.values())
    found = of_environment(
        {"RANK": "1", "WORLD_SIZE": str(size), "MASTER_ADDR": "pi-master-0", "MASTER_PORT": "23456"}
    )
    assert found is not None
    assert (found.rank, found.size, found.master) == (1, 4, "pi-master-0")


def test_the_jobset_manifest_sets_ranks_and_the_address_of_rank_0() -> None:
    jobs = _manifest("jobset.yaml")
    assert (jobs["apiVersion"], jobs["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobs["spec"]["failurePolicy"]["maxRestarts"] >= 0
    (replicated,) = jobs["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    job = replicated["template"]["spec"]
    assert job["completionMode"] == "Indexed"  # required for numbers and DNS names of pods
    assert job["parallelism"] == job["completions"]  # all at once, as they wait for each other
    assert job["backoffLimit"] == 0  # the failure policy restarts all ranks after the loss of a rank
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")
    container = _container(pod)
    given = {each["name"]: each.get("value", "x") for each in container["env"]}
    assert given["WORLD_SIZE"] == str(job["completions"])
    # <jobset>-<job>-<index of the job>-<index of the pod>.<subdomain>; the default subdomain is the name of the JobSet.
    name = jobs["metadata"]["name"]
    assert given["MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}"
    assert _NAME.fullmatch(replicated["name"])
    assert container["command"][:2] == ["sh", "-c"]
    assert "RANK=$JOB_COMPLETION_INDEX " in container["command"][2]
    found = of_environment({**given, "RANK": "3"})
    assert found is not None
    assert (found.rank, found.size, found.master) == (3, 4, given["MASTER_ADDR"])


@pytest.mark.parametrize("name", ["torchrun.sh", "mpi.sh", "slurm.sbatch"])
def test_launch_scripts_are_valid_shell_and_pass_no_key_as_an_argument(name: str) -> None:
    path = _EXAMPLES / name
    for shell in ("sh", "bash"):
        subprocess.run([shell, "-n", str(path)], check=True)
    text = path.read_text().replace("\\\n", " ")
    assert text.startswith("#!/bin/")
    command = text.strip().splitlines()[-1]
    assert "pi.py" in command
    assert "$ACTORRPC_KEY" not in command
    assert "KEY=" not in command


def test_the_sbatch_options_precede_all_commands_and_request_several_tasks() -> None:
    lines = (_EXAMPLES / "slurm.sbatch").read_text().splitlines()
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    header = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(header) < min(commands)  # sbatch stops reading options at the first command
    options = dict(lines[number].removeprefix("#SBATCH --").split("=") for number in header)
    assert set(options) == {"job-name", "nodes", "ntasks-per-node", "cpus-per-task"}
    # A cluster needs several tasks.
    assert int(options["nodes"]) * int(options["ntasks-per-node"]) > 1
    assert lines[-1].startswith("srun ")
    assert "--export=ALL" in lines[-1]
