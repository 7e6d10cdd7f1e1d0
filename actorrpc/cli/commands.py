"""The commands and their arguments: :func:`main`.

docs/reference/exit-statuses.md lists the exit statuses. Except ``debug``, ``drain`` and ``dashboard --allow-actions``, no
command of :data:`_COMMANDS` changes a job, runs users' code or waits for calls.

A command is a row of :data:`_COMMANDS` and a function, which reads the state of groups, and prints it or returns a
:class:`_Shown` to print. The texts are made in ``views.py``, ``doctor.py``, ``profile.py`` and ``debug.py``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import secrets
import select
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NoReturn

from actorrpc.cli import actions, debug, doctor, logs, profile, up, up_agent, views
from actorrpc.debugger import HELD
from actorrpc.errors import RpcError
from actorrpc.observe import processes
from actorrpc.observe.assemble import Silent, assemble
from actorrpc.observe.model import GroupState, plain
from actorrpc.observe.outside import Answer, FoundGroup, GroupLook, at_address, find_groups, look
from actorrpc.observe.trace import check_path, write
from actorrpc.observe.visitor import KeptVisits, patience
from actorrpc.wire.keys import write_private_file

__all__ = ["main"]

_PARTS: Final = ["process", "actors", "supervised", "holders"]
_SHORT_S: Final = 0.8  # how long workers may take to send their state
_RECORDS_S: Final = 10.0  # how long workers may take to send the records of their flight recorders
_DRAIN_LOOK_S: Final = 0.1
_FOUND: Final = 0
_WRONG: Final = 1
_NOTHING: Final = 2


class _NotThereError(RpcError):
    """A group, worker or actor that the user has named does not exist, or the arguments cannot be used."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """The result of a command: the lines to print, the value to print with ``--json``, and whether a problem was found."""

    lines: Callable[[], Iterable[str]]
    json: Callable[[], Any]
    wrong: bool = False


def _print(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _print_json(value: Any) -> None:
    _print([json.dumps(value)])


# -- groups ------------------------------------------------------------------------------------------------------


def _groups(found: argparse.Namespace) -> list[FoundGroup]:
    """Return the groups that the arguments select.

    Raises:
        _NotThereError: there are no such groups, or this process does not have their key.
    """
    if found.connect:
        return [at_address(found.connect)]
    groups = find_groups(found.pid)
    if not groups:
        raise _NotThereError(_no_group(found))
    readable = [each for each in groups if not each.is_closed]
    if not readable:
        raise _NotThereError(": ".join(_closed(groups)))
    return readable


def _no_group(found: argparse.Namespace) -> str:
    which = f"process {found.pid} is in no group" if found.pid else "no group of this user runs"
    return (
        f"there is no group to look into: {which} on this host, in this container. For a group elsewhere, use --connect "
        "tcp://HOST:PORT. ACTORRPC_RUNTIME_DIR must have the same value as for the job"
    )


def _closed(groups: Sequence[FoundGroup]) -> tuple[str, str]:
    """Return why groups whose keys are not known cannot be read, and the remedy. All processes of one group may be listed."""
    pids = ", ".join(str(each.pids[0]) for each in groups)
    why = f"the group of process {pids} was given a key, which this command does not have"
    return why, "set ACTORRPC_KEY or ACTORRPC_KEY_FILE to this key"


def _one_group(found: argparse.Namespace) -> list[FoundGroup]:
    """Return the only group that the arguments select, as a list: workers of one group may be found separately.

    Raises:
        _NotThereError: there is no such group, or there are several.
    """
    groups = _groups(found)
    # If all entries are of one group, _looks() returns one result.
    if len(groups) > 1 and len(_looks(groups, ["process"], _SHORT_S)) > 1:
        pids = ", ".join(
            f"{each.pids[0]} ({each.program})" if each.program else f"{each.pids[0]}" for each in groups
        )
        raise _NotThereError(f"there are several groups: say which one with --pid (one of {pids})")
    return groups


def _looks(
    groups: list[FoundGroup],
    parts: list[str],
    timeout: float,
    begin: dict[str, int] | None = None,
    kept: KeptVisits | None = None,
) -> list[GroupLook]:
    """Read the state of groups; ``begin`` and ``kept`` are as for :func:`look`. Return one result for all entries of a group.

    Raises:
        _NotThereError: no worker has answered.
    """
    seen: set[str] = set()
    looks = []
    problem = "no group has answered, and all processes of the groups have ended"
    for group in groups:
        names = {each.record.incarnation for each in group.targets if each.record is not None}
        if names and names <= seen:
            continue
        made = look(group, parts, timeout, silence=patience(timeout), begin=begin, kept=kept)
        seen |= made.answers.keys()
        if made.silence:
            problem = f"{group.what} does not answer: {made.silence}"
        elif made.answers:
            looks.append(made)
    # A result that was read through a silent worker contains only this worker. Drop it if another result contains more.
    looks = [each for each in looks if not any(each.answers.keys() < other.answers.keys() for other in looks)]
    if not looks:
        raise _NotThereError(problem)
    return looks


def _pictures(groups: list[FoundGroup], parts: list[str], timeout: float) -> list[views.Picture]:
    return [views.Picture.of(each) for each in _looks(groups, parts, timeout)]


# -- commands ----------------------------------------------------------------------------------------------------


def _status(found: argparse.Namespace) -> _Shown:
    pictures = _pictures(_groups(found), _PARTS, found.timeout)
    wrong = any(picture.is_wrong for picture in pictures)
    return _Shown(
        lambda: views.separated(each.status_lines() for each in pictures),
        lambda: {"wrong": wrong, "groups": [each.as_dict() for each in pictures]},
        wrong,
    )


def _stack(found: argparse.Namespace) -> _Shown:
    pictures = _pictures(_one_group(found), [*_PARTS, "threads"], found.timeout)
    if found.whom is not None:
        pictures = [each for picture in pictures if (each := picture.only(found.whom)) is not None]
        if not pictures:
            raise _NotThereError(
                f"there is no actor and no worker {found.whom!r}; actorrpc status lists them"
            )
    with_idle = found.all or found.whom is not None
    return _Shown(
        lambda: views.separated(
            [*each.stack_lines(with_idle, found.all), *each.finding_lines()] for each in pictures
        ),
        lambda: {"groups": [each.stacks_dict() for each in pictures]},
        any(each.is_wrong for each in pictures),
    )


def _describe(found: argparse.Namespace) -> _Shown:
    pictures = _pictures(_groups(found), [*_PARTS, "threads"], found.timeout)
    matches = [(each, actor) for each in pictures for actor in each.actors_named(found.actor)]
    if not matches:
        raise _NotThereError(f"there is no actor {found.actor!r}; actorrpc status lists them")
    return _Shown(
        lambda: views.separated(picture.actor_lines(actor) for picture, actor in matches),
        lambda: {"actors": [picture.actor_dict(actor) for picture, actor in matches]},
        any(picture.about([actor]).is_wrong for picture, actor in matches),
    )


def _logs(found: argparse.Namespace) -> None:
    groups = _groups(found)
    reader = logs.Reader(groups, found.timeout, found.whom, found.grep or "", found.lines)

    def show(line: logs.Line) -> None:
        if found.json:
            _print_json(line.as_dict())
        else:
            _print([str(line)])

    try:
        reader.begin(show)
        if found.follow:
            reader.follow()
    finally:
        reader.close()
    if not (found.json or found.follow or found.grep or found.whom):
        # Users read logs to find faults, but a stuck process prints nothing. The findings name it.
        for picture in _pictures(groups, _PARTS, found.timeout):
            _print(picture.finding_lines())
        places = reader.places()
        _print(["", "Output:", *places] if places else [])


def _doctor(found: argparse.Namespace) -> _Shown:
    checks = doctor.here()
    if found.gpu:
        checks += importlib.import_module("actorrpc.cli.gpu").checks()
    try:
        groups = [at_address(found.connect)] if found.connect else find_groups(found.pid)
        if not groups:
            raise _NotThereError(_no_group(found))
    except RpcError as error:
        named = bool(found.connect or found.pid)
        checks.append((doctor.not_checked if named else doctor.no_group)(str(error)))
        groups = []
    closed = [each for each in groups if each.is_closed]
    if closed:
        checks.append(doctor.not_checked(*_closed(closed)))
    if len(closed) < len(groups):
        try:
            looks = _looks([each for each in groups if not each.is_closed], ["process"], found.timeout)
            checks += [each for made in looks for each in doctor.of_group(made)]
        except _NotThereError as error:
            checks.append(doctor.not_checked(str(error)))
    wrong = any(each.wrong for each in checks)
    return _Shown(
        lambda: doctor.lines(checks),
        lambda: {"wrong": wrong, "checks": [plain(each) for each in checks]},
        wrong,
    )


def _health(found: argparse.Namespace) -> _Shown:
    """Query the workers that listen on this host, or at the address; unlike other commands, report each failure with status 1."""
    found.connect = found.connect or found.address
    answers: list[Answer] = []
    problem = ""
    begun = time.monotonic()
    # With a function for queries, look() queries the found workers only, and not the other members that these report.
    query = KeptVisits(keeps=False).query
    try:
        for group in _groups(found):
            # With --pid, query only this process and its descendants: a driver on this host may be in the same group, but another
            # probe is responsible for it.
            if found.pid:
                family = processes.descendants(found.pid) | {found.pid}
                own = [each for each in group.targets if each.local_pid in family]
                group.targets = own or group.targets
            made = look(
                group, ["process"], found.timeout, silence=patience(found.timeout), query_worker=query
            )
            answers += made.answers.values()
        if not answers:
            problem = "no worker has answered" + (f" at {found.connect}" if found.connect else "")
    except (RpcError, OSError) as error:
        problem = str(error)
    silent = [(record, each) for record, each in answers if isinstance(each, Silent)]
    if silent:
        at = f"the worker at {found.connect}" if found.connect else ""
        problem = "; ".join(
            f"{at or f'worker {record.name!r}'}: {each.reason or each.state}" for record, each in silent
        )
        if found.connect and silent[0][1].state == "silent":
            problem += (
                ". Check the address: a worker listens at ACTORRPC_PORT, and a driver at the port of listen=. Without an "
                "address, this command finds the workers of this host"
            )
    names = sorted(record.name for record, each in answers if not isinstance(each, Silent))
    line = f"healthy: {', '.join(names)} answered in {1000 * (time.monotonic() - begun):.0f} ms"
    return _Shown(
        lambda: [f"unhealthy: {problem}" if problem else line],
        lambda: {"healthy": not problem, "answered": names, "problem": problem},
        bool(problem),
    )


def _top(found: argparse.Namespace) -> None:
    terminal = sys.stdout.isatty() and not found.json
    if terminal and not found.count and sys.stdin.isatty() and importlib.util.find_spec("textual"):
        _live_top(found)
        return
    looked = 0
    before: list[views.Picture] = []
    while True:
        begun = time.monotonic()
        pictures = _pictures(_groups(found), _PARTS, found.timeout)
        if found.json:
            _print_json({"groups": [each.as_dict() for each in pictures]})
        else:
            text = views.separated(each.top_lines(found.actors, before) for each in pictures)
            if terminal:
                sys.stdout.write("\x1b[H\x1b[2J")
            _print(text if terminal or not looked else ["", *text])
        before = pictures
        looked += 1
        if looked == found.count:
            return
        time.sleep(max(0.0, found.interval - (time.monotonic() - begun)))


def _live_top(found: argparse.Namespace) -> None:
    kept = KeptVisits()

    def see(parts: list[str]) -> list[views.Picture]:
        # Stacks may be read while another thread uses the kept connections to read the tables.
        visits = None if "threads" in parts else kept
        return [views.Picture.of(each) for each in _looks(_groups(found), parts, found.timeout, kept=visits)]

    see(["process"])  # if there is no group, this raises before the terminal is changed
    try:
        importlib.import_module("actorrpc.cli.top").Top(see, found.interval, found.actors).run()
    finally:
        kept.close()


def _drain(found: argparse.Namespace) -> _Shown:
    groups = _one_group(found)
    (seen,) = _looks(groups, list(actions.PARTS), found.timeout)
    records = [record for record, _ in seen.answers.values()]
    addresses = {record.name: [host for host, _ in record.tcp] for record in records}
    names = [
        each.name
        for each in seen.state.workers
        if each.rank != 0
        and each.state == "alive"
        and found.whom in (each.name, each.host, *addresses.get(each.name, ()))
    ]
    if not names:
        raise _NotThereError(
            f"no worker, except the driver, has the name or the host {found.whom!r}; actorrpc status lists them"
        )
    until = time.monotonic() + found.grace
    for name in names:
        actions.act(seen, "drain", name, found.grace)
    left = set(names)
    while left and time.monotonic() < until + _SHORT_S:
        time.sleep(_DRAIN_LOOK_S)
        try:
            looks = _looks(groups, ["process"], found.timeout)
        except _NotThereError:
            pids = [pid for group in groups for pid in group.pids]
            if not pids or any(os.path.exists(f"/proc/{pid}") for pid in pids):
                raise
            looks = []  # the processes through which the group was found have all ended: their workers have left
        # While workers leave, the workers of this host may list different members. A worker that any list shows as alive has
        # not left.
        left &= {each.name for seen in looks for each in seen.state.workers if each.state == "alive"}
    lines = [f"worker {each} has left" for each in names if each not in left]
    lines += [
        f"worker {each} has not left within {found.grace:g} s: its calls have not finished, or it runs its own script; nothing "
        "new is placed there"
        for each in sorted(left)
    ]
    return _Shown(lambda: lines, lambda: {"left": sorted({*names} - left), "busy": sorted(left)}, bool(left))


def _trace(found: argparse.Namespace) -> _Shown:
    check_path(found.output)
    begun = time.monotonic()
    groups = _one_group(found)
    if found.seconds:
        time.sleep(found.seconds)
    looks = _looks(groups, ["records", "profiles", *_PARTS], found.timeout)
    since = begun if found.seconds else None
    summary = write(found.output, [recording for each in looks for recording in each.recordings(since)])
    pictures = list(map(views.Picture.of, looks))
    return _Shown(
        lambda: [*views.trace_lines(summary), *(line for each in pictures for line in each.finding_lines())],
        lambda: {
            **asdict(summary),
            "findings": [plain(each) for picture in pictures for each in picture.findings],
        },
        bool(summary.missing),
    )


def _profile(found: argparse.Namespace) -> _Shown:
    output = found.output or ("profile.txt" if found.collapsed else "profile.json")
    # An existing file is not checked: it is overwritten, or is a pipe.
    if os.path.isdir(output) or not os.path.exists(output):
        check_path(output)
    samplers: list[profile.Sampler] = []
    missing: dict[str, str] = {}
    lives = True
    for made in _looks(_one_group(found), _PARTS, found.timeout):
        picture = views.Picture.of(made)
        meant = picture if found.whom is None else picture.only(found.whom)
        if meant is None:
            continue
        names = {each.name for each in meant.state.workers}
        lives = bool(names)
        actors = None
        if found.whom is not None and not picture.workers_named(found.whom):
            actors = {each.actor_id: each.title for each in meant.state.actors}
        for record, answer in made.answers.values():
            if record.name not in names:
                continue
            if isinstance(answer, Silent):
                missing[record.name] = answer.reason or answer.state
                continue
            samplers.append(profile.Sampler(record.name, made.target(record), actors, found.all))
    if not lives:
        raise _NotThereError(f"{found.whom!r} runs on no worker; actorrpc describe shows its state")
    if not samplers and not missing:
        raise _NotThereError(f"there is no actor and no worker {found.whom!r}; actorrpc status lists them")
    took = profile.sample(samplers, found.seconds, found.rate, found.timeout, threading.Event())
    summary = profile.write(output, samplers, missing, took, found.rate, found.collapsed)
    return _Shown(
        lambda: profile.lines(summary, found.collapsed), lambda: asdict(summary), bool(summary.missing)
    )


def _metrics(found: argparse.Namespace) -> None:
    if found.output:
        check_path(found.output)
    groups = _one_group(found)
    prometheus = _extra("prometheus_client", "pip install 'actorrpc[metrics]': this needs prometheus_client")
    metrics = importlib.import_module("actorrpc.observe.metrics")

    def see() -> tuple[GroupState, dict[str, dict[str, Any]]]:
        answers: dict[str, Answer] = {}
        for made in _looks(groups, metrics.PARTS, found.timeout):
            answers |= made.answers
        state = assemble(answers.values())
        return state, {run: each for run, (_, each) in answers.items() if not isinstance(each, Silent)}

    registry = prometheus.CollectorRegistry()
    registry.register(metrics.GroupCollector(see))
    if found.port is not None:
        try:
            server, thread = prometheus.start_http_server(found.port, found.bind, registry)
        except OSError as error:
            raise RpcError(f"this host cannot listen at {found.bind} port {found.port}: {error}") from error
        try:
            _print([f"http://{found.bind}:{server.server_port}/metrics, until Ctrl-C"])
            thread.join()
        finally:
            server.shutdown()
            server.server_close()
    elif found.output:
        prometheus.write_to_textfile(found.output, registry)
    else:
        sys.stdout.write(prometheus.generate_latest(registry).decode())


def _extra(module: str, remedy: str) -> Any:
    """Import a module that needs an extra of the package; ``remedy`` is the message if the module is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise _NotThereError(remedy) from None


