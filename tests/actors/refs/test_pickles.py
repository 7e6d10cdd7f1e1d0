"""References in pickles that a program makes itself: they do not keep their target alive, and load only in their group."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Iterator

import cloudpickle
import pytest
import torch

import actorrpc
from actorrpc import errors, get
from actorrpc.actors.refs import pickles
from actorrpc.rpc.refcount.messages import RRefId
from actorrpc.testing import InProcessCluster
from actorrpc.wire.identity import WorkerKey
from tests.actors import things
from tests.actors.e2e.kit import Log, until
from tests.migration.rows import row


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    """Three workers in this process with a clock that advances by itself; actors of the first run on the others."""
    with InProcessCluster(3, autojump=True) as made:
        yield made


def _until_refused(data: bytes, error: type[Exception]) -> str:
    pause = threading.Event()
    while True:
        gc.collect()
        try:
            pickle.loads(data)
        except error as caught:
            return str(caught)
        pause.wait(0.005)


def test_a_pickled_handle_can_be_loaded_on_all_workers_of_its_group(cluster: InProcessCluster) -> None:
    for dumps in (pickle.dumps, cloudpickle.dumps, lambda each: pickle.dumps(each, protocol=2)):
        counter = things.Counter.remote(3)
        data = dumps(counter)
        for name in ("worker0", "worker1", "worker2"):
            with cluster[name]:
                loaded = pickle.loads(data)
                assert loaded == counter
                get(loaded.add.remote())
        assert get(counter.add.remote()) == 7
        assert get(pickle.loads(dumps(counter.options(timeout=9).add)).remote()) == 8


@row("an ObjectRef or a handle that the program pickles", "from-ray")
def test_a_pickle_does_not_keep_the_actor_alive_but_a_loaded_handle_does(cluster: InProcessCluster) -> None:
    counter = things.Counter.remote(3)
    data = pickle.dumps(counter)
    with cluster["worker2"]:
        kept = pickle.loads(data)
    del counter
    with cluster["worker2"]:
        assert get(kept.add.remote()) == 4  # the loaded handle keeps the actor alive
        assert get(pickle.loads(data).add.remote()) == 5
    del kept
    assert "has ended" in _until_refused(data, errors.ActorDiedError)


@pytest.mark.parametrize("size", [1, 1 << 18], ids=["small", "large"])
@pytest.mark.parametrize("make", ["put", "result"])
@row("an ObjectRef or a handle that the program pickles", "from-ray")
def test_a_pickled_object_ref_can_be_loaded_on_all_workers_of_its_group(
    cluster: InProcessCluster, size: int, make: str
) -> None:
    value = torch.arange(float(size))
    echo = things.Counter.remote().echo
    ref = actorrpc.put(value) if make == "put" else echo.remote(value)
    data = pickle.dumps(ref)
    for name in ("worker0", "worker1", "worker2"):
        with cluster[name]:
            loaded = pickle.loads(data)
            assert loaded == ref
            assert torch.equal(get(loaded), value)
    with cluster["worker2"]:
        kept = pickle.loads(data)
    del ref, loaded
    with cluster["worker2"]:
        assert torch.equal(get(kept), value)
        assert pickle.loads(data) == pickle.loads(pickle.dumps(kept)) == kept
    del kept
    assert "keep the reference itself" in _until_refused(data, errors.RRefError)


def test_references_can_be_saved_by_torch_and_copied_in_closures_queues_and_groups(
    cluster: InProcessCluster,
) -> None:
    counter, ref = things.Counter.remote(), actorrpc.put(7)
    file = io.BytesIO()
    torch.save({"counter": counter, "deep": [ref]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded == {"counter": counter, "deep": [ref]}
    assert get(loaded["deep"]) == [7]
    closure = cloudpickle.loads(cloudpickle.dumps(lambda: get(counter.add.remote()) + get(ref)))
    assert closure() == 8
    deep = copy.deepcopy({"counter": counter, "ref": ref})
    assert deep["counter"] is counter
    assert deep["ref"] is ref
    queue = actorrpc.Queue()
    pickle.loads(pickle.dumps(queue)).put(1)
    assert queue.get() == 1
    group = actorrpc.spawn(2, Log)
    assert list(get(pickle.loads(pickle.dumps(group)).add.call(1))) == [1, 1]


def test_a_pickled_weak_handle_does_not_keep_the_actor_alive(cluster: InProcessCluster) -> None:
    named = things.Counter.options(name="one").remote()
    weak = pickle.loads(pickle.dumps(actorrpc.get_actor("one")))
    assert weak == named
    del named
    gc.collect()
    until(lambda: not actorrpc.is_alive(weak))


def test_loading_a_reference_to_a_dead_worker_raises(cluster: InProcessCluster) -> None:
    with cluster["worker1"]:
        ref, counter = actorrpc.put(1), things.Counter.options(worker="worker2").remote()
        data = pickle.dumps(ref), pickle.dumps(counter)
    assert get([pickle.loads(data[0])]) == [1]
    cluster.kill("worker1")
    with pytest.raises(
        errors.PeerDiedError, match=r"an ObjectRef to put\(int\) .* worker 'worker1'.* has ended"
    ):
        pickle.loads(data[0])
    with pytest.raises(errors.ActorDiedError, match=r"Counter#\w+ has ended: .*worker 'worker1'") as caught:
        pickle.loads(data[1])
    assert caught.value.actor_id == counter.actor_id
    del ref, counter, caught


def test_loading_a_reference_in_another_group_or_none_raises() -> None:
    with InProcessCluster(2):
        counter, ref = things.Counter.remote(), actorrpc.put(1)
        weak = actorrpc.get_actor(things.Counter.options(name="n", lifetime="detached").remote() and "n")
        data = [pickle.dumps(each) for each in (counter, ref, weak)]
    for each in data:
        with pytest.raises(
            errors.NotInitializedError, match=r"pickled in the group \w{8} of 'worker0'.* none"
        ):
            pickle.loads(each)
    for each in (counter, ref):
        with pytest.raises(errors.NotInitializedError):
            pickle.dumps(each)
    # A group with the same names and ranks, whose values may have the same ids.
    with InProcessCluster(2):
        others = [things.Counter.remote(), actorrpc.put(2)]
        for each in data:
            with pytest.raises(errors.SerializationError, match=r"in the group \w{8} .*Between groups, send"):
                pickle.loads(each)
        del others


def test_a_reference_to_an_earlier_incarnation_of_a_worker_is_not_loaded(cluster: InProcessCluster) -> None:
    ref = actorrpc.put(1)
    address = pickles.address_of(ref._as_promise())
    assert pickles.find(address, "it").is_owner()
    wrong = pickles.Address(address.group, WorkerKey(0, "0" * 32), address.name, address.value)
    with pytest.raises(errors.PeerDiedError, match="it cannot be loaded"):
        pickles.find(wrong, "it")
    other = pickles.Address(
        address.group,
        address.worker,
        address.name,
        RRefId(address.value.created_on, address.value.local_id, "0" * 32),
    )
    with pytest.raises(errors.RRefError, match="it was freed"):
        pickles.find(other, "it")
