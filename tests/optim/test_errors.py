"""Waiting for several workers, and the error of those that failed."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from actorrpc.errors import PeerDiedError, RpcError
from actorrpc.futures import Future
from actorrpc.optim import OptimizerError
from actorrpc.optim.optimizer import gather


def _done(value: Any = None, error: BaseException | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
    return future


def test_results_by_worker() -> None:
    assert gather("Error", {}) == {}
    assert list(gather("Error", {"b": _done(1), "a": _done(2)}).items()) == [("b", 1), ("a", 2)]


@pytest.mark.parametrize("sent", [False, True])
def test_one_failure_is_raised_as_it_is(sent: bool) -> None:
    error = PeerDiedError("gone", maybe_executed=True, worker="a")
    with pytest.raises(PeerDiedError) as caught:
        gather("Error running optimizer", {"a": _done(error=error) if sent else error, "b": _done(1)})
    assert caught.value is error
    assert error.__notes__ == ["Error running optimizer on worker 'a'."]


def test_several_failures() -> None:
    failures = {"a": ValueError("one"), "c": LookupError("two")}
    calls = {"a": _done(error=failures["a"]), "b": _done(), "c": failures["c"]}
    with pytest.raises(OptimizerError) as caught:
        gather("Error running optimizer", calls)
    assert caught.value.exceptions == tuple(failures.values())
    assert caught.value.workers == ("a", "c")
    assert "on 2 of 3 workers: a: ValueError: one; c: LookupError: two" in str(caught.value)
    assert isinstance(caught.value, RpcError)
    found = caught.value.subgroup(ValueError)
    assert isinstance(found, OptimizerError)
    assert found.exceptions == (failures["a"],)


def test_all_are_waited_for() -> None:
    late: Future[Any] = Future()
    early = _done(error=ValueError("one"))
    seen: list[str] = []
    early.add_done_callback(lambda _: seen.append("early"))
    late.add_done_callback(lambda _: seen.append("late"))

    class Completing(dict[str, Any]):
        """Completes the late call once the other's failure has been taken."""

        def items(self) -> Any:
            yield "a", early
            late.set_result(None)
            yield "b", late

    with pytest.raises(ValueError, match="one"):
        gather("Error", Completing(a=early, b=late))
    assert seen == ["early", "late"]


def test_it_can_be_pickled() -> None:
    error = OptimizerError("Error on 2 workers", [ValueError("one"), LookupError("two")])
    error.workers = ("a", "b")
    again = pickle.loads(pickle.dumps(error))
    assert (again.workers, again.args[0]) == (("a", "b"), "Error on 2 workers")
    assert [str(each) for each in again.exceptions] == ["one", "two"]
