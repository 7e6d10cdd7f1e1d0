"""DistributedOptimizer: one optimizer for parameters on several workers.

Each worker with parameters has a local optimizer (``local_optimizer.py``); this module runs in the training process. An operation
calls all workers at the same time, once, or twice if the second calls need all answers of the first. Calls that use the gradients
of a context are recorded in the context, so every called worker has this context; no tensor in these calls requires grad.

A learning rate scheduler runs in the training process too, on a stand-in that has the hyper-parameters. Therefore this process
calls the user's functions and has the scheduler's state, and new values are sent in one call to each worker.

``_lock`` guards the table of workers and the :class:`~actorrpc.optim.parameters.StandIn`, which has the hyper-parameters. It is
held while schedulers compute hyper-parameters, and while changes are sent, so that all workers get the changes in one order. It
is re-entrant, because functions given to a scheduler may read the optimizer. A step takes the lock only to send changes that
some workers have not received.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from actorrpc import _time
from actorrpc._exceptions import is_of_handler, undo_on_error
from actorrpc._python import signature_of
from actorrpc.autograd import recorder
from actorrpc.errors import RpcError
from actorrpc.futures import Future
from actorrpc.optim.local_optimizer import Account, LocalOptimizer, check_context, create, within
from actorrpc.optim.parameters import Given, ParamGroup, StandIn, parse
from actorrpc.rpc import api
from actorrpc.rpc.options import UNSET_RPC_TIMEOUT, check_timeout
from actorrpc.rpc.rref import RRef, call_method, run_here, value_here
from actorrpc.wire.identity import WorkerInfo

__all__ = ["DistributedLRScheduler", "DistributedOptimizer", "OptimizerError", "gather"]


class OptimizerError(ExceptionGroup[Exception], RpcError):
    """Several workers failed in the same operation of a DistributedOptimizer. Catch this error, or its members by ``except*``.

    If only one worker fails, its error is raised without a group. An exception that an optimizer's code raised is an instance of
    its original class and of RemoteError.

    Attributes:
        workers: the names of the workers that failed, in the order of ``exceptions``; empty in groups that ``split`` returned.
    """

    maybe_executed = True
    workers: tuple[str, ...] = ()

    def derive(self, excs: Sequence[Exception], /) -> OptimizerError:  # type: ignore[override]
        """Return an OptimizerError with other members. Python calls this method in ``split`` and ``subgroup``."""
        return OptimizerError(self.message, excs)


def gather(what: str, calls: Mapping[str, Future[Any] | Exception | None]) -> dict[str, Any]:
    """Wait for all calls; return their results by the names of the workers.

    Args:
        what: the beginning of the message of an error.
        calls: worker -> the future of a call, or the error of an attempt to call; None if no call was made.

    Raises:
        Exception: the error of the only worker that failed, with a note that names the worker.
        OptimizerError: the errors of all workers that failed, if there are several.
    """
    results: dict[str, Any] = {}
    failures: dict[str, Exception] = {}
    for name, call in calls.items():
        if not isinstance(call, Future):
            if call is not None:
                failures[name] = call
            continue
        try:
            results[name] = call.wait()
        except BaseException as error:
            if isinstance(error, Exception) and not is_of_handler(error):
                failures[name] = error
                continue
            _cover(calls)
            raise
    if not failures:
        return results
    try:
        if len(failures) == 1:
            [(name, only)] = failures.items()
            only.add_note(f"{what} on worker {name!r}.")
            raise only
        texts = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in failures.items())
        group = OptimizerError(
            f"{what} on {len(failures)} of {len(calls)} workers: {texts}", list(failures.values())
        )
        group.workers = tuple(failures)
        raise group
    finally:
        # The traceback of the error refers to this frame; the frame must not refer to the error.
        failures.clear()


def _cover(calls: Mapping[str, Future[Any] | Exception | None]) -> None:
    """Mark the errors of these calls as seen, so that the errors are not logged, because no thread waits for the calls."""
    for each in calls.values():
        if isinstance(each, Future):
            each.cover()


class _Time:
    """The time-out of an operation that makes several calls."""

    def __init__(self, timeout: float) -> None:
        self._seconds = api.get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else check_timeout(timeout)
        self._until = _time.now() + self._seconds

    def remaining(self) -> float:
        """Return the time-out in seconds for a call that is made now; 0 means no time-out."""
        return max(0.001, self._until - _time.now()) if self._seconds else 0.0


class DistributedOptimizer:
    """Optimizes parameters that live on several workers, with a local optimizer on each of them.

    Has the methods of ``torch.distributed.optim.DistributedOptimizer``. In addition, its state can be saved and loaded, its
    hyper-parameters can be read and set, it has learning rate schedulers and gradient clipping, and it accepts whole modules::

        with dist_autograd.context() as context_id:
            loss = ...
            dist_autograd.backward(context_id, [loss])
            optimizer.clip_grad_norm_(context_id, 1.0)
            optimizer.step(context_id)

    Parameters in several dicts make parameter groups, as with torch; all workers then have all groups. The local
    optimizers live as long as this object.

    Thread-safe. Operations of any number of optimizers on the same parameters run one after the other on each worker,
    in no particular order; operations on different parameters run at the same time. All methods raise RpcTimeoutError if
    they take longer than ``timeout`` seconds (default: the group's time-out; 0: no bound), PeerDiedError if a worker
    dies, and exceptions of the optimizer's code. If several workers fail, their errors are raised in one OptimizerError.
    The other workers have finished the operation, unless a method says otherwise.

    Args:
        optimizer_class: a class of ``torch.optim``, or any other subclass of ``torch.optim.Optimizer`` whose ``step``
            needs no closure.
        params: RRefs to tensors or whole modules, handles of actors that are modules, RemoteModules, local modules, or
            local tensors that require grad. Give such an object, an iterable of such objects, or one or several dicts, each with
            such objects under ``"params"``, and with hyper-parameters for these objects.
        args, kwargs: for the class, besides the parameters.

    Raises:
        TypeError: ``optimizer_class`` is not a class of optimizers or needs closures; an item of ``params`` is not a
            parameter.
        ValueError: there are no parameters, a parameter is given twice or cannot have gradients, or no parameter requires
            grad.
        OptimizerError: several workers could not create their optimizers. The optimizers of other workers are deleted.
        Exception: ``optimizer_class``, or the creation of an RRef's value, raised it on a worker.
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], params: Any, *args: Any, **kwargs: Any
    ) -> None:
        _check_class(optimizer_class)
        self._class = optimizer_class
        self._arguments = (args, kwargs)
        self._lock = threading.RLock()
        # Whether hyper-parameters were changed, perhaps by a scheduler, which may check whether steps were made.
        self._scheduled = False
        self._behind = False  # whether some workers have not received all changes of hyper-parameters
        self._optimizers: dict[str, RRef[LocalOptimizer]] = {}
        # Worker -> the positions of its parameters in the order of all parameters.
        self._positions: dict[str, list[int]] = {}
        self._count = 0
        groups = parse(params)
        made = self._created(groups, _Time(UNSET_RPC_TIMEOUT))
        accounts = {name: account for name, (_, account) in made.items()}
        count = sum(sum(counts) for account in accounts.values() for counts in account.counts)
        if not any(account.trainable for account in accounts.values()):
            raise ValueError(
                f"none of the {count} parameters requires grad: there is nothing to optimize. Call requires_grad_() on the "
                f"parameters to train"
            )
        self._optimizers = {name: rref for name, (rref, _) in made.items()}
        self._note(groups, {name: account.counts for name, account in accounts.items()})
        account = next(iter(accounts.values()))
        self._stand_in = StandIn(account.groups, account.defaults)

    # -- the workers ---------------------------------------------------------------------------------

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers that have parameters of this optimizer, in the order of ``params``."""
        return tuple(self._optimizers)

    def _created(
        self, groups: Sequence[Given], limit: _Time
    ) -> dict[str, tuple[RRef[LocalOptimizer], Account]]:
        calls: dict[str, Future[Any] | Exception | None] = {}
        args, kwargs = self._arguments
        for name, (info, shares) in _by_worker(groups).items():
            share = [(group.options, rrefs) for group, rrefs in zip(groups, shares, strict=True)]
            try:
                calls[name] = api.rpc_async(
                    info, create, (self._class, share, args, kwargs), timeout=limit.remaining()
                )
            except Exception as error:
                if is_of_handler(error):
                    raise
                calls[name] = error
        return gather("Error creating optimizer", calls)

    def _note(self, groups: Sequence[Given], counts: Mapping[str, list[list[int]]]) -> None:
        """Number the parameters of new groups in the order of the RRefs; record the numbers in ``_positions``.

        Args:
            counts: for each worker and group, how many parameters each RRef stands for.
        """
        for number, group in enumerate(groups):
            inside = {name: iter(each[number]) for name, each in counts.items()}
            for rref in group.rrefs:
                name = rref.owner_name()
                more = range(self._count, self._count + next(inside[name]))
                self._positions.setdefault(name, []).extend(more)
                self._count = more.stop

    def _all(
        self,
        what: str,
        method: str,
        *args: Any,
        seconds: float,
        context: int | None = None,
        each: Callable[[str], tuple[Any, ...]] | None = None,
        here: bool = False,
    ) -> dict[str, Any]:
        """Call a method of the local optimizers on all workers; return the results by the names of the workers.

        Args:
            what: the beginning of the message of an error.
            context: the context whose gradients the method uses.
            each: a function that returns the arguments for a worker, in place of ``args``.
            here: if this worker's optimizer ``is_plain()``, run its method on this thread while the other workers run theirs.
                The method gets the deadline as a further argument, because there is no call with a time-out.
        """
        calls: dict[str, Future[Any] | Exception | None] = {}
        own: list[tuple[str, RRef[LocalOptimizer], LocalOptimizer]] = []
        token = None if context is None else recorder.enter(context)
        try:
            for name, rref in self._optimizers.items():
                local = value_here(rref) if here else None
                if local is not None and local.is_plain():
                    calls[name] = None
                    own.append((name, rref, local))
                    continue
                try:
                    calls[name] = call_method(rref, method, args if each is None else each(name), seconds)
                except Exception as error:
                    if is_of_handler(error):
                        raise
                    calls[name] = error
        finally:
            if token is not None:
                recorder.restore(token)
        with undo_on_error(partial(_cover, calls)):
            for name, rref, local in own:
                deadline = within(_time.now() + seconds if seconds else None)
                calls[name] = run_here(rref, getattr(local, method), (*args, deadline))
        return gather(what, calls)

    def _on_gradients(
        self, doing: str, method: str, context_id: int | None, *args: Any, limit: _Time
    ) -> dict[str, Any]:
        """Call a method that uses the gradients of a context, or of ``.grad``, on all workers."""
        check_context(context_id)
        what = f"Error {doing} gradients"
        return self._all(what, method, context_id, *args, seconds=limit.remaining(), context=context_id)

    # -- steps and gradients ----------------------------------------------------------------------------

    def step(
        self, context_id: int | None, closure: None = None, *, timeout: float = UNSET_RPC_TIMEOUT
    ) -> None:
        """Make a step on all workers, with the gradients of the parameters in a context.

        Parameters without a gradient are left out, as torch leaves out parameters whose ``.grad`` is None. No other parameters
        are changed, and the ``.grad`` of all parameters is unchanged. If the optimizer is one of torch's own classes and has no
        hooks of the user, the step of this worker's own parameters runs on the calling thread.

        Args:
            context_id: the id from ``with context() as context_id``; None for the gradients in ``.grad``, where backward
                passes with ``accumulate="grad"`` store them.
            closure: must be None.

        Raises:
            TypeError: ``context_id`` is neither an int nor None, or a closure was given.
            RuntimeError: there is no such context.
            OptimizerError: several workers failed; the other workers have made their step.
        """
        if closure is not None:
            raise TypeError(
                "DistributedOptimizer.step() takes no closure: compute the loss, and call backward(context_id, [loss]), "
                "before it"
            )
        check_context(context_id)
        limit = _Time(timeout)
        if self._behind:
            with self._changing(limit.remaining()):
                pass
        self._all(
            "Error running optimizer",
            "step",
            context_id,
            seconds=limit.remaining(),
            context=context_id,
            here=True,
        )
        if self._scheduled:
            self._stand_in.step()

    def zero_grad(
        self,
        context_id: int | None = None,
        set_to_none: bool = True,
        *,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> None:
        """Remove the gradients of this optimizer's parameters from a context, or from ``.grad``.

        Each context begins without gradients. Call this between several backward passes in one context, and for passes
        with ``accumulate="grad"``.

        Args:
            context_id: the context; None for ``.grad``.
            set_to_none: if false, fill the gradients with zeros instead.

        Raises:
            TypeError, RuntimeError: as in :meth:`step`.
        """
        self._on_gradients("clearing", "clear", context_id, bool(set_to_none), limit=_Time(timeout))

    def clip_grad_norm_(
        self,
        context_id: int | None,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> torch.Tensor:
        """Scale the gradients on all workers so that the norm of all gradients, taken as one vector, is at most ``max_norm``.

        The gradients are changed in place, in the context, so a later ``step`` uses the scaled gradients. Sparse gradients are
        included. The result equals the result of ``torch.nn.utils.clip_grad_norm_`` for the same gradients on one worker.

        Args:
            context_id: the context; None for the gradients in ``.grad``.
            max_norm: the largest permitted norm.
            norm_type: the p of the p-norm; ``inf`` for the largest element.
            error_if_nonfinite: raise an error if the norm is infinite or NaN, before a gradient is changed.

        Returns:
            The norm before clipping, a tensor without dimensions. 0 if there are no gradients.

        Raises:
            TypeError: as in :meth:`step`.
            RuntimeError: there is no such context, or the norm is not finite and ``error_if_nonfinite`` is true.
        """
        norm_type, max_norm = float(norm_type), float(max_norm)
        limit = _Time(timeout)
        answers = self._on_gradients("clipping", "norms", context_id, norm_type, limit=limit)
        # Pairs of position and norm. They are sorted, so that the sum equals the sum on one worker to the last bit.
        found: list[tuple[int, torch.Tensor]] = []
        for name, (positions, norms) in answers.items():
            if norms is not None:
                found += zip((self._positions[name][each] for each in positions), norms, strict=True)
        if not found:
            return torch.tensor(0.0)
        found.sort(key=lambda pair: pair[0])
        device = found[0][1].device
        total: torch.Tensor = torch.linalg.vector_norm(
            torch.stack([norm.to(device) for _, norm in found]), norm_type
        )
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"The total norm of order {norm_type} for the gradients is non-finite ({total.item()}), so they cannot be "
                f"clipped. Give error_if_nonfinite=False to scale them by this norm nevertheless"
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if factor.item() != 1.0:
            self._on_gradients("clipping", "scale", context_id, factor, limit=limit)
        return total

    def clip_grad_value_(
        self, context_id: int | None, clip_value: float, *, timeout: float = UNSET_RPC_TIMEOUT
    ) -> None:
        """Clamp each element of the gradients between ``-clip_value`` and ``clip_value``, in place, on all workers.

        Args:
            context_id: the context; None for the gradients in ``.grad``.

        Raises:
            TypeError, RuntimeError: as in :meth:`step`.
        """
        self._on_gradients("clipping", "clip_values", context_id, float(clip_value), limit=_Time(timeout))

    def _unscale(self, context_id: int | None, inverse: torch.Tensor, timeout: float) -> bool:
        """Multiply all gradients by ``inverse``; return whether a gradient had an infinity or a NaN. Called by the scaler."""
        found = self._on_gradients("unscaling", "unscale", context_id, inverse, limit=_Time(timeout))
        return any(found.values())

    # -- hyper-parameters -----------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The hyper-parameters of each group. ``for group in optimizer.param_groups: group["lr"] = 0.1`` sets a value on all
        workers: an assignment that changes a value makes one call to each worker. Reading a value makes no call."""
        with self._lock:
            count = len(self._stand_in.param_groups)
        return [ParamGroup(index, self._read_group, self._write_group) for index in range(count)]

    def _read_group(self, index: int) -> dict[str, Any]:
        with self._lock:
            return self._stand_in.groups()[index]

    def _write_group(self, index: int, values: dict[str, Any]) -> None:
        with self._changing(UNSET_RPC_TIMEOUT) as stand_in:
            stand_in.param_groups[index].update(values)

    @contextmanager
    def _changing(self, timeout: float) -> Iterator[StandIn]:
        """Change hyper-parameters in the block; the changes are sent to all workers at its end."""
        limit = _Time(timeout)
        with self._lock:
            self._scheduled = True
            yield self._stand_in
            changes = self._stand_in.changes()
            if changes is not None:
                self._behind = True
                self._all(
                    "Error setting hyper-parameters",
                    "set_hyperparameters",
                    changes,
                    seconds=limit.remaining(),
                )
                self._stand_in.sent(changes)
            self._behind = False

    def add_param_group(self, param_group: Mapping[str, Any], *, timeout: float = UNSET_RPC_TIMEOUT) -> None:
        """Add a group of parameters, which may be on workers that have no parameters of this optimizer yet.

        Args:
            param_group: parameters under ``"params"``, as in the constructor, and hyper-parameters of the group.

        Raises:
            TypeError, ValueError: as in the constructor; also for parameters that the optimizer has already.
            OptimizerError: several workers refused the group. No worker has added the group.
        """
        if not isinstance(param_group, Mapping):
            raise TypeError(f"a parameter group is a dict with 'params', not a {type(param_group).__name__}")
        limit = _Time(timeout)
        [group] = parse(dict(param_group))
        with self._lock:
            shares = _by_worker([group])
            # Parameters on a new worker: its optimizer gets all groups, the former groups without parameters.
            strangers = [rref for rref in group.rrefs if rref.owner_name() not in self._optimizers]
            before = [Given(options, []) for options in self._stand_in.groups()]
            made = self._created([*before, Given(group.options, strangers)], limit) if strangers else {}
            accounts: dict[str, Account] = self._all(
                what := "Error adding a parameter group",
                "stage_group",
                seconds=limit.remaining(),
                each=lambda name: (group.options, shares[name][1][0] if name in shares else []),
            )
            counts = {name: account.counts for name, account in accounts.items()}
            # Record the positions before a worker has the group, because another thread that clips gradients needs them.
            self._note([group], counts | {name: account.counts[-1:] for name, (_, account) in made.items()})
            self._all(what, "commit_group", seconds=limit.remaining())
            # Make a new table, because another thread may iterate over the old table.
            self._optimizers = self._optimizers | {name: rref for name, (rref, _) in made.items()}
            self._stand_in.add(next(iter(accounts.values())).groups[-1])

    # -- state ------------------------------------------------------------------------------------------------

    def state_dict(self, *, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
        """Return a copy of the state of the optimizers of all workers, for ``torch.save``.

        ``{"optimizer": name of the class, "workers": {name of the worker: state}}``; each state is torch's, with the shapes
        of the parameters added. Each worker copies its state between two of its steps. If all states have to be of the same
        step, do not make a step meanwhile.
        """
        states = self._all("Error reading the optimizer's state", "state", seconds=_Time(timeout).remaining())
        return {"optimizer": self._class.__qualname__, "workers": states}

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        workers: Mapping[str, str] | None = None,
        *,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> None:
        """Load a state from :meth:`state_dict`. All workers check their parts first; if a worker refuses its part, none loads it.

        Args:
            state_dict: the state; its contents are copied.
            workers: name of a worker in the state -> name of the worker that now has its parameters. In a new process with
                the same parameters in the same order: ``dict(zip(state["workers"], optimizer.workers))``.

        Raises:
            ValueError: the state is of another class of optimizer, or for other workers, groups or parameters. The message
                says what differs; no worker was changed.
            OptimizerError: several workers refused their part. No worker was changed.
        """
        limit = _Time(timeout)
        states = self._states_in(state_dict, workers or {})
        what = "Error loading the optimizer's state"
        with self._lock:
            self._all(what, "stage_state", seconds=limit.remaining(), each=lambda name: (states[name],))
            accounts: dict[str, Account] = self._all(what, "commit_state", seconds=limit.remaining())
            self._stand_in.replace(next(iter(accounts.values())).groups)

    def _states_in(self, state_dict: Mapping[str, Any], workers: Mapping[str, str]) -> dict[str, Any]:
        """Check a state and return its parts: present name of a worker -> state of the worker."""
        if not isinstance(state_dict, Mapping) or not {"optimizer", "workers"} <= set(state_dict):
            raise ValueError(
                "this is no state of a DistributedOptimizer, which has 'optimizer' and 'workers'"
                + (": it has " + ", ".join(map(repr, state_dict)) if isinstance(state_dict, Mapping) else "")
            )
        if state_dict["optimizer"] != self._class.__qualname__:
            raise ValueError(
                f"the state is of a {state_dict['optimizer']}, this optimizer is a {self._class.__qualname__}"
            )
        unknown = sorted(set(workers) - set(state_dict["workers"]))
        if unknown:
            raise ValueError(f"the state has no worker of these names, which workers= gives: {unknown}")
        states = {workers.get(name, name): state for name, state in state_dict["workers"].items()}
        here = set(self._optimizers)
        if set(states) != here or len(states) != len(state_dict["workers"]):
            raise ValueError(
                f"the state is for the workers {sorted(states)}, the parameters of this optimizer are on {sorted(here)}: "
                f"workers= says which is which, as {{'name in the state': 'name now'}}"
            )
        for name, state in states.items():
            if not isinstance(state, Mapping) or not {"state", "param_groups", "shapes"} <= set(state):
                raise ValueError(f"the state of worker {name!r} lacks 'state', 'param_groups' or 'shapes'")
        return states

    # -- schedulers -------------------------------------------------------------------------------------------

    def lr_scheduler(
        self, scheduler_class: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> DistributedLRScheduler:
        """Return a learning rate scheduler: ``optimizer.lr_scheduler(StepLR, step_size=30)``.

        All classes of ``torch.optim.lr_scheduler`` can be used. A scheduler of schedulers gets schedulers that this method has
        returned (as below); or ``scheduler_class`` is a function that makes all schedulers for the stand-in that it gets::

            warm = optimizer.lr_scheduler(LinearLR, total_iters=5)
            rest = optimizer.lr_scheduler(CosineAnnealingLR, T_max=95)
            scheduler = optimizer.lr_scheduler(SequentialLR, [warm, rest], milestones=[5])

        Takes the arguments of :class:`DistributedLRScheduler`, except for the optimizer, and raises the same errors.
        """
        return DistributedLRScheduler(self, scheduler_class, *args, **kwargs)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a DistributedOptimizer stays in its process: save its state_dict(), or make one in the other process"
        )

    def __repr__(self) -> str:
        return (
            f"DistributedOptimizer({self._class.__name__}, {self._count} parameters on {list(self.workers)})"
        )


def _by_worker(groups: Sequence[Given]) -> dict[str, tuple[WorkerInfo, list[list[RRef[Any]]]]]:
    """Return for each worker, by its name: its WorkerInfo, and the RRefs of each group whose values are on the worker."""
    found: dict[str, tuple[WorkerInfo, list[list[RRef[Any]]]]] = {}
    for number, group in enumerate(groups):
        for rref in group.rrefs:
            info = rref.owner()
            if info.name not in found:
                found[info.name] = (info, [[] for _ in groups])
            found[info.name][1][number].append(rref)
    return found


def _check_class(optimizer_class: Any) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(
            f"DistributedOptimizer needs a class of optimizers, such as torch.optim.SGD, not {optimizer_class!r}"
        )
    needed = [
        name
        for name, parameter in list(signature_of(optimizer_class.step).parameters.items())[1:]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise TypeError(
            f"{optimizer_class.__name__}.step() needs {', '.join(needed)}: optimizers that evaluate the loss themselves, by a "
            f"closure, cannot be distributed, as the loss is computed across workers. Use one whose step() needs nothing"
        )


class DistributedLRScheduler:
    """A learning rate scheduler of a DistributedOptimizer, whose method ``lr_scheduler()`` returns it.

    :meth:`step` is thread-safe: other changes of the optimizer's hyper-parameters wait until the step has ended.

    Args:
        optimizer: the optimizer whose learning rates the scheduler sets.
        scheduler_class: a class of ``torch.optim.lr_scheduler``, or any function that is called with an optimizer (a stand-in)
            and returns a scheduler of this optimizer.
        args, kwargs: for ``scheduler_class``, besides the optimizer. A DistributedLRScheduler is replaced by its ``scheduler``.

    Raises:
        TypeError: ``scheduler_class`` cannot be called, or did not return a scheduler.
        ValueError: a scheduler in the arguments belongs to another optimizer.
        Exception: ``scheduler_class`` raised it, or the first values could not be sent.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        scheduler_class: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not callable(scheduler_class):
            raise TypeError(
                f"lr_scheduler() takes a class of torch.optim.lr_scheduler, not {scheduler_class!r}"
            )
        self._optimizer = optimizer
        arguments = [self._inner(each) for each in args]
        keywords = {key: self._inner(each) for key, each in kwargs.items()}
        with optimizer._changing(UNSET_RPC_TIMEOUT) as stand_in:
            if _takes_optimizer_first(scheduler_class):
                made = scheduler_class(stand_in, *arguments, **keywords)
            else:
                made = scheduler_class(*arguments, optimizer=stand_in, **keywords)
        if not (callable(getattr(made, "step", None)) and callable(getattr(made, "state_dict", None))):
            raise TypeError(
                f"{scheduler_class!r} returned {made!r}, which is no scheduler: it lacks step() or state_dict()"
            )
        self._scheduler: Any = made

    def _inner(self, value: Any) -> Any:
        """Replace each DistributedLRScheduler in an argument by torch's scheduler."""
        if isinstance(value, DistributedLRScheduler):
            if value._optimizer is not self._optimizer:
                raise ValueError("the scheduler in the arguments belongs to another optimizer")
            return value._scheduler
        if type(value) in (list, tuple):
            return type(value)(self._inner(each) for each in value)
        return value

    @property
    def scheduler(self) -> Any:
        """torch's own scheduler, for reading. Do not call its ``step()``, which would send no values to the workers."""
        return self._scheduler

    def step(self, *args: Any, timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any) -> None:
        """Set the learning rates of the next step or epoch, on all workers. Call it after the optimizer's ``step()``.

        Args:
            args, kwargs: for the scheduler's own ``step``: the metric, for ReduceLROnPlateau.
            timeout: seconds; 0 means no time-out. By default, the time-out of the RPC group.

        Raises:
            PeerDiedError, RpcTimeoutError, OptimizerError: some workers did not get the values. The scheduler has made its
                step; the values are sent again before the optimizer's next step, or with the next change.
        """
        with self._optimizer._changing(timeout):
            self._scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates that the scheduler has set last, in the order of the parameter groups."""
        return list(self._scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of torch's scheduler, which leaves out functions."""
        state: dict[str, Any] = copy.deepcopy(self._scheduler.state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from :meth:`state_dict`. The optimizer's learning rates are in the optimizer's state."""
        self._scheduler.load_state_dict(copy.deepcopy(state_dict))

    def __repr__(self) -> str:
        return f"DistributedLRScheduler({type(self._scheduler).__name__}, lr={self.get_last_lr()})"


def _takes_optimizer_first(scheduler_class: Callable[..., Any]) -> bool:
    """Return whether the optimizer is the first argument, as in all of torch's classes except ChainedScheduler."""
    try:
        names = list(signature_of(scheduler_class).parameters)
    except (TypeError, ValueError):
        return True
    return "optimizer" not in names or names[0] == "optimizer"
