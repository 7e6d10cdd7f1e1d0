"""Interceptors: what rides along with calls without the agent knowing of it.

Autograd contexts, traces, profiling and actors put fields into the headers of calls and answers, and wrap executions.
Where there is none, a call carries no header and pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from actorrpc.core.calls import Execution
    from actorrpc.core.peer import Peer

__all__ = ["Interceptor", "intercepted"]


class Interceptor(Protocol):
    """Something that rides along with calls. Methods run on the thread of the call; what they raise ends it."""

    def request_header(self, header: dict[str, Any], peer: Peer) -> None:
        """Put fields into the header of a call that is about to be packed."""

    def reply_header(self, header: dict[str, Any], execution: Execution) -> None:
        """Put fields into the header of an answer that is about to be packed."""

    def wrap(
        self,
        execution: Execution,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[[], Any],
    ) -> Callable[[], Any]:
        """Return what to run in place of ``call``; ``execution.header`` has the fields that came along."""

    def reply_received(self, header: dict[str, Any], peer: Peer, value: Any) -> Any:
        """See, and maybe replace, a value that has come back."""


def intercepted(
    interceptors: Sequence[Interceptor],
    execution: Execution,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Callable[[], Any]:
    """Return what to run in place of ``function(*args, **kwargs)``: the first interceptor is the outermost."""
    call: Callable[[], Any] = lambda: function(*args, **kwargs)  # noqa: E731
    for interceptor in reversed(interceptors):
        call = interceptor.wrap(execution, function, args, kwargs, call)
    return call
