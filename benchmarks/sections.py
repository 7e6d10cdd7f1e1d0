"""The sections of a run: the scenarios, their placements, and numbers of calls.

Each section is a function of one :class:`~benchmarks.bench.Bench`. Within a section and placement the
groups of all peers are alive together and take turns, round by round, so that other load on the machine
affects all peers equally.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from actorrpc.flight_recorder import KEPT
from benchmarks import reinforce as reinforce_example
from benchmarks.bench import Bench, Member
from benchmarks.idle import Sample, difference, sample
from benchmarks.rigs import PEERS, Rig, RigError
from benchmarks.series import Key

__all__ = ["SECTIONS", "TENSOR_SIZES"]

KIB, MIB = 1 << 10, 1 << 20
TENSOR_SIZES: dict[str, int] = {
    "1 KiB": KIB, "16 KiB": 16 * KIB, "64 KiB": 64 * KIB, "256 KiB": 256 * KIB, "1 MiB": MIB,
    "4 MiB": 4 * MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB, "256 MiB": 256 * MIB,
}  # fmt: skip
QUICK_SIZES = ("1 KiB", "1 MiB", "64 MiB")

WITH_RAW = [
    Member(peer, transport)
    for transport in ("same host", "TCP")
    for peer in ("torch", "actorrpc", "no spin", "raw")
]
WITHOUT_RAW = [member for member in WITH_RAW if member.peer != "raw"]
ONE_HOST = [Member("torch"), Member("actorrpc"), Member("no spin")]
TWO = [Member("torch"), Member("actorrpc")]


def roundtrip(bench: Bench) -> None:
    """Time single calls without arguments."""
    calls = 500 if bench.quick else 3000
    _single_calls(bench, "round trip", WITH_RAW, bench.rounds, calls, calls // 5, ("p50", "p99", "cpu"))


def longest(bench: Bench) -> None:
    """Time many single calls, for the slowest of them."""
    calls = 2000 if bench.quick else 100_000
    _single_calls(bench, "longest call", TWO, 1, calls, calls // 10, ("p999", "longest", "full"))


def _single_calls(
    bench: Bench,
    section: str,
    members: list[Member],
    rounds: int,
    calls: int,
    warm: int,
    metrics: tuple[str, ...],
) -> None:
    for place in bench.places("own", "one"):
        with bench.groups(members, place) as rigs:
            for _ in range(rounds):
                for member, rig in rigs.items():
                    bench.record(
                        section,
                        member,
                        place.name,
                        rig,
                        lambda rig: rig.caller("roundtrip", calls=calls, warm=warm),
                        metrics,
                    )


def pipelined(bench: Bench) -> None:
    """Time calls of which a thousand are in flight."""
    windows = 2 if bench.quick else 10
    for place in bench.places("own", "one"):
        with bench.groups(WITHOUT_RAW, place) as rigs:
            for _ in range(bench.rounds):
                for member, rig in rigs.items():
                    bench.record(
                        "pipelined",
                        member,
                        place.name,
                        rig,
                        lambda rig: rig.caller("pipelined", windows=windows, window=1000, warm=1),
                        ("rate", "cpu"),
                    )


def references(bench: Bench) -> None:
    """Time single calls of a method through a reference, and ``rpc_sync`` of a function for comparison."""
    calls = 500 if bench.quick else 3000
    for place in bench.places("own", "one"):
        with bench.groups(TWO, place) as rigs:
            for _ in range(bench.rounds):
                for member, rig in rigs.items():
                    ways = {member: "reference_roundtrip"}
                    if member.peer == "actorrpc":
                        ways[Member("rpc_sync")] = "roundtrip"
                    for shown, way in ways.items():
                        bench.record(
                            "reference call",
                            shown,
                            place.name,
                            rig,
                            lambda rig, way=way: rig.caller(way, calls=calls, warm=calls // 5),
                            ("p50", "p99", "cpu"),
                        )


def small(bench: Bench) -> None:
    """Send little: 400 bytes of one tensor there and back, and a list of 200 small tensors as an argument."""
    calls = 200 if bench.quick else 1000
    for place in bench.places("own", "one"):
        with bench.groups(TWO, place) as rigs:
            for _ in range(bench.rounds):
                for member, rig in rigs.items():
                    bench.record(
                        "small tensors",
                        member,
                        place.name,
                        rig,
                        lambda rig: rig.caller("small_echo", calls=calls, warm=calls // 5),
                        ("p50", "extra", "cpu"),
                        case="echo 400 bytes",
                    )
                for member, rig in rigs.items():
                    bench.record(
                        "small tensors",
                        member,
                        place.name,
                        rig,
                        lambda rig: rig.caller("many_tensors", calls=calls // 5, warm=calls // 25, count=200),
                        ("p50", "cpu"),
                        case="200 in a list",
                    )


def _together(seconds: float, window: int, callee: str = "") -> Callable[[Rig], dict[str, float]]:
    def measure(rig: Rig) -> dict[str, float]:
        answers = rig.callers(
            "together",
            start_at=time.monotonic() + 0.15,
            seconds=seconds,
            window=window,
            warm=1 if window else 20,
            callee=callee,
        )
        calls = sum(answer["calls"] for answer in answers)
        return {
            "rate": sum(answer["calls"] / answer["elapsed"] for answer in answers),
            "cpu": sum(answer["used"] for answer in answers) / max(1.0, calls) * 1e6,
        }

    return measure


def four(bench: Bench) -> None:
    """Have four callers call four callees at the same time, with calls in windows and one by one."""
    seconds = 0.2 if bench.quick else 0.5
    for place in bench.places("own", "one"):
        with bench.groups(ONE_HOST, place, pairs=4) as rigs:
            for _ in range(bench.rounds):
                for case, window in (("windows of 250", 250), ("single calls", 0)):
                    for member, rig in rigs.items():
                        measure = _together(seconds, window)
                        bench.record("4 to 4", member, place.name, rig, measure, ("rate", "cpu"), case=case)


def fan_in(bench: Bench) -> None:
    """Compare sixteen callers of one callee at the same time with a single caller, in turns."""
    seconds, callers = (0.3, 4) if bench.quick else (1.0, 16)
    for place in bench.places("own", "one"):
        with (
            bench.groups([Member("actorrpc")], place, pairs=callers) as many,
            bench.groups([Member("actorrpc")], place) as one,
        ):
            for _ in range(bench.rounds):
                for case, window in (("windows of 250", 250), ("single calls", 0)):
                    for shown, rigs, callee in (
                        (Member("actorrpc"), many, f"w{callers}"),
                        (Member("one caller"), one, "w1"),
                    ):
                        measure = _together(seconds, window, callee)
                        for rig in rigs.values():
                            bench.record(
                                "fan-in", shown, place.name, rig, measure, ("rate", "cpu"), case=case
                            )


def oversubscribed(bench: Bench) -> None:
    """Run four ping-pong pairs on two CPUs, all of them pinned to both CPUs."""
    seconds = 0.4 if bench.quick else 1.0
    if len(bench.placements["both"].callers) < 2:
        return
    with bench.groups(ONE_HOST, bench.placements["both"], pairs=4) as rigs:
        for _ in range(bench.rounds):
            for member, rig in rigs.items():
                measure = _together(seconds, 0)
                bench.record("oversubscribed", member, "both", rig, measure, ("rate", "cpu"))


def busy(bench: Bench) -> None:
    """Time single calls to a callee whose interpreter is busy on another thread."""
    calls, rounds = (20, min(2, bench.rounds)) if bench.quick else (60, min(5, bench.rounds))

    def measure(rig: Rig) -> dict[str, float]:
        rig.callee("busy_start")
        try:
            return rig.caller("roundtrip", calls=calls, warm=5)
        finally:
            if not rig.broken:
                rig.callee("busy_stop")

    members = [*ONE_HOST, Member("switch 0.5 ms")]
    for place in bench.places("own", "one"):
        with bench.groups(members, place) as rigs:
            for _ in range(rounds):
                for member, rig in rigs.items():
                    bench.record("busy callee", member, place.name, rig, measure, ("p50", "p99"))


def _repeats(size: int) -> int:
    return max(2, min(200, (96 << 20) // size))


def _send(size: int, direction: str, turn: int) -> Callable[[Rig], dict[str, float]]:
    warm = 1 if turn else 2
    return lambda rig: rig.caller("tensor", size=size, repeats=_repeats(size), direction=direction, warm=warm)


def _copy(size: int) -> Callable[[Rig], dict[str, float]]:
    return lambda rig: rig.caller("copy", size=size, repeats=_repeats(size))


def tensors(bench: Bench) -> None:
    """Send tensors of many sizes, as an argument and there and back, and copy the same in memory."""
    rounds, metrics = min(2 if bench.quick else 5, bench.rounds), ("rate", "cpu")
    members = [member for member in WITH_RAW if member.peer != "no spin"]
    if not bench.quick:
        members.insert(2, Member("no lane"))
    for place in bench.places("own", "one"):
        with bench.groups(members, place) as rigs:
            for name in QUICK_SIZES if bench.quick else TENSOR_SIZES:
                bench.say(f"  tensors of {name} ({place.name})")
                size = TENSOR_SIZES[name]
                for turn in range(min(3, rounds) if size >= 64 * MIB else rounds):
                    for direction in ("argument", "echo"):
                        case, measure = f"{direction} {name}", _send(size, direction, turn)
                        for member, rig in rigs.items():
                            bench.record("tensors", member, place.name, rig, measure, metrics, case=case)
                        copier, raw = Member("memcpy"), rigs[Member("raw")]
                        bench.record("tensors", copier, place.name, raw, _copy(size), metrics, case=case)


def encryption(bench: Bench) -> None:
    """Compare TCP with TLS, which is the default, and without: calls, large tensors, and the first call to a worker."""
    members = [Member("actorrpc", "TCP"), Member("encrypted", "TCP")]
    encrypted = members[1]
    rounds, calls = min(5, bench.rounds), 500 if bench.quick else 3000

    def single(rig: Rig) -> dict[str, float]:
        return rig.caller("roundtrip", calls=calls, warm=calls // 5)

    def handshakes(rig: Rig) -> dict[str, float]:
        return rig.caller("handshakes", count=100)

    for place in bench.places("own", "one"):
        with bench.groups(members, place) as rigs:
            for turn in range(rounds):
                large = _send(64 * MIB, "argument", turn)
                for member, rig in rigs.items():
                    bench.record("encryption", member, place.name, rig, single, ("p50", "cpu"))
                    bench.record("encryption of tensors", member, place.name, rig, large, ("rate", "cpu"))
                case, rig = "handshakes, both sides in one process", rigs[encrypted]
                bench.record("encryption", encrypted, place.name, rig, handshakes, ("rate",), case=case)
    place = bench.placements["both"]
    for _ in range(rounds):
        for member in members:
            with bench.groups([member], place) as rigs:
                case, rig = "first call", rigs[member]
                bench.record(
                    "encryption",
                    member,
                    place.name,
                    rig,
                    lambda rig: rig.caller("first_call"),
                    ("time",),
                    case=case,
                )


def startup(bench: Bench) -> None:
    """Time a group's start: from the first fork of ranks that have all imported, to the last ``init_rpc``."""
    place, rounds = bench.placements["both"], min(1 if bench.quick else 5, bench.rounds)
    for member in TWO:
        try:
            bench.stable.prepare(place.callers, f"benchmarks.scenarios,{PEERS[member].backend}")
        except RigError as error:
            bench.note(f"{member.peer} cannot be imported: {str(error).splitlines()[-1]}")
    for ranks in (2, 4, 8):
        for _ in range(rounds):
            for how in ("file", "tcp"):
                for member in TWO:
                    _start_once(bench, member, ranks, how)


