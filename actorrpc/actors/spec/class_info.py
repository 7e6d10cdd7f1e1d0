"""What callers know about an actor's class: its methods, their arguments, and how they are called.

A :class:`ClassInfo` is sent with every handle, so that wrong calls raise at the caller, even if it cannot import the class. It
does not contain default values and annotations, and is usually sent compressed.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import re
import sys
import types
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from torch import nn

from actorrpc._python import signature_of
from actorrpc.actors.spec.options import CallOptions
from actorrpc.errors import ConfigError, SerializationError
from actorrpc.serialization.class_cache import ClassCache
from actorrpc.validation import flag

__all__ = ["BASE", "ClassInfo", "Kind", "MethodInfo", "Signature", "kind_of", "mark_method"]

Kind = Literal["sync", "async", "generator", "async_generator"]

_MARK: Final = "__actorrpc_method__"
_THREADED: Final = "__actorrpc_threaded__"
_ARGUMENT: Final = re.compile(r"argument (?:(\d+)|'([^']*)')(.*)", re.DOTALL).fullmatch
#: The name of an attribute that only :class:`actorrpc.Actor` defines, and no subclass.
BASE: Final = "__actorrpc_base__"
#: The name of the class that runs tasks. It contains a space, so no user's class can have it.
TASKS: Final = "task worker"
#: The name, in errors, of the first argument of the method that runs a task.
THE_FUNCTION: Final = "the function"
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


# -- signatures -------------------------------------------------------------------------------------------


class Signature:
    """The arguments that a function accepts, and Python's errors for other arguments. Immutable.

    Args:
        title: the function's name in Python's errors.
        positional: the names of the arguments that may be given by position.
        only: how many of ``positional`` must not be given by name.
        required: how many of ``positional`` have no default.
        keyword: the names of the keyword-only arguments, and whether each is required.
        varargs, varkw: whether there are ``*args`` and ``**kwargs``.
        bound: how many first arguments Python fills in itself, such as ``self``; Python's messages count them.
    """

    __slots__ = ("bound", "keyword", "least", "most", "only", "positional", "required", "title", "varkw")

    def __init__(
        self,
        title: str,
        positional: tuple[str, ...],
        only: int = 0,
        required: int = 0,
        keyword: tuple[tuple[str, bool], ...] = (),
        varargs: bool = False,
        varkw: bool = False,
        bound: int = 0,
    ) -> None:
        self.title = title
        self.positional = positional
        self.only = only
        self.required = required
        self.keyword = keyword
        self.varkw = varkw
        self.bound = bound
        # Bounds of the number of arguments of a valid call without keywords. Required keyword-only arguments make it invalid.
        self.least = required if not any(must for _, must in keyword) else 1 << 60
        self.most = 1 << 59 if varargs else len(positional)

    @property
    def varargs(self) -> bool:
        """Whether any number of positional arguments may be given."""
        return self.most == 1 << 59

    def packed(self) -> tuple[Any, ...]:
        """Return the arguments of the constructor, for pickling."""
        return (
            self.title,
            self.positional,
            self.only,
            self.required,
            self.keyword,
            self.varargs,
            self.varkw,
            self.bound,
        )

    def shown(self) -> inspect.Signature:
        """Return the signature as an ``inspect.Signature``; ``...`` stands for default values."""
        kinds, made = inspect.Parameter, []
        for at, name in enumerate(self.positional):
            kind = kinds.POSITIONAL_ONLY if at < self.only else kinds.POSITIONAL_OR_KEYWORD
            made.append(kinds(name, kind, default=kinds.empty if at < self.required else ...))
        if self.varargs:
            made.append(kinds("args", kinds.VAR_POSITIONAL))
        for name, must in self.keyword:
            made.append(kinds(name, kinds.KEYWORD_ONLY, default=kinds.empty if must else ...))
        if self.varkw:
            made.append(kinds("kwargs", kinds.VAR_KEYWORD))
        return inspect.Signature(made)

    @classmethod
    def anything(cls, title: str) -> Signature:
        """Return the signature of a function whose arguments are unknown."""
        return cls(title, (), varargs=True, varkw=True)

    @classmethod
    def of(cls, function: Any, title: str, bound: int) -> Signature:
        """Return the signature of a function whose first ``bound`` arguments Python fills in."""
        if type(function) is types.FunctionType and not hasattr(function, "__signature__"):
            return cls._of_code(function, title, bound)
        try:
            parameters = list(signature_of(function, follow_wrapped=False).parameters.values())
        except (TypeError, ValueError):  # a C function without a signature
            return cls.anything(title)
        by_position = [each for each in parameters if each.kind in _POSITIONAL]
        empty = inspect.Parameter.empty
        return cls(
            title,
            tuple(each.name for each in by_position)[bound:],
            only=max(0, sum(each.kind is inspect.Parameter.POSITIONAL_ONLY for each in by_position) - bound),
            required=max(0, sum(each.default is empty for each in by_position) - bound),
            keyword=tuple(
                (each.name, each.default is empty)
                for each in parameters
                if each.kind is inspect.Parameter.KEYWORD_ONLY
            ),
            varargs=any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters),
            varkw=any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters),
            bound=min(bound, len(by_position)),
        )

    @classmethod
    def _of_code(cls, function: types.FunctionType, title: str, bound: int) -> Signature:
        code = function.__code__
        count, only = code.co_argcount, code.co_posonlyargcount
        names = code.co_varnames
        defaults = len(function.__defaults__ or ())
        given = function.__kwdefaults__ or {}
        return cls(
            title,
            names[bound:count] if bound <= count else (),
            only=max(0, only - bound),
            required=max(0, count - defaults - bound),
            keyword=tuple(
                (name, name not in given) for name in names[count : count + code.co_kwonlyargcount]
            ),
            varargs=bool(code.co_flags & inspect.CO_VARARGS),
            varkw=bool(code.co_flags & inspect.CO_VARKEYWORDS),
            bound=min(bound, count),
        )

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise the TypeError that Python would raise for these arguments; return if they are valid."""
        if not kwargs and self.least <= len(args) <= self.most:
            return
        self._check(len(args), kwargs)

    def _check(self, count: int, kwargs: Mapping[str, Any]) -> None:
        names = self.positional
        filled = set(names[:count])
        by_name = names[self.only :]
        only_names = {name for name, _ in self.keyword}
        for name in kwargs:
            if name in by_name:
                if name in filled:
                    raise TypeError(f"{self.title}() got multiple values for argument '{name}'")
                filled.add(name)
            elif name not in only_names and not self.varkw:
                wrong = [each for each in names[: self.only] if each in kwargs]
                if wrong:
                    raise TypeError(
                        f"{self.title}() got some positional-only arguments passed as keyword arguments: "
                        f"'{', '.join(wrong)}'"
                    )
                raise TypeError(f"{self.title}() got an unexpected keyword argument '{name}'")
        if count > self.most:
            raise TypeError(self._too_many(count, sum(name in kwargs for name in only_names)))
        missing = [name for name in names[: self.required] if name not in filled]
        if missing:
            raise TypeError(self._missing("positional", missing))
        missing = [name for name, must in self.keyword if must and name not in kwargs]
        if missing:
            raise TypeError(self._missing("keyword-only", missing))

    def name_argument(self, error: SerializationError) -> None:
        """In an error that names an argument by its number, replace the number by the parameter's name."""
        found = _ARGUMENT(str(error))
        if found is None:
            return
        number, name, rest = found.groups()
        if number is not None:
            at = int(number)
            name = self.positional[at] if at < len(self.positional) else f"number {at + 1}"
        if name == THE_FUNCTION:
            error.args = (f"{name} {self.title}{rest}",)
        else:
            shown = name if name.startswith("number ") else repr(name)
            error.args = (f"argument {shown} of {self.title}(){rest}",)

    def _missing(self, kind: str, names: list[str]) -> str:
        quoted = [f"'{name}'" for name in names]
        if len(quoted) < 3:
            listed = " and ".join(quoted)
        else:
            listed = f"{', '.join(quoted[:-1])}, and {quoted[-1]}"
        plural = "" if len(names) == 1 else "s"
        return f"{self.title}() missing {len(names)} required {kind} argument{plural}: {listed}"

    def _too_many(self, count: int, by_name: int) -> str:
        most, given = len(self.positional) + self.bound, count + self.bound
        least = self.required + self.bound
        takes = f"from {least} to {most}" if least < most else f"{most}"
        plural = "s" if least < most or most != 1 else ""
        also = ""
        if by_name:
            first, second = ("" if n == 1 else "s" for n in (given, by_name))
            also = f" positional argument{first} (and {by_name} keyword-only argument{second})"
        verb = "was" if given == 1 and not by_name else "were"
        return f"{self.title}() takes {takes} positional argument{plural} but {given}{also} {verb} given"


