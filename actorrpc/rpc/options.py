"""Options of ``init_rpc``: torch's options, and further options of actorrpc.

Every value is checked when it is set; the error names values that can be used.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch

from actorrpc._exceptions import say
from actorrpc.config import Settings
from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.validation import MOST, checks_of, integer, number, text, wrong
from actorrpc.wire.keys import Key

if TYPE_CHECKING:
    from actorrpc.agent.context import Worker

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "UNSET_RPC_TIMEOUT",
    "BackendType",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "check_backend",
    "check_timeout",
    "options_of",
]

DEFAULT_RPC_TIMEOUT_SEC: Final = 60.0
DEFAULT_INIT_METHOD: Final = "env://"
DEFAULT_NUM_WORKER_THREADS: Final = 16
UNSET_RPC_TIMEOUT: Final = -1.0
_SETTINGS: Final = checks_of(Settings)


class BackendType(enum.Enum):
    """Names of backends. actorrpc has one agent, and both names stand for it, so that torch's scripts run unchanged."""

    ACTORRPC = "ACTORRPC"
    TENSORPIPE = "TENSORPIPE"


class RpcBackendOptions:
    """Options of the agent.

    Args:
        rpc_timeout: default time-out of calls in seconds; 0 means none. Default 60.
        init_method: where the workers meet: ``env://`` (default), ``tcp://host:port`` or ``file:///path``.
        transport: ``"auto"`` (Unix sockets on one host, TCP between hosts), ``"unix"`` or ``"tcp"``.
        bind: the address to listen on for TCP; default: the address that reached the rendezvous.
        advertise: the address to give to other workers, if it is not ``bind`` (NAT, containers, a proxy): ``host`` or
            ``host:port``; ``[host]:port`` for IPv6.
        port: the TCP port to listen on; default any.
        key: the group's shared key; default ``ACTORRPC_KEY``, ``ACTORRPC_KEY_FILE``, or a key that the first worker makes for
            its host.
        insecure: listen without a key on addresses that others can reach. Logs a warning.
        tls: encrypt TCP connections (default True). False is for networks whose traffic only you can read and change; it logs
            a warning, and all workers need the same value.
        tls_cert: the file (PEM) of this worker's certificate. With this option, ``tls_key`` and ``tls_ca``, the workers also show
            certificates to each other. All workers need these options, or none.
        tls_key: the file (PEM) of the private key of that certificate.
        tls_ca: the file (PEM) of the CA that must have signed the certificates of all workers.
        tls_min_version: ``"1.3"`` (default) or ``"1.2"``.
        data_only: accept only data from peers, and let them call exposed functions only (:func:`actorrpc.rpc.exposed`).
        max_threads: the most worker threads of this process (default 512).
        spin_us: how long a thread may spin before it sleeps (default 100; 0: never).
        lane: whether large tensors are sent through shared memory on one host (default True).
        window: bytes of calls that a peer may leave unread before callers block (default 64 MiB).
        heartbeat: seconds of silence after which a connected peer is sent a ping (default 2).
        heartbeat_misses: a peer that is silent for so many heartbeats is declared dead (default 5, at least 2), except a
            peer on the same host whose process runs. Between hosts, short times (``heartbeat=0.2``: a death is found
            within 1 s) also declare a peer dead that holds the GIL in C code for so long.

    ``None`` means the value of the option's ``ACTORRPC_*`` variable, or else the default.

    Raises:
        ConfigError: a value cannot be used.
    """

    def __init__(
        self,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        *,
        transport: str | None = None,
        bind: str | None = None,
        advertise: str | None = None,
        port: int | None = None,
        key: str | Key | None = None,
        insecure: bool | None = None,
        tls: bool | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_ca: str | None = None,
        tls_min_version: str | None = None,
        data_only: bool | None = None,
        max_threads: int | None = None,
        spin_us: int | None = None,
        lane: bool | None = None,
        window: int | None = None,
        heartbeat: float | None = None,
        heartbeat_misses: int | None = None,
    ) -> None:
        # The key is hidden first, because a report of a later error may show the local variables of this method.
        #: the group's shared key; None: that of the environment
        self.key, wrong = _hidden(key)
        del key
        if wrong is not None:
            raise wrong
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method
        given = locals()
        self._extra = {name: given[name] for name in _SETTINGS if name in given}
        # Check the values now, before any part of the worker has been started.
        Settings(**{name: value for name, value in self._extra.items() if value is not None})

    # Shown by ``repr`` if the constructor has failed.
    _rpc_timeout = DEFAULT_RPC_TIMEOUT_SEC
    _init_method = DEFAULT_INIT_METHOD
    _extra: Mapping[str, Any] = MappingProxyType({})

    def ready(self, worker: Worker) -> None:
        """Do nothing. Subclasses override this method, which is called with the new worker before it serves calls."""

    def settings(self) -> Settings:
        """Return the settings of the agent, from these options and the environment.

        Raises:
            ConfigError: a variable has a value that cannot be used.
        """
        return Settings.from_environment(**self._extra)

    def placements(self) -> tuple[tuple[str, ...], tuple[tuple[str, str, str], ...]]:
        """Return the devices that may be used, and the rows (worker, device here, device there) of device maps."""
        return (), ()

    @property
    def rpc_timeout(self) -> float:
        """Default time-out of calls, in seconds; 0 means none."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, value: float) -> None:
        self._rpc_timeout = check_timeout(value, "rpc_timeout")

    @property
    def init_method(self) -> str:
        """Where the workers meet."""
        return self._init_method

    @init_method.setter
    def init_method(self, value: str) -> None:
        right = "a URL such as env://, tcp://host:port or file:///path"
        if "://" not in text("init_method", value, right=right):
            raise wrong("init_method", value, right)
        self._init_method = value

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self._extra.items() if value is not None)
        return (
            f"{type(self).__name__}(rpc_timeout={self.rpc_timeout}, init_method={self.init_method!r}{given})"
        )


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """torch's options class, for scripts that use it.

    Args:
        num_worker_threads: accepted, without effect: threads are started as needed (see ``max_threads``). Default 16.
        rpc_timeout: default time-out of calls in seconds; 0 means none. Default 60.
        init_method: where the workers meet. Default ``env://``.
        device_maps: worker name -> {device here: device there}, for tensors that are not on the CPU.
        devices: the local devices that may be used; default: the devices of the maps.
        _transports, _channels: accepted without effect, because only TensorPipe has them.

    Further keywords: see :class:`RpcBackendOptions`.

    Raises:
        ConfigError: a value cannot be used.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Any, Any]] | None = None,
        devices: Sequence[Any] | None = None,
        _transports: list[str] | None = None,
        _channels: list[str] | None = None,
        **extra: Any,
    ) -> None:
        known = RpcBackendOptions.__init__.__kwdefaults__ or {}
        unknown = sorted(extra.keys() - known)
        if unknown:
            raise WrongTypeError(
                f"unknown option {unknown[0]!r}; besides torch's there are: {', '.join(known)}"
            )
        extra["key"], wrong = _hidden(extra.pop("key", None))
        if wrong is not None:
            raise wrong
        super().__init__(rpc_timeout, init_method, **extra)
        self.num_worker_threads: int = integer("num_worker_threads", num_worker_threads, least=1)
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices: list[torch.device] = []
        self.set_devices(() if devices is None else devices)
        if device_maps is not None and not isinstance(device_maps, Mapping):
            raise WrongTypeError(
                f"device_maps is a dict of worker names and device maps, not {say(device_maps, repr)}"
            )
        for worker, device_map in (device_maps or {}).items():
            self.set_device_map(worker, device_map)

    def set_device_map(self, to: str, device_map: Mapping[Any, Any]) -> None:
        """Say on which device of worker ``to`` the tensors of each local device arrive.

        May be called several times for a worker; maps are merged. The tensors of that worker's answers use the
        reverse map. The maps of all workers are checked when they join.

        Raises:
            ConfigError: a key or value is not a device, or two local devices of one map share a target.
        """
        if not isinstance(to, str):
            raise WrongTypeError(f"set_device_map names a worker by a str, not {say(to, repr)}")
        if not isinstance(device_map, Mapping):
            raise WrongTypeError(f"a device map is a dict of devices, not {say(device_map, repr)}")
        merged = dict(self.device_maps.get(to, {}))
        for source, target in device_map.items():
            source, target = _numbered(source), _numbered(target)
            if source.type != "cpu" and source in merged and merged[source] != target:
                raise ConfigError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target}, "
                    f"but it is already mapped to {merged[source]}"
                )
            merged[source] = target
        if len({_numbered(target) for target in device_map.values()}) != len(device_map):
            raise ConfigError(
                f"`set_device_map` only supports 1-to-1 mapping, but {to!r} has two sources for one target: {device_map}"
            )
        self.device_maps[to] = merged

    def placements(self) -> tuple[tuple[str, ...], tuple[tuple[str, str, str], ...]]:
        """Return the devices that may be used, and the rows (worker, device here, device there) of device maps."""
        maps = (
            (to, str(here), str(there))
            for to, each in self.device_maps.items()
            for here, there in each.items()
        )
        return tuple(map(str, self.devices)), tuple(maps)

    def set_devices(self, devices: Sequence[Any]) -> None:
        """Say which local devices the agent may use."""
        if isinstance(devices, str) or not isinstance(devices, Sequence):
            raise WrongTypeError(f"devices is a list of devices, not {say(devices, repr)}")
        self.devices = [_device(device) for device in devices]


