"""Plans: how the calls of one method are made, prepared once so that a call costs little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from actorrpc.actors.spec import Location
from actorrpc.core.letters import Letter
from actorrpc.rpc.options import UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from actorrpc.actors.line import Line
    from actorrpc.actors.methods import Kind, MethodInfo
    from actorrpc.actors.options import CallOptions
    from actorrpc.core.peer import Peer

__all__ = ["Plan"]

_GENERATORS: Final = ("generator", "async_generator")


class Plan:
    """How calls of one method with the same options are made to one incarnation. Never changes.

    Attributes:
        peer: where it lives; None where that is not known yet.
        plain: nothing has to be kept of a call once it is sent.
        tries: how often a call that may have run is made again; -1: for ever.
        impatient: a call fails, rather than waits, while the actor is being restarted.
    """

    __slots__ = (
        "_fetching",
        "_there",
        "epoch",
        "impatient",
        "inlines",
        "kept_letter",
        "label",
        "letter",
        "method",
        "options",
        "peer",
        "plain",
        "refs",
        "retried",
        "seconds",
        "tries",
    )

    def __init__(
        self,
        line: Line,
        method: MethodInfo,
        options: CallOptions,
        refs: bool,
        location: Location | None,
        peer: Peer | None,
    ) -> None:
        self.method = method
        self.options = options
        self.refs = refs
        self.label = line.prefix + (options.name or method.name.strip("<>"))
        self.peer: Any = peer
        self.epoch = -1 if location is None else location.epoch
        general = line.options
        tries = options.max_task_retries
        if tries is None:
            tries = general.max_task_retries if general is not None else None
        self.impatient = tries == 0 and not options.patient
        self.tries = tries or 0
        self.retried = options.retry_exceptions or (
            general.retry_exceptions if general is not None else False
        )
        seconds = options.timeout
        if seconds is None:
            seconds = 0.0 if refs else line.runtime.references.default_timeout()
        self.seconds: float = max(0.0, seconds) if seconds != UNSET_RPC_TIMEOUT else 0.0
        self.plain = not tries and not line.restarts and line.max_pending < 0
        self.letter: Letter | None = None
        self.kept_letter: Letter | None = None
        #: large results come with the reply
        self.inlines = False
        self._fetching: Letter | None = None
        self._there: Plan | None = None
        if location is None:
            return
        header: dict[str, Any] = {"a": location.resident_id, "m": method.name}
        if options.concurrency_group is not None:
            header["g"] = options.concurrency_group
        if options.priority:
            header["y"] = options.priority
        if method.kind in _GENERATORS or options.num_returns == "streaming":
            header["q"] = options.max_buffered_items or 0
        elif options.num_returns != 1:
            header["nr"] = options.num_returns
        if refs:
            header["k"] = 1
        if options.allow_out_of_order:
            header["o"] = 1
        self.letter = self.kept_letter = self._letter(header)

    # -- object_ref.Taste ----------------------------------------------------------------------------

    def fetched(self) -> None:
        """Have large results come with the reply from now on: that is half the way, and one copy less."""
        if self.kept_letter is not None and not self.inlines and "nr" not in self.kept_letter.header:
            self.inlines = True
            self.letter = self._letter(
                {name: value for name, value in self.kept_letter.header.items() if name != "k"}
            )

    def handed_on(self) -> None:
        """Have large results stay where they are made: they go directly to where they are wanted."""
        if self.inlines:
            self.inlines = False
            self.letter = self.kept_letter

    def at(self, line: Line, location: Location, peer: Peer) -> Plan:
        """Return the same for another incarnation."""
        there = self._there
        if there is None or there.epoch != location.epoch:
            there = self._there = Plan(line, self.method, self.options, self.refs, location, peer)
        return there

    def letter_for(self, unresolved: bool, place: tuple[int, int] | None = None) -> Letter | None:
        """Return the letter's header.

        Args:
            unresolved: there are ObjectRefs to be fetched over there.
            place: the call has been made before: see ``Trip.place``.
        """
        if place is not None and place[1] == self.epoch and self.letter is not None:
            held = self.letter_for(unresolved)
            return held and Letter({**held.header, "n": place[0]})
        if not unresolved or self.letter is None:
            return self.letter
        if self._fetching is None:
            kept = self.kept_letter or self.letter
            self._fetching = self._letter({**kept.header, "u": 1})
        return self._fetching

    def _letter(self, header: dict[str, Any]) -> Letter:
        # Only for a time-out that the caller has asked for himself: an interrupted method may leave its state half changed.
        interrupts = self.options.interrupt and bool(self.options.timeout)
        return Letter(header, interrupts=interrupts, late=_late(self.method.kind, interrupts))


def _late(kind: Kind, interrupts: bool) -> str:
    """Say what becomes of a call that has begun when its time is over."""
    if kind == "async":
        return "if it has begun, its coroutine is cancelled"
    if kind in _GENERATORS:
        return "if it has begun, its stream is closed"
    if interrupts:
        return "if it has begun, it is interrupted where it runs in Python, on a thread, and leaves that to others"
    return (
        "if it has begun, it goes on to its end, and others wait for that; with options(timeout=..., interrupt=True) it is "
        "interrupted"
    )
