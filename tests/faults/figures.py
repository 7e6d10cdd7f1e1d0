"""Measurements of tests under load: the resources of a process, and a log of figures.

`note` prints figures and, if the variable ACTORRPC_FIGURES names a file, adds them to it as one line of JSON.
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
    """Resources that this process uses.

    Resident memory jumps with the allocator; the number of objects of the garbage collector shows leaks exactly.
    """

    rss_mb: float
    threads: int
    descriptors: int
    cpu_s: float
    objects: int

    @classmethod
    def now(cls, *, collect: bool = True) -> Taken:
        """Measure this process, after a garbage collection if ``collect``."""
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
    """Print figures, and add them to the file of ACTORRPC_FIGURES."""
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
