"""``python -m actorrpc.worker --join tcp://HOST:PORT``: add this machine to a running cluster.

The key comes from ``ACTORRPC_KEY`` or ``ACTORRPC_KEY_FILE``, never from the command line, where every user of the machine
could read it. The worker serves until it is drained or its driver ends. SIGTERM and SIGINT (Ctrl-C) drain it.
docs/reference/exit-statuses.md lists the exit statuses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from actorrpc.cluster import forked_workers, forwarding, join
from actorrpc.cluster.worker_process import exit_process
from actorrpc.errors import ConfigError, ProtocolError, RpcError
from actorrpc.validation import number
from actorrpc.wire.identity import check_name

__all__ = ["main"]


_FAILED: Final = 1
_UNUSABLE: Final = 2
_REFUSED: Final = 3


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_UNUSABLE, f"{self.prog}: {message}\n")


def _pairs(text: str, what: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, sign, value = part.partition("=")
        if not sign or not name or not value:
            raise ConfigError(f"--{what} is written name=value,name=value, not {text!r}")
        found[name] = value
    return found


def _amounts(text: str) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in _pairs(text, "resources").items()}
    except ValueError:
        raise ConfigError(f"--resources takes numbers, like disk=2,tokens=100, not {text!r}") from None


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m actorrpc.worker",
        description="Add a worker to a running cluster. The key is read from ACTORRPC_KEY or ACTORRPC_KEY_FILE.",
        allow_abbrev=False,
    )
    parser.add_argument("--join", metavar="tcp://HOST:PORT", required=True, help="where the driver listens")
    parser.add_argument("--name", help="the worker's name (default: host name and process id)")
    parser.add_argument("--labels", default="", metavar="NAME=WORD,...", help="for options(labels=...)")
    parser.add_argument("--num-cpus", type=float, help="processors to provide (default: all)")
    parser.add_argument("--num-gpus", type=float, help="CUDA devices to provide (default: all)")
    parser.add_argument(
        "--resources", default="", metavar="NAME=NUMBER,...", help="amounts of other resources"
    )
    parser.add_argument(
        "--count",
        type=int,
        metavar="N",
        help="start N workers, which share this machine's processors and devices, and are called NAME-0, NAME-1, ...",
    )
    parser.add_argument("--timeout", type=float, default=30.0, help="the most seconds that joining may take")
    parser.add_argument(
        "--grace",
        type=float,
        default=join.GRACE_S,
        metavar="SECONDS",
        help="how long calls may continue, and actors may move, after SIGTERM (default %(default)g); a signal 1 s later ends it",
    )
    parser.add_argument(
        "--retry",
        action="store_true",
        help="wait for a driver, and for the next driver when the driver has ended; SIGTERM and drain() end the worker",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(each == "--key" or each.startswith(("--key=", "--key-", "--secret")) for each in given):
        # The message does not repeat the argument, which may be the key.
        sys.stderr.write(
            "python -m actorrpc.worker: a key is not taken from the command line, where every user of this machine can read it "
            "(ps); set ACTORRPC_KEY, or ACTORRPC_KEY_FILE to a file that only you can read\n"
        )
        return _UNUSABLE
    found = _parser().parse_args(given)
    try:
        join.parse(found.join, "--join")
        if found.name is not None:
            check_name(found.name)
        number("--timeout", found.timeout, unit="seconds", above=True)
        number("--grace", found.grace, unit="seconds")
        number("--count", found.count, least=1, none=True)
        means = join.JoinedResources(
            num_cpus=found.num_cpus,
            num_gpus=found.num_gpus,
            resources=_amounts(found.resources),
            labels=_pairs(found.labels, "labels"),
        )
    except ConfigError as error:
        sys.stderr.write(f"python -m actorrpc.worker: {error}\n")
        return _UNUSABLE
    if found.count is None:
        forwarding.start()
        return _serve(found, found.name, means)
    prefix = found.name or join.default_name()
    names = [f"{prefix}-{index}" for index in range(found.count)]

    def work(index: int) -> int:
        return _serve(found, names[index], means.take_share(index, found.count))

    return forked_workers.run(names, work)


def _serve(found: argparse.Namespace, name: str | None, means: join.JoinedResources) -> int:
    try:
        return join.serve(
            found.join, name=name, means=means, timeout=found.timeout, grace=found.grace, retry=found.retry
        )
    except (RpcError, OSError) as error:
        sys.stderr.write(f"python -m actorrpc.worker: {error}\n")
        if isinstance(error, ConfigError):
            return _UNUSABLE
        return _REFUSED if isinstance(error, ProtocolError) else _FAILED


if __name__ == "__main__":
    forwarding.enable()
    exit_process(main())
