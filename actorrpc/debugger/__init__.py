"""The debugger: ``breakpoint()`` stops a call, and ``actorrpc debug`` controls it over the group's connections.

``prompt.py`` is a pdb that reads and writes through a debug session. ``session.py`` is the session of one stopped call, with its
input, its output and its front end. ``debugger.py`` manages the sessions of a worker and answers front ends. ``entering.py``
makes a running thread enter the debugger. The front end is in ``actorrpc.cli.debug``.
"""

from __future__ import annotations

__all__: list[str] = []
