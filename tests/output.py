"""Fail each test whose processes print or log a line that the test did not announce.

    @pytest.mark.prints(r"worker 'w1' died", r"Traceback.*ValueError: wanted")

The check covers the standard error of the test's processes (with their logs of level WARNING and above, as they have no other
handler), log records of level WARNING and above of the test process, and tracebacks and ignored exceptions on standard
output. Text is split into *entries*: a line, with the traceback that follows it. A pattern is searched in the whole entry, and
its ``.`` matches line ends. Announced entries are optional; a test of such an entry asserts that it is printed. Output that a
test reads itself (``capfd``, a pipe) is not covered: the test passes it to :func:`unasked` or :func:`check`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Iterable
from typing import Any

import pytest

__all__ = ["check", "entries", "unasked"]

_MARK = "prints"
_PREFIX = re.compile(r"^\([^()\n]* pid=\d+\) ")  # the driver's prefix of lines that its workers print
_OUR_HEADERS = re.compile(r"^--- (errors|output) of rank \d+ ---$|^---$")
_CONTINUES = re.compile(
    r"^\s|^Traceback \(most recent call last\)|^Extension modules:|^The above exception was|^During handling of the above"
    r"|^(Current thread|Thread) 0x|^\[repeated \d+x|^ResourceWarning: Enable tracemalloc"
    r"|^Exception raised from \w+ at |^frame #\d+: |^<omitting python frames>"  # the stack of a C++ error of torch
)
# torch's stores print this on a host without a name server.
_WITHOUT_NETWORK = re.compile(
    r"^\[W\d+ \S+ socket\.cpp:\d+\] \[c10d\] The hostname of the client socket cannot be retrieved"
)
# Tests of the handshake, and a run of the suite with ACTORRPC_TLS=off, do not encrypt connections.
_PLAIN = re.compile(r"^(WARNING actorrpc\.links: )?TCP connections of '[^']*' are not encrypted ")
# Many tests kill workers that have joined. Slow starts of processes depend on the machine, so their warnings are ignored.
_IGNORED = re.compile(
    r"^(WARNING actorrpc\.cluster: )?(worker '[^']*' \(pid \d+\) on host '[^']*' died: "
    r"|(scale\(\d+\)|init\(\) on rank \d+|init_rpc on rank \d+|joining|the Ray engine) waits for )"
)
_ON_STDOUT = re.compile(
    r"^(Traceback \(most recent call last\)|Exception ignored in|\S+:\d+: ResourceWarning)", re.MULTILINE
)
_FORMAT = logging.Formatter("%(levelname)s %(name)s: %(message)s")


def entries(text: str) -> list[str]:
    """Split a text into entries: each line, with the traceback or the indented lines after it."""
    found: list[list[str]] = []
    in_traceback = False  # the last line of a traceback, with the exception, is not indented
    for raw in text.splitlines():
        line = _PREFIX.sub("", raw).rstrip()
        if any(ignored.match(line) for ignored in (_OUR_HEADERS, _WITHOUT_NETWORK, _IGNORED, _PLAIN)):
            in_traceback = False
            continue
        if not line:
            continue
        continues = bool(_CONTINUES.match(line))
        if found and (continues or in_traceback):
            found[-1].append(line)
        else:
            found.append([line])
        if line.startswith("Traceback (most recent call last)"):
            in_traceback = True
        elif not continues:
            in_traceback = False
    return ["\n".join(lines) for lines in found]


def unasked(text: str, announced: Iterable[str] = ()) -> list[str]:
    """Return the entries of a text that match no announced pattern."""
    patterns = [re.compile(pattern, re.DOTALL) for pattern in announced]
    return [entry for entry in entries(text) if not any(pattern.search(entry) for pattern in patterns)]


def check(text: str, *announced: str, what: str = "a process") -> None:
    """Fail if ``text``, the standard error of a process, has an unannounced entry."""
    found = unasked(text, announced)
    if found:
        pytest.fail(f"{what} printed unasked:\n" + "\n".join(found), pytrace=False)


class _Records(logging.Handler):
    """Keeps the log records of the test that runs. ``emit`` runs on any thread, under the handler's own lock."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(_FORMAT)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    def pop_all(self) -> list[str]:
        texts, self.texts = self.texts, []
        return texts


_records = _Records()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and add the handler that keeps log records."""
    config.addinivalue_line(
        "markers", f"{_MARK}(*patterns): what the test's processes may write to stderr or log"
    )
    logging.getLogger().addHandler(_records)


def pytest_unconfigure() -> None:
    """Remove the handler."""
    logging.getLogger().removeHandler(_records)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test at its teardown for unannounced entries."""
    report = yield
    if call.when != "teardown" or item.config.getoption("capture") == "no":
        return report
    announced = [pattern for mark in item.iter_markers(_MARK) for pattern in mark.args]
    found = [f"log: {text}" for record in _records.pop_all() for text in unasked(record, announced)]
    for title, text in report.sections:
        if title.startswith("Captured stderr"):
            found += unasked(text, announced)
        elif title.startswith("Captured stdout") and _ON_STDOUT.search(text):
            found += [entry for entry in unasked(text, announced) if _ON_STDOUT.search(entry)]
    if found and report.passed and not item.stash.get(_FAILED_OTHERWISE, False):
        report.outcome = "failed"
        report.longrepr = (
            f"printed unasked (announce it with @pytest.mark.{_MARK}, or fix it):\n" + "\n".join(found)
        )
    return report


_FAILED_OTHERWISE = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_exception_interact(node: Any) -> None:
    """Remember that a test failed for another reason, which its report shows instead."""
    if isinstance(node, pytest.Item):
        node.stash[_FAILED_OTHERWISE] = True
