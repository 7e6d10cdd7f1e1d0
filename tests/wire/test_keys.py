"""Keys: they are never shown, and key files and directories of other users are not trusted."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from actorrpc.cluster import join
from actorrpc.errors import AuthenticationError, ConfigError
from actorrpc.wire import keys
from actorrpc.wire.keys import Key

TEXT = "correct horse battery staple"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run"
    monkeypatch.setenv("ACTORRPC_RUNTIME_DIR", str(path))
    return path


@pytest.fixture
def swept_directory(directory: Path, default_parent: Path) -> Path:
    """Restrict sweeping to a directory of this test; in the user's directory, files of other programs come and go."""
    return directory


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    return process.pid


def _name_of(pid: int, start: int, ending: str) -> str:
    return f"{keys._pid_namespace()}-{pid}-{start}-{ending}"


# -- the class -------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [b"", b"x" * 15, TEXT])
def test_a_key_that_is_short_or_no_bytes_is_refused(secret: bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        Key(secret)
    assert TEXT not in str(caught.value)
    with pytest.raises(ConfigError, match="a revealed key has 32 bytes"):
        Key.revealed(secret)
    Key(b"x" * 16)


@pytest.mark.parametrize(
    ("short", "says", "enough"),
    [
        ("0f" * 15, "30 hexadecimal digits and needs at least 32", "0f" * 16),
        ("Zz" * 10, "20 characters of base64 and needs at least 22", "Zz" * 11),
        ("a word, a key", "13 bytes and needs at least 16", "a word, a key, x"),
    ],
)
def test_a_text_that_stands_for_less_than_16_bytes_is_refused(short: str, says: str, enough: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Key.from_text(short)
    Key.from_text(enough)


# -- given keys --------------------------------------------------------------------------------------


def test_find_key_reads_either_variable_and_refuses_both(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(TEXT + "\n")
    path.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert keys.find_key({"ACTORRPC_KEY": TEXT}) == Key.from_text(TEXT) != Key.from_text(TEXT + "!")
    assert keys.find_key({"ACTORRPC_KEY_FILE": str(path)}) == Key.from_text(TEXT)
    assert keys.find_key({"ACTORRPC_KEY_FILE": str(link)}) == Key.from_text(TEXT)
    with pytest.raises(ConfigError, match="both"):
        keys.find_key({"ACTORRPC_KEY_FILE": str(path), "ACTORRPC_KEY": TEXT})


def test_a_missing_large_short_open_or_irregular_key_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, text, mode in (
        ("large", "x" * (1 << 17), 0o600),
        ("short", "s3cr3t", 0o600),
        ("readable", TEXT, 0o640),
        ("writable", TEXT, 0o620),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    for name, says in {
        "gone": "No such file",
        "pipe": "regular file",
        ".": "regular file",
        "large": "larger",
        "short": "at least 22; make one with: actorrpc key",
        "readable": "chmod 600",
        "writable": "chmod 600",
    }.items():
        with pytest.raises(ConfigError, match=says) as caught:
            keys.find_key({"ACTORRPC_KEY_FILE": str(tmp_path / name)})
        assert TEXT not in str(caught.value)


def test_a_key_file_and_a_runtime_directory_of_another_user_are_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(TEXT)
    (tmp_path / "key").chmod(0o600)
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(ConfigError, match="belongs to user"):
        keys.find_key({"ACTORRPC_KEY_FILE": str(tmp_path / "key")})
    with pytest.raises(ConfigError, match="belongs to user"):
        keys.runtime_directory()


# -- the private directory -----------------------------------------------------------------------------


def test_the_runtime_directory_is_created_with_mode_0700(directory: Path) -> None:
    assert keys.runtime_directory() == str(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert keys.runtime_directory() == str(directory)


def test_runtime_directory_prefers_its_variable_then_xdg_then_tmp(
    default_parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = str(default_parent / f"actorrpc-{os.getuid()}")
    session = default_parent / "session"
    assert keys.runtime_directory({}) == default
    assert (
        keys.runtime_directory({"XDG_RUNTIME_DIR": str(session)}) == default
    )  # the directory does not exist
    session.mkdir()
    assert keys.runtime_directory({"XDG_RUNTIME_DIR": str(session)}) == str(session / "actorrpc")
    monkeypatch.chdir(default_parent)
    assert keys.runtime_directory({"XDG_RUNTIME_DIR": "session"}) == default  # not absolute
    given = {"XDG_RUNTIME_DIR": str(session), "ACTORRPC_RUNTIME_DIR": "mine"}
    assert keys.runtime_directory(given) == str(default_parent / "mine")


def _open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def _a_link(path: Path) -> None:
    other = path.parent / "other"
    other.mkdir(mode=0o700)
    path.symlink_to(other)


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (_open_to_others, "mode 0755, not 0700 .chmod 700"),
        (_a_link, "symbolic link"),
        (Path.touch, "not a directory"),
        (lambda path: path.mkdir(mode=0o300), "mode 0300"),
    ],
)
def test_a_runtime_directory_with_a_wrong_mode_or_type_is_refused(
    directory: Path, prepare: Callable[[Path], None], says: str
) -> None:
    prepare(directory)
    with pytest.raises(ConfigError, match=says) as caught:
        keys.runtime_directory()
    assert "set ACTORRPC_RUNTIME_DIR" in str(caught.value)


def test_a_runtime_directory_that_cannot_be_created_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        keys.runtime_directory({"ACTORRPC_RUNTIME_DIR": str(tmp_path / "no" / "such")})


# -- sockets and sweeping --------------------------------------------------------------------------------


def test_a_directory_too_long_for_socket_paths_is_replaced(default_parent: Path) -> None:
    short = default_parent / f"actorrpc-{os.getuid()}"
    long = default_parent / ("x" * 90)
    long.mkdir(mode=0o700)
    path = keys.socket_path(str(long))
    assert os.path.dirname(path) == str(short)
    assert stat.S_IMODE(short.stat().st_mode) == 0o700


def test_sweep_removes_only_files_of_dead_processes(swept_directory: Path, dead_pid: int) -> None:
    folder = Path(keys.runtime_directory())
    own = keys.process_start(os.getpid())
    assert own is not None
    stale = [
        folder / _name_of(dead_pid, 1, "0123abcd.sock"),
        folder / _name_of(dead_pid, 1, "0123456789abcdef.key"),
        folder / _name_of(os.getpid(), own + 1, "0123abcd.sock"),  # another process has got the PID since
    ]
    kept = [
        folder / _name_of(os.getpid(), own, "0123abcd.sock"),
        folder / f"1-{dead_pid}-1-0123abcd.sock",  # another PID namespace: cannot be checked
        folder / "notes.txt",
        folder / _name_of(dead_pid, 1, "0123abcd.txt"),
        Path(keys.create_key_file()),
    ]
    for path in stale + kept:
        path.touch()
    assert keys.sweep() == len(stale)
    assert not [path for path in stale if path.exists()]
    assert not [path for path in kept if not path.exists()]
    assert keys.sweep() == 0
    assert [keys.is_stale(str(path)) for path in stale] == [True] * 3
    assert not any(keys.is_stale(str(path)) for path in kept)


def test_the_files_of_a_process_that_its_parent_has_not_reaped_yet_are_stale(swept_directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = keys.process_start(child.pid)
    assert start is not None
    path = Path(keys.runtime_directory()) / _name_of(child.pid, start, "0123abcd.sock")
    try:
        assert not keys.is_stale(str(path))
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert keys.is_stale(str(path))
    child.communicate()


# -- key files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 10])
def test_a_key_file_on_a_full_disk_raises_and_leaves_no_partial_file(directory: Path, room: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    keys.runtime_directory()
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"cannot write the key file .*\.key': File too large"):
            keys.create_key_file()
        with pytest.raises(ConfigError, match=r"cannot write the key file .*\.key': File too large"):
            join.write_secret("secret" * 6, 4711)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(directory.iterdir()) == []


def test_only_key_files_inside_the_runtime_directory_are_read(directory: Path, tmp_path: Path) -> None:
    good = Path(keys.create_key_file())
    outside = tmp_path / good.name
    outside.write_bytes(b"x" * 32)
    outside.chmod(0o600)
    (directory / "sub").mkdir()
    (directory / "plain").write_bytes(b"x" * 32)
    (directory / "plain").chmod(0o600)
    for path in (
        str(outside),
        f"{directory}/../{good.name}",
        f"{directory}/sub/../{good.name}",
        f"{directory}//{good.name}",
        f"{directory}/plain",
        f"{directory}/",
        "/etc/passwd",
        "",
        good.name,
        f"{good}\0",
        "x" * 100_000,
    ):
        with pytest.raises(AuthenticationError, match="not a key file in the runtime directory") as caught:
            keys.read_key_file(path)
        assert len(str(caught.value)) < 800


def test_a_replaced_damaged_or_readable_key_file_is_refused(directory: Path, tmp_path: Path) -> None:
    link = Path(keys.create_key_file())
    link.unlink()
    (tmp_path / "elsewhere").write_bytes(b"x" * 32)
    (tmp_path / "elsewhere").chmod(0o600)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuthenticationError, match="cannot read"):
        keys.read_key_file(str(link))
    for name, data, mode in (
        ("open", b"x" * 32, 0o644),
        ("short", b"x" * 31, 0o600),
        ("long", b"x" * 33, 0o600),
    ):
        path = Path(keys.create_key_file())
        path.write_bytes(data)
        path.chmod(mode)
        with pytest.raises(AuthenticationError, match="others" if name == "open" else "damaged"):
            keys.read_key_file(str(path))
    pipe = Path(keys.create_key_file())
    pipe.unlink()
    os.mkfifo(pipe, 0o600)
    with pytest.raises(AuthenticationError, match="regular file"):
        keys.read_key_file(str(pipe))


def test_a_linked_key_file_outlives_the_process_that_created_it(swept_directory: Path) -> None:
    path = keys.create_key_file()
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
    key = keys.read_key_file(path)
    maker = Path(path).rename(
        swept_directory / _name_of(2**22 + 5, 1, path[-20:])
    )  # of a process that has ended
    link = keys.link_key_file(str(maker))
    assert link is not None
    assert keys.link_key_file(str(maker)) == link
    assert keys.sweep() == 1
    assert not maker.exists()
    assert keys.read_key_file(str(maker)) == key  # at the path that the store contains
    assert keys.link_key_file(str(maker)) is None or Path(link).exists()
    keys.remove_file(link)
    with pytest.raises(AuthenticationError, match="was removed"):
        keys.read_key_file(str(maker))
    assert keys.link_key_file(str(maker)) is None
    with pytest.raises(AuthenticationError):
        keys.link_key_file("/etc/passwd")
