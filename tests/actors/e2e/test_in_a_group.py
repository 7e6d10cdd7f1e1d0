"""A subset of the end-to-end tests with this process as a member of an ``init_rpc`` group: one of each promise.

All of them run so in the slow layer (``place`` in ``conftest.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.actors.e2e import kit
from tests.actors.e2e.test_callers import test_actors_make_actors, test_references_travel
from tests.actors.e2e.test_cancel import test_a_call_that_waits_never_runs
from tests.actors.e2e.test_errors import test_exceptions_have_both_types
from tests.actors.e2e.test_gradients import test_an_actor_as_the_origin
from tests.actors.e2e.test_lifetimes import test_kill_and_restart, test_names, test_the_last_handle
from tests.actors.e2e.test_order import test_each_actor_that_calls_keeps_its_order
from tests.actors.e2e.test_results import (
    test_generators_stream,
    test_large_results_are_handed_over_as_they_were,
)

__all__ = [
    "test_a_call_that_waits_never_runs",
    "test_actors_make_actors",
    "test_an_actor_as_the_origin",
    "test_each_actor_that_calls_keeps_its_order",
    "test_exceptions_have_both_types",
    "test_generators_stream",
    "test_kill_and_restart",
    "test_large_results_are_handed_over_as_they_were",
    "test_names",
    "test_references_travel",
    "test_the_last_handle",
]

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(30)]


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    """A group."""
    with kit.running("group"):
        yield "group"
