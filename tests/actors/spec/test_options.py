"""Options of actors, calls and tasks: valid values, and errors for invalid or unknown ones."""

from __future__ import annotations

import inspect
import pickle
import re
from dataclasses import fields
from typing import Any

import pytest

from actorrpc.actors.spec.options import NEW_PROCESS, ActorOptions, CallOptions, TaskOptions
from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.wire.identity import WorkerInfo
from tests.migration.rows import row

_KINDS = [ActorOptions(), CallOptions(), TaskOptions()]


@pytest.mark.parametrize("cls", [ActorOptions, CallOptions, TaskOptions])
def test_the_docstring_describes_every_option(cls: type[Any]) -> None:
    _, _, rows = (inspect.getdoc(cls) or "").partition("Attributes:")
    described = ", ".join(re.findall(r"^ {4}(\w[\w, ]*): ", rows, re.MULTILINE))
    assert sorted(described.split(", ")) == sorted(each.name for each in fields(cls))


@pytest.mark.parametrize("options", _KINDS, ids=lambda each: type(each).__name__)
def test_an_unknown_option_raises_and_lists_the_valid_ones(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"'naem' is not an option of .* Did you mean 'name'") as caught:
        options.merged(naem="x")
    assert "priority" in str(caught.value)
    assert "timeout" in str(caught.value)


_RIGHT: list[tuple[Any, str, Any, Any]] = [
    (ActorOptions(), "name", "x", "x"),
    (ActorOptions(), "allow_out_of_order_execution", None, None),
    (ActorOptions(), "allow_out_of_order_execution", False, False),
    (ActorOptions(), "name", None, None),
    (ActorOptions(), "lifetime", "detached", "detached"),
    (ActorOptions(), "lifetime", "owned", None),
    (ActorOptions(), "lifetime", "non_detached", None),
    (ActorOptions(), "worker", 0, 0),
    (ActorOptions(), "worker", "w1", "w1"),
    (ActorOptions(), "worker", NEW_PROCESS, NEW_PROCESS),
    (ActorOptions(), "worker", WorkerInfo("w", 1), WorkerInfo("w", 1)),
    (ActorOptions(), "max_restarts", -1, -1),
    (ActorOptions(), "max_task_retries", -1, -1),
    (ActorOptions(), "max_task_retries", None, None),
    (ActorOptions(), "max_pending_calls", -1, -1),
    (ActorOptions(), "max_concurrency", None, None),
    (ActorOptions(), "max_concurrency", 3, 3),
    (ActorOptions(), "concurrency_groups", {"io": 2}, {"io": 2}),
    (ActorOptions(), "num_cpus", 0.5, 0.5),
    (ActorOptions(), "num_gpus", 0, 0),
    (ActorOptions(), "restart_window_s", 3, 3),
    (ActorOptions(), "timeout", 0, 0),
    (ActorOptions(), "env", {"A": 1}, {"A": "1"}),
    (CallOptions(), "num_returns", 0, 0),
    (CallOptions(), "num_returns", "streaming", "streaming"),
    (CallOptions(), "num_returns", "dynamic", "streaming"),
    (CallOptions(), "retry_exceptions", [ValueError], (ValueError,)),
    (CallOptions(), "retry_exceptions", ValueError, (ValueError,)),
    (CallOptions(), "retry_exceptions", True, True),
    (CallOptions(), "priority", -3, -3),
    (TaskOptions(), "max_retries", -1, -1),
]


@pytest.mark.parametrize(("options", "name", "value", "kept"), _RIGHT)
@row('a generator with num_returns="dynamic"', "from-ray")
def test_valid_values_are_accepted_and_normalized(options: Any, name: str, value: Any, kept: Any) -> None:
    assert getattr(options.merged(**{name: value}), name) == kept


_WRONG: list[tuple[Any, str, Any]] = [
    (ActorOptions(), "name", ""),
    (ActorOptions(), "name", 3),
    (ActorOptions(), "lifetime", "forever"),
    (ActorOptions(), "get_if_exists", 1),
    (ActorOptions(), "worker", ""),
    (ActorOptions(), "worker", -1),
    (ActorOptions(), "worker", True),
    (ActorOptions(), "worker", 1.5),
    (ActorOptions(), "max_concurrency", 0),
    (ActorOptions(), "max_concurrency", 1.0),
    (ActorOptions(), "concurrency_groups", ["io"]),
    (ActorOptions(), "concurrency_groups", {"io": 0}),
    (ActorOptions(), "concurrency_groups", {"": 1}),
    (ActorOptions(), "concurrency_groups", {1: 1}),
    (ActorOptions(), "max_pending_calls", 0),
    (ActorOptions(), "max_restarts", -2),
    (ActorOptions(), "max_restarts", True),
    (ActorOptions(), "restart_window_s", 0),
    (ActorOptions(), "restart_backoff_s", -1),
    (ActorOptions(), "num_cpus", float("nan")),
    (ActorOptions(), "num_gpus", "1"),
    (ActorOptions(), "num_gpus", 1.5),
    (ActorOptions(), "env", "A=1"),
    (ActorOptions(), "env", {"A=": "1"}),
    (ActorOptions(), "env", {"A": None}),
    (ActorOptions(), "reentrant", None),
    (ActorOptions(), "checkpoint_every", 0),
    (CallOptions(), "num_returns", -1),
    (CallOptions(), "num_returns", "two"),
    (CallOptions(), "num_returns", True),
    (CallOptions(), "timeout", -1),
    (CallOptions(), "timeout", float("inf")),
    (CallOptions(), "timeout", "1"),
    (CallOptions(), "priority", 1.5),
    (CallOptions(), "retry_exceptions", [ValueError()]),
    (CallOptions(), "retry_exceptions", "ValueError"),
    (CallOptions(), "max_buffered_items", 0),
    (TaskOptions(), "max_retries", -2),
]


