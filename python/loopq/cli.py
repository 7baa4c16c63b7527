"""The command line: `loopq quantize | collect | merge | solve | evaluate | inspect | demo`."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import loopq
from loopq import config as defaults
from loopq.config import LayerConfig, Override, QuantConfig
from loopq.errors import ConfigError, LoopqError
from loopq.progress import Line
from loopq.table import render, short, size

_LAYER = LayerConfig()


def _memory(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: give bytes with a unit, as in 8G or 512M")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def _override(text: str) -> Override:
    pattern, found, rest = text.rpartition("=>")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: write PATTERN=>bits=8,group_size=64")
    changes: dict[str, Any] = {}
    for item in rest.split(","):
        key, equals, value = item.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{text!r}: {item!r} is not NAME=VALUE")
        try:
            changes[key.strip()] = json.loads(value)
        except ValueError:
            changes[key.strip()] = value.strip()
    try:
        return Override(pattern.strip(), changes)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _add_quantizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("quantizer")
    group.add_argument(
        "--method", default=_LAYER.method, help="quantizer: gptq, rtn, ... (default %(default)s)"
    )
    group.add_argument("--bits", type=int, default=_LAYER.bits, help="2, 3, 4 or 8 (default %(default)s)")
    group.add_argument(
        "--group-size",
        type=int,
        default=_LAYER.group_size,
        help="input columns of a scale; -1: one scale per output row (default %(default)s)",
    )
    group.add_argument(
        "--asymmetric", action="store_true", help="unsigned codes with a zero point for each group"
    )
    group.add_argument(
        "--steps",
        default="all",
        help="recurrence steps to calibrate on: all | first | 0:8 | 31 | 1: (default %(default)s)",
    )
    group.add_argument(
        "--damping",
        type=float,
        default=_LAYER.damping,
        help="fraction of mean(diag H) added to the diagonal (default %(default)s)",
    )
    group.add_argument(
        "--scales", choices=("group", "static"), default=_LAYER.scales, help="default %(default)s"
    )
    group.add_argument(
        "--scale-search", choices=("max", "mse"), default=_LAYER.scale_search, help="default %(default)s"
    )
    group.add_argument(
        "--scale-dtype", choices=defaults.SCALE_DTYPES, default=_LAYER.scale_dtype, help="default %(default)s"
    )
    group.add_argument(
        "--act-order", action="store_true", help="sweep columns by falling diag(H); no index is stored"
    )
    group.add_argument(
        "--precision", choices=("float64", "float32"), default=_LAYER.precision, help="default %(default)s"
    )
    group.add_argument(
        "--layer",
        action="append",
        default=[],
        type=_override,
        metavar="PATTERN=>NAME=VALUE,...",
        help="other settings for layers that match, e.g. '*adapter*=>bits=8,steps=first'; repeatable",
    )
    group.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="leave these layers dense"
    )
    group.add_argument(
        "--no-rank", action="store_true", help="leave the rank (eigenvalues) out of the report"
    )


def _config(args: argparse.Namespace) -> QuantConfig:
    layer = LayerConfig(
        method=args.method,
        bits=args.bits,
        group_size=args.group_size,
        symmetric=not args.asymmetric,
        damping=args.damping,
        scales=args.scales,
        scale_search=args.scale_search,
        scale_dtype=args.scale_dtype,
        act_order=args.act_order,
        precision=args.precision,
    )
    return QuantConfig(
        layer=layer,
        steps=args.steps,
        overrides=tuple(args.layer),
        include=tuple(getattr(args, "include", ())),
        exclude=tuple(args.exclude),
        rank_threshold=None if args.no_rank else QuantConfig().rank_threshold,
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="zoo name, folder or hub id")
    parser.add_argument("--system", help="adapter to use, if it is not found by itself")
    parser.add_argument("--n-steps", type=int, help="depth of the rollout (default: the model's own)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the initial states (default %(default)s)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=defaults.BATCH_SIZE,
        help="prompts that run together (default %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="threads; 0 takes all cores; changes no result"
    )


def _add_text(parser: argparse.ArgumentParser, what: str, n_prompts: int) -> None:
    parser.add_argument(
        f"--{what}",
        metavar="FILE",
        help="text, folder of *.txt, .jsonl or .npy of token ids (default: the text that ships with loopq)",
    )
    parser.add_argument(
        "--n-prompts", type=int, default=n_prompts, help="prompts to take (default %(default)s)"
    )
    parser.add_argument(
        "--seq-len",
        type=int,
        default=defaults.SEQ_LEN,
        help="tokens of a window of text (default %(default)s)",
    )


def _load(args: argparse.Namespace) -> Any:
    from loopq.systems.load import load_model

    return load_model(args.model, system=args.system, trust_remote_code=args.trust_remote_code)


def layer_table(reports: Sequence[dict[str, Any]]) -> str:
    """Return the table of a run: one line for each layer."""
    rows = [
        (
            r["layer"],
            "x".join(map(str, r["shape"])),
            r["method_asked"],
            r["method_done"],
            f"INT{r['bits']}",
            r["group_size"] if r["group_size"] != -1 else "row",
            short(r["damping"]),
            r["n_rows"],
            _spans(r["steps"]),
            r["rank"],
            short(_relative(r, "proxy_rtn")),
            short(_relative(r, "proxy")),
            size(r["n_bytes"]),
        )
        for r in reports
    ]
    header = (
        "layer", "shape", "asked", "done", "grid", "group", "damping", "rows", "steps", "rank",
        "loss RTN", "loss", "bytes",
    )  # fmt: skip
    return render(header, rows)


def _relative(report: dict[str, Any], key: str) -> float | None:
    return None if report[key] is None else report[key] / report["proxy_total"]


def _spans(steps: Sequence[int]) -> str:
    if not steps:
        return "-"
    spans = []
    start = last = steps[0]
    for step in [*steps[1:], None]:
        if step is None or step != last + 1:
            spans.append(str(start) if start == last else f"{start}-{last}")
            start = step if step is not None else start
        last = step if step is not None else last
    return ",".join(spans)


def _print_checkpoint(checkpoint: Any, out: str | None) -> None:
    reports = [{"layer": layer.name, **layer.report} for layer in checkpoint.layers.values()]
    print(layer_table(reports))
    print("loss: tr(D H D^T) / tr(W H W^T), D the weight error; RTN: the same grid, rounded to nearest")
    packed = sum(layer.n_bytes for layer in checkpoint.layers.values())
    weights = sum(int(layer.codes.size) for layer in checkpoint.layers.values())
    print(
        f"{len(reports)} layers, {weights} weights in {size(packed)}: {8 * packed / weights:.3f} bits a weight"
    )
    if out:
        print(f"written to {out}, read back and compared")


def _quantize(args: argparse.Namespace) -> int:
    loaded = _load(args)
    with Line() as progress:
        result = loopq.quantize(
            loaded,
            args.calibration,
            _config(args),
            out=args.out,
            n_steps=args.n_steps,
            n_prompts=args.n_prompts,
            seq_len=args.seq_len,
            batch_size=args.batch_size,
            seed=args.seed,
            memory=args.memory,
            threads=args.threads,
            progress=progress,
        )
    _print_checkpoint(result, args.out)
    return 0


def _collect(args: argparse.Namespace) -> int:
    from loopq.api import calibration_tokens, side_files
    from loopq.calibrate.collect import Collection, collect_hessians, collect_rows
    from loopq.calibrate.select import select
    from loopq.config import parse_steps

    loaded = _load(args)
    tokens = calibration_tokens(loaded, args.calibration, n_prompts=args.n_prompts, seq_len=args.seq_len)
    selection = select(
        loaded.system,
        tokens,
        n_steps=args.n_steps,
        include=args.include,
        exclude=args.exclude,
        seed=args.seed,
    )
    job = Collection(loaded.system, tokens, selection, args.batch_size, args.seed, side_files(loaded))
    out = Path(args.out)
    with Line() as progress:
        if args.hessian:
            steps = parse_steps(args.steps, selection.n_steps)
            manifest = collect_hessians(
                job,
                out,
                steps=steps,
                per_step=args.per_step,
                memory=args.memory,
                threads=args.threads,
                progress=progress,
            )
        else:
            manifest = collect_rows(
                job, out, rows_dtype=args.rows_dtype, shard_batches=args.shard_batches, progress=progress
            )
    _print_dump(manifest)
    print(f"written to {out}")
    return 0


def _print_dump(manifest: Any) -> None:
    rows = [
        (
            p.name,
            f"{p.out_features}x{p.in_features}",
            p.role,
            p.treatment,
            p.invocations,
            manifest.leaders.get(p.name),
            sum(manifest.rows.get(manifest.leaders.get(p.name, ""), {}).values()) or None,
        )
        for p in manifest.parameters
    ]
    print(render(("layer", "shape", "role", "treatment", "steps", "input of", "rows"), rows))
    cal = manifest.calibration
    total = sum(int(f["n_bytes"]) for f in manifest.files)
    print(
        f"{manifest.kind} dump of system {manifest.system}, {manifest.n_steps} steps, seed {manifest.seed}; "
        f"{cal['n_prompts']} prompts, {cal['n_tokens']} tokens from {cal['source']}; {size(total)}"
    )


def _merge(args: argparse.Namespace) -> int:
    from loopq.calibrate.dump import merge

    _print_dump(merge([Path(p) for p in args.parts], Path(args.out)))
    print(f"written to {args.out}")
    return 0


def _solve(args: argparse.Namespace) -> int:
    with Line() as progress:
        result = loopq.solve(args.dump, _config(args), out=args.out, threads=args.threads, progress=progress)
    _print_checkpoint(result, args.out)
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from loopq.api import evaluate

    loaded = _load(args)
    with Line() as progress:
        measured = evaluate(
            loaded,
            args.checkpoints,
            args.text,
            n_steps=args.n_steps,
            n_prompts=args.n_prompts,
            seq_len=args.seq_len,
            batch_size=args.batch_size,
            seeds=range(args.seed, args.seed + args.n_seeds),
            progress=progress,
        )
    if args.json:
        print(json.dumps([m.summary() for m in measured], indent=1))
        return 0
    print(measurement_table([m.summary() for m in measured]))
    return 0


def measurement_table(summaries: Sequence[dict[str, Any]]) -> str:
    """Return the table of an evaluation: one line for each set of weights."""
    if summaries[0]["output"] == "hidden":
        rows = [(s["name"], short(s["kl"]), f"{s['agreement']:.5f}") for s in summaries]
        return render(("weights", "squared relative error", "cosine"), rows)
    rows_ = [
        (
            s["name"],
            f"{s['kl']:.5f}",
            f"{100 * s['agreement']:.2f} %",
            f"{s['perplexity']:.4f}",
            None if s["bits_per_byte"] is None else f"{s['bits_per_byte']:.4f}",
            size(s["n_bytes"]) if "n_bytes" in s else None,
        )
        for s in summaries
    ]
    return render(("weights", "KL (nats)", "agreement", "perplexity", "bits/byte", "bytes"), rows_)


def _inspect(args: argparse.Namespace) -> int:
    from loopq.calibrate.dump import Dump
    from loopq.checkpoint import native as store

    folder = Path(args.folder)
    if (folder / store.INDEX).is_file():
        checkpoint = store.read(folder)
        if args.json:
            print(json.dumps({"settings": checkpoint.settings, "layers": _reports(checkpoint)}, indent=1))
            return 0
        _print_checkpoint(checkpoint, None)
        print(json.dumps(checkpoint.settings, indent=1))
        return 0
    dump = Dump(folder)
    if args.json:
        print((folder / "manifest.json").read_text("utf-8"))
        return 0
    _print_dump(dump.manifest)
    return 0


def _reports(checkpoint: Any) -> list[dict[str, Any]]:
    return [{"layer": layer.name, **layer.report} for layer in checkpoint.layers.values()]


def _demo(args: argparse.Namespace) -> int:
    from loopq import demo

    with Line() as progress:
        result = demo.run(threads=args.threads, seeds=range(args.n_seeds), progress=progress)
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    cal, held = result["calibration"], result["evaluation"]
    print(
        f"model {result['model']}, {result['n_steps']} recurrence steps; calibrated on {cal['n_tokens']} tokens, "
        f"measured on {held['n_tokens']} held-out tokens, {len(result['seeds'])} paired initial states each"
    )
    for grid in result["grids"]:
        print(f"\nINT{grid['bits']}, group {grid['group_size']}")
        print(measurement_table([result["reference"], *grid["arms"]]))
    first = result["grids"][0]
    print(f"\nlayers of GPTQ, trajectory, INT{first['bits']}, group {first['group_size']}")
    print(layer_table(result["layers"]))
    return 0


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="loopq", description=loopq.__doc__.splitlines()[0] if loopq.__doc__ else None
    )
    top.add_argument("--version", action="version", version=f"loopq {loopq.__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    sub = command("quantize", _quantize, "quantize a looped model over its trajectory")
    _add_model(sub)
    sub.add_argument("--out", required=True, metavar="DIR", help="folder for the checkpoint")
    _add_text(sub, "calibration", defaults.CALIBRATION_PROMPTS)
    _add_quantizer(sub)
    sub.add_argument(
        "--include", action="append", default=[], metavar="PATTERN", help="quantize these layers too"
    )
    sub.add_argument("--memory", type=_memory, help="limit for Hessians, as in 8G: more passes over the text")

    sub = command("collect", _collect, "run the rollouts and keep what the shared layers see")
    _add_model(sub)
    sub.add_argument("--out", required=True, metavar="DUMP", help="folder for the dump")
    _add_text(sub, "calibration", defaults.CALIBRATION_PROMPTS)
    sub.add_argument(
        "--include", action="append", default=[], metavar="PATTERN", help="observe these layers too"
    )
    sub.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="do not observe these layers"
    )
    sub.add_argument("--hessian", action="store_true", help="keep exact Hessian sums instead of rows")
    sub.add_argument("--steps", default="all", help="with --hessian: steps to sum (default %(default)s)")
    sub.add_argument("--per-step", action="store_true", help="with --hessian: keep each step apart")
    sub.add_argument("--memory", type=_memory, help="with --hessian: limit for accumulators, as in 8G")
    sub.add_argument(
        "--rows-dtype",
        choices=("float32", "float16", "bfloat16"),
        help="storage of the rows (default: the model's own)",
    )
    sub.add_argument("--shard-batches", type=int, default=8, help="batches of one file (default %(default)s)")

    sub = command("merge", _merge, "add Hessian dumps that were collected apart")
    sub.add_argument("parts", nargs="+", metavar="DUMP")
    sub.add_argument("--out", required=True, metavar="DUMP", help="folder for the sum")

    sub = command("solve", _solve, "quantize from a dump; needs no torch")
    sub.add_argument("dump", metavar="DUMP")
    sub.add_argument("--out", required=True, metavar="DIR", help="folder for the checkpoint")
    sub.add_argument("--threads", type=int, default=0, help="threads; 0 takes all cores; changes no result")
    _add_quantizer(sub)

    sub = command("evaluate", _evaluate, "measure checkpoints against the full-precision model")
    _add_model(sub)
    sub.add_argument("checkpoints", nargs="+", metavar="DIR")
    _add_text(sub, "text", defaults.EVALUATION_PROMPTS)
    sub.add_argument(
        "--n-seeds", type=int, default=1, help="paired initial states of each prompt (default %(default)s)"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("inspect", _inspect, "say what a checkpoint or a dump holds")
    sub.add_argument("folder", metavar="DIR|DUMP")
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("demo", _demo, "quantize the embedded model and print the comparison")
    sub.add_argument("--threads", type=int, default=0, help="threads; 0 takes all cores")
    sub.add_argument("--n-seeds", type=int, default=3, help="paired initial states (default %(default)s)")
    sub.add_argument("--json", action="store_true", help="print JSON")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""
    # A closed pipe (`loopq inspect ... | head`) ends the program as it ends any other.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    args = parser().parse_args(argv)
    try:
        code: int = args.run(args)
        return code
    except LoopqError as error:
        print(f"loopq: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("loopq: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
