"""The examples with actors run at small sizes, as users run them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import actorrpc
from tests.examples import kit, modules
from tests.ports import free_port

PROGRESS = r"^\[[# ]*\] episode "
_NEEDED = ("gymnasium", "httpx", "matplotlib", "sklearn", "starlette", "tqdm", "uvicorn")
pytestmark = pytest.mark.skipif(
    not all(map(find_spec, _NEEDED)), reason=f"needs {', '.join(_NEEDED)}: pip install 'actorrpc[examples]'"
)


def run(directory: Path, name: str, *flags: str, prints: Sequence[str] = ()) -> list[str]:
    """Run an example to its end; return its output lines. ``prints`` has patterns of its allowed standard error."""
    done = kit.run(directory, name, *flags, prints=prints)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@contextlib.contextmanager
def started(directory: Path, name: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Start an example in a new process group; kill it at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-u", str(kit.ROOT / "examples" / name), *flags],
        cwd=directory,
        env=kit.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


class TestCartpole:
    @pytest.mark.limit(60)
    def test_cartpole_reports_and_draws_its_curve(self, tmp_path: Path) -> None:
        flags = ("--max-episodes", "10", "--observers", "2", "--seed", "1")
        report, curve = run(tmp_path, "cartpole.py", *flags, prints=[PROGRESS])
        assert report.startswith("not solved after 10 episodes: running reward ")
        assert curve == "learning curve: cartpole.png"
        assert (tmp_path / "cartpole.png").read_bytes().startswith(kit.PNG)

    @pytest.mark.limit(120)
    @pytest.mark.skipif(not kit.NIGHTLY, reason="two runs: nightly")
    def test_cartpole_plays_the_same_games_for_the_same_seed(self, tmp_path: Path) -> None:
        flags = ("--max-episodes", "3", "--observers", "3", "--seed", "7", "--plot", "")
        reports = [
            run(tmp_path, "cartpole.py", *flags, prints=[PROGRESS])[0].split(" in ")[0] for _ in range(2)
        ]
        assert reports[0] == reports[1]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.limit(60)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_parameter_server_learns(tmp_path: Path, mode: str) -> None:
    flags = ("--mode", mode, "--steps", "20", "--workers", "2")
    *progress, report = run(tmp_path, "parameter_server.py", *flags)
    assert len(progress) == 2
    assert report.startswith(f"{mode}: 40 gradients of 2 workers in ")
    assert float(report.rpartition(" ")[2]) > 0.8


@pytest.mark.limit(60)
def test_pipeline_has_the_results_of_one_process(tmp_path: Path) -> None:
    flags = ("--stages", "2", "--steps", "5", "--micro-batches", "3", "--batch", "50")
    lines = run(tmp_path, "pipeline.py", *flags)
    assert lines[-1].endswith("the same as in one process")
    assert not [line for line in lines if "NOT" in line]


@pytest.mark.limit(60)
def test_asyncio_server_answers_concurrent_requests(tmp_path: Path) -> None:
    lines = run(tmp_path, "asyncio_server.py", "--self-test", "--replicas", "2")
    assert "all answers right" in "".join(lines)


@pytest.mark.limit(90)
@pytest.mark.parametrize("lose", [pytest.param(0, id="all live"), pytest.param(1, id="one dies")])
def test_data_parallel_actors_learn_as_one_process_does(tmp_path: Path, lose: int) -> None:
    if lose and not kit.NIGHTLY:
        pytest.skip("a second run: nightly")
    flags = ("--trainers", "2", "--epochs", "2", "--lose", str(lose))
    done = kit.run(tmp_path, "data_parallel_actors.py", *flags, prints=[r"^epoch \d+: loss "])
    assert done.stdout.startswith("2 trainers, 2 epochs in ")
    if lose:
        assert "all 2 are back: it goes on at epoch 1, step 4" in done.stderr
    else:
        assert done.stdout.rstrip().endswith("the same as in one process")


@pytest.mark.limit(120)
def test_split_learning_learns_with_the_results_of_one_process(tmp_path: Path) -> None:
    flags = ("--clients", "2", "--rounds", "5", "--steps", "10")
    *progress, report = run(tmp_path, "split_learning.py", *flags)
    assert [line[:9] for line in progress] == [f"round {turn:2d} " for turn in range(1, 6)]
    losses = [float(line.rpartition(" ")[2]) for line in progress]
    assert losses[0] > 1.8
    assert losses[-1] < 0.5
    assert ", the same as in one process; accuracy " in report
    assert float(report.rpartition(" ")[2]) > 0.75


class TestPostTraining:
    @pytest.mark.limit(120)
    def test_reward_rises_and_a_generator_that_is_killed_is_replaced(self, tmp_path: Path) -> None:
        lines = run(tmp_path, "post_training.py", "--steps", "50", "--lose", "10")
        assert [line for line in lines if line.endswith(": a generator was lost; all 2 are back")]
        assert lines[-2].startswith("done after 50 steps, 1 generators lost, in ")
        rewards = [float(line.split()[3]) for line in lines if re.match(r"step \d+  reward ", line)]
        assert len(rewards) == 5
        assert rewards[-1] > 2 * rewards[0]
        assert (tmp_path / "post_training.png").read_bytes().startswith(kit.PNG)


class TestImpala:
    @pytest.mark.limit(120)
    def test_impala_learns_and_draws_its_curve(self, tmp_path: Path) -> None:
        lines = run(tmp_path, "impala.py", "--max-steps", "12000", "--samplers", "2")
        assert lines[-2].startswith("not solved after 1")
        rewards = [float(line.split()[3]) for line in lines if line.startswith("steps ")]
        assert rewards[-1] > rewards[0]
        assert (tmp_path / "impala.png").read_bytes().startswith(kit.PNG)

    @pytest.mark.parametrize(("bound", "trace"), [(1.0, 1.0), (2.0, 0.5), (1e9, 1e9)])
    def test_vtrace_equals_the_definition_of_the_paper(self, bound: float, trace: float) -> None:
        """Compared with the sums and products of its definition (section 4.1), game by game."""
        impala = modules.load("impala.py")
        dice = torch.Generator().manual_seed(0)
        length, games = 7, 3
        ratios = torch.rand(length, games, generator=dice, dtype=torch.float64) * 4
        rewards = torch.randn(length, games, generator=dice, dtype=torch.float64)
        values = torch.randn(length + 1, games, generator=dice, dtype=torch.float64)
        continues = torch.rand(length, games, generator=dice) > 0.2
        discounts = 0.9 * continues.double()
        assert (ratios > bound).any() or bound > 4
        assert not continues.all()

        targets, advantages = impala.vtrace(ratios, rewards, discounts, values, bound, trace)

        for game in range(games):
            ratio, reward, discount, value = (
                each[:, game].tolist() for each in (ratios, rewards, discounts, values)
            )
            wanted = []
            for start in range(length):
                total = value[start]
                for step in range(start, length):
                    factor = 1.0
                    for between in range(start, step):
                        factor *= discount[between] * min(trace, ratio[between])
                    surprise = reward[step] + discount[step] * value[step + 1] - value[step]
                    total += factor * min(bound, ratio[step]) * surprise
                wanted.append(total)
            wanted.append(value[length])  # the value estimate stands for all later steps
            better = [
                min(bound, ratio[step]) * (reward[step] + discount[step] * following - value[step])
                for step, (_, following) in enumerate(pairwise(wanted))
            ]
            assert targets[:, game].tolist() == pytest.approx(wanted[:-1])
            assert advantages[:, game].tolist() == pytest.approx(better)


class TestHyperparameters:
    def test_survivors_are_the_better_half(self) -> None:
        survivors = modules.load("hyperparameters.py").survivors
        assert survivors({0: 0.1, 1: 0.9, 2: 0.5, 3: 0.7}) == [1, 3]
        assert survivors({4: 0.2, 7: 0.2, 9: 0.2}) == [4, 7]
        assert survivors({5: 0.3}) == [5]

    @pytest.mark.limit(120)
    def test_survivors_have_the_best_scores_and_continue_their_training(self, tmp_path: Path) -> None:
        lines = run(tmp_path, "hyperparameters.py", "--trials", "4", "--lose", "2", "--seed", "1")
        found = [re.match(r"rung (\d) .* trial (\d+)  accuracy ([\d.]+)  (\w+)", line) for line in lines]
        rungs: dict[int, dict[int, tuple[float, bool]]] = {}
        for rung, trial, accuracy, outcome in (each.groups() for each in found if each is not None):
            rungs.setdefault(int(rung), {})[int(trial)] = (float(accuracy), outcome != "ends")
        assert [len(trials) for trials in rungs.values()] == [4, 2, 1]
        for rung, following in pairwise(rungs):
            kept = {trial for trial, (_, continues) in rungs[rung].items() if continues}
            assert kept == set(rungs[following])
            worst = min(rungs[rung][trial][0] for trial in kept)
            assert all(accuracy <= worst for accuracy, continues in rungs[rung].values() if not continues)
        # Two trials end after 1 epoch, one trial after 2, and one trial after 4 epochs.
        assert "; 8 epochs for 16, in " in lines[-2]
        assert (tmp_path / "hyperparameters.png").read_bytes().startswith(kit.PNG)

    @pytest.mark.limit(120)
    def test_a_killed_trial_continues_from_its_checkpoint(self) -> None:
        module = modules.load("hyperparameters.py")
        dice = torch.Generator().manual_seed(0)
        pictures = torch.rand(600, 64, generator=dice)
        labels = torch.randint(10, (600,), generator=dice)
        wanted = module.Configuration(rate=0.1, width=8, batch=16, momentum=0.9)
        with actorrpc.init():
            lives, dies = (module.Trial.remote(wanted, pictures, labels, 0) for _ in range(2))
            actorrpc.get([trial.train.remote(1) for trial in (lives, dies)])
            actorrpc.kill(dies, no_restart=False)
            found = actorrpc.get([trial.train.remote(3) for trial in (lives, dies)])
        assert len(found[0]) == 3
        assert found[0] == found[1]


class TestDataLoader:
    @pytest.mark.limit(120)
    def test_loading_ahead_and_loading_in_between_give_the_same_loss(self, tmp_path: Path) -> None:
        lines = run(tmp_path, "data_loader.py", "--files", "4", "--ahead", "3")
        ahead = re.fullmatch(r"loaded by 2 actors: \d+ items/s, at most (\d+) batches ahead", lines[0])
        assert ahead is not None
        assert int(ahead[1]) <= 3
        assert re.fullmatch(r"loaded in between: \d+ items/s; the same loss", lines[1])
        assert (tmp_path / "data_loader.png").read_bytes().startswith(kit.PNG)

    @pytest.mark.limit(120)
    def test_a_loader_is_never_ahead_by_more_than_max_buffered_items(self, tmp_path: Path) -> None:
        module = modules.load("data_loader.py")
        paths = module.write_files(tmp_path, 2, seed=0)
        with actorrpc.init():
            loader = module.Loader.remote()
            batches = loader.batches.options(max_buffered_items=3).remote(paths, 1).values()
            for taken in range(1, 11):
                next(batches)
                for _ in range(20):  # each call gives the loader time for more
                    made = actorrpc.get(loader.made.remote())
                    assert taken <= made <= taken + 3
            batches.close()


class TestServe:
    @pytest.mark.limit(120)
    def test_reloads_and_a_death_lose_no_request_and_requests_are_batched(self, tmp_path: Path) -> None:
        (line,) = run(tmp_path, "serve.py", "--self-test", "--requests", "300", "--batch", "16")
        report = re.fullmatch(
            r"self-test: (\d+) requests of 300 answered, all right, in [\d.]+ s; "
            r"(\d+) batches of up to (\d+), weights \[1, 2, 3\]",
            line,
        )
        assert report is not None, line
        answered, batches, largest = map(int, report.groups())
        assert answered == 300
        assert batches < 150
        assert largest == 16

    @pytest.mark.limit(120)
    def test_uvicorn_serves_the_model_until_ctrl_c(self, tmp_path: Path) -> None:
        httpx = pytest.importorskip("httpx")
        port = free_port()
        with started(tmp_path, "serve.py", "--port", str(port), "--replicas", "1") as process:
            assert process.stderr is not None
            assert any("Uvicorn running" in line for line in process.stderr)
            address = f"http://127.0.0.1:{port}"
            answer = httpx.post(f"{address}/predict", json={"x": [1, 2, 3, 4]}, timeout=30)
            assert answer.json().keys() == {"y", "version", "batch"}
            assert httpx.post(f"{address}/reload", timeout=30).json() == {"versions": [0]}
            assert httpx.get(f"{address}/stats", timeout=30).json() == {"batches": {"1": 1}}
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate()
        assert "Traceback" not in errors
        assert "Application shutdown complete" in errors
        assert process.returncode == 0


@pytest.mark.limit(120)
@pytest.mark.parametrize(
    ("name", "flags", "progress"),
    [
        ("cartpole.py", ("--plot", "curve.png"), "stderr"),
        ("post_training.py", ("--pretrain", "1", "--plot", "curve.png"), "stdout"),
        ("impala.py", ("--plot", "curve.png"), "stdout"),
        ("hyperparameters.py", ("--trials", "3"), "stdout"),
    ],
)
def test_ctrl_c_ends_the_example_with_a_report(
    tmp_path: Path, name: str, flags: tuple[str, ...], progress: str
) -> None:
    with started(tmp_path, name, *flags) as process:
        assert getattr(process, progress).readline()
        os.killpg(process.pid, signal.SIGINT)  # to the whole process group, as a terminal does
        report, errors = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in report
    assert not errors or (progress == "stderr" and "Traceback" not in errors)
