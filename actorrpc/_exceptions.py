"""Functions for exceptions of any class, above all for the text of an exception that is sent to another worker.

The text consists of the exception's traceback, chain and notes, limited in size; the thread that executed the call makes it. Any
user's class is allowed: a ``str`` that raises or returns 100 MB, a chain that is a circle, a recursion a thousand deep. The text
has Python's format. Python's formatter takes longer than all other steps of a failing call, and is used only for syntax errors
and exception groups. The only files that are read are source files.

A user's class may define properties with the names of an exception's attributes or a ``__getattribute__`` that raises, or refuse
every assignment (as a frozen dataclass does). The attributes are therefore read and set through the descriptors of
``BaseException``. Only :func:`say` (``str`` and ``repr``), :func:`type_name` (a metaclass), the search for source lines (a
module's loader) and Python's formatter can run the user's code. These functions raise nothing, except that :func:`say` passes on
the exception of a signal handler that runs meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import logging
import sys
import traceback as tracebacks
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, TypeGuard, TypeVar

from actorrpc.errors import RemoteTraceback

__all__ = [
    "MAX_NOTES",
    "add_note",
    "cut",
    "cut_frames",
    "format_error",
    "is_a",
    "is_of_handler",
    "let_frames_go",
    "line_of",
    "mark_handlers",
    "notes_of",
    "report",
    "say",
    "shown",
    "type_name",
    "undo_on_error",
]

_E = TypeVar("_E", bound=BaseException)
ARGS: Final[Any] = BaseException.__dict__["args"]
CAUSE: Final[Any] = BaseException.__dict__["__cause__"]
CONTEXT: Final[Any] = BaseException.__dict__["__context__"]
SUPPRESS: Final[Any] = BaseException.__dict__["__suppress_context__"]
TRACEBACK: Final[Any] = BaseException.__dict__["__traceback__"]
MESSAGE: Final[Any] = BaseExceptionGroup.__dict__["message"]
MEMBERS: Final[Any] = BaseExceptionGroup.__dict__["exceptions"]
dict_of: Final[Callable[[BaseException], dict[str, Any]]] = BaseException.__dict__["__dict__"].__get__
_OF_HANDLER: Final = "_actorrpc_of_handler"
names_of: Final[Callable[[type], dict[str, Any]]] = type.__dict__["__dict__"].__get__


def is_a(error: object, kinds: type[_E] | tuple[type[_E], ...]) -> TypeGuard[_E]:
    """Say whether an exception is of one of these classes, as ``except`` does: its ``__class__`` attribute is ignored."""
    return issubclass(type(error), kinds)


def mark_handlers(error: BaseException) -> None:
    """Mark an exception that a signal handler of the program, or an interruption of an actor's method, has raised."""
    dict_of(error)[_OF_HANDLER] = True


def is_of_handler(error: BaseException) -> bool:
    """Say whether :func:`mark_handlers` has marked the exception: the code that it interrupted has not failed then."""
    return _OF_HANDLER in dict_of(error)


@contextlib.contextmanager
def undo_on_error(*undo: Callable[[], object]) -> Generator[None]:
    """Call the functions in order if the ``with`` block raises an exception, ``KeyboardInterrupt`` included."""
    try:
        yield
    except BaseException:
        for each in undo:
            each()
        raise


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception."""
    notes = dict_of(error).setdefault("__notes__", [])
    if type(notes) is list:
        notes.append(note)


def cut_frames(error: BaseException, file: str) -> None:
    """Cut the frames of a source file off the top of an exception's traceback, so that it begins with the user's frames."""
    cut = TRACEBACK.__get__(error)
    while cut is not None and cut.tb_frame.f_code.co_filename == file:
        cut = cut.tb_next
    if cut is not None:
        TRACEBACK.__set__(error, cut)


def let_frames_go(error: BaseException) -> None:
    """Remove the tracebacks of an error that has been sent, and of the errors in its chain.

    The future that raised the error refers to the error, the traceback refers to frames, and the frames refer to the future:
    only the garbage collector frees this cycle, and in an idle process it never runs. Handles in the frames keep actors alive.

    An exception that this thread was handling when the error was raised belongs to the program: it keeps its traceback, and the
    error no longer refers to it. Example: ``shutdown()`` in a ``finally`` block.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        TRACEBACK.__set__(each, None)
        left.append(CAUSE.__get__(each))
        if (context := CONTEXT.__get__(each)) is not None:
            if _is_handled_here(context):
                CONTEXT.__set__(each, None)
            else:
                left.append(context)
        if is_a(each, BaseExceptionGroup):
            left += MEMBERS.__get__(each)


def _is_handled_here(error: BaseException) -> bool:
    """Say whether the outermost frame in the exception's traceback still runs in this thread."""
    caught = TRACEBACK.__get__(error)
    frame = None if caught is None else sys._getframe()
    while frame is not None and frame is not caught.tb_frame:
        frame = frame.f_back
    return frame is not None


_MAX_MESSAGE = 8 << 10
_MAX_FRAMES = 200
_MAX_MEMBERS = 200  # larger exception groups are formatted without their members
_MAX_CHAIN = 64
MAX_NOTES = 100
_MAX_SCAN = 1000


def cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2 - 20
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def say(value: object, how: Callable[[object], str] = str) -> str:
    """Return ``str`` or ``repr`` of a user's object, cut to 8 192 characters; if it raises, a text that says so."""
    try:
        text = how(value)
        return cut(text if type(text) is str else str.__str__(text), _MAX_MESSAGE)
    except BaseException as error:
        if is_of_handler(error):
            raise
        return f"<{type_name(type(value))} whose {how.__name__}() failed>"


def type_name(cls: type) -> str:
    cls = names_of(cls).get("_actorrpc_original", cls)
    try:
        return f"{cls.__module__}.{cls.__qualname__}"
    except BaseException:
        return str(type.__dict__["__name__"].__get__(cls))


def shown(name: str) -> str:
    return name.removeprefix("builtins.").removeprefix("__main__.")


def line_of(error: BaseException) -> str:
    name, text = shown(type_name(type(error))), say(error)
    return cut(f"{name}: {text}" if text else name, 1000)


def report(log: logging.Logger, error: BaseException, message: str, *args: object) -> None:
    """Log an error of any class with its traceback. Never raises, so the calling thread continues."""
    try:
        text = format_error(error, say(error), "", lambda _: None)
        log.error("%s\n%s", message % args, text.removeprefix("On worker :\n").rstrip())
    except BaseException:  # a log handler of the program raised, or memory is exhausted
        pass


def notes_of(error: BaseException) -> list[str]:
    notes: Any = dict_of(error).get("__notes__")
    if type(notes) not in (list, tuple):
        return [] if notes is None else [say(notes, repr)]
    return [say(note) for note in notes[:MAX_NOTES]]


def format_error(
    error: BaseException, message: str, worker: str, remote_of: Callable[[BaseException], Any]
) -> str:
    """Format an exception, whose text is ``message``, and its chain. ``remote_of`` returns a remote error's record, or None."""
    heading = f"On worker {worker}:\n"
    because = "\nThe above exception was the direct cause of the following exception:\n\n"
    blocks: list[str] = []  # in reverse order
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None:
        seen.add(id(link))
        block = _format_one(link, message if link is error else say(link))
        cause: Any = CAUSE.__get__(link)
        context, remote = CONTEXT.__get__(link), remote_of(link)
        is_text = type(cause) is RemoteTraceback
        text = cause.text if is_text else None if remote is None else remote.traceback
        blocks += (block,) if text is None else (heading + block, because, text)  # ``text`` contains headings
        if cause is not None and not is_text:
            link, joint = cause, because
        elif cause is None and context is not None and not SUPPRESS.__get__(link):
            link, joint = context, "\nDuring handling of the above exception, another exception occurred:\n\n"
        else:
            break
        if id(link) in seen:
            break
        blocks.append(joint)
        if len(seen) == _MAX_CHAIN:
            blocks.append("... earlier exceptions left out ...\n")
            break
    first = blocks.pop()
    return "".join([first if first.startswith("On worker ") else heading + first, *reversed(blocks)])


def _format_one(error: BaseException, message: str) -> str:
    if is_a(error, SyntaxError) or (
        is_a(error, BaseExceptionGroup) and len(MEMBERS.__get__(error)) < _MAX_MEMBERS
    ):
        try:
            formatter = tracebacks.TracebackException.from_exception(error, compact=True)
            return "".join(formatter.format(chain=False))
        except BaseException:
            pass
    label = shown(type_name(type(error)))
    last = f"{label}: {message}\n" if message else f"{label}\n"
    return "".join([*_format_frames(TRACEBACK.__get__(error)), last, *(f"{n}\n" for n in notes_of(error))])


def _format_frames(tb: types.TracebackType | None) -> Iterator[str]:
    links: list[types.TracebackType] = []
    while tb is not None:
        links.append(tb)
        tb = tb.tb_next
    if links:
        yield "Traceback (most recent call last):\n"
    checked: set[str] = set()
    runs = itertools.groupby(links, lambda link: (id(link.tb_frame.f_code), link.tb_lineno))
    for number, (_, run) in enumerate(runs):
        same = list(run)
        if number == _MAX_FRAMES:
            yield "  ... frames left out ...\n"
        if number < _MAX_FRAMES or same[0] is links[-1]:
            for link in same[:3]:
                yield _format_frame(link, checked)
            if len(same) > 3:
                yield f"  [Previous line repeated {len(same) - 3} more times]\n"


def _format_frame(link: types.TracebackType, checked: set[str]) -> str:
    code, number = link.tb_frame.f_code, link.tb_lineno
    text = f'  File "{code.co_filename}", line {number}, in {code.co_name}\n'
    try:
        if code.co_filename not in checked:
            checked.add(code.co_filename)
            linecache.checkcache(code.co_filename)
        source = linecache.getline(code.co_filename, number, link.tb_frame.f_globals).rstrip()
        stripped = source.lstrip()
        if not stripped:
            return text
        text += f"    {stripped}\n"
        index = link.tb_lasti // 2
        if index > _MAX_SCAN:
            # ``co_positions()`` counts from the start of the function, which takes long for this instruction: no ``^`` marks.
            return text
        _, end, *columns = next(itertools.islice(code.co_positions(), index, None))
        if end == number and None not in columns:
            start, stop = (len(source.encode()[:at].decode(errors="replace")) for at in columns)
            if 0 < stop - start < len(stripped):
                text += " " * (4 + start - (len(source) - len(stripped))) + "^" * (stop - start) + "\n"
    except Exception:  # the module's loader cannot provide the source
        pass
    return text
