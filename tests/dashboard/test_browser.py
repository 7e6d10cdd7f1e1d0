"""The dashboard in Debian's chromium, driven by playwright, with ``actorrpc dashboard`` as a separate process."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import actorrpc
from tests.actors.e2e.kit import open_gate, pass_gate, until

_CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.limit(180),
    # Skip tests instead of the module: pytest fails a run that collects nothing.
    pytest.mark.skipif(
        find_spec("playwright") is None,
        reason="needs playwright: pip install playwright",
    ),
    pytest.mark.skipif(_CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]
_AXE = Path(sys.prefix, "share", "axe-core", "axe.min.js")  # installed by .ci/browser
_MARKUP = "<img src=x onerror=alert(1)>"
_PIXELS = """() => {
  const canvas = document.querySelector("canvas");
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const data = new Uint32Array(pen.getImageData(0, 0, copy.width, copy.height).data.buffer);
  return { colours: new Set(data).size, sum: data.reduce((sum, each, place) => (sum + each * (place % 97 + 1)) % 1e9, 0) };
}"""
_VIEWS = ["now", "actors", "stacks", "timeline", "logs", "calls", "memory", "training"]


@actorrpc.remote
class Store:
    def __init__(self) -> None:
        print(f"a store is made {_MARKUP}", flush=True)

    def pass_gate(self, path: str) -> str:
        return pass_gate(path)

    def get(self) -> int:
        return 1


@contextlib.contextmanager
def _viewer(*options: str) -> Iterator[str]:
    """Run ``actorrpc dashboard``; yield its link."""
    command = [sys.executable, "-m", "actorrpc", "dashboard", "--json", "--timeout", "5", *options]
    with subprocess.Popen(
        [*command, "--pid", str(os.getpid())], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["link"]
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
            assert (process.returncode, errors) == (130, "")
        finally:
            process.kill()


class _Page:
    """A page, with its requests to other hosts and its console messages."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.foreign: list[str] = []
        self.console: list[str] = []
        self.page.on("console", lambda each: self.console.append(each.text))
        self.page.on("pageerror", lambda each: self.console.append(str(each)))
        self.page.on("request", lambda each: self._note(each.url))
        self.page.on("dialog", lambda each: self.console.append("a dialog"))

    def _note(self, url: str) -> None:
        if urlsplit(url).hostname != "127.0.0.1":
            self.foreign.append(url)