# -- methods ----------------------------------------------------------------------------------------------


class MethodInfo:
    """One method, as its callers see it. Immutable.

    Attributes:
        name: the name by which callers call it.
        kind: how it runs: ``"sync"``, ``"async"``, ``"generator"`` or ``"async_generator"``.
        given: the options given to ``@method(...)``.
        threaded: it runs in a thread even if the actor has an event loop.
        options: the default options, with ``given`` applied.
        signature: the arguments that it accepts.
        check: raises TypeError for arguments that it does not accept, as Python would.
    """

    __slots__ = ("_merged", "check", "given", "kind", "name", "options", "signature", "threaded")

    def __init__(
        self,
        name: str,
        kind: Kind,
        signature: Signature,
        given: Mapping[str, Any] | None = None,
        threaded: bool = False,
    ) -> None:
        self.name = name
        self.kind: Kind = kind
        self.signature = signature
        self.given: Mapping[str, Any] = given or {}
        self.threaded = threaded
        self.options: CallOptions = replace(_DEFAULT, **self.given) if given else _DEFAULT
        self._merged: tuple[CallOptions, CallOptions] | None = None
        self.check: Callable[[tuple[Any, ...], Mapping[str, Any]], None] = signature.check

    def options_of(self, defaults: CallOptions) -> CallOptions:
        """Return the actor's default options for calls, overridden by the options of this method."""
        if defaults is _DEFAULT:
            return self.options
        known = self._merged
        if known is None or known[0] != defaults:
            # Return the same object for equal options: a route prepares a call template for each object.
            known = self._merged = (defaults, replace(defaults, **self.given) if self.given else defaults)
        return known[1]

    def shown(self, function: Any) -> inspect.Signature:
        """Return the signature for display: with defaults and annotations, if the function itself is known here."""
        try:
            known = signature_of(function)
        except (TypeError, ValueError):
            return self.signature.shown()
        parameters = list(known.parameters.values())
        if parameters and parameters[0].kind in _POSITIONAL:
            parameters = parameters[self.signature.bound :]
        return known.replace(parameters=parameters)

    @property
    def streams(self) -> bool:
        """Whether a call returns a stream of results."""
        return self.kind in ("generator", "async_generator")

    def packed(self) -> tuple[Any, ...]:
        """Return the description as plain values, for pickling."""
        return (self.name, self.kind, self.signature.packed(), dict(self.given), self.threaded)

    @classmethod
    def unpack(cls, packed: tuple[Any, ...]) -> MethodInfo:
        """Rebuild a description from the result of :meth:`packed`."""
        name, kind, signature, given, threaded = packed
        return cls(name, kind, Signature(*signature), given, threaded)

    @classmethod
    def anything(cls, name: str, title: str, kind: Kind = "sync") -> MethodInfo:
        """Return an internal method that accepts any arguments."""
        return cls(name, kind, Signature.anything(title))

    def __reduce__(self) -> tuple[Any, ...]:
        return MethodInfo.unpack, (self.packed(),)

    def __repr__(self) -> str:
        return f"<{self.kind} method {self.signature.title}>"


