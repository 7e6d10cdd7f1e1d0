"""Functions that read annotations in all versions of Python, and the private names of CPython that this package uses.

The comment of a private name says its purpose, and the effect if it is missing.

Python may change these names in any release. All of them were found in CPython 3.11, 3.13 and 3.14, except where a comment says
otherwise, and ``tests/test_private_names.py`` checks them on the running version. If :func:`find` does not find a name and was
given no fallback, ``import actorrpc`` raises an ImportError that shows the name.
"""

from __future__ import annotations

import asyncio
import inspect
import pkgutil
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

if sys.version_info >= (3, 14):
    import annotationlib

    _LENIENT: Final[dict[str, Any]] = {"annotation_format": annotationlib.Format.FORWARDREF}
else:
    _LENIENT: Final[dict[str, Any]] = {}


def signature_of(function: Callable[..., Any], **options: Any) -> inspect.Signature:
    """Return ``inspect.signature(function, **options)``, with a ``ForwardRef`` for each name in annotations that is missing.

    Python 3.14 evaluates annotations when code reads them, and earlier versions at the definition. A name may be missing because
    it is imported for type checkers only.
    """
    return inspect.signature(function, **_LENIENT, **options)


def annotations_of(obj: Any) -> dict[str, Any]:
    """Return the annotations of a function or class; as strings, if names in them are missing (see :func:`signature_of`)."""
    try:
        found: dict[str, Any] = obj.__annotations__
    except Exception:
        if sys.version_info >= (3, 14):
            return annotationlib.get_annotations(obj, format=annotationlib.Format.STRING)
        raise
    return found


def find(path: str, *fallback: Any, of: str = f"Python {platform.python_version()}") -> Any:
    """Return the object with the path ``"module:name.name"``; the fallback, if one is given, if the object is missing.

    Raises:
        ImportError: the object is missing, and there is no fallback. The message says that ``of`` does not have the object.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        if fallback:
            return fallback[0]
        name = path.replace(":", ".")
        raise ImportError(f"actorrpc does not work with {of}, which has no {name}") from error


# Returns the event loop that this thread runs, or None (``asyncio.get_running_loop`` raises an exception in place of None).
running_loop: Final[Callable[[], Any]] = find("asyncio:_get_running_loop")
# Sets that loop: calls that run within a wait may run a loop of their own.
set_running_loop: Final[Callable[[Any], None]] = find("asyncio:_set_running_loop")
# End and begin the current task of a loop, which must be the loop that this thread runs. In Python 3.14, a thread has one current
# task; in earlier versions, each loop has one.
leave_task: Final[Callable[[Any, Any], None]] = find("asyncio:_leave_task")
enter_task: Final[Callable[[Any, Any], None]] = find("asyncio:_enter_task")
# The future of ``asyncio.gather``. Without it, the state of a cluster does not show the calls that a ``gather`` awaits.
GatheringFuture: Final[type] = find("asyncio.tasks:_GatheringFuture", asyncio.Future)
# Attributes, read with a default: the future that a task awaits, and the futures that a GatheringFuture awaits. Without them, the
# search for deadlocks and the state of a cluster do not include the calls that coroutines await.
AWAITED: Final = "_fut_waiter"
GATHERED: Final = "_children"
# The code of the methods with which ``run_forever`` begins and ends, in Python 3.13 and later.
LOOP_STEPS: Final = (
    find("asyncio:BaseEventLoop._run_forever_setup.__code__", None),
    find("asyncio:BaseEventLoop._run_forever_cleanup.__code__", None),
)
# Set to False on a task so that asyncio does not log an error if the task is freed while it is pending.
LOGS_PENDING: Final = "_log_destroy_pending"

# Returns the command-line options of this interpreter, such as ``-X dev``. Without it, child processes get no options.
interpreter_options: Final[Callable[[], list[str]]] = find("subprocess:_args_from_interpreter_flags", list)
# Drops the functions that ``atexit`` would call. Without it, actors' processes call the functions of the fork server, too.
clear_exit_functions: Final[Callable[[], None]] = find("atexit:_clear", lambda: None)
# Calls the functions registered with ``atexit``. Actors' processes use it because they end with ``os._exit``, which skips them.
run_exit_functions: Final[Callable[[], None]] = find("atexit:_run_exitfuncs")
# Ends the child processes that ``multiprocessing`` has started. The module registers it with ``atexit`` when it is imported.
end_multiprocessing: Final[Callable[[], None]] = find("multiprocessing.util:_exit_function")
# Two modules of ``multiprocessing``: the object for the helper process, and the object's attributes for the pid and a pipe of the
# helper, read with a default. Without them, the leak check of the tests reports the helper as a leak.
RESOURCE_TRACKER: Final = ("_resource_tracker", "_pid", "_fd")
FORK_SERVER: Final = ("_forkserver", "_forkserver_pid", "_forkserver_alive_fd")

# The class of the objects for threads that ``threading`` did not start. Without it, the leak check may report an ended thread.
DummyThread: Final[Any] = find("threading:_DummyThread", ())
# The module whose functions ``signal.signal`` and ``signal.getsignal`` call.
signal_module: Final[Any] = find("_signal:")
# The callbacks with which weak collections remove a dead entry: the interpreter ignores exceptions in them. Without them, an
# exception that a signal handler raises there is lost. All collections of one type share a code object.
_collections: Final[tuple[Any, ...]] = (WeakKeyDictionary(), WeakSet(), WeakValueDictionary())
WEAK_CALLBACKS: Final = frozenset(each._remove.__code__ for each in _collections if hasattr(each, "_remove"))
# The function of the C API that sets the trace function of any thread, for the debugger on CPython 3.11. From 3.12 on there is
# ``sys.monitoring``, and 3.13 and 3.14 do not have the function.
SET_TRACE: Final = "_PyEval_SetTrace"

# Attributes whose names are in other modules of this package, too, by the object that has them.
IN_PLACE: Final[Mapping[str, tuple[str, ...]]] = {
    # ``concurrent.futures`` and ``asyncio.wrap_future`` use them. ConcurrentFuture defines them.
    "concurrent.futures:Future()": ("_condition", "_state", "_waiters"),
}
