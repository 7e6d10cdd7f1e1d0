"""The parts of an exception, read and set past its class.

A user's class may define properties of these names, a ``__getattribute__`` that raises, or refuse every assignment (a frozen
dataclass does): what is asked of any exception goes through the descriptors of ``BaseException``. Nothing here raises, and
nothing here runs code of the user's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeGuard, TypeVar

__all__ = ["add_note", "cut_frames", "is_a", "let_frames_go"]

_E = TypeVar("_E", bound=BaseException)
ARGS: Final[Any] = BaseException.__dict__["args"]
CAUSE: Final[Any] = BaseException.__dict__["__cause__"]
CONTEXT: Final[Any] = BaseException.__dict__["__context__"]
SUPPRESS: Final[Any] = BaseException.__dict__["__suppress_context__"]
TRACEBACK: Final[Any] = BaseException.__dict__["__traceback__"]
MESSAGE: Final[Any] = BaseExceptionGroup.__dict__["message"]
MEMBERS: Final[Any] = BaseExceptionGroup.__dict__["exceptions"]
dict_of: Final[Callable[[BaseException], dict[str, Any]]] = BaseException.__dict__["__dict__"].__get__
names_of: Final[Callable[[type], dict[str, Any]]] = type.__dict__["__dict__"].__get__


def is_a(error: object, kinds: type[_E] | tuple[type[_E], ...]) -> TypeGuard[_E]:
    """Say whether an exception is of one of these classes, as ``except`` does: what it says of its class is not asked for."""
    return issubclass(type(error), kinds)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception."""
    notes = dict_of(error).setdefault("__notes__", [])
    if type(notes) is list:
        notes.append(note)


def cut_frames(error: BaseException, file: str) -> None:
    """Cut the frames of a source file off the top of an exception's traceback: users look for theirs."""
    cut = TRACEBACK.__get__(error)
    while cut is not None and cut.tb_frame.f_code.co_filename == file:
        cut = cut.tb_next
    if cut is not None:
        TRACEBACK.__set__(error, cut)


def let_frames_go(error: BaseException) -> None:
    """Take the tracebacks off an error that has been sent.

    A call that failed waits for the collector otherwise: the future that raised the error holds it, and its traceback
    the frames with that future, and with handles whose actors are to end. In an idle process the collector never comes.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        TRACEBACK.__set__(each, None)
        left += (CAUSE.__get__(each), CONTEXT.__get__(each))
        if is_a(each, BaseExceptionGroup):
            left += MEMBERS.__get__(each)
