"""The group's key, and the private directory in which a user's workers keep sockets and key files.

Nothing here trusts a path or a file that somebody else could have made: directories and files are opened
without following links and checked (owner, mode, kind) on the open descriptor. A key is held in a
:class:`Key`, which never shows it: not in ``repr``, not in a format, not in a pickle.

Any thread may call these functions; they do a few file operations and never wait for anyone. File names
carry the PID namespace, process id and start time of their maker, so that :func:`sweep` can tell what
dead processes have left.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping
from functools import partial
from typing import Final, NoReturn

from actorrpc._undo import undo_on_error
from actorrpc.errors import AuthenticationError, ConfigError

__all__ = [
    "Key",
    "accounts_path",
    "boot_id",
    "check_private_file",
    "create_group_file",
    "create_key_file",
    "file_digest",
    "find_key",
    "group_files",
    "group_path",
    "is_stale",
    "link_key_file",
    "process_start",
    "read_group_file",
    "read_key_file",
    "remove_file",
    "runtime_directory",
    "socket_path",
    "sweep",
]

#: Where the directory lies that is used where no other is given: short, as the path of a socket has few bytes.
DEFAULT_PARENT: Final = "/tmp"
MAX_SOCKET_PATH: Final = 100  # the kernel takes 107 bytes; some are left for what others may append
_MIN_TEXT: Final = 16
_MAX_FILE: Final = 64 << 10
_RAW: Final = 32
_SOCKET: Final = ".sock"
_GROUP: Final = ".group"
_OBJECTS: Final = ".objects"
_FILE_NAME: Final = re.compile(
    r"(\d+)-(\d+)-(\d+)-([0-9a-f]{16}\.key|[0-9a-f]{8}\.(?:sock|group|[0-9a-f]{8}\.objects))", re.ASCII
)


class Key:
    """A key of 32 bytes that never shows itself. Immutable; compare with ``==``."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if not isinstance(secret, bytes) or len(secret) < _MIN_TEXT:
            del secret  # a report of the error may show variables
            raise ConfigError(f"a key must have at least {_MIN_TEXT} bytes")
        # Whatever the user gave, and whatever else it protects, this key is good for nothing but actorrpc.
        self._secret = hashlib.sha256(b"actorrpc group key 1\0" + secret).digest()

    @classmethod
    def from_text(cls, text: str | bytes, where: str = "key=") -> Key:
        """Make the key that a user's text stands for; space around it does not count.

        Raises:
            ConfigError: it has less than 16 characters; ``where`` says where it was given.
        """
        secret = (os.fsencode(text) if isinstance(text, str) else text).strip()
        if len(secret) < _MIN_TEXT:
            size = len(secret)
            del text, secret
            raise ConfigError(
                f"the key in {where} has {size} characters and needs at least {_MIN_TEXT}; "
                "make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
            )
        return cls(secret)

    @classmethod
    def revealed(cls, secret: bytes) -> Key:
        """Make the key that :meth:`reveal` has returned.

        Raises:
            ConfigError: these are not 32 bytes.
        """
        if not isinstance(secret, bytes) or len(secret) != _RAW:
            del secret
            raise ConfigError(f"what a key reveals has {_RAW} bytes")
        made = cls.__new__(cls)
        made._secret = secret
        return made

    def reveal(self) -> bytes:
        """Return the 32 bytes. Never log, print or send them."""
        return self._secret

    def tag(self) -> str:
        """Return 8 characters that are the same for all who have the key, and say nothing of it."""
        return hashlib.sha256(b"actorrpc group tag\0" + self._secret).hexdigest()[:8]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and hmac.compare_digest(self._secret, other._secret)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "<Key>"

    def __format__(self, spec: str) -> str:
        return "<Key>"

    def __copy__(self) -> Key:
        return self

    def __deepcopy__(self, memo: object) -> Key:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a key is not pickled or sent: give it to each worker by ACTORRPC_KEY or ACTORRPC_KEY_FILE"
        )

    __getstate__ = __reduce__


# -- keys that are given ---------------------------------------------------------------------------


