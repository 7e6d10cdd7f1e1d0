"""The private names of CPython and torch that the package uses exist in the running versions, and stand in two modules."""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.autograd.profiler_util import EventList
from torch.distributed import distributed_c10d as c10d

from actorrpc import _python, _torch

_PACKAGE = Path(_python.__file__).parent
#: The names that the running versions do not have, as their comments say.
_ABSENT: set[str] = set()
if torch.__version__.startswith("2.6."):
    _ABSENT |= {"torch._C:_remove_obj_from_tls", "OPERATOR_TAGS", "OPERATOR_AUTOCAST", "WRAPPER_ID"}
if sys.version_info >= (3, 12):
    _ABSENT.add("SET_TRACE")
if sys.version_info < (3, 13):
    _ABSENT |= {f"asyncio:BaseEventLoop._run_forever_{name}.__code__" for name in ("setup", "cleanup")}


def _constants(module: Any) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _paths(value: ast.expr) -> list[str]:
    """Return the paths with which an expression calls find()."""
    calls = [node for node in ast.walk(value) if isinstance(node, ast.Call) and node.args]
    return [ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) in ("find", "_find")]


_CONSTANTS = [(module, *found) for module in (_python, _torch) for found in _constants(module)]


@pytest.mark.parametrize(
    "path", [each for *_, value in _CONSTANTS for each in _paths(value) if each not in _ABSENT]
)
def test_each_object_exists(path: str) -> None:
    _python.find(path)


class _Double(torch.autograd.Function):
    """A graph node that is written in Python."""


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


_leaf = torch.ones(1, requires_grad=True)
_module = torch.nn.Linear(1, 1)
_operator = torch.library.custom_op("actorrpc_test::double", _double, mutates_args=())
_options = c10d.ProcessGroupGloo._Options  # type: ignore[attr-defined]
_disabled = torch.compiler.disable(_double)
_future: Any = concurrent.futures.Future()


async def _awaits() -> bool:
    future = asyncio.get_running_loop().create_future()
    gathered = asyncio.gather(future)
    waits = asyncio.ensure_future(asyncio.wait_for(gathered, None))
    await asyncio.sleep(0)
    try:
        kept = getattr(waits, _python.LOGS_PENDING)
        waiter = getattr(waits, _python.AWAITED)
        return kept is True and type(waiter) is _python.GatheringFuture and waiter._children == [future]
    finally:
        waits.cancel()


def _has(obj: object, *names: str) -> bool:
    return all(hasattr(obj, name) for name in names)


