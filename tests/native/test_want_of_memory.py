"""Want of memory in the core: an error that says for what, never the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import failures

#: Every long call of the core, by name.
CALLS = """
import numpy as np
from loopq import _native as native
from loopq.errors import ConfigError, OutOfMemoryError

dim, threads = 320, 2
rng = np.random.default_rng(0)
x = rng.standard_normal((2 * dim, dim)).astype(np.float32)
w = rng.standard_normal((dim, dim)).astype(np.float32)
mu = np.full(dim, 1.0)

def summed():
    made = native.HessianAccumulator(dim, [0, 1], per_step=True, threads=threads)
    made.update(0, x)
    made.update(1, x)
    made.finish()
    return made

sums = summed()
h = sums.matrix()
state = sums.state()
rows = native.Grid(bits=3, group_size=-1, signed=True, scale_search="mse")
cd = native.GptqCdSettings(rows, beam=2, sweeps=2, rounds=2, refit=True)
grid = native.Grid(bits=4, group_size=32)
searched = native.Grid(bits=4, group_size=32, scale_search="mse")
streams = native.Grid(bits=2, group_size=32, scale_dtype="float16", trellis=(6, 512))
factor = native.DampedFactor(h, mu, order="conditional", threads=threads)
left = native.DampedFactor(h, mu, threads=threads)
codes = native.rtn(w, grid, threads=threads)["codes"]
few = np.eye(8)
small = native.DampedFactor(few, mu[:8], threads=threads)
tall, wide = w.reshape(-1, 8)[:1].repeat(1 << 16, 0), np.tile(w.reshape(-1)[:1024], (2, 256))
units = native.Grid(bits=4, group_size=32, symmetric=False, units=(8, (0, 63), 63, 1))
table = native.Grid(bits=4, group_size=8, levels=list(range(-120, 121, 16)))
calls = {
    "tall rtn": lambda: native.rtn(tall, grid, threads=threads),
    "tall gptq": lambda: native.gptq(tall, small, grid, threads=threads),
    "tall gptq_cd": lambda: native.gptq_cd(tall[:4096], small, cd, threads=threads),
    "tall coupled": lambda: native.coupled(tall[:2048], small, [small] * 256, cd, threads=threads),
    "tall trellis": lambda: native.trellis(tall[:4096], small, [small] * 512, streams, threads=threads),
    "tall proxy": lambda: native.proxy(tall, tall + 1, few, threads=threads),
    "tall shift": lambda: small.shift(tall, few, 0.5, threads=threads),
    "tall levels": lambda: native.fit_levels(tall[:8192], np.ones(8), table, threads=threads),
    "wide units": lambda: native.rtn(wide, units, threads=threads),
    "wide sums": lambda: native.HessianAccumulator(4096, [0], per_step=False).update(0, wide[:, :4096]),
    "sums": summed,
    "matrix": lambda: sums.matrix([0, 1]),
    "weighted": lambda: sums.matrix(weights=[1.0, 2.0]),
    "state": sums.state,
    "from_state": lambda: native.HessianAccumulator.from_state(state, threads=threads),
    "factor": lambda: native.DampedFactor(h, mu, order="conditional", threads=threads),
    "diagonal order": lambda: native.DampedFactor(h, mu, order="diagonal", precision="float32", threads=threads),
    "shift": lambda: factor.shift(w, h, 0.5, threads=threads),
    "rtn": lambda: native.rtn(w, searched, threads=threads),
    "gptq": lambda: native.gptq(w, left, grid, threads=threads),
    "gptq_cd": lambda: native.gptq_cd(w, factor, cd, threads=threads),
    "coupled": lambda: native.coupled(w, factor, [left], cd, passes=1, threads=threads),
    "trellis": lambda: native.trellis(w, factor, [left], streams, threads=threads),
    "proxy": lambda: native.proxy(w, None, h, threads=threads),
    "eigenvalues": lambda: native.eigvalsh(h, threads=threads),
    "counts": lambda: native.count_above(h, [1e-3], threads=threads),
    "layout": lambda: native.CpuLayout(1, 1 << 16, native.Grid(bits=4, group_size=8)),
    "dense": lambda: native.pack_dense(codes, 4, 8),
    "marlin": lambda: native.marlin_pack(codes[:256].T, np.ones((dim, 1), np.float32)),
}
"""
#: Each with less and less address space; what is held already stays.
LIMITED = """
import resource

def space():
    return 1024 * int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1])

for name, call in calls.items():
    # Threads and what libraries keep are there before.
    try:
        call()
    except Exception as error:
        print(name, "REFUSED", type(error).__name__, error)
        continue
    outcomes = []
    for extra in SIZES:
        # Leftovers of an earlier call are used again and count as nothing.
        resource.setrlimit(resource.RLIMIT_AS, (space() + extra, resource.RLIM_INFINITY))
        try:
            call()
            outcomes.append("done")
        except OutOfMemoryError as error:
            assert "no memory for" in str(error), error
            outcomes.append("no memory")
        except (MemoryError, ConfigError) as error:
            # NumPy's own arrays; the stack of a thread.
            outcomes.append(type(error).__name__)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    print(name, outcomes, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc and RLIMIT_AS")
def test_no_call_ends_the_process():
    sizes = [n << 15 for n in (0, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 160, 320, 480)]
    program = f"SIZES = {sizes}\n{CALLS}\n{LIMITED}"
    # Freed memory returns to the system, so that the next request counts it.
    small = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=small, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert "REFUSED" not in done.stdout, done.stdout
    assert done.stdout.count("no memory") > 20, done.stdout


#: Arrays of results, while each allocation of NumPy fails in turn.
OF_NUMPY = """
import sys
from tests.soak.failures import _arm, _seen, mapped

at = mapped(next(m.__file__ for name, m in sys.modules.items() if name.endswith("._multiarray_umath")))
calls |= {"diagonal": lambda: sums.diagonal([0])}
held, bases = [], (np.zeros(1), np.zeros((1, 1)))

def seen(number):
    # NumPy keeps the memory of some small arrays that are gone for the next ones: these views use it up.
    held.extend(base[:] for base in bases * 9)
    _arm(*at, "", number)
    held.append(calls[name]())
    return _seen()

for name in ("state", "diagonal", "matrix", "eigenvalues", "rtn", "dense"):
    n, refused = seen(0), 0
    for number in range(1, n + 1):
        try:
            seen(number)
        except MemoryError:
            refused += 1
        _arm(0, 0, "", -1)
    print(name, n, refused)
    assert refused == n > 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD and /proc")
def test_an_array_that_numpy_cannot_make_is_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{CALLS}\n{OF_NUMPY}"],
        env=os.environ | {"LD_PRELOAD": str(failures.library(tmp_path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
