"""The targets, as data: one line for each figure, judged from the results of a run.

A target compares one series of actorrpc with a bound, either as it is or as a ratio, taken round by
round, to the same series of another peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.series import Key, Results, Summary, ratio, summarise

__all__ = ["TARGETS", "Target", "Verdict", "judge"]

HOST, TCP = "same host", "TCP"

# Why figures are missed: from timing each piece by itself on a nearly idle machine (Python 3.11, us a call), and from cProfile.
# The last one is a guess that one experiment supports: with 200 us of spin the example takes 1.2 to 1.4 times as many steps.
_PYTHON = (
    "the interpreter: API and pickling 7, sending and reading the reply 8, the callee's reading 3, execution 4, answer 1, "
    "around nine system calls; raw is two calls of one instruction each"
)
_ISSUE = "one thread makes the calls and shares the interpreter with the thread that reads the replies: about 10 us a call"
_TENSOR = "some 60 us of Python on each side for one tensor (pickling 8 + 8, placing 12, headers), besides 50-90 us of copying"
_REFERENCE = (
    "a call by a reference makes a proxy and names its method: a score of Python functions more than rpc_sync"
)
_SMALL = "a tensor's header, its storage and its place in a segment are made and read in Python, on each side"
_LIST = "a tensor with a storage of its own takes 0.8 us to make; its checks, its pickle and its end as much again, on each side"
_ONE_TCP = "sender and receiver share the processor; a chunk's header and hand-over cost what the second processor hides"
_MANY = (
    "16 callers take turns on the processors that one has to itself: with colder caches and more wake-ups a call costs its "
    "caller 23-27 us of processor time in place of 16"
)
_CIPHER = (
    "on one CPU, AES-256-GCM alone encrypts and decrypts 64 MiB in as much time as the plain transfer takes (openssl speed: "
    "4.2 GB/s); OpenSSL 3.0 takes 5.4 us for each record of 16 KiB on each side, 3.8 of them for the cipher"
)
_SPIN = "a step probably keeps the callee busy for longer than the 100 us that a thread may spin: both calls pay a wake-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One figure to reach."""

    text: str
    key: Key
    peer: str = "actorrpc"
    versus: str | None = None
    at_most: float | None = None
    at_least: float | None = None
    why: str = ""  # why it is not reached, if the reason is known

    @property
    def bound(self) -> str:
        """Return the bound as it is printed."""
        if self.at_most is not None:
            return f"<= {self.at_most:.4g}"
        return f">= {self.at_least:.6g}"

    def met(self, value: float) -> bool:
        """Return whether a value satisfies the bound."""
        if self.at_most is not None:
            return value <= self.at_most
        return self.at_least is not None and value >= self.at_least


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and the measured value; ``reached`` is ``None`` if there is no value."""

    target: Target
    measured: Summary | None
    reached: bool | None


def judge(results: Results, target: Target) -> Verdict:
    """Compare a run's results with one target: the median decides."""
    values = results.values(target.key, target.peer)
    if target.versus is not None:
        values = ratio(values, results.values(target.key, target.versus))
    measured = summarise(values)
    return Verdict(target, measured, None if measured is None else target.met(measured.median))


def _key(section: str, metric: str, placement: str, *, case: str = "", transport: str = HOST) -> Key:
    return Key(section, case, transport, placement, metric)


