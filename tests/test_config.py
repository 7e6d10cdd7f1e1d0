"""Settings: what each accepts, from Python and from the environment, and that an error says so."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest

import actorrpc
from actorrpc.config import ENVIRONMENT, Settings
from actorrpc.errors import ConfigError, WrongTypeError

_NAN, _INF = float("nan"), float("inf")

_FLAG: Any = ([True, False], [], ["no", "yes", "", 0, 1, 1.0, None, [True]])
_TEXT: Any = ([None, "x"], [], [3, b"x", True, ["x"]])
_COUNT = ([0, 1, 1 << 20], [-1], ["1", 1.0, _NAN, True, None, [1]])
_TIME = (
    [0, 0.0, 1, 2.5],
    [-1, -0.1, _NAN, _INF, -_INF, 10**400],
    ["1", True, None, [1], 1j, Fraction(1, 2)],
)


def _also(table: Any, *more: Any) -> Any:
    """A table in which more values are out of range."""
    good, out, wrong = table
    return [each for each in good if each not in more], [*out, *more], wrong


# For each field: what it accepts, what is out of its range, what is of a wrong type.
_FIELDS: dict[str, Any] = {
    "transport": (["auto", "unix", "tcp"], ["udp", ""], [3, None, True]),
    "bind": _TEXT,
    "advertise": (["localhost", "[::1]:7000", None], ["localhost:0", ""], [3, True]),
    "port": ([0, 65535], [-1, 65536], ["80", 80.0, True, None]),
    "insecure": _FLAG,
    "tls_cert": _TEXT,
    "tls_key": _TEXT,
    "tls_ca": _TEXT,
    "tls_min_version": (["1.2", "1.3"], ["1.1", ""], [1.3, None]),
    "frame_integrity": _FLAG,
    "data_only": _FLAG,
    "handshake_timeout": _also(_TIME, 0),
    "connect_timeout": _also(_TIME, 0),
    "max_unauthenticated": _COUNT,
    "spin_us": _COUNT,
    "cork_frames": _COUNT,
    "cork_bytes": _COUNT,
    "cork_us": _COUNT,
    "switch_interval": ([0.1, 1, None], [0, -1, _NAN, _INF], ["1", True]),
    "recorder": _FLAG,
    "otel": _FLAG,
    "debug": _FLAG,
    "debug_wait": _TIME,
    "dump_signal": ([0, 41, 64], [-1, 65], ["41", 41.0, True, None]),
    "max_threads": ([2, 1000], [1, 0, -1], ["8", 8.0, True, None]),
    "starvation_s": _TIME,
    "window": _also(_COUNT, 0),
    "lane": _FLAG,
    "lane_threshold": _COUNT,
    "lane_bytes": _COUNT,
    "object_memory": _COUNT,
    "spill_dir": ([None, "/tmp"], ["/no/such/directory", __file__], [3, b"x", True, ["x"]]),
    "object_wait": _TIME,
    "recycle_bytes": _COUNT,
    "chunk": _also(_COUNT, 0),
    "max_frame": ([65536, 1 << 20], [65535, 0, -1], ["65536", 65536.0, True, None]),
    "max_message": _COUNT,
    "max_buffers": _COUNT,
    "heartbeat": _also(_TIME, 0),
    "heartbeat_misses": ([2, 100], [1, 0, -1], ["5", 5.0, True, None]),
    "session_grace": _TIME,
    "context_ttl": _also(_TIME, 0),
}


def test_every_field_is_in_the_table() -> None:
    assert list(_FIELDS) == [field.name for field in fields(Settings)]


@pytest.mark.parametrize("name", _FIELDS)
def test_what_a_field_accepts(name: str) -> None:
    good, out_of_range, of_wrong_type = _FIELDS[name]
    for value in good:
        assert getattr(Settings(**{name: value}), name) == value
    for value in out_of_range:
        assert not isinstance(refused(name, value), WrongTypeError)
    for value in of_wrong_type:
        assert isinstance(refused(name, value), WrongTypeError)


def refused(name: str, value: Any) -> ConfigError:
    """Return the error, which says what there is and what is accepted."""
    with pytest.raises(ConfigError) as caught:
        Settings(**{name: value})
    said = str(caught.value)
    assert said.startswith(name)
    assert repr(value) in said
    assert " must be " in said or "cannot be used" in said
    return caught.value


_NUMBERS = [f"ACTORRPC_{name}" for name in ("HEARTBEAT", "SESSION_GRACE", "CONTEXT_TTL", "SWITCH_INTERVAL")]


@pytest.mark.parametrize("name", _NUMBERS)
@pytest.mark.parametrize("text", ["nan", "inf", "-1", "often"])
def test_times_in_the_environment(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=re.escape(f"{name}={text!r} cannot be used: {ENVIRONMENT[name]}")):
        Settings.from_environment()


@pytest.mark.parametrize("name", ["insecure", "lane", "data_only"])
def test_words_in_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = f"ACTORRPC_{name.upper()}"
    for words, meant in (("1 true Yes ON", True), ("0 false No OFF", False)):
        for word in words.split():
            monkeypatch.setenv(variable, word)
            assert getattr(Settings.from_environment(), name) is meant
    monkeypatch.setenv(variable, "perhaps")
    with pytest.raises(ConfigError, match=f"{variable}='perhaps' cannot be used"):
        Settings.from_environment()


# Variables that are no fields: keys are found by wire.keys, faults by testing, the directory by wire.keys, too.
_NO_FIELDS = {"ACTORRPC_KEY", "ACTORRPC_KEY_FILE", "ACTORRPC_FAULT", "ACTORRPC_RUNTIME_DIR"}


def test_every_other_variable_is_read_into_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    default = Settings()
    said = {
        "ACTORRPC_TRANSPORT": "tcp",
        "ACTORRPC_TLS_MIN_VERSION": "1.2",
        "ACTORRPC_LANE": "0",
        "ACTORRPC_DEBUG": "0",
        "ACTORRPC_RECORDER": "0",
        "ACTORRPC_SPILL_DIR": "/tmp",
    }
    for variable in ENVIRONMENT.keys() - _NO_FIELDS:
        with monkeypatch.context() as set_here:
            set_here.setenv(variable, said.get(variable, "1" if variable not in _AT_LEAST_2 else "2"))
            found = Settings.from_environment()
        changed = [each.name for each in fields(Settings) if _differs(found, default, each.name)]
        assert len(changed) == 1, variable
        assert variable.endswith(changed[0].upper().replace("FRAME_", ""))


_AT_LEAST_2 = {"ACTORRPC_MAX_THREADS", "ACTORRPC_HEARTBEAT_MISSES"}


def _differs(one: Settings, other: Settings, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def test_a_number_in_the_environment_that_is_out_of_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_PORT", "70000")
    with pytest.raises(
        ConfigError, match=r"ACTORRPC_PORT='70000' cannot be used: .*at most 65535, not 70000"
    ):
        Settings.from_environment(port=80)


def test_the_options_of_init_rpc_are_settings_and_a_key() -> None:
    """They are in the signature for type checkers and in the docstring, of which the page of options is made."""
    names = [
        name
        for name, each in inspect.signature(actorrpc.RpcBackendOptions.__init__).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    ]
    assert set(names) - {"key"} <= set(_FIELDS)
    described, _, _ = (actorrpc.RpcBackendOptions.__doc__ or "").partition("Raises:")
    described = ", ".join(re.findall(r"^ {8}(\w[\w, ]*): ", described, re.MULTILINE))
    assert described.split(", ") == ["rpc_timeout", "init_method", *names]
    variables = {f"ACTORRPC_{name.removeprefix('frame_').upper()}" for name in names}
    assert variables <= ENVIRONMENT.keys()


def test_init_takes_no_text_for_true() -> None:
    for given in ("no", "yes", 1, 0):
        with pytest.raises(
            WrongTypeError, match=f"insecure must be True or False, of type bool, not {given!r}"
        ):
            actorrpc.init(listen="tcp://127.0.0.1:0", insecure=given)
    with pytest.raises(ConfigError, match="heartbeat must be a number"):
        actorrpc.init(heartbeat=_NAN)
    assert not actorrpc.is_initialized()


def test_the_refusal_is_among_the_names_that_users_need() -> None:
    assert actorrpc.RefusedError is actorrpc.errors.RefusedError
