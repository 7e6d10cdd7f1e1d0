"""Unchanged programs of torch's RPC run on actorrpc: by the command, by the environment, and all that they start."""

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
    """Run an interpreter with this tree's actorrpc in its reach, but without the drop-in.

    Args:
        prints: what it may write to standard error where it ends well (tests/output.py).
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
def test_a_program_and_its_children(method: str) -> None:
    done = run("-m", "actorrpc.compat", PROGRAMS / "two_ranks.py", method, "--flag")
    assert done.stdout.splitlines() == [FOUND, f"over {method} --flag"], done.stderr


@pytest.mark.limit(120)
def test_without_it_the_program_runs_on_torchs_agent() -> None:
    """The programs can tell: else the tests above would show nothing."""
    done = run(PROGRAMS / "two_ranks.py", "fork", prints=TORCH_RPC)
    assert done.stdout.splitlines()[0].startswith("torch._C._distributed_rpc [2.0, 2.0]"), done.stderr


@pytest.mark.limit(120)
def test_torchrun(tmp_path: Path) -> None:
    command = ("-m", "actorrpc.compat", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = run(*command, PROGRAMS / "under_torchrun.py", cwd=tmp_path)
    assert OURS in done.stdout.splitlines(), done.stderr


@pytest.mark.limit(120)
def test_the_variable_alone_where_actorrpc_is_installed(tmp_path: Path) -> None:
    """The .pth file of the wheel, as it lies in the site-packages."""
    (tmp_path / "actorrpc_drop_in.pth").write_text((SITE / "actorrpc_drop_in.pth").read_text())
    code = f"import site; site.addsitedir({str(tmp_path)!r}); import torch.distributed.rpc as rpc; print(rpc.__name__)"
    assert run("-c", code, ACTORRPC_DROP_IN="1").stdout == "actorrpc.compat.rpc\n"
    assert run("-c", code).stdout == "torch.distributed.rpc\n"


def test_another_sitecustomize_is_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    variables = take_over.drop_in({"PYTHONPATH": str(tmp_path)})
    done = run("-c", "import sys; print('torch' in sys.modules, 'actorrpc' in sys.modules)", **variables)
    assert done.stdout.splitlines() == ["the other one", "False False"], done.stderr


def test_the_interpreters_options_are_passed_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; print(sys.flags.dont_write_bytecode, sys.flags.optimize, sys.argv[1:], sys.path[0])"
    )
    done = run("-B", "-O", "-m", "actorrpc.compat", script, "-m", "x")
    assert done.stdout == f"1 1 ['-m', 'x'] {tmp_path}\n", done.stderr


@pytest.mark.parametrize("option", ["-E", "-I", "-S"])
def test_options_that_hide_the_environment_are_refused(option: str) -> None:
    start = f"""import runpy, sys
sys.path[:0] = {sys.path!r}
runpy.run_module("actorrpc.compat", run_name="__main__", alter_sys=True)"""
    done = run(option, "-c", start, "script.py")
    assert done.returncode == 1
    assert "does not work with -E, -I and -S" in done.stderr


def test_nothing_to_run_is_refused() -> None:
    done = run("-m", "actorrpc.compat")
    assert done.returncode == 1
    assert "usage" in done.stderr
