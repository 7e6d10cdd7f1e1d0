"""A fake group, and a dashboard server for it in a thread."""

from __future__ import annotations

import contextlib
import http.client
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from actorrpc.cli.dashboard.feed import Feed
from actorrpc.cli.dashboard.server import Dashboard
from actorrpc.errors import RpcError
from actorrpc.observe.assemble import Silent
from actorrpc.observe.call_sums import BUCKETS
from actorrpc.observe.outside import FoundGroup, GroupLook
from actorrpc.observe.visitor import Target
from actorrpc.wire.identity import WorkerRecord

SCRIPT = "<script>alert(1)</script>"  # names of jobs must be shown as text


def actor_row(number: int, **more: Any) -> dict[str, Any]:
    row = {
        "actor_id": f"{number:016x}",
        "instance": f"{number:016x}",
        "title": f"Store#{number:04x}",
        "class_name": "Store",
        "state": "alive",
        "age": 10.0,
        "calls_done": number,
        "mailbox": [{"waiting": number, "running": 0, "limit": 1, "oldest": float(number), "next": "get"}],
        "running": [],
    }
    return {**row, **more}


@dataclass
class FakeGroup:
    """A fake group of two workers, one of them stopped; a feed calls ``see``."""

    actors: list[dict[str, Any]] = field(default_factory=list)
    threads: list[dict[str, Any]] = field(default_factory=list)
    asked: list[list[str]] = field(default_factory=list)
    begun: list[dict[str, int] | None] = field(default_factory=list)
    records: list[list[Any]] = field(default_factory=list)
    calls: int = 0
    problem: str = ""
    is_well: bool = False  # whether the second worker answers as well

    def see(self, parts: list[str], begin: dict[str, int] | None = None) -> GroupLook:
        self.asked.append(list(parts))
        self.begun.append(begin)
        if self.problem:
            raise RpcError(self.problem)
        running, stopped = (
            WorkerRecord(name=name, rank=rank, incarnation=f"{rank:032x}", host="here", pid=100 + rank)
            for rank, name in enumerate(["driver", "Store-1"])
        )
        self.calls += 10
        looks = len(self.asked)
        answer = {
            "process": {"age": 5.0 + looks, "cpu": 1.0 + looks / 2, "memory": 3 << 20, "host": SCRIPT},
            "actors": self.actors,
            "threads": self.threads,
            "recorder": {"on": True, "total": len(self.records), "now": 0.0, "threads": {}},
            "records": self.records,
            "metrics": {
                "calls": [["server", "Store/get", False, self.calls, 1.0, [self.calls, *[0] * len(BUCKETS)]]]
            },
        }
        silent = Silent("stopped", "a signal has stopped it")
        targets = [Target(record=running, addresses=[], key=None)]
        group = FoundGroup(what="a fake", program=SCRIPT, pids=[100], targets=targets)
        other = {"process": dict(answer["process"])} if self.is_well else silent
        if "actors" not in parts and parts:
            del answer["actors"]
        return GroupLook(
            group, {running.incarnation: (running, answer), stopped.incarnation: (stopped, other)}, 0.001
        )

    def feed(self, every: float = 0.01, *, acts: bool = False) -> Feed:
        return Feed(self.see, self.groups, every, acts=acts)

    def groups(self) -> list[FoundGroup]:
        return [FoundGroup()]


class ServedPage:
    """A server in a thread, and arbitrary requests to it."""

    def __init__(self, dashboard: Dashboard, links: list[str]) -> None:
        self.dashboard = dashboard
        self.links = links

    @property
    def place(self) -> str:
        return f"/{self.dashboard.access.place}/"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.dashboard.port}"

    @property
    def token(self) -> str:
        return self.links[-1].partition("#token=")[2]

    def ask(
        self, path: str, *, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.dashboard.port, timeout=30)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, self.place + path, body, {"Host": self.host, **named})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def log_in(self) -> str:
        """Log in with the token of the link; return the cookie."""
        origin = f"http://{self.host}"
        status, headers, _ = self.ask("login", method="POST", body=self.token, Origin=origin)
        assert status == 204
        return headers["set-cookie"].partition(";")[0]


@contextlib.contextmanager
def served(feed: Feed, host: str = "127.0.0.1", **options: Any) -> Iterator[ServedPage]:
    """Run a server on a free port."""
    links: list[str] = []
    announced = threading.Event()

    def say(link: str) -> None:
        links.append(link)
        announced.set()

    # uvicorn changes the levels of global loggers, so restore them afterwards.
    levels = {
        name: logging.getLogger(name).level
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
    }
    dashboard = Dashboard(feed, host, 0, say=say, **options)
    thread = threading.Thread(target=dashboard.run, name="page")
    thread.start()
    try:
        announced.wait()
        yield ServedPage(dashboard, links)
    finally:
        dashboard.stop()
        thread.join()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
