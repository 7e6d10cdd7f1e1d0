"""Certificates for tests, made once for each session; and the switch that has the whole suite run over TLS.

    ACTORRPC_TEST_TLS=1 pytest tests/rpc tests/autograd       # forced TCP, with TLS

Then every worker that a test starts has them in its environment, and agents that tests make themselves get them as well.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from actorrpc.testing import processes
from tests.harness.certificates import Certificates, temporary_certificates

__all__ = ["OPTIONS", "OVER_TLS", "files", "foreign", "switch_on"]

OVER_TLS = os.environ.get("ACTORRPC_TEST_TLS") == "1"
OPTIONS: dict[str, Any] = {}
"""What the switch adds to the settings of agents that a test makes itself."""


@functools.cache
def files() -> Certificates:
    """Return those of the workers."""
    return temporary_certificates(processes.scratch() / "certificates")


@functools.cache
def foreign() -> Certificates:
    """Return those of somebody else, with a CA of their own."""
    return temporary_certificates(processes.scratch() / "foreign")


def switch_on() -> None:
    """Have everything that is started from now on use TLS over TCP."""
    OPTIONS.update(files().options)
    os.environ.update({**files().environment, "ACTORRPC_TRANSPORT": "tcp"})