_DEFAULT: Final = CallOptions()


def kind_of(function: Any) -> Kind:
    """Return how a function runs."""
    if inspect.iscoroutinefunction(function):
        return "async"
    if inspect.isasyncgenfunction(function):
        return "async_generator"
    if inspect.isgeneratorfunction(function):
        return "generator"
    return "sync"


def mark_method(function: Any = None, /, **options: Any) -> Any:
    """``@method`` at run time: store options for an actor's method on the function, or return a decorator that does."""
    threaded = flag("thread", options.pop("thread", False))
    checked = CallOptions.check(options)

    def mark(function: Any) -> Any:
        if isinstance(function, type) or not (
            callable(function) or isinstance(function, (staticmethod, classmethod, functools.partialmethod))
        ):
            raise TypeError(f"@method is for the methods of a class, not for {function!r}")
        plain = getattr(function, "__func__", function)
        if threaded and kind_of(plain) in ("async", "async_generator"):
            raise ConfigError(f"thread=True is for plain methods, and {plain.__qualname__} is async")
        setattr(plain, _MARK, {**getattr(plain, _MARK, {}), **checked})
        if threaded:
            setattr(plain, _THREADED, True)
        return function

    return mark if function is None else mark(function)


# -- classes ------------------------------------------------------------------------------------------------


