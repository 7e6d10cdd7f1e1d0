"""Metrics of a group for Prometheus, by pull: in a job that nobody scrapes, nothing is counted.

:class:`GroupCollector` is a collector for ``prometheus_client`` (extra ``metrics``). Calls have OpenTelemetry's names for RPC, in
Prometheus' spelling: https://opentelemetry.io/docs/specs/semconv/rpc/rpc-metrics/. No label tells apart actors, workers or
processes: however many there are, the series are those of the classes and their methods, at most 200 of each.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from actorrpc.observe.call_sums import BUCKETS, OTHER, CallTotals
from actorrpc.observe.model import GroupState

__all__ = ["PARTS", "CallTotals", "GroupCollector"]

#: what is to be asked of each worker
PARTS: Final = ["process", "actors", "supervised", "metrics"]
_NAMES: Final = 200  # classes that are told apart


class GroupCollector:
    """A collector for ``prometheus_client``: looks at a group at each scrape.

    Args:
        look: returns how the group is, and the answers of its workers by incarnation (to :data:`PARTS`).
        calls: the sums over its calls; kept from one scrape to the next.

    Thread-safe: scrapes take turns.
    """

    def __init__(self, look: Callable[[], tuple[GroupState, Mapping[str, Mapping[str, Any]]]]) -> None:
        self._look = look
        self._totals = CallTotals()
        self._lock = threading.Lock()  # guards the totals

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering it looks at nothing."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return all metrics of the group, as it is now."""
        state, answers = self._look()
        with self._lock:
            for run, found in answers.items():
                self._totals.update(run, found)
            return [*self._calls(), *_of_state(state)]

    def _calls(self) -> Iterator[Metric]:
        labels = ("rpc_system_name", "rpc_method", "error_type")
        for side in ("client", "server"):
            text = (
                "calls that were made"
                if side == "client"
                else "calls that were executed, without their time in mailboxes"
            )
            family = HistogramMetricFamily(
                f"rpc_{side}_call_duration_seconds", f"How long {text} took", labels=labels
            )
            for (of, method, failed), (count, seconds, buckets) in sorted(self._totals.rows().items()):
                if of == side:
                    family.add_metric(
                        ("actorrpc", method, OTHER if failed else ""), _cumulative(buckets, count), seconds
                    )
            yield family
        bytes_family = CounterMetricFamily(
            "actorrpc_bytes",
            "Bytes of calls and answers, as their callers have seen them",
            labels=("direction",),
        )
        bytes_family.add_metric(("sent",), self._totals.total("sent"))
        bytes_family.add_metric(("received",), self._totals.total("received"))
        yield bytes_family
        yield CounterMetricFamily(
            "actorrpc_dropped_events",
            "Records of the flight recorders that were overwritten before they were counted",
            self._totals.total("dropped"),
        )


def _cumulative(buckets: list[int], count: int) -> list[tuple[str, float]]:
    found, total = [], 0
    for bound, number in zip(BUCKETS, buckets, strict=False):
        total += number
        found.append((f"{bound:g}", float(total)))
    return [*found, ("+Inf", float(count))]


def _of_state(state: GroupState) -> Iterator[Metric]:
    def gauge(name: str, text: str, labels: tuple[str, ...], rows: Mapping[tuple[str, ...], float]) -> Metric:
        family = GaugeMetricFamily(f"actorrpc_{name}", text, labels=labels)
        for key, value in sorted(rows.items()):
            family.add_metric(key, value)
        return family

    kinds = Counter(each.class_name for each in state.actors)
    told_apart = {kind for kind, _ in kinds.most_common(_NAMES)}

    def kind_of(name: str) -> str:
        return name if name in told_apart else OTHER

    workers: Counter[tuple[str, ...]] = Counter((each.state,) for each in state.workers)
    yield gauge("workers", "Workers by state", ("state",), workers)
    actors: Counter[tuple[str, ...]] = Counter(
        (kind_of(each.class_name), each.state) for each in state.actors
    )
    yield gauge(
        "actors", "Actors by class and state, those that died lately among them", ("class", "state"), actors
    )
    restarts: Counter[tuple[str, ...]] = Counter()
    depth: Counter[tuple[str, ...]] = Counter()
    oldest: dict[tuple[str, ...], float] = {}
    for actor in state.actors:
        kind = (kind_of(actor.class_name),)
        restarts[kind] += actor.restarts
        if actor.answered:
            depth[kind] += actor.waiting
            oldest[kind] = max(oldest.get(kind, 0.0), actor.oldest)
    yield gauge("restarts", "How often the actors that are known have been made again", ("class",), restarts)
    yield gauge("mailbox_depth", "Calls that wait in mailboxes", ("class",), depth)
    yield gauge(
        "mailbox_oldest_seconds", "How long the oldest call that waits has waited", ("class",), oldest
    )
    deadlocks = sum(len(each.deadlocks) for each in state.workers)
    yield gauge("deadlocks", "Deadlocks that were found lately", (), {(): float(deadlocks)})
