"""Modules on other workers: the API of ``torch.distributed.nn``, implemented with actorrpc's calls.

A RemoteModule is an ``nn.Module`` itself, so it can be a part of a local module, but it has no parameters, buffers or modules
of its own: calls that torch makes on the parts of a model (``state_dict``, ``train``, ``to``, ``apply``) are sent to the worker
that has the module, its *owner*, where :mod:`actorrpc.rpc.modules` executes them. The RPC layer records calls for autograd.

A *place* is a worker and one of the worker's devices, in torch's notation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from actorrpc._torch import METADATA, RemoteDevice, parse_to, state_dict_hooks
from actorrpc.agent.peers import MessageContext
from actorrpc.errors import ConfigError, RRefError, SerializationError, WrongTypeError
from actorrpc.futures import Future
from actorrpc.rpc import api, modules
from actorrpc.rpc.rref import RRef, call_with_value
from actorrpc.serialization import codec
from actorrpc.serialization.local_refs import LocalReferences
from actorrpc.wire.identity import WorkerInfo

__all__ = ["RemoteModule"]


def place_of(remote_device: Any) -> tuple[str | int | None, str]:
    """Return the worker (a name, a rank, or None for this worker) and the device that ``remote_device`` names.

    Args:
        remote_device: ``"worker/device"``, ``"worker"``, ``"rank:1/device"``, ``"rank:1"``, ``"device"`` (of this worker);
            a ``torch.device`` of this worker; a WorkerInfo or a rank. The device is ``cpu`` unless ``remote_device`` names one.

    Raises:
        WrongTypeError: ``remote_device`` has another type.
        ConfigError: ``remote_device`` has another form, or torch knows no such device.
    """
    if isinstance(remote_device, WorkerInfo):
        return remote_device.name, "cpu"
    if isinstance(remote_device, int) and not isinstance(remote_device, bool):
        return remote_device, "cpu"
    if isinstance(remote_device, (torch.device, RemoteDevice)):
        remote_device = str(remote_device)
    if not isinstance(remote_device, str):
        raise WrongTypeError(
            f"Invalid type for remote_device: {type(remote_device)}; a place is a str such as 'worker1/cpu'"
        )
    worker, slash, device = remote_device.partition("/")
    if "/" in device or (slash and not worker):
        raise _unreadable(remote_device)
    if not slash:
        if _is_device(worker):
            return None, worker
        device = "cpu"
    if not worker:
        raise _unreadable(remote_device)
    device = device_of(device)
    kind, colon, rank = worker.partition(":")
    if kind != "rank" or not colon:
        return worker, device
    if not (rank.isascii() and rank.isdigit()):
        raise _unreadable(remote_device)
    return int(rank), device


def device_of(device: Any) -> str:
    """Return the name of a device in torch's form.

    Raises:
        ConfigError: torch knows no such device.
    """
    try:
        return str(torch.device(device))
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{str(error).strip()} (given as the device {device!r})") from None


def _unreadable(remote_device: str) -> ConfigError:
    return ConfigError(
        f"Could not parse remote_device: {remote_device}. The valid format is '<workername>/<device>' or "
        "'rank:<rank>/<device>' or '<device>'"
    )


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


# The dtypes whose conversion is passed on. A conversion of the outer module is tried on an empty tensor of each dtype.
_DTYPES: Final = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
# In a saved state, the RemoteModule's own metadata has the metadata of the remote module's parts under this key. When a state is
# loaded, torch passes only the RemoteModule's own metadata to it.
_PARTS: Final = "remote_parts"


def _refuse(name: str, instead: str = "") -> NoReturn:
    raise ValueError(f"Method ``{name}`` not supported for RemoteModule{instead}")


class RemoteModule(nn.Module):
    """A module on another worker. ``remote(x)`` calls the module on its worker and returns the output.

    A RemoteModule can be a part of a local (outer) module. The outer module's ``state_dict`` and ``load_state_dict`` include the
    remote parameters and buffers (as copies on the CPU); its ``train``, ``eval``, ``apply`` and conversions of the dtype apply to
    the remote module, too. A move to a device does not, because each worker has its own devices. The outer module's
    ``parameters``, ``buffers``, ``zero_grad`` and ``requires_grad_`` use the local tensors only: ``remote_parameters()`` returns
    the remote parameters, for a ``DistributedOptimizer``.

    Calls inside of a distributed autograd context are recorded. Hooks that are registered on the RemoteModule run on this
    worker around ``remote(x)``, but neither around ``forward_async`` nor, as in torch, around ``forward``. The remote module's
    own hooks run on its worker, in every call.

    A RemoteModule can be sent to other workers, in arguments and results; hooks and added attributes are not sent. It cannot be
    pickled in other ways: save its ``state_dict()``. The module is deleted when no RemoteModule and no RRef refers to it. Calls
    are thread-safe if the module is thread-safe: several calls may run at the same time.

    Args:
        remote_device: ``"worker"``, ``"worker/device"``, ``"rank:1/device"``, a device of this worker, a WorkerInfo or a rank.
            The device is the CPU unless ``remote_device`` names a device.
        module_cls: the module's class, an actor class, or a function that returns a module. The worker calls ``module_cls``;
            the constructor does not wait for this call, and an exception of it is raised when the RemoteModule is first used.
        args, kwargs: the arguments of ``module_cls``.

    Attributes:
        on: the name of the worker.
        device: the module's device on its worker, as set by the constructor or a method of this RemoteModule.
        module_rref: the RRef to the module.
        training: the mode with which :meth:`train` of this RemoteModule was last called; at first true.

    Raises:
        ConfigError: ``remote_device`` has another form, or torch knows no such device.
        UnknownWorkerError: there is no such worker.
        ValueError: ``module_cls`` is a class, but not a class of modules.
        TypeError: an argument has a wrong type.
        SerializationError: the class, or an argument, cannot be sent.
        NotInitializedError: RPC is not initialised.
    """

    #: TorchScript interfaces of remote modules are not supported.
    is_scriptable = False
    on: str
    device: str
    module_rref: RRef[nn.Module]
    _what: str

    def __init__(
        self,
        remote_device: Any,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        worker, device = place_of(remote_device)
        args, kwargs = _arguments(module_cls, args, kwargs)
        self.on = api.get_worker_info(worker).name  # type: ignore[arg-type]
        self.device = device
        self.module_rref = api.remote(self.on, modules.create, (module_cls, args, kwargs, device))
        self._what = getattr(module_cls, "__name__", "module")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        codec.register(cls, _reduce)

    @classmethod
    def from_rref(cls, module_rref: RRef[Any], device: Any = "cpu") -> Self:
        """Return a RemoteModule for the module of an RRef. Several RemoteModules may share a module.

        Args:
            module_rref: refers to the module: the result of ``get_module_rref()``, or the ``rref`` of an actor whose class is a
                module (then calls bypass the actor's mailbox).
            device: the device of the module, to which inputs are moved.

        Raises:
            TypeError: ``module_rref`` is not an RRef. Whether it refers to a module is checked at the first use.
            ConfigError: torch knows no such device.
        """
        if not isinstance(module_rref, RRef):
            raise TypeError(f"a RemoteModule is made from an RRef, not from a {type(module_rref).__name__}")
        return cls._made(module_rref.owner_name(), device_of(device), module_rref, "module", True)

    @staticmethod
    def init_from_module_rref(
        remote_device: Any, module_rref: RRef[Any], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Return a RemoteModule for the module of an RRef, with torch's signature: see :meth:`from_rref`.

        Args:
            remote_device: as for the constructor, but only its device is used, because the RRef determines the worker.

        Raises:
            ValueError: a TorchScript interface was given.
        """
        if _module_interface_cls is not None:
            raise ValueError("TorchScript interfaces are not supported for RemoteModule")
        return RemoteModule.from_rref(module_rref, place_of(remote_device)[1])

    @classmethod
    def _made(cls, on: str, device: str, rref: RRef[Any], what: str, training: bool) -> Self:
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.on, made.device, made.module_rref, made._what = on, device, rref, what
        made.training = training
        return made

    # -- calling --------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module and return its output. If the module is not on the CPU, its worker moves inputs to the module's device,
        and outputs to the CPU, unless a device map maps them to a device of this worker.

        Raises:
            RpcTimeoutError, PeerDiedError: no answer came; ``maybe_executed`` says whether the call may have run.
            SerializationError: an argument cannot be sent.
            Exception: the module or its constructor raised it.
        """
        return self._on_owner("forward", modules.forward, self.device, args, kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the module and return a Future of its output at once. The errors are the errors of :meth:`forward`."""
        future: Future[Any] = Future()
        self._on_owner("forward", modules.forward, self.device, args, kwargs, future=future)
        return future

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the RRef to the module."""
        return self.module_rref

    def _on_owner(self, name: str, function: Any, *args: Any, future: Future[Any] | None = None) -> Any:
        label = f"{self._what}.{name}"
        return call_with_value(self.module_rref, function, *args, label=label, future=future)

    # -- parameters -----------------------------------------------------------------------------------------------------

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return RRefs to the parameters of the module, one RRef for each parameter, for a ``DistributedOptimizer``.

        Args:
            recurse: include the parameters of inner modules.
        """
        found: list[RRef[nn.Parameter]] = self._on_owner(
            "remote_parameters", modules.parameter_rrefs, recurse
        )
        return found

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[nn.Parameter]]]:
        """Return an iterator over the names of the module's parameters and RRefs to the parameters. Makes one call.

        Args:
            recurse: if false, the iterator is empty, because DistributedDataParallel calls this for each part of a model, and
                needs local parameters. ``remote_parameters(recurse=False)`` leaves out the parameters of inner modules.
        """
        if not recurse:
            return iter(())
        asked = (modules.named_parameter_rrefs, prefix, recurse, remove_duplicate)
        return iter(self._on_owner("named_parameters", *asked))

    def parameters(self, recurse: bool = True) -> NoReturn:
        """Raise ValueError: the parameters are on another worker."""
        _refuse("parameters", ". Please use ``remote_parameters`` instead.")

    # -- state -------------------------------------------------------------------------------------------------------------

    # torch's ``state_dict`` and ``load_state_dict``, also those of an outer module, call the next two methods.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # The state has copies, even if ``keep_vars`` is true, because the parameters themselves are on another worker.
        state = self._on_owner("state_dict", modules.state_of)
        for name, value in state.items():
            destination[prefix + name] = value
        known, found = getattr(destination, METADATA, None), getattr(state, METADATA, None)
        if known is None or found is None:
            return
        for name, value in found.items():
            known.setdefault(prefix + name if name else prefix[:-1], {}).update(value)
        known.setdefault(prefix[:-1], {})[_PARTS] = {name: dict(value) for name, value in found.items()}

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        arguments = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        for hook in state_dict_hooks(self).values():
            hook(*arguments)
        state = {
            name[len(prefix) :]: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        metadata = local_metadata.get(_PARTS)
        if metadata is None and not prefix:  # the state is of the remote module alone
            metadata = getattr(state_dict, METADATA, None)
        missing, unexpected, wrong = self._on_owner(
            "load_state_dict", modules.load_state, state, metadata, assign
        )
        missing_keys.extend(prefix + name for name in missing)
        unexpected_keys.extend(prefix + name for name in unexpected)
        error_msgs.extend(f"{prefix[:-1] or self._what} on {self.on!r}: {text}" for text in wrong)

    # -- changes of the module on its worker ----------------------------------------------------------------------------

    def _steer(self, name: str, *args: Any, **kwargs: Any) -> Self:
        device = self._on_owner(name, modules.change_module, name, args, kwargs)
        if device is not None:
            self.device = device
        return self

    def train(self, mode: bool = True) -> Self:
        """Put the module into training mode, or if ``mode`` is false, into evaluation mode."""
        if not isinstance(mode, bool):
            raise ValueError("training mode is expected to be boolean")
        self._steer("train", mode)
        self.training = mode
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` on the module's worker, with every inner module and with the module itself.

        ``fn`` is sent to the worker, so it cannot change objects of this process.
        """
        return self._steer("apply", fn)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether autograd records operations on the parameters."""
        return self._steer("requires_grad_", requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the ``.grad`` of the parameters. Backward passes of distributed autograd do not use ``.grad`` by default."""
        self._steer("zero_grad", set_to_none)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move and convert the module, with the arguments of ``nn.Module.to``. A device is a device of the module's worker."""
        device, dtype, non_blocking, memory_format = parse_to(*args, **kwargs)
        options: dict[str, Any] = {"device": device, "dtype": dtype, "non_blocking": non_blocking}
        if memory_format is not None:
            options["memory_format"] = memory_format
        return self._steer("to", **options)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Move the module to a device of its worker without the values of parameters and buffers."""
        return self._steer("to_empty", device=device, recurse=recurse)

    def cpu(self) -> Self:
        """Move the module to the CPU."""
        return self._steer("cpu")

    def cuda(self, device: Any = None) -> Self:
        """Move the module to a GPU of its worker: to ``device``, or by default to the current GPU."""
        return self._steer("cuda", device)

    def type(self, dst_type: Any) -> Self:
        """Convert parameters and buffers to the dtype ``dst_type``."""
        return self._steer("type", dst_type)

    def float(self) -> Self:
        """Convert floating point parameters and buffers to float32."""
        return self._steer("float")

    def double(self) -> Self:
        """Convert floating point parameters and buffers to float64."""
        return self._steer("double")

    def half(self) -> Self:
        """Convert floating point parameters and buffers to float16."""
        return self._steer("half")

    def bfloat16(self) -> Self:
        """Convert floating point parameters and buffers to bfloat16."""
        return self._steer("bfloat16")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # The outer module calls this method. ``fn`` may be any function, and is not sent; only its effect on dtypes is sent.
        changed = {}
        for dtype in _DTYPES:
            became = fn(torch.empty(0, dtype=dtype)).dtype
            if became is not dtype:
                changed[dtype] = became
        if changed:
            self._on_owner("to", modules.convert, changed)
        return self

    # -- methods of nn.Module that are refused ------------------------------------------------------------------------------

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Raise ValueError: the inner modules are on another worker. If an outer module calls, yield this module only."""
        if memo is None:
            _refuse("named_modules")
        return self._as_part(memo, prefix, remove_duplicate)

    def _as_part(
        self, memo: set[nn.Module], prefix: str, remove_duplicate: bool
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module for ``named_modules`` of the outer module, unless ``memo`` has this module."""
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self

    def register_backward_hook(self, hook: Any) -> RemovableHandle:
        """Raise ValueError: a hook of this old kind gets the gradients of one autograd node only."""
        _refuse("register_backward_hook", ": use ``register_full_backward_hook``")

    def extra_repr(self) -> str:
        """Return the text that ``repr`` shows."""
        return f"{self._what} on {self.on}/{self.device}"

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            _refuse("add_module", f": {name!r} would not be on the worker of the module")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__
        if name.startswith("__") or "on" not in known:
            raise AttributeError(name)
        raise AttributeError(
            f"RemoteModule has no attribute {name!r}. The module is on {known['on']!r}: its own methods are called with "
            f"get_module_rref().rpc_sync().{name}(...)"
        )

    # -- travelling -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> NoReturn:
        raise SerializationError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC; to save "
            "it, save its state_dict()"
        )

    def __setstate__(self, state: Any) -> NoReturn:
        raise SerializationError(
            "Cannot unpickle RemoteModule in python pickler. RemoteModule can only be unpickled when using RPC"
        )

    def __copy__(self) -> Self:
        return self._made(self.on, self.device, self.module_rref, self._what, self.training)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RRefError(
            f"a RemoteModule is a reference: deepcopy would not copy the module, which is on {self.on!r}; make a second "
            "RemoteModule there, and load the state_dict() of this one into the second"
        )


def _arguments(module_cls: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check the class and the arguments of a module, as far as possible on this worker; return the arguments."""
    if isinstance(module_cls, type) and not issubclass(module_cls, nn.Module):
        # A class that overrides ``__new__`` or its metaclass's ``__call__`` may return modules.
        if module_cls.__new__ is object.__new__ and type(module_cls).__call__ is type.__call__:
            raise ValueError(
                "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an "
                f"instance of {module_cls}."
            )
    elif not callable(module_cls):
        raise TypeError(
            f"module_cls must be a class of modules, or a function that returns a module, not {module_cls!r}"
        )
    if args is None:
        args = ()
    elif isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise WrongTypeError(f"args must be a tuple of arguments, not {type(args).__name__}: write args=(x,)")
    if kwargs is None:
        kwargs = {}
    elif not isinstance(kwargs, Mapping):
        raise WrongTypeError(f"kwargs must be a dict, not {type(kwargs).__name__}")
    return tuple(args), dict(kwargs)


def _refused(name: str) -> Callable[..., NoReturn]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        del self, args, kwargs
        _refuse(name)

    method.__name__, method.__qualname__ = name, f"RemoteModule.{name}"
    method.__doc__ = "Raise ValueError: a RemoteModule does not support this method of nn.Module."
    return method


for _name in (
    *("register_buffer", "register_parameter", "add_module", "register_module"),
    *("buffers", "named_buffers", "children", "named_children", "modules"),
    *("get_submodule", "set_submodule", "get_parameter", "get_buffer"),
    *("share_memory", "compile", "ipu", "xpu", "mtia", "_replicate_for_data_parallel"),
):
    setattr(RemoteModule, _name, _refused(_name))


# -- in messages --------------------------------------------------------------------------------------------------------

_STAYS: Final = frozenset(nn.Module().__dict__)
_TRAVELS: Final = frozenset({"on", "device", "module_rref", "_what"})


def _reduce(remote: RemoteModule) -> Any:
    if not isinstance(codec.current_encoding(), (MessageContext, LocalReferences)):
        remote.__getstate__()
    for name in remote.__dict__.keys() - _STAYS - _TRAVELS:
        warnings.warn(
            f"The new attribute ``{name}`` of RemoteModule is ignored during RPC pickling: on other workers it is missing",
            stacklevel=2,
        )
    return _rebuild, (
        type(remote),
        remote.on,
        remote.device,
        remote.module_rref,
        remote._what,
        remote.training,
    )


def _rebuild(
    cls: type[RemoteModule], on: str, device: str, rref: RRef[Any], what: str, training: bool
) -> RemoteModule:
    return cls._made(on, device, rref, what, training)


codec.register(RemoteModule, _reduce)
