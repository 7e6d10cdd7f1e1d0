"""The command `python -m actorrpc.compat.ray` runs unchanged Ray programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.output import check

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs") / "ray"
OUTPUTS = {
    "looks_around": """True actorrpc.compat.ray True
ray.tune True
ray.data True
ray.util.collective True
True
True
None ran
False""",
    "parameter_server": "[0.0, 1.0, 2.0, 3.0]\n[0.0, 1.0, 2.0, 3.0]",
    "runtime_envs": "['yes', None]\n['yes', 'only']\nonly\nTrue",
}


def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command with this actorrpc in the path."""
    path = os.pathsep.join(filter(None, [str(ROOT), variables.pop("more", ""), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "actorrpc.compat.ray", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.limit(180)
@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_a_ray_program_prints_the_expected_output(name: str) -> None:
    done = run(PROGRAMS / f"{name}.py")
    assert done.stdout.splitlines() == OUTPUTS[name].splitlines(), done.stderr
    assert done.returncode == 0, done.stderr
    check(done.stderr, what=name)


def test_every_program_in_the_folder_is_tested() -> None:
    assert {each.stem for each in PROGRAMS.glob("*.py")} == set(OUTPUTS)


@pytest.mark.limit(120)
def test_the_command_reports_that_an_installed_ray_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise AssertionError('not this one')")
    done = run("-c", "import ray, sys; print(ray.__name__, sys.argv)", "x", more=str(tmp_path))
    assert done.stdout == "actorrpc.compat.ray ['-c', 'x']\n", done.stderr
    assert f"Ray is installed in {tmp_path / 'ray'}; in this program, `import ray` means" in done.stderr


@pytest.mark.limit(120)
def test_the_command_without_a_program_prints_its_usage() -> None:
    done = run()
    assert done.returncode == 1
    assert "usage" in done.stderr
