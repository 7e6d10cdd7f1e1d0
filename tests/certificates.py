"""Certificates for tests, made once in each session, and the switch that runs the whole suite over TLS.

    ACTORRPC_TEST_TLS=1 pytest tests/rpc tests/autograd       # forced TCP, with TLS

Then every worker that a test starts has the certificates in its environment. Tests that create agents pass them ``OPTIONS``.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from actorrpc.testing import processes
from actorrpc.testing.certificates import Certificates, temporary_certificates

__all__ = ["OPTIONS", "OVER_TLS", "files", "foreign", "switch_on"]

OVER_TLS = os.environ.get("ACTORRPC_TEST_TLS") == "1"
OPTIONS: dict[str, Any] = {}
"""Settings that tests pass to agents which they create in the test process; empty without TLS."""


@functools.cache
def files() -> Certificates:
    """Return the certificates of the workers."""
    return temporary_certificates(processes.scratch() / "certificates")


@functools.cache
def foreign() -> Certificates:
    """Return certificates of another CA, which the workers do not trust."""
    return temporary_certificates(processes.scratch() / "foreign")


def switch_on() -> None:
    """Make all workers that start from now on use TLS over TCP."""
    OPTIONS.update(files().options)
    os.environ.update({**files().environment, "ACTORRPC_TRANSPORT": "tcp"})
