"""The key occurs in no log, error, repr, pickle or stack dump of workers, and in no command line or environment of a
process."""

from __future__ import annotations

import base64
import copy
import faulthandler
import hashlib
import logging
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import actorrpc
import actorrpc.rpc as rpc
from actorrpc.errors import AuthenticationError, RpcError, SerializationError
from actorrpc.serialization import codec, exceptions
from actorrpc.testing import processes
from actorrpc.wire import keys
from actorrpc.wire.keys import Key
from tests.agent.agents import Stranger, agents
from tests.intruders.doors import WRONG
from tests.ranks import run_group

_TEXT = "the-secret-of-this-test-0451"


def _forms(text: str = _TEXT) -> list[bytes]:
    """Return the encodings in which a key, and its hashes, could be written."""
    key = Key.from_text(text).reveal()
    found = []
    for raw in (text.encode(), key, hashlib.sha256(text.encode()).digest()):
        found += [raw, raw.hex().encode(), base64.b64encode(raw).rstrip(b"="), repr(raw)[2:-1].encode()]
    return [form for form in dict.fromkeys(found) if len(form) >= 16]


def _shows(data: bytes | str, forms: list[bytes]) -> list[bytes]:
    raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    return [form for form in forms if form in raw]


def _assert_hidden(data: bytes | str, text: str = _TEXT) -> None:
    assert not _shows(data, _forms(text))


def test_the_search_detects_a_shown_key() -> None:
    key = Key.from_text(_TEXT)
    for shown in (
        _TEXT,
        repr(key.reveal()),
        key.reveal().hex(),
        str({"key": key.reveal()}),
        pickle.dumps(key.reveal()),
    ):
        assert _shows(shown, _forms())


# -- objects ----------------------------------------------------------------------------------------


def test_repr_and_str_of_objects_that_hold_the_key_do_not_show_it() -> None:
    key = Key.from_text(_TEXT)
    options = rpc.TensorPipeRpcBackendOptions(key=_TEXT)
    with agents(1, key=key) as (agent,):
        holders = [
            options,
            agent,
            agent.connector,
            agent.connector.admission,
            vars(options),
            {"key": key},
        ]
        for each in holders:
            for show in (repr, str, lambda value: f"{value}", lambda value: repr(ValueError(value))):
                _assert_hidden(show(each))
    for shown in (str(key), f"{key:>10}", f"{key!r:>30}"):
        _assert_hidden(shown)
    assert not hasattr(key, "__dict__")


@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps, codec.dumps, copy.deepcopy])
def test_the_key_cannot_be_pickled_or_sent(dump: Callable[[Any], Any]) -> None:
    for holder in (Key.from_text(_TEXT), rpc.RpcBackendOptions(key=_TEXT)):
        try:
            dumped = dump(holder)
        except (TypeError, SerializationError) as error:
            _assert_hidden(str(error))
            continue
        assert dump is copy.deepcopy
        assert (dumped is holder) is isinstance(holder, Key)
        _assert_hidden(repr(dumped))


# -- errors ------------------------------------------------------------------------------------------


def _reports(error: BaseException) -> str:
    """Return the traceback with all local variables, except those of this file, as a crash reporter would show it."""
    text = ""
    for each in (error, error.__cause__, error.__context__):
        if each is None:
            continue
        shown = traceback.TracebackException.from_exception(each, capture_locals=True)
        for summary in shown.stack:
            if summary.filename == __file__:
                summary.locals = None
        text += "".join(shown.format())
    return text


def _raised(call: Callable[[], Any]) -> BaseException:
    with pytest.raises((RpcError, TypeError, OSError)) as caught:
        call()
    return caught.value


_SHORT = "short-0451-key"  # too short, but still a secret


def _options(**given: Any) -> Callable[[], Any]:
    return lambda: rpc.TensorPipeRpcBackendOptions(**given)


