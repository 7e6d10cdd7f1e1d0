"""The group's key, and the private directory in which a user's workers keep sockets and key files.

Another user may have created a directory or file with an expected name. Therefore the directory and its files must not be
symbolic links, and owner, mode and type are checked (of a file: on its open descriptor). A :class:`Key` contains a key, and does
not show the bytes in ``repr``, in formatted text or in a pickle.

The functions are thread-safe; they do a few file operations and do not wait for other threads or processes. File names contain
the PID namespace, the process id and the start time of the process that created the file, so that :func:`sweep` recognises the
files of dead processes.
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

from actorrpc._exceptions import undo_on_error
from actorrpc.errors import AuthenticationError, ConfigError

__all__ = [
    "MAKE_ONE",
    "Key",
    "accounts_path",
    "boot_id",
    "check_private_file",
    "create_group_file",
    "create_key_file",
    "create_key_in_memory",
    "file_digest",
    "find_key",
    "given_secret",
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
    "write_private_file",
]

#: The parent of the default runtime directory. It is short, because the path of a Unix socket must be short.
DEFAULT_PARENT: Final = "/tmp"
MAX_SOCKET_PATH: Final = 100  # the kernel allows 107 bytes; the rest is a reserve for suffixes
# The least length of a key in bytes. An attacker to whom a worker connects receives a proof made with the key, and can
# test guesses of the key against this proof without a further connection.
_MIN_SIZE: Final = 16
# What a text of a key may consist of, and how many bits of the key each character has; 8 for other texts.
_ALPHABETS: Final = (
    ("hexadecimal digits", re.compile(rb"[0-9A-Fa-f]*"), 4),
    ("characters of base64", re.compile(rb"[0-9A-Za-z+/=_-]*"), 6),
)
MAKE_ONE: Final = "make one with: actorrpc key FILE"
_MAX_FILE: Final = 64 << 10
_RAW: Final = 32
_SOCKET: Final = ".sock"
_GROUP: Final = ".group"
_OBJECTS: Final = ".objects"
_FILE_NAME: Final = re.compile(
    r"(\d+)-(\d+)-(\d+)-([0-9a-f]{16}\.key|[0-9a-f]{8}\.(?:sock|group|[0-9a-f]{8}\.objects))", re.ASCII
)


class Key:
    """A key of 32 bytes, which are not shown in ``repr``, formatted text or pickles. Immutable; compare with ``==``."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if not isinstance(secret, bytes) or len(secret) < _MIN_SIZE:
            del secret  # error reports may show local variables
            raise ConfigError(f"a key must have at least {_MIN_SIZE} bytes")
        # The user may use the same secret elsewhere. The key is a hash of it, so that a leaked key does not reveal the secret.
        self._secret = hashlib.sha256(b"actorrpc group key 1\0" + secret).digest()

    @classmethod
    def from_text(cls, text: str | bytes, where: str = "key=") -> Key:
        """Make a key from the user's text, whose surrounding whitespace is ignored.

        Args:
            where: the source of the text, for the error message.

        Raises:
            ConfigError: the text stands for less than 16 bytes: it has less than 32 hexadecimal digits, less than 22 characters
                of base64, or, if it has other characters, less than 16 bytes in UTF-8.
        """
        secret = (os.fsencode(text) if isinstance(text, str) else text).strip()
        count = len(secret)
        kind, bits = next(
            ((kind, bits) for kind, pattern, bits in _ALPHABETS if pattern.fullmatch(secret)), ("bytes", 8)
        )
        if count * bits // 8 < _MIN_SIZE:
            del text, secret
            raise ConfigError(
                f"the key in {where} has {count} {kind} and needs at least {-(-_MIN_SIZE * 8 // bits)}; {MAKE_ONE}"
            )
        return cls(secret)

    @classmethod
    def revealed(cls, secret: bytes) -> Key:
        """Make a key from the bytes that :meth:`reveal` has returned.

        Raises:
            ConfigError: the argument is not 32 bytes.
        """
        if not isinstance(secret, bytes) or len(secret) != _RAW:
            del secret
            raise ConfigError(f"a revealed key has {_RAW} bytes")
        made = cls.__new__(cls)
        made._secret = secret
        return made

    def reveal(self) -> bytes:
        """Return the 32 bytes. Never log, print or send them."""
        return self._secret

    def tag(self) -> str:
        """Return 8 characters that are equal for equal keys, and from which the key cannot be derived."""
        return hashlib.sha256(b"actorrpc group tag\0" + self._secret).hexdigest()[:8]

    def sign(self, purpose: str, data: bytes) -> bytes:
        """Return an HMAC-SHA256 of ``data`` and ``purpose``, so that it is not valid for a value with another purpose."""
        return hmac.digest(self._secret, b"\0".join((b"actorrpc value 1", purpose.encode(), data)), "sha256")

    def has_signed(self, purpose: str, data: bytes, mac: bytes) -> bool:
        """Say whether :meth:`sign` has returned ``mac`` for this purpose and these data."""
        return hmac.compare_digest(self.sign(purpose, data), mac)

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
    """Return the key in ``ACTORRPC_KEY`` or in the file ``ACTORRPC_KEY_FILE``; None if neither is set.

    Raises:
        ConfigError: both are set, the key is too short, or the file cannot be read, is too large or is not private.
    """
    # The key is not assigned to a local variable, because error reports may show local variables.
    path = _variable(environment, "ACTORRPC_KEY_FILE")
    has_text = bool(_variable(environment, "ACTORRPC_KEY"))
    if has_text and path:
        raise ConfigError("both ACTORRPC_KEY and ACTORRPC_KEY_FILE are set; unset one of them")
    if path:
        return Key.from_text(_read_given(path), f"the file {path!r} (ACTORRPC_KEY_FILE)")
    return Key.from_text(_variable(environment, "ACTORRPC_KEY"), "ACTORRPC_KEY") if has_text else None


