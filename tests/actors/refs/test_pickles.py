"""References in pickles that a program makes itself: what they hold (nothing), where they lead, and where not."""

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
from actorrpc.testing import InProcessCluster
from tests.actors import things
from tests.actors.e2e.kit import Log, until


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    """Three workers in this process, with a clock that goes on by itself; actors of the first run on the others."""
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


def test_a_handle_is_loaded_on_all_workers_of_its_group(cluster: InProcessCluster) -> None:
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


def test_what_a_pickle_leads_to_lives_as_long_as_somebody_else_keeps_it(cluster: InProcessCluster) -> None:
    counter = things.Counter.remote(3)
    data = pickle.dumps(counter)
    with cluster["worker2"]:
        kept = pickle.loads(data)
    del counter
    with cluster["worker2"]:
        assert get(kept.add.remote()) == 4  # what was loaded counts
        assert get(pickle.loads(data).add.remote()) == 5
    del kept
    assert "has ended" in _until_refused(data, errors.ActorDiedError)


@pytest.mark.parametrize("size", [1, 1 << 18], ids=["small", "large"])
@pytest.mark.parametrize("make", ["put", "result"])
def test_an_object_ref_is_loaded_on_all_workers_of_its_group(
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


def test_one_whose_call_is_not_over(cluster: InProcessCluster) -> None:
    things.Counter.gate.clear()
    counter = things.Counter.remote()
    waiting, failing = counter.wait.remote(), counter.boom.remote()
    data = [pickle.dumps(each) for each in (waiting, failing)]
    with cluster["worker2"]:
        loaded, failed = map(pickle.loads, data)
        assert actorrpc.wait([loaded], timeout=0) == ([], [loaded])
        things.Counter.gate.set()
        assert get(loaded) is True
        with pytest.raises(KeyError):
            get(failed)
    with pytest.raises(KeyError):
        get(failing)


def test_references_in_what_is_saved_and_copied(cluster: InProcessCluster) -> None:
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


def test_handles_that_do_not_count(cluster: InProcessCluster) -> None:
    named = things.Counter.options(name="one").remote()
    weak = pickle.loads(pickle.dumps(actorrpc.get_actor("one")))
    assert weak == named
    del named
    gc.collect()
    until(lambda: not actorrpc.is_alive(weak))


def test_a_worker_that_has_ended(cluster: InProcessCluster) -> None:
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


def test_other_groups_and_none() -> None:
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
    # A group of the same names and ranks, whose values may have the same numbers.
    with InProcessCluster(2):
        others = [things.Counter.remote(), actorrpc.put(2)]
        for each in data:
            with pytest.raises(errors.SerializationError, match=r"in the group \w{8} .*Between groups, send"):
                pickle.loads(each)
        del others


def test_one_life_of_a_worker_is_not_taken_for_another(cluster: InProcessCluster) -> None:
    ref = actorrpc.put(1)
    address = pickles.address_of(ref._as_promise())
    assert pickles.find(address, "it").is_owner()
    wrong = address._replace(worker=address.worker._replace(incarnation="0" * 32))
    with pytest.raises(errors.PeerDiedError, match="it cannot be loaded"):
        pickles.find(wrong, "it")
    other = address._replace(value=address.value._replace(incarnation="0" * 32))
    with pytest.raises(errors.RRefError, match="it was freed"):
        pickles.find(other, "it")