def test_backpressure_is_an_alias_of_max_buffered_items() -> None:
    for options in (CallOptions(), ActorOptions(), TaskOptions()):
        for name in ("max_buffered_items", "backpressure", "_generator_backpressure_num_objects"):
            assert options.merged(**{name: 3}).max_buffered_items == 3
            assert options.merged(**{name: None}).max_buffered_items is None
        assert options.merged(_generator_backpressure_num_objects=-1).max_buffered_items is None
        with pytest.raises(ConfigError, match="two names for one thing"):
            options.merged(backpressure=2, max_buffered_items=2)
        with pytest.raises(ConfigError, match="an int of at least 1"):
            options.merged(backpressure=-1)


@pytest.mark.parametrize(("options", "name", "value"), _WRONG)
def test_invalid_values_raise_and_name_the_valid_ones(options: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}(\['.*'\])? must be .*, not ") as caught:
        options.merged(**{name: value})
    assert isinstance(caught.value, ValueError)


def test_a_value_of_a_wrong_type_raises_type_error() -> None:
    with pytest.raises(WrongTypeError):
        ActorOptions().merged(max_restarts="3")
    with pytest.raises(TypeError):
        CallOptions().merged(timeout="3")


@pytest.mark.parametrize("name", ["env", "runtime_env"])
def test_env_accepts_the_runtime_env_of_ray(name: str) -> None:
    found = ActorOptions().merged(**{name: {"env_vars": {"A": "1"}, "working_dir": "/tmp"}})
    assert (found.env, found.working_dir) == ({"A": "1"}, "/tmp")
    assert ActorOptions().merged(**{name: None}).env == {}
    with pytest.raises(ConfigError, match="'pip' is not supported"):
        ActorOptions().merged(**{name: {"env_vars": {}, "pip": ["torch"]}})


def test_env_variables_can_have_names_of_runtime_env_fields() -> None:
    assert ActorOptions().merged(env={"pip": "x", "working_dir_": "y"}).env == {
        "pip": "x",
        "working_dir_": "y",
    }
    with pytest.raises(ConfigError, match="two names for one thing"):
        ActorOptions().merged(env={}, runtime_env={})


def test_the_worker_info_of_torch_is_accepted_as_a_worker() -> None:
    class Info:
        name, id = "w", 3

    assert ActorOptions().merged(worker=Info()).worker == WorkerInfo("w", 3)


def test_options_of_actors_and_tasks_are_the_defaults_of_their_calls() -> None:
    assert ActorOptions(name="x", num_cpus=3).for_calls() == CallOptions()
    actor = ActorOptions(timeout=3, priority=2, max_task_retries=4, retry_exceptions=True)
    assert actor.for_calls() == CallOptions(timeout=3, priority=2, max_task_retries=4, retry_exceptions=True)
    assert ActorOptions(allow_out_of_order_execution=True).for_calls().allow_out_of_order
    task = TaskOptions(max_retries=1, timeout=2, name="t")
    assert task.for_calls() == CallOptions(max_task_retries=1, timeout=2, name="t")


def test_pickled_options_keep_values_that_compare_equal_to_the_default() -> None:
    assert pickle.loads(pickle.dumps(CallOptions(num_returns="streaming"))).num_returns == "streaming"
    assert pickle.loads(pickle.dumps(CallOptions(max_task_retries=0))).max_task_retries == 0


def test_interrupt_requires_a_timeout() -> None:
    assert CallOptions().merged(timeout=1, interrupt=True).interrupt
    assert (
        CallOptions(interrupt=True).merged(priority=1).interrupt
    )  # @method(interrupt=True) gives such options
    assert TaskOptions(timeout=1).merged(interrupt=True).for_calls().interrupt
    for options, wrong in (
        (CallOptions(), {"interrupt": True}),
        (CallOptions(timeout=1), {"interrupt": True, "timeout": 0}),
        (TaskOptions(), {"interrupt": True}),
    ):
        with pytest.raises(ConfigError, match="give timeout=, too"):
            options.merged(**wrong)
    with pytest.raises(ConfigError, match="interrupt must be True or False"):
        CallOptions().merged(interrupt=1, timeout=1)
