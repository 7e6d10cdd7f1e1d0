"""Modules that the fork server imports before it forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.drive import script
from tests.layers import rest_is_slow


def test_processes_share_a_preloaded_module(tmp_path: Path) -> None:
    (tmp_path / "preloaded.py").write_text(
        "import os, sys, torch\n"
        "WHERE, ARGUMENTS = os.getpid(), sys.argv[1:]\n"
        "torch.set_default_dtype(torch.float64)\n"
        "sys.setrecursionlimit(3000)\n"
    )
    program = """
        import actorrpc

        @actorrpc.remote
        def where():
            module = sys.modules["preloaded"]  # no code here imports it
            import torch
            assert torch.get_default_dtype() is torch.float64 and sys.getrecursionlimit() == 3000
            assert "torch._dynamo" in sys.modules  # the first optimizer would import it
            return module.WHERE, module.ARGUMENTS, os.getpid()

        with actorrpc.init(preload=["torch.optim", "preloaded"], num_cpus=2):
            found = actorrpc.get([where.remote(), where.remote()])
        assert len({imported for imported, _, _ in found}) == 1, found
        assert all(arguments == ["--size", "3"] for _, arguments, _ in found), found
        assert {imported for imported, _, _ in found}.isdisjoint([own for _, _, own in found] + [os.getpid()])
        print("shared")
        """
    with script(tmp_path, program, "--size", "3") as process:
        assert process.stdout is not None
        assert process.stdout.read() == "shared\n"
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("source", "reason"),
    rest_is_slow(
        [
            ("import missing_below", "ModuleNotFoundError: No module named 'missing_below'"),
            ("raise ValueError('not today')", "ValueError: not today"),
            ("raise SystemExit('usage')", "SystemExit: usage"),
            (
                "import threading\nthreading.Thread(target=threading.Event().wait, name='ticker', daemon=True).start()",
                "started the thread 'ticker'",
            ),
        ]
    ),
)
def test_actors_and_tasks_fail_with_the_cause_if_a_module_cannot_be_preloaded(
    tmp_path: Path, source: str, reason: str
) -> None:
    (tmp_path / "spoiled.py").write_text(source)
    program = """
        import actorrpc

        @actorrpc.remote
        class Counter:
            def one(self):
                return 1

        @actorrpc.remote
        def task():
            return 1

        with actorrpc.init(preload=["spoiled"]):
            try:
                actorrpc.get(Counter.remote().one.remote(), timeout=60)
            except actorrpc.ActorDiedError as error:
                print(type(error.__cause__).__name__, error)
            try:
                actorrpc.get(task.remote(), timeout=60)
            except actorrpc.errors.ConfigError as error:
                print(type(error).__name__, error.__cause__, error)
        """
    with script(
        tmp_path, program, prints=[r"init\(preload=\): the module 'spoiled' cannot be preloaded"]
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        assert process.wait(60) == 0
    of_actor, of_task = printed.splitlines()
    assert of_actor.startswith("ConfigError ")
    assert " is dead: init(preload=): the module 'spoiled' cannot be preloaded" in of_actor
    assert of_task.startswith("ConfigError None init(preload=): the module 'spoiled' cannot be preloaded")
    assert reason in of_actor
    assert reason in of_task
