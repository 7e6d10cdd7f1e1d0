"""Run programs of fixed seeds; all tests that run programs are slow."""

from __future__ import annotations

import pytest

from tests.programs.generator import generate
from tests.programs.runner import run_seeds
from tests.programs.session import ANNOUNCED, MODES, Options, features_of


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_reproduces_a_program(mode: str) -> None:
    features = features_of(mode)
    for seed in range(300):
        program = generate(seed, features)
        assert program.source == generate(seed, features).source
        compile(program.source, "<program>", "exec")


@pytest.mark.prints(*ANNOUNCED)  # the session itself checks the standard error of all processes
@pytest.mark.slow
@pytest.mark.limit(900)
@pytest.mark.parametrize("mode", MODES)
def test_two_hundred_programs_do_what_the_model_allows(mode: str) -> None:
    result = run_seeds(range(200), Options(mode))
    assert not result.failures, "\n".join(map(str, result.failures))
