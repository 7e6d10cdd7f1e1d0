"""The sections of a run with actors: the scenarios, their placements, and numbers of calls.

Within a section the sessions of all peers are alive together and take turns, round by round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.actors_sessions import sessions
from benchmarks.bench import Bench, Member
from benchmarks.rigs import Placement, Rig, RigError
from benchmarks.series import Key

__all__ = ["ACTOR_SECTIONS", "TENSOR_SIZES", "Measure", "ask", "prepare"]

MIB = 1 << 20
TENSOR_SIZES: dict[str, int] = {"1 MiB": MIB, "64 MiB": 64 * MIB, "256 MiB": 256 * MIB}
PEERS = ("ray", "monarch", "actorrpc")
OURS = Member("actorrpc")
Measure = Callable[[Rig], dict[str, float]]


def ask(do: str, **fields: Any) -> Measure:
    """Return a function that makes a session run a scenario."""
    return lambda rig: rig.caller(do, **fields)


def prepare(bench: Bench, rigs: dict[Member, Rig | None], step: Callable[[Rig], object], what: str) -> None:
    """Run a step that is not measured in all sessions; a session in which it fails is left out of the section."""
    for member, rig in rigs.items():
        if rig is None or rig.broken:
            continue
        try:
            step(rig)
        except RigError as error:
            rig.broken = True
            bench.note(f"{what}: {member.peer}: {str(error).splitlines()[-1]}; {bench.stable.news()}")


def _place(place: Placement, *callees: str, callers: tuple[str, ...] = ()) -> Callable[[Rig], object]:
    actors = {what: list(place.callees) for what in callees} | {what: list(place.callers) for what in callers}
    return ask("place", driver=list(place.callers), actors=actors)


def calls(bench: Bench) -> None:
    """Time single calls, the core's rpc_sync for comparison, and calls of which a thousand are in flight."""
    count, windows = (400, 2) if bench.quick else (1500, 6)
    with sessions(bench, PEERS) as (rigs, _):
        prepare(bench, rigs, ask("make", what="tiny", count=1), "actor call")
        for place in bench.places("own", "one"):
            prepare(bench, rigs, _place(place, "tiny"), "actor call")
            for _ in range(bench.rounds):
                for member, rig in rigs.items():
                    ways = {member: "roundtrip"}
                    if member == OURS:
                        ways |= {Member("rpc_sync"): "core_roundtrip", Member("proxy"): "proxy_roundtrip"}
                    for shown, way in ways.items():
                        bench.record(
                            "actor call",
                            shown,
                            place.name,
                            rig,
                            ask(way, calls=count),
                            ("p50", "p99", "cpu"),
                        )
                for member, rig in rigs.items():
                    bench.record(
                        "pipelined actor calls",
                        member,
                        place.name,
                        rig,
                        ask("pipelined", windows=windows, window=1000),
                        ("rate", "cpu"),
                    )


def four(bench: Bench) -> None:
    """Have four actors call four others at the same time."""
    seconds = 0.3 if bench.quick else 1.0
    with sessions(bench, PEERS) as (rigs, _):
        for what in ("tiny", "caller"):
            prepare(bench, rigs, ask("make", what=what, count=4), "4 actors to 4")
        for place in bench.places("own", "one"):
            prepare(bench, rigs, _place(place, "tiny", callers=("caller",)), "4 to 4")
            for _ in range(bench.rounds):
                for case, window in (("windows of 250", 250), ("single calls", 0)):
                    for member, rig in rigs.items():
                        measure = ask("together", seconds=seconds, window=window)
                        bench.record("4 actors to 4", member, place.name, rig, measure, ("rate",), case=case)


def fan(bench: Bench) -> None:
    """Call eight actors at once and gather their answers."""
    rounds = 100 if bench.quick else 500
    with sessions(bench, PEERS) as (rigs, _):
        prepare(bench, rigs, ask("make", what="tiny", count=8), "fan-out")
        for _ in range(bench.rounds):
            for member, rig in rigs.items():
                bench.record(
                    "fan-out and gather",
                    member,
                    "both",
                    rig,
                    ask("fan", members=8, rounds=rounds),
                    ("p50", "p99", "rate"),
                    case="1 to 8",
                )


