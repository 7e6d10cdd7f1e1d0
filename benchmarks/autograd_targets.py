"""The targets of distributed autograd, as data."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.autograd_sections import MODELS, WORLDS
from benchmarks.series import Key
from benchmarks.targets import Target

__all__ = ["AUTOGRAD_TARGETS"]

HOST = "same host"
_MESSAGES = (
    "a gradient's way through decoder, pass, engine and encoder is some 200 Python functions on each worker, about 2 us each "
    "with the cold caches of a program that computes between messages (yappi, perf_counter); torch does all of it in C++"
)
_STEP = (
    "the model itself takes a third of torch's step (see plain), and five calls and messages the rest; "
    "each wakes a thread that has slept too long to spin, and " + _MESSAGES
)
_LOCAL = "a pass with no messages is some 20 Python functions around the engine's run; torch has none"
_COPIES = (
    "not settled: two copies through shared memory, fresh pages for the gradient, and the products themselves"
)
PLACES = (("own", "own CPUs"), ("one", "one CPU"))


def _targets() -> Iterator[Target]:
    for case in MODELS["rnn"]:
        for world in WORLDS:
            for place, where in PLACES:
                yield Target(
                    text=f"RNN training step, {case}, {world} workers, {where} / torch",
                    key=Key("rnn", f"{case}, {world} workers", HOST, place, "time"),
                    versus="torch",
                    at_most=1.0,
                    why=_STEP,
                )
    for world in WORLDS:
        for place, where in PLACES:
            yield Target(
                text=f"each further hop, {world} workers, {where} / torch",
                key=Key("chain", f"each hop, {world} workers", HOST, place, "hop"),
                versus="torch",
                at_most=1.0,
                why=_MESSAGES,
            )
    for case in ("1 layer", "50 layers"):
        yield Target(
            text=f"local pass, {case}, own CPUs / torch",
            key=Key("local pass", case, HOST, "own", "p50"),
            versus="torch",
            at_most=1.5,
            why=_LOCAL,
        )
    for place, where in PLACES:
        yield Target(
            text=f"64 MiB activation and its gradient, GB/s, {where} / torch",
            key=Key("activation", "64 MiB", HOST, place, "both_ways"),
            versus="torch",
            at_least=2.0,
            why=_COPIES,
        )


AUTOGRAD_TARGETS: tuple[Target, ...] = tuple(_targets())
