"""Compare objects in the shared memory of a host with Ray's, with numpy and torch, in turns in one run.

``python -m benchmarks.objects [--quick] [--only NAME ...] [--rounds N] [--out DIR]`` prints tables and writes ``objects.json``
and ``objects.png``; a quick or partial run writes files of another name. Ray is found in this interpreter, or in the interpreter
that BENCHMARK_RAY_PYTHON names. A whole run needs 14 GB of memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.actors import versions
from benchmarks.actors_sections import Measure, ask, prepare
from benchmarks.actors_sessions import sessions
from benchmarks.bench import Bench, Member
from benchmarks.chart import Panel, sheet
from benchmarks.run import Suite, run
from benchmarks.series import Key, Results
from benchmarks.targets import Target

__all__ = ["OBJECTS", "OBJECT_SECTIONS", "OBJECT_TARGETS", "main"]

MIB = 1 << 20
PEERS = ("ray", "actorrpc")
KINDS = ("numpy", "torch")
MODULE = "benchmarks.objects_scenarios"
READERS = 8
SIZES = {"64 MiB": 64 * MIB, "1 GiB": 1024 * MIB}
QUICK_SIZES = {"8 MiB": 8 * MIB, "64 MiB": 64 * MIB}
_PATIENCE_S = 240.0  # of one scenario


def _sizes(bench: Bench) -> dict[str, int]:
    return QUICK_SIZES if bench.quick else SIZES


def _each(
    bench: Bench, section: str, cases: dict[str, Measure], metrics: tuple[str, ...], readers: int
) -> None:
    """Measure cases on all peers in turns, round by round."""
    with sessions(bench, PEERS, MODULE) as (rigs, _):
        prepare(bench, rigs, ask("make", count=readers), section)
        for case, measure in cases.items():
            for _ in range(bench.rounds):
                for member, rig in rigs.items():
                    bench.record(section, member, "both", rig, measure, metrics, case=case)


def put(bench: Bench) -> None:
    """Put values of one size repeatedly; one copy within a process for comparison."""
    with sessions(bench, PEERS, MODULE) as (rigs, _):
        for name, size in _sizes(bench).items():
            repeats = max(3, min(20, (1024 * MIB) // size))
            for _ in range(bench.rounds):
                for kind in KINDS:
                    case = f"{name}, {kind}"
                    copying = ask("memcpy", size=size, repeats=repeats)
                    ours = rigs[Member("actorrpc")]
                    bench.record("object put", Member("memcpy"), "both", ours, copying, ("rate",), case=case)
                    for member, rig in rigs.items():
                        measure = ask("put", size=size, kind=kind, repeats=repeats, timeout=_PATIENCE_S)
                        bench.record("object put", member, "both", rig, measure, ("rate", "fresh"), case=case)


def get(bench: Bench) -> None:
    """Let 1 and 8 actors get one value, without and with reading all of it."""
    cases: dict[str, Measure] = {}
    for name, size in _sizes(bench).items():
        for kind in KINDS:
            for readers in (1, READERS):
                for touch in (False, True):
                    case = f"{name}, {kind}, {readers} readers{', all of it read' if touch else ''}"
                    cases[case] = ask(
                        "get", size=size, kind=kind, readers=readers, touch=touch, timeout=_PATIENCE_S
                    )
    _each(bench, "object get", cases, ("time", "next", "memory"), READERS)


def hand_over(bench: Bench) -> None:
    """Pass a value from one actor to another."""
    cases = {
        f"{name}, {kind}": ask(
            "hand_over", size=size, kind=kind, repeats=3 if size > 64 * MIB else 10, timeout=_PATIENCE_S
        )
        for name, size in _sizes(bench).items()
        for kind in KINDS
    }
    _each(bench, "object hand-over", cases, ("rate", "handed"), 2)


def pieces(bench: Bench) -> None:
    """Put 1 000 values of 1 MiB, and get them in an actor."""
    count = 100 if bench.quick else 1000
    cases = {
        f"{count} of 1 MiB, {kind}": ask("pieces", size=MIB, kind=kind, count=count, timeout=_PATIENCE_S)
        for kind in KINDS
    }
    _each(bench, "object pieces", cases, ("put_all", "get_all"), 1)


def small(bench: Bench) -> None:
    """Put 100 000 small values and get them."""
    count = 5000 if bench.quick else 100_000
    cases = {str(count): ask("small", count=count, timeout=_PATIENCE_S)}
    _each(bench, "small objects", cases, ("put_all", "get_all", "there"), 1)


def weights(bench: Bench) -> None:
    """Give weights to eight actors."""
    name, size = list(_sizes(bench).items())[-1]
    cases = {
        f"{name} to {READERS}": ask("weights", size=size, kind="torch", readers=READERS, timeout=_PATIENCE_S)
    }
    _each(bench, "object weights", cases, ("time", "memory"), READERS)


OBJECT_SECTIONS: dict[str, Callable[[Bench], None]] = {
    function.__name__: function for function in (put, get, hand_over, pieces, small, weights)
}


def _key(section: str, metric: str, case: str) -> Key:
    return Key(section, case, "same host", "both", metric)


_ASLEEP = (
    "eight processes that have slept while 1 GiB went through the caches take 2 ms to answer a call without arguments; opening "
    "the object is as cold"
)
_WRITTEN = "the maker writes the array, which takes as long as a copy; handing it on takes half of Ray's time"


def _targets() -> Iterator[Target]:
    for name in SIZES:
        for kind in KINDS:
            yield Target(
                text=f"put {name}, {kind}, into memory used before, GB/s / a copy's",
                key=_key("object put", "rate", f"{name}, {kind}"), versus="memcpy", at_least=0.8,
            )  # fmt: skip
    for kind in KINDS:
        case = f"1 GiB, {kind}, {READERS} readers"
        yield Target(
            text=f"{READERS} readers of 1 GiB, {kind}, time / Ray's", why=_ASLEEP,
            key=_key("object get", "time", case), versus="ray", at_most=0.25,
        )  # fmt: skip
        yield Target(
            text=f"{READERS} readers of 1 GiB, {kind}, memory of the host / its size",
            key=_key("object get", "memory", case), at_most=1.1,
        )  # fmt: skip
        yield Target(
            text=f"each get of 1 GiB after the first, {kind}, ms",
            key=_key("object get", "next", case), at_most=1.0,
        )  # fmt: skip
    yield Target(
        text="hand-over of 64 MiB from actor to actor, numpy, GB/s / Ray's", why=_WRITTEN,
        key=_key("object hand-over", "rate", "64 MiB, numpy"), versus="ray", at_least=3.0,
    )  # fmt: skip


OBJECT_TARGETS: tuple[Target, ...] = tuple(_targets())


def _panels() -> list[Panel]:
    def cases(section: str, metric: str, *more: str) -> dict[str, Key]:
        return {
            f"{name}\n{kind}": _key(section, metric, ", ".join((name, kind, *more)))
            for name in (*QUICK_SIZES, *SIZES)
            for kind in KINDS
        }

    everyone = f"{READERS} readers"
    weighed = {name: _key("object weights", "time", f"{name} to {READERS}") for name in ("64 MiB", "1 GiB")}
    return [
        ("put, into memory used before", "GB/s", cases("object put", "rate"), True),
        (f"{everyone} have it", "ms", cases("object get", "time", everyone), False),
        (f"memory of the host, {everyone}", "x its size", cases("object get", "memory", everyone), False),
        ("hand-over from actor to actor", "GB/s", cases("object hand-over", "rate"), True),
        (f"weights to {READERS} actors", "ms", weighed, False),
    ]


def draw_objects(path: Path, results: Results, caption: str) -> None:
    """Write the picture as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    sheet(path, results, caption, _panels())


OBJECTS = Suite(
    name="objects",
    about=(__doc__ or "").splitlines()[0],
    sections=OBJECT_SECTIONS,
    targets=OBJECT_TARGETS,
    draw=draw_objects,
    quick="smaller sizes and fewer rounds: under 4 minutes",
    versions=versions,
)


def main(arguments: list[str] | None = None) -> int:
    """Run it."""
    return run(OBJECTS, arguments)


if __name__ == "__main__":
    sys.exit(main())
