"""Options that several commands share, and how they are read."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from loopq import config as defaults
from loopq.checkpoint.files import nearest
from loopq.config import AllocateConfig, LayerConfig, Override, QuantConfig
from loopq.errors import ConfigError
from loopq.quantizers import QUANTIZERS, check_methods

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


def add_quantizer(parser: argparse.ArgumentParser, *, presets: bool = False) -> None:
    """Add the settings of the quantizer.

    Parameters
    ----------
    parser : ArgumentParser
        Parser of the command.
    presets : bool
        Offer `--preset` too: for commands that have the model, since the best preset takes gradients.

    Notes
    -----
    Where an option has no default here, it was not given: a preset may then set it, and one that goes with nothing
    else that was asked for can be refused. The default that holds stands in the help text.
    """
    group = parser.add_argument_group("quantizer")
    if presets:
        group.add_argument(
            "--preset",
            choices=tuple(defaults.PRESETS),
            help="best: closest to full precision at the same bytes and in the same files, the same as "
            f"{preset_options('best')}; takes {QuantConfig().metric_draws} backward passes for each prompt more, and "
            "says beforehand how long that is. Other options given beside it win",
        )
    _add_grid(group)
    _add_calibration(group)
    _add_solver(group)
    group.add_argument(
        "--layer",
        action="append",
        default=[],
        type=override,
        metavar="PATTERN=>NAME=VALUE,...",
        help="other settings for layers that match, e.g. '*adapter*=>bits=8,steps=first'; repeatable; '*=>NAME=VALUE' "
        "sets any field of LayerConfig (docs/quantizers.md) for all",
    )
    group.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="leave these layers dense"
    )
    group.add_argument(
        "--no-rank", action="store_true", help="leave the rank (eigenvalues) out of the report"
    )


def work_folder(out: str | Path) -> Path:
    """Where a run for that output folder keeps what is done, until it is done."""
    return Path(out).with_name(f".{Path(out).name}.work")


def _add_grid(group: Any) -> None:
    group.add_argument(
        "--bits",
        type=int,
        default=_LAYER.bits,
        metavar="N",
        help=f"{', '.join(map(str, defaults.BITS))} (default %(default)s)",
    )
    group.add_argument(
        "--group-size",
        type=int,
        default=_LAYER.group_size,
        metavar="N",
        help="input columns of a scale; -1: one scale per output row (default %(default)s)",
    )
    group.add_argument(
        "--asymmetric", action="store_true", help="unsigned codes with a zero point for each group"
    )
    group.add_argument(
        "--scale-dtype",
        choices=defaults.SCALE_DTYPES,
        default=_LAYER.scale_dtype,
        help="stored type of the scales (default %(default)s)",
    )
    group.add_argument(
        "--scale-bits",
        type=int,
        metavar="N",
        help="significant bits that scales keep; 5 makes code * scale exact in bfloat16 (default: all of the type)",
    )


def _add_calibration(group: Any) -> None:
    group.add_argument(
        "--steps",
        default="all",
        help="recurrence steps to calibrate on: all | first | 0:8 | 31 | 1: (default %(default)s)",
    )
    group.add_argument(
        "--step-weights",
        default=_LAYER.step_weights,
        metavar="HOW",
        help=f"how steps are added: {' | '.join(defaults.STEP_WEIGHTS)} | alpha=A (default %(default)s)",
    )
    group.add_argument(
        "--inputs",
        choices=("open", "asymmetric", "closed-loop", "equal-rows"),
        default=QuantConfig().inputs,
        help="inputs of the full-precision rollout; layer by layer against its outputs, two runs of the text for "
        "each input group; once more on the quantized rollout; or the rows of one step spread over all (default "
        "%(default)s)",
    )
    group.add_argument(
        "--alpha",
        type=float,
        metavar="SHARE",
        help=f"with --inputs asymmetric: share of the correction (default {QuantConfig().alpha})",
    )
    group.add_argument(
        "--sweeps",
        type=int,
        metavar="N",
        help=f"with --inputs asymmetric: times through all layers (default {QuantConfig().sweeps})",
    )


def _add_solver(group: Any) -> None:
    group.add_argument(
        "--method",
        metavar="NAME",
        help=f"{' | '.join(methods())}; dense leaves a layer as it is (default {_LAYER.method})",
    )
    group.add_argument(
        "--metric",
        choices=("inputs", "loop"),
        help="with --method full: count the square error of a layer's output, or what gradients say it does to the "
        f"model's output through the rest of the loop (default {_LAYER.metric})",
    )
    group.add_argument(
        "--damping",
        type=float,
        default=_LAYER.damping,
        metavar="SHARE",
        help="added to the diagonal of H, as a share of what --damping-kind names (default %(default)s)",
    )
    group.add_argument(
        "--damping-kind",
        choices=("mean", "median", "diagonal", "tail"),
        help="what --damping is a share of: the mean or median of diag(H), each column's own entry, or the mean "
        f"without the largest hundredth of the eigenvalues (default {_LAYER.damping_kind})",
    )
    group.add_argument(
        "--rotation",
        default=_LAYER.rotation,
        metavar="KIND",
        help="none | hadamard:SIZE | random:SIZE | hadamard, of the input at run time (default %(default)s)",
    )
    group.add_argument(
        "--scales",
        choices=("group", "static"),
        help="with --method gptq: scales from the weights as compensated so far, or from the original weights "
        f"(default {_LAYER.scales})",
    )
    group.add_argument(
        "--scale-search",
        choices=("max", "mse"),
        help="with gptq, rtn, awq: scale of the largest magnitude, or of least square error (default "
        f"{_LAYER.scale_search})",
    )
    group.add_argument(
        "--act-order",
        action="store_true",
        help="with --method gptq: sweep columns by falling diag(H); no index is stored",
    )
    group.add_argument(
        "--precision",
        choices=("float64", "float32"),
        help=f"with --method gptq: arithmetic of factor and sweep (default {_LAYER.precision})",
    )


def methods() -> list[str]:
    """Values of `--method`."""
    return [*QUANTIZERS.names(), "dense"]


def preset_options(name: str) -> str:
    """A preset, written out as options."""
    return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in defaults.PRESETS[name].items())


# Options that only some methods read; another method would leave them out without a word.
_READ_BY = {
    "act_order": ("gptq",),
    "scales": ("gptq",),
    "precision": ("gptq",),
    "scale_search": ("gptq", "rtn", "awq"),
}


def quant_config(args: argparse.Namespace) -> QuantConfig:
    """Read what `add_quantizer` added.

    Raises
    ------
    ConfigError
        A value that is not allowed, or an option that goes with nothing else that was asked for.
    """
    named = getattr(args, "preset", None)
    base = defaults.preset(named) if named else QuantConfig()
    given = {
        name: value
        for name in ("method", "metric", "damping_kind", "scales", "scale_search", "precision")
        if (value := getattr(args, name)) is not None
    }
    if args.act_order:
        given["act_order"] = True
    layer = dataclasses.replace(
        base.layer,
        bits=args.bits,
        group_size=args.group_size,
        symmetric=not args.asymmetric,
        damping=args.damping,
        scale_dtype=args.scale_dtype,
        scale_bits=args.scale_bits,
        step_weights=args.step_weights,
        rotation=args.rotation,
        **given,
    )
    config = dataclasses.replace(
        base,
        layer=layer,
        steps=args.steps,
        overrides=tuple(args.layer),
        include=tuple(getattr(args, "include", ())),
        exclude=tuple(args.exclude),
        rank_threshold=None if args.no_rank else base.rank_threshold,
        inputs=args.inputs,
        alpha=args.alpha if args.alpha is not None else base.alpha,
        sweeps=args.sweeps if args.sweeps is not None else base.sweeps,
    )
    check_methods(config)
    used = {layer.method, *(o.changes.get("method", layer.method) for o in args.layer)}
    for name, readers in _READ_BY.items():
        if name in given and not used & set(readers):
            raise ConfigError(
                f"--{name.replace('_', '-')} goes with --method {' or '.join(readers)}; --method {layer.method} would "
                "not read it"
            )
    if args.inputs != "asymmetric" and (args.alpha is not None or args.sweeps is not None):
        raise ConfigError("--alpha and --sweeps go with --inputs asymmetric")
    return config


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
        help="with --allocate: measured KL of each layer alone, or predicted from gradients (default ablation)",
    )
    group.add_argument(
        "--widths",
        type=numbers,
        metavar="B,B,...",
        help="with --allocate: bits a layer may get (default 2,3,4,8)",
    )
    group.add_argument(
        "--group-sizes",
        type=numbers,
        metavar="G,G,...",
        help="with --allocate: group sizes a layer may get (default 32,64,128)",
    )
    group.add_argument(
        "--tune",
        choices=("scales", "codes"),
        help="go on by gradient through the unrolled loop: group scales, or scales and codes",
    )
    group.add_argument(
        "--tune-updates", type=int, metavar="N", help="with --tune: Adam updates (default 250)"
    )
    group.add_argument(
        "--truncate",
        type=int,
        metavar="N",
        help="with --tune: last steps that carry gradients (default: all)",
    )
    group.add_argument(
        "--held-out",
        type=int,
        metavar="N",
        help="with --tune or --step-weights validated: calibration prompts held back (default: a quarter)",
    )


def budget(text: str) -> float | int:
    """Read bits a weight or bytes."""
    try:
        return memory(text) if text[-1:].upper() in "KMGTB" else float(text)
    except ValueError as cause:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give bits a weight, as in 3.25, or bytes with a unit, as in 900K"
        ) from cause


def numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers joined by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as cause:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers joined by commas") from cause


def threads(text: str) -> int:
    """Read a number of threads."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: give 0 (all cores) or a number of threads")
    return int(text)


