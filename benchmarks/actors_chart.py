"""The picture of a run with actors: bars on logarithmic scales."""

from __future__ import annotations

from pathlib import Path

from benchmarks.actors_sections import TENSOR_SIZES
from benchmarks.chart import Panel, sheet
from benchmarks.series import Key, Results

__all__ = ["draw_actors"]

_PLACES = {"own": "own CPUs", "one": "one CPU"}


def _panels() -> list[Panel]:
    """Return the panels of the picture."""

    def key(section: str, metric: str, placement: str = "both", case: str = "") -> Key:
        return Key(section, case, "same host", placement, metric)

    def placed(section: str, metric: str) -> dict[str, Key]:
        return {shown: key(section, metric, place) for place, shown in _PLACES.items()}

    fours = {
        f"{shown}\n{case}": key("4 actors to 4", "rate", place, case)
        for case in ("windows of 250", "single calls")
        for place, shown in _PLACES.items()
    }
    processes = {
        "8": key("actor creation", "time", case="8 processes"),
        "8, with torch": key("actor creation", "time", case="8 processes with torch"),
        "64": key("many processes", "time", case="64 processes"),
        "init()": key("start", "time", case="init"),
        "init() and\nfirst answer": key("start", "time", case="init and first answer"),
    }
    memory = {
        "8": key("actor creation", "private", case="8 processes"),
        "8, with torch": key("actor creation", "private", case="8 processes with torch"),
        "64": key("many processes", "private", case="64 processes"),
    }
    crowds = {
        f"{count} in\none worker": key("actors in one worker", "each", case=f"{count} actors")
        for count in (1000, 10_000)
    }
    moved = [
        (
            f"tensor: {direction}",
            "GB/s",
            {name: key("actor tensors", "rate", case=f"{direction} {name}") for name in TENSOR_SIZES},
            True,
        )
        for direction in ("argument", "result", "hand-over")
    ]
    return [
        ("one call, p50", "us", placed("actor call", "p50"), False),
        ("one call, p99", "us", placed("actor call", "p99"), False),
        ("one call, processor time of both sides", "us", placed("actor call", "cpu"), False),
        ("pipelined calls", "calls/s", placed("pipelined actor calls", "rate"), True),
        ("4 actors call 4", "calls/s", fours, True),
        (
            "1 to 8, fan-out and gather, p50",
            "us",
            {"1 to 8": key("fan-out and gather", "p50", case="1 to 8")},
            False,
        ),
        *moved,
        ("actor processes until all have answered", "ms", processes, False),
        ("private memory of an idle actor process", "MB", memory, False),
        ("a new actor in a running worker", "us each", crowds, False),
    ]


def draw_actors(path: Path, results: Results, caption: str) -> None:
    """Write the picture as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    sheet(path, results, caption, _panels())
