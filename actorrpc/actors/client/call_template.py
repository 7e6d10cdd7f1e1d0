"""Call templates: the parts that all calls of a method have in common, prepared once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from actorrpc.agent.calls import MailHeader
from actorrpc.rpc.options import UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from actorrpc.actors.context import Runtime
    from actorrpc.actors.spec.actor_spec import ActorDescriptor, Location
    from actorrpc.actors.spec.class_info import Kind, MethodInfo
    from actorrpc.actors.spec.options import CallOptions
    from actorrpc.agent.peers import Peer
    from actorrpc.wire.frames import Header

__all__ = ["CallTemplate", "Place", "Templated"]

Place: TypeAlias = "tuple[Location, Peer]"  # the actor's location, and the worker there
_GENERATORS: Final = ("generator", "async_generator")


class Templated(Protocol):
    """The attributes of a CallQueue that templates use."""

    descriptor: ActorDescriptor
    runtime: Runtime


class CallTemplate:
    """The parts that calls of one method, with the same options, to one incarnation of an actor have in common.

    Attributes:
        peer: the worker on which the incarnation lives; None if this process does not know the worker.
        survives_restart: the actor may be restarted or moved. A call that did not run is then sent again, from a copy of its
            arguments.
        tries: how often a call that may have run is sent again; -1: without limit.
        impatient: a call fails at once while the actor is being restarted; if False, the call waits for the restart.
        inlines: replies contain large results. :meth:`inline_results` sets this, :meth:`leave_results` resets it. If False, and
            the calls return ObjectRefs, a large result for a caller on another host stays on the actor's worker, and a large
            result for a caller on the same host is copied into shared memory. Replies of all other calls contain the results.
    """

    __slots__ = (
        "_fetching",
        "_there",
        "epoch",
        "impatient",
        "inlines",
        "kept_mail",
        "label",
        "mail",
        "method",
        "options",
        "peer",
        "refs",
        "retried",
        "seconds",
        "survives_restart",
        "tries",
    )

    def __init__(
        self,
        queue: Templated,
        method: MethodInfo,
        options: CallOptions,
        refs: bool,
        place: Place | None = None,
    ) -> None:
        self.method = method
        self.options = options
        self.refs = refs
        info, general = queue.descriptor.info, queue.descriptor.options
        self.label = info.prefix + (options.name or method.name.strip("<>"))
        self.peer: Any = None if place is None else place[1]
        self.epoch = -1 if place is None else place[0].epoch
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
            seconds = 0.0 if refs else queue.runtime.references.default_timeout()
        self.seconds: float = max(0.0, seconds) if seconds != UNSET_RPC_TIMEOUT else 0.0
        # An actor whose class has checkpoint() may be moved to another worker even if max_restarts is 0.
        self.survives_restart = general is not None and (general.max_restarts != 0 or info.has_checkpoint)
        self.mail: MailHeader | None = None
        self.kept_mail: MailHeader | None = None
        self.inlines = False
        self._fetching: MailHeader | None = None
        self._there: CallTemplate | None = None
        if place is None:
            return
        header: Header = {"mailbox": place[0].instance_id, "method": method.name}
        if options.concurrency_group is not None:
            header["group"] = options.concurrency_group
        if options.priority:
            header["priority"] = options.priority
        if method.kind in _GENERATORS or options.num_returns == "streaming":
            header["window"] = options.max_buffered_items or 0
        elif options.num_returns != 1:
            header["num_returns"] = options.num_returns
        if refs:
            header["keep"] = True
        if options.allow_out_of_order:
            header["unordered"] = True
        self.mail = self.kept_mail = self._mail(header)

    def __str__(self) -> str:
        return f"the call of {self.label}"

    # -- snapshot.ResultPolicy ------------------------------------------------------------------------------

    def inline_results(self) -> None:
        """See :class:`snapshot.ResultPolicy`. Saves a round trip and a copy."""
        if self.kept_mail is not None and not self.inlines and "num_returns" not in self.kept_mail.header:
            self.inlines = True
            header = self.kept_mail.header.copy()
            header.pop("keep", None)
            self.mail = self._mail(header)

    def leave_results(self) -> None:
        """See :class:`snapshot.ResultPolicy`."""
        if self.inlines:
            self.inlines = False
            self.mail = self.kept_mail

    def at(self, queue: Templated, place: Place) -> CallTemplate:
        """Return the template of the same calls to the incarnation that lives at ``place``."""
        there = self._there
        if there is None or there.epoch != place[0].epoch:
            there = self._there = CallTemplate(queue, self.method, self.options, self.refs, place)
        return there

    def mail_for(self, unresolved: bool, place: tuple[int, int] | None = None) -> MailHeader | None:
        """Return the message's header; None if the template has no ``peer``.

        Args:
            unresolved: the arguments contain ObjectRefs whose values the actor's worker has to fetch.
            place: the place of the first try in the mailbox, for a repeated call: see ``PendingCall.place``.
        """
        if place is not None and place[1] == self.epoch and self.mail is not None:
            held = self.mail_for(unresolved)
            return held and MailHeader({**held.header, "place": place[0]})
        if not unresolved or self.mail is None:
            return self.mail
        if self._fetching is None:
            kept = self.kept_mail or self.mail
            self._fetching = self._mail({**kept.header, "unresolved": True})
        return self._fetching

    def _mail(self, header: Header) -> MailHeader:
        # The default time-out does not interrupt a method, because an interrupted method may leave its state half changed.
        interrupts = self.options.interrupt and bool(self.options.timeout)
        return MailHeader(header, interrupts=interrupts, late=_late(self.method.kind, interrupts))


def _late(kind: Kind, interrupts: bool) -> str:
    """Return the part of a time-out error that says how the execution of the call on the actor's worker ends."""
    if kind == "async":
        return "if it has begun, its coroutine is cancelled"
    if kind in _GENERATORS:
        return "if it has begun, its stream is closed"
    if interrupts:
        return "if it has begun, it is interrupted in its thread, unless it runs C code"
    return (
        "if it has begun, it runs to its end, and other calls wait for that; with options(timeout=..., interrupt=True) it is "
        "interrupted"
    )
