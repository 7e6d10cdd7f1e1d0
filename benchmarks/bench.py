"""One run of the benchmarks: its rounds, its workers, its results.

Sections use a :class:`Bench` to start the groups that they compare and to record their answers. A group
that fails is noted and leaves ``None`` in its series; the run continues. Runs on the driver's only thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from benchmarks.rigs import PEERS, Placement, Rig, RigError, Stable, placements
from benchmarks.series import Key, Results

__all__ = ["Bench", "Member"]


class Member(NamedTuple):
    """One compared configuration: its name in the tables, and the transport."""

    peer: str
    transport: str = "same host"


class Bench:
    """The groups, results and notes of a run, used by all sections."""

    __slots__ = ("_known", "placements", "quick", "results", "rounds", "stable")

    def __init__(self, stable: Stable, *, rounds: int, quick: bool) -> None:
        self.stable, self.rounds, self.quick = stable, rounds, quick
        self.results = Results()
        self.placements = placements()
        self._known: set[str] = set()

    def places(self, *names: str) -> list[Placement]:
        """Return the placements with these names that this machine has."""
        found = [self.placements[name] for name in names if name in self.placements]
        if len(found) < len(names):
            self.note("only one CPU is allowed: nothing is measured on two")
        return found

    def say(self, text: str) -> None:
        """Print the progress of the run."""
        print(text, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Add a remark to the report, unless it has it already."""
        if text not in self._known:
            self._known.add(text)
            self.results.notes.append(text)
            self.say(f"  note: {text}")

    def start(
        self, member: Member, placement: Placement, *, pairs: int = 1, solo: bool = False
    ) -> Rig | None:
        """Start one group, or note why it does not start."""
        try:
            return Rig.start(self.stable, PEERS[member], placement, pairs=pairs, solo=solo)
        except RigError as error:
            self.note(
                f"{' '.join(member)} did not start: {str(error).splitlines()[-1]}; {self.stable.news()}"
            )
            return None

    @contextmanager
    def groups(
        self, members: list[Member], placement: Placement, *, pairs: int = 1, solo: bool = False
    ) -> Iterator[dict[Member, Rig | None]]:
        """Run one group for each member, all alive at the same time; end them on leaving."""
        rigs: dict[Member, Rig | None] = {}
        try:
            for member in members:
                rig = rigs[member] = self.start(member, placement, pairs=pairs, solo=solo)
                if rig is not None:
                    rig.pause()
            yield rigs
        finally:
            for rig in rigs.values():
                if rig is not None:
                    rig.close()

    def record(
        self,
        section: str,
        member: Member,
        placement: str,
        rig: Rig | None,
        measure: Callable[[Rig], dict[str, float]],
        metrics: tuple[str, ...],
        *,
        case: str = "",
    ) -> None:
        """Measure one member in one round, and append the values to its series."""
        answer: dict[str, float] = {}
        if rig is not None and not rig.broken:
            rig.resume()
            try:
                answer = measure(rig)
            except RigError as error:
                rig.broken = True
                what = f"{section} {case} {' '.join(member)} {placement}: {str(error).splitlines()[-1]}"
                self.note(f"{what}; {self.stable.news()}")
            finally:
                rig.pause()
        for metric in metrics:
            key = Key(section, case, member.transport, placement, metric)
            self.results.add(key, member.peer, answer.get(metric))