def _start_once(bench: Bench, member: Member, ranks: int, how: str) -> None:
    peer, place = PEERS[member], bench.placements["both"]
    rig: Rig | None = None
    value: float | None = None
    try:
        start = time.monotonic()
        modules = f"benchmarks.scenarios,{peer.backend}"
        rig = Rig(peer, [bench.stable.fork(place.callers, modules) for _ in range(ranks)])
        rig.begin()
        value = (rig.join(bench.stable.rendezvous(how)) - start) * 1e3
    except RigError as error:
        bench.note(f"{member.peer} did not start with {ranks} workers: {str(error).splitlines()[-1]}")
    finally:
        if rig is not None:
            rig.close(kill=value is None)
    key = Key("start-up", f"{ranks} workers, {how} store", member.transport, place.name, "time")
    bench.results.add(key, member.peer, value)


def memory(bench: Bench) -> None:
    """Measure the memory of a worker that has joined a group and was called, less a process that only imported torch."""
    place = bench.placements["both"]
    for _ in range(1 if bench.quick else min(3, bench.rounds)):
        bare = Rig(PEERS[Member("torch")], [bench.stable.solo(place.callers)])
        try:
            bare.begin()
            empty = bare.everyone("usage")[0]
        except RigError as error:
            bench.note(f"no bare process to weigh: {error}")
            return
        finally:
            bare.close(kill=True)

        def measure(rig: Rig, empty: dict[str, float] = empty) -> dict[str, float]:
            rig.caller("roundtrip", calls=1000, warm=0)
            rig.caller("pipelined", windows=2, window=1000, warm=0)
            weights = rig.everyone("usage")
            return {name: max(weight[name] for weight in weights) - empty[name] for name in ("rss", "uss")}

        for member in TWO:
            with bench.groups([member], place, solo=True) as rigs:
                bench.record("memory", member, "both", rigs[member], measure, ("rss", "uss"))


