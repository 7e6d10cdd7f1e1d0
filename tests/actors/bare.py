"""A runtime without actors: what object references and streams need, on top of the running RPC layer."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from actorrpc import rpc
from actorrpc.actors.context import Runtime, current
from actorrpc.actors.refs.host_copies import HostCopies
from actorrpc.actors.refs.offers import Offers
from actorrpc.actors.streams.consumer import ObjectRefGenerator
from actorrpc.actors.streams.producer import Streams, StreamTicket, produce
from actorrpc.agent.calls import CURRENT
from actorrpc.agent.context import current_worker
from actorrpc.rpc import rref as rrefs
from actorrpc.testing import processes

__all__ = ["alone", "bare", "join_generators", "open_stream", "start_generator"]


_in_force = threading.Event()


@contextlib.contextmanager
def bare() -> Iterator[Runtime]:
    """Install a runtime that supports only calls, references and streams."""
    references = rrefs.runtime()
    before = current()
    made = Runtime(references.agent, references)
    made.streams = Streams(references.agent)
    made.host_copies = HostCopies(references)
    made.offers = Offers(references.agent)
    worker = current_worker()
    assert worker is not None
    worker.actors = made
    _in_force.set()
    try:
        yield made
    finally:
        _in_force.clear()
        made.streams.close()
        join_generators()
        worker.actors = before


@contextlib.contextmanager
def alone() -> Iterator[Runtime]:
    """A group of this process alone, with a bare runtime."""
    with tempfile.TemporaryDirectory(dir=processes.scratch()) as folder:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        try:
            with bare() as made:
                yield made
        finally:
            rpc.shutdown(graceful=False)


# -- streams: what an actor does for a generator method ------------------------------------------------------

_threads: list[threading.Thread] = []
_outcomes: list[BaseException | None] = []


def start_generator(make: Callable[..., Any], limit: int, *args: Any) -> StreamTicket:
    """Run a generator on a thread of its own and return the ticket of its stream. Called by RPC."""
    _in_force.wait()  # the caller may have installed its runtime and call before this worker has
    runtime = current()
    assert runtime is not None
    execution = CURRENT.get()
    producer = runtime.streams.open(limit, None if execution is None else execution.peer)

    def run() -> None:
        try:
            produce(make(*args), producer, lambda error: error)
        except BaseException as error:
            _outcomes.append(error)
        else:
            _outcomes.append(None)

    thread = threading.Thread(target=run, name="generator")
    _threads.append(thread)
    thread.start()
    return producer.ticket()


def join_generators() -> list[BaseException | None]:
    """Wait until all generators of this process have ended; return what produce() raised, in order."""
    for thread in _threads:
        thread.join()
    _threads.clear()
    found = list(_outcomes)
    _outcomes.clear()
    return found


def open_stream(make: Callable[..., Any], limit: int, *args: Any, to: Any = 0) -> ObjectRefGenerator[Any]:
    """Start a generator on a worker and return the consumer's end of its stream."""
    call = rpc.rpc_async(to, start_generator, (make, limit, *args))
    call.wait()
    return ObjectRefGenerator(call, label=make.__name__)
