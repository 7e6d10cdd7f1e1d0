"""Add to the report of a failed test the stacks of its processes at the failure, and the command that repeats it."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from typing import Any

import pytest

from actorrpc.cluster.api import ClusterContext
from actorrpc.testing import processes
from actorrpc.testing.pytest_plugin import WATCHDOG

_STACKS = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Save the stacks of a cluster when a failure leaves its ``with`` block: the cluster has ended when the report is made."""
    plain = ClusterContext.__exit__

    def leave(context: ClusterContext, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None and issubclass(kind, AssertionError | TimeoutError):
            item.stash[_STACKS] = processes.dump_stacks(item.config.stash[WATCHDOG].of_test())
        plain(context, kind, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClusterContext, "__exit__", leave)
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the stacks, the cause and the command to the report of a failure."""
    report = yield
    if not report.failed:
        return report
    if call.when == "call":
        stacks = item.stash.get(_STACKS, "") or processes.dump_stacks(item.config.stash[WATCHDOG].of_test())
        if stacks:
            report.sections.append(("processes of the test as it failed", stacks))
    cause = None if call.excinfo is None else call.excinfo.value.__cause__
    if cause is not None:  # near the end of the report: a log may keep only its end
        report.sections.append(("its cause", "".join(traceback.format_exception(cause))[-2000:]))
    seed = item.config.getoption("randomly_seed", None)
    order = f" --randomly-seed={seed}" if isinstance(seed, int) else ""
    file, _, rest = item.nodeid.partition("::")
    report.sections.append(
        ("to repeat it", f"python -m pytest -m ''{order} '{file}'\n(alone: '{file}::{rest}')")
    )
    return report
