"""loopq's types of GGUF beside llama.cpp's own quantizer: `python -m benches.gguf --engine LIBRARY`.

The `down_proj` of some layers of looped SmolLM2-135M have 1536 columns, whole blocks of 256. They become each type by
loopq (rounding; its defaults, from the same prompts) and by the functions that `llama-quantize` calls, without and with
an importance matrix: the diagonal of the same Hessian, summed over all runs. LIBRARY is a shared library with ggml's
`quantize_*`: that of xllamacpp, or `libggml-base.so` of llama-cpp-python. Bits are those of the matrices; KL is on
other text, in float32 on dequantized weights. The model is made by `python -m benches.zoo.smollm2 fetch`.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benches.cost import Costs, add_common, parsed, written
from benches.quality.peers_table import processor
from loopq.errors import ConfigError
from loopq.paper.models import Sizes
from loopq.run.config import QuantConfig
from loopq.run.solving import solve_from

#: Types, with the weights and bytes of a block, and the bar for loopq's KL over llama.cpp's.
TYPES = {
    "q2_0": (64, 18, 0.35), "q2_k": (256, 84, 0.5), "q3_k": (256, 110, 0.5), "iq4_xs": (256, 136, 0.5),
    "q4_0": (32, 18, 0.5), "iq4_nl": (32, 18, 0.5), "q4_k": (256, 144, 0.5), "q4_1": (32, 20, 0.5),
    "q5_0": (32, 22, 0.5), "q5_k": (256, 176, 0.5), "q5_1": (32, 24, 0.5), "q6_k": (256, 210, 0.5),
}  # fmt: skip
_FLOATS = ctypes.POINTER(ctypes.c_float)


class Engine:
    """ggml's quantizers."""

    def __init__(self, path: str) -> None:
        try:
            self.library = ctypes.CDLL(path)
        except OSError as cause:
            raise ConfigError(f"{path}: no library with ggml's quantizers: {cause}") from cause

    def weight(
        self, kind: str, w: NDArray[np.float32], importance: NDArray[Any] | None
    ) -> NDArray[np.float32]:
        """Return what a weight (out, in) becomes."""
        size, n_bytes, _ = TYPES[kind]
        name = kind.replace("_k", "_K")
        w, out = np.ascontiguousarray(w), np.zeros_like(w)
        held = np.zeros((len(w), w.shape[1] // size * n_bytes), np.uint8)
        counts = None if importance is None else np.ascontiguousarray(importance, np.float32)
        pack, unpack = (getattr(self.library, f) for f in (f"quantize_{name}", f"dequantize_row_{name}"))
        pack.argtypes = [_FLOATS, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, _FLOATS]
        unpack.argtypes, unpack.restype = [ctypes.c_void_p, _FLOATS, ctypes.c_int64], None
        pack(_at(w), held.ctypes.data, *w.shape, None if counts is None else _at(counts))
        unpack(held.ctypes.data, _at(out), out.size)
        return out


def _at(values: NDArray[np.float32]) -> Any:
    return values.ctypes.data_as(_FLOATS)


class Types(Costs):
    """The comparison, on one matrix of some layers."""

    @property
    def exclude(self) -> tuple[str, ...]:
        """What is not asked for."""
        chosen = "|".join(map(str, self.args.layer))
        return (rf"re:^(?!model\.layers\.({chosen})\.mlp\.down_proj)",)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser, n_calibration=64)
    parser.add_argument("--engine", required=True, help="library with ggml's quantizers")
    parser.add_argument("--type", action="append", choices=TYPES, help="only these (default: all)")
    parser.add_argument("--layer", action="append", type=int, help="(default: 13 and 14)")
    parser.add_argument(
        "--metric", choices=("loop", "inputs"), default="loop", help="of loopq's own (default: loop)"
    )
    args = parsed(parser)
    args.layer = args.layer or [13, 14]
    return args


def page(args: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> str:
    """The record."""
    lines = [
        f"# Types of GGUF by loopq and by llama.cpp, {datetime.date.today()}", "",
        f"`python -m benches.gguf`: `down_proj` of layers {', '.join(map(str, args.layer))} of "
        f"`{Path(args.model).name}`, {args.n_calibration} x {args.seq_len} tokens, metric {args.metric}, "
        f"one thread of {processor()}. KL on {args.n_evaluation} x {args.seq_len} other tokens.", "",
        "| type | bits | llama.cpp | with importance | loopq, rounding | loopq | over importance | bar |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for kind, row in rows.items():
        size, n_bytes, bar = TYPES[kind]
        lines.append(
            f"| {kind.upper()} | {8 * n_bytes / size:.4g} | {row['plain']['kl']:.2e} | {row['importance']['kl']:.2e} | "
            f"{row['rounding']['kl']:.2e} | {row['loopq']['kl']:.2e} | "
            f"{row['loopq']['kl'] / row['importance']['kl']:.2f} | {bar} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse()
    engine = Engine(args.engine)
    bench = Types(args.model, 0, args, Sizes(args.n_calibration, 16, args.n_evaluation, args.seq_len))
    source = bench.prepared(0.0)
    ours = {"metric": args.metric}
    plan = source.plan(QuantConfig.of(exclude=bench.exclude, **ours))
    sums = source.all_steps(plan)
    dense = {t.name: source.weights.tensors[t.name].float32() for t in plan.tasks}
    importance = {
        t.name: np.diag(sums.accumulator(t.input_group, t.steps).matrix(list(t.steps)))
        for t in plan.tasks
        if t.input_group
    }
    rows: dict[str, dict[str, Any]] = {}
    for kind in args.type or TYPES:
        weights = {
            "plain": {n: engine.weight(kind, w, None) for n, w in dense.items()},
            "importance": {n: engine.weight(kind, w, importance[n]) for n, w in dense.items()},
        }
        for name, settings in (("rounding", {"method": "rtn"}), ("loopq", ours)):
            config = QuantConfig.of(levels=kind, exclude=bench.exclude, **settings)
            layers = solve_from(source.plan(config), source, sums)
            weights[name] = {n: x.in_model_orientation() for n, x in layers.items()}
        found = bench.measured([{} for _ in weights], dict(enumerate(weights.values())))
        rows[kind] = dict(zip(weights, found, strict=True))
        print(kind, {name: row["kl"] for name, row in rows[kind].items()}, flush=True)
        # What is done is written: an interrupted run leaves a table.
        written(args.out, "gguf", page(args, rows))
    print(page(args, rows))


if __name__ == "__main__":
    main()
