"""``init(dashboard=...)``: the dashboard as a child process of the driver."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import actorrpc
from actorrpc import rpc
from actorrpc.cluster.api import page_address
from actorrpc.errors import ConfigError
from tests.actors.e2e.kit import until

pytestmark = [pytest.mark.limit(60)]
_LINK = re.compile(r"(http://\S+)#token=(\S+)")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (False, None),
        (True, ("127.0.0.1", 0)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("localhost", ("localhost", 0)),
        ("127.0.0.1:8265", ("127.0.0.1", 8265)),
        ("[::1]:8265", ("::1", 8265)),
    ],
)
def test_the_dashboard_option_gives_host_and_port(
    given: bool | str, expected: tuple[str, int] | None
) -> None:
    assert page_address(given) == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("0.0.0.0:8265", r"--tls-cert.*ssh -L"),
        ("192.0.2.1", "--tls-cert"),
        ("127.0.0.1:x", "host:port"),
        ("", "an address is a host"),
        (1, "dashboard must be a str"),
        (None, "dashboard must be a str"),
    ],
)
def test_remote_and_malformed_dashboard_addresses_are_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        actorrpc.init(dashboard=given)
    assert not rpc.is_initialized()


def test_dashboard_is_refused_when_joining_and_the_error_names_the_command() -> None:
    with pytest.raises(ConfigError, match=r"--connect tcp://127\.0\.0\.1:1"):
        actorrpc.init("tcp://127.0.0.1:1", dashboard=True)


def test_without_the_dashboard_extra_init_fails_before_it_starts_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'actorrpc\[dashboard\]'"):
        actorrpc.init(dashboard=True)
    assert not rpc.is_initialized()


def _listens(address: str) -> bool:
    parts = urlsplit(address)
    with socket.socket() as made:
        return made.connect_ex((parts.hostname, parts.port)) == 0


def _first_view(address: str, token: str) -> dict[str, Any]:
    """Log in like a browser that follows the link; return the data of the first view."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    connection.request("POST", f"{parts.path}login", token, {"Origin": f"http://{parts.netloc}"})
    answer = connection.getresponse()
    cookie = answer.headers["Set-Cookie"].partition(";")[0]
    answer.read()
    connection.request("GET", f"{parts.path}api/now", None, {"Cookie": cookie})
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


@pytest.mark.slow
def test_the_dashboard_shows_the_cluster_and_ends_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    text = ""

    def link() -> re.Match[str] | None:
        nonlocal text
        text += capfd.readouterr().err
        return _LINK.search(text)

    with actorrpc.init(num_cpus=1, dashboard=True):
        until(lambda: link() is not None)
        found = _LINK.search(text)
        assert found is not None
        assert _first_view(found[1], found[2])["pid"] == os.getpid()
    assert not _listens(found[1])
    assert len(_LINK.findall(capfd.readouterr().err)) == 1  # a new link for the next browser


_PROGRAM = """
import signal, actorrpc
actorrpc.init(num_cpus=1, dashboard=True)
signal.pause()
"""


@pytest.mark.slow
def test_the_dashboard_ends_with_a_killed_driver(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM)
    with subprocess.Popen([sys.executable, path], stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stderr is not None
        found = _LINK.search(driver.stderr.readline())
        assert found is not None
        assert _listens(found[1])
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        until(lambda: not _listens(found[1]))
        # All processes that held the pipe have ended, without a traceback.
        assert "Traceback" not in driver.stderr.read()