def find_key(environment: Mapping[str, str] | None = None) -> Key | None:
    """Return the key that ``ACTORRPC_KEY`` or the file ``ACTORRPC_KEY_FILE`` gives; None without either.

    Raises:
        ConfigError: both are given, the key is too short, or others may read the file.
    """
    # The key is in no variable here: a report of an error may show them.
    path = _variable(environment, "ACTORRPC_KEY_FILE")
    has_text = bool(_variable(environment, "ACTORRPC_KEY"))
    if has_text and path:
        raise ConfigError("both ACTORRPC_KEY and ACTORRPC_KEY_FILE are set; unset one of them")
    if path:
        return Key.from_text(_read_given(path), f"the file {path!r} (ACTORRPC_KEY_FILE)")
    return Key.from_text(_variable(environment, "ACTORRPC_KEY"), "ACTORRPC_KEY") if has_text else None


def _variable(environment: Mapping[str, str] | None, name: str) -> str:
    return (os.environ if environment is None else environment).get(name) or ""


def _read_given(path: str) -> bytes:
    # A link is fine here, the user named it; NONBLOCK, so that a named pipe cannot hold us up.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot read ACTORRPC_KEY_FILE {path!r}: {error.strerror}") from error
    try:
        problem = _unfit(os.fstat(fd))
        if problem:
            raise ConfigError(f"ACTORRPC_KEY_FILE {path!r} {problem}; it must be yours alone (chmod 600)")
        data = os.read(fd, _MAX_FILE + 1)
    finally:
        os.close(fd)
    if len(data) > _MAX_FILE:
        del data
        raise ConfigError(f"ACTORRPC_KEY_FILE {path!r} is larger than {_MAX_FILE} bytes: it is no key")
    return data


def check_private_file(path: str, what: str) -> None:
    """See that a file that holds a secret can be read, and by nobody else; ``what`` says what it is given for.

    Raises:
        ConfigError: it cannot be read, or others may read it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{what} {path!r} cannot be read: {error.strerror}") from error
    try:
        problem = _unfit(os.fstat(fd))
    finally:
        os.close(fd)
    if problem:
        raise ConfigError(f"{what} {path!r} {problem}; it must be yours alone (chmod 600)")


def _unfit(found: os.stat_result) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    if found.st_uid != os.getuid():
        return f"belongs to user {found.st_uid}, not to us ({os.getuid()})"
    if found.st_mode & 0o077:
        return f"may be read by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


# -- keys that are made ----------------------------------------------------------------------------


def create_key_file(data: bytes = b"") -> str:
    """Write a key, or else 32 random bytes, into a new file that only this user can read; return its path.

    Raises:
        ConfigError: the runtime directory cannot be used, or its disk is full; no file is left.
    """
    path = os.path.join(runtime_directory(), _new_name(f"{secrets.token_hex(8)}.key"))
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with undo_on_error(partial(remove_file, path)), open(fd, "wb") as file:
            os.fchmod(fd, 0o600)  # a umask may have taken away our own right to read
            file.write(data or secrets.token_bytes(_RAW))
    except OSError as error:
        raise ConfigError(
            f"cannot write a key file into {os.path.dirname(path)!r}: {error.strerror}"
        ) from error
    return path


def read_key_file(path: str) -> Key:
    """Read a file that :func:`create_key_file` of one of this user's processes has made, or a link to it.

    ``path`` may come from a store that anyone can write to: nothing outside our own directory is opened.

    Raises:
        AuthenticationError: it is not such a file, or it and all links to it are gone.
        ConfigError: the runtime directory cannot be used.
    """
    directory, name = _own_key_file(path)
    try:
        return _read_made(path)
    except FileNotFoundError as error:
        for other in sorted(os.listdir(directory)):
            match = _FILE_NAME.fullmatch(other)
            if match is not None and match[4] == name[4]:
                try:
                    return _read_made(os.path.join(directory, other))
                except FileNotFoundError:
                    continue  # that worker has just ended as well
        raise AuthenticationError(
            f"the group's key file {path!r} is gone: the workers of this host that had it have ended; give "
            "every worker ACTORRPC_KEY where workers come and go"
        ) from error


def _read_made(path: str) -> Key:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise AuthenticationError(f"cannot read the group's key file {path!r}: {error.strerror}") from error
    try:
        problem = _unfit(os.fstat(fd))
        data = b"" if problem else os.read(fd, _RAW + 1)
    finally:
        os.close(fd)
    if problem or len(data) != _RAW:
        del data
        raise AuthenticationError(f"the group's key file {path!r} {problem or 'is damaged'}")
    return Key(data)


def link_key_file(path: str) -> str | None:
    """Keep a key file of a group alive as long as this process: link it under our own name.

    Readers of ``path`` find the link when the file itself is gone. Return the link, or None where the file
    is gone already or links cannot be made.

    Raises:
        AuthenticationError: it is no key file of ours.
        ConfigError: the runtime directory cannot be used.
    """
    directory, name = _own_key_file(path)
    own = os.path.join(directory, _new_name(name[4]))
    try:
        os.link(path, own, follow_symlinks=False)
    except FileExistsError:
        return own
    except OSError:
        return None
    return own


# -- groups that can be looked into ----------------------------------------------------------------


def group_path(socket: str | None) -> str:
    """Return where the group file of a worker lies: beside its Unix socket, where it has one."""
    if socket is not None and socket.endswith(_SOCKET):
        return socket.removesuffix(_SOCKET) + _GROUP
    return os.path.join(runtime_directory(), _new_name(secrets.token_hex(4) + _GROUP))


def create_group_file(path: str, key: bytes, about: bytes) -> None:
    """Write a file by which this user's tools find a group of this host, and may look into it.

    Args:
        path: as :func:`group_path` has given it.
        key: what the group's key reveals; empty where those who look have to be given the key.
        about: who the worker is that writes it.

    Raises:
        ConfigError: the directory cannot be used, or its disk is full; no file is left.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with undo_on_error(partial(remove_file, path)), open(fd, "wb", buffering=0) as file:
            os.fchmod(fd, 0o600)
            file.write(bytes([len(key)]) + key + about)
    except OSError as error:
        raise ConfigError(f"cannot write {path!r}: {error.strerror}") from error


