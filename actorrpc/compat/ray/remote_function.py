"""``ray.remote_function``: functions with ``@ray.remote``."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from actorrpc import actors
from actorrpc.actors.spec.options import TaskOptions
from actorrpc.compat.ray import placement, runtime_env
from actorrpc.compat.ray.exceptions import TaskUnschedulableError, rays_words
from actorrpc.compat.ray.object_ref import DynamicObjectRefGenerator, ObjectRef, unwrapped, wrapped
from actorrpc.compat.ray.options import Extras, check_resources, for_tasks, placed

__all__ = ["RemoteFunction", "remote_function"]

P = ParamSpec("P")
Out = TypeVar("Out")
_NONE = Extras()


def _refers(function: Callable[..., Any], again: bool) -> Callable[..., Any]:
    """Return a function that runs a generator function to its end, and returns ObjectRefs of all items.

    If the generator raises an exception, the last ObjectRef raises it; with ``again``, the function itself raises the exception,
    so that the task is repeated.
    """

    @functools.wraps(function)
    def refer(*args: Any, **kwargs: Any) -> DynamicObjectRefGenerator[Any]:
        found = function(*args, **kwargs)
        if not inspect.isgenerator(found):
            raise ValueError(
                f'num_returns="dynamic" is for generators, and {function.__name__} returned a {type(found).__name__}'
            )
        refs: list[ObjectRef[Any]] = []
        try:
            for value in found:
                refs.append(ObjectRef(actors.put(value)))
        except Exception as error:
            if again:
                raise
            refs.append(ObjectRef(actors.ObjectRef.failed(error)))
        return DynamicObjectRefGenerator(refs)

    return refer


class RemoteFunction(actors.RemoteFunction[P, Out], Generic[P, Out]):
    """A function that runs in another process: ``f.remote(...)``. See :class:`actorrpc.RemoteFunction`.

    Args:
        function: the function.
        options: the options of its tasks.
        extras: Ray's options without an equivalent.
        dynamic: with ``num_returns="dynamic"``: see :func:`_refers`.
    """

    def __init__(
        self,
        function: Callable[P, Any],
        options: TaskOptions | None = None,
        extras: Extras = _NONE,
        dynamic: bool = False,
    ) -> None:
        called: Callable[..., Any] = function
        if dynamic:
            called = _refers(function, options is not None and bool(options.retry_exceptions))
        super().__init__(called, options)
        self._function = function
        self._extras = extras
        self._dynamic = dynamic
        self._is_plain = extras == _NONE

    if not TYPE_CHECKING:

        def remote(self, *args, **kwargs):
            """Run the function in another process; return an ObjectRef, a list of them, an ObjectRefGenerator or None at once.

            ObjectRefs among the arguments are replaced by their values. Starts the embedded cluster if this
            process is in no group.

            Raises:
                TypeError: the function does not take these arguments, or an argument cannot be sent.

            If no node has the resources that the options request, the ObjectRef raises a TaskUnschedulableError.
            """
            args, kwargs = unwrapped(args, kwargs)
            with rays_words:
                made = self
                if (
                    not self._is_plain
                    or runtime_env.VARIABLE in os.environ
                    or placement.own_bundle() is not None
                ):
                    try:
                        made = self._placed()
                    except TaskUnschedulableError as error:
                        return wrapped(actors.ObjectRef.failed(error))
                return wrapped(actors.RemoteFunction.remote(made, *args, **kwargs))

    def _placed(self) -> RemoteFunction[P, Any]:
        """Return the same function with the options of a task that is started now: its placement group and ``runtime_env``."""
        check_resources(self._extras)
        changes, paths = placed(self._extras, self._options.env)
        if not changes:
            return self
        bundle = changes.pop("bundle", None)
        made = self._variant(
            replace(self._options.merged(**changes), bundle=bundle), self._extras, self._dynamic
        )
        if paths:
            made._travels = runtime_env.SearchingFunction(paths, made._travels)
        return made

    def _variant(self, options: TaskOptions, extras: Extras, dynamic: bool) -> RemoteFunction[P, Any]:
        made: RemoteFunction[P, Any] = RemoteFunction(self._function, options, extras, dynamic)
        if made.__wrapped__ is self._function and self._first.__wrapped__ is self._function:
            made._name_as(self._first)
        return made

    def options(self, **options: Any) -> RemoteFunction[P, Any]:
        """Return the same function with other options.

        Raises:
            ConfigError: an option is not supported here, or its value is wrong; the message says what to do (a ValueError).
        """
        dynamic = self._dynamic
        if "num_returns" in options:
            dynamic = options["num_returns"] == "dynamic"
        ours, extras = for_tasks(_without_dynamic(options), self._extras)
        return self._variant(self._options.merged(**ours), extras, dynamic)

    def _remote(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Run the function, with arguments in a list and a dict."""
        made: Any = self.options(**options) if options else self
        return made.remote(*(args or ()), **(kwargs or {}))

    def __reduce__(self) -> Any:
        reduced = super().__reduce__()
        if isinstance(reduced, str):
            return reduced
        itself = reduced[1][0] if self.__wrapped__ is self._function else self._function
        return RemoteFunction, (itself, self._options, self._extras, self._dynamic)


def _without_dynamic(options: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(options)
    if found.get("num_returns") == "dynamic":
        found["num_returns"] = 1
    return found


def remote_function(function: Callable[..., Any], options: Mapping[str, Any]) -> RemoteFunction[..., Any]:
    """Make a remote function of a function.

    Raises:
        ConfigError: as :meth:`RemoteFunction.options`.
    """
    ours, extras = for_tasks(_without_dynamic(options), _NONE)
    return RemoteFunction(
        function, TaskOptions().merged(**ours), extras, options.get("num_returns") == "dynamic"
    )
