"""Runs inside a Ray actor, in a process that Ray has placed, and makes this process a worker of an actorrpc cluster.

When Ray restarts the actor, it makes a :class:`Host` again in a new process, which joins as a new incarnation of the
same worker. The constructor starts a thread that serves, so that a restart needs no call. The main thread, in which Ray runs the
actor's methods, waits in :meth:`Host.wait` for the end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from actorrpc.cluster.join import JoinedResources, join
from actorrpc.cluster.provisioners.ray_link import labels_here
from actorrpc.errors import RendezvousError
from actorrpc.rpc import api

__all__ = ["Host"]

_AGAIN_S: Final = 0.25
_LOST: Final = 1  # the exit code of a worker that has lost its driver: Ray may restart it


class Host:
    """One worker, as long as its process lives. Thread-safe.

    Args:
        environment: environment variables for this process, including the address to join, the worker's name and the key.
        directory: its working directory; None to stay where Ray has put it.
        num_cpus, num_gpus, resources: its resources, as the driver books them. Its labels are the labels of Ray's node.
        timeout: how long joining may take, in seconds.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        directory: str | None,
        num_cpus: float,
        num_gpus: float,
        resources: Mapping[str, float],
        timeout: float,
    ) -> None:
        os.environ.update(environment)
        if directory is not None:
            os.chdir(directory)
        self._means = JoinedResources(
            num_cpus=num_cpus, num_gpus=num_gpus, resources=resources, labels=labels_here()
        )
        self._timeout = timeout
        self._over = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._serve, name="actorrpc-host", daemon=True).start()

    def wait(self) -> None:
        """Return when this worker has left its group.

        Raises:
            RpcError: this worker could not join.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        try:
            member = self._join()
            os.environ.pop("ACTORRPC_KEY", None)  # so that processes that actors start do not inherit the key
            try:
                member.wait()
            finally:
                api.shutdown(False)
            if not member.graceful:
                # This worker has lost the driver. Ray may restart it if it belongs to the pool; then it joins again.
                os._exit(_LOST)
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _join(self) -> Any:
        """Join the cluster; if that fails, try again: the driver may still consider this worker's last incarnation alive."""
        until = time.monotonic() + self._timeout
        while True:
            try:
                return join(
                    os.environ["ACTORRPC_JOIN"],
                    name=os.environ["ACTORRPC_WORKER_NAME"],
                    means=self._means,
                    timeout=max(0.1, until - time.monotonic()),
                )
            except RendezvousError:
                if time.monotonic() + _AGAIN_S >= until:
                    raise
            time.sleep(_AGAIN_S)
