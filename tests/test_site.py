"""The site that Sphinx makes of docs/: where its links lead, and that it asks nobody else. ``.ci/run`` makes it, with -W -n."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_DOCS = Path(__file__).resolve().parent.parent / "docs"


def _extension(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, _DOCS / "_ext" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://elsewhere/x.js"></script>',
        '<link rel="stylesheet" href="//elsewhere/x.css">',
        '<img src="here.png" srcset="here.png 1x, http://elsewhere/x.png 2x">',
        "<style>@import 'https://elsewhere/x.css';</style>",
        '<p style="background: url(https://elsewhere/x.png)">',
    ],
)
def test_what_a_browser_would_fetch_elsewhere_is_found(html: str) -> None:
    (found,) = _extension("foreign_requests").foreign_in_html(html)
    assert "elsewhere" in found


def test_links_and_local_files_are_no_foreign_requests() -> None:
    html = '<a href="https://pytorch.org">torch</a><img src="x.svg"><link rel="icon" href="../x.ico">'
    assert not _extension("foreign_requests").foreign_in_html(html)


def test_a_link_to_a_file_of_the_repository_leads_to_its_page() -> None:
    links = _extension("repository_links")
    page = _DOCS / "how-to" / "settings.md"
    text = "[it](../../SECURITY.md#the-key), [a page](failures.md), [code](../../examples/pipeline.py), [all](../../examples)"
    assert links.on_the_site(text, page, page) == (
        "[it](../security.md#the-key), [a page](failures.md), [code](../../examples/pipeline.py), all"
    )
    shown = links.on_the_site("[limits](docs/limits.md)", _DOCS.parent / "SECURITY.md", _DOCS / "security.md")
    assert shown == "[limits](limits.md)"


def test_pages_that_show_a_file_link_to_it() -> None:
    for page, file in _extension("repository_links").SHOWN.items():
        assert f"(../{file})" in (_DOCS / f"{page}.md").read_text(encoding="utf-8")
