"""The dashboard server: logins, attacks, headers, actions and limits."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import re
import socket
import ssl
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from actorrpc.cli import actions
from actorrpc.cli.dashboard import server
from actorrpc.cli.dashboard.server import Access, Dashboard, is_loopback, make_app
from actorrpc.errors import ConfigError
from actorrpc.observe.visitor import Target
from tests import certificates
from tests.actors.e2e.kit import until
from tests.dashboard.fakes import SCRIPT, FakeGroup, ServedPage, actor_row, served
from tests.dashboard.test_timeline import executed

pytestmark = [pytest.mark.limit(30)]
_STATIC = Path(server.__file__).parent / "static"
_API = [f"api/{each}" for each in ("now", "events", "actors", "calls", "stacks", "timeline", "trace", "logs")]


class _Page:
    """A client that calls the application directly, with the right ``Host`` header."""

    def __init__(self, runner: asyncio.Runner, access: Access, client: httpx.AsyncClient) -> None:
        self._runner = runner
        self.access = access
        self.client = client
        self.place = f"/{access.place}/"

    def ask(self, method: str, path: str, content: str | None = None, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._runner.run(self.client.request(method, path, content=content, headers=named))

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.ask("GET", self.place + path, **headers)

    def log_in(self, token: str, **headers: str) -> httpx.Response:
        return self.ask("POST", self.place + "login", token, **{"Origin": "http://127.0.0.1:8000", **headers})


@contextlib.contextmanager
def _opened(
    base: str, *, secure: bool = False, group: FakeGroup | None = None, acts: bool = False
) -> Iterator[_Page]:
    access = Access("127.0.0.1", ["proxy.example"])
    with asyncio.Runner() as runner:
        feed = (group or FakeGroup([actor_row(n) for n in range(300)])).feed(acts=acts)
        transport = httpx.ASGITransport(make_app(feed, access, secure=secure))
        client = httpx.AsyncClient(transport=transport, base_url=base)
        try:
            yield _Page(runner, access, client)
        finally:
            runner.run(client.aclose())
            runner.run(feed.close())


@pytest.fixture
def page() -> Iterator[_Page]:
    with _opened("http://127.0.0.1:8000") as opened:
        yield opened


# -- logins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", _API)
def test_without_a_valid_cookie_the_api_answers_401(page: _Page, path: str) -> None:
    for cookie in ("", "actorrpc-dashboard=", "actorrpc-dashboard=wrong", "other=1"):
        answer = page.get(path, Cookie=cookie)
        assert answer.status_code == 401
        assert "Store" not in answer.text


def test_a_login_token_works_once(page: _Page) -> None:
    token = page.access.new_token()
    assert page.ask("POST", page.place + "login", token).status_code == 403  # without an origin
    assert page.log_in("wrong").status_code == 401
    assert page.log_in("").status_code == 401
    assert page.log_in("x" * 1025).status_code == 413
    assert page.log_in("\udcff".encode("utf-8", "surrogatepass").decode("latin-1")).status_code == 401
    answer = page.log_in(token)
    assert answer.status_code == 204
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert (
        "path" not in cookie
    )  # the default path is that of the page, so other servers of the host do not get the cookie
    assert page.get("api/now").status_code == 200
    page.client.cookies.clear()
    assert page.log_in(token).status_code == 401
    assert page.get("api/now").status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost:9", 200),  # any port, for tunnels
        ("LOCALHOST", 200),
        ("[::1]:8000", 200),
        ("proxy.example", 200),
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("127.0.0.1.evil.example", 421),
        ("127.0.0.1@evil.example", 421),
        ("evil.example/127.0.0.1", 421),
        ("127.0.0.1:x", 421),
        ("[::1", 421),
        ("192.168.0.7", 421),
        ("", 421),
    ],
)
def test_requests_with_a_foreign_host_header_are_refused(page: _Page, host: str, status: int) -> None:
    assert page.get("", Host=host).status_code == status
    assert page.get("api/now", Host=host).status_code == (401 if status == 200 else status)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8000", 204),
        ("https://proxy.example", 204),
        ("http://127.0.0.1:9000", 403),  # another server on this host
        ("http://localhost:8000", 403),
        ("http://evil.example", 403),
        ("http://127.0.0.1:8000.evil.example", 403),
        ("null", 403),
        ("", 403),
        ("127.0.0.1:8000", 403),
        ("file://127.0.0.1:8000", 403),
    ],
)
def test_logins_from_another_origin_are_refused(page: _Page, origin: str, status: int) -> None:
    assert page.log_in(page.access.new_token(), Origin=origin).status_code == status


@pytest.mark.parametrize(
    ("site", "status"), [("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)]
)
def test_requests_from_other_sites_are_refused(page: _Page, site: str, status: int) -> None:
    page.log_in(page.access.new_token())
    assert page.get("api/actors", Sec_Fetch_Site=site).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_without_allowed_actions_only_get_requests_are_accepted(page: _Page, method: str) -> None:
    page.log_in(page.access.new_token())
    assert page.ask(method, page.place + "api/act", Origin="http://127.0.0.1:8000").status_code == 404
    for path in ("", "app.js", *_API):
        answer = page.ask(method, page.place + path, Origin="http://127.0.0.1:8000")
        assert answer.status_code == 405
    assert page.ask(method, page.place + "login").status_code == 403


# -- actions -----------------------------------------------------------------------------------------------------


@dataclass
class _FakeVisit:
    """Replaces a visit to a worker: records actions, and answers with ``problem``."""

    done: list[tuple[str, str, str]] = field(default_factory=list)
    problem: str = ""
    name: str = ""

    def __call__(self, target: Target, _until: float, *, acts: bool) -> _FakeVisit:
        assert acts
        assert target.record is not None
        self.name = target.record.name
        return self

    def act(self, what: str, whom: str, _until: float, _seconds: float) -> str:
        self.done.append((self.name, what, whom))
        return self.problem

    def close(self) -> None: ...


@pytest.fixture
def visit(monkeypatch: pytest.MonkeyPatch) -> _FakeVisit:
    made = _FakeVisit()
    monkeypatch.setattr(actions, "Visit", made)
    return made


@pytest.fixture
def acting(visit: _FakeVisit) -> Iterator[_Page]:
    rows = [
        actor_row(n, actor_id=f"{n:016x}", supervisor="driver", max_restarts=n, state="alive") for n in (0, 1)
    ]
    group = FakeGroup(rows)
    with _opened("http://127.0.0.1:8000", group=group, acts=True) as opened:
        opened.log_in(opened.access.new_token())
        yield opened


_ACT = {"Origin": "http://127.0.0.1:8000", "X-Actorrpc-Action": "1"}
_KILL = json.dumps({"do": "kill", "whom": f"{0:016x}"})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"X-Actorrpc-Action": ""}, 403),  # as from a form or an image
        ({"X-Actorrpc-Action": "0"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:9000"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "evil.example"}, 421),
        ({"Cookie": "actorrpc-dashboard=wrong"}, 401),
    ],
)
def test_actions_need_the_cookie_origin_and_header_of_the_page(
    acting: _Page, visit: _FakeVisit, headers: dict[str, str], status: int
) -> None:
    if "Cookie" in headers:
        acting.client.cookies.clear()
    answer = acting.ask("POST", acting.place + "api/act", _KILL, **{**_ACT, **headers})
    assert answer.status_code == status
    assert visit.done == ([("driver", "kill", f"{0:016x}")] if status == 200 else [])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (_KILL, ""),
        ('{"do": "restart", "whom": "0000000000000001"}', ""),
        ('{"do": "restart", "whom": "0000000000000000"}', "max_restarts is 0"),
        ('{"do": "kill", "whom": "00000000000000ff"}', "dead or does not exist"),
        ('{"do": "drain", "whom": "Store-1"}', ""),
        ('{"do": "drain", "whom": "driver"}', "could be drained"),
        ('{"do": "drain", "whom": "stranger"}', "could be drained"),
        ('{"do": "eval", "whom": "x"}', "there is no such action"),
        ('{"do": "kill", "whom": 1}', "there is no such action"),
        ("[" * 900, "there is no such action"),
        ("", "there is no such action"),
    ],
)
def test_actions_are_done_or_refused_with_a_reason(
    acting: _Page, visit: _FakeVisit, body: str, says: str
) -> None:
    found = acting.ask("POST", acting.place + "api/act", body, **_ACT).json()
    assert says in found["problem"]
    assert bool(found["said"]) is bool(visit.done) is not bool(says)
    visit.problem = "only a visitor"
    found = acting.ask("POST", acting.place + "api/act", body, **_ACT).json()
    assert found["problem"]
    assert not found["said"]


# -- paths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../",
        "%2e%2e/server.py",
        "..%2fserver.py",
        "static/app.js",
        "app.js/",
        "app.js%00",
        "//etc/passwd",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "....//server.py",
        "server.py",
        "api/",
        "api/now/",
        "__init__.py",
    ],
)
def test_no_path_leads_to_another_file(page: _Page, path: str) -> None:
    answer = page.ask("GET", f"http://127.0.0.1:8000{page.place}{path}")
    assert answer.status_code == 404
    assert len(answer.text) < 100


@pytest.mark.parametrize("prefix", ["", "/a/b", "/user/me/proxy/8000"])
def test_the_page_works_under_any_prefix_of_a_proxy(page: _Page, prefix: str) -> None:
    assert page.ask("GET", prefix + page.place).status_code == 200
    assert page.ask("GET", f"{prefix}{page.place}style.css").status_code == 200
    assert page.ask("GET", f"{prefix}{page.place}api/now").status_code == 401


# -- headers and contents ----------------------------------------------------------------------------------------


def test_every_answer_has_restrictive_security_headers(page: _Page) -> None:
    answers = [page.get(path) for path in ("", "app.js", "nothing", "api/now")]
    answers += [page.get("", Host="evil.example"), page.log_in("wrong")]
    page.log_in(page.access.new_token())
    answers.append(page.get("api/actors"))
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in answer.headers
    assert answers[-1].headers["cache-control"] == "no-store"


def test_the_page_is_small_and_has_no_inline_or_foreign_code() -> None:
    files = {each.name: each.read_bytes() for each in _STATIC.iterdir()}
    assert sum(len(gzip.compress(each)) for each in files.values()) < 100 << 10
    for name, body in files.items():
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?:|//[a-z]+\.|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
        ), name
    html = files["index.html"].decode()
    assert not re.search(r"<style| style=| on[a-z]+=|<script(?![^>]* src=)", html)
    # All paths are relative, so that the page works under any prefix.
    assert not re.search(
        r"""(?:src|href)="/|(?:ask|fetch|EventSource|from)\(?\s*["'`]/""",
        "".join(map(bytes.decode, files.values())),
    )


