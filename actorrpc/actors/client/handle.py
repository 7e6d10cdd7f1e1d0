"""Handles: references to actors, and the ways to call methods.

Methods are called in Ray's way, ``handle.method.remote(...)``, or in torch's way, ``handle.rpc_sync().method(...)``; both go
through the actor's mailbox. Methods of the user's class hide the handle's functions of the same name (``kill``, ``ready``);
therefore the package also has these functions (``actorrpc.kill(handle)``).

If the class is an nn.Module, ``handle.state_dict()`` calls the method in the actor and waits, as if the handle were the
module; :mod:`~actorrpc.rpc.modules` describes the replacements of results that cannot be sent.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    overload,
)

import torch
from torch import nn

from actorrpc._exceptions import say
from actorrpc.actors.client.route import shaped
from actorrpc.actors.context import runtime
from actorrpc.actors.refs import pickles
from actorrpc.actors.refs.object_ref import ObjectRef
from actorrpc.actors.spec.class_info import ClassInfo, MethodInfo, kind_of
from actorrpc.actors.spec.options import CallOptions
from actorrpc.errors import (
    ActorDiedError,
    ConfigError,
    PeerDiedError,
    RpcError,
    RpcTimeoutError,
    RRefError,
    SerializationError,
)
from actorrpc.futures import Future
from actorrpc.rpc import modules
from actorrpc.rpc.options import UNSET_RPC_TIMEOUT
from actorrpc.rpc.rref import RRef, with_calls
from actorrpc.serialization import codec
from actorrpc.serialization.local_refs import LocalReferences

if TYPE_CHECKING:
    from actorrpc.actors.client.actor_base import Actor
    from actorrpc.actors.client.route import Route, Routes
    from actorrpc.actors.spec.actor_spec import ActorDescriptor

__all__ = [
    "ActorHandle",
    "ActorMethod",
    "ActorProxy",
    "as_handle",
    "call",
    "gives_one",
    "is_alive",
    "is_direct",
    "kill",
    "monitor",
    "parameters",
    "ready",
    "route_of",
    "route_to",
    "run",
]

_DIRECT: Final = frozenset(
    {
        *("__call__", "parameters", "named_parameters", "state_dict", "load_state_dict", "train", "eval"),
        *("to", "to_empty", "cpu", "cuda", "type", "float", "double", "half", "bfloat16"),
        *("requires_grad_", "zero_grad", "apply"),
    }
)
_LISTED: Final = ("parameters", "named_parameters")


def is_direct(info: ClassInfo, method: MethodInfo) -> bool:
    """Say whether a method of a class can be called on a handle without ``remote``."""
    if not info.is_module or method.name not in _DIRECT:
        return False
    if method.name == "__call__":
        # An async forward returns a coroutine, which Module.__call__ would return instead of the output.
        forward = info.methods.get("forward")
        return method.kind == "sync" and (forward is None or forward.kind == "sync")
    return method.kind == "sync" or (method.kind == "generator" and method.name in _LISTED)


def run(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Call a method of a module. Runs in the actor.

    Returns:
        ``(True, None)`` if the method has returned the module itself: ``_call_directly`` then returns the handle. Otherwise
        False and the method's result, in which RRefs replace parameters, and the tensors of a ``state_dict`` are on the CPU.
    """
    if name == "state_dict":
        return False, modules.state_of(module, *args, **kwargs)
    found = getattr(module, name)(*args, **kwargs)
    if found is module:
        return True, None
    if name in _LISTED and isinstance(found, (Iterator, list, tuple)):
        found = [_reference(each) for each in found]
    return False, found


