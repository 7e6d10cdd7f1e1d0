"""The public names, errors and options of actorrpc.compat.ray, and messages about unsupported names, without a cluster."""

from __future__ import annotations

import importlib
import inspect
import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import actorrpc.compat.ray as ray
from actorrpc import errors
from actorrpc.compat import take_over
from actorrpc.compat.imports import alias_package, forget
from actorrpc.compat.ray import exceptions, options, placement, runtime_env
from actorrpc.compat.ray.util import actor_pool, queue, scheduling_strategies, state
from tests.migration.rows import row
from tests.test_public_names import _undocumented

MODULES: list[ModuleType] = [
    ray,
    ray.util,
    exceptions,
    actor_pool,
    queue,
    scheduling_strategies,
    state,
    ray.actor,
    placement,
]


@pytest.mark.parametrize("module", MODULES, ids=lambda each: each.__name__)
def test_every_public_name_exists_and_has_a_docstring(module: ModuleType) -> None:
    assert module.__doc__
    assert not [name for name in module.__all__ if not hasattr(module, name)]
    found = {text for name in module.__all__ for text in _undocumented(name, getattr(module, name))}
    assert not found


def test_an_unsupported_name_raises_an_error_that_lists_the_supported_names() -> None:
    with pytest.raises(
        AttributeError, match=r"ray\.tune \(.*ActorPool runs trials\).*available_resources, cancel"
    ):
        _ = ray.tune
    with pytest.raises(AttributeError, match=r"did you mean get"):
        _ = ray.gett
    with pytest.raises(AttributeError, match=r"ray\.util has here: ActorPool"):
        _ = ray.util.multiprocessing
    assert not hasattr(ray, "__path_of_nothing__")


def test_the_address_of_this_machine_is_an_ip_address() -> None:
    assert ipaddress.ip_address(ray.util.get_node_ip_address())


# -- errors -----------------------------------------------------------------------------------------------------


ERRORS = [
    getattr(exceptions, name) for name in exceptions.__all__ if inspect.isclass(getattr(exceptions, name))
]


@row("errors of Ray are not RuntimeErrors", "ray-programs")
@pytest.mark.parametrize("kind", ERRORS, ids=lambda each: each.__name__)
def test_each_ray_error_is_an_rpc_error_and_can_be_pickled(kind: Any) -> None:
    import pickle

    assert issubclass(kind, (exceptions.RayError, errors.RpcError))
    assert issubclass(kind, RuntimeError)
    made = kind("why") if kind is not exceptions.RayTaskError else kind("f", "why", ValueError(1))
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is kind
    assert str(again) == "why"
    assert str(kind())


