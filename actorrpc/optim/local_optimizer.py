"""The local optimizer of one DistributedOptimizer, on a worker that has parameters.

The DistributedOptimizer has an RRef to the LocalOptimizer, and calls its methods by RPC, on threads of the pool. The step of
torch's own optimizers runs on the calling thread if the caller is on this worker. Methods that use gradients, set
hyper-parameters, or copy or load the state have exclusive use of the parameters meanwhile. Exceptions of the user's code are
raised at the caller.

Gradients are lent (:func:`lent`) from an autograd context, or from ``.grad``. While gradients are lent, only the borrower uses
the ``.grad`` of the parameters, so optimizers wait for each other if they have common parameters. A wait ends at the deadline of
the call that this code runs in; no lock is held during the wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from actorrpc import _time
from actorrpc._torch import global_step_hooks, set_grad_enabled, step_hooks
from actorrpc.agent.calls import CURRENT
from actorrpc.autograd import graph
from actorrpc.autograd.api import contexts, participant
from actorrpc.optim.parameters import check_tensor
from actorrpc.rpc.rref import RRef

_NOTHING: Final = (None, None)

__all__ = ["Account", "LocalOptimizer", "check_context", "create", "lent", "within"]


def check_context(context_id: int | None) -> None:
    """Check that this worker knows a context. None, which stands for ``.grad``, is accepted.

    Raises:
        TypeError: ``context_id`` is neither an int nor None.
        RpcError: this worker does not know such a context.
    """
    if context_id is not None:
        participant().contexts.get(context_id)


def within(deadline: float | None = None) -> float | None:
    """Return the earlier of ``deadline`` and the deadline of the call that this code runs in; None for no bound."""
    execution = CURRENT.get()
    if execution is None or math.isinf(execution.deadline):
        return deadline
    return execution.deadline if deadline is None else min(deadline, execution.deadline)


@contextmanager
def lent(parameters: Sequence[torch.Tensor], context_id: int | None) -> Iterator[list[torch.Tensor | None]]:
    """A ``with`` block that borrows the gradients of parameters, in a list. In the block, ``.grad`` is None, and may be used.

    The list has the tensors themselves, so changes in place also change the gradients in the context (or in ``.grad``). If the
    block replaces an entry of the list, and ends without an error, the gradient in the context (or ``.grad``) is replaced.

    Args:
        parameters: leaves, each once.
        context_id: the context; None for the gradients in ``.grad``.

    Raises:
        RpcError: this worker does not know the context.
        RpcTimeoutError: other threads have used the gradients until the deadline of the call.
    """
    deadline = within()
    if context_id is None:
        with graph.Borrowed(parameters, deadline) as in_slots:
            gradients = list(in_slots)
            yield gradients
            in_slots[:] = gradients
        return
    found = _gradients(context_id, deadline)
    with graph.Borrowed(parameters, deadline):
        before = [found.get(id(parameter), _NOTHING)[1] for parameter in parameters]
        gradients = before.copy()
        yield gradients
        replaced = {
            id(parameter): (parameter, gradient)
            for parameter, gradient, old in zip(parameters, gradients, before, strict=True)
            if gradient is not None and gradient is not old
        }
    if replaced:
        context = contexts().get(context_id)
        with context.lock:
            context.gradients.update(replaced)


def _gradients(context_id: int, deadline: float | None) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return a context's table: ``id()`` of a leaf -> leaf and gradient. May wait for a backward pass, which may need ``.grad``:
    call this function before borrowing ``.grad``."""
    left = 0.0 if deadline is None else max(0.001, deadline - _time.now())
    return participant().gradients(context_id, left)


#: The part of a parameter group on one worker: the options of the group, and RRefs to its parameters on the worker.
_Group = tuple[dict[str, Any], Sequence[RRef[Any]]]


@dataclass(frozen=True, slots=True)
class Account:
    """A worker's description of its optimizer.

    Attributes:
        groups: the present hyper-parameters of each group.
        defaults: the optimizer's default hyper-parameters.
        counts: for each group that the call has made, how many parameters each RRef of the group stands for (a module: several).
        trainable: how many parameters require grad.
    """

    groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    counts: list[list[int]]
    trainable: int