#: A check for each name that is not looked up by find().
_CHECKS: dict[str, Callable[[], Any]] = {
    "AWAITED": lambda: asyncio.run(_awaits()),
    "GATHERED": lambda: _python.GATHERED == "_children",  # which _awaits() reads
    "LOGS_PENDING": lambda: asyncio.run(_awaits()),
    "RESOURCE_TRACKER": lambda: _has(
        getattr(resource_tracker, _python.RESOURCE_TRACKER[0]), *_python.RESOURCE_TRACKER[1:]
    ),
    "FORK_SERVER": lambda: _has(getattr(forkserver, _python.FORK_SERVER[0]), *_python.FORK_SERVER[1:]),
    "_collections": lambda: all(each._remove for each in _python._collections),
    "WEAK_CALLBACKS": lambda: len(_python.WEAK_CALLBACKS) == 3,
    "SET_TRACE": lambda: hasattr(ctypes.pythonapi, _python.SET_TRACE),
    "node_class": lambda: issubclass(_torch.node_class(_Double), _torch.PythonNode),
    "leaf_hooks": lambda: _torch.leaf_hooks(get_gradient_edge(_leaf).node) is None,
    "input_metadata": lambda: _torch.input_metadata((_leaf * 2).grad_fn)[0].device.type == "cpu",
    "untyped": lambda: _torch.untyped(torch.TypedStorage(1, _internal=True)).nbytes() == 4,
    "custom_operator_parts": lambda: _torch.custom_operator_parts(_operator)[0] == "actorrpc_test::double",
    "OPERATOR_TAGS": lambda: hasattr(_operator, _torch.OPERATOR_TAGS),
    "OPERATOR_AUTOCAST": lambda: getattr(_operator, _torch.OPERATOR_AUTOCAST) == {},
    "overload_name": lambda: _torch.overload_name(torch.ops.aten.add.Tensor) == ("aten::add", "Tensor"),
    "packet_name": lambda: _torch.packet_name(torch.ops.aten.add) == "aten::add",
    "WRAPPER_ID": lambda: getattr(_disabled, _torch.WRAPPER_ID) == id(_disabled),
    "WRAPPED": lambda: getattr(_disabled, _torch.WRAPPED) is _double,
    "build_tree": lambda: _torch.build_tree(EventList([])) is None,
    "PROFILE_ENDS": lambda: all(hasattr(module, name) for module, name in _torch.PROFILE_ENDS),
    "set_profiler_rank": lambda: hasattr(_torch.distributed_rpc, "_set_profiler_node_id"),
    "state_dict_hooks": lambda: _torch.state_dict_hooks(_module) == {},
    "tensor_mapper": lambda: _torch.tensor_mapper(_module)(lambda t: t) is _module,
    "METADATA": lambda: "" in getattr(_module.state_dict(), _torch.METADATA),
    "step_hooks": lambda: not any(_torch.step_hooks(torch.optim.SGD([_leaf]))),
    "LATE_MODULE": lambda: importlib.import_module(_torch.LATE_MODULE),
    "world_of": lambda: _has(_torch.world_of(c10d), "pg_map", "pg_names", "pg_group_ranks", "tags_to_pg"),
    "gloo_options": lambda: _torch.gloo_options(c10d.ProcessGroupGloo) is _options,
    "TIMEOUT": lambda: hasattr(_options, _torch.TIMEOUT),
    "DEVICES": lambda: hasattr(_options, _torch.DEVICES),
    "set_default_timeout": lambda: _torch.set_default_timeout(c10d.ProcessGroupGloo),
    "setters": lambda: all(_torch.setters(dist.ProcessGroup)),
    "IN_PLACE": lambda: (
        all(_has(_future, *names) for names in _python.IN_PLACE.values())
        and all(_has(owner, *names) for owner, names in _torch.IN_PLACE.items())
    ),
}


@pytest.mark.parametrize(
    "name", sorted({name for _, name, value in _CONSTANTS if not _paths(value)} - _ABSENT)
)
def test_each_attribute_exists(name: str) -> None:
    assert _CHECKS[name]() is not False


def test_a_missing_name_without_a_fallback_raises_an_error_that_shows_name_and_version() -> None:
    with pytest.raises(ImportError, match=r"does not work with torch 9, which has no torch\._C\._missing"):
        _python.find("torch._C:_missing", of="torch 9")
    assert _python.find("torch._C:_missing", None) is None


#: Documented names, and names of other packages: cloudpickle, OpenTelemetry and mypy.
_ALLOWED = {
    *("sys._getframe", "sys._current_frames", "value._value_", "cast(Any, error)._name_"),
    *(
        "self.context._RUNTIME_CONTEXT",
        "importlib.import_module('opentelemetry.trace.propagation')._SPAN_KEY",
    ),
    *("cloudpickle.Pickler._dispatch_table", "var._fullname"),
}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def _foreign(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield the private names in these modules that they do not define."""
    nodes = [(module, node) for module, tree in trees.items() for node in ast.walk(tree)]
    own: set[str] = {"_replace", "_fields", "_asdict", "_make"}  # documented methods of named tuples
    own |= {name for module in (_python, _torch) for names in module.IN_PLACE.values() for name in names}
    for _, node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                own.add(node.attr)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            own |= {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    for module, node in nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            text = ast.unparse(node)
            if text.startswith(("torch.", "asyncio.", "threading.")) or node.attr not in own:
                if text not in _ALLOWED and not text.startswith("_cloudpickle."):
                    yield f"{module}: {text}"
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("actorrpc"):
            yield from (
                f"{module}: {node.module}.{alias.name}"
                for alias in node.names
                if _is_private(f"{node.module}.{alias.name}") and node.module != "__future__"
            )


def test_other_modules_take_private_names_from_the_two_modules() -> None:
    trees = {
        str(path.relative_to(_PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in _PACKAGE.rglob("*.py")
        if path.name not in ("_python.py", "_torch.py")
    }
    assert list(_foreign(trees)) == []
    bad = "import torch\nfrom threading import _DummyThread\ntorch._C._set_neg\ntask._fut_waiter"
    assert len(list(_foreign({"bad.py": ast.parse(bad)}))) == 4
