"""What torch is given for a collective."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import distributed as dist

from actorrpc.actors.collectives import process_group as groups


def test_a_store_gives_itself_for_its_clone() -> None:
    """NCCL has threads that want a store of their own: this one may be asked by any thread."""
    asked: list[Any] = []
    store = groups.CallStore(lambda *args: asked.append(args))
    dist.PrefixStore("some", store.clone()).set("key", "value")
    assert asked == [("put", "some/key", b"value")]
    with contextlib.suppress(AttributeError):  # a torch that asks no store for a clone
        dist.PrefixStore("some", store).clone().set("other", "value")
        assert asked[-1] == ("put", "some/other", b"value")
