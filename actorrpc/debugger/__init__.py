"""The debugger: ``breakpoint()`` in a call holds that call, and ``actorrpc debug`` talks to it over the group's connections.

``prompt.py`` is pdb, reading and writing through a debug session. ``session.py`` is one held call: what was written and what is
to be read, who is attached, and how its callers' time is put off. ``debugger.py`` keeps the sessions of a worker and answers
front ends. ``entering.py`` brings a thread that runs into the debugger. The other side is in ``actorrpc.cli.debug``.
"""

from __future__ import annotations

__all__: list[str] = []
