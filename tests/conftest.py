"""Rules for every test: it has a time limit, leaves nothing behind, and prints nothing unannounced.

    @pytest.mark.limit(120)           # seconds for each of set-up, call and teardown; 60 by default
    @pytest.mark.prints(r"regex")     # output that its processes may print or log (tests/output.py)
    @pytest.mark.slow                 # not in the default run; `-m slow` runs these, `-m ""` runs all
    @pytest.mark.gpu                  # needs a CUDA device

`--limit SECONDS` changes the default limit (0, as with `--pdb`: no limit). The limit, the leak check and `--times N` (run each
test N times) come from the package's pytest plugin. Each run has a new random order; pytest prints its seed, and the report of
a failed test prints the command that repeats it. `python -m tests.again` makes many runs and records them.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

# Must be set before torch is imported: tests start many processes, so each uses one OpenMP thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With this variable, each process that a test starts would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Processes that a test starts print resource warnings, and unannounced output fails the test (tests/output.py).
os.environ.setdefault("PYTHONWARNINGS", "default::ResourceWarning")
# Without NVML, looking for GPUs would open them, and processes that are forked later could not use them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import hypothesis
import pytest

from actorrpc.testing import processes
from tests import certificates, devices, ranks

pytest_plugins = ["actorrpc.testing.pytest_plugin", "tests.output", "tests.red"]

_TESTS = Path(__file__).resolve().parent
# Folders and modules whose tests are all slow. Other slow tests have the marker.
_SLOW = (
    "actors/e2e/",
    "actors/test_typing.py",
    "benchmarks/",
    "cluster/test_ends.py",
    "cluster/provisioners/test_fork_server.py",
    "cluster/test_hosts.py",
    "cluster/test_join_secured.py",
    "cluster/test_logs.py",
    "cluster/provisioners/test_ray.py",
    "cluster/test_scale.py",
    "cluster/test_torchrun.py",
    "compat/test_profiling.py",
    "compat/test_programs.py",
    "conformance/",
    "examples/",
    "faults/",
    "tutorials/",
)
# Exceptions to _SLOW (files, or prefixes of test ids): the features that users meet first, and each promise once.
_QUICK = (
    "actors/e2e/test_callers.py::test_an_actors_rref",
    "actors/e2e/test_callers.py::test_asyncio_callers",
    "actors/e2e/test_cancel.py::test_a_running_method_is_interrupted",
    "actors/e2e/test_cancel.py::test_a_method_that_waits_is_told_once",
    "actors/e2e/test_cancel.py::test_a_call_that_waits_never_runs",
    "actors/e2e/test_cancel.py::test_a_stream[",
    "actors/e2e/test_cancel.py::test_all_calls_of_a_chain_are_given_up",
    "actors/e2e/test_cancel.py::test_a_call_to_an_actor_that_is_made_or_restarted",
    "actors/e2e/test_cancel.py::test_a_nested_call_that_begins_while",
    "actors/e2e/test_cancel.py::test_a_cancelled_call_is_not_made_again",
    "actors/e2e/test_cancel.py::test_cancel_of_coroutines_at_random_moments",
    "actors/e2e/test_cancel.py::test_a_late_",
    "actors/e2e/test_cancel.py::test_nested_calls_inherit_what_is_left",
    "actors/e2e/test_cancel.py::test_the_time_of_a_wait_is_not_the_calls",
    "actors/e2e/test_cancel.py::test_a_method_may_say_so_itself",
    "actors/e2e/test_cancel.py::test_otherwise_it_goes_on",
    "actors/e2e/test_cancel.py::test_never_on_an_event_loop",
    "actors/e2e/test_chains.py::test_cycles",
    "actors/e2e/test_chains.py::test_back_through_other_things",
    "actors/e2e/test_chains.py::test_others_wait_their_turn",
    "actors/e2e/test_ends.py",
    "actors/e2e/test_errors.py::test_what_the_constructor_raised_reaches_every_call",
    "actors/e2e/test_errors.py::test_exceptions_have_both_types",
    "actors/e2e/test_errors.py::test_no_exception_ends_the_worker[embedded-base]",
    "actors/e2e/test_event_loops.py::test_plain_methods_run_on_the_loop",
    "actors/e2e/test_event_loops.py::test_calls_start_in_order_whatever_they_are",
    "actors/e2e/test_event_loops.py::test_waiting_for_a_coroutine_of_its_own_ends_at_once",
    "actors/e2e/test_event_loops.py::test_without_reentrancy_a_circle_is_reported",
    "actors/e2e/test_event_loops.py::test_a_coroutine_of_another_group",
    "actors/e2e/test_exits.py",
    "actors/e2e/test_gradients.py::test_gradients[",
    "actors/e2e/test_gradients.py::test_calls_that_are_made_before_the_actors_are_there",
    "actors/e2e/test_gradients.py::test_an_actor_as_the_origin",
    "actors/e2e/test_gradients.py::test_tasks",
    "actors/e2e/test_gradients.py::test_contexts_are_forgotten",
    "actors/e2e/test_in_a_group.py",
    "actors/e2e/test_lifetimes.py::test_calls_before_it_is_there",
    "actors/e2e/test_lifetimes.py::test_kill_is_for_good",
    "actors/e2e/test_lifetimes.py::test_a_weak_handle_does_not_keep_it",
    "actors/e2e/test_lifetimes.py::test_max_pending_calls",
    "actors/e2e/test_lifetimes.py::test_detached_actors",
    "actors/e2e/test_lost_results.py",
    "actors/e2e/test_object_limits.py::test_who_holds_what_is_said",
    "actors/e2e/test_objects.py::test_a_result_outlives",
    "actors/e2e/test_objects.py::test_items_of_a_stream",
    "actors/e2e/test_objects.py::test_no_bytes_move",
    "actors/e2e/test_objects.py::test_a_fork_keeps",
    "actors/e2e/test_order.py::test_each_thread_that_calls_keeps_its_order",
    "actors/e2e/test_order.py::test_a_call_whose_argument_failed",
    "actors/e2e/test_order.py::test_a_call_behind_one_that_waits_for_it_is_a_deadlock_and_said_so",
    "actors/e2e/test_order.py::test_priorities_overtake_what_waits",
    "actors/e2e/test_order.py::test_out_of_order_execution",
    "actors/e2e/test_order.py::test_the_failure_of_an_argument",
    "actors/e2e/test_order.py::test_the_other_arguments_are_taken_as_of_the_call",
    "actors/e2e/test_restarts.py",
    "actors/e2e/test_results.py::test_large_results_are_handed_over_as_they_were",
    "actors/e2e/test_results.py::test_what_the_caller_changes",
    "actors/e2e/test_results.py::test_parts_of_a_result",
    "actors/e2e/test_results.py::test_generators_stream",
    "actors/e2e/test_results.py::test_a_stream_is_not_taken_up_again",
    "actors/e2e/test_streaming.py::test_for_and_async_for",
    "actors/e2e/test_streaming.py::test_errors_come_in_their_place",
    "actors/e2e/test_streaming.py::test_back_pressure",
    "actors/e2e/test_streaming.py::test_early_ends",
    "actors/e2e/test_streaming.py::test_the_producer_dies_in_mid_stream",
    "actors/e2e/test_streaming.py::test_circles[",
    "actors/e2e/test_streaming.py::test_a_stream_whose_producer_calls_its_reader",
    "actors/e2e/test_streaming.py::test_a_number_of_results",
    "actors/e2e/test_supervision_groups.py",
    "actors/e2e/test_unruly.py",
    "actors/e2e/test_words.py::test_arguments_that_cannot_be_sent",
    "actors/e2e/test_words.py::test_results_that_cannot_be_sent",
    "examples/test_more_examples.py::TestImpala::test_vtrace_equals_the_definition_of_the_paper",
    "faults/test_maybe_executed.py",
    "faults/test_repeats.py",
)

# Hypothesis has no deadline for examples, and the CI runs the same examples each time.
hypothesis.settings.register_profile(
    "actorrpc",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    # The phase "explain" traces functions. CPython 3.11 never leaves the first line of a traced function while an asynchronous
    # exception is pending in any thread of the process, and tests interrupt threads with such exceptions.
    phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("actorrpc")


@pytest.hookimpl(trylast=True)  # after the plugin, which creates the session's directory
def pytest_configure() -> None:
    sys.dont_write_bytecode = False
    if certificates.OVER_TLS:
        certificates.switch_on()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell script that runs pytest in the background makes it ignore SIGINT, which its child processes inherit.
        # Tests of Ctrl-C need Python's handler.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ranks.remember_environment()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Mark tests of slow folders; after the selection, prepare the GPU or skip the tests that need one."""
    for item in items:
        name = item.nodeid.removeprefix("tests/") if item.path.is_relative_to(_TESTS) else ""
        if name.startswith(_SLOW) and not name.startswith(_QUICK):
            item.add_marker(pytest.mark.slow)
    yield
    devices.prepare([item for item in items if item.get_closest_marker("gpu") is not None])


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Freeze the objects that live until the session ends: the leak check collects garbage after every test."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # after pytest-xdist has ended its workers
def pytest_sessionfinish(session: pytest.Session) -> None:
    helpers = processes.helper_pids()
    left = {process for process in processes.of_session() if process.pid not in helpers}
    if left:  # helpers of pytest-xdist workers end shortly after their worker
        left = processes.wait_for_end(left, 10.0)
    if left:
        print("\nleft behind by the session:", *map(processes.describe, sorted(left)), sep="\n  ")
        processes.kill(left)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure() -> None:
    ranks.stop_server()


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing(no_leaks_in_module: None) -> None:
    """Check that each module and its fixtures leave nothing behind."""


@pytest.fixture(autouse=True)
def _test_leaves_nothing(_module_leaves_nothing: None, no_leaks: None) -> None:
    """Check that each test leaves nothing behind."""