@pytest.mark.parametrize(
    ("text", "variables", "call"),
    [
        (_SHORT, {}, _options(key=_SHORT)),
        (_SHORT, {"ACTORRPC_KEY": _SHORT}, keys.find_key),
        (_TEXT, {"ACTORRPC_KEY": _TEXT, "ACTORRPC_KEY_FILE": "/nowhere"}, keys.find_key),
        (_TEXT, {}, _options(key=_TEXT.encode())),
        (_TEXT, {}, _options(key=_TEXT, port=-1)),
    ],
    ids=["short option", "short variable", "both variables", "type", "other option"],
)
def test_errors_about_invalid_keys_do_not_show_them(
    text: str, variables: dict[str, str], call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACTORRPC_KEY", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    report = _reports(_raised(call))
    assert "Error" in report
    assert text not in report
    _assert_hidden(report)


@pytest.mark.parametrize("damaged", [False, True])
def test_errors_about_invalid_key_files_do_not_show_them(damaged: bool, tmp_path: Path) -> None:
    file = Path(keys.create_key_file()) if damaged else tmp_path / "key"
    file.write_text(_TEXT if damaged else _TEXT * 5000)
    file.chmod(0o600)
    read = keys.read_key_file if damaged else lambda name: keys.find_key({"ACTORRPC_KEY_FILE": name})
    _assert_hidden(_reports(_raised(lambda: read(str(file)))))
    file.unlink()


@pytest.mark.prints("'stranger' did not prove to worker 'a0'")
def test_a_refused_handshake_shows_no_key(caplog: pytest.LogCaptureFixture) -> None:
    """Neither key occurs in the error, in the variables of its frames, or in the log."""
    caplog.set_level(logging.DEBUG)
    with agents(1, key=Key.from_text(_TEXT)) as (agent,):
        stranger = Stranger(agent, key=WRONG)
        error = _raised(stranger.shake_hands)
        assert isinstance(error, AuthenticationError)
        stranger.close()
        text = _reports(error) + caplog.text
        packed = exceptions.dump(error, worker="w", dumps=codec.dumps)
    _assert_hidden(text)
    _assert_hidden(packed)
    assert not _shows(text.encode(), [WRONG.reveal(), WRONG.reveal().hex().encode()])


# -- processes -----------------------------------------------------------------------------------------


def _processes() -> dict[int, bytes]:
    """Return the command line and environment of each process of these tests."""
    found = {}
    for process in processes.of_session():
        try:
            shown = Path(f"/proc/{process.pid}/cmdline").read_bytes() + b"\0"
            shown += Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        found[process.pid] = shown
    return found


def _shown_by_processes(forms: list[bytes]) -> list[str]:
    """Search the command lines and environments of all processes."""
    return [f"{pid}: {form!r}" for pid, data in _processes().items() for form in _shows(data, forms)]


def _worker(rank: int, world_size: int, store: str, given: str | None) -> list[str]:
    logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
    logging.getLogger("actorrpc").setLevel(logging.DEBUG)
    options = rpc.RpcBackendOptions(init_method=store, key=given, bind="127.0.0.1", transport="tcp")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    other = f"w{1 - rank}"
    rpc.rpc_sync(other, divmod, (7, 2))
    try:
        rpc.rpc_sync(other, divmod, (1, 0))
    except ZeroDivisionError:
        traceback.print_exc()
    host, port = rpc.api.group().agent.peer(other).record.tcp[0]
    with socket.create_connection((host, port)) as sock:  # a stranger without the key
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while sock.recv(100):
            pass
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    shown = _shown_by_processes(_forms())
    rpc.shutdown()
    sys.stdout.flush()
    output = b"".join(Path(os.readlink(f"/proc/self/fd/{descriptor}")).read_bytes() for descriptor in (1, 2))
    Path(store.removeprefix("file://") + f"-output-{rank}").write_bytes(output)
    return shown


@pytest.mark.prints(
    r"^actorrpc\.errors\.RemoteTraceback:$", r"^On worker w\d:.*ZeroDivisionError.*most recent call first"
)
def test_a_key_given_in_the_program_is_in_no_output_and_no_process_listing(tmp_path: Path) -> None:
    """Even with all logging on."""
    assert run_group(_worker, 2, f"file://{tmp_path}/store", _TEXT) == [[], []]
    outputs = [path.read_bytes() for path in tmp_path.glob("store-output-*")]
    assert len(outputs) == 2
    for output in outputs:
        assert b"ZeroDivisionError" in output
        assert b"refused" in output
        assert b"most recent call first" in output
        _assert_hidden(output)
    _assert_hidden(b"".join(path.read_bytes() for path in tmp_path.glob("store")))


class _Actor:
    def shown(self, forms: list[bytes]) -> list[str]:
        return _shown_by_processes(forms)

    def crash(self) -> None:
        raise ValueError("crash")

    def with_parent(self) -> tuple[int, int]:
        return os.getpid(), os.getppid()


@pytest.mark.limit(120)
def test_the_key_of_a_cluster_is_in_no_process_listing_and_no_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The driver creates the key, and sends it to child processes through a pipe."""
    actorrpc.init()
    try:
        secret = rpc.api.group().agent.connector.key
        assert secret is not None
        key = secret.reveal()
        forms = [key, key.hex().encode(), base64.b64encode(key).rstrip(b"="), repr(key)[2:-1].encode()]
        actor = actorrpc.remote(_Actor).remote()
        assert actorrpc.get(actor.shown.remote(forms)) == []
        with pytest.raises(ValueError, match="crash") as caught:
            actorrpc.get(actor.crash.remote())
        assert not _shows(_reports(caught.value), forms)
        assert not _shown_by_processes(forms)
        # The actor's process and the fork server were among the processes that were searched.
        assert _processes().keys() >= set(actorrpc.get(actor.with_parent.remote()))
    finally:
        actorrpc.shutdown()
    shown = capfd.readouterr()
    assert not _shows(shown.out + shown.err, forms)
