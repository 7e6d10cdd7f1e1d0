"""Settings: the values that each field accepts from Python and from the environment, and the errors for other values."""

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


def _with_out_of_range(table: Any, *more: Any) -> Any:
    """Return the row with ``more`` moved to the values out of range."""
    good, out, wrong = table
    return [each for each in good if each not in more], [*out, *more], wrong


# For each field: accepted values, values out of range, values of a wrong type.
_FIELDS: dict[str, Any] = {
    "transport": (["auto", "unix", "tcp"], ["udp", ""], [3, None, True]),
    "bind": (["h", "::1", "127.0.0.1", "", None], ["h..h"], [3, True, ["h"]]),
    "advertise": (
        ["localhost", "10.0.0.1:7000", "::1", "[::1]", "[::1]:7000", None],
        [
            "localhost:",
            "localhost:0",
            "localhost:65536",
            "h:http",
            ":7000",
            "[::1",
            "[::1]7",
            "[]:7",
            "h..h",
            "",
        ],
        [3, True],
    ),
    "port": ([0, 65535, "7100-7199"], [-1, 65536, "7199-7100", "0-9", "a"], [80.0, True, None]),
    "insecure": _FLAG,
    "tls": _FLAG,
    "tls_cert": _TEXT,
    "tls_key": _TEXT,
    "tls_ca": _TEXT,
    "tls_min_version": (["1.2", "1.3"], ["1.1", ""], [1.3, None]),
    "data_only": _FLAG,
    "require_same": _FLAG,
    "handshake_timeout": _with_out_of_range(_TIME, 0),
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
    "log_forward": _FLAG,
    "log_show": _FLAG,
    "log_dir": _TEXT,
    "log_rate": _with_out_of_range(_COUNT, 0),
    "dump_signal": ([0, 41, 64], [-1, 65], ["41", 41.0, True, None]),
    "max_threads": ([2, 1000], [1, 0, -1], ["8", 8.0, True, None]),
    "starvation_s": _TIME,
    "window": _with_out_of_range(_COUNT, 0),
    "lane": _FLAG,
    "lane_threshold": _COUNT,
    "lane_bytes": _COUNT,
    "device_lane_bytes": _COUNT,
    "object_memory": _COUNT,
    "spill_dir": ([None, "/tmp"], ["/no/such/directory", __file__], [3, b"x", True, ["x"]]),
    "object_wait": _TIME,
    "recycle_bytes": _COUNT,
    "chunk": _with_out_of_range(_COUNT, 0),
    "max_frame": ([65536, 1 << 20], [65535, 0, -1], ["65536", 65536.0, True, None]),
    "max_message": _COUNT,
    "max_buffers": _COUNT,
    "heartbeat": _with_out_of_range(_TIME, 0),
    "heartbeat_misses": ([2, 100], [1, 0, -1], ["5", 5.0, True, None]),
    "session_grace": _TIME,
    "context_ttl": _with_out_of_range(_TIME, 0),
}


def test_this_file_lists_every_settings_field() -> None:
    assert list(_FIELDS) == [field.name for field in fields(Settings)]


@pytest.mark.parametrize("name", _FIELDS)
def test_each_field_accepts_valid_values_and_rejects_others(name: str) -> None:
    good, out_of_range, of_wrong_type = _FIELDS[name]
    for value in good:
        assert getattr(Settings(**{name: value}), name) == value
    for value in out_of_range:
        assert not isinstance(config_error_of(name, value), WrongTypeError)
    for value in of_wrong_type:
        assert isinstance(config_error_of(name, value), WrongTypeError)


def config_error_of(name: str, value: Any) -> ConfigError:
    """Return the error, which must name the field, the value and the accepted values."""
    with pytest.raises(ConfigError) as caught:
        Settings(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert repr(value) in message
    assert " must be " in message or "cannot be used" in message
    return caught.value


_NUMBERS = [f"ACTORRPC_{name}" for name in ("HEARTBEAT", "SESSION_GRACE", "CONTEXT_TTL", "SWITCH_INTERVAL")]


@pytest.mark.parametrize("name", _NUMBERS)
@pytest.mark.parametrize("text", ["nan", "inf", "-1", "often"])
def test_invalid_time_in_an_environment_variable_raises_config_error(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=re.escape(f"{name}={text!r} cannot be used: {ENVIRONMENT[name]}")):
        Settings.from_environment()


# Variables without a field: wire.keys reads the keys and the directory, the testing package reads faults.
_NO_FIELDS = {
    "ACTORRPC_KEY",
    "ACTORRPC_KEY_FILE",
    "ACTORRPC_LISTEN",
    "ACTORRPC_WORKERS",
    "ACTORRPC_FAULT",
    "ACTORRPC_RUNTIME_DIR",
}


def test_every_environment_variable_sets_exactly_one_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACTORRPC_LOG_DIR")
    default = Settings()
    values = {
        "ACTORRPC_TRANSPORT": "tcp",
        "ACTORRPC_TLS": "off",
        "ACTORRPC_TLS_MIN_VERSION": "1.2",
        "ACTORRPC_LANE": "0",
        "ACTORRPC_DEBUG": "0",
        "ACTORRPC_RECORDER": "0",
        "ACTORRPC_LOG_SHOW": "0",
        "ACTORRPC_LOG_FORWARD": "0",
        "ACTORRPC_SPILL_DIR": "/tmp",
    }
    for variable in ENVIRONMENT.keys() - _NO_FIELDS:
        with monkeypatch.context() as set_here:
            set_here.setenv(variable, values.get(variable, "1" if variable not in _AT_LEAST_2 else "2"))
            found = Settings.from_environment()
        changed = [each.name for each in fields(Settings) if _differs(found, default, each.name)]
        assert len(changed) == 1, variable
        assert variable.endswith(changed[0].upper())


_AT_LEAST_2 = {"ACTORRPC_MAX_THREADS", "ACTORRPC_HEARTBEAT_MISSES"}


def _differs(one: Settings, other: Settings, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def test_every_option_of_rpc_backend_options_is_a_documented_setting_or_the_key() -> None:
    """They are in the signature for type checkers, and in the docstring for the page of options."""
    names = [
        name
        for name, each in inspect.signature(actorrpc.RpcBackendOptions.__init__).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    ]
    assert set(names) - {"key"} <= set(_FIELDS)
    described, _, _ = (inspect.getdoc(actorrpc.RpcBackendOptions) or "").partition("Raises:")
    described = ", ".join(re.findall(r"^ {4}(\w[\w, ]*): ", described, re.MULTILINE))
    assert described.split(", ") == ["rpc_timeout", "init_method", *names]
    variables = {f"ACTORRPC_{name.upper()}" for name in names}
    assert variables <= ENVIRONMENT.keys()


def test_init_rejects_flags_that_are_not_bool_and_a_heartbeat_of_nan() -> None:
    for given in ("no", "yes", 1, 0):
        with pytest.raises(
            WrongTypeError, match=f"insecure must be True or False, of type bool, not {given!r}"
        ):
            actorrpc.init(listen="tcp://127.0.0.1:0", insecure=given)
    with pytest.raises(ConfigError, match="heartbeat must be a number"):
        actorrpc.init(heartbeat=_NAN)
    assert not actorrpc.is_initialized()