def accounts_path(socket: str | None, tag: str) -> str:
    """Return where the file lies in which a worker says what objects it holds: beside its Unix socket, where it has one."""
    ending = f".{tag}{_OBJECTS}"
    if socket is not None and socket.endswith(_SOCKET):
        return socket.removesuffix(_SOCKET) + ending
    return os.path.join(runtime_directory(), _new_name(secrets.token_hex(4) + ending))


def group_files() -> list[tuple[int, str]]:
    """Return the group files of this user's processes on this host that live: their process ids and paths, the oldest first."""
    found: dict[str, tuple[int, int]] = {}
    for folder in {runtime_directory(), _default_directory()}:
        if not _is_ours(folder):
            continue
        for name in os.listdir(folder):
            match = _FILE_NAME.fullmatch(name)
            if match is not None and name.endswith(_GROUP) and not is_stale(name):
                found[os.path.join(folder, name)] = int(match[3]), int(match[2])
    return [(pid, path) for path, (_, pid) in sorted(found.items(), key=lambda each: (each[1], each[0]))]


def read_group_file(path: str) -> tuple[Key | None, bytes] | None:
    """Read what :func:`create_group_file` wrote: the key, if it is there, and who the worker is; None where the file is gone.

    Raises:
        AuthenticationError: it is not ours alone, or is damaged.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AuthenticationError(f"cannot read the group file {path!r}: {error.strerror}") from error
    try:
        problem = _unfit(os.fstat(fd))
        data = b"" if problem else os.read(fd, _MAX_FILE)
    finally:
        os.close(fd)
    if problem:
        raise AuthenticationError(f"the group file {path!r} {problem}")
    if not data:
        return None  # it is being written
    if data[0] not in (0, _RAW):
        raise AuthenticationError(f"the group file {path!r} is damaged")
    about = data[1 + data[0] :]
    return (Key.revealed(data[1 : 1 + _RAW]) if data[0] else None), about


def is_stale(path: str) -> bool:
    """Whether a socket or key file was certainly made by a process that has ended."""
    match = _FILE_NAME.fullmatch(os.path.basename(path))
    # Of processes in another PID namespace nobody here can say whether they live.
    return (
        match is not None
        and int(match[1]) == _pid_namespace()
        and process_start(int(match[2])) != int(match[3])
    )


def _own_key_file(path: str) -> tuple[str, re.Match[str]]:
    directory = runtime_directory()
    name = os.path.basename(path)
    match = _FILE_NAME.fullmatch(name)
    if path != os.path.join(directory, name) or match is None or not name.endswith(".key"):
        raise AuthenticationError(
            f"{path[:200]!r} is no key file in our runtime directory {directory!r}: all workers of a host "
            "must have the same ACTORRPC_RUNTIME_DIR, or be given ACTORRPC_KEY"
        )
    return directory, match


def remove_file(path: str) -> None:
    """Remove a file of ours; it may be gone already."""
    try:
        os.unlink(path)
    except OSError:
        pass


# -- the private directory ---------------------------------------------------------------------------


def runtime_directory(environment: Mapping[str, str] | None = None) -> str:
    """Return the directory for sockets and key files; make it if it is not there.

    It is ``ACTORRPC_RUNTIME_DIR``, or ``actorrpc`` in ``XDG_RUNTIME_DIR``, or ``/tmp/actorrpc-<uid>``.

    Raises:
        ConfigError: it cannot be made, is a link, belongs to someone else or is open to others.
    """
    given = os.environ if environment is None else environment
    path = given.get("ACTORRPC_RUNTIME_DIR") or ""
    if path:
        path = os.path.abspath(path)
    else:
        session = given.get("XDG_RUNTIME_DIR") or ""
        # It often outlives or precedes the session it is meant for (su, sudo, containers): then do without.
        path = os.path.join(session, "actorrpc") if _is_ours(session) else _default_directory()
    return _private(path)


def _default_directory() -> str:
    return f"{DEFAULT_PARENT}/actorrpc-{os.getuid()}"


def _is_ours(path: str) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return (
        os.path.isabs(path)
        and stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and os.access(path, os.W_OK)
    )


def _private(path: str) -> str:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise _unusable(path, f"cannot be made: {error.strerror}") from error
    try:
        found = os.lstat(path)
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode):
        raise _unusable(path, "is a symbolic link")
    if not stat.S_ISDIR(found.st_mode):
        raise _unusable(path, "is not a directory")
    if found.st_uid != os.getuid():
        raise _unusable(path, f"belongs to user {found.st_uid}, not to us ({os.getuid()})")
    if found.st_mode & 0o077 or found.st_mode & 0o700 != 0o700:
        raise _unusable(path, f"has mode {stat.S_IMODE(found.st_mode):04o}, not 0700 (chmod 700 {path})")
    return path


def _unusable(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"the runtime directory {path!r} {why}; set ACTORRPC_RUNTIME_DIR to a directory that is yours alone"
    )


def socket_path(directory: str | None = None) -> str:
    """Return a path for a new Unix socket, unique and short enough for the kernel.

    ``directory`` is the runtime directory unless given. Where it is too long, ``/tmp/actorrpc-<uid>`` is
    used instead.

    Raises:
        ConfigError: no directory can be used.
    """
    name = _new_name(f"{secrets.token_hex(4)}.sock")
    path = os.path.join(runtime_directory() if directory is None else directory, name)
    if len(os.fsencode(path)) >= MAX_SOCKET_PATH:
        path = os.path.join(_private(_default_directory()), name)
    return path


def sweep(directory: str | None = None) -> int:
    """Remove what dead processes have left in the runtime directory; return how many files that were.

    Files of processes in another PID namespace are left alone: here nobody can say whether they live.
    """
    removed = 0
    for folder in {runtime_directory(), _default_directory()} if directory is None else {directory}:
        if not _is_ours(folder):
            continue
        for name in os.listdir(folder):
            if is_stale(name):
                try:
                    os.unlink(os.path.join(folder, name))
                    removed += 1
                except OSError:
                    pass  # another worker sweeps too
    return removed


def _new_name(ending: str) -> str:
    pid = os.getpid()
    return f"{_pid_namespace()}-{pid}-{process_start(pid) or 0}-{ending}"


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


# -- what the kernel says of processes -----------------------------------------------------------------


def process_start(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None for a zombie or no process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may itself hold spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def boot_id() -> str:
    """Return the kernel's name for this boot of this machine; empty where it does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def file_digest(path: str) -> str:
    """Return the SHA-256 of what is in a file; empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