def _debug(found: argparse.Namespace) -> _Shown | None:
    looks = _looks(_groups(found), _PARTS, found.timeout)
    pictures = [views.Picture.of(each) for each in looks]
    if found.which is None:
        if found.now or found.cast:
            raise _NotThereError("say which: actorrpc debug (SESSION|ACTOR|WORKER|all)")
        held = [each for picture in pictures for worker in picture.state.workers for each in worker.held]
        return _Shown(lambda: debug.lines(held), lambda: {"held": [asdict(each) for each in held]})
    sessions = _sessions(found, looks, pictures)
    if not found.cast:
        first = sessions[0]
        over = debug.talk(first, sys.stdin, _write, sys.stdin.isatty())
        if not over and not found.json:
            how = (
                f"; actorrpc debug {first.name} attaches again"
                if first.state == HELD
                else ": the call continues"
            )
            _print([f"detached from {first.name}{how}"])
        return None
    answers = debug.cast(sessions, found.cast, found.timeout)
    for each in sessions:
        each.detach()
    if found.json:
        rows = [{"sessions": names, "text": text, "runs": not whole} for names, text, whole in answers]
        return _Shown(list, lambda: {"answers": rows})
    for names, text, whole in answers:
        _print([f"{', '.join(names)}:" + ("" if whole else " (runs)")])
        _write(text)
    return None


