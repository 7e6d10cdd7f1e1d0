"""The rows of docs/migration/from-torch-rpc.md."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor, nn
from torch.autograd import profiler_legacy

import actorrpc
import actorrpc.autograd as dist_autograd
from actorrpc import _time, errors, rpc
from actorrpc.agent.calls import CURRENT
from actorrpc.autograd.api import contexts
from actorrpc.nn import RemoteModule
from actorrpc.optim import DistributedGradScaler, DistributedOptimizer
from actorrpc.rpc import api
from actorrpc.testing import InProcessCluster
from tests.actors.alone import alone
from tests.actors.e2e.kit import until
from tests.announced import PROFILER
from tests.intruders.doors import knock, tcp_agents
from tests.intruders.doors import until as until_closed
from tests.migration.rows import check, row
from tests.ports import free_port


def test_each_row_of_the_page_has_a_test() -> None:
    check("from-torch-rpc.md", globals())


# State of functions that run on workers of this process.

_gate = threading.Event()
_at_gate = threading.Event()
_called: list[Any] = []


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    _gate.clear()
    _at_gate.clear()
    _called.clear()
    yield
    _gate.set()


def hold() -> str:
    _at_gate.set()
    _gate.wait(30)
    return "through"


def note(value: Any) -> None:
    _called.append(value)


class Wrong(ValueError):
    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def fail() -> None:
    raise Wrong("no", 3)


@rpc.functions.async_execution
def later(to: str, x: int) -> Any:
    return rpc.rpc_async(to, max, args=(x, 2)).then(lambda future: future.wait() * 2)


def ping(other: str, depth: int) -> int:
    """Call back and forth."""
    return depth if depth == 0 else 1 + rpc.rpc_sync(other, ping, (rpc.get_worker_info().name, depth - 1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def gradient(self, context: int) -> Tensor:
        return dist_autograd.get_gradients(context)[self.weight]


class Faulty(torch.autograd.Function):
    """Runs ``action`` in its backward pass."""

    action: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if Faulty.action is not None:
            Faulty.action()
        return gradient


def faulty(x: Tensor) -> Tensor:
    found: Tensor = Faulty.apply(x * 2)
    return found


@pytest.fixture
def action() -> Iterator[type[Faulty]]:
    yield Faulty
    Faulty.action = None


# -- name by name ------------------------------------------------------------------------------------------------


@row("import torch.distributed.rpc as rpc")
def test_all_public_names_of_torch_rpc_exist() -> None:
    mine = {name for name, each in vars(torch_rpc).items() if _is_public(name, each)}
    assert mine
    assert not {name for name in mine if not hasattr(rpc, name)}


def _is_public(name: str, value: Any) -> bool:
    inner = ("AllGatherStates", "method_factory", "new_method")  # internals of __init__.py and api.py
    return (
        not name.startswith("_")
        and name not in inner
        and str(getattr(value, "__module__", "")).startswith("torch.distributed.rpc")
    )


@row("rpc.init_rpc(name")
def test_init_rpc_has_torchs_parameters_and_reads_the_variables_of_launchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = inspect.signature(torch_rpc.init_rpc).parameters
    mine = inspect.signature(rpc.init_rpc).parameters
    assert list(mine)[: len(theirs)] == list(theirs)
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }.items():
        monkeypatch.setenv(name, str(value))
    rpc.init_rpc()
    assert [(each.id, each.name) for each in rpc.get_worker_infos()] == [(0, "worker0")]
    rpc.shutdown()


@pytest.mark.usefixtures("near")
@row("rpc.rpc_sync, rpc.rpc_async")
@row("a remote exception is")
def test_calls_accept_lambdas_and_raise_the_remote_error() -> None:
    assert rpc.rpc_sync("worker1", lambda x: x + 1, args=(1,)) == 2
    assert rpc.rpc_async("worker1", max, args=(1, 2)).wait() == 2
    assert rpc.remote("worker1", max, args=(1, 2)).to_here() == 2
    with pytest.raises(Wrong) as caught:
        rpc.rpc_sync("worker1", fail)
    assert caught.value.code == 3


@row("fut.wait(), fut.then(f)")
def test_futures_have_time_outs_and_can_be_awaited(passing: InProcessCluster) -> None:
    futures = [rpc.rpc_async("worker1", max, args=(n, 2)) for n in range(4)]
    assert actorrpc.wait_all(futures) == [2, 2, 2, 3]
    assert isinstance(futures[0], rpc.Future)
    assert futures[0].then(lambda done: done.wait() + 1).wait() == 3
    held = rpc.rpc_async("worker1", hold, timeout=0)
    with pytest.raises(TimeoutError):
        held.wait(5)
    _gate.set()

    async def waits() -> Any:
        return await held

    assert asyncio.run(waits()) == "through"


@pytest.mark.usefixtures("near")
@row("rref.to_here(), .local_value()")
def test_rrefs_have_torchs_methods() -> None:
    rref = rpc.remote("worker1", torch.ones, args=(2,))
    assert rref.to_here().sum() == 2
    assert rref.rpc_sync().size() == torch.Size([2])
    assert rref.rpc_async().sum().wait() == 2
    assert rref.remote().sum().to_here() == 2
    assert rref.owner().name == "worker1"
    assert rpc.RRef(3).local_value() == 3


@pytest.mark.usefixtures("near")
@row("@rpc.functions.async_execution")
def test_async_execution_answers_with_the_result_of_the_future() -> None:
    assert rpc.rpc_sync("worker1", later, ("worker0", 1)) == 4


@pytest.mark.usefixtures("near")
@row("dist_autograd.context()")
@row("a call whose result the loss does not use")
def test_parameters_that_the_loss_does_not_use_get_no_gradient() -> None:
    used, unused = (rpc.remote("worker1", Layer) for _ in range(2))
    x = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context:
        unused.rpc_sync().forward(x)
        dist_autograd.backward(context, [used.rpc_sync().forward(x).sum()])
        assert torch.equal(dist_autograd.get_gradients(context)[x], torch.ones(3))
        assert torch.equal(used.rpc_sync().gradient(context), torch.ones(3))
        with pytest.raises(KeyError):
            unused.rpc_sync().gradient(context)


@pytest.mark.usefixtures("near")
@row("DistributedOptimizer(SGD")
def test_the_optimizer_accepts_references_modules_actors_and_groups() -> None:
    parameters = [rpc.remote("worker1", torch.ones, (3,), {"requires_grad": True})]
    remote = RemoteModule("worker1/cpu", nn.Linear, (2, 1))
    actor = actorrpc.remote(nn.Linear).remote(2, 1)
    group = actorrpc.spawn(2, nn.Linear, 2, 1)
    with_options = [{"params": [remote], "lr": 1.0}]
    for taken in (
        parameters,
        remote.remote_parameters(),
        [remote],
        [actor],
        [nn.Linear(2, 1)],
        group,
        with_options,
    ):
        DistributedOptimizer(torch.optim.SGD, taken, lr=0.1)


@pytest.mark.usefixtures("near")
@row("RemoteModule(")
@row("RemoteModule.forward and .remote_parameters")
@torch.no_grad()
def test_a_remote_module_works_inside_other_modules() -> None:
    remote = RemoteModule("worker1/cpu", nn.Linear, (2, 1))
    model = nn.Sequential(nn.Linear(2, 2), remote)
    assert remote(torch.ones(1, 2)).shape == (1, 1)
    assert len(remote.remote_parameters()) == 2
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    model.eval()
    assert not remote.get_module_rref().rpc_sync().train(False).training
    outputs: list[Any] = []
    handle = remote.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    model.double()
    assert model(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float64
    assert len(outputs) == 1
    handle.remove()
    model.to(torch.float32)
    model.apply(_fill)
    assert torch.equal(remote.state_dict()["weight"], torch.full((1, 2), 0.5))
    model.load_state_dict({**model.state_dict(), "1.bias": torch.zeros(1)})
    assert remote(torch.ones(1, 2)).item() == 1.0


def _fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.5)


@row("rpc.shutdown()")
@row("a peer dies")
@pytest.mark.prints("threads of 'worker1' are still in user code")
def test_the_death_of_a_worker_fails_its_calls_and_does_not_block_shutdown() -> None:
    with InProcessCluster(3, autojump=True) as cluster:
        rpc.rpc_sync("worker1", max, (1, 2))
        held = rpc.rpc_async("worker1", hold)
        cluster.clock.advance(0.0)
        cluster.kill("worker1")
        with pytest.raises(actorrpc.PeerDiedError, match="worker1") as caught:
            held.wait()
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.maybe_executed is True
        _gate.set()
        other = threading.Thread(target=cluster["worker2"].run, args=(rpc.shutdown,))
        other.start()
        cluster["worker0"].run(rpc.shutdown)
        other.join()
        assert not rpc.is_initialized()


# -- improved calls -----------------------------------------------------------------------------------------


@row("fut.wait() has no time-out")
def test_ctrl_c_interrupts_a_wait() -> None:
    with InProcessCluster(2, clock="real"):
        held = rpc.rpc_async("worker1", _interrupt_and_hold, timeout=0)
        with pytest.raises(KeyboardInterrupt):
            held.wait()
        _gate.set()
        assert held.wait() == "through"
        assert rpc.rpc_sync("worker1", max, (1, 2)) == 2


def _interrupt_and_hold() -> str:
    os.kill(os.getpid(), signal.SIGINT)
    return hold()


@pytest.mark.usefixtures("near")
@row("nested and cyclic calls")
def test_two_workers_can_call_each_other_40_levels_deep() -> None:
    assert rpc.rpc_sync("worker1", ping, ("worker0", 40)) == 40


@row("each call has a deadline of its own")
def test_nested_calls_inherit_the_remaining_time(near: InProcessCluster) -> None:
    call = rpc.rpc_async("worker1", _call_with_a_long_time_out, timeout=5.0)
    assert _at_gate.wait(30)  # wait before advancing the clock, as a late call is not started
    near.clock.advance(5.0)
    with pytest.raises(TimeoutError):
        call.wait()
    _gate.set()
    until(lambda: _called)
    [remaining] = _called
    assert 0 < remaining <= 5


def _call_with_a_long_time_out() -> None:
    rpc.rpc_sync("worker0", _note_the_remaining_time, timeout=1000.0)


def _note_the_remaining_time() -> None:
    execution = CURRENT.get()
    assert execution is not None
    remaining = execution.deadline - _time.now()
    hold()
    note(remaining)


@row("each call has a deadline of its own")
def test_a_queued_call_is_not_started_after_its_time_out() -> None:
    with InProcessCluster(2, clock="real", max_threads=2) as cluster:
        callee = cluster["worker1"].run(api.group).agent
        held = rpc.rpc_async("worker1", hold, timeout=0)
        assert _at_gate.wait(30)  # the other thread of the pool reads messages
        late = rpc.rpc_async("worker1", note, ("started",), timeout=0.05)
        with pytest.raises(TimeoutError):
            late.wait()
        # At the callee, the time-out expires slightly later, so the caller's CANCEL frame may arrive first.
        until(lambda: callee.peer("worker0").cancelled)
        _gate.set()
        assert held.wait() == "through"
        rpc.rpc_sync("worker1", note, ("afterwards",))
    assert _called == ["afterwards"]


@pytest.mark.usefixtures("near")
@row("functions must be importable")
def test_lambdas_and_local_classes_are_sent_by_value() -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    closed_over = 3
    found = rpc.rpc_sync("worker1", lambda: Local(closed_over))
    assert isinstance(found, Local)
    assert found.value == 3


@pytest.mark.usefixtures("near")
@row("large tensors on one host")
def test_large_tensors_arrive_as_copies() -> None:
    x = torch.arange(1 << 16)
    found = rpc.rpc_sync("worker1", torch.add, (x, 0))
    assert torch.equal(found, x)
    assert found.data_ptr() != x.data_ptr()


@row("a slow consumer")
def test_a_call_blocked_by_a_full_window_raises_backpressure_error_at_its_time_out() -> None:
    with InProcessCluster(2, clock="real", window=1 << 20, max_threads=2):
        ballast = torch.zeros(1 << 16)
        held = [rpc.rpc_async("worker1", _held, (ballast,), timeout=0) for _ in range(5)]
        with pytest.raises(errors.BackpressureError) as caught:
            rpc.rpc_async("worker1", _held, (ballast,), timeout=0.05)
        assert caught.value.maybe_executed is False
        _gate.set()
        assert actorrpc.wait_all(held) == ["through"] * 5


def _held(_: Tensor) -> str:
    return hold()


@row("idle workers poll")
def test_idle_workers_wake_for_heartbeats_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with InProcessCluster(2, heartbeat=60.0) as cluster:
        rpc.rpc_sync("worker1", max, (1, 2))
        cluster.clock.advance(60.0)
        woken: list[float] = []
        doze = _time.doze

        def counted(lock: threading.Lock, until: float, idle: bool = False) -> bool:
            woken.append(until)
            return doze(lock, until, idle)

        monkeypatch.setattr(_time, "doze", counted)
        cluster.clock.advance(3600.0)
        monkeypatch.undo()
    assert 10 < len(woken) < 1000  # 60 heartbeats of each worker; polling once a second would be 7200


@row("rpc_timeout=0, as in the tutorials")
def test_an_rpc_timeout_of_0_means_no_time_out() -> None:
    with InProcessCluster(2, rpc_timeout=0, heartbeat=60.0) as cluster:
        held = rpc.rpc_async("worker1", hold)
        cluster.clock.advance(3600.0)
        assert not held.done()
        _gate.set()
        assert held.wait() == "through"


@row("a second group in one process")
def test_a_process_can_join_two_groups_one_after_the_other(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        with alone(tmp_path / str(number)):
            rref = rpc.remote("w0", torch.ones, args=(2,))
            assert rref.to_here().sum() == 2
            del rref


@pytest.mark.usefixtures("near")
@pytest.mark.prints(PROFILER)
@row("profiles: calls show in")
@pytest.mark.parametrize(
    "profile", [torch.profiler.profile, torch.autograd.profiler.profile, profiler_legacy.profile]
)
def test_calls_show_in_every_profiler(profile: Any) -> None:
    with profile() as found:
        rpc.rpc_sync("worker1", max, (1, 2))
    listed = found.events() if hasattr(found, "events") else found.function_events
    assert "rpc_sync#max(worker0 -> worker1)" in {event.name for event in listed}


@row("every process that reaches the port may connect")
@pytest.mark.prints("these bytes are not an actorrpc handshake")
def test_bytes_of_an_unauthenticated_connection_are_not_unpickled() -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return note, ("opened",)

    with tcp_agents(1, tls=False) as [agent]:
        stranger = knock(agent)
        stranger.sendall(pickle.dumps(Payload()) * 100)
        until_closed(stranger)
        stranger.close()
    assert not _called


# -- improved gradients -------------------------------------------------------------------------------------


@row("a worker dies in a pass")
def test_the_death_of_a_worker_fails_the_pass_and_changes_no_gradients(action: type[Faulty]) -> None:
    with InProcessCluster(3, autojump=True) as cluster:
        layer = rpc.remote("worker2", Layer)
        x = torch.ones(3, requires_grad=True)
        with dist_autograd.context() as context:
            loss = layer.rpc_sync().forward(rpc.rpc_sync("worker1", faulty, (x,))).sum()
            action.action = lambda: (cluster.kill("worker1"), hold())
            with pytest.raises(actorrpc.PeerDiedError, match="worker1"):
                dist_autograd.backward(context, [loss])
            assert dist_autograd.get_gradients(context) == {}
            assert layer.rpc_sync().forward(torch.ones(3)).sum() == 3
            _gate.set()
        del layer


@pytest.mark.usefixtures("near")
@row("a worker dies in a pass")
@row("an error in a node or a hook elsewhere")
def test_an_error_in_a_pass_keeps_its_type_and_the_pass_can_be_repeated(action: type[Faulty]) -> None:
    x = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("worker1", faulty, (x,)).sum()
        action.action = fail
        with pytest.raises(Wrong) as caught:
            dist_autograd.backward(context, [loss], retain_graph=True)
        error: Any = caught.value
        assert isinstance(error, actorrpc.RemoteError)
        assert error.worker == "worker1"
        assert "raise Wrong" in error.traceback
        assert dist_autograd.get_gradients(context) == {}
        action.action = None
        dist_autograd.backward(context, [loss])
        assert torch.equal(dist_autograd.get_gradients(context)[x], torch.full((3,), 2.0))


@row("backward has no time-out")
def test_backward_accepts_a_time_out(action: type[Faulty]) -> None:
    x = torch.ones(3, requires_grad=True)
    with InProcessCluster(2, autojump=True), dist_autograd.context() as context:
        loss = rpc.rpc_sync("worker1", faulty, (x,)).sum()
        action.action = hold
        with pytest.raises(TimeoutError):
            dist_autograd.backward(context, [loss], timeout=5.0)
        assert dist_autograd.get_gradients(context) == {}
        _gate.set()


@row("backward has no time-out")
def test_ctrl_c_interrupts_a_pass(action: type[Faulty]) -> None:
    x = torch.ones(3, requires_grad=True)
    with InProcessCluster(2, clock="real"), dist_autograd.context() as context:
        loss = rpc.rpc_sync("worker1", faulty, (x,)).sum()
        action.action = _interrupt_and_hold
        with pytest.raises(KeyboardInterrupt):
            dist_autograd.backward(context, [loss])
        assert dist_autograd.get_gradients(context) == {}
        _gate.set()


def _hooked(x: Tensor, weight: Any) -> Tensor:
    return x * weight.local_value()


@pytest.mark.usefixtures("near")
@row("hooks of leaves")
def test_hooks_of_leaves_run_once_on_the_whole_gradient() -> None:
    weight = rpc.remote("worker1", _with_hooks)
    y = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context:
        for _ in range(3):  # the pass visits worker1 three times, so the gradient is 1 + 1 + 1
            y = rpc.rpc_sync("worker1", _hooked, (y, weight))
        dist_autograd.backward(context, [y.sum()])
    assert _called == [("tensor", 3.0), ("accumulated", 3.0)]


def _with_hooks() -> Tensor:
    weight = nn.Parameter(torch.ones(3))
    weight.register_hook(lambda gradient: note(("tensor", float(gradient[0]))))
    weight.register_post_accumulate_grad_hook(lambda each: note(("accumulated", float(each.grad[0]))))
    return weight


@pytest.mark.usefixtures("near")
@row("roots are scalars")
def test_backward_accepts_gradient_accumulate_and_create_graph() -> None:
    layer = rpc.remote("worker1", Layer)
    x = torch.linspace(0.1, 0.7, 3, requires_grad=True)
    found = []
    for _ in range(3):
        with dist_autograd.context() as context:
            y = sum(layer.rpc_sync().forward(x * (n + 0.1)) ** 2 for n in range(5))
            dist_autograd.backward(context, [y], gradient=torch.tensor([1.0, 2.0, 3.0]))
            found.append(dist_autograd.get_gradients(context)[x])
    assert all(torch.equal(each, found[0]) for each in found)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [layer.rpc_sync().forward(x).sum()], accumulate="grad")
        assert x not in dist_autograd.get_gradients(context)
    assert torch.equal(x.grad, torch.ones(3))
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [(layer.rpc_sync().forward(x) ** 3).sum()], create_graph=True)
        first = dist_autograd.get_gradients(context)[x]
        dist_autograd.backward(context, [first.sum()])
        second = dist_autograd.get_gradients(context)[x] - first
    torch.testing.assert_close(second.detach(), 6 * x.detach())


@row("a context whose origin has died")
def test_a_context_is_released_when_its_origin_dies() -> None:
    with InProcessCluster(3, autojump=True) as cluster:
        counted = cluster["worker1"].run(contexts).live
        maker = threading.Thread(target=cluster["worker2"].run, args=(_makes_a_context, "worker1"))
        maker.start()
        maker.join()
        assert len(counted) == 1
        cluster.kill("worker2")
        until(lambda: len(counted) == 0)


def _makes_a_context(to: str) -> None:
    dist_autograd.context().__enter__()
    rpc.rpc_sync(to, torch.add, (torch.ones(3, requires_grad=True), 1))


@pytest.mark.usefixtures("near")
@row("DistributedOptimizer.step")
def test_the_optimizer_supports_schedulers_scaling_clipping_and_state_dicts() -> None:
    remote = RemoteModule("worker1/cpu", nn.Linear, (2, 1))
    optimizer = DistributedOptimizer(torch.optim.SGD, [remote, nn.Linear(1, 1)], lr=0.1)
    optimizer.add_param_group({"params": [rpc.remote("worker1", Layer)]})
    scheduler = optimizer.lr_scheduler(torch.optim.lr_scheduler.StepLR, step_size=1)
    scaler = DistributedGradScaler(init_scale=2.0)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [scaler.scale(remote(torch.ones(1, 2)).sum())])
        scaler.unscale_(optimizer, context)
        norm = optimizer.clip_grad_norm_(context, 0.5)
        assert norm.item() == pytest.approx(3**0.5)
        optimizer.clip_grad_value_(context, 0.1)
        assert scaler.step(optimizer, context)
        optimizer.zero_grad(context)
    scaler.update()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.01)] * 2
    optimizer.load_state_dict(optimizer.state_dict())
