"""Comments, docstrings, messages and pages use few phrases that hide the subject or the noun of a sentence.

A hit is a place to read again and not an error, so each area has a limit per 1 000 words. A failure prints the places.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent

_VERBS = "is|are|was|were|has|have|had|comes|came|goes|went|lies|lives|travels|arrives|waits|runs|does|can|may|must|stands"
_PHRASES = (
    # Pronouns in place of the thread, the object or the user that acts.
    "nobody|somebody|whoever|whom",
    f"(?-i:what) (?:{_VERBS})",
    "those (?:that|who|which|of)|the ones? (?:that|who)|one who",
    "(?:who|which|that) (?:has|have) (?:made|named|asked|called|come|gone|begun|ended|sent)",
    "(?:nothing|none) (?:is|has|was|of|that)|where (?:there|that|one) is",
    # Vague verbs and adverbs.
    "(?:is|are|was|were) (?:to be|over|done with|looked|held back|gone)",
    "(?:see|sees|saw|seen|seeing) to|goe?s? (?:by|along|on over)|goes on|lets? (?:it |them )?go",
    "by (?:then|when)|for ever|any more|beside",
    # Threads and messages as persons, and metaphors.
    "(?:it|they|one|that) (?:hears?|looks?|wants?|knows)",
    "a look|the look|blow|deeds?|bury|hunted|doomed|passer-by",
)
_RIDDLE = re.compile(rf"\b(?:{'|'.join(_PHRASES)})\b", re.IGNORECASE)

_PAGES = ("docs", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


def _files(roots: tuple[str, ...]) -> Iterator[Path]:
    for root in (_ROOT / name for name in roots):
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            has_prose = path.suffix in (".py", ".md") and "_build" not in path.parts
            if has_prose and path != Path(__file__):  # this file contains the phrases themselves
                yield path


def _of_page(source: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a page outside of code blocks, with their first lines."""
    in_code, paragraph, start = False, "", 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        if fence or in_code or not line.strip():
            if paragraph:
                yield start, paragraph
            paragraph = ""
        else:
            start = start if paragraph else number
            paragraph += f" {line.strip()}"
        in_code ^= fence


_STRING, _COMMENT = "string", "comment"
_KINDS = {tokenize.COMMENT: _COMMENT, tokenize.STRING: _STRING}
if sys.version_info >= (3, 12):
    _KINDS[tokenize.FSTRING_MIDDLE] = _STRING


def _of_module(source: str) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module: strings of several words, and comments; those on adjacent lines are joined."""
    tokens = (
        each for each in tokenize.generate_tokens(io.StringIO(source).readline) if each.type != tokenize.NL
    )
    for kind, group in itertools.groupby(tokens, lambda token: _KINDS.get(token.type)):
        if kind is not None:
            found = list(group)
            strip = "#: " if kind == _COMMENT else "rRbBfFuU\"'"
            text = " ".join(" ".join(each.string.lstrip(strip).split()) for each in found)
            if kind == _COMMENT or " " in text:
                yield found[0].start[0], text


def _rate(files: Iterator[Path]) -> tuple[float, list[str]]:
    """Return the phrases per 1 000 words, and their places."""
    words, places = 0, []
    for path in files:
        texts = _of_page if path.suffix == ".md" else _of_module
        for line, text in texts(path.read_text(encoding="utf-8")):
            words += len(text.split())
            for match in _RIDDLE.finditer(text):
                around = text[max(0, match.start() - 60) : match.end() + 60]
                places.append(f"{path}:{line}: [{match[0]}] {around}")
    return 1000 * len(places) / max(words, 1), places


@pytest.mark.parametrize(
    ("roots", "limit"),
    [(("actorrpc",), 1.5), (_PAGES, 1.5), (("tests",), 5.0)],
    ids=["actorrpc", "pages", "tests"],
)
def test_unclear_phrases_are_rarer_than_the_limit(roots: tuple[str, ...], limit: float) -> None:
    rate, places = _rate(_files(roots))
    print(*places, sep="\n")
    assert rate <= limit, f"{len(places)} unclear phrases, {rate:.1f} per 1 000 words; at most {limit}"


def test_unclear_phrases_are_found_in_comments_strings_and_paragraphs(tmp_path: Path) -> None:
    module, page = tmp_path / "module.py", tmp_path / "page.md"
    module.write_text(
        '"""Docs\nof nobody."""\n\n# Whoever\n# waits for what\n# comes.\nx = "1 goes on"  # a look\n'
    )
    page.write_text("one that\nhas come\n\n```python\n# nobody\n```\nWhat is this?\n")
    rate, places = _rate(iter([module, page]))
    found = [(int(place.split(":")[1]), place.partition("[")[2].partition("]")[0]) for place in places]
    assert found == [
        (1, "nobody"),
        (4, "Whoever"),
        (4, "what comes"),
        (7, "goes on"),
        (7, "a look"),
        (1, "that has come"),
    ]
    assert rate == pytest.approx(1000 * 6 / 20)
