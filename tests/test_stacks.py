"""A thread can read the stack of another running thread without a crash.

The program below crashes CPython 3.11 if frames are read carelessly: 1. The garbage collector starts while a frame object is
created. 2. A finaliser releases the GIL. 3. The other thread returns from that frame.
"""

import subprocess
import sys

_PROGRAM = """
import gc, threading, time
from actorrpc import _stacks

looker = threading.get_ident()
over = threading.Event()
known = {"climb", "small", "medium", "large"}

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        if threading.get_ident() == looker:
            time.sleep(0.0005)  # the other thread runs

def small(depth):
    small(depth - 1) if depth else time.sleep(0)

def medium(depth):
    a = b = c = d = e = f = depth
    large(depth - 1) if depth else time.sleep(0)

def large(depth):
    a = b = c = d = e = f = g = h = i = j = k = l = m = depth
    small(depth - 1) if depth else time.sleep(0)

def climb():
    while not over.is_set():
        small(20)
        medium(12)
        large(9)

thread = threading.Thread(target=climb, daemon=True)
thread.start()
gc.collect()
gc.freeze()
gc.set_threshold(40)
seen = set()
for turn in range(600):
    gc.disable()
    gc.collect()
    Cycle()
    kept = [[] for _ in range(25 + turn % 20)]
    gc.enable()
    frame = _stacks.top_frame(thread.ident)
    while frame is not None:
        seen.add(frame.f_code.co_name)
        frame = frame.f_back
    assert gc.isenabled()
over.set()
thread.join()
assert seen > known, seen
print("whole")
"""


def test_reading_the_stack_of_a_running_thread_does_not_crash() -> None:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=50)
    assert (ran.stdout, ran.returncode) == ("whole\n", 0), ran.stderr
