"""RemoteModule in a group with only this process, compared with local modules and torch's error messages."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import actorrpc.autograd as dist_autograd
from actorrpc import errors, rpc
from actorrpc.futures import Future, collect_all
from actorrpc.nn import RemoteModule
from tests.announced import OUTSIDE_OF_A_CONTEXT
from tests.migration.rows import row
from tests.nn import things
from tests.nn.things import Hybrid

pytestmark = pytest.mark.usefixtures("here")


def _value(remote: RemoteModule) -> Any:
    """Return the module itself, which is in this process."""
    return remote.get_module_rref().local_value()


# -- creation --------------------------------------------------------------------------------------------------------


def test_the_place_of_a_module_may_be_a_name_rank_device_or_worker_info() -> None:
    me = rpc.get_worker_info()
    for place in ("w0", "w0/cpu", "rank:0", "rank:0/cpu", "cpu", torch.device("cpu"), me, 0):
        remote = RemoteModule(place, nn.Linear, (2, 2))
        assert (remote.on, remote.device) == ("w0", "cpu")
        assert remote(torch.ones(1, 2)).shape == (1, 2)
    with pytest.raises(
        errors.UnknownWorkerError, match="there is no worker 'nobody' in the group; there are: w0"
    ):
        RemoteModule("nobody/cpu", nn.Linear, (2, 2))
    with pytest.raises(errors.UnknownWorkerError, match="no worker 4"):
        RemoteModule("rank:4", nn.Linear, (2, 2))
    for wrong in ("w0/cpu/cpu", "/cpu", "rank:x"):
        with pytest.raises(errors.ConfigError, match=f"Could not parse remote_device: {wrong}"):
            RemoteModule(wrong, nn.Linear, (2, 2))
    with pytest.raises(TypeError, match=r"Invalid type for remote_device.*such as 'worker1/cpu'"):
        RemoteModule(1.5, nn.Linear, (2, 2))  # type: ignore[arg-type]


def test_modules_are_created_from_classes_and_functions() -> None:
    remote = RemoteModule("w0", things.Echo, [1], {"second": 2})
    assert type(_value(remote)) is things.Echo
    assert remote.get_module_rref() is remote.module_rref
    assert remote.module_rref.rpc_sync().sum() == 3
    assert torch.equal(
        RemoteModule("w0", things.build_linear, (3,)).state_dict()["bias"], things.build_linear(3).bias
    )
    width = 5
    assert RemoteModule("w0", lambda: nn.Linear(width, 1))(torch.ones(2, 5)).shape == (2, 1)
    assert RemoteModule("w0", torch.jit.script, (nn.Linear(2, 3),))(torch.ones(1, 2)).shape == (1, 3)


_EXPECTED = re.escape("Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>,")


def test_creating_an_object_that_is_no_module_raises() -> None:
    with pytest.raises(ValueError, match=_EXPECTED):
        RemoteModule("w0", things.NotAModule, (1,), {"second": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=_EXPECTED + r".*<class 'int'>"):  # only noticed at the owner
        RemoteModule("w0", lambda: 3).forward()
    with pytest.raises(TypeError, match=r"module_cls must be a class of modules, .*, not 3"):
        RemoteModule("w0", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"write args=\(x,\)"):
        RemoteModule("w0", nn.Linear, "ab")
    with pytest.raises(TypeError, match="kwargs must be a dict"):
        RemoteModule("w0", nn.Linear, (), [1])  # type: ignore[arg-type]


def test_a_remote_module_can_be_created_from_an_rref() -> None:
    first = RemoteModule("w0", nn.Linear, (2, 2))
    for other in (
        RemoteModule.from_rref(first.get_module_rref()),
        RemoteModule.from_rref(first.get_module_rref(), torch.device("cpu")),
        RemoteModule.init_from_module_rref("w0/cpu", first.get_module_rref()),
        copy.copy(first),
    ):
        assert _value(other) is _value(first)
        assert (other.on, other.device, type(other)) == ("w0", "cpu", RemoteModule)
        assert torch.equal(other(torch.ones(1, 2)), first(torch.ones(1, 2)))
    with pytest.raises(TypeError, match="made from an RRef, not from a Linear"):
        RemoteModule.from_rref(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="given as the device 'w0/cpu'"):
        RemoteModule.from_rref(first.module_rref, "w0/cpu")
    with pytest.raises(ValueError, match="TorchScript interfaces are not supported"):
        RemoteModule.init_from_module_rref("w0", first.module_rref, object)
    wrong = RemoteModule.from_rref(rpc.RRef([1]))
    for use in (wrong.forward, wrong.remote_parameters, wrong.state_dict, wrong.eval):
        with pytest.raises(TypeError, match=r"expected to refer to an nn.Module, but refers to a list"):
            use()


# -- calling ---------------------------------------------------------------------------------------------------------


def test_forward_and_forward_async_return_the_result_of_the_module() -> None:
    remote = RemoteModule("w0", things.Echo, (1,))
    tensor = torch.ones(1)
    for called in (remote(tensor, 2, word="3"), remote.forward(tensor, 2, "3")):
        assert called == ("3", 2, tensor)
    future = remote.forward_async(tensor, 2)
    assert isinstance(future, Future)
    assert future.wait() == ("default", 2, tensor)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'number'"):
        remote(tensor)
    assert [
        each.wait()[1] for each in collect_all([remote.forward_async(tensor, n) for n in range(5)]).wait()
    ] == [*range(5)]


def test_calls_use_the_rpc_timeout_of_the_group() -> None:
    remote = RemoteModule("w0", things.Busy, (2,))
    before = rpc.get_rpc_timeout()
    try:
        rpc.api.set_rpc_timeout(0.05)  # must expire
        with pytest.raises(errors.RpcTimeoutError, match=r"Busy.forward on 'w0'") as caught:
            remote()
        assert caught.value.maybe_executed is not False
    finally:
        rpc.api.set_rpc_timeout(before)
        _value(remote).barrier.abort()


@rpc.functions.async_execution
def _later(self: Any, x: int) -> Future[int]:
    return rpc.rpc_async("w0", abs, (x,))


def test_a_forward_method_with_async_execution_is_answered_by_its_future() -> None:
    made = type("Deferred", (nn.Module,), {"forward": _later, "__module__": __name__})
    assert RemoteModule("w0", made)(-3) == 3


# -- parameters ------------------------------------------------------------------------------------------------------


def test_remote_parameters_are_rrefs_to_the_parameters_of_the_module() -> None:
    remote = RemoteModule("w0", things.Tied)
    module = _value(remote)
    assert [rref.local_value() for rref in remote.remote_parameters()] == [*module.parameters()]
    assert all(
        a.local_value() is b for a, b in zip(remote.remote_parameters(), module.parameters(), strict=True)
    )
    assert [rref.local_value() for rref in remote.remote_parameters(recurse=False)] == [module.scale]
    assert [*remote.named_parameters(recurse=False)] == []  # the local object has no parameters
    for asked in ({}, {"prefix": "p"}, {"remove_duplicate": False}):
        found = remote.named_parameters(**asked)  # type: ignore[arg-type]
        assert [(name, id(rref.local_value())) for name, rref in found] == [
            (name, id(each))
            for name, each in module.named_parameters(**asked)  # type: ignore[arg-type]
        ]


def test_the_module_is_freed_with_its_last_reference() -> None:
    remote = RemoteModule("w0", nn.Linear, (2, 2))
    module = weakref.ref(_value(remote))
    weight = weakref.ref(_value(remote).weight)
    parameters = remote.remote_parameters()
    other = RemoteModule.from_rref(remote.module_rref)
    del remote
    gc.collect()
    assert other(torch.ones(1, 2)).shape == (1, 2)
    del other
    _wait_freed(module)
    assert weight() is not None  # RRefs of parameters keep the parameters
    del parameters
    _wait_freed(weight)


def _wait_freed(reference: Callable[[], object]) -> None:
    while reference() is not None:  # bounded by the test's limit
        gc.collect()
        rpc.rpc_sync("w0", abs, (1,))


# -- state -----------------------------------------------------------------------------------------------------------


def _same(one: Any, other: Any) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, other[name], rtol=0, atol=0)
        else:
            assert value == other[name]


def test_state_dict_and_load_state_dict_equal_those_of_the_module() -> None:
    remote = RemoteModule("w0", things.Tied)
    module = _value(remote)
    remote(torch.ones(1, 3))
    state = remote.state_dict()
    _same(state, module.state_dict())
    _same(remote.state_dict(prefix="a."), module.state_dict(prefix="a."))
    assert state["first.weight"].data_ptr() == state["second.weight"].data_ptr()
    assert not any(each.requires_grad for each in state.values() if isinstance(each, torch.Tensor))
    _same(remote.state_dict(keep_vars=True), module.state_dict())  # still copies
    _same(remote.state_dict(destination={}), module.state_dict())
    state["scale"].fill_(7)
    assert module.scale.item() == 2
    other = RemoteModule("w0", things.Tied)
    module.word = "old"
    assert str(other.load_state_dict(remote.state_dict())) == "<All keys matched successfully>"
    _same(other.state_dict(), module.state_dict())
    assert _value(other).word == "old"
    local = things.Tied()
    local.load_state_dict(remote.state_dict())
    _same(local.state_dict(), module.state_dict())
    remote.load_state_dict(things.Tied().state_dict(keep_vars=True))
    assert remote.state_dict()["count"] == 0


def test_loading_a_wrong_state_raises_torchs_errors() -> None:
    remote, local = RemoteModule("w0", things.normed, (2,)), things.normed(2)
    good = local.state_dict()
    for change in (
        lambda state: state.pop("0.weight"),
        lambda state: state.update(other=torch.ones(1)),
        lambda state: state.update({"0.other": torch.ones(1), "1.weight": torch.ones(3)}),
        lambda state: state.update({"0.weight": 3}),
        lambda state: state.clear(),
    ):
        state = copy.deepcopy(good)
        change(state)
        expected = _raised(lambda: local.load_state_dict(state))  # noqa: B023
        found = _raised(lambda: remote.load_state_dict(state))  # noqa: B023
        assert found[0].replace("RemoteModule", "Sequential") == expected[0]
        ours = [line.removeprefix("normed on 'w0': ") for line in found[1:]]
        assert ours == expected[1:]
        lax = [_keys(lambda: each.load_state_dict(state, strict=False)) for each in (local, remote)]  # noqa: B023
        assert lax[0] == lax[1]
    with pytest.raises(TypeError, match="dict-like"):
        remote.load_state_dict(3)  # type: ignore[arg-type]


def _raised(load: Callable[[], Any]) -> list[str]:
    with pytest.raises(RuntimeError) as caught:
        load()
    return [line.strip() for line in str(caught.value).split("\n")]


def _keys(load: Callable[[], Any]) -> Any:
    try:
        found = load()
    except RuntimeError:
        return "raised"
    return found.missing_keys, found.unexpected_keys


def test_state_dict_hooks_of_the_remote_module_run() -> None:
    remote, log = RemoteModule("w0", nn.Linear, (1, 1)), []
    remote.register_state_dict_pre_hook(lambda *args: log.append("before saving"))
    remote.register_state_dict_post_hook(lambda _m, state, prefix, _d: state.update({prefix + "more": 1}))
    remote.register_load_state_dict_pre_hook(lambda _m, state, prefix, *rest: state.pop(prefix + "more"))
    remote.register_load_state_dict_post_hook(lambda _m, keys: log.append(keys.missing_keys))
    state = Hybrid(remote, 1).state_dict()
    assert "remote.more" in state
    hybrid = Hybrid(remote, 1)
    hybrid.load_state_dict(state)
    del state["remote.bias"]
    hybrid.load_state_dict(state, strict=False)
    assert log == ["before saving", [], ["remote.bias"]]


# -- a remote module as a part of a local model ----------------------------------------------------------------------


@pytest.mark.prints(OUTSIDE_OF_A_CONTEXT)
def test_a_model_with_a_remote_part_has_one_state_dict_to_save_and_load() -> None:
    hybrid = Hybrid(RemoteModule("w0", things.normed, (3,)))
    hybrid(torch.randn(8, 3))  # changes the running statistics
    file = io.BytesIO()
    torch.save(hybrid.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    _same(state, hybrid.state_dict())
    local = Hybrid(things.normed(3))
    assert list(local.state_dict()) == list(state)
    local.load_state_dict(state)
    again = Hybrid(RemoteModule("w0", things.normed, (3,)))
    again.load_state_dict(state)
    x = torch.randn(5, 3)
    for each in (hybrid, local, again):
        each.eval()
    assert torch.equal(local(x), hybrid(x))
    assert torch.equal(again(x), hybrid(x))
    again.load_state_dict(Hybrid(things.normed(3)).state_dict())  # the state of a local model
    assert not torch.equal(again(x), hybrid(x))


@row("RemoteModule(", "from-torch-rpc")
@row("RemoteModule.forward and .remote_parameters", "from-torch-rpc")
def test_methods_of_the_surrounding_model_apply_to_the_remote_part() -> None:
    remote = RemoteModule("w0", things.normed, (3,))
    hybrid = Hybrid(remote)
    local = hybrid.local
    assert [*hybrid.parameters()] == [*local.parameters()]
    assert [name for name, _ in hybrid.named_parameters()] == ["local.weight", "local.bias"]
    assert [*hybrid.buffers()] == []
    assert [*hybrid.modules()] == [hybrid, local, remote]
    assert [name for name, _ in hybrid.named_modules()] == ["", "local", "remote"]
    assert [*nn.ModuleList([remote, hybrid]).modules()][1:] == [remote, hybrid, local]
    assert [*hybrid.children()] == [local, remote]
    assert hybrid.eval() is hybrid
    assert (remote.training, _value(remote).training, _value(remote)[2].training) == (False, False, False)
    hybrid.train()
    assert (remote.training, _value(remote)[2].training) == (True, True)
    hybrid.zero_grad()
    hybrid.requires_grad_(False)
    assert [rref.local_value().requires_grad for rref in remote.remote_parameters()] == [True] * 4
    hybrid.apply(things.fill)
    assert torch.all(local.weight == 0.5)
    assert torch.all(_value(remote)[0].weight == 0.5)
    assert repr(hybrid).splitlines()[2] == "  (remote): RemoteModule(normed on w0/cpu)"
    assert str(remote) == "RemoteModule(normed on w0/cpu)"
    hybrid.double()
    assert local.weight.dtype is _value(remote)[0].weight.dtype is torch.float64
    hybrid.share_memory()
    assert local.weight.is_shared()
    assert not _value(remote)[0].weight.is_shared()
    torch.optim.SGD(hybrid.parameters(), 0.1)


def test_a_model_with_a_remote_part_cannot_be_deep_copied_or_pickled() -> None:
    hybrid = Hybrid(RemoteModule("w0", nn.Linear, (3, 3)))
    with pytest.raises(errors.RRefError, match="deepcopy would not copy the module, which is on 'w0'"):
        copy.deepcopy(hybrid)
    text = "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
    for save in (lambda: torch.save(hybrid, io.BytesIO()), lambda: pickle.dumps(hybrid.remote)):
        with pytest.raises(RuntimeError, match=text) as caught:
            save()
        assert isinstance(caught.value, errors.SerializationError)
    with pytest.raises(RuntimeError, match="Cannot unpickle RemoteModule in python pickler"):
        hybrid.remote.__setstate__({})  # type: ignore[operator]


# -- changing a module -----------------------------------------------------------------------------------------------


def test_train_and_eval_set_the_mode_of_the_module() -> None:
    remote = RemoteModule("w0", things.Modes)
    for told in (True, False, True):
        assert remote.train(told) is remote
        assert (remote(), remote.training) == (told, told)
    assert remote.eval() is remote
    assert (remote(), remote.training) == (False, False)
    with pytest.raises(ValueError, match="boolean"):
        remote.train(1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        (lambda m: m.double(), torch.float64),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.double().float(), torch.float32),
        (lambda m: m.type(torch.float64), torch.float64),
        (lambda m: m.type(torch.DoubleTensor), torch.float64),
        (lambda m: m.to(torch.float64), torch.float64),
        (lambda m: m.to("cpu"), torch.float32),
        (lambda m: m.to("cpu", torch.float64, non_blocking=True), torch.float64),
        (lambda m: m.to(torch.ones(1, dtype=torch.float64)), torch.float64),
        (lambda m: m.to(memory_format=torch.channels_last), torch.float32),
        (lambda m: m.cpu(), torch.float32),
    ],
)
def test_conversions_change_the_module_in_place(
    change: Callable[[nn.Module], Any], dtype: torch.dtype
) -> None:
    remote = RemoteModule("w0", nn.Linear, (2, 2))
    weight = _value(remote).weight
    assert change(remote) is remote
    assert _value(remote).weight.dtype is dtype
    assert _value(remote).weight is weight  # references to parameters stay valid
    assert remote.device == "cpu"


def test_a_module_on_the_meta_device_can_be_materialized_with_to_empty() -> None:
    remote = RemoteModule("w0", nn.Linear, (2, 2))
    remote.to("meta")
    assert remote.device == "meta"
    with pytest.raises(NotImplementedError, match="to_empty"):
        remote.to("cpu")
    assert remote.to_empty(device="cpu").device == "cpu"
    remote.apply(things.fill)
    assert torch.equal(remote(torch.ones(1, 2)), torch.ones(1, 2))


def test_requires_grad_and_zero_grad_act_on_the_module() -> None:
    remote = RemoteModule("w0", nn.Linear, (2, 2))
    assert remote.requires_grad_(False) is remote
    assert [each.requires_grad for each in _value(remote).parameters()] == [False, False]
    remote.requires_grad_()
    module = _value(remote)
    module(torch.ones(1, 2)).sum().backward()
    remote.zero_grad(set_to_none=False)
    assert torch.equal(module.weight.grad, torch.zeros(2, 2))
    assert remote.zero_grad() is None  # type: ignore[func-returns-value]
    assert module.weight.grad is None


# -- hooks -----------------------------------------------------------------------------------------------------------


def test_forward_hooks_run_at_the_caller_and_hooks_of_the_module_at_its_owner() -> None:
    remote = RemoteModule("w0", things.Untensored)
    log: list[Any] = []
    before = remote.register_forward_pre_hook(lambda module, args: (log.append(module), (args[0] + 1,))[1])
    after = remote.register_forward_hook(lambda module, args, output: output * 10)
    assert remote(1) == 20
    assert log == [remote]
    assert remote.forward(1) == 1  # as in torch, forward() runs no hooks
    assert remote.forward_async(1).wait() == 1
    remote.apply(things.mark)  # registers a hook at the module itself
    assert remote(1) == 1020
    assert remote.forward(1) == 101
    assert remote.forward_async(1).wait() == 101
    before.remove()
    after.remove()
    assert remote(1) == 101
    with pytest.raises(
        ValueError, match=r"``register_backward_hook`` not supported.*register_full_backward_hook"
    ):
        remote.register_backward_hook(lambda *args: None)


# -- gradients -------------------------------------------------------------------------------------------------------


def _both(part: Any, *args: Any) -> tuple[Hybrid, Hybrid]:
    hybrid = Hybrid(RemoteModule("w0", part, args))
    return hybrid, things.clone_of(hybrid, part(*args))


def _gradients(context: int, hybrid: Hybrid) -> dict[str, torch.Tensor]:
    found = dist_autograd.get_gradients(context)
    here = {name: found[each] for name, each in hybrid.named_parameters()}
    there = {
        f"remote.{name}": found[rref.local_value()]
        for name, rref in hybrid.remote.named_parameters()  # type: ignore[union-attr]
    }
    return here | there


def _grads(model: nn.Module) -> dict[str, Any]:
    return {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("part", [things.Tied, things.build_linear, things.normed])
def test_gradients_equal_those_of_the_local_model(part: Any) -> None:
    hybrid, local = _both(part, 3)
    x = torch.randn(4, 3)
    torch.manual_seed(1)
    local(x).square().sum().backward()
    with dist_autograd.context() as context:
        torch.manual_seed(1)  # for dropout
        dist_autograd.backward(context, [hybrid(x).square().sum()])
        torch.testing.assert_close(_gradients(context, hybrid), _grads(local))
    assert all(each.grad is None for each in hybrid.parameters())


def test_gradients_flow_through_forward_async() -> None:
    hybrid, local = _both(things.build_linear, 3)
    x = torch.randn(4, 3)
    (local(x) * local(2 * x)).sum().backward()
    with dist_autograd.context() as context:
        one, other = (hybrid.remote.forward_async(torch.relu(hybrid.local(each))) for each in (x, 2 * x))  # type: ignore[operator]
        dist_autograd.backward(context, [(one.wait() * other.wait()).sum()])
        torch.testing.assert_close(_gradients(context, hybrid), _grads(local))


@pytest.mark.parametrize("changes", [False, True])
def test_full_backward_hooks_run_at_the_caller_as_in_a_local_model(changes: bool) -> None:
    hybrid, local = _both(things.build_linear, 3)
    seen: dict[str, list[Any]] = {"remote": [], "local": []}
    for name, model in (("remote", hybrid), ("local", local)):

        def before(_module: Any, out: Any, name: str = name) -> Any:
            seen[name].append(out[0].clone())
            return (out[0] * 2,) if changes else None

        def after(_module: Any, given: Any, out: Any, name: str = name) -> Any:
            seen[name] += [given[0].clone(), out[0].clone()]
            return (given[0] * 3,) if changes else None

        model.remote.register_full_backward_pre_hook(before)
        model.remote.register_full_backward_hook(after)
    x = torch.randn(4, 3)
    local(x).square().sum().backward()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [hybrid(x).square().sum()])
        torch.testing.assert_close(_gradients(context, hybrid), _grads(local))
    assert len(seen["local"]) == 3
    torch.testing.assert_close(seen["remote"], seen["local"])


# -- unsupported methods ---------------------------------------------------------------------------------------------


def test_unsupported_methods_and_attributes_raise_errors_that_name_them() -> None:
    remote = RemoteModule("w0", nn.Linear, (2, 2))
    calls: dict[str, tuple[Any, ...]] = {
        "register_buffer": ("b", torch.ones(5)),
        "register_parameter": ("p", nn.Parameter(torch.ones(1))),
        "add_module": ("empty", None),
        "register_module": ("empty", None),
        "buffers": (),
        "named_buffers": (),
        "children": (),
        "named_children": (),
        "modules": (),
        "named_modules": (),
        "get_submodule": ("x",),
        "set_submodule": ("x", None),
        "get_parameter": ("weight",),
        "get_buffer": ("b",),
        "share_memory": (),
        "compile": (),
        "xpu": (),
    }
    for name, args in calls.items():
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(remote, name)(*args)
    text = "Method ``parameters`` not supported for RemoteModule. Please use ``remote_parameters`` instead."
    with pytest.raises(ValueError, match=text):
        remote.parameters()
    with pytest.raises(ValueError, match="``register_parameter`` not supported"):
        remote.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="``add_module`` not supported for RemoteModule: 'part'"):
        remote.part = nn.Linear(1, 1)
    with pytest.raises(
        AttributeError, match=r"The module is on 'w0'.*get_module_rref\(\).rpc_sync\(\).weight"
    ):
        _ = remote.weight
    assert not hasattr(remote, "__array__")
    assert remote.is_scriptable is False


def test_every_method_of_nn_module_is_overridden_or_listed_as_correct() -> None:
    """A method of a new torch would act on the empty local module. It must be forwarded, refused, or be correct unchanged."""
    right = {
        # they call overridden methods, or only concern the local object
        *("eval", "forward", "load_state_dict", "state_dict", "extra_repr"),
        *("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
        *("register_full_backward_pre_hook", "register_load_state_dict_post_hook"),
        *(
            "register_load_state_dict_pre_hook",
            "register_state_dict_post_hook",
            "register_state_dict_pre_hook",
        ),
        # to be overridden by classes with extra state
        *("get_extra_state", "set_extra_state"),
    }
    methods = {
        name for name in vars(nn.Module) if callable(getattr(nn.Module, name)) and not name.startswith("_")
    }
    own = set(vars(RemoteModule))
    assert methods - own - right == set()
