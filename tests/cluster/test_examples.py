"""The examples of starting a cluster: manifests match their schemas, and scripts are valid shell."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actorrpc import worker
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


def test_the_trainjob_manifest_matches_its_schema_and_starts_torchrun() -> None:
    job = _manifest("trainjob.yaml")
    models = pytest.importorskip("kubeflow_trainer_api.models")
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # unknown fields would be lost
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", "pi.py"]  # it reads the variables that the runtime sets
    (given,) = trainer["env"]
    assert (given["name"], given["valueFrom"]) == ("ACTORRPC_KEY", _SECRET)


def test_the_manifests_of_a_driver_and_workers_match_their_schemas_and_each_other() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    service, job, workers = yaml.safe_load_all((_EXAMPLES / "workers.yaml").read_text())
    for each in (service, job, workers):
        assert validate(each, "1.37", strict=True)
    (driver,) = job["spec"]["template"]["spec"]["containers"]
    (pod,) = workers["spec"]["template"]["spec"]["containers"]
    for container in (driver, pod):
        given = {each["name"]: each for each in container["env"]}
        assert given["ACTORRPC_KEY"]["valueFrom"] == _SECRET
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["ports"][0]["port"] == driver["ports"][0]["containerPort"] == 7777
    values = {each["name"]: each.get("value") for each in driver["env"]}
    assert values["ACTORRPC_LISTEN"] == "tcp://0.0.0.0:7777"
    assert pod["args"][0] == "--retry"
    options = dict(zip(pod["args"][1::2], pod["args"][2::2], strict=True))
    assert options["--join"] == f"tcp://{service['metadata']['name']}:7777"
    assert int(values["ACTORRPC_WORKERS"]) == workers["spec"]["replicas"] * int(options["--count"])


def test_the_systemd_unit_is_accepted_by_systemd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (_EXAMPLES / "actorrpc-worker.service").read_text()
    (started,) = re.findall("^ExecStart=(.*)$", text, re.MULTILINE)
    assert started.startswith("/opt/actorrpc/bin/python -m actorrpc.worker ")
    with contextlib.suppress(SystemExit):  # the arguments are right except for the last one
        worker.main([*shlex.split(started)[3:], "--timeout", "0"])
    assert "--timeout must be" in capsys.readouterr().err
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing")
    unit = tmp_path / "actorrpc-worker.service"  # the interpreter and the user of this machine
    unit.write_text(
        text.replace("/opt/actorrpc/bin/python", sys.executable).replace("User=actorrpc", "User=root")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_image_copies_files_of_the_repository_and_runs_without_root() -> None:
    text = (_EXAMPLES / "Dockerfile").read_text()
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert [word for word, _ in steps if word != "COPY"] == [
        *("FROM", "RUN", "USER", "WORKDIR", "HEALTHCHECK", "CMD")
    ]
    for word, rest in steps:
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (_EXAMPLES.parents[1] / source).exists(), source
    assert "KEY" not in "".join(rest for _, rest in steps)


def test_the_jobset_manifest_sets_ranks_and_the_address_of_rank_0() -> None:
    jobs = _manifest("jobset.yaml")
    models = pytest.importorskip("kubeflow_trainer_api.models")
    assert models.JobsetV1alpha2JobSet.from_dict(jobs).to_dict() == jobs
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
