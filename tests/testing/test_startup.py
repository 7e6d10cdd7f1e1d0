"""Faults as text, such as in the variable ACTORRPC_FAULT."""

from __future__ import annotations

import pytest

from actorrpc import testing
from actorrpc.errors import ConfigError
from actorrpc.testing import delay, drop
from actorrpc.testing.startup import from_environment


def test_faults_are_parsed_from_text() -> None:
    text = """
        drop call,remote times=2 to=worker1,2 on=worker0;
        delay answer seconds=0.5 function=step,Trainer.* probability=0.1 seed=7;;
        drop rref_* total=3 at_once=1
    """
    expected = [
        drop("call", "remote", times=2, to=["worker1", "2"], on="worker0"),
        delay("answer", seconds=0.5, function=["step", "Trainer.*"], probability=0.1, seed=7),
        drop("rref_*", total=3, at_once=True),
    ]
    assert [repr(fault) for fault in testing.faults_of(text)] == [repr(fault) for fault in expected]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("drop", "'drop'"),
        ("lose call", "'lose'"),
        ("drop calls", "rref_delete"),
        ("drop call soon", "'soon'"),
        ("drop call when=now", "'when=now'"),
        ("drop call times=often", "'times=often'"),
        ("drop call times=-3", "times"),
        ("drop call at_once=perhaps", "'at_once=perhaps'"),
        ("drop call seconds=1", "'drop call seconds=1'"),
        ("delay call", "seconds="),
        ("delay call seconds=1 at_once=1", "'at_once=1'"),
        ("drop call; delay x seconds=1", "'x'"),
    ],
)
def test_an_unreadable_part_of_the_text_is_named_in_the_error(
    text: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        testing.faults_of(text)
    assert named in str(caught.value)
    monkeypatch.setenv("ACTORRPC_FAULT", text)
    with pytest.raises(ConfigError, match="ACTORRPC_FAULT="):
        from_environment()