def test_each_view_gets_its_data_even_for_malformed_queries(page: _Page) -> None:
    page.log_in(page.access.new_token())
    assert page.get("api/now").json()["program"] == SCRIPT
    found = page.get("api/actors?sort=waiting&first=5&most=3&q=store")
    assert [int(each["id"], 16) for each in found.json()["rows"]] == [294, 293, 292]
    assert found.headers["content-type"] == "application/json"
    for query in (
        "first=-1&most=x&sort=nothing",
        "first=99999999999&most=99999999",
        "q=%ff&first=%00",
        "&&=&",
    ):
        assert len(page.get(f"api/actors?{query}").json()["rows"]) in (0, 200)
    assert page.get("api/stacks").json()["workers"] == 2
    assert page.get("api/memory").json()["problem"] == ""
    assert [each["method"] for each in page.get("api/calls").json()["rows"]] == ["Store/get"]
    assert "no driver" in page.get("api/logs?q=x").json()["problem"]


def test_recent_calls_are_sent_as_a_timeline_and_as_a_trace_file() -> None:
    group = FakeGroup(records=[executed(n, n, n, n + 1.0, n) for n in range(50)])
    with _opened("http://127.0.0.1:8000", group=group) as page:
        page.log_in(page.access.new_token())
        found = page.get("api/timeline?seconds=10").json()
        assert len(found["slices"]) == 11
        assert found["missing"] == ["Store-1: a signal has stopped it"]
        assert [each for each in group.begun if each] == [{"records": -12_000}]
        answer = page.get("api/trace")
        assert answer.headers["content-disposition"] == 'attachment; filename="actorrpc-trace.json"'
        # No record lies within the last seconds.
        assert answer.json()["otherData"]["missing"] == {"Store-1": "a signal has stopped it"}
        group.problem = "no group has answered"
        assert page.get("api/timeline").json()["problem"] == "no group has answered"
        assert page.get("api/trace").status_code == 503