class ClassInfo:
    """What callers know about a class. Immutable. Until a class changes, the same object describes it.

    Attributes:
        name: the class's qualified name, without enclosing functions; or its attribute ``__actorrpc_name__``.
        module: the module that defines it.
        methods: all methods by name: inherited, static and class methods, ``__call__`` and other special methods.
        constructor: the arguments of the constructor.
        is_async: whether any method is an ``async def``.
        has_checkpoint: whether it has the methods ``checkpoint()`` and ``restore(state)``.
        is_module: whether it is an ``nn.Module``.
        doc: the first line of its docstring.
    """

    __slots__ = (
        "__weakref__",
        "_blob",
        "_class",
        "constructor",
        "doc",
        "has_checkpoint",
        "is_async",
        "is_module",
        "methods",
        "module",
        "name",
    )

    def __init__(
        self,
        name: str,
        module: str,
        methods: Mapping[str, MethodInfo],
        constructor: MethodInfo,
        doc: str = "",
        is_module: bool = False,
    ) -> None:
        self.name = name
        self.module = module
        self.methods: dict[str, MethodInfo] = dict(methods)
        self.constructor = constructor
        self.doc = doc
        self.is_module = is_module
        self.is_async = any(each.kind in ("async", "async_generator") for each in self.methods.values())
        self.has_checkpoint = _takes(self.methods.get("checkpoint"), ()) and _takes(
            self.methods.get("restore"), (None,)
        )
        self._blob: bytes | None = None
        self._class: weakref.ref[type] | None = None

    @classmethod
    def of(cls, actor: type) -> ClassInfo:
        """Return the description of a class as it is now; the same object as long as the class does not change."""
        return _read.get(actor) or _read.make(actor, actor.__mro__, cls._read)

    @classmethod
    def _read(cls, actor: type) -> ClassInfo:
        name = vars(actor).get("__actorrpc_name__") or actor.__qualname__.rpartition("<locals>.")[2]
        doc = (actor.__doc__ or "").strip().partition("\n")[0]
        info = cls(
            name,
            actor.__module__,
            {each.name: each for each in _methods(actor, name)},
            _constructor(actor, name),
            doc,
            issubclass(actor, nn.Module),
        )
        known = _known.get(actor)
        if known is not None and known._packed() == info._packed():
            return known
        info._class = weakref.ref(actor)
        _known[actor] = info
        return info

    def function(self, name: str) -> Any:
        """Return the class's attribute of that name, without binding it; None if the class is not known here.

        A class is known if actors of it were made here, or if its module is imported: nothing is imported for this.
        """
        actor: Any = None if self._class is None else self._class()
        if actor is None:
            actor = sys.modules.get(self.module)
            for part in self.name.split("."):
                actor = getattr(actor, part, None)
            actor = inspect.getattr_static(actor, "__actor_class__", actor)
        if not isinstance(actor, type):
            return None
        found = inspect.getattr_static(actor, name, None)
        return getattr(found, "__func__", found)  # unwraps static and class methods

    @property
    def prefix(self) -> str:
        """The text before a method's name in messages: ``Class.``, or ``task`` if the class is TaskRunner."""
        return "task " if self.name == TASKS else f"{self.name}."

    def __reduce__(self) -> tuple[Any, ...]:
        blob = self._blob
        if blob is None:
            packed = self._packed()
            if any(isinstance(each.given.get("retry_exceptions"), tuple) for each in self.methods.values()):
                # The message's pickler pickles the fields, because only it can send exception classes by value.
                return _rebuild, packed
            blob = self._blob = zlib.compress(pickle.dumps(packed, 5), 9)
        return _open, (blob,)

    def _packed(self) -> tuple[Any, ...]:
        return (
            self.name,
            self.module,
            [each.packed() for each in self.methods.values()],
            self.constructor.packed(),
            self.doc,
            self.is_module,
        )

    def __repr__(self) -> str:
        return f"<class {self.module}.{self.name} of {len(self.methods)} methods>"


