"""actorrpc and its drop-in need nothing of torch's RPC: torch may be built without it, or have no such modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layers import rest_is_slow
from tests.output import check

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAMS = Path(__file__).with_name("programs")
_HIDDEN = _ROOT / "tests" / "without_rpc"
_ABSENT = "No module named 'torch.distributed.rpc'"
_SCRIPT = r"DeprecationWarning: `torch\.jit\.\w+` is (deprecated|not supported)"


def _run(hide: str, *arguments: object, prints: tuple[str, ...] = ()) -> list[str]:
    """Run an interpreter in which torch's RPC is hidden (tests/without_rpc), and return the lines of its output."""
    path = os.pathsep.join(filter(None, [str(_HIDDEN), str(_ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "HIDE_RPC": hide, "ACTORRPC_DROP_IN": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    check(done.stderr, *prints)
    return done.stdout.splitlines()


@pytest.mark.limit(120)
@pytest.mark.parametrize(("hide", "found"), rest_is_slow([("modules", _ABSENT), ("build", "False")]))
def test_actors_and_gradients_do_not_need_torchs_rpc(hide: str, found: str) -> None:
    assert _run(hide, _PROGRAMS / "actors_without_rpc.py") == [found, "3.0", f"{found} 2.0"]


@pytest.mark.limit(120)
@pytest.mark.parametrize("hide", rest_is_slow(["modules", "build"]))
def test_the_drop_in_provides_the_modules_that_torch_does_not_have(hide: str) -> None:
    lines = _run(hide, "-m", "actorrpc.compat", _PROGRAMS / "names_without_rpc.py", prints=(_SCRIPT,))
    assert lines == ["True True True", "{'actorrpc'}", "4.0 2.0", "True True True"]


@pytest.mark.slow
@pytest.mark.limit(120)
def test_ranks_of_an_unchanged_program_do_not_need_torchs_rpc() -> None:
    lines = _run("modules", "-m", "actorrpc.compat", _PROGRAMS / "two_ranks.py", "fork")
    assert lines == ["actorrpc.compat.rpc.agent [2.0, 2.0] 3 [3.0, 3.0]", "over fork"]


def test_the_import_names_a_missing_torch_distributed() -> None:
    code = (
        "import torch.distributed as dist\n"
        "dist.is_available = lambda: False\n"
        "try:\n"
        "    import actorrpc\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)"
    )
    (line,) = _run("build", "-c", code)
    assert line.startswith("PlatformError actorrpc needs torch.distributed")
