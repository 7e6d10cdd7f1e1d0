"""The examples with actors run at small size, as a user would run them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.kit import NIGHTLY
from tests.output import check

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PNG = b"\x89PNG\r\n\x1a\n"

PROGRESS = r"^\[[# ]*\] episode "


def environment() -> dict[str, str]:
    """Return an environment with this tree's actorrpc, and without addresses of a group."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return found


def run(
    directory: Path, name: str, *flags: str, prints: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run an example to its end in this directory; ``prints`` has patterns of its allowed standard error."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *flags],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check(done.stderr, *prints, what=name)
    return done


@pytest.mark.skipif(
    find_spec("gymnasium") is None, reason="needs gymnasium: pip install 'actorrpc[examples]'"
)
class TestCartpole:
    @pytest.mark.limit(60)
    def test_cartpole_shows_its_progress_and_draws_its_curve(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'actorrpc[examples]'")
        flags = ("--max-episodes", "10", "--observers", "2", "--seed", "1")
        done = run(tmp_path, "cartpole.py", *flags, prints=[PROGRESS])
        report, curve = done.stdout.splitlines()
        assert report.startswith("not solved after 10 episodes: running reward ")
        assert curve == "learning curve: cartpole.png"
        assert (tmp_path / "cartpole.png").read_bytes().startswith(PNG)
        assert done.stderr.count("episode  10/10") == 1

    @pytest.mark.limit(120)
    @pytest.mark.skipif(not NIGHTLY, reason="two runs: nightly")
    def test_cartpole_plays_the_same_games_for_the_same_seed(self, tmp_path: Path) -> None:
        flags = ("--max-episodes", "3", "--observers", "3", "--seed", "7", "--plot", "")
        reports = [
            run(tmp_path, "cartpole.py", *flags, prints=[PROGRESS]).stdout.split(" in ")[0] for _ in range(2)
        ]
        assert reports[0] == reports[1]
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.limit(60)
    def test_ctrl_c_ends_cartpole_with_a_report(self, tmp_path: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / "cartpole.py"), "--plot", "curve.png"],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                assert process.stderr is not None
                progress = process.stderr.readline()
                os.killpg(process.pid, signal.SIGINT)  # to the whole process group, as a terminal does
                report, errors = process.communicate()
            finally:
                process.kill()
        assert "episode  10/" in progress
        assert process.returncode == 130
        assert report.startswith("interrupted after ")
        assert "Traceback" not in errors


@pytest.mark.limit(60)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_parameter_server_learns(tmp_path: Path, mode: str) -> None:
    flags = ("--mode", mode, "--steps", "20", "--workers", "2")
    *progress, report = run(tmp_path, "parameter_server.py", *flags).stdout.splitlines()
    assert len(progress) == 2
    assert report.startswith(f"{mode}: 40 gradients of 2 workers in ")
    assert float(report.rpartition(" ")[2]) > 0.8


@pytest.mark.limit(60)
def test_pipeline_has_the_results_of_one_process(tmp_path: Path) -> None:
    done = run(
        tmp_path, "pipeline.py", "--stages", "2", "--steps", "5", "--micro-batches", "3", "--batch", "50"
    )
    assert done.stdout.rstrip().endswith("the same as in one process")
    assert "NOT" not in done.stdout


@pytest.mark.limit(60)
def test_asyncio_server_answers_concurrent_requests(tmp_path: Path) -> None:
    done = run(tmp_path, "asyncio_server.py", "--self-test", "--replicas", "2")
    assert "all answers right" in done.stdout
    assert done.stderr == ""


@pytest.mark.limit(90)
@pytest.mark.skipif(
    find_spec("sklearn") is None, reason="needs scikit-learn: pip install 'actorrpc[examples]'"
)
@pytest.mark.parametrize("lose", [pytest.param(0, id="all live"), pytest.param(1, id="one dies")])
def test_data_parallel_actors_learn_as_one_process_does(tmp_path: Path, lose: int) -> None:
    if lose and not NIGHTLY:
        pytest.skip("a second run: nightly")
    flags = ("--trainers", "2", "--epochs", "2", "--lose", str(lose))
    done = run(tmp_path, "data_parallel_actors.py", *flags, prints=[r"^epoch \d+: loss "])
    assert done.stdout.startswith("2 trainers, 2 epochs in ")
    if lose:
        assert "all 2 are back: it goes on at epoch 1, step 4" in done.stderr
    else:
        assert done.stdout.rstrip().endswith("the same as in one process")
