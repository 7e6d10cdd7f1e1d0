"""A red test explains itself: the stacks of its processes as it failed, and the command that repeats it."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from actorrpc.testing import processes

_BEFORE = pytest.StashKey[set[processes.ProcessId]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note which processes are not this test's."""
    item.stash[_BEFORE] = processes.descendants()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failure what is needed to understand it."""
    report = yield
    if not report.failed:
        return report
    if call.when == "call":
        own = processes.of_session() - item.stash.get(_BEFORE, set())
        stacks = processes.dump_stacks(
            process for process in own if process.pid not in processes.helper_pids()
        )
        if stacks:
            report.sections.append(("processes of the test as it failed", stacks))
    seed = item.config.getoption("randomly_seed", None)
    order = f" --randomly-seed={seed}" if isinstance(seed, int) else ""
    file, _, rest = item.nodeid.partition("::")
    report.sections.append(
        ("to repeat it", f"python -m pytest -m ''{order} '{file}'\n(alone: '{file}::{rest}')")
    )
    return report
