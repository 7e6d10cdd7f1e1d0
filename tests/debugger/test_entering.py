"""Entering another thread: while others begin and end as fast as they can, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = """
import sys, threading
from actorrpc.debugger import entering

turns, entered, done = 0, 0, threading.Event()

def spin():
    global turns
    while not done.is_set():
        turns += 1

def come_and_go():
    while not done.is_set():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

def here(frame):
    global entered
    entered += 1
    return True

sys.setswitchinterval(1e-6)
spinner = threading.Thread(target=spin)
others = [threading.Thread(target=come_and_go) for _ in range(4)]
for each in (spinner, *others):
    each.start()
for _ in range(600):
    entering.enter(spinner.ident, here)
done.set()
for each in (spinner, *others):
    each.join()
assert entered, turns
print("entered")
"""


@pytest.mark.limit(120)
def test_threads_that_end_meanwhile_do_no_harm() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=_ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "entered\n", "")