@row("RaySystemError", "ray-programs")
@pytest.mark.parametrize(
    ("ours", "rays"),
    [
        (errors.ActorDiedError("x", actor="A", maybe_executed=True), "ActorDiedError"),
        (errors.ActorUnavailableError("x"), "ActorUnavailableError"),
        (errors.UnplacedActorError("x"), "ActorUnschedulableError"),
        (errors.PendingCallsLimitExceeded("x"), "PendingCallsLimitExceeded"),
        (errors.NameTakenError("x"), "ActorAlreadyExistsError"),
        (errors.RpcTimeoutError("x"), "GetTimeoutError"),
        (errors.CancelledError("x"), "TaskCancelledError"),
        (errors.PeerDiedError("x"), "WorkerCrashedError"),
        (errors.PlacementError("x"), "TaskUnschedulableError"),
        (errors.DeadlockError("x"), "RaySystemError(DeadlockError)"),
        (errors.ConfigError("x"), "ConfigError"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_errors_of_actorrpc_are_translated_to_rays_classes(ours: errors.RpcError, rays: str) -> None:
    told = exceptions.in_rays_words(ours)
    assert type(told).__name__ == rays
    assert isinstance(told, type(ours))
    assert (str(told), told.maybe_executed) == ("x", ours.maybe_executed)
    assert exceptions.in_rays_words(told) is told or rays == "ConfigError"


def test_a_lost_object_of_a_dead_process_raises_owner_died_error() -> None:
    lost = errors.PeerDiedError("lost")
    lost.__cause__ = errors.PeerDiedError("it has ended")
    assert type(exceptions.in_rays_words(lost)) is exceptions.OwnerDiedError


# -- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"runtime_env": {"pip": ["x"]}}, "install the packages before the program starts"),
        ({"runtime_env": {"conda": "x"}}, "install the packages before the program starts"),
        ({"runtime_env": {"uv": ["x"]}}, "install the packages before the program starts"),
        ({"runtime_env": {"working_dir": "s3://x"}}, "is no directory of this machine"),
        ({"runtime_env": {"nothing": 1}}, "there are: env_vars, py_modules, working_dir"),
        ({"scheduling_strategy": "NOWHERE"}, "SPREAD"),
        ({"resources": {"CPU": 1}}, "num_cpus="),
        ({"placement_group": 3}, "what placement_group"),
    ],
    ids=str,
)
@row("RuntimeEnvSetupError", "ray-programs")
def test_unsupported_options_raise_errors_with_a_remedy(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        options.for_actors(given, options.Extras())
    assert isinstance(caught.value, exceptions.RuntimeEnvSetupError) is ("runtime_env" in given)


def test_options_are_checked_when_the_decorator_runs() -> None:
    with pytest.raises(ValueError, match="Did you mean 'num_cpus'"):
        ray.remote(num_cpu=1)(len)
    with pytest.raises(TypeError, match=r"@ray\.remote"):
        ray.remote()
    with pytest.raises(TypeError, match="classes and functions"):
        ray.remote(3)
    with pytest.raises(TypeError, match="remote already"):
        ray.remote(ray.remote(len))
    with pytest.raises(TypeError, match="at least one option"):
        ray.method()
    with pytest.raises(TypeError, match="cannot be instantiated directly"):
        ray.remote(Path)()
    with pytest.raises(TypeError, match="cannot be called directly"):
        ray.remote(len)([])


@row("init: job_config", "ray-programs")
def test_wrong_arguments_are_refused_before_a_cluster_starts() -> None:
    for call in (
        lambda: ray.get(3),
        lambda: ray.get([3]),
        lambda: ray.kill(3),
        lambda: ray.cancel(3),
        lambda: ray.get_actor(""),
    ):
        with pytest.raises(ValueError, match=r"ray\."):
            call()
    with pytest.raises(TypeError, match="takes a list"):
        ray.wait(3)
    with pytest.raises(TypeError, match="cannot be made of"):
        ray.ObjectRef(b"x" * 28)  # type: ignore[arg-type]
    with pytest.raises(ConnectionError, match="a cluster of Ray cannot be joined"):
        ray.init("ray://head:10001")
    with pytest.raises(ConnectionError, match="leave address= out"):
        ray.init("auto")
    with pytest.raises(ValueError, match="say namespace= and runtime_env="):
        ray.init(job_config=object())
    with pytest.raises(ValueError, match="did you mean num_cpus"):
        ray.init(num_cpu=1)
    assert not ray.is_initialized()


# -- runtime_env ------------------------------------------------------------------------------------------------


def test_a_runtime_env_inherits_from_the_outer_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env = ray.runtime_env.RuntimeEnv(env_vars={"A": "1", "B": "1"}, working_dir=str(tmp_path))
    made, paths = runtime_env.options_of(runtime_env.merged(env))
    assert made["env"]["A"] == "1"
    assert made["working_dir"] == str(tmp_path)
    assert paths == (str(tmp_path),)
    monkeypatch.setenv(runtime_env.VARIABLE, made["env"][runtime_env.VARIABLE])
    below = runtime_env.merged({"env_vars": {"B": "2"}})
    assert below == {"env_vars": {"A": "1", "B": "2"}, "working_dir": str(tmp_path)}
    assert runtime_env.merged(None)["working_dir"] == str(tmp_path)


def test_py_modules_may_be_packages_files_and_imported_modules(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "module.py").touch()
    modules = [tmp_path / "package", tmp_path / "module.py", pytest]
    found = runtime_env.checked({"py_modules": modules})
    assert found["py_modules"] == [str(tmp_path), str(tmp_path), str(Path(pytest.__file__).parents[1])]


@pytest.mark.parametrize(
    ("env", "says"),
    [({"py_modules": "x"}, "a list of paths or modules"), ({"env_vars": {"A": 1}}, "a dict of texts")],
    ids=str,
)
def test_fields_of_a_runtime_env_with_a_wrong_type_are_refused(env: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        ray.remote(len).options(runtime_env=env)


# -- placement --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"bundles": []},
        {"bundles": [{"CPU": 0}]},
        {"bundles": [{"CPU": -1}]},
        {"bundles": [{"CPU": 1}], "strategy": "X"},
    ],
    ids=str,
)
def test_invalid_placement_groups_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ray.util.placement_group(**given)


# -- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def aliased() -> Iterator[None]:
    """Make `import ray` import actorrpc.compat.ray, as in programs that the command runs."""
    before = {
        name: module for name, module in sys.modules.items() if name == "ray" or name.startswith("ray.")
    }
    for name in before:
        del sys.modules[name]
    finder = alias_package("ray", "actorrpc.compat.ray")
    yield
    forget(finder)
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("aliased")
def test_import_ray_gives_actorrpc_modules_under_the_command() -> None:
    for name in (
        "",
        ".exceptions",
        ".util",
        ".util.queue",
        ".util.placement_group",
        ".actor",
        ".runtime_env",
    ):
        assert importlib.import_module(f"ray{name}") is importlib.import_module(f"actorrpc.compat.ray{name}")
    assert inspect.isfunction(ray.util.placement_group)  # not the module of this name
    with pytest.raises(ModuleNotFoundError, match=r"no module ray\.tune \(.*there are: ray, ray\.actor"):
        importlib.import_module("ray.tune")


def test_a_ray_that_was_imported_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with pytest.raises(RuntimeError, match="ray has been imported already"):
        alias_package("ray", "actorrpc.compat.ray")


def test_the_command_sets_the_variables_of_programs_once() -> None:
    inside = take_over.with_ray({"PYTHONPATH": "a"})
    assert inside["ACTORRPC_RAY"] == "1"
    assert inside["PYTHONPATH"].split(os.pathsep)[1:] == ["a"]
    assert take_over.with_ray(inside) == inside