def tensors(bench: Bench) -> None:
    """Move tensors as arguments, as results, and from one actor to another without passing the driver."""
    with sessions(bench, PEERS) as (rigs, _):
        prepare(bench, rigs, ask("make", what="holder", count=2), "actor tensors")
        for name in list(TENSOR_SIZES)[: 2 if bench.quick else 3]:
            size = TENSOR_SIZES[name]
            repeats = 2 if bench.quick and size > MIB else max(3, min(50, (256 * MIB) // size))
            for _ in range(min(bench.rounds, 3 if size > MIB else 5)):
                for direction in ("argument", "result", "hand-over"):
                    for member, rig in rigs.items():
                        if member.peer == "monarch" and direction == "hand-over":
                            continue  # its futures cannot be passed on
                        for shown, kind in ((member, "torch"), (Member("ray numpy"), "numpy")):
                            if kind == "numpy" and member.peer != "ray":
                                continue
                            measure = ask(
                                "tensor", size=size, direction=direction, kind=kind, repeats=repeats
                            )
                            case = f"{direction} {name}"
                            bench.record("actor tensors", shown, "both", rig, measure, ("rate",), case=case)
            prepare(bench, rigs, ask("forget"), "actor tensors")


def start(bench: Bench) -> None:
    """Time init(), and init() with a first actor; measure the memory of the cluster."""
    for _ in range(1 if bench.quick else min(3, bench.rounds)):
        for peer in PEERS:
            with sessions(bench, (peer,)) as (rigs, took):
                for case, metric in (("init", "init"), ("init and first answer", "first")):
                    key = Key("start", case, "same host", "both", "time")
                    bench.results.add(key, peer, took[peer].get(metric))
                for member, rig in rigs.items():
                    bench.record(
                        "cluster",
                        member,
                        "both",
                        rig,
                        ask("overhead"),
                        ("pss",),
                        case="all processes but the driver and its actors",
                    )


def creation(bench: Bench) -> None:
    """Start eight actor processes in a running cluster, with and without torch; measure their memory when idle."""
    metrics = ("time", "private", "pss", "gather")
    with sessions(bench, PEERS) as (rigs, _):
        for _ in range(1 if bench.quick else min(3, bench.rounds)):
            for case, torch_too in (("8 processes", False), ("8 processes with torch", True)):
                for member, rig in rigs.items():
                    measure = ask("create", count=8, torch_too=torch_too)
                    bench.record("actor creation", member, "both", rig, measure, metrics, case=case)


def many(bench: Bench) -> None:
    """Start 64 actor processes; make 1 000 and 10 000 actors in one worker."""
    metrics = ("time", "private", "pss", "gather")
    with sessions(bench, ("actorrpc",) if bench.quick else PEERS) as (rigs, _):
        for member, rig in rigs.items():
            bench.record(
                "many processes",
                member,
                "both",
                rig,
                ask("create", count=64, torch_too=False, timeout=240.0),
                metrics,
                case="64 processes",
            )
        for count in (1000, 10_000):
            bench.record(
                "actors in one worker",
                OURS,
                "both",
                rigs[OURS],
                ask("crowd", count=count),
                ("time", "each", "rate", "weight"),
                case=f"{count} actors",
            )


def checkpoints(bench: Bench) -> None:
    """Make 200 pipelined calls of an actor that may restart, with ``checkpoint()`` and without."""
    windows = 5 if bench.quick else 20
    with sessions(bench, ("actorrpc",)) as (rigs, _):
        for _ in range(bench.rounds):
            for shown, kept in ((OURS, True), (Member("without"), False)):
                measure = ask("checkpoints", kept=kept, windows=windows, window=200)
                bench.record("checkpoints", shown, "both", rigs[OURS], measure, ("time",), case="200 calls")


ACTOR_SECTIONS: dict[str, Callable[[Bench], None]] = {
    function.__name__: function
    for function in (calls, four, fan, tensors, start, creation, checkpoints, many)
}
