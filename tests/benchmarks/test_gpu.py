"""The benchmark of GPUs: its message without a GPU, its arithmetic, and a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu


def test_without_a_gpu_the_benchmark_measures_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert "nothing was measured" in capsys.readouterr().out
    assert not gpu.missing("cpu")


def test_ratios_are_taken_within_a_round() -> None:
    found = gpu.summary({"torch": [1.0, 2.0, 4.0], "actorrpc": [2.0, 1.0, 8.0]})
    assert found["actorrpc"] == {"gb_per_s": 2.0, "lowest": 1.0, "highest": 8.0, "ratio_to_torch": 2.0}
    assert found["torch"] == {"gb_per_s": 2.0, "lowest": 1.0, "highest": 4.0}
    assert gpu.summary({"torch": [], "actorrpc": [3.0]})["actorrpc"]["gb_per_s"] == 3.0


@pytest.mark.gpu
@pytest.mark.limit(150)
def test_a_short_run_writes_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    arguments = ["--quick", "--sizes", "64", "--rounds", "1", "--out", str(path)]
    assert gpu.main(arguments) == 0, capsys.readouterr().out
    found = json.loads(path.read_text())
    assert set(found["results"]) == {"argument", "echo"}
    assert found["results"]["echo"]["65536"]["actorrpc"]["gb_per_s"] > 0
    transfers, kills = found["memory"].values()
    assert transfers["through_device_memory"] > 900 * (16 << 20)
    assert transfers["before"]["allocated"] == transfers["after"]["allocated"]
    assert kills["before"]["allocated"] == kills["after"]["allocated"]
    assert kills["count"] == 10
