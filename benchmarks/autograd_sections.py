"""The sections of the autograd benchmark: the scenarios, their placements, and numbers of steps.

As in ``sections.py``, the groups of all peers are alive together and take turns. Ranks alternate between the CPUs of a
placement; in training the last rank is the server, and all others are trainers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.bench import Bench, Member
from benchmarks.rigs import PEERS, Peer, Placement, Rig, RigError, Stable
from benchmarks.series import Key

__all__ = ["AUTOGRAD_SECTIONS", "HOPS", "MODELS", "GradientBench", "GradientRig", "slope"]

MIB = 1 << 20
SCENARIOS = "benchmarks.autograd_scenarios"
TWO = [Member("torch"), Member("actorrpc")]
BOTH = [*TWO, Member("torch", "TCP"), Member("actorrpc", "TCP")]
HOPS = (1, 2, 4, 8, 16)
WORLDS = (2, 4)

# Section -> case -> sizes. The first sizes of the RNN are the sizes of torch's tutorial.
MODELS: dict[str, dict[str, dict[str, int]]] = {
    "rnn": {
        "tutorial": {"words": 7, "width": 3, "layers": 4, "length": 3, "batch": 5},
        "larger": {"words": 2000, "width": 64, "layers": 2, "length": 16, "batch": 8},
    },
    "server": {"sparse table": {"words": 100_000, "width": 64, "length": 20, "batch": 64}},
}


class GradientRig(Rig):
    """One running group that has autograd and optimizer as well."""

    __slots__ = ()

    @classmethod
    def assemble(cls, stable: Stable, peer: Peer, cpus: Sequence[tuple[int, ...]]) -> GradientRig:
        """Start a group, with each worker on its CPUs, and wait until all have joined.

        Raises:
            RigError: a worker failed to start or to join.
        """
        package = peer.backend.rpartition(".")[0]
        modules = ",".join([SCENARIOS, peer.backend, f"{package}.autograd", f"{package}.optim"])
        rig = cls(peer, [])
        try:
            for place in cpus:
                rig.workers.append(stable.fork(place, modules))
            rig.pairs = len(rig.workers) // 2
            rig.begin()
            rig.join(stable.rendezvous("file"))
        except BaseException:
            rig.close(kill=True)
            raise
        return rig

    def begin(self) -> None:
        """Give every worker its environment and its scenarios."""
        self._all("begin", {"environment": self.peer.environment, "module": SCENARIOS}, 60.0)

    def trainers(self, do: str, *, timeout: float = 120.0, **fields: object) -> list[dict[str, float]]:
        """Run a scenario on all workers but the last, the server."""
        return self._ask(self.workers[:-1], do, fields, timeout)


class GradientBench(Bench):
    """A run whose groups are :class:`GradientRig`."""

    __slots__ = ()

    def start(
        self, member: Member, placement: Placement, *, pairs: int = 1, solo: bool = False
    ) -> GradientRig | None:
        """Start one group of ``2 * pairs`` workers, or note why it does not start."""
        try:
            return GradientRig.assemble(
                self.stable, PEERS[member], [placement.callers, placement.callees] * pairs
            )
        except RigError as error:
            self.note(
                f"{' '.join(member)} did not start: {str(error).splitlines()[-1]}; {self.stable.news()}"
            )
            return None


def _trained(steps: int, first: bool) -> Callable[[Rig], dict[str, float]]:
    """Return a measurement of training: all trainers at the same time."""

    def measure(rig: Rig) -> dict[str, float]:
        assert isinstance(rig, GradientRig)
        rig.trainers("train", steps=1, warm=5 if first else 1)
        before = sum(each["seconds"] for each in rig.everyone("used"))
        found = rig.trainers("train", steps=steps, warm=0, start_at=time.monotonic() + 0.05)
        after = sum(each["seconds"] for each in rig.everyone("used"))
        return {
            "time": statistics.mean(each["time"] for each in found),
            "step_cpu": (after - before) / (steps * len(found)) * 1e6,
            "loss": statistics.mean(each["loss"] for each in found),
        }

    return measure


def _training(bench: Bench, section: str) -> None:
    steps = 20 if bench.quick else 60
    for world in WORLDS:
        for place in bench.places("own", "one"):
            with bench.groups(TWO if bench.quick else BOTH, place, pairs=world // 2) as rigs:
                for case, sizes in MODELS[section].items():
                    for member, rig in rigs.items():
                        _make(bench, member, rig, section, sizes)
                    for turn in range(bench.rounds):
                        for member, rig in rigs.items():
                            bench.record(
                                section,
                                member,
                                place.name,
                                rig,
                                _trained(steps, turn == 0),
                                ("time", "step_cpu"),
                                case=f"{case}, {world} workers",
                            )
                        if section == "rnn" and world == 2:
                            _plain(bench, place.name, rigs.get(Member("actorrpc")), case, steps, sizes)


def _plain(
    bench: Bench, place: str, rig: GradientRig | None, case: str, steps: int, sizes: dict[str, int]
) -> None:
    """Train the same model in one process: the cost of a step without messages."""

    def measure(rig: Rig) -> dict[str, float]:
        return rig.caller("plain", turns=5 * steps, warm=10, **sizes)

    bench.record("rnn", Member("plain"), place, rig, measure, ("time",), case=f"{case}, 2 workers")


def _make(bench: Bench, member: Member, rig: Rig | None, section: str, sizes: dict[str, int]) -> None:
    if rig is None or rig.broken:
        return
    assert isinstance(rig, GradientRig)
    rig.resume()
    try:
        seed = {"seed": 1} if section == "server" else {}
        rig.trainers("make", model=section, server=len(rig.workers) - 1, **sizes, **seed)
    except RigError as error:
        rig.broken = True
        bench.note(f"{section} {' '.join(member)}: {str(error).splitlines()[-1]}; {bench.stable.news()}")
    finally:
        rig.pause()


def rnn(bench: Bench) -> None:
    """Train torch's model-parallel RNN; with four workers three trainers have each a model of its own."""
    _training(bench, "rnn")


