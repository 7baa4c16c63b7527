"""A forked child has none of its parent's threads, and runs with its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Calls on two threads, in the parent and in a child: those of rayon's pools, and those that meet at barriers.
PROGRAM = """
import os, signal, sys, threading
import numpy as np
from loopq import _native as native

rng = np.random.default_rng(0)
w = rng.standard_normal((64, 64)).astype(np.float32)
x = rng.standard_normal((3, 64)).astype(np.float32)

def solved():
    return native.rtn(w, native.Grid(bits=4, group_size=16), threads=2)["codes"].tobytes()

def multiplied():
    found = native.rtn(w, native.Grid(bits=4, group_size=16), threads=2)
    layout = native.CpuLayout(64, 64, native.Grid(bits=4, group_size=16))
    packed, out = np.zeros(layout.n_bytes, np.uint8), np.zeros((3, 64), np.float32)
    layout.pack(found["codes"], found["scales"], packed, threads=2)
    layout.multiply(packed, x, out, precision="int8", threads=2)
    return out.tobytes()

def run():
    # A head alone: the threads of a team begin together and end.
    runner = native.CpuRunner([(None, w, None, None)], [], [], [], 0, precision="int8", kept="float32")
    out = np.zeros((3, 64), np.float32)
    runner.run(x, np.zeros((3, 0), np.float32), out, threads=2)
    return out.tobytes()

calls = [solved, multiplied, run]

def forked(task):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        try:
            task()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the child ended with {status}; -14: its alarm"
"""

AFTER = """
expected = [call() for call in calls]

def same():
    assert [call() for call in calls] == expected

def again():
    same()
    forked(same)

forked(same)
forked(again)
same()
"""

MEANWHILE = """
# The parent's other thread is in the middle of a call, with whatever it holds.
stop = threading.Event()

def work():
    while not stop.is_set():
        for call in calls:
            call()

expected = [call() for call in calls]
worker = threading.Thread(target=work)
worker.start()

def same():
    assert [call() for call in calls] == expected

for _ in range(20):
    forked(same)
stop.set()
worker.join()
"""

#: Sums that another thread adds to when the child begins have no thread there that would end the addition.
IN_USE = """
sums = native.HessianAccumulator(256, [0], per_step=False, threads=1)
rows = np.ones((1 << 16, 256), np.float32)
stop = threading.Event()

def work():
    while not stop.is_set():
        sums.update(0, rows)

worker = threading.Thread(target=work)
worker.start()

def refused():
    try:
        sums.n_rows(0)
    except Exception as error:
        assert "not whole" in str(error), error

while sums.n_rows(0) == 0:
    pass
for _ in range(20):
    forked(refused)
stop.set()
worker.join()
# Nobody uses them now: parent and child read the same.
n = sums.n_rows(0)

def read():
    assert sums.n_rows(0) == n > 0

forked(read)
read()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "then", [AFTER, MEANWHILE, IN_USE], ids=["after a call", "during a call", "while sums are added to"]
)
def test_a_forked_child_makes_its_own_threads(then: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM + then],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
