"""Sums that do not depend on the order in which their parts come."""

from __future__ import annotations

import itertools

import torch

from actorrpc.autograd.local_pass import Sum


def test_sums_are_the_same_in_whatever_order_their_parts_come() -> None:
    parts = {key: [torch.rand(5) / (key + 1), torch.rand(2) if key % 2 else None] for key in range(4)}
    found = []
    for order in itertools.permutations(parts):
        total = Sum([2, 0, 3, 1])
        given = {key: [None if each is None else each.clone() for each in parts[key]] for key in parts}
        complete = [total.add(key, list(given[key])) for key in order]
        assert complete == [False, False, False, True]
        found.append(total.total)
        for key, tensors in parts.items():  # nothing that came was changed
            for one, other in zip(tensors, given[key], strict=True):
                assert one is other is None or torch.equal(one, other)  # type: ignore[arg-type]
    want = [((parts[2][0] + parts[0][0]) + parts[3][0]) + parts[1][0], parts[3][1] + parts[1][1]]  # type: ignore[operator]
    for total_ in found:
        for one, other in zip(total_, want, strict=True):
            assert torch.equal(one, other)  # type: ignore[arg-type]


def test_one_part_is_handed_on_as_it_is() -> None:
    total = Sum([7])
    gradient = torch.ones(3)
    assert total.add(7, [gradient, None])
    assert total.total[0] is gradient
    assert total.total[1] is None
