"""The reinforcement-learning example plays, reports and draws the same on actorrpc as on torch.

Solving the task takes too long for a test. A run of a few episodes exercises everything else. As an episode depends only on the
seed, both backends must have the same steps and rewards.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.announced import TORCH_RPC
from tests.output import check
from tests.ports import free_port

pytest.importorskip("gymnasium", reason="the example needs gymnasium: pip install 'actorrpc[examples]'")
pytest.importorskip(
    "matplotlib", reason="the example draws with matplotlib: pip install 'actorrpc[examples]'"
)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "torch_style" / "reinforce.py"
PNG = b"\x89PNG\r\n\x1a\n"


def run(directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the example in this directory, with this tree's actorrpc."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    environment["MASTER_PORT"] = str(free_port())
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(SCRIPT), *flags],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def outcome(directory: Path, *flags: str) -> tuple[list[str], dict[str, Any]]:
    """Run a few episodes; return the lines before the JSON, and the JSON."""
    done = run(directory, "--max_episodes", "3", "--log_interval", "2", "--json", *flags)
    assert done.returncode == 0, done.stderr
    check(done.stderr, *(TORCH_RPC if "torch" in flags else ()), what="the example")
    *lines, last = done.stdout.splitlines()
    return lines, json.loads(last)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example as a module, for tests without processes."""
    spec = importlib.util.spec_from_file_location("reinforce_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look up their module during the import
        spec.loader.exec_module(module)
    return module


@pytest.mark.limit(180)  # two groups of three processes, each of which imports torch and gymnasium
def test_reinforce_has_the_steps_and_rewards_of_torch_and_draws_its_curve(tmp_path: Path) -> None:
    lines, ours = outcome(tmp_path, "--world_size", "3", "--plot", "curve.png")
    assert len(lines) == 1
    assert lines[0].startswith("episode    2")
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    assert list(ours) == [
        "backend",
        "seconds",
        "env_steps",
        "steps_per_second",
        "episodes",
        "solved",
        "running_reward",
    ]
    assert ours["backend"] == "actorrpc"
    assert ours["episodes"] == 3
    assert ours["solved"] is False
    assert ours["env_steps"] >= 3 * 2 * 8  # no game of CartPole ends before its eighth step
    assert ours["steps_per_second"] == pytest.approx(ours["env_steps"] / ours["seconds"])

    lines, theirs = outcome(tmp_path, "--world_size", "3", "--plot", "", "--quiet", "--backend", "torch")
    assert lines == []
    assert theirs["backend"] == "torch"
    assert theirs["env_steps"] == ours["env_steps"]
    assert theirs["running_reward"] == ours["running_reward"]
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--world_size", "1"], "--world_size: must be at least 2, not 1"),
        (["--world_size", "two"], "--world_size: invalid whole number value: 'two'"),
        (["--log_interval", "0"], "--log_interval: must be at least 1, not 0"),
        (["--max_episodes", "0"], "--max_episodes: must be at least 1, not 0"),
        (["--seed", "-1"], "--seed: must be at least 0, not -1"),
        (["--gamma", "1.5"], "--gamma: must lie between 0 and 1, not 1.5"),
        (["--gamma", "nan"], "--gamma: must lie between 0 and 1, not nan"),
        (["--backend", "ray"], "--backend: invalid choice: 'ray'"),
        (["--plot", "no/such/directory/curve.png"], "no/such/directory does not exist"),
        (["--plot", "."], "is a directory; give the name of a file"),
        (["--speed", "fast"], "unrecognized arguments: --speed fast"),
    ],
)
def test_wrong_flags_are_refused(
    example: ModuleType, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        example.main(flags)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_returns_are_discounted_sums_of_later_rewards(example: ModuleType) -> None:
    episode = example.Episode(None, rewards=[1.0, 2.0, 4.0])
    assert episode.returns(0.5).tolist() == [3.0, 4.0, 4.0]


def test_actions_are_sampled_with_the_learned_probabilities(example: ModuleType) -> None:
    policy = example.Policy(hidden=8)
    states = [[0.1, -0.2, 0.3, -0.4], [1.0, 2.0, -3.0, 0.5]]
    batch = policy(example.torch.tensor(states)).exp()
    assert [policy.chance_of_left(state) for state in states] == pytest.approx(batch[:, 0].tolist())