def _calls() -> Iterator[Target]:
    trip = "round trip"
    yield Target(
        text="round trip p50, own CPUs, spin off / raw",
        why=_PYTHON, key=_key(trip, "p50", "own"), peer="no spin", versus="raw", at_most=1.4,
    )  # fmt: skip
    yield Target(
        text="round trip p50, own CPUs / torch",
        key=_key(trip, "p50", "own"), versus="torch", at_most=0.2,
    )  # fmt: skip
    yield Target(
        text="round trip processor time, own CPUs / torch",
        key=_key(trip, "cpu", "own"), versus="torch", at_most=1 / 3,
    )  # fmt: skip
    yield Target(
        text="round trip p50, one CPU / torch",
        why=_PYTHON,
        key=_key(trip, "p50", "one"),
        versus="torch",
        at_most=0.2,
    )
    yield Target(
        text="round trip processor time, one CPU / torch",
        why=_PYTHON, key=_key(trip, "cpu", "one"), versus="torch", at_most=0.2,
    )  # fmt: skip
    yield Target(
        text="round trip p50, one CPU, us", why=_PYTHON, key=_key(trip, "p50", "one"), at_most=38.0,
    )  # fmt: skip
    yield Target(
        text="round trip processor time, one CPU, us", why=_PYTHON, key=_key(trip, "cpu", "one"), at_most=40.0,
    )  # fmt: skip
    yield Target(
        text="reference's rpc_sync p50, one CPU / rpc_sync",
        key=_key("reference call", "p50", "one"), versus="rpc_sync", at_most=1.3, why=_REFERENCE,
    )  # fmt: skip
    yield Target(
        text="round trip p50, one CPU, spin on / off (5 % for noise)",
        key=_key(trip, "p50", "one"), versus="no spin", at_most=1.05,
    )  # fmt: skip
    for place, where, bound in (("own", "own CPUs", 7.0), ("one", "one CPU", 8.0)):
        yield Target(
            text=f"pipelined calls/s, {where} / torch",
            why=_ISSUE, key=_key("pipelined", "rate", place), versus="torch", at_least=bound,
        )  # fmt: skip
        yield Target(
            text=f"pipelined calls/s, {where}",
            why=_ISSUE,
            key=_key("pipelined", "rate", place),
            at_least=60_000,
        )
    for place, where in (("own", "own CPUs"), ("one", "one CPU")):
        yield Target(
            text=f"4 to 4 pipelined calls/s, {where} / torch",
            why=_ISSUE, key=_key("4 to 4", "rate", place, case="windows of 250"), versus="torch", at_least=5.0,
        )  # fmt: skip
    for place, where in (("own", "own CPUs"), ("one", "one CPU")):
        for case in ("windows of 250", "single calls"):
            yield Target(
                text=f"16 callers of one callee, calls/s in all, {case}, {where} / one caller (5 % for noise)",
                why=_MANY, key=_key("fan-in", "rate", place, case=case), versus="one caller", at_least=0.95,
            )  # fmt: skip
    for place, where in (("own", "own CPUs"), ("one", "one CPU")):
        yield Target(
            text=f"busy callee p50, {where} / torch (5 % for noise)",
            key=_key("busy callee", "p50", place), versus="torch", at_most=1.05,
        )  # fmt: skip
    yield Target(
        text="4 pairs on 2 CPUs, calls/s, spin on / off",
        key=_key("oversubscribed", "rate", "both"), versus="no spin", at_least=0.95,
    )  # fmt: skip


def _tensors() -> Iterator[Target]:
    yield Target(
        text="echo of 400 bytes of tensor, one CPU, us more than a plain call",
        key=_key("small tensors", "extra", "one", case="echo 400 bytes"), at_most=70.0, why=_SMALL,
    )  # fmt: skip
    for place, where in (("own", "own CPUs"), ("one", "one CPU")):
        yield Target(
            text=f"list of 200 small tensors, p50, {where} / torch",
            key=_key("small tensors", "p50", place, case="200 in a list"), versus="torch", at_most=1 / 3, why=_LIST,
        )  # fmt: skip
    for size, bound in (("1 MiB", 2.2), ("64 MiB", 2.5), ("256 MiB", 2.5)):
        for direction in ("argument", "echo"):
            for place, where in (("own", "own CPUs"), ("one", "one CPU")):
                yield Target(
                    text=f"{size} tensor, {direction}, GB/s, {where} / torch",
                    why=_TENSOR,
                    key=_key("tensors", "rate", place, case=f"{direction} {size}"),
                    versus="torch",
                    at_least=bound,
                )
    for direction in ("argument", "echo"):
        for place, where in (("own", "own CPUs"), ("one", "one CPU")):
            yield Target(
                text=f"64 MiB tensor, {direction}, forced TCP, {where} / raw TCP",
                why=_ONE_TCP,
                key=_key("tensors", "rate", place, case=f"{direction} 64 MiB", transport=TCP),
                versus="raw",
                at_least=0.85,
            )


def _encryption() -> Iterator[Target]:
    for place, where in (("own", "own CPUs"), ("one", "one CPU")):
        yield Target(
            text=f"64 MiB tensor, encrypted / not encrypted, {where}",
            why=_CIPHER, key=_key("encryption of tensors", "rate", place, transport=TCP),
            peer="encrypted", versus="actorrpc", at_least=0.65,
        )  # fmt: skip
    yield Target(
        text="first call to a worker over TCP, encrypted, ms",
        key=_key("encryption", "time", "both", case="first call", transport=TCP), peer="encrypted", at_most=10.0,
    )  # fmt: skip


def _rest() -> Iterator[Target]:
    yield Target(
        text="idle group, wake-ups per second of both workers, of which each 5 s has a heartbeat",
        key=_key("idle", "wakes", "own"), at_most=4.0,
    )  # fmt: skip
    for case in ("no tensors", "tensors"):
        yield Target(
            text=f"growth per 100 000 calls, {case}, MB",
            key=_key("flat memory", "growth", "both", case=case),
            at_most=0.1,
        )
    for place, where in (("own", "own CPUs"), ("one", "one CPU")):
        yield Target(
            text=f"reinforce.py environment steps/s, {where} / torch",
            why=_SPIN, key=_key("reinforce", "steps", place, case="1 observer"), versus="torch", at_least=3.0,
        )  # fmt: skip


TARGETS: tuple[Target, ...] = (*_calls(), *_tensors(), *_encryption(), *_rest())
