"""Parts of collectives: generations of simulated workers, and torch process groups whose ranks are threads of one process."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from actorrpc.actors.collectives import process_group as groups
from actorrpc.actors.collectives.rendezvous import Generations, MemberSlot
from actorrpc.errors import CollectiveError, ConfigError
from actorrpc.wire.identity import WorkerKey

SLOTS = [MemberSlot(WorkerKey(rank, f"life{rank}"), 100 + rank) for rank in range(3)]


class Timers:
    """A clock that never moves."""

    def __init__(self) -> None:
        self.runs: list[Any] = []

    def after(self, delay: float, run: Any) -> None:
        del delay
        self.runs.append(run)


def make_generations() -> tuple[Generations, Any]:
    """Return generations and their agent, which only collects submitted tasks."""
    agent = SimpleNamespace(on_peer_end=[], submitted=[], clock=Timers())
    agent.submit = agent.submitted.append
    return Generations(agent, lambda key, rank, why: None), agent  # type: ignore[arg-type]


class TestMeetings:
    def test_take_waits_until_all_keys_are_set(self) -> None:
        generations, _ = make_generations()
        key = generations.open("it", 1).key
        waiting = generations.get(key, ["a", "b"])
        generations.change(key, "put", "a", b"1")
        assert not waiting.done()
        generations.change(key, "put", "b", b"2")
        assert waiting.value() == [b"1", b"2"]
        assert generations.get(key, ["b"]).value() == [b"2"]
        assert [generations.change(key, "add", "n", each) for each in (2, 3)] == [2, 5]
        assert generations.change(key, "has", ["a", "n"]) is True
        assert generations.change(key, "swap", "a", b"1", b"9") == b"9"
        assert generations.change(key, "swap", "a", b"1", b"8") == b"9"
        assert generations.change(key, "drop", "a") is True
        assert generations.change(key, "has", ["a"]) is False

    def test_the_death_of_a_member_fails_all_waits_of_its_collective_once(self) -> None:
        generations, agent = make_generations()
        generation = generations.open("it", 3)
        waiting = [generations.gather(generation.key, rank, SLOTS[rank], None) for rank in (0, 1)]
        asked = generations.get(generation.key, ["never"])
        (tell,) = agent.on_peer_end
        ended = SimpleNamespace(name="w1", rank=1, key=WorkerKey(1, "another life"), cause="", state="dead")
        tell(ended)
        assert not generation.why
        ended.key = WorkerKey(1, "life1")
        tell(ended)
        for each in (*waiting, asked):
            with pytest.raises(CollectiveError, match=r"it is broken: rank 1 was lost: its worker 'w1'"):
                each.value()
        assert len(agent.submitted) == 1  # rank 0 is notified; rank 2 has not joined
        with pytest.raises(CollectiveError, match="rank 1 was lost"):
            generations.gather(generation.key, 2, SLOTS[2], None)
        tell(ended)
        assert len(agent.submitted) == 1

    def test_a_failed_operation_reports_the_loss_of_a_rank_if_one_is_known(self) -> None:
        generations, agent = make_generations()
        generation = generations.open("it", 2)
        for rank in range(2):
            generations.gather(generation.key, rank, SLOTS[rank], None)
        answer = generations.report_loss(generation.key, 0, "connection closed", False)
        assert generation.why == "connection closed"
        assert not answer.done()
        generations.report_loss(generation.key, 1, "it was killed", True)
        assert answer.value() == generation.why == "rank 1 was lost: it was killed"
        # Without a lost rank, the first reported reason is the answer.
        other = generations.open("it", 2)
        answer = generations.report_loss(other.key, 0, "timed out", False)
        agent.clock.runs[-1]()
        agent.submitted[-1]()
        assert answer.value() == "timed out"

    def test_a_destroyed_collective_refuses_requests(self) -> None:
        generations, _ = make_generations()
        generation = generations.open("it", 2)
        generations.close(generation)
        with pytest.raises(CollectiveError, match="destroyed, or rebuilt"):
            generations.get(generation.key, ["a"])
        assert (
            generations.report_loss(generation.key, 0, "late", True).value()
            == "it has been destroyed, or rebuilt"
        )


class TestGroups:
    def test_unavailable_backends_are_refused(self) -> None:
        assert groups.check_backend("gloo") == "gloo"
        with pytest.raises(ConfigError, match="not None"):
            groups.check_backend(None)
        if not torch.cuda.is_available():
            with pytest.raises(ConfigError, match="nccl"):
                groups.check_devices("nccl")

    def test_the_clone_of_a_store_writes_to_the_same_store(self) -> None:
        """NCCL's threads clone the store. A CallStore is thread-safe, so its clone is the store itself."""
        asked: list[Any] = []
        store = groups.CallStore(lambda *args: asked.append(args))
        dist.PrefixStore("some", store.clone()).set("key", "value")
        assert asked == [("put", "some/key", b"value")]
        with contextlib.suppress(AttributeError):  # older versions of torch do not call clone()
            dist.PrefixStore("some", store).clone().set("other", "value")
            assert asked[-1] == ("put", "some/other", b"value")

    @pytest.mark.limit(20)
    def test_cutting_a_group_ends_its_waiting_operations_and_no_other_groups(self) -> None:
        first, second = make_groups("first"), make_groups("second")
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                dist.recv(torch.empty(1), src=1, group=first[0][0])
            except RuntimeError as error:
                ended.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        group, store = first[0]
        # Both ends of the connection are in this process, and either may close first.
        assert groups.cut(group, store, "gloo") >= 1
        waiting.join()
        assert len(ended) == 1
        assert (groups.connections(store), groups.connections(second[0][1])) == (0, 2)
        values = [torch.full((2,), float(rank)) for rank in range(2)]
        in_threads(
            [lambda rank=rank: dist.all_reduce(values[rank], group=second[rank][0]) for rank in range(2)]
        )
        assert [each.tolist() for each in values] == [[1.0, 1.0]] * 2
        assert groups.cut(group, store, "gloo") == 0
        for each, _ in (*first, *second):
            groups.forget(each)
            groups.forget(each)
        assert not dist.is_initialized()


def in_threads(runs: list[Any]) -> None:
    """Run functions concurrently."""
    threads = [threading.Thread(target=run) for run in runs]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def make_groups(name: str) -> list[tuple[Any, groups.CallStore]]:
    """Return both ranks of a process group."""
    generations, _ = make_generations()
    key = generations.open(name, 2).key
    found: dict[int, Any] = {}

    def make(rank: int) -> None:
        def query(what: str, *args: Any) -> Any:
            return (
                generations.get(key, *args).wait(10)
                if what == "get"
                else generations.change(key, what, *args)
            )

        store = groups.CallStore(query)
        options = {"backend": "gloo", "timeout_s": 15.0, "join_s": 10.0, "address": "127.0.0.1"}
        found[rank] = groups.make(store, rank, 2, name=f"{name}/{rank}", **options), store  # type: ignore[arg-type]

    in_threads([lambda rank=rank: make(rank) for rank in range(2)])
    return [found[0], found[1]]