def _sessions(
    found: argparse.Namespace, looks: list[GroupLook], pictures: list[views.Picture]
) -> list[debug.Attached]:
    """Attach to the held calls that the arguments select; with ``--now``, hold the call of an actor, and attach to it."""
    targets = {record.name: each.target(record) for each in looks for record, _ in each.answers.values()}
    workers = [worker for picture in pictures for worker in picture.state.workers]
    meant = [each for picture in pictures for each in picture.actors_named(found.which)]
    until = time.monotonic() + found.timeout
    if found.now:
        actors = [each for each in meant if each.state != "DEAD"]
        if len(actors) != 1:
            raise _NotThereError(
                f"--now needs one living actor, but {found.which!r} selects {len(actors)} living actors"
            )
        (actor,) = actors
        if not actor.answered:
            why = next((f": it is {each.state}" for each in workers if each.name == actor.worker), "")
            raise _NotThereError(
                f"{actor.title} cannot be entered, as its worker {actor.worker!r} does not answer{why}. actorrpc stack shows "
                "where the worker is"
            )
        return [debug.Attached.entering(actor.title, actor.actor_id, targets[actor.worker], until)]
    held = debug.matching(workers, {each.actor_id for each in meant}, found.which)
    if not held:
        raise _NotThereError(f"no call of {found.which!r} is held; actorrpc debug lists the held calls")
    if len(held) > 1 and not found.cast:
        _print(debug.lines(held))
        raise _NotThereError("several calls are held: name one SESSION, or send commands to all with --cast")
    return [debug.Attached.to(each.session, targets[each.session.rpartition(":")[0]], until) for each in held]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _dashboard(found: argparse.Namespace) -> None:
    if bool(found.tls_cert) != bool(found.tls_key):
        raise _NotThereError("--tls-cert and --tls-key belong together")
    parent = os.pidfd_open(found.ends_with) if found.ends_with else -1
    if found.ends_with and os.getppid() != found.ends_with:
        return  # the parent has ended; another process may have its process id now
    groups = _one_group(found)
    server = _extra(
        "actorrpc.cli.dashboard.server", "pip install 'actorrpc[dashboard]': this needs starlette and uvicorn"
    )
    feed = importlib.import_module("actorrpc.cli.dashboard.feed").Feed
    kept = KeptVisits()

    def see(parts: list[str], begin: dict[str, int] | None = None) -> GroupLook:
        patience = max(found.timeout, _RECORDS_S) if "records" in parts else found.timeout
        return _looks(groups, parts, patience, begin, kept)[0]

    def say(link: str) -> None:
        if found.json:
            _print_json({"link": link})
        else:
            how = "" if found.ends_with else " Ctrl-C ends the page."
            _print([f"{link}\n  The link works once. After its use, the next link is printed here.{how}"])

    served = server.Dashboard(
        feed(see, lambda: groups, acts=found.allow_actions, rest=kept.close),
        found.bind,
        found.port,
        say=say,
        names=found.allow_host,
        tls=(found.tls_cert, found.tls_key) if found.tls_cert else None,
    )

    def wait_for_end() -> None:
        poller = select.poll()
        poller.register(parent, select.POLLIN)
        poller.poll()
        served.stop()

    if parent >= 0:
        threading.Thread(target=wait_for_end, name="parent", daemon=True).start()
    served.run()


