"""``actorrpc top`` on a terminal: two live tables, the description of the selected actor, and its stacks.

Only that command imports this module, because it needs Textual (extra ``cli``). Threads read the state, because reading waits
for workers: one thread at a time for the tables, others for descriptions and stacks. All other code runs in the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from actorrpc.cli.views import ACTOR_COLUMNS, WORKER_COLUMNS, Column, Picture, activities, separated
from actorrpc.errors import RpcError
from actorrpc.observe.model import GroupState

__all__ = ["See", "Top"]

#: Reads the state of the selected groups; raises RpcError or OSError if no group can be read.
See = Callable[[list[str]], list[Picture]]

_PARTS: Final = ["process", "actors", "supervised", "holders"]
_FINDINGS: Final = 5  # greatest number of findings above the tables


def _text(value: str) -> Text:
    """Return a text without markup or control characters: names come from the job."""
    return Text("".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in value))


class _Table(DataTable[Text]):
    """A table that keeps the cursor's row when it is updated. A click on a title, ``<`` and ``>`` change the sort column."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("less_than_sign,comma", "sort(-1)", "sort", key_display="< >"),
        Binding("greater_than_sign,full_stop", "sort(1)", "sort", show=False),
        Binding("enter", "select_cursor", "describe"),
    ]

    def __init__(self, columns: Sequence[Column], sort: int, name_of: Callable[[Any], str], id: str) -> None:
        super().__init__(cursor_type="row", id=id)
        self._shown = columns
        self._name_of = name_of
        self._rows: Sequence[Any] = ()
        self._most = 0
        self.sorted_by = sort

    def show(self, rows: Sequence[Any], most: int) -> None:
        """Show the first ``most`` of these rows, by the sort column."""
        self._rows, self._most = rows, most
        column = self._shown[self.sorted_by]
        # Rows with equal values are ordered by name, so that they keep their order in each update.
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
        """The key of the row under the cursor; None if there are no rows."""
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
    """The output of ``describe`` or ``stack``; the key ``r`` updates it."""

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
        see: reads the state of the groups; takes at most some seconds.
        every: seconds between two reads of the state.
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
            WORKER_COLUMNS, 0, lambda row: f"{row.worker.name} {row.worker.pid}", "workers"
        )
        self._actor_table = _Table(ACTOR_COLUMNS, 3, lambda row: row.actor.actor_id, "actors")

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
        """Start a thread that reads the state, unless such a thread runs."""
        if not self._looks:  # send one request at a time: the group may answer slowly
            self._looks = True
            self.run_worker(self._look())

    async def _look(self) -> None:
        try:
            self._show(await asyncio.to_thread(self._see, _PARTS))
        except (RpcError, OSError) as error:  # the tables keep their contents
            self._head.update(_text(str(error)))
        finally:
            self._looks = False

    def _show(self, pictures: Sequence[Picture]) -> None:
        seen = [each.state for each in pictures]
        workers, actors = activities(self._before, seen)
        self._before = seen
        self._head.update(Text("\n").join(_text(each.title) for each in pictures))
        wrong = [each.what for picture in pictures for each in picture.findings if each.wrong]
        said = [f"* {each.splitlines()[0]}" for each in wrong[:_FINDINGS]]
        if len(wrong) > _FINDINGS:
            said.append(f"... and {len(wrong) - _FINDINGS} more: actorrpc status")
        self._wrong.update(Text("\n").join(map(_text, said)))
        self._worker_table.show(workers, len(workers))
        self._actor_table.show(actors, self._most)

    # -- the selected row ---------------------------------------------------------------------------------------------

    async def on_data_table_row_selected(self, event: _Table.RowSelected) -> None:
        if event.data_table is self._actor_table:
            await self.push_screen(_TextScreen(partial(self._described, event.row_key.value or "")))
        else:
            await self.action_stack()

    async def action_stack(self) -> None:
        """Show the stacks of the selected actor or worker."""
        table = self._worker_table if self._worker_table.has_focus else self._actor_table
        if table.selected is not None and len(self.screen_stack) == 1:
            await self.push_screen(_TextScreen(partial(self._stacks, table.selected)))

    def _described(self, actor_id: str) -> list[str]:
        pictures = self._see([*_PARTS, "threads"])
        found = [each.actor_lines(actor) for each in pictures for actor in each.actors_named(actor_id)]
        return separated(found) or ["it does not exist any longer"]

    def _stacks(self, name: str) -> list[str]:
        pictures = self._see([*_PARTS, "threads"])
        # Select by process id: workers of several groups may have the same name.
        found = [each.only(name.rpartition(" ")[2]) for each in pictures]
        lines = separated(each.stack_lines(True) for each in found if each is not None)
        return lines or ["it does not exist any longer"]
