"""The options of actors, calls and tasks: names, values and checks.

Options that Ray has, too, have Ray's names. Everything is checked when it is given. The error for an unknown option lists the
valid options; the error for an option that only makes sense in Ray says what to use instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, ClassVar, Final, Literal, Self

from actorrpc.errors import ConfigError, WrongTypeError
from actorrpc.validation import (
    Check,
    amounts,
    checks_of,
    choice,
    flag,
    integer,
    mapping,
    number,
    option,
    text,
    variables,
    words,
    wrong,
)
from actorrpc.wire.identity import WorkerInfo

__all__ = ["NEW_PROCESS", "ActorOptions", "CallOptions", "TaskOptions"]

NEW_PROCESS: Final = "new process"
"""``worker=`` for an actor that gets a process of its own. Contains a space, so that no worker can have this name."""


# -- checks of single values ----------------------------------------------------------------------------


def _num_returns(name: str, value: Any) -> Any:
    if value in ("streaming", "dynamic"):  # Ray's older name "dynamic" has nearly the same meaning
        return "streaming"
    return integer(name, value, least=0, right='an int of at least 0, or "streaming"')


def _exceptions(name: str, value: Any) -> bool | tuple[type[BaseException], ...]:
    if isinstance(value, bool):
        return value
    if isinstance(value, type):
        value = (value,)
    right = "True, False, or a list of exception classes"
    if not isinstance(value, (list, tuple)):
        raise wrong(name, value, right, WrongTypeError)
    for each in value:
        if not (isinstance(each, type) and issubclass(each, BaseException)):
            raise wrong(name, each, right, WrongTypeError)
    return tuple(value)


def _lifetime(name: str, value: Any) -> str | None:
    if value in (None, "owned", "non_detached"):
        return None
    if value != "detached":
        raise wrong(name, value, '"detached", or "owned" (the default: it ends with its last handle)')
    return "detached"


def _worker(name: str, value: Any) -> Any:
    right = f"a worker's name, rank or WorkerInfo, an actor's handle, or {NEW_PROCESS!r}"
    if value is None or isinstance(value, WorkerInfo) or getattr(type(value), "_is_actor_handle", False):
        return value
    called, rank = getattr(value, "name", None), getattr(value, "id", None)
    if isinstance(called, str) and isinstance(rank, int):
        return WorkerInfo(called, rank)  # torch's own
    if isinstance(value, str):
        return text(name, value, empty=False, right=right)
    return integer(name, value, least=0, right=right)


def _groups(name: str, value: Any) -> dict[str, int]:
    right = 'a dict of limits by group, like {"io": 2, "compute": 4}'
    return mapping(name, value, partial(integer, least=1), right=right, none=True) or {}


def _max_pending(name: str, value: Any) -> Any:
    right = "-1 (no limit) or an int of at least 1"
    limit = integer(name, value, least=-1, right=right)
    if limit == 0:
        raise wrong(name, value, right)
    return limit


_RUNTIME_ENV: Final = ("env_vars", "working_dir")


def _environment(given: dict[str, Any]) -> None:
    """Split ``env=`` (or Ray's ``runtime_env=``) into variables and the working directory."""
    name = "env"
    if "runtime_env" in given:
        if "env" in given:
            raise ConfigError("env and runtime_env are two names for one thing: give one of them")
        given["env"], name = given.pop("runtime_env"), "runtime_env"
    if "env" not in given:
        return
    value = given["env"]
    if value is None:
        given["env"] = {}
        return
    nested = isinstance(value, Mapping) and (
        name == "runtime_env"
        or isinstance(value.get("env_vars"), Mapping)
        or (set(value) <= {*_RUNTIME_ENV} and "working_dir" in value)
    )
    if nested:
        for key in value:
            if key not in _RUNTIME_ENV:
                raise ConfigError(
                    f"{name}: {key!r} is not supported, only {', '.join(map(repr, _RUNTIME_ENV))}: actors' processes are "
                    "forks of this installation, so install packages before the program starts"
                )
        if value.get("working_dir") is not None:
            given.setdefault("working_dir", value["working_dir"])
        value = value.get("env_vars") or {}
    given["env"] = variables(name, value)


# Options of Ray that this package does not have, with the advice for the error message.
_ELSEWHERE: Final[dict[str, str]] = {
    "accelerator_type": "say which worker with worker=; num_gpus= sets the visible devices of a process of its own",
    "enable_task_events": "there is no event store; list_actors() shows the state of actors",
    "fallback_strategy": "use worker= (actors also take host= and labels=)",
    "label_selector": "use labels={...}: a worker that joined with them",
    "max_calls": "processes that run tasks are kept; put code that leaks memory into an actor, and kill it",
    "memory": "no memory is reserved; limit a process with resource.setrlimit() in the actor's constructor",
    "object_store_memory": "the memory of large objects is a setting of the whole host: init(object_memory=...)",
    "placement_group": "use worker= (actors also take host= and labels=)",
    "placement_group_bundle_index": "use worker= (actors also take host= and labels=)",
    "scheduling_strategy": "use spread=True, host= or worker=",
}


_PLACED: Final = ("host", "labels", "placement_timeout", "spread")


_BACKPRESSURE: Final = ("backpressure", "_generator_backpressure_num_objects")


def _buffered(given: dict[str, Any]) -> None:
    """Replace other names of the option by ``max_buffered_items``. Of Ray's name, the value -1 means None."""
    for name in _BACKPRESSURE:
        if name in given:
            if "max_buffered_items" in given:
                raise ConfigError(
                    f"{name} and max_buffered_items are two names for one thing: give one of them"
                )
            value = given.pop(name)
            given["max_buffered_items"] = None if value == -1 and name == _BACKPRESSURE[1] else value


def _check(cls: type[_Options], given: dict[str, Any]) -> dict[str, Any]:
    """Return the given options, checked, in the form in which they are stored.

    Raises:
        ConfigError: an option is unknown, or its value is wrong.
    """
    checks = _CHECKS[cls]
    if "env" in checks:
        _environment(given)
    _buffered(given)
    for name in given:
        if name not in checks:
            raise _unknown(cls, name)
    return {name: checks[name](name, value) for name, value in given.items()}


def _unknown(cls: type[_Options], name: str) -> ConfigError:
    if name == "thread" and cls is CallOptions:
        return ConfigError(
            "thread=True is an option of the method's definition, @method(thread=True), not of a single call"
        )
    if name in _ELSEWHERE:
        return ConfigError(f"{name!r} is an option of Ray's that makes no sense here: {_ELSEWHERE[name]}")
    if cls is TaskOptions and name in _PLACED:
        return ConfigError(
            f"{name!r} places actors, and tasks share processes: make it a method of an actor with it, or give "
            "the task's place with worker="
        )
    allowed = sorted(_CHECKS[cls])
    others = [kind.what for kind, checks in _CHECKS.items() if name in checks]
    close = difflib.get_close_matches(name, allowed, n=2)
    hint = f" It is an option of {' and of '.join(others)}." if others else ""
    if close:
        hint += f" Did you mean {' or '.join(map(repr, close))}?"
    return ConfigError(
        f"{name!r} is not an option of {cls.what}.{hint} The options of {cls.what} are: {', '.join(allowed)}"
    )


# -- the options ---------------------------------------------------------------------------------------------


def _check_interrupt(interrupt: bool, timeout: float | None) -> None:
    if interrupt and not timeout:
        raise ConfigError("interrupt=True is for calls with a time-out of their own: give timeout=, too")


def _rebuild(cls: type[Any], given: dict[str, Any]) -> Any:
    return cls(**given)


_some = partial(integer, least=1, none=True)
_name = partial(text, none=True, empty=False)
_times = partial(integer, least=-1, right="an int of at least 0, or -1 (no limit)")
_CHECKPOINT: Final = "an int of at least 1: after how many calls a checkpoint is made"
_amount = partial(number, none=True)


def _devices(name: str, value: Any) -> Any:
    found = _amount(name, value)
    if found is not None and found > 1 and found != int(found):
        raise ConfigError(
            f"{name} must be a whole number of devices, or a share of a device (between 0 and 1), not {value}"
        )
    return found


_seconds = partial(number, unit="seconds", none=True)


@cache
def _defaults(cls: Any) -> list[tuple[str, Any]]:
    return [(each.name, each.default) for each in fields(cls)]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options that actors, calls and tasks have in common."""

    __slots__ = ()
    what: ClassVar[str]

    timeout: float | None = option(
        None, partial(_seconds, right="a number of seconds (0: no limit), or None (the default)")
    )
    priority: int = option(0, partial(integer, least=-(1 << 31), right="an int; higher goes first"))
    max_buffered_items: int | None = option(
        None, partial(_some, right="an int of at least 1, or None (64 MiB of items)")
    )
    name: str | None = option(None, _name)
    retry_exceptions: bool | tuple[type[BaseException], ...] = option(False, _exceptions)

    def merged(self, **given: Any) -> Self:
        """Return these options with some of them changed.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        if not given:
            return self
        made = replace(self, **_check(type(self), given))
        made._check_changed(given)
        return made

    def _check_changed(self, given: dict[str, Any]) -> None:
        """Check combinations of options; ``given`` are the changed options."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Options are sent with every handle, so only values that differ from the defaults are pickled.
        given = {}
        for name, default in _defaults(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if value is not default and (value != default or type(value) is not type(default)):
                given[name] = value
        return _rebuild, (type(self), given)


@dataclass(frozen=True, kw_only=True)
class _MethodOptions:
    """Options of actors, for all of their methods, and of calls."""

    __slots__ = ()

    concurrency_group: str | None = option(None, _name)
    max_task_retries: int | None = option(None, partial(_times, none=True))


@dataclass(frozen=True, kw_only=True)
class _RunOptions:
    """Options of calls and tasks, which run once."""

    __slots__ = ()

    num_returns: int | Literal["streaming"] = option(1, _num_returns)
    interrupt: bool = option(False, flag)


@dataclass(frozen=True, kw_only=True)
class _ProcessOptions:
    """Options of the process of an actor or of tasks."""

    __slots__ = ()

    worker: Any = option(None, _worker)
    num_cpus: float | None = option(None, _amount)
    num_gpus: float | None = option(None, _devices)
    env: Mapping[str, str] | None = option(None, variables)
    working_dir: str | None = option(None, _name)
    bundle: tuple[str, int, bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions(_Options, _MethodOptions, _RunOptions):
    """The options of one call of a method: ``handle.method.options(...)`` and ``@method(...)``. Immutable.

    Attributes:
        num_returns: how many ObjectRefs a call returns; the method has to return as many values. 0: the call returns None.
            ``"streaming"``: an ObjectRefGenerator, which generators also return if this is 0 or 1. With n above 1, a call of a
            generator returns n ObjectRefs, each of one item. If the generator yields fewer items, the remaining ObjectRefs raise;
            if it yields more, it is closed.
        timeout: seconds; 0: no limit. None: no limit for ``remote()``, ``rpc_timeout`` for ``rpc_sync()`` and similar. See below.
        interrupt: whether a method that is still running after this ``timeout`` is interrupted, as by ``cancel()``.
            The method may leave the actor's state half changed, therefore the group's default time-out never interrupts it.
        priority: waiting calls with a higher priority run first; default 0.
        concurrency_group: one of the actor's ``concurrency_groups``.
        max_task_retries: how often a call that the actor's death has ended is repeated; -1: without limit; 0: never, and while
            the actor is being restarted, the call fails at once with ActorUnavailableError; None: as in the actor's options, and
            without such an option it is not repeated, but waits for an actor that is being restarted.
        retry_exceptions: True: repeat the call if the method raises; or a list of exceptions after which it is repeated. A call
            of a generator is only repeated while its reader has received no item.
        max_buffered_items: how many items of a stream are produced ahead of its reader. Then the generator pauses, and holds
            its actor. None: 64 MiB of items, which is the limit in any case. The former name ``backpressure`` is also accepted.
        name: the name of the call in messages; by default the method's name.
        allow_out_of_order: whether later calls may overtake this call while its arguments are fetched.
        patient: internal: the call waits for an actor that is being restarted, even with ``max_task_retries=0``.

    The effect of time-outs on a call that has begun. (A call that waits for its turn is removed by all of them except the first
    two.)

    ============================================= =================== ==================== ==================================
    time-out                                      coroutine           plain method          which wait fails, and how
    ============================================= =================== ==================== ==================================
    ``get(ref, timeout=)``, ``wait(timeout=)``    continues           continues            this wait: RpcTimeoutError, or "not
                                                                                           ready"
    ``asyncio.wait_for(ref, t)``                  continues           continues            this wait: TimeoutError
    ``options(timeout=)``, ``rpc_timeout``        is cancelled        continues, holds its the call: RpcTimeoutError
                                                                      actor
    ``options(timeout=, interrupt=True)``         is cancelled        is interrupted, its  the call: RpcTimeoutError
                                                                      actor is free
    ============================================= =================== ==================== ==================================

    Calls for which the ended call waits end with it. A plain method on an event loop is never interrupted. A method in C code
    is interrupted when the C code has returned.
    """

    what: ClassVar[str] = "a method"

    allow_out_of_order: bool = option(False, flag)
    patient: bool = False

    @staticmethod
    def check(given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given options in the form in which they are stored.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        return _check(CallOptions, dict(given))

    def _check_changed(self, given: dict[str, Any]) -> None:
        _check_interrupt("interrupt" in given and self.interrupt, self.timeout)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class ActorOptions(_Options, _MethodOptions, _ProcessOptions):
    """How an actor is made and supervised: ``@remote(...)`` and ``Cls.options(...)``. Immutable.

    Attributes:
        name, namespace: the name for ``get_actor``; it is unique in its namespace.
        get_if_exists: return the actor that already has the name, if there is one.
        lifetime: None: it ends with its last handle, or with the process that made it; ``"detached"``: it outlives both.
        worker: where it lives: a worker's name, rank or WorkerInfo, or another actor's handle (it lives on the same worker), or
            ``"new process"``. None: in a process of its own in an embedded cluster, otherwise on the group's workers in turn.
        max_concurrency: how many calls may run at a time; None: one, or 1000 if it has async methods.
        concurrency_groups: limits for the methods of each group, which run independently of other groups: plain methods in
            threads of the group, ``async def`` methods on its event loop, which has a thread of its own and is made for the first
            call. A blocked loop does not block other groups. asyncio's locks and events work within one group only.
        max_pending_calls: if so many calls of one process have not ended, its further calls are refused; -1: no limit.
        max_restarts: how often it is restarted when it dies; -1: without limit. In a supervision group (:func:`supervise`),
            the group's limit, window and back-off apply; ``max_restarts`` must not be 0 then.
        restart_window_s: only restarts within this time count, in seconds; None: all restarts.
        restart_backoff_s: the wait before the second restart in a row; doubles with each restart up to 10 s, and is shortened at
            random by up to a half.
        max_task_retries, retry_exceptions: see :class:`CallOptions`; for all of its methods.
        num_cpus: how many CPUs it books until it ends: it starts when so many are free on its machine or worker. In a process of
            its own, torch uses so many threads, unless OMP_NUM_THREADS is set (in ``env=`` or by the driver). None or 0: it books
            none, and torch uses one thread. In the process of another actor, it books no CPUs.
        num_gpus: how many devices it books, like ``num_cpus``; a process of its own sees only these.
        host: the host where it must live: a name or an address.
        labels: labels that its worker (or machine) must have: name -> word.
        resources: further amounts that it needs and books, by name.
        spread: place it where there are the fewest actors, on joined workers or in a process of its own.
        placement_timeout: how many seconds it may wait until a worker with all of these has joined and has room, or until the
            worker that ``worker=`` names has joined; 0: do not wait. None: wait 10 s for resources that others use, and do not
            wait for resources, labels or names that no worker has; a restart waits 60 s.
        env: environment variables of a process of its own; ``{"env_vars": ..., "working_dir": ...}`` is
            also accepted.
        working_dir: the working directory of a process of its own.
        allow_out_of_order_execution: calls may overtake calls of the same caller whose arguments are still being fetched. None:
            only if several calls run at a time (in threads, or as coroutines).
        reentrant: calls that descend from a running call may run while that call waits.
        checkpoint_every: of the calls that do not raise, ``checkpoint()`` is called after every n-th, if the class has it and
            ``restore(state)``. Its result is copied, and passed to ``restore`` of the next incarnation after the constructor. The
            answer of such a call (of a generator: its end) is sent after the process that made the actor has received the state.
            So with 1, the effect of an answered call is not lost with the actor. If ``checkpoint()`` raises, the call fails with
            CheckpointError, and the previous state is kept; an error of ``restore`` is treated like an error of the constructor.
        on_error: ``"raise"``: the caller gets the error at once. ``"debug"``: a method that has raised is held, with its frames,
            until a debugger continues it (``actorrpc debug``), or no debugger has attached for ACTORRPC_DEBUG_WAIT seconds; its
            caller gets the error after that.
        timeout, priority, concurrency_group, max_buffered_items: see :class:`CallOptions`; for all of its methods.
        yielding: internal: calls that wait in actorrpc do not count as running.
        movable: internal: ``worker=`` is only the first place; if that worker has ended, the actor restarts on another worker.
        place: internal: the actor's place in its group.
        bundle: internal: its placement group, the number of the bundle in the group (-1: any), and whether actors and tasks that
            it starts are in the group, too.
    """

    what: ClassVar[str] = "an actor"

    namespace: str | None = option(None, _name)
    get_if_exists: bool = option(False, flag)
    lifetime: str | None = option(None, _lifetime)
    max_concurrency: int | None = option(None, _some)
    concurrency_groups: Mapping[str, int] | None = option(None, _groups)
    max_pending_calls: int = option(-1, _max_pending)
    max_restarts: int = option(0, _times)
    restart_window_s: float | None = option(None, partial(_seconds, above=True))
    restart_backoff_s: float = option(0.1, partial(number, unit="seconds"))
    host: str | None = option(None, _name)
    labels: Mapping[str, str] | None = option(None, partial(words, none=True))
    resources: Mapping[str, float] | None = option(None, partial(amounts, none=True))
    spread: bool = option(False, flag)
    placement_timeout: float | None = option(None, _seconds)
    allow_out_of_order_execution: bool | None = option(None, partial(flag, none=True))
    reentrant: bool = option(True, flag)
    checkpoint_every: int = option(1, partial(integer, least=1, right=_CHECKPOINT))
    on_error: str = option("raise", partial(choice, of=("raise", "debug")))
    yielding: bool = False
    movable: bool = False
    place: Mapping[str, int] | None = None

    def check_together(self) -> None:
        """Check combinations of options.

        Raises:
            ConfigError: two options contradict each other.
        """
        if self.get_if_exists and self.name is None:
            raise ConfigError("get_if_exists=True needs a name= to look for")
        if self.worker not in (None, NEW_PROCESS) and (self.env or self.working_dir):
            raise ConfigError(
                "env= and working_dir= are for a process of the actor's own: leave worker= out, or give "
                f"worker={NEW_PROCESS!r}"
            )
        if self.worker is not None and (self.host or self.labels or self.spread):
            raise ConfigError(
                "worker= fixes where the actor lives: leave host=, labels= and spread= out, or worker="
            )
        if getattr(type(self.worker), "_is_actor_handle", False) and self.resources:
            raise ConfigError("worker= names another actor, which has booked its place: leave resources= out")
        group = self.concurrency_group
        if group is not None and group not in (self.concurrency_groups or {}):
            raise ConfigError(
                f"concurrency_group {group!r} is not one of concurrency_groups, which are: "
                f"{', '.join(map(repr, self.concurrency_groups or {})) or 'none'}"
            )

    def for_calls(self) -> CallOptions:
        """Return the options for calls of methods without options of their own."""
        if (
            self.timeout is None
            and not self.priority
            and self.concurrency_group is None
            and self.max_task_retries is None
            and self.retry_exceptions is False
            and self.max_buffered_items is None
            and not self.allow_out_of_order_execution
        ):
            return _DEFAULT_CALL
        return CallOptions(
            timeout=self.timeout,
            priority=self.priority,
            concurrency_group=self.concurrency_group,
            max_task_retries=self.max_task_retries,
            retry_exceptions=self.retry_exceptions,
            max_buffered_items=self.max_buffered_items,
            allow_out_of_order=bool(self.allow_out_of_order_execution),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions(_Options, _RunOptions, _ProcessOptions):
    """How a task (a ``@remote`` function) is run: ``@remote(...)`` and ``f.options(...)``. Immutable.

    Attributes:
        num_returns, timeout, interrupt, max_buffered_items, name, priority: see :class:`CallOptions`.
        max_retries: how often a task is run again if its process dies; -1: without limit; default 3.
        retry_exceptions: True: run it again if it raises; or a list of exceptions after which it is run again.
        worker: where it runs; see :class:`ActorOptions`. None: in the processes that run tasks, or on the group's
            other workers in turn.
        num_cpus, num_gpus, resources: what it books while it runs, as an actor does. It waits as long as others have it, and
            lends its CPUs to others while it waits for a call. With ``worker=``, it books no resources.
        env, working_dir: options of the process that runs it. Tasks with equal values share processes. Therefore there is no
            ``host``, ``labels`` or ``spread``: use an actor, or ``worker=``.
        bundle: internal, as for actors.
    """

    what: ClassVar[str] = "a task"

    resources: Mapping[str, float] | None = option(None, partial(amounts, none=True))
    max_retries: int = option(3, _times)

    def _check_changed(self, given: dict[str, Any]) -> None:
        _check_interrupt(self.interrupt, self.timeout)

    def for_calls(self) -> CallOptions:
        """Return the options for the call of the runner that executes the task."""
        return CallOptions(
            num_returns=self.num_returns,
            timeout=self.timeout,
            interrupt=self.interrupt,
            priority=self.priority,
            max_buffered_items=self.max_buffered_items,
            name=self.name,
            retry_exceptions=self.retry_exceptions,
            # None, not 0: with 0, a call fails at once while its actor is being restarted, but a task waits for its runner.
            max_task_retries=self.max_retries or None,
        )


_DEFAULT_CALL: Final = CallOptions()
_CHECKS: Final[dict[type[_Options], dict[str, Check]]] = {
    kind: checks_of(kind) for kind in (ActorOptions, CallOptions, TaskOptions)
}
