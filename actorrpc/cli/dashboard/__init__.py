"""``actorrpc dashboard``: a page for the browser, served by a process of its own that reads the state of a group from outside.

:mod:`~actorrpc.cli.dashboard.feed` reads the state at most once a second, while a browser has the page open.
:mod:`~actorrpc.cli.dashboard.payloads` converts the state into the data of the views, and :mod:`~actorrpc.cli.dashboard.server`
speaks HTTP (extra ``dashboard``) and decides who may see the data. The page is in ``static``: plain files, no build step.
"""

from __future__ import annotations

__all__: list[str] = []
