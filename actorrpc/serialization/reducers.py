"""Reducers for objects that neither pickle nor cloudpickle sends.

Messages use ``SCRIPT_REDUCERS``, for TorchScript. A script function that the peer can import is sent by the name that it has
in its module, like other functions. Any other script function is sent as the archive that `torch.jit.save` writes, and arrives as
a script module with the same arguments. Script modules are always sent as an archive.

:class:`ByValuePickler` calls all other reducers here, for objects that receivers cannot import, of the main module or of a module
registered for pickling by value:

* instances of subclasses of ``ModuleType`` (``torch.ops``, ``torch.backends``, configuration modules) are sent by name, after
  checking that the name gives the same object; torch's operators are sent by name;
* ``NewType``, ``ParamSpec``, ``TypeVarTuple``, ``ForwardRef``, aliases of the ``type`` statement, ``lru_cache``,
  ``cached_property``, ``partialmethod``, ``singledispatch``, ``singledispatchmethod``, functions that ``torch.compile`` or
  ``torch.compiler.disable`` wrapped, and custom operators are sent as the arguments from which they were made, and the receiver
  makes them again. The contents of caches and compiled code, and the variables that a ``ForwardRef`` of Python 3.14 refers to,
  are not sent.

Functions whose docstring ends with "(wire format)" are named in pickles. This module has no lock. Its only state is ``_values``,
with an entry for each ``type`` alias while it is unpickled. cloudpickle has a table of the ``NewType`` and similar objects that
were sent or made, and torch registers custom operators.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import pkgutil
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Final, cast

import torch
from cloudpickle import cloudpickle as _cloudpickle

from actorrpc import _torch

__all__ = [
    "DESCRIPTORS",
    "REDUCERS",
    "SCRIPT_REDUCERS",
    "complete_model",
    "reduce_descriptor",
    "reduce_function",
    "reduce_module",
]

_Reduced = tuple[Any, ...]

# -- TorchScript ----------------------------------------------------------------------------------------


def _load_script(archive: bytes) -> Any:
    """Load a script module, or function, from its archive (wire format)."""
    return torch.jit.load(io.BytesIO(archive), map_location="cpu")


def _reduce_script_function(function: Any) -> _Reduced:
    # The name is `__torch__.package.module.name`, or `__torch__.name` for a function of the main module.
    module, _, name = function.qualified_name.removeprefix("__torch__.").rpartition(".")
    if getattr(sys.modules.get(module), name, None) is function:
        return pkgutil.resolve_name, (f"{module}:{name}",)
    return _load_script, (bytes(function.save_to_buffer()),)


def _reduce_script_module(module: Any) -> _Reduced:
    return _load_script, (bytes(module.save_to_buffer()),)


#: The reducer of each class of TorchScript.
SCRIPT_REDUCERS: Final[dict[type, Callable[[Any], _Reduced]]] = {
    torch.jit.ScriptFunction: _reduce_script_function,
    # These classes are not in torch.jit.__all__.
    **{
        getattr(torch.jit, name): _reduce_script_module
        for name in ("RecursiveScriptModule", "TopLevelTracedModule")
    },
}


# -- modules and operators of torch, by name -----------------------------------------------------------


def reduce_module(module: ModuleType, is_sent_by_value: Callable[[str], bool]) -> _Reduced:
    """Reduce an instance of a subclass of ``ModuleType`` to a name.

    Args:
        is_sent_by_value: returns whether objects of the module with this name are sent by value, because the module is the main
            module or was registered for it.

    Raises:
        PicklingError: the object is neither an importable module nor an attribute of an importable module.
    """
    for name in _names_of(module, is_sent_by_value):
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError):
            continue
        if found is module:
            return pkgutil.resolve_name, (name,)
    raise pickle.PicklingError(
        f"cannot pickle the {type(module).__qualname__} {module.__name__!r}: no module has it under a name by which the receiver "
        "could import it"
    )


def _names_of(module: ModuleType, is_sent_by_value: Callable[[str], bool]) -> Iterator[str]:
    """Yield names under which an object may be found, as ``module:attribute``; the likely names first."""
    own = str(module.__name__)
    yield f"{own}:"
    parent, _, last = own.rpartition(".")
    if parent in sys.modules:
        yield f"{parent}:{last}"
    importable = [
        (name, each)
        for name, each in sys.modules.copy().items()
        if isinstance(each, ModuleType) and not is_sent_by_value(name)
    ]
    yield from (f"{name}:" for name, each in importable if each is module)
    for name, each in importable:
        for attribute, value in vars(each).copy().items():
            if value is module:
                yield f"{name}:{attribute}"


def _reduce_operator(operator: _torch.OpOverload | _torch.OpOverloadPacket) -> _Reduced:
    if isinstance(operator, _torch.OpOverload):
        name, overload = _torch.overload_name(operator)
    else:
        name, overload = _torch.packet_name(operator), None
    return make_operator, (name, overload, _torch.custom_operators.get(name))


def make_operator(name: str, overload: str | None, _custom: Any) -> Any:
    """Return an operator of ``torch.ops`` (wire format).

    ``_custom`` is not used: when it was unpickled before this call, the custom operator was registered in this process.
    """
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator)
    return packet if overload is None else getattr(packet, overload)


def _reduce_custom_operator(op: Any) -> _Reduced:
    name, schema, function, made, fake, vmap, backward, setup, by_class = _torch.custom_operator_parts(op)
    kernels = {device: _variable(inspect.unwrap(each), "fn") for device, each in made.items()}
    tags = (getattr(op, _torch.OPERATOR_TAGS),) if hasattr(op, _torch.OPERATOR_TAGS) else ()
    return make_custom_operator, (
        name,
        (schema, function, *tags),
        kernels,
        {"register_fake": fake and (fake,), "register_vmap": vmap and (vmap,)},
        (backward, setup),
        (by_class, getattr(op, _torch.OPERATOR_AUTOCAST, {})),
    )


def make_custom_operator(
    name: str,
    made_of: tuple[Any, ...],
    kernels: Mapping[str | None, Callable[..., Any]],
    registered: Mapping[str, tuple[Any, ...] | None],
    gradient: tuple[Any, Any],
    by_key: tuple[Mapping[Any, Any], Mapping[Any, Any]],
) -> Any:
    """Return the custom operator of this name; register it first if this process does not have it (wire format)."""
    found = _torch.custom_operators.get(name)
    if found is not None:
        return found
    namespace, _, short = name.partition("::")
    made = _torch.CustomOpDef(namespace, short, *made_of)
    for device, kernel in kernels.items():
        made.register_kernel(device)(kernel)
    for method, arguments in registered.items():
        if arguments is not None:
            getattr(made, method)(*arguments)
    backward, setup_context = gradient
    if backward is not None:
        made.register_autograd(backward, setup_context=setup_context)
    dispatchers, autocast = by_key
    for cls, function in dispatchers.items():
        made.register_torch_dispatch(cls, function)
    for device, dtype in autocast.items():
        made.register_autocast(device, dtype)
    return made


# -- objects of typing ---------------------------------------------------------------------------------

_PARAMETERS: Final = ("bound", "covariant", "contravariant", "infer_variance")


def complete_model(cls: type) -> None:
    """Make pydantic finish a model class whose annotations it could not resolve when the class was made.

    The first use of the class would finish it, too. But pickles of unfinished models cannot be loaded, and the receiver does not
    have the names that the annotations mention.
    """
    if vars(cls).get("__pydantic_complete__") is False and hasattr(cls, "model_rebuild"):
        cls.model_rebuild(raise_errors=False)


def _reduce_type_parameter(parameter: Any) -> _Reduced:
    options = {
        name: getattr(parameter, f"__{name}__") for name in _PARAMETERS if hasattr(parameter, f"__{name}__")
    }
    if getattr(parameter, "has_default", bool)():
        options["default"] = parameter.__default__
    return _tracked(parameter, type(parameter), (parameter.__name__,), options)


def _reduce_new_type(found: Any) -> _Reduced:
    return _tracked(found, typing.NewType, (found.__qualname__, found.__supertype__), {})


def _reduce_forward_reference(found: Any) -> _Reduced:
    name = getattr(found, "__resolved_str__", found.__forward_arg__)
    options = {key: getattr(found, f"__forward_{key}__") for key in ("module", "is_argument", "is_class")}
    return functools.partial(typing.ForwardRef, name, **options), ()


def _tracked(obj: Any, make: type, args: tuple[Any, ...], options: dict[str, Any]) -> _Reduced:
    return make_tracked, (_cloudpickle._get_or_create_tracker_id(obj), make, args, options, obj.__module__)


def make_tracked(id: str, make: Any, args: tuple[Any, ...], options: dict[str, Any], module: str) -> Any:
    """Return the object that this process made earlier from the same original; make it if there is none (wire format)."""
    made = make(*args, **options)
    made.__module__ = module
    return _cloudpickle._lookup_class_or_track(id, made)


if sys.version_info >= (3, 12):
    _values: Final[dict[int, list[Any]]] = {}  # by id of an alias that is being made

    def _reduce_type_alias(alias: typing.TypeAliasType) -> _Reduced:
        if alias.__type_params__ or not alias.__name__.isidentifier():
            options = {"type_params": alias.__type_params__}
            return functools.partial(typing.TypeAliasType, alias.__name__, alias.__value__, **options), ()
        # The value of an alias for nested data contains the alias, so it is sent after the alias.
        return make_type_alias, (alias.__name__,), (alias.__value__,), None, None, fill_type_alias

    def make_type_alias(name: str) -> Any:
        """Make a ``type`` alias without a value, for :func:`fill_type_alias` (wire format)."""
        value: list[Any] = []
        space: dict[str, Any] = {}
        exec(f"type {name} = value[0]", {"value": value}, space)
        _values[id(space[name])] = value
        return space[name]

    def fill_type_alias(made: Any, state: tuple[Any]) -> None:
        """Set the value of a ``type`` alias (wire format)."""
        _values.pop(id(made)).extend(state)


# -- objects of functools ------------------------------------------------------------------------------

_OF_CACHES: Final = frozenset({"__wrapped__", "cache_parameters"})  # lru_cache sets them


def _reduce_lru_cache(cache: Any) -> _Reduced:
    parameters = cache.cache_parameters()
    attributes = {name: value for name, value in vars(cache).items() if name not in _OF_CACHES}
    return make_lru_cache, (cache.__wrapped__, parameters["maxsize"], parameters["typed"]), attributes


def make_lru_cache(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    """Make an empty cache around a function (wire format)."""
    return functools.lru_cache(maxsize, typed)(function)


def reduce_descriptor(found: Any) -> _Reduced:
    """Reduce an instance of one of ``DESCRIPTORS`` to its class and its attributes."""
    base = next(base for base in DESCRIPTORS if isinstance(found, base))
    state = {name: value for name, value in vars(found).items() if name not in _NOT_SENT}
    return make_descriptor, (type(found), base), state, None, None, fill_descriptor


def make_descriptor(kind: Any, base: Any) -> Any:
    """Make a descriptor with the attributes that are not sent (wire format)."""
    made = object.__new__(kind)
    vars(made).update(vars(base(bool)))
    return made


def fill_descriptor(made: Any, state: dict[str, Any]) -> None:
    """Set the attributes of a descriptor (wire format)."""
    vars(made).update(state)


# A lock in Python 3.11, and a cache of functions in Python 3.12 and 3.13.
_NOT_SENT: Final = ("lock", "_method_cache")
DESCRIPTORS: Final[Any] = (functools.cached_property, functools.partialmethod, functools.singledispatchmethod)
"""Classes whose instances, and instances of their subclasses, :func:`reduce_descriptor` reduces."""

REDUCERS: Final[dict[type, Callable[[Any], _Reduced]]] = {
    _torch.CustomOpDef: _reduce_custom_operator,
    _torch.OpOverload: _reduce_operator,
    _torch.OpOverloadPacket: _reduce_operator,
    type(functools.lru_cache(bool)): _reduce_lru_cache,
    typing.ForwardRef: _reduce_forward_reference,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_type_parameter,
    typing.TypeVarTuple: _reduce_type_parameter,
}
"""Reducers that are called only if the receiver cannot import the object under its module and name."""
if sys.version_info >= (3, 12):
    REDUCERS[typing.TypeAliasType] = _reduce_type_alias

# -- functions made by decorators ----------------------------------------------------------------------

_DISPATCHER: Final = cast(FunctionType, functools.singledispatch(bool)).__code__


def reduce_function(function: FunctionType) -> _Reduced | None:
    """Reduce a function of ``singledispatch``, ``torch.compile`` or ``torch.compiler.disable``; None for any other function."""
    if function.__code__ is _DISPATCHER:
        found: Any = function
        state = dict(found.registry), found.__wrapped__
        return make_dispatcher, (function.__name__,), state, None, None, fill_dispatcher
    own = function.__dict__
    if own and own.get(_torch.WRAPPER_ID) == id(function):
        context = _variable(own.get("get_compiler_config", function), "self")
        return apply_context, (context, own[_torch.WRAPPED])
    return None


def _variable(function: FunctionType, name: str) -> Any:
    """Return the value of a captured variable of a function."""
    assert function.__closure__ is not None
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def make_dispatcher(name: str) -> Any:
    """Make a ``singledispatch`` function without implementations, for :func:`fill_dispatcher` (wire format)."""

    def placeholder(_arg: object) -> None:
        """The default implementation until :func:`fill_dispatcher` replaces it."""

    placeholder.__name__ = name
    return functools.singledispatch(placeholder)


def fill_dispatcher(made: Any, state: tuple[dict[type, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Register the functions of a ``singledispatch`` function (wire format)."""
    registry, wrapped = state
    for cls, function in registry.items():
        made.register(cls, function)
    functools.update_wrapper(made, wrapped)


def apply_context(context: Callable[[Any], Any], function: Any) -> Any:
    """Wrap a function with the context of ``torch.compile`` or ``torch.compiler.disable`` (wire format)."""
    return context(function)
