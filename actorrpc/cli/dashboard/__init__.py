"""``actorrpc dashboard``: a page for the browser, served by a process of its own that reads the state of a group from outside.

:mod:`~actorrpc.cli.dashboard.feed` reads it once a second, and only while a browser has the page open;
:mod:`~actorrpc.cli.dashboard.payloads` makes of it what the views show; :mod:`~actorrpc.cli.dashboard.access` says who may see
it; :mod:`~actorrpc.cli.dashboard.server` speaks HTTP (extra ``dashboard``). The page is in ``static``:
plain files, no build step.
"""

from __future__ import annotations

__all__: list[str] = []
