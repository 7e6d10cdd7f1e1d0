"""Definitions of a script above init() are sent to workers, which cannot import the script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.drive import python

# The first test runs the script, several of whose processes import torch._dynamo at the same time.
pytestmark = pytest.mark.limit(240)

_PROGRAMS = Path(__file__).parent / "programs"


def _run(program: str, *arguments: str) -> str:
    """Run a script, and return its output."""
    process = python(str(_PROGRAMS / program), *arguments)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    return out


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return the result of each function of the script in a worker, by name."""
    results: dict[str, Any] = json.loads(_run("main_script.py", "--size", "3"))
    return results


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("modules_of_torch", True),
        ("type_parameters", [True, True, 3, "P", "Ts"]),
        ("cache", [102334155, 0, {"maxsize": 7, "typed": False}, "fibonacci"]),
        ("dispatch", [3, 0, "depth"]),
        ("members", [1, 1, 5, "int", "object"]),
        ("compilation", [2.0, 3.0, 4.0, True]),
        ("custom_operator", [8.0, 12.0, 27.0]),
        ("body_of_a_class", [3, 4, 3]),
    ],
)
def test_code_of_the_main_script_runs_in_other_processes(
    found: dict[str, Any], name: str, expected: Any
) -> None:
    assert found[name] == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a_lock", ["global 'LOCK'", "Move the code that needs this object into a module"]),
        ("unknown_module", ["global 'SETTINGS'", "'unknown_settings': no module has it"]),
        ("a_name", ["'NAMED'", "__reduce__ returns a name", "define it in a module"]),
    ],
)
def test_sending_an_unpicklable_global_raises_an_error_with_its_name_and_a_remedy(
    found: dict[str, Any], name: str, words: list[str]
) -> None:
    assert found[name].startswith("SerializationError: ")
    assert [word for word in words if word not in found[name]] == []


def test_an_actor_uses_its_class_as_of_its_creation(found: dict[str, Any]) -> None:
    seen, knows = found["changes"]
    assert seen == [[1, 1, 1], [2, 2, 1], [2, 2, 3]]
    assert knows == [True, True, True]  # all actors recognise an instance of the class


def test_an_argument_is_sent_with_its_class_as_of_the_call(found: dict[str, Any]) -> None:
    assert found["argument_changes"] == [["old", 3], ["new", 3], ["new", 4]]


def test_workers_have_the_command_line_of_the_script(found: dict[str, Any]) -> None:
    assert found["arguments"] == [str(_PROGRAMS / "main_script.py"), "--size", "3"]


def test_code_is_sent_although_its_annotations_have_names_for_type_checkers_only() -> None:
    assert _run("lazy_annotations.py") == "sent\n"
