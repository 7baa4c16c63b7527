"""Options that several commands share, and how they are read."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from loopq import config as defaults
from loopq.config import AllocateConfig, LayerConfig, Override, QuantConfig
from loopq.errors import ConfigError

_LAYER = LayerConfig()


def memory(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: give bytes with a unit, as in 8G or 512M")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def override(text: str) -> Override:
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


def add_quantizer(parser: argparse.ArgumentParser) -> None:
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
        "--scale-bits",
        type=int,
        help="significant bits that scales keep; 5 makes code * scale exact in bfloat16 (default: all of the type)",
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
        type=override,
        metavar="PATTERN=>NAME=VALUE,...",
        help="other settings for layers that match, e.g. '*adapter*=>bits=8,steps=first'; repeatable; '*=>NAME=VALUE' "
        "sets any field of LayerConfig for all",
    )
    group.add_argument(
        "--inputs",
        choices=("open", "asymmetric", "closed-loop", "equal-rows"),
        default=QuantConfig().inputs,
        help="inputs of the full-precision rollout; layer by layer against its outputs; once more on the quantized "
        "rollout; or the rows of one step spread over all (default %(default)s)",
    )
    group.add_argument(
        "--alpha",
        type=float,
        default=QuantConfig().alpha,
        help="with --inputs asymmetric: share of the correction (default %(default)s)",
    )
    group.add_argument(
        "--sweeps",
        type=int,
        default=QuantConfig().sweeps,
        help="with --inputs asymmetric: times through all layers (default %(default)s)",
    )
    group.add_argument(
        "--step-weights",
        default=_LAYER.step_weights,
        help=f"how steps are added: {' | '.join(defaults.STEP_WEIGHTS)} | alpha=A (default %(default)s)",
    )
    group.add_argument(
        "--damping-kind",
        choices=("mean", "median", "diagonal", "tail"),
        default=_LAYER.damping_kind,
        help="what --damping is a fraction of (default %(default)s)",
    )
    group.add_argument(
        "--metric",
        choices=("inputs", "loop"),
        default=_LAYER.metric,
        help="with --method full: count the square error of a layer's output, or what gradients say it does to the "
        "model's output through the rest of the loop (default %(default)s)",
    )
    group.add_argument(
        "--rotation",
        default=_LAYER.rotation,
        help="none | hadamard:SIZE | random:SIZE | hadamard, of the input at run time (default %(default)s)",
    )
    group.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="leave these layers dense"
    )
    group.add_argument(
        "--no-rank", action="store_true", help="leave the rank (eigenvalues) out of the report"
    )


def quant_config(args: argparse.Namespace) -> QuantConfig:
    layer = LayerConfig(
        method=args.method,
        bits=args.bits,
        group_size=args.group_size,
        symmetric=not args.asymmetric,
        damping=args.damping,
        scales=args.scales,
        scale_search=args.scale_search,
        scale_dtype=args.scale_dtype,
        scale_bits=args.scale_bits,
        act_order=args.act_order,
        precision=args.precision,
        damping_kind=args.damping_kind,
        step_weights=args.step_weights,
        metric=args.metric,
        rotation=args.rotation,
    )
    return QuantConfig(
        layer=layer,
        steps=args.steps,
        overrides=tuple(args.layer),
        include=tuple(getattr(args, "include", ())),
        exclude=tuple(args.exclude),
        rank_threshold=None if args.no_rank else QuantConfig().rank_threshold,
        inputs=args.inputs,
        alpha=args.alpha,
        sweeps=args.sweeps,
    )


def add_beyond(parser: argparse.ArgumentParser) -> None:
    """Add what `quantize` alone can do: bits under a budget, and the gradient tier."""
    group = parser.add_argument_group("mixed bits and tuning")
    group.add_argument(
        "--allocate",
        type=budget,
        metavar="BUDGET",
        help="choose bits and group size of each layer: bits a weight with scales, as in 3.25, or bytes, as in 900K",
    )
    group.add_argument(
        "--score",
        choices=("ablation", "fisher"),
        default="ablation",
        help="with --allocate: measured KL of each layer alone, or predicted from gradients (default %(default)s)",
    )
    group.add_argument(
        "--widths",
        type=numbers,
        default=defaults.BITS,
        metavar="B,B,...",
        help="with --allocate: bits a layer may get (default 2,3,4,8)",
    )
    group.add_argument(
        "--group-sizes",
        type=numbers,
        default=(32, 64, 128),
        metavar="G,G,...",
        help="with --allocate: group sizes a layer may get (default 32,64,128)",
    )
    group.add_argument(
        "--tune",
        choices=("scales", "codes"),
        help="go on by gradient through the unrolled loop: group scales, or scales and codes",
    )
    group.add_argument("--tune-updates", type=int, help="with --tune: Adam updates (default 250)")
    group.add_argument(
        "--truncate", type=int, help="with --tune: last steps that carry gradients (default: all)"
    )
    group.add_argument(
        "--held-out",
        type=int,
        metavar="N",
        help="with --tune or --step-weights validated: calibration prompts held back (default: a quarter)",
    )


def budget(text: str) -> float | int:
    """Read bits a weight or bytes."""
    return memory(text) if text[-1:].upper() in "KMGTB" else float(text)


def numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers joined by commas."""
    return tuple(int(part) for part in text.split(","))