@pytest.fixture
def browser() -> Iterator[Any]:
    sync = importlib.import_module("playwright.sync_api")
    with sync.sync_playwright() as tools:
        # Containers lack the rights for a sandbox, and the page is our own.
        found = tools.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """A cluster whose actors have markup in their names, with a running call and a waiting call."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with actorrpc.init(num_cpus=2, log_to_driver=False):
        stores = [Store.options(name=f"{_MARKUP} {n}", num_cpus=0.01).remote() for n in range(2)]
        calls = [stores[0].pass_gate.remote(str(gate)), stores[0].get.remote()]
        actorrpc.get(stores[1].get.remote())
        until(lambda: any(each.waiting for each in actorrpc.state(30).actors))
        yield gate
        open_gate(gate)
        actorrpc.get(calls)


def _violations(page: Any) -> list[str]:
    """Return the accessibility violations that axe-core finds in the present page."""
    found = page.evaluate("axe.run(document, { preload: false })")
    assert len(found["passes"]) > 10  # the checks have run
    return [f"{each['id']}: {node['html'][:200]}" for each in found["violations"] for node in each["nodes"]]


@pytest.mark.skipif(not _AXE.exists(), reason="needs axe-core: .ci/browser installs it")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_accessibility_violation_in_any_view(browser: Any, job: Path, scheme: str) -> None:
    found = {}
    with _viewer("--allow-actions") as link:
        opened = _Page(browser, color_scheme=scheme)
        page = opened.page
        page.goto(link)
        page.get_by_role("cell", name="driver", exact=True).wait_for()
        page.evaluate(_AXE.read_text())
        for view in _VIEWS:
            page.get_by_role("link", name=view.capitalize(), exact=True).click()
            if view == "stacks":
                page.get_by_role("button", name="Take stacks").click()
            page.get_by_text(_SHOWS[view]).first.wait_for()
            found[view] = _violations(page)
            if view == "actors":
                page.get_by_role("button", name="Kill").first.click()
                page.get_by_role("dialog").wait_for()
                found["dialog"] = _violations(page)
                page.keyboard.press("Escape")
        opened.context.close()
    assert {view: each for view, each in found.items() if each} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_view_works_on_a_phone_without_errors_or_foreign_requests(
    browser: Any, job: Path, tmp_path: Path, scheme: str
) -> None:
    with _viewer() as link:
        phone = {"width": 360, "height": 740}
        opened = _Page(browser, viewport=phone, color_scheme=scheme)
        page = opened.page
        page.goto(link)
        page.get_by_text("nothing is wrong", exact=False).first.wait_for()
        assert "token" not in page.url
        for view in _VIEWS:
            page.get_by_role("link", name=view.capitalize(), exact=True).click()
            if view == "now":
                page.get_by_role("cell", name="driver", exact=True).wait_for()
            elif view == "actors":
                page.get_by_role("cell", name=f"Store('{_MARKUP} 0')").first.wait_for()
                page.get_by_label("Filter").fill(f"{_MARKUP} 1")
                page.get_by_text("1 actor of 2").wait_for()
                page.get_by_role("button", name="calls/s").click()
                assert "sort=rate" in page.url
            elif view == "stacks":
                page.get_by_role("button", name="Take stacks").click()
                page.get_by_text("runs Store(").first.wait_for()
            elif view == "timeline":
                page.get_by_text("slices of 3 workers").wait_for()
                page.get_by_role("button", name="__init__").first.click()
                page.get_by_text("execution of Store(").wait_for()
                before = page.evaluate(_PIXELS)
                assert before["colours"] > 4
                page.get_by_label("Timeline; arrow").focus()
                for key in ("-", "-", "ArrowLeft", "+", "Home"):
                    page.keyboard.press(key)
                page.wait_for_function(f"({_PIXELS})().sum !== {before['sum']}")
                with page.expect_download() as file:
                    page.get_by_role("link", name="File for Perfetto").click()
                trace = json.loads(Path(file.value.path()).read_bytes())
                assert trace["otherData"]["workers"] == 3
            elif view == "logs":
                page.get_by_text(f"a store is made {_MARKUP}").first.wait_for()
            elif view == "calls":
                page.get_by_text("as it runs").first.wait_for()
                page.get_by_role("cell", name="Store/get", exact=True).first.wait_for()
            elif view == "memory":
                page.get_by_role("columnheader", name="shared memory lent").wait_for()
                page.get_by_role("columnheader", name="referred to by").wait_for()
            else:
                page.get_by_text("0 workers with 0 contexts, 0 passes under way").wait_for()
                page.get_by_role("button", name="Take the last passes").click()
                page.get_by_text("0 passes", exact=True).wait_for()
            assert page.locator("nav a[aria-current=page]").inner_text().lower() == view
            # The page is not wider than the phone; only tables scroll.
            assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
            page.screenshot(path=tmp_path / f"{view}-{scheme}.png")
        # The address of a view contains its filter.
        address = page.url.partition("#")[0]
        page.goto("about:blank")
        page.goto(f"{address}#actors?q=stranger")
        page.get_by_text("0 actors of 2").wait_for()
        assert page.get_by_label("Filter").input_value() == "stranger"
        opened.context.close()
    assert opened.foreign == []
    assert opened.console == []


_SHOWS = {
    "now": "driver",
    "actors": f"Store('{_MARKUP} 1')",
    "stacks": "runs Store(",
    "timeline": f"Store('{_MARKUP} 0').__init__",
    "logs": f"a store is made {_MARKUP}",
    "calls": "as it runs",
    "memory": "driver",
    "training": "0 passes under way",
}


def test_each_view_is_saved_as_one_file_that_works_offline(browser: Any, job: Path, tmp_path: Path) -> None:
    files = {}
    with _viewer() as link:
        opened = _Page(browser)
        page = opened.page
        page.goto(link)
        for view in _VIEWS:
            page.get_by_role("link", name=view.capitalize(), exact=True).click()
            if view == "stacks":
                page.get_by_role("button", name="Take stacks").click()
            page.get_by_text(_SHOWS[view]).first.wait_for()
            with page.expect_download() as file:
                page.get_by_role("button", name="Save this view").click()
            assert file.value.suggested_filename.startswith(f"actorrpc-{view}-")
            files[view] = tmp_path / f"{view}.html"
            file.value.save_as(files[view])
        opened.context.close()
    assert opened.console == []
    for view, path in files.items():
        text = path.read_text()
        assert _MARKUP not in text
        assert "token" not in text.partition('id="saved"')[2].partition("</script>")[0]
        opened = _Page(browser, offline=True, viewport={"width": 360, "height": 740})
        requests: list[str] = []
        opened.page.on("request", lambda each, requests=requests: requests.append(each.url))
        opened.page.goto(path.as_uri())
        opened.page.get_by_text(_SHOWS[view]).first.wait_for()
        opened.page.get_by_text("Saved at").wait_for()
        assert requests == [path.as_uri()]
        if view == "actors":
            opened.page.get_by_label("Filter").fill("0')")
            opened.page.get_by_text("1 actor of 2").wait_for()
        opened.page.screenshot(path=tmp_path / f"saved-{view}.png")
        opened.context.close()
        assert opened.console == []


@pytest.mark.prints(r"acting-visitor-")
def test_an_actor_is_killed_only_after_confirmation(browser: Any, job: Path) -> None:
    with _viewer("--allow-actions") as link:
        opened = _Page(browser)
        page = opened.page
        page.goto(link)
        page.get_by_role("button", name="Drain Store-1").wait_for()
        page.get_by_role("link", name="Actors", exact=True).click()
        kill = page.get_by_role("button", name=f"Kill Store('{_MARKUP} 1')")
        kill.click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        page.get_by_role("dialog").wait_for(state="detached")
        assert actorrpc.get(actorrpc.get_actor(f"{_MARKUP} 1").get.remote()) == 1
        kill.click()
        page.get_by_role("dialog").get_by_role("button", name="Kill").click()
        page.get_by_text(f"Store('{_MARKUP} 1') is killed").wait_for()
        page.get_by_role("searchbox").focus()
        page.get_by_role("cell", name="dead", exact=True).wait_for()
        assert kill.count() == 0
        opened.context.close()
    assert opened.console == []
