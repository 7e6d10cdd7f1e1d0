"""The stand-in for an optimizer that is elsewhere: what has changed, and who has got it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from actorrpc.optim.parameters import StandIn


class _Odd:
    """Cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def stand_in() -> StandIn:
    groups: list[dict[str, Any]] = [
        {"lr": 0.1, "betas": (0.5, 0.6)},
        {"lr": torch.tensor(0.2), "betas": None},
    ]
    return StandIn(groups, {"lr": 0.1, "betas": None})


def test_changes_are_what_differs(stand_in: StandIn) -> None:
    assert stand_in.changes() is None
    stand_in.param_groups[0]["lr"] = 0.3
    stand_in.param_groups[1]["extra"] = 1
    assert stand_in.changes() == [{"lr": 0.3}, {"extra": 1}]
    stand_in.sent([{"lr": 0.3}, {}])
    assert stand_in.changes() == [{}, {"extra": 1}]
    stand_in.param_groups[0]["lr"] = 0.1
    assert stand_in.changes() == [{"lr": 0.1}, {"extra": 1}]


def test_changes_in_place_are_seen(stand_in: StandIn) -> None:
    stand_in.param_groups[1]["lr"].fill_(0.5)
    assert stand_in.changes() == [{}, {"lr": torch.tensor(0.5)}]


@pytest.mark.parametrize("value", [torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64), "0.1", None, 1])
def test_other_types_are_other_values(stand_in: StandIn, value: Any) -> None:
    stand_in.param_groups[0]["lr"] = value
    changes = stand_in.changes()
    assert changes is not None
    assert list(changes[0]) == ["lr"]


def test_what_cannot_be_compared_is_sent(stand_in: StandIn) -> None:
    odd = _Odd()
    stand_in.param_groups[0]["lr"] = odd
    stand_in.sent([{"lr": odd}, {}])
    assert stand_in.changes() is None
    stand_in.param_groups[0]["lr"] = _Odd()
    assert stand_in.changes() is not None


def test_replacing_keeps_the_groups_that_schedulers_know(stand_in: StandIn) -> None:
    group = stand_in.param_groups[0]
    stand_in.replace([{"lr": 1.0}, {"lr": 2.0}])
    assert group == {"lr": 1.0, "params": []}
    assert stand_in.changes() is None
    assert stand_in.groups() == [{"lr": 1.0}, {"lr": 2.0}]


def test_groups_are_added(stand_in: StandIn) -> None:
    stand_in.add({"lr": 0.7})
    assert stand_in.groups()[2] == {"lr": 0.7, "betas": None}
    assert stand_in.changes() == [{}, {}, {"betas": None}]


def test_torchs_schedulers_take_it() -> None:
    stand_in = StandIn([{"lr": 1.0}], {"lr": 1.0})
    scheduler = lr_scheduler.ExponentialLR(stand_in, 0.5)
    stand_in.step()
    scheduler.step()
    assert stand_in.changes() == [{"initial_lr": 1.0, "lr": 0.5}]
