"""The hyper-parameters of a DistributedOptimizer, as its user sees and sets them.

Every worker has all groups, also those of which no parameter is there, with the same values. The process that has the
DistributedOptimizer keeps a copy, in a stand-in for torch's optimizer: learning rate schedulers work on that, and what
has changed is sent to all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

__all__ = ["ParamGroup", "StandIn"]


class StandIn(torch.optim.Optimizer):
    """An optimizer of nothing that has the hyper-parameters of one whose parameters are elsewhere.

    Used under the lock of its DistributedOptimizer.

    Args:
        groups: the hyper-parameters of each group.
        defaults: the optimizer's defaults.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__([{**group, "params": []} for group in groups], defaults)
        self._sent = self._copy()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing; schedulers look whether it was called."""

    def groups(self) -> list[dict[str, Any]]:
        """Return a copy of the hyper-parameters of each group."""
        return self._copy()

    def add(self, group: dict[str, Any]) -> None:
        """Add a group that all workers have by now."""
        self.add_param_group({**group, "params": []})
        self._sent.append(_copied(group))

    def replace(self, groups: list[dict[str, Any]]) -> None:
        """Take over what all workers have by now. The groups stay the same objects."""
        for mine, group in zip(self.param_groups, groups, strict=True):
            mine.clear()
            mine.update(_copied(group), params=[])
        self._sent = self._copy()

    def changes(self) -> list[dict[str, Any]] | None:
        """Return what differs from what the workers have, one dict for each group; None where nothing does."""
        found = [
            {key: value for key, value in group.items() if key not in sent or not _same(value, sent[key])}
            for group, sent in zip(self._copy(), self._sent, strict=True)
        ]
        return found if any(found) else None

    def sent(self, changes: list[dict[str, Any]]) -> None:
        """Note that all workers have got these changes."""
        for group, values in zip(self._sent, changes, strict=True):
            group.update(values)

    def _copy(self) -> list[dict[str, Any]]:
        return [
            _copied({key: value for key, value in group.items() if key != "params"})
            for group in self.param_groups
        ]


class ParamGroup(MutableMapping[str, Any]):
    """The hyper-parameters of one group: ``group["lr"] = 0.1`` sets it on all workers before it returns.

    Reading asks nobody: it shows what was set from here, by schedulers and by loading a state. An optimizer that changes
    its hyper-parameters by itself shows them in ``state_dict()``. Entries cannot be removed, and parameters are not
    among them: they are on the workers.
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
    except Exception:  # a class that cannot be compared: send it
        return False
