"""The code of a page of Markdown as a program: what a reader gets who copies its blocks, one behind the other, into a file.

Sybil finds the blocks. Those of ``python`` run; a ``text`` block right behind one is what it prints (``...`` is anything).
``<!-- skip: next "reason" -->`` above a block says why it does not run. Lines have the numbers that they have on the page.
"""

from __future__ import annotations

import doctest
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import SkipTest

from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from tests.output import check

__all__ = ["ROOT", "Block", "blocks", "program", "run"]

ROOT = Path(__file__).resolve().parent.parent
_MARK = "\x1e"
_OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(slots=True)
class Block:
    """A block of a page.

    Attributes:
        line: of its first line, from 1.
        skipped: why it does not run; empty if it does.
        prints: what it prints; None where the page does not say.
    """

    language: str
    line: int
    code: str
    skipped: str = ""
    prints: str | None = None


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page that are programs or their output, in order."""
    found: list[Block] = []

    def keep(language: str) -> Callable[[Example], None]:
        return lambda example: found.append(_block(language, example))

    parsers = [CodeBlockParser(language, evaluator=keep(language)) for language in ("python", "sh", "text")]
    document = Document.parse(str(page), SkipParser(), *parsers)
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest as reason:
            found.append(_block("skipped", example))
            found[-1].skipped = str(reason)
    lines = document.text.splitlines()
    for before, block in itertools.pairwise(found):
        between = lines[before.line - 1 + len(before.code.splitlines()) + 1 : block.line - 2]
        if before.language == "python" and block.language == "text" and not any(map(str.strip, between)):
            before.prints = block.code
    return found


def _block(language: str, example: Example) -> Block:
    code = str(example.region.lexemes["source"])
    return Block(language, example.line + 1, code)


def program(found: list[Block]) -> str:
    """Return the Python of a page, each line under its number there; behind each block it prints a mark."""
    lines: list[str] = []
    for block in found:
        if block.language == "python":
            lines += [""] * (block.line - 1 - len(lines))
            lines += [*block.code.splitlines(), f"print({_MARK!r}, flush=True)"]  # in the place of the fence
    return "\n".join(lines) + "\n"


def run(page: Path, folder: Path, *, seconds: float = 120.0) -> None:
    """Run the Python of a page as a program, compare what it prints with what the page says, and see that it says no more.

    Raises:
        AssertionError: it fails, or prints something else.
    """
    found = blocks(page)
    file = folder / "program.py"
    file.write_text(program(found), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, file],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{page.name}: {done.stderr}"
    check(done.stderr, what=page.name)
    printed = done.stdout.split(f"{_MARK}\n")
    checker = doctest.OutputChecker()
    for block, got in zip((each for each in found if each.language == "python"), printed, strict=False):
        if block.prints is not None:
            assert checker.check_output(block.prints, got, _OUTPUT), (
                f"{page.name}, line {block.line}: it prints\n{got}\nand not\n{block.prints}"
            )