def allocate_config(args: argparse.Namespace) -> AllocateConfig | None:
    """Read what `add_beyond` added about bits."""
    given = {"score": args.score, "bits": args.widths, "group_sizes": args.group_sizes}
    given = {name: value for name, value in given.items() if value is not None}
    if args.allocate is None:
        if given:
            raise ConfigError("--score, --widths and --group-sizes go with --allocate")
        return None
    return AllocateConfig(args.allocate, **given)


def tune_config(args: argparse.Namespace) -> Any:
    """Read what `add_beyond` added about tuning."""
    if args.tune is None:
        if args.tune_updates is not None or args.truncate is not None:
            raise ConfigError("--tune-updates and --truncate go with --tune")
        if args.held_out is not None and args.step_weights != "validated":
            raise ConfigError("--held-out goes with --tune or --step-weights validated")
        return None
    from loopq.tune.tuner import TuneConfig

    return TuneConfig(
        what=args.tune,
        n_updates=args.tune_updates if args.tune_updates is not None else TuneConfig().n_updates,
        truncate=args.truncate,
        seed=args.seed,
    )


def add_source(parser: argparse.ArgumentParser, what: str = "zoo name, folder or hub id") -> None:
    """Add what names a model and says how it is loaded and run."""
    parser.add_argument("model", metavar="MODEL", help=what)
    parser.add_argument(
        "--system",
        metavar="NAME",
        help="adapter to use, if it is not found by itself (`loopq systems` lists them)",
    )
    parser.add_argument(
        "--n-steps", type=int, metavar="N", help="depth of the rollout (default: the model's own)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read weights from pickles (*.bin), which can run code"
    )
    parser.add_argument("--revision", metavar="COMMIT", help="commit, tag or branch of a hub id")
    parser.add_argument("--dtype", choices=defaults.DTYPES, help="cast the model (default: as it is stored)")
    parser.add_argument(
        "--device", default="cpu", help="device of the model, such as cuda:0 (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the initial states (default %(default)s)"
    )


def add_model(parser: argparse.ArgumentParser, what: str = "zoo name, folder or hub id") -> None:
    """Add a model and how much of it runs at once."""
    add_source(parser, what)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=defaults.BATCH_SIZE,
        metavar="N",
        help="prompts that run together (default %(default)s)",
    )
    add_threads(parser)


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add the number of threads."""
    parser.add_argument(
        "--threads",
        type=threads,
        default=0,
        metavar="N",
        help="threads; 0 takes all cores; changes no result (default %(default)s)",
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
        help="text, folder of *.txt, .jsonl or .npy of token ids (default: the text that ships with loopq, for models "
        "that read bytes)",
    )
    parser.add_argument(
        "--n-prompts", type=int, default=n_prompts, metavar="N", help="prompts to take (default %(default)s)"
    )
    parser.add_argument(
        "--seq-len",
        type=int,
        default=defaults.SEQ_LEN,
        metavar="N",
        help="tokens of a window of text (default %(default)s)",
    )


def check_place(file: str | Path) -> None:
    """Refuse a file that could not be written, before anything is computed for it."""
    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{file}: is a folder; name a file")
    place = nearest(path.parent)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{file}: {place} is no folder that can be written to; name another place")


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
