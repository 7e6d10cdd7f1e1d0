"""tests/output.py: how it splits text into entries, and which tests of a session fail for unannounced output."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.output import check, entries, unasked
from tests.test_infrastructure import run_session

_TEXT = """\
(Counter pid=12) a line
(Counter pid=12) Traceback (most recent call last):
(Counter pid=12)   File "x.py", line 1, in f
(Counter pid=12) ValueError: wanted

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "x.py", line 2, in g
KeyError: 'k'
--- errors of rank 0 ---
x.py:3: ResourceWarning: unclosed file
  open("x")
---
another line
"""


def test_a_traceback_belongs_to_the_line_before_it() -> None:
    first, second, third = entries(_TEXT)
    assert first.startswith("a line\nTraceback")
    assert "ValueError: wanted" in first
    assert first.endswith("KeyError: 'k'")
    assert second.splitlines() == ["x.py:3: ResourceWarning: unclosed file", '  open("x")']
    assert third == "another line"


def test_patterns_are_searched_in_whole_entries() -> None:
    assert unasked(_TEXT, [r"a line.*KeyError", "ResourceWarning: unclosed"]) == ["another line"]
    check(_TEXT, "a line", "ResourceWarning", "another")
    with pytest.raises(pytest.fail.Exception, match="a driver printed unasked:\nanother line"):
        check(_TEXT, "a line", "ResourceWarning", what="a driver")


def complain_in_rank(rank: int, world_size: int) -> None:
    """Leave a file open, in a rank."""
    import logging

    logging.getLogger("actorrpc.somewhere").warning("a warning of rank %d", rank)


@pytest.mark.slow
def test_unannounced_output_of_a_test_or_its_processes_fails_the_test(tmp_path: Path) -> None:
    status, output = run_session(
        tmp_path,
        textwrap.dedent("""
            import logging, subprocess, sys
            import pytest
            from tests.ranks import run_group
            from tests.test_output import complain_in_rank

            log = logging.getLogger("actorrpc.somewhere")

            def test_log():
                log.warning("a warning")

            def test_less_than_a_warning():
                log.info("a word")

            @pytest.mark.prints("a warning", "never said")
            def test_announced():
                log.warning("a warning")

            @pytest.mark.prints("a warning")
            def test_announced_in_part():
                log.warning("a warning")
                log.error("an error")

            def test_child():
                subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('a child\\\\n')"], check=True)

            def test_child_with_a_traceback_on_its_output():
                script = "import traceback, sys\\ntry: 1 / 0\\nexcept ArithmeticError: traceback.print_exc(file=sys.stdout)"
                subprocess.run([sys.executable, "-c", script], check=True)

            def test_child_that_only_talks():
                subprocess.run([sys.executable, "-c", "print('hello')"], check=True)

            def test_rank():
                run_group(complain_in_rank, 1)

            def test_what_is_read(capfd):
                print("seen", file=sys.stderr)
                assert capfd.readouterr().err == "seen\\n"

            def test_that_has_failed_for_another_reason():
                log.warning("a warning")
                assert not 1
        """),
    )
    assert status == pytest.ExitCode.TESTS_FAILED
    for red in (
        "ERROR at teardown of test_log ",
        "ERROR at teardown of test_announced_in_part ",
        "ERROR at teardown of test_child ",
        "ERROR at teardown of test_child_with_a_traceback_on_its_output ",
        "ERROR at teardown of test_rank ",
        "___ test_that_has_failed_for_another_reason ___",
        "log: WARNING actorrpc.somewhere: a warning",
        "log: ERROR actorrpc.somewhere: an error",
        "a warning of rank 0",
        "ZeroDivisionError",
        "to repeat it",
    ):
        assert red in output
    assert "1 failed, 9 passed, 5 errors" in output
