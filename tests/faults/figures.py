"""Figures of tests under load: what a process takes, and where what was measured is written down.

Each `note` is printed and, where the variable ACTORRPC_FIGURES names a file, added to it as one line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["NIGHTLY", "Taken", "note"]

NIGHTLY = os.environ.get("ACTORRPC_NIGHTLY") == "1"


@dataclass(frozen=True, slots=True)
class Taken:
    """What this process has taken of the machine.

    Memory of the process jumps as the allocator likes; the number of objects that the collector knows tells of a leak exactly.
    """

    rss_mb: float
    threads: int
    descriptors: int
    cpu_s: float
    objects: int

    @classmethod
    def now(cls, *, collect: bool = True) -> Taken:
        """Look at this process; garbage first."""
        if collect:
            gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            rss_mb=round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
            threads=threading.active_count(),
            descriptors=len(os.listdir("/proc/self/fd")),
            cpu_s=round(time.process_time(), 2),
            objects=len(gc.get_objects()) if collect else 0,
        )


def note(title: str, figures: Mapping[str, Any]) -> None:
    """Write figures down."""
    row = {
        "what": title,
        **{name: asdict(each) if isinstance(each, Taken) else each for name, each in figures.items()},
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    text = json.dumps(row)
    print(text)
    path = os.environ.get("ACTORRPC_FIGURES")
    if path:
        with open(path, "a") as file:
            file.write(text + "\n")