# -- the server --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.0.0.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
    ],
)
def test_other_hosts_are_served_over_tls_only(host: str, local: bool) -> None:
    assert is_loopback(host) is local
    if not local:
        with pytest.raises(ConfigError, match=r"--tls-cert.*ssh -L"):
            Dashboard(FakeGroup().feed(), host, 0, say=print)


def test_over_tls_the_link_and_the_allowed_hosts_have_the_given_name() -> None:
    made = certificates.files()
    files = (made.cert, made.key)
    with pytest.raises(ConfigError, match="--allow-host"):
        Dashboard(FakeGroup().feed(), "0.0.0.0", 0, say=print, tls=files)
    with served(FakeGroup().feed(), host="0.0.0.0", names=["page.example"], tls=files) as page:
        assert page.links[0].startswith(f"https://page.example:{page.dashboard.port}/")
        trusting = ssl.create_default_context()
        trusting.check_hostname = False
        trusting.verify_mode = ssl.CERT_NONE
        for host, status in (("page.example", 200), ("127.0.0.1", 421)):
            connection = http.client.HTTPSConnection(
                "127.0.0.1", page.dashboard.port, timeout=30, context=trusting
            )
            with contextlib.closing(connection):
                connection.request("GET", page.place, headers={"Host": host})
                assert connection.getresponse().status == status


