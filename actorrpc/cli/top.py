"""``actorrpc top`` on a terminal: two live tables, the actor that the cursor is on, and where its threads are.

Loaded by that command alone, as it needs Textual, which the extra ``cli`` brings. Looks are taken on a thread, one at a time, as
they wait for workers; all else runs on the event loop of the application.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from actorrpc.cli.activity import rates, shares
from actorrpc.cli.text import amount, figure, latencies, runs, span
from actorrpc.cli.views import Picture, separated
from actorrpc.errors import RpcError
from actorrpc.observe.model import GroupState, ObservedActor, ObservedWorker

__all__ = ["See", "Top"]

#: Looks at all groups that are meant; raises RpcError or OSError where there are none.
See = Callable[[list[str]], list[Picture]]

_PARTS: Final = ["process", "actors", "supervised", "holders"]
_FINDINGS: Final = 5  # that are shown above the tables


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a table: its title, what it shows of a row, and by what rows are sorted.

    What is sorted by a number has the largest first.
    """

    title: str
    show: Callable[[Any], str]
    key: Callable[[Any], Any]

    @property
    def by_name(self) -> bool:
        return self.title in ("actor", "worker", "state")


@dataclass(frozen=True, slots=True)
class _WorkerRow:
    worker: ObservedWorker
    share: float | None


@dataclass(frozen=True, slots=True)
class _ActorRow:
    """An actor, with what the process in which it lives uses."""

    actor: ObservedActor
    rate: float | None
    home: _WorkerRow | None

    @property
    def share(self) -> float | None:
        return self.home.share if self.home is not None else None

    @property
    def memory(self) -> int:
        return self.home.worker.memory if self.home is not None else 0


def _or_less(value: float | None) -> float:
    return -1.0 if value is None else value


_OF_WORKERS: Final = (
    _Column("worker", lambda row: row.worker.name, lambda row: (row.worker.rank, row.worker.name)),
    _Column(
        "state", lambda row: row.worker.state, lambda row: (row.worker.state == "alive", row.worker.state)
    ),
    _Column("cpu %", lambda row: figure(row.share), lambda row: _or_less(row.share)),
    _Column("memory", lambda row: amount(row.worker.memory), lambda row: row.worker.memory),
    _Column("fds", lambda row: str(row.worker.descriptors), lambda row: row.worker.descriptors),
    _Column("threads", lambda row: str(row.worker.thread_count), lambda row: row.worker.thread_count),
    _Column("calls out", lambda row: str(row.worker.outgoing_count), lambda row: row.worker.outgoing_count),
    _Column(
        "queued",
        lambda row: str(row.worker.pool.get("queued", 0)),
        lambda row: row.worker.pool.get("queued", 0),
    ),
)
_OF_ACTORS: Final = (
    _Column("actor", lambda row: row.actor.title, lambda row: row.actor.title),
    _Column("worker", lambda row: row.actor.worker, lambda row: row.actor.worker),
    _Column("state", lambda row: row.actor.state.lower(), lambda row: row.actor.state),
    _Column("waiting", lambda row: str(row.actor.waiting), lambda row: (row.actor.waiting, row.actor.oldest)),
    _Column(
        "oldest",
        lambda row: span(row.actor.oldest) if row.actor.waiting else "-",
        lambda row: row.actor.oldest,
    ),
    _Column("calls/s", lambda row: figure(row.rate), lambda row: _or_less(row.rate)),
    _Column("p50", lambda row: latencies(row.actor)[0], lambda row: row.actor.p50),
    _Column("p99", lambda row: latencies(row.actor)[1], lambda row: row.actor.p99),
    _Column("cpu %", lambda row: figure(row.share), lambda row: _or_less(row.share)),
    _Column("memory", lambda row: amount(row.memory) if row.memory else "", lambda row: row.memory),
    _Column(
        "runs", lambda row: runs(row.actor, row.home and row.home.worker), lambda row: len(row.actor.running)
    ),
)


def _text(value: str) -> Text:
    """Return a text as it is: names are the job's, and neither markup nor what a terminal obeys."""
    return Text("".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in value))


class _Table(DataTable[Text]):
    """Rows that stay where the cursor is when they are shown anew; a click on a title, ``<`` and ``>`` sort by another column."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("less_than_sign,comma", "sort(-1)", "sort", key_display="< >"),
        Binding("greater_than_sign,full_stop", "sort(1)", "sort", show=False),
        Binding("enter", "select_cursor", "describe"),
    ]

    def __init__(self, columns: Sequence[_Column], sort: int, name_of: Callable[[Any], str], id: str) -> None:
        super().__init__(cursor_type="row", id=id)
        self._shown = columns
        self._name_of = name_of
        self._rows: Sequence[Any] = ()
        self._most = 0
        self.sorted_by = sort

    def show(self, rows: Sequence[Any], most: int) -> None:
        """Show these rows, the first ones of them by the column that is sorted by."""
        self._rows, self._most = rows, most
        column = self._shown[self.sorted_by]
        # Rows that are equal by it stand in the order of their names, in each look.
        ordered = sorted(rows, key=self._name_of)
        ordered.sort(key=column.key, reverse=not column.by_name)
        under = self.selected
        top = self.scroll_y
        self.clear(columns=True)
        for place, each in enumerate(self._shown):
            self.add_column(_text(each.title + (" *" if place == self.sorted_by else "")), key=str(place))
        for row in ordered[:most]:
            self.add_row(*(_text(each.show(row)) for each in self._shown), key=self._name_of(row))
        for place, row in enumerate(ordered[:most]):
            if self._name_of(row) == under:
                self.move_cursor(row=place, scroll=False)
                self.scroll_to(y=top, animate=False)

    @property
    def selected(self) -> str | None:
        """What names the row that the cursor is on; None where there are no rows."""
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def action_sort(self, step: int) -> None:
        self.sorted_by = (self.sorted_by + step) % len(self._shown)
        self.show(self._rows, self._most)

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        self.sorted_by = event.column_index
        self.show(self._rows, self._most)


class _WorkerTable(_Table):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "stack")]


class _TextScreen(Screen[None]):
    """What ``describe`` or ``stack`` would print, looked at once more each time that ``r`` is pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "back"),
        Binding("r", "again", "look again"),
    ]

    def __init__(self, lines: Callable[[], list[str]]) -> None:
        super().__init__()
        self._lines = lines

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(_text("asking ..."), id="text")
        yield Footer()

    def on_mount(self) -> None:
        self.action_again()

    def action_again(self) -> None:
        self.run_worker(self._look(), exclusive=True)

    async def _look(self) -> None:
        try:
            lines = await asyncio.to_thread(self._lines)
        except (RpcError, OSError) as error:
            lines = [str(error)]
        self.query_one("#text", Static).update(Text("\n").join(map(_text, lines)))


