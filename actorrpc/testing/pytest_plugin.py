"""A plugin for pytest: limits each test's time, and checks that a test leaves nothing behind.

To load it, put this into the ``conftest.py`` of the tests' top folder (or use ``pytest -p actorrpc.testing.pytest_plugin``)::

    pytest_plugins = ["actorrpc.testing.pytest_plugin"]

Each of set-up, call and teardown of a test may then take 60 s, or the time given by ``@pytest.mark.limit(seconds)`` or
``--limit SECONDS`` (0: no limit, as with ``--pdb``). A test that takes longer fails. The failure shows the stacks of the test's
process and of the processes that the test has started, which are killed. ``--times N`` runs each test N times, for tests whose
outcome depends on timing. Tests with the fixture :func:`no_leaks` fail if they leave anything behind::

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

__all__ = ["WATCHDOG", "charge", "no_leaks"]

WATCHDOG = pytest.StashKey[Watchdog]()
"""The key of the watchdog in the configuration's stash."""

_RAISED = pytest.StashKey[bool]()  # in a test's stash: whether the test has raised


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("actorrpc")
    group.addoption("--limit", type=float, default=60.0, help="seconds that a test may take (0: no limit)")
    group.addoption(
        "--leak-wait",
        type=float,
        default=leaks.WAIT,
        help="seconds within which threads and processes of a test must end",
    )
    group.addoption("--times", type=int, default=1, help="run each test so many times in a row")


@pytest.hookimpl(trylast=True)  # after the test's own parameters, so that a test's runs follow each other
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat each test ``--times`` times."""
    times = metafunc.config.getoption("--times")
    if times > 1:
        metafunc.fixturenames.append("_run_number")
        metafunc.parametrize("_run_number", range(times), ids=[f"run{number}" for number in range(times)])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Begin a session, and start the watchdog's thread."""
    config.addinivalue_line("markers", "limit(seconds): how long the test may take; 60 s by default")
    # pytest runs these clean-ups in reverse order.
    processes.begin_session()
    config.add_cleanup(processes.end_session)
    runtime = processes.scratch() / "run"
    runtime.mkdir(mode=0o700)
    patch = pytest.MonkeyPatch()
    patch.setenv("ACTORRPC_RUNTIME_DIR", str(runtime))
    config.add_cleanup(patch.undo)
    stderr = os.fdopen(os.dup(2), "w", errors="replace")  # before pytest captures descriptor 2
    config.add_cleanup(stderr.close)
    config.stash[WATCHDOG] = Watchdog(stderr)
    config.add_cleanup(config.stash[WATCHDOG].close)


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
    if "no_leaks" not in getattr(item, "fixturenames", ()):  # no_leaks calls keep() itself
        watchdog.keep(processes.of_session())
    with watchdog.guard(_limit(item)):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Limit the time of the test itself, and of the teardown."""
    with item.config.stash[WATCHDOG].guard(_limit(item)):
        return (yield)


pytest_runtest_teardown = pytest_runtest_call


# -- nothing is left behind ----------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record whether a test has raised."""
    if call.excinfo is not None:
        item.stash[_RAISED] = True
    return (yield)


def charge(found: leaks.Leaks) -> NoReturn:
    """Fail the test because of its leaks, and kill the leaked processes, so that they do not disturb later tests."""
    text = str(found)
    processes.kill(found.processes)
    pytest.fail(f"left behind:\n{text}", pytrace=False)


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if the test leaves anything behind that did not exist before.

    Checks threads, processes, descriptors, shared memory and files of the runtime directory; and, if the test process is a
    worker before and after, RRefs, autograd contexts, calls and large objects. If the test itself has failed, its traceback
    keeps variables alive; so leaks are only reported, and leaked processes are killed.
    """
    before = leaks.LeakSnapshot.capture()
    request.config.stash[WATCHDOG].keep(before.processes)
    yield
    raised = request.node.stash.get(_RAISED, False)
    wait = 0.0 if raised else request.config.getoption("--leak-wait")
    found = leaks.settle(before, wait)
    if found:
        if not raised:
            charge(found)
        request.node.add_report_section("teardown", "left behind", str(found))
        processes.kill(found.processes)
