"""`loopq bench`: the int4 kernel and whole rollouts on this machine's GPU, against bfloat16."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from loopq.checkpoint.files import write_text
from loopq.commands import COMMANDS, Command
from loopq.commands.options import whole
from loopq.errors import ConfigError, KernelError, MissingExtraError
from loopq.kernels.shapes import BENCH_TOKENS, BENCH_TRIALS
from loopq.settings import parse_text
from loopq.systems.base import MAX_STEPS
from loopq.table import render

# What a comparison with float64 may show (docs/kernels.md): float32 output, and bfloat16 against the correctly rounded.
_FLOAT32_ERROR, _ROUNDED_ERROR = 3e-6, 2e-4


def _tokens(text: str) -> list[int]:
    try:
        found = [parse_text(int, part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > 64:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of tokens from 1 to 64, as in 1,7,16")
    return found


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "what", choices=("kernel", "rollout"), help="single products, or whole rollouts in CUDA graphs"
    )
    parser.add_argument(
        "--shapes",
        default="huginn",
        metavar="NAME",
        help="whose layers: huginn, ouro, parcae, loopformer, or one of their sizes (default %(default)s); a "
        "rollout is Huginn's",
    )
    parser.add_argument(
        "--tokens",
        type=_tokens,
        default=list(BENCH_TOKENS),
        metavar="A,B",
        help=f"numbers of tokens (default {','.join(map(str, BENCH_TOKENS))})",
    )
    parser.add_argument(
        "--group-size",
        type=whole(-1, 1 << 20),
        default=128,
        metavar="N",
        help="inputs of a scale, -1: one scale per output (default 128)",
    )
    parser.add_argument(
        "--steps",
        type=whole(1, MAX_STEPS),
        default=32,
        metavar="N",
        help="steps of a rollout (default %(default)s)",
    )
    parser.add_argument(
        "--trials",
        type=whole(1, 1 << 20),
        default=BENCH_TRIALS,
        metavar="N",
        help="paired trials of each comparison (default %(default)s)",
    )
    parser.add_argument(
        "--bulk", action="store_true", help="bring weights in by bulk copies (compute capability 9.0)"
    )
    parser.add_argument(
        "--device", type=whole(0, 1 << 10), default=0, metavar="N", help="CUDA device (default %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write every number as data")


def run(args: argparse.Namespace) -> int:
    """Check the results, time them, print tables, write the data; the exit code is 1 where a result is wrong."""
    _check(args)
    try:
        backend = _backend(args.device)
    except (MissingExtraError, KernelError) as error:
        # Not a failure of the measurement: this machine cannot make it.
        raise ConfigError(f"bench {args.what}: {error}") from error
    found = (_kernel if args.what == "kernel" else _rollout)(args, backend)
    if args.json:
        record = {"what": args.what, **_machine(backend), **found}
        write_text(args.json, json.dumps(record, indent=1) + "\n")
        print(f"data: {args.json}")
    if not found["exact"]:
        print("loopq: the results above are WRONG on this device; their times mean nothing", file=sys.stderr)
        return 1
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what no machine can do, before asking what this one can."""
    from loopq.kernels.plan import fold_of
    from loopq.kernels.shapes import shapes_of

    shapes_of(args.shapes)
    fold_of(args.group_size)
    if args.what == "rollout" and (not args.shapes.startswith("huginn") or args.group_size != 128):
        raise ConfigError(
            "bench rollout runs Huginn's loop at group size 128: leave --shapes and --group-size"
        )


def _backend(index: int) -> Any:
    from loopq.kernels.load import cuda_backend, require_gpu

    require_gpu(index)
    return cuda_backend(index)


def _machine(backend: Any) -> dict[str, Any]:
    import torch  # lazy: loopq imports without torch

    name = (
        torch.cuda.get_device_name(backend.device) if backend.device.type == "cuda" else str(backend.device)
    )
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def _procedure(args: argparse.Namespace) -> Any:
    from loopq.kernels.bench import Procedure

    return Procedure(trials=args.trials)


