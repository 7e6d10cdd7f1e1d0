"""Unchanged programs of torch's RPC run on actorrpc, with the command or the environment variable, with all their children."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from actorrpc.compat import take_over
from tests.announced import TORCH_RPC
from tests.output import check

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs")
SITE = ROOT / "actorrpc" / "compat" / "site"
OURS = "actorrpc.compat.rpc.agent"
FOUND = f"{OURS} [2.0, 2.0] 3 [3.0, 3.0]"


def run(
    *arguments: object, cwd: Path = ROOT, prints: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter that can import this actorrpc, without the drop-in.

    Args:
        prints: patterns that it may write to standard error if it succeeds (tests/output.py).
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "ACTORRPC_DROP_IN": "0", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode:
        check(done.stderr, *prints)
    return done


@pytest.mark.limit(120)
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_the_command_runs_a_program_and_its_children_on_actorrpc(method: str) -> None:
    done = run("-m", "actorrpc.compat", PROGRAMS / "two_ranks.py", method, "--flag")
    assert done.stdout.splitlines() == [FOUND, f"over {method} --flag"], done.stderr


@pytest.mark.limit(120)
def test_without_the_command_the_program_runs_on_torchs_agent() -> None:
    """The output of the programs shows which agent they use."""
    done = run(PROGRAMS / "two_ranks.py", "fork", prints=TORCH_RPC)
    assert done.stdout.splitlines()[0].startswith("torch._C._distributed_rpc [2.0, 2.0]"), done.stderr


@pytest.mark.limit(120)
def test_the_command_runs_torchrun_on_actorrpc(tmp_path: Path) -> None:
    command = ("-m", "actorrpc.compat", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = run(*command, PROGRAMS / "under_torchrun.py", cwd=tmp_path)
    assert OURS in done.stdout.splitlines(), done.stderr


@pytest.mark.limit(120)
def test_the_environment_variable_alone_activates_an_installed_drop_in(tmp_path: Path) -> None:
    """With the .pth file that the wheel installs in site-packages."""
    (tmp_path / "actorrpc_drop_in.pth").write_text((SITE / "actorrpc_drop_in.pth").read_text())
    code = f"import site; site.addsitedir({str(tmp_path)!r}); import torch.distributed.rpc as rpc; print(rpc.__name__)"
    assert run("-c", code, ACTORRPC_DROP_IN="1").stdout == "actorrpc.compat.rpc\n"
    assert run("-c", code).stdout == "torch.distributed.rpc\n"


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    variables = take_over.drop_in({"PYTHONPATH": str(tmp_path)})
    done = run("-c", "import sys; print('torch' in sys.modules, 'actorrpc' in sys.modules)", **variables)
    assert done.stdout.splitlines() == ["the other one", "False False"], done.stderr


def test_interpreter_options_and_arguments_are_passed_to_the_program(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; print(sys.flags.dont_write_bytecode, sys.flags.optimize, sys.argv[1:], sys.path[0])"
    )
    done = run("-B", "-O", "-m", "actorrpc.compat", script, "-m", "x")
    assert done.stdout == f"1 1 ['-m', 'x'] {tmp_path}\n", done.stderr


@pytest.mark.parametrize("option", ["-E", "-I", "-S"])
def test_interpreter_options_that_ignore_the_environment_are_refused(option: str) -> None:
    start = f"""import runpy, sys
sys.path[:0] = {sys.path!r}
runpy.run_module("actorrpc.compat", run_name="__main__", alter_sys=True)"""
    done = run(option, "-c", start, "script.py")
    assert done.returncode == 1
    assert "does not work with -E, -I and -S" in done.stderr


def test_the_command_without_a_program_prints_its_usage() -> None:
    done = run("-m", "actorrpc.compat")
    assert done.returncode == 1
    assert "usage" in done.stderr