def _run(found: argparse.Namespace) -> None:
    if not found.program:
        raise _NotThereError("say what to run: actorrpc run [--ray] (script.py | -m module) [arguments]")
    _become("actorrpc.compat.ray" if found.ray else "actorrpc.compat", found.program)


def _up(found: argparse.Namespace) -> int:
    hosts = [each for each in (found.hosts or "").split(",") if each]
    in_slurm = not hosts
    hosts = hosts or up.slurm_hosts()
    if not hosts:
        raise _NotThereError(
            "say which hosts: --hosts a,b,c; without it, the hosts of a Slurm job are used, and this is none"
        )
    program = found.program[1:] if found.program[:1] == ["--"] else found.program
    if bool(program) == bool(found.join):
        raise _NotThereError(
            "say where the driver is: --join tcp://HOST:PORT of a driver that listens, or the program to run as the driver, like "
            "actorrpc up --hosts a,b python train.py"
        )
    worker = [
        word
        for name in ("labels", "num_cpus", "num_gpus", "resources")
        if (value := getattr(found, name)) is not None
        for word in (f"--{name.replace('_', '-')}", value)
    ]
    launch = up.HostLaunch(
        hosts=hosts,
        count=found.count,
        slurm=in_slurm,
        ssh=[*shlex.split(found.ssh), "-v", "-T", "-o", "BatchMode=yes"],
        python=found.python,
        worker=worker,
        join=found.join or "",
        program=program,
        limits={**up.PHASES, **dict(found.limit)},
        grace=found.grace,
    )
    return up.Up(launch).run()


