"""What the caller of ``backward`` is told when another worker's part of it fails."""

from __future__ import annotations

from actorrpc.errors import PeerDiedError, RemoteError
from actorrpc.rpc.fork_messages import WorkerKey

__all__ = ["blame", "died"]

_PREFIX = "Error on Node "


def blame(error: BaseException, worker: WorkerKey, name: str) -> BaseException:
    """Say in an error that came from another worker which one that is; returns the error.

    Its message begins with torch's words where it has one that can be changed; a note names the worker in any case. The
    worker where it was raised is named, not those that it has passed through.
    """
    if not isinstance(error, RemoteError):
        if isinstance(error, PeerDiedError) and name not in str(error):
            error.add_note(f"it is worker {name} (rank {worker.rank}) that took part in the backward pass")
        return error
    args = error.args
    text = args[0] if args and isinstance(args[0], str) else None
    if text is not None and text.startswith(_PREFIX):
        return error
    try:
        if text is not None and str(error) == text:
            error.args = (f"{_PREFIX}{worker.rank}: {text}", *args[1:])
    except Exception:
        pass  # a class with ideas of its own about its message
    if not any(note.startswith(_PREFIX) for note in getattr(error, "__notes__", ())):
        error.add_note(
            f"{_PREFIX}{worker.rank}: it was raised in the part that worker {name} had in a backward pass"
        )
    return error


def died(worker: WorkerKey, name: str) -> PeerDiedError:
    """Return the error for a worker that has died while a pass needed it."""
    return PeerDiedError(
        f"worker {name} (rank {worker.rank}) died during a backward pass that needed it: no gradients were changed anywhere",
        worker=name,
    )
