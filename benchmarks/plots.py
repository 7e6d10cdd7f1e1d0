"""Draw the plots of the documentation page on performance from ``benchmarks/results``: ``python -m benchmarks.plots``.

The background is transparent and the text grey, for light and dark pages. The same results give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["FIGURES", "Bar", "label", "main", "medians", "save", "sheet"]

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"
_IMAGES = _ROOT / "docs" / "images"
INK = "#7d848c"
OURS, THEIRS, OTHERS = "#2f81c7", "#d1603d", "#8f6bb3"
COLOURS = {"actorrpc": OURS, "torch": THEIRS, "ray": THEIRS, "monarch": OTHERS, "plain": INK}

Key = tuple[str, str, str, str, str]
"""Section, case, transport, placement and metric of a measurement."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A group of bars, one for each peer.

    Attributes:
        scale: the factor from the values to the unit of the axis.
    """

    name: str
    key: Key
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Panel:
    """One axis of a figure."""

    title: str
    unit: str
    peers: Sequence[str]
    bars: Sequence[Bar]


def _host(section: str, case: str, metric: str, placement: str = "own", transport: str = "same host") -> Key:
    return section, case, transport, placement, metric


_US, _K = 1.0, 1e-3
FIGURES: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "performance-rpc": (
        "core.json",
        (
            Panel(
                "a call, p50 (less is better)",
                "us",
                ("actorrpc", "torch"),
                (
                    Bar("own CPUs", _host("round trip", "", "p50")),
                    Bar("one CPU", _host("round trip", "", "p50", "one")),
                    Bar("TCP", _host("round trip", "", "p50", transport="TCP")),
                ),
            ),
            Panel(
                "calls in a row (more is better)",
                "1000 a second",
                ("actorrpc", "torch"),
                (
                    Bar("own CPUs", _host("pipelined", "", "rate"), _K),
                    Bar("one CPU", _host("pipelined", "", "rate", "one"), _K),
                    Bar("4 to 4", _host("4 to 4", "windows of 250", "rate"), _K),
                ),
            ),
            Panel(
                "tensors, one host (more is better)",
                "GB a second",
                ("actorrpc", "torch"),
                tuple(
                    Bar(size, _host("tensors", f"argument {size}", "rate"))
                    for size in ("1 MiB", "64 MiB", "256 MiB")
                ),
            ),
        ),
    ),
    "performance-actors": (
        "actors-quick.json",
        (
            Panel(
                "a call, p50 (less is better)",
                "us",
                ("actorrpc", "ray", "monarch"),
                (
                    Bar("own CPUs", _host("actor call", "", "p50")),
                    Bar("one CPU", _host("actor call", "", "p50", "one")),
                ),
            ),
            Panel(
                "calls in a row (more is better)",
                "1000 a second",
                ("actorrpc", "ray", "monarch"),
                (
                    Bar("own CPUs", _host("pipelined actor calls", "", "rate"), _K),
                    Bar("4 to 4", _host("4 actors to 4", "windows of 250", "rate"), _K),
                ),
            ),
            Panel(
                "64 MiB (more is better)",
                "GB a second",
                ("actorrpc", "ray", "monarch"),
                (
                    Bar("argument", _host("actor tensors", "argument 64 MiB", "rate", "both")),
                    Bar("result", _host("actor tensors", "result 64 MiB", "rate", "both")),
                ),
            ),
        ),
    ),
    "performance-gradients": (
        "autograd-quick.json",
        (
            Panel(
                "1 KiB through 8 hops and back (less is better)",
                "ms",
                ("actorrpc", "torch"),
                (
                    Bar("2 workers", _host("chain", "8 hops, 2 workers", "p50", "one"), _K),
                    Bar("4 workers", _host("chain", "8 hops, 4 workers", "p50", "one"), _K),
                ),
            ),
            Panel(
                "a pass within one worker (less is better)",
                "ms",
                ("actorrpc", "torch", "plain"),
                (Bar("50 layers", _host("local pass", "50 layers", "p50"), _K),),
            ),
            Panel(
                "64 MiB and its gradient (more is better)",
                "GB a second",
                ("actorrpc", "torch"),
                (
                    Bar("own CPUs", _host("activation", "64 MiB", "both_ways")),
                    Bar("one CPU", _host("activation", "64 MiB", "both_ways", "one")),
                ),
            ),
        ),
    ),
}


def medians(file: str) -> dict[tuple[Key, str], Mapping[str, Any]]:
    """Return the medians in a file of results, by measurement and peer."""
    found = json.loads((_RESULTS / file).read_text(encoding="utf-8"))
    names = ("section", "case", "transport", "placement", "metric")
    return {(tuple(each[name] for name in names), each["peer"]): each for each in found["series"]}  # type: ignore[misc]


def label(value: float) -> str:
    """Return a number as text with at most three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def sheet(panels: int, width: float = 9.6, height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """Return an empty figure and its axes, in colours for light and dark pages."""
    mpl.use("svg")
    mpl.rcParams.update(
        {
            "svg.hashsalt": "actorrpc",
            "svg.fonttype": "none",
            "font.size": 8,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "savefig.transparent": True,
        }
    )
    figure, axes = pyplot.subplots(1, panels, figsize=(width, height), layout="constrained", squeeze=False)
    return figure, list(axes[0])


def save(figure: Figure, file: Path) -> None:
    """Write a figure, without a date."""
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    text = file.read_text(encoding="utf-8")
    file.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def _draw(axes: Axes, panel: Panel, found: dict[tuple[Key, str], Mapping[str, Any]]) -> None:
    width = 0.8 / len(panel.peers)
    for at, peer in enumerate(panel.peers):
        for spot, bar in enumerate(panel.bars):
            each = found[bar.key, peer]
            value, x = each["median"] * bar.scale, spot + (at - (len(panel.peers) - 1) / 2) * width
            axes.bar(x, value, width * 0.9, color=COLOURS[peer], label=peer if spot == 0 else None)
            axes.plot([x, x], [each["low"] * bar.scale, each["high"] * bar.scale], color=INK, linewidth=0.8)
            axes.text(
                x, max(value, each["high"] * bar.scale), label(value), ha="center", va="bottom", fontsize=7
            )
    axes.set_xticks(range(len(panel.bars)), [bar.name for bar in panel.bars])
    axes.set_title(panel.title, fontsize=9)
    axes.set_ylabel(panel.unit)


def main() -> None:
    """Draw all of them."""
    for name, (file, panels) in FIGURES.items():
        found = medians(file)
        figure, axes = sheet(len(panels))
        for each, panel in zip(axes, panels, strict=True):
            _draw(each, panel, found)
        names = {
            name: bar for each in axes for bar, name in zip(*each.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            names.values(), names.keys(), loc="outside lower center", ncols=len(names), frameon=False
        )
        save(figure, _IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
