"""Costs of growing groups: the model and the formulas compared with the real code, at small sizes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from actorrpc.group.group import _Barrier
from benchmarks import scale, scale_meeting, scale_parts, scale_processes
from tests.ranks import start_server


class TestMeeting:
    @pytest.mark.parametrize("seed", [1, 2])
    def test_the_model_makes_the_same_store_operations_as_the_real_code(self, seed: int) -> None:
        scale.check_meeting((1, 2, 4, 8, 16), seed)

    def test_operations_of_a_worker_do_not_grow_with_the_group(self) -> None:
        for dynamic in (False, True):
            small, large = (
                scale_meeting.model(n, 1, dynamic=dynamic).figures()["operations_mean"] for n in (16, 2048)
            )
            assert large < 1.5 * small
        counted = scale_meeting.real(48, 1, dynamic=True)
        assert max(sum(each.values()) for each in counted.operations) == 6
        assert max(counted.read) <= 64  # workers do not read the records of all others


class TestParts:
    def test_heartbeats_grow_with_contacts_and_wake_ups_do_not(self) -> None:
        few, many = scale_parts.heartbeats(3, 1, beats=8), scale_parts.heartbeats(60, 1, beats=8)
        assert few["frames_per_heartbeat"] <= 2 * 3 * 1.4
        assert many["frames_per_heartbeat"] <= 2 * 60 * 1.4
        assert many["wakes_per_heartbeat"] <= 4

    def test_memory_per_worker_is_bounded(self) -> None:
        found = scale_parts.memory(200)
        assert found["table_bytes"] / 200 < 2_000
        assert found["peers_bytes"] / 200 < 12_000


class TestBarrier:
    @pytest.mark.parametrize("seed", range(20))
    def test_a_barrier_opens_exactly_when_all_workers_have_arrived_or_gone(self, seed: int) -> None:
        draw = random.Random(seed)
        names = [f"worker{n}" for n in range(12)]
        everyone = frozenset(names)
        barrier = _Barrier(everyone)
        # Workers may arrive twice, arrive only at the later stage, or leave after arriving, and count once.
        events = [(draw.choice(["arrive", "reached", "gone"]), draw.choice((0, 1)), n) for n in names * 3]
        draw.shuffle(events)
        arrived: dict[int, set[str]] = {0: set(), 1: set()}
        gone: set[str] = set()
        waiting = []
        for what, stage, name in events:
            if what == "arrive":
                waiting.append((stage, barrier.arrive(stage, name)))
            elif what == "reached":
                barrier.reached(stage, name)
            else:
                barrier.gone(name)
                gone.add(name)
            if what != "gone":
                arrived[stage].add(name)
            here = {0: arrived[0] | arrived[1], 1: arrived[1]}
            for at, future in waiting:
                assert future.done() or everyone - gone - here[at]
            if what == "arrive" and everyone - gone - here[stage]:
                assert not waiting[-1][1].done()


@pytest.mark.limit(60)
def test_numbers_of_frames_of_real_processes_equal_the_formulas(tmp_path: Path) -> None:
    start_server()  # the fork server of the tests
    found = scale_processes.measure(5, f"file://{tmp_path}/store", neighbours=2, rest_s=0.0)
    scale.check_frames(found)
    assert found["idle"]["connections_most"] == 0
    assert found["neighbours"]["connections_most"] <= 2 * 4
    # A socket and its reader's eventfd for each connection; both sides may have dialled.
    assert found["all to all"]["descriptors_most"] - found["idle"]["descriptors_most"] <= 2 * 2 * 4 + 3
    found["backward"]["frames"]["request"] += 1
    with pytest.raises(AssertionError):
        scale.check_frames(found)


def test_recorded_results_of_growing_groups_equal_the_formulas() -> None:
    found = json.loads((scale.RESULTS / "scale.json").read_text(encoding="utf-8"))
    assert [row["workers"] for row in found["table"]] == [1, 10, 100, 1000, 10_000]
    assert max(each["workers"] for each in found["processes"]) == 64
    for each in found["processes"]:
        scale.check_frames(each)
    for each in found["clusters"]:
        scale.check_cluster(each)