def allocate_config(args: argparse.Namespace) -> AllocateConfig | None:
    """Read what `add_beyond` added about bits."""
    if args.allocate is None:
        return None
    return AllocateConfig(args.allocate, args.score, args.widths, args.group_sizes)


def tune_config(args: argparse.Namespace) -> Any:
    """Read what `add_beyond` added about tuning."""
    if args.tune is None:
        if args.tune_updates is not None or args.truncate is not None:
            raise ConfigError("--tune-updates and --truncate go with --tune")
        return None
    from loopq.tune.tuner import TuneConfig

    return TuneConfig(
        what=args.tune,
        n_updates=args.tune_updates if args.tune_updates is not None else TuneConfig().n_updates,
        truncate=args.truncate,
        seed=args.seed,
    )


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add what names a model and says how it is loaded and run."""
    parser.add_argument("model", metavar="MODEL", help="zoo name, folder or hub id")
    parser.add_argument("--system", help="adapter to use, if it is not found by itself")
    parser.add_argument("--n-steps", type=int, help="depth of the rollout (default: the model's own)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read weights from pickles (*.bin), which can run code"
    )
    parser.add_argument("--revision", help="commit, tag or branch of a hub id")
    parser.add_argument("--dtype", choices=defaults.DTYPES, help="cast the model (default: as it is stored)")
    parser.add_argument("--device", default="cpu", help="device of the model (default %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the initial states (default %(default)s)"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add a model and how much of it runs at once."""
    add_source(parser)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=defaults.BATCH_SIZE,
        help="prompts that run together (default %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="threads; 0 takes all cores; changes no result"
    )


def add_format(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the options that choose a checkpoint format; without a default the format must be given."""
    from loopq.checkpoint.convert import format_names

    parser.add_argument(
        "--format",
        required=default is None,
        default=default,
        choices=format_names(),
        help="checkpoint format to write" + (" (default %(default)s)" if default else ""),
    )
    parser.add_argument(
        "--ragged",
        choices=("keep", "split", "pad"),
        help="a last group shorter than the others: keep it, cut all groups to a width that divides, or pad with zeros",
    )


def add_text(parser: argparse.ArgumentParser, what: str, n_prompts: int) -> None:
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


def load(args: argparse.Namespace) -> Any:
    from loopq.systems.load import load_model

    return load_model(
        args.model,
        system=args.system,
        trust_remote_code=args.trust_remote_code,
        allow_pickle=args.allow_pickle,
        dtype=args.dtype,
        device=args.device,
        revision=args.revision,
    )
