"""Entering a thread, while other threads start and end quickly, in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = """
import sys, threading
from actorrpc.debugger.debugger import enter

turns, entered, done = 0, threading.Event(), threading.Event()

def spin():
    global turns
    while not done.is_set():
        turns += 1

def start_and_end_threads():
    while not done.is_set():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

def on_entry(frame):
    entered.set()
    return True

sys.setswitchinterval(1e-6)
spinner = threading.Thread(target=spin)
others = [threading.Thread(target=start_and_end_threads) for _ in range(4)]
for each in (spinner, *others):
    each.start()
for _ in range(600):
    enter(spinner.ident, on_entry)
was_entered = entered.wait(60)  # the spinner may not have run meanwhile
done.set()
for each in (spinner, *others):
    each.join()
assert was_entered, turns
print("entered")
"""


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_thread_can_be_entered_while_other_threads_start_and_end() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=_ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "entered\n", "")
