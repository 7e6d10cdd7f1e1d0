"""The page that ``init(dashboard=True)`` serves: ``actorrpc dashboard`` as a child process of the driver.

The child reads the state of the group as a command does, so the driver needs no port and no thread for the page. The child ends
with the cluster, and when the driver ends: the child watches the driver's pidfd, because a pipe would stay open in forks of the
driver.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Final

from actorrpc.cluster.provisioners.fork_client import import_path
from actorrpc.config import host_and_port
from actorrpc.errors import ConfigError
from actorrpc.group import group
from actorrpc.rpc import api
from actorrpc.validation import text

__all__ = ["listens_at", "start"]

_END_S: Final = 0.5  # how long the child may take to send a last event to open pages
# Not `-m`: the child's default path may not contain this package.
_BOOT: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from actorrpc.cli.commands import main
sys.exit(main())
"""


def listens_at(dashboard: bool | str) -> tuple[str, int] | None:
    """Return the address and port of the page, with 0 for any port; None if there should be no page.

    Raises:
        ConfigError: other hosts can reach the address, or the server's packages are not installed.
    """
    if dashboard is False:
        return None
    host, port = "127.0.0.1", None
    if dashboard is not True:
        given = text("dashboard", dashboard) or ""
        host, port = host_and_port(given.removesuffix(":0"))
        if not group.is_loopback(host):
            raise ConfigError(
                f"dashboard={given!r}: other hosts can reach that address. With a certificate, `actorrpc dashboard --bind {host} "
                "--tls-cert FILE --tls-key FILE` serves the page there; without one, use dashboard=True and a tunnel: "
                "ssh -L PORT:127.0.0.1:PORT HOST"
            )
    if any(importlib.util.find_spec(each) is None for each in ("starlette", "uvicorn")):
        raise ConfigError(
            "dashboard=: pip install 'actorrpc[dashboard]' brings starlette and uvicorn, which serve the page"
        )
    return host, port or 0


def start(where: tuple[str, int]) -> None:
    """Start the page of the cluster that this process drives, and do not wait: the child prints a link on stderr.

    Raises:
        OSError: the process cannot be started.
    """
    host, port = where
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    own = str(os.getpid())
    process = subprocess.Popen(
        [
            *(sys.executable, *flags, "-P", "-c", _BOOT, json.dumps(import_path())),
            *("dashboard", "--bind", host, "--port", str(port), "--pid", own, "--ends-with", own),
        ],
        stdin=subprocess.DEVNULL,
        stdout=2,  # not the driver's stdout, which another program may read
        start_new_session=True,  # Ctrl-C in the terminal is for the driver only
    )

    def shut_down(_graceful: bool) -> None:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    api.add_shutdown_hook(shut_down)
