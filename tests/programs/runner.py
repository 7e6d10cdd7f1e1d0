"""Run the programs of many seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.programs.generator import generate
from tests.programs.program import Program
from tests.programs.session import Options, Session, features_of

__all__ = ["Failure", "Result", "run_seeds"]


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
    report: Callable[[str], None] = lambda text: None,
) -> Result:
    """Run the programs of seeds.

    Args:
        renew: a new cluster is started after this many programs, and after each program that fails.
        most_failures: return after this many failures.
        until: start no program after this time of ``time.monotonic()``.
        report: called with a text for each failure.
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
        result.failures.append(failure)
    return result
