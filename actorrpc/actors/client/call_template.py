"""Call templates: how the calls of one method of an actor are made. Each is prepared once, so that a call costs little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from actorrpc.agent.mail import MailHeader
from actorrpc.rpc.options import UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from actorrpc.actors.context import Runtime
    from actorrpc.actors.spec.actor_spec import ActorDescriptor, Location
    from actorrpc.actors.spec.class_info import Kind, MethodInfo
    from actorrpc.actors.spec.options import CallOptions
    from actorrpc.agent.peers import Peer
    from actorrpc.wire.headers import Header

__all__ = ["CallTemplate", "Place", "Templated"]

Place: TypeAlias = "tuple[Location, Peer]"  # where an actor lives, and the worker there
_GENERATORS: Final = ("generator", "async_generator")


class Templated(Protocol):
    """The actor that is called, as templates need it: a CallQueue."""

    descriptor: ActorDescriptor
    runtime: Runtime


class CallTemplate:
    """How calls of one method with the same options are made to one incarnation. Never changes.

    Attributes:
        peer: the worker on which the incarnation lives; None as long as this process does not know it.
        survives_restart: the actor may be restarted. A call that did not run is then sent again, from a copy of its arguments.
        tries: how often a call that may have run is sent again; -1: without limit.
        impatient: a call fails, rather than waits, while the actor is being restarted.
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
        # What keeps its state may also be handed over to another worker, whatever its options say.
        self.survives_restart = general is not None and (general.max_restarts != 0 or info.has_checkpoint)
        self.mail: MailHeader | None = None
        self.kept_mail: MailHeader | None = None
        #: large results come with the reply
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

    # -- results.ResultPolicy -------------------------------------------------------------------------------

    def fetched(self) -> None:
        """Have large results come with the reply from now on: that is half the way, and one copy less."""
        if self.kept_mail is not None and not self.inlines and "num_returns" not in self.kept_mail.header:
            self.inlines = True
            header = self.kept_mail.header.copy()
            header.pop("keep", None)
            self.mail = self._mail(header)

    def handed_on(self) -> None:
        """Have large results stay where they are made: they go directly to where they are wanted."""
        if self.inlines:
            self.inlines = False
            self.mail = self.kept_mail

    def at(self, queue: Templated, place: Place) -> CallTemplate:
        """Return the same for another incarnation."""
        there = self._there
        if there is None or there.epoch != place[0].epoch:
            there = self._there = CallTemplate(queue, self.method, self.options, self.refs, place)
        return there

    def mail_for(self, unresolved: bool, place: tuple[int, int] | None = None) -> MailHeader | None:
        """Return the message's header.

        Args:
            unresolved: there are ObjectRefs to be fetched over there.
            place: the call has been made before: see ``PendingCall.place``.
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
        # Only for a time-out that the caller has asked for himself: an interrupted method may leave its state half changed.
        interrupts = self.options.interrupt and bool(self.options.timeout)
        return MailHeader(header, interrupts=interrupts, late=_late(self.method.kind, interrupts))


def _late(kind: Kind, interrupts: bool) -> str:
    """Return what an error says about the execution of a call that has timed out."""
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
