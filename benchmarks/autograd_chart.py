"""The picture of a run of the autograd benchmark: bars, and the cost of a chain over its length."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.autograd_sections import HOPS, MODELS, WORLDS
from benchmarks.chart import COLOURS, Panel, measured, sheet
from benchmarks.series import Key, Results, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_autograd"]

HOST = "same host"
_PLACES = {"own": "own CPUs", "one": "one CPU"}


def _panels() -> list[Panel]:
    """Return the panels of the picture."""
    training = [
        (
            f"{'RNN' if section == 'rnn' else 'parameter server'}, {case}: a step",
            "ms",
            {
                f"{world} workers,\n{shown}": Key(section, f"{case}, {world} workers", HOST, place, "time")
                for world in WORLDS
                for place, shown in _PLACES.items()
            },
            False,
        )
        for section, cases in MODELS.items()
        for case in cases
    ]
    hop = {
        f"{world} workers,\n{shown}": Key("chain", f"each hop, {world} workers", HOST, place, "hop")
        for world in WORLDS
        for place, shown in _PLACES.items()
    }
    large = {
        f"{shown},\n{transport}": Key("activation", "64 MiB", transport, place, "both_ways")
        for transport in (HOST, "TCP")
        for place, shown in _PLACES.items()
    }
    passes = {case: Key("local pass", case, HOST, "own", "p50") for case in ("1 layer", "50 layers")}
    calls = {
        case.replace(", ", ",\n"): Key("recording", case, HOST, "own", "p50")
        for case in ("outside of a context", "in a context, no gradient", "in a context, recorded")
    }
    return [
        *training,
        ("one more hop, there and back", "us", hop, False),
        ("64 MiB activation and its gradient", "GB/s", large, True),
        ("a pass that stays on its worker", "us", passes, False),
        ("a call with 1 KiB", "us", calls, False),
    ]


def _chains(axes: Axes, results: Results, world: int, placement: str) -> None:
    """Draw the time of forward and backward over the number of hops."""
    for peer, colour in COLOURS.items():
        spots, times = [], []
        for hops in HOPS:
            case = f"{hops} hop{'s' if hops > 1 else ''}, {world} workers"
            found = summarise(results.values(Key("chain", case, HOST, placement, "p50"), peer))
            if found is not None:
                spots.append(hops)
                times.append(found.median)
        if times:
            axes.plot(spots, times, "o-", color=colour, markersize=4, linewidth=1.6)
    axes.set_xticks(HOPS, [str(hops) for hops in HOPS], fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_title(f"chain over {world} workers, {_PLACES[placement]} (less is better)", fontsize=10)
    axes.set_xlabel("hops", fontsize=8)
    axes.set_ylabel("us", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(alpha=0.25)


def draw_autograd(path: Path, results: Results, caption: str) -> None:
    """Write the picture as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    drawings = [
        partial(_chains, results=results, world=world, placement=place)
        for world in WORLDS
        for place in _PLACES
        if measured(results, Key("chain", f"1 hop, {world} workers", HOST, place, "p50"))
    ]
    sheet(path, results, caption, _panels(), drawings)