def _kernel(args: argparse.Namespace, backend: Any) -> dict[str, Any]:
    from loopq.kernels import bench, bench_products
    from loopq.kernels.shapes import shapes_of

    procedure = _procedure(args)
    record: dict[str, Any] = {"group_size": args.group_size, "bulk": args.bulk, "exact": True, "models": {}}
    bandwidth = bench.copy_bandwidth(backend, procedure)
    print(f"copy on the device: {bandwidth / 1e12:.2f} TB/s, read and written")
    for model, layers in shapes_of(args.shapes).items():
        options = {"tokens": args.tokens, "group_size": args.group_size, "bulk": args.bulk}
        checked = bench.verify_products(backend, layers, **options)
        found = bench_products.compare_products(
            backend, layers, **options, bandwidth=bandwidth, procedure=procedure
        )
        record["models"][model] = {"exactness": checked, **found}
        record["exact"] &= all(
            r["error_float32"] <= _FLOAT32_ERROR
            and r["error_rounded"] <= _ROUNDED_ERROR
            and r["repeatable"]
            and r["same_in_batch"]
            for r in checked
        )
        _print_products(model, checked, found)
    return record


def _print_products(model: str, checked: list[dict[str, Any]], found: dict[str, Any]) -> None:
    rows: list[tuple[Any, ...]] = [
        (
            row["layer"],
            row["tokens"],
            f"{row['int4']['median']:.2f}",
            f"{100 * row['share_of_copy_bandwidth']:.0f} %",
            f"{row['cublas_bf16']['median']:.2f}",
            _ratio(row["ratio"]),
            f"{row['torch_int4']['timing']['median']:.2f}" if "timing" in row["torch_int4"] else None,
        )
        for row in found["products"]
    ]
    rows += [
        ("all calls of a step", step["tokens"], f"{step['int4']:.2f}", None, f"{step['cublas_bf16']:.2f}",
         f"{step['ratio']:.2f}", None)
        for step in found["step"]
    ]  # fmt: skip
    header = (
        "layer",
        "tokens",
        "int4 us",
        "of copy speed",
        "cuBLAS bf16 us",
        "ratio (95 %)",
        "torch int4 us",
    )
    print(f"\n{model}")
    print(render(header, rows))
    worst = max(r["error_float32"] for r in checked)
    rounded = max(r["error_rounded"] for r in checked)
    print(
        f"{len(checked)} comparisons with float64: float32 output within {worst:.1e}, bfloat16 within {rounded:.1e} of "
        f"the correctly rounded product"
    )
    refused = {r["torch_int4"]["unavailable"] for r in found["products"] if "unavailable" in r["torch_int4"]}
    for reason in sorted(refused):
        print(f"torch int4 not available: {reason}")


def _rollout(args: argparse.Namespace, backend: Any) -> dict[str, Any]:
    from loopq.kernels import bench_rollout

    if args.shapes != "huginn" or args.group_size != 128:
        raise ConfigError(
            "bench rollout runs Huginn's loop at group size 128: leave --shapes and --group-size"
        )
    size = _loop_size()
    checked = bench_rollout.verify_rollout(
        backend, size=size, n_steps=args.steps, tokens=args.tokens, bulk=args.bulk
    )
    for row in checked:
        equal = "equals" if row["replay_equals_eager"] else "DOES NOT EQUAL"
        print(
            f"{row['tokens']} tokens: {row['n_products']} products in {args.steps} steps, a graph's replay {equal} "
            f"single launches"
        )
    backends = {"plain": backend, **_overlapping(backend)}
    found = bench_rollout.compare_rollouts(
        backends,
        size=size,
        n_steps=args.steps,
        tokens=args.tokens,
        bulk=args.bulk,
        procedure=_procedure(args),
    )
    for record in found:
        times = record["milliseconds"]
        print(f"\n{record['tokens']} tokens, {record['n_steps']} steps")
        print(render(("variant", "ms"), [(name, f"{times[name]['median']:.3f}") for name in sorted(times)]))
        print(render(("ratio", "(95 %)"), [(name, _ratio(r)) for name, r in record["ratios"].items()]))
    exact = all(row["replay_equals_eager"] for row in checked)
    return {"bulk": args.bulk, "exact": exact, "exactness": checked, "rollouts": found}


def _loop_size() -> Any:
    from loopq.kernels.bench_rollout import LoopSize

    return LoopSize()


def _overlapping(backend: Any) -> dict[str, Any]:
    from loopq.kernels.load import CudaBackend

    if not isinstance(backend, CudaBackend) or backend.limits.capability < (9, 0):
        return {}
    return {"overlap": CudaBackend(backend.index, overlap=True)}


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


COMMANDS.register("bench")(Command("time the int4 kernel or whole rollouts on a GPU", add, run, 43))
