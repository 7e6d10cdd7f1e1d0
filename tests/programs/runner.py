"""Run the programs of many seeds, and shrink programs that fail."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from tests.programs.generator import generate
from tests.programs.program import Program
from tests.programs.session import Options, Session, features_of
from tests.programs.shrinker import shrunk

__all__ = ["Failure", "Result", "run_seeds"]

_TRIES = 10  # a program that does not fail in this many runs counts as correct
_SHRINK_S = 120.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A program that did something that the model does not allow."""

    program: Program
    complaints: tuple[str, ...]

    def __str__(self) -> str:
        said = "\n".join(f"# {line}" for text in self.complaints for line in text.splitlines())
        return f"{said}\n\n{self.program.source}"


@dataclass
class Result:
    """The number of programs that ran, and the failures."""

    count: int = 0
    failures: list[Failure] = field(default_factory=list)


def run_seeds(
    seeds: Iterable[int],
    options: Options,
    renew: int = 50,
    most_failures: int = 1,
    until: float = float("inf"),
    *,
    shrinks: bool = True,
    report: Callable[[str], None] = lambda text: None,
) -> Result:
    """Run the programs of seeds.

    Args:
        renew: a new cluster is started after this many programs, and after each program that fails.
        most_failures: return after this many failures.
        until: start no program after this time of ``time.monotonic()``.
        shrinks: shrink programs that fail.
        report: called with a text for each failure, and for each shrunk program.
    """
    result = Result()
    features = features_of(options.mode)
    programs = (generate(seed, features) for seed in seeds)
    program = next(programs, None)
    while program is not None and len(result.failures) < most_failures and time.monotonic() < until:
        ran: list[Program] = []
        found: list[str] = []
        with Session(options) as session:
            while program is not None and not found and len(ran) < renew and time.monotonic() < until:
                found = session.run(program)
                ran.append(program)
                program = next(programs, None)
        result.count += len(ran)
        found = found + session.left
        if not found:
            continue
        failure = Failure(ran[-1], tuple(found))
        report(f"# seed {ran[-1].seed} failed:\n{failure}")
        if shrinks:
            failure = _shrunk(failure, options)
            report(f"# seed {ran[-1].seed} shrunk:\n{failure}")
        result.failures.append(failure)
    return result


def _shrunk(failure: Failure, options: Options) -> Failure:
    """Return the smallest program found that fails with one of the same kinds of complaints."""
    kinds = set(map(_kind, failure.complaints))
    options = replace(options, bound=min(options.bound, 5.0), settle=3.0)
    smallest = failure
    until = time.monotonic() + _SHRINK_S
    session: Session | None = None

    def fails(program: Program) -> bool:
        nonlocal session, smallest
        for _ in range(_TRIES):
            if time.monotonic() >= until:
                return False
            if session is None:
                session = Session(options).__enter__()
            found = session.run(program)
            if found:
                session.__exit__(None, None, None)
                session = None
            if kinds & set(map(_kind, found)):
                smallest = Failure(program, tuple(found))
                return True
        return False

    try:
        if fails(failure.program):
            shrunk(failure.program, fails)
    finally:
        if session is not None:
            session.__exit__(None, None, None)
    return smallest


def _kind(complaint: str) -> str:
    """Return a complaint without names and numbers, shortened, so that complaints about the same fault are equal."""
    words = re.sub(r"\d+_\d+: |actor_\d+|\d+", "", complaint).split()
    return " ".join(words[:4])