def _phase(text: str) -> tuple[str, float]:
    phase, _, seconds = text.partition("=")
    if phase not in up.PHASES:
        raise argparse.ArgumentTypeError(f"a phase is one of {', '.join(up.PHASES)}, not {phase!r}")
    return phase, float(_seconds(seconds))


def _add_up(commands: Any) -> None:
    about = (
        "Start workers on several hosts, by ssh or in a job of Slurm, and a program that is their driver. All processes end with "
        "this command. Its exit status is the program's; without a program, the greatest status of the workers; 1 if a host is "
        "missing."
    )
    made = commands.add_parser(
        "up",
        help="start workers on several hosts, and end them together",
        description=about,
        allow_abbrev=False,
    )
    limits = ", ".join(f"{phase}={seconds:g}" for phase, seconds in up.PHASES.items())
    options = (
        _value(
            "--hosts", "A,B,C", "the hosts, as ssh takes them (default: the hosts of the Slurm job, by srun)"
        ),
        _value("--count", "N", "workers on each host (default 1)", _number, default=1),
        _value("--join", "tcp://HOST:PORT", "where the driver listens, instead of a program"),
        _value(
            "--python", "PATH", "the interpreter on the hosts (default: this one)", default=sys.executable
        ),
        _value("--ssh", "COMMAND", "the command for ssh, with options (default ssh)", default="ssh"),
        _value(
            "--limit",
            "PHASE=S",
            f"how many seconds a phase of the start may take; may be repeated (default {limits})",
            _phase,
            action="append",
            default=[],
        ),
        _value(
            "--grace",
            "S",
            "how long the workers' calls may continue at the end (default 10)",
            _seconds,
            default=10.0,
        ),
        _value("--labels", "NAME=WORD,...", "as for actorrpc worker"),
        _value("--num-cpus", "N", "processors of each worker"),
        _value("--num-gpus", "N", "CUDA devices of each worker"),
        _value("--resources", "NAME=NUMBER,...", "as for actorrpc worker"),
    )
    for flags, keywords in options:
        made.add_argument(*flags, **keywords)
    made.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="...", help="the program, and its arguments"
    )
    made.set_defaults(run=_up)


