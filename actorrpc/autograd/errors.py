"""What the caller of ``backward`` is told when another worker's part of it fails."""

from __future__ import annotations

from collections.abc import Sequence

from actorrpc.errors import PeerDiedError, RemoteError, RpcError, RpcTimeoutError
from actorrpc.wire.identity import WorkerKey

__all__ = ["blame", "died", "late", "released", "timed_out"]

_PREFIX = "Error on Node "
_NOTE = "had in a backward pass"


def blame(error: BaseException, worker: WorkerKey, name: str) -> BaseException:
    """Say in an error that came from another worker which one that is; returns the error.

    Its message begins with torch's words where it has one that can be changed; a note names the worker in any case. The
    worker where it was raised is named, not those that it has passed through.
    """
    if not isinstance(error, RemoteError):
        if isinstance(error, PeerDiedError) and name not in str(error):
            error.add_note(f"it is worker {name} (rank {worker.rank}) that took part in the backward pass")
        return error
    if any(note.endswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return error
    args = error.args
    prefix = f"{_PREFIX}{worker.rank}: "
    try:
        if args and isinstance(args[0], str) and str(error) == args[0]:
            error.args = (prefix + args[0], *args[1:])
            prefix = ""
    except Exception:
        pass  # a class with ideas of its own about its message
    error.add_note(f"{prefix}raised in the part that worker {name} {_NOTE}")
    return error


def died(worker: WorkerKey, name: str) -> PeerDiedError:
    """Return the error for a worker that has died while a pass needed it."""
    return PeerDiedError(
        f"worker {name} (rank {worker.rank}) died during a backward pass that needed it: no gradients were changed anywhere",
        worker=name,
    )


def released(context: object) -> RpcError:
    """Return the error for a context that has been released meanwhile."""
    return RpcError(f"{context} was released: its `with` block has ended")


def timed_out(error: BaseException | None) -> bool:
    """Say whether there was no answer in time: not, whether another worker says so of somebody else."""
    return isinstance(error, RpcTimeoutError) and not isinstance(error, RemoteError)


def late(context: str, timeout: float, names: Sequence[str]) -> RpcTimeoutError:
    """Return the error for a pass that was not over in time, with the names of those that have not answered."""
    return RpcTimeoutError(
        f"the backward pass of {context} was not over within {timeout:g} s: no answer from {', '.join(names)}. No gradients "
        f"were changed",
        maybe_executed=True,
        worker=names[0] if len(names) == 1 else None,
    )
