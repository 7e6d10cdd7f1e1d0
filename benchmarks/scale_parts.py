"""Parts of a worker whose cost grows with the group, run one by one in this process with the real code.

* the table of a fixed group, and a peer for each connected worker: bytes (``tracemalloc``);
* the barrier at the end of a fixed group, at rank 0, which all others ask: seconds of processor time;
* heartbeats between a worker and its connected peers, by
  :class:`actorrpc.transport.failure_detector.FailureDetector`, in virtual time;
* the operations per second of torch's ``TCPStore`` on this machine, with several clients in this process.
"""

from __future__ import annotations

import gc
import heapq
import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, Final

from torch.distributed import TCPStore

from actorrpc.agent.peers import PeerTable
from actorrpc.config import Settings
from actorrpc.group.group import _Barrier
from actorrpc.transport.failure_detector import FailureDetector
from actorrpc.wire.identity import WorkerRecord
from benchmarks.scale_meeting import made_up

__all__ = ["barrier", "heartbeats", "memory", "store_rates"]

_HOP_S: Final = 1e-4


def memory(workers: int) -> dict[str, float]:
    """Return the bytes of the table of a group, and of a peer for each member; and the seconds that reading the table takes."""
    own = made_up(0)
    packed = [made_up(rank).to_bytes() for rank in range(workers)]
    gc.collect()
    tracemalloc.start()
    try:
        table = {each.name: each for each in map(WorkerRecord.from_bytes, packed)}
        gc.collect()
        of_table = tracemalloc.get_traced_memory()[0]
        peer_table = PeerTable(
            own,
            window=1 << 20,
            resolve=lambda to: table.get(str(to)),
            members=lambda: list(table.values()),
            replaced=lambda peer: None,
        )
        empty = tracemalloc.get_traced_memory()[0]
        for name in table:
            peer_table.peer(name)
        gc.collect()
        of_peers = tracemalloc.get_traced_memory()[0] - empty
    finally:
        tracemalloc.stop()
    begun = time.process_time()
    assert len(list(map(WorkerRecord.from_bytes, packed))) == workers
    return {
        "workers": workers,
        "table_bytes": of_table,
        "peers_bytes": of_peers,
        "table_on_the_wire_bytes": sum(map(len, packed)),
        "reading_table_s": time.process_time() - begun,
    }


def barrier(workers: int) -> float:
    """Return the processor seconds that the first worker's barrier takes: both stages, and the ends of all connections."""
    names = [f"worker{rank}" for rank in range(workers)]
    made = _Barrier(frozenset(names))
    begun = time.process_time()
    for stage in (0, 1):
        futures = [made.arrive(stage, name) for name in names]
        assert all(each.done() for each in futures)
    for name in names:
        made.gone(name)
    return time.process_time() - begun


def heartbeats(contacts: int, seed: int, *, beats: int = 20) -> dict[str, float]:
    """Return frames and wake-ups of the clock, per heartbeat, of an idle worker that is connected to ``contacts`` others.

    The others are connected only to this worker. The time of the last frame from each is drawn from the seed; a ping is answered
    at once. The first heartbeats, during which the times of the pings converge, are not counted.
    """
    settings = Settings()
    beat, misses = settings.heartbeat, settings.heartbeat_misses
    draw = random.Random(seed)
    # For each contact: the hub's detector for the contact, and the contact's detector for the hub.
    there = [(FailureDetector(), FailureDetector()) for _ in range(contacts)]
    last_received = [[first := draw.uniform(-beat, 0.0), first] for _ in range(contacts)]
    due = [(0.0, -1), *((draw.uniform(0.0, beat), contact) for contact in range(contacts))]
    heapq.heapify(due)
    warm, end = 4 * beat, (4 + beats) * beat
    frames = wakes = others = 0
    while due[0][0] < end:
        now, who = heapq.heappop(due)
        wait = beat
        for contact in range(contacts) if who < 0 else (who,):
            side = 0 if who < 0 else 1
            look = there[contact][side].look(
                now, last_received[contact][side], heartbeat=beat, misses=misses, late=0.0
            )
            assert look.state == "alive"
            wait = min(wait, look.wait)
            if look.ping_due:
                last_received[contact] = [now + _HOP_S, now + _HOP_S]
                frames += 2 if now >= warm else 0
        wakes += who < 0 and now >= warm
        others += who >= 0 and now >= warm
        heapq.heappush(due, (now + wait, who))
    return {
        "contacts": contacts,
        "frames_per_heartbeat": frames / beats,
        "wakes_per_heartbeat": wakes / beats,
        "wakes_of_a_contact_per_heartbeat": others / beats / max(1, contacts),
    }


def store_rates(*, clients: int = 4, seconds: float = 1.0, table_bytes: int = 1 << 20) -> dict[str, float]:
    """Return how many checks a second, and how many bytes, a ``TCPStore`` serves to clients in this process."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    server.set("here", "1")
    server.set("table", bytes(table_bytes))

    def best(ask: Callable[[Any], Any]) -> float:
        return max(rate(ask) for _ in range(3))  # others use the machine as well

    def rate(ask: Callable[[Any], Any]) -> float:
        counts = [0] * clients
        until = time.monotonic() + seconds

        def run(number: int) -> None:
            client = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
            while time.monotonic() < until:
                ask(client)
                counts[number] += 1

        threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / seconds

    return {
        "checks_per_s": best(lambda client: client.check(["here"])),
        "bytes_per_s": table_bytes * best(lambda client: client.get("table")),
    }
