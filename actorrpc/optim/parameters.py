"""The parameters that users give to a DistributedOptimizer, in groups, and the hyper-parameters of the groups.

Every worker has the hyper-parameters of all groups, with the same values, even of groups of which it has no parameters. The
process of the DistributedOptimizer has a copy in a stand-in for torch's optimizer (:class:`StandIn`): learning rate schedulers
change the copy, and the changes are sent to all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from actorrpc._exceptions import is_of_handler
from actorrpc.rpc.rref import RRef

__all__ = ["Given", "ParamGroup", "StandIn", "check_tensor", "parse"]


class StandIn(torch.optim.Optimizer):
    """An optimizer without parameters that has the hyper-parameters of a DistributedOptimizer.

    All methods but ``step`` are called under the lock of its DistributedOptimizer.

    Args:
        groups: the hyper-parameters of each group.
        defaults: the optimizer's default hyper-parameters.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__([{**group, "params": []} for group in groups], defaults)
        self._sent = self.groups()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing. Schedulers check whether this method was called."""

    def groups(self) -> list[dict[str, Any]]:
        """Return a copy of the hyper-parameters of each group."""
        return [
            _copied({key: value for key, value in group.items() if key != "params"})
            for group in self.param_groups
        ]

    def add(self, group: dict[str, Any]) -> None:
        """Add a group that all workers have."""
        self.add_param_group({**group, "params": []})
        self._sent.append(_copied(group))

    def replace(self, groups: list[dict[str, Any]]) -> None:
        """Set the hyper-parameters to values that all workers have. The groups stay the same objects."""
        for mine, group in zip(self.param_groups, groups, strict=True):
            mine.clear()
            mine.update(_copied(group), params=[])
        self._sent = self.groups()

    def changes(self) -> list[dict[str, Any]] | None:
        """Return the values that some workers do not have yet, one dict for each group; None if all workers have all values."""
        found = [
            {key: value for key, value in group.items() if key not in sent or not _same(value, sent[key])}
            for group, sent in zip(self.groups(), self._sent, strict=True)
        ]
        return found if any(found) else None

    def sent(self, changes: list[dict[str, Any]]) -> None:
        """Record that all workers have these changes."""
        for group, values in zip(self._sent, changes, strict=True):
            group.update(values)


class ParamGroup(MutableMapping[str, Any]):
    """The hyper-parameters of one group: ``group["lr"] = 0.1`` sets the value on all workers before it returns.

    Reading makes no call: this process has a copy of the values, which assignments, schedulers and ``load_state_dict()`` change.
    If an optimizer changes its hyper-parameters itself on a worker, only ``state_dict()`` has the new values. Entries cannot be
    removed, and there is no entry ``"params"``, because the parameters are on the workers.
    """

    __slots__ = ("_index", "_read", "_write")

    def __init__(
        self,
        index: int,
        read: Callable[[int], dict[str, Any]],
        write: Callable[[int, dict[str, Any]], None],
    ) -> None:
        self._index = index
        self._read = read
        self._write = write

    def __getitem__(self, key: str) -> Any:
        if key == "params":
            raise KeyError("params: the parameters are on the workers, only hyper-parameters are here")
        return self._read(self._index)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str) or key == "params":
            raise TypeError(f"{key!r} is no hyper-parameter; add_param_group() adds parameters")
        self._write(self._index, {key: value})

    def __delitem__(self, key: str) -> None:
        raise TypeError("hyper-parameters can be set, but not removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._read(self._index))

    def __len__(self) -> int:
        return len(self._read(self._index))

    def __repr__(self) -> str:
        return f"ParamGroup({self._read(self._index)!r})"


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
    }


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    try:
        return bool(one == other)
    except Exception as error:  # raised by the user's __eq__: send the value
        if is_of_handler(error):
            raise
        return False


_EXPECTED = (
    "parameters are given as RRefs to tensors or modules, handles of actors that are modules, RemoteModules, local modules, "
    "or local tensors that require grad"
)


@dataclass(frozen=True, slots=True)
class Given:
    """One parameter group of the user: its hyper-parameters, and RRefs to its parameters, in order."""

    options: dict[str, Any]
    rrefs: list[RRef[Any]]


def parse(params: Any) -> list[Given]:
    """Return the groups that ``params`` describes. Local tensors and modules become RRefs.

    Raises:
        TypeError: an item is neither a parameter nor a reference to parameters, or the name of a hyper-parameter is no str.
        ValueError: a group has no parameters, a parameter is given twice, or a local tensor cannot be optimized.
    """
    seen: set[Any] = set()
    items = _listed(params)
    if not items:
        raise ValueError("optimizer got an empty parameter list")
    if not any(isinstance(item, Mapping) for item in items):
        return [Given({}, _resolved(items, seen))]
    groups = []
    for item in items:
        if not isinstance(item, Mapping):
            raise TypeError(
                f"params mixes dicts (parameter groups) with other items, such as {_shown(item)}: give only dicts, or no dicts"
            )
        if "params" not in item:
            raise ValueError(f"a parameter group needs an entry 'params', this one has only {sorted(item)}")
        options = {key: value for key, value in item.items() if key != "params"}
        for key in options:
            if not isinstance(key, str):
                raise TypeError(f"names of hyper-parameters are str, but a parameter group has {key!r}")
        inside = _listed(item["params"])
        if not inside:
            raise ValueError("a parameter group has an empty parameter list")
        groups.append(Given(options, _resolved(inside, seen)))
    return groups


def check_tensor(tensor: torch.Tensor, what: str) -> None:
    """Raise an error, whose message begins with ``what``, if autograd cannot collect a gradient for a tensor.

    Raises:
        ValueError: the tensor is the result of an operation, or its dtype cannot have gradients.
    """
    if not tensor.is_leaf:
        raise ValueError(
            f"can't optimize a non-leaf Tensor: {what} is the result of {type(tensor.grad_fn).__name__}; gradients are "
            f"collected for tensors that were made directly (or after detach().requires_grad_())"
        )
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{what} is of {tensor.dtype}, which cannot have gradients")


def _listed(params: Any) -> list[Any]:
    if isinstance(params, (RRef, torch.Tensor, torch.nn.Module, Mapping)) or _lists_parameters(params):
        return [params]
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            "parameters need to have the same order in each run, but the order of a set may change: give a list"
        )
    if isinstance(params, (str, bytes)) or not isinstance(params, Iterable):
        raise TypeError(f"{_EXPECTED}, or an iterable of these: not as {_shown(params)}")
    return list(params)


def _lists_parameters(item: Any) -> bool:
    return callable(getattr(item, "remote_parameters", None))


def _resolved(items: list[Any], seen: set[Any]) -> list[RRef[Any]]:
    """Return RRefs to the parameters of ``items``, in order; refuse parameters in ``seen``, and add the new parameters to it."""
    rrefs: list[RRef[Any]] = []
    for position, item in enumerate(items):
        found = _rrefs_of(item, f"parameter {position}")
        # RRefs to the same value are equal, except that each RRef made from a local item is new: then compare the items.
        is_local = isinstance(item, (torch.Tensor, torch.nn.Module)) and not _lists_parameters(item)
        for each in [item] if is_local else found:
            if each in seen:
                raise ValueError(f"parameter {position} is given twice: {_shown(each)}")
            seen.add(each)
        rrefs.extend(found)
    return rrefs


def _rrefs_of(item: Any, name: str) -> list[RRef[Any]]:
    if isinstance(item, RRef):
        return [item]
    if _lists_parameters(item):
        found = list(item.remote_parameters())
        for each in found:
            if not isinstance(each, RRef):
                raise TypeError(
                    f"{name}: remote_parameters() of {_shown(item)} gave {_shown(each)}, not an RRef"
                )
    elif isinstance(item, torch.nn.Module):
        # The parameters of a RemoteModule within a local module are on another worker, and are added below.
        found = [RRef(item)] if next(item.parameters(), None) is not None else []
        found += [
            rref for each in item.modules() if _lists_parameters(each) for rref in _rrefs_of(each, name)
        ]
    elif isinstance(item, torch.Tensor):
        check_tensor(item, name)
        if not item.requires_grad:
            raise ValueError(f"{name} does not require grad: call requires_grad_() on it first")
        return [RRef(item)]
    else:
        raise TypeError(f"{_EXPECTED}: not as {_shown(item)} ({name})")
    if not found:
        raise ValueError(f"{name} is {_shown(item)}, which has no parameters")
    return found


def _shown(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return f"a tensor of shape {tuple(item.shape)}"
    text = f"{type(item).__name__} {item!r}"
    return text if len(text) <= 120 else f"{text[:117]}..."
