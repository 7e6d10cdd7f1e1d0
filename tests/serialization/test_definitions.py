"""Functions and classes that are sent by value: definitions and their stores, identity of classes, the main module."""

from __future__ import annotations

import dataclasses
import enum
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from typing import Any, ClassVar

import pytest
import torch

from actorrpc.errors import ProtocolError
from actorrpc.serialization import by_value
from actorrpc.serialization.by_value import DefinitionStore, UnknownDefinitionError, hash_of
from actorrpc.serialization.codec import decode, encode
from tests.agent.together import in_threads


class Peer:
    """A simulated peer: its known definitions and its store."""

    def __init__(self) -> None:
        self.store = DefinitionStore()
        self.known: set[bytes] = set()
        self.received = 0

    def send(self, obj: Any, **options: Any) -> Any:
        encoded = encode(obj, known=self.known, **options)
        for key, data in encoded.definitions.items():
            self.store.add(key, data)
            self.known.add(key)
            self.received += 1
        buffers = [memoryview(bytearray(span.view())) for span in encoded.spans]
        return decode(encoded.body, buffers, definitions=self.store)


@pytest.fixture
def peer() -> Peer:
    return Peer()


def test_importable_objects_are_sent_by_name(peer: Peer) -> None:
    encoded = encode((pickle.dumps, Peer, torch.nn.Linear, test_importable_objects_are_sent_by_name))
    assert not encoded.definitions
    assert b"test_definitions" in encoded.body
    assert peer.send(Peer) is Peer


def test_the_definition_of_a_lambda_is_sent_once(peer: Peer) -> None:
    for n in range(5):
        sent = peer.send((lambda x: x + 1, (n,), {}))
        assert sent[0](*sent[1]) == n + 1
    assert peer.received == 1


def test_functions_with_different_captured_values_are_different_definitions(peer: Peer) -> None:
    for n in (1, True, 1.0, 0.0, -0.0, "1", b"1", (1, 2), (1, 2.0), None, float("inf")):
        found = peer.send(lambda n=n: (type(n), repr(n)))()
        assert found == (type(n), repr(n))
        closed = peer.send((lambda value: lambda: (type(value), repr(value)))(n))()
        assert closed == found
    assert peer.received == 22


def test_captured_mutable_state_is_sent_as_of_each_message(peer: Peer) -> None:
    log = [1]

    def use() -> list[int]:
        return log

    def outer() -> list[int]:
        return use()

    assert peer.send(outer)() == [1]
    log.append(2)
    first = peer.send(outer)
    first().append(99)
    assert peer.send(outer)() == [1, 2]
    assert peer.received == 0


def test_recursive_closures_and_closures_over_tensors_survive(peer: Peer) -> None:
    weight = torch.arange(3000.0)

    def apply(n: int) -> Any:
        return weight * 2 if n == 0 else apply(n - 1)

    encoded = encode((apply, (3,), {}))
    assert len(encoded.spans) == 1
    function, args, _ = peer.send((apply, (3,), {}))
    assert torch.equal(function(*args), weight * 2)

    def factorial(n: int) -> int:
        return 1 if n == 0 else n * factorial(n - 1)

    assert peer.send(factorial)(5) == 120
    assert peer.received == 1


def test_a_local_class_that_returns_to_its_process_is_the_same_class(peer: Peer) -> None:
    class Local:
        total = 0

        def __init__(self, n: int) -> None:
            super().__init__()
            self.n = n

        def again(self) -> Any:
            return Local(self.n + 1)

    original = Local.again
    other = Peer()
    a, cls = peer.send([Local(1), Local])
    b = other.send(Local(2))
    assert isinstance(a, Local)
    assert type(a) is cls is Local
    assert type(b) is Local
    assert Local.again is original  # decoding did not change the class
    assert type(peer.send(a.again())) is Local
    assert peer.received == 1


def test_a_class_is_sent_again_only_if_it_has_changed(peer: Peer) -> None:
    class Local:
        value = 1
        items: ClassVar = [1]

        def get(self) -> int:
            return self.value

    peer.send(Local())
    by_value.look_again()
    peer.send(Local())
    assert peer.received == 1
    Local.value = 2
    assert type(peer.send(Local())) is Local
    assert peer.received == 2
    Local.items.append(2)
    peer.send(Local())
    assert peer.received == 2  # only attributes of the class are compared
    by_value.look_again()
    peer.send(Local())
    assert peer.received == 3