def test_no_secret_is_in_any_log(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with served(FakeGroup().feed()) as page, caplog.at_level(0):
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
            caplog.set_level(0, name)
        cookie = page.log_in()
        assert page.ask("api/now", Cookie=cookie)[0] == 200
        assert page.ask("login", method="POST", body="wrong", Origin="http://evil.example")[0] == 403
        # After a login, a new link for another browser is announced.
        assert len(page.links) == 2
        secrets = [each.partition("#token=")[2] for each in page.links] + [cookie.partition("=")[2]]
    assert all(len(each) > 40 for each in secrets)
    text = caplog.text + "".join(capfd.readouterr())
    assert not [each for each in secrets if each in text]


@contextlib.contextmanager
def _stream(page: ServedPage, cookie: str, **headers: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", page.dashboard.port, timeout=30)
    connection.request(
        "GET", f"{page.place}api/events", None, {"Host": page.host, "Cookie": cookie, **headers}
    )
    with contextlib.closing(connection), connection.getresponse() as answer:
        yield answer


def test_states_of_the_group_are_streamed_as_events() -> None:
    with served(FakeGroup().feed()) as page:
        cookie = page.log_in()
        with _stream(page, cookie) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [answer.readline() for _ in range(4)]
        numbers = [json.loads(line.removeprefix(b"data: "))["number"] for line in lines[::2]]
        assert lines[1::2] == [b"\n", b"\n"]
        assert numbers[1] > numbers[0]
        with _stream(page, cookie, **{"Accept-Encoding": "gzip"}) as answer:
            text = b""
            unpacker = zlib.decompressobj(31)
            while text.count(b"\n\n") < 2:
                text += unpacker.decompress(answer.read1())
        assert b'"workers":[{' in text


def test_stopping_the_server_ends_event_streams_regularly() -> None:
    with served(FakeGroup().feed()) as page, _stream(page, page.log_in()) as answer:
        assert answer.readline()
        page.dashboard.stop()
        # The stream ended regularly; otherwise http.client raises an error.
        assert answer.read().endswith(b"\n")


def _socket(page: ServedPage) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", page.dashboard.port))
    made.settimeout(30)
    return made


def _is_closed(made: socket.socket) -> bool:
    try:
        while made.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


_WHOLE = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "begin"),
    [(b"", b""), (b"", b"GET / HTTP/1.1\r\nHost: 127"), (_WHOLE, b"GET / HTTP/1.1\r\nHost: 127")],
)
def test_a_connection_with_an_incomplete_request_is_closed(before: bytes, begin: bytes) -> None:
    with served(FakeGroup().feed(), patience=0.1) as page, _socket(page) as made:
        if before:
            made.sendall(before)
            assert made.recv(1 << 16).startswith(b"HTTP/1.1 421")
        made.sendall(begin)
        assert _is_closed(made)
        assert page.ask("")[0] == 200  # other requests are still served


def test_the_connection_of_a_client_that_does_not_read_is_closed() -> None:
    rows = [actor_row(n, class_name=f"{n}" * 500) for n in range(60)]
    with served(FakeGroup(rows).feed(0.001), patience=0.1) as page:
        cookie = page.log_in()
        with socket.socket() as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.settimeout(30)
            made.connect(("127.0.0.1", page.dashboard.port))
            request = f"GET {page.place}api/events HTTP/1.1\r\nHost: {page.host}\r\nCookie: {cookie}\r\n\r\n"
            made.sendall(request.encode())
            assert made.recv(1)  # the server is sending, and the client stops reading
            until(lambda: not page.dashboard._server.server_state.tasks)
            assert _is_closed(made)


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_malformed_requests_are_answered_with_4xx(request_line: bytes) -> None:
    with served(FakeGroup().feed()) as page, _socket(page) as made:
        made.sendall(request_line)
        first = made.recv(1 << 16).split(b"\r\n")[0]
        assert re.match(rb"HTTP/1.1 4\d\d ", first)
        assert page.ask("")[0] == 200