def _reference(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return RRef(item)
    if isinstance(item, tuple):
        return tuple(_reference(each) for each in item)
    return item


def parameters(module: nn.Module, recurse: bool = True) -> list[RRef[nn.Parameter]]:
    """Return RRefs to the parameters of a module. ``handle.remote_parameters()`` runs this function in the actor."""
    return modules.parameter_rrefs(module, recurse)


C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
A = TypeVar("A", bound="Actor")
R = TypeVar("R")
P = ParamSpec("P")
Out = TypeVar("Out")
F = TypeVar("F", bound=Callable[..., Any])
Style = Literal["rpc_sync", "rpc_async", "remote"]

_ANSWER_S: Final = 30.0  # how long kill() waits for the answer of the actor's supervisor

# For calls that read an attribute, run a function in the actor, or make an RRef to the instance. No method has such a name.
_GETATTR: Final = MethodInfo.anything("<getattr>", "getattr")
_CALL: Final = MethodInfo.anything("<call>", "call")
_RREF: Final = MethodInfo.anything("<rref>", "rref")


class _Doc:
    """The ``__doc__`` of a class: the given text on the class, the docstring of the actor's method on an instance."""

    __slots__ = ("_own",)

    def __init__(self, own: str) -> None:
        self._own = own

    def __get__(self, method: Any, owner: Any = None) -> str | None:
        if method is None:
            return self._own
        documented: str | None = getattr(method._descriptor.info.function(method._info.name), "__doc__", None)
        return documented


class _LikeItsMethod:
    """Base of objects that ``help()``, ``inspect.signature`` and shells show with the name and signature of an actor's method."""

    __slots__ = ()
    _descriptor: ActorDescriptor
    _info: MethodInfo

    @property
    def __name__(self) -> str:
        return self._info.name

    @property
    def __signature__(self) -> inspect.Signature:
        return self._info.shown(self._descriptor.info.function(self._info.name))

    def __get__(self, instance: object, owner: Any = None) -> Self:
        # help() shows an object that has a __get__() as a function: with name, signature and docstring.
        return self


def gives_one(info: MethodInfo, options: CallOptions) -> bool:
    """Say whether a call of the method returns exactly one ObjectRef."""
    return options.num_returns == 1 and not info.streams


class _RemoteCall(_LikeItsMethod):
    """``handle.method.remote``. It is not a bound method, because that would not show the signature of the actor's method."""

    __slots__ = ("_descriptor", "_info", "_options", "_route", "_sent", "_simple")
    __doc__ = _Doc("``handle.method.remote``.")

    def __init__(
        self, descriptor: ActorDescriptor, route: Route, info: MethodInfo, options: CallOptions
    ) -> None:
        self._descriptor = descriptor
        self._route = route
        self._info = info
        self._options = options
        # With num_returns=0 the call is sent with num_returns=1, and the caller gets no ObjectRef for its result.
        self._sent = options if options.num_returns else options.merged(num_returns=1)
        self._simple = gives_one(info, options)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        info = self._info
        signature = info.signature
        if kwargs or not signature.least <= len(args) <= signature.most:
            signature.check(args, kwargs)
        if self._simple:
            return ObjectRef(self._route.call(info, self._sent, args, kwargs, True))
        again = self._route.again(info, self._sent, args, kwargs)
        future = self._route.call(info, self._sent, args, kwargs, True)
        return shaped(future, info, self._options, self._route.explain, again)

    def __repr__(self) -> str:
        return f"<remote of {ActorMethod(self._descriptor, self._route, self._info, self._options)!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (ActorMethod(self._descriptor, self._route, self._info, self._options), "remote")


class ActorMethod(_LikeItsMethod, Generic[P, Out]):
    __doc__ = _Doc(
        """A method of an actor, on a handle. Thread-safe; keeps the actor alive if the handle does.

        For checkers, its type has the method's parameters and the return type of ``remote``. If this process has imported the
        actor's class, the object has the docstring and the signature of the method.
        """
    )

    def __init__(
        self, descriptor: ActorDescriptor, route: Route, info: MethodInfo, options: CallOptions
    ) -> None:
        self._descriptor = descriptor  # contains the anchor, if there is one, which keeps the actor alive
        self._route = route
        self._info = info
        self._options = options
        if not TYPE_CHECKING:
            self.remote = _RemoteCall(descriptor, route, info, options)

    if TYPE_CHECKING:

        def remote(self, *args: P.args, **kwargs: P.kwargs) -> Out:
            """Call the method."""
            raise AssertionError
    else:
        __slots__ = {
            "_descriptor": "",
            "_info": "",
            "_options": "",
            "_route": "",
            "remote": """Call the method; return an ObjectRef to its result at once.

            ObjectRefs among the arguments are replaced by their values before the method runs; ObjectRefs inside of
            containers are passed as they are.

            Returns:
                An ObjectRef; with ``num_returns`` above 1 a list of ObjectRefs, with 0 None; for a generator method, or with
                ``num_returns="streaming"``, an ObjectRefGenerator.

            Raises:
                TypeError: the method does not take these arguments. Nothing was sent.
                SerializationError: an argument cannot be sent.
                PendingCallsLimitExceeded: too many calls wait for the actor.
                RpcError: the call cannot be sent, for example because this worker has left its group.
            """,
        }

    @overload
    def options(self, *, num_returns: int | str, **options: Any) -> ActorMethod[P, Any]: ...
    @overload
    def options(self, **options: Any) -> ActorMethod[P, Out]: ...
    def options(self, **options: Any) -> ActorMethod[P, Any]:
        """Return the method with other options of its calls: see :class:`~actorrpc.actors.spec.options.CallOptions`.

        Raises:
            ConfigError: an option is unknown, or its value is wrong.
        """
        merged = self._options.merged(**options)
        _check_group(merged, self._descriptor)
        return ActorMethod(self._descriptor, self._route, self._info, merged)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call a method of an nn.Module that may be called directly, such as ``state_dict``, and wait for its result.

        Raises:
            TypeError: every other method must be called with ``remote``.
        """
        if is_direct(self._descriptor.info, self._info):
            return self._call_directly(args, kwargs)
        name = self._info.name
        raise TypeError(
            f"a method of an actor cannot be called directly: instead of handle.{name}(...) write handle.{name}.remote(...), "
            f"or handle.rpc_sync().{name}(...) to wait for the result"
        )

    def _call_directly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        info, options, route = self._info, self._options, self._route
        info.check(args, kwargs)
        if options.num_returns != 1:
            options = options.merged(num_returns=1)
        if info.name == "__call__":
            return route.call(info, options, args, kwargs, refs=False).wait()
        asked = (run, info.name, args, kwargs)
        options = options.merged(name=info.name)  # the name for error messages
        itself, value = route.call(_CALL, options, asked, {}, refs=False).wait()
        return ActorHandle(self._descriptor, route) if itself else value

    def __repr__(self) -> str:
        return f"<remote method {self._info.signature.title} of {self._descriptor.title}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorMethod._rebuild, (ActorHandle(self._descriptor, self._route), self._info, self._options)

    @staticmethod
    def _rebuild(handle: ActorHandle[Any], info: MethodInfo, options: CallOptions) -> ActorMethod[..., Any]:
        state = handle.__dict__
        return ActorMethod(state["_actorrpc_descriptor"], state["_actorrpc_route"], info, options)


def _check_group(options: CallOptions, descriptor: ActorDescriptor) -> None:
    group = options.concurrency_group
    if group is None or descriptor.options is None:
        return
    groups = descriptor.options.concurrency_groups or {}
    if group not in groups:
        raise ConfigError(
            f"{descriptor.title} has no concurrency group {group!r}; it has: {', '.join(map(repr, groups)) or 'none'}"
        )


# -- the handle -----------------------------------------------------------------------------------------------


class _Own:
    """A function or value that each handle has unless the user's class has a method of this name.

    This is not a data descriptor, so Python first searches the dict of the handle, which has the class's method of this name.
    """

    __slots__ = ("_function", "_is_value")

    def __init__(self, function: Callable[..., Any], is_value: bool = False) -> None:
        self._function = function
        self._is_value = is_value

    def __get__(self, handle: ActorHandle[Any] | None, owner: Any = None) -> Any:
        if handle is None:
            return self._function
        if self._function.__name__ in _OF_MODULES and not _descriptor(handle).info.is_module:
            raise AttributeError  # Python then calls __getattr__(), whose error message lists the methods
        return self._function(handle) if self._is_value else _OwnMethod(handle, self._function)


def _own(function: F) -> F:
    made: Any = _Own(function)
    return made  # type: ignore[no-any-return]


_OF_MODULES: Final = frozenset({"remote_parameters"})  # only handles of an nn.Module have these functions


class _OwnMethod:
    """A function of handles (such as ``kill``), bound to a handle."""

    __slots__ = ("_function", "_handle")

    def __init__(self, handle: ActorHandle[Any], function: Callable[..., Any]) -> None:
        self._handle = handle
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._handle, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        own = self._function.__name__
        if name == "remote":
            raise AttributeError(
                f"{_descriptor(self._handle).info.name} has no method {own!r}: this is a function of the handle, which is "
                f"called directly, as handle.{own}(...)"
            )
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"<{self._function.__name__} of {self._handle!r}>"


class _Calling:
    """``handle(...)`` and ``handle.__call__``. A descriptor, because Python looks up ``__call__`` on the type of the handle."""

    __slots__ = ()

    def __get__(self, handle: ActorHandle[Any] | None, owner: Any = None) -> Any:
        if handle is None:
            return self
        if "__call__" not in _descriptor(handle).info.methods:
            return _OwnMethod(handle, _not_callable)
        return handle.__dict__.get("__call__") or handle.__getattr__("__call__")


def _not_callable(handle: ActorHandle[Any], *_args: Any, **_kwargs: Any) -> Any:
    name = _descriptor(handle).info.name
    raise TypeError(
        f"{name} is not callable: it has no __call__; its methods are called as handle.method.remote(...)"
    )


_not_callable.__name__ = "__call__"  # for messages


class ActorHandle(Generic[C_co]):
    """A reference to an actor, usable on every worker. Thread-safe.

    ``handle.method.remote(...)`` calls a method and returns an ObjectRef; ``handle.rpc_sync().method(...)`` waits for the
    result, ``handle.rpc_async().method(...)`` returns a Future. All calls go through the actor's mailbox.
    ``handle.rpc_sync().attribute`` reads an attribute.

    Unless the class has methods of these names, a handle also has ``rpc_sync``, ``rpc_async``, ``remote``, ``options``
    (the same handle with other options of its calls), ``rref`` (torch's reference to the instance), ``actor_id``, and
    the package's functions of handles: ``ready``, ``is_alive``, ``kill``, ``monitor``, ``call``.

    If the class is an ``nn.Module``, ``handle(x)`` calls the module and waits. Methods of modules can also be called without
    ``remote``, and wait: ``train``, ``eval``, ``to`` and the other conversions, ``requires_grad_``, ``zero_grad`` and ``apply``,
    which return the handle; ``state_dict`` (copies on the CPU) and ``load_state_dict``; ``parameters`` and
    ``named_parameters``, which return RRefs in place of the parameters, as does ``remote_parameters``, which only handles have.
    Such an RRef keeps a parameter alive, not the actor: the RRef is useless when the actor's process has ended, or the actor
    was restarted. ``handle(x)``, and ``handle.__call__.remote(x)``, which does not wait, run the hooks of the module;
    ``handle.forward.remote(x)`` does not run them.

    The actor ends when no process has a handle any more (a detached actor: when it is killed); handles from
    :func:`actorrpc.get_actor` do not count. Handles of the same actor are equal, and can be sent in arguments and results.

    All workers of the group can load pickles of a handle (of ``pickle``, ``cloudpickle`` or ``torch.save``). A pickle does not
    keep the actor alive: keep a handle until the pickle was loaded. Loading raises an error outside of the group; loading a
    handle that keeps the actor alive waits for the actor's supervisor, and raises ActorDiedError after the actor's end.
    """

    _is_actor_handle = True  # read by modules that cannot import this module

    def __init__(
        self, descriptor: ActorDescriptor, route: Route, given: dict[str, Any] | None = None
    ) -> None:
        state = self.__dict__
        state["_actorrpc_descriptor"] = descriptor
        state["_actorrpc_route"] = route
        state["_actorrpc_given"] = given
        methods = descriptor.info.methods
        if not _OWN.isdisjoint(methods):
            for name in _OWN.intersection(methods):
                # __getattr__() stores the method in the dict, where Python finds it before the handle's function.
                self.__getattr__(name)

    @_own
    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> C_co:
        """Return a proxy whose methods call the actor's methods, wait up to ``timeout`` seconds, and return the results."""
        proxy: Any = ActorProxy(self, "rpc_sync", timeout)
        return proxy  # type: ignore[no-any-return]

    @_own
    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods call the actor's methods and return Futures, which fail after ``timeout`` seconds."""
        return ActorProxy(self, "rpc_async", timeout)

    @_own
    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy whose methods call the actor's methods and return ObjectRefs, which fail after ``timeout`` seconds."""
        return ActorProxy(self, "remote", timeout)

    @_own
    def options(self, **options: Any) -> ActorHandle[C_co]:
        """Return the same handle with other options of its calls."""
        state = self.__dict__
        descriptor, given = (
            state["_actorrpc_descriptor"],
            {**(state["_actorrpc_given"] or {}), **CallOptions.check(options)},
        )
        _check_group(CallOptions(**given), descriptor)
        return ActorHandle(descriptor, state["_actorrpc_route"], given)

    @_own
    def ready(self) -> ObjectRef[None]:
        """See :func:`actorrpc.ready`."""
        return ready(self)

    @_own
    def is_alive(self, timeout: float = 10.0) -> bool:
        """See :func:`actorrpc.is_alive`."""
        return is_alive(self, timeout)

    @_own
    def kill(self, *, no_restart: bool = True) -> None:
        """See :func:`actorrpc.kill`."""
        kill(self, no_restart=no_restart)

    @_own
    def monitor(self, callback: Callable[[ActorDiedError], Any] | None = None) -> Future[ActorDiedError]:
        """See :func:`actorrpc.monitor`."""
        return monitor(self, callback)

    @_own
    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> ObjectRef[Any]:
        """See :func:`actorrpc.call`."""
        return call(self, function, *args, **kwargs)

    @_own
    def remote_parameters(self: ActorHandle[nn.Module], recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return RRefs to the parameters of the module, each once. Only handles of an nn.Module have this function."""
        found: list[RRef[nn.Parameter]] = _send(
            self, "rpc_sync", UNSET_RPC_TIMEOUT, _CALL, (parameters,), {"recurse": recurse}
        )
        return found

    if TYPE_CHECKING:
        actor_id: int
        rref: RRef[C_co]

        # If the class is an nn.Module, `handle(x)` calls the module and waits.
        __call__: ActorMethod[..., Any]

        # With this type, checkers do not check arguments and results; actorrpc.mypy_plugin gives methods their full types.
        def __getattr__(self, name: str) -> ActorMethod[..., Any]: ...

    else:
        __call__ = _Calling()

        @partial(_Own, is_value=True)
        def actor_id(self):
            """The number of the actor, which is unique in the group."""
            return _descriptor(self).actor_id

        @partial(_Own, is_value=True)
        def rref(self):
            """An RRef to the instance, for code with torch's RPC. The first access, also after a restart, waits for the actor."""
            return _rref(self)

        def __getattr__(self, name):
            state = self.__dict__
            descriptor = state.get("_actorrpc_descriptor")
            # The attribute is missing if __init__() was not called, for example after ActorHandle.__new__(ActorHandle).
            if descriptor is None:
                raise AttributeError(name)
            info = descriptor.info.methods.get(name)
            if info is not None:
                # The ActorMethod refers to the route, not to the handle: a cycle would keep the handle, and so the actor, alive.
                options = _options_of(descriptor, info, state["_actorrpc_given"])
                found = state[name] = ActorMethod(descriptor, state["_actorrpc_route"], info, options)
                return found
            raise AttributeError(_missing(descriptor, name))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"cannot set {name!r} on a handle: the actor is elsewhere; give {_descriptor(self).info.name} a method for "
            f"it, or use actorrpc.call(handle, setattr, {name!r}, value)"
        )

    def __dir__(self) -> list[str]:
        info = _descriptor(self).info
        return sorted({*info.methods, *(_OWN if info.is_module else _OWN - _OF_MODULES)})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActorHandle):
            return NotImplemented
        return _descriptor(self).actor_id == _descriptor(other).actor_id

    def __hash__(self) -> int:
        return hash(_descriptor(self).actor_id)

    def __repr__(self) -> str:
        descriptor = _descriptor(self)
        named = f" {descriptor.name!r}" if descriptor.name else ""
        return f"<ActorHandle of {descriptor.info.name}{named} {descriptor.actor_id:016x}>"

    def __copy__(self) -> ActorHandle[C_co]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ActorHandle[C_co]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Only for pickles that the program makes itself; for messages, the codec calls _reduce().
        descriptor = _descriptor(self)
        address = pickles.here() if descriptor.anchor is None else pickles.address_of(descriptor.anchor)
        return _load, (
            address,
            replace(descriptor, anchor=None, location=None),
            self.__dict__["_actorrpc_given"],
        )


_OWN: Final = frozenset(name for name, each in vars(ActorHandle).items() if isinstance(each, _Own))


def _descriptor(handle: ActorHandle[Any]) -> ActorDescriptor:
    descriptor: ActorDescriptor = handle.__dict__["_actorrpc_descriptor"]
    return descriptor


def _options_of(descriptor: ActorDescriptor, info: MethodInfo, given: dict[str, Any] | None) -> CallOptions:
    options = info.options if descriptor.options is None else info.options_of(descriptor.options.for_calls())
    return options.merged(**given) if given else options


def _missing(descriptor: ActorDescriptor, name: str) -> str:
    methods = [each for each in descriptor.info.methods if not each.startswith("_")]
    close = difflib.get_close_matches(name, [*descriptor.info.methods, *_OWN], n=3)
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    else:
        hint = f"its methods are: {', '.join(methods[:20]) or 'none'}"
    return f"{descriptor.info.name} has no method {name!r}; {hint} (attributes are read with handle.rpc_sync().{name})"


# -- sending handles -------------------------------------------------------------------------------------------------


def _reduce(handle: ActorHandle[Any]) -> tuple[Any, ...]:
    context = codec.current_encoding()
    if isinstance(context, LocalReferences):
        return context.hold(handle)
    descriptor = _descriptor(handle)
    if context is None and descriptor.anchor is not None:
        raise SerializationError(
            f"{handle!r} can only be sent in the arguments and results of calls, and not with an exception: give the actor a "
            "name= and find it with actorrpc.get_actor()"
        )
    state = handle.__dict__
    # The descriptor contains the anchor, an RRef. Sending the anchor registers a reference of the receiver to the actor.
    return _rebuild, (state["_actorrpc_route"].descriptor, state["_actorrpc_given"])


def _rebuild(descriptor: ActorDescriptor, given: dict[str, Any] | None = None) -> ActorHandle[Any]:
    routes: Routes = runtime().routes
    return ActorHandle(descriptor, routes.of(descriptor), given)


def _load(
    address: pickles.Address | pickles.GroupIdentity,
    descriptor: ActorDescriptor,
    given: dict[str, Any] | None,
) -> ActorHandle[Any]:
    """Rebuild a handle that a program has pickled by itself (wire format). ``address``: of the actor, or only of its group.

    Raises:
        ActorDiedError: the actor has ended.
        NotInitializedError, SerializationError, RpcTimeoutError: as :func:`pickles.find`.
    """
    what = f"a handle of {descriptor.title}"
    if isinstance(address, pickles.GroupIdentity):
        pickles.enter(address, what)
    else:
        try:
            descriptor = descriptor.held_by(pickles.find(address, what))
        except (RRefError, PeerDiedError) as error:
            raise ActorDiedError(
                f"{descriptor.title} has ended: {error}",
                maybe_executed=False,
                worker=descriptor.supervisor_name,
                actor=descriptor.title,
                actor_id=descriptor.actor_id,
            ) from None
    return _rebuild(descriptor, given)


codec.register(ActorHandle, _reduce)


# -- calls in torch's style ---------------------------------------------------------------------------------------------


class ActorProxy:
    """The return value of ``handle.rpc_sync()``, ``rpc_async()`` and ``remote()``: its methods call the actor. Thread-safe.

    An attribute that is not a method of the class is read from the user's instance: ``rpc_sync`` gives its value, ``rpc_async`` a
    Future, ``remote`` an ObjectRef. A method of a proxy can be sent, and is then called like a function.
    """

    __slots__ = ("_actorrpc_handle", "_actorrpc_style", "_actorrpc_timeout")

    def __init__(self, handle: ActorHandle[Any], style: Style, timeout: float) -> None:
        self._actorrpc_handle = handle
        self._actorrpc_style: Style = style
        self._actorrpc_timeout = timeout
        if timeout != UNSET_RPC_TIMEOUT:
            CallOptions.check({"timeout": timeout})

    def __getattr__(self, name: str) -> Any:
        handle = self._actorrpc_handle
        if name in _descriptor(handle).info.methods:
            return _ProxyMethod(handle, self._actorrpc_style, self._actorrpc_timeout, name)
        if (name.startswith("__") and name.endswith("__")) or name.startswith(("_ipython_", "_repr_")):
            raise AttributeError(name)  # Python and tools look up such names on every object
        return _send(handle, self._actorrpc_style, self._actorrpc_timeout, _GETATTR, (name,), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the ``__call__`` of the user's instance."""
        handle = self._actorrpc_handle
        if "__call__" not in _descriptor(handle).info.methods:
            raise TypeError(f"{_descriptor(handle).info.name} is not callable: it has no __call__")
        return _ProxyMethod(handle, self._actorrpc_style, self._actorrpc_timeout, "__call__")(*args, **kwargs)

    def __dir__(self) -> list[str]:
        return sorted(_descriptor(self._actorrpc_handle).info.methods)

    def __repr__(self) -> str:
        return f"<{self._actorrpc_style} proxy of {self._actorrpc_handle!r}>"


class _ProxyMethod:
    """A method of a proxy. Its pickle contains the handle, so it can be sent."""

    __slots__ = ("_handle", "_name", "_style", "_timeout")

    def __init__(self, handle: ActorHandle[Any], style: Style, timeout: float, name: str) -> None:
        self._handle = handle
        self._style: Style = style
        self._timeout = timeout
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _ProxyMethod, (self._handle, self._style, self._timeout, self._name)

    def __repr__(self) -> str:
        return f"<{self._style} method {self._name} of {self._handle!r}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        info = _descriptor(self._handle).info.methods[self._name]
        info.check(args, kwargs)
        return _send(self._handle, self._style, self._timeout, info, args, kwargs)


def _call_of_rref(
    handle: ActorHandle[Any],
    style: Style,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
) -> Any:
    """Make a call of an actor's RRef, ``rref.rpc_sync().name(...)``, like a call of a handle: through the mailbox."""
    info = _descriptor(handle).info.methods.get(name)
    if info is None:  # an attribute that is callable
        info, args, kwargs = _CALL, (_call_attribute, name, args, kwargs), {}
    else:
        info.check(args, kwargs)
    return _send(handle, "rref" if style == "remote" else style, timeout, info, args, kwargs)


def _call_attribute(instance: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an attribute of an instance, in the actor."""
    return getattr(instance, name)(*args, **kwargs)


def _send(
    handle: ActorHandle[Any],
    style: Style | Literal["rref"],
    timeout: float,
    info: MethodInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    state = handle.__dict__
    descriptor, route = state["_actorrpc_descriptor"], state["_actorrpc_route"]
    known = state.get(info.name)
    if known is None and info.name in descriptor.info.methods:
        known = handle.__getattr__(info.name)
    # Use the same options object for all calls of the method, because the route keeps a template for this object.
    options = known._options if known is not None else _options_of(descriptor, info, state["_actorrpc_given"])
    seconds = None if timeout == UNSET_RPC_TIMEOUT else timeout
    if style == "remote" or info.streams or options.num_returns == "streaming":
        again = route.again(info, options, args, kwargs)
        future = route.call(info, options, args, kwargs, refs=True, timeout=seconds)
        return shaped(future, info, options, route.explain, again)
    if options.num_returns != 1:
        # Torch has no num_returns: a proxy returns the value as it is.
        options = options.merged(num_returns=1)
    if style == "rref":
        return route.keep(info, options, args, kwargs, seconds)
    future = route.call(info, options, args, kwargs, refs=False, timeout=seconds)
    return future.wait() if style == "rpc_sync" else future


def _rref(handle: ActorHandle[Any]) -> Any:
    found = handle.__dict__.get("_actorrpc_rref")
    if found is not None:
        try:
            found._check()
        except RpcError:
            found = None  # this RRef is to an incarnation of the actor that has ended
    if found is None:
        found = _send(handle, "rpc_sync", UNSET_RPC_TIMEOUT, _RREF, (), {})
        state = handle.__dict__
        # A separate handle: a reference cycle would keep `handle`, and so the actor, until the next garbage collection.
        own: ActorHandle[Any] = ActorHandle(
            state["_actorrpc_descriptor"], state["_actorrpc_route"], state["_actorrpc_given"]
        )
        with_calls(found, partial(_call_of_rref, own))
        state["_actorrpc_rref"] = found
    return found


# -- functions that take a handle -------------------------------------------------------------------------------


def as_handle(given: Any, what: str) -> ActorHandle[Any]:
    """Return ``given`` if it is a handle. ``what``: the function that has the argument ``given``, for the error message.

    Raises:
        TypeError: ``given`` is not a handle.
    """
    if isinstance(given, ActorHandle):
        return given
    hint = ""
    if isinstance(given, ObjectRef):
        hint = "; a call is cancelled with cancel(ref)"
    elif isinstance(given, ActorMethod):
        hint = ", and this is one of its methods"
    raise TypeError(f"{what} takes the handle of an actor, not a {type(given).__name__}{hint}")


def route_of(handle: ActorHandle[Any]) -> Route:
    """Return the route of a handle."""
    route: Route = handle.__dict__["_actorrpc_route"]
    return route


def route_to(given: Any, what: str) -> Route:
    """Return the route of a handle, after :func:`as_handle` has checked it."""
    return route_of(as_handle(given, what))


def ready(actor: ActorHandle[Any] | Actor) -> ObjectRef[None]:
    """Return an ObjectRef that completes, with None, when the actor's constructor has returned.

    The ObjectRef fails with ActorDiedError if the actor is dead or cannot be made; an error of the constructor is the cause.
    """
    located: Future[Any] = route_to(actor, "ready()").located()

    def nothing(done: Future[Any]) -> None:
        done.value()

    return ObjectRef(located.then(nothing), label=f"ready({actor!r})")


def is_alive(actor: ActorHandle[Any] | Actor, timeout: float = 10.0) -> bool:
    """Say whether the actor lives, or is being made or restarted. Does not wait for the actor's calls.

    Args:
        timeout: how many seconds the actor's supervisor may take to answer; without an answer, the actor counts as dead.
    """
    asked: Future[bool] = route_to(actor, "is_alive()").alive()
    try:
        return asked.wait(timeout)
    except RpcTimeoutError:
        return False


def monitor(
    actor: ActorHandle[Any] | Actor, callback: Callable[[ActorDiedError], Any] | None = None
) -> Future[ActorDiedError]:
    """Watch an actor: the returned future completes when the actor is dead for good, not when it restarts.

    The future does not keep the actor alive.

    Args:
        callback: called with the ActorDiedError, in a pool thread or in the thread that calls ``kill`` or ``monitor``.

    Returns:
        A Future whose value is the ActorDiedError.
    """
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be callable, not a {type(callback).__name__}")
    watched: Future[ActorDiedError] = route_to(actor, "monitor()").watch()
    if callback is not None:
        notify = callback
        watched.add_done_callback(lambda done: notify(done.value()))
    return watched


def kill(actor: ActorHandle[Any] | Actor, *, no_restart: bool = True) -> None:
    """End an actor at once: its running and waiting calls fail, or are repeated after a restart if they may be. Idempotent.

    If the actor has a process of its own, its hooks (``on_stop``, ``__del__``) do not run.

    Args:
        no_restart: True ends the actor for good, whatever its ``max_restarts``; False restarts the actor as after a failure.

    Raises:
        RpcError: the actor's supervisor does not answer within 30 s.
    """
    asked = route_to(actor, "kill()").kill(no_restart)
    asked.wait(_ANSWER_S)


@overload
def call(
    actor: ActorHandle[C], function: Callable[Concatenate[C, P], R], /, *args: P.args, **kwargs: P.kwargs
) -> ObjectRef[R]: ...
@overload
def call(
    actor: A, function: Callable[Concatenate[A, P], R], /, *args: P.args, **kwargs: P.kwargs
) -> ObjectRef[R]: ...
def call(actor: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run ``function(instance, *args, **kwargs)`` inside an actor, through its mailbox; return an ObjectRef at once.

    ``call(handle, getattr, "x")`` reads an attribute, ``call(handle, setattr, "x", 1)`` sets it.

    Raises:
        TypeError: ``function`` is not callable, or is a coroutine function or generator function.
        SerializationError: the function, or an argument, cannot be sent.
    """
    as_handle(actor, "call()")
    if not callable(function):
        raise TypeError(f"call() takes a function, not {say(function, repr)}")
    kind = kind_of(function)
    if kind != "sync":
        what = "a coroutine" if kind == "async" else "a generator"
        raise TypeError(
            f"call() takes a plain function, and {getattr(function, '__qualname__', function)} only returns {what}: make it a "
            "method of the class"
        )
    return _send(actor, "remote", UNSET_RPC_TIMEOUT, _CALL, (function, *args), kwargs)
