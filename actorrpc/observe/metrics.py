"""Metrics of a group for Prometheus. A worker counts its calls until two minutes after the last scrape.

:class:`GroupCollector` is a collector for ``prometheus_client`` (extra ``metrics``). The metrics of calls have OpenTelemetry's
names for RPC, in Prometheus' spelling: https://opentelemetry.io/docs/specs/semconv/rpc/rpc-metrics/. Labels name classes and
methods, at most 200 of each, and not single actors, workers or processes, so that a large group does not create many time series.
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

#: the parts to request from each worker
PARTS: Final = ["process", "actors", "supervised", "metrics"]
_NAMES: Final = 200  # the most classes that have their own label value


class GroupCollector:
    """A collector for ``prometheus_client``, which queries the group at each scrape. Thread-safe.

    Args:
        look: queries the workers for :data:`PARTS`; returns the state of the group, and the answers by incarnation.
    """

    def __init__(self, look: Callable[[], tuple[GroupState, Mapping[str, Mapping[str, Any]]]]) -> None:
        self._look = look
        self._totals = CallTotals()
        self._lock = threading.Lock()  # guards the totals

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector does not query the group."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Query the group and return all metrics."""
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
                else "executions of calls, which exclude the time in mailboxes,"
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
            "Bytes of calls and answers, as counted by the callers",
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
        "actors", "Actors by class and state, including actors that died recently", ("class", "state"), actors
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
    yield gauge("restarts", "Restarts of the known actors", ("class",), restarts)
    yield gauge("mailbox_depth", "Calls that wait in mailboxes", ("class",), depth)
    yield gauge("mailbox_oldest_seconds", "How long the oldest waiting call has waited", ("class",), oldest)
    deadlocks = sum(len(each.deadlocks) for each in state.workers)
    yield gauge("deadlocks", "Latest broken deadlocks, at most 20 per worker", (), {(): float(deadlocks)})
