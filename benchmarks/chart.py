"""The picture of a run: bars and lines on logarithmic scales, one panel for each thing that matters most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import number
from benchmarks.sections import TENSOR_SIZES
from benchmarks.series import Key, Results, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "Panel", "draw", "measured", "sheet"]

#: Title, unit, bars (label -> key of the measurement) and whether more is better.
Panel = tuple[str, str, dict[str, Key], bool]

COLOURS = {
    "torch": "#d1603d",
    "ray": "#d1603d",
    "ray numpy": "#e9b39f",
    "monarch": "#8f6bb3",
    "actorrpc": "#1f6fb2",
    "no spin": "#7fb2dd",
    "proxy": "#7fb2dd",
    "plain": "#8a8a8a",
    "rpc_sync": "#5fae7b",
    "raw": "#8a8a8a",
    "memcpy": "#c4c4c4",
}
PLACES = {"own": "own CPUs", "one": "one CPU", "both": "2 CPUs"}


def _plain(axes: Axes) -> None:
    """Label a logarithmic axis with plain numbers."""
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    axes.tick_params(axis="y", labelsize=8)
    axes.set_axisbelow(True)


def bars(axes: Axes, results: Results, title: str, unit: str, keys: dict[str, Key], *, more: bool) -> None:
    """Draw a group of bars for each key that was measured, on an axis of whole decades."""
    found = {
        (spot, peer): summary
        for spot, key in enumerate(keys.values())
        for peer in COLOURS
        if (summary := summarise(results.values(key, peer))) is not None
    }
    peers = [peer for peer in COLOURS if any(drawn == peer for _, drawn in found)]
    width = 0.84 / max(1, len(peers))
    positive = [end for summary in found.values() for end in (summary.low, summary.high) if end > 0] or [1.0]
    bottom = 10.0 ** math.floor(math.log10(min(positive) * 0.7))
    top = 10.0 ** (math.log10(max(positive)) + 0.12 * math.log10(10 * max(positive) / bottom))
    axes.set_yscale("log")
    axes.set_ylim(bottom, max(top, bottom * 10))
    for (spot, peer), summary in found.items():
        x = spot + (peers.index(peer) - (len(peers) - 1) / 2) * width
        if summary.median > 0:
            low, high = max(summary.low, bottom), summary.high
            axes.bar(x, summary.median, width * 0.92, color=COLOURS[peer])
            axes.plot([x, x], [low, high], color="black", linewidth=0.8, alpha=0.6)
        label = number(summary.median)
        spot_y = max(summary.high, bottom) * 1.04
        axes.text(x, spot_y, label, ha="center", va="bottom", fontsize=6.5, in_layout=False)
    axes.set_xlim(-0.55, len(keys) - 0.45)
    axes.set_xticks(range(len(keys)), list(keys), fontsize=8)
    axes.set_title(f"{title} ({'more' if more else 'less'} is better)", fontsize=10)
    axes.set_ylabel(unit, fontsize=8)
    axes.grid(axis="y", alpha=0.25)
    _plain(axes)


def _sizes(axes: Axes, results: Results, direction: str, transport: str) -> None:
    """Draw GB/s over the size of the tensor."""
    for peer, colour in COLOURS.items():
        spots, rates = [], []
        for name, size in TENSOR_SIZES.items():
            # A memory copy uses no transport, so it is recorded once.
            which = "same host" if peer == "memcpy" else transport
            key = Key("tensors", f"{direction} {name}", which, "own", "rate")
            found = summarise(results.values(key, peer))
            if found is not None:
                spots.append(size)
                rates.append(found.median)
        if rates:
            axes.plot(spots, rates, "o-", color=colour, markersize=4, linewidth=1.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    names = [name for name in TENSOR_SIZES if name not in ("64 KiB", "4 MiB", "64 MiB")]
    axes.set_xticks([TENSOR_SIZES[name] for name in names], names, fontsize=7)
    axes.minorticks_off()
    axes.set_title(f"tensor as {direction}, {transport}, own CPUs (more is better)", fontsize=10)
    axes.set_ylabel("GB/s", fontsize=8)
    axes.grid(alpha=0.25)
    _plain(axes)


def measured(results: Results, key: Key) -> bool:
    """Return whether a series of any peer has a value for this key."""
    return any(summarise(values) is not None for values in results.series.get(key, {}).values())


def sheet(
    path: Path,
    results: Results,
    caption: str,
    panels: Iterable[Panel],
    drawings: Sequence[Callable[[Axes], None]] = (),
) -> None:
    """Write a picture of panels of bars, as far as anything was measured, and of other drawings behind them, as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib  # noqa: PLC0415 - a run without matplotlib is still a run

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    shown_panels = [
        (title, unit, shown, more)
        for title, unit, keys, more in panels
        if (shown := {name: key for name, key in keys.items() if measured(results, key)})
    ]
    rows = max(1, -(-(len(shown_panels) + len(drawings)) // 3))
    figure, grid = pyplot.subplots(
        rows, 3, figsize=(17, 4.3 * rows + 0.6), layout="constrained", squeeze=False
    )
    spots = iter(grid.flat)
    for title, unit, keys, more in shown_panels:
        bars(next(spots), results, title, unit, keys, more=more)
    for drawing in drawings:
        drawing(next(spots))
    for spot in spots:
        spot.set_visible(False)
    drawn = {peer for key, peers in results.series.items() for peer in peers if measured(results, key)}
    handles = [Patch(color=colour, label=peer) for peer, colour in COLOURS.items() if peer in drawn]
    figure.legend(handles=handles, loc="outside upper center", ncols=max(1, len(handles)), frameon=False)
    figure.supxlabel(caption, fontsize=8)
    figure.savefig(path, format="png", dpi=110)
    pyplot.close(figure)


def draw(path: Path, results: Results, caption: str) -> None:
    """Write the picture as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """

    def pairs(section: str, metric: str) -> dict[str, Key]:
        return {
            f"{PLACES[place]},\n{transport}": Key(section, "", transport, place, metric)
            for transport in ("same host", "TCP")
            for place in ("own", "one", "both")
        }

    fours = {
        f"{PLACES[place]}\n{case}": Key("4 to 4", case, "same host", place, "rate")
        for case in ("windows of 250", "single calls")
        for place in ("own", "one")
    } | {"2 CPUs,\nping-pong": Key("oversubscribed", "", "same host", "both", "rate")}
    starts = {
        f"{ranks}\nworkers": Key("start-up", f"{ranks} workers, file store", "same host", "both", "time")
        for ranks in (2, 4, 8)
    }
    rest = {
        "idle:\nus/s of processor": Key("idle", "", "same host", "own", "cpu_idle"),
        "memory:\nMB resident": Key("memory", "", "same host", "both", "rss"),
        "memory:\nMB private": Key("memory", "", "same host", "both", "uss"),
    }
    games = {
        f"1 observer,\n{PLACES[place]}": Key("reinforce", "1 observer", "same host", place, "steps")
        for place in ("own", "one")
    }
    panels: list[Panel] = [
        ("round trip, p50", "us", pairs("round trip", "p50"), False),
        ("round trip, p99", "us", pairs("round trip", "p99"), False),
        ("round trip, processor time of both sides", "us a call", pairs("round trip", "cpu"), False),
        ("pipelined calls", "calls/s", pairs("pipelined", "rate"), True),
        ("4 callers to 4 callees", "calls/s", fours, True),
        ("callee busy in Python, p50", "us", pairs("busy callee", "p50"), False),
        ("start of a group", "ms", starts, False),
        ("an idle pair, and a worker's memory", "", rest, False),
        ("reinforce.py", "environment steps/s", games, True),
    ]
    lines = [("argument", "same host"), ("echo", "same host"), ("argument", "TCP")]
    if not any(key.section == "tensors" for key in results.series):
        lines = []
    drawings = [partial(_sizes, results=results, direction=where, transport=way) for where, way in lines]
    sheet(path, results, caption, panels, drawings)
