"""The targets of the actors, as data."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.series import Key
from benchmarks.targets import Target

__all__ = ["ACTOR_TARGETS"]

HOST = "same host"
PLACES = (("own", "own CPUs"), ("one", "one CPU"))
_SERIAL = (
    "an actor call makes a future, an ObjectRef and a mailbox entry that rpc_sync does not: with warm caches 8.4 "
    "against 3.2 us of Python in the actor's process, and about as much more in the caller's; after a switch of "
    "processes each costs more"
)
_PIPELINED = (
    "about 15 us of Python for a call at its caller, and at the actor one thread reads while another executes: "
    "they share one interpreter"
)

_WAKING = "a call wakes two processes that sleep, and on a shared machine that swings: 0.12 to 0.20 of Ray's from run to run"
_KEPT = (
    "after each call checkpoint() is called and its state pickled, and the answer is kept until a later answer: "
    "13 to 16 us of Python, in addition to the 20 us of the call, which took 48 us when the target was set"
)
_START = "the process from which actor processes are forked imports torch first, which takes most of the time"
_MANY = "some 290 us of Python for each in the process that makes them, for its order, its first call and both answers"


def _key(section: str, metric: str, placement: str, case: str = "") -> Key:
    return Key(section, case, HOST, placement, metric)


def _targets() -> Iterator[Target]:
    for other, shown in (("ray", "Ray"), ("monarch", "Monarch")):
        for place, where in PLACES:
            yield Target(
                text=f"actor call p50, {where} / {shown}",
                key=_key("actor call", "p50", place), versus=other, at_most=1 / 6, why=_WAKING,
            )  # fmt: skip
    for place, where in PLACES:
        yield Target(
            text=f"actor call p50, {where} / rpc_sync",
            key=_key("actor call", "p50", place), versus="rpc_sync", at_most=1.2, why=_SERIAL,
        )  # fmt: skip
    for place, where in PLACES:
        for other, shown in (("ray", "Ray"), ("monarch", "Monarch")):
            yield Target(
                text=f"pipelined actor calls/s, {where} / {shown}",
                key=_key("pipelined actor calls", "rate", place), versus=other, at_least=6.0, why=_PIPELINED,
            )  # fmt: skip
        yield Target(
            text=f"pipelined actor calls/s, {where}",
            key=_key("pipelined actor calls", "rate", place),
            at_least=45_000,
            why=_PIPELINED,
        )
    yield Target(
        text="200 pipelined calls with a checkpoint / without",
        key=_key("checkpoints", "time", "both", "200 calls"), versus="without", at_most=1.3, why=_KEPT,
    )  # fmt: skip
    yield Target(
        text="10 000 actors in one worker, ms until all have answered",
        key=_key("actors in one worker", "time", "both", "10000 actors"), at_most=3000.0, why=_MANY,
    )  # fmt: skip
    for count in (1000, 10_000):
        yield Target(
            text=f"calls/s round-robin over {count} actors of one worker",
            key=_key("actors in one worker", "rate", "both", f"{count} actors"), at_least=20_000, why=_PIPELINED,
        )  # fmt: skip
    yield Target(
        text="8 actor processes ready (no torch needed), ms",
        key=_key("actor creation", "time", "both", "8 processes"), at_most=150.0,
    )  # fmt: skip
    yield Target(
        text="64 MiB tensor argument, GB/s / Ray's torch path",
        key=_key("actor tensors", "rate", "both", "argument 64 MiB"), versus="ray", at_least=3.0,
    )  # fmt: skip
    yield Target(
        text="8 actor processes ready (no torch needed), time / Ray",
        key=_key("actor creation", "time", "both", "8 processes"), versus="ray", at_most=0.25,
    )  # fmt: skip
    yield Target(
        text="8 actor processes ready (that use torch), time / Ray",
        key=_key("actor creation", "time", "both", "8 processes with torch"), versus="ray", at_most=0.25,
    )  # fmt: skip
    yield Target(
        text="init() until the first actor has answered, ms",
        key=_key("start", "time", "both", "init and first answer"), at_most=800.0, why=_START,
    )  # fmt: skip
    yield Target(
        text="private memory of an idle actor process / Ray's (no torch there)",
        key=_key("actor creation", "private", "both", "8 processes"), versus="ray", at_most=0.5,
    )  # fmt: skip


ACTOR_TARGETS: tuple[Target, ...] = tuple(_targets())
