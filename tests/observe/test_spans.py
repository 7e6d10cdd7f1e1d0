"""OpenTelemetry spans: one tree for calls through several processes, and no overhead for unsampled calls."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

import actorrpc
from actorrpc import rpc
from tests.actors.e2e.kit import until

pytestmark = [pytest.mark.limit(60)]

_exporter = InMemorySpanExporter()


def _install() -> None:
    """Install an SDK in this process, as a program would."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(_exporter))
    trace.set_tracer_provider(provider)


def _ended_spans() -> list[dict[str, Any]]:
    """Return the spans that have ended in this process."""
    found = _exporter.get_finished_spans()
    return [
        {
            "name": each.name,
            "kind": each.kind.name,
            "trace": each.context.trace_id,
            "id": each.context.span_id,
            "parent": each.parent.span_id if each.parent else 0,
            "attributes": dict(each.attributes or {}),
            "events": [event.name for event in each.events],
            "error": each.status.status_code.name == "ERROR",
            "begun": each.start_time,
            "ended": each.end_time,
        }
        for each in found
    ]


@actorrpc.remote
class Node:
    def __init__(self, install: bool = True) -> None:
        if install:
            _install()

    def spans(self) -> list[dict[str, Any]]:
        return _ended_spans()

    def add(self, number: int) -> int:
        return number + 1

    def pass_on(self, other: Any) -> int:
        return int(actorrpc.get(other.add.remote(1)))

    def numbers(self, other: Any) -> Iterator[int]:
        for number in range(2):
            yield actorrpc.get(other.add.remote(number))

    def current(self) -> int:
        return trace.get_current_span().get_span_context().span_id


@actorrpc.remote
class AsyncNode:
    def __init__(self) -> None:
        _install()

    def spans(self) -> list[dict[str, Any]]:
        return _ended_spans()

    async def pass_on(self, other: Any) -> int:
        return int(await other.add.remote(1))

    async def numbers(self, other: Any) -> Any:
        for number in range(2):
            yield await other.add.remote(number)

    def plain(self, other: Any) -> int:
        return int(actorrpc.get(other.add.remote(1)))


@pytest.fixture(scope="module")
def embedded() -> Iterator[None]:
    with actorrpc.init(num_cpus=4, log_to_driver=False, otel=True):
        _install()
        yield


def _tracer() -> Any:
    return trace.get_tracer("the test")


def _tree(root: Any, *actors: Any) -> dict[int, dict[str, Any]]:
    """Return the spans of the trace of an ended span, by id."""
    wanted = root.get_span_context().trace_id
    rows = [*_ended_spans(), *(each for one in actors for each in actorrpc.get(one.spans.remote()))]
    return {each["id"]: each for each in rows if each["trace"] == wanted}


def _path(tree: dict[int, dict[str, Any]], leaf: dict[str, Any]) -> list[tuple[str, str]]:
    """Return kinds and names from a span up to the root."""
    found = [(leaf["kind"], leaf["name"])]
    while leaf["parent"] in tree:
        leaf = tree[leaf["parent"]]
        found.append((leaf["kind"], leaf["name"]))
    return found


