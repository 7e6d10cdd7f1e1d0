"""The transports that ``ObjectRef.read_into`` may use instead of the connection between reader and owner."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

import torch

from actorrpc._exceptions import is_of_handler, line_of, say
from actorrpc.errors import ConfigError, RpcError, WrongTypeError

__all__ = [
    "TensorTransport",
    "find",
    "names_for",
    "register_tensor_transport",
    "unregister_tensor_transport",
]

_METHODS: Final = ("supports", "offer", "read", "withdraw")


class TensorTransport(Protocol):
    """A way in which a reader reads a tensor from the memory of its owner, for ``ObjectRef.read_into``.

    The owner of the tensor calls :meth:`offer`, the reader calls :meth:`read` with the descriptor, and the owner calls
    :meth:`withdraw` on a thread of the package when the reader has finished, has failed or was killed. Several threads call the
    methods at once. All tensors are contiguous, and do not require grad.

    To write a transport with NIXL: ``offer`` registers the tensor (``register_memory``) and returns ``get_agent_metadata()`` with
    the serialized transfer descriptors; ``read`` adds the remote agent, registers the target, starts a ``READ``
    (``initialize_xfer``, ``transfer``), calls ``check()`` between two calls of ``check_xfer_state``, and finally calls
    ``release_xfer_handle``, which also cancels an unfinished transfer, and deregisters the target; ``withdraw`` calls
    ``deregister_memory``. Guard the agent of NIXL by a lock.

    ``torch.distributed.transports`` (torch 2.15) connects pairs of workers: ``offer`` returns the serialized
    ``to_remote_buffer()`` of the registered memory, and the name of the owner. The first ``read`` of a pair calls a function of
    the owner by ``rpc_sync``, which exchanges the results of ``bind()`` and connects both ends. ``withdraw`` unregisters the
    memory.

    Attributes:
        name: the name under which reader and owner have registered the transport, for example ``"nixl"``.
    """

    name: str

    def supports(self, device: torch.device) -> bool:
        """Return whether the transport can read from, and write to, tensors of this process on ``device``."""

    def offer(self, tensor: torch.Tensor) -> bytes:
        """Register the memory of a tensor of this process, and return a descriptor with which another worker can read it.

        The package keeps the tensor until :meth:`withdraw` has returned. Only the owner of a tensor of ``share()`` may change
        the tensor meanwhile. Each offer has its own descriptor, also if the same tensor is offered again. If this method raises,
        ``read_into`` of the reader raises an RpcError, and the target is unchanged.
        """

    def read(
        self,
        descriptor: bytes,
        target: torch.Tensor,
        timeout: float | None,
        check: Callable[[], None],
    ) -> None:
        """Copy the offered tensor into ``target``, which has the same shape and dtype; return when the target is complete.

        A target on a GPU is complete if work that is queued on the caller's current stream afterwards reads the value. The
        memory of the target must not be written to after the method has returned or raised.

        Args:
            timeout: the seconds that are left; None: no limit.
            check: call this function at least once a second while the method waits. It raises an exception when the time is
                up, the owner has died, or the call that this thread executes was cancelled. Do not catch this exception,
                except to cancel the transfer.
        """

    def withdraw(self, descriptor: bytes) -> None:
        """Undo :meth:`offer`. Called once for each offer, on a thread of the package. Exceptions are logged."""


# Name -> transport, in the order of registration. Each access is one atomic operation of a dict.
_registered: Final[dict[str, TensorTransport]] = {}


def register_tensor_transport(transport: TensorTransport) -> None:
    """Let ``ObjectRef.read_into`` use a transport for values of other hosts and of GPUs that the reader cannot use. Thread-safe.

    Register a transport under the same name on the reader and on the owner of the value. They use the first transport, in the
    order of registration by the reader, that both have and that supports the devices of value and target. If there is none, or if
    value or target is not contiguous, the value is sent over the connection between the two workers.

    Raises:
        WrongTypeError: ``transport`` is a class or lacks a method, or its name is not a text.
        ConfigError: a transport of this name is registered already.
    """
    name = getattr(transport, "name", None)
    if isinstance(transport, type):
        raise WrongTypeError(f"register an object, and not the class {transport.__name__}")
    if not isinstance(name, str) or not name:
        raise WrongTypeError(f"the name of a transport must be a text, not {say(name, repr)}")
    missing = [each for each in _METHODS if not callable(getattr(transport, each, None))]
    if missing:
        raise WrongTypeError(
            f"the transport {name!r} lacks the methods {', '.join(missing)}: see TensorTransport"
        )
    if _registered.setdefault(name, transport) is not transport:
        raise ConfigError(
            f"a transport {name!r} is registered already: unregister_tensor_transport({name!r}) removes it"
        )


def unregister_tensor_transport(name: str) -> None:
    """Remove a transport from this process, so that new reads do not use it.

    Tensors that it offers stay registered until their readers have finished.

    Raises:
        ConfigError: no transport of this name is registered.
    """
    if _registered.pop(name, None) is None:
        raise ConfigError(
            f"no transport {say(name, repr)} is registered; registered are: {', '.join(_registered) or 'none'}"
        )


def names_for(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the registered transports that can be used for a tensor, in the order of registration."""
    return tuple(each.name for each in list(_registered.values()) if _supports(each, tensor))


def find(names: Iterable[str], tensor: torch.Tensor) -> TensorTransport | None:
    """Return the first of the named transports that is registered here and can be used for a tensor; None if there is none."""
    found = (_registered.get(name) for name in names)
    return next((each for each in found if each is not None and _supports(each, tensor)), None)


def wait_for_device(tensor: torch.Tensor) -> None:
    """Wait for the work that is queued on the device of a tensor: transports do not wait for the streams of CUDA."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _supports(transport: TensorTransport, tensor: torch.Tensor) -> bool:
    """Return whether a transport can be used for a tensor. False if the tensor is not contiguous, is conjugate or is negated.

    Raises:
        RpcError: the transport has raised.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    try:
        return transport.supports(tensor.device)
    except Exception as error:
        if is_of_handler(error):
            raise
        what = f"supports({tensor.device}) of the transport {transport.name!r} failed in this process"
        raise RpcError(f"{what}: {line_of(error)}") from error
