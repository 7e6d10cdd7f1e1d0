"""Failures of several workers at once, in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actorrpc.errors import RpcError
from actorrpc.futures import Future

__all__ = ["OptimizerError", "gather"]


class OptimizerError(ExceptionGroup[Exception], RpcError):
    """Several workers failed in the same operation of a DistributedOptimizer. Catch it, or its members by ``except*``.

    Each member is what that worker alone would have raised: what its optimizer raised is an instance of its own class
    and a RemoteError. Where only one worker fails, that error itself is raised.

    Attributes:
        workers: the names of the workers that failed, in the order of ``exceptions``. Empty in parts that were split off.
    """

    maybe_executed = True
    workers: tuple[str, ...] = ()

    def derive(self, excs: Sequence[Exception], /) -> OptimizerError:  # type: ignore[override]
        """Return a group of the same kind, for ``split`` and ``subgroup``."""
        return OptimizerError(self.message, excs)


def gather(what: str, calls: Mapping[str, Future[Any] | Exception]) -> dict[str, Any]:
    """Wait for all calls; return their results by the names of the workers.

    Args:
        what: what is done, in words that begin an error's message.
        calls: the call to each worker, or why it could not be made.

    Raises:
        Exception: the error of the only worker that failed, with a note that names it.
        OptimizerError: those of all workers that failed, where they are several.
    """
    results: dict[str, Any] = {}
    failures: dict[str, Exception] = {}
    for name, call in calls.items():
        if isinstance(call, Exception):
            failures[name] = call
            continue
        try:
            results[name] = call.wait()
        except Exception as error:
            failures[name] = error
    if not failures:
        return results
    try:
        if len(failures) == 1:
            [(name, only)] = failures.items()
            only.add_note(f"{what} on worker {name!r}.")
            raise only
        texts = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in failures.items())
        group = OptimizerError(
            f"{what} on {len(failures)} of {len(calls)} workers: {texts}", list(failures.values())
        )
        group.workers = tuple(failures)
        raise group
    finally:
        # The traceback of what is raised leads here: it must not lead back from here.
        failures.clear()
