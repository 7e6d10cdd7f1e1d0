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
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

# Must be set before torch is imported: tests start many processes, so each uses one OpenMP thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With this variable, each process that a test starts would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Processes that a test starts print resource warnings, and unannounced output fails the test (tests/output.py).
os.environ.setdefault("PYTHONWARNINGS", "default::ResourceWarning")
# Not in the home directory: workers that join keep their output in a file.
os.environ.setdefault(
    "ACTORRPC_LOG_DIR", os.path.join(tempfile.gettempdir(), f"actorrpc-test-logs-{os.getuid()}")
)
# Without NVML, looking for GPUs would open them, and processes that are forked later could not use them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import hypothesis
import psutil
import pytest

from actorrpc.testing import leaks, processes
from actorrpc.wire import keys
from tests import certificates, devices, ranks

pytest_plugins = ["actorrpc.testing.pytest_plugin", "tests.output", "tests.red", "tests.sharing"]

_TESTS = Path(__file__).resolve().parent
# Folders and modules whose tests are all slow. Other slow tests have the marker.
_SLOW = (
    "actors/e2e/",
    "benchmarks/",
    "cluster/test_ends.py",
    "cluster/provisioners/test_fork_server.py",
    "cluster/test_hosts.py",
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
    "actors/e2e/test_callers.py::test_calls_through_an_rref_run_on_the_actors_thread_from_any_worker",
    "actors/e2e/test_callers.py::test_asyncio_coroutines_can_await_calls_of_actors",
    "actors/e2e/test_cancel.py::test_cancel_interrupts_a_running_method",
    "actors/e2e/test_cancel.py::test_a_method_that_waits_for_a_call_is_interrupted_only_once",
    "actors/e2e/test_cancel.py::test_a_call_that_is_cancelled_in_the_queue_never_runs",
    "actors/e2e/test_cancel.py::test_cancelling_a_stream_closes_its_generator[",
    "actors/e2e/test_cancel.py::test_cancelling_a_call_cancels_its_nested_calls_on_other_actors",
    "actors/e2e/test_cancel.py::test_cancelling_a_coroutine_cancels_its_call_to_an_actor_that_is_starting_or",
    "actors/e2e/test_cancel.py::test_a_nested_call_that_starts_while_its_caller_is_cancelled_is_cancelled",
    "actors/e2e/test_cancel.py::test_a_cancelled_call_is_not_retried_after_a_restart",
    "actors/e2e/test_cancel.py::test_coroutines_that_are_cancelled_at_random_moments_all_end",
    "actors/e2e/test_cancel.py::test_a_coroutine_that_times_out_can_make_calls_while_it_cleans_up",
    "actors/e2e/test_cancel.py::test_a_call_that_times_out_in_the_queue_is_not_started",
    "actors/e2e/test_cancel.py::test_a_call_whose_time_has_passed_does_not_run",
    "actors/e2e/test_cancel.py::test_a_method_that_times_out_is_interrupted_if_asked_for",
    "actors/e2e/test_cancel.py::test_a_task_that_times_out_is_interrupted_if_its_caller_asks_for_it",
    "actors/e2e/test_cancel.py::test_nested_calls_inherit_the_remaining_time",
    "actors/e2e/test_cancel.py::test_the_timeout_of_a_wait_does_not_end_the_call",
    "actors/e2e/test_cancel.py::test_a_method_that_times_out_runs_to_its_end_by_default_and_on_an_event_loop",
    "actors/e2e/test_chains.py::test_calls_back_to_a_waiting_actor_run_on_its_own_thread",
    "actors/e2e/test_chains.py::test_calls_come_back_through_workers_tasks_queues_arguments_and_threads",
    "actors/e2e/test_chains.py::test_calls_outside_the_chain_wait_until_the_method_ends",
    "actors/e2e/test_ends.py",
    "actors/e2e/test_errors.py::test_an_error_of_the_constructor_is_the_cause_of_every_failed_call",
    "actors/e2e/test_errors.py::test_a_remote_exception_is_a_remote_error_and_has_the_original_type",
    "actors/e2e/test_errors.py::test_base_exceptions_of_methods_do_not_end_the_worker[embedded-base]",
    "actors/e2e/test_event_loops.py::test_plain_methods_of_an_async_actor_run_on_its_event_loop_unless_they_have_a_thread",
    "actors/e2e/test_event_loops.py::test_plain_and_async_calls_start_in_the_order_of_their_caller",
    "actors/e2e/test_event_loops.py::test_blocking_on_a_coroutine_of_the_same_event_loop_raises_deadlock",
    "actors/e2e/test_event_loops.py::test_blocking_is_possible_on_a_coroutine_of_another_group_but_not_of",
    "actors/e2e/test_exits.py",
    "actors/e2e/test_gradients.py::test_gradients_equal_those_of_a_local_computation[",
    "actors/e2e/test_gradients.py::test_gradients_pass_through_calls_made_before_the_actors_exist",
    "actors/e2e/test_gradients.py::test_an_actor_can_run_a_backward_pass",
    "actors/e2e/test_gradients.py::test_an_autograd_context_is_released_on_the_worker_when_it_ends",
    "actors/e2e/test_in_a_group.py",
    "actors/e2e/test_lifetimes.py::test_calls_made_before_the_actor_exists_run_in_order",
    "actors/e2e/test_lifetimes.py::test_a_killed_actor_is_not_restarted_and_all_its_calls_fail",
    "actors/e2e/test_lifetimes.py::test_a_handle_from_get_actor_does_not_keep_the_actor_alive",
    "actors/e2e/test_lifetimes.py::test_a_call_beyond_max_pending_calls_is_refused",
    "actors/e2e/test_lifetimes.py::test_detached_actors",
    "actors/e2e/test_object_limits.py::test_a_full_object_store_names_the_holders",
    "actors/e2e/test_objects.py::test_a_large_result_outlives_the_process_of_its_actor",
    "actors/e2e/test_objects.py::test_large_items_of_a_stream_are_written_to_memory_once",
    "actors/e2e/test_objects.py::test_large_objects_are_not_copied_between_processes",
    "actors/e2e/test_objects.py::test_a_forked_child_can_read_a_value_that_its_parent_released",
    "actors/e2e/test_order.py::test_calls_of_each_thread_run_in_order",
    "actors/e2e/test_order.py::test_calls_of_a_tasks_thread_to_an_actor_that_is_starting_run_in_order",
    "actors/e2e/test_order.py::test_a_failed_argument_does_not_change_the_order_of_the_other_calls",
    "actors/e2e/test_order.py::test_calls_with_a_higher_priority_overtake_waiting_calls",
    "actors/e2e/test_order.py::test_a_call_with_a_pending_argument_is_overtaken_if_order_is_not_required",
    "actors/e2e/test_order.py::test_a_call_fails_with_the_error_of_its_argument",
    "actors/e2e/test_order.py::test_the_other_arguments_of_a_pending_call_are_copied_at_the_call",
    "actors/e2e/test_restarts.py",
    "actors/e2e/test_results.py::test_large_results_keep_the_value_at_their_return",
    "actors/e2e/test_results.py::test_changes_of_a_result_are_not_seen_by_other_holders_of_its_reference",
    "actors/e2e/test_results.py::test_results_of_num_returns_can_have_any_size_and_type",
    "actors/e2e/test_results.py::test_results_of_num_returns_share_no_object",
    "actors/e2e/test_streaming.py::test_streams_are_iterated_with_for_and_async_for",
    "actors/e2e/test_streaming.py::test_an_error_of_a_generator_is_raised_after_its_items",
    "actors/e2e/test_streaming.py::test_max_buffered_items_limits_how_far_a_generator_runs_ahead",
    "actors/e2e/test_streaming.py::test_closing_leaving_or_dropping_a_stream_closes_its_generator",
    "actors/e2e/test_streaming.py::test_a_stream_fails_if_its_actor_is_killed",
    "actors/e2e/test_streaming.py::test_a_generator_can_call_the_actor_that_reads_it",
    "actors/e2e/test_streaming.py::test_num_returns_takes_the_first_items_of_a_generator",
    "actors/e2e/test_supervision_groups.py",
    "actors/e2e/test_unruly.py",
    "actors/e2e/test_words.py::test_the_error_of_an_unpicklable_argument_names_argument_method_and_path",
    "actors/e2e/test_words.py::test_the_error_of_an_unpicklable_result_names_method_and_path",
    "examples/test_actor_examples.py::TestImpala::test_vtrace_equals_the_definition_of_the_paper",
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
    left = processes.of_session()
    if left:  # helpers of pytest-xdist workers end shortly after their worker
        _, left = psutil.wait_procs(left, timeout=10)
    if left:
        print("\nleft behind by the session:", *map(processes.describe, left), sep="\n  ")
        processes.kill(left)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure() -> None:
    ranks.stop_server()


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that each module and its fixtures leave nothing behind, unless one of its tests has failed."""
    from actorrpc.testing.pytest_plugin import charge  # pytest itself imports the plugin first

    before, failed = leaks.LeakSnapshot.capture(), request.session.testsfailed
    yield
    if request.session.testsfailed == failed:
        found = leaks.settle(before, request.config.getoption("--leak-wait"))
        if found:
            charge(found)


@pytest.fixture
def default_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace ``/tmp``, the parent of the default runtime directory, in which other programs have files, by an empty folder."""
    assert keys.DEFAULT_PARENT == "/tmp"  # short enough for socket paths
    monkeypatch.setattr(keys, "DEFAULT_PARENT", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def _test_leaves_nothing(_module_leaves_nothing: None, no_leaks: None) -> None:
    """Check that each test leaves nothing behind."""
