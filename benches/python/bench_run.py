"""Text from a whole looped model by loopq's runner, by the model's modules around its codes, and by the dense model.

    python benches/python/bench_run.py --model .cache/smollm2/looped [--group-size 64] [--record FILE]
    python benches/python/bench_run.py --shape tinyllama
    python benches/python/bench_run.py --model FOLDER --llama PYTHON --gguf FILE
    python benches/python/bench_run.py --model FOLDER --checkpoint Q     # only: what loading takes
    python benches/python/bench_run.py --model FOLDER --trellis 12 14 --bits 3     # only: beside plain codes

Codes are rounded to nearest, those on a trellis drawn at random: speed does not depend on what they are. Rotated ones
have blocks as wide as a group in all layers, which is more than the default rotates.
The dense model is bfloat16 and runs by transformers with its own cache. A shape has random weights. With `--llama`
llama.cpp generates from the same prompt on as many threads. It needs an interpreter with `xllamacpp`, and the GGUF
file that `loopq export` wrote of the model's checkpoint. Its Q4_0 is `--group-size 32`. Logits with codes are
compared before anything is timed. Speeds are the best of the trials. The trials take turns, and llama.cpp's follow.
The last rows are the runner's times for a token, for one block and the head, and for a token with the same block
throughout, which stays in cache.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from record import write

from loopq import _native
from loopq.layers.grid import Bits
from loopq.layers.grids.trellis import OnTrellis, Trellis
from loopq.layers.layer import QuantizedLayer
from loopq.layers.transforms import RotationConfig
from loopq.models.load import load_model
from loopq.quantizers import Problem
from loopq.quantizers.grid import GridSettings
from loopq.quantizers.rtn import RTN
from loopq.runtime.generate import Decoder, Generation
from loopq.runtime.linear import QuantLinear
from loopq.runtime.quantized import QuantEmbedding
from loopq.runtime.runner import Runner
from loopq.systems import find_system
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.capabilities import Programmed

#: Shapes of looped models, of classes of transformers.
SHAPES: dict[str, dict[str, Any]] = {
    # R-Llama's size: 4 layers, a core of 8 that runs four times, 4 layers.
    "tinyllama": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
        "looped_layers": [4, 12, 4],
    },
    "hrm-text-1b": {"model_type": "hrm_text"},
}  # fmt: skip
LLAMA = """
import json, sys, time
import xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = sys.argv[1], 2048, 1, True
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(settings)
prompt, n_tokens, trials = json.loads(sys.argv[2])
seconds = {}
for _ in range(trials):
    for n in (1, n_tokens + 1):
        start = time.perf_counter()
        server.handle_completions(
            {"prompt": prompt, "n_predict": n, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        )
        seconds[n] = min(seconds.get(n, 1e9), time.perf_counter() - start)
print(json.dumps([seconds[1], (seconds[n_tokens + 1] - seconds[1]) / n_tokens]))
"""
LOAD = """
import resource, sys, time
import torch
import loopq
from loopq.models.load import load_model
folder, how = sys.argv[1:]
import transformers
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, start = peak(), time.perf_counter()
loaded = load_model(folder) if how == "dense" else loopq.load(folder, quantized=how == "codes")
took = time.perf_counter() - start
with torch.inference_mode():
    loaded.system.model(torch.arange(8)[None])
print(took, peak() - before)
"""


def loading(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds and peak memory of loading and of one call, each in a separate process."""
    rows = []
    for name, folder, how in (
        ("codes", args.checkpoint, "codes"),
        ("codes, dequantized", args.checkpoint, "weights"),
        ("the model in full precision", args.model, "dense"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", LOAD, folder, how], check=True, stdout=subprocess.PIPE, text=True
        )
        seconds, mib = map(float, done.stdout.split()[-2:])
        rows.append({"way": name, "load_s": seconds, "peak_mib": mib})
        print(f"{name:30}  {seconds:6.2f} s  {mib:8.0f} MiB at the peak, beyond the libraries")
    return rows


def random_model(shape: str) -> Any:
    """A bfloat16 model of a shape, with a loop."""
    import transformers

    config = transformers.AutoConfig.for_model(**SHAPES[shape])
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()
    finally:
        torch.set_default_dtype(default)


def rounded(
    module: Any, bits: Bits, group_size: int, rotation: str = "none", state_bits: int | None = None
) -> QuantLinear:
    """A layer's weight in codes; with state bits, codes of a small weight on a trellis."""
    weight = module.weight.detach().float().numpy()
    transform = RotationConfig(rotation).of(weight.shape[1], group_size)
    if transform is not None:
        weight = transform.fold(weight)
    if state_bits is None:
        grid = GridSettings(bits, group_size, scale_dtype="float32")
        layer = RTN("max").quantize(Problem("layer.weight", weight, None, grid))
        layer = replace(layer, transform=transform)
    else:
        # Small, so that logits are not those of noise and can be compared.
        n_groups = 1 if group_size == -1 else -(-weight.shape[1] // group_size)
        scales = np.full((len(weight), n_groups), 0.1 * weight.std(), np.float32)
        codes = np.random.default_rng(0).integers(-1 << bits - 1, 1 << bits - 1, weight.shape, np.int8)
        on_trellis = OnTrellis(bits, group_size, "float32", Trellis(state_bits, 512))
        layer = QuantizedLayer("layer.weight", on_trellis, codes, scales, None, transform=transform)
    bias = getattr(module, "bias", None)
    return QuantLinear.from_layer(layer, bias, layout="lq-cpu", scale_dtype=torch.float16)


def coded(
    model: Any, group_size: int, outside: bool = False, rotation: str = "none", bits: Bits = 4,
    state_bits: int | None = None,
) -> Any:  # fmt: skip
    """A copy of a model with codes in the place of its layers' weights, and eight-bit ones of its table's."""
    new = copy.deepcopy(model)
    system = find_system(new)
    for shared in system.shared_parameters(system.n_steps):
        name = shared.name.removesuffix(".weight")
        parent, _, child = name.rpartition(".")
        layer = rounded(new.get_submodule(name), bits, group_size, rotation, state_bits)
        setattr(new.get_submodule(parent), child, layer)
    if outside:
        table, head = new.get_input_embeddings(), new.lm_head
        new.lm_head = rounded(head, 8, group_size)
        codes = new.lm_head if head.weight is table.weight else rounded(table, 8, group_size)
        new.set_input_embeddings(QuantEmbedding(codes, torch.bfloat16))
    return new


def decoder_of(system: LoopedSystem, runner: bool) -> Decoder:
    """A decoder that runs by the core, or by the model's modules."""
    if runner:
        decoder = Decoder(system, system.n_steps, Generation())
        if "runner" in decoder.declined:
            raise SystemExit(decoder.declined["runner"])
        return decoder
    with patch.object(type(system), "program", lambda self, n_steps: None):
        return Decoder(system, system.n_steps, Generation())


def parts(decoder: Decoder, trials: int) -> dict[str, float]:
    """Milliseconds of a token by the runner: whole; with one block only; with that block in the place of each."""
    system = decoder.system
    program = system.program(decoder.n_steps) if isinstance(system, Programmed) else None
    if program is None:
        raise SystemExit("no program")
    blocks = [step for step in program.order if step[0] == "block"]
    pieces = {
        "token": program.order,
        "one block": blocks[:1],
        "one block again and again": blocks[:1] * len(blocks),
    }
    runners = {name: Runner(replace(program, order=order)) for name, order in pieces.items()}
    batch = Batch(torch.tensor([[5]]), (0,), by_token=True)
    states = None if program.start is None else program.start(batch, 0)[0]
    best = dict.fromkeys(runners, float("inf"))
    for _ in range(20 * trials):
        for name, runner in runners.items():
            runner.restart()
            start = time.perf_counter()
            runner.extend(batch.input_ids[0], states)
            best[name] = min(best[name], time.perf_counter() - start)
    return {f"{name}, ms": 1e3 * seconds for name, seconds in best.items()} | {"blocks": len(blocks)}


def timed(
    decoder: Decoder, prompt: list[int], n_tokens: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds of the prompt, and of a token after it."""
    decoder.restart()
    ids = list(prompt)
    start = clock()
    logits = decoder(ids)
    first = clock()
    for _ in range(n_tokens):
        ids.append(int(logits.numpy().argmax()))
        logits = decoder(ids)
    return first - start, (clock() - first) / n_tokens


def fastest(
    args: argparse.Namespace, ways: Mapping[str, Decoder], prompt: list[int], clock: Callable[[], float]
) -> dict[str, tuple[float, float]]:
    """The least of both times of each way, over trials in turns."""
    best: dict[str, tuple[float, float]] = {}
    for _ in range(args.trials):
        for name, decoder in ways.items():
            took = timed(decoder, prompt, args.tokens, clock)
            best[name] = tuple(map(min, took, best.get(name, took)))  # type: ignore[assignment]
    return best


def llama(args: argparse.Namespace, prompt: list[int], threads: int) -> tuple[float, float]:
    """The same by llama.cpp, with its server's time for the request."""
    asked = json.dumps([prompt, args.tokens, args.trials])
    done = subprocess.run(
        [args.llama, "-c", LLAMA, args.gguf, asked, str(threads)],
        check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    first, each = json.loads(done.stdout.splitlines()[-1])
    return first, each


def trellis(args: argparse.Namespace, dense: Any, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Codes on a trellis beside plain ones of the same bits, by the runner."""
    rotation, ways = "hadamard:64", {}
    for state_bits in (None, *args.trellis):
        name = "plain codes" if state_bits is None else f"trellis, {state_bits} state bits"
        system = find_system(coded(dense, args.group_size, False, rotation, args.bits, state_bits))
        ways[name] = decoder_of(system, True)
    ways[f"{name}, modules"] = decoder_of(system, False)
    vocabulary = dense.get_input_embeddings().num_embeddings
    prompt = [int(i) for i in np.random.default_rng(0).integers(3, vocabulary, args.prompt)]
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        best = fastest(args, ways, prompt, clock)
        for name, (first, each) in best.items():
            row = {
                "model": args.model.name, "way": name, "bits": args.bits, "group_size": args.group_size,
                "rotation": rotation, "threads": threads, "clock": clock.__name__,
                "prompt_tokens_per_s": args.prompt / first, "tokens_per_s": 1 / each,
                "prompt_over_plain": best["plain codes"][0] / first, "over_plain": best["plain codes"][1] / each,
                "engine": _native.cpu_engines()[-1],
            }  # fmt: skip
            rows.append(row)
            print(
                f"{threads} threads  {name:32}  prompt {args.prompt / first:7.1f} tokens/s  "
                f"{row['prompt_over_plain']:.2f}x   then {1 / each:6.1f} tokens/s  {row['over_plain']:.2f}x",
                flush=True,
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, help="folder of a model in full precision")
    what.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="count seconds of one thread's processor")
    parser.add_argument("--llama", help="interpreter of an environment with xllamacpp")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint of the model: measure loading alone")
    parser.add_argument("--trellis", type=int, nargs="+", help="state bits: measure these codes alone")
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4), help="of codes on a trellis")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args(argv)
    if args.checkpoint and not args.model:
        parser.error("--checkpoint: beside it, --model names the model in full precision")
    if bool(args.llama) != bool(args.gguf):
        parser.error("--llama and --gguf: the one needs the other")
    if args.cpu and (args.llama or args.threads != [1]):
        parser.error("--cpu: only with --threads 1, and without --llama")
    clock = time.process_time if args.cpu else time.perf_counter

    if args.checkpoint:
        write(args.record, loading(args))
        return
    dense = random_model(args.shape) if args.shape else load_model(str(args.model)).model.bfloat16()
    if args.trellis:
        write(args.record, trellis(args, dense, clock))
        return
    models = (dense, *(coded(dense, args.group_size, table) for table in (False, True)))
    systems = [
        find_system(m)
        for m in (*models, coded(dense, args.group_size, rotation=f"hadamard:{args.group_size}"))
    ]
    ways = {
        "loopq run": decoder_of(systems[1], True),
        "loopq run, table in 8 bits": decoder_of(systems[2], True),
        "loopq run, rotated": decoder_of(systems[3], True),
        "modules with codes": decoder_of(systems[1], False),
        "modules, rotated": decoder_of(systems[3], False),
        "dense, bfloat16": decoder_of(systems[0], False),
    }
    vocabulary = dense.get_input_embeddings().num_embeddings
    prompt = [int(i) for i in np.random.default_rng(0).integers(3, vocabulary, args.prompt)]
    logits = {name: decoder(prompt) for name, decoder in ways.items()}
    same = logits["modules with codes"]
    off = float((logits["loopq run"] - same).norm() / same.norm())
    print(f"logits of the runner beside those of the modules: {off:.1e} (l2, relative)")
    size = sum(p.numel() for p in dense.parameters())
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        best = fastest(args, ways, prompt, clock)
        if args.llama:
            best["llama.cpp, Q4_0"] = llama(args, prompt, threads)
        for name, (first, each) in best.items():
            row = {
                "model": args.shape or args.model.name, "weights": size, "steps": systems[0].n_steps, "way": name,
                "threads": threads, "clock": clock.__name__, "prompt_tokens_per_s": args.prompt / first,
                "tokens_per_s": 1 / each, "off": off,
            }  # fmt: skip
            rows.append(row)
            print(
                f"{threads} threads  {name:26}  prompt {args.prompt / first:8.1f} tokens/s   then {1 / each:7.1f} "
                f"tokens/s   {best['dense, bfloat16'][1] / each:5.2f}x dense",
                flush=True,
            )
        spent = parts(ways["loopq run"], args.trials)
        rows.append({"threads": threads, "way": "loopq run, in parts", **spent})
        print(f"{threads} threads  {', '.join(f'{name} {value:.2f}' for name, value in spent.items())}")
    write(args.record, rows)


if __name__ == "__main__":
    main()