def _leaves(tree: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    parents = {each["parent"] for each in tree.values()}
    return [each for each in tree.values() if each["id"] not in parents]


def _one_path(root: Any, *actors: Any, spans: int) -> list[tuple[str, str]]:
    until(lambda: len(_tree(root, *actors)) == spans)
    tree = _tree(root, *actors)
    (leaf,) = _leaves(tree)
    path = _path(tree, leaf)
    assert len(path) == spans
    return path


_ONWARDS = [("SERVER", "Node/add"), ("CLIENT", "Node/add")]


@pytest.mark.usefixtures("embedded")
def test_calls_through_three_processes_form_one_tree_of_spans() -> None:
    first, last = Node.remote(), Node.remote()
    with _tracer().start_as_current_span("root") as root:
        # The first call waits until the actor is created, and another thread sends it.
        assert actorrpc.get(first.pass_on.remote(last)) == 2
    assert _one_path(root, first, last, spans=5) == [
        *_ONWARDS,
        ("SERVER", "Node/pass_on"),
        ("CLIENT", "Node/pass_on"),
        ("INTERNAL", "root"),
    ]
    tree = _tree(root, first, last)
    for each in tree.values():
        if each["name"] != "root":
            assert each["attributes"]["rpc.system.name"] == "actorrpc"
            assert each["attributes"]["rpc.method"] == each["name"]
            assert not each["error"]
            # A child span must not start before its parent.
            assert each["begun"] >= tree[each["parent"]]["begun"] - 1_000_000
    (served,) = [each for each in tree.values() if (each["kind"], each["name"]) == _ONWARDS[0]]
    assert served["attributes"]["actorrpc.mailbox.wait"] >= 0.0
    assert served["events"] == ["actorrpc.mailbox.left"]
    assert served["attributes"]["actorrpc.caller"].startswith("Node-")


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("method", ["pass_on", "plain"])
def test_calls_of_a_method_on_an_event_loop_are_children_of_its_span(method: str) -> None:
    first, last = AsyncNode.remote(), Node.remote()
    with _tracer().start_as_current_span("root") as root:
        assert actorrpc.get(getattr(first, method).remote(last)) == 2
    assert _one_path(root, first, last, spans=5)[:4] == [
        *_ONWARDS,
        ("SERVER", f"AsyncNode/{method}"),
        ("CLIENT", f"AsyncNode/{method}"),
    ]


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("kind", [Node, AsyncNode])
def test_a_stream_is_one_span_with_the_calls_of_its_steps(kind: Any) -> None:
    first, last = kind.remote(), Node.remote()
    with _tracer().start_as_current_span("root") as root:
        assert [actorrpc.get(each) for each in first.numbers.remote(last)] == [1, 2]
    until(lambda: len(_tree(root, first, last)) == 7)
    tree = _tree(root, first, last)
    stream = next(each for each in tree.values() if each["kind"] == "SERVER" and "numbers" in each["name"])
    inner = [each for each in tree.values() if each["parent"] == stream["id"]]
    assert [each["name"] for each in inner] == ["Node/add"] * 2
    assert all(stream["begun"] <= each["begun"] <= each["ended"] <= stream["ended"] for each in inner)


def _sampled(number: int) -> int:
    return number + trace.get_current_span().get_span_context().trace_flags.sampled


@pytest.mark.usefixtures("embedded")
def test_rpc_calls_have_spans_with_their_errors_on_both_sides() -> None:
    node = Node.remote()
    actorrpc.get(actorrpc.ready(node))
    worker = next(each.worker for each in actorrpc.state().actors if each.actor_id == f"{node.actor_id:016x}")
    with _tracer().start_as_current_span("root") as root:
        assert rpc.rpc_sync(worker, _sampled, (1,)) == 2
        assert rpc.rpc_async(worker, _sampled, (1,)).wait() == 2
        assert rpc.remote(worker, _sampled, (1,)).to_here() == 2
        with pytest.raises(TypeError):
            rpc.rpc_sync(worker, operator.add, (1,))
    until(lambda: len(_tree(root, node)) == 9)
    tree = _tree(root, node)
    assert all(len(_path(tree, leaf)) == 3 for leaf in _leaves(tree))
    names = sorted((each["kind"], each["name"]) for each in tree.values())
    assert names.count(("CLIENT", "_sampled")) == names.count(("SERVER", "_sampled")) == 3
    errors = [each for each in tree.values() if each["error"]]
    assert sorted((each["kind"], each["name"]) for each in errors) == [("CLIENT", "add"), ("SERVER", "add")]
    for each in errors:
        assert each["attributes"]["error.type"] == "builtins.TypeError"
        assert each["events"][-1] == "exception"


@pytest.mark.usefixtures("embedded")
def test_unsampled_calls_create_no_span_and_send_no_context() -> None:
    node = Node.remote()
    here, there = len(_ended_spans()), len(actorrpc.get(node.spans.remote()))
    assert actorrpc.get(node.add.remote(1)) == 2
    with trace.use_span(NonRecordingSpan(SpanContext(1, 2, False, TraceFlags(0)))):
        assert actorrpc.get(node.add.remote(1)) == 2
        assert actorrpc.get(node.current.remote()) == 0
    assert (len(_ended_spans()), len(actorrpc.get(node.spans.remote()))) == (here, there)


@pytest.mark.usefixtures("embedded")
def test_a_process_without_an_sdk_forwards_the_span_of_its_caller() -> None:
    between, last = Node.remote(False), Node.remote()
    with _tracer().start_as_current_span("root") as root:
        assert actorrpc.get(between.pass_on.remote(last)) == 2
    # The process in between has no SDK, so its spans do not exist.
    assert _one_path(root, last, spans=3) == [
        ("SERVER", "Node/add"),
        ("CLIENT", "Node/pass_on"),
        ("INTERNAL", "root"),
    ]