def given_secret() -> str:
    """Return the key that ``ACTORRPC_KEY`` or ``ACTORRPC_KEY_FILE`` gives, as text; empty if neither is set.

    Raises:
        ConfigError: the key, or its file, cannot be used.
    """
    if find_key() is None:
        return ""
    text = os.environ.get("ACTORRPC_KEY")
    if text:
        return text.strip()
    return os.fsdecode(_read_given(os.environ["ACTORRPC_KEY_FILE"]).strip())


def _variable(environment: Mapping[str, str] | None, name: str) -> str:
    return (os.environ if environment is None else environment).get(name) or ""


def _read_given(path: str) -> bytes:
    # A symbolic link is allowed, because the user has named the path.
    try:
        problem, data = _read_private(path, _MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(f"cannot read ACTORRPC_KEY_FILE {path!r}: {error.strerror}") from error
    if problem:
        raise ConfigError(f"ACTORRPC_KEY_FILE {path!r} {problem}; it must be yours alone (chmod 600)")
    if len(data) > _MAX_FILE:
        del data
        raise ConfigError(f"ACTORRPC_KEY_FILE {path!r} is larger than {_MAX_FILE} bytes: it is no key")
    return data


def check_private_file(path: str, what: str) -> None:
    """Check that this user can read a file with a secret, and that other users cannot.

    Args:
        what: the purpose of the file, for the error message.

    Raises:
        ConfigError: the file cannot be read, or other users may read it.
    """
    try:
        problem, _ = _read_private(path, 0)
    except OSError as error:
        raise ConfigError(f"{what} {path!r} cannot be read: {error.strerror}") from error
    if problem:
        raise ConfigError(f"{what} {path!r} {problem}; it must be yours alone (chmod 600)")


def _read_private(path: str, most: int, flags: int = 0) -> tuple[str, bytes]:
    """Read up to ``most`` bytes of a file with a secret; return why it is not private, or "", and the bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)  # a named pipe must not block
    try:
        problem = _unfit(os.fstat(fd))
        return problem, b"" if problem else os.read(fd, most)
    finally:
        os.close(fd)


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
    """Write a key into a new file that only this user can read; return its path.

    Args:
        data: the key; empty: write 32 random bytes.

    Raises:
        ConfigError: the runtime directory cannot be used, or its disk is full; no file is left.
    """
    path = os.path.join(runtime_directory(), _new_name(f"{secrets.token_hex(8)}.key"))
    write_private_file(path, data or secrets.token_bytes(_RAW))
    return path


def create_key_in_memory(data: bytes) -> tuple[int, str]:
    """Keep a key in the memory of this process; return a descriptor of it, and a path by which this user's processes read it.

    The path exists until the descriptor is closed, or this process has ended.
    """
    fd = os.memfd_create("actorrpc-key")
    os.fchmod(fd, 0o600)
    os.write(fd, data)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def write_private_file(path: str, data: bytes) -> None:
    """Write a new file that only this user can read.

    Raises:
        ConfigError: there is a file already, or it cannot be written; no part of it is left.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with undo_on_error(partial(remove_file, path)), open(fd, "wb") as file:
            os.fchmod(fd, 0o600)  # the umask may have removed the owner's permission to read
            file.write(data)
    except OSError as error:
        more = ""
        if isinstance(error, FileExistsError):
            more = ", and is not replaced: use this key, or give another path, or remove the file first"
        raise ConfigError(f"cannot write the key file {path!r}: {error.strerror}{more}") from error


def read_key_file(path: str) -> Key:
    """Read a key file of one of this user's processes (:func:`create_key_file`), or a link to it (:func:`link_key_file`).

    ``path`` may come from a store to which other users can write, so no file outside the runtime directory is opened.

    Raises:
        AuthenticationError: ``path`` is not a key file, cannot be read, or was removed with all links to it.
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
                    continue  # the worker that made this link has just ended as well
        raise AuthenticationError(
            f"the group's key file {path!r} was removed: the workers of this host that kept it have ended; if workers "
            "join and leave, give every worker ACTORRPC_KEY"
        ) from error


def _read_made(path: str) -> Key:
    try:
        problem, data = _read_private(path, _RAW + 1, os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise AuthenticationError(f"cannot read the group's key file {path!r}: {error.strerror}") from error
    if problem or len(data) != _RAW:
        del data
        raise AuthenticationError(f"the group's key file {path!r} {problem or 'is damaged'}")
    return Key(data)


def link_key_file(path: str) -> str | None:
    """Keep a key file available while this process lives: create a hard link to it under a name of this process.

    :func:`read_key_file` of ``path`` finds the link after the file itself was removed. Return the path of the link, or None if
    the file was removed already or links cannot be created.

    Raises:
        AuthenticationError: ``path`` is not a key file in the runtime directory.
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


# -- group files -----------------------------------------------------------------------------------


def group_path(socket: str | None) -> str:
    """Return the path of a worker's group file: beside the worker's Unix socket, or else a new path in the runtime directory."""
    if socket is not None and socket.endswith(_SOCKET):
        return socket.removesuffix(_SOCKET) + _GROUP
    return os.path.join(runtime_directory(), _new_name(secrets.token_hex(4) + _GROUP))


def create_group_file(path: str, key: bytes, about: bytes) -> None:
    """Write a group file, by which this user's tools find and query a group on this host.

    Args:
        path: the result of :func:`group_path`.
        key: the revealed key of the group; empty if the user of the tools must give the key.
        about: the packed description of the worker that writes the file.

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
    """Return the path of a worker's list of objects: beside its Unix socket, or else a new path in the runtime directory."""
    ending = f".{tag}{_OBJECTS}"
    if socket is not None and socket.endswith(_SOCKET):
        return socket.removesuffix(_SOCKET) + ending
    return os.path.join(runtime_directory(), _new_name(secrets.token_hex(4) + ending))


def group_files() -> list[tuple[int, str]]:
    """Return ``(pid, path)`` of this user's group files on this host whose process may live, the oldest process first."""
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
    """Return the key (or None) and the description in a group file; None if the file was removed or is still being written.

    Raises:
        AuthenticationError: other users may have changed or read the file, or it cannot be read or is damaged.
    """
    try:
        problem, data = _read_private(path, _MAX_FILE, os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AuthenticationError(f"cannot read the group file {path!r}: {error.strerror}") from error
    if problem:
        raise AuthenticationError(f"the group file {path!r} {problem}")
    if not data:
        return None  # the file is being written
    if data[0] not in (0, _RAW):
        raise AuthenticationError(f"the group file {path!r} is damaged")
    about = data[1 + data[0] :]
    return (Key.revealed(data[1 : 1 + _RAW]) if data[0] else None), about


def is_stale(path: str) -> bool:
    """Whether the process that created a file of the runtime directory has certainly ended."""
    match = _FILE_NAME.fullmatch(os.path.basename(path))
    # This process cannot see whether a process in another PID namespace lives.
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
            f"{path[:200]!r} is not a key file in the runtime directory {directory!r}: all workers of a host "
            "must have the same ACTORRPC_RUNTIME_DIR, or be given ACTORRPC_KEY"
        )
    return directory, match


def remove_file(path: str) -> None:
    """Remove a file if it exists. Errors are ignored."""
    try:
        os.unlink(path)
    except OSError:
        pass


# -- the private directory ---------------------------------------------------------------------------


def runtime_directory(environment: Mapping[str, str] | None = None) -> str:
    """Return the directory for sockets and key files; create it if it does not exist.

    It is ``ACTORRPC_RUNTIME_DIR``, or ``actorrpc`` in ``XDG_RUNTIME_DIR``, or ``/tmp/actorrpc-<uid>``.

    Raises:
        ConfigError: the directory cannot be created, is a link, belongs to another user or is accessible to other users.
    """
    given = os.environ if environment is None else environment
    path = given.get("ACTORRPC_RUNTIME_DIR") or ""
    if path:
        path = os.path.abspath(path)
    else:
        session = given.get("XDG_RUNTIME_DIR") or ""
        # With su, sudo and in containers, XDG_RUNTIME_DIR may name a directory of another user or of an ended session.
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
    """Return a unique path for a new Unix socket that is short enough for the kernel.

    ``directory`` defaults to the runtime directory. If the path would be too long, the directory is ``/tmp/actorrpc-<uid>``.

    Raises:
        ConfigError: no directory can be used.
    """
    name = _new_name(f"{secrets.token_hex(4)}.sock")
    path = os.path.join(runtime_directory() if directory is None else directory, name)
    if len(os.fsencode(path)) >= MAX_SOCKET_PATH:
        path = os.path.join(_private(_default_directory()), name)
    return path


def sweep(directory: str | None = None) -> int:
    """Remove the files of dead processes from a directory (default: both runtime directories); return how many were removed.

    Files of processes in other PID namespaces are kept, because this process cannot see whether those processes live.
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
                    pass  # another worker has removed the file
    return removed


def _new_name(ending: str) -> str:
    pid = os.getpid()
    return f"{_pid_namespace()}-{pid}-{process_start(pid) or 0}-{ending}"


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


# -- processes and the machine, as the kernel reports them ---------------------------------------------


def process_start(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The process's name, in parentheses, may itself contain spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def boot_id() -> str:
    """Return the kernel's id of the current boot of this machine; empty if the kernel does not provide it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def file_digest(path: str) -> str:
    """Return the SHA-256 of a file's content; empty if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
