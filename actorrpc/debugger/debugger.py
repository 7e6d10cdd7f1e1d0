"""The debug sessions of a worker: its held calls, their front ends (``actorrpc debug`` processes), and their deadlines.

A call is *held* while the debugger has stopped its thread. Handlers of notices run on the thread that reads the connection and do
not wait, so a worker answers front ends even if all of its calls are held.

While a worker with a debugger is in its group, ``breakpoint()`` in a call holds the call. Outside of calls (in the driver, in a
rank's own code), it works as before, except in a process whose standard input is closed or /dev/null, where it holds the calling
thread. If PYTHONBREAKPOINT is set, ``breakpoint()`` always works as before.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import operator
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any, Final

from actorrpc import _stacks
from actorrpc._python import SET_TRACE
from actorrpc.actors.host.actor import HostedActor
from actorrpc.actors.host.threads import CALL_METHODS, bears_interruption
from actorrpc.agent.calls import CURRENT, Execution, MailHeader
from actorrpc.agent.context import Worker, current_worker, workers_here
from actorrpc.agent.peers import Peer
from actorrpc.agent.timers import Tick
from actorrpc.debugger import EVENT, PUT_OFF, REQUEST, RUNS, pack, unpack
from actorrpc.debugger.prompt import is_outside, users_frames
from actorrpc.debugger.session import DebugSession
from actorrpc.errors import ProtocolError
from actorrpc.futures import Future
from actorrpc.rpc import api

__all__ = ["Debugger", "enter", "look_around", "start"]

_log = logging.getLogger("actorrpc.debugger")
_LOOK_S: Final = 0.5  # how often sessions of ended calls are removed
_AGAIN_S: Final = 0.2  # time between two attempts to enter an actor
_MOST_S: Final = 60.0  # the most seconds by which one notice may move a deadline
INFINITE: Final = float("inf")
# A front end that enters an idle actor finds it held in this function, with the actor as ``self``.
_IDLE: Final[dict[str, Any]] = {"__name__": "idle actor"}
exec(compile("def idle(self, hold):\n    hold()\n", "<idle actor>", "exec"), _IDLE)


class Debugger:
    """The debugger of one worker. Thread-safe: its tables change by single, atomic steps."""

    def __init__(self, worker: Worker) -> None:
        self.numbers = itertools.count(1)
        self._agent = worker.agent
        self.notify = worker.agent.notify
        self._actors = worker.actors
        self._sessions: dict[int, DebugSession] = {}
        self._entering: dict[Peer, _Entry] = {}
        self._tick = Tick(worker.agent.clock, _LOOK_S, self._look)
        self._ignored: set[tuple[str, int]] = set()  # places of breakpoint() that were logged as ignored

    @property
    def worker(self) -> str:
        """The name of the worker."""
        return self._agent.name

    @property
    def refusal(self) -> str:
        """The reason why this worker does not allow debugging; empty if it allows debugging."""
        settings = self._agent.settings
        if not settings.debug:
            return "ACTORRPC_DEBUG=0 has switched the debugger off"
        if settings.data_only:
            return "it takes data only"
        if self._agent.connector.key is None:
            return "its group has no key: anybody could run code in it"
        return ""

    def sessions(self) -> list[DebugSession]:
        """Return the sessions, in the order in which they were created."""
        return list(self._sessions.values())

    # -- holding calls: on their threads -------------------------------------------------------------------------

    def breakpoint(self, frame: FrameType, execution: Execution | None) -> None:
        """Hold a call (or the calling thread) at the next line of ``frame``. If debugging is refused, only log the reason."""
        if self.refusal:
            where = (frame.f_code.co_filename, frame.f_lineno)
            if where not in self._ignored:
                self._ignored.add(where)
                _log.warning(
                    "breakpoint() at %s:%d is ignored on worker %r: %s. This is logged once.",
                    *where,
                    self.worker,
                    self.refusal,
                )
            return
        self._session(execution, "breakpoint()").prompt.trace(frame)

    def failed(self, execution: Execution, error: BaseException) -> None:
        """Hold a failed call of an actor with ``on_error="debug"``, before the error is sent to its caller."""
        if not self.refusal:
            self._session(execution, f"{type(error).__name__}, which it has raised").prompt.examine(error)

    def _session(self, execution: Execution | None, why: str) -> DebugSession:
        """Return the session of the execution, or of the calling thread if it is None; reuse an existing session."""
        for each in self.sessions():
            if each.execution is execution and (
                execution is not None or each.thread == threading.get_ident()
            ):
                each.why = why
                return each
        if execution is None:
            title = f"thread {threading.current_thread().name!r}"
        elif execution.actor is None or execution.actor.spec is None:
            title = f"{execution.label}()"
        else:
            title = f"{execution.actor.title}.{execution.what}()"
        return DebugSession(self, execution, title, why)

    def held(self, session: DebugSession) -> None:
        """Record that a session holds its call. Called on the call's thread."""
        self._sessions[session.number] = session
        self._agent.held.add(session.thread)
        self._tick.wake()
        if session.attached is None:
            _log.warning(
                "%s on %r is held by %s at %s. To debug it: actorrpc debug %s; it continues by itself after %g s "
                "(ACTORRPC_DEBUG_WAIT)",
                session.title,
                self.worker,
                session.why,
                session.where,
                session.name,
                self._agent.settings.debug_wait,
            )

    def let_go(self, session: DebugSession) -> None:
        """Record that a session has released its call. Called on the call's thread."""
        self._agent.held.discard(session.thread)

    def why_not_held(self, session: DebugSession) -> str:
        """Return the reason why a held call must be released now; empty if the call stays held."""
        if self._agent.closed_down:
            return "as its worker shuts down"
        if session.execution is not None and not self._runs(session.execution):
            return "as its caller no longer waits for it"
        waited = time.monotonic() - session.since
        if session.attached is None and waited > self._agent.settings.debug_wait:
            return f"as no front end has attached to it within {self._agent.settings.debug_wait:g} s"
        return ""

    def _runs(self, execution: Execution) -> bool:
        """Return whether a call has not been answered yet, or produces a stream."""
        if execution.peer.running.get(execution.id) is execution:
            return True
        streams = () if self._actors is None else self._actors.streams.all()
        return any(each.entry is execution for each in streams)

    def _look(self) -> bool:
        """Remove the sessions whose calls have ended; return whether any session is left. Called by ``_tick``."""
        for each in self.sessions():
            # The state may still be ``HELD``: a second interruption may have ended the call before resumes() changed it.
            if each.execution is not None:
                over = not self._runs(each.execution)
            else:
                over = each.state == RUNS and not each.prompt.traces
            if over:
                del self._sessions[each.number]
                each.close()
        return bool(self._sessions)

    # -- deadlines of held calls and of their callers --------------------------------------------------------------

    def extend_deadline(self, execution: Execution, seconds: float) -> None:
        """Move the deadline of an execution by ``seconds`` (may be negative); its caller gets a notice to do the same."""
        if execution.deadline != INFINITE:
            execution.deadline += seconds
            body = pack({"call": execution.id, "seconds": seconds})
            self.notify(execution.peer, PUT_OFF, body)

    def put_off_there(self, peer: Peer, body: bytes) -> None:
        """Move the deadline of a call that this worker has made and that is held on another worker.

        If the call was made in an execution on this worker, the deadline of that execution is moved as well.
        """
        found = unpack(body)
        id, seconds = found.get("call"), found.get("seconds")
        if type(id) is not int or type(seconds) is not float or not -_MOST_S <= seconds <= _MOST_S:
            raise ProtocolError("a notice to move a deadline does not name a call and a number of seconds")
        call = peer.pending.get(id)
        if self.refusal or call is None or call.deadline == INFINITE:
            return
        call.deadline += seconds
        for each in (self._agent.self_peer, *self._agent.peers()):
            for running in list(each.running.values()):
                if isinstance(running, Execution) and call in running.nested:
                    self.extend_deadline(running, seconds)
                    return

    # -- front ends ----------------------------------------------------------------------------------------------

    def asked(self, peer: Peer, body: bytes) -> None:
        """Carry out a request of a front end, and answer it."""
        request = unpack(body)
        number = request.get("id")
        try:
            found = self._do(peer, request)
        except _RefusedError as error:
            found = {"error": str(error)}
        if type(number) is int:
            self.notify(peer, EVENT, pack({**found, "id": number}))

    def _do(self, peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
        if self.refusal:
            raise _RefusedError(f"worker {self.worker!r} refuses the debugger: {self.refusal}")
        what = request.get("do")
        if what == "enter":
            return self._enter(peer, str(request.get("actor")))
        if what == "leave":
            self._entering.pop(peer, None)
            return {}
        session = self._sessions.get(request.get("session", 0))
        if session is None:
            raise _RefusedError(
                f"worker {self.worker!r} has no such session: the call has continued or ended"
            )
        if what == "attach":
            other = session.attached
            if other is not None and other is not peer:
                raise _RefusedError(f"another front end is attached to {session.name}: {_who(other)}")
            _log.warning(
                "%s has attached to %s, which is held at %s", _who(peer), session.title, session.where
            )
            return session.attach(peer)
        if session.attached is not peer:
            raise _RefusedError(f"not attached to {session.name}")
        if what == "detach":
            session.attached = None
        elif what == "say":
            session.say(str(request.get("line", "")))
        else:
            raise ProtocolError("a front end of the debugger has sent an unknown request")
        return {}

    def on_peer_end(self, peer: Peer) -> None:
        """Release the calls of sessions to which a disconnected front end was attached."""
        self._entering.pop(peer, None)
        for each in self.sessions():
            if each.attached is peer:
                _log.warning("%s has disconnected: %s continues", _who(peer), each.title)
                each.let_go()

    # -- entering methods that run -------------------------------------------------------------------------------

    def _enter(self, peer: Peer, actor_id: str) -> dict[str, Any]:
        for hosted in self._actors.registry.all():
            if hosted.spec is not None and f"{hosted.spec.actor_id:016x}" == actor_id:
                break
        else:
            raise _RefusedError(f"worker {self.worker!r} does not have this actor, or no longer has it")
        _log.warning("%s enters %s", _who(peer), hosted.title)
        entry = self._entering[peer] = _Entry(self, peer, hosted)
        self._agent.submit(partial(self._try_to_enter, entry))
        return {}

    def _try_to_enter(self, entry: _Entry) -> None:
        """Enter an actor's running method, or call an idle actor. Repeated, as the method may end before it is entered."""
        if self._entering.get(entry.peer) is not entry or self._agent.closed_down:
            _MONITOR.remove(entry.at_line)
            return
        if entry.begin():
            again = partial(self._agent.submit, partial(self._try_to_enter, entry))
            self._agent.clock.after(_AGAIN_S, again)
        else:
            mail = MailHeader({"mailbox": entry.hosted.id, "method": "<call>"})
            future: Future[Any] = Future()
            future.label = "an actor that a debugger enters"
            future.add_done_callback(Future.acknowledge)
            self._agent.call(self._agent.self_peer, None, (look_around,), {}, 0.0, future=future, mail=mail)

    def entered(self, entry: _Entry) -> bool:
        """Claim an entry; return True to the first caller, if the front end still waits, and False to all others."""
        return self._entering.get(entry.peer) is entry and self._entering.pop(entry.peer, None) is entry

    def look_around(self, instance: Any) -> None:
        """Hold an idle actor for the front ends that wait to enter it. Runs as a call of the actor."""
        execution = CURRENT.get()
        assert execution is not None
        for entry in list(self._entering.values()):
            if entry.hosted is execution.actor and self.entered(entry):
                session = self._session(execution, _who(entry.peer))
                session.attached = entry.peer
                _IDLE["idle"](instance, partial(_hold_caller, session))


class _RefusedError(Exception):
    """A request of a front end is refused; the text is the reason."""


class _Entry:
    """A front end that waits to enter a running method of an actor.

    The actor's thread enters the debugger at whichever comes first: the next line of the user's code (by a trace function), or
    the next check for interruptions while it waits in a function of this package.
    """

    def __init__(self, debugger: Debugger, peer: Peer, hosted: HostedActor) -> None:
        self.peer = peer
        self.hosted = hosted
        self._debugger = debugger

    def begin(self) -> bool:
        """Arrange that the actor's thread enters the debugger; return False if the actor is idle."""
        for runner in list(self.hosted.runners):
            if runner.entered:
                runner.enter(self.at_wait)
                enter(runner.ident, self.at_line)
                return True
        for loop in list(self.hosted.loops.values()):
            if loop.entries and loop.current is not None:
                enter(loop.ident, self.at_line)
                return True
        return False

    def at_line(self, frame: FrameType) -> bool:
        """Hold the call if the line is in its method. Called on the actor's thread at each line, until it returns True."""
        execution = CURRENT.get()
        frames = users_frames(frame)
        if execution is None or execution.actor is not self.hosted or frames[:1] != [frame]:
            return False  # the line is code of this package, before or after the actor's call
        caller = frames[-1].f_back
        if caller is None or caller.f_code not in CALL_METHODS:
            return False  # user code that this package calls for another purpose, such as packing the answer
        if not bears_interruption(frame):
            return False  # an import, whose lock would block other threads while the call is held
        if self._debugger.entered(self):
            self._session(execution).prompt.trace(frame)
        return True

    def at_wait(self) -> None:
        """Hold the call in a wait. Called on the actor's thread, when that thread checks for interruptions."""
        execution = CURRENT.get()
        frames = users_frames(sys._getframe())
        if execution is not None and frames and self._debugger.entered(self):
            self._session(execution).prompt.hold(frames[0])

    def _session(self, execution: Execution) -> DebugSession:
        session = self._debugger._session(execution, _who(self.peer))
        session.attached = self.peer
        return session


def _hold_caller(session: DebugSession) -> None:
    session.prompt.hold(sys._getframe(1))


def _who(peer: Peer) -> str:
    return f"a front end of the debugger (pid {peer.record.pid})"


def look_around(instance: Any) -> None:
    """Hold an idle actor for the front end that enters it. Sent to the actor as a call."""
    worker = current_worker()
    if worker is not None and worker.debugger is not None:
        worker.debugger.look_around(instance)


# -- entering a running thread ------------------------------------------------------------------------------------

_monitoring: Final[Any] = getattr(sys, "monitoring", None)  # Python 3.12 and later have it
_TOOL_IDS: Final = (0, 3, 4)  # the id for debuggers, and two ids that are reserved for no kind of tool


class _Monitor:
    """Calls functions at the next line or jump of other threads, by ``sys.monitoring``; each thread runs its own function.

    Only the code on the stack of such a thread is monitored, because events of all code would slow down all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a finaliser that runs under it may be monitored
        self._tool: int | None = None
        self._runs: dict[int, Callable[[FrameType], bool]] = {}
        self._codes: set[CodeType] = set()

    def add(self, thread: int, run: Callable[[FrameType], bool]) -> bool:
        """See enter()."""
        frame = _stacks.top_frame(thread)
        with self._lock:
            if frame is None or not self._has_tool():
                return False
            self._runs[thread] = run
            while frame is not None:
                if not is_outside(frame):
                    self._codes.add(frame.f_code)
                frame = frame.f_back
            self._set(self._codes, _monitoring.events.LINE | _monitoring.events.JUMP)
        return True

    def remove(self, run: Callable[[FrameType], bool]) -> None:
        """Do not call ``run`` again."""
        with self._lock:
            self._runs = {thread: each for thread, each in self._runs.items() if each != run}
            if self._tool is not None and not self._runs:
                self._set(self._codes, 0)
                self._codes.clear()
                self._register(None)
                _monitoring.free_tool_id(self._tool)
                self._tool = None

    def _has_tool(self) -> bool:
        for id in _TOOL_IDS:
            if self._tool is None and _monitoring.get_tool(id) is None:
                _monitoring.use_tool_id(id, __name__)
                self._tool = id
                self._register(self._at)
        return self._tool is not None

    def _register(self, callback: Callable[..., None] | None) -> None:
        for event in (_monitoring.events.LINE, _monitoring.events.JUMP):
            _monitoring.register_callback(self._tool, event, callback)

    def _set(self, codes: set[CodeType], events: int) -> None:
        for code in codes:
            _monitoring.set_local_events(self._tool, code, events)

    def _at(self, *_: object) -> None:
        run = self._runs.get(threading.get_ident())
        if run is not None and run(sys._getframe(1)):
            self.remove(run)


_MONITOR: Final = _Monitor()

# Python 3.11:
_LINE: Final = 2  # PyTrace_LINE
_api: Final = ctypes.pythonapi
_TRACE: Final = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.py_object, ctypes.py_object, ctypes.c_int, ctypes.c_void_p
)


def _declared(name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(_api, name, None)
    if found is not None:
        found.restype, found.argtypes = result, arguments
    return found


_interpreter = _declared("PyInterpreterState_Get", ctypes.c_void_p)
_first = _declared("PyInterpreterState_ThreadHead", ctypes.c_void_p, ctypes.c_void_p)
_next = _declared(
    "PyThreadState_Next", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)  # accumulate() passes two arguments; the function ignores the second
_frame_of = _declared("PyThreadState_GetFrame", ctypes.c_void_p, ctypes.c_void_p)
_let_go = _declared("Py_DecRef", None, ctypes.c_void_p)
_set_trace = _declared(SET_TRACE, ctypes.c_int, ctypes.c_void_p, _TRACE, ctypes.py_object)


def _event(run: Callable[[FrameType], bool], frame: FrameType, what: int, _argument: Any) -> int:
    """The trace function, which the interpreter calls on the other thread at each event until ``run`` has returned True."""
    if what == _LINE and run(frame):
        found: object = sys.gettrace()
        if found is run:
            sys.settrace(None)
    return 0


_EVENT: Final = _TRACE(_event)


def enter(thread: int, run: Callable[[FrameType], bool]) -> bool:
    """Make a thread call ``run(frame)`` at each line of the user's functions that it executes now, until ``run`` returns True.

    A thread that runs C code calls it only after the return to Python code, which may be never. ``run`` must not raise. It may
    set a trace function. Returns False if the thread was not found, because it has ended or, in Python 3.11, its innermost frame
    has changed meanwhile.

    CPython 3.11 has no API for this. There, internal functions of CPython set a trace function for the other thread, which the
    interpreter calls on that thread at each new line, call or return of any Python code. It replaces the thread's own trace
    function.
    """
    if _monitoring is not None:
        return _MONITOR.add(thread, run)
    frame = _stacks.top_frame(thread)
    if frame is None:
        return False
    # Between two bytecodes of this function, the other thread may run and end, and its thread state would be freed. Therefore a
    # single call of C code (``list`` over iterators in C) goes through all thread states, and sets the trace function of the
    # state whose innermost frame is ``frame``.
    with _stacks.without_collection():  # finalisers would run bytecodes
        head = map(_first, (_interpreter(),))
        steps = itertools.accumulate(itertools.chain(head, itertools.repeat(0)), _next)
        states, places = itertools.tee(itertools.takewhile(bool, steps))
        frames, taken = itertools.tee(map(_frame_of, places))
        meant = itertools.compress(states, map(operator.eq, frames, itertools.repeat(id(frame))))
        found = list(map(_set_trace, meant, itertools.repeat(_EVENT), itertools.repeat(run)))
        for each in taken:
            if each is not None:
                _let_go(each)
    return bool(found)


# -- breakpoint() -------------------------------------------------------------------------------------------------


def start(worker: Worker) -> Callable[[bool], None]:
    """Register the handlers of the debugger, and replace ``sys.breakpointhook``; return a function that undoes this."""
    agent = worker.agent
    made = worker.debugger = Debugger(worker)
    agent.on_notice[REQUEST] = made.asked
    agent.on_notice[PUT_OFF] = made.put_off_there
    agent.inbox.prompt |= {REQUEST, PUT_OFF}
    agent.on_peer_end.append(made.on_peer_end)
    agent.on_failure = made.failed
    previous = sys.breakpointhook
    if getattr(previous, "func", None) is not _breakpoint:
        sys.breakpointhook = partial(_breakpoint, previous)

    def shut_down(_graceful: bool) -> None:
        worker.debugger = agent.on_failure = None
        hook = sys.breakpointhook
        if isinstance(hook, partial) and hook.func is _breakpoint:
            if not any(each.debugger is not None for each in workers_here()):
                sys.breakpointhook = hook.args[0]

    return shut_down


def _breakpoint(previous: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    worker, execution = current_worker(), CURRENT.get()
    debugger = None if worker is None else worker.debugger
    if (
        debugger is None
        or os.environ.get("PYTHONBREAKPOINT")
        or (execution is None and not _has_no_terminal())
    ):
        return previous(*args, **kwargs)
    debugger.breakpoint(sys._getframe(1), execution)
    return None


def _has_no_terminal() -> bool:
    """Return whether standard input is /dev/null or closed, as in a worker that another process has started."""
    try:
        return os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev
    except OSError:
        return True


api.on_start.append(start)