def server(bench: Bench) -> None:
    """Train with a parameter server: with four workers three trainers share one table."""
    _training(bench, "server")


def slope(counts: Sequence[int], values: Sequence[float | None]) -> float | None:
    """Return the cost of each further hop: the slope of the line that fits best; None with fewer than two values."""
    known = [(count, value) for count, value in zip(counts, values, strict=True) if value is not None]
    if len(known) < 2:
        return None
    return statistics.linear_regression(*zip(*known, strict=True)).slope


def chain(bench: Bench) -> None:
    """Time forward and backward through 1 to 16 hops, A to B to A to B, and A to B to C to D to A."""
    turns = 20 if bench.quick else 60
    metrics = ("p50", "forward", "backward")

    def measure(path: list[int]) -> Callable[[Rig], dict[str, float]]:
        return lambda rig: rig.caller("chain", path=path, turns=turns, warm=max(3, turns // 10))

    for world in WORLDS:
        for place in bench.places("own", "one"):
            with bench.groups(TWO if bench.quick else BOTH, place, pairs=world // 2) as rigs:
                for _ in range(bench.rounds):
                    for hops in HOPS:
                        path = [(step + 1) % world for step in range(hops)]
                        for member, rig in rigs.items():
                            case = f"{hops} hop{'s' if hops > 1 else ''}, {world} workers"
                            bench.record("chain", member, place.name, rig, measure(path), metrics, case=case)
                    for member in rigs:
                        _add_slope(bench, member, place.name, world)


def _add_slope(bench: Bench, member: Member, placement: str, world: int) -> None:
    def latest(hops: int) -> float | None:
        case = f"{hops} hop{'s' if hops > 1 else ''}, {world} workers"
        return bench.results.values(Key("chain", case, member.transport, placement, "p50"), member.peer)[-1]

    key = Key("chain", f"each hop, {world} workers", member.transport, placement, "hop")
    bench.results.add(key, member.peer, slope(HOPS, [latest(hops) for hops in HOPS]))


def activation(bench: Bench) -> None:
    """Send 64 MiB there and its gradient back."""
    turns, rounds = (2, min(2, bench.rounds)) if bench.quick else (4, bench.rounds)
    for place in bench.places("own", "one"):
        with bench.groups(TWO if bench.quick else BOTH, place) as rigs:
            for turn in range(rounds):
                for member, rig in rigs.items():
                    warm = 1 if turn else 2
                    bench.record(
                        "activation",
                        member,
                        place.name,
                        rig,
                        lambda rig, warm=warm: rig.caller(  # type: ignore[misc]
                            "activation", size=64 * MIB, turns=turns, warm=warm
                        ),
                        ("both_ways", "time"),
                        case="64 MiB",
                    )


def alone(bench: Bench) -> None:
    """Compare a pass that never leaves its worker with plain autograd, and calls with and without recording."""
    turns = 100 if bench.quick else 500
    plain = Member("plain")
    place = bench.places("own", "one")[0]

    def passing(layers: int, plain: bool) -> Callable[[Rig], dict[str, float]]:
        return lambda rig: rig.caller("alone", layers=layers, turns=turns, warm=10, plain=plain)

    def calling(how: str) -> Callable[[Rig], dict[str, float]]:
        return lambda rig: rig.caller("recording", turns=turns, warm=10, how=how)

    with bench.groups(TWO, place) as rigs:
        for _ in range(bench.rounds):
            for layers in (1, 50):
                case = f"{layers} layer{'s' if layers > 1 else ''}"
                for member, rig in rigs.items():
                    bench.record(
                        "local pass", member, place.name, rig, passing(layers, False), ("p50",), case=case
                    )
                # On a worker of ours: torch's polling thread would share the CPU with the timed code.
                ours = rigs.get(Member("actorrpc"))
                bench.record(
                    "local pass", plain, place.name, ours, passing(layers, True), ("p50",), case=case
                )
            for how, case in (
                ("outside", "outside of a context"),
                ("inside", "in a context, no gradient"),
                ("grad", "in a context, recorded"),
            ):
                for member, rig in rigs.items():
                    bench.record("recording", member, place.name, rig, calling(how), ("p50",), case=case)


AUTOGRAD_SECTIONS: dict[str, Callable[[Bench], None]] = {
    function.__name__: function for function in (rnn, server, chain, activation, alone)
}
