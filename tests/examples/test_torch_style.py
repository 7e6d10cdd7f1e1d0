"""The examples in torch's style learn on actorrpc. Their first results are those that tests/tutorials recorded on torch."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.examples.kit import PNG, run
from tests.examples.modules import load
from tests.tutorials.kit import EXPECTED, PIPELINE_SIZES, RNN_SIZES

_NEEDED = ("gymnasium", "matplotlib", "sklearn")
pytestmark = [
    pytest.mark.limit(180),
    pytest.mark.skipif(
        not all(map(find_spec, _NEEDED)),
        reason=f"needs {', '.join(_NEEDED)}: pip install 'actorrpc[examples]'",
    ),
]

ON_TORCH = {name: lines[-1] for name, lines in json.loads(EXPECTED.read_text()).items()}


def outcome(directory: Path, name: str, *flags: str) -> tuple[list[str], dict[str, Any]]:
    """Run an example with ``--json``; return its lines of progress, and the JSON of its last line."""
    done = run(directory, f"{name}.py", "--json", *flags, folder="torch_style")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(last)
    assert result["backend"] == "actorrpc"
    return lines, result


def begins_with(losses: list[float], expected: list[float]) -> bool:
    """Compare approximately: with momentum or Adam, a missing or doubled gradient changes all later losses."""
    return bool(losses[: len(expected)] == pytest.approx(expected, rel=1e-4))


def test_reinforce_has_the_steps_and_rewards_of_torch_and_draws_its_curve(tmp_path: Path) -> None:
    flags = ("--world_size", "3", "--max_episodes", "3", "--log_interval", "2", "--plot", "curve.png")
    lines, ours = outcome(tmp_path, "reinforce", *flags)
    assert [line[:12] for line in lines] == ["episode    2"]
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    assert ours["steps_per_second"] == pytest.approx(ours["env_steps"] / ours["seconds"])
    for name in ("env_steps", "running_reward", "episodes", "solved"):
        assert ours[name] == ON_TORCH["reinforce"][name]


def test_batched_action_selection_learns(tmp_path: Path) -> None:
    flags = ("--world_size", "3", "--steps", "300", "--episodes", "12")
    lines, ours = outcome(tmp_path, "batch_reinforce", *flags)
    assert len(lines) == len(ours["rewards"]) == 12
    assert ours["rewards"][:2] == ON_TORCH["batch_reinforce"]["rewards"]
    assert max(ours["rewards"]) > 50


def test_the_perplexity_of_unseen_text_falls_and_the_curve_is_drawn(tmp_path: Path) -> None:
    lines, ours = outcome(tmp_path, "rnn", *RNN_SIZES, "--epochs", "2", "--plot", "curve.png")
    assert begins_with(ours["losses"], ON_TORCH["rnn"]["losses"])
    untrained, first, second = ours["perplexities"]
    assert untrained == pytest.approx(300, rel=0.05)  # all words are equally likely
    assert untrained > first > second
    assert second < 60
    assert [line[:10] for line in lines if "perplexity" in line] == ["untrained ", "epoch    1", "epoch    2"]
    assert lines[-1].startswith("what it says now: ")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


def test_two_trainers_of_one_server_learn(tmp_path: Path) -> None:
    lines, result = outcome(tmp_path, "parameter_server", "--world_size", "3", "--epochs", "5")
    assert [len(losses) for losses in result["losses"].values()] == [5 * 24, 5 * 24]
    assert result["accuracy"] > 0.8
    assert sorted(line.split("  loss")[0] for line in lines) == [
        f"trainer{rank}  epoch  {epoch}/5" for rank in (1, 2) for epoch in range(1, 6)
    ]


def test_batched_updates_learn(tmp_path: Path) -> None:
    lines, ours = outcome(tmp_path, "batch_parameter_server", "--world_size", "3", "--epochs", "2")
    # No gradient is stale and sums have a fixed order.
    assert all(map(begins_with, ours["losses"], ON_TORCH["batch_parameter_server"]["losses"]))
    assert ours["accuracy"] > 0.8
    assert [line.split("  loss")[0] for line in lines] == [f"update {16 * count:4d}" for count in range(1, 6)]


def test_ddp_trainers_with_a_remote_embedding_learn(tmp_path: Path) -> None:
    flags = ("--steps", "40", "--vocabulary", "160", "--log_interval", "20")
    progress, result = outcome(tmp_path, "ddp_hybrid", *flags)
    assert [line[:10] for line in progress] == ["step   20 ", "step   40 "]
    # Gradients that DDP has not averaged, or averaged twice, change the second loss.
    assert begins_with(result["losses"], ON_TORCH["ddp_hybrid"]["losses"])
    assert sum(result["losses"][-5:]) / 5 < 0.6
    assert result["accuracy"] > 0.85


def test_the_pipeline_learns_for_any_number_of_micro_batches(tmp_path: Path) -> None:
    flags = (*PIPELINE_SIZES, "--steps", "30", "--micro_batches", "1", "5")
    lines, result = outcome(tmp_path, "pipeline", *flags)
    assert [line[:16] for line in lines] == [" 1 micro-batch  ", " 5 micro-batches"]
    for training, on_torch in zip(result["trainings"], ON_TORCH["pipeline"]["trainings"], strict=True):
        assert training["micro_batches"] == on_torch["micro_batches"]
        assert begins_with(training["losses"], on_torch["losses"])
        assert sum(training["losses"][-5:]) / 5 < 0.9


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("reinforce", ["--world_size", "1"], "--world_size: must be at least 2, not 1"),
        ("reinforce", ["--gamma", "nan"], "--gamma: must lie between 0 and 1, not nan"),
        ("reinforce", ["--plot", "no/such/directory/curve.png"], "no/such/directory does not exist"),
        ("reinforce", ["--plot", "."], "is a directory; give the name of a file"),
        ("parameter_server", ["--world_size", "1"], "--world_size: a server and a trainer make 2"),
        ("pipeline", ["--micro_batches", "0"], "--micro_batches: must be at least 1, not 0"),
        ("pipeline", ["--micro_batches", "9", "--batch", "8"], "there are fewer images in a batch"),
        ("pipeline", ["--width", "6"], "--width: must be a multiple of 4, not 6"),
    ],
)
def test_wrong_flags_are_refused(
    capsys: pytest.CaptureFixture[str], name: str, flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        load(f"{name}.py", "torch_style").main(flags)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_no_paragraph_is_both_trained_on_and_held_out() -> None:
    text = load("rnn.py", "torch_style").Text(
        vocabulary=10**6, seed=1
    )  # all words are known: no difference is hidden
    assert 0 not in text.train
    train, test = ([text.words[number] for number in part] for part in (text.train, text.test))
    assert 0.05 < len(test) / len(train) < 0.2
    spoken = " ".join(train)
    runs = [" ".join(test[start : start + 40]) for start in range(len(test) - 40)]
    assert not any(run in spoken for run in runs)
