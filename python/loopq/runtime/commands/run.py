"""`loopq run`: text from a model or from a quantized checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from loopq.commands import COMMANDS, Command
from loopq.commands.hooks import SPEEDS
from loopq.commands.options import add_settings, given
from loopq.commands.source import ModelOptions, add_source
from loopq.errors import ConfigError
from loopq.formats.convert import is_checkpoint
from loopq.models.load import LoadedModel
from loopq.runtime.generate import Decoder, Generation, speed
from loopq.runtime.graph import RECORDERS
from loopq.runtime.text import Continuation
from loopq.terminal.text import say

#: Characters of a prompt on the standard input, which may have no end.
MAX_PROMPT = 2**24
_EXAMPLES = """examples:
  loopq run huginn_small "The sea was"
  loopq run DIR "The sea was" --n-tokens 200 --temperature 0.8 --top-p 0.95 --seed 1
  loopq run DIR "The sea was" --n-steps 4         another depth
the text goes to the standard output, what is said about it to the standard error"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_source(
        parser, "checkpoint of any format that loopq reads, embedded model (huginn_small), folder or hub id"
    )
    parser.add_argument(
        "prompt", metavar="PROMPT", help="text to continue; -: read it from the standard input"
    )
    add_settings(parser, Generation)
    inputs = parser.add_mutually_exclusive_group()
    inputs.add_argument(
        "--dense",
        action="store_true",
        help="of a checkpoint: dequantize the weights once, instead of holding codes and scales in memory",
    )
    inputs.add_argument(
        "--int8",
        action="store_true",
        help="of a checkpoint: round the inputs of its products to 8 bits, as llama.cpp does; faster, less exact",
    )


def run(args: argparse.Namespace) -> int:
    """Print the text token by token, and the speed."""
    settings = Generation().changed(**given(args, Generation))
    if args.model is None and args.python is None:
        raise ConfigError(
            f'the prompt is missing: loopq run {args.prompt} "TEXT" (-: read it from the standard input)'
        )
    source = ModelOptions.of(args)
    loaded = _open(source, dense=args.dense, int8=args.int8)
    prompt = _standard_input() if args.prompt == "-" else args.prompt
    text = Continuation(loaded, prompt, source.depth, settings)
    decoder, n_prompt = text.decoder, len(text.prompt)
    _say(f"{loaded.system.name}, {decoder.n_steps} steps, {n_prompt} tokens of prompt; {_way(decoder)}")
    for piece in text:
        say(piece, end="", flush=True)
    say()
    _say(_speed(n_prompt, text.times, decoder.depths))
    return 0


def _way(decoder: Decoder) -> str:
    """How the tokens are computed, in words."""
    from loopq.systems.fixed import FixedCached  # lazy: loopq imports without torch

    declined = decoder.declined
    system = decoder.system
    ours = isinstance(system, FixedCached) and (decoder.backend.name == "graph" or not system.class_caches)
    cache = "loopq's cache" if ours else "the model's own cache"
    match decoder.backend.name:
        case "runner":
            return "loopq's runner"
        case "graph":
            return f"{cache}; each step is one CUDA graph"
        case "cache":
            recorded = decoder.system.device.type in RECORDERS
            return cache + (f"; no graph ({declined['graph']})" if recorded else "")
    return f"no cache ({declined['cache']})"


def _standard_input() -> str:
    try:
        prompt = sys.stdin.read(MAX_PROMPT + 1)
    except UnicodeDecodeError as cause:
        raise ConfigError(
            f"the standard input is no text: byte {cause.start} is not {cause.encoding}"
        ) from cause
    if len(prompt) > MAX_PROMPT:
        raise ConfigError(f"the standard input has more than {MAX_PROMPT} characters; give a shorter prompt")
    return prompt


def _open(source: ModelOptions, *, dense: bool, int8: bool) -> LoadedModel:
    """A checkpoint, or a model in full precision."""
    if (dense or int8) and not (source.model and is_checkpoint(Path(source.model))):
        option = "--dense" if dense else "--int8"
        raise ConfigError(f"{option}: {source.name} is not a quantized checkpoint; leave the option away")
    return source.load_any(quantized=not dense, activations="int8" if int8 else "float")


def _speed(n_prompt: int, times: list[float], depths: list[int]) -> str:
    n_tokens = len(times) - 1
    if n_tokens == 0:
        return "no tokens: the model ends the text at once"
    first, rest = times[1] - times[0], times[-1] - times[1]
    text = f"{n_tokens} tokens; the first after {first:.2f} s ({n_prompt / max(first, 1e-9):.1f} tokens of prompt/s)"
    if n_tokens > 1:
        text += f", then {(n_tokens - 1) / max(rest, 1e-9):.2f} tokens/s"
    if len(set(depths)) > 1:
        text += f"; {sum(depths) / len(depths):.2f} steps a token ({min(depths)} to {max(depths)})"
    return text


def _say(text: str) -> None:
    say(f"loopq: {text}", file=sys.stderr)


COMMANDS.register("run")(Command("generate text with a model or checkpoint", add, run, 13, epilog=_EXAMPLES))
SPEEDS.register("one token at a time")(speed)
