"""Errors of backward passes that fail on another worker."""

from __future__ import annotations

from collections.abc import Sequence

from actorrpc.errors import PeerDiedError, RemoteError, RpcError, RpcTimeoutError
from actorrpc.wire.identity import WorkerKey

__all__ = ["blame", "died", "late", "released", "timed_out"]

_PREFIX = "Error on Node "
_NOTE = "had in a backward pass"


def blame(error: BaseException, worker: WorkerKey, name: str) -> BaseException:
    """Add the name of a worker to an error in the worker's answer; return the error.

    An error that the worker raised gets torch's prefix "Error on Node", if its message can be changed, and a note that names the
    worker. A PeerDiedError that does not name the worker gets a note. Other errors are unchanged, as are errors that came through
    several workers, which have the name of the worker that raised them.
    """
    if not isinstance(error, RemoteError):
        if isinstance(error, PeerDiedError) and name not in str(error):
            error.add_note(
                f"the worker that died is {name} (rank {worker.rank}), which took part in the backward pass"
            )
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
        pass  # the user's class does not allow changes of an error's args, or its __str__ raises
    error.add_note(f"{prefix}raised in the part that worker {name} {_NOTE}")
    return error


def died(worker: WorkerKey, name: str) -> PeerDiedError:
    """Return the error for a pass that needed a worker that has died."""
    return PeerDiedError(
        f"worker {name} (rank {worker.rank}) died during a backward pass that needed it: no gradients were changed anywhere",
        worker=name,
    )


def released(context: object) -> RpcError:
    """Return the error for a released context."""
    return RpcError(f"{context} was released: its `with` block has ended")


def timed_out(error: BaseException | None) -> bool:
    """Return whether a call timed out on this worker; False if the error is the answer of a worker on which a call timed out."""
    return isinstance(error, RpcTimeoutError) and not isinstance(error, RemoteError)


def late(context: str, timeout: float, names: Sequence[str]) -> RpcTimeoutError:
    """Return the error for a pass that timed out, with the names of the workers that have not answered."""
    return RpcTimeoutError(
        f"the backward pass of {context} did not end within {timeout:g} s: no answer from {', '.join(names)}. No gradients "
        f"were changed",
        maybe_executed=True,
        worker=names[0] if len(names) == 1 else None,
    )