class Top(App[None]):
    """The application.

    Args:
        see: looks at the groups, in at most some seconds.
        every: seconds between two looks.
        most: how many actors are shown.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #title { height: auto; text-style: bold; }
    #findings { height: auto; max-height: 12; }
    #workers { height: auto; max-height: 40%; margin-bottom: 1; }
    #actors { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "stack", "stack"),
        Binding("tab", "app.focus_next", "other table"),
        Binding("q,ctrl+c", "quit", "quit"),
    ]

    def __init__(self, see: See, every: float, most: int) -> None:
        super().__init__()
        self._see = see
        self._every = every
        self._most = most
        self._before: list[GroupState] = []
        self._looks = False
        self._head = Static(_text("asking ..."), id="title")
        self._wrong = Static(id="findings")
        self._worker_table = _WorkerTable(
            _OF_WORKERS, 0, lambda row: f"{row.worker.name} {row.worker.pid}", "workers"
        )
        self._actor_table = _Table(_OF_ACTORS, 3, lambda row: row.actor.actor_id, "actors")

    def compose(self) -> ComposeResult:
        yield self._head
        yield self._wrong
        yield self._worker_table
        yield self._actor_table
        yield Footer()

    def on_mount(self) -> None:
        self._actor_table.focus()
        self.look_again()
        self.set_interval(self._every, self.look_again)

    def look_again(self) -> None:
        """Begin a look, unless there is one under way."""
        if not self._looks:  # a group that answers slowly is not asked twice at once
            self._looks = True
            self.run_worker(self._look())

    async def _look(self) -> None:
        try:
            self._show(await asyncio.to_thread(self._see, _PARTS))
        except (RpcError, OSError) as error:  # what was seen last stays
            self._head.update(_text(str(error)))
        finally:
            self._looks = False

    def _show(self, pictures: Sequence[Picture]) -> None:
        seen = [each.state for each in pictures]
        rate, share = rates(self._before, seen), shares(self._before, seen)
        self._before = seen
        self._head.update(Text("\n").join(_text(each.title) for each in pictures))
        wrong = [each.what for picture in pictures for each in picture.findings if each.wrong]
        said = [f"* {each.splitlines()[0]}" for each in wrong[:_FINDINGS]]
        if len(wrong) > _FINDINGS:
            said.append(f"... and {len(wrong) - _FINDINGS} more: actorrpc status")
        self._wrong.update(Text("\n").join(map(_text, said)))
        workers: list[_WorkerRow] = []
        actors: list[_ActorRow] = []
        for state in seen:
            homes = {each.name: _WorkerRow(each, share.get((each.name, each.pid))) for each in state.workers}
            workers += homes.values()
            actors += [
                _ActorRow(each, rate.get(each.actor_id), homes.get(each.worker))
                for each in state.actors
                if each.state != "DEAD"
            ]
        self._worker_table.show(workers, len(workers))
        self._actor_table.show(actors, self._most)

    # -- one of them ---------------------------------------------------------------------------------------------

    async def on_data_table_row_selected(self, event: _Table.RowSelected) -> None:
        if event.data_table is self._actor_table:
            await self.push_screen(_TextScreen(partial(self._described, event.row_key.value or "")))
        else:
            await self.action_stack()

    async def action_stack(self) -> None:
        """Show the stacks of what the cursor is on."""
        table = self._worker_table if self._worker_table.has_focus else self._actor_table
        if table.selected is not None and len(self.screen_stack) == 1:
            await self.push_screen(_TextScreen(partial(self._stacks, table.selected)))

    def _described(self, actor_id: str) -> list[str]:
        pictures = self._see([*_PARTS, "threads"])
        found = [each.actor_lines(actor) for each in pictures for actor in each.actors_named(actor_id)]
        return separated(found) or ["it is not there any more"]

    def _stacks(self, name: str) -> list[str]:
        pictures = self._see([*_PARTS, "threads"])
        # A worker is meant by its process as well: those of several groups may have one name.
        found = [each.only(name.rpartition(" ")[2]) for each in pictures]
        lines = separated(each.stack_lines(True) for each in found if each is not None)
        return lines or ["it is not there any more"]
