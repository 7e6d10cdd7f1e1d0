"""The plan of a backward pass: which messages take part, and in what order each worker processes their gradients. No state.

On the sender of a message, the message's gradients lead to receipts of earlier messages, so messages form a graph without cycles.
A message's *level* is the length of the longest path from the roots to the message. The messages of one worker and one level form
a *stratum*, which is processed in one call of the engine. Gradients always lead to messages of a higher level, so a stratum never
waits for itself, however often gradients return to a worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from actorrpc.autograd.messages import Contribution, Sink, Stratum, make
from actorrpc.errors import RpcError
from actorrpc.wire.identity import WorkerKey

__all__ = ["ROOTS", "Send", "levels", "make_plan"]

#: A message: its sender, and the sender's number of the message.
Send = tuple[WorkerKey, int]

#: The number that stands for the roots in place of a message. No message has this number.
ROOTS: Final = 0


def levels(answers: Mapping[Send, Sequence[Sink]]) -> dict[Send, int]:
    """Return the level of each message: 0 if no other message leads to it.

    Args:
        answers: message -> the receipts to which its gradients lead.

    Raises:
        RpcError: a receipt belongs to a message that is not in ``answers``, or messages lead to each other in a circle.
    """
    following: dict[Send, dict[Send, None]] = {}
    before = dict.fromkeys(answers, 0)
    for send, sinks in answers.items():
        sends = following[send] = {}
        for worker, message, _ in sinks:
            each = worker, message
            if each in sends:
                continue
            if each not in before:
                raise RpcError(f"{_name(send)} leads to {_name(each)}, about which no answer says anything")
            sends[each] = None
            before[each] += 1
    found: dict[Send, int] = {}
    ready: list[Send] = []
    for send, count in before.items():
        if not count:
            found[send] = 0
            ready.append(send)
    left = len(before)
    while ready:
        send = ready.pop()
        left -= 1
        below = found[send] + 1
        for each in following[send]:
            if found.get(each, 0) < below:
                found[each] = below
            before[each] -= 1
            if before[each] == 0:
                ready.append(each)
    if left:
        some = ", ".join(_name(each) for each in sorted(send for send, count in before.items() if count)[:5])
        raise RpcError(f"messages wait for each other's gradients in a circle: {some}")
    return found


def make_plan(origin: WorkerKey, answers: Mapping[Send, Sequence[Sink]]) -> dict[WorkerKey, list[Stratum]]:
    """Return the strata of each worker that takes part, in the order in which the worker runs them.

    The plan does not depend on the order of the answers: contributions are added up in the order of the senders' ranks
    and of their receipts.

    Args:
        origin: the worker of the roots; its first stratum is the roots.
        answers: message that takes part -> the receipts to which its gradients lead; the roots are ``(origin, ROOTS)``.

    Raises:
        RpcError: the answers contradict each other.
    """
    contributions: dict[Send, set[Contribution]] = {(origin, ROOTS): {Contribution(origin, 0)}}
    seen: dict[Contribution, Send] = {}
    for (worker, _), sinks in answers.items():
        for to, message, receipt in sinks:
            send, contribution = (to, message), make(Contribution, (worker, receipt))
            if seen.setdefault(contribution, send) != send:
                raise RpcError(
                    f"two answers name different messages for receipt {receipt} of worker {worker.rank}: {_name(send)} and "
                    f"{_name(seen[contribution])}"
                )
            contributions.setdefault(send, set()).add(contribution)
    order: list[tuple[WorkerKey, int, int]] = []
    for (worker, message), level in levels(answers).items():
        order.append((worker, level, message))
    plan: dict[WorkerKey, list[Stratum]] = {}
    last: tuple[WorkerKey, int] | None = None
    for worker, level, message in sorted(order):
        if (worker, message) not in contributions:
            raise RpcError(f"nothing leads to {_name((worker, message))}, although an answer names it")
        if last != (worker, level):
            last = worker, level
            plan.setdefault(worker, []).append(make(Stratum, ({},)))
        plan[worker][-1].messages[message] = tuple(sorted(contributions[worker, message]))
    return plan


def _name(send: Send) -> str:
    worker, message = send
    return "the roots" if message == ROOTS else f"message {message} of worker {worker.rank}"
