"""A plugin for pytest: a limit on each test's time, and a check that a test leaves nothing behind.

It is not loaded by itself. In the ``conftest.py`` of the tests' top folder::

    pytest_plugins = ["actorrpc.testing.pytest_plugin"]

(or ``pytest -p actorrpc.testing.pytest_plugin``). Then each of set-up, call and teardown of a test may take 60 s, or what
``@pytest.mark.limit(seconds)`` or ``--limit SECONDS`` say (0: any time, as with ``--pdb``); a test that takes longer fails
with the stacks of its process and of those that it has started, which are killed. ``--times N`` runs each test N times, as
a test that passes once proves little about what depends on timing. And tests with the fixture
:func:`no_leaks` fail if they leave anything behind::

    pytestmark = pytest.mark.usefixtures("no_leaks")      # all tests of a module

The session has a private runtime directory (``ACTORRPC_RUNTIME_DIR``), so that files of other programs are not taken for
leaks. Linux only.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

import pytest

from actorrpc.testing import leaks, processes
from actorrpc.testing.watchdog import Watchdog

__all__ = ["WATCHDOG", "charge", "no_leaks", "no_leaks_in_module"]

WATCHDOG = pytest.StashKey[Watchdog]()
"""Where the configuration keeps what limits the time of tests."""

_RAISED = pytest.StashKey[bool]()  # on a test
_LEFT = pytest.StashKey[bool]()  # on a module
_RUNTIME = "ACTORRPC_RUNTIME_DIR"
_runtime_before: list[str | None] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("actorrpc")
    group.addoption("--limit", type=float, default=60.0, help="seconds that a test may take (0: any)")
    group.addoption(
        "--leak-wait", type=float, default=leaks.WAIT, help="seconds until what a test started must be gone"
    )
    group.addoption("--times", type=int, default=1, help="run each test so many times, one after the other")


@pytest.hookimpl(trylast=True)  # behind the test's own parameters: its runs follow each other
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make ``--times`` tests of one."""
    times = metafunc.config.getoption("--times")
    if times > 1:
        metafunc.fixturenames.append("_run_number")
        metafunc.parametrize("_run_number", range(times), ids=[f"run{number}" for number in range(times)])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Begin a session, and start the thread that watches the time."""
    config.addinivalue_line("markers", "limit(seconds): how long the test may take; 60 s by default")
    processes.begin_session()
    _runtime_before.append(os.environ.get(_RUNTIME))
    os.environ[_RUNTIME] = str(processes.scratch() / "run")
    os.mkdir(os.environ[_RUNTIME], mode=0o700)
    stderr = os.fdopen(os.dup(2), "w", errors="replace")  # before pytest captures descriptor 2
    config.stash[WATCHDOG] = Watchdog(stderr)
    config.add_cleanup(stderr.close)
    config.add_cleanup(config.stash[WATCHDOG].close)  # cleanups run last in, first out


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End the session."""
    if _runtime_before:
        processes.end_session()
        before = _runtime_before.pop()
        if before is None:
            del os.environ[_RUNTIME]
        else:
            os.environ[_RUNTIME] = before


# -- the limit -----------------------------------------------------------------------------------


def _limit(item: pytest.Item) -> float:
    if item.config.option.usepdb:
        return 0.0
    mark = item.get_closest_marker("limit")
    return float(mark.args[0] if mark else item.config.getoption("--limit"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Limit the time of the set-up."""
    watchdog = item.config.stash[WATCHDOG]
    if "no_leaks" not in getattr(item, "fixturenames", ()):  # which looks for itself
        watchdog.keep(processes.of_session())
    with watchdog.guard(_limit(item)):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Limit the time of the test itself."""
    with item.config.stash[WATCHDOG].guard(_limit(item)):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Limit the time of the teardown."""
    with item.config.stash[WATCHDOG].guard(_limit(item)):
        return (yield)


# -- nothing is left behind ----------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note whether a test has raised."""
    if call.excinfo is not None:
        item.stash[_RAISED] = True
    return (yield)


def charge(found: leaks.Leaks) -> NoReturn:
    """Fail because of what was left behind, and kill the processes among it, so that they disturb no later test."""
    text = str(found)
    processes.kill(found.processes)
    pytest.fail(f"left behind:\n{text}", pytrace=False)


@pytest.fixture(scope="module")
def no_leaks_in_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if the fixtures of a module leave anything; what a test left was that test's failure already."""
    before = leaks.LeakSnapshot.take()
    yield
    if not request.node.stash.get(_LEFT, False):
        found = leaks.settle(before, request.config.getoption("--leak-wait"))
        if found:
            charge(found)


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if the test leaves anything behind that was not there before.

    Threads, processes, descriptors, shared memory and files of the runtime directory; and, where the test process is a
    worker before and after, RRefs, autograd contexts and calls. A test that has failed is not charged, as its traceback
    keeps its variables alive: what it left is shown.
    """
    before = leaks.LeakSnapshot.take()
    request.config.stash[WATCHDOG].keep(before.processes)
    yield
    raised = request.node.stash.get(_RAISED, False)
    wait = 0.0 if raised else request.config.getoption("--leak-wait")
    found = leaks.settle(before, wait)
    if found:
        module = request.node.getparent(pytest.Module)
        if module is not None:
            module.stash[_LEFT] = True
        if not raised:
            charge(found)
        request.node.add_report_section("teardown", "left behind", str(found))
        processes.kill(found.processes)