def _key(found: argparse.Namespace) -> None:
    path = os.path.abspath(found.file)
    write_private_file(path, f"{secrets.token_hex(32)}\n".encode())
    _print([f"export ACTORRPC_KEY_FILE={shlex.quote(path)}"])


def _become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by ``python -m module``, with the options of Python that ``python -m actorrpc`` was given."""
    options = []
    if sys.argv and os.path.basename(sys.argv[0]) == "__main__.py":
        options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) - 1]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *options, "-m", module, *arguments])


# -- the table ---------------------------------------------------------------------------------------------------


def _checked(
    convert: Callable[[str], Any], is_right: Callable[[Any], bool], what: str
) -> Callable[[str], Any]:
    """Return a function for argparse's ``type=``, which converts and checks a value; ``what`` describes valid values."""

    def check(text: str) -> Any:
        try:
            found = convert(text)
        except ValueError:
            found = None
        if found is None or not is_right(found):
            raise argparse.ArgumentTypeError(f"{what}, not {text!r}")
        return found

    return check


_seconds: Final = _checked(float, lambda found: 0 < found < 1e6, "a number of seconds above 0")
_rate: Final = _checked(float, lambda found: 0 < found <= 1000, "a number above 0, at most 1000")
_number: Final = _checked(int, lambda found: found >= 1, "a whole number from 1 on")
_number_or_none: Final = _checked(int, lambda found: found >= 0, "a whole number from 0 on")
_port: Final = _checked(int, lambda found: 0 <= found <= 65535, "a port from 0 to 65535")

_Option = tuple[tuple[str, ...], dict[str, Any]]


def _value(flags: str, metavar: str, text: str, kind: Callable[[str], Any] = str, **more: Any) -> _Option:
    """Return an option that takes a value; ``flags`` are separated by spaces."""
    return tuple(flags.split()), {"metavar": metavar, "help": text, "type": kind, **more}


def _flag(flags: str, text: str) -> _Option:
    return tuple(flags.split()), {"action": "store_true", "help": text}


def _word(name: str, metavar: str, text: str, **more: Any) -> _Option:
    """Return a positional argument, which may be left out unless ``nargs`` is given."""
    return (name,), {"nargs": "?", "metavar": metavar, "help": text, **more}


@dataclass(frozen=True, slots=True)
class _Command:
    """A row of the table.

    Attributes:
        text: what the command shows, for ``--help``; ``cost``: the load that the command causes on the workers.
        as_json: the help text of ``--json``; empty for a command without that option.
        timeout: how long all workers together may take to answer, in seconds; the default of ``--timeout``.
        timeout_flag: the name of this option.
    """

    run: Callable[[argparse.Namespace], _Shown | None]
    text: str
    cost: str
    options: Sequence[_Option] = ()
    as_json: str = "print it as JSON"
    timeout: float = _SHORT_S
    timeout_flag: str = "--timeout"


