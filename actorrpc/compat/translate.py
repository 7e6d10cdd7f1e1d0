"""Futures and errors of calls with torch's behaviour and texts.

An error in a callback of a future is a RuntimeError, and a wait for all futures ends at the first failure. The texts of errors
also contain torch's words. An error is changed in place before it is raised: its class and fields stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import torch

from actorrpc import futures
from actorrpc._exceptions import is_of_handler
from actorrpc._torch import find_builtin
from actorrpc.errors import RpcTimeoutError, SerializationError, UnknownWorkerError

__all__ = [
    "Future",
    "as_runtime_error",
    "check_script_call",
    "collect_all",
    "is_builtin",
    "reword",
    "wait_all",
]

_TIMED_OUT: Final = "RPC ran for more than"
_NO_DESTINATION: Final = "could not find destination"
_NO_SCHEMA: Final = "Overloaded torch operator invoked from Python failed to match any schema"
_NO_DEVICE: Final = "only supports CPU tensors by default"
_NO_FUTURE: Final = "Functions decorated with @rpc.async_function"
_OF_SCRIPT: Final = "torch.jit.ScriptFunction"


def reword(error: BaseException, function: Any = None) -> None:
    """Add torch's words to the text of the error of a call of ``function``."""
    if len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    text = error.args[0]
    if isinstance(error, RpcTimeoutError) and _TIMED_OUT not in text:
        error.args = (f"{text} ({_TIMED_OUT} its time-out)",)
    elif isinstance(error, UnknownWorkerError) and _NO_DESTINATION not in text:
        error.args = (f"{_NO_DESTINATION}: {text}",)
    elif isinstance(error, SerializationError) and _NO_DEVICE in text:
        error.args = (text.replace(f"RPC {_NO_DEVICE}", f"TensorPipe RPC backend {_NO_DEVICE}"),)
    elif isinstance(error, TypeError) and _NO_SCHEMA not in text and is_builtin(function):
        error.args = (f"{_NO_SCHEMA}: {text}",)
    elif isinstance(error, TypeError) and text.startswith(_NO_FUTURE) and text.endswith(_OF_SCRIPT):
        kind = text.partition("<class 'torch.")[2].partition("'>")[0]
        error.args = (f"Async functions must return an IValue of Future type, but got {kind}. {text}",)


def check_script_call(function: torch.jit.ScriptFunction[Any, Any], args: Sequence[Any]) -> None:
    """Check, before a call is sent, the number of arguments of a script function.

    Raises:
        RuntimeError: there are too many arguments.
    """
    schema: Any = function.schema
    if len(args) > len(schema.arguments):
        raise RuntimeError(
            f"{schema.name}() expected at most {len(schema.arguments)} argument(s) but received {len(args)} argument(s). "
            f"Declaration: {schema}"
        )


def is_builtin(function: Any) -> bool:
    """Return whether a function is an operator of torch, such as ``torch.add``."""
    try:
        return function is not None and find_builtin(function) is not None
    except Exception as error:  # torch cannot look up this callable
        if is_of_handler(error):
            raise
        return False


def as_runtime_error(error: Exception) -> Exception:
    """Return a RuntimeError, as torch raises for an error of a callback; if possible, also an instance of the error's class."""
    cls = type(error)
    if isinstance(error, RuntimeError):
        return error
    if issubclass(RuntimeError, cls):
        made: Any = RuntimeError(*error.args)
        made.__cause__ = error
        return made  # type: ignore[no-any-return]
    try:
        made = type(cls.__name__, (cls, RuntimeError), {"__module__": cls.__module__})(*error.args)
    except Exception:  # the classes cannot be combined, or the constructor takes other arguments
        made = RuntimeError(f"{cls.__name__}: {error}")
    made.__cause__ = error
    return made  # type: ignore[no-any-return]


T = TypeVar("T")
S = TypeVar("S")


class Future(futures.Future[T]):
    """Like :class:`actorrpc.Future`, with torch's error texts. ``function``: the called function, or None."""

    __slots__ = ("function",)

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__(devices=devices)
        self.function: Any = None

    def _outcome(self) -> T:
        if self.error is not None:
            reword(self.error, self.function)
        return super()._outcome()

    def then(self, callback: Callable[[Any], S]) -> futures.Future[S]:
        """Return a future for ``callback(self)``; an error of the callback is a RuntimeError, too."""
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments. {callback!r} is not callable")

        def run(done: Any) -> S:
            try:
                return callback(done)
            except Exception as error:
                if is_of_handler(error):
                    raise
                raise as_runtime_error(error) from error

        run.__qualname__ = getattr(callback, "__qualname__", run.__qualname__)
        return super().then(run)


def collect_all(given: Iterable[torch.futures.Future[Any]]) -> futures.Future[list[Any]]:
    """Replace ``torch.futures.collect_all``: the future fails as soon as one of the given futures fails, with the same error."""
    listed = list(given)
    everything: Future[list[Any]] = Future()
    everything.label = f"collect_all of {len(listed)} futures"
    everything.awaits = listed

    def one(done: Any) -> None:
        try:
            done.value()
        except Exception as error:
            everything.try_fail(error)

    def last(_: Any) -> None:
        everything.try_complete(listed)

    for future in listed:
        future.add_done_callback(one)
    futures.collect_all(listed).add_done_callback(last)
    return everything


def wait_all(given: Iterable[torch.futures.Future[Any]]) -> list[Any]:
    """Replace ``torch.futures.wait_all``: return the values, or raise the first failure as soon as a future fails."""
    return [future.wait() for future in collect_all(given).wait()]
