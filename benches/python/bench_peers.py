"""The solver beside the solvers that people use, in turns: every peer a process of its own, one solve at a time.

    python benches/python/bench_peers.py --ist CHECKOUT --gptqmodel PYTHON --llmcompressor PYTHON [--load 4]

CHECKOUT is a checkout of IST-DASLab/gptq; PYTHON is the interpreter of an environment that has the peer. A peer that
is not given is left out, and the record says so. ``--load N`` runs N busy processes besides, as a shared machine does.
All are given the same float32 W and H and solve 4 bits, groups of 128, symmetric, damping 0.01, columns in their own
order; the times hold factor and solve. The proxies are printed so that nobody is fast by doing less: loopq's grid has
the scale max/7, the peers' max/7.5, which is what tells their proxies apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from record import write

HERE = Path(__file__).resolve().parent


class Peer:
    """One solver process."""

    def __init__(self, name: str, python: str, folder: Path, threads: int, extra: list[str]) -> None:
        self.name = name
        command = [
            python,
            str(HERE / "peer.py"),
            name,
            str(folder / "W.npy"),
            str(folder / "H.npy"),
            str(threads),
        ]
        self.process = subprocess.Popen(
            command + extra,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._line() != "ready":
            raise SystemExit(f"{name} does not start: run {' '.join(command + extra)} to see why")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def solve(self) -> dict[str, float]:
        """Solve once; seconds and proxy."""
        assert self.process.stdin is not None
        self.process.stdin.write("solve\n")
        self.process.stdin.flush()
        answer: dict[str, float] = json.loads(self._line())
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def problem(folder: Path, m: int, dim: int) -> None:
    """Write W and H of a layer: normal weights, inputs with a common part."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((dim + 256, dim), dtype=np.float32)
    x += 0.5 * rng.standard_normal((dim + 256, 1), dtype=np.float32)
    np.save(folder / "H.npy", x.T @ x / len(x))
    np.save(folder / "W.npy", rng.standard_normal((m, dim), dtype=np.float32))


def compare(m: int, dim: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time all solvers in turns on one shape."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        problem(folder, m, dim)
        wanted: list[tuple[str, str, list[str]]] = [
            ("loopq-float32", sys.executable, []),
            ("loopq-float64", sys.executable, []),
        ]
        if args.ist:
            wanted.append(("ist", args.torch_python, [args.ist]))
        wanted += [
            (n, p, []) for n, p in (("gptqmodel", args.gptqmodel), ("llmcompressor", args.llmcompressor)) if p
        ]
        peers = [Peer(n, p, folder, args.threads, extra) for n, p, extra in wanted]
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.load)]
        try:
            turns = [{p.name: p.solve() for p in peers} for _ in range(args.turns)]
        finally:
            for process in busy:
                process.kill()
            for peer in peers:
                peer.close()
    seconds = {p.name: statistics.median(t[p.name]["seconds"] for t in turns) for p in peers}
    others = [n for n in seconds if not n.startswith("loopq")]
    ratios = {
        ours: statistics.median(min(t[o]["seconds"] for o in others) / t[ours]["seconds"] for t in turns)
        for ours in ("loopq-float32", "loopq-float64")
    }
    return {
        "m": m, "dim": dim, "load": args.load, "turns": args.turns, "seconds": seconds,
        "proxy": {n: v["proxy"] for n, v in turns[-1].items()}, "fastest_peer_over_loopq": ratios,
    }  # fmt: skip


def main() -> None:
    """Run the comparison and record it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ist", help="checkout of IST-DASLab/gptq")
    parser.add_argument(
        "--torch-python", default=sys.executable, help="interpreter with torch and transformers"
    )
    parser.add_argument("--gptqmodel", help="interpreter of an environment with GPTQModel")
    parser.add_argument("--llmcompressor", help="interpreter of an environment with llm-compressor")
    parser.add_argument(
        "--shapes", nargs="*", default=["2048x2048", "2048x5632", "5632x2048"], help="out x in"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--load", type=int, default=0, help="busy processes besides")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    if not (args.ist or args.gptqmodel or args.llmcompressor):
        raise SystemExit("no peer given: --ist, --gptqmodel, --llmcompressor")
    results = []
    for shape in args.shapes:
        m, dim = (int(v) for v in shape.split("x"))
        results.append(compare(m, dim, args))
        print(json.dumps(results[-1]), flush=True)
        write(args.record, results, threads=args.threads)


if __name__ == "__main__":
    main()
