"""Run programs of fixed seeds; all tests that run programs are slow."""

from __future__ import annotations

import pytest

from tests.programs.generator import generate
from tests.programs.program import Program, Start
from tests.programs.runner import run_seeds
from tests.programs.session import ANNOUNCED, MODES, Options, features_of
from tests.programs.shrinker import is_valid, shrunk


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_reproduces_a_program_that_keeps_the_rules(mode: str) -> None:
    features = features_of(mode)
    for seed in range(300):
        program = generate(seed, features)
        assert program.source == generate(seed, features).source
        assert is_valid(program), program.source
        compile(program.source, "<program>", "exec")


def test_a_program_is_shrunk_to_what_it_fails_with() -> None:
    """Here a program "fails" as long as it calls a method ``fail``."""

    def fails(program: Program) -> bool:
        return any(call.method == "fail" for root in program.calls() for call in root.tree())

    shrunk_programs = 0
    for seed in range(40):
        program = generate(seed, features_of("embedded"))
        if fails(program):
            small = shrunk(program, fails)
            statements = [each for driver in small.drivers for each in driver.statements]
            assert len(statements) == 1
            assert isinstance(statements[0], Start)
            shrunk_programs += 1
    assert shrunk_programs > 5


# Programs cause these log messages. The session itself checks the standard error of all processes.
_prints = pytest.mark.prints(*ANNOUNCED)


@_prints
@pytest.mark.slow
@pytest.mark.limit(900)
@pytest.mark.parametrize("mode", MODES)
def test_two_hundred_programs_do_what_the_model_allows(mode: str) -> None:
    result = run_seeds(range(200), Options(mode))
    assert not result.failures, "\n".join(map(str, result.failures))
