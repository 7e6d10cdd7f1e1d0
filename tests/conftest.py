"""What holds for every test: a limit on its time, and that it leaves nothing behind.

    @pytest.mark.limit(120)           # seconds for each of set-up, call and teardown; 60 by default

`--limit SECONDS` changes the default (0: none, as with `--pdb`).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

import hypothesis
import pytest

from tests import leaks, processes
from tests.watchdog import Watchdog

# Before anything imports torch: one thread in each process, as there are many.
os.environ.setdefault("OMP_NUM_THREADS", "1")
processes.begin_session()
os.environ["ACTORRPC_RUNTIME_DIR"] = str(processes.scratch() / "run")
os.mkdir(os.environ["ACTORRPC_RUNTIME_DIR"], mode=0o700)

# No assertion on time, in examples neither; the same examples in each run of the CI.
hypothesis.settings.register_profile(
    "actorrpc",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("actorrpc")

_WATCHDOG = pytest.StashKey[Watchdog]()
_RAISED = pytest.StashKey[bool]()  # on a test
_LEFT = pytest.StashKey[bool]()  # on a module


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--limit", type=float, default=60.0, help="seconds that a test may take (0: any)")
    parser.addoption(
        "--leak-wait", type=float, default=leaks.WAIT, help="seconds until what a test started must be gone"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "limit(seconds): how long the test may take; 60 s by default")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script that starts pytest in the background makes it ignore Ctrl-C, and all that it starts: but
        # what Ctrl-C does is something to test.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    stderr = os.fdopen(os.dup(2), "w", errors="replace")  # before pytest captures descriptor 2
    config.stash[_WATCHDOG] = Watchdog(stderr)
    config.add_cleanup(stderr.close)
    config.add_cleanup(config.stash[_WATCHDOG].close)  # cleanups run last in, first out


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Have the collector leave alone what is there for good: it is asked after every test what that has left."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    helpers = processes.helper_pids()
    left = {process for process in processes.of_session() if process.pid not in helpers}
    if left:
        print("\nleft behind by the session:", *map(processes.describe, sorted(left)), sep="\n  ")
        processes.kill(left)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure() -> None:
    group = sys.modules.get("tests.group")
    if group is not None:
        group.stop_server()
    processes.end_session()


# -- the limit -----------------------------------------------------------------------------------


def _limit(item: pytest.Item) -> float:
    if item.config.option.usepdb:
        return 0.0
    mark = item.get_closest_marker("limit")
    return float(mark.args[0] if mark else item.config.getoption("--limit"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    with item.config.stash[_WATCHDOG].guard(_limit(item)):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    with item.config.stash[_WATCHDOG].guard(_limit(item)):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    with item.config.stash[_WATCHDOG].guard(_limit(item)):
        return (yield)


# -- nothing is left behind ----------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.excinfo is not None:
        item.stash[_RAISED] = True
    return (yield)


def _charge(found: leaks.Leaks) -> NoReturn:
    text = str(found)
    processes.kill(found.processes)  # they must not disturb later tests
    pytest.fail(f"left behind:\n{text}", pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Find what the fixtures of a module leave; what a test left was that test's failure already."""
    before = leaks.Snapshot.take()
    yield
    if not request.node.stash.get(_LEFT, False):
        found = leaks.settle(before, request.config.getoption("--leak-wait"))
        if found:
            _charge(found)


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest, _module_leaves_nothing: None) -> Iterator[None]:
    before = leaks.Snapshot.take()
    request.config.stash[_WATCHDOG].keep(before.processes)
    yield
    raised = request.node.stash.get(_RAISED, False)
    # A traceback keeps the test's variables alive: then what is there now is shown, but is no verdict.
    wait = 0.0 if raised else request.config.getoption("--leak-wait")
    found = leaks.settle(before, wait)
    if found:
        request.node.getparent(pytest.Module).stash[_LEFT] = True
        if not raised:
            _charge(found)
        request.node.add_report_section("teardown", "left behind", str(found))
        processes.kill(found.processes)
