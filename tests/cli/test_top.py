"""``actorrpc top`` on a terminal: the tests press keys and read the screen."""

from __future__ import annotations

import asyncio
import os
import pty
from collections.abc import Awaitable, Callable

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

import actorrpc
from actorrpc.cli.top import Top
from actorrpc.cli.views import Picture
from tests.cluster.drive import python
from tests.dashboard.fakes import FakeGroup, actor_row

_NAME = "Store('[red]\x1b]0;title\x07')"
_CLEANED = "Store('[red]\ufffd]0;title\ufffd')"


def _group() -> FakeGroup:
    """A fake group of two workers, of which the second is stopped; actor n has n calls in its mailbox."""
    frames = [{"function": "work", "file": "/job.py", "line": 7}]
    return FakeGroup(
        [actor_row(number, title=_NAME if number == 1 else f"Store#{number}") for number in range(3)],
        [{"ident": 1, "name": "of Store#2", "frames": frames}],
    )


def _run_on_screen(group: FakeGroup, steps: Callable[[Top, Pilot[None]], Awaitable[None]]) -> None:
    """Run ``steps`` on the screen; looks happen only in steps, as the interval is an hour."""

    async def run() -> None:
        top = Top(lambda parts: [Picture.of(group.see(parts))], 3600.0, 20)
        async with top.run_test(size=(140, 40)) as pilot:
            await top.workers.wait_for_complete()
            await pilot.pause()
            await steps(top, pilot)

    asyncio.run(run())


def _table(top: Top, name: str) -> list[list[str]]:
    shown = top.screen_stack[0].query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in shown.get_row_at(place)] for place in range(shown.row_count)]


def _text(top: Top, name: str) -> str:
    return str(top.screen.query_one(f"#{name}", Static).content)


def _footer(top: Top) -> list[str]:
    return [each.binding.description for each in top.screen.active_bindings.values() if each.binding.show]


async def _look(top: Top, pilot: Pilot[None]) -> None:
    top.look_again()
    await top.workers.wait_for_complete()
    await pilot.pause()


def test_top_shows_findings_workers_and_actors_with_full_mailboxes_first() -> None:
    group = _group()

    async def steps(top: Top, pilot: Pilot[None]) -> None:
        assert "pid 100: 2 workers, 3 actors" in _text(top, "title")
        assert "* worker 'Store-1' (pid 101) is stopped" in _text(top, "findings")
        assert _table(top, "actors")[0][0] == "Store#2"  # the actor with the fullest mailbox is first
        group.actors[2] |= {"age": 11.0, "calls_done": 702}
        await _look(top, pilot)
        assert _table(top, "workers") == [
            ["driver", "alive", "50", "3.0 MiB", "", "", "0", "0"],
            ["Store-1", "stopped", "-", "", "", "", "0", "0"],
        ]
        actor = "|".join(_table(top, "actors")[0])
        assert actor == "Store#2|driver|alive|2|2.0 s|700|-|-|50|3.0 MiB|-"
        # Control characters in names are replaced.
        assert _table(top, "actors")[1][0] == _CLEANED

    _run_on_screen(group, steps)


def test_keys_open_the_description_and_the_stack_of_an_actor() -> None:
    group = _group()

    async def steps(top: Top, pilot: Pilot[None]) -> None:
        for key, text in (("enter", "calls done"), ("s", "1 thread of")):
            await pilot.press(key)
            await top.workers.wait_for_complete()
            await pilot.pause()
            assert text in _text(top, "text")
            assert "threads" in group.asked[-1]
            await pilot.press("escape")
        assert _footer(top).count("describe") == 1
        await pilot.press("tab")  # the table of workers, above
        assert "describe" not in _footer(top)
        await pilot.press("enter")
        await pilot.pause()
        await top.workers.wait_for_complete()
        await pilot.pause()
        assert "work  /job.py:7" in _text(top, "text")
        await pilot.press("q")
        assert len(top.screen_stack) == 1

    _run_on_screen(group, steps)


def test_an_unreachable_group_is_reported_and_the_last_tables_stay() -> None:
    group = _group()

    async def steps(top: Top, pilot: Pilot[None]) -> None:
        group.problem = "no group has answered"
        await _look(top, pilot)
        assert _text(top, "title") == "no group has answered"
        assert len(_table(top, "actors")) == 3

    _run_on_screen(group, steps)


@actorrpc.remote
class Idle:
    pass


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_top_ends_at_q_and_ctrl_c_on_a_terminal(key: bytes) -> None:
    with actorrpc.init(num_cpus=2, log_to_driver=False):
        idle = Idle.remote()
        actorrpc.get(actorrpc.ready(idle))
        ours, theirs = pty.openpty()
        try:
            command = ("-m", "actorrpc", "top", "--pid", str(os.getpid()), "--timeout", "30")
            streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
            with python(*command, env={"TERM": "xterm"}, **streams) as process:
                os.close(theirs)
                seen = b""
                while b"Idle#" not in seen:
                    seen += os.read(ours, 65536)
                os.write(ours, key)
                try:
                    while os.read(ours, 65536):
                        pass
                except OSError:  # EIO: the terminal was closed
                    pass
                assert process.wait() == 0
        finally:
            os.close(ours)
