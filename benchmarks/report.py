"""Results as text and as JSON. Pure but for :func:`write_json`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.series import Key, Results, Summary, ratio, summarise
from benchmarks.targets import TARGETS, Target, Verdict, judge

__all__ = ["as_document", "cell", "number", "table", "text", "verdict_table", "write_json"]

PEER_ORDER = (
    "torch",
    "ray",
    "ray numpy",
    "monarch",
    "actorrpc",
    "plain",
    "rpc_sync",
    "one caller",
    "without",
    "proxy",
    "no spin",
    "no lane",
    "switch 0.5 ms",
    "raw",
    "memcpy",
)
COMPARED = ("torch", "ray", "monarch", "rpc_sync", "one caller", "without", "plain", "raw", "memcpy")

METRICS: dict[str, str] = {
    "p50": "p50, us",
    "p99": "p99, us",
    "p999": "p99.9, us",
    "longest": "the longest, us",
    "full": "full collections of the garbage of both processes",
    "cpu": "processor time of both sides, us a call",
    "extra": "us more than a call without arguments",
    "rate": "calls a second",
    "time": "ms",
    "rss": "resident MB above a process with torch imported",
    "uss": "private MB above a process with torch imported",
    "cpu_idle": "processor time of both sides, us a second",
    "wakes": "wake-ups a second",
    "growth": "MB per 100 000 calls, the worse process",
    "steps": "environment steps a second",
    "gather": "ms to call all of them and have their answers",
    "private": "private MB of an idle actor process, the median one",
    "pss": "MB of all of them (a page that n share counts 1/n to each)",
    "each": "us to make one and have its first answer",
    "weight": "private KiB of the worker for each actor",
    "step_cpu": "processor time of all workers, us a step",
    "forward": "forward, us",
    "backward": "backward, us",
    "hop": "us for each further hop",
    "both_ways": "GB/s, the tensor and its gradient",
    "fresh": "GB/s, into memory that was not used before",
    "next": "ms of one get, the median of those after the first",
    "memory": "memory of the host while all have it, in times its size",
    "put_all": "ms to put all of them",
    "get_all": "ms to get all of them",
    "handed": "ms until the other actor has it, once it is made",
    "there": "us to get each of a tenth of them in an actor",
}
_IN_BYTES = ("tensors", "object put", "object hand-over")  # sections whose rates are of bytes
TENSOR_METRICS = {"rate": "GB/s", "cpu": "processor time of both sides, s per GB"}


def metric_title(key: Key) -> str:
    """Return what a metric means in its section, with its unit."""
    if key.section.endswith(_IN_BYTES) and key.metric in TENSOR_METRICS:
        return TENSOR_METRICS[key.metric]
    return METRICS.get(key.metric, key.metric)


def number(value: float) -> str:
    """Format a number with three significant digits, in plain notation."""
    size = abs(value)
    if size >= 1e4:
        return f"{value:,.0f}".replace(",", " ")
    if size >= 100 or value == 0:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.1:
        return f"{value:.2f}"
    return f"{value:.3g}"


def cell(summary: Summary | None) -> str:
    """Format a median and, after more than one round, the ends of the spread."""
    if summary is None:
        return "-"
    if summary.rounds == 1:
        return number(summary.median)
    return f"{number(summary.median)} [{number(summary.low)}..{number(summary.high)}]"


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table whose columns are aligned."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def line_of(cells: list[str]) -> str:
        return "| " + " | ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line_of(head), rule, *(line_of(row) for row in lines[1:])])


def _order(peers: Iterable[str]) -> list[str]:
    known = {peer: place for place, peer in enumerate(PEER_ORDER)}
    return sorted(peers, key=lambda peer: (known.get(peer, len(known)), peer))


def section_table(results: Results, section: str, metric: str) -> str:
    """Return the table of one metric of one section; ratios are taken round by round."""
    keys = [key for key in results.series if key.section == section and key.metric == metric]
    peers = _order({peer for key in keys for peer in results.series[key]})
    others = [peer for peer in COMPARED if peer in peers and "actorrpc" in peers]
    head = ["case", "transport", "CPUs", *peers, *(f"actorrpc / {other}" for other in others)]
    rows = []
    for key in keys:
        row = [key.case or section, key.transport, key.placement]
        row += [cell(summarise(results.values(key, peer))) for peer in peers]
        ours = results.values(key, "actorrpc")
        row += [cell(summarise(ratio(ours, results.values(key, other)))) for other in others]
        rows.append(row)
    return table(head, rows)


def verdict_table(verdicts: Iterable[Verdict]) -> str:
    """Return the table of the targets."""
    answers = {True: "yes", False: "no", None: "not measured"}
    rows = [[v.target.text, cell(v.measured), v.target.bound, answers[v.reached]] for v in verdicts]
    return table(["figure", "measured", "target", "reached"], rows)


def _judged(results: Results, targets: Iterable[Target]) -> list[Verdict]:
    measured = {key.section for key in results.series}
    return [judge(results, target) for target in targets if target.key.section in measured]


def text(results: Results, meta: dict[str, Any], targets: Iterable[Target] = TARGETS) -> str:
    """Return the whole report: every table, the targets, the reasons for those missed, and the notes."""
    parts = [f"{name}: {value}" for name, value in meta.items()]
    for section in results.sections():
        metrics = dict.fromkeys(key.metric for key in results.series if key.section == section)
        for metric in metrics:
            title = metric_title(Key(section, "", "", "", metric))
            parts.append(f"\n{section}: {title}; median [lowest..highest] over the rounds\n")
            parts.append(section_table(results, section, metric))
    verdicts = _judged(results, targets)
    if verdicts:
        parts += ["\ntargets (the median decides)\n", verdict_table(verdicts)]
    missed = [v for v in verdicts if v.reached is False]
    parts += [f"- {v.target.text}: {v.target.why or 'not reached; no reason known yet'}" for v in missed]
    parts += [f"note: {note}" for note in results.notes]
    return "\n".join(parts)


def as_document(
    results: Results, meta: dict[str, Any], targets: Iterable[Target] = TARGETS
) -> dict[str, Any]:
    """Return all measurements as plain data, including the values of each round."""
    series = []
    for key, peers in results.series.items():
        for peer, values in peers.items():
            found = summarise(values)
            series.append(
                {
                    **key._asdict(),
                    "meaning": metric_title(key),
                    "peer": peer,
                    "values": values,
                    "median": None if found is None else found.median,
                    "low": None if found is None else found.low,
                    "high": None if found is None else found.high,
                }
            )
    judged = [
        {
            "text": v.target.text,
            "target": v.target.bound,
            "measured": None if v.measured is None else v.measured.median,
            "low": None if v.measured is None else v.measured.low,
            "high": None if v.measured is None else v.measured.high,
            "reached": v.reached,
            "why": v.target.why if v.reached is False else "",
        }
        for v in _judged(results, targets)
    ]
    return {"meta": meta, "series": series, "targets": judged, "notes": results.notes}


def write_json(
    path: Path, results: Results, meta: dict[str, Any], targets: Iterable[Target] = TARGETS
) -> None:
    """Write the document."""
    path.write_text(json.dumps(as_document(results, meta, targets), indent=1) + "\n", encoding="utf-8")
