"""Offers: the owner's side of ``ObjectRef.read_into``.

If the reader cannot read a value in shared memory (it is on another host, or the value is a tensor of a GPU), the owner answers
its request with an :class:`Offer`. The offer contains an RRef to a :class:`Lease`, which keeps the tensor, and its registration
with a transport, for as long as the reader has the RRef. The reference counts of RRefs also release the lease of a reader that
was killed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from actorrpc._exceptions import is_of_handler, line_of, report, say, shown, type_name
from actorrpc.actors.refs import transports
from actorrpc.actors.refs.shared import SharedTensor
from actorrpc.actors.refs.snapshot import Snapshot
from actorrpc.actors.refs.transports import TensorTransport
from actorrpc.agent.agent import Agent
from actorrpc.errors import ProtocolError, RpcError
from actorrpc.rpc.rref import RRef

__all__ = ["CHUNK", "Form", "Lease", "Offer", "Offers", "Wanted", "chunk", "opened", "pieces"]

# read_into() of 256 MiB over an encrypted connection, on a machine with two processors, with two chunks in flight, reaches
# 0.40 GB/s with chunks of 1 MiB, 0.50 with 4 MiB, and 0.55 with 16 MiB or 64 MiB. get() and copy_() reach 0.56 GB/s.
CHUNK: Final = 16 << 20
"""The bytes of a chunk. A Snapshot of at most this size is sent without an offer if the reader can use no transport."""

_log = logging.getLogger("actorrpc")


class Form(NamedTuple):
    """What a value and its target must have in common.

    Attributes:
        kind: the dtype of a tensor, and its layout if it is not strided; ``"nested tensor"``; the type of any other object.
        shape: the shape of a tensor; None for a nested tensor and for an object that is no tensor.
    """

    kind: str
    shape: tuple[int, ...] | None

    @classmethod
    def of(cls, value: Any) -> Form:
        """Return the form of a value."""
        if not isinstance(value, torch.Tensor):
            return cls(shown(type_name(type(value))), None)
        if value.is_nested:
            return cls("nested tensor", None)
        kind = str(value.dtype)
        if value.layout is not torch.strided or value.is_meta:
            kind += " meta" if value.is_meta else f" {value.layout}"
        return cls(kind, tuple(value.shape))

    def __str__(self) -> str:
        return f"a {self.kind}" if self.shape is None else f"a {self.kind} tensor of shape {self.shape}"


class Wanted(NamedTuple):
    """A reader's request for an offer.

    Attributes:
        form: the form of the reader's target.
        transports: the names of the transports that the reader can use.
    """

    form: Form
    transports: tuple[str, ...]


class Offer(NamedTuple):
    """The owner's answer to a :class:`Wanted`.

    Attributes:
        owner: the name of the worker that has the value.
        form: the form of the value.
        lease: keeps the value for the reader; None if the forms of value and target differ.
        transport: the name of the transport that the reader must use; empty: the connection.
        descriptor: the result of ``offer()`` of that transport; empty for the connection.
    """

    owner: str
    form: Form
    lease: RRef[Lease] | None
    transport: str
    descriptor: bytes


class Lease:
    """Keeps a tensor for one reader. When the reader's RRef is released, a pool thread withdraws the offer of the tensor."""

    __slots__ = ("_on_release", "tensor")

    def __init__(self, tensor: torch.Tensor, on_release: Callable[[], None] | None) -> None:
        self._on_release = on_release
        self.tensor = tensor

    def __del__(self) -> None:
        if self._on_release is not None:
            self._on_release()


class Offers:
    """The tensors of this process that transports offer to readers. Thread-safe: each step is one atomic operation of a dict."""

    __slots__ = ("_agent", "_numbers", "_open")

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._numbers = itertools.count()
        #: number -> transport, descriptor, tensor
        self._open: Final[dict[int, tuple[TensorTransport, bytes, torch.Tensor]]] = {}

    def make(self, found: Any, wanted: Wanted, reader: str) -> Any:
        """Return an :class:`Offer` of a value to the worker ``reader``.

        If the value is a Snapshot of at most ``CHUNK`` bytes, and the reader can use no transport, return the Snapshot. Calls a
        transport, so no lock may be held.

        Raises:
            RpcError: the transport has raised.
        """
        if type(found) is Snapshot and found.nbytes <= CHUNK and not wanted.transports:
            return found
        value = opened(found)
        owner, form = self._agent.name, Form.of(value)
        if form != wanted.form:
            return Offer(owner, form, None, "", b"")
        tensor: torch.Tensor = value.detach()
        by = "a transport"
        try:
            transport = transports.find(wanted.transports, tensor)
            if transport is None:
                return Offer(owner, form, RRef(Lease(tensor, None)), "", b"")
            by = f"the transport {transport.name!r}"
            transports.wait_for_device(tensor)
            descriptor = transport.offer(tensor)
            if not isinstance(descriptor, bytes):
                raise TypeError(f"offer() returned {say(descriptor, repr)}, and not bytes")
        except Exception as error:
            if is_of_handler(error):
                raise
            raise RpcError(
                f"worker {owner!r} cannot offer {form} to worker {reader!r} by {by}: {line_of(error)}. The target is unchanged"
            ) from error
        number = next(self._numbers)
        self._open[number] = transport, descriptor, tensor
        clock, withdraw = self._agent.clock, partial(self._agent.submit, partial(self._withdraw, number))
        return Offer(
            owner, form, RRef(Lease(tensor, partial(clock.call_soon, withdraw))), transport.name, descriptor
        )

    def _withdraw(self, number: int) -> None:
        found = self._open.pop(number, None)
        if found is None:
            return
        transport, descriptor, _tensor = found
        try:
            transport.withdraw(descriptor)
        except Exception as error:
            if is_of_handler(error):
                raise
            report(_log, error, "the transport %r could not withdraw a tensor", transport.name)

    def close(self) -> None:
        """Withdraw all offers."""
        for number in list(self._open):
            self._withdraw(number)


def opened(found: Any) -> Any:
    """Return the object of a Snapshot or SharedTensor without a copy; return any other value itself.

    The caller must not change the object.
    """
    return found.view() if type(found) in (Snapshot, SharedTensor) else found


def pieces(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield as few views as possible that together have the elements ``start`` to ``stop - 1``, in row-major order."""
    if start >= stop:
        return
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
    elif stop - start == tensor.numel():
        yield tensor
    else:
        size = tensor.numel() // len(tensor)  # of a row
        first, last = -(-start // size), stop // size
        if first > last:  # all elements are in one row
            yield from pieces(tensor[last], start - last * size, stop - last * size)
            return
        if start < first * size:
            yield from pieces(tensor[first - 1], start - (first - 1) * size, size)
        if first < last:
            yield tensor[first:last]
        yield from pieces(tensor[last], 0, stop - last * size) if last * size < stop else ()


def chunk(lease: Lease, start: int, stop: int) -> torch.Tensor:
    """Return the elements ``start`` to ``stop - 1`` of a lease's tensor, in row-major order, on the CPU.

    The reader calls this function by RPC; it runs on the owner.

    Raises:
        ProtocolError: the tensor does not have these elements.
    """
    if not 0 <= start < stop <= lease.tensor.numel():
        raise ProtocolError(f"a tensor of {lease.tensor.numel()} elements has no elements {start} to {stop}")
    parts = [each.reshape(-1).to("cpu") for each in pieces(lease.tensor, start, stop)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
