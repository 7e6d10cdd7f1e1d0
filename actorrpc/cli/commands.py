"""The commands and their arguments: :func:`main`.

Exit status: 0, all is well, or what was asked for has been shown (``logs``, ``top``, ``metrics``, ``debug`` and ``dashboard`` do
no more); 1, something is wrong, and was said; 2, there is no such group, worker or actor, or the arguments cannot be used. No
command changes anything in a job (but ``dashboard --allow-actions``) or runs code of its users, and none waits behind the calls
of its actors.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final, NoReturn

from actorrpc.cli import debug, doctor, logs, profile, views
from actorrpc.debugger.protocol import HELD
from actorrpc.errors import ConfigError, RpcError
from actorrpc.observe.assemble import Silent, assemble
from actorrpc.observe.model import GroupState, plain
from actorrpc.observe.outside import Answer, FoundGroup, GroupLook, at_address, find_groups, look
from actorrpc.observe.protocol import patience
from actorrpc.observe.tracing.trace import Recording, check_path, write
from actorrpc.observe.visitor import KeptVisits

__all__ = ["main"]

_PARTS: Final = ["process", "actors", "supervised", "holders"]
_MAX_RATE_HZ: Final = 1000
_SHORT_S: Final = 0.8  # how long workers may take to say how they are
_RECORDS_S: Final = 10.0  # how long workers may take to send the records of their flight recorders
_FOUND: Final = 0
_WRONG: Final = 1
_NOTHING: Final = 2


class _NotThereError(RpcError):
    """What was named is not there."""


class _CommandParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_NOTHING, f"{self.prog}: {message} (actorrpc --help)\n")


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < 1e6:
        raise argparse.ArgumentTypeError(f"a number of seconds above 0, not {text!r}")
    return found


def _rate(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= _MAX_RATE_HZ:
        raise argparse.ArgumentTypeError(f"a number above 0, at most {_MAX_RATE_HZ}, not {text!r}")
    return found


def _whole(text: str, least: int, what: str, most: float = float("inf")) -> int:
    try:
        found = int(text)
    except ValueError:
        found = least - 1
    if not least <= found <= most:
        raise argparse.ArgumentTypeError(f"{what}, not {text!r}")
    return found


_number = partial(_whole, least=1, what="a whole number from 1 on")
_number_or_none = partial(_whole, least=0, what="a whole number from 0 on")
_port = partial(_whole, least=0, what="a port from 0 to 65535", most=65535)


def _parser() -> _CommandParser:
    parser = _CommandParser(
        prog="actorrpc",
        description="Look into groups that run, and start programs. Without --connect: groups of this user, on this host.",
        epilog="Exit status: 0, all is well; 1, something is wrong (logs, top, metrics, debug and dashboard only show: 0); 2, "
        "there is no such thing. --json is for programs.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )

    def command(
        name: str,
        run: Callable[[argparse.Namespace], int],
        text: str,
        cost: str,
        as_json: str | None = "print it as JSON",
    ) -> _CommandParser:
        made: _CommandParser = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}. {cost}", allow_abbrev=False
        )
        made.set_defaults(run=run)
        where = made.add_argument_group("which group")
        where.add_argument(
            "--connect",
            metavar="ADDRESS",
            help="that of the worker at tcp://HOST:PORT, or at the Unix socket of this path; the key is in ACTORRPC_KEY or "
            "ACTORRPC_KEY_FILE",
        )
        where.add_argument(
            "--pid", type=int, default=0, help="that of the process with this number, on this host"
        )
        made.add_argument(
            "--timeout",
            type=_seconds,
            default=_SHORT_S,
            metavar="S",
            help="how long all workers together may take (default %(default)s)",
        )
        if as_json:
            made.add_argument("--json", action="store_true", help=as_json)
        return made

    once = "Costs each worker less than a millisecond."
    command("status", _status, "workers, actors by class and state, and what is wrong, in words", once)
    stack = command(
        "stack",
        _stack,
        "where all threads of all workers are, equal stacks as one",
        "Costs each worker a millisecond or two, in which it runs nothing else.",
    )
    stack.add_argument(
        "whom",
        nargs="?",
        metavar="ACTOR|WORKER",
        help="only these: see describe; or a worker's name, rank or pid",
    )
    stack.add_argument(
        "--all",
        action="store_true",
        help="also the threads of the library that wait for work, and all frames of the library",
    )
    describe = command("describe", _describe, "all that is known of an actor", once)
    describe.add_argument(
        "actor", metavar="ACTOR", help="its name, its title, its class, or a part of its id"
    )
    logs_parser = command(
        "logs",
        _logs,
        "what the processes of a cluster have printed, those that have ended too: the last 8 MiB of all",
        "Costs its driver some milliseconds.",
        "print each line as a JSON object on a line of its own",
    )
    logs_parser.add_argument("whom", nargs="?", metavar="WORKER|PID", help="only what this one has printed")
    logs_parser.add_argument(
        "-f", "--follow", action="store_true", help="go on with what is printed from now on"
    )
    logs_parser.add_argument(
        "--grep", metavar="RE", help="only lines in which this regular expression is found"
    )
    logs_parser.add_argument(
        "-n", "--lines", type=_number_or_none, metavar="N", help="only the last N lines; then what follows"
    )
    command(
        "doctor",
        _doctor,
        "check key, files, limits and versions, and that each worker can be reached; each fault with its remedy",
        once,
    )
    top = command(
        "top",
        _top,
        "workers and actors, again and again: live on a terminal with actorrpc[cli], as tables elsewhere",
        f"{once} Each time.",
        "print each look as a JSON object on a line of its own",
    )
    top.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="S", help="seconds between two looks (default 2)"
    )
    top.add_argument("--count", type=_number, metavar="N", help="print tables, and end after N looks")
    top.add_argument("--actors", type=_number, default=20, metavar="N", help="show N actors (default 20)")

    trace = command(
        "trace",
        _trace,
        "write the last calls, and those under way, of all workers into a file for https://ui.perfetto.dev or chrome://tracing",
        "Costs each worker some milliseconds for 10 000 calls.",
    )
    trace.set_defaults(timeout=_RECORDS_S)
    trace.add_argument(
        "--seconds", type=_seconds, metavar="S", help="wait so long first, and leave out what was over before"
    )
    trace.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="(default trace.json)")
    profile_parser = command(
        "profile",
        _profile,
        "write where the threads of workers are, sampled for some seconds, as a flame graph for https://www.speedscope.app",
        f"Costs a worker with 20 threads about 1 % of its time at {profile.RATE_HZ:g} Hz; others cost less.",
    )
    profile_parser.add_argument(
        "whom", nargs="?", metavar="ACTOR|WORKER", help="only these: see stack; all calls of an actor"
    )
    profile_parser.add_argument(
        "--seconds",
        type=_seconds,
        default=10.0,
        metavar="N",
        help="for so long, or until Ctrl-C (default 10)",
    )
    profile_parser.add_argument(
        "--rate",
        type=_rate,
        default=profile.RATE_HZ,
        metavar="HZ",
        help=f"samples of each worker a second (default {profile.RATE_HZ:g})",
    )
    profile_parser.add_argument(
        "--all", action="store_true", help="also the threads of the library that wait for work"
    )
    profile_parser.add_argument(
        "--collapsed", action="store_true", help="folded lines instead, as flamegraph.pl reads them"
    )
    profile_parser.add_argument(
        "-o", "--output", metavar="FILE", help="(default profile.json; profile.txt for --collapsed)"
    )
    metrics_parser = command(
        "metrics",
        _metrics,
        "metrics of one group in Prometheus' text format: calls by method, actors by class, mailboxes",
        "Costs each worker a millisecond, and one or two of a hundred calls for two minutes after it was asked.",
        None,
    )
    metrics_parser.add_argument(
        "-o", "--output", metavar="FILE", help="write them to this file, which is replaced"
    )
    metrics_parser.add_argument(
        "--port",
        type=_port,
        metavar="N",
        help="serve them at http://127.0.0.1:N/metrics (0: any) until Ctrl-C",
    )
    metrics_parser.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="HOST",
        help="listen at this address instead; nothing asks for a password there",
    )

    debugger = command(
        "debug",
        _debug,
        "list the calls that breakpoint() holds, and talk to them as with pdb",
        "A call that is held goes on when its front end is gone.",
    )
    debugger.set_defaults(timeout=5.0)
    debugger.add_argument(
        "which",
        nargs="?",
        metavar="SESSION|ACTOR|WORKER|all",
        help="attach to this one; commands are pdb's, detach leaves the call held",
    )
    debugger.add_argument(
        "--now",
        action="store_true",
        help="enter what this ACTOR runs, in the middle of it; or when it is idle",
    )
    debugger.add_argument(
        "--cast",
        action="append",
        default=[],
        metavar="COMMAND",
        help="give this command to all that are meant, and print their answers, equal ones as one; may be repeated",
    )

    page = command(
        "dashboard",
        _dashboard,
        "a page for the browser that shows one group: what is wrong, actors, stacks, logs, calls",
        "Costs each worker less than a millisecond a second while somebody looks at it, and nothing otherwise.",
    )
    page.add_argument("--port", type=_port, default=0, metavar="N", help="listen at this port (default: any)")
    page.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="HOST",
        help="listen at this address instead of 127.0.0.1; one that other hosts reach needs TLS",
    )
    page.add_argument("--tls-cert", metavar="FILE", help="certificate, for TLS")
    page.add_argument("--tls-key", metavar="FILE", help="private key of the certificate")
    page.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="further name that the page may be reached by, as that of a proxy; may be repeated",
    )

    page.add_argument(
        "--allow-actions",
        action="store_true",
        help="those who have the page may also kill and restart actors, and drain workers; by default it only shows",
    )
    page.add_argument(
        "--ends-with",
        type=int,
        default=0,
        metavar="PID",
        help="end when this process does, which has started this one, as init(dashboard=True) has it",
    )

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
        help="`import ray` means actorrpc.compat.ray; else torch.distributed.rpc is ours",
    )
    run.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="...", help="script.py or -m module, and its arguments"
    )
    run.set_defaults(run=_run)
    worker = commands.add_parser(
        "worker",
        help="add this machine to a cluster that runs",
        description="Add this machine to a cluster that runs, as python -m actorrpc.worker does.",
        add_help=False,
        allow_abbrev=False,
    )
    worker.add_argument("arguments", nargs=argparse.REMAINDER)
    worker.set_defaults(run=_worker)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["worker"]:  # its options are its own, and --help is
        return _become("actorrpc.worker", given[1:])
    found = _parser().parse_args(given)
    try:
        return int(found.run(found))
    except (RpcError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # head(1) has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _FOUND
        sys.stderr.write(f"actorrpc {found.command}: {error}\n")
        return _NOTHING
    except KeyboardInterrupt:
        return 130


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _print_json(value: Any) -> None:
    _print([json.dumps(value, indent=1)])


# -- groups ------------------------------------------------------------------------------------------------------


def _groups(found: argparse.Namespace) -> list[FoundGroup]:
    """Return the groups that are meant.

    Raises:
        _NotThereError: there is none.
    """
    if found.connect:
        return [at_address(found.connect)]
    groups = find_groups(found.pid)
    if not groups:
        which = f"process {found.pid} is in none" if found.pid else "none of this user runs"
        raise _NotThereError(
            f"there is no group to look into: {which} on this host, in this container. --connect tcp://HOST:PORT looks into one "
            "elsewhere; ACTORRPC_RUNTIME_DIR must be that of the job"
        )
    closed = [each for each in groups if each.is_closed]
    if len(closed) == len(groups):
        raise _NotThereError(
            f"the group of process {closed[0].pids[0]} was given a key, which this process has not: set ACTORRPC_KEY or "
            "ACTORRPC_KEY_FILE to it"
        )
    return [each for each in groups if not each.is_closed]


def _one_group(found: argparse.Namespace) -> list[FoundGroup]:
    """Return the one group that is meant, as its workers have it.

    Raises:
        _NotThereError: there is none, or more than one.
    """
    groups = _groups(found)
    if len(groups) > 1 and not _is_one(groups):
        pids = ", ".join(
            f"{each.pids[0]} ({each.program})" if each.program else f"{each.pids[0]}" for each in groups
        )
        raise _NotThereError(f"there are several groups: say which one with --pid (one of {pids})")
    return groups


def _is_one(groups: list[FoundGroup]) -> bool:
    """Say whether these are workers of one group that was found by each of them."""
    return len(_looks_at(groups, ["process"], _SHORT_S)) == 1


def _looks(
    found: argparse.Namespace,
    parts: list[str],
    groups: Callable[[argparse.Namespace], list[FoundGroup]] = _groups,
) -> list[GroupLook]:
    """Look into all groups that are meant; one that was found by several of its workers is looked into once."""
    return _looks_at(groups(found), parts, found.timeout)


def _looks_at(
    groups: list[FoundGroup],
    parts: list[str],
    timeout: float,
    begin: dict[str, int] | None = None,
    kept: KeptVisits | None = None,
) -> list[GroupLook]:
    seen: set[str] = set()
    looks = []
    for group in groups:
        names = {each.record.incarnation for each in group.targets if each.record is not None}
        if names and names <= seen:
            continue
        made = look(group, parts, timeout, silence=patience(timeout), begin=begin, kept=kept)
        seen |= made.answers.keys()
        if made.answers:
            looks.append(made)
    # A worker that does not answer has told of itself only; another worker of its group has told of both.
    looks = [each for each in looks if not any(each.answers.keys() < other.answers.keys() for other in looks)]
    if not looks:
        raise _NotThereError("no group has answered, and none of its processes is there any more")
    return looks


# -- commands ----------------------------------------------------------------------------------------------------


def _status(found: argparse.Namespace) -> int:
    pictures = [views.Picture.of(each) for each in _looks(found, _PARTS)]
    wrong = any(picture.is_wrong for picture in pictures)
    if found.json:
        _print_json({"wrong": wrong, "groups": [each.as_dict() for each in pictures]})
    else:
        _print(views.separated(each.status_lines() for each in pictures))
    return _WRONG if wrong else _FOUND


def _stack(found: argparse.Namespace) -> int:
    pictures = [views.Picture.of(each) for each in _looks(found, [*_PARTS, "threads"], _one_group)]
    if found.whom is not None:
        pictures = [each for picture in pictures if (each := picture.only(found.whom)) is not None]
        if not pictures:
            raise _NotThereError(
                f"there is no actor and no worker {found.whom!r}; actorrpc status lists them"
            )
    if found.json:
        _print_json({"groups": [each.stacks_dict() for each in pictures]})
    else:
        with_idle = found.all or found.whom is not None
        texts = ([*each.stack_lines(with_idle, found.all), *each.finding_lines()] for each in pictures)
        _print(views.separated(texts))
    return _WRONG if any(each.is_wrong for each in pictures) else _FOUND


def _describe(found: argparse.Namespace) -> int:
    matches = []
    for each in _looks(found, [*_PARTS, "threads"]):
        picture = views.Picture.of(each)
        matches += [(picture, actor) for actor in picture.actors_named(found.actor)]
    if not matches:
        raise _NotThereError(f"there is no actor {found.actor!r}; actorrpc status lists them")
    if found.json:
        _print_json({"actors": [picture.actor_dict(actor) for picture, actor in matches]})
    else:
        _print(views.separated(picture.actor_lines(actor) for picture, actor in matches))
    return _WRONG if any(picture.about(actor).is_wrong for picture, actor in matches) else _FOUND


def _logs(found: argparse.Namespace) -> int:
    try:
        wanted = logs.Wanted.of(found.whom, found.grep, found.lines)
    except ConfigError as error:
        raise _NotThereError(str(error)) from error
    groups = _groups(found)
    reader = logs.Reader(groups, wanted, found.timeout)
    try:
        reader.begin(_print_json_line if found.json else _print_line)
        if found.follow:
            reader.follow()
    finally:
        reader.end()
    if not (found.json or found.follow or found.grep or found.whom):
        # Logs are read to find what is wrong, and a process that is stuck has printed nothing of that.
        for made in _looks_at(groups, _PARTS, found.timeout):
            _print(views.Picture.of(made).finding_lines())
    return _FOUND


def _print_line(line: logs.Line) -> None:
    sys.stdout.write(f"({line.label} pid={line.pid}) {line.text}\n")
    sys.stdout.flush()


def _print_json_line(line: logs.Line) -> None:
    sys.stdout.write(json.dumps(line.as_dict()) + "\n")
    sys.stdout.flush()


def _doctor(found: argparse.Namespace) -> int:
    checks = doctor.here()
    try:
        groups = _groups(found)
    except RpcError as error:
        checks.append(doctor.no_group(str(error)))
    else:
        for group in groups:
            checks += doctor.of_group(look(group, ["process"], found.timeout))
    wrong = any(each.wrong for each in checks)
    if found.json:
        _print_json({"wrong": wrong, "checks": [doctor.as_dict(each) for each in checks]})
    else:
        _print(doctor.lines(checks))
    return _WRONG if wrong else _FOUND


def _top(found: argparse.Namespace) -> int:
    terminal = sys.stdout.isatty() and not found.json
    if terminal and not found.count and sys.stdin.isatty() and importlib.util.find_spec("textual"):
        return _live_top(found)
    looked = 0
    before: list[views.Picture] = []
    while True:
        begun = time.monotonic()
        pictures = [views.Picture.of(each) for each in _looks(found, _PARTS)]
        if found.json:
            rows = [each.as_dict() for each in pictures]
            _print([json.dumps({"groups": rows})])
        else:
            text = views.separated(each.top_lines(found.actors, before) for each in pictures)
            if terminal:
                sys.stdout.write("\x1b[H\x1b[2J")
            _print(text if terminal or not looked else ["", *text])
        before = pictures
        looked += 1
        if found.count and looked >= found.count:
            return _FOUND
        time.sleep(max(0.0, found.interval - (time.monotonic() - begun)))


def _live_top(found: argparse.Namespace) -> int:
    kept = KeptVisits()

    def see(parts: list[str]) -> list[views.Picture]:
        visits = None if "threads" in parts else kept  # it may be asked for beside the tables
        return [
            views.Picture.of(each) for each in _looks_at(_groups(found), parts, found.timeout, kept=visits)
        ]

    see(["process"])  # where there is nothing to see, the terminal stays as it is
    try:
        importlib.import_module("actorrpc.cli.top").Top(see, found.interval, found.actors).run()
    finally:
        kept.close()
    return _FOUND


def _trace(found: argparse.Namespace) -> int:
    check_path(found.output)
    begun = time.monotonic()
    groups = _one_group(found)
    if found.seconds:
        time.sleep(found.seconds)
    recordings = []
    looks = _looks_at(groups, ["records", "profiles", *_PARTS], found.timeout)
    for made in looks:
        for record, answer in made.answers.values():
            recording = Recording.of(record.name, record.pid, answer)
            if found.seconds:
                recording.since(begun)
            recordings.append(recording)
    summary = write(found.output, recordings)
    pictures = list(map(views.Picture.of, looks))
    if found.json:
        findings = [plain(each) for picture in pictures for each in picture.findings]
        _print_json({**asdict(summary), "findings": findings})
    else:
        _print(views.trace_lines(summary))
        for picture in pictures:
            _print(picture.finding_lines())
    return _WRONG if summary.missing else _FOUND


def _profile(found: argparse.Namespace) -> int:
    output = found.output or ("profile.txt" if found.collapsed else "profile.json")
    if os.path.isdir(output) or not os.path.exists(output):  # what is there is written to, and may be a pipe
        check_path(output)
    samplers: list[profile.Sampler] = []
    lives = True
    missing: dict[str, str] = {}
    for made in _looks(found, _PARTS, _one_group):
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
        raise _NotThereError(f"{found.whom!r} lives in no worker; actorrpc describe says what became of it")
    if not samplers and not missing:
        raise _NotThereError(f"there is no actor and no worker {found.whom!r}; actorrpc status lists them")
    took = profile.sample(samplers, found.seconds, found.rate, found.timeout, threading.Event())
    has_some = any(each.samples for each in samplers)
    threads = profile.write(output, samplers, found.rate, found.collapsed) if has_some else 0
    summary = profile.ProfileSummary(
        path=os.path.abspath(output) if has_some else "",
        seconds=took,
        rate=found.rate,
        workers=sum(each.samples > 0 for each in samplers),
        threads=threads,
        samples=sum(each.samples for each in samplers),
        late=sum(each.ticks.late for each in samplers),
        lost=sum(each.ticks.lost for each in samplers),
        missing=missing | {each.name: each.why for each in samplers if each.why},
    )
    if found.json:
        _print_json(asdict(summary))
    else:
        _print(profile.lines(summary, found.collapsed))
    return _WRONG if summary.missing else _FOUND


def _metrics(found: argparse.Namespace) -> int:
    if found.output:
        check_path(found.output)
    groups = _one_group(found)
    try:
        prometheus = importlib.import_module("prometheus_client")
    except ImportError:
        raise _NotThereError("pip install 'actorrpc[metrics]': prometheus_client writes them") from None
    metrics = importlib.import_module("actorrpc.observe.metrics")

    def see() -> tuple[GroupState, dict[str, dict[str, Any]]]:
        answers: dict[str, Answer] = {}
        for made in _looks_at(groups, metrics.PARTS, found.timeout):
            answers |= made.answers
        state = assemble(answers.values())
        return state, {run: each for run, (_, each) in answers.items() if not isinstance(each, Silent)}

    registry = prometheus.CollectorRegistry()
    registry.register(metrics.GroupCollector(see))
    if found.port is not None:
        try:
            server, thread = prometheus.start_http_server(found.port, found.bind, registry)
        except OSError as error:
            raise RpcError(f"{found.bind} port {found.port} cannot be listened at: {error}") from error
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
    return _FOUND


def _debug(found: argparse.Namespace) -> int:
    looks = _looks(found, _PARTS)
    made = [views.Picture.of(each) for each in looks]
    workers = [worker for picture in made for worker in picture.state.workers]
    if found.which is None:
        if found.now or found.cast:
            raise _NotThereError("say which: actorrpc debug (SESSION|ACTOR|WORKER|all)")
        held = [each for worker in workers for each in worker.held]
        if found.json:
            _print_json({"held": [asdict(each) for each in held]})
        else:
            _print(debug.lines(held))
        return _FOUND
    targets = {record.name: each.target(record) for each in looks for record, _ in each.answers.values()}
    until = time.monotonic() + found.timeout
    if found.now:
        actors = [
            each for picture in made for each in picture.actors_named(found.which) if each.state != "DEAD"
        ]
        if len(actors) != 1:
            raise _NotThereError(
                f"--now enters one actor that lives; {len(actors)} are called {found.which!r}"
            )
        (actor,) = actors
        if not actor.answered:
            why = next((f": it is {each.state}" for each in workers if each.name == actor.worker), "")
            raise _NotThereError(
                f"{actor.title} cannot be entered, as its worker {actor.worker!r} does not answer{why}. actorrpc stack shows "
                "where it is"
            )
        sessions = [debug.Attached.entering(actor.title, actor.actor_id, targets[actor.worker], until)]
    else:
        meant = {each.actor_id for picture in made for each in picture.actors_named(found.which)}
        held = debug.matching(workers, meant, found.which)
        if not held:
            raise _NotThereError(f"no call of {found.which!r} is held; actorrpc debug lists those that are")
        if len(held) > 1 and not found.cast:
            _print(debug.lines(held))
            raise _NotThereError("these are several: say which SESSION, or give commands to all with --cast")
        sessions = [
            debug.Attached.to(each.session, targets[each.session.rpartition(":")[0]], until) for each in held
        ]
    if not found.cast:
        over = debug.talk(sessions[0], sys.stdin, _write, debug.is_terminal())
        if not over and not found.json:
            name = sessions[0].name
            how = f"; actorrpc debug {name} attaches again" if sessions[0].state == HELD else ": it goes on"
            _print([f"detached from {name}{how}"])
        return _FOUND
    answers = debug.cast(sessions, found.cast, found.timeout)
    for each in sessions:
        each.detach()
    if found.json:
        rows = [{"sessions": names, "text": text, "runs": not whole} for names, text, whole in answers]
        _print_json({"answers": rows})
    else:
        for names, text, whole in answers:
            _print([f"{', '.join(names)}:" + ("" if whole else " (runs)")])
            _write(text)
    return _FOUND


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _dashboard(found: argparse.Namespace) -> int:
    if bool(found.tls_cert) != bool(found.tls_key):
        raise _NotThereError("--tls-cert and --tls-key belong together")
    parent = os.pidfd_open(found.ends_with) if found.ends_with else -1
    if found.ends_with and os.getppid() != found.ends_with:
        return _FOUND  # it is gone; that number may be another one's by now
    groups = _one_group(found)
    try:
        server = importlib.import_module("actorrpc.cli.dashboard.server")
    except ImportError:
        raise _NotThereError("pip install 'actorrpc[dashboard]': starlette and uvicorn serve it") from None
    feed = importlib.import_module("actorrpc.cli.dashboard.feed").Feed

    kept = KeptVisits()

    def see(parts: list[str], begin: dict[str, int] | None = None) -> GroupLook:
        patience = max(found.timeout, _RECORDS_S) if "records" in parts else found.timeout
        return _looks_at(groups, parts, patience, begin, kept)[0]

    def say(link: str) -> None:
        if found.json:
            _print([json.dumps({"link": link})])
        else:
            how = "" if found.ends_with else " Ctrl-C ends the page."
            _print([f"{link}\n  works once; the next one comes here when it was used.{how}"])

    tls = (found.tls_cert, found.tls_key) if found.tls_cert else None
    served = server.Dashboard(
        feed(see, lambda: groups, acts=found.allow_actions, rest=kept.close),
        found.bind,
        found.port,
        say=say,
        names=found.allow_host,
        tls=tls,
    )
    if parent >= 0:
        threading.Thread(target=_wait_for_end, args=(parent, served.stop), name="parent", daemon=True).start()
    served.run()
    return _FOUND


def _wait_for_end(pidfd: int, then: Callable[[], None]) -> None:
    """Call a function when a process has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    then()


def _run(found: argparse.Namespace) -> int:
    if not found.program:
        raise _NotThereError("say what to run: actorrpc run [--ray] (script.py | -m module) [arguments]")
    return _become("actorrpc.compat.ray" if found.ray else "actorrpc.compat", found.program)


def _worker(found: argparse.Namespace) -> int:
    return _become("actorrpc.worker", found.arguments)


def _become(module: str, arguments: Sequence[str]) -> int:
    """Replace this process by ``python -m module``, with Python's own options."""
    options = []
    if sys.argv and os.path.basename(sys.argv[0]) == "__main__.py":
        options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) - 1]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *options, "-m", module, *arguments])
