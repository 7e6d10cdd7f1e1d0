"""One end-to-end test of each promise, with this process as a member of an ``init_rpc`` group.

In the slow layer all of them run so (``place`` in ``conftest.py``).
"""

from __future__ import annotations

import pytest

from tests.actors.e2e.conftest import Shared
from tests.actors.e2e.test_callers import (
    test_actors_can_create_actors,
    test_references_can_be_passed_between_actors,
)
from tests.actors.e2e.test_cancel import test_a_call_that_is_cancelled_in_the_queue_never_runs
from tests.actors.e2e.test_errors import test_a_remote_exception_is_a_remote_error_and_has_the_original_type
from tests.actors.e2e.test_gradients import test_an_actor_can_run_a_backward_pass
from tests.actors.e2e.test_lifetimes import (
    test_a_named_actor_is_found_and_its_name_is_unique,
    test_an_actor_ends_with_its_last_handle,
    test_kill_with_restart_resets_the_actor_up_to_max_restarts,
)
from tests.actors.e2e.test_order import test_calls_of_each_actor_run_in_order
from tests.actors.e2e.test_results import test_large_results_keep_the_value_at_their_return
from tests.actors.e2e.test_streaming import test_streams_are_iterated_with_for_and_async_for

__all__ = [
    "test_a_call_that_is_cancelled_in_the_queue_never_runs",
    "test_a_named_actor_is_found_and_its_name_is_unique",
    "test_a_remote_exception_is_a_remote_error_and_has_the_original_type",
    "test_actors_can_create_actors",
    "test_an_actor_can_run_a_backward_pass",
    "test_an_actor_ends_with_its_last_handle",
    "test_calls_of_each_actor_run_in_order",
    "test_kill_with_restart_resets_the_actor_up_to_max_restarts",
    "test_large_results_keep_the_value_at_their_return",
    "test_references_can_be_passed_between_actors",
    "test_streams_are_iterated_with_for_and_async_for",
]

pytestmark = [pytest.mark.usefixtures("place"), pytest.mark.limit(30)]


@pytest.fixture(scope="module")
def place(shared: Shared) -> str:
    """Run the tests in a group."""
    shared.want("group")
    return "group"