def _takes(method: MethodInfo | None, args: tuple[Any, ...]) -> bool:
    if method is None or method.kind in ("generator", "async_generator"):
        return False
    try:
        method.check(args, {})
    except TypeError:
        return False
    return True


# The last description of each class. Two threads that make a description at once get equal results.
_known: Final[weakref.WeakKeyDictionary[type, ClassInfo]] = weakref.WeakKeyDictionary()
_read: Final[ClassCache[ClassInfo]] = ClassCache()
# Received descriptions, by their bytes, so that received handles of one class share one object. Each operation on the dict is one
# step under the GIL.
_received: Final[OrderedDict[bytes, ClassInfo]] = OrderedDict()
_MAX_RECEIVED: Final = 1024


def _open(blob: bytes) -> ClassInfo:
    info = _received.get(blob)
    if info is None:
        info = _rebuild(*pickle.loads(zlib.decompress(blob)))
        info._blob = blob
        info = _received.setdefault(blob, info)
        while len(_received) > _MAX_RECEIVED:
            try:
                _received.popitem(last=False)
            except KeyError:
                break
    return info


def _rebuild(
    name: str,
    module: str,
    methods: Iterable[tuple[Any, ...]],
    constructor: tuple[Any, ...],
    doc: str,
    is_module: bool,
) -> ClassInfo:
    found = {each[0]: MethodInfo.unpack(each) for each in methods}
    return ClassInfo(name, module, found, MethodInfo.unpack(constructor), doc, is_module)


def _methods(actor: type, owner: str) -> Iterable[MethodInfo]:
    seen: set[str] = {"__init__", "__new__", "__class_getitem__", "__init_subclass__", "__del__", "__class__"}
    for base in actor.__mro__:
        if base is object or base.__module__ in ("typing", "abc"):
            continue
        if BASE in vars(base):
            # Skip the names that ``Actor`` defines (``remote``, ``options``): they belong to the class, and are no methods of the
            # handle, even if a later base class defines them too.
            seen.update(vars(base))
            continue
        for name, raw in vars(base).items():
            if name in seen or isinstance(raw, type):
                continue
            seen.add(name)  # a name that a subclass sets to None or a property is not a method
            found = _method_of(name, raw, owner)
            if found is not None:
                yield found


def _method_of(name: str, raw: Any, owner: str) -> MethodInfo | None:
    function, bound = raw, 1
    if isinstance(raw, staticmethod):
        function, bound = raw.__func__, 0
    elif isinstance(raw, classmethod):
        function = raw.__func__
    elif isinstance(raw, functools.partialmethod):
        given = getattr(raw.func, _MARK, None)
        function = raw.func
        while isinstance(function, functools.partial):
            function = function.func
        threaded = getattr(raw.func, _THREADED, False)
        return MethodInfo(name, kind_of(function), Signature.anything(f"{owner}.{name}"), given, threaded)
    elif isinstance(raw, functools.singledispatchmethod):
        function = raw.func
    elif not callable(raw) or isinstance(raw, (property, functools.cached_property)):
        return None
    elif not hasattr(type(raw), "__get__"):
        bound = 0  # an instance with `__call__`: Python passes it no self
    if isinstance(function, type):
        return None
    given = getattr(function, _MARK, None)
    # Python's errors contain the name under which the function was defined.
    title = function.__qualname__ if isinstance(function, types.FunctionType) else f"{owner}.{name}"
    title = title.rpartition("<locals>.")[2]
    threaded = getattr(function, _THREADED, False)
    return MethodInfo(name, kind_of(function), Signature.of(function, title, bound), given, threaded)


def _constructor(actor: type, owner: str) -> MethodInfo:
    title = f"{owner}.__init__"
    if type(actor).__call__ is not type.__call__:
        # A metaclass with its own __call__ may accept any arguments.
        return MethodInfo("__init__", "sync", Signature.anything(title))
    new, init = getattr(actor, "__new__"), getattr(actor, "__init__")  # noqa: B009 (of the class, for mypy)
    if init is not object.__init__:
        function = init
    elif new is not object.__new__:
        function, title = new, f"{owner}.__new__"
    else:
        return MethodInfo("__init__", "sync", Signature(owner, ()))
    if isinstance(function, types.FunctionType):
        title = function.__qualname__.rpartition("<locals>.")[2]
    return MethodInfo("__init__", "sync", Signature.of(function, title, 1))