def create(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[_Group],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[RRef[LocalOptimizer], Account]:
    """Make an optimizer of parameters of this worker; return an RRef to it and its description. Called by RPC.

    Raises:
        TypeError, ValueError: the value of an RRef is not a parameter, or a parameter is given twice.
        Exception: the optimizer's class, or the creation of an RRef's value, raised it.
    """
    found = [(options, *_parameters_of(rrefs)) for options, rrefs in groups]
    _refuse_duplicates([each for _, parameters, _ in found for each in parameters])
    params: list[Any]
    if len(found) == 1 and not found[0][0]:
        params = list(found[0][1])  # some optimizer classes accept a list of parameters, but no groups
    else:
        params = [{**options, "params": parameters} for options, parameters, _ in found]
    made = LocalOptimizer(optimizer_class(params, *args, **kwargs))
    return RRef(made), made.account([counts for _, _, counts in found])


def _parameters_of(rrefs: Sequence[RRef[Any]]) -> tuple[list[torch.Tensor], list[int]]:
    """Return the parameters to which RRefs of this worker refer, and how many each RRef stands for. Waits for the values."""
    parameters: list[torch.Tensor] = []
    counts: list[int] = []
    for rref in rrefs:
        value = rref.local_value()
        if isinstance(value, torch.nn.Module):
            inside: list[torch.Tensor] = list(value.parameters())
            if not inside:
                raise ValueError(f"a {type(value).__name__} was given as a parameter, but has no parameters")
        elif isinstance(value, torch.Tensor):
            inside = [value]
        else:
            raise TypeError(
                f"optimizers take RRefs to tensors and modules, but one of the RRefs is to a {type(value).__name__}"
            )
        for each in inside:
            check_tensor(each, f"a parameter of shape {tuple(each.shape)}")
        parameters += inside
        counts.append(len(inside))
    return parameters, counts


def _refuse_duplicates(parameters: Sequence[torch.Tensor], known: Sequence[torch.Tensor] = ()) -> None:
    seen = set(known)
    for each in parameters:
        if each in seen:
            raise ValueError(
                f"a parameter of shape {tuple(each.shape)} is given twice, by different RRefs or by modules that share it: "
                f"each parameter must be given once"
            )
        seen.add(each)


class LocalOptimizer:
    """The part of a DistributedOptimizer on one worker. Thread-safe.

    Args:
        optimizer: torch's optimizer, of parameters of this worker.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # The state and the group that all workers have to accept before commit_state() or commit_group() uses them.
        self._staged_state: dict[str, Any] | None = None
        self._staged_group: dict[str, Any] | None = None

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]

    def _borrowed(self) -> graph.Borrowed:
        """Return a ``with`` block that has exclusive use of the parameters: other optimizers and backward passes wait."""
        return graph.Borrowed(self._parameters, within())

    def account(self, counts: list[list[int]] | None = None) -> Account:
        """Return the description of this optimizer."""
        return Account(
            [
                {key: value for key, value in group.items() if key != "params"}
                for group in self._optimizer.param_groups
            ],
            dict(self._optimizer.defaults),
            counts or [],
            sum(each.requires_grad for each in self._parameters),
        )

    # -- gradients -------------------------------------------------------------------------------------

    def is_plain(self) -> bool:
        """Return whether a step runs only code of torch, which does not wait for other threads."""
        optimizer = self._optimizer
        return not (
            any(global_step_hooks)
            or any(step_hooks(optimizer))
            or "step" in optimizer.__dict__
            or not type(optimizer).__module__.startswith("torch.optim.")
        )

    def step(self, context_id: int | None, deadline: float | None = None) -> None:
        """Make a step with the gradients of a context, or of ``.grad`` if ``context_id`` is None; ``.grad`` is unchanged.

        Args:
            deadline: until when to wait for other users of the gradients; by default, the deadline of the call.
        """
        parameters, deadline = self._parameters, deadline or within()
        found = None if context_id is None else _gradients(context_id, deadline)
        graded = torch.is_grad_enabled()
        set_grad_enabled(False)  # cheaper than torch.no_grad(), which is written in Python
        try:
            with graph.Borrowed(parameters, deadline) as in_slots:
                for parameter, gradient in zip(parameters, in_slots, strict=True):
                    parameter.grad = gradient if found is None else found.get(id(parameter), _NOTHING)[1]
                self._optimizer.step()
        finally:
            set_grad_enabled(graded)

    @torch.no_grad()
    def clear(self, context_id: int | None, set_to_none: bool) -> None:
        """Remove the gradients from the context or ``.grad``; if ``set_to_none`` is false, fill them with zeros."""
        parameters = self._parameters
        with lent(parameters, context_id) as gradients:
            if not set_to_none:
                for gradient in gradients:
                    if gradient is not None:
                        gradient.detach_().zero_() if gradient.grad_fn is not None else gradient.zero_()
            elif context_id is None:
                gradients[:] = [None] * len(gradients)
            else:
                context = contexts().get(context_id)
                with context.lock:
                    for parameter in parameters:
                        context.gradients.pop(id(parameter), None)

    @torch.no_grad()
    def norms(self, context_id: int | None, norm_type: float) -> tuple[list[int], torch.Tensor | None]:
        """Return the positions of the parameters that have gradients, and the norms of these gradients, on the CPU."""
        with lent(self._parameters, context_id) as loans:
            positions = [position for position, each in enumerate(loans) if each is not None]
            # torch's foreach functions are not used: on a CPU they also work tensor by tensor, and they refuse sparse tensors.
            norms = [torch.linalg.vector_norm(_values(each), norm_type) for each in loans if each is not None]
        return positions, torch.stack([each.to(norms[0].device) for each in norms]).cpu() if norms else None

    @torch.no_grad()
    def scale(self, context_id: int | None, factor: torch.Tensor) -> None:
        """Multiply the gradients, in place."""
        with lent(self._parameters, context_id) as loans:
            for each in loans:
                if each is not None:
                    each.mul_(factor.to(each.device))

    @torch.no_grad()
    def clip_values(self, context_id: int | None, limit: float) -> None:
        """Clamp each element of the gradients between ``-limit`` and ``limit``, in place."""
        with lent(self._parameters, context_id) as loans:
            for position, each in enumerate(loans):
                if each is None:
                    continue
                if each.is_sparse:
                    loans[position] = each = each.coalesce()
                _values(each).clamp_(-limit, limit)

    @torch.no_grad()
    def unscale(self, context_id: int | None, inverse: torch.Tensor) -> bool:
        """Multiply the gradients by ``inverse``, in place; return whether they had an infinity or a NaN before.

        Raises:
            ValueError: a gradient is of float16, whose range is too small for unscaled gradients. No gradient was changed.
        """
        with lent(self._parameters, context_id) as loans:
            given = [each for each in loans if each is not None]
            if any(each.dtype == torch.float16 for each in given):
                raise ValueError("Attempting to unscale FP16 gradients: keep the parameters in float32.")
            values = [each._values() if each.is_sparse else each for each in given]
            finite = all(bool(torch.isfinite(each).all()) for each in values)
            for each in values:
                each.mul_(inverse.to(each.device))
        return not finite

    # -- hyper-parameters and state ---------------------------------------------------------------------

    def set_hyperparameters(self, changes: Sequence[dict[str, Any]]) -> None:
        """Set hyper-parameters. ``changes`` has one dict for each group."""
        with self._borrowed():
            for group, values in zip(self._optimizer.param_groups, changes, strict=True):
                group.update(values)

    def stage_group(self, options: dict[str, Any], rrefs: Sequence[RRef[Any]]) -> Account:
        """Check whether a group can be added, and keep it for :meth:`commit_group`. Return the description with the new group.

        Raises:
            TypeError, ValueError: the value of an RRef is not a parameter, or is a parameter of this optimizer already.
            Exception: the optimizer's class raised it.
        """
        parameters, counts = _parameters_of(rrefs)
        with self._borrowed():
            _refuse_duplicates(parameters, self._parameters)
            groups = self._optimizer.param_groups
            before = len(groups)
            try:
                self._optimizer.add_param_group({**options, "params": parameters})
                self._staged_group = groups[-1]
                account = self.account([counts])
            finally:
                del groups[before:]
        return account

    def commit_group(self) -> None:
        """Add the group that was staged."""
        with self._borrowed():
            if self._staged_group is not None:
                self._optimizer.param_groups.append(self._staged_group)
                self._staged_group = None

    @torch.no_grad()
    def state(self) -> dict[str, Any]:
        """Return a copy of the optimizer's state, with the shapes of its parameters."""
        with self._borrowed():
            state: dict[str, Any] = _copied(self._optimizer.state_dict())
            state["shapes"] = self._shapes()
        return state

    def _shapes(self) -> list[list[list[int]]]:
        return [[list(each.shape) for each in group["params"]] for group in self._optimizer.param_groups]

    @torch.no_grad()
    def stage_state(self, state: dict[str, Any]) -> None:
        """Check whether a state can be loaded, and keep it for :meth:`commit_state`, which loads it.

        Raises:
            ValueError: the state is for other groups or parameters; the message says how they differ.
            Exception: the optimizer's class raised it.
        """
        shapes = self._shapes()
        _compare(state["shapes"], shapes)
        optimizer = self._optimizer
        with self._borrowed():
            before = dict(optimizer.__dict__)
            try:
                optimizer.load_state_dict({key: value for key, value in state.items() if key != "shapes"})
                self._staged_state = dict(optimizer.__dict__)
            finally:
                # load_state_dict() only replaces attributes of the optimizer. Restoring the former attributes undoes it.
                optimizer.__dict__.clear()
                optimizer.__dict__.update(before)

    def commit_state(self) -> Account:
        """Load the state that was staged; return the description of the optimizer with this state."""
        with self._borrowed():
            if self._staged_state is not None:
                self._optimizer.__dict__.update(self._staged_state)
                self._staged_state = None
            return self.account()


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements of a gradient; of a sparse gradient, its coalesced values: a view, if the gradient is coalesced."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _copied(value: Any) -> Any:
    """Return a copy of containers and tensors, on the CPU. The next step may change the originals while the copy is sent."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    return value


def _compare(saved: list[list[list[int]]], present: list[list[list[int]]]) -> None:
    """Refuse a state that was saved for other parameters.

    Raises:
        ValueError: the groups or shapes differ; the message lists the differences.
    """
    if len(saved) != len(present):
        raise ValueError(f"the state has {len(saved)} parameter groups, the optimizer has {len(present)}")
    differences = []
    for number, (there, here) in enumerate(zip(saved, present, strict=True)):
        if len(there) != len(here):
            differences.append(f"group {number} has {len(there)} parameters in the state, {len(here)} here")
            continue
        for position, (one, other) in enumerate(zip(there, here, strict=True)):
            if list(one) != list(other):
                differences.append(
                    f"parameter {position} of group {number} has shape {tuple(one)} in the state, {tuple(other)} here"
                )
    if differences:
        raise ValueError("the state is for other parameters: " + "; ".join(differences))