def idle(bench: Bench) -> None:
    """Measure, from outside, the processor time of idle processes; all groups are measured at the same time."""
    seconds = 2.0 if bench.quick else 5.0
    place = bench.places("own", "one")[0]
    with bench.groups(ONE_HOST, place) as rigs:
        for rig in rigs.values():
            if rig is not None:
                rig.resume()
                rig.caller("roundtrip", calls=100, warm=0)
        time.sleep(6.0)  # timers that the last calls left behind have fired
        for _ in range(1 if bench.quick else min(3, bench.rounds)):
            before: dict[Member, Sample] = {m: sample(rig.pids()) for m, rig in rigs.items() if rig}
            time.sleep(seconds)
            after: dict[Member, Sample] = {m: sample(rig.pids()) for m, rig in rigs.items() if rig}
            for member, rig in rigs.items():

                def measure(_: Rig, member: Member = member) -> dict[str, float]:
                    return difference(before[member], after[member], seconds)  # noqa: B023

                bench.record("idle", member, place.name, rig, measure, ("cpu_idle", "wakes"))
            for rig in rigs.values():
                if rig is not None:
                    rig.resume()


def flat(bench: Bench) -> None:
    """Measure the growth of the processes over 100 000 calls.

    Memory is measured and not time, so the peers run in parallel. torch makes a fifth of the calls, and its growth is scaled.
    """
    calls = 20_000 if bench.quick else 100_000
    place = bench.placements["both"]
    for case, sizes in (("no tensors", []), ("tensors", [4 * KIB, 128 * KIB])):
        with bench.groups(TWO, place) as rigs:
            for member, rig in rigs.items():
                if rig is not None:
                    rig.resume()
                    share = calls // 5 if member.peer == "torch" else calls  # it is slower, and no target's
                    # Our flight recorders keep a record of each call: fill them before the measurement.
                    warm = share // 2 if member.peer == "torch" else max(share // 2, KEPT)
                    fields = {"calls": share, "warm": warm, "sizes": sizes}
                    rig.workers[0].send("churn", **{"with": fields})
            for member, rig in rigs.items():
                bench.record(
                    "flat memory",
                    member,
                    "both",
                    rig,
                    lambda rig: rig.workers[0].receive(400.0),
                    ("growth",),
                    case=case,
                )


def reinforce(bench: Bench) -> None:
    """Run the reinforcement-learning example on both backends."""
    reinforce_example.measure(
        bench.results, rounds=min(1 if bench.quick else 3, bench.rounds), quick=bench.quick, note=bench.note
    )


SECTIONS: dict[str, Callable[[Bench], None]] = {
    function.__name__: function
    for function in (
        roundtrip, references, longest, pipelined, four, fan_in, busy, oversubscribed, small, tensors, encryption, startup,
        memory, idle, flat, reinforce,
    )
}  # fmt: skip
