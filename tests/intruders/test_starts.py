"""The addresses on which a worker listens: without a key, never beyond its host, unless ``insecure`` is set."""

from __future__ import annotations

import itertools
import logging
import socket
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import actorrpc.rpc as rpc
from actorrpc.config import Settings
from actorrpc.errors import ConfigError
from actorrpc.group import group
from actorrpc.group.group import _Doors
from actorrpc.wire import keys
from tests.ranks import GroupError, run_group

_LOOPBACK = ("127.0.0.1", "127.0.0.9", "::1", "localhost")
_OPEN = ("0.0.0.0", "::")
_KEY_TEXT = "a key of these starts"


def _open(**given: Any) -> tuple[set[str], list[str]]:
    """Open the listening sockets of a worker; return the TCP addresses, and "unix" for each Unix socket."""
    own, has_key = given.pop("own", None), given.pop("has_key", False)
    doors = _Doors()
    try:
        doors.open(Settings(**given), own, has_key)
        inside = [sock for sock in doors.sockets if sock.family == socket.AF_UNIX]
        return {sock.getsockname()[0] for sock in doors.sockets if sock not in inside}, ["unix"] * len(inside)
    finally:
        doors.close()


_MATRIX = list(
    itertools.product(
        (None, "127.0.0.1", "::1", "localhost", *_OPEN),
        ("auto", "unix", "tcp"),
        (False, True),
        (False, True),
        (None, "192.0.2.1"),
    )
)


@pytest.mark.parametrize(("bind", "transport", "has_key", "insecure", "own"), _MATRIX)
@pytest.mark.prints(r"listening on \S+ WITHOUT a key")
def test_without_a_key_a_worker_listens_beyond_its_host_only_if_insecure(
    bind: str | None,
    transport: str,
    has_key: bool,
    insecure: bool,
    own: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = socket.getaddrinfo
    # 192.0.2.1 is reserved for documentation, so this host cannot bind it.
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *given, **named: real("127.0.0.77" if host == "192.0.2.1" else host, *given, **named),
    )
    caplog.set_level(logging.WARNING, logger="actorrpc")
    asked = bind or own
    beyond = asked in (*_OPEN, "192.0.2.1")
    may_refuse = beyond and not has_key and not insecure and transport != "unix"
    given = {"bind": bind, "transport": transport, "has_key": has_key, "insecure": insecure, "own": own}
    if may_refuse and (transport == "tcp" or bind is not None):
        with pytest.raises(ConfigError, match=rf"{asked}.*ACTORRPC_KEY"):
            _open(**given)
        return
    tcp, unix = _open(**given)
    if may_refuse:
        assert not tcp  # only the Unix socket, because TCP was not requested
    assert bool(unix) == (transport != "tcp")
    if transport == "unix":
        assert not tcp
    if tcp and not beyond:
        assert all(address.startswith("127.") or address == "::1" for address in tcp)
    warned = any("WITHOUT a key" in record.getMessage() for record in caplog.records)
    assert warned == bool(tcp and not has_key and insecure)


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        *((host, True) for host in _LOOPBACK),
        *(
            (host, False)
            for host in (*_OPEN, "192.0.2.1", "::1234", "::2", "fe80::1%lo", "1.127.0.1", "::ffff:0.0.0.0")
        ),
    ],
)
def test_is_loopback_recognizes_loopback_addresses(host: str, inside: bool) -> None:
    assert group.is_loopback(host) is inside


def test_a_host_name_is_loopback_only_if_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def resolve(*args: Any, **kwargs: Any) -> Any:
        if not found:
            raise socket.gaierror(-2, "unknown")
        return [(socket.AF_INET, 1, 6, "", (each, 0)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ConfigError, match="without a key"):
        _open(bind="nowhere.example.com")
    found.append("127.0.0.1")
    assert group.is_loopback("127.0.0.1.example.com")
    found.append("192.0.2.1")
    assert not group.is_loopback("127.0.0.1.example.com")


# -- real starts ---------------------------------------------------------------------------------------


def _start(rank: int, world_size: int, store: str, options: dict[str, Any]) -> dict[str, Any]:
    rpc.init_rpc(
        f"w{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=store, **options),
    )
    try:
        state = rpc.api.group()
        found = {
            "keyless": state.agent.connector.key is None,
            "tcp": [host for host, _ in state.agent.record.tcp],
            "sum": rpc.rpc_sync(f"w{(rank + 1) % world_size}", divmod, (7, 2)),
        }
    finally:
        rpc.shutdown()
    return found


def _starts(tmp_path: Path, count: int = 2, env: dict[str, str] | None = None, **options: Any) -> list[Any]:
    return run_group(_start, count, f"file://{tmp_path}/store", options, env=env)


@pytest.mark.slow
def test_without_options_a_group_on_one_host_uses_unix_sockets_and_its_own_key(tmp_path: Path) -> None:
    for found in _starts(tmp_path):
        assert found == {"keyless": False, "tcp": [], "sum": (3, 1)}
    assert not [path for path in Path(keys.runtime_directory()).iterdir() if path.suffix == ".key"]


def test_with_actorrpc_key_a_worker_may_listen_on_all_addresses(tmp_path: Path) -> None:
    for found in _starts(tmp_path, env={"ACTORRPC_KEY": _KEY_TEXT, "ACTORRPC_BIND": "0.0.0.0"}):
        assert not found["keyless"]
        assert len(found["tcp"]) == 1


def test_init_rpc_refuses_to_listen_on_all_addresses_without_a_key(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match=r"ConfigError: this worker would listen on"):
        _starts(tmp_path, 1, bind="0.0.0.0")


@pytest.mark.prints(r"listening on 0\.0\.0\.0 WITHOUT a key")
def test_insecure_allows_listening_on_all_addresses_without_a_key(tmp_path: Path) -> None:
    for found in _starts(tmp_path, insecure=True, bind="0.0.0.0"):
        assert found["keyless"]
        assert len(found["tcp"]) == 1


# -- encryption ----------------------------------------------------------------------------------------------


def _start_without_cryptography(rank: int, world_size: int, store: str) -> str:
    start: dict[str, Any] = {"tls": True, **dict.fromkeys(("tls_cert", "tls_key", "tls_ca"), "")}
    options = rpc.RpcBackendOptions(init_method=f"{store}-unix", transport="unix", **start)
    rpc.init_rpc("unix", rank=0, world_size=1, rpc_backend_options=options)
    rpc.shutdown()
    assert "cryptography" not in sys.modules
    sys.modules["cryptography"] = cast(Any, None)  # importing it fails from now on
    options = rpc.RpcBackendOptions(init_method=f"{store}-tcp", transport="tcp", **start)
    with pytest.raises(ConfigError) as caught:
        rpc.init_rpc("tcp", rank=0, world_size=1, rpc_backend_options=options)
    return str(caught.value)


def test_the_package_cryptography_is_needed_for_tcp_only(tmp_path: Path) -> None:
    [error] = run_group(_start_without_cryptography, 1, f"file://{tmp_path}/store")
    assert "pip install cryptography" in error
    assert "ACTORRPC_TLS=off" in error
