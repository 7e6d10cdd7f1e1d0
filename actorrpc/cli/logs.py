"""``actorrpc logs``: the output of the processes of clusters, which their drivers keep."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from actorrpc.errors import ConfigError, RpcError
from actorrpc.observe.findings import some
from actorrpc.observe.outside import FoundGroup, look
from actorrpc.observe.visitor import Question, Visit, names_by_pid

__all__ = ["Line", "Reader"]

_AGAIN_S: Final = 0.25
_DRIVER: Final = "the driver"
# In the description of a worker that has joined, before the address of its driver.
_JOINED: Final = " of the cluster at "
_NAMED: Final = 20  # greatest number of names that are listed if the requested worker does not exist


@dataclass(frozen=True, slots=True)
class Line:
    """A line that a process has printed.

    Attributes:
        number: increases with each line of its cluster; ``when``: seconds since 1970.
        pid, label: the id and the label of the process that has printed the line.
        is_error: whether the line was written to standard error.
        worker: the name of the process in the group; empty if it is no worker.
        host: the name of the process's host; empty if it is the driver's host.
    """

    number: int
    when: float
    pid: int
    label: str
    is_error: bool
    text: str
    worker: str = ""
    host: str = ""

    @classmethod
    def of(cls, row: Any) -> Line | None:
        """Return the line that a driver has sent as ``row``; None if ``row`` is not valid."""
        kinds = (int, float, int, str, bool, str, str, str)
        if isinstance(row, list) and len(row) == len(kinds) and all(map(isinstance, row, kinds)):
            return cls(*row)
        return None

    def __str__(self) -> str:
        host = f", host={self.host}" if self.host else ""
        return f"({self.label} pid={self.pid}{host}) {self.text}"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "time": self.when,
            "pid": self.pid,
            "label": self.label,
            "worker": self.worker,
            "host": self.host,
            "stream": "stderr" if self.is_error else "stdout",
            "text": self.text,
        }


class Reader:
    """Reads the logs of groups.

    Args:
        whom: only lines of the processes with this process id, label, or worker's name.
        grep: only lines in which this regular expression is found.
        last: how many of the existing lines are shown; None: all.

    Raises:
        ConfigError: ``grep`` is not a regular expression.
        RpcError: no driver answers.
    """

    def __init__(
        self,
        groups: list[FoundGroup],
        timeout: float,
        whom: str | None = None,
        grep: str = "",
        last: int | None = None,
    ) -> None:
        try:
            self._pattern = re.compile(grep)
        except re.error as error:
            raise ConfigError(f"--grep {grep!r} is not a regular expression: {error}") from error
        self._whom, self._last = whom, last
        self._timeout = timeout
        self._show: Callable[[Line], None] = lambda line: None
        self._keeps = False  # whether a driver keeps lines
        self._groups = groups
        self._visits: list[tuple[Visit, int]] = []
        self._known: set[str] = set()  # names of existing workers, and labels of the lines that were read
        self._pids: set[str] = set()
        problem: RpcError | OSError | None = None
        for group in groups:
            for target in group.targets:
                try:
                    visit = Visit(target, time.monotonic() + timeout)
                except (OSError, RpcError) as error:
                    problem = error
                    continue
                self._visits.append((visit, 1))
                break
        if not self._visits:
            raise RpcError(f"no driver has answered: {problem}")

    def begin(self, show: Callable[[Line], None]) -> None:
        """Call ``show`` for each line that exists; later, :meth:`more` calls ``show`` for new lines.

        Raises:
            RpcError: the queried processes keep no logs, because they are not drivers; or the wanted process does not exist.
        """
        self._show = show
        found = self._read()
        if found is None:
            places = "".join(f"\n  {each}" for each in self.places())
            drivers = [each.what.partition(_JOINED)[2] for each in self._groups if _JOINED in each.what]
            if drivers:
                raise RpcError(
                    "no logs are kept on this host: the driver of its workers keeps them. Run "
                    f"actorrpc logs --connect {drivers[0]}{places}"
                )
            raise RpcError(
                "no logs are kept: the workers were started by init_rpc(), a launcher or by hand, and their output goes where "
                f"their launcher has sent it{places}"
            )
        whom = self._whom
        if whom is not None and whom not in self._known and whom not in self._pids:
            more = f" and {len(self._known) - _NAMED} more" if len(self._known) > _NAMED else ""
            raise RpcError(
                f"there is no worker {whom!r}, and no process whose lines are kept; give one of these names, or a pid: "
                f"{', '.join(sorted(self._known)[:_NAMED])}{more}"
            )
        kept: deque[Line] = deque(found, maxlen=self._last)
        for line in kept:
            show(line)

    def places(self) -> list[str]:
        """Say where the output of workers goes, except of processes whose output only the driver keeps."""
        found: list[str] = []
        for group in self._groups:
            names: dict[tuple[str, str], list[str]] = {}
            for each in look(group, ["process"], self._timeout).state.workers:
                if each.output not in ("", _DRIVER) and (each.rank or not self._keeps):
                    names.setdefault((each.host, each.output), []).append(each.name)
            found += [
                f"{some(who)} (host {host}) writes to {output}" for (host, output), who in names.items()
            ]
        return found

    def follow(self) -> None:
        """Show new lines until the drivers have ended."""
        while self._visits:
            time.sleep(_AGAIN_S)
            self.more()

    def more(self) -> bool:
        """Show the lines that are new since the last call; return whether one of the drivers still runs."""
        for line in self._read() or ():
            self._show(line)
        return bool(self._visits)

    def _read(self) -> list[Line] | None:
        """Return the wanted lines since the last call, in order; None if no logs are kept."""
        lines: list[Line] = []
        keeps = False
        for place in reversed(range(len(self._visits))):
            visit, number = self._visits[place]
            try:
                until = time.monotonic() + self._timeout
                found = visit.query(Question(visit.target, ["logs", "members"], until, {"logs": number}))
            except (OSError, RpcError):
                visit.close()
                del self._visits[place]
                continue
            rows, end = found.get("logs"), found.get("log_end")
            if not isinstance(rows, list):
                continue
            keeps = self._keeps = True
            pids = names_by_pid(found)
            parsed = [line for line in map(Line.of, rows) if line is not None]
            self._known |= {*pids.values(), *(line.label for line in parsed)}
            self._pids |= {*map(str, pids), *(str(line.pid) for line in parsed)}
            lines += [line for line in parsed if self._is_wanted(line, pids)]
            following = parsed[-1].number + 1 if parsed else end
            self._visits[place] = visit, following if isinstance(following, int) else number
        return sorted(lines, key=lambda line: (line.when, line.number)) if keeps else None

    def _is_wanted(self, line: Line, pids: dict[int, str]) -> bool:
        if self._whom not in (None, str(line.pid), line.label, line.worker or pids.get(line.pid)):
            return False
        return self._pattern.search(line.text) is not None

    def close(self) -> None:
        """Hang up."""
        while self._visits:
            self._visits.pop()[0].close()