_ONCE: Final = "Costs each worker less than a millisecond."
_COMMANDS: Final = {
    "status": _Command(_status, "workers, actors by class and state, and problems", _ONCE),
    "stack": _Command(
        _stack,
        "the stacks of all threads of all workers, equal stacks shown once",
        "Costs each worker a millisecond or two, in which the worker runs nothing else.",
        [
            _word("whom", "ACTOR|WORKER", "only this actor (see describe) or worker (name, rank or pid)"),
            _flag(
                "--all",
                "also the threads of the library that wait for work, and the library's frames below the user's code",
            ),
        ],
    ),
    "describe": _Command(
        _describe,
        "everything known about an actor",
        _ONCE,
        [_word("actor", "ACTOR", "the actor's name, title or class, or start or end of its id", nargs=None)],
    ),
    "logs": _Command(
        _logs,
        "the last 8 MiB that the processes of a cluster have printed, including ended processes",
        "Costs its driver some milliseconds.",
        [
            _word("whom", "WORKER|PID", "only the output of this process"),
            _flag("-f --follow", "continue with new output"),
            _value("--grep", "RE", "only lines in which this regular expression is found"),
            _value(
                "-n --lines", "N", "only the last N lines, and with -f the lines that follow", _number_or_none
            ),
        ],
        as_json="print each line as a JSON object on a line of its own",
    ),
    "doctor": _Command(
        _doctor,
        "check key, files, limits and versions, and that each worker can be reached; shows remedies",
        _ONCE,
        [
            _flag(
                "--gpu",
                "also check what CUDA tensors between processes of this host need; takes up to two minutes",
            )
        ],
    ),
    "health": _Command(
        _health,
        "a probe for Kubernetes and systemd: status 0 if the workers on this host answer, else 1 and a line that says why",
        f"{_ONCE} The command itself uses 0.2 s of processor time.",
        [_word("address", "ADDRESS", "the same as --connect ADDRESS: only the worker at this address")],
        timeout=2.0,
    ),
    "top": _Command(
        _top,
        "workers and actors, updated regularly: live on a terminal with actorrpc[cli], as tables elsewhere",
        f"{_ONCE[:-1]} for each update.",
        [
            _value("--interval", "S", "seconds between two updates (default 2)", _seconds, default=2.0),
            _value("--count", "N", "print tables, and end after N updates", _number),
            _value("--actors", "N", "show N actors (default 20)", _number, default=20),
        ],
        as_json="print each update as a JSON object on a line of its own",
    ),
    "drain": _Command(
        _drain,
        "make a worker leave without losing its work: calls finish, actors with checkpoint() move, nothing new is placed there",
        "Waits until the workers have left. Workers that have not left in time stay; run the command again to wait longer.",
        [
            _word(
                "whom", "WORKER|HOST", "this worker, or all workers on this host but the driver", nargs=None
            ),
            _value(
                "--grace",
                "S",
                "how long calls may continue, and actors may move, before the command ends with status 1 (default 60)",
                _seconds,
                default=60.0,
            ),
        ],
        timeout_flag="--query-timeout",
    ),
    "trace": _Command(
        _trace,
        "write the last and the running calls of all workers into a file for https://ui.perfetto.dev or chrome://tracing",
        "Costs each worker some milliseconds for 10 000 calls.",
        [
            _value(
                "--seconds", "S", "wait this long, and leave out calls that ended before the wait", _seconds
            ),
            _value("-o --output", "FILE", "(default trace.json)", default="trace.json"),
        ],
        timeout=_RECORDS_S,
    ),
    "profile": _Command(
        _profile,
        "sample the threads of workers for some seconds, and write a flame graph for https://www.speedscope.app",
        f"Costs a worker with 20 threads about 1 % of its time at {profile.RATE_HZ:g} Hz, and workers with fewer threads less.",
        [
            _word("whom", "ACTOR|WORKER", "only this worker, or all calls of this actor; see stack"),
            _value(
                "--seconds", "N", "sample this long, or until Ctrl-C (default 10)", _seconds, default=10.0
            ),
            _value(
                "--rate",
                "HZ",
                f"samples per second of each worker (default {profile.RATE_HZ:g})",
                _rate,
                default=profile.RATE_HZ,
            ),
            _flag("--all", "also the threads of the library that wait for work"),
            _flag("--collapsed", "write folded lines for flamegraph.pl instead"),
            _value("-o --output", "FILE", "(default profile.json; profile.txt for --collapsed)"),
        ],
    ),
    "metrics": _Command(
        _metrics,
        "metrics of one group in Prometheus' text format: calls by method, actors by class, mailboxes",
        "Costs each worker a millisecond, and 1 to 2 % of the throughput of calls for two minutes after each request.",
        [
            _value("-o --output", "FILE", "write the metrics to this file, which is replaced"),
            _value("--port", "N", "serve them at http://127.0.0.1:N/metrics (0: any) until Ctrl-C", _port),
            _value(
                "--bind",
                "HOST",
                "listen at this address instead; there is no password",
                default="127.0.0.1",
            ),
        ],
        as_json="",
    ),
    "debug": _Command(
        _debug,
        "list the calls that breakpoint() holds, and debug them as with pdb",
        "A held call continues when the command that is attached to it ends without detaching.",
        [
            _word(
                "which",
                "SESSION|ACTOR|WORKER|all",
                "attach to this held call: the commands are pdb's, and detach leaves the call held",
            ),
            _flag("--now", "hold the running call of this ACTOR, or the idle ACTOR, and attach to it"),
            _value(
                "--cast",
                "COMMAND",
                "send this command to all selected calls, and print their answers, equal answers once; may be repeated",
                action="append",
                default=[],
            ),
        ],
        timeout=5.0,
    ),
    "dashboard": _Command(
        _dashboard,
        "a page for the browser that shows one group: problems, actors, stacks, logs, calls",
        "Costs each worker less than a millisecond a second while a browser shows the page, and nothing otherwise.",
        [
            _value("--port", "N", "listen at this port (default: any)", _port, default=0),
            _value(
                "--bind",
                "HOST",
                "listen at this address instead of 127.0.0.1; an address that other hosts can reach needs TLS",
                default="127.0.0.1",
            ),
            _value("--tls-cert", "FILE", "certificate, for TLS"),
            _value("--tls-key", "FILE", "private key of the certificate"),
            _value(
                "--allow-host",
                "NAME",
                "further host name for the page, such as the name of a proxy; may be repeated",
                action="append",
                default=[],
            ),
            _flag(
                "--allow-actions",
                "users of the page may also kill and restart actors, and drain workers; by default the page only shows",
            ),
            _value(
                "--ends-with",
                "PID",
                "end with this process, which must be the parent; init(dashboard=True) uses it",
                int,
                default=0,
            ),
        ],
    ),
}
_GROUP: Final = (
    _value(
        "--connect",
        "ADDRESS",
        "the group of the worker at tcp://HOST:PORT, or at the Unix socket of this path; the key is in ACTORRPC_KEY or "
        "ACTORRPC_KEY_FILE",
    ),
    (
        ("--pid",),
        {"type": int, "default": 0, "help": "the group of the process with this number, on this host"},
    ),
)