def test_local_dataclasses_enums_and_classes_with_tensors_survive(peer: Peer) -> None:
    @dataclasses.dataclass(frozen=True)
    class Point:
        x: int
        y: int = 2

    class Colour(enum.Enum):
        RED = 1

    class Holder:
        shared = torch.arange(2000.0)

    assert peer.send(Point(1)) == Point(1)
    assert peer.send(Colour.RED) is Colour.RED
    assert peer.received == 2
    assert peer.send([Holder, Holder()])[0] is Holder
    assert peer.received == 2  # a class with a tensor is no definition


def test_sent_local_classes_are_not_kept_alive() -> None:
    def make() -> tuple[weakref.ref[type], bytes]:
        class Local:
            pass

        function = lambda: Local  # noqa: E731
        encode([Local, function, Local()])
        return weakref.ref(Local)

    ref = make()
    gc.collect()
    assert ref() is None


def test_decoding_lists_all_missing_definitions_before_unpickling() -> None:
    encoded = encode([lambda: 1, lambda: 2])
    store = DefinitionStore()
    with pytest.raises(UnknownDefinitionError, match="unknown definition") as caught:
        decode(encoded.body, (), definitions=store)
    assert isinstance(caught.value, ProtocolError)
    assert set(caught.value.hashes) == set(encoded.definitions)
    assert pickle.loads(pickle.dumps(caught.value)).hashes == caught.value.hashes
    for key in caught.value.hashes:
        store.add(key, encoded.definitions[key])
    assert [f() for f in decode(encoded.body, (), definitions=store)] == [1, 2]
    with pytest.raises(UnknownDefinitionError):
        decode(encoded.body, (), definitions=None)


def test_the_definition_store_evicts_least_recently_used_and_checks_hashes() -> None:
    store = DefinitionStore(max_definitions=3, max_bytes=1 << 20)
    items = [pickle.dumps(n) for n in range(5)]
    keys = [hash_of(data) for data in items]
    for key, data in zip(keys[:3], items[:3], strict=True):
        store.add(key, data)
    assert store.get(keys[0]) == 0  # used, so definition 1 is evicted next
    store.add(keys[3], items[3])
    assert [key in store for key in keys] == [True, False, True, True, False]
    assert store.missing(keys) == [keys[1], keys[4]]
    assert store.data(keys[3]) == items[3]
    assert store.data(keys[4]) is None
    with pytest.raises(ProtocolError, match="hash"):
        store.add(keys[4], items[3])
    with pytest.raises(UnknownDefinitionError):
        store.get(keys[4])
    large = pickle.dumps(b"x" * (1 << 20))
    store.add(hash_of(large), large)
    assert len(store) == 1
    assert len(store.get(hash_of(large))) == 1 << 20


def test_threads_that_decode_a_definition_get_the_same_object() -> None:
    encoded = encode(lambda: 7)
    store = DefinitionStore()
    for key, data in encoded.definitions.items():
        store.add(key, data)
    start = threading.Barrier(8)
    found: list[Any] = []

    def run() -> None:
        start.wait()
        for _ in range(20):
            found.append(decode(encoded.body, (), definitions=store))

    in_threads(run, [() for _ in range(8)])
    assert len(found) == 160
    assert len(set(found)) == 1


def test_resolving_a_definition_outside_of_a_message_raises() -> None:
    with pytest.raises(ProtocolError, match="outside of a message"):
        by_value.definition(b"0" * 16)


# -- the main module ---------------------------------------------------------------------------------


SPAWNING = """
import multiprocessing, sys
sys.path[:0] = {path!r}
from actorrpc.serialization.codec import decode, encode, DefinitionStore

class Thing:
    pass

def child(pipe):
    def send(obj, **options):
        message = encode(obj, **options)
        pipe.send((message.body, dict(message.definitions)))
    # In the child the main module is called __mp_main__, and is __main__ as well.
    assert Thing.__module__ == "__mp_main__"
    send((child, Thing()))
    send((child, Thing(), lambda: Thing))
    send((child, Thing()), remote_main=False)
    assert decode(pipe.recv(), (), definitions=None) is Thing

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there,), daemon=True)
    process.start()
    there.close()
    for n in range(3):
        body, found = here.recv()
        store = DefinitionStore()
        for key, data in found.items():
            store.add(key, data)
        got = decode(body, (), definitions=store)
        print(got[0] is child, type(got[1]) is Thing, got[2]() is Thing if len(got) > 2 else "")
    here.send(encode(Thing).body)
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_spawned_child_shares_the_main_module_with_its_parent(tmp_path: Any) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING.format(path=[entry for entry in sys.path if entry]))
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, check=True)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["True", "True"],
        ["True", "True", "True"],
        ["False", "False"],
    ]
