"""Joining over secured connections: TLS with certificates of the group's CA, and frames with integrity tags.

Until it has joined, a worker is invisible to other workers.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actorrpc
from actorrpc import rpc
from actorrpc.cluster import driver_rpc, init, join
from actorrpc.errors import AuthenticationError, ProtocolError, RpcError
from tests import certificates
from tests.cluster.drive import until
from tests.cluster.joiners import CLEAN, is_there, joiner

pytestmark = pytest.mark.limit(90)
_ROOT = Path(__file__).resolve().parents[2]
_KEY = "a key for these tests, long enough"
_DRIVER = """
import actorrpc, sys

with actorrpc.init(listen="tcp://127.0.0.1:0", transport="tcp") as context:
    print(context.address, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def _driver(**environment: str) -> Iterator[str]:
    """Run a driver in another process; yield its address."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_DRIVER)],
        env={**CLEAN, "PYTHONPATH": str(_ROOT), "ACTORRPC_KEY": _KEY, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()
        assert process.returncode == 0


@contextlib.contextmanager
def _joined(address: str, **settings: Any) -> Iterator[Any]:
    """Join that driver as a worker; yield the connection to it."""
    member = join.join(address, name="one", settings={"transport": "tcp", **settings})
    try:
        assert rpc.rpc_sync("driver", os.getpid) != os.getpid()
        yield member.agent.peer("driver").conn
    finally:
        rpc.shutdown()


def _join_is_refused(address: str, kind: type[RpcError], says: str, **settings: Any) -> None:
    """Check that joining fails at once with this error, and not with RendezvousError at the time-out."""
    with pytest.raises(kind, match=says) as found:
        join.join(address, name="one", timeout=60.0, settings={"transport": "tcp", **settings})
    assert address in str(found.value)
    assert not rpc.is_initialized()


@pytest.mark.prints(
    "refuses the certificate of this worker, or shows none: .*unknown ca",
    r"certificate of the process that connected from 127\.0\.0\.1 is refused: self.signed certificate",
    "it does not speak TLS, and this worker speaks nothing else",
)
def test_joining_over_tls_works_only_with_certificates_of_the_same_ca(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", _KEY)
    ours, others = certificates.files(), certificates.foreign()
    with _driver(**ours.environment) as address:
        with _joined(address, **ours.options) as conn:
            assert isinstance(conn.stream.sock, ssl.SSLSocket)
            assert conn.writer.seal is None
        _join_is_refused(
            address, AuthenticationError, "the certificate of the driver .* is refused", **others.options
        )
        # The worker trusts the driver, but the driver does not trust the worker.
        both = tmp_path / "both.pem"
        both.write_text(Path(ours.ca).read_text() + Path(others.ca).read_text())
        _join_is_refused(
            address, AuthenticationError, "refuses the cert", **{**others.options, "tls_ca": str(both)}
        )
        _join_is_refused(address, ProtocolError, "TLS")


@pytest.mark.slow
@pytest.mark.prints("it speaks TLS, and this worker has no certificates")
def test_frame_integrity_applies_if_only_the_driver_requires_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_KEY", _KEY)
    with _driver(ACTORRPC_INTEGRITY="1") as address:
        with _joined(address) as conn:  # integrity applies if either side requires it
            assert conn.writer.seal is not None
        _join_is_refused(address, ProtocolError, "TLS", **certificates.files().options)


@pytest.mark.slow
def test_a_worker_is_invisible_to_others_until_it_has_joined() -> None:
    changes: list[tuple[str, str]] = []
    with init(listen="tcp://127.0.0.1:0", num_cpus=1, transport="tcp") as context:
        rpc.on_member_change(lambda worker, old, new, reason: changes.append((worker.name, new)))
        agent = driver_rpc.current().agent  # type: ignore[union-attr]
        seen: set[str] = set()
        admit = driver_rpc.current().admit  # type: ignore[union-attr]

        def admit_and_record(request: Any) -> Any:
            visitors = [peer.name for peer in agent.peers() if peer.record.is_visitor]
            assert visitors  # the joining worker is connected as a visitor
            seen.update(row.name for row in rpc.workers())
            seen.update(info.name for info in rpc.get_worker_infos())
            return admit(request)

        driver_rpc.current().admit = admit_and_record  # type: ignore[union-attr, method-assign]
        with joiner(context.address, "--name", "far", ACTORRPC_TRANSPORT="tcp") as process:
            until(lambda: is_there("far"))
            assert actorrpc.get(actorrpc.remote(os.getpid).options(worker="far").remote()) == process.pid
            process.terminate()
            until(lambda: ("far", "left") in changes)
        assert seen == {"driver"}
        assert changes == [("far", "left")]
        until(lambda: not [peer for peer in agent.peers() if peer.record.is_visitor])
        assert not [end for end in agent.peer_table._ends.values() if end.name.startswith("joining-")]
        assert [row.name for row in rpc.workers()] == ["driver", "far"]