class _CommandParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_NOTHING, f"{self.prog}: {message} (actorrpc --help)\n")


def _parser() -> _CommandParser:
    parser = _CommandParser(
        prog="actorrpc",
        description="Inspect running groups, and start programs. Without --connect: groups of this user on this host.",
        epilog="Exit status: 0, no problem; 1, a problem was found (logs, top, metrics, debug and dashboard only show: 0); 2, "
        "there is no such group, worker or actor, or the arguments are invalid. --json is for programs.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    for name, row in _COMMANDS.items():
        text = row.text
        about = f"{text[0].upper()}{text[1:]}. {row.cost}"
        made = commands.add_parser(name, help=text, description=about, allow_abbrev=False)
        made.set_defaults(run=row.run)
        where = made.add_argument_group("which group")
        for flags, keywords in _GROUP:
            where.add_argument(*flags, **keywords)
        how_long = "how long all workers together may take to answer one query (default %(default)s)"
        common = [_value(row.timeout_flag, "S", how_long, _seconds, default=row.timeout, dest="timeout")]
        if row.as_json:
            common.append(_flag("--json", row.as_json))
        for flags, keywords in (*common, *row.options):
            made.add_argument(*flags, **keywords)
    run = commands.add_parser(
        "run",
        help="run a program of torch's RPC, or of Ray's, on actorrpc",
        description="Run an unchanged program on actorrpc, in the place of this process: "
        "actorrpc run [--ray] (script.py | -m module) [arguments].",
        allow_abbrev=False,
    )
    run.add_argument(
        "--ray",
        action="store_true",
        help="`import ray` imports actorrpc.compat.ray; without --ray, actorrpc replaces torch.distributed.rpc",
    )
    run.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="...", help="script.py or -m module, and its arguments"
    )
    run.set_defaults(run=_run)
    key = commands.add_parser(
        "key",
        help="make a key for a group of workers on several hosts",
        description="Make a key in a new file that only you can read, and print the variable to set. Copy the file to each host.",
        allow_abbrev=False,
    )
    key.add_argument("file", metavar="FILE", help="the file")
    key.set_defaults(run=_key)
    _add_up(commands)
    # This parser is only for the list in --help: main() passes the arguments to actorrpc.worker, which parses them.
    commands.add_parser("worker", help="add this machine to a running cluster", add_help=False)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["worker"]:
        _become("actorrpc.worker", given[1:])
    if given[:1] == ["up-agent"]:  # only actorrpc up runs it
        return up_agent.main()
    found = _parser().parse_args(given)
    try:
        shown = found.run(found)
        if shown is None or isinstance(shown, int):
            return shown or _FOUND
        _print([json.dumps(shown.json(), indent=1)] if found.json else shown.lines())
        return _WRONG if shown.wrong else _FOUND
    except (RpcError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of the output, such as head(1), has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _FOUND
        sys.stderr.write(f"actorrpc {found.command}: {error}\n")
        return _NOTHING
    except KeyboardInterrupt:
        return 130