def _hidden(key: Any) -> tuple[Key | None, ConfigError | None]:
    """Return a key as a :class:`Key`, which ``repr`` does not show, or an error without a traceback."""
    if key is None or isinstance(key, Key):
        return key, None
    if not isinstance(key, str):
        return None, WrongTypeError(f"key must be a str, not a {type(key).__name__}")
    try:
        return Key.from_text(key), None
    except ConfigError as error:
        return None, error.with_traceback(None)


def _numbered(value: Any) -> torch.device:
    """Return the device of a map, which must have a number (``cuda:0``), as the devices of tensors have."""
    device = _device(value)
    if device.index is None and device.type != "cpu":
        raise ConfigError(
            f"{say(value, repr)} in a device map has no number: write {device.type}:0, for example"
        )
    return torch.device("cpu") if device.type == "cpu" else device


def _device(value: Any) -> torch.device:
    try:
        return torch.device(value)
    except TypeError as error:
        raise WrongTypeError(f"{say(value, repr)} is not a device: {error}") from error
    except RuntimeError as error:
        raise ConfigError(f"{say(value, repr)} is not a device: {error}") from error


def check_timeout(value: Any, name: str = "timeout") -> float:
    """Return a time-out as a float.

    Raises:
        ConfigError: ``value`` is not a number of seconds >= 0.
    """
    if type(value) in (float, int) and 0.0 <= value <= MOST:
        return float(value)
    value = number(name, value, most=math.inf, right="0 (none) or a positive number of seconds")
    return 0.0 if value > MOST else float(value)


def options_of(given: Any) -> RpcBackendOptions:
    """Return a user's options as an RpcBackendOptions; torch's own options are converted.

    Raises:
        TypeError: ``given`` is not an options object.
    """
    if given is None:
        return TensorPipeRpcBackendOptions()
    if isinstance(given, RpcBackendOptions):
        return given
    if hasattr(given, "init_method") and hasattr(given, "rpc_timeout"):
        return TensorPipeRpcBackendOptions(
            num_worker_threads=getattr(given, "num_worker_threads", 16),
            rpc_timeout=given.rpc_timeout,
            init_method=given.init_method or "env://",
            device_maps=getattr(given, "device_maps", None),
            devices=getattr(given, "devices", None),
        )
    raise TypeError(f"rpc_backend_options must be a RpcBackendOptions, not {type(given).__name__}")


def check_backend(backend: Any) -> None:
    """Check that ``backend`` is a member of BackendType, or torch's TENSORPIPE.

    Raises:
        TypeError: ``backend`` is neither.
    """
    if backend is None or isinstance(backend, BackendType) or getattr(backend, "name", None) == "TENSORPIPE":
        return
    raise TypeError(f"Argument backend must be a member of BackendType, not {say(backend, repr)}")
