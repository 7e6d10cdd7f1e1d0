"""``actorrpc doctor``: checks this host and the running groups; reports each fault with its remedy."""

from __future__ import annotations

import importlib
import os
import platform
import resource
import shutil
import stat
from collections.abc import Sequence
from typing import Final

from actorrpc import __version__
from actorrpc.cli.text import amount, count, span
from actorrpc.config import Settings
from actorrpc.errors import ConfigError
from actorrpc.observe.findings import fault, note, some
from actorrpc.observe.model import Finding, GroupState, ObservedWorker
from actorrpc.observe.outside import GroupLook
from actorrpc.transport.tls import Tls, describe
from actorrpc.wire import keys, versions
from actorrpc.wire.handshake import VERSIONS

__all__ = ["here", "lines", "no_group", "not_checked", "of_group"]

_FEW: Final = 4096  # descriptors
_LITTLE: Final = 64 << 20  # bytes of shared memory
_PACKAGES: Final = ("torch", "cloudpickle", "msgpack", "psutil")


def here() -> list[Finding]:
    """Check this host, and the settings that a worker started here would use."""
    return [_packages(), _key(), _directory(), _settings(), _descriptors(), _shared_memory()]


def _packages() -> Finding:
    metadata = importlib.import_module(
        "importlib.metadata"
    )  # importing this takes 30 ms, which other commands should not spend
    found: list[str] = []
    missing: list[str] = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    what = f"actorrpc {__version__} (protocol {VERSIONS[1]}), Python {platform.python_version()}, {', '.join(found)}"
    if missing:
        return fault(
            "versions", f"{what}; not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    return note("versions", what)


def _key() -> Finding:
    try:
        given = keys.find_key()
    except ConfigError as error:
        return fault("key", str(error), "unset the variable, or let only yourself read the file (chmod 600)")
    if given is None:
        return note(
            "key",
            "no key is given: groups of this host make their own; several hosts need ACTORRPC_KEY or ACTORRPC_KEY_FILE",
        )
    by = "ACTORRPC_KEY_FILE" if os.environ.get("ACTORRPC_KEY_FILE") else "ACTORRPC_KEY"
    return note("key", f"a key is given by {by}")


def _directory() -> Finding:
    try:
        path = keys.runtime_directory()
    except ConfigError as error:
        return fault(
            "directory", str(error), "set ACTORRPC_RUNTIME_DIR, or repair owner and mode (chmod 700)"
        )
    wrong = []
    stale = 0
    for name in os.listdir(path):
        stale += keys.is_stale(name)
        found = os.lstat(os.path.join(path, name))
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            wrong.append(f"{name} (mode {stat.S_IMODE(found.st_mode):04o}, user {found.st_uid})")
    if wrong:
        return fault(
            "directory",
            f"files in {path} are open to others: {', '.join(wrong[:5])}",
            "remove them, or chmod 600",
        )
    left = (
        f"; {count(stale, 'file')} of processes that have ended, which the next worker removes"
        if stale
        else ""
    )
    return note("directory", f"only this user can access {path}{left}")


def _settings() -> Finding:
    try:
        settings = Settings.from_environment()
        tls = Tls.load(settings)
    except ConfigError as error:
        return fault("settings", str(error), "correct the variable, or unset it")
    return note("settings", f"variables are valid; TLS: {describe(tls)}")


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"a process may have {soft} descriptors (hard limit {hard})"
    if 0 <= hard < _FEW:
        return fault(
            "descriptors",
            what,
            "raise the hard limit: LimitNOFILE= of the service, --ulimit nofile= of the container",
        )
    return note("descriptors", what)


def _shared_memory() -> Finding:
    try:
        # actorrpc's segments are memfds, which are in no file system, so only memory limits them. DataLoader uses /dev/shm.
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return fault(
            "shared memory",
            f"/dev/shm cannot be used: {error}",
            "mount a tmpfs there: DataLoader workers need it",
        )
    what = f"/dev/shm has {amount(usage.free)} free of {amount(usage.total)}; actorrpc's own segments are outside of it"
    if usage.free < _LITTLE:
        return fault("shared memory", what, "enlarge it (docker run --shm-size=), or remove files there")
    return note("shared memory", what)


def no_group(text: str) -> Finding:
    """Return the finding that there is no group to check."""
    return note("group", f"no group was checked: {text}")


def not_checked(text: str, remedy: str = "") -> Finding:
    """Return the finding that a group exists, or was named, and could not be checked."""
    return fault("group", f"a group was not checked: {text}", remedy)


def of_group(look: GroupLook) -> list[Finding]:
    """Check a group whose state was read."""
    state = look.state
    title = f"{look.group.what}" + (f" (pid {look.group.pids[0]})" if look.group.pids else "")
    reached = [each for each in state.workers if each.state == "alive"]
    what = f"{title}: {len(reached)} of {count(len(state.workers), 'worker')} answered in {span(look.took)}"
    reachability = Finding(kind="reachability", wrong=len(reached) < len(state.workers), what=what)
    return [reachability, *_mixed(state), *state.findings]


def _mixed(state: GroupState) -> list[Finding]:
    """Report the packages of which workers have different versions."""
    found = []
    for name in versions.NAMES:
        there: dict[str, list[ObservedWorker]] = {}
        for each in state.workers:
            if name in each.versions:
                there.setdefault(versions.to_compare(name, each.versions[name]), []).append(each)
        if len(there) > 1:
            parts = []
            for version, workers in there.items():
                hosts = ", ".join(sorted({each.host for each in workers})[:5])
                parts.append(f"{version} on {some([each.name for each in workers])} (host {hosts})")
            found.append(
                fault(
                    "versions",
                    f"workers have different versions of {name}: {'; '.join(parts)}",
                    "install the same version on all hosts; docs/how-to/several-hosts.md says which versions may be mixed",
                )
            )
    return found


def lines(checks: Sequence[Finding]) -> list[str]:
    """Return what ``doctor`` prints."""
    found = []
    for each in checks:
        found.append(f"{'WRONG' if each.wrong else 'ok   '} {each.kind}: {each.what}")
        if each.remedy:
            found.append(f"      -> {each.remedy}")
    wrong = sum(each.wrong for each in checks)
    nothing = (
        "No faults." if any(each.kind == "reachability" for each in checks) else "No faults on this host."
    )
    return [*found, "", count(wrong, "fault") if wrong else nothing]
