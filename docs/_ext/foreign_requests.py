"""Fail a build whose pages load fonts, scripts or pictures from other hosts."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["foreign_in_css", "foreign_in_html", "setup"]

_LOADS = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "object": ("data",),
    "embed": ("src",),
}
_ELSEWHERE = re.compile(r"(?:https?:)?//")
_CSS = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


class _Loads(HTMLParser):
    """Collects the URLs on other hosts that a browser loads with the page. Links that a user clicks are not collected."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "author", "license"):
            return
        for name in _LOADS.get(tag, ()):
            for part in (given.get(name) or "").split(","):
                if _ELSEWHERE.match(part.strip()):
                    self.foreign.append(f"<{tag} {name}={part.strip()}>")
        self.foreign += foreign_in_css(given.get("style") or "")


def foreign_in_html(text: str) -> list[str]:
    """Return the elements of a page that load from other hosts."""
    reader = _Loads()
    reader.feed(text)
    styles = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
    return reader.foreign + [found for style in styles for found in foreign_in_css(style)]


def foreign_in_css(text: str) -> list[str]:
    """Return the URLs on other hosts that a style sheet loads."""
    return _CSS.findall(text)


def _look(app: Sphinx, failure: Exception | None) -> None:
    if failure is not None or app.builder.format != "html":
        return
    from sphinx.util import logging

    log = logging.getLogger(__name__)
    for path in Path(app.outdir).rglob("*"):
        look = {".html": foreign_in_html, ".css": foreign_in_css}.get(path.suffix)
        for found in look(path.read_text(encoding="utf-8")) if look else ():
            log.warning("%s asks another host: %s", path.relative_to(app.outdir), found)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect this to a build."""
    app.connect("build-finished", _look)
    return {"parallel_read_safe": True}
