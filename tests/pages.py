"""Run the Python blocks of a Markdown page as one program, as if a reader had copied them into a file.

Sybil finds the blocks. ``python`` blocks run; a ``text`` block directly after a ``python`` block is its expected output (``...``
matches anything). A block after ``<!-- skip: next "reason" -->`` does not run. Line numbers of the program are those of the page.
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
        line: number of its first line, from 1.
        skipped: the reason for not running it; empty if it runs.
        prints: its expected output; None if the page shows no output.
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
    """Return the program of a page, with its line numbers; it prints a mark after each block."""
    lines: list[str] = []
    for block in found:
        if block.language == "python":
            lines += [""] * (block.line - 1 - len(lines))
            lines += [
                *block.code.splitlines(),
                f"print({_MARK!r}, flush=True)",
            ]  # on the line of the closing fence
    return "\n".join(lines) + "\n"


def run(page: Path, folder: Path, *, seconds: float = 120.0) -> None:
    """Run the Python blocks of a page, and compare their output with the output that the page shows.

    Raises:
        AssertionError: the program failed, printed other output, or wrote to standard error.
    """
    found = blocks(page)
    file = folder / "program.py"
    file.write_text(program(found), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)  # would replace ``num_cpus`` as the number of torch's threads
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
                f"{page.name}, line {block.line}: it prints\n{got}\ninstead of\n{block.prints}"
            )
