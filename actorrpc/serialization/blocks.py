"""Decide which bytes of a storage are sent, if tensors of a message use parts of the storage.

A storage is sent in blocks. Tensors that overlap are in one block, therefore they share memory at the receiver. Blocks that
lie close together are merged. The receiver never gets a byte that no tensor of the message uses: the sender copies a block
with gaps into zeroed memory, or packs the block without its gaps.

All positions, lengths and strides are in bytes. This module only computes; the sender's thread copies afterwards
(:mod:`actorrpc.serialization.tensors`). The receiver calls :func:`repitch` with the peer's numbers, and checks the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any, Final

__all__ = ["Block", "View", "plan", "repitch"]

# Two blocks are merged, and a tensor with gaps keeps its strides, if no gap is longer than _GAP bytes, and if the bytes sent are
# at most _WASTE times as many as the bytes used.
_GAP: Final = 4 << 10
_WASTE: Final = 2
# If the views of a block have more rectangles than this (see _rectangles), the bytes that the views use together are not counted.
_MAX_RECTANGLES: Final = 1 << 16


class View:
    """The bytes that one tensor uses of its storage.

    Attributes:
        number: the tensor's number in the message.
        tensor: the tensor; None stands for the whole storage.
        low, high: the offsets in the storage of the tensor's first byte, and of the byte after the tensor's last byte.
        item: the bytes of one element.
        steps: (stride, size) of each dimension, in the order of strides. Dimensions of one element or stride 0 are left out.
        gap: the length of the longest run of unused bytes between two used bytes.
        step: the distance between two contiguous runs of used bytes; 0 if all bytes from low to high are used.
        used: how many bytes are used; 0 if the dimensions overlap in a way for which the number is not computed.
    """

    __slots__ = ("gap", "high", "item", "low", "number", "step", "steps", "tensor", "used")

    def __init__(self, number: int, tensor: Any, low: int, high: int, is_contiguous: bool) -> None:
        self.number, self.tensor, self.low, self.high = number, tensor, low, high
        self.item: int = 1 if tensor is None else tensor.itemsize
        self.gap = self.step = 0
        self.used = high - low
        self.steps: list[tuple[int, int]] = []
        if is_contiguous:
            if high - low > self.item:
                self.steps.append((self.item, (high - low) // self.item))
            return
        moving = zip(tensor.stride(), tensor.shape, strict=True)
        self.steps = sorted([(stride * self.item, n) for stride, n in moving if n > 1 and stride])
        reach = used = self.item
        for stride, n in self.steps:
            if stride > reach:
                self.gap = max(self.gap, stride - reach)
                self.step = self.step or stride
            if self.step:
                used = used * n if stride >= reach else 0
            reach += (n - 1) * stride
            if not self.step:
                used = reach
        self.used = used


class Block:
    """A part of a storage that becomes one storage at the receiver.

    Attributes:
        groups: the views in the block. Views of different groups do not overlap.
        parts: views, some without a tensor, that together cover the bytes of the block's views. For a block with gaps, the
            sender copies the parts, so that it does not copy the same bytes for many overlapping views.
        low, high: the range of the sender's storage.
        size: how many bytes are sent.
        is_dense: every byte from low to high is used, so the range is sent without a copy.
        is_compact: the elements of the block's only tensor are sent, in order.
        used: how many bytes the views use together, or a lower bound of it.
        step, pitch: the distance between two rows in the sender's storage, and in the bytes sent. Both are 0 if rows are not
            moved closer together.
    """

    __slots__ = ("groups", "high", "is_compact", "is_dense", "low", "parts", "pitch", "size", "step", "used")

    def __init__(self, views: list[View], used: int, parts: list[View]) -> None:
        self.groups = [views]
        self.parts = parts
        self.low = min([view.low for view in views])
        self.high = max([view.high for view in views])
        self.size = self.high - self.low
        self.is_dense = used == self.size
        self.is_compact = False
        self.step = self.pitch = 0
        self.used = used

    def absorbs(self, other: Block) -> bool:
        """Merge ``other``, a block that starts later, if ``_GAP`` and ``_WASTE`` allow it; return whether it was merged."""
        gap = other.low - self.high
        used = self.used + other.used
        if self.pitch or other.pitch or self.is_compact or other.is_compact:
            return False
        if not 0 <= gap <= _GAP or other.high - self.low > _WASTE * used:
            return False
        self.groups += other.groups
        self.parts = [*self.parts, *other.parts]
        self.high = other.high
        self.size = self.high - self.low
        self.is_dense = self.is_dense and other.is_dense and not gap
        self.used = used
        return True

    def align(self) -> None:
        """Move ``low`` down to a multiple of the largest element size, so that tensors start at whole elements."""
        low = self.low & -max([view.item for group in self.groups for view in group])
        if low != self.low and not self.pitch:
            self.size += self.low - low
            self.low = low
            self.is_dense = False


def plan(views: Iterable[View]) -> list[Block]:
    """Return the blocks in which the bytes of the views, which all lie in one storage, are sent."""
    blocks: list[Block] = []
    for cluster in _clusters(views):
        for block in _split(cluster):
            if not blocks or not blocks[-1].absorbs(block):
                blocks.append(block)
    for block in blocks:
        block.align()
    return blocks


def repitch(start: int, strides: Sequence[int], step: int, pitch: int) -> tuple[int, list[int]]:
    """Return a tensor's start and strides after the distance between rows has been changed from ``step`` to ``pitch``."""
    row, column = divmod(start, step)
    return row * pitch + column, [stride // step * pitch + stride % step for stride in strides]


def _clusters(views: Iterable[View]) -> Iterator[list[View]]:
    """Divide views into groups whose ranges from low to high overlap; each group is ordered by low."""
    cluster: list[View] = []
    high = 0
    for view in sorted(views, key=lambda each: each.low):
        if view.low >= high and cluster:
            yield cluster
            cluster = []
        cluster.append(view)
        high = max(high, view.high)
    yield cluster


def _split(cluster: list[View]) -> list[Block]:
    """Return the blocks of views whose ranges from low to high overlap, although their bytes may not."""
    low = min([view.low for view in cluster])
    high = max([view.high for view in cluster])
    end = low
    for view in cluster:
        if not view.step and view.low <= end:
            end = max(end, view.high)
    if end == high:
        return [Block(cluster, high - low, cluster)]
    step = min([view.step for view in cluster if view.step])
    columns = _columns(cluster, step)
    if columns is None:
        return _cheapest(cluster, 0, 0, 0)
    blocks = [block for first, end, views in columns for block in _cheapest(views, step, first, end)]
    if sum([block.size for block in blocks]) >= high - low:
        parts = [part for block in blocks for part in block.parts]
        whole = Block(cluster, sum([block.used for block in blocks]), parts)
        whole.groups = [group for block in blocks for group in block.groups]
        return [whole]
    return blocks


def _columns(cluster: Sequence[View], step: int) -> list[tuple[int, int, list[View]]] | None:
    """Cut the storage into rows of ``step`` bytes, and divide the views into groups that have no column in common.

    Returns for each group the first column, the column after the last, and the views. If a group's columns continue in the
    next row, the column after the last is above ``step``. Returns None if a view's strides do not fit such rows.
    """
    windows: list[tuple[int, int, View]] = []
    for view in cluster:
        width = view.item + sum([stride * (n - 1) for stride, n in view.steps if stride < step])
        if step % view.item or any(stride % step for stride, _ in view.steps if stride >= step):
            return None
        windows.append((view.low % step, view.low % step + width, view))
    windows.sort(key=lambda window: window[:2])
    groups: list[tuple[int, int, list[View]]] = []
    for first, end, view in windows:
        if groups and first < groups[-1][1]:
            before, reach, views = groups[-1]
            views.append(view)
            groups[-1] = before, max(reach, end), views
        else:
            groups.append((first, end, [view]))
    # Join the last group with the first group, if the last group continues in the next row and overlaps the first group there.
    while len(groups) > 1 and groups[0][0] + step < groups[-1][1]:
        (_, end, views), (first, reach, more) = groups.pop(0), groups.pop()
        groups.append((first, max(reach, end + step), more + views))
    if any(end - first > step for first, end, _ in groups):
        return None
    return groups


def _rectangles(view: View, step: int, first: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield rectangles that cover a view's bytes, as (first row, row after the last, first column, column after the last).

    Each row has ``step`` bytes; row 0 begins at byte ``first`` of the storage. ``step`` 0: the whole storage is one row.
    """
    width, rows = view.item, 1
    outer: list[range] = []
    for stride, n in view.steps:
        if stride <= width and (stride < step or not step) and rows == 1 and not outer:
            width += stride * (n - 1)
        elif stride == step * rows and not outer:
            rows *= n
        else:
            outer.append(range(0, stride * n, stride))
    for offsets in product(*outer):
        row, column = divmod(view.low + sum(offsets) - first, step) if step else (0, view.low + sum(offsets))
        yield row, row + rows, column, column + width


def _union(views: list[View], step: int, first: int) -> tuple[int, list[View], list[list[View]]]:
    """Return how many bytes the views use together, the parts that are copied, and the views in groups that do not overlap.

    ``step`` and ``first`` have the same meaning as in :func:`_cheapest`. With more than ``_MAX_RECTANGLES`` rectangles the first
    result is a lower bound, and all views are in one group.
    """
    outer = [
        [n for stride, n in view.steps if view.step and stride >= view.step and stride > step]
        for view in views
    ]
    if sum(map(prod, outer)) > _MAX_RECTANGLES:
        return max([view.used for view in views]), views, [views]
    rectangles = sorted(
        (*each, at) for at, view in enumerate(views) for each in _rectangles(view, step, first)
    )
    leaders = list(range(len(views)))

    def leader(at: int) -> int:
        while leaders[at] != at:
            leaders[at] = at = leaders[leaders[at]]
        return at

    used = begun = 0
    parts: list[View] = []
    # Rectangles in the present row: first column, column after the last, index of the view, row after the last.
    active: list[tuple[int, int, int, int]] = []
    for row, until in pairwise(sorted({row for each in rectangles for row in each[:2]})):
        active = [each for each in active if each[3] > row]
        while begun < len(rectangles) and rectangles[begun][0] == row:
            _, bottom, *columns, at = rectangles[begun]
            active.append((columns[0], columns[1], at, bottom))
            begun += 1
        active.sort()
        runs: list[list[int]] = []
        last = -1
        for column, end, at, _ in active:
            if runs and column < runs[-1][1]:
                leaders[leader(at)] = leader(last)
            if runs and column <= runs[-1][1]:
                runs[-1][1] = max(runs[-1][1], end)
            else:
                runs.append([column, end])
            last = at
        for column, end in runs:
            low = first + row * step + column
            part = View(-1, None, low, low + end - column, True)
            part.steps.append((step, until - row))
            parts.append(part)
            used += (until - row) * (end - column)
    groups: dict[int, list[View]] = {}
    for at, view in enumerate(views):
        groups.setdefault(leader(at), []).append(view)
    # Copying rectangles byte by byte is only faster than copying each view if the views overlap much.
    overlap = sum([view.used for view in views]) > _WASTE * used
    return used, parts if overlap else views, list(groups.values())


def _cheapest(views: list[View], step: int, first: int, end: int) -> list[Block]:
    """Return the blocks of views that may overlap: with their strides if _GAP and _WASTE allow it, else in the shortest form.

    ``step``: the length of the rows in which the views lie, between the columns ``first`` and ``end``; 0 if there are no rows.
    """
    used, parts, groups = _union(views, step, first)
    block = Block(views, used, parts)
    if block.is_dense or (max([view.gap for view in views]) <= _GAP and block.size <= _WASTE * used):
        return [block]
    if step:
        item = max([view.item for view in views])
        first -= first % item
        low = block.low - (block.low - first) % step
        pitch = -(-(end - first) // item) * item
        size = ((block.high - 1 - low) // step + 1) * pitch
        if low >= 0 and size < block.size:
            block.low, block.size, block.step, block.pitch, block.is_dense = low, size, step, pitch, False
    if len(views) == 1 and views[0].tensor.numel() * views[0].item <= block.size:
        block.size, block.is_compact, block.is_dense = views[0].tensor.numel() * views[0].item, True, False
        block.step = block.pitch = 0
    if len(groups) > 1 and block.size > _WASTE * used:
        return [each for group in groups for cluster in _clusters(group) for each in _split(cluster)]
    return [block]
